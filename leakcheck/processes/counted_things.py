"""What a process has by number: its descriptors and threads, as the kernel lists them from outside."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from lowtide.probes.host.process_files import numbered_descriptors, numbered_threads
from lowtide.probes.processes.mapped_files import mapped_shared_memory
from lowtide.probes.processes.tree_traces import sockets_of_agents
from lowtide.reports.schema import ResourceName

COUNTED: tuple[ResourceName, ...] = ("file-descriptors", "threads")
"""The resources of which a level is a number of things, and its key."""

UNITS: Mapping[str, str] = {"file-descriptors": "file descriptors", "threads": "threads"}
"""What these are called."""

MAKING: Mapping[str, str] = {
    "file-descriptors": "close in the end the descriptors that are opened in",
    "threads": "end the threads that are started in",
}
"""What to do about them, up to the turn."""

Things = Mapping[str, Mapping[int, str]]
"""By the key of a level, what each of the things is by its number."""


def things_of(pid: int) -> dict[str, Mapping[int, str]]:
    """Return the descriptors that a process has open for itself, and its threads; empty where that may not be read."""
    return {"file-descriptors": own_descriptors(pid, mapped=False), "threads": numbered_threads(pid)}


def own_descriptors(pid: int, *, mapped: bool = True) -> dict[int, str]:
    """Return its descriptors, without those of its agent, whose connections come and go with questions.

    Args:
        pid: the process.
        mapped: whether those count that shared memory has which the process maps: that is one thing.
    """
    before = sockets_of_agents(pid)
    found = numbered_descriptors(pid)
    others = before | sockets_of_agents(pid)
    if not mapped:
        others |= {each.path for each in mapped_shared_memory(pid) or ()}
    return {number: target for number, target in found.items() if target not in others}


def counted(names: Iterable[str]) -> Counter[str]:
    """Return how many there are of each name, numbers aside."""
    return Counter(re.sub(r"\d+", "N", name) for name in names)


def kind_of(things: Sequence[str]) -> str:
    """Return what some things are, or most of them."""
    ((kind, count),) = counted(things).most_common(1)
    return kind if count == len(things) else f"most of them {kind}"
