"""One life of a target in which every call is checked: against the model, the books, and what must survive."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any

from lowtide.leakcheck.judging import contract
from lowtide.leakcheck.judging.ladder import DRIVER_PATIENCE, release, trim_heap, wait_until_within
from lowtide.leakcheck.judging.metrics import DRIVER_TOLERANCE, host_memory_tolerance
from lowtide.leakcheck.lives.life_checks import LevelsAtWork, LifeChecks, Probes, asked, levels_at_work, said, void
from lowtide.leakcheck.lives.life_checks import added_up as _added_up
from lowtide.leakcheck.lives.script import Call, Fault, LifeError, simplest, varied
from lowtide.leakcheck.lives.shared_lives import SharedLives
from lowtide.leakcheck.resources.rule import Rung
from lowtide.leakcheck.targets.faults import Injection, injecting_into
from lowtide.probes.host.counters import Counters
from lowtide.probes.stages import announced_pools
from lowtide.reports.schema import NotMeasured
from lowtide.reports.sizes import format_bytes


class Lives(SharedLives):
    """The lives of one search, entered for as long as it lasts."""

    def __enter__(self) -> Lives:
        """Begins it."""
        self.open()
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Ends it."""
        self.close()

    def warm_up(self) -> None:
        """Goes through one life unjudged, so that what libraries keep from their first use is there."""
        CheckedLife(self).warm_up()


