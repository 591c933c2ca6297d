"""A finding about private pools of torch's allocator in which nothing lives: which they are, and who holds them."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from lowtide.leakcheck.item_findings import ItemLeak, with_fingerprint, with_pool_holder
from lowtide.leakcheck.listing import first_of
from lowtide.leakcheck.tensor_findings import Context
from lowtide.reports.schema import Finding
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
