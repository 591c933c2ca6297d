"""What a plain test must release: its reading, and how each row of the table (`rules`) is read from it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from lowtide.leakcheck.judging.metrics import Metric, metric_of
from lowtide.leakcheck.judging.rules import RULES, bound_of_test
from lowtide.leakcheck.resources.rule import Bound, Rule
from lowtide.reports.schema import Finding

HOST_MEMORY_TOLERANCE = bound_of_test("host-memory").allowed(card=False)
"""Bytes of the process's own memory that may stay."""

HOST_MEMORY_TOLERANCE_WITH_CARD = bound_of_test("host-memory").allowed(card=True)
"""The same where the process uses a card."""

DRIVER_TOLERANCE = bound_of_test("driver").tolerance
"""Bytes that the driver may count more where its allocations cannot be listed."""

UNLISTED_TOLERANCE = bound_of_test("unlisted").tolerance
"""Bytes that the driver may count more beyond what it lists."""

_LEVELS = ("pinned", "gc-frozen", "host-memory", "driver")
"""The keys of what a test's reading has as one figure, without names."""


@dataclass(frozen=True)
class Reading:
    """What one test, or one fixture, is judged by at one moment.

    Attributes:
        items: per metric's key, what is its own and still there, by name, with bytes or 1 each.
        amounts: per metric's key a level of the whole process; None if it cannot be read.
    """

    items: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    amounts: Mapping[str, int | None] = field(default_factory=dict)


def host_memory_tolerance(devices: Collection[str]) -> int:
    """Bytes of the process's own memory that may stay, by the devices that it uses."""
    return HOST_MEMORY_TOLERANCE if set(devices) <= {"cpu"} else HOST_MEMORY_TOLERANCE_WITH_CARD


def may_be_of_libraries(finding: Finding, devices: Collection[str]) -> bool:
    """Return whether host memory that no object of Python's explains may be what a card's libraries take."""
    return finding.resource == "host-memory" and finding.bytes <= host_memory_tolerance(devices)


def plain_metrics(devices: Collection[str], tolerance: int = 0) -> tuple[Metric[Reading], ...]:
    """What a plain test is judged by; a metric's key is that of its row and its device, as `tensors cuda:0`.

    Args:
        devices: the devices that are judged, `cpu` included.
        tolerance: bytes that may stay of each resource that is counted in bytes; the coarse levels (`driver` without a
            list of allocations, `host-memory`) keep their own tolerance where that is larger.
    """
    card = not set(devices) <= {"cpu"}
    tested = [(rule, rule.test) for rule in RULES if rule.test is not None]
    metrics = [_of_readings(rule, bound, "", tolerance, card=card) for rule, bound in tested if rule.place == "process"]
    for device in devices:
        places = ("device",) if device == "cpu" else ("device", "card")
        metrics += [
            _of_readings(rule, bound, device, tolerance, card=card) for rule, bound in tested if rule.place in places
        ]
    return tuple(metrics)


def _of_readings(rule: Rule, bound: Bound, device: str, tolerance: int, *, card: bool) -> Metric[Reading]:
    key = rule.key_on(device)
    # What arrays explain has no more room in a process that uses a card: see `may_be_of_libraries`.
    allowed = bound.allowed(card=card and rule.key != "host-memory")
    if rule.unit == "bytes":
        allowed = max(allowed, tolerance)
    if rule.key in _LEVELS:
        return metric_of(rule, bound, device, lambda reading: reading.amounts.get(key, 0), None, allowed)
    return metric_of(
        rule,
        bound,
        device,
        lambda reading: sum(reading.items.get(key, {}).values()),
        lambda reading: reading.items.get(key, {}),
        allowed,
    )
