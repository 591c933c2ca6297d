"""Stage marks and announcements: the two things an engine calls, at next to no cost when nobody listens."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

UPDATE = "update_weights"
"""The stage in which a trainer sends an engine weights."""

PoolKind = Literal["arena", "pinned", "host"]


class PoolSourceError(RuntimeError):
    """An announced pool source that cannot be announced or read; the message names its type and says what to do."""


@dataclass(frozen=True, slots=True)
class EnteredStage:
    """One named span of an engine's life.

    Attributes:
        name: the innermost name.
        path: the names from the outermost stage to this one; ends in `name`.
        thread: the identifier of the thread that entered it (`threading.get_ident()`).
    """

    name: str
    path: tuple[str, ...]
    thread: int


class StageListener(Protocol):
    """Hears of every stage, in the thread that runs it."""

    def stage_entered(self, stage: EnteredStage) -> None:
        """Hear of `stage` before its body runs; an exception from here keeps the body from running."""

    def stage_left(self, stage: EnteredStage, error: BaseException | None) -> None:
        """Hear of `stage` after its body, with the exception that ended it or None."""


# A context variable, not a `threading.local`: it is as separate per thread (a new thread starts with an empty path),
# and besides it follows an asyncio task, where several requests interleave on one thread.
_path: ContextVar[tuple[str, ...]] = ContextVar("lowtide_stage_path", default=())

# Copied on write, so that entering a stage reads it without a lock.
_listeners: tuple[StageListener, ...] = ()
_listeners_lock = threading.Lock()

# Nsight Systems and Compute announce themselves to the NVTX library by this variable, before the process starts.
_nsight_attached = "NVTX_INJECTION64_PATH" in os.environ


class _Silence:
    """The shared stage of an engine to which nobody listens."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        return None


_SILENCE = _Silence()


def stage(name: str) -> AbstractContextManager[None]:
    """Mark a span of the engine's life: `with` it around the code that is the stage; stages nest.

    Costs under a microsecond when nobody listens and no profiler is on. Under torch's profiler the stage shows as
    `lowtide:<path>` in its events (and as an NVTX range under `emit_nvtx`), under Nsight as an NVTX range. The path
    holds the stages that were entered while somebody listened or a profiler was on.
    """
    if not _listeners and not _profiled():
        return _SILENCE
    return _OpenStage(name)


@contextlib.contextmanager
def listening(listener: StageListener) -> Iterator[None]:
    """Tell `listener` of every stage in every thread until the block ends.

    A listener that raises does not leave the stage half open. What it raises reaches the engine's caller; where the
    engine's own code raised too, the engine's exception is the one raised and the listener's is a note on it.
    """
    global _listeners
    with _listeners_lock:
        _listeners = (*_listeners, listener)
    try:
        yield
    finally:
        with _listeners_lock:
            _listeners = _without_last(_listeners, listener)


def _is_alone(listener: object) -> bool:
    """Return whether no other one than this listener is told of stages now."""
    return all(other is listener for other in _listeners)


def _without_last(listeners: tuple[StageListener, ...], gone: StageListener) -> tuple[StageListener, ...]:
    for index in range(len(listeners) - 1, -1, -1):
        if listeners[index] is gone:
            return listeners[:index] + listeners[index + 1 :]
    return listeners


def _tell_command() -> None:
    """Tell stages from here on to the command that runs this program, if it wants to know them."""
    global _listeners
    # The variable of the agents in a program's processes, in whose folder the command's socket is.
    path = f"{os.environ.get('LOWTIDE_AGENTS', '')}/stages"
    if os.access(path, os.F_OK):
        from lowtide.probes.reported_stages import StagesOfCommand

        with _listeners_lock:
            _listeners = (*_listeners, StagesOfCommand(path, _is_alone))


