"""Says what a cut is and what is known of a program by which it is judged harmless; takes entries out of containers.

Entries go by their identities: no key or element is compared, hashed, or asked for anything.  A container may hold what
raises, or loads something, when it is hashed or compared.  Only the built-in types' own methods are called, past
whatever a subclass makes of them.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Container
from types import ModuleType
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from lowtide.leakcheck.explaining import declarations
from lowtide.leakcheck.resources.resource import Change
from lowtide.probes.objects.foreign import has_plain_hash, is_a, type_name
from lowtide.probes.objects.identities import NamespaceSizes
from lowtide.probes.originals import gc


class Entries:
    """Where a container has what it holds, read once for all cuts of its entries: there may be a million.

    True as long as the container does not change.

    Args:
        container: a dict, list, deque or set.
        was_there: whether an object may have been there before the leak.

    Attributes:
        container: the container.
        keys: those of a dict, in their order.
        last_old: the place of the last item that may have been there before; -1 if none may. (What the collector does
            not track, as a number in a dict, does not count there: nobody notes when it is made.)
        last_slot: the place of the last item of a list that may have been there before, or is None; -1 likewise.
        has_none: whether an item is None.
    """

    def __init__(self, container: Any, was_there: Callable[[object], bool] = lambda item: False) -> None:
        self.container = container
        is_dict, is_set = is_a(container, dict), is_a(container, set)
        self.keys: list[object] = list(dict.keys(container)) if is_dict else []
        items = list(dict.values(container)) if is_dict else list(_base_of(container).__iter__(container))
        self.has_none = any(item is None for item in items)
        self.last_old = self.last_slot = -1
        self._places: dict[int, int] = {}
        for place, item in enumerate(items):
            self._places.setdefault(id(item), place)
            is_old = was_there(item)
            self.last_old = place if is_old and gc.is_tracked(item) else self.last_old
            self.last_slot = place if is_old or item is None else self.last_slot
        self._types = list(map(type, items)) if is_set else []
        # Of a set it is its elements that are hashed.
        hashed = self.keys if is_dict else items if is_set else []
        self._not_plain = {place: None for place, item in enumerate(hashed) if not has_plain_hash(item)}

    def place(self, held: int) -> int | None:
        """Return the first place of the object of an identity; None if it is not there."""
        return self._places.get(held)

    @functools.cached_property
    def _places_of_keys(self) -> dict[int, int]:
        return {id(key): place for place, key in enumerate(self.keys)}

    @functools.cached_property
    def _places_of_names(self) -> dict[str, int]:
        return {key: place for place, key in enumerate(self.keys) if type(key) is str}

    def place_of_key(self, key: int) -> int | None:
        """Return the place of the key of an identity; None if it is none of the dict's."""
        return self._places_of_keys.get(key)

    def place_of_name(self, name: str) -> int | None:
        """Return the place of a name in a namespace; None if it is not there."""
        return self._places_of_names.get(name)

    def type_at(self, place: int) -> str:
        """Return the name of the type of an element of a set."""
        return type_name(self._types[place])

    def can_delete(self, place: int) -> bool:
        """Return whether `delete_from_dict` can delete what is at a place of a dict."""
        if is_a(self.container, OrderedDict):
            # It hashes even what it pops, and whenever it changes it may look all its keys up again.
            return not self._not_plain
        # What stands behind it can be put back only by its hash.
        return place not in self._not_plain or next(reversed(self._not_plain)) <= place

    def can_delete_key(self, place: int) -> bool:
        """Return whether `delete_keys` can delete what is at a place of a dict."""
        return place not in self._not_plain and (not is_a(self.container, OrderedDict) or not self._not_plain)

    def can_discard(self, place: int) -> bool:
        """Return whether `discard` can take the element at a place out of a set."""
        return place not in self._not_plain or len(self._not_plain) == 1


def delete_from_dict(entries: Any, held: Collection[int]) -> None:
    """Delete, for each of some identities, the first entry whose value is its object; the others keep their order.

    Does nothing where there is none, or where it could be deleted by its hash only and that is the program's code.
    """
    known, base = Entries(entries), _base(entries)
    places = {place for identity in held if (place := known.place(identity)) is not None and known.can_delete(place)}
    for place in sorted(places, reverse=True):
        key = known.keys[place]
        if has_plain_hash(key):
            base.__delitem__(entries, key)
            continue
        behind = []
        while (last := base.popitem(entries))[0] is not key:
            behind.append(last)
        del last
        for each, value in reversed(behind):
            base.__setitem__(entries, each, value)


