"""Taking one entry out of a container by its identity: what goes, what stays, and that nothing in it is asked."""

from __future__ import annotations

import enum
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide.leakcheck.explaining.cut import (
    Entries,
    delete_from_dict,
    delete_from_sequence,
    delete_keys,
    discard,
    empty_in,
)
from lowtide.probes.objects.foreign import has_plain_hash


class Thing:
    """What is to go."""


def can_delete(entries: Any, held: int) -> bool:
    known = Entries(entries)
    place = known.place(held)
    return place is not None and known.can_delete(place)


def can_delete_key(entries: Any, key: int) -> bool:
    known = Entries(entries)
    place = known.place_of_key(key)
    return place is not None and known.can_delete_key(place)


def can_discard(elements: Any, held: int) -> bool:
    known = Entries(elements)
    place = known.place(held)
    return place is not None and known.can_discard(place)


class Asked:
    """Counts how often it is hashed or compared."""

    count = 0

    def __hash__(self) -> int:
        Asked.count += 1
        return 7

    def __eq__(self, other: object) -> bool:
        Asked.count += 1
        return self is other


class Mode(enum.Enum):
    FAST = 1


@pytest.fixture
def thing() -> Thing:
    return Thing()


@pytest.fixture(autouse=True)
def nothing_is_asked() -> Any:
    yield
    Asked.count = 0


def test_an_entry_under_a_key_that_is_not_to_be_asked_goes_if_it_is_the_last(thing: Thing) -> None:
    entries = {"a": 1, Asked(): 2, Asked(): thing}
    Asked.count = 0
    assert can_delete(entries, id(thing))
    delete_from_dict(entries, [id(thing)])
    assert (list(entries.values()), Asked.count) == ([1, 2], 0)


def test_the_plain_keys_behind_it_are_put_back_in_their_order(thing: Thing) -> None:
    entries: dict[Any, object] = {"a": 1, Asked(): thing, "b": 2, (3, "c"): 3, Mode.FAST: 4}
    Asked.count = 0
    delete_from_dict(entries, [id(thing)])
    assert (list(entries.items()), Asked.count) == ([("a", 1), ("b", 2), ((3, "c"), 3), (Mode.FAST, 4)], 0)


def test_it_stays_where_another_such_key_stands_behind_it(thing: Thing) -> None:
    entries = {Asked(): thing, Asked(): 2}
    Asked.count = 0
    assert not can_delete(entries, id(thing))
    delete_from_dict(entries, [id(thing)])
    empty_in(entries, id(thing))
    assert (list(entries.values()), Asked.count) == ([thing, 2], 0)


@pytest.mark.parametrize(
    "entries", [{}, defaultdict(list), type("Own", (dict,), {"__delitem__": None, "keys": None})()]
)
def test_a_plain_key_is_deleted_past_all_others(thing: Thing, entries: Any) -> None:
    entries[Asked()], entries["a"], entries[Asked()] = 1, thing, 2
    Asked.count = 0
    delete_from_dict(entries, [id(thing)])
    assert (list(dict.values(entries)), Asked.count) == ([1, 2], 0)
    delete_from_dict(entries, [id(thing)])
    assert len(entries) == 2


def test_an_ordered_dict_keeps_its_own_order(thing: Thing) -> None:
    entries: Any = OrderedDict([("a", 1), ("c", thing), (Mode.FAST, 2), ("b", 3)])
    entries.move_to_end("a")
    delete_from_dict(entries, [id(thing)])
    assert list(entries) == [Mode.FAST, "b", "a"]


def test_an_ordered_dict_with_a_key_that_is_not_to_be_asked_is_left_alone(thing: Thing) -> None:
    entries: Any = OrderedDict([("a", thing), (Asked(), 1)])
    Asked.count = 0
    assert not can_delete(entries, id(thing))
    delete_from_dict(entries, [id(thing)])
    assert (list(dict.values(entries)), Asked.count) == ([thing, 1], 0)


def test_something_else_is_put_in_its_place(thing: Thing) -> None:
    entries: Any = {"a": 1, "b": thing, "c": 2}
    empty_in(entries, id(thing))
    assert list(entries.items()) == [("a", 1), ("b", None), ("c", 2)]


@pytest.mark.parametrize("kind", [list, deque])
def test_of_equal_items_the_one_of_that_identity_goes(kind: Callable[[Any], Any]) -> None:
    first, second = Asked(), Asked()
    items = kind([first, second, 3])
    delete_from_sequence(items, [id(second)])
    delete_from_sequence(items, [id(second)])
    assert (next(iter(items)) is first, len(items), Asked.count) == (True, 2, 0)


def test_an_element_that_is_not_to_be_asked_leaves_a_set_of_plain_ones(thing: Thing) -> None:
    element = Asked()
    elements = {1, "a", element, thing}
    Asked.count = 0
    assert can_discard(elements, id(element))
    discard(elements, [id(element)])
    assert (elements, Asked.count) == ({1, "a", thing}, 0)


def test_a_plain_element_leaves_a_set_of_such_as_are_not_to_be_asked(thing: Thing) -> None:
    elements = {Asked(), Asked(), thing}
    Asked.count = 0
    discard(elements, [id(thing)])
    assert (len(elements), thing in elements, Asked.count) == (2, False, 0)


def test_one_of_several_that_are_not_to_be_asked_stays() -> None:
    element = Asked()
    elements = {Asked(), element}
    Asked.count = 0
    assert not can_discard(elements, id(element))
    discard(elements, [id(element)])
    assert (len(elements), Asked.count) == (2, 0)


class Hashes(Thing):
    def __hash__(self) -> int:
        return 1


@pytest.mark.parametrize(
    ("key", "is_plain"),
    [
        ("a", True),
        ((1, ("b", None)), True),
        (Thing(), True),
        (Thing, True),
        (Mode.FAST, True),
        (torch.float32, True),
        (torch.device("cpu"), True),
        (torch.ones(1), True),
        (torch.nn.Parameter(torch.ones(1)), True),
        (Path("a"), True),
        (Hashes(), False),
        ((1, Hashes()), False),
        (frozenset({Hashes()}), False),
        (Hashes().__hash__, False),
    ],
)
def test_whose_hash_is_plain(key: object, is_plain: bool) -> None:
    assert has_plain_hash(key) is is_plain


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_a_key_goes_with_its_entry(kind: type[dict[object, int]]) -> None:
    first, second = torch.ones(2), torch.ones(2)
    entries = kind()
    for key in (first, second, "a"):
        entries[key] = 1
    delete_keys(entries, [id(second)])
    assert [key is first or key == "a" for key in entries] == [True, True]
    # There is none any more.
    delete_keys(entries, [id(second)])
    assert len(entries) == 2


def test_a_key_with_a_hash_of_its_own_stays() -> None:
    class Hashed:
        def __hash__(self) -> int:
            return 1

    entries = {Hashed(): 1}
    key = id(next(iter(entries)))
    assert not can_delete_key(entries, key)
    delete_keys(entries, [key])
    assert len(entries) == 1
