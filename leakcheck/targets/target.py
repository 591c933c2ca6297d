"""What an engine offers so that the fuzzer, the fault sweep and `lowtide check` can drive it, and where that runs.

Another process gets at the same target by the lines of Python that make it there.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import re
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from lowtide.probes.stages import UPDATE

if TYPE_CHECKING:
    import torch

    from lowtide.reports.schema import NotMeasured

_DEAF = """import signal
signal.signal(signal.SIGINT, lambda number, frame: None)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
"""
"""A handler, and nothing that an engine's own processes would inherit."""


class Device(str, Enum):
    """Where the engine runs."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


def device_name(device: Device) -> str:
    """Return the name that torch has for it; `auto` takes a card if there is one."""
    import torch

    if device is Device.CPU or (device is Device.AUTO and not torch.cuda.is_available()):
        return "cpu"
    return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cuda"


class TargetError(ValueError):
    """A target that cannot be driven; the message says what it must be."""


@dataclass(frozen=True)
class Capabilities:
    """What a target can do; what it cannot is never asked of it.

    Attributes:
        device: where it keeps its memory, "cpu" or "cuda:N".
        configs: what `create` may be given: for each setting the values that it may take, the simplest first.
        prompt_lengths: tokens of the prompts to infer from, the simplest first.
        max_requests: prompts of one call at most.
        max_tokens: new tokens of one request at most.
        unfinished: whether requests can be left unfinished: `start`, `step` and `abort`.
        sleep_levels: of `sleep`; none for an engine that does not sleep.
        sleep_modes: of `sleep`: `wait` runs unfinished requests to their end, `abort` ends them.
        preserving_levels: the levels from which the contents of `preserved()` come back with `wake`.
        emptying_levels: the levels at which the driver counts no more for the process than before `create`.
        wake_tags: parts that `wake` can be asked for one by one.
        prefix_cache: whether there is `reset_prefix_cache`.
        reload: whether there is `reload`.
        update_weights: whether there is `update_weights`.
        keeping_levels: the levels from which the weights that `update_weights` has sent come back with `wake`; after
            another one they are not compared until they are sent again.
        illegal_call: what an illegal call raises; None for an engine that does not promise anything.
        failure: what the engine may raise on purpose for a lack of memory or a copy that failed, instead of the error
            itself, which is then its cause.
    """

    device: str = "cpu"
    configs: Mapping[str, Sequence[Any]] = field(default_factory=lambda: MappingProxyType({}))
    prompt_lengths: Sequence[int] = (3, 17, 40)
    max_requests: int = 3
    max_tokens: int = 6
    unfinished: bool = False
    sleep_levels: Sequence[int] = ()
    sleep_modes: Sequence[str] = ("wait",)
    preserving_levels: Sequence[int] = ()
    emptying_levels: Sequence[int] = ()
    wake_tags: Sequence[str] = ()
    prefix_cache: bool = False
    reload: bool = False
    update_weights: bool = False
    keeping_levels: Sequence[int] = ()
    illegal_call: type[Exception] | None = None
    failure: tuple[type[Exception], ...] = ()

    def __post_init__(self) -> None:
        if not re.fullmatch(r"cpu|cuda:\d+", self.device):
            raise TargetError(f"capability device is {self.device!r}: write 'cpu', or a card with its number: 'cuda:0'")
        for name in ("max_requests", "max_tokens"):
            if getattr(self, name) < 1:
                raise TargetError(f"capability {name} is {getattr(self, name)}: it must be at least 1")
        if not self.prompt_lengths or min(self.prompt_lengths) < 1:
            raise TargetError(f"capability prompt_lengths is {self.prompt_lengths!r}: give lengths of at least 1")
        for name, values in self.configs.items():
            if not values:
                raise TargetError(f"capability configs has no value for {name!r}: give at least one")
        if unknown := set(self.sleep_modes) - {"wait", "abort"}:
            raise TargetError(f"capability sleep_modes has {sorted(unknown)}: 'wait' and 'abort' are known")
        if self.sleep_levels and not self.sleep_modes:
            raise TargetError("capability sleep_modes is empty: an engine that sleeps has at least 'wait'")
        for name in ("preserving_levels", "emptying_levels", "keeping_levels"):
            if extra := set(getattr(self, name)) - set(self.sleep_levels):
                raise TargetError(f"capability {name} has {sorted(extra)}, which are not in sleep_levels")


class LifecycleTarget(Protocol):
    """One engine after the other in one process; each life makes a new target.

    Only what the capabilities declare is called. Prompts are the target's own to make: equal lengths must give equal
    prompts, in every life, and decoding must not be random, or tokens cannot be compared.

    It may besides have `engine`, what a user of the engine holds, from which paths are reported; `state()`, which names
    the engine's own idea of its state (`new`, `running`, `asleep` or `closed`); `preserved()`, the tensors whose
    contents must survive a sleep, by name; `graph_buffers()`, address and bytes of what captured graphs read, by name;
    `kv_usage()`, an object with `total`, `available`, `evictable`, `held` and `pending_transfer` blocks; and for an
    engine in other processes `pages()`, the bytes with pages behind them by arena tag, and `injecting(injection)`, a
    context in which fault points there reach an `Injection`; each may return None.
    """

    @property
    def capabilities(self) -> Capabilities:
        """What it can do; the same for every target of a factory."""

    def create(self, config: Mapping[str, Any]) -> None:
        """Make the engine, with one value of each setting in `Capabilities.configs`; again after `shutdown`."""

    def infer(self, prompt_lengths: Sequence[int], max_tokens: int) -> Sequence[Sequence[int]]:
        """Generate for one prompt of each length to the end; the new tokens of each, `max_tokens` or fewer."""

    def shutdown(self) -> None:
        """Give everything back; legal in every state, and again."""


@runtime_checkable
class Stepwise(Protocol):
    """A target whose requests can be left unfinished (`unfinished`)."""

    def start(self, prompt_lengths: Sequence[int], max_tokens: int) -> Sequence[str]:
        """Queue one request per length; an id of each."""

    def step(self) -> Mapping[str, Sequence[int]]:
        """Make one step of the engine; return the tokens of the requests that it finished, by id."""

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests now."""


