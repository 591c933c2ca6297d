"""What a life is made of: the engine that is driven, the stages of its script, and how one is performed.

Its calls are written down as they are made, with how one fails; `LifeModel` says which are legal, and what the engine
must be in after them. `Interrupts` remembers a Ctrl-C that gets lost: Python drops what is raised in a finalizer, and
an engine may catch anything.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

from lowtide.leakcheck.targets.target import CALLS, CallKind, Capabilities, answered, calls_of
from lowtide.probes.originals import in_main_thread, signal
from lowtide.probes.stages import UPDATE
from lowtide.reports.schema import Finding, Stage

if TYPE_CHECKING:
    from lowtide.leakcheck.targets.faults import Kind

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup


_KINDS: dict[tuple[str, str], type[LifeError]] = {}

SCRIPT = ("create", "infer", "sleep(1)", "wake", "infer", "sleep(2)", "wake", "infer", "shutdown")
"""One whole life."""

UPDATES = (f"{UPDATE}(1)", "infer", f"{UPDATE}(0)", "infer")
"""What comes before the shutdown of an engine to which a trainer sends weights: others, and those of before."""

JUDGEMENT = "judgement"
"""What an event calls the time after a shutdown, in which it is judged what the life has left."""

_WITH_NUMBER = re.compile(r"(\w+)(?:\((\d+)\))?")

Phase: TypeAlias = Literal["new", "running", "asleep", "closed"]


class Event(msgspec.Struct, frozen=True):
    """What a listener hears before each stage, and before a life is judged: how far the run is, and what it has read.

    Attributes:
        cycle: the life, from 1 on, of `cycles`.
        stage: what starts now, `JUDGEMENT` after a shutdown.
        done: stages of all lives that are done, of `total`.
        sizes: bytes at the latest reading, by name; whole numbers alone, so that whoever keeps them keeps nothing of
            what is measured.
        latest_stages: gives some of the last stages as a report has them; to be asked while the listener hears of it.
    """

    cycle: int
    cycles: int
    stage: str
    done: int
    total: int
    sizes: Mapping[str, int] = msgspec.field(default_factory=dict)
    latest_stages: Callable[[int], Sequence[Stage]] = lambda most: ()

    @property
    def text(self) -> str:
        """`cycle 1/2: infer`."""
        return f"cycle {self.cycle}/{self.cycles}: {self.stage}"


def parsed(name: str) -> tuple[str, int | None]:
    """Return what a stage of a script calls, and the level or version in it: ("sleep", 1) for `sleep(1)`."""
    method, number = _WITH_NUMBER.fullmatch(name).groups()  # type: ignore[union-attr]
    return method, None if number is None else int(number)


def asked(engine: object, name: str) -> Any:
    """Return what a life, or a target, says of itself; None where it does not."""
    method = getattr(engine, name, None)
    return None if method is None else answered(name, method())


def told(engine: object, name: str) -> Mapping[str, Any]:
    """Return what a life, or a target, says of itself by name; nothing where it does not."""
    return asked(engine, name) or {}


def surviving(engine: object) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the tensors whose contents must survive a sleep, and the places that captured graphs read, by name."""
    return told(engine, "preserved"), told(engine, "graph_buffers")


def parts_of(error: BaseException) -> list[BaseException]:
    """Return the errors in a group and in those within it; the error itself where it is none."""
    if isinstance(error, BaseExceptionGroup):
        return [part for inner in error.exceptions for part in parts_of(inner)]
    return [error]


class LifeError(AssertionError):
    """A call of a life did not do what it must; `findings` say what.

    Each kind of finding has a subclass of its own, so that a search that shrinks a failing life keeps to the same one.
    """

    findings: tuple[Finding, ...] = ()
    kind: tuple[str, str] = ("", "")


class Fault(msgspec.Struct, frozen=True):
    """What is to fail in a call: the fault point number `at`, from 0 on, of a kind; None counts them only."""

    kind: Kind
    at: int | None = 0


class Call(msgspec.Struct, frozen=True):
    """One call of a life, as it was made: with what was to fail in it, and whether it had to be refused (`illegal`)."""

    name: str
    arguments: Mapping[str, Any] = msgspec.field(default_factory=dict)
    fault: Fault | None = None
    illegal: bool = False

    @classmethod
    def of(cls, name: str, *given: Any, fault: Fault | None = None, **named: Any) -> Call:
        """Return the call of a name with these arguments, in their order or by name."""
        known = CALLS[name].arguments
        arguments = {**known, **dict(zip(known, given, strict=False)), **named}
        return cls(name, {key: value for key, value in arguments.items() if value is not None}, fault)

    def __str__(self) -> str:
        parts = [f"{name}={value!r}" for name, value in self.arguments.items()]
        if self.fault is not None:
            parts.append(f"fault={self.fault!r}")
        if self.illegal:
            return f"illegal({', '.join([repr(self.name), *parts])})"
        return f"{self.name}({', '.join(parts)})"


class Coverage(msgspec.Struct):
    """What the lives of one search have been through."""

    lives: int = 0
    calls: int = 0
    states: set[str] = msgspec.field(default_factory=set)
    edges: set[tuple[str, str, str]] = msgspec.field(default_factory=set)
    failed: bool = False


def simplest(capabilities: Capabilities) -> dict[str, Any]:
    """Return the first value of every setting."""
    return {name: values[0] for name, values in capabilities.configs.items()}


