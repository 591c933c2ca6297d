"""Who holds which KV block, on the device and on the host: reference counts, prefix hashes, and who gives way first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from lowtide.engine.errors import EngineError


@dataclass
class KVCacheBlock:
    """Who needs one block, and which tokens it holds: a free block keeps its hash until it is given to somebody else.

    Attributes:
        ref_count: requests and transfers that hold it; 0 is free.
        num_transfers: those of them that are copies to or from the host under way.
        block_hash: of the tokens up to the block's end, when other requests may find it.
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
        """Gives out `count` free blocks, each with one reference; what they held cannot be found any more."""
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
        """Drops one reference to each block; those without any become free, in the order given."""
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


@dataclass(eq=False)
class HostBlock:
    """One block's place in host memory; `ready` once the copy that fills it was taken in."""

    slot: int
    block_hash: bytes
    ready: bool = False
    num_transfers: int = 0


class HostBlockStore:
    """What host memory holds, by hash; the block that was used longest ago gives way."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._by_hash: OrderedDict[bytes, HostBlock] = OrderedDict()
        # Slots that were used and are free again, and how many were ever used: memory that is never needed is never
        # touched.
        self._free_slots: list[int] = []
        self._num_used = 0

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._by_hash

    def __len__(self) -> int:
        return len(self._by_hash)

    def find(self, hashes: Iterable[bytes]) -> list[HostBlock]:
        """The leading blocks that can be loaded."""
        found = []
        for block_hash in hashes:
            block = self._by_hash.get(block_hash)
            if block is None or not block.ready:
                break
            found.append(block)
        return found

    def reserve(self, block_hash: bytes, protected: Collection[bytes]) -> HostBlock | None:
        """A place for a block that is not in the store; None when all are taken by transfers or by `protected`."""
        if not self._free_slots and self._num_used < self._num_blocks:
            self._free_slots.append(self._num_used)
            self._num_used += 1
        elif not self._free_slots:
            idle = (
                block
                for block in self._by_hash.values()
                if block.num_transfers == 0 and block.block_hash not in protected
            )
            victim = next(idle, None)
            if victim is None:
                return None
            self.discard(victim)
        block = self._by_hash[block_hash] = HostBlock(self._free_slots.pop(), block_hash)
        return block

    def touch(self, hashes: Sequence[bytes]) -> None:
        """Marks a prefix as just used; its end gives way before its beginning, without which it is of no use."""
        for block_hash in reversed(hashes):
            if block_hash in self._by_hash:
                self._by_hash.move_to_end(block_hash)

    def discard(self, block: HostBlock) -> None:
        """Forgets one block, if it is still there."""
        if self._by_hash.get(block.block_hash) is block:
            del self._by_hash[block.block_hash]
            self._free_slots.append(block.slot)

    def forget(self) -> None:
        """Forgets all blocks."""
        self._by_hash.clear()
        self._free_slots = list(range(self._num_used - 1, -1, -1))
