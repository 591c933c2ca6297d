"""What a run has measured and found so far, and what the report says of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from lowtide.leakcheck.findings.causes import CommonCause, by_cause
from lowtide.leakcheck.growth.series import trend_of
from lowtide.leakcheck.judging.judge import Judgement, Level, grouped, one_for_each_level
from lowtide.leakcheck.judging.metrics import NOT_OF_PYTHON, Metric
from lowtide.leakcheck.lives.script import told
from lowtide.probes.device.allocations import Outside
from lowtide.probes.snapshot import Snapshot
from lowtide.reports.from_snapshot import LedgerBase, to_ledger, to_readings
from lowtide.reports.outcomes import judged_as
from lowtide.reports.processes.stage_processes import ProcessStage
from lowtide.reports.schema import Finding, NotMeasured, Outcome, OutOfMemory, Return, Stage, Subject, TypeGrowth
from lowtide.reports.sizes import format_amount


class Lived(msgspec.Struct, frozen=True):
    """One stage that was gone through: its tokens, the bytes of weights that it had to move, and what was there."""

    name: str
    cycle: int
    seconds: float
    before: Snapshot
    after: Snapshot
    tokens: int = 0
    moved: int = 0
    processes: tuple[ProcessStage, ...] = ()


class _Things(msgspec.Struct, frozen=True):
    """Things of one resource by their names, and the fingerprints of the findings that are about some of them."""

    key: str
    names: frozenset[str]
    marks: frozenset[str]


class LifeRecord:
    """Keeps what was measured and found.

    Attributes:
        whole: how many lives were gone through to their end, and judged.
        out_of_memory: what there was when memory was not enough; None if it was.
        causes: what findings have in common with others, by their fingerprints.
    """

    def __init__(self, name: str, device: str, cycles: int) -> None:
        self._name = name
        self._device = device
        self._cycles = cycles
        self.whole = 0
        self.out_of_memory: OutOfMemory | None = None
        self.stages: list[Lived] = []
        self.findings: list[Finding] = []
        self.returns: list[Return] = []
        self.not_measured: dict[str, NotMeasured] = {}
        self.level_of: dict[str, Level] = {}
        self.causes: dict[str, CommonCause | None] = {}
        self.type_growth: tuple[TypeGrowth, ...] = ()
        # Bytes that no probe explained before the first life, and how many more after it, by device.
        self._context: dict[str, int] = {}
        self._libraries: dict[str, int] = {}
        # What others than torch had asked the driver for before the first life, where it lists that.
        self._outside: Mapping[str, Outside] = {}
        # Of what is counted and not followed one by one: in which lives there was more of it at the end.
        self._left_in: dict[str, list[int]] = {}
        # Of those, how many lives came before the first in which it is judged.
        self._unjudged: dict[str, int] = {}
        self._things: list[_Things] = []
        # What there was before the latest life, and how many stages had been gone through then.
        self._begun: tuple[int, dict[str, int]] = (0, {})

    def note_baseline(self, cycle: int, baseline: Snapshot) -> None:
        """Note what nothing explains before a first life as the process's; before a second also what libraries took."""
        self._begun = (len(self.stages), sizes_of(baseline, self._device))
        if cycle == 1:
            self._context, self._outside = self._unexplained(baseline), baseline.outside
        elif cycle == 2:
            unexplained = self._unexplained(baseline)
            self._libraries = {device: max(0, left - self._context[device]) for device, left in unexplained.items()}

    def sizes(self) -> dict[str, int]:
        """Return the bytes at the latest reading, by name: after the last stage, or before the life that begins."""
        stages, begun = self._begun
        if stages == len(self.stages):
            return begun
        return sizes_of(self.stages[-1].after, self._device, self.stages[-1].processes)

    def note_returns(self, judgement: Judgement, cycle: int, explained: Collection[str]) -> None:
        """Note what came back after a life and at which rung, and in which lives each finding was left."""
        self.returns += [item for item in judgement.returns if not is_reported(item, explained)]
        offset = 1 if self._cycles > 1 else 0
        for finding, metric in zip(judgement.findings, judgement.metrics, strict=True):
            late = offset if metric.first_use else 0
            self._left_in.setdefault(finding.fingerprint, []).append(cycle - late)
            self._unjudged[finding.fingerprint] = late

    def note_levels(self, judgement: Judgement) -> None:
        """Note which findings are of the same level, and what could not be judged."""
        for finding, metric in zip(judgement.findings, judgement.metrics, strict=True):
            if not metric.is_named:
                level = (metric.resource, metric.device, metric.unit, metric.what)
                self.level_of[finding.fingerprint] = level
        self.not_measured.update({item.what: item for item in judgement.not_measured})

    def note_things(self, finding: Finding, metric: Metric, names: Collection[str]) -> None:
        """Note what a finding is about: what all lives have left has what each has, and is one finding with it."""
        things = _Things(metric.key, frozenset(names), frozenset({finding.fingerprint}))
        same = [each for each in self._things if each.key == metric.key and each.names & things.names]
        for each in same:
            things = _Things(metric.key, things.names | each.names, things.marks | each.marks)
        self._things = [*(each for each in self._things if each not in same), things]
        level = (metric.resource, metric.device, metric.unit, min(things.names, default=""))
        self.level_of.update(dict.fromkeys(things.marks if things.names else (), level))

    def note_preserved(self, life: object, *, elsewhere: bool) -> Mapping[str, Any]:
        """Note what a life says must survive a sleep; where none of it is in any process, the report says so."""
        preserved = told(life, "preserved")
        if not (preserved or elsewhere) and hasattr(life, "preserved"):
            what = "contents after a wake"
            why = "the engine announces no tensors in any process; the tokens after a wake are compared"
            self.not_measured[what] = NotMeasured(what=what, why=why)
        return preserved

    def subject(
        self, failure: str, more_not_measured: Sequence[NotMeasured], used_before: dict[str, set[int]]
    ) -> Subject:
        """Return what the report says.

        Args:
            failure: why the run ended early; empty where it did not.
            more_not_measured: besides what was noted.
            used_before: by resource, the lives that left what libraries had from their first use and is more since.
        """
        distinct = one_for_each_level(grouped(self.findings), self.level_of)
        findings = tuple(self._with_trend(finding, used_before) for finding in distinct)
        findings = by_cause(findings, {id(finding): self.causes.get(finding.fingerprint) for finding in findings})
        subject = self._judged(findings, more_not_measured, self.latest_stages(len(self.stages)))
        if not failure:
            return subject
        if self.whole:
            judged = f"{format_amount(self.whole, 'whole cycles')} {'was' if self.whole == 1 else 'were'} judged"
            failure = f"{failure}; {judged}" + ("" if findings else ", and everything that was judged came back")
        outcome: Outcome = "leak" if findings else "error"
        return msgspec.structs.replace(subject, outcome=outcome, reason=failure, out_of_memory=self.out_of_memory)

    def subject_of_latest(self, of_tensors: Sequence[Finding], more_not_measured: Sequence[NotMeasured]) -> Subject:
        """Return what is known after a life that others follow, with the stages of that life alone.

        Args:
            of_tensors: findings that are among those of the whole run only after its last life.
            more_not_measured: besides what was noted.
        """
        findings = one_for_each_level(grouped((*self.findings, *of_tensors)), self.level_of)
        return self._judged(findings, more_not_measured, self.latest_stages(len(self.stages) - self._begun[0]))

    def _judged(
        self, findings: tuple[Finding, ...], more_not_measured: Sequence[NotMeasured], stages: tuple[Stage, ...]
    ) -> Subject:
        not_measured = (*self.not_measured.values(), *more_not_measured)
        outcome, reason = judged_as("leak" if findings else "clean", not_measured)
        return Subject(
            id=self._name,
            outcome=outcome,
            reason=reason,
            stages=stages,
            findings=findings,
            returns=tuple(self.returns),
            not_measured=not_measured,
            type_growth=self.type_growth if findings else (),
        )

    def latest_stages(self, most: int) -> tuple[Stage, ...]:
        """Return the last stages that have ended, as a report has them."""
        first = max(0, len(self.stages) - most)
        return tuple(
            self._stage(lived, follows=turn > first and lived.before is self.stages[turn - 1].after)
            for turn, lived in enumerate(self.stages[first:], first)
        )

    def _with_trend(self, finding: Finding, used_before: dict[str, set[int]]) -> Finding:
        mark = finding.fingerprint
        level = self.level_of.get(mark, mark)
        same = [other for other in self._left_in if self.level_of.get(other, other) == level]
        if finding.trend is not None or not same:
            return finding
        born_in = {turn for other in same for turn in self._left_in[other]}
        born_in |= used_before.get(finding.resource, set())
        return msgspec.structs.replace(finding, trend=trend_of(born_in, self.whole - self._unjudged[same[0]]))

    def _unexplained(self, snapshot: Snapshot) -> dict[str, int]:
        known = {device: to_ledger(snapshot, LedgerBase(device, 0)).unexplained for device in ("cpu", self._device)}
        return {device: size for device, size in known.items() if size is not None}

    def _bases(self, cycle: int) -> list[LedgerBase]:
        devices = ["cpu"] if self._device == "cpu" else [self._device, "cpu"]
        late = self._libraries if cycle > 1 else {}
        return [
            LedgerBase(device, self._context.get(device, 0), late.get(device, 0), self._outside.get(device))
            for device in devices
        ]

    def _stage(self, lived: Lived, *, follows: bool) -> Stage:
        """Return one stage as a report has it; one that follows another leaves out the ledgers that it begins with."""
        bases = self._bases(lived.cycle)
        return Stage(
            name=lived.name,
            cycle=lived.cycle,
            seconds=lived.seconds,
            before=to_readings(lived.before, self._device, () if follows else bases),
            after=to_readings(lived.after, self._device, bases),
            tokens_per_second=lived.tokens / lived.seconds if lived.tokens else None,
            bytes_per_second=lived.moved / lived.seconds if lived.moved else None,
            processes=lived.processes,
        )


