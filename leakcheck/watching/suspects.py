"""What seems to be left of a test, at next to no cost; it may err on the side of suspicion only.

What comes back by itself is waited for: threads and processes that are ending, a driver that takes its time.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lowtide.leakcheck.findings.collected import Collected
from lowtide.leakcheck.judging.device_memory import MEMORY_POOL, DeviceMemory
from lowtide.leakcheck.judging.filled_caches import FilledCaches
from lowtide.leakcheck.judging.ladder import LadderStep, SettlePolicy, climb
from lowtide.leakcheck.judging.metrics import DRIVER_TOLERANCE, HOST_MEMORY_TOLERANCE, UNLISTED_TOLERANCE
from lowtide.leakcheck.judging.owners import Owner
from lowtide.leakcheck.judging.records import Ownership
from lowtide.leakcheck.judging.storages import is_storage, is_tensor
from lowtide.leakcheck.resources.rule import Rung
from lowtide.probes.heap.births import Births, Newborn
from lowtide.probes.heap.caches import LRU_CACHE
from lowtide.probes.host.counters import Counters
from lowtide.probes.memory.tensors import hold_memory, keys_of_each
from lowtide.probes.originals import weakref

LONGEST_WAIT = 60.0
"""Seconds after which waiting ends even if something still moves."""

_WAITED_FOR = ("threads", "processes", "file-descriptors", "shared-memory", "temporary-files")


class Suspects:
    """Finds what may have been left.

    Args:
        ownership: who owns what.
        births: what was born.
        caches: the filled caches.
        device_memory: what is on the cards besides tensors.
    """

    def __init__(self, ownership: Ownership, births: Births, caches: FilledCaches, device_memory: DeviceMemory) -> None:
        self._ownership = ownership
        self._births = births
        self._caches = caches
        self._device_memory = device_memory
        # The tensors that seemed to be left when that was last looked at, as long as it is to be looked at again.
        self._tensors_left: list[weakref.ref[Any]] = []
        self._knows_all = True

    @property
    def has_living_tensors(self) -> bool:
        """Whether one of the tensors that seemed to be left is still alive: known without a list of the heap."""
        return any(tensor() is not None for tensor in self._tensors_left)

    def living_tensors(self) -> list[int]:
        """Return the identities of those of them that are alive, the oldest first; none where one cannot be told.

        Not those of storages that a tensor among them has: who asks for a storage makes an object that C++ holds then.
        """
        left = [tensor() for tensor in self._tensors_left if self._knows_all]
        found = [item for item in left if item is not None]
        keys = keys_of_each(found)
        of_tensors = frozenset().union(*(each for item, each in zip(found, keys, strict=True) if not is_storage(item)))
        return [
            id(item)
            for item, each in zip(found, keys, strict=True)
            if not (is_storage(item) and each and each <= of_tensors)
        ]

    def before_collecting(self, least: int) -> Collected | None:
        """Read the tensors that seem to be left, before anything is collected; None where they are few."""
        _, left = self._survivors()
        return Collected.before(left, least) if left else None

    def _survivors(self) -> tuple[list[Newborn], list[Any]]:
        """Return what was born and is there, and of that the tensors that belong to no owner that is alive."""
        survivors = self._births.survivors()
        tensors = [born for born in survivors if is_tensor(born.item)]
        # There is a live owner for every import: they are gone through only where there is a tensor.
        live = {owner.label for owner in self._ownership.live} if tensors else ()
        left = [born.item for born in tensors if born.label not in live]
        # Compilers leave many that hold nothing, in garbage that only a full collection would end.
        if left:
            left = [item for item, holds in zip(left, hold_memory(left), strict=True) if holds]
        return survivors, left

    def forget(self) -> None:
        """Let go of the tensors: `torch.utils.swap_tensors` refuses those that have weak references."""
        self._tensors_left = []

    def find(self, now: Counters, ended: Sequence[Owner], tolerance: int) -> list[str]:
        """What may be above what it should be, by key; costs next to nothing and may err on this side only."""
        suspects = [
            key
            for subject in (None, *ended)
            for key in (*now.items, "globals")
            if self._ownership.new_items(key, now, subject, ended)
        ]
        for key in now.amounts:
            shares = self._ownership.shares(key, now, ended).values()
            if any(share is not None and share > self.slack(key, tolerance) for share in shares) and self._is_worth(
                key
            ):
                suspects.append(key)
        survivors, left = self._survivors()
        if any(owner.storages for owner in ended) or self._births.froze_until_last_look:
            suspects.append("tensors")
        # Until the verdict only: `torch.utils.swap_tensors` refuses tensors with weak references.
        self._tensors_left = _weakly(left)
        self._knows_all = len(self._tensors_left) == len(left)
        if left:
            suspects.append("tensors")
        self._caches.add(born.item for born in survivors if type(born.item) is LRU_CACHE)
        if self._caches.suspects(survivors):
            suspects.append("lru-cache")
        return suspects

    def slack(self, key: str, tolerance: int) -> int:
        """Bytes by which a level may rise before it deserves a full reading."""
        if key == "host-memory":
            return max(tolerance, HOST_MEMORY_TOLERANCE)
        if key.startswith("driver ") and not self._device_memory.lists_allocations(key.partition(" ")[2]):
            return max(tolerance, DRIVER_TOLERANCE)
        if key.startswith(MEMORY_POOL):
            return max(tolerance, UNLISTED_TOLERANCE)
        return 0

    def _is_worth(self, key: str) -> bool:
        """Whether a level's growth deserves a full reading: torch keeps free segments, which is no leak."""
        return not key.startswith("reserved ") or self._device_memory.has_new_empty_pools(key.partition(" ")[2])


