"""`LeakCheck(turns=…)`: what grows with each turn of a block, in which container or part of the memory."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import io
import linecache
import lzma
import os
import random
import re
import sys
import types
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lowtide import LeakCheck
from lowtide.leakcheck.findings import turn_growth
from lowtide.leakcheck.findings.turn_growth import SECOND, TurnGrowth, is_read
from lowtide.leakcheck.watching.check import LeakCheckError
from lowtide.reports.schema import Finding

LIBC = ctypes.CDLL(None)

REQUESTS: dict[str, bytes] = {}


class Server:
    """Answers requests, and forgets to forget some."""

    def __init__(self) -> None:
        self.recent: deque[bytes] = deque(maxlen=8)
        self.replies: list[bytes] = []
        self.table: dict[int, bytes] = {}

    def answer(self, turn: int) -> None:
        self.recent.append(bytes(3000))
        self.table[turn % 4] = bytes(3000)


def findings(check: LeakCheck) -> list[Finding]:
    return [finding for finding in check.report.subjects[0].findings if finding.trend == "growth"]


def grown_by(turn: Callable[[int], object], turns: int = 20) -> dict[str | None, str]:
    """Return what is told of a block that does something in each of its turns, by holder."""
    with LeakCheck(turns=turns) as check:
        for number in range(turns):
            turn(number)
            check.turn()
    return {finding.holder: finding.message for finding in findings(check)}


class Shards:
    """Has a table and a memo, which fills, in four parts each, some of every third request, and a new list in each."""

    def __init__(self) -> None:
        self.parts: dict[str, dict[int, bytes]] = {f"part[{number}]": {} for number in range(4)}
        self.memo: list[dict[int, bytes]] = [{} for _ in range(4)]
        self.samples: list[bytes] = []
        self.history: list[bytes] = []
        self.window: list[bytes] = []
        self.drawn = random.Random(1)

    def answer(self, number: int) -> None:
        self.parts[f"part[{number % 4}]"][number] = bytes(3000)
        key = self.drawn.randrange(60)
        self.memo[key % 4].setdefault(key, bytes(3000))
        self.history = [*self.history, bytes(4000)]
        self.window = [*self.window, bytes(4000)][-16:]
        if number % 3 == 0:
            self.samples.append(bytes(6000))


SHARDS = Shards()


def show_source(number: int) -> None:
    """Compile a generated text, and let a traceback find it."""
    name = f"<request {number}>"
    source = "".join(f"x{line} = {line}\n" for line in range(100))
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    exec(compile(source, name, "exec"), {})


def load(number: int) -> None:
    module = types.ModuleType(f"generated_{number}")
    exec("".join(f"def f{line}(): return {line}\n" for line in range(40)), vars(module))
    sys.modules[module.__name__] = module


@pytest.fixture
def shown() -> Iterator[None]:
    before = {*linecache.cache}, {*sys.modules}
    re.purge()
    yield
    re.purge()
    for table, names in zip((linecache.cache, sys.modules), before, strict=True):
        for name in set(table) - names:
            del table[name]


@pytest.mark.usefixtures("shown")
def test_what_each_turn_adds_is_told_with_its_container() -> None:
    server = Server()
    REQUESTS.clear()

    def serve(number: int) -> None:
        server.answer(number)
        server.replies.append(bytes(2000 + number))
        REQUESTS[f"request {number}"] = bytes(2000 + number)
        SHARDS.answer(number)
        show_source(number)
        load(number)

    grown = grown_by(serve, turns=48)
    (replies,) = (holder for holder in grown if holder and ".replies of local 'server' of test_what" in holder)
    module, in_each = __name__, "in each of 46 turns"
    # An empty text has 49 bytes, from Python 3.12 on 41.
    in_all, lines = ("96.5", "6.7") if sys.version_info < (3, 12) else ("96.2", "5.9")
    told = {
        replies: f"{replies} takes 1 item (2.0 KiB) {in_each}",
        f"{module}.REQUESTS": f"{module}.REQUESTS takes 1 item (2.1 KiB) {in_each}, {in_all} KiB in all: 48 of bytes",
        # What is taken by turns, or in every third, and a new list in each; a memo that fills is none.
        f"{module}.SHARDS.parts[*]": f"{module}.SHARDS.parts[*] takes 1 item (3.0 KiB) {in_each}",
        f"{module}.SHARDS.samples": f"{module}.SHARDS.samples takes 1 item (5.8 KiB) in one of 3 of 46 turns",
        f"{module}.SHARDS.history": f"{module}.SHARDS.history takes 1 item (3.9 KiB) {in_each}",
        # Tables of Python's library, and generated modules.
        "linecache.cache": f"linecache.cache takes 1 item ({lines} KiB) {in_each}",
        "sys.modules": "sys.modules takes 1 item (",
    }
    assert {holder: message[: len(told.get(holder, message))] for holder, message in grown.items()} == told
    assert grown[f"{module}.SHARDS.parts[*]"].endswith(": 48 of bytes in 4 of them")


@pytest.mark.usefixtures("shown")
def test_turns_that_add_nothing_are_clean() -> None:
    server = Server()

    def serve(number: int) -> None:
        server.answer(number)
        # What a library bounds, and what is put where it was.
        re.compile(f"{number}(a|b)+{'c' * 3000}")
        show_source(0)
        load(0)

    assert grown_by(serve) == {}


LABELS: dict[str, list[int]] = {}
FEW: dict[str, list[int]] = {}


@pytest.mark.parametrize(("turns", "is_told"), [(2000, True), (200, False)])
def test_little_is_told_once_many_turns_have_added_some(turns: int, is_told: bool) -> None:
    def label(number: int) -> None:
        LABELS.setdefault(f"user {number}", [number] * 30)
        FEW.setdefault(f"user {number % 50}", [number] * 30)

    assert [f"{__name__}.LABELS"] * is_told == list(grown_by(label, turns))
    LABELS.clear()
    FEW.clear()


def test_memory_that_c_keeps_is_told_with_its_part() -> None:
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    taken = []
    with LeakCheck(turns=16) as check:
        for _ in range(16):
            taken.append(library.malloc(1 << 20))
            ctypes.memset(taken[-1], 1, 1 << 20)
            check.turn()
    for address in taken:
        library.free(ctypes.c_void_p(address))
    (finding,) = findings(check)
    # Beside it the process's heap moves, more or less by what ran in it before, and it is said to a tenth.
    said = re.search(r"over 15 turns, ([\d.]+) ([KM])iB with each", finding.message)
    assert said is not None, finding.message
    assert 0.9 <= float(said[1]) / {"K": 1024, "M": 1}[said[2]] <= 1.2
    assert "malloc in use has" in finding.message


def test_a_turn_needs_to_know_how_many_there_will_be() -> None:
    with LeakCheck() as check, pytest.raises(LeakCheckError, match=r"use LeakCheck\(turns=12\)"):
        check.turn()


def test_turns_that_were_not_made_are_said() -> None:
    with LeakCheck(turns=40) as check:
        for _ in range(3):
            check.turn()
    (subject,) = check.report.subjects
    assert subject.outcome == "clean"
    (missing,) = subject.not_measured
    assert (missing.what, missing.why.partition(":")[0]) == (
        "what grows with each turn",
        "3 of 40 turns were made, and it shows from 12 on",
    )


@pytest.mark.nightly
def test_it_is_told_however_large_the_heap_is() -> None:
    large, kept = [[] for _ in range(400_000)], list[bytes]()  # type: ignore[var-annotated]
    with LeakCheck(turns=12) as check:
        for turn in range(12):
            kept.append(bytes(2000 + turn))
            check.turn()
    del large
    (finding,) = findings(check)
    assert (finding.holder or "").startswith("local 'kept' of test_it_is_told")


def test_one_stretch_is_read_however_large_the_heap_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_growth, "_FREE", 0)
    growth, kept = TurnGrowth("tests", by_frames=True), list[bytes]()
    for turn in range(1, 13):
        kept.append(bytes(2000 + turn))
        if is_read(turn, 12, is_last=turn == 12):
            growth.read(turn, begins=turn == SECOND)
    (finding,) = growth.end("module", "module").containers
    assert (finding.holder or "").startswith("local 'kept' of test_one_stretch")


@pytest.mark.nightly
def test_who_wants_to_hear_of_each_turn_hears_what_there_is_more() -> None:
    heard: list[tuple[int, dict[str, int]]] = []
    opened: list[int] = []
    with LeakCheck(on_turn=lambda turn, more: heard.append((turn, dict(more)))) as check:
        for _ in range(3):
            opened.append(os.open("/dev/null", os.O_RDONLY))
            check.turn()
        os.close(opened.pop())
        check.turn()
    for number in opened:
        os.close(number)
    assert [(turn, more["file-descriptors"], more["threads"]) for turn, more in heard] == [
        (1, 1, 0),
        (2, 2, 0),
        (3, 3, 0),
        (4, 2, 0),
    ]
    assert heard[0][1]["host-memory"] < 8 << 20


@pytest.mark.parametrize("setting", [{"tolerance": "much"}, {"peak": -1}])
def test_what_is_no_size_is_one_line(setting: dict[str, Any]) -> None:
    with pytest.raises(
        LeakCheckError, match=r"^LeakCheck\((tolerance|peak)=…\): .* is no size: use bytes such as 4096"
    ):
        LeakCheck(**setting)


def test_a_tolerance_may_be_written_with_its_unit() -> None:
    kept = []
    with LeakCheck(tolerance="2MiB") as check:
        kept.append(bytearray(64))
    assert check.report.subjects[0].outcome == "clean"
    assert check.report.settings is not None


def test_the_container_of_what_has_the_memory_in_c_is_named() -> None:
    kept: list[object] = []
    (message,) = grown_by(lambda _: kept.append(zlib.compressobj()), turns=40).values()
    assert "; local 'kept' of test_the_container_of_what" in message
    assert message.endswith(" takes 1 zlib.Compress with each, which may have it in C")


def test_a_container_of_what_has_no_memory_in_c_is_not_blamed_for_what_c_allocates() -> None:
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    kept: list[object] = []
    shared = zlib.compressobj()

    def take(turn: int) -> None:
        ctypes.memset(library.malloc(1 << 19), 1, 1 << 19)
        kept.append((turn, shared))

    (message,) = grown_by(take, turns=40).values()
    assert "malloc in use has" in message
    assert "kept" not in message


def test_a_few_of_what_has_the_memory_in_c_are_no_growth() -> None:
    kept: deque[object] = deque(maxlen=4)
    assert grown_by(lambda _: kept.append(zlib.compressobj()), turns=40) == {}


def test_what_each_turn_adds_with_a_name_is_told_in_place_of_what_has_none() -> None:
    kept: list[object] = []
    with LeakCheck(turns=20) as check:
        for _ in range(20):
            # Some 2.4 MiB in C, and more than the tolerance of a block in all.
            kept.extend(lzma.LZMACompressor(preset=1) for _ in range(3))
            check.turn()
    (finding,) = check.report.subjects[0].findings
    assert finding.message.endswith(" takes 3 _lzma.LZMACompressor with each, which may have it in C")


@pytest.mark.parametrize(("last", "is_told"), [(20, True), (5, False)])
def test_descriptors_that_native_code_opens_in_each_turn_are_no_first_use(last: int, *, is_told: bool) -> None:
    opened = list[str]()
    with LeakCheck(turns=20, remedies="never") as check:
        for number in range(20):
            if number < last:
                opened.append(str(LIBC.timerfd_create(1, 0)))
            check.turn()
    for descriptor in opened:
        os.close(int(descriptor))
    subject = check.report.subjects[0]
    told = [finding.message for finding in subject.findings if finding.resource == "file-descriptors"]
    assert (len(told), len(subject.not_measured)) == ((1, 0) if is_told else (0, 1))
    assert not is_told or told[0].startswith("20 file descriptors still open after block")


class Prompt:
    """Is an argument of a cached function."""

    def __init__(self) -> None:
        self.text = bytearray(3000)


@functools.lru_cache(maxsize=None)  # noqa: UP033 - as engines write it
def length_of(prompt: Prompt) -> int:
    return len(prompt.text)


class Engine:
    """Keeps something of each request that others have to hold."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.has_ended = self.loop.create_future()
        self.error = ValueError("it has ended")
        self.out = io.StringIO()
        self.said: dict[tuple[object, ...], bool] = {}

    def on_end(self, prompt: Prompt, _: object) -> None:
        prompt.text.clear()

    def fail(self, prompt: bytearray) -> None:
        raise self.error

    def answer(self, number: int) -> None:
        length_of(Prompt())
        self.said[f"{number}" * 1000, UserWarning, 1] = True
        self.has_ended.add_done_callback(functools.partial(self.on_end, Prompt()))
        with contextlib.suppress(ValueError):
            self.fail(bytearray(3000))
        self.out.write(f"{number}" * 20_000)


