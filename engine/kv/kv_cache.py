"""The paged KV cache: its memory, and which blocks of it each request has (prefix sharing, eviction, offload)."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from lowtide.engine.config import Allocator, EngineConfig, ModelConfig
from lowtide.engine.errors import ConfigError
from lowtide.engine.kv.block_pool import BlockPool, KVCacheBlock, KVCacheUsage
from lowtide.engine.kv.kv_offload import OffloadingManager
from lowtide.engine.request import Request


def kv_cache_shape(config: ModelConfig, num_blocks: int, block_size: int) -> tuple[int, int, int, int]:
    """Shape of the keys of one layer, and of the values: [num_blocks, block_size, num_kv_heads, head_dim]."""
    return (num_blocks, block_size, config.num_kv_heads, config.head_dim)


def kv_cache_bytes_per_block(config: ModelConfig, block_size: int) -> int:
    """Bytes of one block: keys and values of `block_size` tokens in all layers."""
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


class KVCacheManager:
    """Gives KV blocks to requests and takes them back; requests with equal prefixes share the full blocks of them.

    Pure bookkeeping: it knows block numbers, not memory.

    Args:
        num_blocks: KV blocks.
        block_size: tokens per block.
        enable_prefix_caching: whether equal prefixes are shared.
        num_host_blocks: KV blocks that host memory holds besides; 0 is no offload, which needs prefix caching.
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
        """Whether a request must wait before it can start: for its next blocks, which the host has, or for their room.

        When there is room, the blocks are planned to be loaded; `get_computed_blocks` gives them once they are there.
        The room asked for is that of the whole start, of `budget` tokens at most, for a request that then had to wait
        might lose them again.
        """
        if self.offload is None:
            return False
        num_computed = len(computed_blocks)
        wanted = request.block_hashes[num_computed : (request.num_tokens - 1) // self.block_size]
        if not wanted:
            return False
        if self.offload.is_loading(wanted[0]):
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
        """Makes room for the next tokens of a request; None, with nothing changed, when there are too few blocks.

        Asked again for the same tokens (a step that failed is run again), it finds the room there already.

        Args:
            request: its computed tokens have room already.
            num_new_tokens: tokens that are computed next, after those in `computed_blocks`.
            computed_blocks: shared ones, for a request that holds no blocks yet; they are not among those returned.
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
        """Takes back the blocks of a request, if it holds any; the last tokens' block is given out again first."""
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
        """A block's hash covers its tokens and all before them, by the hash of the block before (as in vLLM V1)."""
        hashes, size = request.block_hashes, self.block_size
        for start in range(len(hashes) * size, request.num_tokens - size + 1, size):
            parent = hashes[-1] if hashes else b""
            tokens = array("q", request.token_ids[start : start + size]).tobytes()
            hashes.append(hashlib.blake2b(parent + tokens, digest_size=16).digest())
