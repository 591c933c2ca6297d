"""Drives an engine through its life, reads between the stages, and judges."""

from __future__ import annotations

import dataclasses
import re
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from lowtide.leakcheck.baseline.import_watch import ImportWatch
from lowtide.leakcheck.baseline.imported_modules import Imported
from lowtide.leakcheck.baseline.orphaned_files import Remains
from lowtide.leakcheck.baseline.owners import Owner
from lowtide.leakcheck.baseline.readings import to_readings
from lowtide.leakcheck.baseline.shared_memory import MadeSegments
from lowtide.leakcheck.findings.empty_pools import of_cached_pools, of_empty_pools
from lowtide.leakcheck.findings.host_arrays import with_array_holder
from lowtide.leakcheck.findings.item_findings import ItemLeak
from lowtide.leakcheck.findings.life_findings import Leftovers
from lowtide.leakcheck.judging import contract
from lowtide.leakcheck.judging.buffer_growth import GrowthWatch
from lowtide.leakcheck.judging.exemptions import exempt
from lowtide.leakcheck.judging.judge import Judgement, Level, excesses, grouped, judge, named_amount, one_for_each_level
from lowtide.leakcheck.judging.ladder import ACTIONS, Rung, SettlePolicy, Step, climb, release
from lowtide.leakcheck.judging.late_release import DRIVER_PATIENCE, wait_for_release
from lowtide.leakcheck.judging.metrics import NOT_OF_PYTHON, Metric, as_counted, shutdown_metrics
from lowtide.leakcheck.judging.trend import trend_of
from lowtide.leakcheck.judging.type_growth import TypeCounts
from lowtide.leakcheck.libraries.library_items import JUDGED, LibraryItems
from lowtide.leakcheck.lives.interrupts import Interrupts
from lowtide.leakcheck.lives.preserved_state import Survival
from lowtide.leakcheck.lives.process_state import ProcessState
from lowtide.leakcheck.settings.environment_setters import EnvironmentSetters
from lowtide.leakcheck.targets.target import TargetError
from lowtide.leakcheck.watching.unmeasured_processes import UnseenMemory
from lowtide.probes.device.driver import Driver
from lowtide.probes.host.counters import CounterReader, Counters, child_processes
from lowtide.probes.host.makers import Makers
from lowtide.probes.host.process_events import ProcessEvents
from lowtide.probes.host.process_tree import ProcessTree, name_of
from lowtide.probes.ledger import LedgerBase, base_from
from lowtide.probes.snapshot import Snapshot, take_snapshot
from lowtide.probes.stages import announced_pools, listening
from lowtide.reports.outcomes import judged_as, largest_of_each
from lowtide.reports.schema import Finding, NotMeasured, Return, Stage, Subject, TypeGrowth

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup

_OF_GROUPS = ("driver", "file-descriptors", "threads")
"""What a process group holds besides itself."""

_NO_SECOND_LIFE = "libraries move it in a first life, and no whole second life followed to compare it with"

SCRIPT = ("create", "infer", "sleep(1)", "wake", "infer", "sleep(2)", "wake", "infer", "shutdown")
"""One whole life."""


