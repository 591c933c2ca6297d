"""One value that becomes longer with every turn is told with its holder, and one that only changes is not."""

from __future__ import annotations

import array
import contextvars
import functools
import io
import itertools
import xml.etree.ElementTree
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from lowtide.leakcheck.findings import turn_growth
from lowtide.leakcheck.findings.turn_growth import TurnGrowth
from lowtide.leakcheck.growth import host_levels
from lowtide.leakcheck.processes import answers
from lowtide.leakcheck.processes.messages import Look, ask
from lowtide.leakcheck.processes.own_tensors import explain_grown
from lowtide.leakcheck.processes.timed_growth import Moment, grown_between
from lowtide.probes.heap.large_values import read_values
from lowtide.reports.schema import Finding

TURNS = 40
SIZE = 30_000
MIB = 1 << 20


class Held:
    """What the program holds by attributes of a class."""

    value: Any = None
    logs: Any = ()


@pytest.fixture(autouse=True)
def emptied() -> Iterator[None]:
    yield
    Held.value, Held.logs = None, ()


def found_after(
    turn: Callable[[int], object], *, asked: bool = True, seconds: float = 0.0, turns: int = TURNS
) -> list[Finding]:
    growth = TurnGrowth("steps", asked=asked, seconds=seconds)
    apart = turns // 10
    for number in range(1, turns + 1):
        turn(number)
        if number % apart == 0:
            growth.read(number, begins=number == apart)
    return list(growth.end("", "").containers)


def lengthen_text(number: int) -> None:
    Held.value = (Held.value or "") + chr(97 + number % 26) * SIZE


def lengthen_buffer(number: int) -> None:
    Held.value = Held.value or bytearray()
    Held.value.extend(bytes(SIZE))


def lengthen_array(number: int) -> None:
    Held.value = Held.value or array.array("d")
    Held.value.frombytes(bytes(SIZE))


def write_to_memory(number: int) -> None:
    Held.value = Held.value or io.BytesIO()
    Held.value.write(bytes(SIZE))


def write_text_to_memory(_: int) -> None:
    Held.value = Held.value or io.StringIO()
    Held.value.write("x" * SIZE)