@runtime_checkable
class Sleeping(Protocol):
    """A target that sleeps (`sleep_levels`)."""

    def sleep(self, level: int, mode: str) -> Mapping[str, Sequence[int]]:
        """Give device memory back until `wake`; the tokens of the requests that this ran to their end, by id."""

    def wake(self, tags: Sequence[str] | None) -> None:
        """Take all of it again, or only the parts named."""


@runtime_checkable
class PrefixCaching(Protocol):
    """A target that forgets prefixes (`prefix_cache`)."""

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; whether that was possible."""


@runtime_checkable
class Reloading(Protocol):
    """A target that loads its weights anew in place (`reload`)."""

    def reload(self) -> None:
        """Load them."""


@runtime_checkable
class Updating(Protocol):
    """A target to which a trainer sends weights (`update_weights`).

    It may besides have `weights()`, which gives what the engine has, by name: tensors, or what distinguishes their
    contents, as a checksum.
    """

    def update_weights(self, version: int) -> Mapping[str, Any] | None:
        """Send the weights of a version: 0 those that `create` loads, 1 others, which give other tokens.

        Return what was sent, by name, as `weights` must give it from then on; None where only tokens are compared.
        """


@runtime_checkable
class Preserving(Protocol):
    """A target that reports what must survive a sleep."""

    def preserved(self) -> Mapping[str, torch.Tensor]:
        """Return the tensors, by name."""


TargetFactory = Callable[[], LifecycleTarget]


@dataclass(frozen=True)
class CallKind:
    """A call that a target may have.

    Attributes:
        arguments: by name, in their order, each with what it is where it is not given.
        capability: that declares the call; empty for one that every target has.
        phases: of an engine's life in which it is legal.
        with_weights: whether it is legal asleep, too, where the weights are awake.
        is_alone: whether it is not made, or is refused, while requests are unfinished.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    capability: str = ""
    phases: Sequence[str] = ("running",)
    with_weights: bool = False
    is_alone: bool = False


_REQUESTS: Mapping[str, Any] = {"prompt_lengths": None, "max_tokens": None}

CALLS: Mapping[str, CallKind] = {
    "create": CallKind({"config": None}, phases=("new", "closed")),
    "infer": CallKind(_REQUESTS, is_alone=True),
    "start": CallKind(_REQUESTS, "unfinished"),
    "step": CallKind({}, "unfinished"),
    "abort": CallKind({"count": 1}, "unfinished"),
    "sleep": CallKind({"level": None, "mode": "wait"}, "sleep_levels"),
    "wake": CallKind({"tags": None}, "sleep_levels", phases=("asleep",)),
    "reset_prefix_cache": CallKind({}, "prefix_cache"),
    "reload": CallKind({}, "reload", with_weights=True, is_alone=True),
    UPDATE: CallKind({"version": None}, "update_weights", with_weights=True, is_alone=True),
    "shutdown": CallKind(phases=("new", "running", "asleep", "closed")),
}
"""All calls, by name, in the order in which a life may first make them."""


