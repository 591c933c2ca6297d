"""What grows one behind the other is named by its head and its links, and what only looks like it is silent."""

from __future__ import annotations

import functools
import gc
import itertools
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

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
    payload_type = Payload

    def __init__(self, previous: Any) -> None:
        self.previous = previous
        self.next: Any = None
        self.payload = self.payload_type()


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
    """What the turns of one kind keep, with types of their own: how many there are of a type is what is followed."""

    def __init__(self) -> None:
        self.head: Any = None
        self.tail: Any = None
        self.kept: list[Any] = []
        self.cache: OrderedDict[int, Node] = OrderedDict()
        self.payload = type("Payload", (Payload,), {})
        self.node = type("Node", (Node,), {"payload_type": self.payload})


class Program:
    """Has of each kind of turns what they keep, as the attribute of their name."""


PROGRAM = Program()
Turn: TypeAlias = Callable[[Held, int], object]


@pytest.fixture(autouse=True)
def emptied() -> Iterator[None]:
    yield
    vars(PROGRAM).clear()


def held_by(turn: Turn) -> Held:
    vars(PROGRAM).setdefault(turn.__name__, Held())
    held: Held = getattr(PROGRAM, turn.__name__)
    return held


def name_of(turn: Turn, attribute: str = "head") -> str:
    return f"{__name__}.PROGRAM.{turn.__name__}.{attribute}"


def found_after(*turns: Turn) -> list[Finding]:
    """Return what is found of turns of several kinds, side by side."""
    growth = TurnGrowth("steps", asked=True)
    for number in range(1, TURNS + 1):
        for turn in turns:
            turn(held_by(turn), number)
        if number % 4 == 0:
            growth.read(number, begins=number == 4)
    return list(growth.end("", "").containers)


def link(held: Held, number: int) -> None:
    held.head = held.node(held.head)


def link_both_ways(held: Held, number: int) -> None:
    node = held.node(held.tail)
    if held.tail is not None:
        held.tail.next = node
    held.tail, held.head = node, held.head or node


def link_two_kinds(held: Held, number: int) -> None:
    held.head = held.node(Wrapper(held.head))


def nest_closures(held: Held, number: int) -> None:
    before, data = held.head, bytes(SIZE)
    held.head = lambda: (before, data)


def wrap_functions(held: Held, number: int) -> None:
    before = held.head or link

    @functools.wraps(before)
    def wrapped(number: int) -> Any:
        return before(number)

    wrapped.data = bytes(SIZE)  # type: ignore[attr-defined]
    held.head = wrapped


def both(before: Any, data: bytes) -> Iterator[bytes]:
    yield from before
    yield data


def nest_generators(held: Held, number: int) -> None:
    held.head = both(held.head or (), bytes(SIZE))


def chain_errors(held: Held, number: int) -> None:
    error = ValueError(bytes(SIZE))
    error.__context__ = held.head
    held.head = error


def nest_dicts(held: Held, number: int) -> None:
    # Others come and go, too.
    for _ in range(10):
        held.head = {"before": held.head, "data": bytes(SIZE)}


def nest_lists(held: Held, number: int) -> None:
    held.head = [held.payload(), held.head]


def nest_tuples(held: Held, number: int) -> None:
    held.head = (bytes(SIZE), held.head)


def chain_iterators(held: Held, number: int) -> None:
    held.head = itertools.chain(held.head or (), [bytes(SIZE)])


def grow_a_tree(held: Held, number: int) -> None:
    leaf = Leaf(random.Random(number).random())
    at = held.head
    if at is None:
        held.head = leaf
    while at is not None:
        side = "left" if leaf.key < at.key else "right"
        if getattr(at, side) is None:
            setattr(at, side, leaf)
            return
        at = getattr(at, side)


def set_attributes(held: Held, number: int) -> None:
    held.head = held.head or held.node(None)
    setattr(held.head, f"node_{number}", held.node(None))


def copy_a_list(held: Held, number: int) -> None:
    held.head = [*(held.head or ()), held.node(None)]


def copy_a_tuple(held: Held, number: int) -> None:
    held.head = (*(held.head or ()), held.node(None))


def copy_a_dict(held: Held, number: int) -> None:
    held.head = {**(held.head or {}), number: held.node(None)}


def take_beside_a_chain(held: Held, number: int) -> None:
    """Have a list take what a long chain, which was there, is made of."""
    for _ in range(9 * TURNS if number == 1 else 0):
        link(held, number)
    held.kept.append(held.node(None))


def take_what_is_linked(held: Held, number: int) -> None:
    held.kept.append(held.node(held.kept[-1] if held.kept else None))


@pytest.mark.nightly
def test_wrapped_functions_are_a_chain() -> None:
    (finding,) = found_after(wrap_functions)
    assert finding.holder == name_of(wrap_functions)
    assert " behind each other by .__wrapped__, " in finding.message


