"""Private pools of torch's allocator in which nothing lives: who holds each, and the findings about them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from lowtide.leakcheck.explaining.explain import Explanation
from lowtide.leakcheck.findings.item_findings import ItemLeak, with_fingerprint
from lowtide.leakcheck.findings.storage_holders import Context, common_holder
from lowtide.leakcheck.judging.fingerprints import fingerprint, whereabouts
from lowtide.leakcheck.judging.ladder import ALLOCATOR_HOLDER
from lowtide.probes.device.allocations import AllocationsError, read_allocations
from lowtide.probes.heap.holders import SharedWalk, instances_in
from lowtide.probes.memory.ranges import Range, common, total
from lowtide.probes.objects.foreign import type_name
from lowtide.probes.originals import loaded
from lowtide.reports.schema import Cause, Finding, Remedy
from lowtide.reports.sizes import first_of, format_bytes
from lowtide.reports.statement import Note, noted, restated

_POOL = re.compile(r"pool \((\d+), (\d+)\)")
_SHOWN = 3

PoolId = tuple[int, ...]


_Holding = tuple[Explanation, Cause]
"""Who holds a pool, and what that is."""


def with_pool_holders(leak: ItemLeak, context: Context) -> list[ItemLeak]:
    """Return a finding about private pools as one for each of their holders; any other as it is."""
    # What emptying the cache gave back nobody held.
    is_held = leak.finding.resource == "reserved" and leak.finding.remedy is None
    return _by_holder(leak, context) if is_held and leak.names else [leak]


def pool_holder(leak: ItemLeak, context: Context) -> Explanation | None:
    """Return who holds the private pools that a finding is about; of several the one with the most."""
    return next((holding[0] if holding else None for _, holding in _held(leak.names, context)), None)


def with_pools_to_let_go(leak: ItemLeak, context: Context) -> list[ItemLeak]:
    """Return what `with_pool_holders` does, with what to let go of, where nothing is tried."""
    return [part if part is leak else _advised(part, leak.finding) for part in with_pool_holders(leak, context)]


def _advised(part: ItemLeak, whole: Finding) -> ItemLeak:
    pools = "the pool" if len(_sizes(part.names)) == 1 else "the pools"
    holder = pools if part.explanation is None else part.explanation.holder
    changes = {
        "advice": f"let go of {holder} at {whole.stage}, then torch.cuda.empty_cache()",
        "former_fingerprint": whole.fingerprint,
    }
    return replace(part, finding=msgspec.structs.replace(with_fingerprint(part, "").finding, **changes))


def _by_holder(leak: ItemLeak, context: Context) -> list[ItemLeak]:
    held = _held(leak.names, context)
    mapped = _mapped(leak.finding.device, leak.names)
    return [_with_holder(_of_pools(leak, names, mapped), holding) for names, holding in held]


def _held(names: Mapping[str, int], context: Context) -> list[tuple[dict[str, int], _Holding | None]]:
    """Part private pools by what holds them: those behind the same suspect are one leak, those behind another another.

    Returns:
        The largest first, those that nobody is known to hold last; each with who holds all of it, by the way to the
        pool that is reached in the fewest steps.
    """
    explained = _explained({identity for name in names if (identity := _pool_of(name)) is not None}, context)
    parts: dict[object, dict[str, int]] = {}
    holders: dict[object, list[_Holding]] = {}
    for name, size in names.items():
        identity = _pool_of(name)
        holder = explained.get(identity) if identity is not None else None
        # As the fingerprint has it, so that no two of them share one.
        mark = None if holder is None else (holder[1], holder[0].suspects[:1])
        parts.setdefault(mark, {})[name] = size
        if holder is not None:
            holders.setdefault(mark, []).append(holder)
    found = [(part, _one_of(holders[mark]) if mark in holders else None) for mark, part in parts.items()]
    return sorted(found, key=lambda held: (held[1] is None, -sum(held[0].values())))


def _one_of(holdings: Sequence[_Holding]) -> _Holding:
    """Return the holding that is reached in the fewest steps, with the name of what holds all of them."""
    nearest, cause = min(holdings, key=lambda holding: len(holding[0].path))
    return replace(nearest, holder=common_holder([nearest, *(each for each, _ in holdings)])), cause


def of_cached_pools(pools: Finding, others: Finding | None) -> Finding:
    """Return the finding about pools that `torch.cuda.empty_cache()` gave back: only torch held them.

    What the same call gave back of the default pool has the same cause: if it was anything, `others` says so.
    """
    assert pools.remedy is not None
    size, returned = pools.bytes, pools.remedy.returns_bytes
    of_pools = f"{format_bytes(size)} of it in private pools in which nothing lives"
    if others is not None and others.remedy is not None:
        size, returned = size + others.bytes, returned + others.remedy.returns_bytes
    action = pools.remedy.action
    finding = pools if others is None else others
    changes = {
        "bytes": size,
        # That of the default pool's finding, also in a life in which nothing of that pool is reported.
        "fingerprint": fingerprint(**whereabouts(finding), suspects=("", finding.cause)),
        "former_fingerprint": pools.fingerprint,
        "holder": ALLOCATOR_HOLDER,
        "remedy": Remedy(action=action, returns_bytes=returned),
    }
    return restated(
        finding,
        changes,
        what=f"reserved on {finding.device}",
        is_since=False,
        things=(),
        notes=(Note(f", {of_pools}; {action} returns {format_bytes(returned)}"),),
    )


def _of_pools(leak: ItemLeak, names: Mapping[str, int], mapped: Sequence[Range] | None) -> ItemLeak:
    """Return the finding as one about these pools, with their ids and not with the address of each segment."""
    finding, sizes = leak.finding, _sizes(names)
    size = sum(sizes.values())
    pools = first_of([f"{pool}: {format_bytes(amount)}" for pool, amount in sizes.items()], _SHOWN)
    word = "a private pool" if len(sizes) == 1 else f"{len(sizes)} private pools"
    finding = restated(
        finding,
        {"bytes": size, "holder": first_of(list(sizes), _SHOWN)},
        amount=f"{format_bytes(size)} reserved on {finding.device} in {word} of torch's allocator, in which nothing "
        "lives,",
        things=(),
        notes=(Note(f" ({pools}){_without_memory(names, mapped)}"),),
    )
    return replace(leak, finding=finding, names=names)


def _sizes(names: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes by pool."""
    sizes: dict[str, int] = {}
    for name, amount in names.items():
        pool = _POOL.match(name)
        if pool is not None:
            sizes[pool[0]] = sizes.get(pool[0], 0) + amount
    return sizes


