"""Watches a process test by test: the cheap pass that clears nearly every test, and the full reading of the others.

A test owns what appears while it runs.  A fixture of a wider scope owns what appears while it is set up and what later
grows under it (a pool that starts its threads at the first request); both are judged when their own scope ends.  What
appears while a module is imported belongs to the process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import math
import multiprocessing
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Union

import msgspec

from lowtide.leakcheck.baseline.deep_reading import Deep, DeepReader, devices_of, unclaimed
from lowtide.leakcheck.baseline.device_memory import IDLE_POOL, MEMORY_POOL, Cards, allocation_name
from lowtide.leakcheck.baseline.filled_caches import FilledCaches
from lowtide.leakcheck.baseline.orphaned_files import Remains
from lowtide.leakcheck.baseline.owners import Claims, Owner
from lowtide.leakcheck.baseline.records import Books, Subject
from lowtide.leakcheck.baseline.shared_memory import MadeSegments
from lowtide.leakcheck.baseline.small_retention import LEAST_KEPT, KeptMemory
from lowtide.leakcheck.baseline.storages import HeapReading, Key, is_tensor, live_keys, read_heap, storage_keys, thaw
from lowtide.leakcheck.explaining.cuts import NamespaceSizes, namespace_sizes
from lowtide.leakcheck.findings.cached_values import CachedValues, SortedValues
from lowtide.leakcheck.findings.causes import Cause, by_cause, with_causes
from lowtide.leakcheck.findings.deferred_remedies import Unproven, prove_now, put_off
from lowtide.leakcheck.findings.empty_pools import with_pool_holders
from lowtide.leakcheck.findings.host_arrays import with_array_holder
from lowtide.leakcheck.findings.item_findings import (
    UNFROZEN,
    ItemLeak,
    actions_for,
    confirmed_workspaces,
    frozen_items,
    is_harmless,
    try_actions,
    with_changes,
    with_fingerprint,
)
from lowtide.leakcheck.findings.owner_growth import COUNTED, growth_of, limit_passed, merged, note_growth, rest_of
from lowtide.leakcheck.findings.remedies import StorageWatch, prove
from lowtide.leakcheck.findings.tensor_findings import (
    Context,
    Explained,
    TensorLeak,
    behind_frozen_holders,
    explain_storages,
    frames,
    restaged,
    tensor_leaks,
    told_as_frozen,
    with_free_beside,
)
from lowtide.leakcheck.judging.budget import REMEDIES_SHARE, Budget
from lowtide.leakcheck.judging.items import FROZEN, listed
from lowtide.leakcheck.judging.judge import excesses, judge
from lowtide.leakcheck.judging.ladder import Rung, SettlePolicy, Step, climb, collect, release, trim_heap
from lowtide.leakcheck.judging.metrics import NOT_OF_PYTHON, Metric
from lowtide.leakcheck.judging.tolerances import (
    DRIVER_TOLERANCE,
    UNLISTED_TOLERANCE,
    Reading,
    host_memory_tolerance,
    plain_metrics,
)
from lowtide.leakcheck.libraries.blas_handles import BlasHandles
from lowtide.leakcheck.libraries.cards_without_torch import PastTorch
from lowtide.leakcheck.libraries.first_use import FirstUse, driver_is_open, excused_by_libraries, may_be_a_drivers
from lowtide.leakcheck.libraries.library_caches import empty_library_caches
from lowtide.leakcheck.libraries.library_items import JUDGED, LibraryItems, Sorted
from lowtide.leakcheck.libraries.warm_up import WarmUp
from lowtide.leakcheck.settings.environment_setters import EnvironmentSetters
from lowtide.leakcheck.watching.unmeasured_processes import UnseenMemory
from lowtide.probes.allocation_stacks import AllocationStacks
from lowtide.probes.device.driver import Driver, find_driver
from lowtide.probes.device.graphs import any_graph_alive
from lowtide.probes.heap.births import Births
from lowtide.probes.heap.caches import LRU_CACHE
from lowtide.probes.heap.holders import SharedWalk, sharing_walk
from lowtide.probes.host.counters import CounterReader, Counters, anonymous_bytes
from lowtide.probes.host.makers import Makers
from lowtide.probes.host.process_events import ProcessEvents
from lowtide.probes.host.process_tree import ProcessTree
from lowtide.probes.memory.tensors import hold_memory, survey_storages
from lowtide.probes.objects.listed import FROZEN_AT_STARTUP, Census, all_objects, collector_paused
from lowtide.reports.schema import Finding, Frame, NotMeasured

LONGEST_WAIT = 60.0
"""Seconds after which waiting ends even if something still moves."""

_FORGETTING = 1.0
_FORGETTING_SHARE = 0.1
"""Seconds, and of what a test takes the share, that finding the dead among what was born may cost."""

_MOST_CLEARINGS = 5
"""How often a process's BLAS workspaces are cleared to tell them from other blocks: the next test takes them again."""

_OF_BLOCKS = ("native ", "workspaces ", "in-flight ")
"""The beginnings of the keys of blocks of torch's allocator in which no tensor lies."""

_WAITED_FOR = ("threads", "processes", "file-descriptors", "shared-memory", "temporary-files")


