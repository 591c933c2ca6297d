"""Twice as many suspects, or a path twice as long, take twice the work: counted in lines that run, not in seconds."""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lowtide.leakcheck.explaining import explain as explaining
from lowtide.leakcheck.explaining.cut import Names, delete_from_dict, delete_from_sequence, delete_keys, discard
from lowtide.leakcheck.explaining.explain import Explanation, explain
from lowtide.leakcheck.judging.judge import Budget
from lowtide.probes.heap.holders import SharedWalk, trace

pytestmark = pytest.mark.nightly

FEW = 200
SLACK = 2.2
"""How many times as much work twice as much may take."""


class Thing:
    """A suspect, or an object on the way to one."""


class Node:
    """An element of a linked list, in whose slots nothing is searched for."""

    __slots__ = ("next", "value")

    def __init__(self, value: object, following: Node | None) -> None:
        self.value = value
        self.next = following


KEPT: dict[str, Any] = {}


def in_list(things: list[Thing]) -> Any:
    return list(things)


def in_tuple(things: list[Thing]) -> Any:
    return tuple(things)


def in_deque(things: list[Thing]) -> Any:
    return deque(things)


def in_dict(things: list[Thing]) -> Any:
    return dict(enumerate(things))


def in_dict_by_name(things: list[Thing]) -> Any:
    return {f"name {place}": thing for place, thing in enumerate(things)}


def in_ordered_dict(things: list[Thing]) -> Any:
    return OrderedDict(enumerate(things))


def as_keys(things: list[Thing]) -> Any:
    return dict.fromkeys(things)


def in_set(things: list[Thing]) -> Any:
    return set(things)


def as_attributes(things: list[Thing]) -> Any:
    holder = Thing()
    vars(holder).update({f"attribute_{place}": thing for place, thing in enumerate(things)})
    return holder


def in_objects(things: list[Thing]) -> Any:
    holders = [Thing() for _ in things]
    for holder, thing in zip(holders, things, strict=True):
        vars(holder)["held"] = thing
    return holders


def in_closures(things: list[Thing]) -> Any:
    def holding(thing: Thing) -> Callable[[], Thing]:
        return lambda: thing

    return list(map(holding, things))


def in_linked_list(things: list[Thing]) -> Any:
    node = None
    for thing in things:
        node = Node(thing, node)
    return node


def below_lists(things: list[Thing]) -> Any:
    """The first of them only."""
    held: Any = things[0]
    for _ in things:
        held = [held]
    return held


def below_objects(things: list[Thing]) -> Any:
    """The first of them only."""
    held = things[0]
    for _ in things:
        holder = Thing()
        vars(holder)["held"] = held
        held = holder
    return held


SHAPES = {
    shape.__name__: shape
    for shape in (
        in_list,
        in_tuple,
        in_deque,
        in_dict,
        in_dict_by_name,
        in_ordered_dict,
        as_keys,
        in_set,
        as_attributes,
        in_objects,
        in_closures,
        in_linked_list,
        below_lists,
        below_objects,
    )
}


@pytest.fixture(scope="module")
def heaps() -> Iterator[tuple[SharedWalk, dict[tuple[str, int], list[Thing]]]]:
    """Each shape with a few things, and with twice as many, all in one walk."""
    suspects = {}
    for name, shape in SHAPES.items():
        for count in (FEW, 2 * FEW):
            things = [Thing() for _ in range(count)]
            # A short one: of a long holder the middle is left out.
            KEPT[str(len(KEPT))] = shape(things)
            suspects[name, count] = things[:1] if name.startswith("below") else things
    walk = SharedWalk()
    yield walk, suspects
    walk.close()
    KEPT.clear()


def lines_of(work: Callable[[], object]) -> int:
    """How many lines are run, each turn of a loop and each call counted."""
    lines = 0

    def note(frame: object, event: str, argument: object) -> Any:
        nonlocal lines
        lines += event in ("call", "line")
        return note

    before = sys.gettrace()
    sys.settrace(note)
    try:
        work()
    finally:
        sys.settrace(before)
    return lines


class Born:
    """Knows nothing that was there before, but for the module's own dict."""

    def __contains__(self, identity: object) -> bool:
        return identity == id(KEPT)


