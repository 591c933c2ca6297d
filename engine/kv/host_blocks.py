"""Which KV blocks host memory holds, by the hash of their tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass


@dataclass(eq=False)
class HostBlock:
    """One block's place in host memory.

    Attributes:
        slot: index into the host memory.
        block_hash: of the tokens up to the block's end.
        ready: whether the copy that fills it was taken in.
        num_transfers: transfers under way that write or read it.
    """

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
