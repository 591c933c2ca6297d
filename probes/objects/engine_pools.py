"""What engines keep in pools of their own, as the objects of vLLM, SGLang and LMCache say it: memory, and slots.

The private pools of torch's allocator are known by the engine's allocator that keeps them. The slots of a fixed pool
(KV blocks, cached embeddings, chunks of an offloaded cache) are given to requests: one that is not given back shows in
no counter of memory, and the engine has room for one request less. What is read are attributes, found by the engines'
modules; nothing of theirs is called, and nothing imported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from lowtide.probes.objects.foreign import is_a, type_name
from lowtide.probes.objects.listed import all_instances
from lowtide.probes.originals import loaded, sys, time, weakref

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
    kept: Mapping[Any, Any] = module.CuMemAllocator.instance.allocator_and_pools
    return kept


def _of_memory_saver(module: Any) -> Mapping[Any, Any]:
    """Return `TorchMemorySaver._impl._mem_pools`: pools by tag and settings."""
    kept: Mapping[Any, Any] = module.torch_memory_saver._impl._mem_pools
    return kept


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


NOBODY = "no request"

_UNKNOWN = "a request that the scheduler does not know"
_ENDED = "a request that has ended"
_NO_READER = "a reader that is gone: ref_count_down() was left out"
_UNRETRIEVED = "a request that looked them up and did not retrieve them: lookup_unpin() was left out"

_WAITS = 50
"""Times as long as it took to look for pools, for which they are not looked for again: it goes through the heap."""


class LostSlot(NamedTuple):
    """A slot that is taken, and that no request has which waits or runs.

    Attributes:
        pool: the class of its pool.
        unit: what a slot of the pool is.
        number: which one, as the pool numbers it.
        owner: who has it, in words.
        request: the identifier of the request that had it; empty where none is known.
        instance: the identity of the pool, of which an engine that follows has another one.
    """

    pool: str
    unit: str
    number: str
    owner: str
    request: str = ""
    instance: int = 0


class SlotReading(NamedTuple):
    """The lost slots of a process.

    Attributes:
        lost: they.
        unread: the pools whose attributes are not those that are known here, each with why.
    """

    lost: tuple[LostSlot, ...]
    unread: Mapping[str, str] = MappingProxyType({})


class _Pools(NamedTuple):
    """How the pools of one class are read.

    Attributes:
        module: where the class is.
        name: its name there.
        read: returns the lost slots of one of them.
    """

    module: str
    name: str
    read: Callable[[Any], Iterable[LostSlot]]


class RequestSlots:
    """Reads the lost slots of all pools of the engines in this process.

    To find the pools takes a look at every object there is. It is made anew where the references to their class have
    changed, of which each of them has one, and no more often than takes a fiftieth of the time: of one that comes
    meanwhile the slots are read from the next look on.

    Args:
        at_once: whether it is made however long it takes.
    """

    def __init__(self, *, at_once: bool = False) -> None:
        self._waits = 0 if at_once else _WAITS
        self._known: dict[str, tuple[int, float, list[weakref.ref[Any]]]] = {}

    def read(self) -> SlotReading:
        """Read them; takes microseconds where there is no engine or nothing is taken."""
        found: list[LostSlot] = []
        unread: dict[str, str] = {}
        for pools in _POOLS:
            cls = getattr(loaded(pools.module), pools.name, None)
            if not isinstance(cls, type):
                continue
            for pool in self._instances(pools.module, cls):
                # Another thread may change them meanwhile.
                with contextlib.suppress(RuntimeError):
                    try:
                        found += pools.read(pool)
                    except (AttributeError, TypeError) as error:
                        unread[f"slots of {pools.module}.{pools.name}"] = f"another version's: {error}"
        return SlotReading(tuple(found), unread)

    def _instances(self, module: str, cls: type) -> Iterator[Any]:
        references, looked_until, known = self._known.get(module, (0, 0.0, []))
        now = sys.getrefcount(cls)
        if now != references and time.perf_counter() > looked_until:
            begun = time.perf_counter()
            known = [weakref.ref(pool) for pool in all_instances(cls)]
            ended = time.perf_counter()
            self._known[module] = sys.getrefcount(cls), ended + self._waits * (ended - begun), known
        return (pool for reference in known if (pool := reference()) is not None)


def _vllm_blocks(pool: Any) -> Iterator[LostSlot]:
    """Yield the blocks of vLLM's pool (`vllm.v1.core.block_pool`) that are not in its queue of free ones.

    What only the prefix cache has is in that queue. One block, which stands for none, never is.
    """
    if pool.num_gpu_blocks - pool.free_block_queue.num_free_blocks <= 1:
        return
    taken = {block.block_id: block for block in pool.blocks if block.ref_cnt > 0 and not block.is_null}
    requests = _VllmRequests(pool)
    managers = loaded("vllm.v1.core.single_type_kv_cache_manager")
    of_request = {
        block.block_id: identifier
        for manager in all_instances(managers.SingleTypeKVCacheManager)
        if manager.block_pool is pool
        for identifier, blocks in dict(manager.req_to_blocks).items()
        for block in blocks
    }
    for number in taken:
        request = of_request.get(number, "")
        owner = requests.owner(request) if request else NOBODY
        if owner:
            yield LostSlot("vLLM's BlockPool", "KV block", str(number), owner, request, id(pool))


def _vllm_embeddings(manager: Any) -> Iterator[LostSlot]:
    """Yield what vLLM's cache of encoder outputs (`vllm.v1.core.encoder_cache_manager`) keeps for requests."""
    entries = {digest: set(users) for digest, users in dict(manager.cached).items() if users}
    if not entries:
        return
    requests = _VllmRequests(manager)
    for digest, users in entries.items():
        owners = {request: requests.owner(request) for request in sorted(users)}
        if all(owners.values()):
            request, owner = next(iter(owners.items()))
            yield LostSlot("vLLM's EncoderCacheManager", "encoder output", digest, owner, request, id(manager))


