"""torch's allocation history on a card: switched on where nobody else uses it, and the stacks that it has."""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from lowtide.probes.device.torch_allocator import Segment, full_snapshot
from lowtide.probes.memory.stack_frames import StackFrame
from lowtide.probes.originals import StandIns, torch_with_cuda

_RECORD = "_record_memory_history"

_OF_PROGRAM = "_lowtide_history_of_program"
"""The attribute by which what stands in for torch's function says what the program has switched on."""


MOST_EVENTS = 1 << 17
"""Allocations and releases that are kept where their order is asked for: some hundred bytes each."""


def history_of_program(torch: Any) -> str | None:
    """Return which allocation history the program has switched on, as torch calls it; None where it has none.

    While a history is recorded here, torch says that one is on, whoever's it is.
    """
    told = getattr(getattr(torch.cuda.memory, _RECORD, None), _OF_PROGRAM, None)
    if told is not None:
        kind: str | None = told()
        return kind
    is_on = torch.cuda.is_initialized() and torch._C._cuda_isHistoryEnabled()
    return "all" if is_on else None


class CardHistory:
    """Switches the allocation history of torch's allocator on and off, where nobody else uses it.

    From `start` to `stop` torch's function that does so is stood in for, to know what the program has switched on.

    Args:
        initialized: called when torch has initialised CUDA, if that was waited for.

    Attributes:
        is_supported: whether there is such a history; None until that is known.
        waits: whether torch has yet to initialise CUDA, and will say so: until then there is nothing to start.
    """

    def __init__(self, initialized: Callable[[], None] = lambda: None) -> None:
        self._tell = initialized
        self.waits = False
        self._original: Any = None
        self._stand_ins = StandIns()
        self._of_program: str | None = None
        self._wanted = False
        self._queued = False
        self._wants_events = False
        self.is_supported: bool | None = None
        # Whether it was switched on here; what the user switched on is not to be switched off.
        self._ours = False

    def start(self, torch: Any) -> None:
        """Switch it on, now or when CUDA is initialised; legal twice."""
        self._wanted = True
        if not hasattr(torch._C, "_cuda_isHistoryEnabled"):  # torch for the CPU only
            self.is_supported = False
        if self.is_supported is False:
            return
        self._stand_ins.put(torch.cuda.memory, _RECORD, functools.partial(self._listening, torch))
        if torch.cuda.is_initialized():
            self._switch_on(torch)
        elif not self._queued and hasattr(torch.cuda, "_lazy_call"):
            self._queued = self.waits = True
            torch.cuda._lazy_call(self._initialized)

    def start_events(self, torch: Any) -> None:
        """Keep the allocations in their order, too, from here to `stop_events`, where the program has no history."""
        self._wants_events = True
        if self._ours and torch.cuda.is_initialized() and self._of_program is None:
            self._record(torch)

    def stop_events(self, torch: Any) -> None:
        """Keep the stack of each block in use alone again; legal twice."""
        if not self._wants_events:
            return
        self._wants_events = False
        if self._ours and torch.cuda.is_initialized() and self._of_program is None:
            # Only when it is off does torch forget the events; the blocks keep their stacks.
            self._original(None)
            self._record(torch)

    def stop(self, torch: Any) -> None:
        """Switch it off, unless the user switched it on; legal twice."""
        self.stop_events(torch)
        self._wanted = False
        if self._queued:
            self._queued = self.waits = False
            _take_from_queue(torch.cuda, self._initialized)
        # In a forked child it is not initialised, whatever it was in the parent.
        if self._ours and torch.cuda.is_initialized() and torch._C._cuda_isHistoryEnabled() and not _has_events(torch):
            self._original(None)
        self._ours = False
        self._stand_ins.restore()

    def _listening(self, torch: Any, original: Any) -> Any:
        self._original = original
        self._of_program = history_of_program(torch)

        def ours(enabled: Any = "all", *args: Any, **kwargs: Any) -> Any:
            result = original(enabled, *args, **kwargs)
            self._of_program = ("all" if enabled is True else enabled) or None
            return result

        setattr(ours, _OF_PROGRAM, lambda: self._of_program)
        return ours

    def _initialized(self) -> None:
        """Start the history where torch asks, while it initialises CUDA: the allocator is there already."""
        torch = torch_with_cuda()
        if self._wanted and torch is not None:
            self.waits = False
            self._switch_on(torch)
            self._tell()

    def _switch_on(self, torch: Any) -> None:
        try:
            if self.is_supported is None:
                # cudaMallocAsync and pluggable allocators have none; to try would leave a callback behind, and fail.
                self.is_supported = torch.cuda.get_allocator_backend() == "native"
            if self.is_supported and not torch._C._cuda_isHistoryEnabled():
                self._record(torch)
                self._ours = True
        except Exception:  # noqa: BLE001 - whatever it is, it would fail the user's initialisation of CUDA
            self.is_supported = False

    def _record(self, torch: Any) -> None:
        if self._wants_events:
            self._original("all", context="alloc", stacks="python", max_entries=MOST_EVENTS)
        else:
            self._original("state", context="alloc", stacks="python")


