"""What the entries of a container keep: their own things, however they lead to them, and nothing that was there."""

from __future__ import annotations

import ctypes
import functools
import io
import lzma
import mmap
import random
import re
import sys
import threading
import zlib
from asyncio import Future
from collections import deque
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from lowtide.leakcheck.findings.kept_bytes import hides_memory, kept_by, own_size

PAYLOAD = 2000


class Engine:
    def __init__(self) -> None:
        self.pool = [bytes(500) for _ in range(3000)]
        self.requests: dict[int, Any] = {}


class Request:
    def __init__(self, engine: Engine, number: int) -> None:
        self.engine, self.number, self.data = engine, number, bytes(PAYLOAD)


class Output(msgspec.Struct, gc=False):
    """As vLLM's: the collector is shown nothing of it."""

    engine: Engine
    data: bytes | bytearray
    error: str = ""


class Slotted:
    __slots__ = ("number",)


ENGINE = Engine()
BUFFER = bytearray(PAYLOAD)


def of(make: Callable[[int], object], entries: int = 20) -> float:
    """Bytes that an entry keeps, on the average."""
    return kept_by([(make(number),) for number in range(entries)]).bytes / entries


def closing_over(number: int) -> Callable[[], bytes]:
    data = bytes(PAYLOAD)
    return lambda: data


def with_default(number: int) -> Callable[[], bytes]:
    def callback(data: bytes = bytes(PAYLOAD)) -> bytes:
        return data

    return callback


def map_of_a_file(number: int) -> mmap.mmap:
    with Path(__file__).open("rb") as file:
        return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)


def class_of_its_own(number: int) -> type:
    return type(f"Output{number}", (), {"schema": bytes(PAYLOAD)})


@pytest.mark.parametrize(
    "make",
    [
        closing_over,
        with_default,
        class_of_its_own,
        lambda number: functools.partial(len, bytes(PAYLOAD)),
        lambda number: np.zeros(PAYLOAD, np.uint8)[:2],
        lambda number: ctypes.create_string_buffer(PAYLOAD),
        lambda number: mmap.mmap(-1, PAYLOAD),
        lambda number: Request(ENGINE, number),
        lambda number: Output(ENGINE, bytes(PAYLOAD)),
    ],
)
def test_what_an_entry_brings_with_it_counts(make: Callable[[int], object]) -> None:
    assert PAYLOAD <= of(make) < 2 * PAYLOAD + sys.getsizeof(type("Output", (), {}))


@pytest.mark.parametrize(
    "make",
    [
        lambda number: ENGINE,
        lambda number: (number, ENGINE),
        lambda number: ENGINE.__init__,  # type: ignore[misc]
        lambda number: Request,
        lambda number: closing_over,
        lambda number: np.zeros,
        lambda number: sys,
        lambda number: Output(ENGINE, BUFFER),
        lambda number: ctypes.c_char.from_buffer(BUFFER),
        map_of_a_file,
    ],
)
def test_what_was_there_does_not(make: Callable[[int], object]) -> None:
    assert of(make) < PAYLOAD / 4


def test_classes_and_functions_of_modules_count_nothing_though_each_entry_has_another() -> None:
    defined = [each for each in vars(functools).values() if callable(each)][:10]
    assert kept_by([(each,) for each in defined if type(each).__name__ in ("function", "type")]).bytes == 0


def test_what_all_entries_of_one_turn_share_counts_once() -> None:
    payloads = [bytes(PAYLOAD) for _ in range(5)]
    kept = kept_by([(number, payload) for payload in payloads for number in range(40)])
    assert 5 * PAYLOAD <= kept.bytes < 6 * PAYLOAD


def test_who_refers_to_the_entry_before_it_does_not_count_that_again() -> None:
    entries: list[Any] = []
    for number in range(20):
        request = Request(ENGINE, number)
        request.engine = entries[-1] if entries else ENGINE
        entries.append(request)
    kept = kept_by([(each,) for each in entries], besides=(ENGINE,))
    assert 20 * PAYLOAD <= kept.bytes < 30 * PAYLOAD


def test_an_engine_that_has_them_in_another_dict_does_not_make_them_everybodys() -> None:
    engine = Engine()
    engine.requests = {number: Request(engine, number) for number in range(20)}
    wrapped = [([request],) for request in engine.requests.values()]
    assert 20 * PAYLOAD <= kept_by(wrapped).bytes < 30 * PAYLOAD


@pytest.mark.parametrize("item", [Slotted(), Engine, [], {}, 1.5, closing_over, b"12345678"])
def test_an_object_is_as_large_as_the_interpreter_says(item: object) -> None:
    assert own_size(item) == sys.getsizeof(item)


def test_attributes_for_which_no_dict_was_made_count() -> None:
    request = Request(ENGINE, 1)
    more = 0 if sys.version_info >= (3, 13) or sys.version_info < (3, 11) else 3 * 8
    assert own_size(request) >= sys.getsizeof(request) + more


class Asked(type):
    """Counts what its classes are asked."""

    count = 0

    def __getattribute__(cls, name: str) -> object:
        Asked.count += 1
        return type.__getattribute__(cls, name)


class OfPython(metaclass=Asked):
    pass


class Derived(OfPython):
    pass


def test_what_may_have_memory_in_c_is_known_by_its_class_which_is_not_asked() -> None:
    hiding = [type(zlib.compressobj()), lzma.LZMACompressor, random.Random]
    telling = [type(threading.Lock()), io.BytesIO, deque, dict, str, datetime, re.Pattern, Derived, object, Future]
    Asked.count = 0
    assert all(map(hides_memory, hiding))
    assert not any(map(hides_memory, telling))
    assert Asked.count == 0
