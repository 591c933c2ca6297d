"""The paged KV cache: its memory, and which blocks each request has, on the device and on the host."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lowtide.engine.config import Allocator, EngineConfig, ModelConfig
from lowtide.engine.errors import ConfigError, EngineError
from lowtide.engine.request import Request

if TYPE_CHECKING:
    from lowtide.engine.kv.kv_offload import OffloadingConnector


def kv_cache_shape(config: ModelConfig, num_blocks: int, block_size: int) -> tuple[int, int, int, int]:
    """Shape of the keys of one layer, and of the values: [num_blocks, block_size, num_kv_heads, head_dim]."""
    return (num_blocks, block_size, config.num_kv_heads, config.head_dim)


def kv_cache_bytes_per_block(config: ModelConfig, block_size: int) -> int:
    """Return the bytes of one block: keys and values of `block_size` tokens in all layers."""
    return 2 * config.num_layers * block_size * config.num_kv_heads * config.head_dim * config.torch_dtype.itemsize


def num_kv_cache_blocks(config: EngineConfig, model: ModelConfig) -> int:
    """Blocks in the KV cache: the setting, or else as many as the budget in bytes holds, which must be one at least."""
    if config.num_blocks is not None:
        return config.num_blocks
    per_block = kv_cache_bytes_per_block(model, config.block_size)
    if config.kv_cache_budget < per_block:
        raise ConfigError(
            f"kv_cache_bytes {config.kv_cache_budget} does not hold one block; a block of {config.block_size} tokens "
            f"takes {per_block} bytes"
        )
    return config.kv_cache_budget // per_block


def num_host_kv_blocks(config: EngineConfig, model: ModelConfig) -> int:
    """KV blocks that `kv_offload_bytes` of host memory hold, one at least; 0 without offload."""
    per_block = kv_cache_bytes_per_block(model, config.block_size)
    if 0 < config.kv_offload_bytes < per_block:
        raise ConfigError(
            f"kv_offload_bytes {config.kv_offload_bytes} does not hold one block; a block of {config.block_size} "
            f"tokens takes {per_block} bytes, and 0 is no offload"
        )
    return config.kv_offload_bytes // per_block


class KVCache:
    """Keys and values of all layers, each of `kv_cache_shape`, uninitialised: only slots that were written are read."""

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int, allocate: Allocator) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape, dtype = kv_cache_shape(config, num_blocks, block_size), config.torch_dtype
        self.layers = tuple((allocate(shape, dtype), allocate(shape, dtype)) for _ in range(config.num_layers))


@dataclass
class KVCacheBlock:
    """Who needs one block, and which tokens it holds: a free block keeps its hash until it is given to somebody else.

    Of its `ref_count` holders, `num_transfers` are copies to or from the host under way; the hash is of all tokens up
    to its end, when other requests may find it.
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

    `evictable` blocks are free and can still be found by their prefix; `pending_transfer` are those of `held` that only
    transfers to or from the host hold.
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
        """Count the blocks afresh from their own state, so that the count can contradict the bookkeeping."""
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
        """Return the block, held or free, that holds the tokens of this hash."""
        return self._by_hash.get(block_hash)

    def is_free(self, block: KVCacheBlock) -> bool:
        """Return whether nobody holds the block."""
        return block.block_id in self._free

    def take(self, count: int) -> list[KVCacheBlock]:
        """Give out `count` free blocks, each with one reference; what they held cannot be found any more."""
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
        """Add a reference to blocks that hold a wanted prefix; free ones are free no more."""
        for block in blocks:
            if block.ref_count == 0:
                del self._free[block.block_id]
            block.ref_count += 1

    def publish(self, block: KVCacheBlock, block_hash: bytes) -> None:
        """Make a full block findable; the first block with these tokens stays the one that is found."""
        if block.block_hash is None and block_hash not in self._by_hash:
            block.block_hash = block_hash
            self._by_hash[block_hash] = block

    def release(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Drop one reference to each block; those without any become free, in the order given."""
        for block in blocks:
            if block.ref_count == 0:
                raise EngineError(f"KV block {block.block_id} is released twice: nobody holds it")
            block.ref_count -= 1
            if block.ref_count == 0:
                self._free[block.block_id] = block

    def begin_transfer(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Add a reference to blocks that are copied from or to: nobody else gets them before `end_transfer`."""
        self.share(blocks)
        for block in blocks:
            block.num_transfers += 1

    def end_transfer(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Drop the reference of `begin_transfer`, in the order given."""
        for block in blocks:
            block.num_transfers -= 1
            self.release((block,))

    def forget(self) -> None:
        """Make every block unfindable."""
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
        # Those that were never used come last: memory that is never needed is never touched.
        self._new_slots = iter(range(num_blocks))
        self._free_slots: list[int] = []

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._by_hash

    def find(self, hashes: Iterable[bytes]) -> list[HostBlock]:
        """Return the leading blocks that can be loaded."""
        found = []
        for block_hash in hashes:
            block = self._by_hash.get(block_hash)
            if block is None or not block.ready:
                break
            found.append(block)
        return found

    def reserve(self, block_hash: bytes, protected: Collection[bytes]) -> HostBlock | None:
        """Return a place for a block that is not in the store; None when transfers or `protected` take all."""
        slot = self._free_slots.pop() if self._free_slots else next(self._new_slots, None)
        if slot is None:
            idle = (
                block
                for block in self._by_hash.values()
                if block.num_transfers == 0 and block.block_hash not in protected
            )
            victim = next(idle, None)
            if victim is None:
                return None
            self.discard(victim)
            slot = self._free_slots.pop()
        block = self._by_hash[block_hash] = HostBlock(slot, block_hash)
        return block

    def touch(self, hashes: Sequence[bytes]) -> None:
        """Mark a prefix as just used; its end gives way before its beginning, without which it is of no use."""
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
        self._new_slots = iter(range(self._num_blocks))
        self._free_slots.clear()


@dataclass(eq=False)
class Transfer:
    """Copies of whole KV blocks in one direction, from their plan until their end is taken in.

    A load also holds the KV blocks before its own, which would otherwise be the first to make room for it.  A `stale`
    one describes contents that were forgotten since; of what a `cancelled` one wrote nothing can be said.
    """

    is_load: bool
    copies: Sequence[tuple[KVCacheBlock, HostBlock]]
    held: Sequence[KVCacheBlock]
    stale: bool = False
    cancelled: bool = False
    error: BaseException | None = None


class OffloadingManager:
    """Plans transfers and holds their blocks until their ends are taken in.  Pure bookkeeping, as the block pool is.

    As in vLLM V1, the scheduler's side plans and keeps the books, and a connector of the worker copies.  A block that
    is copied from or to has a reference of its own until the copy's end was *taken in*: an engine step does that, and
    so does whoever must have all blocks back (vllm#38503 is what happens where only a step does it).
    """

    def __init__(self, pool: BlockPool, num_host_blocks: int) -> None:
        self._pool = pool
        self._store = HostBlockStore(num_host_blocks)
        self._planned: deque[Transfer] = deque()
        self._in_flight: list[Transfer] = []
        self.loading: set[bytes] = set()
        """Hashes of the blocks that are on their way to the device."""

    @property
    def holds_blocks_alone(self) -> bool:
        """Whether there are blocks that come free as soon as transfers are taken in."""
        pending = (*self._planned, *self._in_flight)
        return any(block.pending_transfer for transfer in pending for block in transfer.held)

    def plan_save(self, blocks: Sequence[KVCacheBlock], hashes: Sequence[bytes]) -> None:
        """Plans to copy what the host does not have of a prefix, as far as there is room on the host."""
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
            saved = [block for block, _ in copies]
            self._pool.begin_transfer(saved)
            self._plan(Transfer(False, copies, saved))

    def find(self, hashes: Iterable[bytes]) -> list[HostBlock]:
        """Return the leading blocks of these that the host has."""
        return self._store.find(hashes)

    def plan_load(self, before: Sequence[KVCacheBlock], host_blocks: Sequence[HostBlock]) -> None:
        """Plans to copy blocks to the device, behind those `before`; as many KV blocks must be free."""
        self._pool.begin_transfer(before)
        taken = self._pool.take(len(host_blocks))
        self._pool.begin_transfer(taken)
        self._pool.release(taken)
        self.loading.update(block.block_hash for block in host_blocks)
        self._plan(Transfer(True, list(zip(taken, host_blocks, strict=True)), [*before, *taken]))

    def submit(self, connector: OffloadingConnector) -> None:
        """Hands what was planned to the connector."""
        while self._planned:
            self._in_flight.append(self._planned.popleft())
            connector.begin(self._in_flight[-1])

    def take_in(self, completed: Iterable[Transfer]) -> list[BaseException]:
        """Give back the blocks of transfers that have ended; the errors of those that failed, which never were."""
        errors = []
        for transfer in completed:
            if transfer.error is not None:
                errors.append(transfer.error)
            if transfer in self._in_flight:
                self._in_flight.remove(transfer)
                self._end(transfer, succeeded=transfer.error is None and not transfer.cancelled)
        return errors

    def abandon(self) -> None:
        """Give back the blocks of all transfers, when no copy is under way: an interrupt has lost their ends."""
        for transfer in [*self._planned, *self._in_flight]:
            self._end(transfer, succeeded=False)
        self._planned.clear()
        self._in_flight.clear()

    def forget(self) -> None:
        """Forgets what the host has, and sees to it that no transfer under way brings anything of it back."""
        for transfer in [*self._planned, *self._in_flight]:
            transfer.stale = True
        self._store.forget()

    def _plan(self, transfer: Transfer) -> None:
        for _, host_block in transfer.copies:
            host_block.num_transfers += 1
        self._planned.append(transfer)

    def _end(self, transfer: Transfer, *, succeeded: bool) -> None:
        for block, host_block in transfer.copies:
            host_block.num_transfers -= 1
            if transfer.is_load:
                self.loading.discard(host_block.block_hash)
            if not succeeded:
                self._store.discard(host_block)
            elif transfer.is_load and not transfer.stale:
                self._pool.publish(block, host_block.block_hash)
            elif not transfer.is_load:
                # A stale one is not in the store any more.
                host_block.ready = True
        # The end of a prefix is given out again first, as everywhere.
        self._pool.end_transfer(transfer.held[::-1])


class KVCacheManager:
    """Gives KV blocks to requests and takes them back; requests with equal prefixes share the full blocks of them.

    Pure bookkeeping: it knows block numbers, not memory.  Host blocks, of which 0 are no offload, need prefix caching.
    """

    def __init__(
        self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True, num_host_blocks: int = 0
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._pool = BlockPool(num_blocks)
        self.offload = OffloadingManager(self._pool, num_host_blocks) if num_host_blocks else None
        self._held: dict[str, list[int]] = {}

    @property
    def usage(self) -> KVCacheUsage:
        """Where the blocks are now."""
        return self._pool.usage()

    @property
    def blocks_are_coming(self) -> bool:
        """Whether there are blocks that come free by themselves, as soon as transfers have ended."""
        return self.offload is not None and self.offload.holds_blocks_alone

    def block_ids(self, request_id: str) -> Sequence[int]:
        """Blocks of a request, in the order of its tokens; a live view, empty when it holds none."""
        return self._held.get(request_id, ())

    def get_computed_blocks(self, request: Request) -> list[KVCacheBlock]:
        """Leading blocks of the request that are in the cache already; takes none of them.

        Never the whole request: the last token must be computed, for its logits are what is sampled from.
        """
        if not self.enable_prefix_caching:
            return []
        self._extend_hashes(request)
        found = []
        for block_hash in request.block_hashes[: (request.num_tokens - 1) // self.block_size]:
            block = self._pool.find(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def await_offloaded(self, request: Request, computed_blocks: Sequence[KVCacheBlock], budget: int) -> bool:
        """Return whether a request must wait before it can start: for its next blocks on the host, or for room.

        The room is that of the whole start, of `budget` tokens at most, for a request that then had to wait might lose
        them.
        """
        if self.offload is None:
            return False
        num_computed = len(computed_blocks)
        wanted = request.block_hashes[num_computed : (request.num_tokens - 1) // self.block_size]
        if not wanted:
            return False
        if wanted[0] in self.offload.loading:
            return True
        found = self.offload.find(wanted)
        if not found:
            return False
        num_loaded = (num_computed + len(found)) * self.block_size
        num_tokens = num_loaded + min(request.num_tokens - num_loaded, budget)
        num_missing = -(-num_tokens // self.block_size) - num_computed
        num_revived = sum(self._pool.is_free(block) for block in computed_blocks)
        if num_missing + num_revived <= self._pool.num_free:
            self.offload.plan_load(computed_blocks, found)
        return True

    def allocate_slots(
        self, request: Request, num_new_tokens: int, computed_blocks: Sequence[KVCacheBlock] = ()
    ) -> list[KVCacheBlock] | None:
        """Make room for the next tokens of a request; None, with nothing changed, when there are too few blocks.

        Asked again for the same tokens (a step that failed is run again), it finds the room there already.  The
        `computed_blocks` are shared ones, for a request that holds none yet.
        """
        num_held = len(self.block_ids(request.request_id)) + len(computed_blocks)
        num_tokens = request.num_computed_tokens + len(computed_blocks) * self.block_size + num_new_tokens
        num_missing = max(0, -(-num_tokens // self.block_size) - num_held)
        if not num_missing and not computed_blocks:
            return []
        num_revived = sum(self._pool.is_free(block) for block in computed_blocks)
        if num_missing + num_revived > self._pool.num_free:
            return None
        # Shared blocks first: taking could evict them.
        self._pool.share(computed_blocks)
        taken = self._pool.take(num_missing)
        held = self._held.setdefault(request.request_id, [])
        held.extend(block.block_id for block in (*computed_blocks, *taken))
        return taken

    def cache_blocks(self, request: Request, num_new_tokens: int) -> None:
        """Lets others find the blocks that the last `num_new_tokens` computed tokens of the request have filled.

        They are offloaded at once, as vLLM does it, and not when the request ends: the copy runs while the request
        still holds the block, and what a preempted or aborted request has computed is on the host too.

        Called after the step that computed them, never before: a step that fails must leave nothing to be found.
        """
        if not self.enable_prefix_caching:
            return
        self._extend_hashes(request)
        held = self.block_ids(request.request_id)
        first = (request.num_computed_tokens - num_new_tokens) // self.block_size
        num_full = request.num_computed_tokens // self.block_size
        for index in range(first, num_full):
            self._pool.publish(self._pool.blocks[held[index]], request.block_hashes[index])
        if self.offload is not None and first < num_full:
            blocks = [self._pool.blocks[block_id] for block_id in held[:num_full]]
            self.offload.plan_save(blocks, request.block_hashes[:num_full])

    def free(self, request: Request) -> None:
        """Take back the blocks of a request, if it holds any; the last tokens' block is given out again first."""
        held = self._held.pop(request.request_id, [])
        self._pool.release(self._pool.blocks[block_id] for block_id in reversed(held))

    def reset_prefix_cache(self) -> bool:
        """Forgets all contents, those on the host too; False, with nothing changed, while somebody holds blocks.

        Both describe the same prefixes: whoever resets because the weights are new, or to measure without a cache, is
        served stale or warm blocks where the host's stay (vllm#57727).
        """
        if self._pool.num_free < self.num_blocks:
            return False
        self.forget()
        return True

    def forget(self) -> None:
        """Forgets all contents whoever holds blocks, as must be done when the memory behind them goes."""
        self._pool.forget()
        if self.offload is not None:
            self.offload.forget()

    def _extend_hashes(self, request: Request) -> None:
        """Hash full blocks: a hash covers a block's tokens and all before them, by the hash before (as in vLLM V1)."""
        hashes, size = request.block_hashes, self.block_size
        for start in range(len(hashes) * size, request.num_tokens - size + 1, size):
            parent = hashes[-1] if hashes else b""
            tokens = array("q", request.token_ids[start : start + size]).tobytes()
            hashes.append(hashlib.blake2b(parent + tokens, digest_size=16).digest())
