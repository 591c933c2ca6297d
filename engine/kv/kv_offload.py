"""KV offload, the scheduler's side: which blocks are copied to the host, which come back, and who holds them meanwhile.

As in vLLM V1, the scheduler's side plans and keeps the books, and a connector of the worker copies behind the steps'
backs.  A block that is copied from or to has a reference of its own until the copy's end was *taken in*: an engine step
does that, and so does whoever must have all blocks back (vllm#38503 is what happens where only a step does it).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lowtide.engine.kv.block_pool import BlockPool, KVCacheBlock
from lowtide.engine.kv.host_blocks import HostBlock, HostBlockStore

if TYPE_CHECKING:
    from lowtide.engine.kv.offloading_connector import OffloadingConnector


@dataclass(frozen=True, slots=True)
class BlockTransfer:
    """Copies of whole KV blocks in one direction.

    Attributes:
        transfer_id: by which its end is known.
        blocks: KV block and host slot of each copy.
    """

    transfer_id: int
    blocks: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class CompletedTransfer:
    """The end of a transfer, after which nothing reads or writes its blocks.

    Attributes:
        transfer_id: of the transfer.
        error: what its copies raised; then nothing can be said of what they wrote.
        cancelled: whether it was given up; likewise.
    """

    transfer_id: int
    error: BaseException | None = None
    cancelled: bool = False


@dataclass(eq=False)
class _Pending:
    """A transfer that was planned or begun.

    `held` are the KV blocks that it holds; a load's are also those before it, which would otherwise be the first to
    make room for it.  A `stale` one describes contents that were forgotten since.
    """

    transfer: BlockTransfer
    is_load: bool
    copies: tuple[tuple[KVCacheBlock, HostBlock], ...]
    held: tuple[KVCacheBlock, ...]
    stale: bool = False


class OffloadingManager:
    """Plans transfers and holds their blocks until their ends are taken in.  Pure bookkeeping, as the block pool is.

    Args:
        pool: of the KV blocks.
        num_host_blocks: slots of host memory.
    """

    def __init__(self, pool: BlockPool, num_host_blocks: int) -> None:
        self._pool = pool
        self._store = HostBlockStore(num_host_blocks)
        self._planned: deque[_Pending] = deque()
        self._in_flight: dict[int, _Pending] = {}
        self._loading: set[bytes] = set()
        self._num_transfers = 0

    @property
    def holds_blocks_alone(self) -> bool:
        """Whether there are blocks that come free as soon as transfers are taken in."""
        pending = (*self._planned, *self._in_flight.values())
        return any(block.pending_transfer for transfer in pending for block in transfer.held)

    def plan_save(self, blocks: Sequence[KVCacheBlock], hashes: Sequence[bytes]) -> None:
        """Plans to copy what the host does not have of a prefix, as far as there is room on the host.

        Args:
            blocks: full and computed, from the first token on.
            hashes: of each of them.
        """
        prefix = frozenset(hashes)
        copies = []
        for block, block_hash in zip(blocks, hashes, strict=True):
            if block_hash in self._store:
                continue
            host_block = self._store.reserve(block_hash, prefix)
            if host_block is None:
                break  # what comes after a gap can never be loaded
            copies.append((block, host_block))
        self._store.touch(hashes)
        if copies:
            self._plan(copies, [block for block, _ in copies], is_load=False)

    def find(self, hashes: Iterable[bytes]) -> list[HostBlock]:
        """The leading blocks of these that the host has."""
        return self._store.find(hashes)

    def is_loading(self, block_hash: bytes) -> bool:
        """Whether the block with these tokens is on its way to the device."""
        return block_hash in self._loading

    def plan_load(self, before: Sequence[KVCacheBlock], host_blocks: Sequence[HostBlock]) -> None:
        """Plans to copy blocks to the device, where the prefix cache has them once the load is taken in.

        Args:
            before: blocks of the same prefix that are on the device.
            host_blocks: those that follow; as many KV blocks are free, besides `before`.
        """
        self._pool.begin_transfer(before)
        taken = self._pool.take(len(host_blocks))
        self._pool.begin_transfer(taken)
        self._pool.release(taken)
        self._loading.update(block.block_hash for block in host_blocks)
        self._plan(list(zip(taken, host_blocks, strict=True)), [*before, *taken], is_load=True)

    def submit(self, connector: OffloadingConnector) -> None:
        """Hands what was planned to the connector."""
        while self._planned:
            pending = self._planned.popleft()
            self._in_flight[pending.transfer.transfer_id] = pending
            begin = connector.load if pending.is_load else connector.save
            begin(pending.transfer)

    def take_in(self, completed: Iterable[CompletedTransfer]) -> list[BaseException]:
        """Gives back the blocks of transfers that have ended; what they copied can be found from now on.

        Returns:
            The errors of those that failed, which are as if they had never been.
        """
        errors = []
        for end in completed:
            if end.error is not None:
                errors.append(end.error)
            pending = self._in_flight.pop(end.transfer_id, None)
            if pending is not None:
                self._end(pending, succeeded=end.error is None and not end.cancelled)
        return errors

    def abandon(self) -> None:
        """Gives back the blocks of all transfers; right only when no copy is under way and all ends were taken in.

        What is left then never began, or its end was lost: an interrupt came between.
        """
        for pending in [*self._planned, *self._in_flight.values()]:
            self._end(pending, succeeded=False)
        self._planned.clear()
        self._in_flight.clear()

    def forget(self) -> None:
        """Forgets what the host has, and sees to it that no transfer under way brings anything of it back."""
        for pending in [*self._planned, *self._in_flight.values()]:
            pending.stale = True
        self._store.forget()

    def _plan(
        self, copies: Sequence[tuple[KVCacheBlock, HostBlock]], held: Sequence[KVCacheBlock], *, is_load: bool
    ) -> None:
        if not is_load:
            self._pool.begin_transfer(held)
        for _, host_block in copies:
            host_block.num_transfers += 1
        numbers = tuple((block.block_id, host_block.slot) for block, host_block in copies)
        self._planned.append(_Pending(BlockTransfer(self._num_transfers, numbers), is_load, tuple(copies), tuple(held)))
        self._num_transfers += 1

    def _end(self, pending: _Pending, *, succeeded: bool) -> None:
        for block, host_block in pending.copies:
            host_block.num_transfers -= 1
            if pending.is_load:
                self._loading.discard(host_block.block_hash)
            if not succeeded:
                self._store.discard(host_block)
            elif pending.is_load and not pending.stale:
                self._pool.publish(block, host_block.block_hash)
            elif not pending.is_load:
                # A stale one is not in the store any more.
                host_block.ready = True
        # The end of a prefix is given out again first, as everywhere.
        self._pool.end_transfer(pending.held[::-1])