def explained(walk: SharedWalk, things: list[Thing], ignore: set[int]) -> list[Explanation]:
    return explain(
        things, ignore=ignore, innocent=Born(), names=Names(Born(), are_free=True), budget=Budget(0), walk=walk
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_twice_as_many_suspects_take_twice_the_work(
    heaps: tuple[SharedWalk, dict[tuple[str, int], list[Thing]]], shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    walk, suspects = heaps
    monkeypatch.setattr(explaining, "MOST_STEPS", 2 * FEW)
    ignore = {id(suspects), *map(id, suspects.values())}
    # What is found out about types and files is found out once.
    explained(walk, suspects[shape, FEW], ignore)
    few, many = (lines_of(lambda: explained(walk, suspects[shape, count], ignore)) for count in (FEW, 2 * FEW))  # noqa: B023
    assert many <= SLACK * few


@pytest.mark.parametrize(
    ("delete", "container", "held"),
    [
        (delete_from_sequence, list, list),
        (delete_from_sequence, deque, list),
        (delete_from_dict, lambda things: dict(enumerate(things)), list),
        (delete_from_dict, lambda things: OrderedDict(enumerate(things)), list),
        (delete_keys, dict.fromkeys, list),
        (discard, set, list),
    ],
    ids=["list", "deque", "dict", "ordered dict", "keys", "set"],
)
def test_deleting_twice_as_many_entries_takes_twice_the_work(
    delete: Callable[[Any, Any], None], container: Callable[[Any], Any], held: Callable[[Any], Any]
) -> None:
    counts = []
    for count in (FEW, 2 * FEW):
        numbers = [object() for _ in range(count)]
        items = container(numbers)
        counts.append(lines_of(lambda: delete(items, {id(number) for number in held(numbers)})))  # noqa: B023
        assert not items
    assert counts[1] <= SLACK * counts[0]


def test_what_each_edge_of_a_long_path_retains_takes_work_by_its_length(
    heaps: tuple[SharedWalk, dict[tuple[str, int], list[Thing]]],
) -> None:
    walk, suspects = heaps
    counts = []
    for count in (FEW, 2 * FEW):
        things = suspects["below_lists", count]
        with trace(things, ignore={id(suspects), *map(id, suspects.values())}, walk=walk) as found:
            freed: list[Any] = []
            counts.append(lines_of(lambda: freed.extend(found.freed_by_cutting(0, 2))))  # noqa: B023
        assert len(freed) == count
        assert all(0 in each for each in freed)
    assert counts[1] <= SLACK * counts[0]


def test_suspects_that_others_stand_for_have_the_same_verdict_cause_and_cut(
    heaps: tuple[SharedWalk, dict[tuple[str, int], list[Thing]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    walk, suspects = heaps
    ignore = {id(suspects), *map(id, suspects.values())}
    things = suspects["in_linked_list", FEW]
    monkeypatch.setattr(explaining, "MOST_STEPS", 1 << 30)
    alone = explained(walk, things, ignore)
    monkeypatch.setattr(explaining, "MOST_STEPS", 1)
    together = explained(walk, things, ignore)
    assert not any(found.is_part for found in alone)
    assert sum(found.is_part for found in together) > FEW // 2
    for one, other in zip(alone, together, strict=True):
        assert (one.verdict, one.cause, one.suspects[0]) == (other.verdict, other.cause, other.suspects[0])
        assert one.cut is not None
        assert other.cut is not None
        assert one.cut.code == other.cut.code
        assert one.path[: len(other.path)] == other.path or not other.is_part
        assert one.holder.startswith(other.holder) or not other.is_part


def test_a_suspect_behind_something_old_is_explained_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it hangs on is not the new edge that its neighbours hang on."""
    monkeypatch.setattr(explaining, "MOST_STEPS", 1)
    old, new, suspects = Thing(), Thing(), [Thing(), Thing(), Thing()]
    parts = [[suspect] for suspect in suspects]
    vars(new)["list"] = [parts[0], parts[1], old]
    vars(old)["late"] = [parts[2]]
    KEPT["mixed"] = new
    born = set(map(id, [new, vars(new)["list"], vars(old)["late"], *parts, *suspects]))

    class Older:
        def __contains__(self, identity: object) -> bool:
            return identity not in born

    reported = explain(
        suspects, ignore={id(suspects), id(parts)}, innocent=Older(), names=Names(Older()), budget=Budget(0)
    )
    del KEPT["mixed"]
    assert [found.is_part for found in reported] == [False, True, False]
    assert reported[2].suspects[0] != reported[0].suspects[0]
