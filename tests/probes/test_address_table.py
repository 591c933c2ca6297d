"""The table of addresses answers as a dict would, however many addresses it has and however they collide."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.probes.objects import address_table as module
from lowtide.probes.objects.address_table import AddressTable, each_once, first_places

# The table scatters addresses by all but their last four bits: these are few slots for many addresses.
COLLIDING = st.builds(lambda block, place: 16 * block + place, st.integers(0, 3), st.integers(0, 15))
ADDRESSES = st.one_of(COLLIDING, st.integers(0, 2**47).map(lambda word: 16 * word), st.integers(0, 2**63 - 1))
MANY = settings(max_examples=60, deadline=None)


def array(addresses: list[int]) -> npt.NDArray[np.int64]:
    return np.array(addresses, np.int64)


def places(added: list[int]) -> dict[int, set[int]]:
    """Where each address was added, one or several times."""
    found: dict[int, set[int]] = {}
    for place, address in enumerate(added):
        found.setdefault(address, set()).add(place)
    return found


def assert_answers_as(table: AddressTable, known: dict[int, set[int]], asked: list[int]) -> None:
    answers = table.find(array(asked))
    assert answers.dtype == np.int32
    for address, answer in zip(asked, answers.tolist(), strict=True):
        assert answer in known.get(address, {-1})


@MANY
@given(added=st.lists(ADDRESSES, min_size=1), others=st.lists(ADDRESSES))
def test_each_address_is_found_where_it_was_added_and_no_other(added: list[int], others: list[int]) -> None:
    assert_answers_as(AddressTable(array(added)), places(added), added + others)


@MANY
@given(parts=st.lists(st.lists(ADDRESSES), min_size=1, max_size=6), others=st.lists(ADDRESSES))
def test_what_is_added_later_is_found_too(parts: list[list[int]], others: list[int]) -> None:
    parts[0].append(7)
    table = AddressTable(array(parts[0]))
    added = list(parts[0])
    for part in parts[1:]:
        table.add(array(part))
        added += part
        assert_answers_as(table, places(added), added + others)


@MANY
@given(added=st.sets(ADDRESSES, min_size=1))
def test_distinct_addresses_are_numbered_in_the_order_of_addition(added: set[int]) -> None:
    ordered = list(added)
    assert AddressTable(array(ordered)).find(array(ordered)).tolist() == list(range(len(ordered)))


@pytest.mark.parametrize("step", [1, 16, 4096, 1 << 32])
def test_it_grows_by_many_addresses_a_few_at_a_time(step: int) -> None:
    addresses = array(list(range(0, 5000 * step, step)))
    table = AddressTable(addresses[:1])
    for start in range(1, len(addresses), 700):
        table.add(addresses[start : start + 700])
    assert table.find(addresses).tolist() == list(range(len(addresses)))
    assert set(table.find(addresses + 5000 * step).tolist()) == {-1}


def test_many_addresses_in_one_slot_are_distinguished() -> None:
    # Sixteen to a slot, and the slots next to each other are taken as well.
    addresses = array([16 * block + place for block in range(64) for place in range(16)])
    table = AddressTable(addresses)
    assert table.find(addresses).tolist() == list(range(len(addresses)))
    assert table.find(array([16 * 64, 16 * 64 + 15])).tolist() == [-1, -1]


def test_one_address_many_times_is_found_at_one_of_its_places() -> None:
    table = AddressTable(array([32] * 1000 + [48]))
    assert 0 <= table.find(array([32]))[0] < 1000
    assert table.find(array([48, 64])).tolist() == [1000, -1]


def test_an_address_that_is_added_again_is_found_at_either_place() -> None:
    table = AddressTable(array([16, 32]))
    table.add(array([32, 48]))
    assert table.find(array([32]))[0] in (1, 2)
    assert table.find(array([16, 48])).tolist() == [0, 3]


def test_nothing_asked_nothing_found() -> None:
    assert AddressTable(array([16])).find(array([])).tolist() == []


def test_nothing_added_changes_nothing() -> None:
    table = AddressTable(array([16, 32]))
    table.add(array([]))
    assert table.find(array([16, 32, 48])).tolist() == [0, 1, -1]


def test_in_an_empty_table_nothing_is_found() -> None:
    table = AddressTable(array([]))
    assert table.find(array([])).tolist() == []
    assert table.find(array([16, 32])).tolist() == [-1, -1]


def test_an_empty_table_can_be_added_to() -> None:
    table = AddressTable(array([]))
    table.add(array([16, 32]))
    assert table.find(array([32, 16, 48])).tolist() == [1, 0, -1]


def test_what_is_asked_stays_as_it_was() -> None:
    asked = array([16, 32, 48])
    AddressTable(array([48, 16])).find(asked)
    assert asked.tolist() == [16, 32, 48]


@MANY
@given(addresses=st.lists(ADDRESSES), rounds=st.integers(0, 3))
def test_the_first_place_of_each_address_is_found(addresses: list[int], rounds: int) -> None:
    expected = [addresses.index(address) for address in addresses]
    assert first_places(array(addresses)).tolist() == expected
    with pytest.MonkeyPatch.context() as patch:
        # Few rounds leave some that met others in all of them.
        patch.setattr(module, "_ROUNDS", rounds)
        assert first_places(array(addresses)).tolist() == expected


def test_the_first_places_of_very_many_addresses() -> None:
    drawn = np.random.default_rng(0).integers(0, 50_000, 200_000) * 16
    found = first_places(drawn)
    _, expected, which = np.unique(drawn, return_index=True, return_inverse=True)
    assert np.array_equal(found, expected[which])


@pytest.mark.parametrize("numbers", [[], [0], [3, 0, 3], [5, 5, 5], [2**47, 16, 2**47, 0]])
def test_each_number_comes_once_and_in_order(numbers: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    # A test may have replaced it.
    monkeypatch.setattr(np, "concatenate", None)
    assert each_once(np.array(numbers, np.int64)).tolist() == sorted(set(numbers))
