"""Which growing containers are findings: those that take what nothing else has had all the time."""

from __future__ import annotations

import abc
import asyncio
import atexit
import codecs
import collections
import ctypes
import gc
import io
import linecache
import logging
import weakref
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar, copy_context
from typing import Any
from unittest.mock import MagicMock

import pytest

from lowtide.leakcheck.findings import growing_objects, turn_growth
from lowtide.leakcheck.findings.growing_objects import Stretch, growth_in_heap
from lowtide.leakcheck.findings.turn_growth import SECOND, TurnGrowth, is_read
from lowtide.leakcheck.growth.containers import Course
from lowtide.probes.heap.container_lengths import ContainerLengths, read_lengths
from lowtide.reports.schema import Finding

TURNS = 14


class Block:
    __slots__ = ("number", "payload")

    def __init__(self, number: int) -> None:
        self.number = number
        self.payload = bytes(2000)

    def end(self) -> None:
        """Be called by whoever has it, once something else is over."""


POOL: list[Block] = []
BY_NUMBER: dict[int, Block] = {}
TABLE: dict[int, Block] = {}
SEEN: list[Block] = []
LATEST: list[Block | None] = []
RECENT: collections.OrderedDict[int, Block] = collections.OrderedDict()


@pytest.fixture(autouse=True)
def emptied() -> Iterator[None]:
    yield
    gc.unfreeze()
    for container in (POOL, BY_NUMBER, TABLE, SEEN, LATEST, RECENT):
        container.clear()


class Plain:
    """Smaller by itself than its number in a dict."""

    def __init__(self) -> None:
        self.payload = bytes(2000)


def found_after(turn: Callable[[int], object], *, by_frames: bool = False, fixture: object = None) -> list[Finding]:
    roots = [] if fixture is None else [("fixture 'step'", fixture)]
    growth = TurnGrowth("steps", lambda: roots, asked=True, by_frames=by_frames)
    for number in range(1, TURNS + 1):
        turn(number)
        if is_read(number, TURNS, is_last=number == TURNS):
            growth.read(number, begins=number == SECOND)
    return list(growth.end("", "").containers)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_table_of_what_a_pool_has_anyway_is_no_growth(is_frozen: bool) -> None:
    POOL.extend(map(Block, range(TURNS * 3 + 3)))
    if is_frozen:
        gc.freeze()

    def use(number: int) -> None:
        for place in range(3 * number, 3 * number + 3):
            TABLE[place] = POOL[place]

    assert found_after(use) == []


def test_nor_where_a_dict_has_it() -> None:
    BY_NUMBER.update({number: Block(number) for number in range(TURNS * 3 + 3)})

    def use(number: int) -> None:
        SEEN.extend(BY_NUMBER[place] for place in range(3 * number, 3 * number + 3))

    assert found_after(use) == []


def test_what_is_made_in_each_turn_is_growth_however_large_the_pool() -> None:
    POOL.extend(map(Block, range(200)))

    def make(number: int) -> None:
        SEEN.extend([Block(number), Block(number), POOL[number]])

    (finding,) = found_after(make)
    assert finding.holder == f"{__name__}.SEEN"


def test_so_it_is_where_a_class_has_something_else_under_the_name_of_its_size() -> None:
    class Odd(Block):
        __sizeof__ = MagicMock().__sizeof__

    (found,) = found_after(lambda number: SEEN.append(Odd(number)))
    assert (found.count, found.bytes > TURNS * 1000) == (TURNS - SECOND, True)


@pytest.mark.parametrize(
    ("turns", "each", "size"),
    [
        (61, 1, lambda number: 1 << 20 if number > 51 else 1000),
        (61, 1, lambda number: 1000 if number > 10 else 1 << 20),
        (101, 100, lambda number: 20_000 if number % 10 == 0 else 500),
    ],
    ids=["late ones are large", "early ones are large", "every tenth is large"],
)
def test_the_bytes_are_those_of_its_whole_course(turns: int, each: int, size: Callable[[int], int]) -> None:
    kept: list[bytes] = []
    growth = TurnGrowth("steps", lambda: [("fixture 'kept'", kept)], asked=True)
    for number in range(1, turns + 1):
        kept.extend(bytes(size(number * each + place)) for place in range(each))
        if number % 10 == 1:
            growth.read(number)
    (finding,) = growth.end("", "").containers
    of_all = sum(map(len, kept[each:]))
    assert 0.85 * of_all < finding.bytes < 1.15 * of_all


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


