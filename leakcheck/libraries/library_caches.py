"""What libraries beside torch keep on a card of what was freed, as torch's own allocator does, is given back.

A library counts only if the program has imported it and used a card with it; nothing is imported, and no card begun.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from lowtide.probes.device.torch_allocator import has_context, initialized_torch
from lowtide.probes.originals import loaded


@dataclass(frozen=True)
class LibraryCache:
    """An allocator that keeps what was freed.

    Attributes:
        module: the module that is there once it may have something.
        reason: what it keeps, and why that is no leak.
        give_back: has it give that back, on the cards with these numbers.
    """

    module: str
    reason: str
    give_back: Callable[[Sequence[int]], None]


def _cupy(cards: Sequence[int]) -> None:
    cupy: Any = loaded("cupy")
    for card in cards:
        # The pool of one card at a time: that of the current one.
        with cupy.cuda.Device(card):
            cupy.get_default_memory_pool().free_all_blocks()
    cupy.get_default_pinned_memory_pool().free_all_blocks()


def _numba(cards: Sequence[int]) -> None:
    gpus: Any = loaded("numba.cuda").gpus
    # `numba.cuda.current_context()` would make a context where there is none.
    used: Any = loaded("numba.cuda.cudadrv.driver").driver.devices
    for device in list(used.values()):
        if device.primary_context is not None:
            # What is freed while no context is current is lost for good.
            with gpus[device.id]:
                # Arrays wait with the memory manager, streams and events with the context.
                device.primary_context.memory_manager.deallocations.clear()
                device.primary_context.deallocations.clear()


LIBRARY_CACHES = (
    LibraryCache("cupy", "pools of blocks that no array uses any more, for the next array", _cupy),
    LibraryCache("numba.cuda.cudadrv.driver", "arrays that are dead, until ten of them, or a fifth of a card", _numba),
)
"""The libraries that are known to; each keeps what it has until somebody asks."""


def empty_library_caches() -> None:
    """Have every library that is in use give back what it only keeps; what fails is left as it is."""
    torch = initialized_torch()
    if torch is None:
        return
    for cache in LIBRARY_CACHES:
        if issubclass(type(sys.modules.get(cache.module)), ModuleType):
            # Another version, or half an import.
            with contextlib.suppress(Exception):
                cache.give_back([card for card in range(torch.cuda.device_count()) if has_context(torch, card)])
