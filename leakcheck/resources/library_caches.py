"""What libraries beside torch keep on a card of what was freed, as torch's own allocator does, is given back.

A library counts only if the program has imported it and used a card with it; nothing is imported, and no card begun.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import msgspec

from lowtide.leakcheck.resources.resource import Change
from lowtide.probes.device.torch_allocator import any_graph_alive, has_context
from lowtide.probes.objects.listed import all_instances
from lowtide.probes.originals import initialized_torch, loaded
from lowtide.reports.schema import NotMeasured
from lowtide.reports.sizes import format_amount, format_bytes


class LibraryCache(msgspec.Struct, frozen=True):
    """An allocator that keeps what was freed.

    Attributes:
        module: the module that is there once it may have something.
        name: whose it is, for people.
        reason: what it keeps, and why that is no leak.
        call: what has it give that back, as code.
        held: what it keeps on a card, in words, and what to add to that behind its name; empty where that is nothing.
        give_back: has it give that back, on the card with that number.
        in_graphs: whether a captured graph may use it, so that it is kept while one is alive.
        prepared_by: the driver's library that has prepared what is kept, and keeps tables of its own for its kind.
    """

    module: str
    name: str
    reason: str
    call: str
    held: Callable[[int], tuple[str, str]]
    give_back: Callable[[int], None]
    in_graphs: bool = False
    prepared_by: str = ""


class Emptied(NamedTuple):
    """What libraries have given back.

    Attributes:
        notes: what they had, as their own public counters say it.
        prepared_by: the driver's libraries that had prepared some of it.
    """

    notes: tuple[NotMeasured, ...] = ()
    prepared_by: frozenset[str] = frozenset()


def _pools_of_cupy() -> list[Any]:
    """Return the pools of cupy's: the default one, and those that the program has made."""
    cupy: Any = loaded("cupy")
    default = cupy.get_default_memory_pool()
    return [default, *(pool for pool in all_instances(cupy.cuda.MemoryPool) if pool is not default)]


def _cupys(card: int) -> tuple[str, str]:
    cupy: Any = loaded("cupy")
    # The part of a pool on one card at a time: the current one.
    with cupy.cuda.Device(card):
        pools = _pools_of_cupy()
        total = sum(int(pool.total_bytes()) for pool in pools)
        used = sum(int(pool.used_bytes()) for pool in pools)
    return (format_bytes(total), f", of which {format_bytes(used)} are used") if total > used else ("", "")


def _empty_cupys(card: int) -> None:
    cupy: Any = loaded("cupy")
    with cupy.cuda.Device(card):
        for pool in _pools_of_cupy():
            pool.free_all_blocks()


def _cupys_pinned(card: int) -> tuple[str, str]:
    cupy: Any = loaded("cupy")
    # There is one for all cards, and it does not say how large its blocks are.
    free = int(cupy.get_default_pinned_memory_pool().n_free_blocks())
    return (format_amount(free, "free blocks") if free else "", "")


def _empty_cupys_pinned(card: int) -> None:
    cupy: Any = loaded("cupy")
    cupy.get_default_pinned_memory_pool().free_all_blocks()


def _numbas_lists(card: int) -> list[Any]:
    # `numba.cuda.current_context()` would make a context where there is none.
    used: Any = loaded("numba.cuda.cudadrv.driver").driver.devices
    contexts = [device.primary_context for device in list(used.values()) if device.id == card]
    # Arrays wait with the memory manager, streams and events with the context.
    return [
        waiting
        for context in contexts
        if context is not None
        for waiting in (context.memory_manager.deallocations, context.deallocations)
    ]


def _numbas(card: int) -> tuple[str, str]:
    waiting = sum(map(len, _numbas_lists(card)))
    return (format_amount(waiting, "freed things") if waiting else "", "")


