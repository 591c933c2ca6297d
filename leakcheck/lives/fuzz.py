"""Property-based lives: calls in orders that nobody writes a test for, drawn and shrunk by Hypothesis.

A life that fails is made as short and as plain as can be, by leaving out one thing after the other.
"""

from __future__ import annotations

import secrets
import time
import unittest
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, ClassVar

import hypothesis
import msgspec
from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from msgspec.structs import replace

from lowtide.leakcheck.lives.checked_life import CheckedLife, Lives
from lowtide.leakcheck.lives.script import Call, Coverage, Fault, LifeError, LifeModel, failure_of
from lowtide.leakcheck.targets.faults import Kind
from lowtide.leakcheck.targets.target import Capabilities, TargetFactory, TargetSource
from lowtide.probes.stages import UPDATE
from lowtide.reports.schema import Finding, NotMeasured

Life = tuple[Call, ...]
Attempt = Callable[[Life], "Life | None"]


def shorten(life: Sequence[Call], fails: Callable[[Life], Life | None], able: Capabilities) -> Life:
    """Return a life that still fails, of which no call can be left out and no argument made simpler.

    Settings and faults first, because some settings (captured graphs, a process group) make a life on a card take ten
    times as long; then calls, in large parts and then one by one, because every life costs as much as it has calls;
    then arguments; and again, until none gets any further. (Zeller and Hildebrandt, "Simplifying and isolating
    failure-inducing input", 2002.)

    Args:
        life: that fails.
        fails: the calls of a life up to the one that fails; None if it passes, or fails in another way, or has a call
            that is out of place.
        able: what values are the simplest.
    """
    tried: set[str] = set()

    def attempt(candidate: Life) -> Life | None:
        written = repr(candidate)
        if written in tried:
            return None
        tried.add(written)
        return fails(candidate)

    best = _without_settings(tuple(life), attempt)
    while True:
        before = best
        best = _without_parts(best, attempt)
        best = _without_pairs(best, attempt)
        best = _with_plainer_calls(best, attempt, able)
        if best == before:
            return best


def _without_settings(life: Life, attempt: Attempt) -> Life:
    """Leave out all settings and all faults, else all faults, else one setting of all creates after the other."""
    names = dict.fromkeys(name for call in life for name in call.arguments.get("config", {}))
    plain = attempt(tuple(replace(_with_settings(call, ()), fault=None) for call in life))
    if plain is not None:
        return plain
    life = attempt(tuple(replace(call, fault=None) for call in life)) or life
    for left_out in names:
        kept = [name for name in names if name != left_out]
        plainer = attempt(tuple(_with_settings(call, kept) for call in life))
        if plainer is not None:
            life, names = plainer, dict.fromkeys(kept)
    return life


def _with_settings(call: Call, kept: Collection[str]) -> Call:
    """Return the call without the settings that are not kept."""
    config = call.arguments.get("config", {})
    if config.keys() <= set(kept):
        return call
    fewer = {name: value for name, value in config.items() if name in kept}
    return replace(call, arguments={"config": fewer} if fewer else {})


def _without_parts(life: Life, attempt: Attempt) -> Life:
    """Leave out halves, quarters, and so on to single calls, from the end."""
    size = len(life) // 2
    while size:
        at = len(life) - size
        while at >= 0:
            shorter = attempt(life[:at] + life[at + size :])
            life = life if shorter is None else shorter
            at = min(at, len(life)) - size
        size //= 2
    return life


def _without_pairs(life: Life, attempt: Attempt) -> Life:
    """Leave out two calls at a time that need each other: a sleep and its wake, a start and its steps."""
    at = len(life) - 2
    while at >= 0:
        for end in range(at + 1, len(life)):
            shorter = attempt(life[:at] + life[at + 1 : end] + life[end + 1 :])
            if shorter is not None:
                life = shorter
                break
        at = min(at - 1, len(life) - 2)
    return life


def _with_plainer_calls(life: Life, attempt: Attempt, able: Capabilities) -> Life:
    """Make one argument after the other plainer."""
    at = 0
    while at < len(life):
        for plainer in _plainer(life[at], able):
            simpler = attempt((*life[:at], plainer, *life[at + 1 :]))
            if simpler is not None:
                life = simpler
                break
        else:
            at += 1
    return life


