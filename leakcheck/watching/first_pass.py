"""Finds what seems to be left of a test, at next to no cost; it may err on the side of suspicion only.

What comes back by itself is waited for: threads and processes that are ending, a driver that takes its time.  What
tests keep of host memory, each of them less than would be a leak, is summed up.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from lowtide.leakcheck.findings.host_memory import with_largest_containers
from lowtide.leakcheck.findings.storage_watch import Collected
from lowtide.leakcheck.growth.series import FEWEST_STEPS, KeptSteps
from lowtide.leakcheck.judging.device_memory import MEMORY_POOL
from lowtide.leakcheck.judging.fingerprints import finding_of
from lowtide.leakcheck.judging.ladder import SettlePolicy, settle, trim_heap
from lowtide.leakcheck.judging.metrics import (
    DRIVER_TOLERANCE,
    HOST_MEMORY_TOLERANCE,
    UNLISTED_TOLERANCE,
    host_memory_tolerance,
)
from lowtide.leakcheck.judging.owners import ANYTHING, Owner
from lowtide.leakcheck.judging.storages import Key, is_storage, is_tensor
from lowtide.leakcheck.resources.resource import MIB
from lowtide.leakcheck.watching.watched import Watched
from lowtide.probes import native
from lowtide.probes.heap.births import Newborn, SurvivorLook
from lowtide.probes.heap.caches import LRU_CACHE
from lowtide.probes.heap.container_lengths import MANY, long_containers
from lowtide.probes.host.counters import Counters
from lowtide.probes.memory.tensors import hold_memory, keys_of_each, survey_storages
from lowtide.probes.objects.listed import any_frozen
from lowtide.probes.originals import gc, weakref
from lowtide.reports.schema import Finding
from lowtide.reports.sizes import format_bytes

LONGEST_WAIT = 60.0
"""Seconds after which waiting ends even if something still moves."""

LEAST_KEPT = 8 * MIB
"""Bytes that a test must keep to count: below are tables that libraries build, and how full the heap happens to be."""

_LEAST_ARRAYS = 4 * LEAST_KEPT
"""Bytes by which a test has to raise the level so that the large arrays are listed: that goes through the heap."""

_MOMENT_S = 0.05
"""Seconds without any movement after which waiting ends for what has not come from the same lines before."""

_SHOWN_TESTS = 3

NOTHING: Mapping[int, int] = {}

_WAITED_FOR = ("threads", "processes", "file-descriptors", "shared-memory", "temporary-files")


class Suspects:
    """Finds what may have been left."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        # The tensors that seemed to be left when that was last looked at, as long as it is to be looked at again.
        self._tensors_left: list[weakref.ref[Any]] = []
        self._knows_all = True
        self._last: SurvivorLook | None = None
        # Whether the look before anything was collected has found that nothing was born: so it stays.
        self._are_none = False

    @property
    def has_living_tensors(self) -> bool:
        """Return whether one of the tensors that seemed to be left is still alive: known without a list of the heap."""
        return any(tensor() is not None for tensor in self._tensors_left)

    def living_tensors(self) -> list[Any]:
        """Return those of them that are alive, the oldest first; none where one cannot be told. Drop them soon.

        No storages that a tensor among them has: who asks for a storage makes an object that C++ holds then.
        """
        left = [tensor() for tensor in self._tensors_left if self._knows_all]
        found = [item for item in left if item is not None]
        keys = keys_of_each(found)
        of_tensors = frozenset().union(*(each for item, each in zip(found, keys, strict=True) if not is_storage(item)))
        return [
            item
            for item, each in zip(found, keys, strict=True)
            if not (is_storage(item) and each and each <= of_tensors)
        ]

    def before_collecting(self, least: int) -> Collected | None:
        """Read the tensors that seem to be left, before anything is collected; None where they are few."""
        survivors, left = self._survivors()
        self._are_none = not survivors and not self._watched.births.froze_until_last_look
        return Collected.before(left, least) if left else None

    def _survivors(self) -> tuple[list[Newborn], list[Any]]:
        """Return what was born and is there, and of that the tensors that belong to no owner that is alive."""
        births = self._watched.births
        survivors = births.survivors(last=self._last)
        self._last = births.look(survivors) if survivors else None
        tensors = [born for born in survivors if is_tensor(born.item)]
        # There is a live owner for every import: they are gone through only where there is a tensor.
        live = {owner.label for owner in self._watched.ownership.live} if tensors else ()
        left = [born.item for born in tensors if born.label not in live]
        # Compilers leave many that hold nothing, in garbage that only a full collection would end.
        if left:
            left = [item for item, holds in zip(left, hold_memory(left), strict=True) if holds]
        return survivors, left

    def forget(self) -> None:
        """Let go of the tensors: `torch.utils.swap_tensors` refuses those that have weak references."""
        self._tensors_left = []
        self._last = None
        self._are_none = False

    def find(self, now: Counters, ended: Sequence[Owner], tolerance: int, seen: Collection[Key]) -> list[str]:
        """Return the keys of what may be above what it should be; costs next to nothing.

        Args:
            now: the counters.
            ended: the owners that are judged with the test.
            tolerance: bytes that a test may leave.
            seen: the storages at the last full reading.
        """
        suspects = [
            key
            for subject in (None, *ended)
            for key in (*now.items, "globals")
            if self._watched.ownership.new_items(key, now, subject, ended)
        ]
        for key in now.amounts:
            shares = self._watched.ownership.shares(key, now, ended).values()
            if any(share is not None and share > self.slack(key, tolerance) for share in shares) and self._is_worth(
                key
            ):
                suspects.append(key)
        survivors, left = ([], []) if self._are_none else self._survivors()
        self._are_none = False
        if any(owner.storages for owner in ended) or (not left and self._may_be_hidden(seen)):
            suspects.append("tensors")
        # Until the verdict only: `torch.utils.swap_tensors` refuses tensors with weak references.
        self._tensors_left = _weakly(left)
        self._knows_all = len(self._tensors_left) == len(left)
        if left:
            suspects.append("tensors")
        self._watched.caches.add(born.item for born in survivors if type(born.item) is LRU_CACHE)
        if self._watched.caches.suspects(survivors):
            suspects.append("lru-cache")
        return suspects

    def _may_be_hidden(self, seen: Collection[Key]) -> bool:
        """Return whether the program has frozen tensors that were never seen young, right after the survivors' list.

        Where nothing is frozen any more (vLLM freezes its heap once it is set up, and thaws it at its shutdown), it has
        not if each tensor lies where one lay before.
        """
        if not self._watched.births.froze_until_last_look:
            return False
        if any_frozen():
            return True
        survey, owned = survey_storages(), (owner.storages for owner in self._watched.ownership.live)
        return survey.unreadable > 0 or not survey.sizes.keys() <= set(seen).union(*owned)

    def slack(self, key: str, tolerance: int) -> int:
        """Return the bytes by which a level may rise before it deserves a full reading."""
        if key == "host-memory":
            return max(tolerance, HOST_MEMORY_TOLERANCE)
        if key.startswith("driver ") and not self._watched.device_memory.lists_allocations(key.partition(" ")[2]):
            return max(tolerance, DRIVER_TOLERANCE)
        if key.startswith(MEMORY_POOL):
            return max(tolerance, UNLISTED_TOLERANCE)
        return 0

    def _is_worth(self, key: str) -> bool:
        """Return whether a level's growth deserves a full reading: torch keeps free segments, which is no leak."""
        return not key.startswith("reserved ") or self._watched.device_memory.has_new_empty_pools(key.partition(" ")[2])


