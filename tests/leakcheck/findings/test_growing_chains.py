"""What grows one behind the other is named by its head and its links, and what only looks like it is silent."""

from __future__ import annotations

import functools
import itertools
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest

from lowtide.leakcheck.explaining.explain import Explanation, explain
from lowtide.leakcheck.findings import growing_objects
from lowtide.leakcheck.findings.growing_objects import Stretch, growth_in_heap
from lowtide.leakcheck.findings.turn_growth import TurnGrowth
from lowtide.leakcheck.growth.containers import Course
from lowtide.probes.heap.container_lengths import read_lengths
from lowtide.reports.schema import Finding

TURNS = 40
SIZE = 2000


class Payload:
    def __init__(self) -> None:
        self.data = bytes(SIZE)


class Node:
    def __init__(self, previous: Any) -> None:
        self.previous = previous
        self.next: Any = None
        self.payload = Payload()


class Wrapper:
    __slots__ = ("inner",)

    def __init__(self, inner: Any) -> None:
        self.inner = inner


class Leaf:
    def __init__(self, key: float) -> None:
        self.key, self.data = key, bytes(SIZE)
        self.left: Any = None
        self.right: Any = None


class Held:
    """What the program holds by attributes of a class."""

    head: Any = None
    tail: Any = None
    still: Any = None
    cache: ClassVar[OrderedDict[int, Node]] = OrderedDict()


@pytest.fixture(autouse=True)
def emptied() -> Iterator[None]:
    yield
    # One by one: what is very long must not be let go of by itself.
    Held.head = Held.tail = Held.still = None
    Held.cache.clear()


def found_after(turn: Callable[[int], object]) -> list[Finding]:
    growth = TurnGrowth("steps", asked=True)
    for number in range(1, TURNS + 1):
        turn(number)
        if number % 4 == 0:
            growth.read(number, begins=number == 4)
    return list(growth.end("", "").containers)


def link(number: int) -> None:
    Held.head = Node(Held.head)


def link_both_ways(number: int) -> None:
    node = Node(Held.tail)
    if Held.tail is not None:
        Held.tail.next = node
    Held.tail, Held.head = node, Held.head or node


def link_two_kinds(number: int) -> None:
    Held.head = Node(Wrapper(Held.head))


def nest_closures(number: int) -> None:
    before, data = Held.head, bytes(SIZE)
    Held.head = lambda: (before, data)


def wrap_functions(number: int) -> None:
    before = Held.head or link

    @functools.wraps(before)
    def wrapped(number: int) -> Any:
        return before(number)

    wrapped.data = bytes(SIZE)  # type: ignore[attr-defined]
    Held.head = wrapped


def nest_generators(number: int) -> None:
    def both(before: Any, data: bytes) -> Iterator[bytes]:
        yield from before
        yield data

    Held.head = both(Held.head or (), bytes(SIZE))


def chain_errors(number: int) -> None:
    error = ValueError(bytes(SIZE))
    error.__context__ = Held.head
    Held.head = error


def nest_dicts(number: int) -> None:
    # Others come and go, too.
    for _ in range(10):
        Held.head = {"before": Held.head, "data": bytes(SIZE)}


def nest_lists(number: int) -> None:
    Held.head = [Payload(), Held.head]


def nest_tuples(number: int) -> None:
    Held.head = (bytes(SIZE), Held.head)


def chain_iterators(number: int) -> None:
    Held.head = itertools.chain(Held.head or (), [bytes(SIZE)])


def grow_a_tree(number: int) -> None:
    leaf = Leaf(random.Random(number).random())
    at = Held.head
    if at is None:
        Held.head = leaf
    while at is not None:
        side = "left" if leaf.key < at.key else "right"
        if getattr(at, side) is None:
            setattr(at, side, leaf)
            return
        at = getattr(at, side)


