"""How large the values are that an object refers to is read in one go, and nothing is kept."""

from __future__ import annotations

import functools
import gc
import sys
import weakref
import xml.etree.ElementTree
from typing import Any

import numpy as np

from lowtide.probes.heap.container_lengths import read_lengths
from lowtide.probes.heap.large_values import (
    LEAST,
    OF_ITEMS,
    OF_TYPE,
    OF_VALUES,
    UNIT,
    items_of,
    read_values,
    size_of_value,
    with_values,
)
from tests.probes.in_both_ways import in_both_ways

_way = in_both_ways("values_of_all")


class Holder:
    def __init__(self) -> None:
        self.text, self.data, self.small = "x" * LEAST, bytearray(3 * LEAST), bytes(LEAST - 1)


class Slotted:
    __slots__ = tuple(f"slot_{number}" for number in range(20))


def test_an_object_has_what_its_attributes_are() -> None:
    holder = Holder()
    (owner,) = {id(holder) + OF_VALUES, id(vars(holder)) + OF_VALUES} & {*read_values()[0].ids.tolist()}
    read, values = read_values([owner])
    (place,) = read.places_of(np.array([owner], np.int64)).tolist()
    assert read.lengths[place] == 4 * LEAST // UNIT
    assert values == {owner: [holder.data, holder.text]}
    assert size_of_value(holder.data) == 3 * LEAST


def test_what_lies_in_dicts_of_names_alone_is_met() -> None:
    inner = {"deep": "x" * LEAST}
    assert not gc.is_tracked(inner)
    holder = [{"inner": inner, "same": inner}]
    read, _ = read_values()
    (place,) = read.places_of(np.array([id(inner) + OF_VALUES], np.int64)).tolist()
    assert read.lengths[place] == LEAST // UNIT
    assert holder[0]["same"] is inner


def test_of_tuples_among_the_lengths_of_containers_are_those_of_many_things() -> None:
    few, many = [(None,) * 15], [(None,) * 16]
    ids = {*with_values(read_lengths()[0]).ids.tolist()}
    assert {id(few), id(many)} <= ids
    assert (id(few) + OF_ITEMS in ids, id(many) + OF_ITEMS in ids) == (False, True)


def test_what_is_frozen_is_read_too() -> None:
    holder = ["x" * (2 * LEAST)]
    gc.freeze()
    try:
        read, values = read_values([id(holder) + OF_VALUES])
    finally:
        gc.unfreeze()
    (place,) = read.places_of(np.array([id(holder) + OF_VALUES], np.int64)).tolist()
    assert (read.lengths[place], values) == (2 * LEAST // UNIT, {id(holder) + OF_VALUES: [holder[0]]})


def test_a_value_that_two_have_counts_for_both_and_twice_for_one_that_has_it_twice() -> None:
    text = "x" * LEAST
    one, other = [text, text], [text]
    read, _ = read_values()
    places = read.places_of(np.array([id(one), id(other)], np.int64) + OF_VALUES)
    assert read.lengths[places].tolist() == [2 * LEAST // UNIT, LEAST // UNIT]


def test_the_things_in_tuples_and_their_like_are_counted() -> None:
    arguments = functools.partial(print, 1, 2, 3)
    holders = [[("x",) * 5, ()], [frozenset("abc"), ("y",)], [arguments]]
    ids = [id(holder) + OF_ITEMS for holder in holders]
    read, values = read_values(ids)
    assert read.lengths[read.places_of(np.array(ids, np.int64))].tolist() == [5, 4, 3]
    assert [items_of(values[each][0]) for each in ids] == [("x",) * 5, frozenset("abc"), (1, 2, 3)]


def test_what_no_container_holds_and_has_no_room_for_is_counted_and_the_most_that_any_of_a_type_has() -> None:
    element, slotted = xml.etree.ElementTree.Element("all"), Slotted()
    for _ in range(20):
        xml.etree.ElementTree.SubElement(element, "one")
    for name in Slotted.__slots__:
        setattr(slotted, name, bytes(LEAST + 1 + len(name)))
    read, values = read_values([id(element) + OF_ITEMS, id(Slotted) + OF_TYPE + OF_VALUES])
    ids = np.array([id(element) + OF_ITEMS, id(slotted) + OF_ITEMS, id(Slotted) + OF_TYPE + OF_VALUES], np.int64)
    places = read.places_of(ids)
    assert places[1] == -1
    assert read.lengths[places[[0, 2]]].tolist() == [len(gc.get_referents(element)), LEAST // UNIT]
    assert values[id(element) + OF_ITEMS] == [element]
    assert len(values[id(Slotted) + OF_TYPE + OF_VALUES]) == 20


def test_a_view_has_none_of_its_own() -> None:
    array = np.ones(LEAST)
    held = [[array[1:]]]
    assert id(held[0]) + OF_VALUES not in read_values()[0].ids.tolist()
    assert size_of_value(array) == 8 * LEAST


def test_nothing_is_kept() -> None:
    holder = Holder()
    seen = weakref.ref(holder)
    read_values([id(holder) + OF_VALUES])
    del holder
    assert seen() is None
    assert gc.isenabled()


def test_a_nest_of_tuples_is_followed_to_its_end() -> None:
    innermost: Any = ("x" * LEAST,)
    nest = innermost
    # Deeper than functions may call each other.
    for _ in range(sys.getrecursionlimit() + 100):
        # Only a tuple of what is not tracked is let go of, so that each level takes a collection.
        gc.collect(0)
        nest = (nest,)
    gc.collect(0)
    assert not gc.is_tracked(nest)
    holder = [nest]
    read, _ = read_values()
    place = read.places_of(np.array([id(innermost) + OF_VALUES], np.int64))
    assert read.lengths[place].tolist() == [LEAST // UNIT]
    assert holder
