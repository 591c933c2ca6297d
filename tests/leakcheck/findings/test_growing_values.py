"""One value that becomes longer with every turn is told with its holder, and one that only changes is not."""

from __future__ import annotations

import array
import contextvars
import functools
import io
import itertools
import xml.etree.ElementTree
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

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
    """What the turns of one kind keep."""

    def __init__(self) -> None:
        self.value: Any = None
        self.logs: Any = ()


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


def name_of(turn: Turn, attribute: str = "value") -> str:
    return f"{__name__}.PROGRAM.{turn.__name__}.{attribute}"


def found_after(*turns: Turn, asked: bool = True, seconds: float = 0.0) -> list[Finding]:
    """Return what is found of turns of several kinds, side by side."""
    growth = TurnGrowth("steps", asked=asked, seconds=seconds)
    for number in range(1, TURNS + 1):
        for turn in turns:
            turn(held_by(turn), number)
        if number % 4 == 0:
            growth.read(number, begins=number == 4)
    return list(growth.end("", "").containers)


def lengthen_text(held: Held, number: int) -> None:
    held.value = (held.value or "") + chr(97 + number % 26) * SIZE


def lengthen_buffer(held: Held, number: int) -> None:
    held.value = held.value or bytearray()
    held.value.extend(bytes(SIZE))


def lengthen_array(held: Held, number: int) -> None:
    held.value = held.value or array.array("d")
    held.value.frombytes(bytes(SIZE))


def write_to_memory(held: Held, number: int) -> None:
    held.value = held.value or io.BytesIO()
    held.value.write(bytes(SIZE))


def write_text_to_memory(held: Held, _: int) -> None:
    held.value = held.value or io.StringIO()
    held.value.write("x" * SIZE)


