"""The length of every container is read in one go, whoever hides it, and without running its code."""

from __future__ import annotations

import gc
import weakref
from collections import ChainMap, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from functools import partial
from types import MappingProxyType, ModuleType
from typing import Any

import pytest

from lowtide.probes import native
from lowtide.probes.heap import container_lengths
from lowtide.probes.heap.container_lengths import last_entries, read_lengths
from lowtide.probes.objects import identities
from lowtide.probes.original_numpy import np
from tests.resized_buffers import buffers_resized_meanwhile


class Boasting(list[int]):
    def __len__(self) -> int:
        raise AssertionError("foreign code")


class Numbered(dict[str, int]):
    pass


class Holder:
    names: dict[str, int]

    def __init__(self) -> None:
        self.names = {}


def length_of(container: object) -> int:
    read, found = read_lengths([id(container)])
    assert found == {id(container): container}
    (place,) = read.places_of(np.array([id(container)], np.int64)).tolist()
    assert read.kinds[place] == id(type(container))
    return int(read.lengths[place])


@pytest.fixture(params=["in C", "from memory", "one by one"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return how lengths are read: each way must give the same."""
    if request.param != "in C":
        monkeypatch.setattr(native, "lengths_of_all", None)
    elif native.lengths_of_all is None:
        pytest.skip("the extension is not built here")
    if request.param == "one by one":
        monkeypatch.setattr(identities, "_LENGTHS_LAID_OUT", False)
    return str(request.param)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    "container",
    [
        [[]],
        [[], [], []],
        {1: [], 2: []},
        {(), (1,), (2,), (3,)},
        deque([[], []], maxlen=5),
        Boasting([1, 2]),
        Numbered(a=1, b=2),
        OrderedDict({1: 1, 2: 2, 3: 3}),
        defaultdict(list, {1: []}),
    ],
    ids=lambda container: type(container).__name__,
)
def test_each_kind_of_container_is_read(container: Any) -> None:
    assert length_of(container) == (2 if type(container) is Boasting else len(container))


@pytest.mark.usefixtures("way")
def test_what_was_taken_out_does_not_count() -> None:
    entries, things = {place: [place] for place in range(9)}, {(place,) for place in range(9)}
    del entries[3], entries[4]
    things -= {(1,), (2,), (3,)}
    assert (length_of(entries), length_of(things)) == (7, 6)


@pytest.mark.usefixtures("way")
def test_a_dict_of_names_alone_is_found_where_an_attribute_holds_it() -> None:
    holder = Holder()
    holder.names["one"] = 1
    assert not gc.is_tracked(holder.names)
    assert length_of(holder.names) == 1


@pytest.mark.usefixtures("way")
def test_a_dict_of_names_alone_is_found_where_a_short_list_holds_it() -> None:
    chained = ChainMap[str, int]({})
    chained["one"] = 1
    assert not gc.is_tracked(chained.maps[0])
    assert length_of(chained.maps[0]) == 1


def held_by_a_variable() -> tuple[dict[str, int], object]:
    return {"one": 1}, None


def held_by_a_closure() -> tuple[dict[str, int], object]:
    seen = {"one": 1}
    return seen, lambda: seen


def held_by_a_generator() -> tuple[dict[str, int], object]:
    def counted() -> Iterator[dict[str, int]]:
        seen = {"one": 1}
        yield seen

    generator = counted()
    return next(generator), generator


def held_by_a_view() -> tuple[dict[str, int], object]:
    seen = {"one": 1}
    return seen, MappingProxyType(seen)


def held_by_a_default() -> tuple[dict[str, int], object]:
    def count(seen: dict[str, int] = {"one": 1}) -> dict[str, int]:  # noqa: B006
        return seen

    return count(), count


def held_by_a_partial() -> tuple[dict[str, int], object]:
    seen = {"one": 1}
    return seen, partial(dict.get, seen)


def held_by_a_module() -> tuple[dict[str, int], object]:
    module = ModuleType("seen")
    return vars(module), module


def held_by_a_long_list() -> tuple[dict[str, int], object]:
    rows = [{"one": 1} for _ in range(1000)]
    return rows[500], rows


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    "held",
    [
        held_by_a_variable,
        held_by_a_closure,
        held_by_a_generator,
        held_by_a_view,
        held_by_a_default,
        held_by_a_partial,
        held_by_a_module,
        held_by_a_long_list,
    ],
)
def test_a_dict_of_names_alone_is_found_whoever_holds_it(
    held: Callable[[], tuple[dict[str, int], object]],
) -> None:
    if held is held_by_a_variable:
        found, _ = held()
        assert (gc.is_tracked(found), length_of(found)) == (False, 1)
        return
    # In no variable of a function that runs.
    holder, identity = held_alone(held())
    read, _ = read_lengths()
    assert (read.places_of(np.array([identity])) >= 0, holder is not None) == (True, True)


@pytest.mark.usefixtures("way")
def test_dicts_that_are_not_tracked_count_for_what_a_reading_costs() -> None:
    before, _ = read_lengths()
    rows = [{"one": number} for number in range(5000)]
    after, _ = read_lengths()
    assert (gc.is_tracked(rows[0]), after.objects - before.objects > 4500) == (False, True)


def held_alone(held: tuple[dict[str, int], object]) -> tuple[object, int]:
    return held[1], id(held[0])


@pytest.mark.usefixtures("way")
def test_a_type_is_as_long_as_there_are_objects_of_it() -> None:
    kept = [Holder() for _ in range(7)]
    assert length_of(Holder) == len(kept)


@pytest.fixture
def frozen() -> Iterator[list[Any]]:
    hidden = [Holder(), {1: []}]
    hidden[0].names["one"] = 1
    gc.freeze()
    yield hidden
    gc.unfreeze()


@pytest.mark.usefixtures("way")
def test_what_is_frozen_is_read_and_stays_frozen(frozen: list[Any]) -> None:
    count = gc.get_freeze_count()
    assert (length_of(frozen), length_of(frozen[1]), length_of(frozen[0].names)) == (2, 1, 1)
    assert gc.get_freeze_count() == count


@pytest.mark.usefixtures("way")
def test_nothing_is_kept_alive_by_a_reading() -> None:
    thing = Holder()
    seen = weakref.ref(thing)
    read, found = read_lengths()
    del thing
    assert seen() is None
    assert (len(read.ids) > 1000, found) == (True, {})


@pytest.mark.skipif(native.lengths_of_all is None, reason="the extension is not built here")
def test_each_way_reads_the_same_of_the_whole_heap(monkeypatch: pytest.MonkeyPatch) -> None:
    in_c, _ = read_lengths()
    monkeypatch.setattr(native, "lengths_of_all", None)
    in_numpy, _ = read_lengths()
    # Python 3.12 freezes some objects of its own at its start, which the other way leaves out.
    assert abs(in_c.objects - in_numpy.objects - gc.get_freeze_count()) < 100
    # Readings make dicts of names themselves.
    both = np.intersect1d(in_c.ids, in_numpy.ids)
    assert len(both) > len(in_c.ids) - 100
    assert len(both) > len(in_numpy.ids) - 100
    places, others = in_c.places_of(both), in_numpy.places_of(both)
    assert (in_c.kinds[places] == in_numpy.kinds[others]).all()
    assert np.count_nonzero(in_c.lengths[places] != in_numpy.lengths[others]) < 20


@pytest.mark.skipif(native.lengths_of_all is None, reason="the extension is not built here")
def test_no_other_thread_sees_what_it_lets_go_of_alive() -> None:
    with buffers_resized_meanwhile() as errors:
        for _ in range(20):
            read_lengths([id(errors)])
    assert errors == []


def test_what_is_not_there_has_no_place() -> None:
    read, found = read_lengths([12345])
    assert (read.places_of(np.array([12345], np.int64)).tolist(), found) == ([-1], {})
    nothing = np.zeros(0, np.int64)
    nowhere = container_lengths.ContainerLengths(nothing, nothing, nothing)
    assert nowhere.places_of(np.array([12345], np.int64)).tolist() == [-1]


def test_the_last_entries_are_those_that_came_last() -> None:
    assert last_entries([1, 2, 3], 2) == [(3,), (2,)]
    assert last_entries(deque([1, 2, 3]), 1) == [(3,)]
    assert last_entries({"a": 1, "b": 2}, 1) == [("b", 2)]
    assert last_entries({7}, 5) == [(7,)]
    assert last_entries(Boasting([1, 2]), 1) == [(2,)]


@pytest.mark.parametrize("kind", [list, deque, set, dict.fromkeys])
def test_of_many_entries_some_are_given_all_over(kind: Callable[[range], object]) -> None:
    given = sorted(entry[0] for entry in last_entries(kind(range(1000)), 1000, 20, 4))
    runs = [given[at : at + 4] for at in range(0, len(given), 4)]
    assert (len(runs), all(run == list(range(run[0], run[0] + 4)) for run in runs)) == (50, True)
    assert [run[0] // 20 for run in runs] == list(range(50))
    # Not always the same ones of those of which every so many is like no others.
    assert len({run[0] % 20 for run in runs}) == 5


def test_lengths_are_read_from_memory_where_objects_are() -> None:
    assert identities._LENGTHS_LAID_OUT == identities._LAID_OUT


def test_a_dict_of_names_alone_is_found_in_a_list_of_many() -> None:
    held = [{"name": str(number)} for number in range(20_000)]
    gc.collect()
    ids = {*read_lengths()[0].ids.tolist()}
    assert {id(held[0]), id(held[-1])} <= ids