@dataclass(frozen=True)
class Policy:
    """How strictly to watch.

    Attributes:
        tolerance: bytes that may stay of each resource that is counted in bytes.
        settle: seconds without any movement after which waiting for threads, processes or the driver ends.
        stacks: whose memory's allocation is recorded with its stack: `auto`: that of cards, which is cheap; `all`: the
            process's own too, which takes a dispatch mode around every operation; `off`: none.
        remedies: whether to try what would give a leak back, which changes the program: `now`, with the verdict;
            `later`, when `prove` is called and nothing of the program runs any more; `never`.
        explain: whether it is told who holds a tensor that stays, which takes walks through the whole heap.
        card: whether cards are judged.
        warm_up: whether a card is used once before a test uses it: `now`, as soon as the watch opens; `first-use`, when
            torch initialises it; `off`.
        driver: whether the driver's figures are; not where several workers share a card, and make what nobody has open.
        growth: bytes by which an owner may grow, test after test, before that is reported at once; None: it is reported
            when the owner ends.
        warnings_filters: whether these are (not where the test runner puts them back itself).
        budget: seconds that may be spent for one test on what its holders retain; on the remedies of a session, four
            times as many.
    """

    tolerance: int = 0
    settle: float = 0.5
    stacks: Literal["auto", "all", "off"] = "auto"
    remedies: Literal["now", "later", "never"] = "later"
    explain: bool = True
    card: bool = True
    warm_up: Literal["now", "first-use", "off"] = "off"
    driver: bool = True
    growth: int | None = None
    warnings_filters: bool = True
    budget: float = math.inf


Thing = tuple[str, str, int | str]
"""What a finding is about: `storage` with device and address, or `item` with a metric's key and the item's name."""


@dataclass(frozen=True)
class Verdict:
    """What a test, and the owners that ended with it, left behind.

    Attributes:
        findings: the test's own.
        of_owners: those of each owner that ended, by its label.
        not_measured: what a driver does not tell, and what may be a leak or what a library keeps from its first use,
            which cannot be told apart.
        climbed: whether the cheap pass was not enough.
        unproven: what is to be given to `prove` at the end, for the test and for each owner.
        things: what each of the test's findings is about, by the finding's fingerprint.
    """

    findings: tuple[Finding, ...] = ()
    of_owners: Mapping[str, tuple[Finding, ...]] = field(default_factory=dict)
    not_measured: tuple[NotMeasured, ...] = ()
    climbed: bool = False
    unproven: Unproven = field(default_factory=Unproven)
    unproven_of_owners: Mapping[str, Unproven] = field(default_factory=dict)
    things: Mapping[str, frozenset[Thing]] = field(default_factory=dict)


Draft = Union[Finding, TensorLeak, ItemLeak]  # noqa: UP007 - evaluated
"""A finding, or one for which remedies are still to be tried."""