def varied(capabilities: Capabilities) -> list[dict[str, Any]]:
    """Return the simplest configuration, and it with each other value of each setting."""
    plain = simplest(capabilities)
    others = [(name, value) for name, values in capabilities.configs.items() for value in dict.fromkeys(values[1:])]
    return [plain, *({**plain, name: value} for name, value in others if value != plain[name])]


def failure_of(findings: Sequence[Finding]) -> LifeError:
    """Return the failure that has these findings; its class is that of the first one's resource and cause."""
    kind = (findings[0].resource, findings[0].cause)
    if kind not in _KINDS:
        _KINDS[kind] = type("LifeError", (LifeError,), {"kind": kind, "__module__": __name__})
    failure = _KINDS[kind]("; ".join(finding.message for finding in findings))
    failure.findings = tuple(findings)
    return failure


class LifeModel(msgspec.Struct):
    """The state of one target, derived from the calls that succeeded.

    Attributes:
        capabilities: of the target.
        phase: where it is in its life.
        awake: of the wake tags, those that are awake.
        unfinished: (prompt length, max_tokens) of the requests that have not ended, by id.
        level: of the last sleep; 0 before the first.
        version: of the weights that it has; None where a sleep has let go of those that were sent.
    """

    capabilities: Capabilities
    phase: Phase = "new"
    awake: set[str] = msgspec.field(default_factory=set)
    unfinished: dict[str, tuple[int, int]] = msgspec.field(default_factory=dict)
    level: int = 0
    version: int | None = 0

    @property
    def legal(self) -> tuple[str, ...]:
        """The calls that must succeed now."""
        return tuple(name for name in calls_of(self.capabilities) if self._is_legal(CALLS[name]))

    def _is_legal(self, kind: CallKind) -> bool:
        if self.unfinished and kind.is_alone:
            return False
        return self.phase in kind.phases or (kind.with_weights and self.phase == "asleep" and "weights" in self.awake)

    @property
    def illegal(self) -> tuple[str, ...]:
        """The calls that must be refused now; none for a target that does not promise to."""
        if self.capabilities.illegal_call is None:
            return ()
        return tuple(call for call in calls_of(self.capabilities) if call not in self.legal)

    def given(self, call: Call) -> tuple[Any, ...]:
        """Return what the target's own method gets where a call is made now."""
        arguments = {**CALLS[call.name].arguments, **call.arguments}
        if call.name == "create":
            return ({**simplest(self.capabilities), **(arguments["config"] or {})},)
        if call.name == "abort":
            return (list(self.unfinished)[: arguments["count"]],)
        return tuple(arguments.values())

    @property
    def wakeable(self) -> tuple[str, ...]:
        """The parts that can be asked for one by one now."""
        return tuple(tag for tag in self.capabilities.wake_tags if tag not in self.awake)

    @property
    def situation(self) -> str:
        """The state in a word, as coverage counts it."""
        if self.phase == "running":
            return "running, requests unfinished" if self.unfinished else "running"
        if self.phase == "asleep":
            awake = f", {' and '.join(sorted(self.awake))} awake" if self.awake else ""
            return f"asleep at level {self.level}{awake}"
        return self.phase

    def created(self) -> None:
        """Note that `create` succeeded."""
        self.phase, self.version = "running", 0
        self.awake = set(self.capabilities.wake_tags)

    def started(self, ids: Sequence[str], prompt_lengths: Sequence[int], max_tokens: int) -> None:
        """Note that `start` succeeded."""
        self.unfinished |= {each: (length, max_tokens) for each, length in zip(ids, prompt_lengths, strict=True)}

    def ended(self, ids: Iterable[str]) -> Mapping[str, tuple[int, int]]:
        """End requests; return (prompt length, max_tokens) of those that were unfinished."""
        return {each: self.unfinished.pop(each) for each in ids if each in self.unfinished}

    def slept(self, level: int) -> None:
        """Note that `sleep` succeeded."""
        self.phase, self.level = "asleep", level
        if not self.keeps(level):
            self.version = None
        self.awake.clear()
        self.unfinished.clear()

    def keeps(self, level: int) -> bool:
        """Return whether the present weights come back with the wake from a sleep of a level."""
        return self.version == 0 or level in self.capabilities.keeping_levels

    def woke(self, tags: Sequence[str] | None) -> None:
        """Note that `wake` succeeded."""
        self.awake |= set(self.capabilities.wake_tags if tags is None else tags)
        if self.awake >= set(self.capabilities.wake_tags):
            self.phase = "running"

    def shut_down(self) -> None:
        """Note that `shutdown` succeeded, or raised: the engine is closed either way."""
        if self.phase != "new":
            self.phase = "closed"
        self.awake.clear()
        self.unfinished.clear()


class Interrupts:
    """While it is entered, remembers that there was a Ctrl-C, which is raised as ever.

    Only in the main thread, and only where nobody but another one of these has taken the signal over, whose Ctrl-C is
    this one's, too; else it hears nothing.
    """

    def __init__(self) -> None:
        self.heard = False
        self._before: Any = None

    def __enter__(self) -> Interrupts:
        self.heard = False
        if in_main_thread():
            before = signal.getsignal(signal.SIGINT)
            outer = getattr(before, "__self__", None)
            if before is signal.default_int_handler or isinstance(outer, Interrupts):
                self.heard = isinstance(outer, Interrupts) and outer.heard
                self._before = before
                signal.signal(signal.SIGINT, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None

    def raise_if_heard(self) -> None:
        """Raise again what nobody may have seen.

        Raises:
            KeyboardInterrupt: there was one since this was entered.
        """
        if self.heard:
            raise KeyboardInterrupt

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.heard = True
        self._before(number, frame)
