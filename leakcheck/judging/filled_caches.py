"""Caches that were filled during a test: which of them alone keep a new module, or an object by its bound method."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Sequence
from types import CellType, FunctionType, MethodType
from typing import Any

import msgspec

from lowtide.leakcheck.judging.exemptions import exempt
from lowtide.leakcheck.judging.storages import Key, is_module, is_tensor, storage_keys
from lowtide.probes.heap.births import Newborn
from lowtide.probes.heap.caches import BEYOND_CACHES, CacheActivity, alive, cache_entries, walk_caches
from lowtide.probes.heap.holders import SharedWalk, trace
from lowtide.probes.heap.reach import module_namespaces, reach
from lowtide.probes.objects.foreign import module_of_class, type_name
from lowtide.probes.originals import gc, weakref

_MOST_REACHED = 20_000
"""Objects that are looked at behind one cache, or behind one object that it holds."""

_MOST_IN_ALL = 300_000
"""Objects that are looked at behind all large caches together; what several of these reach is reported of the first."""


class CachedItem(msgspec.Struct, frozen=True):
    """One object that a cache keeps; holds neither of the two.

    Attributes:
        cache: a weak reference to the cache.
        code: the cache, as code.
        identity: that of the object.
    """

    cache: weakref.ref[Any]
    code: str
    identity: int

    @property
    def is_there(self) -> bool:
        """Whether the cache still leads to the object."""
        cache = self.cache()
        return cache is not None and any(id(item) == self.identity for item in _kept_by(cache, module_namespaces()))

    @property
    def entries(self) -> list[Any]:
        """The cache's arguments and results that lead to the object; what hangs on them lives with it."""
        cache = self.cache()
        if cache is None:
            return []
        namespaces = module_namespaces()
        found = []
        for entry in _single_entries(cache):
            objects, _ = reach([entry], boundaries=BEYOND_CACHES, namespaces=namespaces, max_objects=_MOST_REACHED)
            if any(id(item) == self.identity for item in objects):
                found.append(entry)
        return found

    def clear(self) -> None:
        """Empty the cache, if there is one still."""
        cache = self.cache()
        if cache is not None:
            cache.cache_clear()


