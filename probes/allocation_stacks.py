"""From where memory was allocated: torch's allocation history on a card, a dispatch mode for the CPU's storages."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from itertools import islice
from operator import attrgetter
from pathlib import PurePath
from types import CodeType, FrameType
from typing import Any, NamedTuple

from lowtide.probes.device.allocation_history import CardHistory, PeakBlock, blocks_at_peak, parse_stacks
from lowtide.probes.device.torch_allocator import Segment, all_segments
from lowtide.probes.memory.stack_frames import StackFrame
from lowtide.probes.originals import initialized_torch, loaded, sys, time, torch_with_cuda

_OWN_MODULES = ("lowtide.probes.", "lowtide.leakcheck.", "lowtide.pytest_plugin.")
OWN_FOLDERS = tuple(
    str(PurePath(__file__).parents[1] / name) + os.sep for name in ("probes", "leakcheck", "pytest_plugin")
)
"""Where the checker's own code lies: what it allocates is none of the program's."""

_DISPATCH_FILES = (
    "/torch/utils/_python_dispatch.py",
    "/torch/_ops.py",
    "/torch/_compile.py",
    "/torch/_dynamo/eval_frame.py",
)
"""Through these runs an op that a dispatch mode sees, or a function that is compiled or kept from it."""

_MOST_ADDRESSES = 1 << 16
"""Addresses of which the CPU's recorder remembers a stack: 6 MB with their keys, the stacks not counted."""

_MOST_STACKS = 1 << 12
"""Different stacks that it shares between addresses: 2 KB each at a depth of 32."""

# Not `Exception`: an alarm's handler may raise the program's own while recording, and that is not to be lost.
_RECORDING_ERRORS = (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError)

# From Python 3.11 on, a code object knows the names around its own.
_name_of: attrgetter[str] = attrgetter("co_qualname" if hasattr(CodeType, "co_qualname") else "co_name")

_FlatStack = tuple[Any, ...]
"""File, line, function of each frame, one after the other: a third of the objects that tuples of three would be."""


