"""What is read from memory of many objects is what Python says of each, which is asked where it cannot be read."""

from __future__ import annotations

import ctypes
import functools
import gc
import subprocess
import sys
import weakref
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from lowtide.probes import native
from lowtide.probes.objects import identities as module
from lowtide.probes.objects.identities import (
    Identities,
    are_tracked,
    elements,
    identities,
    misses_of,
    namespace_sizes,
    object_at,
    objects_at,
    places_of,
    referents,
    types_of,
)


class Meta(type):
    """A metaclass that answers wrongly."""

    def __hash__(cls) -> int:
        raise AssertionError

    def __eq__(cls, other: object) -> bool:
        raise AssertionError


class Odd(metaclass=Meta):
    """Says that it is something else."""

    __class__ = dict  # type: ignore[assignment]


class Slotted:
    __slots__ = ("value",)


SAMPLE: list[Any] = [Odd(), Odd, Slotted(), 1, 10**30, 1.5, "ä", b"", (), [], {}, None, len, type, object(), sys, Meta]


@pytest.fixture(params=[True, False], ids=["from memory", "one by one"])
def laid_out(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(module, "_LAID_OUT", request.param)
    return bool(request.param)


@pytest.mark.usefixtures("laid_out")
@pytest.mark.parametrize("count", [0, 1, 2, len(SAMPLE)])
def test_they_are_those_that_python_gives(count: int) -> None:
    items = SAMPLE[:count]
    ids = identities(items)
    assert (ids.dtype, ids.tolist()) == (np.int64, [id(item) for item in items])
    kinds = types_of(ids)
    assert (kinds.dtype, kinds.tolist()) == (np.int64, [id(type(item)) for item in items])


def test_this_interpreter_s_memory_is_read() -> None:
    # Else the rest of this proves nothing, and everything takes ten times as long.
    assert module._LAID_OUT
    assert module._CACHES_LAID_OUT


def test_of_a_whole_heap_too() -> None:
    gc.collect()
    items = gc.get_objects()
    ids = identities(items)
    assert ids.tolist() == list(map(id, items))
    assert types_of(ids).tolist() == list(map(id, map(type, items)))


@pytest.mark.usefixtures("laid_out")
def test_a_list_that_grew_and_shrank_is_read_as_it_is() -> None:
    items: list[Any] = []
    for step in range(100):
        items.append(object())
        if step % 3 == 0:
            items.pop(0)
        assert identities(items).tolist() == list(map(id, items))


def test_what_is_read_stays_when_the_list_changes() -> None:
    items: list[Any] = [object(), object()]
    kept = list(items)
    ids = identities(items)
    items.clear()
    items.extend(range(1000))
    assert ids.tolist() == list(map(id, kept))


def test_an_object_is_had_by_its_identity() -> None:
    item = object()
    before = sys.getrefcount(item)
    assert object_at(id(item)) is item
    assert sys.getrefcount(item) == before


@pytest.mark.usefixtures("laid_out")
def test_lists_are_read_side_by_side() -> None:
    grown = [object() for _ in range(100)]
    del grown[3:]
    lists: list[list[Any]] = [[], SAMPLE, [], grown, [lists_in := []], [[]]]
    counts, ids = elements(lists)
    assert counts.tolist() == [0, len(SAMPLE), 0, 3, 1, 1]
    assert ids.tolist() == [id(item) for each in lists for item in each]
    assert ids.tolist()[-2] == id(lists_in)
    assert [part.tolist() for part in elements([])] == [[], []]
    assert [part.tolist() for part in elements([[], []])] == [[0, 0], []]


@pytest.mark.usefixtures("laid_out")
def test_what_is_tracked_is_reported_as_the_collector_does() -> None:
    no_longer_tracked = (1, "two", 3.0)
    gc.collect()
    items = [*SAMPLE, {1: 2}, {1: []}, no_longer_tracked, ([],), Meta("Made", (), {}), int, np.zeros(1), np.float64]
    assert are_tracked(identities(items)).tolist() == list(map(gc.is_tracked, items))
    assert {True, False} == {gc.is_tracked(item) for item in items if isinstance(item, type)}
    assert are_tracked(identities([])).tolist() == []


@pytest.fixture(params=[True, False], ids=["in C", "without C"])
def in_c(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the names of modules, and what caches did not have, in both ways."""
    if not request.param:
        monkeypatch.setattr(native, "namespace_sizes", None)
        monkeypatch.setattr(native, "numbers_in", None)
    elif native.namespace_sizes is None:
        pytest.skip("the extension is not built here")


@pytest.mark.usefixtures("in_c")
def test_how_many_names_a_module_has(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lazy(ModuleType):
        pass

    modules: list[Any] = [gc, Lazy("lazy"), ModuleType("shrunk"), ModuleType("new")]
    vars(modules[2]).update(dict.fromkeys("abcdefghijklmnop"))
    for name in "abcdefgh":
        del vars(modules[2])[name]
    for item in (*modules[:3], Odd(), None):
        monkeypatch.setitem(sys.modules, f"test of names {id(item)}", item)
    sizes = namespace_sizes()
    assert [sizes.of(vars(module)) for module in modules] == [*(len(vars(module)) for module in modules[:3]), 0]
    assert sizes.of(vars(sys)) == len(vars(sys))


@pytest.mark.usefixtures("in_c")
def test_a_module_that_was_cleared_has_no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    module_without = ModuleType("cleared")
    monkeypatch.setitem(sys.modules, "test of a cleared module", module_without)
    place = ctypes.c_int64.from_address(id(module_without) + 16)
    namespace, place.value = place.value, 0
    try:
        sizes = namespace_sizes()
    finally:
        place.value = namespace
    assert (sizes.of(vars(module_without)), sizes.of(vars(sys))) == (0, len(vars(sys)))


@pytest.mark.usefixtures("in_c")
def test_how_often_a_cache_did_not_have_what_it_was_asked_for() -> None:
    caches = [functools.lru_cache(maxsize)(abs) for maxsize in (None, 0, 2, 128)]
    references = list(map(weakref.ref, caches))
    assert misses_of(references).tolist() == [0, 0, 0, 0]
    for key in (1, 1, 2, 3, 1):
        for cache in caches:
            cache(key)
    assert misses_of(references).tolist() == [3, 5, 4, 3]
    del cache, caches[1]
    assert misses_of(references).tolist() == [3, -1, 4, 3]
    assert misses_of([]).tolist() == []


def test_another_layout_of_caches_is_noticed() -> None:
    assert not module._are_caches_laid_out(module._MISSES + 8)


def test_what_is_tracked_of_a_whole_heap_and_of_what_it_holds() -> None:
    heap = gc.get_objects()
    items = gc.get_referents(*heap)
    tracked = are_tracked(identities(items)).tolist()
    assert tracked == list(map(gc.is_tracked, items))
    assert 0 < sum(tracked) < len(tracked)


def test_many_objects_are_had_by_their_identities() -> None:
    items: list[Any] = [[place] for place in range(2 * module._AT_A_TIME + 3)]
    last = items[-1]
    before = sys.getrefcount(last)
    ids = identities(items)
    for part in (slice(0), slice(1), slice(module._AT_A_TIME), slice(None), slice(None, None, 2)):
        assert list(map(id, objects_at(ids[part]))) == ids[part].tolist()
    found = objects_at(ids)
    assert sys.getrefcount(last) == before + 1
    del found
    assert sys.getrefcount(last) == before


def test_nothing_is_left_to_the_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        for count in range(1, 50):
            ids = identities(SAMPLE[:1] * count)
            types_of(ids)
            are_tracked(ids)
            objects_at(ids)
            elements([SAMPLE] * count)
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_addresses_that_are_too_high_to_be_read_at_once_are_asked_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ADDRESS_BITS", 8)
    items = [1, "two"]
    assert types_of(identities(items)).tolist() == [id(int), id(str)]


@pytest.mark.parametrize("is_laid_out", [True, False])
def test_what_objects_refer_to_is_read_as_the_collector_says(
    is_laid_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LAID_OUT", is_laid_out)
    items = [*SAMPLE, [], {}, {"a": SAMPLE}, (SAMPLE, 1, SAMPLE), "text", pytest]
    counts, ids, found = referents(items)
    expected = [gc.get_referents(item) for item in items]
    assert counts.tolist() == [len(each) for each in expected]
    assert ids.tolist() == [id(item) for each in expected for item in each]
    assert len(found) == len(ids) + len(items)
    assert [part.tolist() for part in referents([])[:2]] == [[], []]


@pytest.mark.parametrize("is_laid_out", [True, False])
def test_objects_are_numbered_whatever_the_interpreter_is(is_laid_out: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LAID_OUT", is_laid_out)
    items = [[place] for place in range(50)]
    table = places_of(identities(items[:20]))
    table.add(identities(items[20:40]))
    assert table.find(identities(items)).tolist() == [*range(40), *[-1] * 10]
    assert table.first_places(identities([items[40], items[41], items[40]])).tolist() == [0, 1, 0]


LAYOUT = (8, 16, 24, -16, 328)


@pytest.mark.parametrize(("place", "other"), [(0, 16), (1, 24), (1, 0), (2, 8), (3, 0), (4, 8), (4, 320)])
def test_another_layout_is_noticed(place: int, other: int) -> None:
    assert module._is_laid_out(*LAYOUT)
    layout = list(LAYOUT)
    layout[place] = other
    assert not module._is_laid_out(*layout)


def test_another_interpreter_is_asked_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.implementation, "name", "pypy")
    assert not module._is_laid_out(*LAYOUT)


def test_a_walk_over_the_heap_asks_one_by_one_too() -> None:
    code = (
        "from lowtide.probes.objects import identities; identities._LAID_OUT = False\n"
        "from lowtide.probes.heap.holders import find_paths\n"
        "class Kept: parts = []\n"
        "thing = [1]; Kept.parts.append({'a': thing}); found = [thing]; del thing\n"
        "(path,) = find_paths(found, ignore={id(found)})\n"
        "print(path)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "module '__main__' .Kept .parts [0] ['a']"


def test_nothing_of_it_stays_that_could_be_come_across() -> None:
    code = (
        "import gc, numpy; from lowtide.probes.objects import identities as m;"
        "m.types_of(m.identities([1, 'two'])); m.elements([[1]]); m.are_tracked(m.identities([1, []]));"
        "big = [v for v in vars(m).values() if isinstance(v, numpy.ndarray)]; assert not big, big;"
        "print(max((o.nbytes for o in gc.get_objects() if isinstance(o, numpy.ndarray)), default=0))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1 << 20


def test_a_set_of_identities_has_each_once_and_none_of_those_left_out() -> None:
    found = Identities(np.array([32, 16, 32, 64], np.int64), but={16, 48})
    assert (len(found), list(found)) == (2, [32, 64])
    assert [number in found for number in (16, 32, 48, 64, 80, 0, -1)] == [
        False,
        True,
        False,
        True,
        False,
        False,
        False,
    ]
    assert "32" not in found
    assert 32 not in Identities(np.zeros(0, np.int64))
