"""Which growing containers are findings: those that take what nothing else has had all the time."""

from __future__ import annotations

import abc
import asyncio
import atexit
import codecs
import collections
import concurrent.futures
import ctypes
import functools
import gc
import io
import linecache
import logging
import os
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextvars import ContextVar, copy_context
from typing import Any, TypeAlias, TypeVar
from unittest.mock import MagicMock

import httpx
import msgspec
import pytest

from lowtide.leakcheck.findings import growing_objects, turn_growth
from lowtide.leakcheck.findings.growing_objects import Stretch, growth_in_heap, ids_of, is_worth_a_look
from lowtide.leakcheck.findings.turn_growth import SECOND, TurnGrowth, is_read
from lowtide.leakcheck.growth.containers import Course
from lowtide.probes.heap.container_lengths import ContainerLengths, read_lengths
from lowtide.reports.schema import Finding

TURNS = 14

Item = TypeVar("Item")


class Block:
    __slots__ = ("number", "payload")

    def __init__(self, number: int) -> None:
        self.number = number
        self.payload = bytes(2000)

    def end(self) -> None:
        """Be called by whoever has it, once something else is over."""


class Plain:
    """Smaller by itself than its number in a dict."""

    def __init__(self) -> None:
        self.payload = bytes(2000)


class Held:
    """What the turns of one kind keep, with a type of their own."""

    def __init__(self) -> None:
        self.block = type("Block", (Block,), {"__slots__": ()})
        self.pool: list[Any] = []
        self.by_number: dict[int, Any] = {}
        self.table: dict[int, Any] = {}
        self.seen: list[Any] = []
        self.latest: list[Any] = []
        self.recent: collections.OrderedDict[int, Any] = collections.OrderedDict()
        self.noted: Any = None


class Program:
    """Has of each kind of turns what they keep, as the attribute of their name."""


PROGRAM = Program()
SEEN: list[Block] = []
Turn: TypeAlias = Callable[[Held, int], object]


@pytest.fixture(autouse=True)
def emptied() -> Iterator[None]:
    yield
    gc.unfreeze()
    vars(PROGRAM).clear()
    SEEN.clear()


def held_by(turn: Turn) -> Held:
    vars(PROGRAM).setdefault(turn.__name__, Held())
    held: Held = getattr(PROGRAM, turn.__name__)
    return held


def name_of(turn: Turn, attribute: str) -> str:
    return f"{__name__}.PROGRAM.{turn.__name__}.{attribute}"


def found_after(*turns: Turn, by_frames: bool = False, fixtures: Collection[object] = ()) -> list[Finding]:
    """Return what is found of turns of several kinds, side by side."""
    roots = [("fixture 'step'", fixture) for fixture in fixtures]
    growth = TurnGrowth("steps", lambda: roots, asked=True, by_frames=by_frames)
    for number in range(1, TURNS + 1):
        for turn in turns:
            turn(held_by(turn), number)
        if is_read(number, TURNS, is_last=number == TURNS):
            growth.read(number, begins=number == SECOND)
    return list(growth.end("", "").containers)


