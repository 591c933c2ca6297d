"""Host memory by the large arrays that it is, or the containers of many small things, and who holds them."""

from __future__ import annotations

import collections
import ctypes
import functools
import gc
import io
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
import zmq
from msgspec.structs import replace

from lowtide.leakcheck.findings import host_memory
from lowtide.leakcheck.findings.host_memory import (
    held_again,
    memory_holder,
    with_largest_containers,
    with_memory_holder,
    with_native_holder,
)
from lowtide.leakcheck.findings.item_findings import HeldMemory, ItemLeak, with_fingerprint
from lowtide.leakcheck.findings.remedies import try_holders
from lowtide.leakcheck.findings.storage_holders import Context
from lowtide.probes.heap.container_lengths import long_containers
from lowtide.probes.heap.holders import sharing_walk
from lowtide.probes.memory.buffers import large_buffers
from lowtide.reports.schema import Finding

MIB = 1 << 20
# Sizes that nothing else in the process has.
UNIT = 3 * MIB
KEPT: dict[str, Any] = {}
LISTED: list[Any] = []


@pytest.fixture(autouse=True)
def nothing_kept() -> Any:
    yield
    KEPT.clear()
    LISTED.clear()


def host(size: int, resource: str = "host-memory") -> ItemLeak:
    finding = Finding(
        resource="host-memory",
        cause="unknown",
        bytes=size,
        count=1,
        device="cpu",
        stage="call",
        message="much did not come back",
        fingerprint="",
    )
    return with_fingerprint(ItemLeak(finding, resource, {}, 0), "")


