"""Watches a process test by test: the cheap pass that clears nearly every test, and the full reading of the others.

A test owns what appears while it runs.  A fixture of a wider scope owns what appears while it is set up and what later
grows under it (a pool that starts its threads at the first request); both are judged when their own scope ends.  What
appears while a module is imported belongs to the process.
"""

from __future__ import annotations

import dataclasses
import gc
import multiprocessing
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import msgspec
import psutil

from lowtide.leakcheck.books import Books, Subject
from lowtide.leakcheck.cards import Cards
from lowtide.leakcheck.exemptions import is_exempt
from lowtide.leakcheck.first_use import FirstUse
from lowtide.leakcheck.judge import excesses, judge
from lowtide.leakcheck.ladder import Rung, SettlePolicy, Step, climb, release
from lowtide.leakcheck.metrics import Metric
from lowtide.leakcheck.owners import Claims, Owner
from lowtide.leakcheck.plain import DRIVER_TOLERANCE, Reading, host_memory_tolerance, plain_metrics
from lowtide.leakcheck.shared_memory import MadeSegments
from lowtide.leakcheck.storages import HeapReading, Held, Key, is_tensor, read_heap, storage_keys, thaw
from lowtide.leakcheck.tensor_findings import restaged, tensor_findings
from lowtide.probes.births import Births, Newborn
from lowtide.probes.caches import LRU_CACHE, CacheActivity, cache_entries
from lowtide.probes.counters import CounterReader, Counters
from lowtide.probes.device.driver import Driver, find_driver
from lowtide.probes.heap import type_name
from lowtide.probes.objects import FROZEN_AT_STARTUP, Census, all_objects, collector_paused
from lowtide.probes.ranges import common
from lowtide.probes.reach import reach
from lowtide.probes.stages import announced_pools
from lowtide.probes.tensors import survey_storages
from lowtide.reports.schema import Finding, NotMeasured

LONGEST_WAIT = 60.0
"""Seconds after which waiting ends even if something still moves."""

_SHOWN_NAMES = 3

_WAITED_FOR = ("threads", "processes", "file-descriptors", "shared-memory")


@dataclass(frozen=True)
class Policy:
    """How strictly to watch.

    Attributes:
        tolerance: bytes that may stay of each resource that is counted in bytes.
        settle: seconds without any movement after which waiting for threads, processes or the driver ends.
        card: whether cards are judged.
        driver: whether the driver's figures are (not where several workers share a card).
    """

    tolerance: int = 0
    settle: float = 0.5
    card: bool = True
    driver: bool = True


@dataclass(frozen=True)
class Verdict:
    """What a test, and the owners that ended with it, left behind.

    Attributes:
        findings: the test's own.
        of_owners: those of each owner that ended, by its label.
        not_measured: what may be a leak or what a library keeps from its first use, which cannot be told apart.
        climbed: whether the cheap pass was not enough.
    """

    findings: tuple[Finding, ...] = ()
    of_owners: Mapping[str, tuple[Finding, ...]] = field(default_factory=dict)
    not_measured: tuple[NotMeasured, ...] = ()
    climbed: bool = False


@dataclass(frozen=True)
class _Deep:
    """A full reading: one `Reading` per subject, and the storages behind them."""

    readings: tuple[Reading, ...]
    heap: HeapReading


