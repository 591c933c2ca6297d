"""Uses a card once before a test does, so that what a first use takes for good is in every baseline.

The driver makes a context, the BLAS library a handle, and a first CUDA graph buffers of the driver's own: on an H200
some 700 MiB that nobody gives back, behind which a raw allocation of the first test would not be seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lowtide.leakcheck.libraries.blas_handles import BlasHandles, multiply
from lowtide.probes.device.allocations import read_allocations
from lowtide.probes.device.torch_allocator import initialized_torch
from lowtide.probes.originals import in_main_thread, loaded, weakref
from lowtide.reports.schema import NotMeasured


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
        """What a warm-up that failed leaves unknown; said once."""
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
    """A graph of one kernel, captured and run; as `torch.cuda.graph` does it, without its collections."""
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin()
        ones.add_(1)
        graph.capture_end()
    graph.replay()
    torch.cuda.synchronize()
