"""The judgement of a suspect test: readings up the ladder, who holds what is left, findings, and what gives it back.

What tests leave under owners that live is judged when an owner ends or passes a limit.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from lowtide.leakcheck.explaining.cut import NamespaceSizes
from lowtide.leakcheck.findings.causes import with_causes
from lowtide.leakcheck.findings.deferred_remedies import DeferredRemedies
from lowtide.leakcheck.findings.grouping import CommonCause, by_cause
from lowtide.leakcheck.findings.known_ways import KnownWays
from lowtide.leakcheck.findings.owner_growth import COUNTED, growth_of, limit_passed, note_growth, rest_of
from lowtide.leakcheck.findings.storage_holders import Context, explain_storages, marked_as_frozen
from lowtide.leakcheck.judging.judge import Budget, missing
from lowtide.leakcheck.judging.ladder import LadderStep, collect
from lowtide.leakcheck.judging.metrics import Metric, Reading, plain_metrics
from lowtide.leakcheck.judging.owners import Claims, Owner
from lowtide.leakcheck.judging.records import Ownership, Subject
from lowtide.leakcheck.judging.storages import HeapReading, Key, tensors_in
from lowtide.leakcheck.resources.rule import Rung
from lowtide.leakcheck.watching.deep_reading import Deep, devices_of, unclaimed
from lowtide.leakcheck.watching.drafting import (
    Drafting,
    things_of,
    watches_of,
    with_free_memory_beside,
    with_growth,
)
from lowtide.leakcheck.watching.full_reading import FullReadings, no_note
from lowtide.leakcheck.watching.remedy_trials import Draft, RemedyTrials, owners_froze
from lowtide.leakcheck.watching.verdict import Policy, Thing, Verdict
from lowtide.probes.allocation_stacks import AllocationStacks
from lowtide.probes.heap.holders import SharedWalk
from lowtide.probes.host.counters import Counters
from lowtide.probes.host.makers import Makers
from lowtide.reports.schema import Finding, NotMeasured


@dataclass(frozen=True)
class Case:
    """What is to be judged.

    Attributes:
        ended: the owners that ended with the test, which are judged too.
        hints: advice to give where a finding is held by the object beside it.
        final: whether the test is over; else nothing is changed to prove a remedy.
        born: identities of what was born in the test; None where that is not known.
        stage: the stage that ends here.
        turns: how often each stage has run.
        module: the test module.
        namespaces: the sizes of modules' namespaces before the test.
        tolerance: bytes that the test may leave.
        seen: the storages at the last full reading.
        grown: by an owner's label, what has grown under it.
        budget: what of its time may still be spent.
        known: a walk of the ways to what was explained before, if all that is left hangs on these: nothing of that is
            garbage, and no full collection was needed to see it.
    """

    ended: Sequence[Owner]
    hints: Sequence[tuple[str, object]]
    final: bool
    born: Collection[int] | None
    stage: str
    turns: Mapping[str, int]
    module: str
    namespaces: NamespaceSizes | None
    tolerance: int
    seen: frozenset[Key]
    grown: Mapping[str, Sequence[Finding]]
    budget: Budget
    known: SharedWalk | None = None

    @property
    def subjects(self) -> tuple[Subject, ...]:
        """The test itself, as None, and the owners."""
        return (None, *self.ended)


@dataclass(frozen=True)
class Judged:
    """What came of it.

    Attributes:
        findings: of each subject.
        causes: by a finding's identity, the cause that it shares with others.
        things: what each of the test's findings is about, in their order.
        unproven: of each subject, what is to be tried later.
        heap: the storages at the last reading.
        explained: bytes of new host memory that are judged by name.
        not_measured: what libraries are excused for.
    """

    findings: tuple[tuple[Finding, ...], ...]
    causes: Mapping[int, CommonCause | None]
    things: Sequence[frozenset[Thing]]
    unproven: Sequence[DeferredRemedies]
    heap: HeapReading
    explained: int
    not_measured: tuple[NotMeasured, ...]

    def about(self) -> dict[str, frozenset[Thing]]:
        """What each of the test's findings is about, by its fingerprint."""
        found: dict[str, frozenset[Thing]] = {}
        for finding, things in zip(self.findings[0], self.things, strict=True):
            found[finding.fingerprint] = found.get(finding.fingerprint, frozenset()) | things
        return found

    def findings_by_cause(self, of_test: Sequence[Finding]) -> list[tuple[Finding, ...]]:
        """The findings of each subject, those of one cause together.

        Args:
            of_test: those of the test's that libraries are not excused for.
        """
        return [by_cause(found, self.causes) for found in (tuple(of_test), *self.findings[1:])]