def _plainer(call: Call, able: Capabilities) -> Iterator[Call]:
    if call.fault is not None:
        yield replace(call, fault=None)
        if call.fault.at:
            yield replace(call, fault=replace(call.fault, at=0))
            yield replace(call, fault=replace(call.fault, at=call.fault.at - 1))
    arguments = dict(call.arguments)
    for name in arguments.get("config", {}):
        yield _with_settings(call, arguments["config"].keys() - {name})
    if "prompt_lengths" in arguments:
        lengths = arguments["prompt_lengths"]
        for index, length in enumerate(lengths):
            if len(lengths) > 1:
                yield replace(call, arguments={**arguments, "prompt_lengths": lengths[:index] + lengths[index + 1 :]})
            for shorter in able.prompt_lengths:
                if shorter < length:
                    changed = [*lengths[:index], shorter, *lengths[index + 1 :]]
                    yield replace(call, arguments={**arguments, "prompt_lengths": changed})
    for fewer_tokens in dict.fromkeys((1, arguments.get("max_tokens", 1) - 1)):
        if 1 <= fewer_tokens < arguments.get("max_tokens", 1):
            yield replace(call, arguments={**arguments, "max_tokens": fewer_tokens})
    for name, simplest in (("level", able.sleep_levels[:1]), ("mode", able.sleep_modes[:1])):
        if name in arguments and simplest and arguments[name] != simplest[0]:
            yield replace(call, arguments={**arguments, name: simplest[0]})
    if "tags" in arguments:
        yield replace(call, arguments={})
    if arguments.get("count", 1) > 1:
        yield replace(call, arguments={"count": 1})


STEPS = 10
"""Calls of one life at most, besides the first `create` and the last `shutdown`."""

FAULTS: Sequence[Kind] = ("map", "map", "map", "map", "allocation", "reserve", "copy", "interrupt")
"""What may fail in a life: only what fails in the call itself, so that a life can be replayed.  Most often there is no
room: that is what happens."""

_MOVING = ("create", "sleep", "wake", "reload", UPDATE)

PLACES = (0, 1, 1, 2, 3)
"""Which fault point fails: one of the first, most often the second, when there is something to be undone.  The sweep of
`lowtide fuzz --faults` fails every one."""


class _TestCaseOf:
    """The `unittest.TestCase` of a machine, whose lives are watched while it runs."""

    def __get__(self, machine: object, cls: type[LifecycleMachine]) -> type[unittest.TestCase]:
        class TestCase(unittest.TestCase):
            settings = _settings(100, STEPS)

            def runTest(self) -> None:  # noqa: N802 - unittest's name
                with cls.lives:
                    run_state_machine_as_test(cls, settings=self.settings)
                    grown = cls.lives.processes.engine.findings_at_end()
                if grown:
                    raise failure_of(grown)

        TestCase.__name__ = TestCase.__qualname__ = f"{cls.__name__}.TestCase"
        return TestCase


