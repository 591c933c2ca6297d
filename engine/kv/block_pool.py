"""Who holds which KV block: reference counts, prefix hashes, and the order in which free blocks are given out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lowtide.engine.errors import EngineError


@dataclass
class KVCacheBlock:
    """Who needs one block, and which tokens it holds.

    Attributes:
        block_id: index into the KV cache.
        ref_count: requests and transfers that hold it; 0 is free.
        num_transfers: those of them that are copies to or from the host under way.
        block_hash: of the tokens up to the block's end, when other requests may find it; a free block keeps it until
            the block is given to somebody else.
    """

    block_id: int
    ref_count: int = 0
    num_transfers: int = 0
    block_hash: bytes | None = None

    @property
    def pending_transfer(self) -> bool:
        """Whether transfers alone hold it: no request does, and it comes back when they are taken in."""
        return 0 < self.ref_count == self.num_transfers


@dataclass(frozen=True)
class KVCacheUsage:
    """Where the blocks are: `available + evictable == total - held` (the invariant of sglang's leak check).

    Attributes:
        total: all blocks.
        available: free, with no contents that anyone could find.
        evictable: free, kept for requests with the same prefix until the block is needed.
        held: blocks that requests or transfers hold, shared ones counted once.
        pending_transfer: those of `held` that transfers to or from the host alone hold.
    """

    total: int
    available: int
    evictable: int
    held: int
    pending_transfer: int = 0

    @property
    def free(self) -> int:
        """Blocks that the next request can have."""
        return self.available + self.evictable


class BlockPool:
    """All blocks: the free ones in the order in which they will be given out, and those that a hash finds.

    As in vLLM V1, a free block stays findable until it is given out, and the one freed longest ago is given out first.
    An ordered dict does what vLLM does with links between blocks: they would be reference cycles.
    """

    def __init__(self, num_blocks: int) -> None:
        self.blocks = tuple(KVCacheBlock(block_id) for block_id in range(num_blocks))
        self._free = OrderedDict((block.block_id, block) for block in self.blocks)
        self._by_hash: dict[bytes, KVCacheBlock] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def usage(self) -> KVCacheUsage:
        """Counts the blocks afresh from their own state, so that the count can contradict the bookkeeping."""
        held = sum(block.ref_count > 0 for block in self.blocks)
        evictable = sum(block.block_hash is not None for block in self._free.values())
        return KVCacheUsage(
            total=len(self.blocks),
            available=len(self._free) - evictable,
            evictable=evictable,
            held=held,
            pending_transfer=sum(block.pending_transfer for block in self.blocks),
        )

    def find(self, block_hash: bytes) -> KVCacheBlock | None:
        """The block, held or free, that holds the tokens of this hash."""
        return self._by_hash.get(block_hash)

    def is_free(self, block: KVCacheBlock) -> bool:
        """Whether nobody holds the block."""
        return block.block_id in self._free

    def take(self, count: int) -> list[KVCacheBlock]:
        """Gives out `count` free blocks, each with one reference; what they held cannot be found any more.

        Raises:
            EngineError: there are fewer; ask `num_free` first.
        """
        if count > len(self._free):
            raise EngineError(f"{count} KV blocks were asked for and {len(self._free)} are free")
        taken = []
        for _ in range(count):
            _, block = self._free.popitem(last=False)
            if block.block_hash is not None:
                del self._by_hash[block.block_hash]
                block.block_hash = None
            block.ref_count = 1
            taken.append(block)
        return taken

    def share(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Adds a reference to blocks that hold a wanted prefix; free ones are free no more."""
        for block in blocks:
            if block.ref_count == 0:
                del self._free[block.block_id]
            block.ref_count += 1

    def publish(self, block: KVCacheBlock, block_hash: bytes) -> None:
        """Makes a full block findable; the first block with these tokens stays the one that is found."""
        if block.block_hash is None and block_hash not in self._by_hash:
            block.block_hash = block_hash
            self._by_hash[block_hash] = block

    def release(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Drops one reference to each block; those without any become free, in the order given.

        Raises:
            EngineError: a block is free already.
        """
        for block in blocks:
            if block.ref_count == 0:
                raise EngineError(f"KV block {block.block_id} is released twice: nobody holds it")
            block.ref_count -= 1
            if block.ref_count == 0:
                self._free[block.block_id] = block

    def begin_transfer(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Adds a reference to blocks that are copied from or to: nobody else gets them before `end_transfer`."""
        self.share(blocks)
        for block in blocks:
            block.num_transfers += 1

    def end_transfer(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Drops the reference of `begin_transfer`, in the order given."""
        for block in blocks:
            block.num_transfers -= 1
            self.release((block,))

    def forget(self) -> None:
        """Makes every block unfindable."""
        for block in self._by_hash.values():
            block.block_hash = None
        self._by_hash.clear()
