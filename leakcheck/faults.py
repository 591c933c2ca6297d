"""Makes one operation of an engine fail: the k-th allocation, mapping, copy or whatever else can go wrong.

SQLite's tests fail every malloc in turn (sqlite.org/testing.html, "Anomaly Testing"); this is that for an engine's
life. A fault point is a place that is passed and may fail. Those of torch are found by a dispatch mode: whatever
operator returns memory that is not one of its arguments' allocates, by its own schema. Those of an engine's own
(driver calls, threads, collectives) are its `Seam`s.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch.utils._python_dispatch import TorchDispatchMode

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup

Kind: TypeAlias = Literal["allocation", "reserve", "map", "pin", "copy", "transfer", "collective", "interrupt"]

KINDS: Sequence[Kind] = (
    "allocation",
    "reserve",
    "map",
    "pin",
    "copy",
    "transfer",
    "collective",
    "interrupt",
)
"""What can fail: an operator of torch that allocates; an arena's address range, pages, or page-locking; a copy between
tensors; a copy in a thread of the engine's own; a collective. `interrupt` is Ctrl-C at any of
these places."""


@dataclass(frozen=True)
class Seam:
    """A function of an engine whose call is a fault point.

    Attributes:
        kind: what fails there.
        owner: the class or module that has it.
        name: of the attribute.
        error: makes what it raises; given a few words of what was asked for.
        covers: whether the fault points inside it are not counted: they are part of this one.
    """

    kind: Kind
    owner: Any
    name: str
    error: Callable[[str], BaseException]
    covers: bool = False


@dataclass
class Passed:
    """A fault point that was passed: its kind, and what was asked for."""

    kind: Kind
    what: str


@dataclass
class Injection:
    """Counts fault points, and makes one of them fail.

    Attributes:
        kind: the kind that is counted; `interrupt` counts all but those in threads.
        at: which one fails, from 0 on; None only counts.
        passed: the points of that kind that were passed so far.
        raised: what was raised; None before.
    """

    kind: Kind
    at: int | None = None
    passed: list[Passed] = field(default_factory=list)
    raised: BaseException | None = None
    _within: threading.local = field(default_factory=threading.local, repr=False)

    @contextmanager
    def within(self) -> Iterator[None]:
        """In here this thread passes no fault points: they are part of one that it has passed."""
        depth = getattr(self._within, "depth", 0)
        self._within.depth = depth + 1
        try:
            yield
        finally:
            self._within.depth = depth

    def reach(self, kind: Kind, what: str, error: Callable[[str], BaseException]) -> None:
        """A fault point: returns, or raises."""
        if getattr(self._within, "depth", 0):
            return
        if self.kind == "interrupt":
            # Python delivers it to the main thread only.
            if threading.current_thread() is not threading.main_thread():
                return
            error = _interrupt
        elif kind != self.kind:
            return
        self.passed.append(Passed(kind, what))
        if self.raised is None and self.at == len(self.passed) - 1:
            self.raised = error(what)
            raise self.raised

    def caused(self, error: BaseException, wrappers: tuple[type[BaseException], ...] = ()) -> bool:
        """Whether `error` is what was raised, or one of `wrappers` that has it as its cause, at whatever depth."""
        current: BaseException | None = error
        while current is not None and current is not self.raised:
            if isinstance(current, BaseExceptionGroup):
                return any(self.caused(part, wrappers) for part in current.exceptions)
            if not isinstance(current, wrappers):
                return False
            current = current.__cause__
        return current is not None


class _TorchFaults(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The fault points inside torch."""

    def __init__(self, injection: Injection, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._injection = injection
        self._device = device

    def __torch_dispatch__(
        self, function: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = str(function)
        if _is_collective(name):
            self._injection.reach("collective", name, _timeout)
        elif _is_copy(name):
            self._injection.reach("copy", name, lambda what: _copy_failed(what, self._device))
        elif _allocates(function):
            self._injection.reach("allocation", name, lambda what: _out_of_memory(what, self._device))
        return function(*args, **(kwargs or {}))


@contextmanager
def injecting(injection: Injection, seams: Sequence[Seam] = (), *, device: str = "cpu") -> Iterator[Injection]:
    """While it lasts, fault points of this thread's torch operators and of the seams reach `injection`.

    Args:
        injection: counts them and chooses the one that fails.
        seams: the engine's own.
        device: where the engine has its memory, for the words of torch's errors.
    """
    with ExitStack() as stack:
        for seam in seams:
            stack.enter_context(_patched(seam, injection))
        stack.enter_context(_TorchFaults(injection, device))
        yield injection


@contextmanager
def _patched(seam: Seam, injection: Injection) -> Iterator[None]:
    # Not getattr: a static method must be put back as what it is.
    original = vars(seam.owner)[seam.name]
    function = original.__func__ if isinstance(original, staticmethod) else original

    def call(*args: Any, **kwargs: Any) -> Any:
        injection.reach(seam.kind, seam.name, seam.error)
        with injection.within() if seam.covers else nullcontext():
            return function(*args, **kwargs)

    setattr(seam.owner, seam.name, staticmethod(call) if isinstance(original, staticmethod) else call)
    try:
        yield
    finally:
        setattr(seam.owner, seam.name, original)


def _allocates(function: Any) -> bool:
    """Whether an operator returns memory that is not one of its arguments', as its schema tells."""
    schema = function._schema
    return any(value.alias_info is None and "Tensor" in str(value.type) for value in schema.returns)


def _is_copy(name: str) -> bool:
    return name.startswith(("aten.copy_", "aten._to_copy"))


def _is_collective(name: str) -> bool:
    return name.startswith("c10d.")


def _interrupt(what: str) -> BaseException:
    return KeyboardInterrupt(f"at {what}")


def _out_of_memory(what: str, device: str) -> BaseException:
    """What torch raises where there is no memory for an operator."""
    if device == "cpu":
        return RuntimeError(f"[enforce fail] DefaultCPUAllocator: can't allocate memory for {what} (injected)")
    return torch.OutOfMemoryError(f"CUDA out of memory in {what} (injected)")


def _copy_failed(what: str, device: str) -> BaseException:
    return RuntimeError(f"{'CUDA error' if device != 'cpu' else 'error'}: {what} failed (injected)")


def _timeout(what: str) -> BaseException:
    return torch.distributed.DistBackendError(f"{what}: timed out (injected)")
