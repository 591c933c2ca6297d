"""First use: values that were computed from plain data and are kept for the next time, until they go on to be more.

A memo keeps them: an `lru_cache` asked for plain data (numbers, strings, dtypes, devices, members of enumerations),
what `torch.compile` made of a function (the constants of its graphs), or what an installed library has under a private
name, in objects of its own. What one test leaves in a memo is listed.
Reported is what is too much for that, and once, as growth, what test after test goes on to leave. Excused is only what
memos alone hold, and no object of the program: no module, no argument that is a tensor, no tensor with a gradient.
"""

from __future__ import annotations

import enum
import re
import sys
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any

import msgspec

from lowtide.leakcheck.explaining.expressions import of_module
from lowtide.leakcheck.explaining.library_objects import known_advice, library_of, offered_by_module, territories
from lowtide.leakcheck.explaining.path_reading import can_end
from lowtide.leakcheck.growth.series import KeptSteps
from lowtide.leakcheck.judging.ladder import ACTIONS
from lowtide.leakcheck.judging.owners import held_in_all
from lowtide.leakcheck.judging.storages import HeldStorage, Key, storage_keys, tensors_over
from lowtide.leakcheck.resources.resource import Rung
from lowtide.probes.heap.caches import BEYOND_CACHES, cache_entries
from lowtide.probes.heap.holders import SharedWalk, Traces, trace
from lowtide.probes.heap.paths import Link
from lowtide.probes.heap.reach import led_to, module_namespaces, reach
from lowtide.probes.memory.tensors import survey_storages, torch_member
from lowtide.probes.objects.described import is_library, library_globals, program_namespaces
from lowtide.probes.objects.foreign import (
    LRU_CACHE,
    dict_of_module,
    is_a,
    module_of_class,
    mro_of,
    namespace_of,
    place_of_definition,
    type_name,
)
from lowtide.probes.objects.listed import Census
from lowtide.probes.originals import gc, loaded, weakref
from lowtide.probes.references.definitions import is_dict_of_cache
from lowtide.probes.references.entries import is_name
from lowtide.reports.schema import NotMeasured
from lowtide.reports.sizes import format_amount, format_bytes

MOST_OF_LIBRARY = 16 << 20
"""Bytes that a library's cache may keep from the first test that asks it."""

MOST_ADDED = 128 << 10
"""Bytes that may come to that later, and that any other memo may keep: what constants, masks and small tables weigh."""

FEWEST_TURNS = 12
"""Tests that must have added something, so that a memo is more than a dozen of values that come again."""

_PLAIN_KINDS = frozenset(map(id, (bool, int, float, complex, str, bytes, type(None), type(...))))
_TORCHS = ("dtype", "device", "layout", "memory_format")
_MOST_WRAPPED = 4
"""How many decorators may lie around a cache."""

_MOST_TABLES = 6
"""In how many places libraries may keep one object."""

_SAYS_CACHE = re.compile(r"(?<!kv)(?<!kv_)cache|memo(?!r)", re.IGNORECASE)
"""The names of what is kept to be computed once; the cache of an engine's keys and values is its state."""

_MOST_BEHIND = 20_000
"""Objects that are looked at behind what a library keeps."""

_KEPT_IN_CPP = "torch.distributed.tensor."
"""How the names begin of classes whose instances their library keeps in C++: DTensor keeps how it runs an operator."""

_EMPTIES_CPP = "torch.distributed.tensor.debug._clear_sharding_prop_cache()"

_OF_CPP = "pybind11_builtins.pybind11_object"
"""The class of all objects that pybind11 makes."""

_COMPILED = "__compiled_fn"
"""How the names begin under which dynamo puts what it compiled into the globals of a function."""