class _OpenStage:
    """A stage with listeners: calls the listeners, marks the profiler's timeline, keeps the path."""

    __slots__ = ("_close_range", "_name", "_notified", "_outer", "_stage")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._outer = _path.get()
        self._stage = EnteredStage(self._name, (*self._outer, self._name), threading.get_ident())
        self._close_range = _open_range("lowtide:" + "/".join(self._stage.path))
        _path.set(self._stage.path)
        notified: list[StageListener] = []
        self._notified = notified
        try:
            for listener in _listeners:
                listener.stage_entered(self._stage)
                notified.append(listener)
        except BaseException as error:
            # `__exit__` will not be called, so those who heard of the stage hear here that it is over.
            self._leave(error)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failed = self._leave(error)
        if error is None and failed is not None:
            raise failed

    def _leave(self, error: BaseException | None) -> BaseException | None:
        """Undoes `__enter__`; returns the listeners' first error, after noting it on `error` if there is one."""
        # Not `ContextVar.reset`, which raises where a generator is closed in another context than it began in.
        _path.set(self._outer)
        first = error
        for listener in reversed(self._notified):
            if not any(listener is still for still in _listeners):
                continue
            try:
                listener.stage_left(self._stage, error)
            except BaseException as failure:  # noqa: BLE001 - noted on the first error, or raised as the first
                if first is None:
                    first = failure
                else:
                    _note(first, failure, listener)
        if self._close_range is not None:
            self._close_range()
        return first


def _note(error: BaseException, failure: BaseException, listener: StageListener) -> None:
    """Write what a listener raised onto the exception that goes on instead of it."""
    report = "".join(traceback.format_exception(type(failure), failure, failure.__traceback__))
    text = f"the stage listener {type(listener).__name__} raised as well:\n{report}"
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:  # Python 3.10; the attribute that `add_note` fills, which pytest and the exceptiongroup backport read
        notes = [*getattr(error, "__notes__", ()), text]
        error.__notes__ = notes  # type: ignore[attr-defined]


def _profiled() -> bool:
    if _nsight_attached:
        return True
    # torch keeps this flag for the very purpose of a cheap check; `emit_nvtx` sets it too.
    profiler = sys.modules.get("torch.autograd.profiler")
    return profiler is not None and bool(getattr(profiler, "_is_profiler_enabled", False))


def _open_range(label: str) -> Callable[[], object] | None:
    """Open a range in whatever profiler is on; returns what closes it, or None where nothing records."""
    profiler = sys.modules.get("torch.autograd.profiler")
    if profiler is not None and getattr(profiler, "_is_profiler_enabled", False):
        # Under `emit_nvtx` torch itself turns a recorded function into an NVTX range, so one call serves both.
        recorded = profiler.record_function(label)
        recorded.__enter__()
        return lambda: recorded.__exit__(None, None, None)
    # The binding, not `torch.cuda.nvtx`, whose functions exist and raise in a build without CUDA.
    nvtx = getattr(sys.modules.get("torch._C"), "_nvtx", None) if _nsight_attached else None
    if nvtx is None:
        return None
    nvtx.rangePushA(label)
    return nvtx.rangePop  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class PoolReading:
    """Memory that an allocator outside torch holds under one tag on one device.

    Attributes:
        kind: `arena`, device memory (on a CPU engine: what stands for it) that torch's counters do not see; `pinned`,
            page-locked host buffers; `host`, ordinary host memory that the engine keeps, such as the image of
            sleeping weights.
        tag: the allocator's own name for it (`weights`, `kv_cache`).
        device: `cuda:0`, `cpu`.
        reserved: bytes of address range.
        mapped: bytes with physical pages behind them.
        ranges: address and length in bytes of each mapped part.
        span: address and length of the whole address range, whose other parts have no pages; None where it has none.
    """

    kind: PoolKind
    tag: str
    device: str
    reserved: int
    mapped: int
    ranges: tuple[tuple[int, int], ...]
    span: tuple[int, int] | None = None

    @property
    def addresses(self) -> tuple[tuple[int, int], ...]:
        """Address and length of what lies in the pool, with pages or without."""
        return self.ranges if self.span is None else (self.span,)