def test_a_ring_of_the_latest_does_not_excuse_who_keeps_all() -> None:
    LATEST.extend([None] * 8)
    RECENT.update({number: Block(number) for number in range(-8, 0)})

    def serve(number: int) -> None:
        for place in range(3):
            block = Block(number)
            SEEN.append(block)
            LATEST[(3 * number + place) % 8] = block
            RECENT[3 * number + place] = block
            RECENT.popitem(last=False)

    (finding,) = found_after(serve)
    assert finding.holder == f"{__name__}.SEEN"


def test_nor_does_another_one_that_grows_or_that_is_made_anew() -> None:
    def serve(number: int) -> None:
        block = Block(number)
        TABLE[number] = block
        SEEN.append(block)
        LATEST[:] = [list(SEEN)]  # type: ignore[list-item]

    assert {finding.holder for finding in found_after(serve)} == {f"{__name__}.SEEN", f"{__name__}.TABLE"}


def test_a_list_that_c_alone_holds_in_a_frozen_heap_is_passed_over() -> None:
    held: list[Block] = []
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
    address = id(held)
    del held

    def turn(number: int) -> None:
        ctypes.cast(address, ctypes.py_object).value.append(Block(number))
        SEEN.append(Block(number))
        if number == 1:
            gc.freeze()

    try:
        assert [finding.holder for finding in found_after(turn)] == [f"{__name__}.SEEN"]
    finally:
        ctypes.pythonapi.Py_DecRef(ctypes.cast(address, ctypes.py_object))


def test_numbers_that_other_tables_have_too_excuse_nobody() -> None:
    LATEST.extend(list(range(100)))  # type: ignore[arg-type]

    def serve(number: int) -> None:
        TABLE[number] = Plain()  # type: ignore[assignment]

    (finding,) = found_after(serve)
    assert finding.holder == f"{__name__}.TABLE"


@pytest.mark.parametrize("by_frames", [True, False])
def test_a_list_that_only_c_holds_is_said_where_no_test_runner_may_have_it(by_frames: bool) -> None:
    log = io.StringIO()
    found = found_after(lambda number: log.write("x" * 20_000 + str(number)), by_frames=by_frames)
    if not by_frames or not found:
        # Python 3.12 and later write it elsewhere.
        assert found == []
    else:
        assert found[0].message.startswith("a list of native code takes 1 item (19.")


def test_who_asks_what_grows_holds_none_of_it() -> None:
    """Else it would be told by that what the checker has for itself, as its agent in another process."""
    notes = type("Notes", (), {"__module__": "lowtide.probes.heap"})()
    notes.born = [Block(number) for number in range(TURNS)]
    there = {id(notes.born): notes.born}
    courses = [Course(id(notes.born), id(list), [0, TURNS], [0, TURNS])]
    assert growth_in_heap(courses, there, Stretch("steps", by_frames=True)) == {}


def test_a_function_that_a_fixture_returns_has_no_globals_of_its_module() -> None:
    def step(number: int) -> None:
        SEEN.append(Block(number))

    (finding,) = found_after(step, fixture=step)
    assert finding.holder == f"{__name__}.SEEN"


def test_what_it_closes_over_it_has() -> None:
    kept: list[Block] = []
    (finding,) = found_after(lambda number: kept.append(Block(number)), fixture=lambda: kept)
    assert (finding.holder or "").startswith("fixture 'step'")


@pytest.mark.parametrize(("kept", "count"), [(TURNS, 1), (4, 0)], ids=["each", "the latest"])
def test_a_dict_of_texts_in_a_variable_is_told_if_it_grows(kept: int, count: int) -> None:
    """The collector does not track it."""

    def run() -> list[Finding]:
        replies: dict[int, str] = {}
        return found_after(lambda number: replies.update({number % kept: "x" * (2000 + number)}), by_frames=True)

    found = run()
    assert len(found) == count
    assert all("'replies'" in (each.holder or "") for each in found)