class WatchJudge:
    """Judges what one watch finds suspect.

    Args:
        policy: how strictly it watches.
        read: reads the counters.
        ownership: who owns what.
        readings: takes the full readings.
        drafting: drafts findings.
        trials: tries remedies.
        stacks: from where memory was allocated.
        makers: knows which code made threads.
        give_back: does what a rung of the ladder does; False where there is nothing to act on.

    Attributes:
        ways: those to what was explained so far.
    """

    def __init__(
        self,
        policy: Policy,
        read: Callable[[], Counters],
        ownership: Ownership,
        readings: FullReadings,
        drafting: Drafting,
        trials: RemedyTrials,
        stacks: AllocationStacks,
        makers: Makers,
        give_back: Callable[[Rung], bool],
    ) -> None:
        self._policy = policy
        self._read = read
        self._ownership = ownership
        self._readings = readings
        self._drafting = drafting
        self._trials = trials
        self._stacks = stacks
        self._makers = makers
        self._give_back = give_back
        self.ways = KnownWays()

    def __call__(
        self, case: Case, note: Callable[[Claims, HeapReading, Counters], None], climbed: Callable[[], None]
    ) -> Judged:
        """Judge.

        Args:
            case: what.
            note: is shown what the owners that are alive hold, where the test is over.
            climbed: called once all readings are done and nothing is explained yet.
        """
        self._readings.begin()
        metrics = plain_metrics(["cpu", *devices_of(self._read())], case.tolerance)
        context = self._context(case)

        def climb(known: SharedWalk | None) -> tuple[list[LadderStep[Deep]], frozenset[Key]]:
            return self._readings.climb(
                case.subjects,
                case.ended,
                case.seen,
                lambda deep: _above(metrics, deep),
                context,
                note if case.final else no_note,
                may_thaw=case.final and not owners_froze(self._ownership),
                give_back=self._give_back,
                diagnoses=self._policy.explain,
                known=known,
            )

        steps, frozen = climb(case.known)
        if case.known is not None and not _suffices(case.known, _above(metrics, steps[0].reading), steps[0].reading):
            # There is more, of which a collection may give back some.
            case.known.close()
            collect()
            steps, frozen = climb(None)
        climbed()
        for key, owner in steps[0].reading.heap.claimed.items():
            owner.storages.setdefault(key, owner.stage)
        context = replace(context, hints=(*context.hints, *self._readings.values.hints))
        drafts, causes, unproven, things = self._drafted(case, metrics, steps, frozen, context)
        findings = tuple(
            tuple(draft if isinstance(draft, Finding) else draft.finding for draft in found) for found in drafts
        )
        drafts.clear()
        shared = {
            id(finding): cause
            for found, known in zip(findings, causes, strict=True)
            for finding, cause in zip(found, known, strict=False)
        }
        last = steps[-1].reading
        return Judged(findings, shared, things, unproven, last.heap, last.explained, self._readings.listed)

    def _context(self, case: Case) -> Context:
        return Context(
            budget=case.budget,
            born=case.born,
            hints=case.hints,
            living=not case.final,
            stacks=self._stacks.stacks_at,
            turns=case.turns,
            namespaces=case.namespaces,
            patience=self._policy.settle,
            made_at=self._makers.place_of,
        )

    def _drafted(
        self,
        case: Case,
        metrics: Sequence[Metric[Reading]],
        steps: Sequence[LadderStep[Deep]],
        frozen: frozenset[Key],
        context: Context,
    ) -> tuple[list[list[Draft]], list[list[CommonCause | None]], list[DeferredRemedies], list[frozenset[Thing]]]:
        """What each subject has left, explained, with the remedies tried for which now is the time."""
        left = {held.key: held.owner for held in steps[-1].reading.heap.held if self._policy.explain}
        causes: list[list[CommonCause | None]] = [[] for _ in case.subjects]
        puts_off = case.final and self._policy.remedies == "later"
        # Until here nothing but reading: whoever asks for a holder asks one walk.
        with contextlib.closing(case.known or SharedWalk()) as walk:
            asking = replace(context, walk=walk)
            # What the setup of a fixture has made was there before the test that its end is judged with.
            of_owners = replace(asking, born=None)
            explained = [
                marked_as_frozen(explain_storages([key for key in left if (left[key] is None) is of_test], of), frozen)
                for of_test, of in ((True, asking), (False, of_owners))
            ]
            drafts = [
                self._drafting.findings(
                    subject,
                    turn,
                    ended=case.ended,
                    metrics=metrics,
                    steps=steps,
                    stage=case.stage,
                    explained=explained[subject is not None],
                    context=asking if subject is None else of_owners,
                    distinguished=self._readings.distinguished,
                    module=case.module,
                )
                for turn, subject in enumerate(case.subjects)
            ]
            for part in explained:
                self.ways.note(part.by_key.values())
            del explained
            drafts = [with_free_memory_beside(drafted) for drafted in drafts]
            if self._policy.explain:
                for turn, drafted in enumerate(drafts):
                    drafts[turn], causes[turn] = with_causes(drafted, of_owners if turn else asking)
            watches = watches_of(drafts, walk) if puts_off else {}
        things = [things_of(draft) for draft in drafts[0]]
        for owner, of_owner in zip(case.ended, drafts[1:], strict=True):
            of_owner[:] = [with_growth(draft, case.grown.get(owner.label, ())) for draft in of_owner]
        unproven = [DeferredRemedies() for _ in case.subjects]
        read = functools.partial(self._readings.read, case.subjects, case.ended, case.seen)
        if case.final and self._policy.remedies == "now":
            self._trials.try_now(drafts, context, read)
        elif puts_off:
            unproven = self._trials.defer(drafts, watches, context, read)
        return drafts, causes, unproven, things