class CheckedLife(LifeChecks):
    """Drives one target; every call is checked, and raises `LifeError` where something is not as it must be.

    A call with a fault in it says whether it succeeded all the same.  `close` ends the life, and judges what it left.

    Args:
        lives: what this life shares with others; entered.

    Attributes:
        model: what it must be in.
        calls: those that were made.
        points: of the last call with a fault, how many fault points it passed.
    """

    def __init__(self, lives: Lives) -> None:
        lives.interrupts.raise_if_heard()
        super().__init__(lives)
        self._late: Injection | None = None
        self._baseline = Counters({}, {}, {})
        self._host_at_first = 0
        self._imports_at_first = 0
        self.points = 0
        self._open()

    def create(self, config: Mapping[str, Any] | None = None, fault: Fault | None = None) -> bool:
        """Make the engine; settings that are not given have their simplest value."""
        plain = simplest(self._capabilities)
        whole = {**plain, **(config or {})}
        special = {name: value for name, value in whole.items() if name not in plain or plain[name] != value}

        def created(result: None) -> None:
            self.model.created()
            self._pages_at_work = self._pages()
            self._preserved_state.mark()

        arguments = {"config": special} if special else {}
        return self._call("create", arguments, lambda: self._target.create(whole), created, fault)

    def infer(self, prompt_lengths: Sequence[int], max_tokens: int, fault: Fault | None = None) -> bool:
        """Generate to the end; each request gets the tokens that a fresh engine gives it alone."""

        def inferred(result: Sequence[Sequence[int]]) -> None:
            if len(result) != len(prompt_lengths):
                self._fail("contents", f"infer gave {len(result)} outputs for {len(prompt_lengths)} prompts")
            for length, tokens in zip(prompt_lengths, result, strict=True):
                self._compare(length, max_tokens, tokens)

        arguments = {"prompt_lengths": list(prompt_lengths), "max_tokens": max_tokens}
        return self._call("infer", arguments, lambda: self._target.infer(prompt_lengths, max_tokens), inferred, fault)

    def start(self, prompt_lengths: Sequence[int], max_tokens: int, fault: Fault | None = None) -> bool:
        """Queue requests and leave them."""
        arguments = {"prompt_lengths": list(prompt_lengths), "max_tokens": max_tokens}
        return self._call(
            "start",
            arguments,
            lambda: self._target.start(prompt_lengths, max_tokens),
            lambda ids: self.model.started(ids, prompt_lengths, max_tokens),
            fault,
        )

    def step(self, fault: Fault | None = None) -> bool:
        """One step."""
        return self._call("step", {}, lambda: self._target.step(), self._finished, fault)

    def abort(self, count: int = 1) -> None:
        """End the oldest `count` unfinished requests."""
        ids = list(self.model.unfinished)[:count]
        self._call(
            "abort", {"count": count}, lambda: self._target.abort(ids), lambda result: void(self.model.ended(ids)), None
        )

    def sleep(self, level: int, mode: str = "wait", fault: Fault | None = None) -> bool:
        """Put it to sleep; unfinished requests run to their end, or are ended."""
        preserved = level in self._capabilities.preserving_levels and self.model.phase == "running"
        if preserved:
            self._preserved_state.before_sleep(self._preserved())
            self._lives.processes.before_sleep()

        self._begin_stage("sleep")

        def slept(finished: Mapping[str, Sequence[int]] | None) -> None:
            self._finished(finished or {})
            self._check_slept(level)
            if mode == "wait" and self.model.unfinished:
                left = ", ".join(self.model.unfinished)
                self._fail("state", f"sleep(mode='wait') lost the outputs of unfinished requests: {left}")
            self.model.slept(level)

        arguments = {"level": level, "mode": mode}
        return self._call("sleep", arguments, lambda: self._target.sleep(level, mode), slept, fault)

    def wake(self, tags: Sequence[str] | None = None, fault: Fault | None = None) -> bool:
        """Wake all of it, or the parts named; once it runs, what had to survive is compared."""

        self._begin_stage("wake")

        def woke(result: None) -> None:
            self.model.woke(tags)
            self._check_woke()
            if self.model.phase == "running":
                lost = self._preserved_state.after_wake("wake", self._preserved(), self._graph_buffers())
                self._raise([*lost, *self._lives.processes.after_wake()])
                self._preserved_state.mark()

        arguments = {} if tags is None else {"tags": list(tags)}
        return self._call("wake", arguments, lambda: self._target.wake(tags), woke, fault)

    def reset_prefix_cache(self, fault: Fault | None = None) -> bool:
        """Forget all prefixes, which must be possible where no request runs."""

        def was_reset(result: bool) -> None:
            if result or self.model.unfinished:
                return
            usage = asked(self._target, "kv_usage")
            held = {} if usage is None else contract.holders(usage)
            found = contract.after_idle(
                "reset_prefix_cache", self._device, held or {"a holder that the engine does not name": 0}, None
            )
            self._raise(found)

        return self._call(
            "reset_prefix_cache",
            {},
            lambda: self._target.reset_prefix_cache(),
            was_reset,
            fault,
        )

    def reload(self, fault: Fault | None = None) -> bool:
        """Load the weights anew."""
        return self._call("reload", {}, lambda: self._target.reload(), void, fault)

    def shutdown(self, fault: Fault | None = None) -> bool:
        """Shut it down, and judge what it left; where something failed in it, another shutdown must do the rest."""
        try:
            done = self._call("shutdown", {}, self._target.shutdown, lambda result: self.model.shut_down(), fault)
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
            self._target.shutdown()
        except Exception as error:  # noqa: BLE001 - any engine may raise anything
            self._raise([contract.failed_teardown("shutdown", error)])
        self.model.shut_down()
        self._check("shutdown")

    def illegal(self, name: str) -> None:
        """Make a call that must be refused now, and change nothing."""
        self.calls.append(Call(name, illegal=True))
        before = self._pages()
        expected = self._capabilities.illegal_call
        assert expected is not None
        given: tuple[Any, ...] = self._any_arguments().get(name, ())
        situation = self.model.situation
        try:
            getattr(self._target, name)(*given)
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
            self._target.shutdown()
        # What it left in memory is there when the next one begins, and so is none of that one's.
        self._target = None
        self._lives.put_back()

    def make(self, call: Call) -> None:
        """Make a call as it was written down."""
        if call.illegal:
            self.illegal(call.name)
        elif call.fault is not None:
            getattr(self, call.name)(**call.arguments, fault=call.fault)
        else:
            getattr(self, call.name)(**call.arguments)

    def warm_up(self) -> None:
        """Go through all calls once, unjudged, so that what libraries keep from their first use is there."""
        self._preserved_state.warm_up({})
        # The first dispatch mode of a process makes what torch keeps for all of them.
        with injecting_into(self._target, Injection("allocation")):
            self._levels_of(simplest(self._capabilities))
        plain, *others = varied(self._capabilities)
        if asked(self._target, "pages") is not None:
            # What a setting takes, it takes in another process, which starts anew with each engine.
            others = []
        levels = self._levels_of(plain).host
        self._lives.host_at_work = _added_up(plain, levels, [(each, self._levels_of(each).host) for each in others])

    def _levels_of(self, config: Mapping[str, Any]) -> LevelsAtWork:
        probes = Probes(self._host_outside, self._outside, self._preserved, self._graph_buffers)
        levels = levels_at_work(self._target, self._capabilities, config, self._preserved_state, probes)
        self._lives.driver_at_work = max(self._lives.driver_at_work, levels.driver)
        self._lives.of_libraries = max(self._lives.of_libraries, levels.asleep)
        return levels

    def _any_arguments(self) -> dict[str, tuple[Any, ...]]:
        """Return arguments that would be right in another state."""
        able = self._capabilities
        requests = ([able.prompt_lengths[0]], 1)
        return {
            "create": (simplest(able),),
            "infer": requests,
            "start": requests,
            "abort": ([],),
            "sleep": (*able.sleep_levels[:1], *able.sleep_modes[:1]),
            "wake": (None,),
        }

    def _open(self) -> None:
        """Take a new engine's baseline."""
        # Otherwise what an engine takes anew may come out of what earlier ones left in torch's cache, and show nowhere.
        release(Rung.EMPTY_CACHE)
        trim_heap()
        self._others = frozenset(address for pool in announced_pools() for address, _ in pool.ranges)
        self._lives.begin()
        self._baseline = self._lives.counters.read()
        self._imports_at_first = self._driver_of_imports()
        self._host_at_first = self._host_outside()

    def _call(
        self,
        name: str,
        arguments: Mapping[str, Any],
        perform: Callable[[], Any],
        succeeded: Callable[[Any], None],
        fault: Fault | None,
    ) -> bool:
        """Make a call, and judge it; whether it succeeded."""
        situation = self.model.situation
        self.calls.append(Call(name, arguments, fault))
        if self._lives.explain:
            # Since when: asked of one life only, because noting it costs as much as many a call.
            self._lives.watch.phase(name)
        before = self._pages()
        self._lives.processes.begin_call(name)
        injection = None if fault is None else Injection(fault.kind, fault.at)
        failed = False
        try:
            with nullcontext() if injection is None else injecting_into(self._target, injection):
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
        self._raise(self._lives.processes.end_call(name, None if failed else arguments.get("level")))
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
            self._raise([contract.failed_teardown("shutdown", error)])
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
            self._raise(self._preserved_state.dangling(name, self._preserved(), self._graph_buffers()))

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
            self._fail("host-memory", f"{format_bytes(left)} of host memory are nobody's after {name}", amount=left)
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
        allowed = then + of_libraries + DRIVER_TOLERANCE + self._driver_of_imports() - self._imports_at_first
        # What it no longer reports does not count as released.
        left = wait_until_within(lambda: self._outside(first), allowed, DRIVER_PATIENCE, first)
        if left > allowed:
            said = (
                f"the driver counts {format_bytes(left - then)} more on {self._device} after {name} that nobody has: "
                f"{format_bytes(left)} outside arenas and torch's segments, {format_bytes(then)} before create"
            )
            self._fail("driver", said, amount=left - then)

    def _cover(self, before: str, call: str) -> None:
        after = self.model.situation
        self._lives.coverage.states |= {before, after}
        self._lives.coverage.edges.add((before, call, after))