def _empty_numbas(card: int) -> None:
    lists = _numbas_lists(card)
    if lists:
        # What is freed while no context is current is lost for good.
        with loaded("numba.cuda").gpus[card]:
            for waiting in lists:
                waiting.clear()


def _rmms(card: int) -> tuple[str, str]:
    memory: Any = loaded("rmm.mr")
    resource = memory.get_per_device_resource(card)
    size = int(resource.pool_size()) if hasattr(resource, "pool_size") else 0
    return (format_bytes(size) if size else "", "")


def _plans(card: int) -> tuple[str, str]:
    plans: Any = loaded("torch").backends.cuda.cufft_plan_cache[card]
    number = int(plans.size)
    return (format_amount(number, "plans") if number else "", "")


def _clear_plans(card: int) -> None:
    plans: Any = loaded("torch").backends.cuda.cufft_plan_cache[card]
    plans.clear()


def _keep(card: int) -> None:
    """Give nothing back: who has memory of such a pool would lose it."""


LIBRARY_CACHES = (
    LibraryCache(
        "cupy",
        "cupy's pools",
        "blocks that no array uses any more, for the next array",
        "cupy.get_default_memory_pool().free_all_blocks()",
        _cupys,
        _empty_cupys,
    ),
    LibraryCache(
        "cupy",
        "cupy's pool of pinned memory",
        "blocks that no array uses any more, for the next array",
        "cupy.get_default_pinned_memory_pool().free_all_blocks()",
        _cupys_pinned,
        _empty_cupys_pinned,
    ),
    LibraryCache(
        "numba.cuda.cudadrv.driver",
        "numba's list of what is to be freed",
        "arrays that are dead, until ten of them, or a fifth of a card",
        "numba.cuda.current_context().memory_manager.deallocations.clear()",
        _numbas,
        _empty_numbas,
    ),
    LibraryCache(
        "rmm.mr",
        "rmm's pool",
        "all that it has ever taken from the card, until it is replaced",
        "rmm.reinitialize()",
        _rmms,
        _keep,
    ),
    LibraryCache(
        "torch.backends.cuda",
        "torch's cache of cuFFT's plans",
        "a plan with its tables for each shape, for the next transform",
        "torch.backends.cuda.cufft_plan_cache.clear()",
        _plans,
        _clear_plans,
        in_graphs=True,
        prepared_by="libcufft",
    ),
)
"""The libraries that are known to; each keeps what it has until somebody asks."""


def empty_library_caches() -> Emptied:
    """Have every library that is in use give back what it only keeps, and return that; what fails is left as it is."""
    found: dict[NotMeasured, str] = {}
    torch = initialized_torch()
    for card in range(torch.cuda.device_count()) if torch is not None else ():
        for cache, what in _holding(torch, card):
            if cache.in_graphs and any_graph_alive():
                continue
            with contextlib.suppress(Exception):
                cache.give_back(card)
                found[NotMeasured(what=what, why=f"it keeps {cache.reason}: {cache.call}")] = cache.prepared_by
    return Emptied(tuple(found), frozenset(filter(None, found.values())))


def changes_on(card: int) -> list[Change]:
    """Return what gives memory on a card back that a library keeps, to be tried when no test follows."""
    torch = initialized_torch()
    caches = [] if torch is None else [cache for cache, _ in _holding(torch, card) if cache.give_back is not _keep]
    return [Change(cache.call, "", functools.partial(cache.give_back, card)) for cache in caches]


def _holding(torch: Any, card: int) -> Iterator[tuple[LibraryCache, str]]:
    """Return the libraries that keep something on a card, with what."""
    for cache in LIBRARY_CACHES:
        amount = more = ""
        # Another version, or half an import.
        with contextlib.suppress(Exception):
            if issubclass(type(sys.modules.get(cache.module)), ModuleType) and has_context(torch, card):
                amount, more = cache.held(card)
        if amount:
            yield cache, f"{amount} in {cache.name} on cuda:{card}{more}"