class _Memo(msgspec.Struct, frozen=True):
    """What keeps values for the next time.

    Attributes:
        identity: what tells it from others.
        holders: the objects that keep the values.
        tensors: those behind the values.
        name: as it is listed.
        emptied_by: the code that empties it.
        most: bytes that are its first use.
        cache: the `lru_cache` that it is, if it is one.
        is_table: whether it is what a library has under a private name.
    """

    identity: Hashable
    holders: Sequence[object]
    tensors: Sequence[Any]
    name: str
    emptied_by: str
    most: int
    cache: Any = None
    is_table: bool = False

    @property
    def has_native_objects(self) -> bool:
        """Return whether a library has there what it made in C++, which may own what no Python code made."""
        if not self.is_table:
            return False
        objects = _behind(self.holders)
        # Of these the collector tracks none.
        kinds = {type(item) for item in gc.get_referents(*objects)}
        return any(type_name(base) == _OF_CPP for kind in kinds for base in mro_of(kind))


class _Kept:
    """What one memo keeps, test by test; of an `lru_cache` by a weak reference."""

    def __init__(self, cache: Any, since: str, turn: int) -> None:
        self.since = since
        self.first = self.turn = turn
        self.growth = ""
        self.is_listed = False
        self._cache = None if cache is None else weakref.ref(cache)
        self._asked = 0
        # Before the first test that used it, and after each.
        self._levels = [0, 0]
        self._base = 0
        self._is_told = self._has_grown = False

    def is_of(self, memo: _Memo) -> bool:
        """Return whether it is this memo, and none that had its place before."""
        return memo.cache is None or (self._cache is not None and self._cache() is memo.cache)

    def end_turn(self, turn: int) -> None:
        """Test number `turn` is over: note that it used the memo, where it left nothing in it."""
        cache = None if self._cache is None else self._cache()
        if cache is None:
            return
        hits, misses, _, entries = cache.cache_info()
        if turn != self.turn and hits + misses != self._asked:
            self._levels.append(self._levels[-1] if entries else 0)
        self._asked = hits + misses

    def is_more(self, level: int, turn: int, most: int) -> bool:
        """Note the bytes that it keeps in test number `turn`; return whether they are to be reported.

        As many as `most` are a first use.
        """
        if turn != self.turn:
            if self._is_told or self.turn == self.first:
                self._base = self._levels[-1]
            self.turn, self._is_told, self.growth = turn, False, ""
            self._levels.append(level)
        self._levels[-1] = level
        steps = KeptSteps.between(self._levels)
        if not self._has_grown and len(steps.turns) >= FEWEST_TURNS and steps.adds_late:
            self.growth, self._has_grown = steps.said(format_bytes), True
        too_much = level > (most if turn == self.first else self._base + MOST_ADDED)
        self._is_told = self._is_told or bool(self.growth) or too_much
        return self._is_told


class SortedValues(msgspec.Struct, frozen=True):
    """Storages that did not come back, separated from what memos are excused for.

    Attributes:
        excused: those that are a memo's first use.
        hints: what to say of others, with what they are reached through.
        listed: what to say of those that are excused.
        natively: the memos that keep objects of C++, too, each with whether it is excused.
    """

    excused: frozenset[Key] = frozenset()
    hints: tuple[tuple[str, object], ...] = ()
    listed: tuple[NotMeasured, ...] = ()
    natively: tuple[tuple[str, bool], ...] = ()