class Server:
    """Something that lives as long as all requests."""


def test_what_each_turn_has_pythons_library_hold_is_told_with_what_it_is_for() -> None:
    server = Server()
    finalizers: list[weakref.finalize[[], Server]] = []
    (finding,) = found_after(lambda number: finalizers.append(weakref.finalize(server, Block(number).end)))
    for finalizer in finalizers:
        finalizer.detach()
    assert finding.holder == "weakref.finalize._registry"
    assert finding.message.split("; ")[0].endswith(f"for {Block.end.__module__}.Block.end")


def test_what_the_interpreter_itself_keeps_a_list_of_is_told() -> None:
    added: list[Callable[[str], None]] = []

    def register(number: int) -> None:
        block = Block(number)
        added.append(lambda name: block.end())
        codecs.register(added[-1])

    found = found_after(register)
    for search in added:
        codecs.unregister(search)
    assert "codecs.register()" in [finding.holder for finding in found]


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


@pytest.mark.usefixtures("loggers")
def test_loggers_that_become_more_are_one_finding_though_their_parent_has_an_index_of_them() -> None:
    def begin(number: int) -> None:
        vars(logging.getLogger(f"requests.{number}"))["block"] = Block(number)

    (finding,) = found_after(begin, by_frames=True)
    assert finding.holder == "logging.Logger.manager.loggerDict"


@pytest.mark.usefixtures("loggers")
@pytest.mark.parametrize(
    ("add", "name"),
    [
        (lambda logger, block: logger.addFilter(block.end), "filters"),
        (lambda logger, block: logger.addHandler(Handling(block)), "handlers"),
    ],
)
def test_what_a_logger_has_is_named_by_it(add: Callable[[logging.Logger, Block], None], name: str) -> None:
    logger = logging.getLogger("engine.requests")
    (finding,) = found_after(lambda number: add(logger, Block(number)), by_frames=True)
    assert finding.holder == f"logging.getLogger('engine.requests').{name}"


def test_what_a_session_in_a_list_takes_is_told_beside_the_list() -> None:
    sessions: list[list[Block]] = SEEN  # type: ignore[assignment]
    sessions.append([])

    def serve(number: int) -> None:
        sessions.append([Block(number)])
        sessions[0].append(Block(number))

    assert {finding.holder for finding in found_after(serve)} == {f"{__name__}.SEEN", f"{__name__}.SEEN[0]"}


def shut_down(data: object) -> None:
    """Be called at exit, and do nothing."""


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
    found = found_after(lambda number: registered.append(register(number)), by_frames=True)
    (finding,) = [each for each in found if (each.holder or "").startswith("atexit")]
    for function in registered:
        atexit.unregister(function)
    assert finding.holder == f"atexit.register({name.format(__name__)})"
    assert finding.message.startswith(f"{finding.holder} takes 1 item (2.")
    assert finding.count == TURNS - SECOND


def test_variables_of_a_context_that_each_turn_makes_are_told_and_those_it_sets_anew_are_not() -> None:
    """A context keeps each variable that was set in it, as the documentation of `contextvars` says."""
    kept: ContextVar[Block] = ContextVar("kept")
    made = copy_context().run(found_after, lambda number: ContextVar(f"request {number}").set(Block(number)))
    again = copy_context().run(found_after, lambda number: ContextVar(f"of {number} others").set(Block(number)))
    assert copy_context().run(found_after, lambda number: kept.set(Block(number))) == []
    (finding,), (other,) = made, again
    assert finding.holder == "contextvars.copy_context()"
    assert finding.message.startswith(f"{finding.holder} takes 1 item (2.")
    assert finding.fingerprint == other.fingerprint


def test_what_is_called_at_exit_alone_keeps_nothing() -> None:
    found = found_after(lambda number: atexit.register(codecs.lookup, "utf-8"), by_frames=True)
    atexit.unregister(codecs.lookup)
    assert found == []


