"""A card's first use, and what it takes for good: a context, a handle of the BLAS library, buffers for a first graph.

On an H200 that is some 700 MiB that nobody gives back, behind which a raw allocation of the first test would not be
seen: so a card is used once before a test does (`WarmUp`). Each later thread that uses the BLAS library takes a handle,
an allocation of 64 MiB and two small ones that torch does not count (measured with torch 2.11). torch keeps the handles
of threads that have ended in a pool and hands them to later threads (`ATen/cuda/CublasHandlePool.cpp`), so that as many
stay as there were threads at once (`BlasHandles`). Until torch has initialised a card, nothing on it can be judged, and
that is said (`CardsWithoutTorch`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lowtide.probes.device.allocations import AllocationsError, read_allocations
from lowtide.probes.device.contexts import cards_with_contexts
from lowtide.probes.device.torch_allocator import initialized_torch, read_segments
from lowtide.probes.host.counters import Counters
from lowtide.probes.memory.ranges import Range, common
from lowtide.probes.originals import in_main_thread, loaded, os, threading, weakref
from lowtide.reports.schema import CardMemory, NotMeasured, OtherProcess

_PATIENCE = 20.0
"""Seconds to wait for the threads of a trial: a first BLAS call loads a library."""

_MOST_THREADS = 32
"""Handles that one trial may ask for: each takes 96 MiB of the card where it is not there yet."""

_SMALLEST = 1 << 20
"""Bytes of the part by which a handle is known: the others are of a size that anything may have."""


@dataclass(frozen=True)
class Trial:
    """What a trial has shown.

    Attributes:
        kept: those of the allocations that are idle handles, by name.
        taken: address and bytes of what the trial itself has taken anew, which stays as well.
    """

    kept: frozenset[str] = frozenset()
    taken: tuple[Range, ...] = ()


class BlasHandles:
    """Knows what a handle takes on each card, and finds by trial how many idle ones there are."""

    def __init__(self) -> None:
        self._sizes: dict[int, tuple[int, ...]] = {}
        self._idle: dict[int, int] = {}

    def learn(self, index: int, before: Sequence[Range], after: Sequence[Range]) -> None:
        """Note what the first BLAS call of this thread took.

        Args:
            index: of the card, as torch numbers it.
            before: the driver's allocations before the call.
            after: those after it.
        """
        self._sizes.setdefault(index, tuple(sorted((size for _, size in _new(index, before, after)), reverse=True)))

    def tried(self, index: int, items: Mapping[str, int]) -> Trial:
        """Return which of some new allocations are idle handles.

        So many threads at once use the library as there would be idle handles; only what they do not have to take anew
        was there. What they take anew stays, as idle handles.

        Args:
            index: of the card.
            items: the allocations, in bytes, by name.
        """
        sizes = self._sizes.get(index, ())
        if not sizes or sizes[0] < _SMALLEST:
            return Trial()
        candidates = sum(size == sizes[0] for size in items.values())
        wanted = self._idle.get(index, 0) + candidates
        if not candidates or wanted > _MOST_THREADS:
            return Trial()
        try:
            before = read_allocations(index) or ()
            has_worked = _use_at_once(index, wanted)
            new = _new(index, before, read_allocations(index) or ())
        except AllocationsError:  # then nothing is excused
            return Trial()
        if not has_worked:
            return Trial(taken=tuple(new))
        self._idle[index] = wanted
        taken = sum(size == sizes[0] for _, size in new)
        found: set[str] = set()
        for size, count in Counter(sizes).items():
            alike = [name for name, held in items.items() if held == size and name not in found]
            found.update(alike[: count * max(0, candidates - taken)])
        return Trial(frozenset(found), tuple(new))


def _new(index: int, before: Sequence[Range], after: Sequence[Range]) -> list[Range]:
    """Return each allocation that was not there before and is not torch's."""
    known = set(before)
    segments = [(address, size) for _, address, size, _ in read_segments(index) or ()]
    return [entry for entry in after if entry not in known and not common([entry], segments)]