class Watch:
    """Watches one process, one test at a time.

    Args:
        policy: how strictly.
    """

    def __init__(self, policy: Policy | None = None) -> None:
        self.policy = policy or Policy()
        self._segments = MadeSegments()
        self._environment = EnvironmentSetters()
        self._tree = ProcessTree()
        self._remains = Remains(self._tree, self._segments, is_alone=self.policy.driver)
        self._books = Books(self._segments, self._remains.shared_memory, self._environment)
        self._births = Births()
        self._caches = FilledCaches()
        self._cards = Cards(driver=self.policy.driver)
        self._driver: Driver | None = None
        self._counters = CounterReader(
            self._ask_driver if self.policy.driver else None,
            card=self.policy.card,
            orphans=self._tree.orphans,
            temporary_files=self._remains.temporary_files,
            warnings_filters=self.policy.warnings_filters,
        )
        self._first_use = FirstUse()
        self._handles = BlasHandles()
        self._warm_up = WarmUp(self._handles, self._warming_up)
        self._past_torch = PastTorch()
        self._stacks = AllocationStacks(
            card=self.policy.card and self.policy.stacks != "off", cpu=self.policy.stacks == "all"
        )
        self._unseen = UnseenMemory(self._tree, self._ask_driver if self.policy.card else None)
        # An engine's process may begin and end between two stages.
        self._events = ProcessEvents(self._unseen.look)
        self._labels: list[str] = []
        self._tolerance = self.policy.tolerance
        self._seen: frozenset[Key] = frozenset()
        self._turns: dict[str, int] = {}
        self._begun = self._forgetting = 0.0
        self._is_in_a_test = self._card_came_in_this_test = False
        # The tensors that seemed to be left when that was last looked at, as long as it is to be looked at again.
        self._tensors_left: list[weakref.ref[Any]] = []
        self._namespaces: NamespaceSizes | None = None
        self._workspaces_cleared = 0
        self._kept = KeptMemory()
        self._level_at_end: int | None = None
        self._is_judged = True
        self._users: dict[int, Owner] = {}
        self._grown: dict[str, list[Finding]] = {}
        self._passed: list[Finding] = []
        self._module = ""
        self._makers = Makers()
        self._library_items = LibraryItems(self._makers)
        self._sorted: Sorted | None = None
        self._cached_values = CachedValues()
        self._values = SortedValues()
        self._subject = ""
        self._reader = DeepReader(self._read, self._books, self._births, self._cards, self._caches)

    def open(self) -> None:
        """Begin to watch; goes through the heap once."""
        if self.policy.card and self.policy.warm_up == "now":
            self._warm_up.now()
        self._births.start()
        self._segments.start()
        self._tree.start()
        self._makers.start()
        self._events.start()
        self._remains.start()
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
        self._remains.stop()
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
            module: the test module, by which leaks of what has no name are told apart.
            subject: the test's name; without one, what it keeps of host memory does not add up with what others do.
            judged: whether what it leaves counts.
            follows: whether only a test runner has run since the last end, so that libraries' settings are the same.
        """
        self._module = module
        if gc.isenabled():
            # What earlier tests left in young garbage must not come back during this one.
            with self._births.forgetting():
                gc.collect(1)
        self._queue_warm_up()
        self._tolerance = self.policy.tolerance if tolerance is None else tolerance
        self._users.clear()
        self._subject = subject
        # Again before every test: torch may have come meanwhile, or a card's context.
        self._stacks.start()
        self._births.mark(stage)
        self._begun, self._forgetting = time.perf_counter(), 0.0
        self._turns = {stage: 1}
        self._caches.mark()
        self._cached_values.mark()
        self._events.start()
        self._remains.mark()
        self._namespaces = namespace_sizes()
        now = self._counters.read_in_part(settings="no library's") if follows else self._read()
        if self._joins_card(now):
            now = self._read()
        self._unseen.begin(now)
        self._is_judged = judged
        if self._level_at_end is not None:
            self._kept.fell(max(self._level_at_end - (now.amounts["host-memory"] or 0), 0))
        self._books.begin(stage, now)
        if any(not self._cards.knows(device) or self._cards.has_shrunk(device, now) for device in devices_of(now)):
            self._adopt(now, read_heap(self._births, Claims(()), (), ()))
        self._is_in_a_test = True
        self._card_came_in_this_test = False

    def forget_settings(self) -> None:
        """Whoever judges has put the process-wide settings back."""
        self._books.forget_settings()

    def _queue_warm_up(self) -> None:
        """Again and again: torch may have been imported meanwhile, or a card used by another thread."""
        if self.policy.card and self.policy.warm_up != "off":
            self._warm_up.queue()

    def _joins_card(self, now: Counters) -> bool:
        """Whether torch has just been warmed up on a card that the program uses without it, to be judged from here on.

        The program has a context there already.
        """
        may_warm_up = self.policy.card and self.policy.warm_up != "off" and "torch" in sys.modules
        if not may_warm_up or self._warm_up.is_done or not self._past_torch.cards(now):
            return False
        self._warm_up.now()
        return True

    def _warming_up(self, use: Callable[[], None]) -> None:
        """What the first use of a card takes belongs to the process, whoever's test it is in."""
        if not self._is_in_a_test:
            use()
            # A card that another thread has used before is known as it was then.
            self._cards.forget()
            return
        owner = Owner("the card's warm-up", only_adds=True)
        self.enter(owner)
        try:
            use()
        finally:
            self.leave()
            now = self._read()
            self._first_use.adopt()
            self._card_came_in_this_test = True
            # The driver has opened its own before it could be known that it would.
            new = now.items["file-descriptors"].keys() - self._books.baseline.items["file-descriptors"].keys()
            owner.items.setdefault("file-descriptors", set()).update(filter(may_be_a_drivers, new))
            # Nothing of the program is on a card that was used by nobody before.
            self._cards.adopt(now, [device for device in devices_of(now) if not self._cards.knows(device)], ())

    @property
    def stage_now(self) -> str:
        """The stage to which what appears is attributed."""
        return self._births.label

    def stage(self, label: str, *, again: bool = False) -> None:
        """Tensors that appear from here on, appeared in stage `label`.

        Args:
            label: the stage.
            again: whether this is a new turn of it, not the return from a stage inside it.
        """
        self._unseen.look()
        self._attribute_births(label, again=again)

    def _attribute_births(self, label: str, *, again: bool = False) -> None:
        if again:
            self._turns[label] = self._turns.get(label, 0) + 1
            if self._turns[label] > 1:
                self._forget_dead()
        self._births.begin(label, self._turns.setdefault(label, 1))

    def _forget_dead(self) -> None:
        """So that no new object passes for a dead one of an earlier turn; not for ever in a loop over a frozen heap,
        where it takes half a second each time.
        """
        now = time.perf_counter()
        if self._forgetting > _FORGETTING + _FORGETTING_SHARE * (now - self._begun):
            return
        self._births.forget_dead()
        self._forgetting += time.perf_counter() - now

    def phase(self, label: str, *, again: bool = False, settings_later: bool = False) -> None:
        """As `stage`, and for all that is counted but the cards' levels.

        Args:
            label: the stage that begins.
            again: see `stage`.
            settings_later: whether the process-wide settings are left to the next reading, since nothing can change
                them before; what has changed then is of the stage that ends here.
        """
        ending = self._births.label
        last = self._books.last
        now = self._counters.read_in_part(last, settings="none") if settings_later else self._counters.read(last)
        self._unseen.look(always=True, now=now)
        self._attribute_births(label, again=again)
        self._caches.note(ending)
        self._books.attribute(ending, now, settings_later=settings_later)

    def full_phase(self, label: str) -> Counters:
        """As `phase`, and for the cards' levels too; returns what was read."""
        ending = self._births.label
        self.stage(label)
        self._caches.note(ending)
        now = self._read()
        self._books.attribute(ending, now)
        return now

    def enter(self, owner: Owner) -> None:
        """What appears from here to `leave` belongs to `owner`; nests."""
        self._labels.append(self._births.label)
        if owner.only_adds:
            now = self._read()
            self._unseen.look(now=now)
            self._caches.note(self._births.label)
            self._books.attribute(self._births.label, now)
            # Modules are imported by the thousand, so that this must not look at all young objects each time.
            self._births.begin_aside(owner.label)
        else:
            now = self.full_phase(owner.label)
        self._caches.enter()
        self._books.enter(owner, now)

    def leave(self) -> None:
        """The setup of the owner entered last is over, whether it succeeded or not."""
        before = self._labels.pop()
        born = self._births.end_aside() if self._books.innermost.only_adds else None
        if born is None:
            self.stage(before)
        now = self._read()
        owner = self._books.leave(now)
        self._books.attribute(owner.stage, now)
        for device in devices_of(now):
            # Listing takes some tenths of a second.
            if owner.growth.get(f"driver {device}", 0) > 0 and self._cards.knows(device):
                self._take_allocations(owner, device, now)
        survivors = self._births.survivors(owner.label) if born is None else born
        self._caches.add(born.item for born in survivors if type(born.item) is LRU_CACHE)
        self._caches.leave()
        own = [born.item for born in survivors if is_tensor(born.item)]
        owner.storages = dict.fromkeys(storage_keys(own), owner.stage) if own else {}
        self._queue_warm_up()

    def _take_allocations(self, owner: Owner, device: str, now: Counters) -> None:
        """The driver's allocations that an owner's setup made are its own, unless a library was first used there."""
        names = self._cards.adopt_allocations(now, device)
        if names and not self._first_use.libraries():
            owner.items[f"allocations {device}"] = set(names)

    def used(self, owners: Iterable[Owner], *, allowed: int | None = None) -> None:
        """The test uses these owners: what it leaves under them may be growth.

        Args:
            owners: those that are alive.
            allowed: bytes that it may leave there, if not what it may leave of its own.
        """
        for owner in owners:
            if id(owner) not in self._users:
                self._users[id(owner)] = owner
                owner.ledger.begin_turn(self._tolerance if allowed is None else allowed)

    def ending(self, owner: Owner) -> None:
        """An owner is about to end, and still holds all that it held for the tests: judge what has grown under it."""
        if not owner.ledger.may_grow or not any(owner is other for other in self._books.live):
            return
        now = self._read()
        # Again even where its last test was read: others may have emptied since what they had filled.
        claims = Claims(self._books.live)
        for key in COUNTED:
            unclaimed(key, self._books.new_items(key, now, None, ()), claims)
        note_growth([owner], claims, frozenset(), now, self._books.baseline)
        # What it reached is not to be found there as a holder.
        del claims
        self._grown[owner.label] = growth_of(owner, self._stacks.stacks_at, now)
        self._report_limits([owner])

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
            return self._with_growth(self._judge(self._books.close(ended), let_go, hints, final=True))
        finally:
            self._is_in_a_test = False
            self._caches.forget()
            # The hints hold caches.
            self._values = SortedValues()
            self._grown.clear()
            self._passed.clear()

    def unseen(self) -> tuple[NotMeasured, ...]:
        """The other processes whose memory had to be seen since the test began, as of now."""
        self._unseen.look()
        return self._unseen.not_measured

    def check(self) -> Verdict:
        """Judge in the middle of a test: as `end`, but nothing ends, and nothing is changed to prove a remedy."""
        return self._judge([], lambda: None, (), final=False)

    def _judge(
        self, ended: list[Owner], let_go: Callable[[], None], hints: Sequence[tuple[str, object]], *, final: bool
    ) -> Verdict:
        stage = self._births.label
        now = self._read_trimmed(ended)
        self._books.attribute(stage, now)
        self._unseen.look(always=True, now=now)
        self._caches.note(stage)
        # Before anything is collected: what is young now will be old then.
        self._caches.born(self._births.born() if self._caches.any_filled else ())
        untold = tuple(NotMeasured(what=key, why=why) for key, why in now.untold.items())
        untold += self._warm_up.told() + self._unseen.not_measured
        untold += self._past_torch.told(now) if self.policy.card else ()
        if not self._suspects(now, ended):
            return Verdict(not_measured=untold, findings=self._kept_in_all(now, ended, final=final))
        born = self._births.born()
        let_go()

        def is_clean() -> bool:
            nonlocal now
            now = self._read_trimmed(ended)
            # That one of them is still alive shows without a list of the whole heap; that nothing is left does not.
            return not any(tensor() is not None for tensor in self._tensors_left) and not self._suspects(now, ended)

        budget = Budget(self.policy.budget)
        # Young garbage first, at a hundredth of the cost of a full collection.
        gc.collect(1)
        if is_clean():
            return Verdict(not_measured=untold, findings=self._kept_in_all(now, ended, final=final))
        collect(is_clean)
        if is_clean():
            kept = self._kept_in_all(now, ended, final=final)
            return Verdict(not_measured=untold, findings=kept, climbed=True)
        self._tensors_left = []
        share = self._books.shares("host-memory", now, ended)[id(None)]
        self._wait(ended, let_go)
        self._sorted = None
        devices = ["cpu", *devices_of(self._read())]
        metrics = plain_metrics(devices, self._tolerance)
        subjects: tuple[Subject, ...] = (None, *ended)
        nothing = Reading()

        def above(deep: Deep) -> list[Metric[Reading]]:
            return [
                item.metric
                for reading in deep.readings
                for item in excesses(metrics, nothing, reading)
                if not item.is_back and item.above is not None
            ]

        context = Context(
            budget=budget,
            born=born,
            hints=hints,
            living=not final,
            stacks=self._stacks.stacks_at,
            turns=self._turns,
            namespaces=self._namespaces,
            patience=self.policy.settle,
            started=self._makers.place_of_thread,
        )
        steps, frozen = self._climb(
            subjects,
            ended,
            above,
            context,
            self._note_growth if final else _no_note,
            may_thaw=final and not self._owners_froze,
        )
        if final:
            self._report_limits(self._users.values())
        for key, owner in steps[0].reading.heap.claimed.items():
            owner.storages.setdefault(key, owner.stage)
        context = dataclasses.replace(context, hints=(*context.hints, *self._values.hints))
        left = {held.key for held in steps[-1].reading.heap.held}
        causes: list[list[Cause | None]] = [[] for _ in subjects]
        puts_off = final and self.policy.remedies == "later"
        # Until here nothing but reading: whoever asks for a holder asks one walk.
        with sharing_walk() as walk:
            asking = dataclasses.replace(context, walk=walk)
            explained = told_as_frozen(explain_storages(left if self.policy.explain else (), asking), frozen)
            drafts = [
                self._findings(
                    subject,
                    turn,
                    ended=ended,
                    metrics=metrics,
                    steps=steps,
                    stage=stage,
                    explained=explained,
                    context=asking,
                )
                for turn, subject in enumerate(subjects)
            ]
            del explained
            drafts = [_with_free_beside(drafted) for drafted in drafts]
            if self.policy.explain:
                for turn, drafted in enumerate(drafts):
                    drafts[turn], causes[turn] = with_causes(drafted, asking)
            watches = _watches(drafts, walk) if puts_off else {}
        things = [_things(draft) for draft in drafts[0]]
        for owner, of_owner in zip(ended, drafts[1:], strict=True):
            of_owner[:] = [_merged(draft, self._grown.get(owner.label, ())) for draft in of_owner]
        unproven = [Unproven() for _ in subjects]
        read = functools.partial(self._read_deep, subjects, ended, self._seen)
        if final and self.policy.remedies == "now":
            self._try_remedies(drafts, context, read)
        elif puts_off:
            unproven = self._put_off(drafts, watches, context, read)
        del read
        findings = [
            tuple(draft if isinstance(draft, Finding) else draft.finding for draft in found) for found in drafts
        ]
        drafts.clear()
        shared = {
            id(finding): cause
            for told, known in zip(findings, causes, strict=True)
            for finding, cause in zip(told, known, strict=False)
        }
        about: dict[str, frozenset[Thing]] = {}
        for finding, found in zip(findings[0], things, strict=True):
            about[finding.fingerprint] = about.get(finding.fingerprint, frozenset()) | found
        now = self._read()
        # What a card's first use takes is known where the card was warmed up.
        before = now if self._card_came_in_this_test else self._books.baseline
        findings[0], excused = excused_by_libraries(findings[0], before, now, self._first_use, any_graph_alive)
        findings = [by_cause(found, shared) for found in findings]
        for finding in findings[0]:
            for part in finding.parts:
                about[finding.fingerprint] |= about[part.fingerprint]
        self._adopt(self._read(), steps[-1].reading.heap)
        self._unseen.is_told(
            int(name)
            for subject in subjects
            for name in self._books.new_items("processes", self._read(), subject, ended)
            if final
        )
        if any(finding.changed for found in findings for finding in found):
            self._seen &= live_keys()
        # Of before the climb, which takes memory itself; and what is a finding is not told again as part of a sum.
        share = None if findings[0] or share is None else share - steps[-1].reading.explained
        trim_heap()
        kept = self._keeping(share, self._read(), final=final)
        return Verdict(
            findings=(*findings[0], *kept),
            not_measured=(
                *untold,
                *excused,
                *(self._sorted.listed if self._sorted is not None else ()),
                *self._values.listed,
            ),
            of_owners={owner.label: found for owner, found in zip(ended, findings[1:], strict=True)},
            climbed=True,
            unproven=unproven[0],
            unproven_of_owners={owner.label: later for owner, later in zip(ended, unproven[1:], strict=True)},
            things=about,
        )

    def _read_trimmed(self, ended: Sequence[Owner]) -> Counters:
        """The counters; where host memory has moved, without what is free in the heap.

        What a verdict itself leaves free goes back, too. So baselines and verdicts are read alike, and what one test
        left free cannot hide what the next one keeps.
        """
        now = self._read()
        share = self._books.shares("host-memory", now, ended)[id(None)]
        if share is None or abs(share) < LEAST_KEPT:
            return now
        trim_heap()
        return self._read()

    def _kept_in_all(self, now: Counters, ended: Sequence[Owner], *, final: bool) -> tuple[Finding, ...]:
        """What the tests until now have kept of host memory together, if this clean one makes it too much."""
        return self._keeping(self._books.shares("host-memory", now, ended)[id(None)], now, final=final)

    def _keeping(self, share: int | None, now: Counters, *, final: bool) -> tuple[Finding, ...]:
        if not final:
            return ()
        self._level_at_end = now.amounts["host-memory"]
        if not self._subject:
            return ()
        self._kept.add(self._subject, share or 0, counts=self._is_judged)
        tolerance = max(self.policy.tolerance, host_memory_tolerance(devices_of(now)))
        if not self._is_judged or not self._kept.is_too_much(tolerance):
            return ()
        # A clean test is not collected for: what it left may be garbage.
        gc.collect()
        trim_heap()
        self._level_at_end = anonymous_bytes()
        self._kept.fell(max((now.amounts["host-memory"] or 0) - self._level_at_end, 0))
        if not self._kept.is_too_much(tolerance):
            return ()
        return (self._kept.finding(self._books.since("host-memory", ())),)

    def _note_growth(self, claims: Claims, heap: HeapReading, now: Counters) -> None:
        """Writes down what lies under the owners that the test used, or under which it left something."""
        before = self._books.baseline
        claimed = set(map(id, heap.claimed.values()))
        changed = [
            owner
            for owner in self._books.live
            if id(owner) in claimed
            or any(owner.items.get(key, set()) - before.items.get(key, {}).keys() for key in COUNTED)
        ]
        self.used(owner for owner in changed if owner.has_settled)
        known = [owner for owner in self._users.values() if not owner.ledger.is_empty]
        wanted = {id(owner): owner for owner in (*changed, *known)}
        note_growth(wanted.values(), claims, heap.claimed.keys(), now, before)

    def _report_limits(self, owners: Iterable[Owner]) -> None:
        if self.policy.growth is not None:
            for owner in owners:
                self._passed += limit_passed(owner, self.policy.growth, self._stacks.stacks_at)

    def _with_growth(self, verdict: Verdict) -> Verdict:
        """The verdict with what has grown under the owners that ended, and with what has grown past the limit."""
        of_owners = {
            label: (*found, *rest_of(self._grown.get(label, ()), found))
            for label in {**verdict.of_owners, **self._grown}
            for found in [verdict.of_owners.get(label, ())]
        }
        findings = (*verdict.findings, *self._passed)
        return dataclasses.replace(verdict, findings=findings, of_owners=of_owners)

    def prove(self, each: Sequence[Unproven]) -> list[dict[str, Finding]]:
        """The findings of some subjects, by their fingerprints before, with what gave each back.

        Nothing of the program may run afterwards.
        """
        budget = Budget(REMEDIES_SHARE * self.policy.budget)
        return prove_now(each, self._left_now, self._driver_bytes, self.policy.settle, budget)

    def _left_now(self, key: str) -> Mapping[str, int] | None:
        now = self._read()
        device = key.partition(" ")[2]
        if device not in devices_of(now):
            return now.items.get(key)
        if key.startswith(MEMORY_POOL):
            return {IDLE_POOL: now.amounts.get(key) or 0}
        # Only blocks are told apart by what Python's tensors hold.
        claimed = {address for _, address in live_keys()} if key.startswith(_OF_BLOCKS) else ()
        return self._cards.all_items(now, device, claimed).get(key)

    def _put_off(
        self,
        drafts: list[list[Draft]],
        watches: Mapping[int, StorageWatch],
        context: Context,
        read: Callable[[], Deep],
    ) -> list[Unproven]:
        """Tries what changes nothing that the next test could need; the rest is for the end."""
        unproven = []
        for found in drafts:
            for place, draft in enumerate(found):
                if not isinstance(draft, ItemLeak):
                    continue
                found[place] = draft = self._confirmed(draft, read)
                if is_harmless(draft):
                    found[place] = self._tried_harmless(draft, context, read)
            tensors = [draft for draft in found if isinstance(draft, TensorLeak)]
            # By now the harmless ones are findings.
            items = [draft for draft in found if isinstance(draft, ItemLeak)]
            unproven.append(put_off(tensors, [watches[id(draft.sizes)] for draft in tensors], items))
        return unproven

    def _tried_harmless(self, draft: ItemLeak, context: Context, read: Callable[[], Deep]) -> Draft:
        """The finding, or the leak with what waiting has shown, where there is more to be tried at the end."""
        waiting = dataclasses.replace(draft, endings=())
        actions = actions_for(waiting, context.patience, may_unfreeze=False)
        finding = try_actions(waiting, actions, self._left(draft, read), self._driver_bytes)
        return dataclasses.replace(draft, finding=finding) if draft.endings and finding.remedy is None else finding

    def _try_remedies(self, drafts: list[list[Draft]], context: Context, read: Callable[[], Deep]) -> None:
        """Replaces the drafts by findings with what gave each back: tensors first, which often hold all the rest."""
        may_unfreeze = self._may_unfreeze(drafts)
        leaks = [draft for found in drafts for draft in found if isinstance(draft, TensorLeak)]
        done = dict(zip(map(id, leaks), prove(leaks, context, may_unfreeze=may_unfreeze), strict=True))
        cuts = dict.fromkeys(
            finding.remedy.action for finding in done.values() if finding.remedy is not None and finding.tried
        )
        for found in drafts:
            for place, draft in enumerate(found):
                if isinstance(draft, TensorLeak):
                    found[place] = done[id(draft)]
        del leaks
        after = read() if cuts else None
        for found in drafts:
            for place, draft in enumerate(found):
                if not isinstance(draft, ItemLeak):
                    continue
                if after is not None:
                    left = draft.left(after.readings[draft.subject].items.get)
                    draft = draft.without(left, "; ".join(cuts))
                draft = self._confirmed(draft, read)
                actions = actions_for(draft, context.patience, may_unfreeze=may_unfreeze)
                found[place] = try_actions(draft, actions, self._left(draft, read), self._driver_bytes)

    def _may_unfreeze(self, drafts: Sequence[Sequence[Draft]]) -> bool:
        """Whether a freeze is a finding, and nobody else has done one: there is one permanent generation."""
        findings = [draft.finding for found in drafts for draft in found if isinstance(draft, ItemLeak)]
        frozen_before = self._books.baseline.amounts.get("gc-frozen") or 0
        is_own = frozen_before <= FROZEN_AT_STARTUP and not self._owners_froze
        return any(finding.resource == "gc-frozen" for finding in findings) and is_own

    @property
    def _owners_froze(self) -> bool:
        """Whether an owner that is alive has frozen the heap in its setup."""
        return any(owner.growth.get("gc-frozen", 0) > 0 for owner in self._books.live)

    def _confirmed(self, draft: ItemLeak, read: Callable[[], Deep]) -> ItemLeak:
        if draft.finding.cause != "library-workspace" or draft.finding.resource != "tensors" or not draft.names:
            return draft
        is_first = self._first_use.of_blas or self._workspaces_cleared >= _MOST_CLEARINGS
        self._workspaces_cleared += not is_first
        return confirmed_workspaces(draft, self._left(draft, read), is_first=is_first)

    def _left(self, draft: ItemLeak, read: Callable[[], Deep]) -> Callable[[], Mapping[str, int]]:
        return lambda: draft.left(lambda key: read().readings[draft.subject].items.get(key, {}))

    def _driver_bytes(self) -> int:
        amounts = self._read().amounts
        return sum(amount or 0 for key, amount in amounts.items() if key.startswith("driver "))

    def _read_deep(
        self,
        subjects: Sequence[Subject],
        ended: Sequence[Owner],
        seen: Collection[Key],
        note: Callable[[Claims, HeapReading, Counters], None] = lambda claims, heap, now: None,
        last: Deep | None = None,
    ) -> Deep:
        """A full reading, without what libraries are excused for; that is settled with the first of a judgement."""
        with sharing_walk() as walk:
            deep = self._reader(subjects, ended, seen, note, walk, last)
            if self._sorted is None:
                self._values = self._cached_values.sort(deep.heap.held, self._caches.known(), self._subject, walk)
        now = self._read()
        if self._sorted is None:
            new = {
                key: {name: size for part in deep.readings for name, size in part.items.get(key, {}).items()}
                for key in JUDGED
            }
            tensors = [(address, 1) for device, address in deep.heap.alive if device == "cpu"]
            self._sorted = self._library_items.sort(new, now, self._subject, tensors)
        return deep.settled(self._sorted, now).without(self._values.excused)

    def _climb(
        self,
        subjects: Sequence[Subject],
        ended: Sequence[Owner],
        above: Callable[[Deep], Sequence[Metric[Reading]]],
        context: Context,
        note: Callable[[Claims, HeapReading, Counters], None],
        *,
        may_thaw: bool,
    ) -> tuple[list[Step[Deep]], frozenset[Key]]:
        """The readings after each rung that a plain test may have to climb; everything has been collected by now.

        And the storages whose holders the test had frozen.

        Args:
            subjects: who is judged.
            ended: the owners among them.
            above: which metrics of a reading are not back.
            context: what is known around the leaks.
            note: is shown what the owners that are alive hold.
            may_thaw: whether a freeze that was done since the baseline may be undone: not that of an owner that lives.
        """
        first = self._read_deep(subjects, ended, self._seen, note)
        if self._tries_blas_handles(first):
            first = self._read_deep(subjects, ended, self._seen)
        frozen_before = self._books.baseline.amounts.get("gc-frozen") or 0
        steps: list[Step[Deep]] = []
        frozen: frozenset[Key] = frozenset()
        if may_thaw and above(first) and frozen_before <= FROZEN_AT_STARTUP < gc.get_freeze_count():
            # Undoes what this test froze; a freeze that was there before is not to be undone.
            frozen = behind_frozen_holders({held.key for held in first.heap.held}, context)
            hidden = thaw(self._births.froze_in, self._seen)
            steps = [Step(Rung.RAW, first.with_hidden(hidden), 0.0)]
            steps.append(Step(Rung.UNFREEZE, self._read_deep(subjects, ended, self._seen), 0.0))
        steps = steps or [Step(Rung.RAW, first, 0.0)]
        for rung in (Rung.EMPTY_CACHE, Rung.CLEAR_HOST_CACHE):
            left = above(steps[-1].reading)
            # At which rung it comes back is a diagnosis; whether it is a leak may be known before.
            climbs = self.policy.explain or any(metric.rung.order > Rung.COLLECT.order for metric in left)
            if left and climbs and release(rung):
                if rung is Rung.EMPTY_CACHE:
                    empty_library_caches()
                # What is free in the process's heap, or pinned, no object holds.
                last = steps[-1].reading if rung is Rung.CLEAR_HOST_CACHE else None
                steps.append(Step(rung, self._read_deep(subjects, ended, self._seen, last=last), 0.0))
        return steps, frozen

    def _tries_blas_handles(self, deep: Deep) -> bool:
        """Whether some allocations are known now: handles that torch keeps for the next thread, and a trial's own.

        What a second run of the same call does not take again is a first use.
        """
        found = False
        for key, items in deep.readings[0].items.items():
            if not key.startswith("allocations "):
                continue
            device = key.partition(" ")[2]
            trial = self._handles.tried(int(device.rpartition(":")[2]), items)
            known = {*trial.kept, *(allocation_name(address) for address, _ in trial.taken)}
            if known:
                self._cards.forget_allocations(device, known)
                found = True
        return found

    def _findings(
        self,
        subject: Subject,
        turn: int,
        *,
        ended: Sequence[Owner],
        metrics: Sequence[Metric[Reading]],
        steps: Sequence[Step[Deep]],
        stage: str,
        explained: Explained,
        context: Context,
    ) -> list[Draft]:
        own = [Step(step.rung, step.reading.readings[turn], step.seconds) for step in steps]
        context = dataclasses.replace(context, module=(subject.where if subject is not None else "") or self._module)
        found: list[Draft] = []
        judged = judge(metrics, Reading(), own, stage=stage, cycle=1)
        for finding, key in zip(judged.findings, judged.keys, strict=True):
            if finding.resource == "tensors" and finding.verdict not in NOT_OF_PYTHON and finding.bytes:
                held = [
                    [
                        storage
                        for storage in step.reading.heap.held
                        if storage.owner is subject and storage.key[0] == finding.device
                    ]
                    for step in steps
                ]
                found += tensor_leaks(held, [step.rung for step in steps], explained, context)
            else:
                names = frozen_items() if key == FROZEN else own[0].reading.items.get(key, {})
                if finding.resource == "reserved" and finding.remedy is None:
                    # Emptying the cache gave back the segments of pools that nobody holds any more.
                    names = own[-1].reading.items.get(key, names)
                filled = [self._caches.stage_of(name) for name in names]
                since = next(filter(None, filled), "") or self._books.since(_level_of(key, finding.device), names)
                dated = restaged(finding, subject.stage if subject is not None else since or stage)
                stack = self._stack_of(finding.device, key, names)
                changed = (UNFROZEN,) if key == FROZEN and finding.remedy is not None else ()
                more = "" if self._sorted is None else self._sorted.addition(key, names)
                dated = msgspec.structs.replace(dated, message=dated.message + more)
                dated = msgspec.structs.replace(dated, holder=listed(key, names), allocated_at=stack, changed=changed)
                leak = ItemLeak(dated, key, names, turn, cached=self._caches.of(names))
                if key == "globals":
                    leak = with_changes(
                        leak, self._books.left(self._read(), subject, ended), self._environment.place_of
                    )
                found += [
                    with_array_holder(with_fingerprint(part, context.module), context)
                    for part in with_pool_holders(leak, context)
                ]
        return found

    def _stack_of(self, device: str, key: str, names: Mapping[str, int]) -> tuple[Frame, ...]:
        """Where the largest of some blocks was allocated."""
        if not names or not key.startswith(("native ", "workspaces ")):
            return ()
        largest = int(max(names, key=lambda name: names[name]).rpartition(" ")[2], 16)
        return frames(self._stacks.stacks_at(device, [largest]).get(largest, ()))

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
        survivors = self._births.survivors()
        if any(owner.storages for owner in ended) or self._births.froze_until_last_look:
            suspects.append("tensors")
        tensors = [born for born in survivors if is_tensor(born.item)]
        # There is a live owner for every import: they are gone through only where there is a tensor.
        live = {owner.label for owner in self._books.live} if tensors else ()
        left = [born.item for born in tensors if born.label not in live]
        # Compilers leave many that hold nothing, in garbage that only a full collection would end.
        if left:
            left = [item for item, holds in zip(left, hold_memory(left), strict=True) if holds]
        # Until the verdict only: `torch.utils.swap_tensors` refuses tensors with weak references.
        self._tensors_left = _weakly(left)
        if left:
            suspects.append("tensors")
        self._caches.add(born.item for born in survivors if type(born.item) is LRU_CACHE)
        if self._caches.suspects(survivors):
            suspects.append("lru-cache")
        return suspects

    def _slack(self, key: str) -> int:
        if key == "host-memory":
            return max(self._tolerance, host_memory_tolerance(devices_of(self._books.baseline)))
        if key.startswith("driver ") and not self._cards.lists_allocations(key.partition(" ")[2]):
            return max(self._tolerance, DRIVER_TOLERANCE)
        if key.startswith(MEMORY_POOL):
            return max(self._tolerance, UNLISTED_TOLERANCE)
        return 0

    def _is_worth(self, key: str) -> bool:
        """Whether a level's growth deserves a full reading: torch keeps free segments, which is no leak."""
        return not key.startswith("reserved ") or self._cards.has_new_empty_pools(key.partition(" ")[2])

    def _wait(self, ended: Sequence[Owner], let_go: Callable[[], None]) -> None:
        """Wait for what comes back by itself: threads and processes that are ending, a driver that takes its time."""

        def missing(now: Counters) -> dict[str, object]:
            _reap_children()
            let_go()
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

    def _adopt(self, now: Counters, heap: HeapReading) -> None:
        self._seen = heap.alive
        if devices_of(now) or driver_is_open(now):
            self._first_use.adopt()
        self._cards.adopt(now, devices_of(now), {address for _, address in heap.alive})

    def _read(self) -> Counters:
        return self._counters.read()

    def _ask_driver(self) -> Driver:
        if self._driver is None:
            self._driver = find_driver()
        return self._driver


