"""The paged KV cache: its memory, and who holds which block of it (prefix sharing, reference counts, eviction)."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lowtide.engine.config import Allocator, EngineConfig, ModelConfig
from lowtide.engine.errors import ConfigError, EngineError
from lowtide.engine.request import Request


def kv_cache_shape(config: ModelConfig, num_blocks: int, block_size: int) -> tuple[int, int, int, int]:
    """Shape of the keys of one layer, and of the values: [num_blocks, block_size, num_kv_heads, head_dim]."""
    return (num_blocks, block_size, config.num_kv_heads, config.head_dim)


def kv_cache_bytes_per_block(config: ModelConfig, block_size: int) -> int:
    """Bytes of one block: keys and values of `block_size` tokens in all layers."""
    return 2 * config.num_layers * block_size * config.num_kv_heads * config.head_dim * config.torch_dtype.itemsize


def num_kv_cache_blocks(config: EngineConfig, model: ModelConfig) -> int:
    """Blocks in the KV cache: the setting, or else as many as the budget in bytes holds.

    Raises:
        ConfigError: the budget does not hold a single block.
    """
    if config.num_blocks is not None:
        return config.num_blocks
    per_block = kv_cache_bytes_per_block(model, config.block_size)
    if config.kv_cache_budget < per_block:
        raise ConfigError(
            f"kv_cache_bytes {config.kv_cache_budget} does not hold one block; a block of {config.block_size} tokens "
            f"takes {per_block} bytes"
        )
    return config.kv_cache_budget // per_block


class KVCache:
    """Keys and values of all layers.

    Attributes:
        layers: (keys, values) of each layer, both of `kv_cache_shape`. Uninitialised: only slots that were written
            are ever read.
    """

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int, allocate: Allocator) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape, dtype = kv_cache_shape(config, num_blocks, block_size), config.torch_dtype
        self.layers = tuple((allocate(shape, dtype), allocate(shape, dtype)) for _ in range(config.num_layers))


@dataclass
class KVCacheBlock:
    """Who needs one block, and which tokens it holds.

    Attributes:
        block_id: index into the KV cache.
        ref_count: requests that hold it; 0 is free.
        block_hash: of the tokens up to the block's end, when other requests may find it; a free block keeps it until
            the block is given to somebody else.
    """

    block_id: int
    ref_count: int = 0
    block_hash: bytes | None = None


@dataclass(frozen=True)
class KVCacheUsage:
    """Where the blocks are: `available + evictable == total - held` (the invariant of sglang's leak check).

    Attributes:
        total: all blocks.
        available: free, with no contents that anyone could find.
        evictable: free, kept for requests with the same prefix until the block is needed.
        held: blocks that requests hold, shared ones counted once.
    """

    total: int
    available: int
    evictable: int
    held: int

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
            total=len(self.blocks), available=len(self._free) - evictable, evictable=evictable, held=held
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

    def forget(self) -> None:
        """Makes every block unfindable."""
        for block in self._by_hash.values():
            block.block_hash = None
        self._by_hash.clear()


class KVCacheManager:
    """Gives KV blocks to requests and takes them back; requests with equal prefixes share the full blocks of them.

    Pure bookkeeping: it knows block numbers, not memory.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._pool = BlockPool(num_blocks)
        self._held: dict[str, list[int]] = {}

    @property
    def usage(self) -> KVCacheUsage:
        """Where the blocks are now."""
        return self._pool.usage()

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

    def allocate_slots(
        self, request: Request, num_new_tokens: int, computed_blocks: Sequence[KVCacheBlock] = ()
    ) -> list[KVCacheBlock] | None:
        """Makes room for the next tokens of a request; None, with nothing changed, when there are too few blocks.

        Asked again for the same tokens (a step that failed is run again), it finds the room there already.

        Args:
            request: its computed tokens have room already.
            num_new_tokens: tokens that are computed next, after those in `computed_blocks`.
            computed_blocks: what `get_computed_blocks` gave, for a request that holds no blocks yet.

        Returns:
            The blocks taken, without the shared ones.
        """
        num_held = len(self.block_ids(request.request_id)) + len(computed_blocks)
        num_tokens = request.num_computed_tokens + len(computed_blocks) * self.block_size + num_new_tokens
        num_missing = max(0, -(-num_tokens // self.block_size) - num_held)
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

        Called after the step that computed them, never before: a step that fails must leave nothing to be found.
        """
        if not self.enable_prefix_caching:
            return
        self._extend_hashes(request)
        held = self.block_ids(request.request_id)
        first = (request.num_computed_tokens - num_new_tokens) // self.block_size
        for index in range(first, request.num_computed_tokens // self.block_size):
            self._pool.publish(self._pool.blocks[held[index]], request.block_hashes[index])

    def free(self, request: Request) -> None:
        """Takes back the blocks of a request, if it holds any; the last tokens' block is given out again first."""
        held = self._held.pop(request.request_id, [])
        self._pool.release(self._pool.blocks[block_id] for block_id in reversed(held))

    def reset_prefix_cache(self) -> bool:
        """Forgets all contents, as must be done when the memory behind them goes.

        Returns:
            False, with nothing changed, while requests hold blocks.
        """
        if self._held:
            return False
        self._pool.forget()
        return True

    def _extend_hashes(self, request: Request) -> None:
        """A block's hash covers its tokens and all before them, by the hash of the block before (as in vLLM V1)."""
        hashes, size = request.block_hashes, self.block_size
        for start in range(len(hashes) * size, request.num_tokens - size + 1, size):
            parent = hashes[-1] if hashes else b""
            tokens = array("q", request.token_ids[start : start + size]).tobytes()
            hashes.append(hashlib.blake2b(parent + tokens, digest_size=16).digest())