class CachedValues:
    """What memos have been excused for in this process; holds caches weakly."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, _Kept] = {}
        self._turn = 0

    @property
    def any_kept(self) -> bool:
        """Return whether any memo has kept values so far; if none has, no test needs to be marked."""
        return bool(self._kept)

    def mark(self) -> None:
        """Begin another test."""
        for kept in self._kept.values():
            kept.end_turn(self._turn)
        self._turn += 1

    def sort(
        self, held: Sequence[HeldStorage], caches: Iterable[Any], subject: str, walk: SharedWalk | None = None
    ) -> SortedValues:
        """Tell apart which of some storages, that were not there at the baseline, a memo keeps.

        Args:
            held: these.
            caches: the `lru_cache`s that there are.
            subject: what is judged, as a later finding calls it.
            walk: the walk over the heap to ask, if it is shared with others.
        """
        new = {storage.key: storage.bytes for storage in held}
        memos = [*_caches_with(new, caches), *_compiled_with(new)] if new else []
        memos += _tables_with(new, memos, walk) if new else []
        if not memos:
            return SortedValues()
        alone = _held_by_these_alone(memos, walk)
        excused: set[Key] = set()
        hints: list[tuple[str, object]] = []
        listed = []
        natively = []
        for memo in memos:
            sizes = {key: size for key, size in survey_storages(memo.tensors).sizes.items() if key in alone}
            own = sizes.keys() & new.keys()
            kept = self._of(memo, subject) if own else None
            if kept is None:
                continue
            is_more = kept.is_more(sum(sizes.values()), self._turn, memo.most)
            natively += [(memo.name, not is_more)] if memo.has_native_objects else []
            if not is_more:
                kept.is_listed = True
                excused |= own
                listed.append(_listed(memo, [storage for storage in held if storage.key in own]))
            elif kept.is_listed and kept.first != self._turn:
                hints += [(_more(kept), holder) for holder in memo.holders]
        return SortedValues(frozenset(excused), tuple(hints), tuple(listed), tuple(natively))

    def _of(self, memo: _Memo, subject: str) -> _Kept:
        kept = self._kept.get(memo.identity)
        if kept is None or not kept.is_of(memo):
            kept = self._kept[memo.identity] = _Kept(memo.cache, subject, self._turn)
        return kept


def _more(kept: _Kept) -> str:
    since = kept.since or "an earlier test"
    first = f"its first values came with {since}, and were listed as once so far"
    return f"it grows, {kept.growth}: {first}" if kept.growth else first


def _listed(memo: _Memo, held: Sequence[HeldStorage]) -> NotMeasured:
    size, largest = sum(storage.bytes for storage in held), max(held, key=lambda storage: storage.bytes)
    return NotMeasured(
        what=f"{format_bytes(size)} in {format_amount(len(held), 'tensors')} ({largest.text}) in {memo.name}",
        why=f"once so far: if test after test leaves more there, that is a leak; {memo.emptied_by} empties it",
    )


def _held_by_these_alone(memos: Sequence[_Memo], walk: SharedWalk | None) -> set[Key]:
    """Return the storages that nothing leads to but some memos."""
    keys = storage_keys(item for memo in memos for item in memo.tensors)
    # All over that memory: the base of a view is held by the view, where no walk sees it.
    tensors = tensors_over(keys, walk)
    ignore = {id(holder) for memo in memos for holder in memo.holders}
    with trace(tensors, ignore=ignore, walk=walk) as found:
        return keys - storage_keys(item for place, item in enumerate(tensors) if found.reaches(place))


def _compiled_with(new: Mapping[Key, int]) -> Iterator[_Memo]:
    """Yield the functions of which `torch.compile` made something that keeps one of some storages."""
    by_code = _compiled()
    if not by_code:
        return
    torch: Any = loaded("torch")
    # From an operator on everything is torch's, and so is what a library has in a global.
    beyond = (*BEYOND_CACHES, torch._ops.OperatorBase, torch._ops.OpOverloadPacket)
    # What is made of a library's function, as of its modules' calls, lies in that library's globals.
    made = {id(each) for values in by_code.values() for each in values}
    stops = (module_namespaces() | library_globals()) - made
    for (file, line, name), compiled in by_code.items():
        # It makes classes and functions, and keeps some as attributes of others.
        objects, _ = reach(
            compiled, boundaries=beyond, namespaces=stops, enters=lambda item: place_of_definition(item) is None
        )
        # A parameter, and what needs a gradient, is the program's.
        plain = (item for item in held_in_all(torch, Census(objects)) if type(item) is torch.Tensor)
        tensors = [item for item in plain if not torch_member(item, "requires_grad")]
        if storage_keys(tensors) & new.keys():
            where = f"what torch.compile made of {name}, {file.rpartition('/')[2]}:{line}"
            yield _Memo((file, line, name), compiled, tensors, where, ACTIONS[Rung.RESET_COMPILED], MOST_ADDED)


def _compiled() -> dict[tuple[str, int, str], list[Any]]:
    """Return what dynamo has compiled and installed, by file, first line and name of the function that it is of.

    It notes what it puts into a function's globals, to take it out when the code that uses it is gone.
    """
    utils: Any = loaded("torch._dynamo.utils")
    installed = getattr(getattr(utils, "CleanupManager", None), "instance", None)
    originals = getattr(utils, "orig_code_map", None)
    found: dict[tuple[str, int, str], list[Any]] = {}
    for place, hooks in list(getattr(installed, "values", {}).items()):
        reference = getattr(installed, "refs", {}).get(place)
        code = None if reference is None or originals is None else originals.get(reference())
        if type(code) is CodeType:
            values = [hook.scope.get(hook.name) for hook in hooks if hook.name.startswith(_COMPILED)]
            found.setdefault((code.co_filename, code.co_firstlineno, code.co_name), []).extend(values)
    return found


def _tables_with(new: Mapping[Key, int], memos: Sequence[_Memo], walk: SharedWalk | None) -> Iterator[_Memo]:
    """Yield what installed libraries have under private names that keeps some storages, with all others that do.

    Of some it is known already that `memos` keep them.
    """
    known = storage_keys(item for memo in memos for item in memo.tensors)
    small = [key for key, size in new.items() if size <= MOST_ADDED and key not in known]
    if small and (walk is None or not walk.is_made):
        # Most leaks are the program's, and that shows without a walk.
        near = tensors_over(small)
        small = list(
            storage_keys(item for item, led in zip(near, led_to(near, program_namespaces()), strict=True) if not led)
        )
        del near
    tensors = tensors_over(small, walk) if small else []
    tables: dict[str, _Table] = {}
    # By the first of them that leads to a tensor.
    groups: dict[int, list[_Table]] = {}
    reached: set[int] = set()
    # One library may keep the same object in several places: the next way to it is behind those that are known.
    for _ in range(_MOST_TABLES if tensors else 0):
        with trace(tensors, ignore={id(table.holder) for table in tables.values()}, walk=walk) as found:
            ways = [_table_of(item, place, found) for place, item in enumerate(tensors)]
            reached |= {id(item) for place, item in enumerate(tensors) if found.reaches(place)}
        for item, table in zip(tensors, ways, strict=True):
            if table is not None:
                groups.setdefault(id(item), []).append(tables.setdefault(table.name, table))
        if not any(ways):
            break
    lost = [item for item in tensors if id(item) not in reached]
    with trace(lost, walk=walk, thorough=True) as found:
        for place, item in enumerate(lost):
            if (table := _native_table_of(item, place, found)) is not None:
                groups[id(item)] = [table]
    by_first: dict[str, list[Any]] = {}
    for item in tensors:
        if id(item) in groups:
            by_first.setdefault(groups[id(item)][0].name, []).append(item)
    for name, items in by_first.items():
        own = list({table.name: table for item in items for table in groups[id(item)]}.values())
        emptied_by = "; ".join(table.emptied_by for table in own)
        holders = [table.holder for table in own]
        held = held_in_all(loaded("torch"), Census(_behind(holders)))
        yield _Memo(name, holders, [*items, *held], name, emptied_by, MOST_ADDED, is_table=True)


def _behind(holders: Iterable[object]) -> list[Any]:
    """Return the objects that some holders lead to, past no cache that is none of them."""
    entries = [part for item in holders for part in (cache_entries(item) if type(item) is LRU_CACHE else (item,))]
    return reach(entries, boundaries=BEYOND_CACHES, namespaces=module_namespaces(), max_objects=_MOST_BEHIND)[0]


class _Table(msgspec.Struct, frozen=True):
    """What a library keeps under a private name, as code, and the code that lets go of it."""

    name: str
    holder: object
    emptied_by: str


def _table_of(item: Any, place: int, found: Traces) -> _Table | None:
    """Return what of a library's leads to a tensor by nothing but its objects; None where something else does.

    An object that can be ended is no memo, and neither is a bare tensor of which nobody says that a cache keeps it:
    a registry of what should have ended looks the same.
    """
    path = found.path(place)
    if path is None or path.root_kind != "module" or len(path.steps) < 2 or not _is_constant(item):
        return None
    links = [found.link(place, turn) for turn in range(len(path.steps))]
    first = next((turn for turn, step in enumerate(path.steps) if not step.definition), len(links))
    first -= bool(first and type(links[first].owner) is LRU_CACHE) if first < len(links) else 0
    if first + 1 >= len(links):
        return None
    holder, behind = links[first + 1].owner, links[first + 1 :]
    territory = territories(path.root_name, links)[first]
    # Nobody puts anything into a cache that is public, but by asking it.
    of = territory.shared if type(holder) is LRU_CACHE else territory.inside
    if not of or of in sys.stdlib_module_names or not all(map(_is_librarys_link, behind)):
        return None
    name = path.root_name + "".join(step.edge for step in path.steps[: first + 1])
    in_objects = any(_library_of_site(link.owner) for link in behind)
    # What a cached function was given is in its keys, whatever it is called.
    if not in_objects and (type(holder) is LRU_CACHE or not _SAYS_CACHE.search(name)):
        return None
    offer = offered_by_module(links[0].owner, path.steps[0].edge[1:])
    call = f"{name}.cache_clear()" if type(holder) is LRU_CACHE else offer.call if offer else known_advice(name)
    return _Table(name, holder, call or f"what {of} offers for that")


def _native_table_of(item: Any, place: int, found: Traces) -> _Table | None:
    """Return what of a library that keeps such things in C++ leads to a tensor by nothing but the library's objects."""
    path = found.path(place)
    if path is None or path.root_kind != "native" or not path.root_name.startswith(_KEPT_IN_CPP):
        return None
    links = [found.link(place, turn) for turn in range(len(path.steps))]
    if not _is_constant(item) or not all(map(_is_librarys_link, links)):
        return None
    return _Table(f"a {path.root_name}, held from C++", links[0].owner, _EMPTIES_CPP)