def numbers(size: int) -> Any:
    return np.ones(size // 8)


def test_an_array_of_that_size_is_named_with_its_holder_and_how_to_let_go_of_it() -> None:
    KEPT["table"] = {"deep": numbers(41 * MIB)}
    finding = with_memory_holder(host(40 * MIB), Context()).finding
    assert finding.holder == f"{__name__}.KEPT['table']['deep']"
    assert finding.message == (
        f"much did not come back; 41.0 MiB in a numpy.ndarray held by {__name__}.KEPT['table']['deep']"
    )
    assert (finding.cause, finding.verdict, finding.path[0].edge) == ("module-global", "reachable", __name__)
    assert finding.advice is not None
    assert f"{__name__}.KEPT['table']" in finding.advice
    # Other arrays are other leaks; and the suppression of the time when none was named still applies.
    assert finding.former_fingerprint == host(40 * MIB).finding.fingerprint
    assert finding.fingerprint not in ("", finding.former_fingerprint)


def test_all_in_one_container_are_named_together() -> None:
    KEPT["parts"] = {name: numbers(UNIT) for name in "abcdefghij"}
    finding = with_memory_holder(host(10 * UNIT), Context()).finding
    assert "; 30.0 MiB in 10 of numpy.ndarray held by " in finding.message
    assert "KEPT['parts']" in (finding.holder or "")


def test_the_last_of_a_list_are_named_where_the_first_were_there_before() -> None:
    LISTED.extend(numbers(UNIT) for _ in range(12))
    finding = with_memory_holder(host(4 * UNIT), Context()).finding
    assert "; 12.0 MiB in 4 of numpy.ndarray held by " in finding.message
    assert finding.holder == f"{__name__}.LISTED"


def test_of_several_of_that_size_in_a_list_the_last_is_named() -> None:
    LISTED.extend(numbers(41 * MIB) for _ in range(2))
    assert with_memory_holder(host(41 * MIB), Context()).finding.holder == f"{__name__}.LISTED[1]"


@pytest.mark.parametrize(("pieces", "turns", "unread"), [(1, 5, 1), (12, 5, 1), (1, 2, 2)])
def test_what_each_of_several_turns_has_added_to_a_container_is_told_by_the_container(
    pieces: int, turns: int, unread: int
) -> None:
    """The first turns are none of the growth, and their arrays are there, too."""
    LISTED.extend(numbers(UNIT // pieces) for _ in range((turns + unread) * pieces))
    held = memory_holder(UNIT, Context(living=True), grown=turns * UNIT)
    assert held is not None
    assert (
        held[0].note.text == f"; {3 * (turns + unread)}.0 MiB in {(turns + unread) * pieces} of numpy.ndarray held by "
    )
    assert held[0].note.holder == f"{__name__}.LISTED"


def test_a_table_that_is_larger_than_all_growth_is_not_said_to_be_it() -> None:
    LISTED.extend(numbers(UNIT) for _ in range(12))
    held = memory_holder(UNIT, Context(living=True), grown=5 * UNIT)
    # One of its entries has the size, as before.
    assert held is not None
    assert held[0].note.text == "; 3.0 MiB in a numpy.ndarray held by "


@pytest.mark.parametrize("size", [30 * MIB, 60 * MIB, 1 << 30])
def test_arrays_of_another_size_are_not_said_to_be_it(size: int) -> None:
    KEPT["table"] = numbers(41 * MIB)
    assert with_memory_holder(host(size), Context()).finding.holder is None


class Server:
    weights: Any = None


def test_two_leaks_are_named_where_they_are_all_that_there_is() -> None:
    # Of what other modules of tests have made.
    there = frozenset((id(each.item), each.bytes) for each in large_buffers())
    Server.weights, KEPT["table"] = numbers(41 * MIB), numbers(59 * MIB)
    finding = with_memory_holder(host(102 * MIB), Context(old_arrays=there)).finding
    Server.weights = None
    held = f"{__name__}.KEPT['table'], {__name__}.Server.weights"
    assert f"; 100.0 MiB in 2 of numpy.ndarray held by {held}" in finding.message
    assert finding.holder == f"{__name__}.KEPT['table']"
    assert all(f"{name}" in (finding.advice or "") for name in held.split(", "))


def test_none_is_where_there_are_others() -> None:
    Server.weights, KEPT["table"], KEPT["more"] = (numbers(size * MIB) for size in (41, 59, 77))
    finding = with_memory_holder(host(100 * MIB), Context()).finding
    Server.weights = None
    assert finding.holder is None


def test_other_resources_are_left_as_they_are() -> None:
    KEPT["table"] = numbers(41 * MIB)
    leak = host(41 * MIB, "threads")
    assert with_memory_holder(leak, Context()) is leak


def test_what_nothing_of_the_program_holds_is_not_named() -> None:
    lost = ctypes.py_object(numbers(43 * MIB))
    ctypes.pythonapi.Py_IncRef(lost)
    address = id(lost.value)
    del lost
    try:
        assert with_memory_holder(host(43 * MIB), Context()).finding.holder is None
    finally:
        ctypes.pythonapi.Py_DecRef(ctypes.cast(address, ctypes.py_object))


def test_what_a_function_that_runs_has_is_its() -> None:
    local = numbers(43 * MIB)
    holder = with_memory_holder(host(43 * MIB), Context()).finding.holder or ""
    assert holder.startswith("local 'local' of test_what_a_function_that_runs_has_is_its() in test_host_memory.py:")
    assert local.size


@pytest.mark.parametrize("is_old", [True, False])
def test_an_array_that_was_there_before_is_no_part_of_what_is_new(is_old: bool) -> None:
    KEPT["before"] = numbers(41 * MIB)
    there = frozenset((id(each.item), each.bytes) for each in large_buffers())
    context = Context(old_arrays=there if is_old else (), born=frozenset([id(KEPT)]))
    # Nearer than that it would be the array of that size, where it is new.
    assert with_memory_holder(host(44 * MIB), context).finding.holder == (
        None if is_old else f"{__name__}.KEPT['before']"
    )


def test_what_has_become_larger_is_named_by_how_much() -> None:
    KEPT["text"] = bytearray(13 * MIB)
    there = frozenset((id(each.item), each.bytes) for each in large_buffers())
    KEPT["text"].extend(bytes(21 * MIB))
    finding = with_memory_holder(host(21 * MIB), Context(old_arrays=there)).finding
    assert finding.message.endswith(f"; 21.0 MiB in a bytearray held by {__name__}.KEPT['text']")
    assert with_memory_holder(host(13 * MIB), Context(old_arrays=there)).finding.holder is None


def test_a_file_in_memory_is_named() -> None:
    KEPT["file"] = io.BytesIO()
    KEPT["file"].write(bytes(41 * MIB))
    finding = with_memory_holder(host(41 * MIB), Context()).finding
    assert finding.message.endswith(f"; 41.0 MiB in a _io.BytesIO held by {__name__}.KEPT['file']")


def test_what_tells_its_size_is_not_what_c_code_may_have() -> None:
    context = context_of(lambda: KEPT.update(small=[numbers(UNIT)]))
    assert with_native_holder(host(90 * MIB), context).finding.holder is None
    context = context_of(lambda: KEPT.update(other=[zmq.Frame(b"small")]))
    assert with_native_holder(host(90 * MIB), context).finding.holder == f"{__name__}.KEPT['other'][0]"


# Many small things.

COUNT = 20_000


def texts(first: int = 0, count: int = COUNT) -> list[str]:
    return [f"{number:6}" * 50 for number in range(first, first + count)]


SIZE = sum(map(sys.getsizeof, texts()))


class Engine:
    log: ClassVar[collections.deque[str]] = collections.deque()

    def __init__(self) -> None:
        self.by_name: dict[int, str] = collections.OrderedDict()


@functools.cache
def rendered(number: int) -> str:
    return f"{number:6}" * 50


def into_list(engine: Engine, items: Iterable[str]) -> None:
    LISTED.extend(items)


def into_set(engine: Engine, items: Iterable[str]) -> None:
    KEPT["names"] = set(items)


def into_deque(engine: Engine, items: Iterable[str]) -> None:
    engine.log.extend(items)


def into_attribute(engine: Engine, items: Iterable[str]) -> None:
    engine.by_name.update(enumerate(items))


def into_lists(engine: Engine, items: Iterable[str]) -> None:
    KEPT["parts"] = collections.defaultdict(list)
    for number, item in enumerate(items):
        KEPT["parts"][number // 10].append(item)


def into_long_lists(engine: Engine, items: Iterable[str]) -> None:
    KEPT["parts"] = collections.defaultdict(list)
    for number, item in enumerate(items):
        KEPT["parts"][number % 110].append(item)


def into_cache(engine: Engine, items: Iterable[str]) -> None:
    for number, _ in enumerate(items):
        rendered(number)


@pytest.fixture
def engine() -> Iterable[Engine]:
    KEPT["engine"] = Engine()
    yield KEPT["engine"]
    Engine.log.clear()
    rendered.cache_clear()


def context_of(call: Callable[[], object]) -> Context:
    """Return what is known of what a call makes."""
    # Held meanwhile: nothing new may have the address of what was there.
    before, old = long_containers(), gc.get_objects()
    call()
    born = frozenset(map(id, gc.get_objects())) - {id(old), *map(id, old)}
    return Context(born=born, old_lengths=before)


SHAPES = [
    (into_list, "LISTED", "LISTED.clear()"),
    pytest.param(into_set, "KEPT['names']", "KEPT['names'].clear()", marks=pytest.mark.nightly),
    pytest.param(into_deque, "Engine.log", "Engine.log.clear()", marks=pytest.mark.nightly),
    pytest.param(into_attribute, "KEPT['engine'].by_name", "KEPT['engine'].by_name.clear()", marks=pytest.mark.nightly),
    pytest.param(into_lists, "KEPT['parts']", "KEPT['parts'].clear()", marks=pytest.mark.nightly),
    pytest.param(into_long_lists, "KEPT['parts']", "KEPT['parts'].clear()", marks=pytest.mark.nightly),
    (into_cache, "rendered", "rendered.cache_clear()"),
]


@pytest.mark.parametrize(("fill", "holder", "change"), SHAPES)
def test_a_container_of_many_small_things_is_named_and_emptied(
    engine: Engine, fill: Callable[[Engine, Iterable[str]], None], holder: str, change: str
) -> None:
    context = context_of(lambda: fill(engine, texts()))
    # With the containers' own.
    leak = with_memory_holder(host(round(SIZE * 1.15)), context)
    assert leak.finding.holder == f"{__name__}.{holder}"
    assert leak.finding.advice == f"{__name__}.{change}"
    assert " entries of a " in leak.finding.message
    assert leak.held is not None
    (cut,) = held_again(leak.held, Context())
    cut.apply()
    assert with_memory_holder(host(round(SIZE * 1.15)), context).finding.holder is None


def test_what_was_in_a_container_before_stays_in_it(engine: Engine) -> None:
    table: dict[int, str] = {}
    KEPT["table"] = table
    LISTED.extend(texts())
    Engine.log.extend(texts())
    table.update(enumerate(texts()))
    before = long_containers()
    for fill, taken, change in [
        (lambda: LISTED.extend(texts(COUNT)), LISTED, f"del {__name__}.LISTED[20000:40000]"),
        (lambda: Engine.log.extend(texts(COUNT)), Engine.log, f"[{__name__}.Engine.log.pop() for _ in range(20000)]"),
        (
            lambda: table.update(enumerate(texts(COUNT), COUNT)),
            table.values(),
            f"for key in list({__name__}.KEPT['table'])[20000:40000]: del {__name__}.KEPT['table'][key]",
        ),
    ]:
        fill()
        leak = with_memory_holder(host(SIZE), Context(old_lengths=before))
        assert leak.finding.advice == change
        assert leak.held is not None
        (cut,) = held_again(leak.held, Context())
        cut.apply()
        assert list(taken) == texts()


def test_an_index_of_what_another_container_has_is_named_too() -> None:
    before = long_containers()
    LISTED.extend(texts())
    KEPT["index"] = dict.fromkeys(LISTED)
    advice = with_memory_holder(host(SIZE), Context(old_lengths=before)).finding.advice
    assert set((advice or "").split("; ")) == {f"{__name__}.LISTED.clear()", f"{__name__}.KEPT['index'].clear()"}


def test_two_containers_are_named_where_they_are_all_that_there_is() -> None:
    before = long_containers()
    LISTED.extend(texts())
    KEPT["more"] = texts(COUNT, 2 * COUNT)
    finding = with_memory_holder(host(3 * SIZE), Context(old_lengths=before)).finding
    assert f"in 60,000 entries of 2 containers held by {__name__}.KEPT['more'], {__name__}.LISTED" in finding.message


def test_what_was_noted_of_them_is_none_of_them() -> None:
    KEPT["noted"] = before = {**long_containers(), **dict.fromkeys(range(-SIZE, -SIZE + COUNT), 1)}
    KEPT["other"] = dict.fromkeys(range(-2 * SIZE, -2 * SIZE + COUNT), 1)
    found = {each.item for each in host_memory._grown_containers(Context(old_lengths=before), COUNT)}
    assert (id(before) in found, id(KEPT["other"]) in found) == (False, True)


@pytest.mark.parametrize("size", [SIZE // 2, 2 * SIZE])
def test_a_container_of_another_size_is_not_said_to_be_it(size: int) -> None:
    before = long_containers()
    LISTED.extend(texts())
    assert with_memory_holder(host(size), Context(old_lengths=before)).finding.holder is None


def test_a_container_that_was_there_before_is_not() -> None:
    LISTED.extend(texts())
    assert with_memory_holder(host(SIZE), Context(old_lengths=long_containers())).finding.holder is None
    # Where nobody knows how long it was before, none is.
    assert with_memory_holder(host(SIZE), Context()).finding.holder is None


@pytest.mark.parametrize(
    "make", [lambda: {"texts": [(text, 1) for text in texts()]}, lambda: numbers(round(SIZE * 1.15))]
)
def test_what_a_test_runner_notes_is_not_taken_from_it(request: pytest.FixtureRequest, make: Callable[[], Any]) -> None:
    notes = request.node.user_properties
    context = context_of(lambda: notes.append(("noted", make())))
    leak = with_memory_holder(host(round(SIZE * 1.15)), context)
    assert leak.held is None or held_again(leak.held, Context(is_over=True)) == []
    notes.clear()


def test_what_lies_in_what_was_there_before_is_told_by_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_MOST_SAMPLED", 5)
    # Of what the collector tracks, so that it has been tracked itself from the beginning.
    table: dict[int, list[str]] = {-1: []}
    KEPT["table"] = table

    def fill() -> None:
        for number in range(110):
            table[number] = texts(number * COUNT, 400)

    context = context_of(fill)
    leak = with_memory_holder(host(round(110 / COUNT * 400 * SIZE)), context)
    assert leak.finding.holder == f"{__name__}.KEPT['table']"


@pytest.mark.parametrize("is_new", [True, False])
def test_of_what_the_collector_tracks_the_age_is_the_evidence(is_new: bool) -> None:
    before = long_containers()
    LISTED.extend([text] for text in texts())
    born = frozenset(map(id, LISTED)) if is_new else frozenset()
    finding = with_memory_holder(host(SIZE + COUNT * 72), Context(born=born, old_lengths=before)).finding
    assert (finding.holder == f"{__name__}.LISTED") is is_new


@pytest.mark.parametrize(
    ("name", "holder"),
    [("torch.plugin_of_a_test", None), ("plugin_of_a_test", "plugin_of_a_test.TABLE")],
)
def test_tables_that_came_with_a_library_s_import_are_not_named(
    monkeypatch: pytest.MonkeyPatch, name: str, holder: str | None
) -> None:
    def load() -> None:
        module = ModuleType(name)
        module.__dict__["TABLE"] = dict(enumerate(texts()))
        monkeypatch.setitem(sys.modules, name, module)

    context = context_of(load)
    assert with_memory_holder(host(round(SIZE * 1.15)), context).finding.holder == holder


def test_the_names_of_a_module_are_no_container(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("plugin_of_a_test")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    names = {f"name_{number}": text for number, text in enumerate(texts())}
    before = long_containers()
    vars(module).update(names, listed=[])
    assert with_memory_holder(host(round(SIZE * 1.3)), Context(old_lengths=before)).finding.holder is None


def test_a_table_of_modules_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        for number in range(COUNT // 10):
            part = ModuleType(f"plugin_of_a_test.{number}")
            vars(part)["TEXT"] = f"{number:6}" * 500
            monkeypatch.setitem(sys.modules, part.__name__, part)
            KEPT[part.__name__] = part

    context = context_of(load)
    assert with_memory_holder(host(round(SIZE * 1.15)), context).finding.holder is None


def test_what_all_entries_share_is_none_s_own() -> None:
    before, shared = long_containers(), [numbers(UNIT)]
    LISTED.extend([(shared, text) for text in texts()])
    assert (
        with_memory_holder(host(SIZE + COUNT * 64), Context(old_lengths=before)).finding.holder == f"{__name__}.LISTED"
    )


def test_what_has_come_over_a_while_is_told_by_the_largest_containers() -> None:
    LISTED.extend(texts())
    KEPT["more"] = texts(COUNT, 2 * COUNT)
    taken = {id(LISTED): COUNT, id(KEPT["more"]): 2 * COUNT}
    finding = with_largest_containers(host(5 * SIZE).finding, taken)
    assert f"in 60,000 entries of 2 containers held by {__name__}.KEPT['more'], {__name__}.LISTED" in finding.message
    assert with_largest_containers(host(100 * SIZE).finding, taken).holder is None
    assert with_largest_containers(host(5 * SIZE).finding, {}).holder is None


# What is no long container: a tuple, a tree, a chain.


class Node:
    def __init__(self, text: str, behind: Sequence[Node] = ()) -> None:
        self.text = text
        self.behind = [*behind]


def as_tuple(items: Sequence[str]) -> Any:
    return tuple(items)


def as_tree(items: Sequence[str]) -> Any:
    return Node(items[0], [as_tree(items[first::4]) for first in range(1, 5) if items[first::4]])


def as_chain(items: Sequence[str]) -> Any:
    return functools.reduce(lambda before, item: Node(item, [before]), items, Node(""))


def as_dicts(items: Sequence[str]) -> Any:
    return {f"a{row}": {f"b{at}": [*items[row * 90 + at :: 8100]] for at in range(90)} for row in range(90)}


def as_closure(items: Sequence[str]) -> Any:
    kept = tuple(items)
    return lambda: kept


SEVERAL = [
    (as_tuple, "KEPT['engine'].kept", "a tuple leads"),
    (as_tree, "KEPT['engine'].kept.behind", "a list leads"),
    pytest.param(as_chain, "KEPT['engine'].kept.behind", "a list leads", marks=pytest.mark.nightly),
    pytest.param(as_dicts, "KEPT['engine'].kept", "a dict leads", marks=pytest.mark.nightly),
    pytest.param(as_closure, "KEPT['engine'].kept, closure cell 'kept'", "a tuple leads", marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("make", "holder", "what"), SEVERAL)
def test_what_leads_to_much_that_is_new_is_named_and_let_go_of(
    engine: Any, make: Callable[[Sequence[str]], Any], holder: str, what: str
) -> None:
    engine.kept = None
    wanted = host(round(SIZE * 1.1))

    def keep() -> None:
        engine.kept = make(texts())
        # A tuple of nothing that is tracked is found out when it runs.
        gc.collect(0)

    context = context_of(keep)
    leak = with_memory_holder(wanted, context)
    assert leak.finding.holder == f"{__name__}.{holder}"
    assert f" in what {what} to, held by " in leak.finding.message
    assert leak.held is not None
    with sharing_walk() as walk:
        cuts = held_again(leak.held, replace(context, is_over=True, walk=walk))
    for cut in cuts:
        cut.apply()
    assert engine.kept is None


def test_on_a_card_it_is_no_evidence_where_libraries_may_have_built_it(engine: Any) -> None:
    context = context_of(lambda: setattr(engine, "kept", as_tree(texts())))
    wanted = host(round(SIZE * 1.1))
    assert with_memory_holder(wanted, context).finding.holder is not None
    assert with_memory_holder(wanted, context, may_be_of_libraries=True).finding.holder is None


def test_what_was_there_before_and_leads_to_as_much_is_not_named(engine: Any) -> None:
    engine.kept = as_tree(texts())
    context = context_of(lambda: None)
    assert with_memory_holder(host(SIZE), context).finding.holder is None


def test_of_several_that_are_as_large_what_is_known_to_be_new_is_named(engine: Any) -> None:
    engine.kept = as_tuple(texts())
    gc.collect(0)
    context = context_of(lambda: KEPT.update(table=as_dicts(texts())))
    assert with_memory_holder(host(SIZE), context).finding.holder == f"{__name__}.KEPT['table']"


def test_several_are_named_where_together_they_are_all_that_there_is() -> None:
    context = context_of(lambda: KEPT.update(tree=as_tree(texts()), other=as_tree(texts(COUNT))))
    finding = with_memory_holder(host(round(2.4 * SIZE)), context).finding
    assert "in what 2 objects lead to, held by " in finding.message
    assert {f"{__name__}.KEPT['{name}'].behind" for name in ("tree", "other")} <= {
        *re.split("held by |, ", finding.message)
    }


# What is said to hold it is tried.


def tried(leaks: Sequence[ItemLeak]) -> list[Finding]:
    return try_holders([(leak, leak.held) for leak in leaks if leak.held is not None], Context(is_over=True))


def pages(count: int) -> list[bytes]:
    """Pieces that the C library can give back."""
    return [bytes(4096) for _ in range(count)]


def test_what_gives_it_back_is_the_remedy() -> None:
    before = long_containers()
    LISTED.extend(pages(8000))
    first = with_memory_holder(host(8000 * 4096), Context(old_lengths=before))
    between = long_containers()
    LISTED.extend(pages(12000))
    second = with_memory_holder(host(12000 * 4096), Context(old_lengths=between))
    remedies = [finding.remedy for finding in tried([first, second])]
    assert LISTED == []
    returned = [remedy.returns_bytes for remedy in remedies if remedy is not None]
    assert [size for size in returned if size < 7000 * 4096] == []
    assert len(returned) == 2


def test_what_was_emptied_for_another_finding_is_not_said_to_be_wrong() -> None:
    kept = KEPT["kept"] = set(pages(8000))
    leaks = []
    for first in (0, 1):
        before = long_containers()
        kept.update(bytes(4096 + 4 * number + first) for number in range(8000))
        leaks.append(with_memory_holder(host(sum(map(len, kept)) // (first + 1)), Context(old_lengths=before)))
    first_told, second_told = tried(leaks)
    assert second_told.remedy is not None
    assert first_told.holder == second_told.holder == f"{__name__}.KEPT['kept']"
    assert first_told.remedy is None


@pytest.mark.parametrize("is_guess", [True, False])
def test_a_guess_that_gives_nothing_back_is_dropped(is_guess: bool) -> None:
    KEPT["table"] = numbers(41 * MIB)
    leak = with_memory_holder(host(41 * MIB), Context())
    assert leak.held is not None
    # Something else is that memory.
    leak = replace(leak, finding=replace_bytes(leak.finding, 1 << 30))
    otherwise = host(1 << 30).finding if is_guess else None
    (finding,) = tried([replace(leak, held=HeldMemory(leak.held.items, otherwise))])
    assert finding.remedy is None
    assert [each.returns_bytes // MIB for each in finding.tried] == [41]
    assert (finding.holder is None) is is_guess


def replace_bytes(finding: Finding, size: int) -> Finding:
    return msgspec.structs.replace(finding, bytes=size)


def test_an_object_of_c_code_in_another_one_goes_with_that() -> None:
    context = context_of(lambda: KEPT.update(socket=zmq.Context().socket(zmq.PAIR)))
    leak = with_native_holder(host(40 * MIB), context)
    socket = KEPT.pop("socket")
    socket.close()
    socket.context.term()
    assert f"has for zmq.sugar.socket.Socket held by {__name__}.KEPT['socket']" in leak.finding.message
    assert leak.held is not None
    assert len(leak.held.items) == 1


def test_objects_of_c_code_that_the_collector_does_not_track_are_met_again() -> None:
    models = pytest.importorskip("tokenizers.models")
    LISTED.extend(models.WordLevel({"a": 0}, unk_token="a") for _ in range(4))
    assert not any(map(gc.is_tracked, LISTED))
    with sharing_walk() as walk:
        cuts = held_again(HeldMemory({id(LISTED[1]): None, id(LISTED[2]): None}), Context(is_over=True, walk=walk))
    for cut in reversed(cuts):
        cut.apply()
    assert (len(cuts), len(LISTED)) == (2, 2)