class Watch:
    """Watches one process, one test at a time.

    Args:
        policy: how strictly.
    """

    def __init__(self, policy: Policy | None = None) -> None:
        self.policy = policy or Policy()
        self._segments = MadeSegments()
        self._books = Books(self._segments)
        self._births = Births()
        self._caches = CacheActivity()
        self._cards = Cards(driver=self.policy.driver)
        self._driver: Driver | None = None
        self._counters = CounterReader(self._ask_driver if self.policy.driver else None, card=self.policy.card)
        self._first_use = FirstUse()
        self._cache_stages: dict[int, str] = {}
        self._filled: list[Any] = []
        self._appeared: dict[str, str] = {}
        self._born: set[int] | None = set()
        self._labels: list[str] = []
        self._tolerance = self.policy.tolerance
        self._seen: frozenset[Key] = frozenset()

    def open(self) -> None:
        """Begin to watch; goes through the heap once."""
        self._births.start()
        self._segments.start()
        with collector_paused():
            census = Census(all_objects())
            self._caches.add(census.exactly(LRU_CACHE))
            self._seen = frozenset((held.device, held.address) for held in survey_storages(census).storages)

    def close(self) -> None:
        """End it; legal twice."""
        self._births.stop()
        self._segments.stop()
        if self._driver is not None:
            self._driver.close()
            self._driver = None

    def begin(self, stage: str = "setup", tolerance: int | None = None) -> None:
        """A test begins: what is there now is its baseline.

        Args:
            stage: to what it is attributed that appears now.
            tolerance: bytes that this test may leave, if not what the policy says.
        """
        if gc.isenabled():
            # What earlier tests left in young garbage must not come back during this one.
            gc.collect(1)
        self._tolerance = self.policy.tolerance if tolerance is None else tolerance
        self._births.mark(stage)
        self._caches.mark()
        self._cache_stages.clear()
        self._filled = []
        self._appeared.clear()
        now = self._read()
        self._books.begin(stage, now)
        if any(not self._cards.knows(device) for device in _devices(now)):
            self._adopt(now, read_heap(self._births, Claims(()), (), ()))

    @property
    def stage_now(self) -> str:
        """The stage to which what appears is attributed."""
        return self._births.label

    def stage(self, label: str) -> None:
        """Tensors that appear from here on, appeared in stage `label`."""
        self._births.note()
        self._births.label = label

    def phase(self, label: str) -> None:
        """As `stage`, and for all that is counted but the cards' levels."""
        ending = self._births.label
        self.stage(label)
        self._note_caches(ending)
        self._books.attribute(ending, self._counters.read(self._books.last))

    def full_phase(self, label: str) -> None:
        """As `phase`, and for the cards' levels too."""
        ending = self._births.label
        self.stage(label)
        self._note_caches(ending)
        self._books.attribute(ending, self._read())

    def enter(self, owner: Owner) -> None:
        """What appears from here to `leave` belongs to `owner`; nests."""
        self._labels.append(self._births.label)
        self.full_phase(owner.label)
        self._books.enter(owner, self._read())

    def leave(self) -> None:
        """The setup of the owner entered last is over, whether it succeeded or not."""
        self.stage(self._labels.pop())
        now = self._read()
        owner = self._books.leave(now)
        self._books.attribute(owner.stage, now)
        survivors = self._births.survivors()
        self._caches.add(born.item for born in survivors if type(born.item) is LRU_CACHE)
        own = [born.item for born in survivors if born.label == owner.label and is_tensor(born.item)]
        owner.storages = dict.fromkeys(storage_keys(own), owner.stage)

    def end(
        self,
        ended: Sequence[Owner] = (),
        *,
        let_go: Callable[[], None] = lambda: None,
        hints: Sequence[tuple[str, object]] = (),
    ) -> Verdict:
        """The test is over, and everything that its runner held for it is let go: judge it.

        Args:
            ended: the owners whose scope ended with it; they are judged too, and then forgotten.
            let_go: lets go of what the runner holds and may still need where nothing is suspect.
            hints: advice to give where a finding is held by the object beside it.
        """
        try:
            return self._judge(self._books.close(ended), let_go, hints)
        finally:
            self._filled = []

    def check(self) -> Verdict:
        """Judge in the middle of a test: as `end`, but nothing ends."""
        return self._judge([], lambda: None, ())

    def _judge(self, ended: list[Owner], let_go: Callable[[], None], hints: Sequence[tuple[str, object]]) -> Verdict:
        stage = self._births.label
        now = self._read()
        self._books.attribute(stage, now)
        self._note_caches(stage)
        # Before anything is collected: what is young now will be old then.
        self._born = self._births.born() if self._filled else set()
        if not self._suspects(now, ended):
            return Verdict()
        born = self._births.born()
        let_go()
        # Young garbage first, at a hundredth of the cost of a full collection.
        for generation in (1, 2):
            gc.collect(generation)
            if not self._suspects(self._read(), ended):
                return Verdict(climbed=generation == 2)
        self._wait(ended)
        devices = ["cpu", *_devices(self._read())]
        metrics = plain_metrics(devices, self._tolerance)
        subjects: tuple[Subject, ...] = (None, *ended)
        nothing = Reading()

        def is_back(deep: _Deep) -> bool:
            return all(
                item.is_back or item.above is None
                for reading in deep.readings
                for item in excesses(metrics, nothing, reading)
            )

        steps = self._climb(subjects, ended, is_back)
        for key, owner in steps[0].reading.heap.claimed.items():
            owner.storages.setdefault(key, owner.stage)
        findings = [
            self._findings(subject, turn, metrics=metrics, steps=steps, stage=stage, hints=hints, born=born)
            for turn, subject in enumerate(subjects)
        ]
        findings[0], excused = self._excused(findings[0])
        self._adopt(self._read(), steps[-1].reading.heap)
        return Verdict(
            findings=findings[0],
            not_measured=excused,
            of_owners={owner.label: found for owner, found in zip(ended, findings[1:], strict=True)},
            climbed=True,
        )

    def _climb(
        self, subjects: Sequence[Subject], ended: Sequence[Owner], is_back: Callable[[_Deep], bool]
    ) -> list[Step[_Deep]]:
        """The readings after each rung that a plain test may have to climb; everything has been collected by now."""
        first = self._deep(subjects, ended)
        frozen_before = self._books.baseline.amounts.get("gc-frozen") or 0
        steps: list[Step[_Deep]] = []
        if not is_back(first) and frozen_before <= FROZEN_AT_STARTUP < gc.get_freeze_count():
            # Undoes what this test froze; a freeze that was there before is not to be undone.
            hidden = thaw(self._births.froze_in, self._seen)
            steps = [Step(Rung.RAW, _with_hidden(first, hidden), 0.0)]
            steps.append(Step(Rung.UNFREEZE, self._deep(subjects, ended), 0.0))
        steps = steps or [Step(Rung.RAW, first, 0.0)]
        for rung in (Rung.EMPTY_CACHE, Rung.CLEAR_HOST_CACHE):
            if not is_back(steps[-1].reading) and release(rung):
                steps.append(Step(rung, self._deep(subjects, ended), 0.0))
        return steps

    def _excused(self, findings: tuple[Finding, ...]) -> tuple[tuple[Finding, ...], tuple[NotMeasured, ...]]:
        """Without what a library that was first used in this test may have taken for good, and that told instead."""
        may_be = [finding for finding in findings if _may_be_a_library(finding)]
        if not may_be:
            return findings, ()
        libraries = self._first_use.libraries()
        if _opened_the_driver(self._books.baseline, self._read()):
            why = "the card's driver was first used here, and keeps descriptors and memory of its own"
        elif libraries:
            why = f"{', '.join(libraries)} was first used here, and keeps memory of its own"
        elif self._read().native_threads > self._books.baseline.native_threads and self._first_use.any_loaded:
            why = "a native thread started here, and libraries keep memory of their own for each thread"
        else:
            return findings, ()
        excused = tuple(NotMeasured(what=finding.message, why=why) for finding in may_be)
        return tuple(finding for finding in findings if finding not in may_be), excused

    def _findings(
        self,
        subject: Subject,
        turn: int,
        *,
        metrics: Sequence[Metric[Reading]],
        steps: Sequence[Step[_Deep]],
        stage: str,
        hints: Sequence[tuple[str, object]],
        born: set[int] | None,
    ) -> tuple[Finding, ...]:
        own = [Step(step.rung, step.reading.readings[turn], step.seconds) for step in steps]
        found: list[Finding] = []
        for finding in judge(metrics, Reading(), own, stage=stage, cycle=1).findings:
            if finding.resource == "tensors" and finding.verdict != "native-held" and finding.bytes:
                held = [
                    [
                        storage
                        for storage in step.reading.heap.held
                        if storage.owner is subject and storage.key[0] == finding.device
                    ]
                    for step in steps
                ]
                found += tensor_findings(held, [step.rung for step in steps], hints, born)
            else:
                key = f"{finding.resource} {finding.device}".strip()
                if finding.resource == "tensors":
                    key = f"native {finding.device}" if finding.verdict == "native-held" else "unreadable"
                names = own[0].reading.items.get(key, ())
                told = [self._appeared[name] for name in names if name in self._appeared]
                since = told[0] if told else self._books.since(key, names)
                dated = restaged(finding, subject.stage if subject is not None else since or stage)
                found.append(msgspec.structs.replace(dated, holder=_listed(key, names)))
        return tuple(found)

    def _deep(self, subjects: Sequence[Subject], ended: Sequence[Owner]) -> _Deep:
        now = self._read()
        devices = _devices(now)
        claims = Claims(self._books.live)
        heap = read_heap(self._births, claims, ended, self._seen)
        cards = self._cards.new_items(devices, {address for _, address in heap.alive})
        readings = []
        for subject in subjects:
            items: dict[str, Mapping[str, int]] = {}
            for key in (*now.items, "globals"):
                items[key] = self._books.new_items(key, now, subject, ended)
                if subject is None:
                    items[key] = _unclaimed(key, items[key], claims)
            for key in [key for key in items if key.startswith("arena ")]:
                items[key] = _without_tensors(key.partition(" ")[2], items[key], heap.alive)
            for held in heap.held:
                if held.owner is subject:
                    items[f"tensors {held.key[0]}"] = {**items.get(f"tensors {held.key[0]}", {}), held.name: held.bytes}
            if subject is None:
                items |= {key: self._without_gradients(key, found, claims) for key, found in cards.items()}
                items["unreadable"] = dict.fromkeys(heap.unreadable, 1)
                items["lru-cache"] = self._held_by_caches(self._births.survivors(), heap)
            readings.append(Reading(items, self._levels(now, subject, ended, heap)))
        return _Deep(tuple(readings), heap)

    def _without_gradients(self, key: str, items: Mapping[str, int], claims: Claims) -> Mapping[str, int]:
        """Without the blocks that hold gradients, never looked at by Python, of tensors that a live owner holds."""
        if not items or not key.startswith("native "):
            return items
        starts = {name: int(name.rpartition(" ")[2], 16) for name in items}
        held = claims.gradient_addresses()
        return {
            name: size
            for name, size in items.items()
            if not any(starts[name] <= address < starts[name] + size for address in held)
        }

    def _levels(
        self, now: Counters, subject: Subject, ended: Sequence[Owner], heap: HeapReading
    ) -> dict[str, int | None]:
        """By how much each level is above what it should be, as far as nothing finer explains it."""
        levels: dict[str, int | None] = {}
        for key in now.amounts:
            share = self._books.shares(key, now, ended)[id(subject)]
            if key.startswith(("allocated ", "reserved ")):
                continue  # their parts are judged one by one
            if key.startswith("driver ") and self._cards.lists_allocations(key.partition(" ")[2]):
                continue
            if share is not None and subject is None and key == "host-memory":
                share -= heap.new_on_cpu
            levels[key] = share
        return levels

    def _suspects(self, now: Counters, ended: Sequence[Owner]) -> list[str]:
        """What may be above what it should be, by key; costs next to nothing and may err on this side only."""
        suspects = [
            key
            for subject in (None, *ended)
            for key in (*now.items, "globals")
            if self._books.new_items(key, now, subject, ended)
        ]
        for key in now.amounts:
            shares = self._books.shares(key, now, ended).values()
            if any(share is not None and share > self._slack(key) for share in shares) and self._is_worth(key):
                suspects.append(key)
        if any(owner.storages for owner in ended) or self._births.froze:
            suspects.append("tensors")
        live = {owner.label for owner in self._books.live}
        survivors = self._births.survivors()
        if any(is_tensor(born.item) and born.label not in live for born in survivors):
            suspects.append("tensors")
        self._caches.add(born.item for born in survivors if type(born.item) is LRU_CACHE)
        if self._held_by_caches(survivors, None):
            suspects.append("lru-cache")
        return suspects

    def _slack(self, key: str) -> int:
        if key == "host-memory":
            return max(self._tolerance, host_memory_tolerance(_devices(self._books.baseline)))
        if key.startswith("driver ") and not self._cards.lists_allocations(key.partition(" ")[2]):
            return max(self._tolerance, DRIVER_TOLERANCE)
        return 0

    def _is_worth(self, key: str) -> bool:
        """Whether a level's growth deserves a full reading: torch keeps free segments, which is no leak."""
        return not key.startswith("reserved ") or self._cards.has_new_empty_pools(key.partition(" ")[2])

    def _held_by_caches(self, survivors: Iterable[Newborn], heap: HeapReading | None) -> dict[str, int]:
        """New modules, and objects of bound methods, in caches that were asked for something new since the baseline.

        Where such a cache holds a storage that is judged, the storage is the finding.
        """
        if not self._filled:
            return {}
        newborn = {id(born.item) for born in survivors}
        judged = set() if heap is None else {held.key for held in heap.held}
        found: dict[str, int] = {}
        for cache in self._filled:
            objects, _ = reach(cache_entries(cache), boundaries=(LRU_CACHE,), max_objects=20_000)
            owners = [item.__self__ for item in objects if type(item) is MethodType]
            held = [item for item in objects if id(item) in newborn and _is_module(item)]
            held += [
                owner
                for owner in owners
                if self._born is not None and id(owner) in self._born and type(owner).__module__ != "builtins"
            ]
            if held and not (judged and storage_keys(item for item in objects if is_tensor(item)) & judged):
                name = f"{cache.__module__}.{getattr(cache, '__qualname__', '?')}"
                texts = [f"{type_name(type(item))} at {id(item):#x} in {name}" for item in held]
                texts = [text for text in texts if not is_exempt("lru-cache", text)]
                found.update(dict.fromkeys(texts, 1))
                self._appeared.update(dict.fromkeys(texts, self._cache_stages.get(id(cache), "")))
        return found

    def _wait(self, ended: Sequence[Owner]) -> None:
        """Wait for what comes back by itself: threads and processes that are ending, a driver that takes its time."""

        def missing(now: Counters) -> dict[str, object]:
            _reap_children()
            waiting: dict[str, object] = {
                key: sorted(found)
                for subject in (None, *ended)
                for key in _WAITED_FOR
                if (found := self._books.new_items(key, now, subject, ended))
            }
            for key in now.amounts:
                share = self._books.shares(key, now, ended)[id(None)]
                if key.startswith("driver ") and share is not None and share > self._slack(key):
                    waiting[key] = share
            return waiting

        climb(
            self._read,
            lambda now: not missing(now),
            still_waiting=lambda now: bool(missing(now)),
            moved=lambda then, now: missing(then) != missing(now),
            policy=SettlePolicy(stability=self.policy.settle, limit=max(LONGEST_WAIT, self.policy.settle)),
            rungs=(Rung.SETTLE,),
        )

    def _note_caches(self, stage: str) -> None:
        """Caches that were filled for the first time since the last look, were so in `stage`."""
        self._filled = self._caches.changed()
        for cache in self._filled:
            self._cache_stages.setdefault(id(cache), stage)

    def _adopt(self, now: Counters, heap: HeapReading) -> None:
        self._seen = heap.alive
        if _devices(now):
            self._first_use.adopt()
        self._cards.adopt(_devices(now), {address for _, address in heap.alive})

    def _read(self) -> Counters:
        return self._counters.read()

    def _ask_driver(self) -> Driver:
        if self._driver is None:
            self._driver = find_driver()
        return self._driver


