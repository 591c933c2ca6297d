"""What is written in C and reads the collector's lists, and what says that a dictionary has changed."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from lowtide.probes import native
from lowtide.probes.heap import births
from lowtide.probes.host import replaced
from lowtide.probes.objects import listed

if native.followers_among is None:
    pytest.skip("what is written in C was not built here", allow_module_level=True)


@pytest.fixture(autouse=True)
def nothing_is_collected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def among(first: object, items: list[object], most: int = -1) -> list[object]:
    assert native.followers_among is not None
    return native.followers_among(first, np.array(list(map(id, items)), np.int64).tobytes(), most)


def instances(*classes: type) -> list[Any]:
    assert native.all_instances is not None
    return native.all_instances(classes, False)


def test_it_is_used_on_this_interpreter() -> None:
    assert births._followers_among is native.followers_among


def test_what_comes_behind_is_found_in_its_order() -> None:
    first, *others = [[] for _ in range(5)]
    found = among(first, [others[3], others[0], others[2]])
    assert list(map(id, found)) == [id(others[0]), id(others[2]), id(others[3])]


def test_of_so_many_places_no_more_are_looked_at() -> None:
    items = [[] for _ in range(5)]
    assert [len(among(items[0], items, most)) for most in range(5)] == [0, 1, 2, 3, 4]


def test_what_comes_before_is_found_only_where_all_are_looked_at() -> None:
    before: list[object] = []
    first: list[object] = []
    assert among(first, [before], 1) == []
    assert among(first, [before])[0] is before


class Base:
    itself: Any = None


class Derived(Base): ...


class Virtual(type):
    """Says of everything that it derives from its classes."""

    def __instancecheck__(cls, _item: object) -> bool:
        return True

    def __subclasscheck__(cls, _other: type) -> bool:
        return True


def test_instances_are_found_in_all_generations_and_among_what_is_frozen() -> None:
    frozen = [Base(), []]
    gc.freeze()
    try:
        old = [Derived(), Base()]
        gc.collect()
        middle = [Derived()]
        gc.collect(0)
        young = [Base(), Derived()]
        found = instances(Base)
    finally:
        gc.unfreeze()
    assert sorted(map(id, found)) == sorted(map(id, [frozen[0], *old, *middle, *young]))


def test_frozen_garbage_is_found() -> None:
    item = Base()
    item.itself = item
    gc.freeze()
    try:
        del item
        (found,) = instances(Base)
        assert found.itself is found
        del found.itself
    finally:
        gc.unfreeze()


def test_no_instance_gets_a_reference_but_what_is_returned() -> None:
    kept, other = Base(), [1]
    before = sys.getrefcount(kept), sys.getrefcount(other)
    found = instances(Base, Derived)
    assert (sys.getrefcount(kept), sys.getrefcount(other)) == (before[0] + 1, before[1])
    assert found == [kept]


def test_what_a_class_says_of_others_is_not_asked() -> None:
    claims = Virtual("Claims", (), {})
    item = claims()
    assert instances(claims) == [item]
    assert instances() == []


@pytest.mark.parametrize("wrong", [[Base], (1,), Base])
def test_only_classes_are_looked_for(wrong: Any) -> None:
    assert native.all_instances is not None
    with pytest.raises(TypeError, match=r"tuple|classes"):
        native.all_instances(wrong, False)


def test_without_it_the_same_instances_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [Base(), Derived()]
    gc.freeze()
    try:
        kept += [Derived()]
        fast = listed.all_instances(Base)
        monkeypatch.setattr(native, "all_instances", None)
        slow = listed.all_instances(Base)
    finally:
        gc.unfreeze()
    assert sorted(map(id, fast)) == sorted(map(id, slow)) == sorted(map(id, kept))


def test_what_is_in_another_generation_is_not_found() -> None:
    old: list[object] = []
    gc.collect()
    young: list[object] = []
    assert among(young, [old]) == []
    assert among(old, [young]) == []
    gc.collect()
    assert [item is young for item in among(old, [young])] == [True]


def test_the_dead_are_not_found() -> None:
    first: list[object] = []
    dead = [[] for _ in range(100)]
    ids = np.array(list(map(id, dead)), np.int64).tobytes()
    dead.clear()
    assert native.followers_among is not None
    assert native.followers_among(first, ids, -1) == []


def test_no_reference_is_left() -> None:
    first, second = [[] for _ in range(2)]
    before = sys.getrefcount(first), sys.getrefcount(second)
    for _ in range(100):
        among(first, [second, first])
    assert (sys.getrefcount(first), sys.getrefcount(second)) == before


@pytest.mark.parametrize("first", [1, "text", ()])
def test_what_is_in_no_list_is_refused(first: object) -> None:
    with pytest.raises(ValueError, match="does not track"):
        among(first, [[]])


@pytest.mark.parametrize("marks_of", [native.marks_of, replaced._slow_marks], ids=["in C", "in Python"])
def test_the_mark_of_a_dictionary_is_another_one_once_a_value_in_it_is(
    marks_of: Callable[[tuple[dict[str, Any], ...]], bytes],
) -> None:
    cls = type("Class", (), {"method": len})
    plain, of_class = {"a": len, "b": len}, gc.get_referents(vars(cls))[0]

    def marks() -> tuple[bytes, bytes]:
        found = marks_of((plain, of_class))
        assert len(found) == 16
        return found[:8], found[8:]

    first = marks()
    assert marks() == first
    plain["a"] = max
    second = marks()
    assert (second[0] != first[0], second[1]) == (True, first[1])
    cls.method = max  # type: ignore[attr-defined]
    third = marks()
    assert (third[0], third[1] != second[1]) == (second[0], True)
    del plain["b"]
    assert marks()[0] != third[0]


def test_only_dictionaries_have_marks() -> None:
    assert native.marks_of is not None
    with pytest.raises(TypeError, match="dictionaries only"):
        native.marks_of(({}, []))  # type: ignore[arg-type]
