"""What torch says that its memory on cards has been at most, also where the program has it count anew meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

from lowtide.probes.device.torch_allocator import has_context
from lowtide.probes.originals import StandIns, initialized_torch, loaded

_RESETS = ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats")
"""By these functions of `torch._C` all of torch's own have their peaks counted anew."""


class CardPeak(NamedTuple):
    """Bytes that torch has allocated on a card.

    Attributes:
        now: how many there are.
        most: how many there have been at most since torch began to count.
    """

    now: int
    most: int


def read_card_peaks() -> dict[str, CardPeak]:
    """Return the bytes on each card with a context; none before CUDA is in use, or where its allocator counts none."""
    torch = initialized_torch()
    if torch is None:
        return {}
    found = {}
    for index in range(torch.cuda.device_count()):
        if has_context(torch, index):
            stats = {}
            with contextlib.suppress(RuntimeError):  # a pluggable allocator without counters
                stats = torch.cuda.memory_stats(index)
            if "allocated_bytes.all.peak" in stats:
                found[f"cuda:{index}"] = CardPeak(
                    stats["allocated_bytes.all.current"], stats["allocated_bytes.all.peak"]
                )
    return found


def forget_card_peak(device: str) -> bool:
    """Have torch count the peak of a card from now on; False where it does not."""
    torch: Any = initialized_torch()
    try:
        torch.cuda.reset_peak_memory_stats(int(device.partition(":")[2]))
    except RuntimeError:  # an allocator that cannot
        return False
    return True


class ResetsOfPeaks:
    """From `start` to `stop` says when the program has torch count its peaks anew.

    Args:
        before: called right before it does.
    """

    def __init__(self, before: Callable[[], None]) -> None:
        self._before = before
        self._stand_ins = StandIns()

    def start(self) -> None:
        """Begin, if torch is loaded by now; legal twice."""
        native: Any = getattr(loaded("torch"), "_C", None)
        for name in _RESETS:
            self._stand_ins.put(native, name, self._standing_in)

    def stop(self) -> None:
        """End it; legal twice."""
        self._stand_ins.restore()

    def _standing_in(self, original: Any) -> Any:
        def reset(*args: Any, **kwargs: Any) -> Any:
            self._before()
            return original(*args, **kwargs)

        return reset
