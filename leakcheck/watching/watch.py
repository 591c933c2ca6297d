"""Watches a process test by test: the cheap pass that clears nearly every test, and the full reading of the others.

A test owns what appears while it runs.  A fixture of a wider scope owns what appears while it is set up and what later
grows under it (a pool that starts its threads at the first request); both are judged when their own scope ends.  What
appears while a module is imported belongs to the process, and so does what the first use of a card takes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial

from msgspec.structs import replace

from lowtide.leakcheck.findings.heap_file import HeapFile
from lowtide.leakcheck.findings.out_of_memory import OutOfMemoryWatch
from lowtide.leakcheck.findings.peak_memory import PeakWatch
from lowtide.leakcheck.findings.remedies import DeferredRemedies, UnprovenLeak
from lowtide.leakcheck.findings.storage_holders import Context
from lowtide.leakcheck.findings.storage_watch import collected_host_memory
from lowtide.leakcheck.findings.tensor_findings import leaks_of
from lowtide.leakcheck.growth.series import FEWEST_STEPS
from lowtide.leakcheck.judging.judge import Budget
from lowtide.leakcheck.judging.ladder import collect, trim_heap
from lowtide.leakcheck.judging.owners import Claims, Owner
from lowtide.leakcheck.judging.rules import COLLECTED
from lowtide.leakcheck.judging.storages import (
    HeapReading,
    HeldStorage,
    Key,
    is_tensor,
    live_keys,
    new_storages,
    read_heap,
    storage_keys,
    within,
)
from lowtide.leakcheck.processes.lost_slots import LostSlots
from lowtide.leakcheck.resources.first_use import CardsWithoutTorch, WarmUp, driver_is_open, may_be_a_drivers
from lowtide.leakcheck.watching.first_pass import KeptHostMemory, Stayed, Suspects, wait_for_return
from lowtide.leakcheck.watching.full_reading import Case, OwnersInUse, Unsettled
from lowtide.leakcheck.watching.import_watch import ThreadImports
from lowtide.leakcheck.watching.judgement import STANDING, WatchJudge
from lowtide.leakcheck.watching.watched import Policy, Verdict, Watched
from lowtide.probes.heap.caches import LRU_CACHE
from lowtide.probes.heap.holders import SharedWalk, sharing_walk
from lowtide.probes.host.counters import Counters
from lowtide.probes.memory.tensors import survey_storages
from lowtide.probes.objects.engine_pools import MODULES
from lowtide.probes.objects.identities import NamespaceSizes, namespace_sizes
from lowtide.probes.objects.listed import all_instances
from lowtide.probes.originals import gc, in_main_thread, initialized_torch, loaded, time, torch_with_cuda
from lowtide.probes.stages import EnteredStage, announced_pools
from lowtide.reports.schema import Finding, NotMeasured

_MOST_GENERATIONS = 4
"""How often a process that ends while it is read may leave another one."""

_FORGETTING = 1.0
_FORGETTING_SHARE = 0.1
"""Seconds, and of what a test takes the share, that finding the dead among what was born may cost."""


class Watch:
    """Watches one process, one test at a time.

    Args:
        policy: how strictly.
        watched: what is followed, where somebody else follows it, too.

    Attributes:
        others: the other processes.
        tolerance: bytes that the test of now may leave.
        collected: bytes that it may leave to the collector before that is told.
        out_of_memory: says who held what when memory was not enough.
        heap: where the heap of the test of now is kept if it leaves something; None: nowhere.
        turns: how often each stage has run since the test began.
        thread_imports: what imports in other threads than the main one have made.
    """

    def __init__(self, policy: Policy | None = None, watched: Watched | None = None) -> None:
        self._watched = watched or Watched(policy or Policy())
        self.policy = self._watched.policy
        self.others = self._watched.others
        self.maker_of = self._watched.makers.of_item
        self.tolerance = self.policy.tolerance
        self.collected = COLLECTED
        self.out_of_memory = OutOfMemoryWatch(self._watched.births, self._watched.stacks.stacks_at, "before it began")
        self.heap: HeapFile | None = None
        self.turns: dict[str, int] = {}
        # What there was in the middle of the turns that somebody counts, by resource.
        self._midway: Mapping[str, Collection[str]] = {}
        self._peak: PeakWatch | None = None
        self._slots = LostSlots(self.others.lost_slots)
        # What engines have lost in the test of now; None where nobody has looked yet.
        self._lost: list[Finding] | None = None
        self._unread_slots: tuple[NotMeasured, ...] = ()
        self._labels: list[str] = []
        self._begun = self._forgetting = 0.0
        # The stage of what the next reading counts, where that is not the one of now.
        self._unread = ""
        self._subject = ""
        self._seen: frozenset[Key] = frozenset()
        self._namespaces: NamespaceSizes | None = None
        self._module = ""
        self._in_use = OwnersInUse(self._watched)
        self._arrival = CardArrival(self._watched, self)
        self._warm_up = self._arrival.warm_up
        self._suspects = Suspects(self._watched)
        self._stayed: Stayed = {}
        self._host = KeptHostMemory(self._watched)
        self._judge = WatchJudge(self._watched, self._in_use)
        self.thread_imports = ThreadImports(self._watched.ownership, warnings_filters=self.policy.warnings_filters)

    def note_midway(self) -> None:
        """Note what there is in the middle of turns that do the same: what comes in both halves is no first use."""
        self._midway = self._watched.counters.read().items

    def amounts(self) -> dict[str, int]:
        """Return what the process holds of each resource now, as the counters have it: bytes, or how many there are."""
        now = self._watched.counters.read()
        counted = {key: sum(items.values()) for key, items in now.items.items()}
        return counted | {key: amount for key, amount in now.amounts.items() if amount is not None}

    def open(self) -> None:
        """Begin to watch; goes through the heap once."""
        if self.policy.card and self.policy.warm_up == "now":
            self._warm_up.now()
        self._watched.start()
        self._watched.caches.add(all_instances(LRU_CACHE))
        self._seen = frozenset(survey_storages().sizes)
        if self._may_have_slots():
            self._slots.adopt()
        self._host.open()
        trim_heap()

    def close(self) -> None:
        """End it; legal twice."""
        if self._peak is not None:
            self._peak.stop()
        self._warm_up.close()
        self._watched.stop()

    def begin(
        self,
        stage: str = "setup",
        tolerance: int | None = None,
        module: str = "",
        subject: str = "",
        *,
        judged: bool = True,
        follows: bool = False,
        peak: int | None = None,
    ) -> None:
        """Begin a test: what is there now is its baseline.

        Args:
            stage: to what it is attributed that appears now.
            tolerance: bytes that this test may leave, if not what the policy says.
            module: the test module, by which leaks of what has no name are distinguished.
            subject: the test's name; without one, what it keeps of host memory does not add up with what others do.
            judged: whether what it leaves counts.
            follows: whether only a test runner has run since the last end, so that libraries' settings are the same.
            peak: bytes by which memory may rise meanwhile; None: as many as there are.
        """
        watched = self._watched
        self._module = module
        # Again before every test: one may have emptied `gc.callbacks`.
        watched.births.start()
        if gc.isenabled():
            # What earlier tests left in young garbage must not come back during this one.
            with watched.births.forgetting():
                gc.collect(1)
        self._arrival.queue()
        self.tolerance = self.policy.tolerance if tolerance is None else tolerance
        self._in_use.tolerance = self.tolerance
        if self._in_use.any_used:
            self._in_use.forget()
        # Again before every test: torch may have come meanwhile, or a card's context.
        if watched.stacks.has_work:
            watched.stacks.start()
        watched.births.mark(stage)
        self._begun, self._forgetting = time.perf_counter(), 0.0
        self.turns, self._midway, self._unread = {stage: 1}, {}, ""
        watched.caches.mark()
        self._judge.readings.subject = subject
        if self._judge.readings.any_kept:
            self._judge.readings.mark()
        watched.makers.start()
        watched.events.start()
        watched.orphaned_files.mark()
        self._namespaces = namespace_sizes()
        now = watched.counters.read_in_part(settings="no library's") if follows else watched.counters.read()
        if self._arrival.joins(now):
            now = watched.counters.read()
        self.others.begin(now)
        self._host.begin(subject, now, judged=judged)
        watched.ownership.begin(stage, now, subject)
        self._lost = None
        memory = watched.device_memory
        if any(not memory.knows(device) or memory.has_shrunk(device, now) for device in now.devices):
            self._adopt(now, read_heap(watched.births, Claims(()), (), ()))
        self._arrival.begin_test()
        self._subject = subject or module
        if peak is not None:
            self._peak = PeakWatch(watched.stacks, lambda: self.stage_now, peak, card=self.policy.card)
            self._peak.begin()

    @property
    def host_memory(self) -> int | None:
        """The process's own memory when the last test had been judged, in bytes; None before the first."""
        level = self._host.level_at_end
        return None if level is None else level + self._watched.counters.kept_free

    def kept_of(
        self, label: str, name: str, root: object, turns: Collection[int]
    ) -> list[tuple[Finding, dict[int, int]]]:
        """Say who holds what appeared in a stage and is there, with its bytes by the stage's turn; changes nothing.

        Where no more of some turns have left anything than those by which a level rises once, nobody is looked for.

        Args:
            label: the stage.
            name: how paths call the root.
            root: what lives, and may be asked by its own parts who holds what.
            turns: those that count.
        """
        left = {born.turn for born in self._watched.births.survivors(label) if is_tensor(born.item)}
        if len(left.intersection(turns)) < FEWEST_STEPS:
            return []
        gc.collect()
        is_pooled = within(announced_pools())
        readings, _ = new_storages([born for born in self._watched.births.survivors(label) if is_tensor(born.item)], {})
        held = [
            HeldStorage.of(storage, stage, turn=turn)
            for storage, stage, turn in readings.values()
            if storage.bytes and not is_pooled(storage.address)
        ]
        turn_of = {each.key: each.turn for each in held}
        with sharing_walk() as walk:
            context = Context(born=self._watched.births.born(), roots=[(name, root)], living=True, walk=walk)
            leaks = leaks_of(held, context)
        return [(leak.finding, leak.sizes_by(turn_of)) for leak in leaks]

    @property
    def stage_now(self) -> str:
        """Return the stage to which what appears is attributed."""
        return self._watched.births.label

    def stage(self, label: str, *, again: bool = False) -> None:
        """Attribute tensors that appear from here on to stage `label`.

        Args:
            label: the stage.
            again: whether this is a new turn of it, not the return from a stage inside it.
        """
        self._watched.others.look()
        self.attribute_births(label, again=again)

    def attribute_births(self, label: str, *, again: bool = False) -> None:
        """Attribute as `stage` does, where no other process can have begun since the last reading."""
        if self._peak is not None:
            self._peak.stage_ended(label)
        if again:
            self.turns[label] = self.turns.get(label, 0) + 1
            if self.turns[label] > 1:
                self._forget_dead()
        self._watched.births.begin(label, self.turns.setdefault(label, 1))

    def _forget_dead(self) -> None:
        """Let no new object pass for a dead one of an earlier turn.

        Not for ever in a loop over a frozen heap, where it takes half a second each time.
        """
        now = time.perf_counter()
        if self._forgetting > _FORGETTING + _FORGETTING_SHARE * (now - self._begun):
            return
        self._watched.births.forget_dead()
        self._forgetting += time.perf_counter() - now

    def phase(self, label: str, *, again: bool = False, settings_later: bool = False) -> None:
        """Attribute as `stage` does, and all that is counted but the cards' levels.

        Args:
            label: the stage that begins.
            again: see `stage`.
            settings_later: whether the process-wide settings are left to the next reading, since nothing can change
                them before; what has changed then is of the stage that ends here.
        """
        counters, last = self._watched.counters, self._watched.ownership.last
        now = counters.read_in_part(last, settings="none") if settings_later else counters.read(last)
        self.others.look(always=True, now=now)
        self._attribute(now, settings_later=settings_later)
        self.attribute_births(label, again=again)

    def unread_phase(self, label: str) -> None:
        """Attribute what is born as `stage` does; what is counted at the next reading is still of the stage before.

        Args:
            label: the stage that begins, in which no code of the program's is known to run.
        """
        self._unread = self._unread or self._watched.births.label
        self.attribute_births(label)

    def full_phase(self, label: str) -> None:
        """Attribute as `phase` does, and the cards' levels too."""
        self._read_to_attribute()
        self.attribute_births(label)

    def _read_to_attribute(self) -> Counters:
        """Return the counters; what they have is of the stage that ends here."""
        now = self._watched.counters.read()
        self.others.look(now=now)
        self._attribute(now)
        return now

    def _attribute(self, now: Counters, *, settings_later: bool = False) -> None:
        """Attribute what is counted by now to the stage of now; what the next reading finds is of the one of then."""
        ending, self._unread = self._unread or self.stage_now, ""
        self._watched.caches.note(ending)
        self._watched.ownership.attribute(ending, now, settings_later=settings_later)

    def enter(self, owner: Owner) -> None:
        """Attribute what appears from here to `leave` to `owner`; nests."""
        if self._peak is not None and not owner.ends_with_test:
            self._peak.entered()
        self._labels.append(self.stage_now)
        now = self._read_to_attribute()
        if owner.only_adds:
            # Modules are imported by the thousand, so that this must not look at all young objects each time.
            self._watched.births.begin_aside(owner.label)
        else:
            self.attribute_births(owner.label)
        self._watched.caches.enter()
        self._watched.ownership.enter(owner, now)

    def leave(self) -> None:
        """End the setup of the owner entered last, whether it succeeded or not."""
        watched, before = self._watched, self._labels.pop()
        born = watched.births.end_aside() if watched.ownership.innermost.only_adds else None
        if born is None:
            self.stage(before)
        now = watched.counters.read()
        owner = watched.ownership.leave(now)
        if not owner.only_adds:
            self.others.follow()
            owner.note_made(watched.births.born() or ())
        watched.ownership.attribute(owner.stage, now)
        for device in now.devices:
            # Listing takes some tenths of a second.
            if owner.growth.get(f"driver {device}", 0) > 0 and watched.device_memory.knows(device):
                self._take_allocations(owner, device, now)
        survivors = watched.births.survivors(owner.label) if born is None else born
        watched.caches.add(born.item for born in survivors if type(born.item) is LRU_CACHE)
        watched.caches.leave()
        own = [born.item for born in survivors if is_tensor(born.item)]
        owner.storages = dict.fromkeys(storage_keys(own), owner.stage) if own else {}
        if self._peak is not None and not owner.ends_with_test:
            self._peak.left()
        self._arrival.queue()
        # A library may have come with it that binds sockets in C.
        watched.makers.start()

    def _take_allocations(self, owner: Owner, device: str, now: Counters) -> None:
        """Give an owner the driver's allocations that its setup made, unless a library was first used there."""
        names = self._watched.device_memory.adopt_allocations(now, device)
        if names and not self._watched.first_use.libraries():
            owner.items[f"allocations {device}"] = set(names)

    def used(self, owners: Iterable[Owner], *, allowed: int | None = None) -> None:
        """Note that the test uses some owners: what it leaves under them may be growth.

        Args:
            owners: those that are alive.
            allowed: bytes that it may leave there, if not what it may leave of its own.
        """
        used = list(owners)
        if used:
            self._in_use.used(used, allowed=allowed)
            self.others.used(used)

    def slots_after(self, stage: EnteredStage) -> None:
        """Look for what requests have lost, where the program says that the stage in which they ran has ended."""
        if stage.name == "infer":
            self.look_at_slots(stage.name)

    def look_at_slots(self, stage: str) -> None:
        """Look, while the engines that it used are there, for what the test has lost in their pools.

        Args:
            stage: which has ended.
        """
        may_be_any = self._may_have_slots()
        self._lost = [*(self._lost or ()), *(self._slots.look(stage) if may_be_any else ())]
        self._unread_slots = self._slots.not_measured if may_be_any else ()

    def _may_have_slots(self) -> bool:
        return self._watched.tree.any_alive() or any(loaded(module) is not None for module in MODULES)

    def ending(self, owner: Owner) -> None:
        """Judge what has grown under an owner that is about to end, and still holds all that it held for the tests."""
        self._in_use.ending(owner)
        self._in_use.add(owner, self.others.growth_of(owner))

    def end(
        self,
        ended: Sequence[Owner] = (),
        *,
        let_go: Callable[[], None] = lambda: None,
        hints: Sequence[tuple[str, object]] = (),
    ) -> Verdict:
        """Judge a test that is over, and for which its runner holds nothing any more.

        Args:
            ended: the owners whose scope ended with it; they are judged too, and then forgotten.
            let_go: lets go of what the runner holds and may still need where nothing is suspect; called again while
                something is waited for.
            hints: advice to give where a finding is held by the object beside it.
        """
        try:
            # First of all: to judge takes memory.
            peak, self._peak = self._peak, None
            peaks, hidden = ([], []) if peak is None else peak.end(self._subject)
            self._arrival.meet()
            if self._lost is None:
                self.look_at_slots(self.stage_now)
            lost, self._lost = self._lost or (), None
            closed = self._watched.ownership.close(ended)
            in_others = self.others.judge([*self._watched.ownership.live, *closed])
            verdict = self._verdict(closed, let_go, hints, final=True)
            if self._in_use.any_used:
                verdict = self._in_use.with_growth(verdict)
            return replace(
                verdict,
                findings=(*verdict.findings, *lost, *in_others, *peaks),
                not_measured=(*verdict.not_measured, *self._unread_slots, *hidden),
            )
        finally:
            self._suspects.forget()
            self._arrival.end_test()
            self._watched.caches.forget()
            if self._in_use.any_used:
                self._in_use.forget()

    def check(self) -> Verdict:
        """Judge in the middle of a test: as `end`, but nothing ends, and nothing is changed to prove a remedy."""
        try:
            return self._verdict([], lambda: None, (), final=False)
        finally:
            self._suspects.forget()

    def _verdict(
        self, ended: list[Owner], let_go: Callable[[], None], hints: Sequence[tuple[str, object]], *, final: bool
    ) -> Verdict:
        watched, stage = self._watched, self.stage_now
        # First of all: what is read here may be what makes Python collect.
        left = self._suspects.before_collecting(self.collected)

        def collected() -> Finding | None:
            found = of_host if left is None else left.finding(stage)
            return found if found is not None and found.bytes >= self.collected else None

        now = self._host.read_trimmed(ended)
        of_host: Finding | None = None
        # What was free in the heap before may have a part of it.
        if final and left is None and 2 * (self._host.share(now, ended) or 0) >= self.collected:
            of_host = collected_host_memory(stage, self.collected)
            now = now if of_host is None else self._host.read_trimmed(ended)
        self._attribute(now)
        if final:
            watched.ownership.over(now)
        self.others.look(always=True, now=now)
        # Before anything is collected: what is young now will be old then.
        watched.caches.born(watched.births.born() if watched.caches.any_filled else ())
        unmeasured = tuple(NotMeasured(what=key, why=why) for key, why in now.unmeasured.items())
        unmeasured += self._arrival.not_measured(now)
        now, suspects = self._suspects_of(now, ended)

        def clean(*, swept: bool = False) -> Verdict:
            kept = self._kept(self._host.share(now, ended), now, final=final)
            missing = (*unmeasured, *self.others.not_measured)
            return Verdict(not_measured=missing, findings=kept, swept=swept, collected=collected())

        if not suspects:
            return clean()
        born = watched.births.born()
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

        # What is born in a test may put a setting back as it dies: a full collection would find it there, too.
        are_young = not now.devices and watched.births.are_young
        budget = Budget(self.policy.budget)
        # Young garbage first, at a hundredth of the cost of a full collection.
        gc.collect(1)
        if is_clean():
            return clean()
        suspects = self._suspects.find(now, ended, self.tolerance, self._seen)
        heap = self.heap if final else None
        of_settings = are_young and set(suspects) == {"globals"} and heap is None
        # Whether the tensors explain what the process has more, their full reading shows.
        are_tensors = not any(owner.storages for owner in ended) and {*suspects} - {"host-memory"} == {"tensors"}
        if final and are_tensors and "host-memory" not in suspects and self._are_renewed(born):
            return clean()
        things: Mapping[str, Collection[str]] | None = {} if of_settings else None
        found: SharedWalk | Unsettled | None = None
        has_tensors = "tensors" in suspects
        standing = sorted(STANDING.intersection(suspects))
        may_be_known = {*suspects} <= {"tensors", *standing, *({"host-memory"} if has_tensors else ())}
        # Where the heap is kept it is walked in any case.
        if heap is None and may_be_known and (are_tensors or (final and not ended)):
            names = {key: [*watched.ownership.new_items(key, now, None, ended)] for key in standing}
            found = self._known_ways(born, names)
            things = None if has_tensors or not isinstance(found, SharedWalk) else names
        known = found if isinstance(found, SharedWalk) else None
        if known is None and not of_settings:
            collect(is_clean)
            if is_clean():
                return clean(swept=True)
        self._suspects.forget()
        share = self._host.share(now, ended)
        if not of_settings:
            wait_for_return(
                watched,
                ended,
                slack=lambda key: self._suspects.slack(key, self.tolerance),
                let_go=let_go,
                stayed=self._stayed,
            )
        context = Context(
            budget=budget,
            born=born,
            hints=hints,
            living=not final,
            stacks=watched.stacks.stacks_at,
            turns=self.turns,
            midway=self._midway,
            namespaces=self._namespaces,
            patience=self.policy.settle,
            module=self._module,
            maker_of=watched.makers.of_item,
            old_arrays=self._host.old_arrays,
            old_lengths=self._host.old_lengths,
        )
        unsettled = found if isinstance(found, Unsettled) else None
        case = Case(ended, final, stage, self.tolerance, self._seen, context, known, things, heap, unsettled)
        back = collected()
        return replace(self._concluded(case, unmeasured, share), collected=back)

    def _are_renewed(self, born: Collection[int] | None) -> bool:
        """Return whether the tensors that seem to be left have only taken the place of others under owners."""
        left, live = self._suspects.living_tensors(), self._watched.ownership.live
        found = self._in_use.renewals.explain(left, live, born, self._seen)
        if found is not None and found.fresh:
            self._in_use.renew(found)
            self._seen -= found.gone
        return found is not None

    def _known_ways(
        self, born: Collection[int] | None, names: Mapping[str, Sequence[str]]
    ) -> SharedWalk | Unsettled | None:
        """Return a walk of the ways to what was explained, if all hangs on their ends that no owner holds; see there.

        Args:
            born: the identities of what was born in the test.
            names: those of the things that are left beside tensors, by resource.
        """
        left, live = self._suspects.living_tensors(), self._watched.ownership.live
        wanted = self._in_use.renewals.elsewhere(left, live, born) if left else []
        # Whoever holds one of them here would be one holder more.
        left.clear()
        return self._judge.ways.to(wanted, names, born)

    def _suspects_of(self, now: Counters, ended: Sequence[Owner]) -> tuple[Counters, list[str]]:
        """Return the counters, and what is suspect by them; read again where that is nothing but may have changed.

        A process whose parent had ended, and that has ended itself since it was read, may have left another one.
        """
        suspects = self._suspects.find(now, ended, self.tolerance, self._seen)
        for _ in range(_MOST_GENERATIONS):
            if suspects or not self._watched.tree.lost_an_orphan():
                break
            now = self._host.read_trimmed(ended)
            suspects = self._suspects.find(now, ended, self.tolerance, self._seen)
        return now, suspects

    def _concluded(self, case: Case, unmeasured: tuple[NotMeasured, ...], share: int | None) -> Verdict:
        """Judge in full, and take what is there then for the new baseline."""
        watched = self._watched
        try:
            verdict, last = self._judge(case, card_came=self._arrival.came_in_this_test)
        finally:
            # The hints hold caches.
            self._judge.readings.forget()
        self._adopt(watched.counters.read(), last.heap)
        now = watched.counters.read()
        left = [watched.ownership.new_items("processes", now, subject, case.ended) for subject in case.subjects]
        reported = {int(name) for names in left if case.final for name in names}
        self.others.is_reported(reported)
        # Only now: a process that was ending when the test was over has been waited for.
        missing = [
            line for line in self.others.not_measured if line.process is None or line.process.pid not in reported
        ]
        if any(finding.changed for found in (verdict.findings, *verdict.of_owners.values()) for finding in found):
            self._seen &= live_keys()
        # Of before the climb, which takes memory itself; and a finding is not reported again as part of a sum.
        share = None if verdict.findings or share is None else share - last.explained
        trim_heap()
        kept = self._kept(share, watched.counters.read(), final=case.final)
        return replace(
            verdict,
            findings=(*verdict.findings, *kept),
            not_measured=tuple(dict.fromkeys((*unmeasured, *missing, *verdict.not_measured))),
        )

    def _kept(self, share: int | None, now: Counters, *, final: bool) -> tuple[Finding, ...]:
        return self._host.kept(share, now, final=final, card_came=self._arrival.came_in_this_test)

    def are_held(self, leaks: Sequence[UnprovenLeak]) -> bool:
        """Return whether all that some leaks have left is held on ways that are known; no list of the heap is made."""
        return self._judge.ways.hold(leaks)

    def prove(self, each: Sequence[DeferredRemedies]) -> list[dict[str, Finding]]:
        """Return the findings of some subjects, by their fingerprints before, with what gave each back.

        Nothing of the program may run afterwards.
        """
        return self._judge.trials.prove(each)

    def _adopt(self, now: Counters, heap: HeapReading) -> None:
        self._seen = heap.alive
        if now.devices or driver_is_open(now):
            self._watched.first_use.adopt()
        self._watched.device_memory.adopt(now, now.devices, dict.fromkeys(heap.alive, 0))