def _weakly(items: Iterable[object]) -> list[weakref.ref[Any]]:
    """Return weak references to those objects that can have one."""
    found = []
    for item in items:
        with contextlib.suppress(TypeError):
            found.append(weakref.ref(item))
    return found


Stayed = dict[tuple[str, str], str]
"""Of what was waited for and did not come: by its resource and the line that made it, the name of the last one."""


def wait_for_return(
    watched: Watched,
    ended: Sequence[Owner],
    *,
    slack: Callable[[str], int],
    let_go: Callable[[], None],
    stayed: Stayed,
) -> None:
    """Wait while something of a test's or of the ended owners' is missing, as long as anything of that moves.

    What appears only later is waited for, too, but moves nothing: a thread may make something all the time. Where all
    that is missing was made by lines of which the last one was waited for as long, and is there still, it is waited for
    a moment only.

    Args:
        watched: what is followed; its policy says after how long without any movement waiting ends.
        ended: the owners that are judged with the test.
        slack: by a level's key, the bytes by which it may have risen.
        let_go: lets go of what the test runner holds.
        stayed: what did not come until now; added to.
    """
    ownership, stability = watched.ownership, watched.policy.settle

    def missing(now: Counters) -> set[tuple[str, str | int]]:
        _reap_children()
        let_go()
        items = {
            (key, name)
            for subject in (None, *ended)
            for key in _WAITED_FOR
            for name in ownership.new_items(key, now, subject, ended)
        }
        shares = {key: ownership.share(key, now, None, ended) for key in now.amounts if key.startswith("driver ")}
        return items | {(key, share) for key, share in shares.items() if share is not None and share > slack(key)}

    def made(now: Counters) -> Stayed:
        return {(key, watched.makers.place_of(key, name)): name for key, name in missing(now) if type(name) is str}

    start = watched.counters.read()
    first = missing(start)
    if not first:
        return
    lines = made(start)
    are_levels = any(type(thing) is int for _, thing in first)
    if not are_levels and all(line and stayed.get((key, line)) in start.items.get(key, ()) for key, line in lines):
        stability = min(stability, _MOMENT_S)

    def moves(now: Counters) -> set[tuple[str, str | int]]:
        return {(key, thing) for key, thing in missing(now) if type(thing) is int or (key, thing) in first}

    stayed |= made(
        settle(
            watched.counters.read,
            lambda now: bool(missing(now)),
            lambda then, now: moves(then) != moves(now),
            start,
            SettlePolicy(stability=stability, limit=max(LONGEST_WAIT, stability)),
        )
    )


