"""Makes one operation of an engine fail: the k-th allocation, mapping, copy or whatever else can go wrong.

SQLite's tests fail every malloc in turn (sqlite.org/testing.html, "Anomaly Testing"); this is that for an engine's
life. A fault point is a place that is passed and may fail. Those of torch are found by a dispatch mode: whatever
operator returns memory that is not one of its arguments' allocates, by its own schema. Those of an engine's own
(driver calls, threads, collectives) are its `Seam`s; where it opens a shard of a checkpoint, a `ShardSeam`, it is given
a damaged copy instead.

A checkpoint is damaged in a copy of its shards: cut short, or with a tensor of another shape.
"""

from __future__ import annotations

import functools
import inspect
import json
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.leakcheck.resources.orphaned_files import OwnSegments
from lowtide.probes.allocation_stacks import keep_from_compiler
from lowtide.probes.originals import in_main_thread

Damage: TypeAlias = Literal["shard-cut", "shard-shape"]

_LENGTH = 8
"""Bytes of a safetensors file that say how long its header is; the header is JSON, the tensors' bytes follow it."""


def cut_short(shard: Path, copy: Path) -> None:
    """Write the first half of `shard` to `copy`, as a download that broke off leaves it."""
    left = shard.stat().st_size // 2
    with shard.open("rb") as source, copy.open("wb") as target:
        while left and (part := source.read(min(left, 16 << 20))):
            target.write(part)
            left -= len(part)


def misshape(shard: Path, copy: Path) -> None:
    """Write `shard`, a safetensors file, to `copy` with its last tensor of one dimension more: a valid file."""
    whole = shard.read_bytes()
    stop = _LENGTH + int.from_bytes(whole[:_LENGTH], "little")
    header: dict[str, dict[str, Any]] = json.loads(whole[_LENGTH:stop])
    name = next(name for name in reversed(header) if name != "__metadata__")
    header[name]["shape"] = [1, *header[name]["shape"]]
    encoded = json.dumps(header).encode()
    copy.write_bytes(len(encoded).to_bytes(_LENGTH, "little") + encoded + whole[stop:])


DAMAGES: Mapping[str, Callable[[Path, Path], None]] = {"shard-cut": cut_short, "shard-shape": misshape}
"""By kind of fault, what makes the copy."""


if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup

Kind: TypeAlias = Literal["allocation", "reserve", "map", "pin", "copy", "transfer", "collective", "interrupt"] | Damage

STANDING = "lowtide-standing "
"""What a line begins with in which a process says that it stands, and where."""

KINDS: Sequence[Kind] = (
    "allocation",
    "reserve",
    "map",
    "pin",
    "copy",
    "transfer",
    "collective",
    "shard-cut",
    "shard-shape",
    "interrupt",
)
"""What can fail: an operator of torch that allocates; an arena's address range, pages, or page-locking; a copy between
tensors; a copy in a thread of the engine's own; a collective, or what makes a group for it; a checkpoint's shard that
ends early, or whose tensor has the wrong shape. `interrupt` is Ctrl-C at any of these places."""


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


@dataclass(frozen=True)
class ShardSeam:
    """A function of an engine that opens the shard at the path that is its first argument, each time it needs it."""

    owner: Any
    name: str


class DamagedShardError(Exception):
    """Stands for what an engine raises over a damaged shard, which is its own to choose; never raised."""

    def __init__(self, shard: str) -> None:
        super().__init__(f"a damaged {shard}")
        self.shard = shard


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
        raised: what was raised, or stands for it; None before.
        is_elsewhere: whether another process has raised it: then it is known by its type and its words.
    """

    kind: Kind
    at: int | None = None
    passed: list[Passed] = field(default_factory=list)
    raised: BaseException | None = None
    is_elsewhere: bool = False
    _within: threading.local = field(default_factory=threading.local, repr=False)

    @contextmanager
    def within(self) -> Iterator[None]:
        """Let this thread pass no fault points meanwhile: they are part of one that it has passed."""
        depth = getattr(self._within, "depth", 0)
        self._within.depth = depth + 1
        try:
            yield
        finally:
            self._within.depth = depth

    def reach(self, kind: Kind, what: str, error: Callable[[str], BaseException]) -> None:
        """Pass a fault point: return, or raise."""
        if getattr(self._within, "depth", 0):
            return
        if self.kind == "interrupt":
            # Python delivers it to the main thread only.
            if not in_main_thread():
                return
            error = _interrupt
        elif kind != self.kind:
            return
        self.passed.append(Passed(kind, what))
        if self.raised is None and self.at == len(self.passed) - 1:
            self.raised = error(what)
            raise self.raised

    def open(self, shard: Path, folder: Path) -> Path:
        """Return the shard, or the damaged copy of it in `folder` that is to be opened instead."""
        if self.kind not in DAMAGES:
            self.reach("interrupt", f"open {shard.name}", _interrupt)
            return shard
        self.passed.append(Passed(self.kind, shard.name))
        if self.raised is not None or self.at != len(self.passed) - 1:
            return shard
        copy = folder / shard.name
        DAMAGES[self.kind](shard, copy)
        self.raised = DamagedShardError(shard.name)
        return copy

    def caused(self, error: BaseException, wrappers: tuple[type[BaseException], ...] = ()) -> bool:
        """Return whether `error` is what was raised, or has it as its cause below `wrappers`, at whatever depth.

        Over a damaged shard: whether it is one of `wrappers`, and names the file.
        """
        if isinstance(self.raised, DamagedShardError):
            return isinstance(error, wrappers) and self.raised.shard in str(error)
        current: BaseException | None = error
        while current is not None and not self._is_raised(current):
            if isinstance(current, BaseExceptionGroup):
                return any(self.caused(part, wrappers) for part in current.exceptions)
            if not isinstance(current, wrappers):
                return False
            current = current.__cause__
        return current is not None

    def _is_raised(self, error: BaseException) -> bool:
        if self.is_elsewhere and self.raised is not None:
            return type(error) is type(self.raised) and str(error) == str(self.raised)
        return error is self.raised


def _uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make torch.compile leave a `__torch_dispatch__` alone, without loading it where that can be."""
    try:
        keep_from_compiler(torch, function.__code__)
    except AttributeError:
        return cast(Callable[..., Any], torch.compiler.disable(function))  # type: ignore[no-untyped-call]
    return function


