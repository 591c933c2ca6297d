"""The judgement of an engine's shutdown: readings up the ladder, against the baselines of one life and of all.

They are read without what imports and libraries' first use have left.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec

from lowtide.leakcheck.findings.causes import BELONGING, causes_of, with_holders
from lowtide.leakcheck.findings.empty_pools import of_cached_pools, with_pools_to_let_go
from lowtide.leakcheck.findings.heap_file import HeapFile
from lowtide.leakcheck.findings.host_memory import bytes_of_new_arrays, with_memory_holder
from lowtide.leakcheck.findings.item_findings import ItemLeak
from lowtide.leakcheck.findings.remedies import actions_for, try_actions
from lowtide.leakcheck.findings.storage_holders import Context
from lowtide.leakcheck.judging.device_memory import IDLE_POOL, MEMORY_POOL
from lowtide.leakcheck.judging.fingerprints import fingerprint, fingerprint_of_items, whereabouts
from lowtide.leakcheck.judging.judge import (
    Excess,
    Judgement,
    excesses,
    grouped,
    judge,
    missing,
    named_amount,
    one_for_each_level,
)
from lowtide.leakcheck.judging.ladder import ACTIONS, LadderStep, trim_heap
from lowtide.leakcheck.judging.metrics import Metric, Reading
from lowtide.leakcheck.lives.life_reader import LifeReader, LifeReading, setting_left
from lowtide.leakcheck.lives.life_record import LifeRecord, is_reported
from lowtide.leakcheck.resources import LISTED, read_items
from lowtide.leakcheck.resources.resource import Items, Rung
from lowtide.probes.heap.container_lengths import long_containers
from lowtide.probes.heap.holders import SharedWalk, sharing_walk
from lowtide.probes.memory.buffers import known_arrays
from lowtide.probes.objects.described import program_modules
from lowtide.probes.objects.foreign import type_name
from lowtide.probes.objects.listed import all_objects
from lowtide.probes.snapshot import Snapshot
from lowtide.reports.schema import Finding, NotMeasured, TypeGrowth
from lowtide.reports.statement import restated_as

_NO_SECOND_LIFE = "libraries move it in a first life, and no whole second life followed to compare it with"

_OF_PRIVATE_POOLS = "reserved "
"""The beginning of the keys of private pools."""

_OF_ALL_LIVES = frozenset(resource.rule.key for resource in LISTED)
"""What is judged since the first life began alone: one finding has what all have left, which one change may end."""

_ALL_OF_LEVEL = 1.1
"""By how much arrays may seem to be more than a level has risen by that they are part of."""

_OF_GROUPS = ("driver", "file-descriptors", "pinned", "threads")
"""What a process group holds besides itself."""


_Row = tuple[Finding, Metric]
"""A finding, and the metric that it is about."""

_Kind = tuple[str, str, bool]
"""What a finding is about: resource, device, and whether native code holds it, as no pool does that was announced."""


class _Baseline(NamedTuple):
    """What a life must return to at its end, what can be judged from there on, and how long containers were then."""

    reading: LifeReading
    metrics: Sequence[Metric]
    lengths: Mapping[int, int]


class ShutdownJudgement:
    """Judges the shutdowns of one run's lives, with the judge and the ladder that judge tests.

    Args:
        cycles: how many lives there are.
        record: takes the findings.
        reader: reads this process.
        tolerances: what one life may leave, by the metric's key, in place of the table's tolerance.
        heap: where the heap is kept in which the last life has left something; None: nowhere.

    Attributes:
        is_concluded: whether it is known what all lives together have left.
        excesses: how far each metric was above its life's own baseline, after each shutdown so far.
    """

    def __init__(
        self,
        cycles: int,
        record: LifeRecord,
        reader: LifeReader,
        tolerances: Mapping[str, int],
        heap: HeapFile | None,
    ) -> None:
        self._cycles = cycles
        self._record = record
        self._reader = reader
        self._leftovers = reader.leftovers
        self._tolerances = tolerances
        self._heap = heap
        # What there was before each life that has begun, and what the first left.
        self._starts: list[LifeReading] = []
        self._lengths: list[Mapping[int, int]] = []
        self._old_arrays: frozenset[tuple[int, int]] = frozenset()
        self._first_end: LifeReading | None = None
        self._types: TypeCounts | None = None
        # Whether a whole life has followed the first, which says how much of what that left was first use.
        self._has_compared = False
        # Whether the run ends with the life that is judged.
        self._is_last = False
        self._steps: list[LadderStep[LifeReading]] = []
        self._of_all_lives: list[ItemLeak] = []
        self.is_concluded = False
        self.excesses: list[tuple[Excess, ...]] = []

    def begin(self, cycle: int) -> Snapshot:
        """Begin a life; return what there is before it."""
        self._lengths.append(long_containers())
        if cycle == 1:
            self._old_arrays = known_arrays()
        # What is free by now, as what judging the life before took, would hide as much of what this one keeps.
        trim_heap()
        start = self._reader.read()
        self._types = TypeCounts(f"before cycle {cycle}")
        self._starts.append(start)
        return start.snapshot

    def settle(self, *, failed: bool) -> Snapshot:
        """Read right after a shutdown: at once, waited, collected; return the first reading."""
        self._is_last = len(self._starts) == self._cycles or failed
        self._steps = []
        trim_heap()
        self._climb(Rung.SETTLE, Rung.COLLECT)
        return self._steps[0].reading.snapshot

    @property
    def leaves_any(self) -> bool:
        """Return whether something has not come back so far."""
        return bool(self._missing(self._steps[-1].reading))

    def __call__(self, engine: object, *, failed: bool) -> None:
        """Climb on, and judge; the engine object is held meanwhile, as whoever called shutdown holds it."""
        cycle, now = len(self._starts), self._steps[-1].reading
        is_last = self._is_last = cycle == self._cycles or failed
        self._reader.note_first_use(cycle, self._starts[-1], now)
        self.excesses.append(excesses(self._judged_in(cycle), self._starts[-1], now))
        self._first_end = self._first_end or now
        self._has_compared |= cycle > 1 and not failed
        devices = {item.metric.device for item in self._missing(now) if item.metric.resource == "tensors"}
        actions = dict(ACTIONS)
        if is_last:
            self._record.type_growth = () if self._types is None else self._types.growth("after shutdown")
            of_tensors = self._conclude(engine, devices, actions)
        else:
            # What would give it back is tried after the last life only: until then it must show whether it adds up.
            of_tensors = self._leftovers.explain(engine, cycle, devices)
            self._climb(Rung.EMPTY_CACHE)
        explained = {finding.device for finding in of_tensors}
        with sharing_walk() as walk:
            context = self._context(engine, walk)
            judgements = [
                self._judged(start, actions, msgspec.structs.replace(context, old_lengths=start.lengths))
                for start in self._baselines
            ]
            of_arrays = self._arrays_of_all_lives(judgements, context) if is_last else []
        # What several lives have left together says nothing of this one.
        self._record.note_returns(judgements[0], cycle, explained)
        for judgement in judgements:
            # Whether a tensor that nobody sees keeps an arena is known when the heap is thawed, after the last life.
            hidden = is_last and any(finding.verdict == "frozen-garbage" for finding in of_tensors)
            found = [finding for finding in judgement.findings if not is_reported(finding, explained)]
            if hidden or (not is_last and any(finding.resource == "gc-frozen" for finding in found)):
                found = [finding for finding in found if finding.resource != "arena"]
            self._record.findings += found
            self._record.note_levels(judgement)
        self._record.findings += [*of_tensors, *of_arrays] if is_last else ()
        self._judge_process()
        self.is_concluded = is_last

    def not_compared(self, deep_sleeps: Collection[str]) -> list[NotMeasured]:
        """Return what the first life left of what libraries move in it, where no second one has shown what is theirs.

        Args:
            deep_sleeps: the sleeps in which a driver must count no more than before create.
        """
        if self._cycles == 1 or self._has_compared or self._first_end is None:
            return []
        late = [metric for metric in self._reader.metrics if metric.first_use]
        left = [
            f"{named_amount(item.metric, item.above)} after the shutdown of cycle 1"
            for item in missing(late, self._starts[0], self._first_end)
            if item.above is not None
        ]
        slept = dict.fromkeys(lived.name for lived in self._record.stages if lived.name in deep_sleeps)
        left += [f"the driver's level on {self._reader.device} in {name}" for name in slept]
        return [NotMeasured(what=what, why=_NO_SECOND_LIFE) for what in left]

    def _judged(self, start: _Baseline, actions: Mapping[Rung, str], context: Context) -> Judgement:
        """Judge what is left since one baseline, and say who holds it and what ends it."""
        then, now = start.reading, self._steps[-1].reading
        cycle = len(self._starts)
        # Before the last life nothing is released but what the first rungs do: what is to go by a later one may stay.
        due = [each for each in start.metrics if self._is_last or each.rung.order <= Rung.EMPTY_CACHE.order]
        judgement = judge(due, then, self._steps, stage="shutdown", cycle=cycle, actions=actions)
        findings, metrics = [], []
        for finding, metric in _with_cached_pools(list(zip(judgement.findings, judgement.metrics, strict=True))):
            names = metric.new_items(then, now)
            whole = ItemLeak(self._reader.explained(finding, names.keys()), metric.key, names, 0)
            for leak in with_pools_to_let_go(whole, context):
                findings.append(self._concluded(leak, context) if self._is_last else _marked(leak))
                metrics.append(metric)
                self._record.note_things(findings[-1], metric, leak.names)
        return msgspec.structs.replace(judgement, findings=tuple(findings), metrics=tuple(metrics))

    def _arrays_of_all_lives(self, judgements: Sequence[Judgement], context: Context) -> list[Finding]:
        """Return the finding on arrays that came in any life and stay, where the level tells nothing of them.

        What libraries take in a first life may be as much, and each life may put its own in place of the last one's.
        """
        of_all = [finding for judgement in judgements for finding in judgement.findings]
        metric = next((metric for metric in self._reader.metrics if metric.key == "host-memory"), None)
        if metric is None or any(finding.resource == metric.resource for finding in of_all):
            return []
        context = msgspec.structs.replace(context, old_arrays=self._old_arrays)
        # What a run allows one life, nothing tells of all either.
        allowed = max(metric.tolerance, self._tolerances.get(metric.key, 0))
        metric = msgspec.structs.replace(metric, tolerance=allowed)
        # What of them is in files, shared, or under tensors is not in the level.
        level = metric.above(self._starts[0], self._steps[-1].reading) or 0
        size = bytes_of_new_arrays(context) if level > metric.tolerance else 0
        if size > _ALL_OF_LEVEL * level:
            return []
        steps = [LadderStep(Rung.RAW, Reading(amounts={metric.key: size}), 0.0)]
        judged = judge([metric], Reading(), steps, stage="shutdown", cycle=len(self._starts))
        named = [with_memory_holder(ItemLeak(each, metric.key, {}, 0), context).finding for each in judged.findings]
        return [finding for finding in named if finding.holder]

    def _concluded(self, leak: ItemLeak, context: Context) -> Finding:
        """Return a finding after the last life, with its holder; note it where what ends it is tried later."""
        if leak.key.startswith(MEMORY_POOL):
            return self._trimmed(msgspec.structs.replace(leak, names={IDLE_POOL: leak.finding.bytes}))
        finding = _with_holder(msgspec.structs.replace(leak, finding=_marked(leak)), context)
        if leak.key in _OF_ALL_LIVES:
            self._of_all_lives.append(msgspec.structs.replace(leak, finding=finding))
        return finding

    def _trimmed(self, leak: ItemLeak) -> Finding:
        """Return a finding on what a card's own pools keep, once they have been told to give it back."""
        leak = msgspec.structs.replace(leak, finding=msgspec.structs.replace(leak.finding, holder=IDLE_POOL))

        def left() -> Mapping[str, int]:
            size = self._reader.read().amounts.get(leak.key)
            return {IDLE_POOL: size} if size else {}

        changes = actions_for(leak, patience=0, may_unfreeze=False)
        return try_actions(leak, changes, left, self._reader.driver_bytes)

    def _conclude(self, engine: object, devices: set[str], actions: dict[Rung, str]) -> list[Finding]:
        """Climb on after the last life, single holders before whole caches; add to `actions` what lets go of these."""
        self._leftovers.read(Rung.RAW)
        if self.leaves_any and self._leftovers.thaw():
            self._steps.append(LadderStep(Rung.UNFREEZE, self._reader.read(), 0.0))
        self._climb(Rung.EMPTY_CACHE)
        storages = self._leftovers.left
        if self._heap is not None and (self.leaves_any or storages):
            # Before anything is changed to give it back.
            context = self._leftovers.context(engine)
            with sharing_walk() as walk:
                self._heap.keep(walk, born=context.born, storages=storages, items={}, roots=context.roots)
        leaks = self._leftovers.leaks_at_end(engine, len(self._starts), devices)
        things = self._things_left()
        if len(leaks) + len(things) > 1:
            # Before anything is changed to give it back.
            with sharing_walk() as walk:
                self._record.causes = causes_of([*leaks, *things], self._context(engine, walk))
        findings, cuts = self._leftovers.conclude(leaks, engine, len(self._starts))
        if cuts:
            actions[Rung.CLEAR_CACHES] = "; ".join(cuts)
            self._steps.append(LadderStep(Rung.CLEAR_CACHES, self._reader.read(), 0.0))
        last = self._steps[-1].rung
        self._climb(*(rung for rung in Rung if rung.order > max(last.order, Rung.EMPTY_CACHE.order)))
        return findings

    def _context(self, engine: object, walk: SharedWalk) -> Context:
        """Return what is known around what lives have left, for one walk over the heap."""
        return msgspec.structs.replace(self._leftovers.context(engine), maker_of=self._reader.makers.of_item, walk=walk)

    def _things_left(self) -> list[ItemLeak]:
        """Return what has names, or is host memory, and did not come back since a baseline."""
        now, cycle = self._steps[-1].reading, len(self._starts)
        found = []
        for start in self._baselines:
            judgement = judge(start.metrics, start.reading, self._steps, stage="shutdown", cycle=cycle, actions={})
            rows = zip(judgement.findings, judgement.metrics, strict=True)
            leaks = (ItemLeak(each, of.key, of.new_items(start.reading, now), 0) for each, of in rows)
            found += [msgspec.structs.replace(leak, finding=_marked(leak)) for leak in leaks]
        return [leak for leak in found if leak.names or leak.key == "host-memory"]

    def _judge_process(self) -> None:
        """Try what ends process groups and their like, judge settings, and what went with the groups."""
        # The groups last: what goes with them is a part of theirs.
        for leak in sorted(self._of_all_lives, key=lambda leak: leak.key == "process-groups"):
            read = functools.partial(_read_of, leak.key)
            actions = actions_for(leak, patience=0, may_unfreeze=False)
            tried = try_actions(leak, actions, read, self._reader.driver_bytes)
            are_groups = leak.key == "process-groups"
            self._record.findings = [
                finding
                for finding in self._record.findings
                # One remedy ends the groups of all lives.
                if finding is not leak.finding and not (are_groups and finding.resource == leak.finding.resource)
            ]
            if are_groups and tried.changed:
                tried = self._with_what_went_too(tried)
            self._record.findings.append(tried)
        self._record.findings += [
            setting_left(change, remedies=self._is_last) for change in self._reader.changed_settings()
        ]

    def _with_what_went_too(self, groups: Finding) -> Finding:
        """Make what is back now that process groups are destroyed a part of their finding: it was theirs.

        Of what came back in part, the rest is reported.
        """
        steps = [LadderStep(Rung.RAW, self._reader.read(), 0.0)]
        left: dict[_Kind, Finding] = {}
        for start in self._baselines:
            of_groups = [metric for metric in start.metrics if metric.resource in _OF_GROUPS]
            judged = judge(of_groups, start.reading, steps, stage="shutdown", cycle=1)
            left |= {_kind_of(finding): finding for finding in judged.findings}
        back, kept = [], []
        for finding in self._record.findings:
            rest = left.get(_kind_of(finding))
            if finding.resource not in _OF_GROUPS:
                kept.append(finding)
            elif rest is None:
                back.append(finding)
            else:
                kept.append(less(finding, rest))
                # That it has nothing to do with the groups was measured.
                self._record.causes.pop(finding.fingerprint, None)
        self._record.findings = kept
        return msgspec.structs.replace(groups, parts=one_for_each_level(grouped(back), self._record.level_of))

    @property
    def _baselines(self) -> list[_Baseline]:
        """Return what the present life must return to: its own beginning first, and after the last that of all lives.

        What each life leaves may be within the tolerance; what all of them leave must be too. From the first beginning
        on nothing is judged that libraries move in a first life.
        """
        judged = self._judged_in(len(self._starts))
        of_all = [metric for metric in judged if metric.key in _OF_ALL_LIVES]
        judged = [metric for metric in judged if metric not in of_all]
        # Not where several lives add up: their noise does, too.
        own = [
            msgspec.structs.replace(metric, tolerance=self._tolerances.get(metric.key, metric.tolerance))
            for metric in judged
        ]
        starts = list(zip(self._starts, self._lengths, strict=True))
        (first, at_first), (last, at_last) = starts[0], starts[-1]
        found = [_Baseline(last, own, at_last), _Baseline(first, of_all, at_first)]
        for start, lengths in starts[:2] if self._is_last else ():
            late = [metric for metric in judged if not (start is first and metric.first_use)]
            found += [] if start is last else [_Baseline(start, late, lengths)]
        return found

    def _judged_in(self, cycle: int) -> list[Metric]:
        """Return what can be judged in a life: in the first, not what libraries move in it."""
        late = [metric for metric in self._reader.metrics if metric.first_use] if cycle == 1 else []
        if self._cycles == 1:
            for metric in late:
                self._record.not_measured[metric.resource] = NotMeasured(
                    what=metric.resource, why="libraries move it in a first life: run at least two cycles to judge it"
                )
        return [metric for metric in self._reader.metrics if metric not in late]

    def _missing(self, now: Reading) -> list[Excess]:
        return [item for start in self._baselines for item in missing(start.metrics, start.reading, now)]

    def _climb(self, *rungs: Rung) -> None:
        self._steps = self._reader.climb(self._missing, rungs, self._steps)