def _is_constant(item: Any) -> bool:
    """Return whether a tensor or a storage object is nobody's parameter."""
    torch: Any = loaded("torch")
    is_plain = type(item) is torch.Tensor and not torch_member(item, "requires_grad")
    return is_plain or type(item) is torch.UntypedStorage


def _is_librarys_link(link: Link) -> bool:
    """Return whether an edge starts from a container or a library's object that nobody can end, by a key of such."""
    torch: Any = loaded("torch")
    owner = link.owner
    if library_of(owner) == "" or is_a(owner, torch.nn.Module) or can_end(owner):
        return False
    if link.kind != "item" or not is_a(link.carrier, dict):
        return True
    return all(_is_librarys(key) for key, value in list(dict.items(link.carrier)) if id(value) == link.held)


def _is_librarys(key: Any) -> bool:
    """Return whether a key is made of plain data and objects of libraries."""
    if is_a(key, weakref.ref):
        key = weakref.ref.__call__(key)
    if type(key) is tuple:
        return all(map(_is_librarys, key))
    return _is_plain(key) or bool(library_of(key))


def _library_of_site(owner: object) -> bool:
    library = library_of(owner)
    return bool(library) and library not in sys.stdlib_module_names


def _caches_with(new: Mapping[Key, int], caches: Iterable[Any]) -> Iterator[_Memo]:
    """Yield each `lru_cache` that has computed one of some storages, with the tensors behind it."""
    for cache in caches:
        tensors = _computed(cache)
        name = _name(cache) if tensors and storage_keys(tensors) & new.keys() else ""
        if name:
            function = vars(cache)["__wrapped__"]
            where = f"the cache of {function.__module__}.{function.__qualname__}"
            most = MOST_OF_LIBRARY if is_library(function.__code__.co_filename) else MOST_ADDED
            yield _Memo(id(cache), [cache], tensors, where, f"{name}.cache_clear()", most, cache)