def _reap_children() -> None:
    """Have multiprocessing and subprocess take note of children that have ended and that nobody has waited for."""
    if "multiprocessing.process" in sys.modules:
        multiprocessing.active_children()
    if "subprocess" in sys.modules:
        subprocess._cleanup()  # type: ignore[attr-defined]


class SmallRetention:
    """The level of host memory that nothing explains, from test to test.

    What libraries take once is of many sizes and ends. So only tests that keep at least 8 MiB count, three of them at
    least, and each with no more than the usual amount.
    """

    def __init__(self) -> None:
        self._levels = [0]
        # Of each test its name, and the bytes that it may keep without counting.
        self._names: list[str] = []
        self._allowed: list[int] = []
        self._taken: list[Mapping[int, int]] = []

    def fell(self, size: int) -> None:
        """Note that so many bytes of what earlier tests had kept were given back between two tests."""
        self._levels[-1] -= size

    def add(self, name: str, share: int, *, counts: bool = True, taken: Mapping[int, int] = NOTHING) -> None:
        """Note that a test is over.

        Args:
            name: its name.
            share: by how many bytes it raised what nothing else explains.
            counts: whether it is judged.
            taken: how many entries long containers have taken in it, by identity.
        """
        self._levels.append(self._levels[-1] + share)
        self._names.append(name)
        self._allowed.append(LEAST_KEPT - 1 if counts else ANYTHING)
        self._taken.append(taken)

    @property
    def has_risen(self) -> bool:
        """Return whether the last test kept so much that it counts."""
        return len(self._levels) > 1 and self._levels[-1] - self._levels[-2] >= LEAST_KEPT

    def is_too_much(self, tolerance: int) -> bool:
        """Return whether the last test kept something, and all together more than the tolerance, in bytes."""
        if not self.has_risen:
            return False
        if self._levels[-1] - min(self._levels) <= tolerance:
            return False
        steps = self._steps()
        return len(steps.turns) >= FEWEST_STEPS and steps.repeated > tolerance

    def _steps(self) -> KeptSteps:
        return KeptSteps.between(self._levels, self._allowed)

    def finding(self, stage: str) -> Finding:
        """Return what tests have kept, the last one included, attributed to a stage, and where; it is reported once."""
        steps = self._steps()
        # What came once beside it, as the tables of a first look at a large heap, is no part of what the tests keep.
        total = steps.repeated
        module = self._names[-1].partition("::")[0]
        tests = [self._names[turn - 1] for turn in steps.turns]
        names = _last_of(tests)
        size = KeptSteps(steps.added).said(format_bytes)
        taken = sum((Counter(self._taken[turn - 1]) for turn in steps.turns), Counter[int]())
        self._levels, self._names, self._allowed, self._taken = [self._levels[-1]], [], [], []
        finding = finding_of(
            "host-memory",
            bytes=total,
            count=len(tests),
            device="",
            stage=stage,
            message=f"{format_bytes(total)} of host-memory kept over the session, {size}: {names}",
            suspects=("session",),
            known_by={"module": module},
            trend="growth",
        )
        return with_largest_containers(finding, taken)


