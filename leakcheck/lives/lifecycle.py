"""Drives an engine through its life, reads between the stages, and judges."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence

import msgspec

from lowtide.leakcheck.baseline.import_watch import ImportWatch
from lowtide.leakcheck.baseline.imported_modules import Imported
from lowtide.leakcheck.baseline.owners import Owner
from lowtide.leakcheck.baseline.preserved_state import Survival
from lowtide.leakcheck.findings.life_findings import Leftovers
from lowtide.leakcheck.judging import contract
from lowtide.leakcheck.judging.buffer_growth import GrowthWatch
from lowtide.leakcheck.judging.judge import excesses, grouped, judge, named_amount, one_for_each_level
from lowtide.leakcheck.judging.ladder import ACTIONS, Rung, SettlePolicy, Step, climb, release
from lowtide.leakcheck.judging.late_release import DRIVER_PATIENCE, wait_for_release
from lowtide.leakcheck.judging.metrics import Metric, shutdown_metrics
from lowtide.leakcheck.judging.type_growth import TypeCounts
from lowtide.leakcheck.lives.interrupts import Interrupts
from lowtide.leakcheck.lives.life_metrics import LifeMetrics
from lowtide.leakcheck.lives.life_probes import LifeProbes
from lowtide.leakcheck.lives.life_record import LifeRecord, Lived
from lowtide.leakcheck.lives.process_state import ProcessState
from lowtide.leakcheck.lives.script import (
    SCRIPT,
    Event,
    Life,
    asked,
    failures,
    is_out_of_memory,
    perform,
    was_interrupted,
)
from lowtide.leakcheck.lives.shutdown_findings import is_told, less, with_arrays, with_pools
from lowtide.leakcheck.targets.target import TargetError
from lowtide.probes.device.driver import Driver
from lowtide.probes.host.counters import child_processes
from lowtide.probes.snapshot import Snapshot, take_snapshot
from lowtide.probes.stages import announced_pools, listening
from lowtide.reports.outcomes import largest_of_each
from lowtide.reports.schema import Finding, NotMeasured, Return, Subject

__all__ = ["SCRIPT", "Event", "Life", "LifecycleRun"]

_OF_GROUPS = ("driver", "file-descriptors", "threads")
"""What a process group holds besides itself."""

_NO_SECOND_LIFE = "libraries move it in a first life, and no whole second life followed to compare it with"


class LifecycleRun:
    """One run of `cycles` lives, one after the other in this process; keeps what it has when it is interrupted.

    Args:
        name: of the subject in the report.
        make: makes the engine of one life; takes no memory yet.
        device: "cpu" or "cuda:N", where the engine keeps its memory.
        driver: whom to ask for the card's figures.
        cycles: how many lives; the first of several also loads the libraries, and is judged without what they move.
        listener: hears of each stage before it starts.
        script: the stages of one life, from `create` to `shutdown`; without sleeps for an engine that does not sleep.
        preserving: the sleeps in it from which the contents of `preserved()` come back with the wake; None for all.
        emptying: the sleeps in it in which the driver must count no more for the process than before create.
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
        script: Sequence[str] = SCRIPT,
        preserving: Collection[str] | None = None,
        emptying: Collection[str] = ("sleep(2)",),
    ) -> None:
        self._make = make
        self._device = device
        self._driver = driver
        self._cycles = cycles
        self._listener = listener
        self._script = tuple(script)
        self._preserving = self._script if preserving is None else preserving
        self._emptying = emptying
        self._indices = () if device == "cpu" else (int(device.partition(":")[2] or 0),)
        self._record = LifeRecord(name, device, cycles)
        self._first_baseline: Snapshot | None = None
        self._warm_baseline: Snapshot | None = None
        # What the first life left, and whether a whole one has followed that says how much of that was first use.
        self._first_end: Snapshot | None = None
        self._has_compared = False
        self._expected: Sequence[Sequence[int]] | None = None
        self._leftovers = Leftovers(card=device != "cpu")
        self._types: TypeCounts | None = None
        self._probes = LifeProbes(lambda: self._driver, card=device != "cpu")
        self._process = ProcessState(self._driver_bytes, self._probes.counters.read, self._probes.environment)
        self._imports = ImportWatch(self._importing, self._import_done)
        self._imported = Imported(self._probes.counters.read)
        self._metrics = LifeMetrics(
            lambda: shutdown_metrics(device),
            self._probes.makers,
            self._imported,
            self._leftovers.imported_bytes,
            device,
        )
        self._survival = Survival(device)
        self._growth = GrowthWatch(device)
        self._cycle = 0
        self._failure = ""
        self.interrupted = False

    def run(self) -> Subject:
        """Live all lives; an error or Ctrl-C ends the run early, with the engine shut down and what there is kept."""
        try:
            self._open_device()
            self._leftovers.open()
            self._imports.install()
            self._imports.active = True
            self._probes.start()
            with listening(self._growth), Interrupts() as interrupts:
                for cycle in range(1, self._cycles + 1):
                    self._live(cycle)
                    if interrupts.heard:
                        # If nobody has seen it since: it hit a finalizer, where Python drops it.
                        self._interrupt()
                    if self._failure:
                        break
        except KeyboardInterrupt:
            # Outside the engine's own stages: it is shut down already, or was never made.
            self._interrupt()
        finally:
            self._imports.remove()
            self._leftovers.close()
            self._probes.stop()
        more = (*self._not_compared(), *self._metrics.once_so_far, *largest_of_each(self._probes.unseen.not_measured))
        return self._record.subject(self._failure, more, self._metrics.used_before)

    def _open_device(self) -> None:
        """Make the card's context before the first reading, so that it is a line of its own in the ledger."""
        torch = sys.modules.get("torch")
        if torch is None:
            return
        if self._device != "cpu":
            torch.cuda.synchronize(self._device)
        self._survival.warm_up({"a few words": torch.zeros(8, dtype=torch.int64, device=self._device)})

    def _live(self, cycle: int) -> None:
        self._cycle = cycle
        self._process.mark()
        if cycle > 1:
            # What an earlier life left to the collector would hide as much that this one keeps.
            release(Rung.COLLECT)
        release(Rung.EMPTY_CACHE)
        baseline = self._snapshot(f"before cycle {cycle}")
        self._types = TypeCounts(f"before cycle {cycle}")
        if cycle == 1:
            self._first_baseline = baseline
        elif cycle == 2:
            self._warm_baseline = baseline
        self._record.note_baseline(cycle, baseline)
        life = None
        try:
            life = self._make()
            self._walk(life, cycle, baseline)
        except KeyboardInterrupt:
            self._interrupt()
        except TargetError as error:
            self._failure = f"cycle {cycle}: {error}"
        except Exception as error:  # noqa: BLE001 - the engine must be shut down whatever went wrong here
            self._failure = f"cycle {cycle}: lowtide itself failed: {type(error).__name__}: {error}"
        if life is not None:
            self._end(life, cycle, baseline)

    def _interrupt(self) -> None:
        self.interrupted = True
        when = f"in cycle {self._cycle}" if self._cycle else "before the first life"
        self._failure = self._failure or f"interrupted {when}"

    def _walk(self, life: Life, cycle: int, baseline: Snapshot) -> None:
        before = at_work = before_sleep = baseline
        for turn, name in enumerate(self._script[:-1]):
            self._announce(cycle, turn)
            self._leftovers.stage(name, cycle)
            if name in self._preserving and name.startswith("sleep"):
                self._survival.before_sleep(asked(life, "preserved"))
            try:
                tokens, seconds = self._performed(life, name, cycle, before)
            except Exception as error:  # noqa: BLE001 - any engine may raise anything; it is the run's result
                self._failure = f"cycle {cycle}: {name} raised {type(error).__name__}: {error}"
                return
            self._probes.unseen.look(always=True)
            if name.startswith("sleep"):
                self._wait_for_driver(name, cycle, before)
            after = self._snapshot(f"cycle {cycle}, after {name}")
            # What a level 1 sleep, and the wake from it, have to move.
            moved = 0
            if name == "sleep(1)":
                moved = before.arena_mapped("weights", self._device)
            elif name == "wake" and self._script[turn - 1] == "sleep(1)":
                moved = after.arena_mapped("weights", self._device)
            self._record.stages.append(Lived(name, cycle, seconds, before, after, sum(map(len, tokens)), moved))
            if name.startswith("sleep"):
                # Before the first sleep: what a sleep does not give back is not to be excused at the next.
                at_work = before if before_sleep is baseline else at_work
                before_sleep = before
                engine = getattr(life, "engine", life)
                pools = (*before.pools, *after.pools)
                self._record.findings += self._leftovers.explain_asleep(engine, cycle, self._device, pools)
                self._record.findings += contract.after_sleep(name, self._device, baseline, after)
                if name in self._emptying and self._judges_first_use(cycle):
                    self._record.findings += contract.after_deep_sleep(name, self._device, baseline, at_work, after)
            elif name == "wake":
                self._record.findings += contract.after_wake(name, self._device, before_sleep, after)
                lost = self._survival.after_wake(name, asked(life, "preserved"), asked(life, "graph_buffers"))
                self._record.findings += lost
                if lost:
                    # What it would compute with is not there: it could read anywhere.
                    return
            elif name == "infer":
                if self._expected is None:
                    self._expected = tokens
                self._record.findings += contract.after_infer(name, self._expected, tokens)
                self._record.findings += self._idle(life, name)
                grown = self._growth.finding(name)
                self._record.findings += [] if grown is None else [grown]
            before = after

    def _performed(self, life: Life, name: str, cycle: int, before: Snapshot) -> tuple[Sequence[Sequence[int]], float]:
        """One stage: its tokens, and the seconds that it took; a wake that finds no memory is made again."""
        started = time.perf_counter()
        try:
            tokens = perform(life, name)
        except Exception as error:
            if name != "wake":
                raise
            after = self._snapshot(f"cycle {cycle}, after a {name} that failed")
            self._record.findings += contract.after_failed_wake(name, self._device, before, after)
            if not is_out_of_memory(error):
                raise
            # That may end by itself: it may be made again, and until then nothing may have changed.
            why = f"in cycle {cycle} it raised {type(error).__name__}: {error}; made again, it worked"
            started = time.perf_counter()
            tokens = perform(life, name)
            self._record.not_measured["the first try of wake"] = NotMeasured(what="the first try of wake", why=why)
        return tokens, time.perf_counter() - started

    def _idle(self, life: Life, stage: str) -> list[Finding]:
        """Who holds KV blocks now that no request runs, where the engine tells."""
        held = asked(life, "kv_blocks_held")
        after = None
        step = getattr(life, "step", None)
        if held and step is not None:
            step()
            after = asked(life, "kv_blocks_held")
        return contract.after_idle(stage, self._device, held, after)

    def _end(self, life: Life, cycle: int, baseline: Snapshot) -> None:
        """Shut down and judge; the engine object is held meanwhile, as whoever called shutdown holds it."""
        self._announce(cycle, len(self._script) - 1)
        self._leftovers.stage("shutdown", cycle)
        last = self._record.stages[-1] if self._record.stages else None
        before = last.after if last is not None and last.cycle == cycle else baseline
        started = time.perf_counter()
        try:
            self._shut_down(life)
        except Exception as error:  # noqa: BLE001 - whatever an engine's shutdown raises is a finding
            self._record.findings.append(contract.failed_teardown("shutdown", error))
        seconds = time.perf_counter() - started
        self._probes.unseen.look(always=True)
        metrics = self._judged_in(cycle)
        baselines = self._baselines(cycle, baseline)
        steps = self._settled(metrics, baselines)
        self._metrics.note_first_use(cycle, baseline, steps[-1].reading)
        self._first_end = steps[-1].reading if cycle == 1 else self._first_end
        self._has_compared |= cycle > 1 and not self._failure
        is_last = cycle == self._cycles or bool(self._failure)
        self._record.stages.append(Lived("shutdown", cycle, seconds, before, steps[0].reading))
        missing = self._missing(metrics, baselines, steps[-1].reading)
        devices = {metric.device for metric, _ in missing if metric.resource == "tensors"}
        engine = getattr(life, "engine", life)
        actions = dict(ACTIONS)
        if not is_last:
            # What would give it back is tried after the last life only: until then it must show whether it adds up.
            of_tensors = self._leftovers.explain(engine, cycle, devices)
            steps += self._climb(metrics, baselines, (Rung.EMPTY_CACHE,))[1:]
        else:
            self._record.type_growth = () if self._types is None else self._types.growth("after shutdown")
            of_tensors = self._conclude(engine, cycle, devices, steps, actions, metrics, baselines)
        explained = {finding.device for finding in of_tensors}
        for start in baselines:
            judged = self._metrics_since(start, metrics)
            judgement = judge(judged, start, steps, stage="shutdown", cycle=cycle, actions=actions)
            judgement = with_pools(judgement, start, steps[-1].reading, lambda: self._leftovers.context(engine))
            if is_last:
                judgement = with_arrays(judgement, self._leftovers.context(engine))
            found = [finding for finding in judgement.findings if not is_told(finding, explained)]
            # Whether a tensor that nobody sees keeps an arena is known when the heap is thawed, after the last life.
            hidden = is_last and any(finding.verdict == "frozen-garbage" for finding in of_tensors)
            if hidden or (not is_last and any(finding.resource == "gc-frozen" for finding in found)):
                found = [finding for finding in found if finding.resource != "arena"]
            self._record.findings += found
            if start is baseline:
                self._record.note_returns(judgement, cycle, explained)
            self._record.note_levels(judgement)
        if is_last:
            self._record.findings += of_tensors
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

    def _settled(self, metrics: Sequence[Metric[Snapshot]], baselines: Sequence[Snapshot]) -> list[Step[Snapshot]]:
        try:
            return self._climb(metrics, baselines, (Rung.SETTLE, Rung.COLLECT))
        except KeyboardInterrupt:
            # The report ends with what a shutdown left; whoever asks a second time does not wait for it.
            self._interrupt()
            return self._climb(metrics, baselines, (Rung.SETTLE, Rung.COLLECT))

    def _with_what_went_too(
        self, groups: Finding, metrics: Sequence[Metric[Snapshot]], baselines: Sequence[Snapshot]
    ) -> Finding:
        """What is back now that process groups are destroyed was theirs, and is a part of their finding.

        Of what came back in part, the rest is reported.
        """
        now = self._snapshot("after shutdown")
        of_groups = [metric for metric in metrics if metric.resource in _OF_GROUPS]
        left: dict[tuple[str, str], Finding] = {}
        for start in baselines:
            judged = judge(
                self._metrics_since(start, of_groups), start, [Step(Rung.RAW, now, 0.0)], stage="shutdown", cycle=1
            )
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

    def _conclude(
        self,
        engine: object,
        cycle: int,
        devices: set[str],
        steps: list[Step[Snapshot]],
        actions: dict[Rung, str],
        metrics: Sequence[Metric[Snapshot]],
        baselines: Sequence[Snapshot],
    ) -> list[Finding]:
        """Climbs on after the last life, single holders before whole caches; adds to `steps` and `actions`."""
        self._leftovers.read(Rung.RAW)
        if self._missing(metrics, baselines, steps[-1].reading) and self._leftovers.thaw():
            steps.append(Step(Rung.UNFREEZE, self._snapshot("after shutdown"), 0.0))
        steps += self._climb(metrics, baselines, (Rung.EMPTY_CACHE,))[1:]
        findings, cuts = self._leftovers.conclude(engine, cycle, devices)
        if cuts:
            actions[Rung.CLEAR_CACHES] = "; ".join(cuts)
            steps.append(Step(Rung.CLEAR_CACHES, self._snapshot("after shutdown"), 0.0))
        above = tuple(rung for rung in Rung if rung.order > max(steps[-1].rung.order, Rung.EMPTY_CACHE.order))
        steps += self._climb(metrics, baselines, above)[1:]
        return findings

    def _baselines(self, cycle: int, baseline: Snapshot) -> list[Snapshot]:
        """What the end of a life must return to: its own beginning, and after the last life that of all of them.

        What each life leaves may be within the tolerance; what all of them leave must be too.
        """
        earlier = [self._first_baseline, self._warm_baseline] if cycle == self._cycles else []
        return [baseline, *(start for start in earlier if start is not None and start is not baseline)]

    def _shut_down(self, life: Life) -> None:
        try:
            life.shutdown()
        except BaseException as error:
            if not was_interrupted(error):
                raise
            self._interrupt()
            self._record.findings += [contract.failed_teardown("shutdown", part) for part in failures(error)]
            # Legal at any time, and again: what the interrupt kept from being given back is given back now.
            life.shutdown()

    def _metrics_since(self, start: Snapshot, metrics: Sequence[Metric[Snapshot]]) -> Sequence[Metric[Snapshot]]:
        """Those that can be judged from a baseline on: from the first one, not what libraries move in a first life."""
        if start is self._first_baseline:
            return [metric for metric in metrics if not metric.first_use]
        return metrics

    def _missing(
        self, metrics: Sequence[Metric[Snapshot]], baselines: Sequence[Snapshot], now: Snapshot
    ) -> list[tuple[Metric[Snapshot], int]]:
        return [
            (item.metric, item.above)
            for start in baselines
            for item in excesses(self._metrics_since(start, metrics), start, now)
            if item.above is not None and not item.is_back
        ]

    def _climb(
        self, metrics: Sequence[Metric[Snapshot]], baselines: Sequence[Snapshot], rungs: Sequence[Rung]
    ) -> list[Step[Snapshot]]:
        def waiting(now: Snapshot) -> list[int]:
            return [above for metric, above in self._missing(metrics, baselines, now) if metric.settles]

        return climb(
            lambda: self._snapshot("after shutdown"),
            lambda now: not self._missing(metrics, baselines, now),
            still_waiting=lambda now: bool(waiting(now)),
            moved=lambda then, now: waiting(then) != waiting(now),
            rungs=rungs,
            policy=DRIVER_PATIENCE if self._indices else SettlePolicy(),
            peek=lambda: (
                self._driver_bytes(),
                threading.active_count(),
                len(child_processes()),
                self._probes.tree.orphans(),
            ),
        )

    def _judged_in(self, cycle: int) -> tuple[Metric[Snapshot], ...]:
        metrics = self._metrics.all()
        if self._judges_first_use(cycle):
            return metrics
        late = [metric for metric in metrics if metric.first_use]
        if self._cycles == 1:
            for metric in late:
                self._record.not_measured[metric.resource] = NotMeasured(
                    what=metric.resource, why="libraries move it in a first life: run at least two cycles to judge it"
                )
        return tuple(metric for metric in metrics if not metric.first_use)

    def _importing(self, owner: Owner) -> None:
        """What a module makes and changes when a life imports it belongs to the process, as in tests."""
        self._imported.begin(owner)
        self._leftovers.importing(owner)

    def _import_done(self) -> None:
        self._leftovers.imported()
        self._process.adopt(self._imported.end())

    def _judges_first_use(self, cycle: int) -> bool:
        return cycle > 1

    def _announce(self, cycle: int, turn: int) -> None:
        stages = len(self._script)
        done = (cycle - 1) * stages + turn
        self._listener(Event(cycle, self._cycles, self._script[turn], done, self._cycles * stages))

    def _wait_for_driver(self, stage: str, cycle: int, before: Snapshot) -> None:
        """Until the driver counts as much less as the arenas have dropped since `before`, or does not move any more."""
        held = before.driver_bytes(self._device) if self._indices else None
        if held is None:
            return
        arenas = [pool for pool in announced_pools() if pool.kind == "arena" and pool.device == self._device]
        dropped = before.arena_mapped(device=self._device) - sum(pool.mapped for pool in arenas)
        late = wait_for_release(self._driver_bytes, held, dropped, DRIVER_PATIENCE)
        if late is not None:
            self._record.returns.append(
                Return(
                    resource="driver",
                    device=self._device,
                    stage=stage,
                    cycle=cycle,
                    bytes=late.bytes,
                    rung=Rung.SETTLE.value,
                    seconds=late.seconds,
                )
            )

    def _driver_bytes(self) -> int:
        """What the driver counts for this process; 0 where it is not asked or does not tell."""
        return sum(self._driver.read(index).process_bytes or 0 for index in self._indices)

    def _snapshot(self, label: str) -> Snapshot:
        snapshot = take_snapshot(label, driver=self._driver, devices=self._indices)
        self._metrics.note_imports(snapshot)
        return self._probes.judged(snapshot)

    def _not_compared(self) -> list[NotMeasured]:
        """What the first life left of what libraries move in it, where no second one could say what is theirs."""
        if self._cycles == 1 or self._has_compared or self._first_baseline is None or self._first_end is None:
            return []
        late = [metric for metric in self._metrics.all() if metric.first_use]
        left = [
            f"{named_amount(item.metric, item.above)} after the shutdown of cycle 1"
            for item in excesses(late, self._first_baseline, self._first_end)
            if item.above is not None and not item.is_back
        ]
        if self._indices:
            lived = dict.fromkeys(lived.name for lived in self._record.stages if lived.name in self._emptying)
            left += [f"the driver's level on {self._device} in {name}" for name in lived]
        return [NotMeasured(what=what, why=_NO_SECOND_LIFE) for what in left]