class FilledCaches:
    """Knows all `lru_cache`s, which of them were asked for something new since a mark, and in which stage."""

    def __init__(self) -> None:
        self._activity = CacheActivity()
        self._stages: dict[int, str] = {}
        # Weakly: a `sqlite3.Connection` that is closed gives its file back once nobody has its cache of statements.
        self._filled: list[weakref.ref[Any]] = []
        # Those in which the last cheap look found anything; None until there was one.
        self._holding: list[weakref.ref[Any]] | None = None
        self._born: Collection[int] | None = ()
        self._cached_items: dict[str, CachedItem] = {}
        self._owned: set[int] = set()
        self._entered: list[set[int]] = []
        self._alone: dict[int, bool] = {}

    def add(self, caches: Iterable[Any]) -> None:
        """Watch these too."""
        self._activity.add(caches)

    def mark(self) -> None:
        """Begin: what is filled from here on is new."""
        self._activity.mark()
        self._stages.clear()
        self._owned.clear()
        self._entered.clear()
        self.forget()

    def note(self, stage: str) -> None:
        """Note that those filled for the first time since the last look were filled in `stage`."""
        filled = self._activity.changed()
        self._filled, self._holding = [*map(weakref.ref, filled)], None
        for cache in filled:
            self._stages.setdefault(id(cache), stage)

    def enter(self) -> None:
        """Count what gets into a cache until `leave` as that of who is set up meanwhile; call it right after `note`."""
        self._entered.append(set(map(id, alive(self._filled))))

    def leave(self) -> None:
        """Count what the caches that were first filled since `enter` hold as that of who was set up."""
        before = self._entered.pop()
        new = [cache for cache in self._activity.changed() if id(cache) not in before]
        if not new:
            return
        namespaces = module_namespaces()
        for cache in new:
            self._owned.update(map(id, _kept_by(cache, namespaces)))
        # Whoever fills one of them again does so in another stage.
        self._activity.take(new)

    def known(self) -> list[Any]:
        """Return all that are watched and alive."""
        return self._activity.known()

    @property
    def any_filled(self) -> bool:
        """Whether any was at the last look."""
        return bool(self._filled)

    def born(self, identities: Collection[int] | None) -> None:
        """Note the identities of what was born since the mark; None if nobody knows."""
        self._born = identities

    def forget(self) -> None:
        """Forget which were filled, and what they hold."""
        self._filled, self._holding = [], None
        self._cached_items = {}
        self._alone = {}

    def suspects(self, survivors: Iterable[Newborn]) -> bool:
        """Return whether a filled cache holds anything that may be its alone; looks at nothing but the caches."""
        found = self._new_in_each(alive(self._filled), survivors, module_namespaces()) if self._filled else []
        self._holding = [weakref.ref(cache) for cache, items in found if items]
        return bool(self._holding)

    def held(
        self, survivors: Iterable[Newborn], judged: Collection[Key], walk: SharedWalk | None = None
    ) -> dict[str, int]:
        """Return new modules, and objects of bound methods, that only the filled caches keep, as text with 1 each.

        What anybody else holds too (a logger, a singleton, a fixture's engine) lives anyway, and is no leak of a cache.
        That is found out by one walk over the heap for all of them, once per test.  What gets nothing new any more only
        loses: where `suspects` has looked, only those caches are gone through in which it found anything.

        Args:
            survivors: what was born since the mark and is alive.
            judged: the storages that are judged: what leads to one of those is reported by the finding about that.
            walk: the walk over the heap to ask, if it is shared with others.
        """
        caches = alive(self._filled if self._holding is None else self._holding)
        if not caches:
            return {}
        # Asked once: with torch's compiler loaded there are thousands of modules, and dozens of its caches fill.
        namespaces = module_namespaces()
        in_each = self._new_in_each(caches, survivors, namespaces)
        self._find_alone([item for _, items in in_each for item in items], walk)
        found: dict[str, int] = {}
        for cache, items in in_each:
            for item in _outermost([item for item in items if self._alone[id(item)]], judged, namespaces):
                text = _described(item, cache)
                found[text] = 1
                self._cached_items[text] = CachedItem(weakref.ref(cache), _name(cache), id(item))
        return found

    def stage_of(self, name: str) -> str:
        """Return the stage in which what this text names got into its cache; empty if it is no such text."""
        item = self._cached_items.get(name)
        cache = None if item is None else item.cache()
        return "" if cache is None else self._stages.get(id(cache), "")

    def of(self, names: Iterable[str]) -> dict[str, CachedItem]:
        """Return what these texts name; it may be asked for long after `forget`."""
        return {name: self._cached_items[name] for name in names if name in self._cached_items}

    def _new_in_each(
        self, caches: Sequence[Any], survivors: Iterable[Newborn], namespaces: Collection[int]
    ) -> list[tuple[Any, list[Any]]]:
        """Return some caches, each with the modules and owners of bound methods in it that were born since the mark."""
        newborn = {id(born.item) for born in survivors}
        found = []
        for cache, objects in walk_caches(caches, namespaces, _MOST_REACHED, _MOST_IN_ALL):
            new = [item for item in _kept(cache, objects) if self._is_new(item, newborn)]
            stays = exempt("lru-cache", [_described(item, cache) for item in new]) if new else set()
            found.append((cache, [item for item in new if _described(item, cache) not in stays]))
        return found

    def _is_new(self, item: object, newborn: Collection[int]) -> bool:
        if id(item) in self._owned:
            return False
        if is_module(item):
            return id(item) in newborn
        return self._born is not None and id(item) in self._born and module_of_class(type(item)) != "builtins"

    def _find_alone(self, items: list[Any], walk: SharedWalk | None) -> None:
        """Find out which of some objects no root leads to but through the filled caches."""
        asked = list({id(item): item for item in items if id(item) not in self._alone}.values())
        if not asked:
            return
        with trace(asked, ignore=set(map(id, alive(self._filled))), walk=walk) as found:
            self._alone.update((id(item), not found.reaches(place)) for place, item in enumerate(asked))