class Life(Protocol):
    """An engine that can be driven through a script; new ones are made for every life.

    It may have an attribute `engine`: what a caller of `shutdown` still has, and from which paths are told; without one
    that is the life itself.  It may have `preserved()`, which gives by name the tensors whose contents must survive a
    sleep, `graph_buffers()`, which gives by name address and bytes of what captured graphs read, and
    `kv_blocks_held()`, which gives who holds how many KV blocks although no request does, with `step()` to try whether
    one more step ends that.  A script that has the stage `reload` needs a `reload()`.
    """

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
        self._name = name
        self._make = make
        self._device = device
        self._driver = driver
        self._cycles = cycles
        self._listener = listener
        self._script = tuple(script)
        self._preserving = self._script if preserving is None else preserving
        self._emptying = emptying
        self._indices = () if device == "cpu" else (int(device.partition(":")[2] or 0),)
        self._stages: list[tuple[str, int, float, Snapshot, Snapshot, int, int]] = []
        self._findings: list[Finding] = []
        self._returns: list[Return] = []
        self._not_measured: dict[str, NotMeasured] = {}
        self._libraries: dict[str, int] = {}
        self._context: dict[str, int] = {}
        self._first_baseline: Snapshot | None = None
        self._warm_baseline: Snapshot | None = None
        # What the first life left, and whether a whole one has followed that says how much of that was first use.
        self._first_end: Snapshot | None = None
        self._has_compared = False
        self._expected: Sequence[Sequence[int]] | None = None
        self._leftovers = Leftovers(card=device != "cpu")
        # Of what is counted and not followed one by one: in which lives there was more of it at the end.
        self._left_in: dict[str, list[int]] = {}
        self._turns: dict[str, int] = {}
        self._level_of: dict[str, Level] = {}
        self._types: TypeCounts | None = None
        self._type_growth: tuple[TypeGrowth, ...] = ()
        self._tree = ProcessTree()
        self._segments = MadeSegments()
        self._remains = Remains(self._tree, self._segments)
        self._unseen = UnseenMemory(self._tree, lambda: self._driver)
        self._events = ProcessEvents(self._unseen.look)
        self._environment = EnvironmentSetters()
        counters = CounterReader(
            lambda: self._driver,
            card=device != "cpu",
            orphans=self._tree.orphans,
            temporary_files=self._remains.temporary_files,
        )
        self._process = ProcessState(self._driver_bytes, counters.read, self._environment)
        self._imports = ImportWatch(self._importing, self._import_done)
        self._imported = Imported(counters.read)
        # Bytes of imported modules' tensors by device, and by how much imports raised each level, at each snapshot.
        self._imported_bytes: dict[float, dict[str, int]] = {}
        self._makers = Makers()
        self._library_items = LibraryItems(self._makers)
        # By resource, what libraries have from their first use, with the life; in which lives there was some of it that
        # has become more since; and what to say of it as long as no life has followed.
        self._first_use: dict[str, dict[str, int]] = {}
        self._used_before: dict[str, set[int]] = {}
        self._once_so_far: tuple[NotMeasured, ...] = ()
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
            self._tree.start()
            self._segments.start()
            self._makers.start()
            self._events.start()
            self._environment.start()
            self._remains.start()
            self._remains.mark()
            self._unseen.begin()
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
            self._remains.stop()
            self._segments.stop()
            self._events.stop()
            self._environment.stop()
            self._makers.stop()
            self._tree.stop()
        return self._subject()

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
                self._survival.before_sleep(_asked(life, "preserved"))
            started = time.perf_counter()
            try:
                try:
                    tokens = _perform(life, name)
                except Exception as error:
                    if name != "wake":
                        raise
                    after = self._snapshot(f"cycle {cycle}, after a {name} that failed")
                    self._findings += contract.after_failed_wake(name, self._device, before, after)
                    if not _is_out_of_memory(error):
                        raise
                    # That may end by itself: it may be made again, and until then nothing may have changed.
                    why = f"in cycle {cycle} it raised {type(error).__name__}: {error}; made again, it worked"
                    started = time.perf_counter()
                    tokens = _perform(life, name)
                    self._not_measured["the first try of wake"] = NotMeasured(what="the first try of wake", why=why)
            except Exception as error:  # noqa: BLE001 - any engine may raise anything; it is the run's result
                self._failure = f"cycle {cycle}: {name} raised {type(error).__name__}: {error}"
                return
            seconds = time.perf_counter() - started
            self._unseen.look(always=True)
            if name.startswith("sleep"):
                self._wait_for_driver(name, cycle, before)
            after = self._snapshot(f"cycle {cycle}, after {name}")
            # What a level 1 sleep, and the wake from it, have to move.
            moved = 0
            if name == "sleep(1)":
                moved = before.arena_mapped("weights", self._device)
            elif name == "wake" and self._script[turn - 1] == "sleep(1)":
                moved = after.arena_mapped("weights", self._device)
            self._stages.append((name, cycle, seconds, before, after, sum(map(len, tokens)), moved))
            if name.startswith("sleep"):
                # Before the first sleep: what a sleep does not give back is not to be excused at the next.
                at_work = before if before_sleep is baseline else at_work
                before_sleep = before
                engine = getattr(life, "engine", life)
                pools = (*before.pools, *after.pools)
                self._findings += self._leftovers.explain_asleep(engine, cycle, self._device, pools)
                self._findings += contract.after_sleep(name, self._device, baseline, after)
                if name in self._emptying and self._judges_first_use(cycle):
                    self._findings += contract.after_deep_sleep(name, self._device, baseline, at_work, after)
            elif name == "wake":
                self._findings += contract.after_wake(name, self._device, before_sleep, after)
                lost = self._survival.after_wake(name, _asked(life, "preserved"), _asked(life, "graph_buffers"))
                self._findings += lost
                if lost:
                    # What it would compute with is not there: it could read anywhere.
                    return
            elif name == "infer":
                if self._expected is None:
                    self._expected = tokens
                self._findings += contract.after_infer(name, self._expected, tokens)
                self._findings += self._idle(life, name)
                grown = self._growth.finding(name)
                self._findings += [] if grown is None else [grown]
            before = after

    def _idle(self, life: Life, stage: str) -> list[Finding]:
        """Who holds KV blocks now that no request runs, where the engine tells."""
        held = _asked(life, "kv_blocks_held")
        after = None
        step = getattr(life, "step", None)
        if held and step is not None:
            step()
            after = _asked(life, "kv_blocks_held")
        return contract.after_idle(stage, self._device, held, after)

    def _end(self, life: Life, cycle: int, baseline: Snapshot) -> None:
        """Shut down and judge; the engine object is held meanwhile, as whoever called shutdown holds it."""
        self._announce(cycle, len(self._script) - 1)
        self._leftovers.stage("shutdown", cycle)
        before = self._stages[-1][4] if self._stages and self._stages[-1][1] == cycle else baseline
        started = time.perf_counter()
        try:
            self._shut_down(life)
        except Exception as error:  # noqa: BLE001 - whatever an engine's shutdown raises is a finding
            self._findings.append(contract.failed_teardown("shutdown", error))
        seconds = time.perf_counter() - started
        self._unseen.look(always=True)
        metrics = self._metrics(cycle)
        baselines = self._baselines(cycle, baseline)
        try:
            steps = self._climb(metrics, baselines, (Rung.SETTLE, Rung.COLLECT))
        except KeyboardInterrupt:
            # The report ends with what a shutdown left; whoever asks a second time does not wait for it.
            self._interrupt()
            steps = self._climb(metrics, baselines, (Rung.SETTLE, Rung.COLLECT))
        self._note_first_use(cycle, baseline, steps[-1].reading)
        self._first_end = steps[-1].reading if cycle == 1 else self._first_end
        self._has_compared |= cycle > 1 and not self._failure
        is_last = cycle == self._cycles or bool(self._failure)
        self._stages.append(("shutdown", cycle, seconds, before, steps[0].reading, 0, 0))
        missing = self._missing(metrics, baselines, steps[-1].reading)
        devices = {metric.device for metric, _ in missing if metric.resource == "tensors"}
        engine = getattr(life, "engine", life)
        actions = dict(ACTIONS)
        if not is_last:
            # What would give it back is tried after the last life only: until then it must show whether it adds up.
            of_tensors = self._leftovers.explain(engine, cycle, devices)
            steps += self._climb(metrics, baselines, (Rung.EMPTY_CACHE,))[1:]
        else:
            self._type_growth = () if self._types is None else self._types.growth("after shutdown")
            of_tensors = self._conclude(engine, cycle, devices, steps, actions, metrics, baselines)
        explained = {finding.device for finding in of_tensors}
        for start in baselines:
            judged = self._metrics_since(start, metrics)
            judgement = judge(judged, start, steps, stage="shutdown", cycle=cycle, actions=actions)
            judgement = self._with_pools(judgement, start, steps[-1].reading, engine)
            if is_last:
                judgement = self._with_arrays(judgement, engine)
            found = [finding for finding in judgement.findings if not _is_told(finding, explained)]
            # Whether a tensor that nobody sees keeps an arena is known when the heap is thawed, after the last life.
            hidden = is_last and any(finding.verdict == "frozen-garbage" for finding in of_tensors)
            if hidden or (not is_last and any(finding.resource == "gc-frozen" for finding in found)):
                found = [finding for finding in found if finding.resource != "arena"]
            self._findings += found
            if start is baseline:
                self._returns += [item for item in judgement.returns if not _is_told(item, explained)]
                offset = 1 if self._cycles > 1 else 0
                for finding, metric in zip(judgement.findings, judgement.metrics, strict=True):
                    late = offset if metric.first_use else 0
                    self._left_in.setdefault(finding.fingerprint, []).append(cycle - late)
                    self._turns[finding.fingerprint] = self._cycles - late
            for finding, metric in zip(judgement.findings, judgement.metrics, strict=True):
                if metric.items is None:
                    level = (metric.resource, metric.device, metric.unit, metric.what)
                    self._level_of[finding.fingerprint] = level
            self._not_measured.update({item.what: item for item in judgement.not_measured})
        if is_last:
            self._findings += of_tensors
        changed = self._process.findings("shutdown", remedies=is_last)
        groups = next((finding for finding in changed if finding.resource == "process-groups"), None)
        if groups is not None:
            # One remedy ends those of all lives.
            self._findings = [finding for finding in self._findings if finding.resource != "process-groups"]
        if groups is not None and groups.changed:
            changed[changed.index(groups)] = self._with_what_went_too(groups, metrics, baselines)
        self._findings += changed

    def _with_pools(self, judgement: Judgement, start: Snapshot, now: Snapshot, engine: object) -> Judgement:
        """With who holds the private pools of torch's allocator; those that its cache held are told with the rest."""
        told = list(zip(judgement.findings, judgement.metrics, judgement.keys, strict=True))
        for pools in [each for each in told if each[1].key]:
            finding, metric, key = pools
            others = [each for each in told if each is not pools and _is_cached_like(each[0], finding)]
            if left := metric.new_items(start, now):
                context = self._leftovers.context(engine)
                place = told.index(pools)
                told[place : place + 1] = [
                    (each, metric, key) for each in of_empty_pools(finding, metric.key, left, context)
                ]
            elif finding.cause == "allocator-cache" and others:
                told.remove(pools)
                told[told.index(others[0])] = (of_cached_pools(finding, others[0][0]), *others[0][1:])
            elif finding.cause == "allocator-cache":
                told[told.index(pools)] = (of_cached_pools(finding, None), metric, key)
        findings, metrics, keys = zip(*told, strict=True) if told else ((), (), ())
        return dataclasses.replace(judgement, findings=findings, metrics=metrics, keys=keys)

    def _with_arrays(self, judgement: Judgement, engine: object) -> Judgement:
        """With who holds the arrays that the host memory is which nothing else explains."""
        context = self._leftovers.context(engine)
        findings = []
        for finding in judgement.findings:
            if finding.resource == "host-memory" and finding.cause == "unknown":
                told = with_array_holder(ItemLeak(finding, finding.resource, {}, 0), context).finding
                # It stays the same leak as in the lives before, of which only the level is known.
                mark, former = finding.fingerprint, finding.former_fingerprint
                findings.append(msgspec.structs.replace(told, fingerprint=mark, former_fingerprint=former))
            else:
                findings.append(finding)
        return dataclasses.replace(judgement, findings=tuple(findings))

    def _with_what_went_too(
        self, groups: Finding, metrics: Sequence[Metric[Snapshot]], baselines: Sequence[Snapshot]
    ) -> Finding:
        """What is back now that process groups are destroyed was theirs, and is a part of their finding.

        Of what came back in part, the rest is told.
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
        for finding in self._findings:
            rest = left.get((finding.resource, finding.device))
            if finding.resource not in _OF_GROUPS:
                kept.append(finding)
            elif rest is None:
                back.append(finding)
            else:
                kept.append(_less(finding, rest))
        self._findings = kept
        return msgspec.structs.replace(groups, parts=one_for_each_level(grouped(back), self._level_of))

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
            if not _was_interrupted(error):
                raise
            self._interrupt()
            self._findings += [contract.failed_teardown("shutdown", part) for part in _failures(error)]
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
            peek=lambda: (self._driver_bytes(), threading.active_count(), len(child_processes()), self._tree.orphans()),
        )

    def _metrics(self, cycle: int) -> tuple[Metric[Snapshot], ...]:
        metrics = tuple(map(self._without_first_use, self._metrics_without_imports()))
        if self._judges_first_use(cycle):
            return metrics
        late = [metric for metric in metrics if metric.first_use]
        if self._cycles == 1:
            for metric in late:
                self._not_measured[metric.resource] = NotMeasured(
                    what=metric.resource, why="libraries move it in a first life: run at least two cycles to judge it"
                )
        return tuple(metric for metric in metrics if not metric.first_use)

    def _note_first_use(self, cycle: int, baseline: Snapshot, now: Snapshot) -> None:
        """Tell apart what a library made and keeps: it is a leak once a later life makes more of it."""
        new: dict[str, dict[str, int]] = {}
        there: dict[str, dict[str, int]] = {}
        for metric in self._metrics_without_imports():
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
                self._used_before.setdefault(key, set()).add(known.pop(name))
        self._once_so_far = found.listed

    def _without_first_use(self, metric: Metric[Snapshot]) -> Metric[Snapshot]:
        """Of what is counted, without what libraries have from their first use."""
        items = metric.items
        if metric.resource not in JUDGED or items is None:
            return metric

        def left(snapshot: Snapshot) -> dict[str, int]:
            known = self._first_use.get(metric.resource, ())
            found = items(snapshot).items()
            return {name: size for name, size in found if as_counted(metric.resource, name) not in known}

        return dataclasses.replace(metric, read=lambda snapshot: sum(left(snapshot).values()), items=left)

    def _importing(self, owner: Owner) -> None:
        """What a module makes and changes when a life imports it belongs to the process, as in tests."""
        self._imported.begin(owner)
        self._leftovers.importing(owner)

    def _import_done(self) -> None:
        self._leftovers.imported()
        self._process.adopt(self._imported.end())

    def _metrics_without_imports(self) -> list[Metric[Snapshot]]:
        return list(map(self._without_imports, shutdown_metrics(self._device)))

    def _without_imports(self, metric: Metric[Snapshot]) -> Metric[Snapshot]:
        """Without what modules made for themselves when a life imported them: tensors that Python holds, what has a
        name, and by how much the levels of the process rose."""
        if metric.items is not None:
            items = metric.items

            def left(snapshot: Snapshot) -> dict[str, int]:
                names = self._imported.names(metric.resource)
                found = items(snapshot)
                return {name: found[name] for name in found if as_counted(metric.resource, name) not in names}

            return dataclasses.replace(metric, read=lambda snapshot: sum(left(snapshot).values()), items=left)
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
            self._returns.append(
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
        self._imported_bytes[snapshot.taken_at] = self._bytes_of_imports()
        # Those that serve a library for the whole process are no engine's; those whose parent has ended are.
        children = {name.partition(" ")[0]: name for name in snapshot.host.children}
        children |= {str(pid): f"{pid} {name_of(pid)}" for pid in self._tree.orphans()}
        stays = exempt("processes", children)
        left = sorted(int(pid) for pid in children if pid not in stays)
        segments = {entry.name for entry in snapshot.host.shared_memory}
        remain = self._remains.shared_memory(segments) | self._segments.names
        host = dataclasses.replace(
            snapshot.host,
            children=tuple(children[str(pid)] for pid in left),
            shared_memory=tuple(
                dataclasses.replace(entry, left_here=entry.name in remain) for entry in snapshot.host.shared_memory
            ),
            temporary_files=tuple(self._remains.temporary_files()),
        )
        return dataclasses.replace(snapshot, host=host)

    def _bytes_of_imports(self) -> dict[str, int]:
        found = self._leftovers.imported_bytes()
        # Tensors are counted by themselves.
        of_host = max(0, self._imported.growth("host-memory") - found.get("cpu", 0))
        of_driver = self._imported.growth(f"driver {self._device}")
        return {**found, "host-memory cpu": of_host, f"driver {self._device}": of_driver}

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
        findings = tuple(map(self._with_trend, one_for_each_level(grouped(self._findings), self._level_of)))
        not_measured = (*self._not_measured.values(), *self._not_compared(), *self._once_so_far)
        not_measured += largest_of_each(self._unseen.not_measured)
        outcome, reason = judged_as("leak" if findings else "clean", not_measured)
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
            not_measured=not_measured,
            type_growth=self._type_growth if findings else (),
        )

    def _not_compared(self) -> list[NotMeasured]:
        """What the first life left of what libraries move in it, where no second one could say what is theirs."""
        if self._cycles == 1 or self._has_compared or self._first_baseline is None or self._first_end is None:
            return []
        late = [metric for metric in map(self._without_first_use, self._metrics_without_imports()) if metric.first_use]
        left = [
            f"{named_amount(item.metric, item.above)} after the shutdown of cycle 1"
            for item in excesses(late, self._first_baseline, self._first_end)
            if item.above is not None and not item.is_back
        ]
        if self._indices:
            lived = dict.fromkeys(name for name, *_ in self._stages if name in self._emptying)
            left += [f"the driver's level on {self._device} in {name}" for name in lived]
        return [NotMeasured(what=what, why=_NO_SECOND_LIFE) for what in left]

    def _with_trend(self, finding: Finding) -> Finding:
        mark = finding.fingerprint
        level = self._level_of.get(mark, mark)
        same = [other for other in self._left_in if self._level_of.get(other, other) == level]
        if finding.trend is not None or not same:
            return finding
        born_in = {turn for other in same for turn in self._left_in[other]}
        born_in |= self._used_before.get(finding.resource, set())
        return msgspec.structs.replace(finding, trend=trend_of(born_in, self._turns[same[0]]))

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


def _is_told(item: Finding | Return, devices: Collection[str]) -> bool:
    """Whether tensors are what it is about, and those on its device are told one by one."""
    is_plain = item.resource == "tensors" and item.bytes > 0 and getattr(item, "verdict", None) not in NOT_OF_PYTHON
    return is_plain and item.device in devices


def _perform(life: Life, name: str) -> Sequence[Sequence[int]]:
    """One stage of the script; the tokens of an infer, nothing for the others."""
    if name == "infer":
        return life.infer()
    level = re.fullmatch(r"sleep\((\d+)\)", name)
    if level is not None:
        life.sleep(int(level[1]))
    else:
        getattr(life, name)()
    return ()


def _asked(life: Life, name: str) -> Mapping[str, Any]:
    """What a life tells of itself, if it does."""
    method = getattr(life, name, None)
    return {} if method is None else method()


def _is_out_of_memory(error: Exception) -> bool:
    """Python's, torch's, or an engine's own, by its name."""
    return isinstance(error, MemoryError) or any(base.__name__ == "OutOfMemoryError" for base in type(error).__mro__)


def _failures(error: BaseException) -> list[BaseException]:
    """The parts of an error that are no interrupt."""
    if isinstance(error, BaseExceptionGroup):
        return [part for inner in error.exceptions for part in _failures(inner)]
    return [] if isinstance(error, KeyboardInterrupt) else [error]


def _less(finding: Finding, rest: Finding) -> Finding:
    """A finding with what is left of it; as it was where that is no less."""
    if (rest.bytes, rest.count) >= (finding.bytes, finding.count):
        return finding
    return msgspec.structs.replace(
        finding, bytes=rest.bytes, count=rest.count, message=rest.message, holder=rest.holder
    )


def _is_cached_like(finding: Finding, other: Finding) -> bool:
    """Whether torch's cache on one card is the cause of both."""
    return finding.cause == "allocator-cache" and (finding.resource, finding.device) == (other.resource, other.device)


def _was_interrupted(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(_was_interrupted(part) for part in error.exceptions)
    return isinstance(error, KeyboardInterrupt)