def test_of_a_long_chain_few_objects_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way to each of them may be as long as the chain."""
    asked = []

    def counted(targets: list[Any], **known: Any) -> list[Explanation]:
        asked.append(len(targets))
        return explain(targets, **known)

    monkeypatch.setattr(growing_objects, "explain", counted)
    (finding,) = found_after(lambda number: [link(number) for _ in range(20)])
    assert (finding.holder or "").endswith("Held.head")
    assert sum(asked) < 100


@pytest.mark.parametrize(
    ("turn", "holders", "links"),
    [
        (link, {"head"}, {".previous"}),
        (link_both_ways, {"head", "tail"}, {".previous", ".next"}),
        pytest.param(link_two_kinds, {"head"}, {".previous.inner", ".inner.previous"}, marks=pytest.mark.nightly),
        (nest_closures, {"head"}, {"cell 'before'"}),
        pytest.param(wrap_functions, {"head"}, {".__wrapped__"}, marks=pytest.mark.nightly),
        pytest.param(nest_generators, {"head"}, {"f_locals['before']"}, marks=pytest.mark.nightly),
        (chain_errors, {"head"}, {".__context__"}),
        pytest.param(nest_dicts, {"head"}, {"['before']"}, marks=pytest.mark.nightly),
        (nest_lists, {"head"}, {"[*]"}),
        (nest_tuples, {"head"}, {"[*]"}),
        (chain_iterators, {"head"}, {"inside itertools.chain inside tuple_iterator[*]"}),
        (grow_a_tree, {"head"}, {".left or .right", ".right or .left"}),
    ],
    ids=lambda each: each.__name__ if callable(each) else "",
)
def test_a_chain_is_named_by_its_head_and_its_links(
    turn: Callable[[int], None], holders: set[str], links: set[str]
) -> None:
    (finding,) = found_after(turn)
    assert finding.holder in {f"{__name__}.Held.{holder}" for holder in holders}
    assert any(f" behind each other by {link}, " in finding.message for link in links)
    assert (finding.resource, finding.trend) == ("host-memory", "growth")
    assert SIZE * finding.count < finding.bytes < 2 * SIZE * finding.count


def make_anew(number: int) -> None:
    Held.head = None
    for _ in range(30):
        link(number)


def keep_the_latest(number: int) -> None:
    link(number)
    at = Held.head
    for _ in range(8):
        at = at.previous if at is not None else None
    if at is not None:
        at.previous = None


def fill_a_cache(number: int) -> None:
    Held.cache[number] = Node(None)
    if len(Held.cache) > 10:
        Held.cache.popitem(last=False)


def raise_and_keep_the_last(number: int) -> None:
    try:
        raise ValueError(bytes(SIZE))
    except ValueError as error:
        Held.head = error


def make_and_drop_lists(number: int) -> None:
    Held.head = [[[bytes(SIZE)] for _ in range(number % 5)], None]


def nest_a_few_times(number: int) -> None:
    Held.head = None if number % 8 == 0 else [bytes(SIZE), Held.head]


def nest_until_it_is_deep(number: int) -> None:
    """As a table of prefixes does that is full."""
    if number <= TURNS * 3 // 4:
        nest_lists(number)


def chain_a_few_iterators(number: int) -> None:
    Held.head = None if number % 8 == 0 else Held.head
    chain_iterators(number)


@pytest.mark.parametrize(
    "turn",
    [make_and_drop_lists, nest_a_few_times, nest_until_it_is_deep, chain_a_few_iterators],
)
def test_one_that_has_ended_or_begins_anew_is_none(turn: Callable[[int], None]) -> None:
    assert found_after(turn) == []


@pytest.mark.parametrize(
    "turn", [make_anew, keep_the_latest, pytest.param(fill_a_cache, marks=pytest.mark.nightly), raise_and_keep_the_last]
)
def test_one_that_is_as_long_as_before_is_none(turn: Callable[[int], None]) -> None:
    for number in range(30):
        turn(number)
    assert found_after(turn) == []


def set_attributes(number: int) -> None:
    Held.head = Held.head or Node(None)
    setattr(Held.head, f"node_{number}", Node(None))


def test_objects_that_another_one_has_as_attributes_are_told_by_it() -> None:
    (finding,) = found_after(set_attributes)
    assert (finding.holder or "").startswith(f"{__name__}.Held.head")


def copy_a_list(number: int) -> None:
    Held.head = [*(Held.head or ()), Node(None)]


def copy_a_tuple(number: int) -> None:
    Held.head = (*(Held.head or ()), Node(None))


def copy_a_dict(number: int) -> None:
    Held.head = {**(Held.head or {}), number: Node(None)}


@pytest.mark.parametrize(
    "turn", [copy_a_list, *(pytest.param(each, marks=pytest.mark.nightly) for each in (copy_a_tuple, copy_a_dict))]
)
def test_a_container_that_gives_way_to_a_longer_one_is_told(turn: Callable[[int], None]) -> None:
    (finding,) = found_after(turn)
    assert finding.holder == f"{__name__}.Held.head"
    assert finding.message.startswith(f"{finding.holder} takes 1 item (2.")


def copy_the_latest(number: int) -> None:
    Held.head = [*(Held.head or ())[-20:], Node(None)]


def test_one_that_gives_way_to_one_as_long_is_not() -> None:
    for number in range(30):
        copy_the_latest(number)
    assert found_after(copy_the_latest) == []


KEPT: list[Node] = []


def test_what_others_make_of_the_same_type_is_no_link() -> None:
    """Each turn leaves a list in another attribute, all behind a deep nest that was there."""
    for number in range(3 * TURNS):
        nest_lists(number)
    found = found_after(lambda number: KEPT.append([bytes(SIZE)]))  # type: ignore[arg-type]
    KEPT.clear()
    assert [finding.holder for finding in found] == [f"{__name__}.KEPT"]


def test_a_chain_that_was_there_is_not_blamed_for_what_a_list_takes() -> None:
    for _ in range(9 * TURNS):
        Held.still = Node(Held.still)
    found = found_after(lambda number: KEPT.append(Node(None)))
    KEPT.clear()
    assert [finding.holder for finding in found] == [f"{__name__}.KEPT"]


def test_a_list_of_what_is_linked_tells_all_of_it() -> None:
    found = found_after(lambda number: KEPT.append(Node(KEPT[-1] if KEPT else None)))
    KEPT.clear()
    assert [finding.holder for finding in found] == [f"{__name__}.KEPT"]


@pytest.mark.parametrize(("linked", "count"), [(True, 1), (False, 0)])
def test_where_nobody_knows_what_was_there_earlier_it_must_be_deep(linked: bool, count: int) -> None:
    for number in range(3 * TURNS):
        link(number) if linked else grow_a_tree(number)
    cls = Node if linked else Leaf
    courses = [Course(id(cls), id(type), [0, 3 * TURNS], [0, 3 * TURNS])]
    _, there = read_lengths([id(cls)])
    assert len(growth_in_heap(courses, there, Stretch("steps"))) == count
