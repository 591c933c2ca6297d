"""How large the values are that an object refers to is read in one go, and nothing is kept."""

from __future__ import annotations

import gc
import weakref

import numpy as np

from lowtide.probes.heap.large_values import LEAST, UNIT, read_values, size_of_value


class Holder:
    def __init__(self) -> None:
        self.text, self.data, self.small = "x" * LEAST, bytearray(3 * LEAST), bytes(LEAST - 1)


def test_an_object_has_what_its_attributes_are() -> None:
    holder = Holder()
    (owner,) = {id(holder), id(vars(holder))} & {*read_values()[0].ids.tolist()}
    read, values = read_values([owner])
    (place,) = read.places_of(np.array([owner], np.int64)).tolist()
    assert read.lengths[place] == 4 * LEAST // UNIT
    assert values == {owner: holder.data}
    assert size_of_value(values[owner]) == 3 * LEAST


def test_a_view_has_none_of_its_own() -> None:
    array = np.ones(LEAST)
    held = [[array[1:]]]
    assert id(held[0]) not in read_values()[0].ids.tolist()
    assert size_of_value(array) == 8 * LEAST


def test_nothing_is_kept() -> None:
    holder = Holder()
    seen = weakref.ref(holder)
    read_values([id(holder)])
    del holder
    assert seen() is None
    assert gc.isenabled()
