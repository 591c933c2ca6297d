"""Takes entries out of a container by their identities: no key or element is compared, hashed, or asked for anything.

A container may hold what raises, or loads something, when it is hashed or compared.  Only the built-in types' own
methods are called, past whatever a subclass makes of them.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from typing import Any

from lowtide.probes.objects.foreign import has_plain_hash, is_a, type_name
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
        """Whether `delete_from_dict` can delete what is at a place of a dict."""
        if is_a(self.container, OrderedDict):
            # It hashes even what it pops, and whenever it changes it may look all its keys up again.
            return not self._not_plain
        # What stands behind it can be put back only by its hash.
        return place not in self._not_plain or next(reversed(self._not_plain)) <= place

    def can_delete_key(self, place: int) -> bool:
        """Whether `delete_keys` can delete what is at a place of a dict."""
        return place not in self._not_plain and (not is_a(self.container, OrderedDict) or not self._not_plain)

    def can_discard(self, place: int) -> bool:
        """Whether `discard` can take the element at a place out of a set."""
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


def set_in_dict(entries: Any, held: int, value: object) -> None:
    """Put something else where the object of an identity is; nothing where that takes the program's own hash."""
    known = Entries(entries)
    place = known.place(held)
    if place is not None and has_plain_hash(known.keys[place]):
        _base(entries).__setitem__(entries, known.keys[place], value)


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


def set_in_sequence(items: Any, held: int, value: object) -> None:
    """Put something else where the object of an identity is first in a list or deque."""
    place = Entries(items).place(held)
    if place is not None:
        _base_of(items).__setitem__(items, place, value)


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
    """The built-in type whose methods keep a dict whole: an ordered one has an order of its own."""
    return OrderedDict if is_a(entries, OrderedDict) else dict


def _base_of(container: Any) -> Any:
    """The built-in type of a list, deque or set."""
    return next(base for base in (list, deque, set) if is_a(container, base))