class _VllmRequests:
    """What vLLM's scheduler knows of its requests.

    Args:
        part: what belongs to the scheduler: a pool, or a cache.
    """

    def __init__(self, part: Any) -> None:
        schedulers = loaded("vllm.v1.core.sched.scheduler")
        found = [] if schedulers is None else all_instances(schedulers.Scheduler)
        own = [each for each in found if part is each.kv_cache_manager.block_pool or part is each.encoder_cache_manager]
        self._requests: Mapping[str, Any] | None = dict(own[0].requests) if own else None

    def owner(self, request: str) -> str:
        """Return what is wrong with a request that has something; empty where it waits or runs."""
        if self._requests is None:
            return ""
        known = self._requests.get(request)
        if known is None:
            return _UNKNOWN
        return _ENDED if known.status > type(known.status).PREEMPTED else ""


def _sglang_rows(pool: Any) -> Iterator[LostSlot]:
    """Yield the rows of SGLang's table of tokens (`sglang.srt.mem_cache.memory_pool`) that no running request has.

    In newer versions (0.5.23) the first row stands for none.
    """
    rows = range(1 if hasattr(pool, "_alloc_size") else 0, pool.req_to_token.shape[0])
    taken = set(rows).difference(pool.free_slots)
    if not taken:
        return
    requests: Any = loaded("sglang.srt.managers.schedule_batch")
    of_row: dict[int | None, Any] = {}
    for request in [] if requests is None else all_instances(requests.Req):
        of_row[getattr(request, "kv", request).req_pool_idx] = request
    for row in sorted(taken):
        request = of_row.get(row)
        owner = NOBODY if request is None else "" if request.finished_reason is None else _ENDED
        if owner:
            name = "" if request is None else str(request.rid)
            yield LostSlot("SGLang's ReqToTokenPool", "row", str(row), owner, name, id(pool))


def _lmcache_chunks(backend: Any) -> Iterator[LostSlot]:
    """Yield the chunks of LMCache's cache in host memory that are counted as used once more than anybody has them.

    Such a one (`lmcache.v1.storage_backend.local_cpu_backend`) is never evicted (LMCache#3884). Who has taken one from
    the cache refers to it for as long as it may give it back.
    """
    monitors = loaded("lmcache.v1.pin_monitor")
    monitored = getattr(getattr(monitors, "PinMonitor", None), "_instance", None)
    chunk = object()
    # What asking for the number of references adds to it.
    own = sys.getrefcount(chunk)
    for key in [*backend.hot_cache]:
        chunk = backend.hot_cache.get(key)
        # A bytes object of the cache is counted by nobody.
        used = 0 if chunk is None else getattr(chunk.meta, "ref_count", 0)
        if used <= 1:
            continue
        references = sys.getrefcount(chunk) - own
        # Who watches pinned ones uses none.
        references -= monitored is not None and id(chunk) in monitored._pinned_objects
        if used > references:
            yield LostSlot("LMCache's LocalCPUBackend", "KV chunk", f"{id(chunk):#x}", _NO_READER, "", id(backend))


def _lmcache_lookups(engine: Any) -> Iterator[LostSlot]:
    """Yield what LMCache's engine (`lmcache.v1.cache_engine`) has pinned for requests that did not come for it.

    It is never evicted (LMCache#1034). Between a lookup and the retrieval a request waits in vLLM's scheduler, where
    that is in this process.
    """
    pins = {str(request): found for request, found in dict(engine.lookup_pins).items() if found}
    if not pins:
        return
    schedulers: Any = loaded("vllm.v1.core.sched.scheduler")
    known = [] if schedulers is None else all_instances(schedulers.Scheduler)
    waiting = {request for scheduler in known for request in dict(scheduler.requests)}
    for request in pins.keys() - waiting:
        chunks = sum(map(len, pins[request].values()))
        numbers = f"{chunks} chunks of {request}"
        yield LostSlot("LMCache's LMCacheEngine", "pinned lookup", numbers, _UNRETRIEVED, request, id(engine))


_POOLS = (
    _Pools("vllm.v1.core.block_pool", "BlockPool", _vllm_blocks),
    _Pools("vllm.v1.core.encoder_cache_manager", "EncoderCacheManager", _vllm_embeddings),
    _Pools("sglang.srt.mem_cache.memory_pool", "ReqToTokenPool", _sglang_rows),
    _Pools("lmcache.v1.storage_backend.local_cpu_backend", "LocalCPUBackend", _lmcache_chunks),
    _Pools("lmcache.v1.cache_engine", "LMCacheEngine", _lmcache_lookups),
)

MODULES = tuple(pools.module for pools in _POOLS)
"""Where engines have their pools: while none of them is loaded, none has any."""