_CONTAINERS = frozenset(map(id, (dict, list, set, frozenset)))


def _computed(cache: Any) -> list[Any]:
    """Return the tensors behind those values of a cache that were computed from plain data."""
    _, _, most, entries = cache.cache_info()
    torch: Any = loaded("torch")
    if not entries or torch is None:
        return []
    found: list[Any] = []
    for key, value in _entries(cache, entries, is_bounded=most is not None):
        # Most caches hold no tensors, and that shows at the value's type.
        kind = type(value)
        may_have = kind is torch.Tensor or id(kind) in _CONTAINERS or is_a(value, tuple)
        tensors = _tensors_in(value) if may_have else None
        if tensors and _is_plain(key):
            found += tensors
    return found


def _entries(cache: Any, number: int, *, is_bounded: bool) -> Iterable[tuple[Any, Any]]:
    """Return the keys of a cache, each with its value; none if the interpreter shows them otherwise.

    It shows the collector the dict of all keys, which has the values where it has no bound; and a bounded one each key
    and right behind it the value.
    """
    referents = gc.get_referents(cache)
    table: dict[Any, Any] = next((item for item in referents if is_dict_of_cache(cache, item)), {})
    if not is_bounded:
        return list(table.items())
    keys = {id(key) for key in table}
    places = [place for place, item in enumerate(referents[:-1]) if id(item) in keys]
    pairs = []
    last = -1
    for place in places:
        # A value may be its key.
        if place > last:
            pairs.append((referents[place], referents[place + 1]))
            last = place + 1
    return pairs if len(pairs) == number else ()


