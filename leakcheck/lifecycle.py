"""Drives an engine through its life, reads between the stages, and judges."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from lowtide.leakcheck import contract
from lowtide.leakcheck.judge import excesses, grouped, judge
from lowtide.leakcheck.ladder import Rung, Step, climb, release
from lowtide.leakcheck.metrics import Metric, shutdown_metrics
from lowtide.leakcheck.readings import to_readings
from lowtide.probes.device.driver import Driver
from lowtide.probes.ledger import LedgerBase, base_from
from lowtide.probes.snapshot import Snapshot, take_snapshot
from lowtide.reports.schema import Finding, NotMeasured, Outcome, Return, Stage, Subject

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup

SCRIPT = ("create", "infer", "sleep(1)", "wake", "infer", "sleep(2)", "wake", "infer", "shutdown")
"""One whole life."""


class Life(Protocol):
    """An engine that can be driven through `SCRIPT`; new ones are made for every life."""

    def create(self) -> None:
        """Take memory and be ready."""

    def infer(self) -> Sequence[Sequence[int]]:
        """Generate for a fixed set of prompts; the new tokens of each."""

    def sleep(self, level: int) -> None:
        """Give device memory back until `wake`."""

    def wake(self) -> None:
        """Take all of it again."""

    def shutdown(self) -> None:
        """Give everything back; legal at any time."""


@dataclass(frozen=True)
class Event:
    """What a listener hears before each stage: how far the run is."""

    cycle: int
    cycles: int
    stage: str
    done: int
    total: int


class LifecycleRun:
    """One run of `cycles` lives, one after the other in this process; keeps what it has when it is interrupted.

    Args:
        name: of the subject in the report.
        make: makes the engine of one life; takes no memory yet.
        device: "cpu" or "cuda:N", where the engine keeps its memory.
        driver: whom to ask for the card's figures.
        cycles: how many lives; the first of several also loads the libraries, and is judged without what they move.
        listener: hears of each stage before it starts.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Life],
        *,
        device: str,
        driver: Driver,
        cycles: int,
        listener: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self._name = name
        self._make = make
        self._device = device
        self._driver = driver
        self._cycles = cycles
        self._listener = listener
        self._indices = () if device == "cpu" else (int(device.partition(":")[2] or 0),)
        self._stages: list[tuple[str, int, float, Snapshot, Snapshot, int, int]] = []
        self._findings: list[Finding] = []
        self._returns: list[Return] = []
        self._not_measured: dict[str, NotMeasured] = {}
        self._libraries: dict[str, int] = {}
        self._context: dict[str, int] = {}
        self._warm_baseline: Snapshot | None = None
        self._expected: Sequence[Sequence[int]] | None = None
        self._cycle = 0
        self._failure = ""
        self.interrupted = False

    def run(self) -> Subject:
        """Live all lives; an error or Ctrl-C ends the run early, with the engine shut down and what there is kept."""
        try:
            self._open_device()
            for cycle in range(1, self._cycles + 1):
                self._live(cycle)
                if self._failure:
                    break
        except KeyboardInterrupt:
            # Outside the engine's own stages: it is shut down already, or was never made.
            self._interrupt()
        return self._subject()

    def _open_device(self) -> None:
        """Make the card's context before the first reading, so that it is a line of its own in the ledger."""
        if self._device != "cpu":
            sys.modules["torch"].cuda.synchronize(self._device)

    def _live(self, cycle: int) -> None:
        self._cycle = cycle
        # What an earlier life left to the collector would hide as much that this one keeps.
        release(Rung.COLLECT)
        release(Rung.EMPTY_CACHE)
        baseline = self._snapshot(f"before cycle {cycle}")
        if cycle == 1:
            self._context = self._unexplained(baseline)
        elif cycle == 2:
            self._warm_baseline = baseline
            self._libraries = {
                device: left - self._context[device] for device, left in self._unexplained(baseline).items()
            }
        life = None
        try:
            life = self._make()
            self._walk(life, cycle, baseline)
        except KeyboardInterrupt:
            self._interrupt()
        except Exception as error:  # noqa: BLE001 - the engine must be shut down whatever went wrong here
            self._failure = f"cycle {cycle}: lowtide itself failed: {type(error).__name__}: {error}"
        if life is not None:
            self._end(life, cycle, baseline)

    def _interrupt(self) -> None:
        self.interrupted = True
        self._failure = self._failure or f"interrupted in cycle {self._cycle}"

    def _walk(self, life: Life, cycle: int, baseline: Snapshot) -> None:
        before = baseline
        before_sleep = baseline
        for turn, name in enumerate(SCRIPT[:-1]):
            self._announce(cycle, turn)
            started = time.perf_counter()
            try:
                tokens = _perform(life, name)
            except Exception as error:  # noqa: BLE001 - any engine may raise anything; it is the run's result
                self._failure = f"cycle {cycle}: {name} raised {type(error).__name__}: {error}"
                return
            seconds = time.perf_counter() - started
            after = self._snapshot(f"cycle {cycle}, after {name}")
            # What a level 1 sleep, and the wake from it, have to move.
            moved = 0
            if name == "sleep(1)":
                moved = before.arena_mapped("weights", self._device)
            elif name == "wake" and SCRIPT[turn - 1] == "sleep(1)":
                moved = after.arena_mapped("weights", self._device)
            self._stages.append((name, cycle, seconds, before, after, sum(map(len, tokens)), moved))
            if name.startswith("sleep"):
                before_sleep = before
                self._findings += contract.after_sleep(name, self._device, baseline, after)
                if name == "sleep(2)" and self._judges_first_use(cycle):
                    self._findings += contract.after_deep_sleep(name, self._device, baseline, after)
            elif name == "wake":
                self._findings += contract.after_wake(name, self._device, before_sleep, after)
            elif name == "infer":
                if self._expected is None:
                    self._expected = tokens
                self._findings += contract.after_infer(name, self._expected, tokens)
            before = after

    def _end(self, life: Life, cycle: int, baseline: Snapshot) -> None:
        """Shut down and judge; the engine object is held meanwhile, as whoever called shutdown holds it."""
        self._announce(cycle, len(SCRIPT) - 1)
        before = self._stages[-1][4] if self._stages and self._stages[-1][1] == cycle else baseline
        started = time.perf_counter()
        try:
            self._shut_down(life)
        except Exception as error:  # noqa: BLE001 - whatever an engine's shutdown raises is a finding
            self._findings.append(contract.failed_teardown("shutdown", error))
        seconds = time.perf_counter() - started
        metrics = self._metrics(cycle)
        baselines = [baseline]
        warm = self._warm_baseline
        if cycle == self._cycles and warm is not None and warm is not baseline:
            # What each life leaves may be within the tolerance; what all of them leave must be too.
            baselines.append(warm)
        steps = self._climb(metrics, baselines)
        self._stages.append(("shutdown", cycle, seconds, before, steps[0].reading, 0, 0))
        for start in baselines:
            judgement = judge(metrics, start, steps, stage="shutdown", cycle=cycle)
            self._findings += judgement.findings
            if start is baseline:
                self._returns += judgement.returns
            self._not_measured.update({item.what: item for item in judgement.not_measured})

    def _shut_down(self, life: Life) -> None:
        try:
            life.shutdown()
        except BaseException as error:
            if not _was_interrupted(error):
                raise
            self._interrupt()
            self._findings += [contract.failed_teardown("shutdown", part) for part in _failures(error)]
            # Legal at any time, and again: what the interrupt kept from being given back is given back now.
            life.shutdown()

    def _climb(self, metrics: Sequence[Metric[Snapshot]], baselines: Sequence[Snapshot]) -> list[Step[Snapshot]]:
        def missing(now: Snapshot) -> list[tuple[Metric[Snapshot], int]]:
            return [
                (item.metric, item.above)
                for baseline in baselines
                for item in excesses(metrics, baseline, now)
                if item.above is not None and not item.is_back
            ]

        def waiting(now: Snapshot) -> list[int]:
            return [above for metric, above in missing(now) if metric.settles]

        return climb(
            lambda: self._snapshot("after shutdown"),
            lambda now: not missing(now),
            still_waiting=lambda now: bool(waiting(now)),
            moved=lambda then, now: waiting(then) != waiting(now),
        )

    def _metrics(self, cycle: int) -> tuple[Metric[Snapshot], ...]:
        metrics = shutdown_metrics(self._device)
        if self._judges_first_use(cycle):
            return metrics
        late = [metric for metric in metrics if metric.first_use]
        if self._cycles == 1:
            for metric in late:
                self._not_measured[metric.resource] = NotMeasured(
                    what=metric.resource, why="libraries move it in a first life: run at least two cycles to judge it"
                )
        return tuple(metric for metric in metrics if not metric.first_use)

    def _judges_first_use(self, cycle: int) -> bool:
        return cycle > 1

    def _announce(self, cycle: int, turn: int) -> None:
        total = self._cycles * len(SCRIPT)
        self._listener(Event(cycle, self._cycles, SCRIPT[turn], (cycle - 1) * len(SCRIPT) + turn, total))

    def _snapshot(self, label: str) -> Snapshot:
        return take_snapshot(label, driver=self._driver, devices=self._indices)

    def _unexplained(self, snapshot: Snapshot) -> dict[str, int]:
        known = {"cpu": base_from(snapshot, "cpu")}
        if self._device != "cpu" and snapshot.driver_bytes(self._device) is not None:
            known[self._device] = base_from(snapshot, self._device)
        return known

    def _bases(self, cycle: int) -> list[LedgerBase]:
        devices = ["cpu"] if self._device == "cpu" else [self._device, "cpu"]
        late = self._libraries if cycle > 1 else {}
        return [LedgerBase(device, self._context.get(device, 0), late.get(device, 0)) for device in devices]

    def _subject(self) -> Subject:
        findings = grouped(self._findings)
        outcome: Outcome = "leak" if findings else "clean"
        reason = ""
        if self._failure and not findings:
            outcome, reason = "error", self._failure
        elif self._failure:
            reason = self._failure
        return Subject(
            id=self._name,
            outcome=outcome,
            reason=reason,
            stages=tuple(self._stage(*row) for row in self._stages),
            findings=findings,
            returns=tuple(self._returns),
            not_measured=tuple(self._not_measured.values()),
        )

    def _stage(
        self, name: str, cycle: int, seconds: float, before: Snapshot, after: Snapshot, tokens: int, moved: int
    ) -> Stage:
        bases = self._bases(cycle)
        return Stage(
            name=name,
            cycle=cycle,
            seconds=seconds,
            before=to_readings(before, self._device, bases),
            after=to_readings(after, self._device, bases),
            tokens_per_second=tokens / seconds if tokens else None,
            bytes_per_second=moved / seconds if moved else None,
        )


def _perform(life: Life, name: str) -> Sequence[Sequence[int]]:
    """One stage of the script; the tokens of an infer, nothing for the others."""
    if name == "infer":
        return life.infer()
    if name == "create":
        life.create()
    elif name == "wake":
        life.wake()
    else:
        life.sleep(1 if name == "sleep(1)" else 2)
    return ()


def _failures(error: BaseException) -> list[BaseException]:
    """The parts of an error that are no interrupt."""
    if isinstance(error, BaseExceptionGroup):
        return [part for inner in error.exceptions for part in _failures(inner)]
    return [] if isinstance(error, KeyboardInterrupt) else [error]


def _was_interrupted(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(_was_interrupted(part) for part in error.exceptions)
    return isinstance(error, KeyboardInterrupt)
