"""Edges of what programs are made of: modules, classes, functions, caches, contexts, futures, queues."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextvars import Context
from types import FunctionType, ModuleType
from typing import Any

from lowtide.probes.memory.capsules import EXPORTED, keeps_exported
from lowtide.probes.objects.foreign import (
    LRU_CACHE,
    dict_of_module,
    is_a,
    mro_of,
    namespace_of,
    namespace_of_class,
    type_name,
)
from lowtide.probes.originals import gc, loaded, threading
from lowtide.probes.references.entries import Edge, Rest, item_text, namespace_entry
from lowtide.probes.references.unseen_references import CALLBACK, MAPPED, edge_of

_HAMT = frozenset({"hamt", "hamt_bitmap_node", "hamt_array_node", "hamt_collision_node"})


def of_module(way: Rest) -> Edge | None:
    """Name a global of a module, past its namespace."""
    if not is_a(way[0], ModuleType) or way[1] is not dict_of_module(way[0]):
        return None
    return namespace_entry(way, "module-global", ".__dict__")


def of_class(way: Rest) -> Edge | None:
    """Name an attribute of a class, past its namespace; its bases."""
    cls = way[0]
    if not is_a(cls, type):
        return None
    if way[1] is namespace_of_class(cls):
        return namespace_entry(way, "class-attribute", ".__dict__")
    for name in ("__mro__", "__bases__", "__base__"):
        if type.__dict__[name].__get__(cls) is way[1]:
            return Edge(f".{name}", "other")
    return None


def of_type(way: Rest) -> Edge | None:
    """Name the class of an instance."""
    return Edge(".__class__", "other") if way[1] is type(way[0]) else None


def of_function(way: Rest) -> Edge | None:
    """Name a cell, a default or a global of a function."""
    function, held = way[0], way[1]
    if type(function) is not FunctionType:
        return None
    if function.__closure__ is not None and held is function.__closure__ and len(way) > 2:
        names = function.__code__.co_freevars
        name = next(name for name, cell in zip(names, held, strict=True) if cell is way[2])
        return Edge(f"cell {name!r}", "closure", min(3, len(way) - 1))
    if held is function.__globals__:
        return Edge(f"__globals__{item_text(way.after(1))}", "module-global", 2) if len(way) > 2 else None
    for name in ("__defaults__", "__kwdefaults__"):
        if held is getattr(function, name):
            if len(way) == 2:
                return Edge(f".{name}", "default")
            return Edge(f".{name}{item_text(way.after(1))}", "default", 2)
    return None


def of_cache(way: Rest) -> Edge | None:
    """Name a `functools.lru_cache`: a bounded one shows its keys and results itself, another the dict of them."""
    cache: Any = way[0]
    held = way[1]
    if type(way[0]) is not LRU_CACHE or held is vars(cache):
        return None
    if held is vars(cache).get("__wrapped__"):
        return Edge(".__wrapped__", "other")
    if cache.cache_info().maxsize is None:
        return _cache_entry(way, held, way[2], 2) if type(held) is dict and len(way) > 2 else None
    entries = way.containers.once(cache, _dict_of_bounded_cache)
    return None if entries is None else _cache_entry(way, entries, held, 1)


def _dict_of_bounded_cache(cache: Any) -> Any:
    return next((item for item in gc.get_referents(cache) if is_dict_of_cache(cache, item)), None)


def is_dict_of_cache(cache: Any, item: Any) -> bool:
    """Return whether an object that a cache refers to is the dict of its entries."""
    if type(item) is not dict or item is vars(cache):
        return False
    # A bounded one leads from the keys to links of a type of their own, which hold the results.
    return cache.cache_info().maxsize is None or any(map(_is_cache_link, item.values()))


def _is_cache_link(item: object) -> bool:
    return type_name(type(item)) == "functools._lru_list_elem"


def _cache_entry(way: Rest, entries: dict[Any, object], held: object, references: int) -> Edge:
    if way.containers.has_key(entries, held):
        return Edge("lru_cache key", "lru-cache-key", references)
    return Edge("lru_cache value", "lru-cache-value", references)


def of_context(way: Rest) -> Edge | None:
    """Name a copied context: its variables, past the tree in which it keeps them."""
    if type(way[0]) is not Context:
        return None
    references = next((place for place, item in enumerate(way) if place and type_name(type(item)) not in _HAMT), 0)
    names = way.containers.once(way[0], _names_in_context)
    name = names.get(id(way[references])) if references else None
    return None if name is None else Edge(f"[{name!r}]", "context-variable", references)


def _names_in_context(context: Context) -> dict[int, str]:
    """Return the names of a context's variables, by the identities of their values; of several the first."""
    names: dict[int, str] = {}
    for variable, value in context.items():
        names.setdefault(id(value), variable.name)
    return names


def of_thread_local(way: Rest) -> Edge | None:
    """Name a `threading.local`: past its dict of the threads and the thread's own dict."""
    if len(way) < 4 or not is_a(way[0], threading.local) or type(way[1]) is not dict or type(way[2]) is not dict:
        return None
    return namespace_entry(way.after(1), "thread", "")._replace(references=3)


def of_unseen(way: Rest) -> Edge | None:
    """Name a reference that the collector is not shown: an array's base, what a memory view is of."""
    if type(way[0]) is memoryview and len(way) > 2 and type_name(type(way[1])) == "managedbuffer":
        return Edge(".obj", "other", 2)
    if keeps_exported(type(way[0])):
        return Edge(EXPORTED, "opaque")
    text = edge_of(way[0], way[1], way.containers)
    if text in (CALLBACK, MAPPED):
        return Edge(text, "opaque")
    return None if text is None else Edge(text, "item" if text.startswith("[") else "other")


def of_future(way: Rest) -> Edge | None:
    """Name a future or task of asyncio that is written in C."""
    module: Any = loaded("_asyncio")
    if module is None:
        return None
    for base in mro_of(type(way[0])):
        names = _TEXT_OF_TASK if base is module.Task else _TEXT_OF_FUTURE if base is module.Future else {}
        for name, text in names.items():
            if name in namespace_of(base) and namespace_of(base)[name].__get__(way[0]) is way[1]:
                return Edge(text, "other")
        if base is module.Future:
            return _callback(way, namespace_of(base)["_callbacks"].__get__(way[0]) or [])
    return None


_TEXT_OF_TASK = {"_coro": ".get_coro()", "_fut_waiter": "._fut_waiter"}
_TEXT_OF_FUTURE = {"_result": "._result", "_exception": "._exception", "_loop": "._loop"}


def _callback(way: Rest, callbacks: Sequence[tuple[object, object]]) -> Edge | None:
    """Return the first callback and its context lie in the future itself, the others in a list of pairs."""
    for place, pair in enumerate(callbacks):
        for part, item in enumerate(pair):
            if item is way[1]:
                return Edge(f"._callbacks[{place}][{part}]", "other")
        if len(way) > 2 and pair is way[2]:
            return Edge(f"._callbacks[{place}]", "other", 2)
    return Edge("its context", "opaque") if type(way[1]) is Context else None


def of_queue(way: Rest) -> Edge | None:
    """Name a `queue.SimpleQueue`, which shows its items to nobody: past the list in which it keeps them."""
    if not any(type_name(base) == "_queue.SimpleQueue" for base in mro_of(type(way[0]))):
        return None
    if sys.version_info >= (3, 13):
        return Edge("queued item", "opaque")
    return Edge("queued item", "opaque", 2) if type(way[1]) is list and len(way) > 2 else None
