"""The judgement of an engine's shutdown: readings up the ladder, against the baselines of one life and of all.

They are read without what imports and libraries' first use have left.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from lowtide.leakcheck.findings.causes import BELONGING, with_holders
from lowtide.leakcheck.findings.empty_pools import of_cached_pools, of_empty_pools
from lowtide.leakcheck.findings.heap_file import HeapFile
from lowtide.leakcheck.findings.host_arrays import with_array_holder
from lowtide.leakcheck.findings.item_findings import ItemLeak
from lowtide.leakcheck.findings.life_findings import LeftoverTensors
from lowtide.leakcheck.findings.storage_holders import Context
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
from lowtide.leakcheck.judging.ladder import ACTIONS, LadderStep
from lowtide.leakcheck.judging.metrics import Metric, as_counted, shutdown_metrics
from lowtide.leakcheck.lives.life_record import LifeProbes, LifeRecord, ProcessState, is_reported
from lowtide.leakcheck.resources.first_use import JUDGED, LibraryItems
from lowtide.leakcheck.resources.resource import Rung
from lowtide.leakcheck.watching.import_watch import Imported
from lowtide.probes.heap.holders import sharing_walk
from lowtide.probes.host.counters import Counters
from lowtide.probes.host.makers import Makers
from lowtide.probes.objects.foreign import mro_of, namespace_of, type_name
from lowtide.probes.objects.listed import all_objects
from lowtide.probes.snapshot import Snapshot
from lowtide.reports.schema import Finding, NotMeasured, TypeGrowth
from lowtide.reports.statement import restated_as

_NO_SECOND_LIFE = "libraries move it in a first life, and no whole second life followed to compare it with"

_OF_PRIVATE_POOLS = "reserved "
"""The beginning of the keys of private pools."""

_OF_GROUPS = ("driver", "file-descriptors", "threads")
"""What a process group holds besides itself."""

Climb = Callable[
    [Callable[[Snapshot], Sequence[Excess]], Sequence[Rung], Sequence[LadderStep[Snapshot]]], list[LadderStep[Snapshot]]
]
"""Climbs some rungs after some steps, as long as something is missing."""


class ShutdownJudgement:
    """Judges the shutdowns of one run's lives, with the judge and the ladder that judge tests.

    Args:
        cycles: how many lives there are.
        record: takes the findings.
        metrics: what is judged.
        leftovers: follows the tensors.
        process: follows process groups and settings.
        climb: climbs the ladder.
        read: takes a snapshot after a shutdown.
        probes: know of things outside of this process, and who made what.
        tolerances: what one life may leave, by the metric's key, in place of the table's tolerance.
        heap: where the heap is kept in which the last life has left something; None: nowhere.
    """

    def __init__(
        self,
        cycles: int,
        record: LifeRecord,
        metrics: LifeMetrics,
        leftovers: LeftoverTensors,
        process: ProcessState,
        climb: Climb,
        read: Callable[[], Snapshot],
        probes: LifeProbes,
        tolerances: Mapping[str, int] | None,
        heap: HeapFile | None = None,
    ) -> None:
        self._heap = heap
        self._cycles = cycles
        self._record = record
        self._metrics = metrics
        self._leftovers = leftovers
        self._process = process
        self._climb = climb
        self._read = read
        self._probes = probes
        self._tolerances = tolerances or {}
        self._own_baseline: Snapshot | None = None
        self._types: TypeCounts | None = None
        self._first_baseline: Snapshot | None = None
        self._warm_baseline: Snapshot | None = None
        # What the first life left, and whether a whole one has followed that says how much of that was first use.
        self._first_end: Snapshot | None = None
        self._has_compared = False
        # Whether the run ends with the life that is judged.
        self._is_last = False
        self.is_concluded = False
        """Whether it is known what all lives together have left."""
        self.excesses: list[tuple[Excess, ...]] = []
        """How far each metric was above its life's own baseline, after each shutdown so far."""

    def begin(self, cycle: int, baseline: Snapshot) -> None:
        """Begin a life, from this reading."""
        self._types = TypeCounts(f"before cycle {cycle}")
        self._own_baseline = baseline
        if cycle == 1:
            self._first_baseline = baseline
        elif cycle == 2:
            self._warm_baseline = baseline

    def settle(self, cycle: int, baseline: Snapshot, *, failed: bool) -> list[LadderStep[Snapshot]]:
        """Take the readings right after a shutdown: at once, waited, collected; `failed`: the run ends with it."""
        self._is_last = cycle == self._cycles or failed
        return self._climbed(self._judged_in(cycle), self._baselines(baseline), (Rung.SETTLE, Rung.COLLECT))

    def leaves(self, cycle: int, baseline: Snapshot, steps: Sequence[LadderStep[Snapshot]]) -> bool:
        """Return whether something has not come back after these steps."""
        return bool(self._missing(self._judged_in(cycle), self._baselines(baseline), steps[-1].reading))

    def __call__(
        self, engine: object, cycle: int, baseline: Snapshot, steps: list[LadderStep[Snapshot]], *, failed: bool
    ) -> None:
        """Climb on, and judge; the engine object is held meanwhile, as whoever called shutdown holds it.

        Args:
            engine: the one that was shut down.
            cycle: which life this was.
            baseline: the reading from before it.
            steps: the climb so far, of `settle`.
            failed: whether the run ends here.
        """
        metrics, baselines = self._judged_in(cycle), self._baselines(baseline)
        self._metrics.note_first_use(cycle, baseline, steps[-1].reading)
        self.excesses.append(excesses(metrics, baseline, steps[-1].reading))
        self._first_end = steps[-1].reading if cycle == 1 else self._first_end
        self._has_compared |= cycle > 1 and not failed
        is_last = self._is_last = cycle == self._cycles or failed
        left = self._missing(metrics, baselines, steps[-1].reading)
        devices = {item.metric.device for item in left if item.metric.resource == "tensors"}
        actions = dict(ACTIONS)
        if is_last:
            self._record.type_growth = () if self._types is None else self._types.growth("after shutdown")
            of_tensors = self._conclude(engine, cycle, devices, steps, actions, metrics, baselines)
        else:
            # What would give it back is tried after the last life only: until then it must show whether it adds up.
            of_tensors = self._leftovers.explain(engine, cycle, devices)
            steps[:] = self._climbed(metrics, baselines, (Rung.EMPTY_CACHE,), steps)
        explained = {finding.device for finding in of_tensors}
        for start in baselines:
            judgement = self._judged(engine, cycle, start, metrics, steps, actions, is_last=is_last)
            # Whether a tensor that nobody sees keeps an arena is known when the heap is thawed, after the last life.
            hidden = is_last and any(finding.verdict == "frozen-garbage" for finding in of_tensors)
            found = [finding for finding in judgement.findings if not is_reported(finding, explained)]
            if hidden or (not is_last and any(finding.resource == "gc-frozen" for finding in found)):
                found = [finding for finding in found if finding.resource != "arena"]
            self._record.findings += found
            if start is baseline:
                self._record.note_returns(judgement, cycle, explained)
            self._record.note_levels(judgement)
        if is_last:
            self._record.findings += of_tensors
        self._judge_process(metrics, baselines, is_last=is_last)
        self.is_concluded = is_last

    def not_compared(self, deep_sleeps: Collection[str]) -> list[NotMeasured]:
        """Return what the first life left of what libraries move in it, where no second one has shown what is theirs.

        Args:
            deep_sleeps: the sleeps in which a driver must count no more than before create.
        """
        if self._cycles == 1 or self._has_compared or self._first_baseline is None or self._first_end is None:
            return []
        late = [metric for metric in self._metrics.all() if metric.first_use]
        left = [
            f"{named_amount(item.metric, item.above)} after the shutdown of cycle 1"
            for item in missing(late, self._first_baseline, self._first_end)
            if item.above is not None
        ]
        slept = dict.fromkeys(lived.name for lived in self._record.stages if lived.name in deep_sleeps)
        left += [f"the driver's level on {self._metrics.device} in {name}" for name in slept]
        return [NotMeasured(what=what, why=_NO_SECOND_LIFE) for what in left]

    def _judged(
        self,
        engine: object,
        cycle: int,
        start: Snapshot,
        metrics: Sequence[Metric[Snapshot]],
        steps: Sequence[LadderStep[Snapshot]],
        actions: dict[Rung, str],
        *,
        is_last: bool,
    ) -> Judgement:
        """Judge what is left since one baseline, with its holders."""
        judged = self._metrics_since(start, metrics)
        judgement = judge(judged, start, steps, stage="shutdown", cycle=cycle, actions=actions)
        judgement = with_pools(judgement, start, steps[-1].reading, lambda: self._leftovers.context(engine))
        named = [
            self._probes.explained(finding, metric.new_items(start, steps[-1].reading).keys())
            for finding, metric in zip(judgement.findings, judgement.metrics, strict=True)
        ]
        judgement = dataclasses.replace(judgement, findings=tuple(named))
        if not is_last:
            return judgement
        context = dataclasses.replace(self._leftovers.context(engine), made_at=self._probes.makers.place_of)
        judgement = _with_holders(judgement, start, steps[-1].reading, context)
        return with_arrays(judgement, context)

    def _conclude(
        self,
        engine: object,
        cycle: int,
        devices: set[str],
        steps: list[LadderStep[Snapshot]],
        actions: dict[Rung, str],
        metrics: Sequence[Metric[Snapshot]],
        baselines: Sequence[Snapshot],
    ) -> list[Finding]:
        """Climb on after the last life, single holders before whole caches; add to `steps` and `actions`."""
        self._leftovers.read(Rung.RAW)
        if self._missing(metrics, baselines, steps[-1].reading) and self._leftovers.thaw():
            steps.append(LadderStep(Rung.UNFREEZE, self._read(), 0.0))
        steps[:] = self._climbed(metrics, baselines, (Rung.EMPTY_CACHE,), steps)
        if self._heap is not None:
            self._keep_heap(self._heap, engine, self._missing(metrics, baselines, steps[-1].reading))
        findings, cuts = self._leftovers.conclude(engine, cycle, devices)
        if cuts:
            actions[Rung.CLEAR_CACHES] = "; ".join(cuts)
            steps.append(LadderStep(Rung.CLEAR_CACHES, self._read(), 0.0))
        above = tuple(rung for rung in Rung if rung.order > max(steps[-1].rung.order, Rung.EMPTY_CACHE.order))
        steps[:] = self._climbed(metrics, baselines, above, steps)
        return findings

    def _keep_heap(self, file: HeapFile, engine: object, missing: Sequence[Excess]) -> None:
        """Keep the heap if something is left, before anything is changed to give it back."""
        context, storages = self._leftovers.context(engine), self._leftovers.left
        if missing or storages:
            with sharing_walk() as walk:
                file.keep(walk, born=context.born, storages=storages, items={}, roots=context.roots)

    def _judge_process(
        self, metrics: Sequence[Metric[Snapshot]], baselines: Sequence[Snapshot], *, is_last: bool
    ) -> None:
        """Process groups and settings, and what went with the groups."""
        changed = self._process.findings("shutdown", remedies=is_last)
        groups = next((finding for finding in changed if finding.resource == "process-groups"), None)
        if groups is not None:
            # One remedy ends those of all lives.
            self._record.findings = [
                finding for finding in self._record.findings if finding.resource != "process-groups"
            ]
        if groups is not None and groups.changed:
            changed[changed.index(groups)] = self._with_what_went_too(groups, metrics, baselines)
        self._record.findings += changed

    def _with_what_went_too(
        self, groups: Finding, metrics: Sequence[Metric[Snapshot]], baselines: Sequence[Snapshot]
    ) -> Finding:
        """Make what is back now that process groups are destroyed a part of their finding: it was theirs.

        Of what came back in part, the rest is reported.
        """
        steps = [LadderStep(Rung.RAW, self._read(), 0.0)]
        of_groups = [metric for metric in metrics if metric.resource in _OF_GROUPS]
        left: dict[tuple[str, str], Finding] = {}
        for start in baselines:
            judged = judge(self._metrics_since(start, of_groups), start, steps, stage="shutdown", cycle=1)
            left |= {(finding.resource, finding.device): finding for finding in judged.findings}
        back, kept = [], []
        for finding in self._record.findings:
            rest = left.get((finding.resource, finding.device))
            if finding.resource not in _OF_GROUPS:
                kept.append(finding)
            elif rest is None:
                back.append(finding)
            else:
                kept.append(less(finding, rest))
        self._record.findings = kept
        return msgspec.structs.replace(groups, parts=one_for_each_level(grouped(back), self._record.level_of))

    def _baselines(self, baseline: Snapshot) -> list[Snapshot]:
        """Return what a life must return to at its end: its own beginning, and after the last life that of all of them.

        What each life leaves may be within the tolerance; what all of them leave must be too.
        """
        earlier = [self._first_baseline, self._warm_baseline] if self._is_last else []
        return [baseline, *(start for start in earlier if start is not None and start is not baseline)]

    def _judged_in(self, cycle: int) -> tuple[Metric[Snapshot], ...]:
        """Return what can be judged in this life: in the first, not what libraries move in it."""
        metrics = self._metrics.all()
        if cycle > 1:
            return metrics
        late = [metric for metric in metrics if metric.first_use]
        if self._cycles == 1:
            for metric in late:
                self._record.not_measured[metric.resource] = NotMeasured(
                    what=metric.resource, why="libraries move it in a first life: run at least two cycles to judge it"
                )
        return tuple(metric for metric in metrics if not metric.first_use)

    def _metrics_since(self, start: Snapshot, metrics: Sequence[Metric[Snapshot]]) -> Sequence[Metric[Snapshot]]:
        """Return what can be judged from a baseline on: from the first one, not what libraries move in a first life."""
        if start is self._own_baseline:
            # Not where several lives add up: their noise does, too.
            own = self._tolerances
            metrics = [
                dataclasses.replace(metric, tolerance=own.get(metric.key, metric.tolerance)) for metric in metrics
            ]
        if start is self._first_baseline:
            return [metric for metric in metrics if not metric.first_use]
        return metrics

    def _missing(
        self, metrics: Sequence[Metric[Snapshot]], baselines: Sequence[Snapshot], now: Snapshot
    ) -> list[Excess]:
        return [item for start in baselines for item in missing(self._metrics_since(start, metrics), start, now)]

    def _climbed(
        self,
        metrics: Sequence[Metric[Snapshot]],
        baselines: Sequence[Snapshot],
        rungs: Sequence[Rung],
        steps: Sequence[LadderStep[Snapshot]] = (),
    ) -> list[LadderStep[Snapshot]]:
        return self._climb(lambda now: self._missing(metrics, baselines, now), rungs, steps)