def _with_cached_pools(rows: list[_Row]) -> list[_Row]:
    """Report what torch's cache held in private pools with the rest of what it held on that card."""
    for pools in [each for each in rows if each[1].key.startswith(_OF_PRIVATE_POOLS)]:
        finding, metric = pools
        others = [each for each in rows if each is not pools and _is_cached_like(each[0], finding)]
        if finding.cause == "allocator-cache" and others:
            rows.remove(pools)
            rows[rows.index(others[0])] = (of_cached_pools(finding, others[0][0]), others[0][1])
        elif finding.cause == "allocator-cache":
            rows[rows.index(pools)] = (of_cached_pools(finding, None), metric)
    return rows


def _with_holder(leak: ItemLeak, context: Context) -> Finding:
    """Add who holds threads, processes, descriptors and the like, or the arrays that unexplained host memory is."""
    if leak.key in BELONGING:
        return with_holders(leak, context)
    if leak.key != "host-memory" or leak.finding.cause != "unknown":
        return leak.finding
    # It stays the same leak as in the lives before, of which only the level is known.
    marks = {name: getattr(leak.finding, name) for name in ("fingerprint", "former_fingerprint")}
    return msgspec.structs.replace(with_memory_holder(leak, context).finding, **marks)


def _marked(leak: ItemLeak) -> Finding:
    """Return a finding by the name for ever that it has, which of some is not made by the judge."""
    finding = leak.finding
    if leak.key not in _OF_ALL_LIVES:
        return finding
    facts = whereabouts(finding)
    mark = fingerprint_of_items(leak.key, leak.names, **facts, suspects=(finding.cause,))
    former = fingerprint(**facts, suspects=(finding.cause,))
    return msgspec.structs.replace(finding, fingerprint=mark, former_fingerprint=former if former != mark else "")