class LifecycleMachine(RuleBasedStateMachine):
    """One life of a target, call by call; made for one target by `lifecycle_machine`."""

    TestCase = _TestCaseOf()  # type: ignore[assignment]
    lives: ClassVar[Lives]
    last: ClassVar[Sequence[Call]] = ()
    findings: ClassVar[Sequence[Finding]] = ()
    listener: ClassVar[Callable[[Coverage], None] | None] = None

    def __init__(self) -> None:
        super().__init__()
        self._life = CheckedLife(self.lives)
        self._failed = False

    @rule(data=st.data())
    def call(self, data: st.DataObject) -> None:
        """Make any call that is legal now, with any arguments; one time in a few one that is not."""
        model = self._life.model
        weighted = [name for name in model.legal for _ in range(_weight(name, model))]
        # Refused calls lead nowhere: one after the other would be a life of its own, and a dull one.
        illegal = bool(model.illegal) and not (self._life.calls and self._life.calls[-1].illegal)
        name = data.draw(_one_of([*weighted, *(["illegal"] if illegal else [])]), label="call")
        if name == "illegal":
            refused = data.draw(_one_of(model.illegal), label="refused")
            self._checked(lambda: self._life.illegal(refused))
            return
        drawn = self._arguments(name, data)
        fault = None if name == "abort" else self._fault(name, data)
        self._checked(lambda: self._life.make(Call.of(name, *drawn, fault=fault)))

    def teardown(self) -> None:
        """Shut down what still runs, and judge; then this life is one more that was lived."""
        cls = type(self)
        try:
            if not self._failed:
                self._checked(self._life.close)
        finally:
            if self._failed:
                self._life.abandon()
            if cls.listener is not None:
                cls.listener(self.lives.coverage)

    def _arguments(self, name: str, data: st.DataObject) -> tuple[Any, ...]:
        able = self.lives.capabilities
        if name == "create":
            return ({key: data.draw(_one_of(values), label=key) for key, values in able.configs.items()},)
        if name in ("infer", "start"):
            lengths = st.lists(_one_of(able.prompt_lengths), min_size=1, max_size=able.max_requests)
            # One step, one more after the first, and many.
            most = _one_of(sorted({1, min(2, able.max_tokens), able.max_tokens}))
            return data.draw(lengths, label="prompt_lengths"), data.draw(most, label="max_tokens")
        if name == "abort":
            return (data.draw(st.integers(1, len(self._life.model.unfinished)), label="count"),)
        if name == "sleep":
            level = data.draw(_one_of(able.sleep_levels), label="level")
            return level, data.draw(_one_of(able.sleep_modes), label="mode")
        if name == "wake":
            # All of it most often: then there are two halves that it can fail between.
            parts: list[list[str] | None] = [None, None, None, *([tag] for tag in self._life.model.wakeable)]
            return (data.draw(_one_of(parts), label="tags"),)
        if name == UPDATE:
            return (data.draw(_one_of((1, 0)), label="version"),)
        return ()

    def _fault(self, name: str, data: st.DataObject) -> Fault | None:
        """Draw what fails in a call, one time in a few: most often in those that move memory."""
        odds = (False, True) if name in _MOVING else (False, False, False, True)
        if not data.draw(st.sampled_from(odds), label="fault"):
            return None
        kind = data.draw(st.sampled_from(FAULTS), label="kind")
        return Fault(kind, data.draw(_one_of(PLACES), label="at"))

    def _checked(self, call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            self._failed = True
            self.lives.coverage.failed = True
            cls = type(self)
            cls.last = tuple(self._life.calls)
            cls.findings = error.findings if isinstance(error, LifeError) else ()
            raise


def lifecycle_machine(factory: TargetFactory) -> type[LifecycleMachine]:
    """Make the state machine of a target, whose `TestCase` a test module takes: `TestLives = Machine.TestCase`.

    Subclass it for more rules and invariants; `TestCase.settings` are Hypothesis's.

    Raises:
        TargetError: what it makes cannot be driven.
    """
    return _machine(Lives(factory), None)


class Found(msgspec.Struct, frozen=True):
    """What a search found, and how long it took.

    Attributes:
        findings: of the shortest life that fails; none if no life did.
        life: that life's calls.
        reason: what ended the search without a result; empty where nothing did.
        not_measured: what could not be judged.
        seed: that of the search.
    """

    coverage: Coverage
    seconds: float
    findings: tuple[Finding, ...] = ()
    life: tuple[Call, ...] = ()
    reason: str = ""
    not_measured: tuple[NotMeasured, ...] = ()
    seed: int = 0


def fuzz(
    factory: TargetFactory,
    *,
    examples: int = 100,
    seed: int | None = None,
    steps: int = STEPS,
    listener: Callable[[Coverage], None] | None = None,
) -> Found:
    """Search for a life in which something is wrong.

    Args:
        factory: makes a target.
        examples: lives to try.
        seed: of the search; the same finds the same.  None draws one, and looks first at what failed the last time.
        steps: calls of one life at most.
        listener: hears of the coverage after each life, also of those that shorten one that fails.

    Raises:
        TargetError: what the factory makes cannot be driven.
    """
    lives = Lives(factory, explain=False)
    machine = _machine(lives, listener)
    # The life that fails is shortened by its calls, which takes some thirty lives where shrinking takes five hundred.
    phases = [Phase.generate] if seed is not None else [Phase.reuse, Phase.generate]
    wanted = settings(_settings(examples, steps), phases=phases)
    # Where `CI` is set, Hypothesis would draw the same lives each night.
    seed = secrets.randbelow(1 << 32) if seed is None else seed
    machine = hypothesis.seed(seed)(machine)
    started = time.perf_counter()
    with lives:
        # From here on: not what it takes to load the libraries.
        started = time.perf_counter()
        try:
            run_state_machine_as_test(machine, settings=wanted)
        except LifeError as failure:
            kind = failure.kind

            def attempt(calls: Sequence[Call]) -> tuple[Call, ...] | None:
                failing = _failing(lives, calls, kind)
                if listener is not None:
                    listener(lives.coverage)
                return failing

            life = shorten(machine.last, attempt, lives.capabilities)
            seconds = time.perf_counter() - started
            # Only now, of the one life that is shown, who holds what.
            findings = replay(factory, life) or failure.findings
            return Found(lives.coverage, seconds, findings, life, not_measured=lives.unmeasured, seed=seed)
        except hypothesis.errors.Flaky as error:
            seconds = time.perf_counter() - started
            why = f"a life that failed did not fail again: {error}"
            findings = tuple(machine.findings)
            return Found(lives.coverage, seconds, findings, tuple(machine.last), why, lives.unmeasured, seed)
        # No single life shows it, so there is none to be shortened.
        grown = tuple(lives.processes.engine.findings_at_end())
    return Found(lives.coverage, time.perf_counter() - started, grown, not_measured=lives.unmeasured, seed=seed)


def replay(factory: TargetFactory, life: Sequence[Call]) -> tuple[Finding, ...]:
    """Return what is wrong in a life, with who holds what it leaves; nothing if it passes.

    Raises:
        TargetError: what the factory makes cannot be driven.
    """
    with Lives(factory) as lives:
        checked = CheckedLife(lives)
        try:
            for call in life:
                checked.make(call)
            checked.close()
        except LifeError as error:
            checked.abandon()
            return error.findings
    return ()


def _failing(lives: Lives, calls: Sequence[Call], kind: tuple[str, str]) -> tuple[Call, ...] | None:
    """Return the calls up to the one that fails in this way; None if none does, or one is not to be made there."""
    life = CheckedLife(lives)
    try:
        for call in calls:
            if call.name not in (life.model.illegal if call.illegal else life.model.legal):
                break
            life.make(call)
        else:
            life.close()
            return None
        life.abandon()
    except LifeError as error:
        life.abandon()
        return tuple(life.calls) if error.kind == kind else None
    return None


def as_program(life: Sequence[Call], source: TargetSource) -> str:
    """Write a life as Python that runs on its own, and fails as the life did."""
    names = ["CheckedLife", *(["Fault"] if any(call.fault for call in life) else []), "Lives"]
    imports = sorted([*source.imports, f"from lowtide.leakcheck.checked_life import {', '.join(names)}"])
    opened = f"{source.context}, " if source.context else ""
    lines = [*imports, "", f"with {opened}Lives({source.factory}) as lives:", "    life = CheckedLife(lives)"]
    return "\n".join([*lines, *(f"    life.{call}" for call in life), "    life.close()", ""])


def _machine(lives: Lives, listener: Callable[[Coverage], None] | None) -> type[LifecycleMachine]:
    members = {"lives": lives, "listener": None if listener is None else staticmethod(listener)}
    return type("TargetMachine", (LifecycleMachine,), members)


def _settings(examples: int, steps: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
        # The life is printed by its caller, in its own way.
        verbosity=Verbosity.quiet,
    )


def _weight(name: str, model: LifeModel) -> int:
    """Return how often a call is made, beside the others that are legal: what leads on comes most."""
    if name in ("step", "abort") and not model.unfinished:
        return 0
    if name == "shutdown":
        return 0 if model.phase in ("new", "closed") else 1
    return {"create": 6, "infer": 4, "reset_prefix_cache": 4, "sleep": 5, "wake": 8, "abort": 1}.get(name, 2)


def _one_of(values: Sequence[Any]) -> st.SearchStrategy[Any]:
    return st.sampled_from(list(values))