def concatenate(number: int) -> None:
    Held.value = np.zeros(SIZE) if Held.value is None else np.concatenate([Held.value, np.ones(SIZE // 8)])


@pytest.mark.parametrize(
    ("turn", "kind"),
    [
        (lengthen_text, "str"),
        (lengthen_buffer, "bytearray"),
        (lengthen_array, "array.array"),
        (write_to_memory, "_io.BytesIO"),
        (write_text_to_memory, "_io.StringIO"),
        (concatenate, "numpy.ndarray"),
    ],
    ids=lambda each: each.__name__ if callable(each) else "",
)
@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_it_is_told_with_its_holder(turn: Callable[[int], None], kind: str, seconds: float) -> None:
    (finding,) = (each for each in found_after(turn, seconds=seconds) if each.holder)
    assert finding.holder == f"{__name__}.Held.value"
    assert finding.message.startswith(f"{finding.holder} grows by ")
    assert f" in all: {kind} of " in finding.message
    assert 0.85 * SIZE * finding.count < finding.bytes < 1.2 * SIZE * finding.count
    assert (finding.count, finding.trend) == (TURNS - 4, "growth")


def test_it_is_told_though_malloc_has_less_in_the_end() -> None:
    """As what a server frees between two requests: where nothing rises, nothing is read."""
    ballast = [bytes(1000) for _ in range(2000)]

    def serve(number: int) -> None:
        lengthen_text(number)
        if number == TURNS:
            ballast.clear()

    assert [each.holder for each in found_after(serve, seconds=1.0)] == [f"{__name__}.Held.value"]


@pytest.mark.parametrize("lengthens", [True, False])
def test_it_is_told_by_what_each_turn_adds_to_the_process(lengthens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The level since the first turn lacks what that has added, and whatever else has gone meanwhile."""
    growth, read = TurnGrowth("tests"), host_levels.read_levels
    monkeypatch.setattr(host_levels, "read_levels", lambda: tuple(level - MIB for level in read()))
    for number in range(12):
        Held.value = ((Held.value or "") if lengthens else "") + chr(97 + number) * (4 * MIB)
        growth.note("")
    found = growth.end("", "").host
    assert (found and found.holder) == (f"{__name__}.Held.value" if lengthens else None)


def replace(number: int) -> None:
    Held.value = bytes(SIZE * 20 + number)


def rise_and_fall(number: int) -> None:
    Held.value = bytes(SIZE * (number % 10))


def fill(number: int) -> None:
    if number < TURNS // 2:
        lengthen_buffer(number)


def lengthen_by_little(number: int) -> None:
    Held.value = (Held.value or "x" * SIZE) + "y" * 2000


def lengthen_tuple(number: int) -> None:
    Held.value = (*(Held.value or ()), bytes(SIZE))


def add_to_set(number: int) -> None:
    Held.value = (Held.value or frozenset()) | {bytes(SIZE) + bytes([number])}


def wrap_partial(number: int) -> None:
    Held.value = functools.partial(Held.value or print, bytes(SIZE))


def lengthen_tuple_by_little(number: int) -> None:
    Held.value = (*(Held.value or ()), bytes(1300))


def lengthen_two(number: int) -> None:
    lengthen_tuple(number)
    Held.logs = (*Held.logs, number)


@pytest.mark.parametrize("turn", [lengthen_tuple, add_to_set, wrap_partial, lengthen_two])
@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_what_gives_way_to_a_longer_one_is_told_as_a_container_is(turn: Callable[[int], None], seconds: float) -> None:
    (finding,) = (each for each in found_after(turn, seconds=seconds) if each.holder)
    assert finding.holder == f"{__name__}.Held.value" + ".args" * (turn is wrap_partial)
    assert finding.message.startswith(f"{finding.holder} takes 1 item (")


def test_a_tuple_is_read_though_little_has_come_in_a_few_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    # All else in this process moves it by more.
    monkeypatch.setattr(turn_growth, "malloc_in_use", lambda: 1300 * len(Held.value or ()))
    (finding,) = found_after(lengthen_tuple_by_little)
    assert finding.holder == f"{__name__}.Held.value"


def window(number: int) -> None:
    Held.value = (*(Held.value or ()), bytes(SIZE))[-8:]


def take_tuples(number: int) -> None:
    Held.value = Held.value or []
    Held.value.append((number,))


class Row:
    """Has a place for what each turn may say."""

    __slots__ = tuple(f"said_{number}" for number in range(TURNS + 1))


def fill_row(number: int) -> None:
    Held.value = Held.value or Row()
    setattr(Held.value, f"said_{number}", (bytes(2000 + number), number))


@pytest.mark.parametrize("turn", [window, take_tuples, fill_row])
@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_a_window_of_things_and_tuples_of_little_are_none(turn: Callable[[int], None], seconds: float) -> None:
    assert found_after(turn, seconds=seconds) == []


@pytest.mark.parametrize("turn", [replace, rise_and_fall, fill, lengthen_by_little])
@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_one_that_is_no_longer_in_the_end_is_none(turn: Callable[[int], None], seconds: float) -> None:
    assert found_after(turn, seconds=seconds) == []


def test_a_program_that_runs_and_needs_no_more_is_not_held_up_to_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = []
    monkeypatch.setattr(turn_growth, "read_values", lambda *words: readings.append(1) or read_values(*words))
    found_after(rise_and_fall, seconds=1.0)
    quiet = len(readings)
    found_after(lengthen_buffer, seconds=1.0)
    assert quiet < 5 < len(readings) - quiet


def grown_in_a_process(turn: Callable[[int], object], requests: int = 0) -> list[Finding]:
    """Return what two looks into a process say of what is held, with thirty turns between them."""
    before = ask(answers.answer, Look(), "this process")
    for number in range(30):
        turn(number)
    now = ask(answers.answer, Look(), "this process")
    moments = [Moment(started=1, seen=seen, things={}) for seen in (before, now)]
    found = grown_between(*moments, "mark 'a'", requests, explain_grown)
    return [each for each in found if (each.holder or "").startswith(f"{__name__}.Held.")]


def test_a_process_says_how_large_its_values_are_and_who_holds_one_that_has_grown() -> None:
    lengthen_buffer(0)
    (finding,) = grown_in_a_process(lengthen_buffer)
    assert f" has {finding.bytes / 1024:.1f} KiB more than at mark 'a': bytearray of " in finding.message


def test_a_process_says_who_holds_a_tuple_that_has_grown() -> None:
    Held.value = ("",) * 20
    (finding,) = grown_in_a_process(lengthen_tuple)
    assert f" has 30 items ({finding.bytes / 1024:.1f} KiB) more than at mark 'a': 50 of " in finding.message


def test_what_a_list_takes_is_told_by_the_list_alone() -> None:
    Held.logs = []
    (finding,) = found_after(lambda number: Held.logs.append(bytes(SIZE)))
    assert finding.holder == f"{__name__}.Held.logs"
    assert " takes 1 item (" in finding.message


def test_what_grows_in_one_of_the_things_that_a_list_takes_is_told_beside_the_list() -> None:
    Held.logs = [Held()]

    def serve(number: int) -> None:
        Held.logs.append(bytes(SIZE))
        Held.logs[0].value = (Held.logs[0].value or "") + chr(97 + number % 26) * SIZE

    holders = {finding.holder for finding in found_after(serve)}
    assert holders == {f"{__name__}.Held.logs", f"{__name__}.Held.logs[0].value"}


@pytest.mark.parametrize(("turn", "count"), [(lengthen_buffer, 1), (lengthen_by_little, 0), (rise_and_fall, 0)])
def test_where_nobody_has_asked_a_value_is_told_that_needs_more_and_more(
    turn: Callable[[int], None], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All else in this process moves it, too.
    monkeypatch.setattr(turn_growth, "malloc_in_use", lambda: len(Held.value or ()))
    found = found_after(turn, asked=False)
    assert [finding.holder for finding in found] == [f"{__name__}.Held.value"] * count


def test_where_nobody_has_asked_values_are_not_read_while_malloc_gives_out_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    readings = []
    monkeypatch.setattr(turn_growth, "read_values", lambda *words: readings.append(1) or read_values(*words))
    monkeypatch.setattr(turn_growth, "malloc_in_use", lambda: 0)
    found_after(lengthen_buffer, asked=False)
    assert not readings


CONTEXT: contextvars.ContextVar[Any] = contextvars.ContextVar("said", default="")


class State(msgspec.Struct, frozen=True):
    """Gives way to another one with each turn."""

    text: str = ""
    things: tuple[bytes, ...] = ()


def lengthen_in_a_context(_: int) -> None:
    CONTEXT.set((CONTEXT.get() or "") + "x" * SIZE)


def lengthen_in_a_tuple(number: int) -> None:
    Held.value = ((Held.value or ("",))[0] + "x" * SIZE, number)


def lengthen_in_a_record(_: int) -> None:
    Held.value = State((Held.value or State()).text + "x" * SIZE)


def take_in_a_record(number: int) -> None:
    Held.value = State(things=(*(Held.value or State()).things, bytes(2000 + number)))


def take_in_an_array(number: int) -> None:
    Held.value = np.append(np.empty(0, object) if Held.value is None else Held.value, [b"x" * (2000 + number)])


def take_in_an_object_of_c(number: int) -> None:
    Held.value = xml.etree.ElementTree.Element("all") if Held.value is None else Held.value
    xml.etree.ElementTree.SubElement(Held.value, "one", {"text": "x" * (2000 + number)})


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        (lengthen_in_a_context, "context variable 'said' grows by "),
        (lengthen_in_a_tuple, f"{__name__}.Held.value[0] grows by "),
        (lengthen_in_a_record, f"{__name__}.Held.value.text grows by "),
        (take_in_a_record, f"{__name__}.Held.value.things takes 1 item ("),
        (take_in_an_array, f"{__name__}.Held.value takes 1 item ("),
        (take_in_an_object_of_c, f"{__name__}.Held.value takes 1 item ("),
    ],
)
def test_it_is_told_whatever_refers_to_it(turn: Callable[[int], object], said: str) -> None:
    (finding,) = contextvars.copy_context().run(found_after, turn)
    assert finding.message.startswith(said)


def take_turns_in_a_tuple(number: int) -> None:
    Held.value = ("x" * (SIZE * (number % 5 + 1)), number)


def hold_the_last_in_an_object_of_c(number: int) -> None:
    take_in_an_object_of_c(number)
    if len(Held.value) > 8:
        Held.value.remove(Held.value[0])


def take_longer_texts(number: int) -> None:
    Held.logs = Held.logs or []
    Held.logs.append(("x" * SIZE * number, number))


def test_what_holds_the_last_few_or_other_things_is_none() -> None:
    assert found_after(take_turns_in_a_tuple) == []
    Held.value = None
    assert found_after(hold_the_last_in_an_object_of_c) == []


def test_the_longest_of_what_a_list_takes_is_told_by_the_list_alone() -> None:
    (finding,) = found_after(take_longer_texts)
    assert finding.holder == f"{__name__}.Held.logs"


def test_what_a_linked_block_of_c_holds_is_told_once_there_are_many_blocks() -> None:
    ahead, behind = itertools.tee(bytes(2000 + number) for number in range(800))
    even, beside = itertools.tee(bytes(2000 + number) for number in range(800))
    Held.logs = [behind, beside]

    def serve(_: int) -> None:
        for each in (ahead, even, beside):
            next(each)

    (finding,) = found_after(serve, turns=800)
    assert finding.holder == f"{__name__}.Held.logs[0] (inside itertools._tee)"


def take_in_a_list(number: int) -> None:
    Held.logs = Held.logs or []
    Held.logs.append(bytes(2000 + number))


@pytest.mark.parametrize(("requests", "told"), [(30, True), (50, True), (200, False)])
def test_more_requests_may_have_been_sent_than_came_but_not_many_times_as_many(requests: int, told: bool) -> None:
    take_in_a_list(0)
    found = grown_in_a_process(take_in_a_list, requests)
    assert [f" of {requests} requests, " in finding.message for finding in found] == [True] * told


@functools.lru_cache(maxsize=64)
def remembered(number: int) -> bytes:
    return bytes(2000 + number)


def test_a_cache_that_fills_is_none_though_it_refers_to_all_that_it_has() -> None:
    assert found_after(remembered) == []