def _read_of(key: str) -> Items:
    return read_items()[key]


def _kind_of(finding: Finding) -> _Kind:
    return finding.resource, finding.device, finding.verdict == "native-held"


def less(finding: Finding, rest: Finding) -> Finding:
    """Return a finding with what is left of it; as it was where that is no less."""
    if (rest.bytes, rest.count) >= (finding.bytes, finding.count):
        return finding
    facts = {"bytes": rest.bytes, "count": rest.count, "holder": rest.holder}
    return restated_as(finding, rest, facts)


def _is_cached_like(finding: Finding, other: Finding) -> bool:
    """Return whether torch's cache on one card is the cause of both."""
    return finding.cause == "allocator-cache" and (finding.resource, finding.device) == (other.resource, other.device)


_OWN = ("lowtide.probes.", "lowtide.leakcheck.", "lowtide.reports.", "lowtide.pytest_plugin.")

MOST_TYPES = 12
"""Types in a table; those that grew most."""


class TypeCounts:
    """How many objects of each type there are at one moment."""

    def __init__(self, moment: str) -> None:
        self._moment = moment
        self._counts = _counts()

    def growth(self, until: str) -> tuple[TypeGrowth, ...]:
        """Return of which types there are more now: the program's own first, then those that grew most."""
        now = _counts()
        grown = {name: count - self._counts.get(name, 0) for name, count in now.items()}
        own = ("lowtide.engine.", *(f"{module.__name__}." for module in program_modules()))
        rows = sorted(
            (item for item in grown.items() if item[1] > 0),
            key=lambda item: (not item[0].startswith(own), -item[1], item[0]),
        )
        return tuple(
            TypeGrowth(type=name, since=self._moment, until=until, before=self._counts.get(name, 0), after=now[name])
            for name, _ in rows[:MOST_TYPES]
        )


def _counts() -> dict[str, int]:
    """Count objects by type, without what the checker itself makes and keeps for its report."""
    # Not at the top: only a program with tensors has a use for numpy.
    from lowtide.probes.objects.identities import identities, types_of
    from lowtide.probes.original_numpy import np

    objects = all_objects()
    # Counted by type first: a name is made for one object of each.
    _, places, numbers = np.unique(types_of(identities(objects)), return_index=True, return_counts=True)
    counts: Counter[str] = Counter()
    for place, number in zip(places.tolist(), numbers.tolist(), strict=True):
        counts[type_name(type(objects[place]))] += number
    return {name: count for name, count in counts.items() if not name.startswith(_OWN)}
