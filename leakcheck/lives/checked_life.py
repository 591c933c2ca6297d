"""One life of a target in which every call is checked: against the model, the books, and what must survive.

What all lives of one search share is in `Lives`. What an engine has at work beyond its arenas and pools is gone through
before any life is judged. The other processes of an engine are asked call by call, each by its agent (`LifeProcesses`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from datetime import date
from typing import Any

import msgspec
from msgspec.structs import replace

from lowtide.leakcheck.findings.life_findings import ENGINE, SleptTensors
from lowtide.leakcheck.findings.storage_holders import Context
from lowtide.leakcheck.judging import contract
from lowtide.leakcheck.judging.contract import PreservedState, digests, says_the_same
from lowtide.leakcheck.judging.fingerprints import finding_of
from lowtide.leakcheck.judging.ladder import DRIVER_PATIENCE, release, trim_heap, wait_until_within
from lowtide.leakcheck.judging.metrics import DRIVER_TOLERANCE, host_memory_tolerance
from lowtide.leakcheck.lives.life_reader import LivedProcess
from lowtide.leakcheck.lives.script import (
    Call,
    Coverage,
    Fault,
    Interrupts,
    LifeError,
    LifeModel,
    asked,
    failure_of,
    simplest,
    surviving,
    told,
    varied,
)
from lowtide.leakcheck.lives.workspace_growth import GrowthWatch
from lowtide.leakcheck.processes.engine_processes import EngineProcesses
from lowtide.leakcheck.processes.lost_slots import LostSlots
from lowtide.leakcheck.processes.process_levels import judged_asleep, role_of
from lowtide.leakcheck.resources import LISTED, read_items
from lowtide.leakcheck.resources.resource import Items, Rung
from lowtide.leakcheck.resources.settings import ABSENT, changes_between, put_back
from lowtide.leakcheck.suppressions.entries import shipped
from lowtide.leakcheck.targets.faults import Injection, injecting_into
from lowtide.leakcheck.targets.target import (
    CALLS,
    TargetError,
    TargetFactory,
    Unjudged,
    answered,
    make_target,
)
from lowtide.leakcheck.watching.watch import Watch
from lowtide.leakcheck.watching.watched import Policy, Verdict, Watched
from lowtide.probes.host.counters import Counters
from lowtide.probes.host.memory_parts import held_bytes
from lowtide.probes.host.process_files import rollup
from lowtide.probes.objects.listed import frozen_by_program
from lowtide.probes.originals import gc
from lowtide.probes.stages import UPDATE, announced_pools, listening
from lowtide.reports.outcomes import largest_of_each
from lowtide.reports.processes.stage_processes import ProcessStage
from lowtide.reports.schema import Cause, Finding, NotMeasured, ResourceName
from lowtide.reports.sizes import format_bytes

_TOO_FEW = "it infers too rarely to say whether it grows: try more lives, so that three inferences follow another one"


class LifeProcesses:
    """Judges the processes that engines start, through all lives of one search.

    Args:
        engine: asks them.
        emptying: the levels of a sleep that leave nothing on the device.
    """

    def __init__(self, engine: EngineProcesses, emptying: Collection[int]) -> None:
        self.engine = engine
        self._emptying = {f"sleep({level})" for level in emptying}
        # The number of the present one, from 1 on.
        self.life = 0
        # By process: host memory that nothing explained when it was read first.
        self._at_first: dict[int, int] = {}
        # Those that were there at the end of a call, and those of them that have answered then.
        self._present: set[int] = set()
        self._answered: set[int] = set()

    def end_call(self, name: str, level: int | None) -> list[Finding]:
        """Report what is wrong in any process after a call, a failed one too; `level` is of a sleep that did not."""
        found = self.engine.ended.findings()
        if not self.engine.tree.any_alive():
            return found
        stage = name if level is None else f"{name}({level})"
        self.engine.end_stage(stage)
        self._present.update(self.engine.tree.descendants())
        self._answered.update(self.engine.has_answered)
        if level is not None:
            found += self.engine.after_sleep(stage, self.life, empties=stage in self._emptying)
        elif name == "wake":
            found += self.engine.more_awake(stage)
        found += [left for reading in self.engine.readings if (left := self._nobodys(reading, stage)) is not None]
        return found

    def _nobodys(self, reading: ProcessStage, stage: str) -> Finding | None:
        """Report host memory of one process under no tensor and in no arena, where it has grown too much."""
        pid, now = reading.process.pid, reading.beside_tensors
        if now is None or reading.host is None:
            return None
        allowed = self._at_first.setdefault(pid, now) + host_memory_tolerance([self.engine.device or "cpu"])
        if now > allowed:
            imported = self.engine.trim(pid)
            trimmed = rollup(pid)
            if imported is None or trimmed is None:
                return None  # it is listed as not measured, or has ended
            now -= reading.host - trimmed.private + imported
        if now <= allowed:
            return None
        grown = now - self._at_first[pid]
        return finding_of(
            "host-memory",
            bytes=grown,
            device="cpu",
            stage=stage,
            message=f"{reading.process.text}: {format_bytes(grown)} of host memory are unexplained after {stage}",
            suspects=("other process", role_of(reading.process.name)),
            process=reading.process,
        )

    def unseen(self, noted: Collection[NotMeasured], *, growth: bool) -> list[NotMeasured]:
        """Return what was not judged of what was noted from outside: no answer of a process, or too few inferences.

        A process that begins and ends within one call has nothing left that could be judged but what it made for
        others to find, and one that never infers does not grow with its inferences.

        Args:
            noted: the processes that had to be seen, among other things.
            growth: whether it must be known that processes do not grow with each inference.
        """
        left = []
        for item in noted:
            pid = None if item.process is None else item.process.pid
            if pid is None or pid in self._present - self._answered:
                left.append(item)
            elif growth and pid in self.engine.answering - self.engine.judged:
                left.append(msgspec.structs.replace(item, why=_TOO_FEW))
        return [*left, *self.engine.not_measured.values()]


_SMALLEST_LEVEL = 8 << 20
"""Bytes by which host memory moves anyway."""


class Lives:
    """What all lives of one search share while it is entered: the watch, what a fresh engine says, the coverage.

    Args:
        factory: makes a target; one for each life.
        explain: whether the holders of what a life leaves are reported, which takes a second or two each time.
        growth: whether it must be known of other processes that they do not grow with each inference.

    Raises:
        TargetError: what it makes cannot be driven.
    """

    def __init__(self, factory: TargetFactory, *, explain: bool = True, growth: bool = True) -> None:
        self.factory = factory
        self.explain = explain
        self._judges_growth = growth
        able = self.capabilities = make_target(factory).capabilities
        self.coverage = Coverage()
        # Other processes are asked by `processes`, whose growth counts over all lives.
        watched = Watched(Policy(remedies="never", explain=explain, processes=False))
        self.watch = Watch(watched=watched)
        self.growth = GrowthWatch(able.device)
        self._frozen = 0
        self._listening = ExitStack()
        # An engine, or Python in a finalizer, may have dropped one: then no further life begins.
        self.interrupts = Interrupts()
        # What libraries take from the driver for an engine at work, such as a communicator of NCCL: at most, in bytes.
        self.of_libraries = 0
        # What engines have at work, awake and asleep, that they give back and that is in no arena or pool, in bytes.
        self.driver_at_work = 0
        self.host_at_work: dict[str, int] = {}
        self._around = LivedProcess(able.device, watched, self.watch.enter, self.watch.leave)
        self.counters, self.ownership = self._around.counters, watched.ownership
        self._at_first: Mapping[str, Items] = {}
        self._settings_at_first: Mapping[str, str] = {}
        self.processes = LifeProcesses(self._around.processes, able.emptying_levels)
        # What could not be judged, once each.
        self.not_measured: dict[NotMeasured, None] = {}
        # By prompt length and version of the weights: how many tokens were asked for, and what came.
        self._tokens: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}

    @property
    def unmeasured(self) -> tuple[NotMeasured, ...]:
        """What could not be judged; of other processes of one program only the largest, since each life has its own."""
        return largest_of_each(self.processes.unseen(self.not_measured, growth=self._judges_growth))

    def __enter__(self) -> Lives:
        """Load what a first life loads, so that it is no life's, and begin to watch."""
        self._listening.enter_context(self.interrupts)
        self._listening.callback(self._around.stop)
        self._around.start()
        self._settings_at_first = self.ownership.baseline.settings
        self._at_first = read_items()
        self._frozen = frozen_by_program(gc.get_freeze_count())
        try:
            for version in (0, 1) if self.capabilities.update_weights else (0,):
                for length in self.capabilities.prompt_lengths:
                    self.expected(length, self.capabilities.max_tokens, version)
            self.warm_up()
        except BaseException:
            self._listening.close()
            raise
        gc.collect()
        with self._judging():
            self.put_back()
            self.watch.open()
        self._listening.enter_context(listening(self.growth))
        return self

    def __exit__(self, *exc_info: object) -> None:
        """End the watch."""
        self._listening.close()
        self.watch.close()

    def warm_up(self) -> None:
        """Go through one life unjudged, so that what libraries keep from their first use is there."""
        CheckedLife(self).warm_up()

    def begin(self) -> None:
        """Take what is there when a life begins as its baseline."""
        with self._judging():
            self.processes.life += 1
            self.watch.begin("create")

    def end(self) -> Verdict:
        """Report what a life that is over has left behind."""
        with self._judging():
            return self.watch.end()

    @contextmanager
    def _judging(self) -> Iterator[None]:
        """Count what this checker itself imports now as nobody's."""
        self._around.imports.active = False
        try:
            yield
        finally:
            self._around.imports.active = True

    def put_back(self) -> None:
        """Undo what lives have changed in the process, so that the next one can be seen to change it again.

        A heap that stays frozen, a setting that stays replaced: what the first life leaves of these, the others find.
        """
        # What imports have set stays.
        settings = dict(self._settings_at_first)
        for owner in self.ownership.live:
            settings |= owner.settings
        known = {name: text for name, text in settings.items() if text != ABSENT}
        for setting in changes_between(known, self.counters.read().settings):
            # What was added, and not only replaced or removed, may be needed by lives that follow.
            if setting.before != ABSENT or setting.is_replaced:
                with suppress(Exception):
                    put_back([setting])
        now = read_items()
        for resource in LISTED:
            key = resource.rule.key
            for change in resource.changes(now[key].keys() - self._at_first[key].keys()):
                # What does not end is there when the next one begins, and so is none of that one's.
                with suppress(Exception):
                    change.apply()
        self.ownership.forget_settings()
        if frozen_by_program(gc.get_freeze_count()) > self._frozen:
            gc.unfreeze()
            gc.collect()

    def says_the_same(self) -> list[Finding]:
        """Report that engines give the same tokens with both versions of the weights."""
        lengths, most = self.capabilities.prompt_lengths, self.capabilities.max_tokens
        former, updated = ([self.expected(length, most, version) for length in lengths] for version in (0, 1))
        return says_the_same(UPDATE, updated, former)

    def expected(self, prompt_length: int, max_tokens: int, version: int = 0) -> Sequence[int]:
        """Return what a fresh engine with the simplest settings, and such weights, says to this request alone."""
        asked, tokens = self._tokens.get((prompt_length, version), (0, ()))
        if asked < max_tokens:
            asked = max(self.capabilities.max_tokens, max_tokens)
            target: Any = Unjudged(make_target(self.factory))
            target.create(simplest(self.capabilities))
            try:
                if version:
                    target.update_weights(version)
                (tokens,) = answered("infer", target.infer([prompt_length], asked), count=1)
            except TargetError:
                # What the shutdown of an engine that has failed raises would say less.
                with suppress(TargetError):
                    target.shutdown()
                raise
            target.shutdown()
            tokens = tuple(tokens)
            self._tokens[prompt_length, version] = (asked, tokens)
        return tokens[:max_tokens]