def delete_keys(entries: Any, keys: Collection[int]) -> None:
    """Delete the entries whose keys are the objects of some identities, but where that takes the program's own hash."""
    known = Entries(entries)
    for identity in keys:
        place = known.place_of_key(identity)
        if place is not None and known.can_delete_key(place):
            _base(entries).__delitem__(entries, known.keys[place])


def empty_in(container: Any, held: int) -> None:
    """Put None where the object of an identity is first in a dict, list or deque.

    Does nothing where that takes the program's own hash.
    """
    known = Entries(container)
    place = known.place(held)
    if place is None:
        return
    if not is_a(container, dict):
        _base_of(container).__setitem__(container, place, None)
    elif has_plain_hash(known.keys[place]):
        _base(container).__setitem__(container, known.keys[place], None)


def delete_from_sequence(items: Any, held: Collection[int]) -> None:
    """Delete, for each of some identities, the first item of a list or deque that is its object."""
    base: Any = list if is_a(items, list) else deque
    places: dict[int, int] = {}
    for place, item in enumerate(base.__iter__(items)):
        if id(item) in held:
            places.setdefault(id(item), place)
    # From the end, where deleting moves nothing.
    for place in sorted(places.values(), reverse=True):
        base.__delitem__(items, place)


def discard(elements: Any, held: Collection[int]) -> None:
    """Take the objects of some identities out of a set, but where that would hash or compare what is not plain."""
    known, found = Entries(elements), list(set.__iter__(elements))
    for place, item in enumerate(found):
        if id(item) not in held or not known.can_discard(place):
            continue
        if has_plain_hash(item):
            set.discard(elements, item)
            continue
        # Popping takes no hash, as adding the others again does; theirs is plain.
        others = [other for other in set.__iter__(elements) if other is not item]
        set.clear(elements)
        for other in others:
            set.add(elements, other)


def _base(entries: Any) -> Any:
    """Return the built-in type whose methods keep a dict whole: an ordered one has an order of its own."""
    return OrderedDict if is_a(entries, OrderedDict) else dict


def _base_of(container: Any) -> Any:
    """Return the built-in type of a list, deque or set."""
    return next(base for base in (list, deque, set) if is_a(container, base))


_UNMENTIONED = "a name that is in no source"


class Place(NamedTuple):
    """Where a container's entry is, for one action on several entries of it.

    Attributes:
        container: its identity.
        code: the container as code; in words where there is none.
        key: the entry, as code: `['a']`.
        size: how many entries the container has.
        position: the entry's place in it.
        clear: what empties the container, as code; empty where there is none.
        is_plain: whether `del` with code and key is what deletes the entry.
        ordered: the container's built-in type: `list`, `dict`, `deque`.
    """

    container: int
    code: str
    key: str
    size: int
    position: int = 0
    clear: str = ""
    is_plain: bool = True
    ordered: str = ""


class Cut(Change, frozen=True, eq=False):
    """A change of the edge by which something is held, to be made once; keeps the holder alive, and not what is held.

    `apply` raises what the holder's own code raises.

    Attributes:
        place: for an entry of a container, where.
        ends_anyway: whether the change is made even where making it raises.
        sets_none: whether None takes the place of what is held, and nothing is taken away.
        emptied: the identity of the cache that the change empties; 0 where it empties none.
        held: the identity of the entry that the change deletes from a container; 0 where it does something else.
        together: deletes several entries of that container, by their identities, going through it once.
    """

    place: Place | None = None
    ends_anyway: bool = False
    sets_none: bool = False
    emptied: int = 0
    held: int = 0
    together: Callable[[Collection[int]], object] | None = None