class CardArrival:
    """Notices the first use of a card, by torch or past it.

    Args:
        watched: what is followed.
        watch: makes what the warm-up takes its own.

    Attributes:
        warm_up: uses a card once.
        came_in_this_test: whether a card was warmed up since the test began.
    """

    def __init__(self, watched: Watched, watch: Watch) -> None:
        self._watched = watched
        self._watch = watch
        self._past_torch = CardsWithoutTorch()
        self._is_in_a_test = False
        self.warm_up = WarmUp(watched.handles, self._warming_up)
        self.came_in_this_test = False

    def begin_test(self) -> None:
        """Give what a card takes from here on to an owner of its own."""
        self._is_in_a_test = True
        self.came_in_this_test = False

    def end_test(self) -> None:
        """Take what comes from here on for no test's."""
        self._is_in_a_test = False

    def not_measured(self, now: Counters) -> tuple[NotMeasured, ...]:
        """Return what of cards could not be judged."""
        found: tuple[NotMeasured, ...] = self.warm_up.not_measured() if self.warm_up.problem else ()
        if self._watched.policy.card and self._may_be_past_torch(now):
            found += self._past_torch.not_measured(now)
        return found + self._watched.device_memory.not_measured if now.devices else found

    def queue(self) -> None:
        """Have a card warmed up once it is used.

        Again and again: torch may have been imported meanwhile, or a card used by another thread.
        """
        has_news = not self.warm_up.is_queued or initialized_torch() is not None
        if self._warms_up and has_news and torch_with_cuda() is not None:
            self.warm_up.queue()

    def joins(self, now: Counters) -> bool:
        """Return whether torch has just been warmed up on a card that the program uses without it.

        It is judged from here on: the program has a context there already.
        """
        if not self._warms_up or loaded("torch") is None or self.warm_up.is_done:
            return False
        if not self._may_be_past_torch(now) or not self._past_torch.cards(now):
            return False
        self.warm_up.now()
        return True

    def meet(self) -> None:
        """Take what the first use of a further card takes for the process's, where the test has used one.

        What the program has there by its end is judged, but for memory to which no address leads: nobody knows how
        much the context was.
        """
        torch = initialized_torch()
        if not (self._warms_up and self.warm_up.is_done and in_main_thread()) or torch is None:
            return
        memory = self._watched.device_memory
        if torch.cuda.device_count() == 1:
            return
        for device in self._watched.counters.read().devices:
            if not memory.knows(device):
                index = int(device.rpartition(":")[2])
                self._aside(partial(self.warm_up.use_too, index))
                memory.adopt_first_use(self._watched.counters.read(), device, self._watched.handles.sizes(index))

    def _may_be_past_torch(self, now: Counters) -> bool:
        return now.items["file-descriptors"] is not self._past_torch.without_driver

    @property
    def _warms_up(self) -> bool:
        return self._watched.policy.card and self._watched.policy.warm_up != "off"

    def _warming_up(self, use: Callable[[], None]) -> None:
        """Give the process what the first use of a card takes, whoever's test it is in."""
        watched = self._watched
        if not self._is_in_a_test:
            use()
            # A card that another thread has used before is known as it was then.
            watched.device_memory.forget()
            return
        now = self._aside(use)
        watched.first_use.adopt()
        # Nothing of the program is on a card that was used by nobody before.
        unknown = [device for device in now.devices if not watched.device_memory.knows(device)]
        watched.device_memory.adopt(now, unknown, {})

    def _aside(self, use: Callable[[], None]) -> Counters:
        """Use a card, and give the process what comes meanwhile; return the counters then."""
        watched = self._watched
        owner = Owner("the card's warm-up", only_adds=True)
        self._watch.enter(owner)
        try:
            use()
        finally:
            self._watch.leave()
            now = watched.counters.read()
            self.came_in_this_test = True
            # The driver has opened its own before it could be known that it would.
            new = now.items["file-descriptors"].keys() - watched.ownership.baseline.items["file-descriptors"].keys()
            owner.items.setdefault("file-descriptors", set()).update(filter(may_be_a_drivers, new))
        return now
