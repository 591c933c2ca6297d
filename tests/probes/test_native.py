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


def ids_of(items: list[Any]) -> bytes:
    return np.array(list(map(id, items)), np.int64).tobytes()


def among(first: object, items: list[object], most: int = 10) -> list[object]:
    assert native.followers_among is not None
    return native.followers_among(first, ids_of(items), most)


def old_among(items: list[Any]) -> list[Any]:
    assert native.old_among is not None
    return native.old_among(ids_of(items))


def instances(*classes: type) -> list[Any]:
    assert native.all_instances is not None
    return native.all_instances(classes, False)


def test_it_is_used_on_this_interpreter() -> None:
    assert births._followers_among is native.followers_among
    assert births._old_among is native.old_among
    assert births._of_generations is native.of_generations
    assert births._young_with_types is native.young_with_types


def test_what_comes_behind_is_found_in_its_order() -> None:
    first, *others = [[] for _ in range(5)]
    found = among(first, [others[3], others[0], others[2]])
    assert list(map(id, found)) == [id(others[0]), id(others[2]), id(others[3])]


def test_of_so_many_places_no_more_are_looked_at() -> None:
    items = [[] for _ in range(5)]
    assert [len(among(items[0], items, most)) for most in range(5)] == [0, 1, 2, 3, 4]


def test_what_comes_before_is_found_among_the_old_ones() -> None:
    before: list[object] = []
    first: list[object] = []
    assert among(first, [before], 1) == []
    assert old_among([before]) == []
    gc.collect()
    assert old_among([before])[0] is before


@pytest.mark.parametrize("frozen", [False, True])
def test_all_are_found_however_many_came_and_went_since_they_were_gone_through(frozen: bool) -> None:
    def found() -> set[int]:
        return set(map(id, instances(Base)))

    items = [Base() for _ in range(5_000)]
    for step in (lambda: None, gc.collect, gc.freeze if frozen else gc.collect):
        step()
        assert found() == set(map(id, items))
    for gone in (slice(0, 1), slice(10, 40), slice(100, 2_000), slice(0, 3_000, 3)):
        del items[gone]
        items += [Base() for _ in range(300)]
        gc.collect(1)
        assert found() == set(map(id, items))
    gc.unfreeze()
    gc.collect()
    assert found() == {id(item) for item in old_among(items)} == set(map(id, items))
    items.clear()
    assert found() == set()


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


def test_of_what_is_frozen_alone_nothing_else_is_found() -> None:
    kept = [Derived()]
    gc.freeze()
    try:
        others = [Base()]
        frozen, some = listed.frozen_instances(Base), listed.all_instances(Base)
    finally:
        gc.unfreeze()
    assert list(map(id, frozen)) == list(map(id, kept))
    assert set(map(id, some)) == {id(kept[0]), id(others[0])}


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


def numbers(in_bytes: bytes) -> list[int]:
    found: list[int] = np.frombuffer(in_bytes, np.int64).tolist()
    return found


def of_generations(oldest: Any, classes: Any) -> tuple[list[int], list[int], list[Any]]:
    assert native.of_generations is not None
    ids, places, items = native.of_generations(oldest, classes)
    return numbers(ids), numbers(places), items


@pytest.mark.parametrize("oldest", [0, 1, 2])
def test_of_the_generations_asked_for_the_oldest_comes_first(oldest: int) -> None:
    old: list[Any] = [Base(), []]
    gc.collect()
    middle = [Derived(), [], Base()]
    gc.collect(0)
    young = [[], Derived()]
    ids, places, items = of_generations(oldest, (Base,))
    wanted = [old, middle, young][2 - oldest :]
    age = {id(item): age for age, generation in enumerate(wanted) for item in generation}
    assert [age[each] for each in ids if each in age] == sorted(age.values())
    assert [ids[place] for place in places] == list(map(id, items))
    assert {*items} == {item for generation in wanted for item in generation if isinstance(item, Base)}


def test_what_is_young_is_what_the_collector_lists_but_what_is_made_to_ask() -> None:
    classes = (Base, type("Other", (), {}))
    older = gc.get_objects(generation=1)
    newer = gc.get_objects(generation=0)
    listed = [*map(id, older), *map(id, newer)]
    ids, _, _ = of_generations(1, classes)
    listed.remove(id(classes))
    known = set(listed)
    assert [each for each in ids if each in known] == listed
    assert id(classes) not in ids


def test_no_young_object_gets_a_reference_but_what_is_watched() -> None:
    kept, other = Base(), [1]
    before = sys.getrefcount(kept), sys.getrefcount(other)
    ids, _, items = of_generations(1, (Base,))
    assert (sys.getrefcount(kept), sys.getrefcount(other)) == (before[0] + 1, before[1])
    assert items == [kept]
    assert id(other) in ids


@pytest.mark.parametrize(
    ("oldest", "classes", "error"),
    [(3, (), ValueError), (-1, (), ValueError), ("1", (), TypeError), (1, [], TypeError), (1, (1,), TypeError)],
)
def test_other_generations_and_classes_are_refused(oldest: Any, classes: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        of_generations(oldest, classes)


def test_the_types_of_what_is_young_come_behind_it() -> None:
    assert native.young_with_types is not None
    middle = [Derived()]
    gc.collect(0)
    young, first = [Base()], Base()
    ids, types = np.split(np.frombuffer(native.young_with_types(first), np.int64), 2)
    found = list(zip(ids.tolist(), types.tolist(), strict=True))
    assert found[0] == (id(first), id(Base))
    assert {(id(item), id(type(item))) for item in (*middle, middle, *young, first)} <= {*found[1:]}
    assert found.index((id(middle), id(list))) < found.index((id(young), id(list)))


@pytest.mark.parametrize("wrong", [(), [1], [Base]])
def test_numbers_are_read_behind_weak_references_alone(wrong: Any) -> None:
    assert native.numbers_in is not None
    with pytest.raises((TypeError, SystemError)):
        native.numbers_in(wrong, 16)


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
    assert among(young, [old], 1_000_000) == []
    assert among(old, [young], 1_000_000) == []
    gc.collect()
    assert [item is young for item in among(old, [young], 1_000_000)] == [True]


def test_the_dead_are_not_found() -> None:
    first: list[object] = []
    dead = [[] for _ in range(100)]
    ids = ids_of(dead)
    dead.clear()
    assert native.followers_among is not None
    assert native.followers_among(first, ids, 200) == []


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