def with_pools(judgement: Judgement, start: Snapshot, now: Snapshot, context: Callable[[], Context]) -> Judgement:
    """Add who holds the private pools of torch's allocator; those that its cache held are reported with the rest."""
    rows = list(zip(judgement.findings, judgement.metrics, strict=True))
    for pools in [each for each in rows if each[1].key.startswith(_OF_PRIVATE_POOLS)]:
        finding, metric = pools
        others = [each for each in rows if each is not pools and _is_cached_like(each[0], finding)]
        if left := metric.new_items(start, now):
            place = rows.index(pools)
            rows[place : place + 1] = [(each, metric) for each in of_empty_pools(finding, metric.key, left, context())]
        elif finding.cause == "allocator-cache" and others:
            rows.remove(pools)
            rows[rows.index(others[0])] = (of_cached_pools(finding, others[0][0]), others[0][1])
        elif finding.cause == "allocator-cache":
            rows[rows.index(pools)] = (of_cached_pools(finding, None), metric)
    findings, metrics = zip(*rows, strict=True) if rows else ((), ())
    return dataclasses.replace(judgement, findings=findings, metrics=metrics)


def _with_holders(judgement: Judgement, start: Snapshot, now: Snapshot, context: Context) -> Judgement:
    """Add who holds the threads, processes, descriptors and the like that are left."""
    rows = list(zip(judgement.findings, judgement.metrics, strict=True))
    if not any(metric.key in BELONGING for _, metric in rows):
        return judgement
    with sharing_walk() as walk:
        context = dataclasses.replace(context, walk=walk)
        told = [
            with_holders(ItemLeak(finding, metric.key, metric.new_items(start, now), 0), context)
            if metric.key in BELONGING
            else finding
            for finding, metric in rows
        ]
    return dataclasses.replace(judgement, findings=tuple(told))