def calls_of(capabilities: Capabilities) -> tuple[str, ...]:
    """Return the names of the calls that a target with these capabilities has, in whatever state."""
    return tuple(name for name, kind in CALLS.items() if not kind.capability or getattr(capabilities, kind.capability))


def make_target(factory: TargetFactory) -> LifecycleTarget:
    """Make a new target, checked for having what it declares.

    Raises:
        TargetError: it cannot be made, or lacks a method, or one that takes what that is called with.
    """
    try:
        target = factory()
    except TargetError:
        raise
    except Exception as error:  # any factory may raise anything
        raise TargetError(f"{factory!r} made no target: it raised {type(error).__name__}: {error}") from error
    capabilities = getattr(target, "capabilities", None)
    if not isinstance(capabilities, Capabilities):
        raise TargetError(f"{factory!r} made a {type(target).__name__} without `capabilities`: give it Capabilities(…)")
    missing = [name for name in calls_of(capabilities) if not callable(getattr(target, name, None))]
    if missing:
        raise TargetError(
            f"{type(target).__name__} declares what it does not have: add the methods {', '.join(missing)}, or do not "
            "declare them in its capabilities"
        )
    for name in calls_of(capabilities):
        _check_arguments(target, name)
    return target


def _check_arguments(target: LifecycleTarget, name: str) -> None:
    """Refuse a method that cannot take the arguments of its call."""
    arguments = CALLS[name].arguments
    try:
        signature = inspect.signature(getattr(target, name))
    except (TypeError, ValueError):
        # What is written in C may not say what it takes.
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise TargetError(
            f"{type(target).__name__}.{name} cannot be called: {error}; write "
            f"`def {name}({', '.join(['self', *arguments])})`"
        ) from error


class Unjudged:
    """A target in calls of which nothing is judged, as before the first life: what they raise says what to do."""

    def __init__(self, target: LifecycleTarget) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return the call of that name, which raises nothing but `TargetError`."""
        method = getattr(self._target, name)

        def call(*arguments: Any) -> Any:
            try:
                return method(*arguments)
            except Exception as error:  # any engine may raise anything
                last = traceback.extract_tb(error.__traceback__)[-1]
                said = " ".join(f"{type(error).__name__}: {error}".split())
                again = "; lives make engines one after the other in this process" if name == "create" else ""
                raise TargetError(
                    f"{name} raised {said} ({last.filename}:{last.lineno}), before any life was judged{again}: "
                    "`lowtide check` judges a life up to the call that raises"
                ) from error

        return call


class Answer(NamedTuple):
    """What a target must return from a call, or from what is asked of it.

    Attributes:
        words: what it is.
        is_right: returns whether it is that.
        may_be_none: whether it may be None, too.
    """

    words: str
    is_right: Callable[[Any], bool]
    may_be_none: bool = False


def _has_length(said: Any) -> bool:
    # A tensor with one value has the method, and no length.
    return hasattr(said, "__len__") and getattr(said, "shape", (1,)) != ()


def _is_list(said: Any, each: Callable[[Any], bool] = lambda part: True) -> bool:
    return _has_length(said) and not isinstance(said, Mapping) and all(map(each, said))


def _is_by_name(said: Any, each: Callable[[Any], bool] = lambda part: True) -> bool:
    return isinstance(said, Mapping) and all(map(each, said.values()))


_USAGE = ("total", "available", "evictable", "held", "pending_transfer")
_BY_NAME = Answer("a mapping by name, or None", _is_by_name, may_be_none=True)
_FINISHED = Answer(
    "the tokens of the requests that it finished, by their ids", lambda said: _is_by_name(said, _has_length)
)

ANSWERS: Mapping[str, Answer] = {
    "infer": Answer("one sequence of token ids for each prompt", lambda said: _is_list(said, _has_length)),
    "start": Answer("one id for each request", _is_list),
    "step": _FINISHED,
    "sleep": _FINISHED._replace(words=f"{_FINISHED.words}, or None", may_be_none=True),
    UPDATE: _BY_NAME,
    "weights": _BY_NAME,
    "pages": _BY_NAME,
    "preserved": Answer(
        "tensors by name, or None",
        lambda said: _is_by_name(said, lambda part: hasattr(part, "data_ptr")),
        may_be_none=True,
    ),
    "graph_buffers": Answer(
        "address and bytes of each, by name, or None",
        lambda said: _is_by_name(said, lambda part: _has_length(part) and len(part) == 2),
        may_be_none=True,
    ),
    "kv_usage": Answer(
        f"an object with {', '.join(_USAGE)}, or None",
        lambda said: all(hasattr(said, name) for name in _USAGE),
        may_be_none=True,
    ),
}
"""By the names of the calls that return something which is looked into."""


def answered(name: str, said: Any, *, count: int | None = None) -> Any:
    """Return what a target has returned from a call, once it is what it must be.

    Args:
        name: the call's.
        said: that.
        count: how many things it must be, where that is known.

    Raises:
        TargetError: that is not what it must return.
    """
    answer = ANSWERS.get(name)
    if answer is None or (said is None and answer.may_be_none):
        return said
    if not answer.is_right(said) or (count is not None and len(said) != count):
        raise TargetError(f"{name} returned {_in_short(said)}: it must return {answer.words}")
    return said


def _in_short(said: Any) -> str:
    """Return `list of 2 int`, without the values, whose own texts might be long, or raise."""
    name = type(said).__name__
    if not _has_length(said):
        return name
    first = next(iter(said.values() if isinstance(said, Mapping) else said), None) if len(said) else None
    return f"{name} of {len(said)}" + ("" if first is None else f" {type(first).__name__}")


def load_factory(name: str, arguments: Sequence[str] = ()) -> TargetFactory:
    """Import the factory that `MODULE:FACTORY` names; the current directory is looked in too.

    Raises:
        TargetError: there is none, or its import fails.
    """
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise TargetError(f"{name!r} names no target: write MODULE:FACTORY, such as my_engine.target:make")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except ModuleNotFoundError as error:
        raise TargetError(f"{name!r}: {error}; it is looked for from {Path.cwd()}") from error
    except AttributeError as error:
        raise TargetError(f"{name!r}: {error}") from error
    except Exception as error:  # any module may raise anything
        raise TargetError(f"{name!r}: importing {module_name} raised {type(error).__name__}: {error}") from error
    if not callable(found):
        raise TargetError(f"{name!r} is a {type(found).__name__}: it must be a callable that makes a target")
    factory: TargetFactory = functools.partial(found, *arguments) if arguments else found
    return factory


@dataclass(frozen=True)
class TargetSource:
    """How a program gets at a target.

    Attributes:
        imports: lines that come first, sorted: imports, and names for what is used again.
        factory: an expression for what makes a target.
        context: an expression for a context manager around it all, such as a defect; may be empty.
    """

    imports: Sequence[str]
    factory: str
    context: str = ""

    def program(self, module: str, function: str, *arguments: object) -> str:
        """Python that calls a module's function with the factory and these arguments, within the context."""
        imports = sorted({*self.imports, f"from {module} import {function}"})
        call = f"{function}({', '.join([self.factory, *map(repr, arguments)])})"
        within = [f"with {self.context}:", f"    {call}"] if self.context else [call]
        return "\n".join([*imports, *within])