def _weakly(items: Iterable[object]) -> list[weakref.ref[Any]]:
    """Weak references to those objects that can have one."""
    found = []
    for item in items:
        with contextlib.suppress(TypeError):
            found.append(weakref.ref(item))
    return found


def wait_for_return(
    read: Callable[[], Counters],
    ownership: Ownership,
    ended: Sequence[Owner],
    *,
    slack: Callable[[str], int],
    let_go: Callable[[], None],
    settle: float,
) -> None:
    """Wait while something of a test's or of the ended owners' is missing, as long as anything of that moves.

    What appears only later is waited for, too, but moves nothing: a thread may make something all the time.

    Args:
        read: reads the counters.
        ownership: who owns what.
        ended: the owners that are judged with the test.
        slack: by a level's key, the bytes by which it may have risen.
        let_go: lets go of what the test runner holds.
        settle: seconds without any movement after which it ends.
    """

    def missing(now: Counters) -> set[tuple[str, str | int]]:
        _reap_children()
        let_go()
        items = {
            (key, name)
            for subject in (None, *ended)
            for key in _WAITED_FOR
            for name in ownership.new_items(key, now, subject, ended)
        }
        shares = {key: ownership.shares(key, now, ended)[id(None)] for key in now.amounts if key.startswith("driver ")}
        return items | {(key, share) for key, share in shares.items() if share is not None and share > slack(key)}

    start = read()

    first = missing(start)

    def moves(now: Counters) -> set[tuple[str, str | int]]:
        return {(key, thing) for key, thing in missing(now) if type(thing) is int or (key, thing) in first}

    climb(
        read,
        lambda now: not missing(now),
        still_waiting=lambda now: bool(missing(now)),
        moved=lambda then, now: moves(then) != moves(now),
        policy=SettlePolicy(stability=settle, limit=max(LONGEST_WAIT, settle)),
        rungs=(Rung.SETTLE,),
        climbed=[LadderStep(Rung.RAW, start, 0.0)],
    )


def _reap_children() -> None:
    """Have multiprocessing and subprocess take note of children that have ended and that nobody has waited for."""
    if "multiprocessing.process" in sys.modules:
        multiprocessing.active_children()
    if "subprocess" in sys.modules:
        subprocess._cleanup()  # type: ignore[attr-defined]