def _opened_the_driver(before: Counters, now: Counters) -> bool:
    def opened(counters: Counters) -> bool:
        return any(" -> /dev/nvidia" in name or "/dev/kfd" in name for name in counters.items["file-descriptors"])

    return opened(now) and not opened(before)


def _reap_children() -> None:
    """Have multiprocessing and subprocess take note of children that have ended and that nobody has waited for."""
    if "multiprocessing.process" in sys.modules:
        multiprocessing.active_children()
    if "subprocess" in sys.modules:
        subprocess._cleanup()  # type: ignore[attr-defined]


def _may_be_a_library(finding: Finding) -> bool:
    if finding.resource == "driver":
        return True
    targets = re.findall(r" -> (\S+?):", finding.message)
    return finding.resource == "file-descriptors" and set(targets) <= {"socket", "pipe", "anon_inode"}


def _is_module(item: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and any(base is torch.nn.Module for base in type(item).__mro__)


def _with_hidden(deep: _Deep, hidden: Sequence[Held]) -> _Deep:
    """The same reading, with storages of the test's that no walk could find."""
    own, *others = deep.readings
    items = dict(own.items)
    for held in hidden:
        key = f"tensors {held.key[0]}"
        items[key] = {**items.get(key, {}), held.name: held.bytes}
    heap = dataclasses.replace(deep.heap, held=(*deep.heap.held, *hidden))
    return _Deep((Reading(items, own.amounts), *others), heap)


def _with_command(pid: str) -> str:
    """`4711 (python)`."""
    try:
        return f"{pid} ({psutil.Process(int(pid)).name()})"
    except psutil.Error:  # it ended meanwhile
        return pid


def _listed(key: str, names: Iterable[str]) -> str | None:
    """The first of some names, as a finding's holder."""
    listed = sorted(map(_with_command, names) if key == "processes" else names)
    more = f" and {len(listed) - _SHOWN_NAMES} more" if len(listed) > _SHOWN_NAMES else ""
    return ", ".join(listed[:_SHOWN_NAMES]) + more if listed else None


def _devices(now: Counters) -> list[str]:
    """The cards on which the process has a context."""
    return [key.partition(" ")[2] for key in now.amounts if key.startswith("reserved ")]


def _unclaimed(key: str, items: Mapping[str, int], claims: Claims) -> dict[str, int]:
    """Without what grew under an owner that is alive; it is the owner's from now on."""
    if not items:
        return {}
    owners = claims.names(key)
    left = {}
    for name, amount in items.items():
        number, _, target = name.partition(" -> ")
        owner = owners.get(name) or owners.get(f"{number} ->") or owners.get(target)
        if owner is None:
            left[name] = amount
        else:
            owner.items.setdefault(key, set()).add(name)
    return left


def _without_tensors(device: str, items: Mapping[str, int], alive: Iterable[Key]) -> dict[str, int]:
    """Without the parts of arenas under a live tensor: those are the tensor's."""
    if not items:
        return {}
    parts = {
        f"{pool.tag} at {address:#x}": (address, length)
        for pool in announced_pools()
        if pool.kind == "arena" and pool.device == device
        for address, length in pool.ranges
    }
    tensors = [(address, 1) for where, address in alive if where == device]
    return {name: size for name, size in items.items() if name in parts and not common([parts[name]], tensors)}