class AllocationStacks:
    """Remembers from where memory is allocated, so that what survives can be traced to a line of Python.

    On a card torch's own allocator does it: its allocation history, in the mode that keeps the stack of each block in
    use and no list of events (half a microsecond per allocation). It is switched on as soon as CUDA is initialised and
    never initialises it. A program that records a history itself is left alone, and its stacks are read. If the program
    switches it off, the next `start` switches it on again.

    On the CPU torch keeps no such record, so there it takes a dispatch mode (`TorchDispatchMode`), in the threads that
    called `start`: 6 to 15 µs for an op that allocates, 5 for another, and so only if asked for. Under that mode:

    - `torch.compile` compiles as it does without, and nothing is compiled again: torch takes modes away while it
      compiles, this one says that it ignores what happens inside (`ignore_compile_internals`), sets none of the flags
      by which older versions would run everything eagerly, and its own code is marked as not to be compiled. What
      inductor's code allocates itself is not dispatched, and so has no stack; what eager ops around it allocate has.
    - Autograd, `no_grad`, `inference_mode`, vmap and the other transforms, `make_fx`, fake tensors, `swap_tensors`, and
      higher-order operators work as without. What is allocated inside a higher-order operator is not seen, only what
      it returns. Tensor subclasses and modes of the program are asked as without.
    - `torch.jit.trace` of a function that computes with Python numbers fails, as in any dispatch mode (torch 2.13):
      torch hands those numbers over as numbers, and they are tensors there.
    - An address whose memory was freed and then taken by something that is not dispatched (`torch.UntypedStorage`,
      `torch.frombuffer`, inductor's code, another thread) still has the older stack: the freeing is not observed.

    Args:
        card: whether to switch the card's history on.
        cpu: whether to watch the CPU's storages.
        depth: frames to keep of each stack, the innermost ones.

    Attributes:
        has_work: whether `start` may find something to switch on: not if only cards' memory is followed, with a torch
            for the CPU only or before it has initialised CUDA.
    """

    def __init__(self, *, card: bool = True, cpu: bool = False, depth: int = 32) -> None:
        self._depth = depth
        self.has_work = card or cpu
        self._history = CardHistory(self._note_work) if card else None
        self._recorder = _CpuRecorder(depth) if cpu else None

    def start(self) -> None:
        """Begin to record, as far as torch is loaded; legal twice, and to be called again when it may be by now."""
        torch = torch_with_cuda()
        if torch is None:
            return
        if self._history is not None:
            self._history.start(torch)
            self._note_work()
        if self._recorder is not None:
            self._recorder.start(torch)

    def stop(self) -> None:
        """End it; legal twice. What was recorded can still be read.

        The CPU's mode is taken off the calling thread; on another one it stays, and does nothing any more.
        """
        torch = torch_with_cuda()
        if torch is None:
            return
        if self._history is not None:
            self._history.stop(torch)
            self._note_work()
        if self._recorder is not None:
            self._recorder.stop(torch)

    def _note_work(self) -> None:
        history = self._history
        has_history = history is not None and history.is_supported is not False and not history.waits
        self.has_work = self._recorder is not None or has_history

    def stacks_at(self, device: str, addresses: Collection[int]) -> dict[int, tuple[StackFrame, ...]]:
        """Return the stacks from which the memory at some addresses was allocated, the innermost frame first.

        The checker's own frames and those of torch's dispatcher are left out.

        Args:
            device: `cpu`, `cuda:0`.
            addresses: on a card, anywhere in a block of torch's allocator; on the CPU, of storages.

        Returns:
            The stacks by address, without the addresses of which no stack is known.
        """
        if not addresses:
            return {}
        kind, _, index = device.partition(":")
        found: dict[int, tuple[StackFrame, ...]] = {}
        if kind == "cuda":
            found = parse_stacks(_segments(), int(index or 0), addresses)
        elif kind == "cpu" and self._recorder is not None:
            found = self._recorder.stacks_at(addresses)
        # Most addresses share their stack with others.
        cut: dict[tuple[StackFrame, ...], tuple[StackFrame, ...]] = {}
        for stack in found.values():
            if stack not in cut:
                cut[stack] = _without_machinery(stack)[: self._depth]
        return {address: cut[stack] for address, stack in found.items() if cut[stack]}

    def start_peak(self) -> None:
        """Follow from here to `take_peak` when most is allocated."""
        torch = torch_with_cuda()
        if torch is not None and self._history is not None:
            self._history.start_events(torch)
        if self._recorder is not None:
            self._recorder.peak = PeakOfStorages()

    def pause_peak(self, *, paused: bool) -> None:
        """Pause it, or go on: what is allocated in between is somebody else's."""
        if self._recorder is not None and self._recorder.peak is not None:
            self._recorder.peak.is_paused = paused

    def take_peak(self, devices: Iterable[str], counts: Callable[[int], bool]) -> dict[str, list[PeakBlock]]:
        """End it; what was there at the peak of some devices, as far as its allocation was recorded.

        Args:
            devices: `cpu`, `cuda:0`.
            counts: see `blocks_at_peak`; what was allocated on the CPU in a pause does not count in any case.
        """
        torch = torch_with_cuda()
        found: dict[str, list[PeakBlock]] = {}
        for device in devices:
            index = device.partition(":")[2]
            if index and torch is not None and self._history is not None:
                found[device] = blocks_at_peak(torch, int(index), counts)
            elif not index and self._recorder is not None and self._recorder.peak is not None:
                found[device] = self._recorder.peak.blocks()
        if self._recorder is not None:
            self._recorder.peak = None
        if torch is not None and self._history is not None:
            self._history.stop_events(torch)
        return {
            device: [block._replace(stack=_without_machinery(block.stack)[: self._depth]) for block in blocks]
            for device, blocks in found.items()
        }


def _segments() -> list[Segment]:
    """Return what torch's allocators hold, with the stacks; empty if they cannot report it."""
    torch = initialized_torch()
    return [] if torch is None else all_segments(torch)[0] or []


class _Live(NamedTuple):
    reference: Any
    bytes: int
    stack: _FlatStack
    made_at: int


_STEP = 1 / 64
"""By what part of the most so far there must be more before it is looked at what of it is there."""