class CleanEngine(Engine):
    """Keeps nothing."""

    def fail(self, prompt: bytearray) -> None:
        raise self.error.with_traceback(None)

    def answer(self, number: int) -> None:
        length_of.__wrapped__(Prompt())
        callback = functools.partial(self.on_end, Prompt())
        self.has_ended.add_done_callback(callback)
        self.has_ended.remove_done_callback(callback)
        with contextlib.suppress(ValueError):
            self.fail(bytearray(3000))
        self.out.write(f"{number}" * 20_000)
        self.out.seek(0)
        self.out.truncate()


def told_of(engine: Engine) -> list[Finding]:
    with LeakCheck(turns=40, remedies="never") as check:
        for number in range(40):
            engine.answer(10 + number)
            check.turn()
    engine.loop.close()
    length_of.cache_clear()
    return findings(check)


def test_what_grows_is_told_by_what_it_is_of_and_for() -> None:
    found = {(finding.holder or "").partition(" of local ")[0]: finding for finding in told_of(Engine())}
    # Until Python 3.11 a `StringIO` has its texts in a list, which is none of its own.
    assert found.keys() == {".has_ended", ".error.__traceback__", ".out", ".said", f"{__name__}.length_of"}
    cache = found[f"{__name__}.length_of"]
    assert re.search(r"in all: \d+ of test_turns.Prompt$", cache.message.replace("tests.leakcheck.watching.", ""))
    callbacks, traceback, written = found[".has_ended"], found[".error.__traceback__"], found[".out"]
    assert callbacks.message.endswith(" of tuple, for tests.leakcheck.watching.test_turns.Engine.on_end")
    assert "with_traceback(None)" in (traceback.advice or "")
    assert ": _io.StringIO of " in written.message
    assert ": 40 of str, added in Engine.answer, test_turns.py:" in found[".said"].message


def test_what_keeps_nothing_of_its_turns_is_silent() -> None:
    assert told_of(CleanEngine()) == []
