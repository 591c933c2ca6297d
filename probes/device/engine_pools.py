"""Who keeps the private pools of torch's allocator, where an engine's own allocator says it; read, never called."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lowtide.probes.objects.foreign import is_a, type_name
from lowtide.probes.originals import loaded

PoolId = tuple[int, int]


def owners_of_pools() -> dict[PoolId, str]:
    """Return who keeps each pool, by torch's number of it: `weights of vLLM's CuMemAllocator`.

    vLLM's `CuMemAllocator` and `torch_memory_saver` (SGLang's) keep one pool for each tag, whose memory they unmap
    while the engine sleeps. They are found by their modules, and nothing is imported.
    """
    found: dict[PoolId, str] = {}
    for whose, keeper, pools in _KEEPERS:
        # Of another version, or changed by another thread meanwhile.
        with contextlib.suppress(AttributeError, RuntimeError):
            for tag, pool in _by_tag(pools(loaded(keeper))):
                first, second = pool.id
                found[int(first), int(second)] = f"{tag} of {whose}"
    return found


def _of_vllm(module: Any) -> Mapping[Any, Any]:
    """Return `CuMemAllocator.allocator_and_pools`: by tag a pool with its allocator, or a list of these."""
    return module.CuMemAllocator.instance.allocator_and_pools  # type: ignore[no-any-return]


def _of_memory_saver(module: Any) -> Mapping[Any, Any]:
    """Return `TorchMemorySaver._impl._mem_pools`: pools by tag and settings."""
    return module.torch_memory_saver._impl._mem_pools  # type: ignore[no-any-return]


_KEEPERS = (
    ("vLLM's CuMemAllocator", "vllm.device_allocator.cumem", _of_vllm),
    ("torch_memory_saver", "torch_memory_saver", _of_memory_saver),
)


def _by_tag(pools: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for key, kept in dict(pools).items():
        tag = key[0] if is_a(key, tuple) else key
        for pool in _pools_in(kept):
            yield str(tag), pool


def _pools_in(kept: Any) -> Iterable[Any]:
    """Yield the pools in what is kept for a tag: itself, or in lists and tuples."""
    if is_a(kept, list) or is_a(kept, tuple):
        for part in kept:
            yield from _pools_in(part)
    elif type_name(type(kept)).endswith(".MemPool"):
        yield kept
