"""The table of objects' places answers as a dict would, however far apart the objects lie."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.probes.objects.address_table import AddressTable
from lowtide.probes.objects.identities import ObjectPlaces

# Neighbours, others in the same page, and others far away; not all of them at multiples of 16 bytes.
BASES = st.sampled_from([0, 1 << 20, 5 << 20, 1 << 34, (1 << 47) - (1 << 20)])
SLOTS = st.builds(lambda base, slot: base + 16 * slot, BASES, st.one_of(st.integers(1, 8), st.integers(1, 65_000)))
OBJECTS = st.builds(
    lambda slots, off: [slot + off for slot in slots], st.sets(SLOTS, max_size=40), st.sampled_from([0, 8])
)
MANY = settings(max_examples=60, deadline=None)


def array(ids: list[int]) -> npt.NDArray[np.int64]:
    return np.array(ids, np.int64)


@MANY
@given(objects=OBJECTS, known=st.integers(0, 40), parts=st.integers(1, 5))
def test_each_object_has_the_number_at_which_it_was_added_and_others_none(
    objects: list[int], known: int, parts: int
) -> None:
    added, others = objects[:known], objects[known:]
    step = max(1, len(added) // parts)
    table = ObjectPlaces(array(added[:step]))
    for start in range(step, len(added), step):
        assert set(table.find(array(others)).tolist()) <= {-1}
        table.add(array(added[start : start + step]))
    found = table.find(array(added + others))
    assert found.dtype == np.int32
    assert found.tolist() == [*range(len(added)), *[-1] * len(others)]


@MANY
@given(objects=OBJECTS, data=st.data())
def test_the_first_place_of_each_object_is_found_and_none_is_added(objects: list[int], data: st.DataObject) -> None:
    known, asked = objects[:5], data.draw(st.lists(st.sampled_from(objects[5:]))) if objects[5:] else []
    table = ObjectPlaces(array(known))
    assert table.first_places(array(asked)).tolist() == [asked.index(item) for item in asked]
    assert table.find(array(known + asked)).tolist() == [*range(len(known)), *[-1] * len(asked)]


@MANY
@pytest.mark.parametrize("kind", [ObjectPlaces, AddressTable])
@given(objects=OBJECTS, data=st.data())
def test_what_is_new_and_chosen_is_added_once(
    kind: type[ObjectPlaces | AddressTable], objects: list[int], data: st.DataObject
) -> None:
    known = objects[:3]
    chosen = set(data.draw(st.lists(st.sampled_from(objects)))) if objects else set()
    table, expected = kind(array(known)), list(known)

    def which(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        assert len(set(ids.tolist())) == len(ids)
        return np.array([number in chosen for number in ids.tolist()], np.bool_)

    for _ in range(3):
        met = data.draw(st.lists(st.sampled_from(objects), max_size=60)) if objects else []
        new = [number for number in dict.fromkeys(met) if number in chosen and number not in expected]
        added = table.add_new(array(met), which).tolist()
        assert sorted(added) == sorted(new)
        expected += added
        assert table.find(array(expected)).tolist() == list(range(len(expected)))
        assert (table.find(array([number for number in objects if number not in expected])) < 0).all()


def test_what_is_asked_stays_as_it_was() -> None:
    asked = array([16, 1 << 40, 48])
    table = ObjectPlaces(array([48, 16]))
    table.find(asked)
    table.first_places(asked[1:2])
    assert asked.tolist() == [16, 1 << 40, 48]


def test_very_many_objects_in_very_many_pages() -> None:
    drawn = np.unique(np.random.default_rng(0).integers(1, 1 << 30, 20_000)) * 16
    np.random.default_rng(1).shuffle(drawn)
    table = ObjectPlaces(drawn[:1000])
    table.add(drawn[1000:15_000])
    found = table.find(drawn)
    assert np.array_equal(found[:15_000], np.arange(15_000))
    assert set(found[15_000:].tolist()) == {-1}


@pytest.mark.parametrize("number", [-16, 1 << 48, 1 << 62])
def test_what_is_no_address_has_no_place(number: int) -> None:
    table = ObjectPlaces(array([16]))
    assert table.find(array([number])).tolist() == [-1]
    with pytest.raises(ValueError, match="an identity is no address"):
        table.add(array([number]))
