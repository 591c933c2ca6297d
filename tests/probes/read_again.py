"""Takes snapshots over and over in a process where nothing else happens, and fails if one of them changed anything."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import mmap
import random
import sys
import threading
from collections import Counter
from collections.abc import Iterator

import torch
from msgspec.structs import replace

from lowtide.probes.device.driver import NoDriver
from lowtide.probes.snapshot import Snapshot, take_snapshot
from lowtide.probes.stages import PoolReading, announce

PAGE = mmap.PAGESIZE


def snapshot() -> Snapshot:
    return take_snapshot(driver=NoDriver("a test"))


class Allocator:
    """A pool of pages outside torch, announced."""

    def __init__(self, tag: str, pages: int) -> None:
        self.memory = mmap.mmap(-1, pages * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.range = (ctypes.addressof(ctypes.c_char.from_buffer(self.memory)), pages * PAGE)
        self.tag = tag
        announce(self)

    def touch(self, pages: int) -> None:
        self.memory[0 : pages * PAGE] = b"x" * (pages * PAGE)

    def read_pools(self) -> tuple[PoolReading, ...]:
        return (PoolReading("arena", self.tag, "cpu", 2 * self.range[1], self.range[1], (self.range,)),)


def state() -> dict[str, object]:
    """What a reading could disturb, as Python and torch tell it, without asking the probes."""
    objects = gc.get_objects()
    kinds = Counter(type(item).__qualname__ for item in objects if issubclass(type(item), torch.Tensor))
    storages = sum(issubclass(type(item), torch.UntypedStorage) for item in objects)
    del objects
    return {
        "tensors": dict(kinds),
        "storages": storages,
        "frozen": gc.get_freeze_count(),
        "garbage": len(gc.garbage),
        "collector": (gc.isenabled(), gc.get_threshold()),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "default device": torch.get_default_device(),
        "default dtype": torch.get_default_dtype(),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "torch's random state": torch.random.get_rng_state().numpy().tobytes(),
        "random state": random.getstate(),
        "cuda": torch.cuda.is_initialized(),
        "modules": sorted(sys.modules),
        "trace": (sys.gettrace(), sys.getprofile()),
    }


def stable(taken: Snapshot) -> Snapshot:
    """The snapshot without what moves by itself: time, and how much memory the reading process has."""
    host = replace(taken.host, rss=0, anonymous=0, file_backed=0, own=0, shared=0, heaps=None)
    return replace(taken, host=host)


@contextlib.contextmanager
def much_alive() -> Iterator[list[object]]:
    """One of each kind of thing that the probes read."""
    arena = Allocator("weights", 8)
    arena.touch(3)
    leaf = torch.ones(10, requires_grad=True)
    (leaf * 2).sum().backward()
    cached = functools.lru_cache(maxsize=4)(lambda key: torch.ones(7))
    cached(1)
    done = threading.Event()
    thread = threading.Thread(target=done.wait, args=(600,), name="alive")
    thread.start()
    try:
        yield [
            arena,
            leaf,
            cached,
            torch.ones(100)[3:],
            torch.sparse_coo_tensor([[0]], [1.0], (5,), check_invariants=True),
            torch.empty(3, device="meta"),
        ]
    finally:
        done.set()
        thread.join()


def main(readings: int, frozen: bool) -> None:
    with much_alive() as alive:
        # Libraries fill their own caches once; what that replaces should not be among what is frozen.
        snapshot()
        state()
        gc.collect()
        if frozen:
            gc.freeze()
        first = stable(snapshot())
        before = state()
        for turn in range(readings):
            again = stable(snapshot())
            changed = [name for name in first.__struct_fields__ if getattr(again, name) != getattr(first, name)]
            assert not changed, [(turn, name, getattr(first, name), getattr(again, name)) for name in changed]
        after = state()
        assert after == before, {key: (before[key], after[key]) for key in before if before[key] != after[key]}
        assert len(alive) == 6


if __name__ == "__main__":
    main(int(sys.argv[1]), "--frozen" in sys.argv)