def test_of_a_long_chain_few_objects_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way to each of them may be as long as the chain."""
    asked = []

    def counted(targets: list[Any], **known: Any) -> list[Explanation]:
        asked.append(len(targets))
        return explain(targets, **known)

    def link_many(held: Held, number: int) -> None:
        for _ in range(20):
            link(held, number)

    monkeypatch.setattr(growing_objects, "explain", counted)
    (finding,) = found_after(link_many)
    assert finding.holder == name_of(link_many)
    assert sum(asked) < 100


Told: TypeAlias = dict[Turn, tuple[set[str], set[str]]]
"""Of each kind of turns the attributes of which one is told, and what of which is said of it."""


def behind_by(*links: str) -> set[str]:
    return {f" behind each other by {link}, " for link in links}


CHAINS: Told = {
    link: ({"head"}, behind_by(".previous")),
    link_both_ways: ({"head", "tail"}, behind_by(".previous", ".next")),
    link_two_kinds: ({"head"}, behind_by(".previous.inner", ".inner.previous")),
    nest_closures: ({"head"}, behind_by("cell 'before'")),
    nest_generators: ({"head"}, behind_by("f_locals['before']")),
    chain_errors: ({"head"}, behind_by(".__context__")),
    nest_dicts: ({"head"}, behind_by("['before']")),
    chain_iterators: ({"head"}, behind_by("inside itertools.chain inside tuple_iterator[*]")),
    grow_a_tree: ({"head"}, behind_by(".left or .right", ".right or .left")),
    # What is told as a container is: objects that another one has as attributes,
    set_attributes: ({"head", "head.__dict__"}, {" takes "}),
    # a container that gives way to a longer one,
    copy_a_list: ({"head"}, {" takes 1 item (2."}),
    copy_a_tuple: ({"head"}, {" takes 1 item (2."}),
    copy_a_dict: ({"head"}, {" takes 1 item (2."}),
    # and a list of what is linked, which tells all of it.
    take_beside_a_chain: ({"kept"}, {" takes 1 item (2."}),
    take_what_is_linked: ({"kept"}, {" takes 1 item (2."}),
}

# Of what everybody makes all that there is is followed, and one chain of a type is told.
LISTS: Told = {nest_lists: ({"head"}, behind_by("[*]"))}
TUPLES: Told = {nest_tuples: ({"head"}, behind_by("[*]"))}


@pytest.fixture
def no_collections() -> Iterator[None]:
    """Have nothing go meanwhile, or be tracked no more, that others have left: all lists and tuples are counted."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("turns", [CHAINS, LISTS, TUPLES], ids=["chains", "lists", "tuples"])
def test_a_chain_is_named_by_its_head_and_its_links_and_what_a_container_takes_by_that(turns: Told) -> None:
    found = {finding.holder: finding for finding in found_after(*turns)}
    told = {turn: [found.pop(name_of(turn, each), None) for each in names] for turn, (names, _) in turns.items()}
    assert {turn.__name__: told[turn] for turn in turns if told[turn].count(None) != len(told[turn]) - 1} | found == {}
    for turn, (_, said) in turns.items():
        (finding,) = (each for each in told[turn] if each is not None)
        assert any(each in finding.message for each in said), finding.message
        assert (finding.resource, finding.trend) == ("host-memory", "growth")
        assert SIZE * finding.count < finding.bytes < 2 * SIZE * finding.count, finding.message


def make_anew(held: Held, number: int) -> None:
    held.head = None
    for _ in range(30):
        link(held, number)


def keep_the_latest(held: Held, number: int) -> None:
    link(held, number)
    at = held.head
    for _ in range(8):
        at = at.previous if at is not None else None
    if at is not None:
        at.previous = None


def fill_a_cache(held: Held, number: int) -> None:
    held.cache[number] = held.node(None)
    if len(held.cache) > 10:
        held.cache.popitem(last=False)


def raise_and_keep_the_last(held: Held, number: int) -> None:
    try:
        raise ValueError(bytes(SIZE))
    except ValueError as error:
        held.head = error


def copy_the_latest(held: Held, number: int) -> None:
    held.head = [*(held.head or ())[-20:], held.node(None)]


AS_LONG = (make_anew, keep_the_latest, fill_a_cache, raise_and_keep_the_last, copy_the_latest)
"""What is as long as before, once it has been filled."""


# Of lists, tuples and dicts all that there are is followed: a type of its own for each kind of turns.
def make_and_drop_tuples(held: Held, number: int) -> None:
    held.head = tuple((held.payload(),) for _ in range(number % 5))


def nest_dicts_a_few_times(held: Held, number: int) -> None:
    held.head = None if number % 8 == 0 else {"before": held.head, "data": bytes(SIZE)}


def nest_until_it_is_deep(held: Held, number: int) -> None:
    """As a table of prefixes does that is full."""
    if number <= TURNS * 3 // 4:
        nest_lists(held, number)


def chain_a_few_iterators(held: Held, number: int) -> None:
    held.head = None if number % 8 == 0 else held.head
    chain_iterators(held, number)


ENDING = (make_and_drop_tuples, nest_dicts_a_few_times, nest_until_it_is_deep, chain_a_few_iterators)
"""What has ended, or begins anew."""


def test_one_that_is_as_long_as_before_or_has_ended_or_begins_anew_is_none() -> None:
    for number in range(30):
        for turn in AS_LONG:
            turn(held_by(turn), number)
    assert [finding.holder for finding in found_after(*AS_LONG, *ENDING)] == []


def test_what_others_make_of_the_same_type_is_no_link() -> None:
    """Each turn leaves a list in another attribute, all behind a deep nest that was there."""

    def take_lists(held: Held, number: int) -> None:
        held.kept.append([bytes(SIZE)])

    for number in range(3 * TURNS):
        nest_lists(held_by(take_lists), number)
    assert [finding.holder for finding in found_after(take_lists)] == [name_of(take_lists, "kept")]


@pytest.mark.parametrize(("linked", "count"), [(True, 1), (False, 0)])
def test_where_nobody_knows_what_was_there_earlier_it_must_be_deep(linked: bool, count: int) -> None:
    turn: Turn = link if linked else grow_a_tree
    for number in range(3 * TURNS):
        turn(held_by(turn), number)
    cls = held_by(turn).node if linked else Leaf
    courses = [Course(id(cls), id(type), [0, 3 * TURNS], [0, 3 * TURNS])]
    _, there = read_lengths([id(cls)])
    assert len(growth_in_heap(courses, there, Stretch("steps"))) == count
