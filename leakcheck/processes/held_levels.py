"""What each process of a watched server holds: exported as metrics, kept in the history, and judged over time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from lowtide.probes.device.driver import Driver
from lowtide.probes.device.driver.card_holders import read_card_holders
from lowtide.probes.host.process_files import anonymous_bytes_of, descriptors_of, thread_names
from lowtide.probes.processes.outside_view import by_process
from lowtide.reports.schema import ResourceName


class Level(NamedTuple):
    """What one process holds of one quantity.

    Attributes:
        pid: the process.
        device: the card; empty for none.
        amount: bytes, or how many.
    """

    pid: int
    device: str
    amount: int


@dataclass(frozen=True)
class HeldSource:
    """Where it is read what processes hold.

    Attributes:
        pids: gives the processes.
        driver: reports what they hold on cards.
        tensors: gives the bytes that torch has given out on each card, by process, as the processes said last.
    """

    pids: Callable[[], Collection[int]]
    driver: Driver
    tensors: Callable[[], Mapping[int, Mapping[str, int]]]


@dataclass(frozen=True)
class Quantity:
    """One thing that a process holds some of.

    Attributes:
        resource: which.
        metric: its name for OpenTelemetry, which has names for most:
            https://opentelemetry.io/docs/specs/semconv/system/process-metrics.
        unit: its unit there.
        description: what it is.
        read: reads it in all processes.
    """

    resource: ResourceName
    metric: str
    unit: str
    description: str
    read: Callable[[HeldSource], Iterator[Level]]


def _of_each(read: Callable[[int], int]) -> Callable[[HeldSource], Iterator[Level]]:
    return lambda source: (Level(pid, "", read(pid)) for pid in source.pids())


def _on_cards(source: HeldSource) -> Iterator[Level]:
    family = set(source.pids())
    for pid, cards in by_process(read_card_holders(source.driver)).items():
        for device, size in cards.items() if pid in family else ():
            if size is not None:
                yield Level(pid, device, size)


def _tensors(source: HeldSource) -> Iterator[Level]:
    said = source.tensors()
    return (Level(pid, device, size) for pid in source.pids() for device, size in said.get(pid, {}).items())


QUANTITIES = (
    Quantity(
        "host-memory",
        "process.memory.usage",
        "By",
        "Memory of a process that is no file's: resident, and swapped out.",
        _of_each(anonymous_bytes_of),
    ),
    Quantity(
        "tensors",
        "lowtide.tensor.memory.usage",
        "By",
        "Memory of a card that torch has given out in a process, at its last reading.",
        _tensors,
    ),
    Quantity(
        "driver", "hw.gpu.memory.usage", "By", "Memory of a card that its driver counts for a process.", _on_cards
    ),
    Quantity(
        "file-descriptors",
        "process.unix.file_descriptor.count",
        "{file_descriptor}",
        "File descriptors that a process has open.",
        _of_each(lambda pid: len(descriptors_of(pid))),
    ),
    Quantity(
        "threads",
        "process.thread.count",
        "{thread}",
        "Threads of a process.",
        _of_each(lambda pid: len(thread_names(pid))),
    ),
)
"""All that a process is seen to hold."""