class Names(msgspec.Struct, frozen=True):
    """What is known of the program before the leak, by which a change is judged harmless.

    Attributes:
        older: the identities of what was there; None if nobody knows.
        home: the module whose code made what holds; None if nobody knows.
        root: the module that the path begins at; None if it begins elsewhere.
        holder: the name there by which what holds is known; empty if it has none.
        are_free: whether any name may be set to None: the program has ended but for its checker.
        sizes: how many names each module had (`namespace_sizes`); None if nobody knows.
        by_source: whether the program's source says what was there, since nothing else does.
    """

    older: Container[int] | None = None
    home: ModuleType | None = None
    root: ModuleType | None = None
    holder: str = ""
    are_free: bool = False
    sizes: NamespaceSizes | None = None
    by_source: bool = False
    _sources: dict[int, tuple[object, str]] = msgspec.field(default_factory=dict)
    _keys: dict[tuple[int, str], tuple[object, declarations.Keys | None]] = msgspec.field(default_factory=dict)
    _read: dict[int, Entries] = msgspec.field(default_factory=dict)
    _asked: dict[tuple[object, int, str], tuple[object, declarations.Binding]] = msgspec.field(default_factory=dict)

    def bound(
        self, question: Callable[[Any, str], declarations.Binding], where: object, name: str
    ) -> declarations.Binding:
        """Return what the program's source says of a name in a class or module; asks each question of a file once."""
        if id(where) not in self._sources:
            # With what it is about, so that the identity stays its own.
            self._sources[id(where)] = where, declarations.source_of(where)
        # Of all names that are not in the source it says the same: a leak may have made a million of them.
        name = name if name in self._sources[id(where)][1] else _UNMENTIONED
        key = (question, id(where), name)
        if key not in self._asked:
            self._asked[key] = where, question(where, name)
        return self._asked[key][1]

    def bound_key(self, module: ModuleType, key: object) -> declarations.Binding:
        """Return what a module's source says of a key in the dict that has the holder's name there."""
        if (id(module), self.holder) not in self._keys:
            self._keys[id(module), self.holder] = module, declarations.of_keys(module, self.holder)
        return declarations.binding_of(self._keys[id(module), self.holder][1], key)

    def entries(self, container: Any) -> Entries:
        """Return where a container has what it holds; read once, so these names are for one reading of the program."""
        if id(container) not in self._read:
            self._read[id(container)] = Entries(container, self.may_have_been_there)
        return self._read[id(container)]

    def is_bound_elsewhere(self, name: str) -> bool:
        """Return whether the modules at hand bind an attribute of that name outside their functions and classes."""
        return any(self.bound(declarations.of_attribute, module, name) != "absent" for module in self.modules)

    def of(self, home: ModuleType | None, root: ModuleType | None, holder: str) -> Names:
        """Return these names for what a module's code made."""
        return replace(self, home=home, root=root, holder=holder)

    @property
    def modules(self) -> tuple[ModuleType, ...]:
        """Return the modules where something may be bound before anything runs."""
        return tuple(module for module in dict.fromkeys((self.home, self.root)) if module is not None)

    def may_have_been_there(self, item: object) -> bool:
        """Return whether an object is older than the leak, or nobody knows."""
        return self.older is None or id(item) in self.older

    def is_new_global(self, namespace: dict[str, object], name: str, bound: declarations.Binding) -> bool:
        """Return whether a module got a name since; `bound` is what its source says of the name."""
        if self.sizes is None:
            return bound == "absent" and self.is_new(namespace, name)
        # A dict keeps the order; where a name has gone meanwhile, this errs towards what was there.
        place = self.entries(namespace).place_of_name(name)
        is_added = place is not None and place >= self.sizes.of(namespace)
        return is_added and bound in ("absent", "unknown")

    def is_new(self, namespace: dict[str, object], name: str) -> bool:
        """Return whether a name was added since: a dict keeps the order, so nothing older stands behind it."""
        place = self.entries(namespace).place_of_name(name)
        return self.older is not None and place is not None and self.entries(namespace).last_old <= place


class Refused(Exception):  # noqa: N818 - it is an answer, not a failure
    """Cutting here could break what the program has had before; so nothing behind it may be cut either."""


class LinkOwner(msgspec.Struct, frozen=True):
    """What a link starts from, for a reader.

    Attributes:
        words: as a path has it.
        code: as an expression that leads to it; None where there is none.
    """

    words: str
    code: str | None

    @property
    def text(self) -> str:
        """Return the expression, or the words."""
        return self.words if self.code is None else self.code

    def cut(self, code: str | None, instead: str, effect: str, apply: Callable[[], object], **facts: Any) -> Cut:
        """Return a change by its code, or where there is none, by words for it; with further facts of the cut."""
        is_code = self.code is not None and bool(code)
        return Cut(code if is_code and code else instead, effect, apply, is_code, **facts)

    def deletion(self, code: str | None, text: str, apply: Callable[[], object], where: str = "") -> Cut:
        """Return the deletion of what is called `text`."""
        return self.cut(code, f"delete {text}", f"{text}{where} is deleted", apply)

    def emptying(
        self, code: str | None, text: str, apply: Callable[[], object], where: str = "", *, is_replaced: bool = False
    ) -> Cut:
        """Return the setting of what is called `text` to None; in words where that replaces what a program runs by.

        As a function or class that it calls, a part of a module.
        """
        instead = f"put back what {text} was" if is_replaced else f"set {text} to None"
        return self.cut(None if is_replaced else code, instead, f"{text}{where} is None", apply, sets_none=True)
