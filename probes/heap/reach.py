"""What some objects keep alive: a walk forward from them that stops where everything would be reached."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import compress
from types import AsyncGeneratorType, CodeType, CoroutineType, FrameType, FunctionType, GeneratorType, ModuleType
from typing import Any, NamedTuple

from lowtide.probes import native
from lowtide.probes.objects.address_table import Ints
from lowtide.probes.objects.foreign import dict_of_module, is_a, module_of_class, mro_of
from lowtide.probes.objects.identities import Identities, identities, places_of, referents
from lowtide.probes.objects.listed import frame_locals
from lowtide.probes.original_numpy import np
from lowtide.probes.originals import gc
from lowtide.probes.references.unseen_references import Reader, first_reader, readers, untracked_kinds

_CHUNK = 4096

# Beyond these everything reaches everything.
_BOUNDARIES: tuple[type, ...] = (type, ModuleType, CodeType, FrameType)

_SUSPENDED = (GeneratorType, CoroutineType, AsyncGeneratorType)


def reach(
    starts: Iterable[object],
    *,
    boundaries: Collection[type] = (),
    packages: Collection[str] = (),
    namespaces: Collection[int] | None = None,
    only: Identities | None = None,
    enters: Callable[[Any], bool] = lambda item: False,
    max_objects: int = 200_000,
) -> tuple[list[Any], bool]:
    """Return the objects that `starts` reach and that can hold others; whether there were over `max_objects`.

    Args:
        starts: where to begin.
        boundaries: types not to look into, besides classes, modules and their namespaces, code and frames.
        packages: top-level packages whose objects are not to be looked into.
        namespaces: `module_namespaces()`, for who asks more than once, and whatever else is not to be entered.
        only: those to go on to from an object's plain references; None for all.
        enters: whether to look into this class, and whether at the attributes of this function.
        max_objects: how many to look at.

    Of a function its closure and its defaults are followed, of a suspended generator or coroutine its locals. A weak
    reference does not keep its target.
    """
    stops = (*_BOUNDARIES, *boundaries)
    seen: dict[int, object] = {}
    manners: dict[int, _Manner] = {}
    known = readers()
    passed = frozenset(map(id, (dict, tuple, *untracked_kinds())))
    waiting: list[object] = list(starts)
    while waiting:
        chunk = waiting[-_CHUNK:]
        del waiting[-_CHUNK:]
        plain: list[object] = []
        for item in chunk:
            identity = id(item)
            if identity in seen:
                continue
            kind = type(item)
            if kind is dict and namespaces is None:
                # Two thousand modules with torch: most walks meet no dict.
                namespaces = module_namespaces()
            if namespaces is not None and identity in namespaces:
                continue
            manner = manners.get(id(kind))
            if manner is None:
                manner = manners[id(kind)] = _Manner.of(kind, stops, packages, known)
            if manner.stops and not (manner.is_class and enters(item)):
                continue
            if len(seen) >= max_objects:
                return list(seen.values()), True
            seen[identity] = item
            if kind is FunctionType:
                waiting.extend(_held_by_function(item))
                if enters(item):
                    waiting.extend(_attributes_of_function(item))
            elif manner.is_suspended:
                waiting.extend(_held_by_suspended(item))
            else:
                plain.append(item)
                if manner.reader is not None:
                    waiting.extend(manner.reader(item))
        held = gc.get_referents(*plain)
        if only is not None:
            held = list(compress(held, only.holds(identities(held)).tolist()))
        # The collector tracks no array, and no dict or tuple of nothing else.
        waiting.extend(item for item in held if gc.is_tracked(item) or id(type(item)) in passed)
    return list(seen.values()), False


class _Manner(NamedTuple):
    """How instances of a type are gone through."""

    stops: bool
    is_class: bool
    is_suspended: bool
    reader: Reader | None

    @classmethod
    def of(cls, kind: type, stops: Iterable[type], packages: Collection[str], known: Mapping[int, Reader]) -> _Manner:
        """Find it out: once for each type of a walk."""
        bases = list(map(id, mro_of(kind)))
        is_stopped = not set(bases).isdisjoint(map(id, stops)) or module_of_class(kind).partition(".")[0] in packages
        is_suspended = any(kind is suspended for suspended in _SUSPENDED)
        return cls(is_stopped, id(type) in bases, is_suspended, first_reader(known, bases))


_MOST_LEVELS, _MOST_HOLDERS = 4, 500
"""How far back, and through how many objects at once, a search backwards is cheaper than a walk over the heap."""


def led_to(items: Sequence[object], namespaces: Collection[int]) -> list[bool]:
    """Tell to which of some objects one of some dicts leads, as far as that is seen from near them.

    From the objects back, a level of holders at a time: each takes a tenth of what a walk over the heap takes. False
    says nothing: the way may be longer, hidden, or through what is frozen.

    Args:
        items: the objects.
        namespaces: the identities of the dicts.
    """
    led: set[int] = set()
    frontier, places_of = list(items), {id(item): {place} for place, item in enumerate(items)}
    # What each has been passed for; the caller's list and those made here lead to nothing.
    known: dict[int, set[int]] = {id(items): set(range(len(items)))}
    for _ in range(_MOST_LEVELS):
        if not frontier or len(frontier) > _MOST_HOLDERS:
            break
        known |= {id(frontier): set(range(len(items)))}
        found = gc.get_referrers(*frontier)
        holders: dict[int, set[int]] = {}
        for holder in found:
            if type(holder) is FrameType:
                continue
            held = [places_of[id(part)] for part in gc.get_referents(holder) if id(part) in places_of]
            places = set().union(*held) - led - known.get(id(holder), set())
            if id(holder) in namespaces:
                led |= places
            elif places:
                holders[id(holder)] = places
        frontier = [holder for holder in found if holders.get(id(holder), set()) - led]
        places_of = {id(holder): holders[id(holder)] for holder in frontier}
        for identity, places in places_of.items():
            known[identity] = known.get(identity, set()) | places
    return [place in led for place in range(len(items))]


_LONGEST_WAY = 100
"""Objects on a way that is looked for: a long chain of links takes as many steps over all references."""


def ways_to(wanted: Collection[int], starts: Collection[int], reached: Sequence[object]) -> set[int]:
    """Return the identities of the objects on shortest ways to some objects, as far as the collector shows a way.

    Args:
        wanted: the identities of the objects.
        starts: those of where the ways begin.
        reached: what is gone through, the objects and the starts included.
    """
    ids = identities(list(reached))
    sizes, referred, held = referents(list(reached))
    nodes = places_of(ids).find(referred)
    held.clear()
    is_known = nodes >= 0
    holders, nodes = np.repeat(np.arange(len(ids)), sizes)[is_known], nodes[is_known]
    before = np.full(len(ids), -1)
    frontier = np.isin(ids, np.fromiter(starts, np.int64, len(starts)))
    before[frontier] = np.flatnonzero(frontier)
    for _ in range(_LONGEST_WAY):
        steps = frontier[holders] & (before[nodes] < 0)
        if not steps.any():
            break
        before[nodes[steps]] = holders[steps]
        frontier = np.zeros(len(ids), np.bool_)
        frontier[nodes[steps]] = True
    found: set[int] = set()
    for node in np.flatnonzero(np.isin(ids, np.fromiter(wanted, np.int64, len(wanted))) & (before >= 0)).tolist():
        while node not in found:
            found.add(node)
            node = int(before[node])
    return set(ids[sorted(found)].tolist())


def module_namespaces() -> frozenset[int]:
    """Identities of the dicts that hold the modules' globals."""
    return frozenset(map(id, _dicts_of_modules()))