def _take_from_queue(cuda: Any, call: Any) -> None:
    """Take a call back from those that torch makes when it initialises CUDA; they stay queued after it, too."""
    queue = getattr(cuda, "_queued_calls", None)
    if isinstance(queue, list):
        with cuda._initialization_lock:
            queue[:] = [entry for entry in queue if entry[0] != call]


def _has_events(torch: Any) -> bool:
    """Return whether the history has a list of events: then the user has switched on another kind since.

    What is switched on here keeps one event at most.
    """
    try:
        return any(len(trace) > 1 for trace in full_snapshot(torch)["device_traces"])
    except RuntimeError:
        return False


class PeakBlock(NamedTuple):
    """Something that was allocated, and was there when there was most.

    Attributes:
        bytes: that were asked for.
        stack: Python's frames on which it was allocated, the innermost first.
        time: when, in microseconds since 1970.
        address: where it begins.
        is_alive: whether it is there still.
    """

    bytes: int
    stack: tuple[StackFrame, ...]
    time: int
    address: int
    is_alive: bool


def blocks_at_peak(torch: Any, index: int, counts: Callable[[int], bool]) -> list[PeakBlock]:
    """Return the blocks on a card that were there when most was allocated, by a history of events, whoever's that is.

    Args:
        torch: the module.
        index: of the card.
        counts: tells by the time of an allocation or a release, in microseconds since 1970, whether it counts.
    """
    try:
        traces = full_snapshot(torch)["device_traces"]
    except RuntimeError:  # cudaMallocAsync and pluggable allocators have none
        return []
    return parse_peak(traces[index] if index < len(traces) else (), counts)


def parse_peak(trace: Iterable[Mapping[str, Any]], counts: Callable[[int], bool]) -> list[PeakBlock]:
    """Return the same of the events of one card, as torch writes them."""
    # A block that waits for a stream is not allocated any more, as torch counts it.
    events = [
        event
        for event in trace
        if event["action"] in ("alloc", "free_requested") and counts(int(event.get("time_us", 0)))
    ]
    sums = list(itertools.accumulate(event["size"] * (1 if event["action"] == "alloc" else -1) for event in events))
    highest = max(range(len(sums)), key=sums.__getitem__, default=-1)
    there: dict[int, Mapping[str, Any]] = {}
    for event in events[: highest + 1]:
        if event["action"] == "alloc":
            there[event["addr"]] = event
        else:
            there.pop(event["addr"], None)
    freed = {event["addr"] for event in events[highest + 1 :] if event["action"] == "free_requested"}
    return [
        PeakBlock(
            event["size"],
            tuple(_frame(frame) for frame in event.get("frames") or () if _is_python(frame["filename"])),
            int(event.get("time_us", 0)),
            address,
            address not in freed,
        )
        for address, event in there.items()
    ]


def parse_stacks(
    segments: Iterable[Segment], device_index: int, addresses: Collection[int]
) -> dict[int, tuple[StackFrame, ...]]:
    """Find the blocks that hold the addresses, and the Python stacks with which they were allocated.

    Args:
        segments: as `torch.cuda.memory_snapshot()` gives them.
        device_index: index of the device; other devices have the same addresses.
        addresses: anywhere in a block.

    Returns:
        The stacks by address, the innermost frame first; without the addresses in no block in use and those in a block
        that was allocated while no history was recorded.
    """
    wanted = sorted(addresses)
    found: dict[int, tuple[StackFrame, ...]] = {}
    for segment in segments:
        if segment["device"] != device_index:
            continue
        for block in segment["blocks"]:
            frames = block.get("frames")
            # A free block may still show the stack of the one that had its memory before.
            if not frames or block["state"] == "inactive":
                continue
            first = bisect_left(wanted, block["address"])
            last = bisect_left(wanted, block["address"] + block["size"])
            if first < last:
                stack = tuple(_frame(frame) for frame in frames if _is_python(frame["filename"]))
                if stack:
                    found.update(dict.fromkeys(wanted[first:last], stack))
    return found


def _frame(frame: Mapping[str, Any]) -> StackFrame:
    return StackFrame(str(frame["filename"]), int(frame["line"]), str(frame["name"]))


def _is_python(file: str) -> bool:
    """Return whether a frame is Python's: a history that the user records may have those of C++ too."""
    return file.endswith(".py") or file.startswith("<")
