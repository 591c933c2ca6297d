"""A finding about private pools of torch's allocator in which nothing lives: which they are, and who holds them."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from lowtide.leakcheck.fingerprints import fingerprint
from lowtide.leakcheck.item_findings import ItemLeak, with_fingerprint, with_pool_holder
from lowtide.leakcheck.listing import first_of
from lowtide.leakcheck.metrics import ALLOCATOR_HOLDER
from lowtide.leakcheck.tensor_findings import Context
from lowtide.reports.schema import Finding, Remedy
from lowtide.reports.sizes import format_bytes

_POOL = re.compile(r"pool \(\d+, \d+\)")
_SHOWN = 3


def of_empty_pools(finding: Finding, key: str, names: Mapping[str, int], context: Context) -> Finding:
    """The finding with the pools' ids and the holder of one, and not with the address of each segment.

    Args:
        finding: as the metric tells it.
        key: the metric's key.
        names: bytes of the segments that are still reserved, by `pool (0, 1), segment at 0x…`.
        context: what is known around it.
    """
    sizes: dict[str, int] = {}
    for name, amount in names.items():
        pool = _POOL.match(name)
        if pool is not None:
            sizes[pool[0]] = sizes.get(pool[0], 0) + amount
    pools = first_of([f"{pool}: {format_bytes(amount)}" for pool, amount in sizes.items()], _SHOWN)
    word = "a private pool" if len(sizes) == 1 else f"{len(sizes)} private pools"
    size = sum(sizes.values())
    where = f"on {finding.device} in {word} of torch's allocator, in which nothing lives,"
    told = msgspec.structs.replace(
        finding,
        bytes=size,
        message=f"{format_bytes(size)} reserved {where} did not come back at {finding.stage} ({pools})",
        holder=first_of(list(sizes), _SHOWN),
    )
    leak = with_pool_holder(ItemLeak(told, key, names, 0), context)
    pool_or_pools = "the pool" if len(sizes) == 1 else "the pools"
    advice = f"let go of {pool_or_pools} at {finding.stage}, then torch.cuda.empty_cache()"
    if leak.explanation is not None:
        advice = f"let go of {leak.explanation.holder} at {finding.stage}, then torch.cuda.empty_cache()"
    found = with_fingerprint(leak, "").finding
    return msgspec.structs.replace(found, advice=advice, former_fingerprint=finding.fingerprint)


def of_cached_pools(pools: Finding, others: Finding | None) -> Finding:
    """The finding about pools that `torch.cuda.empty_cache()` gave back: only torch held them, as it holds its cache.

    Args:
        pools: as the metric tells it.
        others: what the same call gave back of the default pool, whose cause is the same; None for nothing.
    """
    assert pools.remedy is not None
    size, returned = pools.bytes, pools.remedy.returns_bytes
    of_pools = f"{format_bytes(size)} of it in private pools in which nothing lives"
    if others is not None and others.remedy is not None:
        size, returned = size + others.bytes, returned + others.remedy.returns_bytes
    action = pools.remedy.action
    told = msgspec.structs.replace(pools if others is None else others, former_fingerprint=pools.fingerprint)
    return msgspec.structs.replace(
        told,
        bytes=size,
        # That of the default pool's finding, also in a life in which nothing of that pool is told.
        fingerprint=fingerprint(
            resource=told.resource, device=told.device, stage=told.stage, suspects=("", told.cause)
        ),
        holder=ALLOCATOR_HOLDER,
        remedy=Remedy(action=action, returns_bytes=returned),
        message=f"{format_bytes(size)} of reserved on {told.device} did not come back at {told.stage}, {of_pools}; "
        f"{action} returns {format_bytes(returned)}",
    )