def _things(draft: Draft) -> frozenset[Thing]:
    if isinstance(draft, TensorLeak):
        return frozenset(("storage", device, address) for device, address in draft.keys)
    if isinstance(draft, ItemLeak):
        # A level is one thing, and has no names.
        names = () if draft.key == FROZEN else draft.names
        return frozenset(("item", draft.key, name) for name in names or ("",))
    return frozenset()


def _weakly(items: Iterable[object]) -> list[weakref.ref[Any]]:
    """Weak references to those objects that can have one."""
    found = []
    for item in items:
        with contextlib.suppress(TypeError):
            found.append(weakref.ref(item))
    return found


def _watches(drafts: Sequence[Sequence[Draft]], walk: SharedWalk) -> dict[int, StorageWatch]:
    """For each leak of tensors, by the identity of its sizes, what tells which of its storages are gone."""
    leaks = [draft for drafted in drafts for draft in drafted if isinstance(draft, TensorLeak)]
    sizes = [leak.sizes for leak in leaks]
    return dict(zip(map(id, sizes), StorageWatch.of_each(sizes, walk), strict=True))


def _with_free_beside(drafts: Sequence[Draft]) -> list[Draft]:
    leaks = [draft for draft in drafts if isinstance(draft, TensorLeak)]
    told = iter(with_free_beside(leaks))
    return [next(told) if isinstance(draft, TensorLeak) else draft for draft in drafts]


def _level_of(key: str, device: str) -> str:
    """The key of the level that tells since when something on a card is there."""
    return f"driver {device}" if key == f"allocations {device}" or key == f"unlisted {device}" else key


def _merged(draft: Draft, grown: Sequence[Finding]) -> Draft:
    if isinstance(draft, Finding):
        return merged(draft, grown)
    return dataclasses.replace(draft, finding=merged(draft.finding, grown))


def _no_note(claims: Claims, heap: HeapReading, now: Counters) -> None:
    """In the middle of a test nothing is known yet of what it will have left."""


def _reap_children() -> None:
    """Have multiprocessing and subprocess take note of children that have ended and that nobody has waited for."""
    if "multiprocessing.process" in sys.modules:
        multiprocessing.active_children()
    if "subprocess" in sys.modules:
        subprocess._cleanup()  # type: ignore[attr-defined]