def with_arrays(judgement: Judgement, context: Context) -> Judgement:
    """Add who holds the arrays that the host memory is which nothing else explains."""
    findings = []
    for finding in judgement.findings:
        if finding.resource == "host-memory" and finding.cause == "unknown":
            named = with_array_holder(ItemLeak(finding, finding.resource, {}, 0), context).finding
            # It stays the same leak as in the lives before, of which only the level is known.
            mark, former = finding.fingerprint, finding.former_fingerprint
            findings.append(msgspec.structs.replace(named, fingerprint=mark, former_fingerprint=former))
        else:
            findings.append(finding)
    return dataclasses.replace(judgement, findings=tuple(findings))


def less(finding: Finding, rest: Finding) -> Finding:
    """Return a finding with what is left of it; as it was where that is no less."""
    if (rest.bytes, rest.count) >= (finding.bytes, finding.count):
        return finding
    facts = {"bytes": rest.bytes, "count": rest.count, "holder": rest.holder}
    return restated_as(finding, rest, facts)


def _is_cached_like(finding: Finding, other: Finding) -> bool:
    """Return whether torch's cache on one card is the cause of both."""
    return finding.cause == "allocator-cache" and (finding.resource, finding.device) == (other.resource, other.device)


class LifeMetrics:
    """The metrics of a run's lives, and what is known of imports and libraries by which they are read.

    Args:
        device: "cpu" or "cuda:N".
        makers: knows which code made the threads, processes and descriptors.
        imported: what imported modules made and changed.
        leftovers: knows the tensors that imported modules hold.
    """

    def __init__(
        self,
        device: str,
        makers: Makers,
        imported: Imported,
        leftovers: LeftoverTensors,
    ) -> None:
        self._library_items = LibraryItems(makers)
        self._imported = imported
        self._leftovers = leftovers
        self.device = device
        # Bytes of imported modules' tensors by device, and by how much imports raised each level, at each snapshot.
        self._imported_bytes: dict[float, dict[str, int]] = {}
        # By resource, what libraries have from their first use, with the life.
        self._first_use: dict[str, dict[str, int]] = {}
        self.used_before: dict[str, set[int]] = {}
        """By resource, the lives that left some of what libraries had from their first use and that is more since."""
        self.once_so_far: tuple[NotMeasured, ...] = ()
        """What to say of a first use as long as no life has followed."""

    def all(self) -> tuple[Metric[Snapshot], ...]:
        """Return all that is judged, without what libraries have from their first use and what imports left."""
        return tuple(map(self._without_first_use, self._without_what_imports_left()))

    def note_imports(self, snapshot: Snapshot) -> None:
        """Note how much of a snapshot, taken just now, is of imports."""
        found = self._leftovers.imported_bytes()
        # Tensors are counted by themselves.
        of_host = max(0, self._imported.growth("host-memory") - found.get("cpu", 0))
        of_driver = self._imported.growth(f"driver {self.device}")
        levels = {**found, "host-memory cpu": of_host, f"driver {self.device}": of_driver}
        self._imported_bytes[snapshot.taken_at] = levels

    def note_first_use(self, cycle: int, baseline: Snapshot, now: Snapshot) -> None:
        """Tell apart what a library made and keeps: it is a leak once a later life makes more of it."""
        new: dict[str, dict[str, int]] = {}
        there: dict[str, dict[str, int]] = {}
        for metric in self._without_what_imports_left():
            key: str = metric.resource
            if key in JUDGED and metric.items is not None:
                new[key] = {as_counted(key, name): size for name, size in metric.new_items(baseline, now).items()}
                there[key] = {as_counted(key, name): size for name, size in metric.items(now).items()}
        tensors = now.tensors.on("cpu").ranges
        found = self._library_items.sort(new, Counters(there, {}, {}), f"cycle {cycle}", tensors)
        for key in JUDGED:
            known = self._first_use.setdefault(key, {})
            for name in found.excused.get(key, ()):
                known.setdefault(name, cycle)
            for name in {name for names in found.earlier.get(key, {}).values() for name in names if name in known}:
                self.used_before.setdefault(key, set()).add(known.pop(name))
        self.once_so_far = found.listed

    def _without_first_use(self, metric: Metric[Snapshot]) -> Metric[Snapshot]:
        """Return a metric of what is counted without what libraries have from their first use."""
        if metric.resource not in JUDGED or metric.items is None:
            return metric
        return _without(metric, metric.items, lambda: self._first_use.get(metric.resource, ()))

    def _without_what_imports_left(self) -> list[Metric[Snapshot]]:
        return list(map(self._without_imports, shutdown_metrics(self.device)))

    def _without_imports(self, metric: Metric[Snapshot]) -> Metric[Snapshot]:
        """Return a metric without what modules made for themselves when a life imported them.

        That is tensors that Python holds, what has a name, and by how much the levels of the process rose.
        """
        if metric.items is not None:
            return _without(metric, metric.items, lambda: self._imported.names(metric.resource))
        if metric.resource == "tensors" and metric.unit == "bytes" and metric.cause == "unknown":
            key = metric.device
        elif metric.resource in ("host-memory", "driver"):
            key = f"{metric.resource} {metric.device}"
        else:
            return metric

        def read(snapshot: Snapshot) -> int | None:
            level = metric.read(snapshot)
            return None if level is None else level - self._imported_bytes.get(snapshot.taken_at, {}).get(key, 0)

        return dataclasses.replace(metric, read=read)


