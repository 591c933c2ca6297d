"""All memory of one engine: an arena per tag, and how their contents go to the host and come back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from lowtide.engine.device_allocator.arena import Arena, Workspace
from lowtide.engine.device_allocator.host_memory import HostBuffer, TransferRing
from lowtide.engine.pages import PageBackend
from lowtide.engine.teardown import Teardown, undone_by

# Not zero, which is what fresh pages mostly hold and what many tables may hold too; as an index it is out of range.
POISON = 0xA5

# Addresses cost nothing; what the runtime arena really holds is mapped as it is asked for.
RUNTIME_ADDRESSES = 1 << 30
# Behind the KV cache itself, for what belongs to it and may go with it: small tables, scales.
KV_CACHE_SPARE_ADDRESSES = 1 << 20


class EngineMemory:
    """Owns the arenas `weights`, `kv_cache`, `runtime` and `workspace` (one per micro-batch), and the transfer ring.

    Sizes are bytes.  With `poison`, what `restore` maps is filled with `POISON` before anything else.

    Raises:
        OutOfMemoryError: no room; nothing is held then.
    """

    def __init__(
        self,
        backend: PageBackend,
        *,
        weights: int,
        kv_cache: int,
        workspace: int,
        num_micro_batches: int,
        poison: bool = False,
    ) -> None:
        self._backend = backend
        self._poison = poison
        self._image: HostBuffer | None = None
        self._ring: TransferRing | None = None
        self._arenas: dict[str, Arena] = {}
        self.workspaces: list[Workspace] = []
        with undone_by(self.close):
            self._arenas["weights"] = Arena("weights", weights, backend)
            self._arenas["kv_cache"] = Arena("kv_cache", kv_cache + KV_CACHE_SPARE_ADDRESSES, backend)
            self._arenas["runtime"] = Arena("runtime", RUNTIME_ADDRESSES, backend)
            for _ in range(num_micro_batches):
                self.workspaces.append(Workspace(Arena("workspace", workspace, backend)))
            self._ring = TransferRing(backend, weights)

    def arena(self, tag: str) -> Arena:
        """The arena of one tag: `weights`, `kv_cache` or `runtime`."""
        return self._arenas[tag]

    def mapped(self) -> dict[str, int]:
        """Bytes with pages behind them, by tag."""
        sizes = {tag: arena.mapped for tag, arena in self._arenas.items()}
        sizes["workspace"] = sum(workspace.mapped for workspace in self.workspaces)
        return sizes

    def save_weights(self) -> None:
        """Copy the weights to host memory; on an error everything is as it was."""
        assert self._ring is not None
        weights = self._arenas["weights"]
        fresh = self._image is None
        image = self._image or self._ring.new_image(weights.used)
        try:
            self._ring.save(weights, image)
        except BaseException:
            if fresh:
                image.close()
            raise
        self._image = image

    def forget_weights(self) -> None:
        """Give up the host copy of the weights; interrupted before it has begun, it keeps the copy."""
        image = self._image
        if image is None:
            return
        try:
            image.close()
        finally:
            if image.closed:
                self._image = None

    def drop(self, tags: Sequence[str]) -> None:
        """Give the pages of these arenas and of all workspaces back; contents are gone, addresses stay."""
        for tag in tags:
            self._arenas[tag].unmap_to(0)
        for workspace in self.workspaces:
            workspace.drop_pages()
        self._backend.empty_cache()

    def restore(self, tag: str, refill: Callable[[], None] | None = None) -> None:
        """Map an arena's pages again; weights are filled from the host copy, or by `refill` where there is none.

        Without room, the arena may be mapped in part: the caller drops it.
        """
        arena = self._arenas[tag]
        if tag == "weights" and self._image is not None:
            assert self._ring is not None
            self._ring.restore(self._image, arena, arena.used)
            return
        arena.map_to(arena.used)
        if self._poison and arena.used:
            arena.bytes_at(0, arena.used).fill_(POISON)
        if refill is not None:
            refill()

    def close_host_buffers(self, teardown: Teardown) -> None:
        """Give up the transfer ring and the host copy of the weights."""
        if self._image is not None and teardown.run("the host copy of the weights", self._image.close):
            self._image = None
        if self._ring is not None and teardown.run("the transfer ring", self._ring.close):
            self._ring = None

    def close(self, teardown: Teardown, *, drop_pages: bool = False) -> None:
        """Give everything up, step by step; memory that a tensor still holds goes with that tensor.

        What could not be given up is kept, for another call to try again.  With `drop_pages` even that is given back:
        for an engine that never came to life, whose tensors nobody but a traceback can hold.
        """
        self.close_host_buffers(teardown)
        if drop_pages:
            for tag, arena in self._arenas.items():
                teardown.run(f"pages of arena {tag!r}", partial(arena.unmap_to, 0))
            for workspace in self.workspaces:
                teardown.run("pages of a workspace", workspace.drop_pages)
        self.workspaces = [
            workspace for workspace in self.workspaces if not teardown.run("a workspace", workspace.close)
        ]
        self._arenas = {
            tag: arena for tag, arena in self._arenas.items() if not teardown.run(f"arena {tag!r}", arena.close)
        }
        self.empty_cache(teardown)

    def empty_cache(self, teardown: Teardown) -> None:
        """Make torch give back what it caches of the memory that the steps used."""
        teardown.run("torch's cached memory", self._backend.empty_cache)