def _above(metrics: Sequence[Metric[Reading]], deep: Deep) -> list[Metric[Reading]]:
    """The metrics of a reading that are not back."""
    nothing = Reading()
    return [item.metric for reading in deep.readings for item in missing(metrics, nothing, reading)]


def _suffices(known: SharedWalk, above: Sequence[Metric[Reading]], deep: Deep) -> bool:
    """Whether what is left is nothing but tensors that are in a walk of the known ways."""
    held = {storage.key for storage in deep.heap.held}
    found = {key for _, keys in tensors_in(held, known) for key in keys}
    return held <= found and all(metric.resource == "tensors" for metric in above)


class OwnersInUse:
    """Follows the owners that the tests of one watch use.

    Args:
        read: reads the counters.
        ownership: who owns what.
        stacks: from where memory was allocated.
        limit: bytes by which an owner may grow before that is reported at once; None: when it ends.
    """

    def __init__(
        self, read: Callable[[], Counters], ownership: Ownership, stacks: AllocationStacks, limit: int | None
    ) -> None:
        self._read = read
        self._ownership = ownership
        self._stacks = stacks
        self._limit = limit
        self._tolerance = 0
        self._users: dict[int, Owner] = {}
        self._grown: dict[str, list[Finding]] = {}
        self._passed: list[Finding] = []

    def begin(self, tolerance: int) -> None:
        """A test begins, which may leave so many bytes."""
        self._tolerance = tolerance
        self._users.clear()

    @property
    def grown(self) -> Mapping[str, Sequence[Finding]]:
        """By the label of an owner that is ending, what has grown under it."""
        return self._grown

    def forget(self) -> None:
        """The test was judged."""
        self._grown.clear()
        self._passed.clear()

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
        if not owner.ledger.may_grow or not any(owner is other for other in self._ownership.live):
            return
        now = self._read()
        # Again even where its last test was read: others may have emptied since what they had filled.
        claims = Claims(self._ownership.live)
        for key in COUNTED:
            unclaimed(key, self._ownership.new_items(key, now, None, ()), claims)
        note_growth([owner], claims, frozenset(), now, self._ownership.baseline)
        # What it reached is not to be found there as a holder.
        del claims
        self._grown[owner.label] = growth_of(owner, self._stacks.stacks_at, now)
        self._report([owner])

    def add(self, owner: Owner, grown: Sequence[Finding]) -> None:
        """More that has grown under an owner that is about to end."""
        if grown:
            self._grown.setdefault(owner.label, []).extend(grown)

    def note(self, claims: Claims, heap: HeapReading, now: Counters) -> None:
        """Writes down what lies under the owners that the test used, or under which it left something."""
        before = self._ownership.baseline
        claimed = set(map(id, heap.claimed.values()))
        changed = [
            owner
            for owner in self._ownership.live
            if id(owner) in claimed
            or any(owner.items.get(key, set()) - before.items.get(key, {}).keys() for key in COUNTED)
        ]
        self.used(owner for owner in changed if owner.has_settled)
        known = [owner for owner in self._users.values() if not owner.ledger.is_empty]
        wanted = {id(owner): owner for owner in (*changed, *known)}
        note_growth(wanted.values(), claims, heap.claimed.keys(), now, before)

    def report_limits(self) -> None:
        """Reports the owners that the test used and that have grown past the limit."""
        self._report(self._users.values())

    def _report(self, owners: Iterable[Owner]) -> None:
        if self._limit is not None:
            for owner in owners:
                self._passed += limit_passed(owner, self._limit, self._stacks.stacks_at)

    def with_growth(self, verdict: Verdict) -> Verdict:
        """The verdict with what has grown under the owners that ended, and with what has grown past the limit."""
        of_owners = {
            label: (*found, *rest_of(self._grown.get(label, ()), found))
            for label in {**verdict.of_owners, **self._grown}
            for found in [verdict.of_owners.get(label, ())]
        }
        findings = (*verdict.findings, *self._passed)
        return replace(verdict, findings=findings, of_owners=of_owners)