def _without(
    metric: Metric[Snapshot], items: Callable[[Snapshot], Mapping[str, int]], names: Callable[[], Collection[str]]
) -> Metric[Snapshot]:
    """Return a metric of what is counted without what has some names, as the counters have them."""

    def left(snapshot: Snapshot) -> dict[str, int]:
        known = names()
        found = items(snapshot).items()
        return {name: size for name, size in found if as_counted(metric.resource, name) not in known}

    return dataclasses.replace(metric, read=lambda snapshot: sum(left(snapshot).values()), items=left)


_OWN = ("lowtide.probes.", "lowtide.leakcheck.", "lowtide.reports.", "lowtide.pytest_plugin.")

MOST_TYPES = 12
"""Types in a table; those that grew most."""


class TypeCounts:
    """How many objects of each type there are at one moment.

    Args:
        moment: its name.
    """

    def __init__(self, moment: str) -> None:
        self._moment = moment
        self._counts = _counts()

    def growth(self, until: str) -> tuple[TypeGrowth, ...]:
        """Of which types there are more now, those that grew most first.

        Args:
            until: the name of this moment.
        """
        now = _counts()
        grown = {name: count - self._counts.get(name, 0) for name, count in now.items()}
        rows = sorted((item for item in grown.items() if item[1] > 0), key=lambda item: (-item[1], item[0]))
        return tuple(
            TypeGrowth(type=name, since=self._moment, until=until, before=self._counts.get(name, 0), after=now[name])
            for name, _ in rows[:MOST_TYPES]
        )


def _counts() -> dict[str, int]:
    """Without what the checker itself makes and keeps for its report."""
    # Not at the top: only a program with tensors has a use for numpy.
    from lowtide.probes.objects.identities import identities, types_of
    from lowtide.probes.original_numpy import np

    objects = all_objects()
    # Counted by type first: a name is made for one object of each.
    _, places, numbers = np.unique(types_of(identities(objects)), return_index=True, return_counts=True)
    counts: Counter[str] = Counter()
    for place, number in zip(places.tolist(), numbers.tolist(), strict=True):
        counts[_name(objects[place])] += number
    return {name: count for name, count in counts.items() if not name.startswith(_OWN)}


def _name(item: object) -> str:
    """Return module and name of an object's class, which is asked for them unless its metaclass may answer anything."""
    cls = type(item)
    return type_name(cls) if _answers_itself(cls) else f"{cls.__module__}.{cls.__name__}"


def _answers_itself(cls: type) -> bool:
    """Whether a class's metaclass has code of its own for attributes that every class has."""
    own = [namespace_of(base) for base in mro_of(type(cls)) if base is not type and base is not object]
    return any(
        "__getattribute__" in names or "__name__" in names or type(names.get("__module__", "")) is not str
        for names in own
    )
