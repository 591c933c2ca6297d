"""What a process holds that may grow: each quantity once, with how it is read, what of it is nothing, and its words.

What is counted, descriptors, threads and child processes, the kernel lists from outside.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from lowtide.leakcheck.growth.host_levels import LEAST_A_TURN, LEAST_IN_ALL
from lowtide.leakcheck.growth.series import FEWEST_STEPS, LevelKey
from lowtide.probes.device.driver import Driver
from lowtide.probes.device.driver.card_holders import read_card_holders
from lowtide.probes.host.process_files import (
    anonymous_bytes_of,
    children_of,
    numbered_children,
    numbered_descriptors,
    numbered_threads,
)
from lowtide.probes.processes.mapped_files import mapped_shared_memory
from lowtide.probes.processes.outside_view import by_process
from lowtide.probes.processes.tree_traces import sockets_of_agents
from lowtide.reports.schema import ResourceName
from lowtide.reports.sizes import format_amount, format_bytes

Things = Mapping[ResourceName, Mapping[int, str]]
"""What each of the things that are counted is, by its number."""


class Level(NamedTuple):
    """What one process holds of one quantity, in bytes or how many; the card is empty for none."""

    pid: int
    device: str
    amount: int


class HeldSource(msgspec.Struct, frozen=True):
    """Where it is read what processes hold.

    Attributes:
        pids: gives the processes.
        driver: reports what they hold on cards.
        tensors: gives the bytes that torch has given out on each card, by process, as the processes said last.
    """

    pids: Callable[[], Collection[int]]
    driver: Driver
    tensors: Callable[[], Mapping[int, Mapping[str, int]]]


class Quantity(msgspec.Struct, frozen=True):
    """One thing that a process holds some of.

    Attributes:
        what: bytes of what; of what is counted, the things in the plural.
        advice: what to do about what each turn leaves, with `{turn}`.
        metric: its name for OpenTelemetry, its unit there and what it is; empty where it is not exported. It has names
            for most: https://opentelemetry.io/docs/specs/semconv/system/process-metrics.
        read: reads it in all processes, as metrics and the history have it.
        things: lists them by number in a process, where they are counted.
        allowed: what a turn may add for good and be no growth, where each reading is exact.
        fewest: turns that must add something then.
        least: what each turn must add where a series decides.
        in_all: what all turns must.
        is_slow: whether a series decides, too, where each turn may add less than is allowed.
    """

    what: str
    advice: str
    metric: tuple[str, str, str] = ("", "", "")
    read: Callable[[HeldSource], Iterator[Level]] = lambda source: iter(())
    things: Callable[[int], Mapping[int, str]] | None = None
    allowed: int = 0
    fewest: int = FEWEST_STEPS
    least: float = LEAST_A_TURN
    in_all: float = LEAST_IN_ALL
    is_slow: bool = False

    def amount(self, amount: int) -> str:
        """Return so much of it in words."""
        return format_amount(amount, self.what) if self.things else format_bytes(amount)

    def rate(self, rate: float) -> str:
        """Return so much of it with each turn, or in each second, in words."""
        return f"{rate:.2g}" if self.things else format_bytes(round(rate))

    def more(self, amount: int, device: str) -> str:
        """Return in words that there is so much more."""
        of = "" if self.things else f" of {self.what}"
        return f"{self.amount(amount)} more{of}{f' on {device}' if device else ''}"


ALLOWED = 4 << 20
"""Bytes of memory that a turn may add for good: allocators, and a driver, take it in pieces of this order."""

_FEWEST_OF_THINGS = 5
"""Turns that must add some of what is counted: a pool of threads or connections fills by one with each, too."""

_MORE_THINGS = 11.5
"""More of them by a series: a dozen, once that is rounded."""

_BYTES = "look in that process for what keeps bytes of each {turn}, as with `memray attach`"


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


_things = partial(Quantity, fewest=_FEWEST_OF_THINGS, least=0, in_all=_MORE_THINGS)

QUANTITIES: Mapping[ResourceName, Quantity] = {
    "host-memory": Quantity(
        "host memory",
        _BYTES,
        ("process.memory.usage", "By", "Memory of a process that is no file's: resident, and swapped out."),
        _of_each(anonymous_bytes_of),
        allowed=ALLOWED,
        is_slow=True,
    ),
    "shared-memory": Quantity("shared memory that it maps", _BYTES),
    "tensors": Quantity(
        "tensors",
        "look in that process for what keeps tensors of each {turn}, in no list, dict, set or deque that grows",
        (
            "lowtide.tensor.memory.usage",
            "By",
            "Memory of a card that torch has given out in a process, at its last reading.",
        ),
        _tensors,
    ),
    "driver": Quantity(
        "driver memory",
        _BYTES,
        ("hw.gpu.memory.usage", "By", "Memory of a card that its driver counts for a process."),
        _on_cards,
        allowed=ALLOWED,
    ),
    "file-descriptors": _things(
        "file descriptors",
        "close with each {turn} the descriptors that it opens",
        ("process.unix.file_descriptor.count", "{file_descriptor}", "File descriptors that a process has open."),
        _of_each(lambda pid: len(numbered_descriptors(pid))),
        numbered_descriptors,
    ),
    "threads": _things(
        "threads",
        "end with each {turn} the threads that it starts",
        ("process.thread.count", "{thread}", "Threads of a process."),
        _of_each(lambda pid: len(numbered_threads(pid))),
        numbered_threads,
    ),
    "processes": _things(
        "child processes",
        "end with each {turn} the processes that it starts, and wait for the end of each",
        read=_of_each(lambda pid: len(children_of(pid))),
        things=numbered_children,
    ),
}
"""All that a process is seen to hold; what explains another one comes before it."""

COUNTED: tuple[ResourceName, ...] = tuple(name for name, each in QUANTITIES.items() if each.things)
"""Those of which a level is a number of things."""


def things_of(pid: int, *, mapped: bool = False) -> dict[ResourceName, Mapping[int, str]]:
    """Return the descriptors that a process has open for itself, its threads and its child processes.

    Empty where that may not be read. A child that has ended is one until its parent waits for it.

    Of descriptors those of mapped memory count as in `own_descriptors`.
    """
    return {
        "file-descriptors": own_descriptors(pid, mapped=mapped),
        "threads": numbered_threads(pid),
        "processes": numbered_children(pid),
    }


def own_descriptors(pid: int, *, mapped: bool = True) -> dict[int, str]:
    """Return its descriptors, without those of its agent, whose connections come and go with questions.

    Those that shared memory has which the process maps count if `mapped`: that is one thing.
    """
    before = sockets_of_agents(pid)
    found = numbered_descriptors(pid)
    others = before | sockets_of_agents(pid)
    if not mapped:
        others |= {each.path for each in mapped_shared_memory(pid) or ()}
    return {number: target for number, target in found.items() if target not in others}


def counted(names: Iterable[str]) -> Counter[str]:
    """Return how many there are of each name; where several differ by numbers alone, with `N` in place of these."""
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(re.sub(r"\d+", "N", name), []).append(name)
    return Counter({of[0] if len({*of}) == 1 else kind: len(of) for kind, of in alike.items()})


def most_of(kinds: Counter[str]) -> str:
    """Return the most frequent kind, with how many there are of it."""
    ((kind, count),) = kinds.most_common(1)
    return f"{count} of {kind}"


def kind_of(things: Sequence[str]) -> str:
    """Return what some things are, or most of them."""
    ((kind, count),) = counted(things).most_common(1)
    return kind if count == len(things) else f"most of them {kind}"


HOST, SHARED = LevelKey("host-memory", "cpu"), LevelKey("shared-memory", "cpu")
"""The levels of a process's memory that are on no card and under no tensor."""

IN_USE = LevelKey("host-memory", "in use")
"""What of it a process's heaps have given out, as it says itself: to the byte, where the kernel counts pages."""