def _kept_by(cache: Any, namespaces: Collection[int]) -> list[Any]:
    """Return the `torch.nn.Module`s behind a cache's entries, and the objects whose bound methods it was given."""
    entries = cache_entries(cache)
    objects, _ = reach(entries, boundaries=BEYOND_CACHES, namespaces=namespaces, max_objects=_MOST_REACHED)
    return _kept(cache, objects)


def _kept(cache: Any, objects: Iterable[Any]) -> list[Any]:
    """Return the same of a cache, behind whose entries these objects are."""
    of_torch: dict[int, bool] = {}
    kept: dict[int, Any] = {}
    owners = set()
    for item in objects:
        kind = type(item)
        if kind is MethodType:
            owners.add(id(item.__self__))
        if id(kind) not in of_torch:
            of_torch[id(kind)] = is_module(item)
        if of_torch[id(kind)]:
            kept[id(item)] = item
    # A full cache of texts and numbers is gone through no second time after each test that fills it.
    given = {id(item): item for item in _given(cache_entries(cache), owners)} if owners else {}
    return list((kept | given).values())


_CONTAINERS = (tuple, list, dict, set, frozenset, functools.partial, CellType)


def _given(entries: Iterable[object], owners: Collection[int]) -> Iterator[object]:
    """Yield what a cache was given: objects by a bound method, and those that lead to a bound method of their own.

    They may stand in containers, and methods in a function's closure or defaults. What hangs on another object was not
    given: nearly every object of a program leads to some method of another.

    Args:
        entries: the cache's arguments and results.
        owners: the identities of the objects whose bound methods they lead to.
    """
    left: list[tuple[Any, bool]] = [(entry, False) for entry in entries]
    seen = set[int]()
    while left and len(seen) < _MOST_REACHED:
        item, is_closed_over = left.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        kind = type(item)
        if kind is MethodType:
            yield item.__self__
        elif kind is FunctionType:
            inside = (item.__closure__ or (), item.__defaults__ or (), (item.__kwdefaults__ or {}).values())
            left += [(part, True) for parts in inside for part in parts]
        elif any(kind is each for each in _CONTAINERS):  # a class may say that it equals any other
            left += [(part, is_closed_over) for part in gc.get_referents(item)]
        elif id(item) in owners and not is_closed_over:
            yield item


def _single_entries(cache: Any) -> list[Any]:
    """Return the arguments and results by themselves, without the dict in which an unbounded cache has all of them."""
    return [
        part
        for entry in cache_entries(cache)
        for part in (gc.get_referents(entry) if type(entry) is dict else (entry,))
    ]


def _described(item: object, cache: Any) -> str:
    return f"{type_name(type(item))} at {id(item):#x} in {_name(cache)}"


def _outermost(items: Iterable[Any], judged: Collection[Key], namespaces: Collection[int]) -> list[Any]:
    """Leave out what another one of them holds, and what leads to a storage that is judged."""
    kept: dict[int, Any] = {}
    inside: set[int] = set()
    for item in items:
        if id(item) in inside:
            continue
        objects, _ = reach([item], boundaries=BEYOND_CACHES, namespaces=namespaces, max_objects=_MOST_REACHED)
        own = set(map(id, objects))
        inside |= own
        kept = {identity: other for identity, other in kept.items() if identity not in own}
        if not (judged and storage_keys(part for part in objects if is_tensor(part)) & set(judged)):
            kept[id(item)] = item
    return list(kept.values())


def _name(cache: Any) -> str:
    return f"{cache.__module__}.{getattr(cache, '__qualname__', '?')}"
