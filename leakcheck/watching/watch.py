"""Watches a process test by test: the cheap pass that clears nearly every test, and the full reading of the others.

A test owns what appears while it runs.  A fixture of a wider scope owns what appears while it is set up and what later
grows under it (a pool that starts its threads at the first request); both are judged when their own scope ends.  What
appears while a module is imported belongs to the process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

from lowtide.leakcheck.explaining.cut import NamespaceSizes, namespace_sizes
from lowtide.leakcheck.findings.deferred_remedies import DeferredRemedies
from lowtide.leakcheck.findings.storage_holders import Context, explain_storages
from lowtide.leakcheck.findings.tensor_findings import tensor_leaks
from lowtide.leakcheck.judging.device_memory import DeviceMemory
from lowtide.leakcheck.judging.filled_caches import FilledCaches
from lowtide.leakcheck.judging.judge import Budget
from lowtide.leakcheck.judging.ladder import collect, release, trim_heap
from lowtide.leakcheck.judging.owners import Claims, Owner
from lowtide.leakcheck.judging.records import Ownership
from lowtide.leakcheck.judging.rules import COLLECTED
from lowtide.leakcheck.judging.storages import (
    HeapReading,
    HeldStorage,
    Key,
    is_tensor,
    live_keys,
    new_storages,
    read_heap,
    within,
)
from lowtide.leakcheck.processes.other_processes import OtherProcesses
from lowtide.leakcheck.resources import read_items
from lowtide.leakcheck.resources.first_use import FirstUse, driver_is_open, excused_by_libraries
from lowtide.leakcheck.resources.library_caches import Emptied, empty_library_caches
from lowtide.leakcheck.resources.orphaned_files import OrphanedFiles, OwnSegments
from lowtide.leakcheck.resources.rule import Rung
from lowtide.leakcheck.resources.settings import EnvironmentSetters
from lowtide.leakcheck.resources.warm_up import BlasHandles
from lowtide.leakcheck.watching.attribution import Attribution
from lowtide.leakcheck.watching.card_arrival import CardArrival
from lowtide.leakcheck.watching.deep_reading import devices_of
from lowtide.leakcheck.watching.drafting import Drafting
from lowtide.leakcheck.watching.full_reading import FullReadings
from lowtide.leakcheck.watching.host_memory import KeptHostMemory
from lowtide.leakcheck.watching.judgement import Case, OwnersInUse, WatchJudge
from lowtide.leakcheck.watching.remedy_trials import RemedyTrials
from lowtide.leakcheck.watching.suspects import Suspects, wait_for_return
from lowtide.leakcheck.watching.verdict import Policy, Verdict
from lowtide.probes.allocation_stacks import AllocationStacks
from lowtide.probes.device.driver import Driver, find_driver
from lowtide.probes.device.graphs import any_graph_alive
from lowtide.probes.heap.births import Births
from lowtide.probes.heap.caches import LRU_CACHE
from lowtide.probes.heap.holders import SharedWalk, sharing_walk
from lowtide.probes.host.counters import CounterReader, Counters
from lowtide.probes.host.makers import Makers
from lowtide.probes.host.process_events import ProcessEvents
from lowtide.probes.host.process_tree import ProcessTree
from lowtide.probes.memory.tensors import survey_storages
from lowtide.probes.objects.listed import Census, all_objects, collector_paused
from lowtide.probes.originals import gc
from lowtide.probes.stages import announced_pools
from lowtide.reports.schema import Finding, NotMeasured

_MOST_GENERATIONS = 4
"""How often a process that ends while it is read may leave another one."""


class Watch:
    """Watches one process, one test at a time.

    Args:
        policy: how strictly.

    Attributes:
        tolerance: bytes that the test of now may leave.
        collected: bytes that it may leave to the collector before that is told.
    """

    def __init__(self, policy: Policy | None = None) -> None:
        self.policy = policy = policy or Policy()
        self._segments = OwnSegments()
        self._environment = EnvironmentSetters()
        self._makers = Makers()
        self._tree = ProcessTree(self._makers.processes)
        self._orphaned_files = OrphanedFiles(
            self._tree, self._segments, self._makers, lambda: self.others.began(), alone=self.policy.driver
        )
        self._ownership = Ownership(self._segments, self._orphaned_files.shared_memory, self._environment, self._makers)
        self._births = Births()
        self._caches = FilledCaches()
        self._device_memory = DeviceMemory(driver=self.policy.driver)
        self._driver: Driver | None = None
        self._counters = CounterReader(
            self._ask_driver if self.policy.driver else None,
            card=self.policy.card,
            orphans=self._tree.orphans,
            temporary_files=self._orphaned_files.temporary_files,
            warnings_filters=self.policy.warnings_filters,
            resources=read_items,
        )
        self._first_use = FirstUse()
        self._handles = BlasHandles()
        self._stacks = AllocationStacks(
            card=self.policy.card and self.policy.stacks != "off", cpu=self.policy.stacks == "all"
        )
        ask = self._ask_driver if self.policy.card else None
        asks, clears = policy.processes, policy.remedies != "never"
        self.others = OtherProcesses(self._tree, ask, asks=asks, clears=clears, tolerance=policy.tolerance)
        self._events = ProcessEvents(self.others.look, self._orphaned_files.note_ended)
        self.tolerance = self.policy.tolerance
        self.collected = COLLECTED
        self._seen: frozenset[Key] = frozenset()
        self._namespaces: NamespaceSizes | None = None
        self._module = ""
        # What libraries kept on cards beside torch, and have given back for the judgement.
        self._emptied = Emptied()
        self._in_use = OwnersInUse(self._read, self._ownership, self._stacks, self.policy.growth)
        self._attribution = Attribution(
            self._counters,
            self._births,
            self._ownership,
            self._caches,
            self._device_memory,
            self._first_use,
            self.others,
        )
        self._arrival = CardArrival(
            self.policy,
            self._read,
            self._ownership,
            self._device_memory,
            self._first_use,
            self._handles,
            self._attribution,
        )
        self._warm_up = self._arrival.warm_up
        self._suspects = Suspects(self._ownership, self._births, self._caches, self._device_memory)
        self._host = KeptHostMemory(self._read, self._ownership, self.policy.tolerance)
        self._readings = FullReadings(
            self._read, self._ownership, self._births, self._device_memory, self._caches, self._makers, self._handles
        )
        self._trials = RemedyTrials(self.policy, self._read, self._ownership, self._device_memory, self._first_use)
        self._judgement = WatchJudge(
            self.policy,
            self._read,
            self._ownership,
            self._readings,
            Drafting(self._read, self._ownership, self._caches, self._stacks, self._environment),
            self._trials,
            self._stacks,
            self._makers,
            self._give_back,
        )

    def open(self) -> None:
        """Begin to watch; goes through the heap once."""
        if self.policy.card and self.policy.warm_up == "now":
            self._warm_up.now()
        self._births.start()
        self._segments.start()
        self._tree.start()
        self.others.start()
        self._makers.start()
        self._events.start()
        self._orphaned_files.start()
        self._environment.start()
        with collector_paused():
            census = Census(all_objects())
            self._caches.add(census.exactly(LRU_CACHE))
            self._seen = frozenset((held.device, held.address) for held in survey_storages(census).storages)
            del census
        trim_heap()

    def close(self) -> None:
        """End it; legal twice."""
        self._warm_up.close()
        self._stacks.stop()
        self._births.stop()
        self._segments.stop()
        self._orphaned_files.stop()
        self.others.stop()
        self._tree.stop()
        self._events.stop()
        self._makers.stop()
        self._environment.stop()
        if self._driver is not None:
            self._driver.close()
            self._driver = None

    def begin(
        self,
        stage: str = "setup",
        tolerance: int | None = None,
        module: str = "",
        subject: str = "",
        *,
        judged: bool = True,
        follows: bool = False,
    ) -> None:
        """A test begins: what is there now is its baseline.

        Args:
            stage: to what it is attributed that appears now.
            tolerance: bytes that this test may leave, if not what the policy says.
            module: the test module, by which leaks of what has no name are distinguished.
            subject: the test's name; without one, what it keeps of host memory does not add up with what others do.
            judged: whether what it leaves counts.
            follows: whether only a test runner has run since the last end, so that libraries' settings are the same.
        """
        self._module = module
        # Again before every test: one may have emptied `gc.callbacks`.
        self._births.start()
        if gc.isenabled():
            # What earlier tests left in young garbage must not come back during this one.
            with self._births.forgetting():
                gc.collect(1)
        self._arrival.queue()
        self.tolerance = self.policy.tolerance if tolerance is None else tolerance
        self._in_use.begin(self.tolerance)
        # Again before every test: torch may have come meanwhile, or a card's context.
        self._stacks.start()
        self._attribution.begin(stage)
        self._caches.mark()
        self._readings.mark(subject)
        self._makers.start()
        self._events.start()
        self._orphaned_files.mark()
        self._namespaces = namespace_sizes()
        now = self._counters.read_in_part(settings="no library's") if follows else self._read()
        if self._arrival.joins(now):
            now = self._read()
        self.others.begin(now)
        self._host.begin(subject, now, judged=judged)
        self._ownership.begin(stage, now)
        if any(
            not self._device_memory.knows(device) or self._device_memory.has_shrunk(device, now)
            for device in devices_of(now)
        ):
            self._adopt(now, read_heap(self._births, Claims(()), (), ()))
        self._arrival.begin_test()

    @property
    def turns(self) -> Mapping[str, int]:
        """How often each stage has begun since the test began."""
        return self._attribution.turns

    def kept_of(self, label: str, name: str, root: object) -> list[tuple[Finding, dict[int, int]]]:
        """Say who holds what appeared in a stage and is there, with its bytes by the stage's turn; changes nothing.

        Args:
            label: the stage.
            name: how paths call the root.
            root: what lives, and may be asked by its own parts who holds what.
        """
        if not any(is_tensor(born.item) for born in self._births.survivors(label)):
            return []
        gc.collect()
        is_pooled = within(announced_pools())
        readings, _ = new_storages([born for born in self._births.survivors(label) if is_tensor(born.item)], {})
        held = [
            HeldStorage.of(storage, stage, turn=turn)
            for storage, stage, turn in readings.values()
            if storage.bytes and not is_pooled(storage.address)
        ]
        turns = {each.key: each.turn for each in held}
        with sharing_walk() as walk:
            context = Context(born=self._births.born(), roots=[(name, root)], living=True, walk=walk)
            leaks = tensor_leaks([held], [Rung.RAW], explain_storages(turns, context), context)
        found = []
        for leak in leaks:
            sizes: dict[int, int] = {}
            for key, size in leak.sizes.items():
                sizes[turns[key]] = sizes.get(turns[key], 0) + size
            found.append((leak.finding, sizes))
        return found

    def forget_settings(self) -> None:
        """Whoever judges has put the process-wide settings back."""
        self._ownership.forget_settings()

    @property
    def stage_now(self) -> str:
        """The stage to which what appears is attributed."""
        return self._attribution.stage_now

    def stage(self, label: str, *, again: bool = False) -> None:
        """As `Attribution.stage`: tensors that appear from here on appeared in stage `label`."""
        self._attribution.stage(label, again=again)

    def phase(self, label: str, *, again: bool = False, settings_later: bool = False) -> None:
        """As `Attribution.phase`: the same, and for all that is counted but the cards' levels."""
        self._attribution.phase(label, again=again, settings_later=settings_later)

    def full_phase(self, label: str) -> Counters:
        """As `Attribution.full_phase`: the same, and for the cards' levels too."""
        return self._attribution.full_phase(label)

    def enter(self, owner: Owner) -> None:
        """What appears from here to `leave` belongs to `owner`; nests."""
        self._attribution.enter(owner)

    def leave(self) -> None:
        """The setup of the owner entered last is over, whether it succeeded or not."""
        self._attribution.leave()
        self._arrival.queue()
        # A library may have come with it that binds sockets in C.
        self._makers.start()

    def used(self, owners: Iterable[Owner], *, allowed: int | None = None) -> None:
        """The test uses these owners: what it leaves under them may be growth.

        Args:
            owners: those that are alive.
            allowed: bytes that it may leave there, if not what it may leave of its own.
        """
        used = list(owners)
        self._in_use.used(used, allowed=allowed)
        self.others.used(used)

    def ending(self, owner: Owner) -> None:
        """An owner is about to end, and still holds all that it held for the tests: judge what has grown under it."""
        self._in_use.ending(owner)
        self._in_use.add(owner, self.others.growth_of(owner))

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
            let_go: lets go of what the runner holds and may still need where nothing is suspect; called again while
                something is waited for.
            hints: advice to give where a finding is held by the object beside it.
        """
        try:
            closed = self._ownership.close(ended)
            in_others = self.others.judge([*self._ownership.live, *closed])
            verdict = self._in_use.with_growth(self._judge(closed, let_go, hints, final=True))
            return replace(verdict, findings=(*verdict.findings, *in_others))
        finally:
            self._arrival.end_test()
            self._caches.forget()
            # The hints hold caches.
            self._readings.forget()
            self._in_use.forget()

    def check(self) -> Verdict:
        """Judge in the middle of a test: as `end`, but nothing ends, and nothing is changed to prove a remedy."""
        return self._judge([], lambda: None, (), final=False)

    def _judge(
        self, ended: list[Owner], let_go: Callable[[], None], hints: Sequence[tuple[str, object]], *, final: bool
    ) -> Verdict:
        stage = self._births.label
        # First of all: what is read here may be what makes Python collect.
        left = self._suspects.before_collecting(self.collected)

        def collected() -> Finding | None:
            found = None if left is None else left.finding(stage)
            return found if found is not None and found.bytes >= self.collected else None

        now = self._host.read_trimmed(ended)
        self._ownership.attribute(stage, now)
        if final:
            self._ownership.over(now)
        self.others.look(always=True, now=now)
        self._caches.note(stage)
        # Before anything is collected: what is young now will be old then.
        self._caches.born(self._births.born() if self._caches.any_filled else ())
        unmeasured = tuple(NotMeasured(what=key, why=why) for key, why in now.unmeasured.items())
        unmeasured += self._arrival.not_measured(now) + self.others.not_measured + self._device_memory.not_measured
        now, suspects = self._suspects_of(now, ended)
        if not suspects:
            kept = self._host.kept_in_all(now, ended, final=final)
            return Verdict(not_measured=unmeasured, findings=kept, collected=collected())
        born = self._births.born()
        with nullcontext() if left is None else left.released():
            let_go()

        def is_clean() -> bool:
            nonlocal now, suspects
            now = self._host.read_trimmed(ended)
            # That one of them is still alive shows without a list of the whole heap; that nothing is left does not.
            if self._suspects.has_living_tensors:
                return False
            now, suspects = self._suspects_of(now, ended)
            return not suspects

        budget = Budget(self.policy.budget)
        # Young garbage first, at a hundredth of the cost of a full collection.
        gc.collect(1)
        if is_clean():
            kept = self._host.kept_in_all(now, ended, final=final)
            return Verdict(not_measured=unmeasured, findings=kept, collected=collected())
        known = self._known_ways(now, ended, born)
        if known is None:
            collect(is_clean)
            if is_clean():
                kept = self._host.kept_in_all(now, ended, final=final)
                return Verdict(not_measured=unmeasured, findings=kept, climbed=True, collected=collected())
        self._suspects.forget()
        share = self._host.share(now, ended)
        wait_for_return(
            self._read,
            self._ownership,
            ended,
            slack=lambda key: self._suspects.slack(key, self.tolerance),
            let_go=let_go,
            settle=self.policy.settle,
        )
        case = Case(
            ended=ended,
            hints=hints,
            final=final,
            born=born,
            stage=stage,
            turns=self._attribution.turns,
            module=self._module,
            namespaces=self._namespaces,
            tolerance=self.tolerance,
            seen=self._seen,
            grown=self._in_use.grown,
            budget=budget,
            known=known,
        )
        back = collected()
        return replace(self._concluded(case, unmeasured, share), collected=back)

    def _known_ways(self, now: Counters, ended: Sequence[Owner], born: Collection[int] | None) -> SharedWalk | None:
        """A walk of the ways to what was explained before, if nothing is suspect but tensors at the end of these."""
        if any(owner.storages for owner in ended):
            return None
        suspects = set(self._suspects.find(now, ended, self.tolerance))
        # Whether the tensors explain what the process has more, their full reading shows.
        if suspects - {"host-memory"} != {"tensors"}:
            return None
        return self._judgement.ways.to(self._suspects.living_tensors(), born)

    def _suspects_of(self, now: Counters, ended: Sequence[Owner]) -> tuple[Counters, list[str]]:
        """The counters, and what is suspect by them; read again where that is nothing but may have become something.

        A process whose parent had ended, and that has ended itself since it was read, may have left another one.
        """
        suspects = self._suspects.find(now, ended, self.tolerance)
        for _ in range(_MOST_GENERATIONS):
            if suspects or not self._tree.lost_an_orphan():
                break
            now = self._host.read_trimmed(ended)
            suspects = self._suspects.find(now, ended, self.tolerance)
        return now, suspects

    def _concluded(self, case: Case, unmeasured: tuple[NotMeasured, ...], share: int | None) -> Verdict:
        """The full judgement, and its end as the new baseline."""
        report_limits = self._in_use.report_limits if case.final else lambda: None
        self._emptied = Emptied()
        judged = self._judgement(case, self._in_use.note, report_limits)
        now = self._read()
        # What a card's first use takes is known where the card was warmed up.
        before = now if self._arrival.came_in_this_test else self._ownership.baseline
        about = judged.about()
        own, excused = excused_by_libraries(
            judged.findings[0],
            before,
            now,
            self._first_use,
            any_graph_alive,
            lambda finding: [str(name) for _, key, name in about[finding.fingerprint] if key == "file-descriptors"],
            self._emptied.prepared_by,
        )
        findings = judged.findings_by_cause(own)
        for finding in findings[0]:
            for part in finding.parts:
                about[finding.fingerprint] |= about[part.fingerprint]
        self._adopt(self._read(), judged.heap)
        left = [self._ownership.new_items("processes", self._read(), subject, case.ended) for subject in case.subjects]
        reported = {int(name) for names in left if case.final for name in names}
        self.others.is_reported(reported)
        unmeasured = tuple(line for line in unmeasured if line.process is None or line.process.pid not in reported)
        if any(finding.changed for found in findings for finding in found):
            self._seen &= live_keys()
        # Of before the climb, which takes memory itself; and a finding is not reported again as part of a sum.
        share = None if findings[0] or share is None else share - judged.explained
        trim_heap()
        kept = self._host.kept(share, self._read(), final=case.final)
        return Verdict(
            findings=(*findings[0], *kept),
            not_measured=tuple(dict.fromkeys((*unmeasured, *excused, *judged.not_measured, *self._emptied.notes))),
            of_owners={owner.label: found for owner, found in zip(case.ended, findings[1:], strict=True)},
            climbed=True,
            unproven=judged.unproven[0],
            unproven_of_owners={
                owner.label: later for owner, later in zip(case.ended, judged.unproven[1:], strict=True)
            },
            things=about,
        )

    def prove(self, each: Sequence[DeferredRemedies]) -> list[dict[str, Finding]]:
        """The findings of some subjects, by their fingerprints before, with what gave each back.

        Nothing of the program may run afterwards.
        """
        return self._trials.prove(each)

    def _give_back(self, rung: Rung) -> bool:
        """What a rung of the ladder does; False where there is nothing to act on."""
        if not release(rung):
            return False
        if rung is Rung.EMPTY_CACHE:
            self._emptied = empty_library_caches()
        return True

    def _adopt(self, now: Counters, heap: HeapReading) -> None:
        self._seen = heap.alive
        if devices_of(now) or driver_is_open(now):
            self._first_use.adopt()
        self._device_memory.adopt(now, devices_of(now), dict.fromkeys(heap.alive, 0))

    def _read(self) -> Counters:
        return self._counters.read()

    def _ask_driver(self) -> Driver:
        if self._driver is None:
            self._driver = find_driver()
        return self._driver