def concatenate(held: Held, number: int) -> None:
    held.value = np.zeros(SIZE) if held.value is None else np.concatenate([held.value, np.ones(SIZE // 8)])


def test_it_is_told_though_malloc_has_less_in_the_end() -> None:
    """As what a server frees between two requests: where nothing rises, nothing is read."""
    ballast = [bytes(1000) for _ in range(2000)]

    def serve(held: Held, number: int) -> None:
        lengthen_text(held, number)
        if number == TURNS:
            ballast.clear()

    assert [each.holder for each in found_after(serve, seconds=1.0)] == [name_of(serve)]


@pytest.mark.parametrize("lengthens", [True, False])
def test_it_is_told_by_what_each_turn_adds_to_the_process(lengthens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The level since the first turn lacks what that has added, and whatever else has gone meanwhile."""
    growth, read, held = TurnGrowth("tests"), host_levels.read_levels, held_by(lengthen_text)
    monkeypatch.setattr(host_levels, "read_levels", lambda: tuple(level - MIB for level in read()))
    for number in range(12):
        held.value = ((held.value or "") if lengthens else "") + chr(97 + number) * (4 * MIB)
        growth.note("")
    found = growth.end("", "").host
    assert (found and found.holder) == (name_of(lengthen_text) if lengthens else None)


def replace(held: Held, number: int) -> None:
    held.value = bytes(SIZE * 20 + number)


def rise_and_fall(held: Held, number: int) -> None:
    held.value = bytes(SIZE * (number % 10))


def fill(held: Held, number: int) -> None:
    if number < TURNS // 2:
        lengthen_buffer(held, number)


def lengthen_by_little(held: Held, number: int) -> None:
    held.value = (held.value or "x" * SIZE) + "y" * 2000


def lengthen_tuple(held: Held, number: int) -> None:
    held.value = (*(held.value or ()), bytes(SIZE))


def add_to_set(held: Held, number: int) -> None:
    held.value = (held.value or frozenset()) | {bytes(SIZE) + bytes([number])}


def wrap_partial(held: Held, number: int) -> None:
    held.value = functools.partial(held.value or print, bytes(SIZE))


def lengthen_tuple_by_little(held: Held, number: int) -> None:
    held.value = (*(held.value or ()), bytes(1300))


def lengthen_two(held: Held, number: int) -> None:
    lengthen_tuple(held, number)
    held.logs = (*held.logs, number)


def take_into_a_list(held: Held, number: int) -> None:
    held.logs = held.logs or []
    held.logs.append(bytes(SIZE))


def lengthen_text_in_a_list(held: Held, number: int) -> None:
    take_into_a_list(held, number)
    if number == 1:
        held.logs[0] = Held()
    lengthen_text(held.logs[0], number)


GROWING: dict[Turn, dict[str, tuple[str, str]]] = {
    lengthen_text: {"value": ("grows by", "str")},
    lengthen_buffer: {"value": ("grows by", "bytearray")},
    lengthen_array: {"value": ("grows by", "array.array")},
    write_to_memory: {"value": ("grows by", "_io.BytesIO")},
    write_text_to_memory: {"value": ("grows by", "_io.StringIO")},
    concatenate: {"value": ("grows by", "numpy.ndarray")},
    # What gives way to a longer one is told as a container is.
    lengthen_tuple: {"value": ("takes 1 item (", "40 of bytes")},
    add_to_set: {"value": ("takes 1 item (", "40 of bytes")},
    wrap_partial: {"value.args": ("takes 1 item (", "40 of bytes")},
    lengthen_two: {"value": ("takes 1 item (", "40 of bytes")},
    # What a list takes is told by the list alone, and what grows in one of these things beside it.
    take_into_a_list: {"logs": ("takes 1 item (", "40 of bytes")},
    lengthen_text_in_a_list: {"logs": ("takes 1 item (", "40 of bytes"), "logs[0].value": ("grows by", "str")},
}
"""Of each kind of turns what is said of which attribute of theirs."""


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_what_grows_is_told_with_its_holder(seconds: float) -> None:
    found = [finding for finding in found_after(*GROWING, seconds=seconds) if finding.holder]
    wanted = {name_of(turn, attribute): what for turn, each in GROWING.items() for attribute, what in each.items()}
    told = {}
    for finding in found:
        verb, kind = wanted.get(finding.holder or "", ("", ""))
        is_as_large = 0.85 * SIZE * finding.count < finding.bytes < 1.2 * SIZE * finding.count
        is_said = finding.message.startswith(f"{finding.holder} {verb}") and f" in all: {kind}" in finding.message
        told[finding.holder] = (is_said, is_as_large, finding.trend) if verb else finding.message
    assert told == dict.fromkeys(wanted, (True, True, "growth"))
    assert len(found) == len(wanted)
    assert {finding.count for finding in found if " grows by " in finding.message} == {TURNS - 4}


def test_a_tuple_is_read_though_little_has_come_in_a_few_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    # All else in this process moves it by more.
    monkeypatch.setattr(turn_growth, "malloc_in_use", lambda: 1300 * len(held_by(lengthen_tuple_by_little).value or ()))
    (finding,) = found_after(lengthen_tuple_by_little)
    assert finding.holder == name_of(lengthen_tuple_by_little)


def window(held: Held, number: int) -> None:
    held.value = (*(held.value or ()), bytes(SIZE))[-8:]


def take_tuples(held: Held, number: int) -> None:
    held.value = held.value or []
    held.value.append((number,))


class Row:
    """Has a place for what each turn may say."""

    __slots__ = tuple(f"said_{number}" for number in range(TURNS + 1))


def fill_row(held: Held, number: int) -> None:
    held.value = held.value or Row()
    setattr(held.value, f"said_{number}", (bytes(2000 + number), number))


STILL = (replace, rise_and_fall, fill, lengthen_by_little, window, take_tuples, fill_row)
"""What is no longer in the end, a window of things, and tuples of little."""


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_what_only_changes_or_is_little_is_none(seconds: float) -> None:
    assert [finding.holder for finding in found_after(*STILL, seconds=seconds)] == []


def test_a_program_that_runs_and_needs_no_more_is_not_held_up_to_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = []
    monkeypatch.setattr(turn_growth, "read_values", lambda *words: readings.append(1) or read_values(*words))
    found_after(rise_and_fall, seconds=1.0)
    quiet = len(readings)
    found_after(lengthen_buffer, seconds=1.0)
    assert quiet < 5 < len(readings) - quiet


def grown_in_a_process(turn: Turn, requests: int = 0) -> list[Finding]:
    """Return what two looks into a process say of what is held, with thirty turns between them."""
    before = ask(answers.answer, Look(), "this process")
    for number in range(30):
        turn(held_by(turn), number)
    now = ask(answers.answer, Look(), "this process")
    moments = [Moment(started=1, seen=seen, things={}) for seen in (before, now)]
    found = grown_between(*moments, "mark 'a'", requests, explain_grown)
    return [each for each in found if (each.holder or "").startswith(f"{__name__}.PROGRAM.{turn.__name__}.")]


def test_a_process_says_how_large_its_values_are_and_who_holds_one_that_has_grown() -> None:
    lengthen_buffer(held_by(lengthen_buffer), 0)
    (finding,) = grown_in_a_process(lengthen_buffer)
    assert f" has {finding.bytes / 1024:.1f} KiB more than at mark 'a': bytearray of " in finding.message


def test_a_process_says_who_holds_a_tuple_that_has_grown() -> None:
    held_by(lengthen_tuple).value = ("",) * 20
    (finding,) = grown_in_a_process(lengthen_tuple)
    assert f" has 30 items ({finding.bytes / 1024:.1f} KiB) more than at mark 'a': 50 of " in finding.message


@pytest.mark.parametrize(("turn", "count"), [(lengthen_buffer, 1), (lengthen_by_little, 0), (rise_and_fall, 0)])
def test_where_nobody_has_asked_a_value_is_told_that_needs_more_and_more(
    turn: Turn, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However large this process's heap is; and all else in it moves what malloc has given out, too.
    monkeypatch.setattr(turn_growth, "_FREE", 1 << 40)
    monkeypatch.setattr(turn_growth, "malloc_in_use", lambda: len(held_by(turn).value or ()))
    found = found_after(turn, asked=False)
    assert [finding.holder for finding in found] == [name_of(turn)] * count


def test_where_nobody_has_asked_values_are_not_read_while_malloc_gives_out_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    readings = []
    monkeypatch.setattr(turn_growth, "read_values", lambda *words: readings.append(1) or read_values(*words))
    monkeypatch.setattr(turn_growth, "malloc_in_use", lambda: 0)
    found_after(lengthen_buffer, asked=False)
    assert not readings


CONTEXT: contextvars.ContextVar[Any] = contextvars.ContextVar("said", default="")


class TextState(msgspec.Struct, frozen=True):
    """Gives way to another one with each turn."""

    text: str = ""


class ThingsState(msgspec.Struct, frozen=True):
    """As the other one."""

    things: tuple[bytes, ...] = ()


def lengthen_in_a_context(_: Held, number: int) -> None:
    CONTEXT.set((CONTEXT.get() or "") + "x" * SIZE)


def lengthen_in_a_tuple(held: Held, number: int) -> None:
    held.value = ((held.value or ("",))[0] + "x" * SIZE, number)


def lengthen_in_a_record(held: Held, _: int) -> None:
    held.value = TextState((held.value or TextState()).text + "x" * SIZE)


def take_in_a_record(held: Held, number: int) -> None:
    # Beside another of the type, which stays as it is.
    held.logs = held.logs or ThingsState(tuple(bytes(2000 + turn) for turn in range(TURNS // 2)))
    held.value = ThingsState((*(held.value or ThingsState()).things, bytes(2000 + number)))


def take_in_an_array(held: Held, number: int) -> None:
    held.value = np.append(np.empty(0, object) if held.value is None else held.value, [b"x" * (2000 + number)])


def take_in_an_object_of_c(held: Held, number: int) -> None:
    held.value = xml.etree.ElementTree.Element("all") if held.value is None else held.value
    xml.etree.ElementTree.SubElement(held.value, "one", {"text": "x" * (2000 + number)})


RECORDS = {
    lengthen_in_a_context: "context variable 'said' grows by ",
    lengthen_in_a_tuple: f"{name_of(lengthen_in_a_tuple)}[0] grows by ",
    lengthen_in_a_record: f"{name_of(lengthen_in_a_record)}.text grows by ",
    take_in_a_record: f"{name_of(take_in_a_record)}.things takes 1 item (",
    take_in_an_array: f"{name_of(take_in_an_array)} takes 1 item (",
    take_in_an_object_of_c: f"{name_of(take_in_an_object_of_c)} takes 1 item (",
}


def test_it_is_told_whatever_refers_to_it() -> None:
    messages = [finding.message for finding in contextvars.copy_context().run(found_after, *RECORDS)]
    assert {said: sum(message.startswith(said) for message in messages) for said in RECORDS.values()} == dict.fromkeys(
        RECORDS.values(), 1
    )
    assert len(messages) == len(RECORDS)


def take_turns_in_a_tuple(held: Held, number: int) -> None:
    held.value = ("x" * (SIZE * (number % 5 + 1)), number)


def take_turns_in_lists(held: Held, number: int) -> None:
    held.value = held.value or [[] for _ in range(5)]
    held.value[number % 5] = ["x" * (SIZE * (number % 5 + 1))]


def hold_the_last_in_an_object_of_c(held: Held, number: int) -> None:
    take_in_an_object_of_c(held, number)
    if len(held.value) > 8:
        held.value.remove(held.value[0])


@functools.lru_cache(maxsize=64)
def remembered(number: int) -> bytes:
    return bytes(2000 + number)


def remember(_: Held, number: int) -> None:
    remembered(number)


def test_what_holds_the_last_few_or_other_things_and_a_cache_that_fills_are_none() -> None:
    found = found_after(take_turns_in_a_tuple, take_turns_in_lists, hold_the_last_in_an_object_of_c, remember)
    assert [finding.holder for finding in found] == []


def take_longer_texts(held: Held, number: int) -> None:
    held.logs = held.logs or []
    held.logs.append(("x" * SIZE * number, number))


def test_the_longest_of_what_a_list_takes_is_told_by_the_list_alone() -> None:
    (finding,) = found_after(take_longer_texts)
    assert finding.holder == name_of(take_longer_texts, "logs")


def test_what_a_linked_block_of_c_holds_is_told_once_there_are_many_blocks() -> None:
    ahead, behind = itertools.tee(bytes(2000 + number) for number in range(800))
    even, beside = itertools.tee(bytes(2000 + number) for number in range(800))

    def serve(held: Held, _: int) -> None:
        held.logs = [behind, beside]
        for _ in range(20):
            for each in (ahead, even, beside):
                next(each)

    (finding,) = found_after(serve)
    assert finding.holder == f"{name_of(serve, 'logs')}[0] (inside itertools._tee)"


def take_in_a_list(held: Held, number: int) -> None:
    held.logs = held.logs or []
    held.logs.append(bytes(5000 + number))


@pytest.mark.parametrize(("requests", "told"), [(30, True), (60, True), (70, False)])
def test_more_requests_may_have_been_sent_than_came_but_not_many_times_as_many(requests: int, told: bool) -> None:
    take_in_a_list(held_by(take_in_a_list), 0)
    found = grown_in_a_process(take_in_a_list, requests)
    assert [f" of {requests} requests, " in finding.message for finding in found] == [True] * told