def _dicts_of_modules() -> list[dict[str, Any]]:
    every = list(sys.modules.values())
    return [dict_of_module(module) for module in every if type(module) is ModuleType or is_a(module, ModuleType)]


class BoundSince:
    """Tells what modules' globals were bound to since a moment."""

    def __init__(self) -> None:
        self._namespaces = self._marks = np.zeros(0, np.int64)

    def note(self) -> None:
        """Take what is bound now for known."""
        dicts = _dicts_of_modules()
        self._namespaces, self._marks = identities(dicts), _marks_of(dicts)

    def stops(self) -> frozenset[int]:
        """Return the identities of the modules' namespaces, and of all that those hold in which something was bound."""
        dicts = _dicts_of_modules()
        namespaces, marks = identities(dicts), _marks_of(dicts)
        if len(namespaces) == len(self._namespaces) and np.all(namespaces == self._namespaces):
            before = self._marks
        else:
            known = dict(zip(self._namespaces.tolist(), self._marks.tolist(), strict=True))
            before = np.array([known.get(namespace, 0) for namespace in namespaces.tolist()], np.int64)
        changed = np.flatnonzero((marks != before) | (marks == 0)).tolist()
        bound = (map(id, list(dicts[place].values())) for place in changed)
        return frozenset(namespaces.tolist()).union(*bound)


def _marks_of(dicts: list[dict[str, Any]]) -> Ints:
    """Return a mark of each dict; 0 where there are none."""
    if native.marks_of is None:
        return np.zeros(len(dicts), np.int64)
    return np.frombuffer(native.marks_of(tuple(dicts)), np.int64)


def _held_by_function(function: Any) -> Iterator[object]:
    yield from function.__closure__ or ()
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()


def _attributes_of_function(function: Any) -> list[object]:
    """Return the dict of a function's attributes, where it has one: asking the function for it would make it."""
    others = (function.__globals__, function.__builtins__)
    dicts = (part for part in gc.get_referents(function) if type(part) is dict)
    return [part for part in dicts if not any(part is other for other in others)]


def _held_by_suspended(item: Any) -> list[object]:
    for name in ("gi_frame", "cr_frame", "ag_frame"):
        frame = getattr(item, name, None)
        if frame is not None:
            return frame_locals(frame)
    return []