def start_program(program: str, *, env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen[bytes]:
    """Start a process of its own that runs Python, and finds the modules that this one finds.

    A terminal's Ctrl-C, which it gets from its beginning on, is for the one who has started it, and ends it.

    Args:
        program: its text.
        env: variables of its environment besides this one's.
        options: of `subprocess.Popen`.
    """
    paths = os.pathsep.join(entry for entry in sys.path if entry)
    known = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        return subprocess.Popen(
            [sys.executable, "-c", _DEAF + program], env={**os.environ, "PYTHONPATH": paths, **(env or {})}, **options
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, known)


@dataclass(frozen=True)
class Subjected:
    """What is fuzzed.

    Attributes:
        name: of the subject in the report.
        factory: makes a target.
        source: how a program gets at the same.
        context: what is switched on meanwhile.
        from_outside: the same for a program that will be killed, and must leave no files; None if `source` leaves none.
        thorough: the configuration whose faults are swept: with everything that can fail.
        not_measured: what cannot fail here, and why.
    """

    name: str
    factory: TargetFactory
    source: TargetSource
    context: AbstractContextManager[object]
    from_outside: TargetSource | None = None
    thorough: Mapping[str, Any] = field(default_factory=dict)
    not_measured: tuple[NotMeasured, ...] = ()


def named_target(name: str, arguments: Sequence[str] = ()) -> Subjected:
    """Return the user's own target, as MODULE:FACTORY.

    Raises:
        TargetError: there is none of that name.
    """
    module, _, attribute = name.partition(":")
    factory = load_factory(name, arguments)
    imports = [f"from {module} import {attribute.partition('.')[0]}"]
    if arguments:
        imports.insert(0, "from functools import partial")
        attribute = f"partial({', '.join([attribute, *map(repr, arguments)])})"
    return Subjected(name, factory, TargetSource(imports, attribute), nullcontext())