class CheckedLife:
    """Drives one target; every call is checked, and raises `LifeError` where something is not as it must be.

    Each call of the target is one of this, as `life.sleep(level=1)`, and returns whether it succeeded: one with a fault
    in it (`fault=Fault("map", 0)`) may have failed.  `close` ends the life, and judges what it left.

    Attributes:
        target: what is driven.
        model: what it must be in.
        calls: those that were made.
        points: of the last call with a fault, how many fault points it passed.
    """

    def __init__(self, lives: Lives) -> None:
        lives.interrupts.raise_if_heard()
        self._lives = lives
        self._capabilities = lives.capabilities
        self.target: Any = make_target(lives.factory)
        self._device = self._capabilities.device
        self._preserved_state = PreservedState(self._device)
        self._pages_at_work: dict[str, int] = {}
        # Where earlier lives' memory is that did not come back.
        self._others: frozenset[int] = frozenset()
        self._slept = SleptTensors(self._device.partition(":")[0])
        engine = lives.processes.engine
        self._slots = LostSlots(lambda: engine.lost_slots(engine.has_answered), self._device, at_once=True)
        self.model = LifeModel(self._capabilities)
        self.calls: list[Call] = []
        self._late: Injection | None = None
        self._baseline = Counters({}, {}, {})
        self._host_at_first = 0
        self.points = 0
        self._open()

    def __getattr__(self, name: str) -> Callable[..., bool]:
        """Return what makes the call of that name: with its arguments, and with `fault`, what is to fail in it."""
        if name not in CALLS:
            raise AttributeError(f"{type(self).__name__} has no {name!r}, and no target has such a call")

        def call(*given: Any, fault: Fault | None = None, **named: Any) -> bool:
            return self.make(Call.of(name, *given, fault=fault, **named))

        return call

    def make(self, call: Call) -> bool:
        """Make a call, and judge it and what it has made of the engine; return whether it succeeded.

        Of a shutdown it is judged, too, what the life has left; where something failed in it, another one must do the
        rest.
        """
        if call.illegal:
            self.illegal(call.name)
            return False
        if call.name == "create":
            plain, config = simplest(self._capabilities), call.arguments.get("config", {})
            special = {name: value for name, value in config.items() if name not in plain or plain[name] != value}
            call = replace(call, arguments={"config": special} if special else {})
        if call.name == "shutdown":
            return self._shut_down(call)
        self._prepare(call)
        weights = digests(self._weights()) if call.name == UPDATE else {}
        done = self._made(call, lambda result: self._succeeded(call, result, weights))
        if call.name == UPDATE and not done:
            self._raise(contract.after_failed_update(self._device, weights, self._weights()))
        return done

    def _prepare(self, call: Call) -> None:
        """Remember what a sleep must preserve, and the tensors by which an engine without arenas is judged."""
        if call.name == "sleep" and self.model.phase == "running":
            level = call.arguments["level"]
            if level in self._capabilities.preserving_levels and self.model.keeps(level):
                self._preserved_state.before_sleep(told(self.target, "preserved"))
                self._lives.processes.engine.before_sleep()
        if call.name in ("sleep", "wake") and not self._pages_at_work:
            self._slept.begin(call.name)

    def _succeeded(self, call: Call, result: Any, weights: Mapping[str, Any]) -> None:
        """Note what a call has made of the engine, and judge what it gave; `weights` were there before an update."""
        model, arguments = self.model, call.arguments
        result = answered(call.name, result, count=len(arguments["prompt_lengths"]) if call.name == "start" else None)
        if call.name == "create":
            model.created()
            self._pages_at_work = self._pages()
            self._preserved_state.mark()
        elif call.name == "infer":
            lengths = arguments["prompt_lengths"]
            if len(result) != len(lengths):
                self._fail("contents", f"infer gave {len(result)} outputs for {len(lengths)} prompts")
            for length, tokens in zip(lengths, result, strict=True):
                self._compare(length, arguments["max_tokens"], tokens)
        elif call.name == "start":
            model.started(result, **arguments)
        elif call.name == "step":
            self._finished(result)
        elif call.name == "abort":
            model.ended(*model.given(call))
        elif call.name == "sleep":
            self._has_slept(result or {}, **arguments)
        elif call.name == "wake":
            self._woke(arguments.get("tags"))
        elif call.name == "reset_prefix_cache" and not (result or model.unfinished):
            held = contract.held_by_nobody(asked(self.target, "kv_usage"))
            self._raise(contract.after_idle(call.name, self._device, held, None))
        elif call.name == "reload":
            model.version = 0
            self._rewritten()
        elif call.name == UPDATE:
            model.version = arguments["version"]
            self._raise(contract.after_update(self._device, weights, result or {}, self._weights()))
            self._raise(self._lives.says_the_same())
            self._rewritten()

    def _rewritten(self) -> None:
        """Take the weights that were written while the rest sleeps for those that must be there when all is awake."""
        if self.model.phase != "running":
            preserved = told(self.target, "preserved")
            weights = self._weights() if self._capabilities.update_weights else {}
            written = {name: tensor for name, tensor in preserved.items() if name in weights}
            # Whoever does not say which are the weights may have written any.
            self._preserved_state.rewritten(written or preserved)
            self._lives.processes.engine.rewritten()

    def _has_slept(self, finished: Mapping[str, Sequence[int]], level: int, mode: str = "wait") -> None:
        """Judge a sleep: unfinished requests have run to their end, or are ended."""
        self._finished(finished)
        self._check_slept(level)
        if mode == "wait" and self.model.unfinished:
            left = ", ".join(self.model.unfinished)
            self._fail("state", f"sleep(mode='wait') lost the outputs of unfinished requests: {left}")
        self.model.slept(level)

    def _woke(self, tags: Sequence[str] | None) -> None:
        """Judge a wake: once all of it runs, what had to survive is compared."""
        self.model.woke(tags)
        # An engine without arenas has no more than before the sleep.
        self._raise(self._slept.more_awake("wake", self._context))
        if self.model.phase == "running":
            lost = self._preserved_state.after_wake("wake", *surviving(self.target))
            self._raise([*lost, *self._lives.processes.engine.after_wake("wake")])
            self._preserved_state.mark()

    def _shut_down(self, call: Call) -> bool:
        try:
            done = self._made(call, lambda result: self.model.shut_down())
            if not done:
                self._shut_down_again()
        except LifeError:
            self.model.shut_down()
            raise
        self._raise(self._left())
        self._open()
        return done

    def _shut_down_again(self) -> None:
        try:
            self.target.shutdown()
        except Exception as error:  # noqa: BLE001 - any engine may raise anything
            self._raise([contract.failed_teardown(error)])
        self.model.shut_down()
        self._check("shutdown")

    def illegal(self, name: str) -> None:
        """Make a call that must be refused now, and change nothing."""
        self.calls.append(Call(name, illegal=True))
        before = self._pages()
        expected = self._capabilities.illegal_call
        assert expected is not None
        able, situation = self._capabilities, self.model.situation
        # Arguments that would be right in another state.
        right = {"prompt_lengths": [able.prompt_lengths[0]], "max_tokens": 1, "count": 0, "version": 0}
        right |= {
            key: values[0] for key, values in (("level", able.sleep_levels), ("mode", able.sleep_modes)) if values
        }
        known = CALLS[name].arguments
        given = self.model.given(Call(name, {key: value for key, value in right.items() if key in known}))
        try:
            getattr(self.target, name)(*given)
        except expected:
            self._unchanged(f"{name}, which was refused,", before)
        except Exception as error:  # noqa: BLE001 - any engine may raise anything
            self._fail("state", f"{name} while {situation} raised {said(error)}, not {expected.__name__}", "illegal")
        else:
            self._fail("state", f"{name} while {situation} did not raise {expected.__name__}", "illegal")
        self._check(name)
        self._cover(situation, f"illegal {name}")

    def close(self) -> None:
        """End the life, wherever it is."""
        try:
            if self.model.phase in ("running", "asleep"):
                self.shutdown()
            # What a create left that failed, too.
            self._raise(self._left())
        finally:
            self._lives.coverage.lives += 1
            self._lives.coverage.calls += len(self.calls)

    def abandon(self) -> None:
        """End a life that has failed: nothing is judged any more."""
        # It has failed already, with something that says more.
        with suppress(Exception):
            self.target.shutdown()
        # What it left in memory is there when the next one begins, and so is none of that one's.
        self.target = None
        self._lives.put_back()

    def warm_up(self) -> None:
        """Go through all calls once, unjudged, so that what libraries keep from their first use is there."""
        self._preserved_state.warm_up({})
        # The first dispatch mode of a process makes what torch keeps for all of them.
        with injecting_into(self.target, Injection("allocation")):
            self._levels_of(simplest(self._capabilities))
        plain, *others = varied(self._capabilities)
        if asked(self.target, "pages") is not None:
            # What a setting takes, it takes in another process, which starts anew with each engine.
            others = []
        levels = self._levels_of(plain)
        self._lives.host_at_work = added_up(plain, levels, [(each, self._levels_of(each)) for each in others])

    def _levels_of(self, config: Mapping[str, Any]) -> dict[str, int]:
        """Go through all calls with one configuration, unjudged, and note what libraries take from the driver for it.

        Returns:
            Bytes of host memory in no pool that the engine had at most and gave back, by phase: `running`, `asleep`.
        """
        able, lives, target = self._capabilities, self._lives, Unjudged(self.target)
        host: dict[str, int] = {}

        def note(phase: str) -> None:
            host[phase] = max(host.get(phase, 0), self._host_outside())

        # What an earlier engine left free in the heap would hide what this one takes of it.
        trim_heap()
        driver_before, host_before = self._outside(), self._host_outside()
        target.create(config)
        note("running")
        self._preserved_state.before_sleep(told(self.target, "preserved"))
        target.infer(list(able.prompt_lengths), able.max_tokens)
        note("running")
        if able.unfinished:
            ids = target.start([able.prompt_lengths[0]], able.max_tokens)
            target.step()
            target.abort(ids)
        if able.reload:
            target.reload()
        if able.update_weights:
            target.update_weights(1)
            target.update_weights(0)
        if able.prefix_cache:
            target.reset_prefix_cache()
        note("running")
        lives.driver_at_work = max(lives.driver_at_work, self._outside() - driver_before)
        for level in able.sleep_levels:
            target.sleep(level, able.sleep_modes[0])
            note("asleep")
            lives.of_libraries = max(lives.of_libraries, self._outside() - driver_before)
            target.wake(None)
            note("running")
            self._preserved_state.after_wake("wake", *surviving(self.target))
        target.shutdown()
        if max(host.values()) - host_before > _SMALLEST_LEVEL:
            # What it did not give back is not to be excused in the lives that follow.
            gc.collect()
            trim_heap()
            host_before = max(host_before, self._host_outside())
        return {phase: max(0, level - host_before) for phase, level in host.items()}

    def _open(self) -> None:
        """Take a new engine's baseline."""
        # Otherwise what an engine takes anew may come out of what earlier ones left in torch's cache, and show nowhere.
        release(Rung.EMPTY_CACHE)
        trim_heap()
        self._others = frozenset(address for pool in announced_pools() for address, _ in pool.ranges)
        self._lives.begin()
        self._baseline = self._lives.counters.read()
        self._host_at_first = self._host_outside()
        self._slots.adopt()

    def _made(self, call: Call, succeeded: Callable[[Any], None]) -> bool:
        """Make a call, and check what must hold after every one; return whether it succeeded."""
        name, fault, situation = call.name, call.fault, self.model.situation
        perform = functools.partial(getattr(self.target, name), *self.model.given(call))
        self.calls.append(call)
        if self._lives.explain:
            # Since when: asked of one life only, because noting it costs as much as many a call.
            self._lives.watch.phase(name)
        before = self._pages()
        self._lives.processes.engine.begin_stage(name, self._lives.processes.life)
        injection = None if fault is None else Injection(fault.kind, fault.at)
        failed = False
        try:
            with nullcontext() if injection is None else injecting_into(self.target, injection):
                result = perform()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and (injection is None or injection.raised is None):
                raise
            # What an engine raises after one that got lost is its consequence: a process of its own has had it, too.
            self._lives.interrupts.raise_if_heard()
            self._judge_error(name, error, injection)
            failed = True
        # What another process has now, no check below sees: also where the call is found to have failed.
        self._lives.not_measured.update(dict.fromkeys(self._lives.watch.others.unseen()))
        self.points = 0 if injection is None else len(injection.passed)
        if injection is not None and injection.raised is not None and not failed:
            if injection.kind == "interrupt":
                self._fail("state", f"Ctrl-C in {name} was swallowed", "swallowed")
            self._late = injection if injection.kind == "transfer" else None
        grown = self._lives.growth.finding(name)
        self._raise([] if grown is None else [grown])
        self._raise(self._lives.processes.end_call(name, None if failed else call.arguments.get("level")))
        if failed and name == "shutdown":
            # It has given back what it could; what state that is, is for the next one to end.
            self._cover(situation, f"{name} with a fault")
            return False
        if failed:
            # No exception of the engine's is alive any more: what it kept would show.
            self._unchanged(f"{name}, which failed,", before)
        else:
            succeeded(result)
        self._check(name)
        self._cover(situation, name if fault is None else f"{name} with a fault")
        return not failed

    def _judge_error(self, name: str, error: BaseException, injection: Injection | None) -> None:
        """Check that an error is the one that was injected."""
        able = self._capabilities
        for known in (injection, self._late):
            if known is not None and known.raised is not None and known.caused(error, able.failure):
                known.raised = None
                self._late = None
                return
        if name == "shutdown" and isinstance(error, Exception):
            self._raise([contract.failed_teardown(error)])
        injected = None if injection is None else injection.raised
        instead = "" if injected is None else f" although what failed in it was {said(injected)}"
        self._fail("state", f"{name} raised {said(error)}{instead}", type(error).__name__)

    def _check(self, name: str) -> None:
        """Check what must hold after every call."""
        self._check_state(name)
        if self.model.phase in ("running", "asleep"):
            self._check_kv_blocks(name)
            self._check_pages(name)
            self._check_ledger(name)
        if self.model.phase == "running":
            self._raise(self._preserved_state.dangling(name, *surviving(self.target)))

    def _check_ledger(self, name: str) -> None:
        """Check that what no arena, pool or segment accounts for does not grow beyond what libraries need."""
        at_work = self._lives.host_at_work
        phases = ("running", "asleep") if self.model.awake else (self.model.phase,)
        allowed = max(at_work.get(phase, 0) for phase in phases) + host_memory_tolerance([self._device])
        left = self._host_outside() - self._host_at_first
        if left > allowed:
            trim_heap()
            left = self._host_outside() - self._host_at_first
        if left > allowed:
            self._fail("host-memory", f"{format_bytes(left)} of host memory are unexplained after {name}", amount=left)
        if self._device == "cpu":
            return
        place = f"driver {self._device}"
        now = self._lives.counters.read()
        then, first = self._baseline.amounts.get(place), now.amounts.get(place)
        if then is None or first is None:
            why = (
                now.unmeasured.get(place)
                or self._baseline.unmeasured.get(place)
                or "this process has not used the card"
            )
            self._lives.not_measured[NotMeasured(what=place, why=why)] = None
            return
        of_libraries = self._lives.of_libraries
        if self.model.phase == "running":
            of_libraries = max(of_libraries, self._lives.driver_at_work)
        allowed = then + of_libraries + DRIVER_TOLERANCE + self._lives.ownership.growth(place)
        # What it no longer reports does not count as released.
        left = wait_until_within(lambda: self._outside(first), allowed, DRIVER_PATIENCE, first)
        if left > allowed:
            said = (
                f"the driver counts {format_bytes(left - then)} more on {self._device} after {name}, unexplained: "
                f"{format_bytes(left)} outside arenas and torch's segments, {format_bytes(then)} before create"
            )
            self._fail("driver", said, amount=left - then)

    def _cover(self, before: str, call: str) -> None:
        after = self.model.situation
        self._lives.coverage.states |= {before, after}
        self._lives.coverage.edges.add((before, call, after))

    def _unchanged(self, what: str, before: Mapping[str, int]) -> None:
        """Check that what failed has left the memory as it was."""
        now = self._pages()
        for tag in sorted({*before, *now}):
            # The workspaces grow with what was computed before it failed, and are the engine's to keep.
            if tag != "workspace" and before.get(tag, 0) != now.get(tag, 0):
                then = before.get(tag, 0)
                self._fail_arena(tag, now.get(tag, 0), then, f"{what} {format_bytes(then)} before", "not-restored")

    def _check_state(self, name: str) -> None:
        state = asked(self.target, "state")
        # An engine that could not be made is as new as one that was never asked for.
        same = {self.model.phase, "new"} if self.model.phase == "closed" else {self.model.phase}
        if state is not None and state not in same:
            self._fail("state", f"the engine says that it is {state} after {name}; it must be {self.model.phase}")

    def _check_kv_blocks(self, name: str) -> None:
        lost = self._slots.look(name)
        self._lives.not_measured.update(dict.fromkeys(self._slots.not_measured))
        self._raise(lost)
        usage = asked(self.target, "kv_usage")
        if usage is None:
            return
        if usage.available + usage.evictable != usage.total - usage.held:
            self._fail(
                "kv-blocks",
                f"KV blocks do not add up after {name}: {usage.available} available and {usage.evictable} evictable "
                f"are not {usage.total} less {usage.held} held",
            )
        nobody = usage.held - usage.pending_transfer
        if not self.model.unfinished and nobody:
            self._raise(contract.after_idle(name, self._device, {"no request": nobody}, None))

    def _check_pages(self, name: str) -> None:
        """Check that an engine has the pages of what is awake."""
        now = self._pages()
        for tag, at_work in self._pages_at_work.items():
            if tag == "workspace":
                wanted = now.get(tag, 0) if self.model.phase == "running" else 0
            else:
                asleep = self.model.phase == "asleep" and tag != "runtime" and tag not in self.model.awake
                wanted = 0 if asleep else at_work
            if now.get(tag, 0) != wanted:
                cause: Cause = "not-restored" if wanted else "unknown"
                self._fail_arena(tag, now.get(tag, 0), wanted, f"{name}, not {format_bytes(wanted)}", cause)

    def _fail_arena(self, tag: str, now: int, wanted: int, rest: str, cause: Cause) -> None:
        message = f"arena {tag!r} has {format_bytes(now)} mapped after {rest}"
        self._fail("arena", message, tag, cause, abs(now - wanted), f"arena {tag!r}")

    def _check_slept(self, level: int) -> None:
        """Judge what an engine without arenas has given back in a sleep of a level."""
        empties = level in self._capabilities.emptying_levels
        found, missing = judged_asleep(
            self._slept, f"sleep({level})", self._device, empties=empties, context=self._context
        )
        if missing is not None:
            self._lives.not_measured[missing] = None
        self._raise(found)

    def _context(self) -> Context:
        return Context(roots=[(ENGINE, getattr(self.target, "engine", self.target))], living=True)

    def _host_outside(self) -> int:
        """Return the bytes of the process's own host memory beyond announced pools and what imported modules took."""
        pooled = sum(pool.mapped for pool in announced_pools() if pool.device == "cpu")
        return held_bytes() - pooled - self._lives.ownership.growth("host-memory")

    def _outside(self, unknown: int = 0) -> int:
        """Return the driver's bytes beyond arenas and torch's segments; `unknown` where it reports nothing."""
        amount = self._lives.counters.read().amounts.get(f"driver {self._device}")
        return unknown if amount is None else amount

    def _left(self) -> list[Finding]:
        """Report what the life has left behind, now that it is over."""
        verdict = self._lives.end()
        self._lives.not_measured.update(dict.fromkeys(verdict.not_measured))
        found = shipped().apply(verdict.findings, date.today()).findings
        return [finding for finding in found if finding.suppressed_by is None]

    def _finished(self, outputs: Mapping[str, Sequence[int]]) -> None:
        asked = self.model.ended(outputs)
        for each, (length, max_tokens) in asked.items():
            self._compare(length, max_tokens, outputs[each])

    def _compare(self, length: int, max_tokens: int, tokens: Sequence[int]) -> None:
        if self.model.version is None:
            return
        wanted = self._lives.expected(length, max_tokens, self.model.version)
        if list(tokens) != list(wanted):
            self._fail(
                "contents",
                f"a prompt of {length} tokens gives {list(tokens)}; a fresh engine gives {list(wanted)}",
                "tokens",
                "not-restored",
            )

    def _pages(self) -> dict[str, int]:
        """Return the bytes with pages behind them, by arena tag, of this life's engines."""
        elsewhere: Mapping[str, int] | None = asked(self.target, "pages")
        if elsewhere is not None:
            return dict(elsewhere)
        found: dict[str, int] = {}
        for pool in announced_pools():
            if pool.kind == "arena" and pool.device == self._device:
                mapped = sum(length for address, length in pool.ranges if address not in self._others)
                found[pool.tag] = found.get(pool.tag, 0) + mapped
        return found

    def _weights(self) -> Mapping[str, Any]:
        """Return what the engine has, where it says it and has its weights."""
        has_weights = self.model.phase == "running" or "weights" in self.model.awake
        return told(self.target, "weights") if has_weights else {}

    def _fail(
        self,
        resource: ResourceName,
        message: str,
        suspect: str = "",
        cause: Cause = "unknown",
        amount: int = 0,
        holder: str | None = None,
    ) -> None:
        finding = finding_of(
            resource,
            cause=cause,
            bytes=amount,
            device=self._device,
            stage=self.calls[-1].name,
            message=message,
            suspects=(suspect, cause),
            holder=holder,
        )
        self._raise([finding])

    def _raise(self, findings: Sequence[Finding]) -> None:
        if findings:
            raise failure_of(findings)


def said(error: BaseException) -> str:
    """Return an error's type and message."""
    return f"{type(error).__name__}: {error}"


def added_up(
    plain: Mapping[str, Any], levels: Mapping[str, int], others: Sequence[tuple[Mapping[str, Any], Mapping[str, int]]]
) -> dict[str, int]:
    """Return the most bytes of an engine in any configuration, by phase: what each setting adds may come together.

    Args:
        plain: the simplest configuration, with which it had `levels`.
        levels: bytes by phase.
        others: configurations in which one setting is changed, and the bytes with each.
    """
    found = dict(levels)
    for phase, level in levels.items():
        added: dict[str, int] = {}
        for config, changed in others:
            (name,) = [name for name, value in config.items() if value != plain[name]]
            added[name] = max(added.get(name, 0), changed.get(phase, 0) - level)
        found[phase] += sum(added.values())
    return found