def sizes_of(snapshot: Snapshot, device: str, processes: Sequence[ProcessStage] = ()) -> dict[str, int]:
    """Return the bytes to watch a life by, by name.

    Those mapped by each arena in all of the engine's processes, what the other processes hold, what the driver counts
    for this one where it is asked, and this process's resident memory.
    """
    sizes: dict[str, int] = {}
    arenas = [(pool.tag, pool.mapped) for pool in snapshot.pools if pool.kind == "arena" and pool.device == device]
    arenas += [item for each in processes for tags in each.arenas.values() for item in tags.items()]
    held = [(f"arena {tag}", size) for tag, size in arenas]
    held += [(f"in {each.process.name}", each.bytes) for each in processes]
    for name, size in held:
        sizes[name] = sizes.get(name, 0) + size
    driver = snapshot.driver_bytes(device)
    if driver is not None:
        sizes[f"driver, {device}"] = driver
    sizes["RSS"] = snapshot.host.rss
    return sizes


def is_reported(item: Finding | Return, devices: Collection[str]) -> bool:
    """Return whether it is about tensors, and those on its device are reported one by one."""
    is_plain = item.resource == "tensors" and item.bytes > 0 and getattr(item, "verdict", None) not in NOT_OF_PYTHON
    return is_plain and item.device in devices