@pytest.mark.parametrize(("kept", "may_grow"), [(Block, True), (lambda number: number % 100, False)])
def test_whether_anything_may_grow_is_looked_at_where_somebody_asks_and_there_is_a_candidate(
    kept: Callable[[int], Block], may_grow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    walks = list[int]()

    def counted(wanted: Collection[int]) -> tuple[ContainerLengths, dict[int, object]]:
        walks.append(len(wanted))
        return read_lengths(wanted)

    monkeypatch.setattr(turn_growth, "read_lengths", counted)
    growth = TurnGrowth("steps", asked=True)
    undecided = []
    for number in range(1, 5):
        SEEN.append(kept(number))
        growth.read(number, begins=number == 1)
        undecided.append(growth.undecided("") > 0)
    assert undecided == [False, False, may_grow, may_grow]
    of_readings, of_questions = 4, 2
    assert len(walks) == of_readings + of_questions


def test_a_list_that_c_alone_holds_in_a_frozen_heap_is_passed_over() -> None:
    held: list[Block] = []
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
    address = id(held)
    del held

    def serve(_: Held, number: int) -> None:
        ctypes.cast(address, ctypes.py_object).value.append(Block(number))
        SEEN.append(Block(number))
        if number == 1:
            gc.freeze()

    try:
        assert [finding.holder for finding in found_after(serve)] == [f"{__name__}.SEEN"]
    finally:
        ctypes.pythonapi.Py_DecRef(ctypes.cast(address, ctypes.py_object))


def test_who_asks_what_grows_holds_none_of_it() -> None:
    """Else it would be told by that what the checker has for itself, as its agent in another process."""
    notes = type("Notes", (), {"__module__": "lowtide.probes.heap"})()
    notes.born = [Block(number) for number in range(TURNS)]
    there = {id(notes.born): notes.born}
    courses = [Course(id(notes.born), id(list), [0, TURNS], [0, TURNS])]
    assert growth_in_heap(courses, there, Stretch("steps", by_frames=True)) == {}


class FixtureDef:
    """As pytest's, whose list of what ends a fixture takes a partial of a method with each test that uses it."""

    __module__ = "_pytest.fixtures"

    def finish(self, request: object) -> None:
        """Take the fixture down."""


@pytest.mark.parametrize(("ends", "is_looked_at"), [(Block.end, True), (FixtureDef().finish, False)])
def test_what_calls_a_test_runner_is_the_runners_own_and_costs_no_walk(
    ends: Callable[..., None], is_looked_at: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = ids_of([functools.partial])
    traced = list[int]()
    trace = growing_objects.trace
    monkeypatch.setattr(growing_objects, "trace", lambda items, **how: traced.append(len(items)) or trace(items, **how))
    kept = [functools.partial(ends, request=Block(number)) for number in range(TURNS)]
    course = Course(id(kept), id(list), [0, TURNS // 2, TURNS], [0, TURNS // 2, TURNS])
    assert is_worth_a_look(course, kept, tensors=False) == is_looked_at
    of_type = msgspec.structs.replace(course, identity=id(functools.partial), kind=id(type))
    growth_in_heap([of_type], {id(functools.partial): functools.partial}, Stretch("tests", earlier=earlier))
    assert bool(traced) == is_looked_at


def test_variables_of_a_context_that_each_turn_makes_are_told_and_those_it_sets_anew_are_not() -> None:
    """A context keeps each variable that was set in it, as the documentation of `contextvars` says."""
    kept: ContextVar[Block] = ContextVar("kept")

    def make(held: Held, number: int) -> None:
        ContextVar(f"request {number}").set(Block(number))
        kept.set(Block(number))

    (finding,) = copy_context().run(found_after, make)
    (other,) = copy_context().run(found_after, lambda _, number: ContextVar(f"of {number} others").set(Block(number)))
    assert finding.holder == "contextvars.copy_context()"
    assert finding.message.startswith(f"{finding.holder} takes 1 item (2.")
    assert finding.fingerprint == other.fingerprint


class Window:
    """Has the last values of a thousand turns."""

    def __init__(self) -> None:
        self.values: collections.deque[Any] = collections.deque()

    def note(self, value: Any) -> None:
        self.values.append(value)
        while len(self.values) > 1000:
            self.values.popleft()


class Journal(Window):
    """Asks how much it has, and takes nothing out."""

    def __init__(self) -> None:
        self.entries: list[Any] = []

    def note(self, value: Any) -> None:
        self.entries.append(value)
        if len(self.entries) > 1000:
            self.is_long = True


class AbstractWindow(Window, abc.ABC):
    """A window whose class has a metaclass of its own."""


# What is told.


def make_beside_a_pool(held: Held, number: int) -> None:
    """Keep what is made, however large the pool of what was there."""
    if number == 1:
        held.pool.extend(map(held.block, range(200)))
    held.seen.extend([held.block(number), held.block(number), held.pool[number]])


def make_odd_ones(held: Held, number: int) -> None:
    """Keep what has something else under the name of its size."""
    if number == 1:
        held.block = type("Odd", (Block,), {"__sizeof__": MagicMock().__sizeof__})
    held.seen.append(held.block(number))


def make_beside_rings(held: Held, number: int) -> None:
    """Keep all of what rings have the latest of."""
    if number == 1:
        held.latest.extend([None] * 8)
        held.recent.update({earlier: held.block(earlier) for earlier in range(-8, 0)})
    for place in range(3):
        block = held.block(number)
        held.seen.append(block)
        held.latest[(3 * number + place) % 8] = block
        held.recent[3 * number + place] = block
        held.recent.popitem(last=False)


def keep_twice(held: Held, number: int) -> None:
    """Keep it in two that grow, and in one that is made anew."""
    block = held.block(number)
    held.table[number] = block
    held.seen.append(block)
    held.latest[:] = [list(held.seen)]


def keep_by_known_numbers(held: Held, number: int) -> None:
    """Keep it by numbers that another table has, too: they excuse nobody."""
    if number == 1:
        held.latest.extend(range(100))
    held.table[number] = Plain()


def keep_in_a_session(held: Held, number: int) -> None:
    """Keep a session in a list, and something in the first session."""
    held.seen.append([held.block(number)])
    held.seen[0].append(held.block(number))


def fill_a_window_of_much(held: Held, number: int) -> None:
    held.noted = held.noted or Window()
    held.noted.note(bytes(64_000))


def keep_a_journal(held: Held, number: int) -> None:
    held.noted = held.noted or Journal()
    held.noted.note(bytes(2000))


def keep_code(held: Held, number: int) -> None:
    held.table[number] = compile(f"x = {'a' * 2000!r} + '{number}'", f"<{number}>", "exec")


def put_names_together(held: Held, number: int) -> None:
    if number == 1:
        held.noted = Plain()
        for earlier in range(40):
            setattr(held.noted, f"old_{earlier}", None)
    setattr(held.noted, f"result_{number}", bytes(2000 + number))


class HasFewNames:
    """As many as an instance has room for."""

    def __init__(self) -> None:
        self.first: list[int] = []


def put_few_names_together(held: Held, number: int) -> None:
    held.noted = held.noted or HasFewNames()
    vars(held.noted)
    setattr(held.noted, f"result_{number}", bytes(2000 + number))


def keep_what_keeps_its_key(held: Held, number: int) -> None:
    held.noted = weakref.WeakKeyDictionary[Any, Any]() if held.noted is None else held.noted
    key = Plain()
    held.noted[key] = (key, bytes(2000 + number))


class Reference(weakref.ref[Any]):
    """One that has something itself, as that of a registry."""

    __slots__ = ("payload",)


def keep_weak_references_that_have_much(held: Held, number: int) -> None:
    reference = Reference(Held)
    reference.payload = bytes(2000 + number)
    held.seen.append(reference)


def set_timers(held: Held, number: int) -> None:
    held.noted = held.noted or asyncio.new_event_loop()
    held.noted.call_later(3600 + number, serve_later, bytes(4000))


def serve_later(block: bytes) -> int:
    return len(block)


def keep_results(held: Held, number: int) -> None:
    held.table[number] = concurrent.futures.Future()
    held.table[number].set_result(Block(number))


def keep_results_of_what_is_installed(held: Held, number: int) -> None:
    held.table[number] = concurrent.futures.Future()
    held.table[number].set_result(httpx.Headers({"text": "x" * (2000 + number)}))


def refer_with_calls_of_their_own(held: Held, number: int) -> None:
    held.seen.append(weakref.ref(held, functools.partial(forget, Block(number))))


def forget(block: object, reference: object = None) -> None:
    """Be called when what is referred to is gone."""


GROWING: dict[Turn, dict[str, str]] = {
    make_beside_a_pool: {"seen": "42 of"},
    make_odd_ones: {"seen": f"14 of {__name__}.Odd"},
    make_beside_rings: {"seen": "42 of"},
    keep_twice: {"seen": "14 of", "table": "14 of"},
    keep_by_known_numbers: {"table": "14 of"},
    keep_in_a_session: {"seen": "14 of list", "seen[0]": "15 of"},
    fill_a_window_of_much: {"noted.values": "14 of bytes"},
    keep_a_journal: {"noted.entries": "14 of bytes"},
    keep_code: {"table": "14 of code"},
    put_names_together: {"noted.__dict__": "of bytes"},
    put_few_names_together: {"noted.__dict__": "of bytes"},
    keep_what_keeps_its_key: {"noted.data": "14 of tuple"},
    keep_weak_references_that_have_much: {"seen": f"14 of {__name__}.Reference"},
    set_timers: {"noted._scheduled": f", for {__name__}.serve_later"},
    keep_results: {"table": f"14 of concurrent.futures._base.Future, for {Block.__module__}.Block"},
    keep_results_of_what_is_installed: {"table": "14 of concurrent.futures._base.Future, for httpx.Headers"},
    refer_with_calls_of_their_own: {"seen": f"14 of weakref.ReferenceType, for {__name__}.forget"},
}
"""Of each kind of turns what is said of which attributes of theirs."""


class Server:
    """Something that lives as long as all requests."""


def said_of(found: Collection[Finding], told: Mapping[str, str]) -> dict[str, str]:
    """Return what is said of each holder: that which should be, where it is and comes to enough bytes."""
    said = {finding.holder or "": finding.message for finding in found}
    assert len(said) == len(found)
    are_enough = {finding.holder for finding in found if finding.bytes > TURNS * 1000}
    is_right = {holder for holder in told.keys() & are_enough if told[holder] in said.get(holder or "", "")}
    return said | {holder: told[holder] for holder in is_right}


def test_what_takes_something_in_each_turn_is_told() -> None:
    server = Server()
    kept: list[Block] = []
    finalizers: list[weakref.finalize[[], Server]] = []
    added: list[Callable[[str], None]] = []

    def step(_: Held, number: int) -> None:
        """Add to what the module has, which is not that of a fixture that returns a function of it."""
        SEEN.append(Block(number))

    def step_within(_: Held, number: int) -> None:
        """Add to what such a function closes over."""
        kept.append(Block(number))

    def finalize(_: Held, number: int) -> None:
        finalizers.append(weakref.finalize(server, Block(number).end))

    def register(_: Held, number: int) -> None:
        block = Block(number)
        added.append(lambda name: block.end())
        codecs.register(added[-1])

    found = found_after(*GROWING, step, step_within, finalize, register, fixtures=[step, lambda: kept])
    for search in added:
        codecs.unregister(search)
    for finalizer in finalizers:
        finalizer.detach()
    held_by(set_timers).noted.close()
    told = {name_of(turn, attribute): what for turn, each in GROWING.items() for attribute, what in each.items()}
    told[f"{__name__}.SEEN"] = told["fixture 'step', closure cell 'kept'"] = f"14 of {__name__}.Block"
    told["weakref.finalize._registry"] = f", for {Block.end.__module__}.Block.end"
    told["codecs.register()"] = " of function"
    assert said_of(found, told) == told
    (odd,) = (finding for finding in found if finding.holder == name_of(make_odd_ones, "seen"))
    assert odd.count == TURNS - SECOND


def keep_two(held: Held, number: int) -> None:
    held.seen.extend(bytes(1000 + each) for each in range(2))


def keep_a_large_one(held: Held, number: int) -> None:
    held.seen.append(bytes(9000 + number))


def test_what_takes_most_bytes_comes_first() -> None:
    found = found_after(keep_two, keep_a_large_one)
    assert [finding.holder for finding in found] == [name_of(each, "seen") for each in (keep_a_large_one, keep_two)]


class Handling(logging.NullHandler):
    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block


@pytest.fixture
def loggers() -> Iterator[None]:
    known = dict(logging.Logger.manager.loggerDict)
    yield
    logging.Logger.manager.loggerDict.clear()
    logging.Logger.manager.loggerDict.update(known)


def begin_loggers(_: Held, number: int) -> None:
    """Begin one, of which its parent has an index."""
    vars(logging.getLogger(f"requests.{number}"))["block"] = Block(number)


def add_filters(_: Held, number: int) -> None:
    logging.getLogger("engine.filtered").addFilter(Block(number).end)


def add_handlers(_: Held, number: int) -> None:
    logging.getLogger("engine.handled").addHandler(Handling(Block(number)))


def shut_down(data: object) -> None:
    """Be called at exit, and do nothing."""


@pytest.mark.usefixtures("loggers")
def test_what_a_variable_or_pythons_library_or_c_has_is_told_where_no_test_runner_may_have_it() -> None:
    # The collector does not track it.
    replies: dict[int, str] = {}
    log = io.StringIO()

    def reply(_: Held, number: int) -> None:
        replies[number] = "x" * (2000 + number)

    def write(_: Held, number: int) -> None:
        log.write("x" * 20_000 + str(number))

    found = found_after(reply, write, begin_loggers, add_filters, add_handlers, by_frames=True)
    (replied,) = (each.holder or "" for each in found if "'replies'" in (each.holder or ""))
    told = {
        replied: "14 of str",
        "logging.Logger.manager.loggerDict": " of logging.Logger",
        "logging.getLogger('engine.filtered').filters": "14 of method",
        "logging.getLogger('engine.handled').handlers": f"14 of {__name__}.Handling",
    }
    if sys.version_info < (3, 12):
        # Later ones write it elsewhere.
        told["a list of native code"] = " takes 1 item (19."
    assert said_of(found, told) == told


@pytest.mark.parametrize(
    ("register", "name"),
    [
        (lambda number: atexit.register(shut_down, bytes(2000)), "function {}.shut_down"),
        (lambda number: atexit.register(Block(number).end), "method {}.Block.end"),
        (lambda number: atexit.register(shut_down, data=Block(number)), "function {}.shut_down"),
        (lambda number: atexit.register(bytes(2000).find, b"1"), "function bytes.find"),
    ],
    ids=["argument", "method", "keyword", "of C"],
)
def test_what_is_to_be_called_at_exit_is_told_by_its_function(register: Callable[[int], Any], name: str) -> None:
    registered: list[Any] = []
    found = found_after(lambda _, number: registered.append(register(number)), by_frames=True)
    (finding,) = [each for each in found if (each.holder or "").startswith("atexit")]
    for function in registered:
        atexit.unregister(function)
    assert finding.holder == f"atexit.register({name.format(__name__)})"
    assert finding.message.startswith(f"{finding.holder} takes 1 item (2.")
    assert finding.count == TURNS - SECOND


def test_the_bytes_are_those_of_its_whole_course() -> None:
    """Whether late ones are large, early ones are, or every tenth is."""
    # What earlier tests have left in cycles would be told when it goes.
    gc.collect()
    turns = 101
    sizes: dict[str, tuple[int, Callable[[int], int]]] = {
        "late": (1, lambda number: 1 << 20 if number > turns - 10 else 1000),
        "early": (1, lambda number: 1000 if number > 10 else 1 << 20),
        "every tenth": (100, lambda number: 20_000 if number % 10 == 0 else 500),
    }
    kept: dict[str, list[bytes]] = {name: [] for name in sizes}
    growth = TurnGrowth("steps", lambda: [(f"fixture '{name}'", each) for name, each in kept.items()], asked=True)
    for number in range(1, turns + 1):
        for name, (each, size) in sizes.items():
            kept[name].extend(bytes(size(number * each + place)) for place in range(each))
        if number % 10 == 1:
            growth.read(number)
    of_all = {f"fixture '{name}'": sum(map(len, kept[name][each:])) for name, (each, _) in sizes.items()}
    found = {finding.holder or "": finding.bytes for finding in growth.end("", "").containers}
    assert {holder: 0.85 * of_all[holder] < size < 1.15 * of_all[holder] for holder, size in found.items()} == (
        dict.fromkeys(of_all, True)
    )


# What is not.


def use_a_pool(held: Held, number: int) -> None:
    """Keep in a table what a pool has anyway."""
    if number == 1:
        held.pool.extend(map(held.block, range(TURNS * 3 + 3)))
    for place in range(3 * number, 3 * number + 3):
        held.table[place] = held.pool[place]


def use_a_dict(held: Held, number: int) -> None:
    if number == 1:
        held.by_number.update({place: held.block(place) for place in range(TURNS * 3 + 3)})
    held.seen.extend(held.by_number[place] for place in range(3 * number, 3 * number + 3))


def finalize_what_goes(_: Held, number: int) -> None:
    block = Plain()
    weakref.finalize(block, Block(number).end)


def show_lines(_: Held, number: int) -> None:
    name = f"<request {number}>"
    linecache.cache[name] = (3000, None, ["x" * (3000 + number)], name)


def get_loggers(_: Held, number: int) -> None:
    logging.getLogger(f"request-{number % 3}")


def fill_a_window(held: Held, number: int) -> None:
    held.noted = held.noted or Window()
    held.noted.note(bytes(2000))


def fill_an_abstract_window(held: Held, number: int) -> None:
    held.noted = held.noted or AbstractWindow()
    held.noted.note(bytes(2000))


def fill_a_window_of_more(held: Held, number: int) -> None:
    held.noted = held.noted or Window()
    held.noted.note(bytes(20_000))


def tell_of_garbage(held: Held, number: int) -> None:
    held.noted = weakref.WeakKeyDictionary[Any, Any]() if held.noted is None else held.noted
    key: Any = Plain()
    key.itself = key
    held.noted[key] = bytes(2000 + number)


def keep_the_last_of_garbage(held: Held, number: int) -> None:
    item: Any = Plain()
    item.itself = item
    held.latest = [item]


def refer_weakly(held: Held, number: int) -> None:
    held.seen += (weakref.ref(Held, lambda _: None) for _ in range(30))


def refer_with_one_call(held: Held, number: int) -> None:
    held.seen.extend(weakref.ref(held, forget) for _ in range(40))


def write_to_what_c_has(held: Held, number: int) -> None:
    """Have C hold a list, as a test runner may."""
    held.noted = held.noted or io.StringIO()
    held.noted.write("x" * 20_000 + str(number))


STILL = (
    use_a_pool,
    use_a_dict,
    finalize_what_goes,
    show_lines,
    get_loggers,
    fill_a_window,
    fill_an_abstract_window,
    fill_a_window_of_more,
    tell_of_garbage,
    keep_the_last_of_garbage,
    refer_weakly,
    refer_with_one_call,
    write_to_what_c_has,
)


@pytest.mark.usefixtures("loggers")
def test_what_was_there_or_goes_or_is_little_once_it_is_full_is_none() -> None:
    gc.collect()
    gc.disable()
    try:
        assert [finding.holder for finding in found_after(*STILL)] == []
    finally:
        gc.enable()
        linecache.clearcache()


def test_a_table_of_what_a_pool_has_anyway_is_none_in_a_frozen_heap_either() -> None:
    def use(held: Held, number: int) -> None:
        use_a_pool(held, number)
        if number == 1:
            gc.freeze()

    assert found_after(use) == []


def end_what_has_ended(held: Held, number: int) -> None:
    """Register what is called no more: it leaves its place in the table behind what was there before."""
    for earlier in range(TURNS if number == 1 else 0):
        atexit.register(shut_down, bytes(2000 + earlier))
    atexit.unregister(atexit.register(held.block(number).end))


def look_up(_: Held, number: int) -> None:
    """Have something called at exit that keeps nothing."""
    atexit.register(codecs.lookup, "utf-8")


def test_the_latest_of_a_variable_and_what_is_called_at_exit_alone_or_no_more_are_none() -> None:
    replies: dict[int, str] = {}

    def reply(_: Held, number: int) -> None:
        replies[number % 4] = "x" * (2000 + number)

    try:
        assert [finding.holder for finding in found_after(reply, end_what_has_ended, look_up, by_frames=True)] == []
    finally:
        atexit.unregister(codecs.lookup)
        atexit.unregister(shut_down)


class Session:
    """Is on the stack of what runs within it, in no variable."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal

    async def __aenter__(self) -> None:
        """Begin."""

    async def __aexit__(self, *error: object) -> None:
        """End."""


RUNNING: list[Any] = []


def test_what_hangs_on_the_stack_of_a_coroutine_is_named_by_its_own_attribute() -> None:
    async def serve(session: list[Session]) -> None:
        async with session.pop():
            await asyncio.Event().wait()

    async def run() -> list[Finding]:
        journal = [Journal()]
        note = journal[0].entries.append
        RUNNING[:] = [asyncio.create_task(serve([Session(journal.pop())]))]
        await asyncio.sleep(0)
        found = found_after(lambda *_: note(bytes(2000)))
        RUNNING.pop().cancel()
        return found

    (finding,) = asyncio.run(run())
    assert finding.message.startswith(f"Journal.entries of {__name__}.RUNNING[0].get_coro() (inside coroutine) takes ")


class Numbers:
    """Serves connections that a loop accepts, by one task that lives as long as it does."""

    def __init__(self) -> None:
        self.calls: asyncio.Queue[None] = asyncio.Queue()
        self.serving = asyncio.create_task(self.serve(self.calls))

    @staticmethod
    async def serve(calls: asyncio.Queue[None]) -> None:
        """Answer what comes, and keep some of each."""
        answers = list[bytes]()
        while True:
            await calls.get()
            answers.append(os.urandom(2000))
            calls.task_done()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Be called for each connection."""


def there(item: weakref.ref[Item]) -> Item:
    """Return what a weak reference refers to, which no variable has."""
    alive = item()
    assert alive is not None
    return alive


def test_what_the_task_of_a_server_has_is_told_by_that_and_not_by_the_loop_s_tables_alone() -> None:
    async def run() -> list[Finding]:
        server = Numbers()
        async with await asyncio.start_server(server.accept, "127.0.0.1", 0):
            calls, serving = weakref.ref(server.calls), weakref.ref(server.serving)
            del server
            growth = TurnGrowth("steps", asked=True, by_frames=True)
            for number in range(1, TURNS + 1):
                there(calls).put_nowait(None)
                await there(calls).join()
                if is_read(number, TURNS, is_last=number == TURNS):
                    growth.read(number, begins=number == SECOND)
            found = growth.end("", "").containers
            there(serving).cancel()
        return list(found)

    (finding,) = asyncio.run(run())
    assert finding.message.startswith("Numbers.serving.get_coro() f_locals['answers'] of ")


def test_a_list_of_the_checker_s_in_the_place_of_one_that_is_gone_is_not_what_was_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    SEEN.extend(map(Block, range(TURNS)))
    taken = [*SEEN]
    monkeypatch.setattr(growing_objects, "_taken", lambda course, container: taken)
    wanted = [(Course(id(SEEN), id(list), [0, TURNS], [0, TURNS]), SEEN)]
    assert growing_objects._of_new_things(wanted, {id(taken)}) == wanted
    there = [*SEEN]
    assert growing_objects._of_new_things(wanted, {id(there)}) == []


def test_what_is_gone_or_empty_by_the_end_is_no_growth() -> None:
    """Another container may be where it was."""
    there: list[Block] = []
    turns, lengths = [2, 6, 10, 14], [0, 20, 40, 60]
    emptied = Course(id(there), id(list), turns, lengths, by_turns=True)
    gone = Course(id(there) + 1, id(list), turns, lengths, is_remade=True)
    stretch = growing_objects.Stretch("steps")
    assert growing_objects.growth_in_heap([emptied, gone], {id(there): there}, stretch) == {}


TASKS: set[asyncio.Task[Any]] = set()
EVENTS: list[asyncio.Event] = []


def test_those_who_wait_in_an_event_are_told_by_the_tasks_that_the_program_keeps() -> None:
    async def wait(event: asyncio.Event, block: bytes) -> bytes:
        await event.wait()
        return block

    async def serve() -> list[Finding]:
        growth = TurnGrowth("steps", asked=True, by_frames=True)
        EVENTS.append(asyncio.Event())
        for number in range(1, TURNS + 1):
            TASKS.add(asyncio.ensure_future(wait(EVENTS[0], bytes(4000))))
            await asyncio.sleep(0)
            if is_read(number, TURNS, is_last=number == TURNS):
                growth.read(number, begins=number == SECOND)
        found = growth.end("", "").containers
        EVENTS[0].set()
        await asyncio.gather(*TASKS)
        return list(found)

    try:
        (finding,) = asyncio.run(serve())
    finally:
        TASKS.clear()
        EVENTS.clear()
    assert finding.holder == f"{__name__}.TASKS"