def _last_of(names: Sequence[str]) -> str:
    shown = ", ".join(names[-_SHOWN_TESTS:])
    return f"{len(names) - _SHOWN_TESTS} before and {shown}" if len(names) > _SHOWN_TESTS else shown


class KeptHostMemory:
    """Sums up what the tests of one watch keep of host memory.

    Attributes:
        level_at_end: the counters' host memory when the last test had been judged, in bytes; None before the first.
        old_arrays: identity and bytes of the large arrays that were there when it last had risen by much, or a card had
            come: no later test's. (A library's first use may take as much as one of them.)
        old_lengths: of the long containers that were there then, or at the beginning, by identity.
    """

    def __init__(self, watched: Watched) -> None:
        self.old_arrays: frozenset[tuple[int, int]] = frozenset()
        self.old_lengths: Mapping[int, int] = {}
        self._watched = watched
        self._kept = SmallRetention()
        self.level_at_end: int | None = None
        self._subject = ""
        self._is_judged = True
        self._level_at_begin = 0

    def open(self) -> None:
        """Note how long containers are before the first test."""
        self._note_lengths()

    def _note_lengths(self) -> Mapping[int, int]:
        """Note how long containers are, where that takes no time; return how much longer the long ones have become."""
        if native.lengths_of_all is None:
            return NOTHING
        before, self.old_lengths = self.old_lengths, long_containers()
        taken = {item: length - before.get(item, 0) for item, length in self.old_lengths.items()}
        return {item: count for item, count in taken.items() if count >= MANY}

    def begin(self, subject: str, now: Counters, *, judged: bool) -> None:
        """Note the level at which a test begins.

        Args:
            subject: its name; empty where what it keeps does not add up with what others do.
            now: the counters.
            judged: whether what it leaves counts.
        """
        self._subject = subject
        self._is_judged = judged
        self._level_at_begin = now.amounts["host-memory"] or 0
        if self.level_at_end is not None:
            self._kept.fell(max(self.level_at_end - (now.amounts["host-memory"] or 0), 0))

    def share(self, now: Counters, ended: Sequence[Owner]) -> int | None:
        """Return the bytes by which the test itself has raised the level; None where that is not known."""
        return self._watched.ownership.share("host-memory", now, None, ended)

    def read_trimmed(self, ended: Sequence[Owner]) -> Counters:
        """Return the counters; where host memory has moved, without what is free in the heap.

        What a verdict itself leaves free goes back, too. So baselines and verdicts are read alike, and what one test
        left free cannot hide what the next one keeps.
        """
        now = self._watched.counters.read()
        share = self.share(now, ended)
        if share is None or abs(share) < LEAST_KEPT:
            return now
        return self._trimmed()

    def _trimmed(self) -> Counters:
        """Give back what is free in the heap, and what cannot be given back count no more; return the counters then."""
        trim_heap()
        self._watched.counters.note_trimmed()
        return self._watched.counters.read()

    def kept(self, share: int | None, now: Counters, *, final: bool, card_came: bool) -> tuple[Finding, ...]:
        """Return the finding about all tests together, if with this one they have kept too much.

        Args:
            share: bytes that this test kept; None where that is not known.
            now: the counters.
            final: whether the test is over.
            card_came: whether a card came into use in it.
        """
        if not final:
            return ()
        self.level_at_end = now.amounts["host-memory"]
        risen = (self.level_at_end or 0) - self._level_at_begin
        taken = self._note_lengths() if card_came or risen >= LEAST_KEPT else NOTHING
        if card_came or risen >= _LEAST_ARRAYS:
            # numpy, which only who has arrays or a card needs.
            from lowtide.probes.memory.buffers import known_arrays

            self.old_arrays = known_arrays(LEAST_KEPT)
        if card_came or risen >= LEAST_KEPT:
            # What looking took would be given back in the next test.
            trim_heap()
        if not self._subject:
            return ()
        self._kept.add(self._subject, share or 0, counts=self._is_judged, taken=taken)
        if not self._is_judged or not self._kept.has_risen:
            return ()
        tolerance = max(self._watched.policy.tolerance, host_memory_tolerance(now.devices))
        if not self._kept.is_too_much(tolerance):
            return ()
        # A clean test is not collected for: what it left may be garbage.
        gc.collect()
        self.level_at_end = self._trimmed().amounts["host-memory"] or 0
        self._kept.fell(max((now.amounts["host-memory"] or 0) - self.level_at_end, 0))
        if not self._kept.is_too_much(tolerance):
            return ()
        return (self._kept.finding(self._watched.ownership.since("host-memory", ())),)
