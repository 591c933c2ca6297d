"""The slots of fixed pools that engines give to requests (KV blocks, cached embeddings), and which of them are lost.

Such a pool is as large as ever when a slot is not given back: no counter of memory shows it, and the engine has room
for one request less. What is read are attributes of the engines' own objects, found by their modules; nothing of theirs
is called, and nothing imported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from lowtide.probes.objects.listed import all_instances
from lowtide.probes.originals import loaded, sys, time, weakref

NOBODY = "no request"

_UNKNOWN = "a request that the scheduler does not know"
_ENDED = "a request that has ended"

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
    """

    pool: str
    unit: str
    number: str
    owner: str
    request: str = ""


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
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, float, list[weakref.ref[Any]]]] = {}

    def lost(self) -> list[LostSlot]:
        """Return them; takes microseconds where there is no engine or nothing is taken."""
        found: list[LostSlot] = []
        for pools in _POOLS:
            cls = getattr(loaded(pools.module), pools.name, None)
            if not isinstance(cls, type):
                continue
            for pool in self._instances(pools.module, cls):
                # Of another version, or changed by another thread meanwhile.
                with contextlib.suppress(AttributeError, TypeError, RuntimeError):
                    found += pools.read(pool)
        return found

    def _instances(self, module: str, cls: type) -> Iterator[Any]:
        references, looked_until, known = self._known.get(module, (0, 0.0, []))
        now = sys.getrefcount(cls)
        if now != references and time.perf_counter() > looked_until:
            begun = time.perf_counter()
            known = [weakref.ref(pool) for pool in all_instances(cls)]
            ended = time.perf_counter()
            self._known[module] = sys.getrefcount(cls), ended + _WAITS * (ended - begun), known
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
            yield LostSlot("vLLM's BlockPool", "KV block", str(number), owner, request)


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
            yield LostSlot("vLLM's EncoderCacheManager", "encoder output", digest, owner, request)


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


_POOLS = (
    _Pools("vllm.v1.core.block_pool", "BlockPool", _vllm_blocks),
    _Pools("vllm.v1.core.encoder_cache_manager", "EncoderCacheManager", _vllm_embeddings),
)

MODULES = tuple(pools.module for pools in _POOLS)
"""Where engines have their pools: while none of them is loaded, none has any."""