class _TorchFaults(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The fault points inside torch."""

    def __init__(self, injection: Injection, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._injection = injection
        self._device = device

    @_uncompiled
    def __torch_dispatch__(
        self, function: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, is_on_card = str(function), self._device != "cpu"
        if name.startswith("c10d."):
            self._injection.reach("collective", name, _timeout)
        elif name.startswith(("aten.copy_", "aten._to_copy")):
            kind = "CUDA error" if is_on_card else "error"
            self._injection.reach("copy", name, lambda what: RuntimeError(f"{kind}: {what} failed (injected)"))
        elif _allocates(function) and not _is_of_nothing(function, args):
            self._injection.reach("allocation", name, _no_card_memory if is_on_card else _no_memory)
        return function(*args, **(kwargs or {}))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


@contextmanager
def injecting(
    injection: Injection, seams: Sequence[Seam | ShardSeam] = (), *, device: str = "cpu"
) -> Iterator[Injection]:
    """Lead fault points of this thread's torch operators and of the seams to `injection` while it lasts."""
    with ExitStack() as stack:
        for seam in seams:
            if isinstance(seam, Seam):
                stand_in = functools.partial(_reaching, seam, injection)
            else:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lowtide-")))
                stand_in = functools.partial(_opening, injection, folder)
            stack.enter_context(_in_place(seam.owner, seam.name, stand_in))
        stack.enter_context(_TorchFaults(injection, device))
        yield injection


def injecting_into(target: Any, injection: Injection) -> AbstractContextManager[Injection]:
    """Lead fault points of a target's engine to `injection` while it lasts, in whichever process the engine has them.

    Args:
        target: a `LifecycleTarget`; one whose engine has other processes brings `injecting` of its own.
        injection: counts them and chooses the one that fails.
    """
    elsewhere = target.injecting(injection) if hasattr(target, "injecting") else None
    if elsewhere is not None:
        return cast(AbstractContextManager[Injection], elsewhere)
    seams = target.fault_seams() if hasattr(target, "fault_seams") else ()
    return injecting(injection, seams, device=target.capabilities.device)


@contextmanager
def _in_place(owner: Any, name: str, stand_in: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    # Not getattr: a static method must be put back as what it is.
    original = inspect.getattr_static(owner, name)
    is_inherited = name not in vars(owner)
    is_static = isinstance(original, staticmethod)
    call = stand_in(original.__func__ if is_static else original)
    setattr(owner, name, staticmethod(call) if is_static else call)
    try:
        yield
    finally:
        if is_inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


def _reaching(seam: Seam, injection: Injection, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        injection.reach(seam.kind, seam.name, seam.error)
        with injection.within() if seam.covers else nullcontext():
            return function(*args, **kwargs)

    return call


def _opening(injection: Injection, folder: Path, function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda shard, *args, **kwargs: function(injection.open(Path(shard), folder), *args, **kwargs)


def _allocates(function: Any) -> bool:
    """Return whether an operator returns memory that is not one of its arguments', according to its schema."""
    schema = function._schema
    return any(value.alias_info is None and "Tensor" in str(value.type) for value in schema.returns)


def _is_of_nothing(function: Any, args: Sequence[Any]) -> bool:
    """Return whether a size with a 0 in it is made: that takes no memory, and cannot fail for a lack of it."""
    arguments = function._schema.arguments
    return bool(args and arguments and arguments[0].name == "size" and 0 in args[0])


def _interrupt(what: str) -> BaseException:
    return KeyboardInterrupt(f"at {what}")


def _no_memory(what: str) -> BaseException:
    """Return what torch raises where there is no memory for an operator; `_no_card_memory` the same of a card."""
    return RuntimeError(f"[enforce fail] DefaultCPUAllocator: can't allocate memory for {what} (injected)")


def _no_card_memory(what: str) -> BaseException:
    return torch.OutOfMemoryError(f"CUDA out of memory in {what} (injected)")


def _timeout(what: str) -> BaseException:
    return torch.distributed.DistBackendError(f"{what}: timed out (injected)")


class Pause(Injection):
    """Stops where another injection would make something fail.

    Args:
        kind: of the points that are counted.
        at: which one is not passed, from 0 on.
        made: the shared memory that the process has made.
        points: how many of them the stage has.
    """

    def __init__(self, kind: Kind, at: int, made: OwnSegments, points: int) -> None:
        super().__init__(kind, at)
        self.points = points
        self._made = made

    def reach(self, kind: Kind, what: str, error: Callable[[str], BaseException]) -> None:
        """Pass a fault point: return, or stand still for ever."""
        before = len(self.passed)
        # The one that would be raised is where to stand.
        with suppress(KeyboardInterrupt):
            super().reach(kind, what, error)
        if self.raised is not None and len(self.passed) > before:
            self.stand()

    def stand(self) -> None:
        """Say where this is, and wait for the end."""
        message = {"at": len(self.passed), "points": self.points, "segments": sorted(self._made.names)}
        print(STANDING + json.dumps(message), flush=True)  # noqa: T201 - the witness reads it
        while True:
            signal.pause()
