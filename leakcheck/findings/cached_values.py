"""First use of a library's cache: a value that the library computed from plain data and keeps, until there is more.

A bounded `lru_cache` of an installed library may keep tables (anchors, position embeddings) that its own function
computed from numbers, strings, dtypes and devices. The first of each cache are excused and listed; what the cache has
more of after a later test is reported. Excused is only what such caches alone hold, and no object of the program: no
module, no argument that is a tensor, and no tensor with a gradient.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

from lowtide.leakcheck.baseline.storages import HeldStorage, Key, storage_keys, tensors_over
from lowtide.leakcheck.explaining.expressions import is_name, of_module
from lowtide.probes.heap.holders import SharedWalk, trace
from lowtide.probes.memory.tensors import survey_storages
from lowtide.probes.objects.foreign import LRU_CACHE, dict_of_module, is_a, module_of_class, namespace_of
from lowtide.probes.objects.whose_code import is_library
from lowtide.probes.originals import gc, loaded, weakref
from lowtide.reports.schema import NotMeasured
from lowtide.reports.sizes import format_amount, format_bytes

MOST_KEPT = 16 << 20
"""Bytes up to which what one cache keeps is a first use."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...))
_TORCHS = ("dtype", "device", "layout", "memory_format")
_MOST_WRAPPED = 4
"""How many decorators may lie around a cache."""


@dataclass
class _Kept:
    """What one cache keeps: the cache, the bytes of its values at the most, and with which test the first came."""

    cache: weakref.ref[Any]
    level: int
    since: str
    turn: int
    grown: bool = False


@dataclass(frozen=True)
class SortedValues:
    """Storages that did not come back, separated from what libraries' caches are excused for.

    Attributes:
        excused: those that are a cache's first.
        hints: what to say of others, with the cache through which they are reached.
        listed: what to say of those that are excused.
    """

    excused: frozenset[Key] = frozenset()
    hints: tuple[tuple[str, object], ...] = field(default=(), repr=False)
    listed: tuple[NotMeasured, ...] = ()


class CachedValues:
    """What the caches of libraries have been excused for in this process; holds the caches weakly."""

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}
        self._turn = 0

    def mark(self) -> None:
        """From here on it is a later test."""
        self._turn += 1

    def sort(
        self, held: Sequence[HeldStorage], caches: Iterable[Any], subject: str, walk: SharedWalk | None = None
    ) -> SortedValues:
        """Tell apart which of some storages a library's cache keeps from its first use.

        Args:
            held: what is there and was not at the baseline.
            caches: the `lru_cache`s that there are.
            subject: what is judged, as a later finding calls it.
            walk: the walk over the heap to ask, if it is shared with others.
        """
        new = {storage.key: storage.bytes for storage in held}
        asked = _asked(new, caches) if new else {}
        if not asked:
            return SortedValues()
        alone = _held_by_these_alone(asked, walk)
        excused: set[Key] = set()
        hints: list[tuple[str, object]] = []
        listed = []
        for name, (cache, tensors) in asked.items():
            sizes = {key: size for key, size in _sizes(tensors).items() if key in alone}
            own = sizes.keys() & new.keys()
            kept = self._noted(cache, sum(sizes.values()), subject) if own else None
            if kept is None or kept.level > MOST_KEPT:
                continue
            if kept.grown:
                since = kept.since or "an earlier test"
                hints.append((f"the cache's first values came with {since}, and were listed as once so far", cache))
            else:
                excused |= own
                listed.append(_listed(cache, name, [storage for storage in held if storage.key in own]))
        return SortedValues(frozenset(excused), tuple(hints), tuple(listed))

    def _noted(self, cache: Any, level: int, subject: str) -> _Kept:
        kept = self._kept.get(id(cache))
        if kept is None or kept.cache() is not cache:
            kept = self._kept[id(cache)] = _Kept(weakref.ref(cache), level, subject, self._turn)
        kept.grown = kept.grown or (level > kept.level and kept.turn != self._turn)
        kept.level = max(kept.level, level)
        return kept


def _listed(cache: Any, name: str, held: Sequence[HeldStorage]) -> NotMeasured:
    size, largest = sum(storage.bytes for storage in held), max(held, key=lambda storage: storage.bytes)
    tensors = f"{format_bytes(size)} in {format_amount(len(held), 'tensors')} ({largest.text})"
    function = vars(cache)["__wrapped__"]
    return NotMeasured(
        what=f"{tensors} in the cache of {function.__module__}.{function.__qualname__}",
        why=f"once so far: if the cache keeps more after a later test, that is a leak; {name}.cache_clear() empties it",
    )


def _asked(new: Mapping[Key, int], caches: Iterable[Any]) -> dict[str, tuple[Any, list[Any]]]:
    """By its name as code, each library's cache that has computed one of some storages, with the tensors behind it."""
    found = {}
    for cache in caches:
        tensors = _computed(cache)
        name = _name_in_library(cache) if tensors and storage_keys(tensors) & new.keys() else ""
        if name:
            found[name] = (cache, tensors)
    return found