def _use_at_once(index: int, count: int) -> bool:
    """Return whether so many threads, each with a handle, came to the end of a small matrix product."""
    meeting = threading.Barrier(count)
    done: list[bool] = []

    def work() -> None:
        try:
            multiply(index)
            meeting.wait(_PATIENCE)
            done.append(True)
        except (RuntimeError, threading.BrokenBarrierError):  # no memory for another handle, or another thread's error
            meeting.abort()

    threads = [threading.Thread(target=work, name="lowtide-blas", daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_PATIENCE)
    return len(done) == count


def multiply(index: int) -> None:
    """Multiply small matrices on a card: the first time in a thread takes a handle."""
    torch: Any = loaded("torch")
    with torch.no_grad():
        ones = torch.ones(64, 64, device=f"cuda:{index}")
        torch.mm(ones, ones)
        torch.cuda.synchronize(index)


class WarmUp:
    """Warms the current card up, once per process.

    A process that does not use a card must not get a context by being judged: a child that it forks could not use the
    card any more. So the card is warmed up in the moment in which torch initialises it, unless it is to be at once.

    Args:
        handles: learn what the first handle of the BLAS library took.
        around: called with what warms the card up; everything that appears meanwhile is the process's own.
    """

    def __init__(self, handles: BlasHandles, around: Callable[[Callable[[], None]], None]) -> None:
        self._handles = handles
        self._around = around
        self._queued: Callable[[], None] | None = None
        self.is_done = False
        self._problem = ""

    def queue(self) -> None:
        """Have it done as soon as torch initialises a card; legal again and again, before torch is there too."""
        torch: Any = loaded("torch")
        # While torch is being imported it has no such functions yet.
        if self.is_done or not hasattr(getattr(torch, "cuda", None), "_queued_calls"):
            return
        if initialized_torch() is not None:
            self.now()
        if self.is_done or self._queued is not None:
            return
        # Torch keeps the call for good, and must not keep this with it.
        this = weakref.ref(self)

        def warm_up() -> None:
            found = this()
            if found is not None:
                found.now()

        self._queued = warm_up
        torch.cuda._lazy_call(warm_up)

    def now(self) -> None:
        """Do it; in another thread than the main one it is left for later."""
        if self.is_done or not in_main_thread():
            return
        self.is_done = True
        self._around(self._use_once)

    def not_measured(self) -> tuple[NotMeasured, ...]:
        """Return what a warm-up that failed leaves unknown; said once."""
        why, self._problem = self._problem, ""
        return (NotMeasured(what="what a card's first use takes", why=why),) if why else ()

    def close(self) -> None:
        """Take back what is queued; legal twice."""
        torch: Any = loaded("torch")
        if self._queued is not None and torch is not None:
            torch.cuda._queued_calls[:] = [entry for entry in torch.cuda._queued_calls if entry[0] is not self._queued]
        self._queued = None

    def _use_once(self) -> None:
        torch: Any = loaded("torch")
        try:
            torch.cuda.init()
            index = torch.cuda.current_device()
            from torch.utils._python_dispatch import _disable_current_modes

            with _disable_current_modes(), torch.no_grad():
                ones = torch.ones(64, device=f"cuda:{index}") + 1
                before = read_allocations(index) or ()
                multiply(index)
                self._handles.learn(index, before, read_allocations(index) or ())
                _capture_once(torch, ones)
            del ones
            # A test may count what torch has allocated; the handle and the context stay all the same.
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(index)
        except Exception as error:  # noqa: BLE001 - whatever it is, the program has not asked for it
            self._problem = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _capture_once(torch: Any, ones: Any) -> None:
    """Capture and run a graph of one kernel, as `torch.cuda.graph` does it, without its collections."""
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin()
        ones.add_(1)
        graph.capture_end()
    graph.replay()
    torch.cuda.synchronize()


_CARD = re.compile(r"\d+ -> /dev/(nvidia|dxg)")
"""Descriptors that CUDA's driver opens, for a context and for less than that."""

_ADVICE = "call torch.cuda.init() before the card is used, as in a session fixture, to have it judged"


class CardsWithoutTorch:
    """Tells whether the process has a context on a card that torch has not initialised."""

    def __init__(self) -> None:
        self._descriptors: Mapping[str, int] = {}
        self._any_open = False

    def cards(self, now: Counters) -> list[int]:
        """Return the numbers of these cards; next to free where no driver is open.

        Args:
            now: the counters, by which it is known whether there is anything to ask.
        """
        if initialized_torch() is not None:
            return []
        descriptors = now.items.get("file-descriptors", {})
        if descriptors is not self._descriptors:
            self._descriptors = descriptors
            self._any_open = any(map(_CARD.match, descriptors))
        return cards_with_contexts() if self._any_open else []

    def not_measured(self, now: Counters) -> tuple[NotMeasured, ...]:
        """Return what is not judged for it; a test of which that is said is not clean."""
        cards = [f"cuda:{index}" for index in self.cards(now)]
        if not cards:
            return ()
        process = OtherProcess(
            pid=os.getpid(),
            name="this process",
            host=None,
            cards=tuple(CardMemory(device=device, bytes=None) for device in cards),
        )
        what = f"memory on {', '.join(cards)} that was taken without torch"
        return (NotMeasured(what=what, why=_ADVICE, process=process),)