@runtime_checkable
class PoolSource(Protocol):
    """An allocator that reports what it holds."""

    def read_pools(self) -> Sequence[PoolReading]:
        """Tell what is held now; change nothing and allocate nothing on a device."""


@runtime_checkable
class PreservedSource(Protocol):
    """An engine, or a part of one, with tensors whose contents must survive a sleep."""

    def preserved_tensors(self) -> Mapping[str, torch.Tensor]:
        """Return these tensors by name. Asked right before a sleep and after a wake, when all of them have pages."""

    def graph_addresses(self) -> Mapping[str, tuple[int, int]]:
        """Address and length in bytes of what captured graphs read, by name, as it was at their capture."""


# Keyed by identity: a `WeakSet` would call the source's own `__hash__` and `__eq__`. Each change is one dict operation,
# atomic under the interpreter lock; a lock of ours could be asked for again by a callback that the collector runs.
_sources: dict[int, weakref.ref[PoolSource | PreservedSource]] = {}


def announce(source: PoolSource | PreservedSource) -> None:
    """Make `source` known to the probes, weakly: announcing keeps nothing alive. Announcing twice changes nothing.

    Raises:
        PoolSourceError: `source` cannot be referenced weakly, or has nothing to report.
    """
    if not isinstance(source, PoolSource | PreservedSource):
        raise PoolSourceError(
            f"{type(source).__name__} cannot be announced: it needs read_pools(), "
            "or preserved_tensors() and graph_addresses()"
        )
    key = id(source)
    try:
        # A callable written in C, in which no signal handler runs: what one raises in a callback is lost. It is called
        # with the reference, which `pop` takes for what to return where the key is not there.
        _sources[key] = weakref.ref(source, partial(_sources.pop, key))
    except TypeError as error:
        raise PoolSourceError(
            f"{type(source).__name__} cannot be announced, because it takes no weak reference; "
            "if it has __slots__, add '__weakref__' to them"
        ) from error


def withdraw(source: PoolSource | PreservedSource) -> None:
    """Forgets `source`; one that is not announced changes nothing."""
    _sources.pop(id(source), None)


def announced_pools() -> tuple[PoolReading, ...]:
    """Read every announced source that is still alive; sorted by device, kind and tag.

    Raises:
        PoolSourceError: a source raised; the message names it, the cause is its exception.
    """
    pools: list[PoolReading] = []
    for source in _living():
        if isinstance(source, PoolSource):
            pools.extend(_asked(source, "read_pools"))
    return tuple(sorted(pools, key=lambda pool: (pool.device, pool.kind, pool.tag, pool.ranges)))


@dataclass(frozen=True, slots=True)
class Preserved:
    """What announced sources say must survive a sleep, by name.

    Attributes:
        tensors: the tensors themselves.
        graph_addresses: address and length in bytes of what captured graphs read.
    """

    tensors: Mapping[str, torch.Tensor]
    graph_addresses: Mapping[str, tuple[int, int]]


def announced_preserved() -> Preserved:
    """Ask every announced source that is still alive for what must survive a sleep.

    Raises:
        PoolSourceError: a source raised; the message names it, the cause is its exception.
    """
    tensors: dict[str, torch.Tensor] = {}
    addresses: dict[str, tuple[int, int]] = {}
    for source in _living():
        if isinstance(source, PreservedSource):
            tensors.update(_asked(source, "preserved_tensors"))
            addresses.update(_asked(source, "graph_addresses"))
    return Preserved(tensors, addresses)


def _living() -> Iterator[PoolSource | PreservedSource]:
    for reference in list(_sources.values()):
        source = reference()
        if source is not None:
            yield source


def _asked(source: object, method: str) -> Any:
    try:
        return getattr(source, method)()
    except Exception as error:
        raise PoolSourceError(
            f"{type(source).__name__}.{method}() raised {type(error).__name__}: {error}; "
            "withdraw(source) if it can no longer tell what it holds"
        ) from error


_tell_command()