def _held_by_these_alone(asked: Mapping[str, tuple[Any, list[Any]]], walk: SharedWalk | None) -> set[Key]:
    """The storages that nothing leads to but some caches."""
    keys = storage_keys(item for _, items in asked.values() for item in items)
    # All over that memory: the base of a view is held by the view, where no walk sees it.
    tensors = tensors_over(keys, walk)
    with trace(tensors, ignore={id(cache) for cache, _ in asked.values()}, walk=walk) as found:
        return keys - storage_keys(item for place, item in enumerate(tensors) if found.reaches(place))


def _sizes(tensors: Sequence[Any]) -> dict[Key, int]:
    return {(storage.device, storage.address): storage.bytes for storage in survey_storages(tensors).storages}


def _computed(cache: Any) -> list[Any]:
    """The tensors behind those values of a bounded cache that were computed from plain data."""
    _, _, most, entries = cache.cache_info()
    if most is None or not entries or loaded("torch") is None:
        return []
    found: list[Any] = []
    for key, value in _entries(cache, entries):
        tensors = _tensors_in(value) if _is_plain(key) else None
        found += tensors or ()
    return found


def _entries(cache: Any, number: int) -> Iterator[tuple[Any, Any]]:
    """The keys of a bounded cache, each with its value; none if the interpreter shows them otherwise.

    It shows the collector each key and right behind it the value, and the dict of all keys.
    """
    referents = gc.get_referents(cache)
    tables = (item for item in referents if type(item) is dict and item is not vars(cache) and len(item) == number)
    keys = {id(key) for key in next(tables, ())}
    places = [place for place, item in enumerate(referents[:-1]) if id(item) in keys]
    pairs = []
    last = -1
    for place in places:
        # A value may be its key.
        if place > last:
            pairs.append((referents[place], referents[place + 1]))
            last = place + 1
    return iter(pairs if len(pairs) == number else ())


def _is_plain(item: Any) -> bool:
    """Whether something of a key is data that belongs to nobody: no object, class or function of the program."""
    kind = type(item)
    if kind is tuple or kind is frozenset or _is_torchs(kind, ("Size",)):
        return all(map(_is_plain, kind.__iter__(item)))
    # With `typed=True` the arguments' types are part of the key; a bare object stands before the named arguments.
    return _is_plain_type(kind) or kind is object or (kind is type and _is_plain_type(item))


def _is_plain_type(kind: type) -> bool:
    return any(kind is plain for plain in _PLAIN) or _is_torchs(kind, _TORCHS)


def _is_torchs(kind: type, names: Collection[str]) -> bool:
    torch = loaded("torch")
    return any(kind is getattr(torch, name, None) for name in names)


def _tensors_in(value: Any) -> list[Any] | None:
    """The tensors in a value that is made of nothing but tensors, plain data and containers; else None."""
    torch: Any = loaded("torch")
    found: list[Any] = []
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        item = waiting.pop()
        kind = type(item)
        if id(item) in seen or _is_plain(item):
            continue
        seen.add(id(item))
        if kind is torch.Tensor:
            if item.requires_grad:
                return None
            found.append(item)
        elif kind is dict:
            waiting += [*dict.keys(item), *dict.values(item)]
        elif kind is list or kind is set or kind is frozenset or is_a(item, tuple):
            waiting += [part for part in gc.get_referents(item) if part is not kind]
        else:
            return None
    return found


def _name_in_library(cache: Any) -> str:
    """A cache as code, if an installed library made it of a function of its own: where its module has it.

    That is a global or a class attribute, perhaps behind decorators; empty if it is not the library's.
    """
    function = vars(cache).get("__wrapped__")
    if type(function) is not FunctionType or not is_library(function.__code__.co_filename):
        return ""
    module = sys.modules.get(function.__module__) if type(function.__module__) is str else None
    if module is None or not is_a(module, ModuleType) or dict_of_module(module) is not function.__globals__:
        return ""
    names = list(dict_of_module(module).items())
    for name, value in names:
        if is_name(name) and (way := _way_to(cache, value)) is not None:
            return f"{of_module(function.__module__)}.{name}{way}"
    for name, value in names:
        if not is_name(name) or not is_a(value, type) or module_of_class(value) != function.__module__:
            continue
        for entry, held in list(namespace_of(value).items()):
            way = _way_to(cache, held)
            if way is not None:
                owner = f"{of_module(function.__module__)}.{name}"
                # What a class shows of a function or a cache is the thing itself.
                bare = type(held) is FunctionType or type(held) is LRU_CACHE
                return f"{owner}.{entry}{way}" if bare else f"{owner}.__dict__[{entry!r}]{way}"
    return ""


def _way_to(cache: Any, value: Any, wrapped: int = 0) -> str | None:
    """From a decorated function to its cache, as code; None if it does not lead there."""
    if value is cache:
        return ""
    if wrapped == _MOST_WRAPPED:
        return None
    steps: list[tuple[str, Any]] = []
    if type(value) is FunctionType:
        cells = value.__closure__ or ()
        steps = [(f".__closure__[{place}].cell_contents", _contents(cell)) for place, cell in enumerate(cells)]
    elif type(value) is staticmethod or type(value) is classmethod:
        steps = [(".__func__", value.__func__)]
    elif type(value) is property:
        steps = [(".fget", value.fget)]
    for edge, held in steps:
        way = _way_to(cache, held, wrapped + 1)
        if way is not None:
            return edge + way
    return None


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None
