"""Drives an engine through its life, reads between the stages, and judges: lowtide's own, or a user's target.

Whether the tensors that an engine in this process keeps grow from inference to inference is judged while it lives: at
its shutdown it may give all of them back, and a server is not shut down for weeks.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from lowtide.leakcheck.findings.causes import with_holders
from lowtide.leakcheck.findings.heap_file import HeapFile
from lowtide.leakcheck.findings.host_memory import memory_holder
from lowtide.leakcheck.findings.item_findings import NamedGrowth
from lowtide.leakcheck.findings.life_findings import ENGINE, SleptTensors, has_slept
from lowtide.leakcheck.findings.out_of_memory import is_out_of_memory
from lowtide.leakcheck.findings.storage_holders import Context
from lowtide.leakcheck.findings.turn_growth import (
    FEWEST_TURNS,
    INFERENCES,
    Grown,
    OpenEnd,
    TurnGrowth,
    call_recorder,
    is_read,
    not_decided,
)
from lowtide.leakcheck.growth.containers import FEWEST_READINGS
from lowtide.leakcheck.judging import contract
from lowtide.leakcheck.judging.contract import PreservedState, Tokens, digests
from lowtide.leakcheck.judging.judge import Excess
from lowtide.leakcheck.judging.ladder import release, trim_heap
from lowtide.leakcheck.judging.metrics import unaccounted_host_memory
from lowtide.leakcheck.lives.life_reader import LifeReader
from lowtide.leakcheck.lives.life_record import LifeRecord, Lived
from lowtide.leakcheck.lives.script import (
    JUDGEMENT,
    SCRIPT,
    UPDATES,
    Event,
    Interrupts,
    asked,
    parsed,
    parts_of,
    simplest,
    surviving,
    told,
)
from lowtide.leakcheck.lives.shutdown_judgement import ShutdownJudgement
from lowtide.leakcheck.lives.tenant import Tenant, freed_between, tenant_of
from lowtide.leakcheck.lives.workspace_growth import GrowthWatch
from lowtide.leakcheck.processes.lost_slots import LostSlots
from lowtide.leakcheck.processes.own_tensors import outside_pools
from lowtide.leakcheck.processes.process_growth import Left, Turns, grown_under, is_under
from lowtide.leakcheck.processes.process_levels import explain_kept_on_host, judged_asleep
from lowtide.leakcheck.resources.resource import Rung
from lowtide.leakcheck.targets.target import Capabilities, TargetError, TargetFactory, answered, make_target
from lowtide.probes.device.allocator_snapshots import AllocatorSnapshots
from lowtide.probes.device.driver import Driver
from lowtide.probes.originals import gc, time
from lowtide.probes.snapshot import Snapshot
from lowtide.probes.stages import UPDATE, listening
from lowtide.reports.outcomes import largest_of_each
from lowtide.reports.schema import Finding, NotMeasured, Subject

if TYPE_CHECKING:
    import torch

MORE_UPDATES = FEWEST_READINGS - 1
"""Updates at the end of the last life by which growth is judged, besides those of the script."""

_UPDATES = "weight updates"
"""What they are called as turns."""

MORE_INFERENCES = 2
"""Inferences at the end of a life by which growth of other processes is judged, besides those of the script."""


_LEAST_ASLEEP = 32 << 20
"""Bytes of host memory in no tensor that an engine must hold for a sleep to be judged by what of them stays."""

_MOST_TIMES = 10
"""How many times as many turns as were asked for there are at most until it is known what grows."""


@dataclass(eq=False)
class LifecycleRun:
    """One run of `cycles` lives, one after the other in this process; keeps what it has when it is interrupted.

    Attributes:
        name: of the subject in the report.
        make: makes the engine of one life; takes no memory yet.
        device: "cpu" or "cuda:N", where the engine keeps its memory.
        driver: whom to ask for the card's figures.
        cycles: how many lives; the first of several also loads the libraries, and is judged without what they move.
        listener: hears of each stage before it starts, and of the judgement after each shutdown.
        script: the stages of one life, from `create` to `shutdown`; without sleeps for an engine that does not sleep.
        preserving: the sleeps in it from which the contents of `preserved()` come back with the wake; None for all.
        emptying: the sleeps in it in which the driver must count no more for the process than before create.
        tolerances: what one life may leave at its shutdown, by the metric's key, in place of the table's tolerance;
            what several lives leave together is judged by the table.
        tenant: takes what each sleep has freed, in a second process; None if nobody does.
        snapshots: keeps what torch's allocator has on a card after each sleep and shutdown that leaves something.
        turns: inferences in a row at the end of each life, and updates of the weights at that of the last one, by
            which it is judged what grows; 0: only as many as tell of tensors, of other processes, and of what each
            update adds to containers.
        until_decided: whether more of them follow, up to ten times as many, until it is known what grows.
        native: whether the calls are recorded in them that allocate, while host memory seems to grow; and on a card
            which library asks the driver for memory.
        heap: where the heap is kept in which something is left of the last life; None: nowhere.
        keep: hears what is known after each whole life that others follow, with the stages of that life alone.
        interrupted: whether Ctrl-C has ended it.
    """

    name: str
    make: Callable[[], TargetLife]
    _: KW_ONLY
    device: str
    driver: Driver
    cycles: int
    listener: Callable[[Event], None] = lambda event: None
    script: Sequence[str] = SCRIPT
    preserving: Collection[str] | None = None
    emptying: Collection[str] = ("sleep(2)",)
    tolerances: Mapping[str, int] = field(default_factory=dict)
    tenant: Tenant | None = None
    snapshots: AllocatorSnapshots | None = None
    turns: int = 0
    until_decided: bool = False
    native: bool = False
    heap: HeapFile | None = None
    keep: Callable[[Subject], None] | None = None
    interrupted: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        """Make what follows the lives; nothing is read yet."""
        self._calls = call_recorder(wanted=self.native)
        self._record = LifeRecord(self.name, self.device, self.cycles)
        self._sent = SentWeights(self.device)
        self._reader = LifeReader(self.device, self.driver, native=self.native)
        self._leftovers = self._reader.leftovers
        self._judgement = ShutdownJudgement(self.cycles, self._record, self._reader, self.tolerances, self.heap)
        self._processes = self._reader.processes
        self._processes.asks_turns = self.turns > 0
        self._preserved_state = PreservedState(self.device)
        self._growth = GrowthWatch(self.device)
        self._slots = LostSlots(lambda: self._processes.lost_slots(self._processes.has_answered), self.device)
        self._turns_of = {stage: Turns(stage) for stage in ("infer", UPDATE)}
        self._named_growth = NamedGrowth(UPDATE, lambda: self._reader.counters.read().items)
        # What has grown in the last life: tensors under the engine, by stage, and with `turns` the rest.
        self._grown: dict[str, list[Finding]] = {}
        self._of_turns: dict[str, Finding] = {}
        self._said_of_turns = ""
        self._cycle = 0
        self._failure = ""

    @property
    def excesses(self) -> tuple[tuple[Excess, ...], ...]:
        """How far each metric was above its life's own baseline after each shutdown so far."""
        return tuple(self._judgement.excesses)

    def run(self) -> Subject:
        """Live all lives; an error or Ctrl-C ends the run early, with the engine shut down and what there is kept."""
        try:
            self._open_device()
            self._reader.start()
            unrecorded = self._reader.watched.device_memory.unrecorded
            self._record.not_measured.update({each.what: each for each in unrecorded})
            with listening(self._growth), listening(self._leftovers.out_of_memory), Interrupts() as interrupts:
                # One that got lost while libraries were loaded.
                interrupts.raise_if_heard()
                for cycle in range(1, self.cycles + 1):
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
            self._reader.stop()
        self._record.findings += self._processes.findings_at_end()
        if not self._judgement.is_concluded:
            self._record.findings += self._leftovers.earlier
        # What the engine has kept asleep, or left, is no growth besides; nor is a container of tensors that grow.
        for grown in (*self._grown.values(), list(self._of_turns.values())):
            holders = {finding.holder for finding in self._record.findings}
            self._record.findings += [finding for finding in grown if finding.holder not in holders]
        compared = self._judgement.not_compared(self.emptying if self._reader.cards else ())
        more = (*compared, *self._reader.once_so_far, *self._unseen())
        more += () if self.heap is None else self.heap.not_measured
        subject = self._record.subject(self._failure, more, self._reader.used_before)
        if self.heap is not None and not subject.findings:
            self.heap.drop()
        if subject.outcome != "clean" or subject.reason:
            return subject
        return msgspec.structs.replace(subject, reason=self._said_of_turns)

    def _unseen(self) -> tuple[NotMeasured, ...]:
        """Return what other processes and the tenant could not be judged by."""
        untaken = () if self.tenant is None else self.tenant.not_measured.values()
        unseen = largest_of_each(self._reader.unseen.besides(self._processes.judged, self._processes.answering))
        return (*unseen, *untaken, *self._processes.not_measured.values(), *self._processes.not_judged)

    def _open_device(self) -> None:
        """Make the card's context before the first reading, so that it is a line of its own in the ledger."""
        torch = sys.modules.get("torch")
        if torch is None:
            return
        if self.device != "cpu":
            torch.cuda.synchronize(self.device)
        self._preserved_state.warm_up({"a few words": torch.zeros(8, dtype=torch.int64, device=self.device)})

    def _live(self, cycle: int) -> None:
        self._cycle = cycle
        if cycle > 1:
            # What an earlier life left to the collector would hide as much that this one keeps.
            release(Rung.COLLECT)
        release(Rung.EMPTY_CACHE)
        baseline = self._judgement.begin(cycle)
        self._record.note_baseline(cycle, baseline)
        life = None
        try:
            life = self.make()
            self._walk(life, cycle, baseline)
        except KeyboardInterrupt:
            self._interrupt()
        except TargetError as error:
            self._failure = f"cycle {cycle}: {error}"
        except Exception as error:  # noqa: BLE001 - the engine must be shut down whatever went wrong here
            self._failure = f"cycle {cycle}: lowtide itself failed: {type(error).__name__}: {error}"
        if life is not None:
            self._end(life, cycle, baseline)

    def _failed(self, cycle: int, what: str, error: Exception) -> None:
        """Note what an engine has raised, and who had the memory where that was not enough."""
        self._failure = f"cycle {cycle}: {what} raised {type(error).__name__}: {error}"
        self._record.out_of_memory = self._leftovers.out_of_memory.read(error, self.snapshots, f"cycle {cycle}")

    def _interrupt(self) -> None:
        self.interrupted = True
        when = f"in cycle {self._cycle}" if self._cycle else "before the first life"
        self._failure = self._failure or f"interrupted {when}"

    def _walk(self, life: TargetLife, cycle: int, baseline: Snapshot) -> None:
        before = at_work = before_sleep = baseline
        engine: object = life
        may_grow = False
        self._grown.clear()
        for turns in self._turns_of.values():
            turns.again.clear()
        self._named_growth.forget()
        self._sent.begin_life()
        slept = SleptTensors(self.device.partition(":")[0], self._leftovers.of_process)
        for turn, called in enumerate(self.script[:-1]):
            method, number = parsed(called)
            version, name = (number, UPDATE) if method == UPDATE else (None, called)
            self._announce(cycle, turn)
            if version is not None:
                self._sent.begin(life)
            self._named_growth.begin(name)
            self._leftovers.stage(name, cycle)
            self._processes.begin_stage(name, cycle)
            if name.startswith("sleep") and (self.preserving is None or name in self.preserving):
                preserved = self._record.note_preserved(life, elsewhere=self._processes.before_sleep())
                self._preserved_state.before_sleep(preserved)
            slept.begin(name)
            try:
                tokens, seconds = self._performed(life, called, cycle, before)
            except TargetError:
                raise
            except Exception as error:  # noqa: BLE001 - any engine may raise anything; it is the run's result
                self._failed(cycle, called, error)
                return
            # Targets make it as they are created.
            engine = getattr(life, "engine", life)
            self._reader.look()
            if name.startswith("sleep"):
                self._record.returns += self._reader.wait_for_driver(name, cycle, before)
            after = self._reader.snapshot()
            # What a level 1 sleep, and the wake from it, have to move.
            moved = 0
            if name == "sleep(1)":
                moved = before.arena_mapped("weights", self.device)
            elif name == "wake" and self.script[turn - 1] == "sleep(1)":
                moved = after.arena_mapped("weights", self.device)
            self._processes.end_stage(name)
            self._record.findings += self._processes.contexts_elsewhere(name)
            for turns in self._turns_of.values():
                turns.after(name)
            may_grow = leaves_more(before, after) if name == "infer" else may_grow
            others = self._processes.readings
            self._record.stages.append(Lived(name, cycle, seconds, before, after, sum(map(len, tokens)), moved, others))
            if name.startswith("sleep"):
                # Before the first sleep: what a sleep does not give back is not to be excused at the next.
                at_work = before if before_sleep is baseline else at_work
                before_sleep = before
                known = len(self._record.findings)
                self._record.findings += self._leftovers.explain_asleep(engine, cycle, self.device, before.pools)
                self._record.findings += contract.after_sleep(name, self.device, baseline, after)
                self._record.findings += self._processes.after_sleep(name, cycle, empties=name in self.emptying)
                if self.tenant is not None:
                    self._record.findings += self.tenant.after_sleep(name, freed_between(before, after, self.device))
                if name in self.emptying and cycle > 1:
                    self._record.findings += contract.after_deep_sleep(name, self.device, baseline, at_work, after)
                if len(self._record.findings) == known:
                    self._record.findings += self._kept_asleep(slept, name, engine)
                if len(self._record.findings) == known and name in self.emptying and cycle > 1:
                    self._record.findings += self._kept_on_host(name, baseline, before, after, engine)
                self._keep_snapshot(cycle, name, leaves=len(self._record.findings) > known)
            elif name == "wake":
                self._record.findings += contract.after_wake(name, self.device, before_sleep, after)
                self._record.findings += slept.more_awake(name, functools.partial(self._leftovers.context, engine))
                self._record.findings += self._processes.more_awake(name)
                lost = self._processes.after_wake(name)
                lost += self._preserved_state.after_wake(name, *surviving(life))
                self._record.findings += lost
                if lost:
                    # What it would compute with is not there: it could read anywhere.
                    return
            elif version is not None:
                self._named_growth.end(name)
                self._record.findings += self._sent.end(version, life)
            elif name == "infer":
                self._record.findings += self._sent.judge(name, tokens)
                lost = self._slots.look(name)
                self._record.not_measured.update({each.what: each for each in self._slots.not_measured})
                # Else that the prefix cache cannot be reset would be told beside what its blocks are held by.
                self._record.findings += lost if self._slots.any_lost else self._idle(life, name)
                grown = self._growth.finding(name)
                self._record.findings += [] if grown is None else [grown]
            before = after
        # Of an engine in this process one life shows it.
        self._infer_again(life, engine, is_looked_at=may_grow and cycle == self.cycles)
        if self._turns_of[UPDATE].again and cycle == self.cycles:
            self._update_again(life, engine)

    def _kept_asleep(self, slept: SleptTensors, stage: str, engine: object) -> list[Finding]:
        """Report what an engine of this process holds asleep, if most of what it held; note it if nobody forbids it."""
        empties = stage in self.emptying
        context = functools.partial(self._leftovers.context, engine)
        found, missing = judged_asleep(slept, stage, self.device, empties=empties, context=context)
        if missing is not None:
            self._record.not_measured[missing.what] = missing
        return found

    def _kept_on_host(
        self, stage: str, baseline: Snapshot, at_work: Snapshot, after: Snapshot, engine: object
    ) -> list[Finding]:
        """Report most of what an engine on the CPU held outside tensors and arenas at work, if it stays in a sleep."""
        before, *levels = map(unaccounted_host_memory, (baseline, at_work, after))
        held, stays = (level - before for level in levels)
        if self.device != "cpu" or held <= _LEAST_ASLEEP or has_slept(held, stays):
            return []
        # Garbage, and what is free in the heap, the engine holds no more.
        release(Rung.COLLECT)
        trim_heap()
        stays = unaccounted_host_memory(self._reader.snapshot()) - before
        if has_slept(held, stays):
            return []
        found = memory_holder(stays, msgspec.structs.replace(self._leftovers.context(engine), living=True))
        return [explain_kept_on_host(stage, held, stays, None if found is None else found[0])]

    def _infer_again(self, life: TargetLife, engine: object, *, is_looked_at: bool) -> None:
        """Infer some times more, for growth, which takes several inferences in a row to show, and look for it."""
        own = self._turns_of["infer"]
        is_looked_at = is_looked_at and any(is_under(ENGINE, finding) for finding, _ in self._left(own, engine))
        least = MORE_INFERENCES if self._processes.has_answered else 0
        least = max(least, own.missing) if is_looked_at else least
        count, wanted, elsewhere = 0, self.turns, 0
        most = wanted * _MOST_TIMES if self.until_decided else wanted
        readings = OpenEnd()
        with closing(self._turn_growth(INFERENCES, engine)) as growth:
            while count < max(least, wanted) and self._again(life, "infer", "infer"):
                count += 1
                if not wanted:
                    continue
                growth.note(INFERENCES)
                is_last = count == wanted
                if readings.is_read(count) or is_last:
                    growth.read(count, begins=readings.begins)
                if is_last:
                    elsewhere = self._processes.look_at_turns()
                    wanted = min(count + max(growth.undecided(INFERENCES), elsewhere), most)
            if is_looked_at:
                self._grown[own.stage] = grown_under(ENGINE, self._left(own, engine), own)
            if not (wanted and count):
                return
            more, said = growth.undecided(INFERENCES), growth.said(INFERENCES)
            known = sum(finding.bytes for finding in self._grown.get("infer", ()) if finding.device == "cpu")
            grown = growth.end(INFERENCES, "", lambda: known)
        found = self._noted(grown)
        self._said_of_turns = ""
        if more and not found:
            missing = not_decided(count, more)
            self._record.not_measured[missing.what] = missing
        elif not (found or elsewhere):
            self._said_of_turns = f"nothing grows over {count} inferences in a row: {said}"

    def _update_again(self, life: TargetLife, engine: object) -> None:
        """Update the weights some times more, for growth, and look for it."""
        count = max(MORE_UPDATES, self.turns)
        with closing(self._turn_growth(_UPDATES, engine)) as growth:
            growth.read(1, begins=True)
            for turn in range(1, count + 1):
                if not self._again(life, UPDATE, f"{UPDATE}({turn % 2})"):
                    return
                growth.note(_UPDATES)
                if count < FEWEST_TURNS or is_read(turn, count, is_last=turn == count, asked=True):
                    growth.read(turn + 1)
            own = self._turns_of[UPDATE]
            self._grown[UPDATE] = grown_under(ENGINE, self._left(own, engine), own)
            known = sum(finding.bytes for finding in self._grown[UPDATE] if finding.device == "cpu")
            self._noted(growth.end(_UPDATES, "", lambda: known))
        context = Context(roots=[(ENGINE, engine)], living=True, maker_of=self._reader.makers.of_item)
        self._record.findings += [with_holders(leak, context, with_cause=True) for leak in self._named_growth.leaks()]

    def _turn_growth(self, turns: str, engine: object) -> TurnGrowth:
        """Return what reads how an engine grows with some turns."""
        return TurnGrowth(turns, lambda: [(ENGINE, engine)], asked=True, calls=self._calls, native_option="--native")

    def _noted(self, grown: Grown) -> Sequence[Finding]:
        """Note what has grown with some turns, and return it."""
        found = [*grown.containers, *([] if grown.host is None else [grown.host])]
        self._of_turns |= {finding.fingerprint: finding for finding in found}
        return found

    def _again(self, life: TargetLife, stage: str, called: str) -> bool:
        """Go through a stage once more, for growth; return whether it has worked."""
        self._leftovers.stage(stage, self._cycle)
        self._processes.begin_stage(stage, self._cycle)
        self._named_growth.begin(stage)
        try:
            perform(life, called)
        except Exception as error:  # noqa: BLE001 - any engine may raise anything; it is the run's result
            self._failed(self._cycle, f"{stage}, made again,", error)
            return False
        self._named_growth.end(stage)
        self._processes.end_stage(stage)
        self._turns_of[stage].after(stage)
        return True

    def _left(self, turns: Turns, engine: object) -> Left:
        """Return who holds what the turns of a stage have made in this life, of an engine that is about to end."""
        # Garbage that waits for the collector looks like what is kept.
        gc.collect()
        left = self._leftovers.explain_turns(self._cycle, turns.stage, engine)
        # What the walk has taken is free, and none of the engine's.
        trim_heap()
        return left

    def _performed(
        self, life: TargetLife, name: str, cycle: int, before: Snapshot
    ) -> tuple[Sequence[Sequence[int]], float]:
        """Perform a stage; return its tokens and its seconds. A wake that finds no memory is made again."""
        started = time.perf_counter()
        try:
            tokens = perform(life, name)
        except Exception as error:
            if name != "wake":
                raise
            after = self._reader.snapshot()
            self._record.findings += contract.after_failed_wake(name, self.device, before, after)
            self._record.findings += self._processes.after_failed_wake(name)
            if not is_out_of_memory(error):
                raise
            # That may end by itself: it may be made again, and until then nothing may have changed.
            why = f"in cycle {cycle} it raised {type(error).__name__}: {error}; made again, it worked"
            started = time.perf_counter()
            tokens = perform(life, name)
            self._record.not_measured["the first try of wake"] = NotMeasured(what="the first try of wake", why=why)
        return tokens, time.perf_counter() - started

    def _idle(self, life: TargetLife, stage: str) -> list[Finding]:
        """Return who holds KV blocks now that no request runs, if the engine reports it."""
        held = told(life, "kv_blocks_held")
        after = None
        step = getattr(life, "step", None)
        if held and step is not None:
            step()
            after = told(life, "kv_blocks_held")
        return contract.after_idle(stage, self.device, held, after)

    def _end(self, life: TargetLife, cycle: int, baseline: Snapshot) -> None:
        """Shut down and judge; the engine object is held meanwhile, as whoever called shutdown holds it."""
        self._announce(cycle, len(self.script) - 1)
        self._leftovers.stage("shutdown", cycle)
        last = self._record.stages[-1] if self._record.stages else None
        before = last.after if last is not None and last.cycle == cycle else baseline
        started = time.perf_counter()
        try:
            self._shut_down(life)
        except Exception as error:  # noqa: BLE001 - whatever an engine's shutdown raises is a finding
            self._record.findings.append(contract.failed_teardown(error))
        seconds = time.perf_counter() - started
        self._reader.look()
        try:
            after = self._judgement.settle(failed=bool(self._failure))
        except KeyboardInterrupt:
            # The report ends with what a shutdown left; whoever asks a second time does not wait for it.
            self._interrupt()
            after = self._judgement.settle(failed=True)
        self._keep_snapshot(cycle, "shutdown", leaves=self._judgement.leaves_any)
        self._record.stages.append(Lived("shutdown", cycle, seconds, before, after))
        self._announce(cycle, len(self.script))
        self._judgement(getattr(life, "engine", life), failed=bool(self._failure))
        self._record.findings += self._processes.ended.findings()
        self._record.whole += not self._failure
        if self.keep is not None and cycle < self.cycles and not self._failure:
            self.keep(self._record.subject_of_latest(self._leftovers.earlier, self._unseen()))

    def _keep_snapshot(self, cycle: int, stage: str, *, leaves: bool) -> None:
        """Write torch's snapshot before anything is done about what stays: after the remedies it would not be in it."""
        why = self.snapshots.keep(f"cycle {cycle} {stage}") if leaves and self.snapshots is not None else ""
        if why:
            self._record.not_measured[stage] = NotMeasured(what=f"torch's snapshot after {stage}", why=why)

    def _shut_down(self, life: TargetLife) -> None:
        try:
            life.shutdown()
        except BaseException as error:
            parts = parts_of(error)
            failures = [part for part in parts if not isinstance(part, KeyboardInterrupt)]
            if len(failures) == len(parts):
                raise
            self._interrupt()
            self._record.findings += [contract.failed_teardown(part) for part in failures]
            # Legal at any time, and again: what the interrupt kept from being given back is given back now.
            life.shutdown()

    def _announce(self, cycle: int, turn: int) -> None:
        """Tell the listener what stage of the script begins now; past its end, the judgement."""
        stages, record = len(self.script), self._record
        done, total = (cycle - 1) * stages + turn, self.cycles * stages
        stage = (*self.script, JUDGEMENT)[turn]
        self.listener(Event(cycle, self.cycles, stage, done, total, record.sizes(), record.latest_stages))