def test_what_is_called_at_exit_no_more_keeps_nothing() -> None:
    """It leaves its place in the table behind what was there before."""
    for number in range(TURNS):
        atexit.register(shut_down, bytes(2000 + number))

    def serve(number: int) -> None:
        end = atexit.register(Block(number).end)
        atexit.unregister(end)

    found = found_after(serve, by_frames=True)
    atexit.unregister(shut_down)
    assert found == []


@pytest.mark.parametrize("kind", ["finalize", "line cache", "logger"])
def test_what_pythons_library_has_for_itself_is_none(kind: str) -> None:
    def use(number: int) -> None:
        if kind == "finalize":
            block = Plain()
            weakref.finalize(block, Block(number).end)
        elif kind == "line cache":
            name = f"<request {number}>"
            linecache.cache[name] = (3000, None, ["x" * (3000 + number)], name)
        else:
            logging.getLogger(f"request-{number % 3}")

    try:
        assert found_after(use) == []
    finally:
        linecache.clearcache()


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


HELD: list[Window] = []


@pytest.mark.parametrize(
    ("kind", "size", "told"),
    [
        (Window, 2000, False),
        (AbstractWindow, 2000, False),
        (Window, 20_000, False),
        (Window, 64_000, True),
        (Journal, 2000, True),
    ],
)
def test_a_window_that_fills_is_no_growth_where_it_is_small_once_it_is_full(
    kind: type[Window], size: int, *, told: bool
) -> None:
    HELD[:] = [kind()]
    try:
        assert bool(found_after(lambda _: HELD[0].note(bytes(size)))) == told
    finally:
        HELD.clear()


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
        found = found_after(lambda _: note(bytes(2000)))
        RUNNING.pop().cancel()
        return found

    (finding,) = asyncio.run(run())
    assert finding.message.startswith(f"Journal.entries of {__name__}.RUNNING[0].get_coro() (inside coroutine) takes ")


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


LOOPS: list[asyncio.AbstractEventLoop] = []


def test_the_timers_of_a_loop_that_the_program_has_are_told_with_what_they_are_for() -> None:
    loop = asyncio.new_event_loop()
    LOOPS.append(loop)
    try:
        (finding,) = found_after(lambda turn: loop.call_later(3600 + turn, serve_later, bytes(4000)))
    finally:
        LOOPS.clear()
        loop.close()
    assert finding.holder == f"{__name__}.LOOPS[0]._scheduled"
    assert f", for {__name__}.serve_later" in finding.message


def serve_later(block: bytes) -> int:
    return len(block)


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
            growth.read(number, begins=number == 1)
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


class Tables:
    """Has a table of code, attributes by names that are put together, and what is told of garbage until it goes."""

    def __init__(self) -> None:
        self.code: dict[int, object] = {}
        self.told: weakref.WeakKeyDictionary[Plain, bytes] = weakref.WeakKeyDictionary()
        self.kept: weakref.WeakKeyDictionary[Plain, tuple[Plain, bytes]] = weakref.WeakKeyDictionary()
        self.results = Plain()
        for number in range(40):
            setattr(self.results, f"old_{number}", None)

    def compile(self, number: int) -> None:
        self.code[number] = compile(f"x = {'a' * 2000!r} + '{number}'", f"<{number}>", "exec")

    def note(self, number: int) -> None:
        setattr(self.results, f"result_{number}", bytes(2000 + number))

    def keep(self, number: int) -> None:
        key = Plain()
        self.kept[key] = (key, bytes(2000 + number))

    def tell(self, number: int) -> None:
        key: Any = Plain()
        key.itself = key
        self.told[key] = bytes(2000 + number)


TABLES = Tables()


@pytest.mark.parametrize(
    ("turn", "holder"),
    [(TABLES.compile, "code"), (TABLES.note, "results.__dict__"), (TABLES.keep, "kept.data")],
)
def test_a_table_is_told_whatever_it_has(turn: Callable[[int], None], holder: str) -> None:
    assert [finding.holder for finding in found_after(turn)] == [f"{__name__}.TABLES.{holder}"]


def test_a_table_of_what_is_garbage_is_none() -> None:
    gc.collect()
    gc.disable()
    try:
        assert found_after(TABLES.tell) == []
    finally:
        gc.enable()
