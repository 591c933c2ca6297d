"""From readings to findings: what is above its baseline, at which rung it came back, and what that says.

`Budget` limits the time for what can be left out (what a holder retains, remedies); a verdict is never left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from lowtide.leakcheck.judging.fingerprints import fingerprint, fingerprint_of_items
from lowtide.leakcheck.judging.ladder import ACTIONS, MEANINGS, LadderStep
from lowtide.leakcheck.judging.metrics import DRIVER_ADVICE, DRIVER_HOLDER, Metric, Reading
from lowtide.leakcheck.resources import resource_of
from lowtide.leakcheck.resources.resource import Rung
from lowtide.probes.originals import time
from lowtide.reports.schema import Cause, Finding, NotMeasured, Remedy, Return, Verdict
from lowtide.reports.sizes import first_of, format_amount
from lowtide.reports.statement import Note, StatedFinding, Statement

REMEDIES_SHARE = 4
"""How many times the budget of a test the remedies of a session may take: with the default of 30 s, 120 s."""

UNTRIED = "not tried: the time for remedies was over (--leakcheck-budget)"
"""How a finding says that nothing was tried to give it back."""


class Budget:
    """A number of seconds, counted from when it is made; without a limit by default."""

    def __init__(self, seconds: float = math.inf) -> None:
        self._until = time.monotonic() + seconds

    @property
    def is_spent(self) -> bool:
        """Return whether the time is over, so that nothing more is to be begun."""
        return time.monotonic() >= self._until

    def within(self, seconds: float) -> Budget:
        """Return a budget of so many seconds that ends with this one at the latest."""
        return Budget(min(seconds, self._until - time.monotonic()))


def untried(advice: str | None) -> str:
    """Return a finding's advice, with the remark that it was not tried."""
    return f"{advice} ({UNTRIED})" if advice else UNTRIED


FROZEN = "gc-frozen"
"""The key of the metric of frozen objects, which is a level and has no items."""

_SHOWN_NAMES = 3


def listed(key: str, names: Iterable[str]) -> str | None:
    """Return the first of some names as a finding's holder; None where there is none."""
    if key == FROZEN:
        return None
    return first_of(described(key, names), _SHOWN_NAMES) or None


def described(key: str, names: Iterable[str]) -> list[str]:
    """Return how a finding calls some things of a resource, sorted, by what the counters call them."""
    resource = resource_of(key)
    return sorted(names if resource is None else map(resource.describe, names))


Level = tuple[str, str, str, str]
"""What a metric without names counts: its resource, device, unit, and how a finding calls it."""


class Excess(msgspec.Struct, frozen=True):
    """How far one metric is above its baseline, in the metric's unit; None where it could not be read."""

    metric: Metric
    above: int | None

    @property
    def is_back(self) -> bool:
        """Whether it is known to be back."""
        return self.above is not None and self.above <= self.metric.tolerance


def excesses(metrics: Iterable[Metric], baseline: Reading, now: Reading) -> tuple[Excess, ...]:
    """Return how far each metric is above its baseline."""
    return tuple(Excess(metric, metric.above(baseline, now)) for metric in metrics)


def missing(metrics: Iterable[Metric], baseline: Reading, now: Reading) -> list[Excess]:
    """Return what is above its baseline, of what can be read."""
    return [item for item in excesses(metrics, baseline, now) if item.above is not None and not item.is_back]


class Judgement(msgspec.Struct, frozen=True):
    """What one climb of the ladder showed.

    Attributes:
        findings: what is a leak.
        returns: what came back later than at once.
        not_measured: what this machine does not say.
        metrics: the metric that each finding is about.
    """

    findings: tuple[Finding, ...]
    returns: tuple[Return, ...]
    not_measured: tuple[NotMeasured, ...]
    metrics: tuple[Metric, ...] = ()


def judge(
    metrics: Sequence[Metric],
    baseline: Reading,
    steps: Sequence[LadderStep[Reading]],
    *,
    stage: str,
    cycle: int,
    actions: Mapping[Rung, str] = ACTIONS,
) -> Judgement:
    """Judge a climb: a metric that is back at its rung is clean, one that is back later or never is a finding.

    Args:
        metrics: what is judged.
        baseline: what must be returned to.
        steps: the climb's readings, `raw` first.
        stage: where this was.
        cycle: which life, from 1.
        actions: what was done at each rung.
    """
    findings, returns, not_measured, judged = [], [], [], []
    table = [excesses(metrics, baseline, step.reading) for step in steps]
    for column, metric in enumerate(metrics):
        excess = [row[column] for row in table]
        if excess[0].above is None:
            not_measured.append(NotMeasured(what=_name(metric), why="this machine does not say"))
            continue
        back = next((turn for turn, item in enumerate(excess) if item.is_back), None)
        if back == 0:
            continue
        raw = excess[0].above
        if back is not None:
            returns.append(
                Return(
                    resource=metric.resource,
                    device=metric.device,
                    stage=stage,
                    cycle=cycle,
                    bytes=raw if metric.unit == "bytes" else 0,
                    rung=steps[back].rung.value,
                    seconds=sum(step.seconds for step in steps[: back + 1]),
                )
            )
            if steps[back].rung.order <= metric.rung.order:
                continue
        above: list[int] = []
        for item in excess:
            # What could be read before and cannot be read now does not count as released.
            above.append(above[-1] if item.above is None else item.above)
        findings.append(_finding(metric, baseline, steps, above, back, stage, actions))
        judged.append(metric)
    return Judgement(tuple(findings), tuple(returns), tuple(not_measured), tuple(judged))


