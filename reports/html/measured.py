"""What a report has figures for: each with how often it was read, by whom, and the lowest and highest of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from lowtide.reports.escaping import one_line
from lowtide.reports.html.tables import sizes_of
from lowtide.reports.schema import Readings, Report

_BY = {"allocated": "torch", "reserved": "torch", "pinned": "torch", "RSS": "the kernel", "shared memory": "the kernel"}
"""Who counts a figure, where it is neither the driver nor lowtide itself."""


class Measured(NamedTuple):
    """One figure.

    Attributes:
        name: what it is.
        by: who counts it.
        known: in how many readings it is known.
        readings: how many there were.
        lowest: bytes; None where it is known in no reading.
        highest: bytes.
    """

    name: str
    by: str
    known: int
    readings: int
    lowest: int | None
    highest: int | None


def measured_figures(report: Report) -> list[Measured]:
    """The figures of all subjects' stages; none where no subject has any."""
    found: dict[str, tuple[str, list[int | None]]] = {}
    for readings in _readings(report):
        for name, by, size in _figures(readings, report.machine.driver):
            found.setdefault(name, (by, []))[1].append(size)
    return [_measured(name, by, sizes) for name, (by, sizes) in found.items()]


def _measured(name: str, by: str, sizes: list[int | None]) -> Measured:
    known = [size for size in sizes if size is not None]
    return Measured(one_line(name), by, len(known), len(sizes), min(known, default=None), max(known, default=None))


def _readings(report: Report) -> Iterator[Readings]:
    for subject in report.subjects:
        for stage in subject.stages:
            yield stage.before
            yield stage.after


def _figures(readings: Readings, driver: str) -> Iterator[tuple[str, str, int | None]]:
    for name, size in sizes_of(readings, sorted(readings.arenas)).items():
        yield name, driver if name == "driver" else _BY.get(name, "lowtide"), size
    for ledger in readings.ledgers:
        yield f"ledger of {ledger.device}", ledger.source, ledger.total
        yield f"unexplained on {ledger.device}", "lowtide", ledger.unexplained