def _mapped(device: str, names: Mapping[str, int]) -> Sequence[Range] | None:
    """Return what the driver lists of a card where some segments are, read once for all pools; None if it cannot."""
    try:
        return read_allocations(int(device.partition(":")[2]), _segments(names))
    except AllocationsError:
        return None


def _segments(names: Mapping[str, int]) -> list[Range]:
    """Return address and length of each segment."""
    return [(int(name.rpartition(" ")[2], 16), size) for name, size in names.items()]


def _without_memory(names: Mapping[str, int], mapped: Sequence[Range] | None) -> str:
    """Return what to say of segments behind which the driver holds less than torch counts; empty for nothing.

    An allocator of the program's own may have unmapped them, as one does that puts an engine to sleep: torch counts
    them as before.
    """
    if mapped is None:
        return ""
    segments = _segments(names)
    size, held = total(segments), total(common(segments, mapped))
    if held >= size:
        return ""
    rest = "torch counts addresses that no memory is mapped to"
    return f"; the driver holds {format_bytes(held) if held else 'none'} of it: {rest}"


def _with_holder(leak: ItemLeak, holding: _Holding | None) -> ItemLeak:
    if holding is None:
        return leak
    explanation, cause = holding
    is_one = len({_pool_of(name) for name in leak.names}) == 1
    finding = noted(
        leak.finding,
        f"; the {'pool is' if is_one else 'pools are'} held by ",
        explanation.holder or "",
        cause=cause,
        verdict=explanation.verdict,
        path=explanation.path,
    )
    return replace(leak, finding=finding, explanation=explanation)


def _explained(wanted: Collection[PoolId], context: Context) -> dict[PoolId, _Holding]:
    """Return who holds each of some pools, and what that is, for those that anybody holds."""
    holders = [item for item in _pool_owners(context.walk) if _pool_id(item) in wanted]
    explanations = context.explain(holders)
    found: dict[PoolId, _Holding] = {}
    for item, explanation in zip(holders, explanations, strict=True):
        identity = _pool_id(item)
        known = None if identity is None else found.get(identity)
        if identity is not None and explanation.path and (known is None or len(explanation.path) < len(known[0].path)):
            found[identity] = (explanation, "cuda-graph" if "Graph" in type_name(type(item)) else explanation.cause)
    return found


def _pool_of(name: str) -> PoolId | None:
    found = _POOL.search(name)
    return None if found is None else tuple(map(int, found.groups()))


def _pool_owners(walk: SharedWalk | None) -> list[Any]:
    torch: Any = loaded("torch")
    kinds = [getattr(torch.cuda, name, None) for name in ("MemPool", "CUDAGraph")] if torch is not None else []
    return instances_in(walk, *(kind for kind in kinds if kind is not None))


def _pool_id(item: Any) -> PoolId | None:
    try:
        # A graph has a pool only once it was captured.
        identity = item.pool() if callable(getattr(item, "pool", None)) else item.id
        return tuple(map(int, identity))
    except RuntimeError:
        return None
