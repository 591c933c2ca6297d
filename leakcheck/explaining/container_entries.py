"""Takes one entry out of a container by its identity: no key or element is compared, hashed, or asked for anything.

A container may hold what raises, or loads something, when it is hashed or compared.  Only the built-in types' own
methods are called, past whatever a subclass makes of them.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Any

from lowtide.probes.objects.foreign import has_plain_hash, is_a


def keys_of(entries: Any, held: int) -> list[object]:
    """The keys of a dict under which it holds the object of an identity."""
    return [key for key, value in dict.items(entries) if id(value) == held]


def values_behind(entries: Any, held: int) -> list[object]:
    """The values of a dict that stand behind the first that is the object of an identity."""
    values = list(dict.values(entries))
    first = next((place for place, value in enumerate(values) if id(value) == held), len(values))
    return values[first + 1 :]


def can_delete_from_dict(entries: Any, held: int) -> bool:
    """Whether `delete_from_dict` can."""
    keys = list(dict.keys(entries))
    place = _place(dict.values(entries), held)
    if place is None:
        return False
    if _base(entries) is OrderedDict:
        # It hashes even what it pops, and whenever it changes it may look all its keys up again.
        return all(map(has_plain_hash, keys))
    # What stands behind it can be put back only by its hash.
    return has_plain_hash(keys[place]) or all(map(has_plain_hash, keys[place + 1 :]))


def delete_from_dict(entries: Any, held: int) -> None:
    """Delete the first entry whose value is the object of an identity; the others keep their order.

    Does nothing where there is none, or where it could be deleted by its hash only and that is the program's code.
    """
    if not can_delete_from_dict(entries, held):
        return
    base = _base(entries)
    key = keys_of(entries, held)[0]
    if has_plain_hash(key):
        base.__delitem__(entries, key)
        return
    behind = []
    while (last := base.popitem(entries))[0] is not key:
        behind.append(last)
    del last
    for each, value in reversed(behind):
        base.__setitem__(entries, each, value)


def can_delete_key(entries: Any, key: int) -> bool:
    """Whether `delete_key` can."""
    found = [item for item in dict.keys(entries) if id(item) == key]
    return (
        bool(found)
        and has_plain_hash(found[0])
        and (_base(entries) is dict or all(map(has_plain_hash, dict.keys(entries))))
    )


def delete_key(entries: Any, key: int) -> None:
    """Delete the entry whose key is the object of an identity; nothing where that takes the program's own hash."""
    if can_delete_key(entries, key):
        _base(entries).__delitem__(entries, next(item for item in dict.keys(entries) if id(item) == key))


def set_in_dict(entries: Any, held: int, value: object) -> None:
    """Put something else where the object of an identity is; nothing where that takes the program's own hash."""
    for key in keys_of(entries, held)[:1]:
        if has_plain_hash(key):
            _base(entries).__setitem__(entries, key, value)


def delete_from_sequence(items: Any, held: int) -> None:
    """Delete the first item of a list or deque that is the object of an identity."""
    base: Any = list if is_a(items, list) else deque
    place = _place(base.__iter__(items), held)
    if place is not None:
        base.__delitem__(items, place)


def can_discard(elements: Any, held: int) -> bool:
    """Whether `discard` can."""
    found = list(set.__iter__(elements))
    if not any(id(item) == held for item in found):
        return False
    return all(has_plain_hash(item) for item in found if id(item) != held) or _is_plain(found, held)


def discard(elements: Any, held: int) -> None:
    """Take the object of an identity out of a set; nothing where that would hash or compare what is not plain."""
    found = list(set.__iter__(elements))
    if not can_discard(elements, held):
        return
    if _is_plain(found, held):
        for item in found:
            if id(item) == held:
                set.discard(elements, item)
        return
    # Popping takes no hash, as adding the others again does; theirs is plain.
    set.clear(elements)
    for item in found:
        if id(item) != held:
            set.add(elements, item)


def _is_plain(items: Iterable[object], held: int) -> bool:
    return all(has_plain_hash(item) for item in items if id(item) == held)


def _base(entries: Any) -> Any:
    """The built-in type whose methods keep a dict whole: an ordered one has an order of its own."""
    return OrderedDict if is_a(entries, OrderedDict) else dict


def _place(items: Iterable[object], held: int) -> int | None:
    return next((place for place, item in enumerate(items) if id(item) == held), None)