class PeakOfStorages:
    """Knows which of the CPU's storages that ops have allocated were there when there was most, to within 2 %.

    By weak references to the storages, which keep no memory: nobody sees a storage being freed, but whether it is there
    is asked when the sum of all may be a new maximum.

    Attributes:
        is_paused: whether what is allocated is somebody else's.
    """

    def __init__(self) -> None:
        self.is_paused = False
        self._live: dict[int, _Live] = {}
        self._sum = self._most = 0
        self._at_peak: dict[int, _Live] = {}

    def add(self, address: int, storage: Any, stack: _FlatStack) -> None:
        """Take in a storage that was allocated just now."""
        if self.is_paused:
            return
        reference: Any = loaded("torch.multiprocessing.reductions").StorageWeakRef
        # Of one that is gone, in whose place this one is.
        before = self._live.pop(address, None)
        made = _Live(reference(storage), int(storage.nbytes()), stack, time.time_ns() // 1000)
        self._live[address] = made
        self._sum += made.bytes - (0 if before is None else before.bytes)
        if self._sum > self._most * (1 + _STEP):
            self._live = {each: live for each, live in self._live.items() if not live.reference.expired()}
            self._sum = sum(live.bytes for live in self._live.values())
            if self._sum > self._most:
                self._most, self._at_peak = self._sum, dict(self._live)

    def blocks(self) -> list[PeakBlock]:
        """Return those at the peak."""
        return [
            PeakBlock(live.bytes, _unfolded(live.stack), live.made_at, address, not live.reference.expired())
            for address, live in self._at_peak.items()
        ]


def _unfolded(flat: _FlatStack) -> tuple[StackFrame, ...]:
    # A frame of generated code may have no line.
    return tuple(StackFrame(flat[at], flat[at + 1] or 0, flat[at + 2]) for at in range(0, len(flat), 3))


class _CpuRecorder:
    """Remembers the stack of what the CPU's ops allocate, by the address of the storage.

    Attributes:
        active: whether to record; a mode that cannot be taken off its thread does nothing while this is False.
        peak: follows when most was allocated; None: nobody asks.
    """

    def __init__(self, depth: int) -> None:
        self.active = False
        self.peak: PeakOfStorages | None = None
        self._depth = depth
        self._mode: Any = None
        self._stacks: dict[int, _FlatStack] = {}
        self._shared: dict[_FlatStack, _FlatStack] = {}

    def start(self, torch: Any) -> None:
        if self._mode is None and not self._prepare(torch):
            return
        if not self.active:
            # In between nothing was recorded: what is known may be of memory that was freed since.
            self._stacks.clear()
            self.active = True
        if not any(torch._C._get_dispatch_stack_at(at) is self._mode for at in range(_modes(torch))):
            # Not `__enter__`: it sets flags for all threads, which would make older versions run eagerly what is to be
            # compiled, and which only come right if modes are left in the reverse order.
            torch._C._push_on_torch_dispatch_stack(self._mode)

    def stop(self, torch: Any) -> None:
        self.active = False
        self.peak = None
        self._shared.clear()
        if self._mode is None:
            return
        above = []
        stack = [torch._C._get_dispatch_stack_at(at) for at in range(_modes(torch))]
        if any(mode is self._mode for mode in stack):
            # The user may have entered one after it and not left it yet.
            while (top := torch._C._pop_torch_dispatch_stack(None)) is not self._mode:
                above.append(top)
            for mode in reversed(above):
                torch._C._push_on_torch_dispatch_stack(mode)

    def stacks_at(self, addresses: Collection[int]) -> dict[int, tuple[StackFrame, ...]]:
        unfolded: dict[_FlatStack, tuple[StackFrame, ...]] = {}
        found = {}
        for address in addresses:
            flat = self._stacks.get(address)
            if flat is None:
                continue
            if flat not in unfolded:
                unfolded[flat] = _unfolded(flat)
            found[address] = unfolded[flat]
        return found

    def addresses(self, args: object, kwargs: dict[str, object]) -> set[int]:
        """Return the addresses of the storages that an op is given."""
        found = set()
        try:
            for tensor in self._tensors(args):
                found.add(self._address(tensor))
            if kwargs:
                for tensor in self._tensors(tuple(kwargs.values())):
                    found.add(self._address(tensor))
        except _RECORDING_ERRORS:
            pass
        return found

    def note(self, func: object, before: set[int], result: object, caller: FrameType) -> None:
        """Remembers the stack of what an op has allocated.

        Args:
            func: the op.
            before: the addresses of what it was given, as they were before it: it may have moved them.
            result: what it returned.
            caller: the frame to begin with.
        """
        try:
            if func is self._lift:
                # `torch.tensor` allocates unseen, and then hands what it made over to this.
                before = set()
            fresh = self._fresh_addresses(before, result)
            if func is self._set_storage:
                # Made unseen too, unless it is a storage that is known. (That of the op with an offset is made to
                # rebuild a tensor: `torch.load`, `deepcopy`.)
                fresh = {address: tensor for address, tensor in fresh.items() if address not in self._stacks}
            if fresh:
                stack = self._walk(caller)
                for address, tensor in fresh.items():
                    # First out, for what was remembered last to be at the end.
                    self._stacks.pop(address, None)
                    self._stacks[address] = stack
                    if self.peak is not None:
                        with self._no_functions():
                            self.peak.add(address, tensor.untyped_storage(), stack)
                if len(self._stacks) > _MOST_ADDRESSES:
                    self._drop_oldest()
        except _RECORDING_ERRORS:
            pass

    def _prepare(self, torch: Any) -> bool:
        """Make the mode; False if torch is not what it is known to be, and so nothing can be recorded."""
        dispatch: Any = loaded("torch.utils._python_dispatch")
        try:
            self._tensor = torch.Tensor
            self._plain = (torch.Tensor, torch.nn.Parameter)
            # Of the storage, and asking for it makes no Python object of it and no copy of a copy-on-write one.
            self._data_address = torch._C._data_address
            self._no_functions = torch._C.DisableTorchFunction
            self._lift = torch.ops.aten.lift_fresh.default
            self._set_storage = torch.ops.aten.set_.source_Storage
            self._mode = _make_mode(torch, dispatch, self)
        except AttributeError:
            return False
        return True

    def _tensors(self, value: object) -> list[Any]:
        if isinstance(value, self._tensor):
            return [value]
        if isinstance(value, (tuple, list)):
            return [tensor for item in value for tensor in self._tensors(item)]
        return []

    def _address(self, tensor: Any) -> int:
        try:
            return int(self._data_address(tensor))
        except RuntimeError:  # no storage: sparse, mkldnn, a transform's wrapper
            return 0

    def _fresh_addresses(self, before: set[int], result: object) -> dict[int, Any]:
        """Return the addresses of the CPU's storages in a result that were not there before, with a tensor each."""
        fresh = {}
        for tensor in self._tensors(result):
            # What another type says of itself may be made up, or run its own code.
            if any(type(tensor) is plain for plain in self._plain):
                address = self._address(tensor)
                if address and address not in before:
                    # The program's function modes would see the question for the device.
                    with self._no_functions():
                        if tensor.is_cpu:
                            fresh[address] = tensor
        return fresh

    def _walk(self, frame: FrameType | None) -> _FlatStack:
        """Return the stack from a frame outwards, the checker's own frames left out."""
        flat: list[object] = []
        most = 3 * self._depth
        while frame is not None and len(flat) < most:
            module = frame.f_globals.get("__name__")
            if type(module) is not str or not module.startswith(_OWN_MODULES):
                code = frame.f_code
                flat += (code.co_filename, frame.f_lineno, _name_of(code))
            frame = frame.f_back
        if len(self._shared) > _MOST_STACKS:
            self._shared.clear()
        stack = tuple(flat)
        return self._shared.setdefault(stack, stack)

    def _drop_oldest(self) -> None:
        # Many at once: each look for the first key of a dict passes over all keys that were taken out before it.
        for address in list(islice(self._stacks, _MOST_ADDRESSES // 4)):
            self._stacks.pop(address, None)


def _modes(torch: Any) -> int:
    """Return the number of dispatch modes of the calling thread."""
    return int(torch._C._len_torch_dispatch_stack())


def _make_mode(torch: Any, dispatch: Any, recorder: _CpuRecorder) -> Any:
    """Return an instance of a mode that runs every op through `_dispatch`; not entered."""
    base = dispatch.TorchDispatchMode
    keep_from_compiler(torch, _dispatch.__code__)

    class AllocationMode(base):  # type: ignore[misc, valid-type]
        """Tells the recorder of every op."""

        # Else such operators refuse to run.
        supports_higher_order_operators = True
        __torch_dispatch__ = _dispatch

        @classmethod
        def ignore_compile_internals(cls) -> bool:
            return True

        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False

    mode = AllocationMode()
    mode.recorder = recorder
    mode.plain = torch._C._disabled_torch_dispatch_impl
    mode.others = torch._C._len_torch_dispatch_stack
    return mode


def _dispatch(
    mode: Any, func: Any, types: Collection[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """Run an op, with its mode taken off, and has it recorded."""
    recorder: _CpuRecorder = mode.recorder
    kwargs = kwargs or {}
    if not recorder.active:
        return func(*args, **kwargs)
    if types and any(kind.__torch_dispatch__ is not mode.plain for kind in types):
        # Of a subclass with a dispatcher of its own. If torch asks that, and not this mode, then what it allocates is
        # seen; but a mode below this one would not be asked either.
        return func(*args, **kwargs) if mode.others() else NotImplemented
    before = recorder.addresses(args, kwargs)
    result = func(*args, **kwargs)
    recorder.note(func, before, result, sys._getframe(1))
    return result


def _without_machinery(stack: Iterable[StackFrame]) -> tuple[StackFrame, ...]:
    """Return the stack without the checker's frames, and those through which a dispatch mode has sent the op."""
    return tuple(
        frame for frame in stack if not frame.file.startswith(OWN_FOLDERS) and not frame.file.endswith(_DISPATCH_FILES)
    )


def keep_from_compiler(torch: Any, code: CodeType) -> None:
    """Mark a `__torch_dispatch__` as not to be compiled, nor what it calls.

    Torch wraps that of each mode for the same end (`torch._disable_dynamo`), unless the mode's `_should_skip_dynamo`
    says no; its wrapper imports the whole compiler at the first op: seconds, and some 70 MiB.

    Args:
        torch: the module.
        code: of the method.

    Raises:
        AttributeError: this version of torch does it in another way.
    """
    dynamo = torch._C._dynamo.eval_frame
    skip = dynamo._FrameExecStrategy(dynamo._FrameAction.SKIP, dynamo._FrameAction.SKIP)
    dynamo.set_code_exec_strategy(code, skip)