class SentWeights:
    """Follows which weights the engine of a life has, and what they say.

    Version 0 is what an engine is created with.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._version = 0
        self._is_updated = self._is_wrong = False
        self._before: Mapping[str, Any] = {}
        # By version, in whichever life an engine had it first.
        self._expected: dict[int, Tokens] = {}

    def begin_life(self) -> None:
        """Begin another life: another engine is to be created."""
        self._version, self._is_updated, self._is_wrong = 0, False, False

    def begin(self, life: TargetLife) -> None:
        """Note what the engine has before an update."""
        self._before = digests(told(life, "weights"))

    def end(self, version: int, life: TargetLife) -> list[Finding]:
        """Compare what it has after the update with what was sent."""
        before, self._before = self._before, {}
        self._version, self._is_updated = version, True
        found = contract.after_update(self._device, before, told(life, "sent_weights"), told(life, "weights"))
        self._is_wrong = bool(found)
        return found

    def judge(self, stage: str, tokens: Tokens) -> list[Finding]:
        """Judge what the engine says with the weights that it must have."""
        if not self._is_updated:
            return contract.after_infer(stage, self._expected.setdefault(0, tokens), tokens)
        if self._is_wrong:
            # It is known that it has other weights.
            return []
        expected = self._expected.setdefault(self._version, tokens)
        found = contract.says_otherwise(stage, tokens, expected)
        return found or (contract.says_the_same(stage, tokens, self._expected[0]) if self._version else [])


def leaves_more(before: Snapshot, after: Snapshot) -> bool:
    """Return whether there is more under tensors outside pools, on any device."""
    then, now = (outside_pools(each.tensors, each.pools) for each in (before, after))
    return any(size > then.get(device, 0) for device, size in now.items())


def perform(life: TargetLife, name: str) -> Tokens:
    """Perform one stage of the script; return the tokens of an infer, nothing for the others."""
    if name == "infer":
        return life.infer()
    method, number = parsed(name)
    getattr(life, method)(*([] if number is None else [number]))
    return ()


def script_of(capabilities: Capabilities) -> tuple[str, ...]:
    """Return the stages of one life: work, then a sleep of every level that there is, with work again after each."""
    stages = ["create", "infer"]
    for level in capabilities.sleep_levels:
        stages += [f"sleep({level})", "wake", "infer"]
    if capabilities.reload:
        stages += ["reload", "infer"]
    if capabilities.update_weights:
        stages += UPDATES
    return (*stages, "shutdown")


def check_run(
    name: str,
    factory: TargetFactory,
    *,
    tenant: bool = False,
    tolerances_on: Callable[[str], Mapping[str, int]] = lambda device: {},
    **options: Any,
) -> LifecycleRun:
    """Return the run of fixed lives of a factory's targets.

    Args:
        name: of the subject in the report.
        factory: makes a target; one for each life.
        tenant: whether a second process takes what each sleep has freed on a card.
        tolerances_on: gives what one life on a device may leave in place of the table's tolerances.
        options: as those of `LifecycleRun`.

    Raises:
        TargetError: what it makes cannot be driven.
    """
    # Where there is no torch, that is said before the target is made.
    import torch  # noqa: F401

    able = make_target(factory).capabilities
    return LifecycleRun(
        name,
        lambda: TargetLife(factory),
        device=able.device,
        script=script_of(able),
        preserving={f"sleep({level})" for level in able.preserving_levels},
        emptying={f"sleep({level})" for level in able.emptying_levels},
        tenant=tenant_of(able.device) if tenant else None,
        tolerances=tolerances_on(able.device),
        **options,
    )


class TargetLife:
    """One life of a target in its simplest configuration, with one prompt of each of its lengths.

    Its methods are the stages of a script, and what a target may say of itself.

    Raises:
        TargetError: what it makes cannot be driven.
    """

    def __init__(self, factory: TargetFactory) -> None:
        # What it has besides is asked for only where its capabilities, or its own methods, say so.
        self._target: Any = make_target(factory)
        self._able: Capabilities = self._target.capabilities
        self._sent: Mapping[str, Any] = {}

    @property
    def engine(self) -> object:
        """What a user of the engine holds: the target's `engine`, or the target itself."""
        return getattr(self._target, "engine", None) or self._target

    def __getattr__(self, name: str) -> Any:
        """Return what the target has, as a life has it: `shutdown`, `reload`, `weights`, `graph_buffers`."""
        return getattr(self._target, name)

    def create(self) -> None:
        """Make the engine."""
        self._target.create(simplest(self._able))

    def infer(self) -> Sequence[Sequence[int]]:
        """Generate for all prompts, in batches of as many as the target takes."""
        lengths, most = list(self._able.prompt_lengths), self._able.max_requests
        batches = [lengths[start : start + most] for start in range(0, len(lengths), most)]
        most = self._able.max_tokens
        return [tokens for batch in batches for tokens in answered("infer", self._target.infer(batch, most))]

    def sleep(self, level: int) -> None:
        """Put it to sleep, with no request unfinished."""
        self._target.sleep(level, self._able.sleep_modes[0])

    def wake(self) -> None:
        """Wake all of it."""
        self._target.wake(None)

    def update_weights(self, version: int) -> None:
        """Send it the weights of a version."""
        # Not the tensors themselves: whoever sends them need not keep them.
        self._sent = digests(answered(UPDATE, self._target.update_weights(version)) or {})

    def sent_weights(self) -> Mapping[str, Any]:
        """Return what was sent last, by name, as `digests` has it, if the target says it."""
        return self._sent

    def preserved(self) -> Mapping[str, torch.Tensor]:
        """Return what must survive a sleep, by name, if the target reports it."""
        return told(self._target, "preserved")

    def kv_blocks_held(self) -> Mapping[str, int]:
        """Return who holds how many KV blocks although no request does, once the target has forgotten its prefixes."""
        if not self._able.prefix_cache or self._target.reset_prefix_cache():
            return {}
        return contract.held_by_nobody(asked(self._target, "kv_usage"))

    def step(self) -> None:
        """Make one step, where the target has steps."""
        if self._able.unfinished:
            self._target.step()