def _is_plain(item: Any) -> bool:
    """Return whether something of a key is data that belongs to nobody: no object, class or function of the program."""
    kind = type(item)
    if id(kind) in _PLAIN_KINDS:
        return True
    if kind is tuple or kind is frozenset or _is_torchs(kind, ("Size",)):
        return all(map(_is_plain, kind.__iter__(item)))
    if is_a(item, enum.Enum):
        return True
    # With `typed=True` the arguments' types are part of the key; a bare object stands before the named arguments.
    return _is_plain_type(kind) or kind is object or (kind is type and _is_plain_type(item))


def _is_plain_type(kind: type) -> bool:
    return id(kind) in _PLAIN_KINDS or _is_torchs(kind, _TORCHS)


def _is_torchs(kind: type, names: Collection[str]) -> bool:
    torch = loaded("torch")
    return any(kind is getattr(torch, name, None) for name in names)


def _tensors_in(value: Any) -> list[Any] | None:
    """Return the tensors in a value that is made of nothing but tensors, plain data and containers; else None."""
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


def _name(cache: Any) -> str:
    """Return a cache as code, if a module made it of a function of its own: where the module has it.

    That is a global or a class attribute, perhaps behind decorators; empty if it is not the module's.
    """
    function = vars(cache).get("__wrapped__")
    if type(function) is not FunctionType:
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
    """Return the way from a decorated function to its cache, as code; None if it does not lead there."""
    if value is cache:
        return ""
    if wrapped == _MOST_WRAPPED:
        return None
    steps: list[tuple[str, Any]] = []
    if type(value) is FunctionType:
        cells = value.__closure__ or ()
        # An empty one refers to nothing.
        held_in = [(place, held) for place, cell in enumerate(cells) for held in gc.get_referents(cell)]
        steps = [(f".__closure__[{place}].cell_contents", held) for place, held in held_in]
    elif type(value) is staticmethod or type(value) is classmethod:
        steps = [(".__func__", value.__func__)]
    elif type(value) is property:
        steps = [(".fget", value.fget)]
    for edge, held in steps:
        way = _way_to(cache, held, wrapped + 1)
        if way is not None:
            return edge + way
    return None