def _finding(
    metric: Metric,
    baseline: Reading,
    steps: Sequence[LadderStep[Reading]],
    above: Sequence[int],
    back: int | None,
    stage: str,
    actions: Mapping[Rung, str],
) -> Finding:
    # What counts is what was left when the resource had to be back.
    due = max(turn for turn, step in enumerate(steps) if step.rung.order <= metric.rung.order)
    left = above[due]
    cause: Cause = metric.cause
    verdict: Verdict | None = metric.verdict
    remedy = advice = None
    notes: tuple[Note, ...] = ()
    of_rung = None
    if back is not None:
        rung = steps[back].rung
        meaning = MEANINGS[rung]
        of_rung = meaning.holder
        # The driver is said to hold what nothing that was tried gives back.
        cause = cause if cause not in ("unknown", "driver") else meaning.cause
        # That native code holds it stays true, whatever made that let go.
        verdict = verdict if verdict == "native-held" else meaning.verdict
        if rung in actions:
            came = above[back - 1] - above[back]
            remedy = Remedy(action=actions[rung], returns_bytes=_bytes(metric, came))
            notes = (Note(f"; {remedy.action} returns {format_amount(came, metric.unit)}"),)
    new = sorted(metric.new_items(baseline, steps[due].reading))
    holder = listed(metric.resource, new) or of_rung
    if cause == "library-workspace" and remedy is not None:
        holder = "workspaces of BLAS libraries"
    if cause == "driver" and remedy is None:
        holder, advice = holder or DRIVER_HOLDER, DRIVER_ADVICE
    elif (kind := resource_of(metric.key)) is not None:
        advice = kind.advice(new) or None
        if more := kind.remark(new):
            notes = (Note(more), *notes)
    elif cause == "native" and new:
        advice = f"release or deregister the memory before {stage} ends"
    things = tuple(described(metric.resource, new)) if new else ()
    mark, former = _fingerprints(metric, stage, cause, new)
    return StatedFinding(
        resource=metric.resource,
        cause=cause,
        bytes=_bytes(metric, left),
        count=left if metric.unit != "bytes" else 1,
        device=metric.device,
        stage=stage,
        statement=Statement(unit=metric.unit, what=_name(metric), things=things, notes=notes),
        fingerprint=mark,
        former_fingerprint=former if former != mark else "",
        verdict=verdict,
        holder=holder,
        remedy=remedy,
        advice=advice,
    )


def _fingerprints(metric: Metric, stage: str, cause: Cause, new: Sequence[str]) -> tuple[str, str]:
    """Return a finding's fingerprint, and the one without the names of its items."""
    facts: dict[str, Any] = {
        "resource": metric.resource,
        "device": metric.device,
        "stage": stage,
        "suspects": (metric.what, cause),
    }
    mark = fingerprint_of_items(metric.resource, new, **facts) if new else fingerprint(**facts)
    return mark, fingerprint(**facts, by_phase=True)


def named_amount(metric: Metric, amount: int) -> str:
    """Say how much of what a metric counts: `4.0 MiB of driver on cuda:0`, `3 threads`."""
    text = format_amount(amount, metric.unit)
    return f"{text} of {_name(metric)}" if metric.unit == "bytes" else text


def _bytes(metric: Metric, amount: int) -> int:
    return amount if metric.unit == "bytes" else 0


def _name(metric: Metric) -> str:
    where = f" on {metric.device}" if metric.device else ""
    return f"{metric.what or metric.resource}{where}"


def _weight(finding: Finding) -> tuple[bool, int, int]:
    return finding.remedy is not None, finding.bytes, finding.count


def one_for_each_level(findings: Iterable[Finding], level_of: Mapping[str, Level]) -> tuple[Finding, ...]:
    """Return findings about the same level as one, the largest with a remedy, in order of first appearance.

    A later reading of a level counts what earlier ones found, and may have seen it come back at another rung.

    Args:
        findings: of several lives.
        level_of: the level that findings are about, by their fingerprints; what has names is not among them.
    """
    groups: dict[object, Finding] = {}
    for finding in findings:
        level: object = level_of.get(finding.fingerprint, finding.fingerprint)
        known = groups.get(level)
        if known is None or _weight(finding) > _weight(known):
            groups[level] = finding
    return tuple(groups.values())


def grouped(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return findings with the same fingerprint as one, the largest with a remedy, in order of first appearance."""
    return one_for_each_level(findings, {})
