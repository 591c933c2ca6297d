"""Counters: each thing that is counted appears under its name, and disappears."""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import gc
import itertools
import mmap
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from multiprocessing import shared_memory
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed

from lowtide.leakcheck.resources.settings import changes_between
from lowtide.probes import native, originals, stages
from lowtide.probes.device.allocations import STEP_BYTES
from lowtide.probes.device.driver import find_driver
from lowtide.probes.host import counters
from lowtide.probes.host.counters import (
    CounterReader,
    Counters,
    Folder,
    anonymous_bytes,
    child_processes,
)
from lowtide.probes.objects import listed
from lowtide.probes.objects.foreign import living_threads, thread_key
from tests.waiting import HANG_S, wait_until

MIB = 1 << 20


def read() -> Counters:
    return CounterReader(None, card=False).read()


@contextlib.contextmanager
def thread() -> Iterator[str]:
    done = threading.Event()
    started = threading.Thread(target=done.wait, name="a-thread-of-this-test")
    started.start()
    yield f"a-thread-of-this-test ({started.ident})"
    done.set()
    started.join()


@contextlib.contextmanager
def process() -> Iterator[str]:
    child = subprocess.Popen(["sleep", "600"])
    yield str(child.pid)
    child.kill()
    child.wait()


@contextlib.contextmanager
def open_file() -> Iterator[str]:
    with Path(__file__).open() as file:
        yield f"{file.fileno()} -> {__file__}"


@contextlib.contextmanager
def open_socket() -> Iterator[str]:
    with socket.socket() as end:
        yield f"{end.fileno()} -> {os.readlink(f'/proc/self/fd/{end.fileno()}')}"  # noqa: PTH115 - no path


@contextlib.contextmanager
def epoll() -> Iterator[str]:
    with select.epoll() as poll:
        yield f"{poll.fileno()} -> anon_inode:[eventpoll]"


@contextlib.contextmanager
def shared() -> Iterator[str]:
    memory = shared_memory.SharedMemory(create=True, size=4096)
    memory.close()
    yield memory.name.lstrip("/")
    memory.unlink()


THINGS: dict[str, tuple[str, Callable[[], AbstractContextManager[str]]]] = {
    "thread": ("threads", thread),
    "process": ("processes", process),
    "file": ("file-descriptors", open_file),
    "socket": ("file-descriptors", open_socket),
    "epoll": ("file-descriptors", epoll),
    "shared-memory": ("shared-memory", shared),
}


@pytest.mark.parametrize("thing", THINGS)
def test_it_is_there_by_name_and_gone(thing: str) -> None:
    resource, make = THINGS[thing]
    with make() as name:
        assert name in read().items[resource]
    assert name not in read().items[resource]


class Source:
    def __init__(self, *pools: stages.PoolReading) -> None:
        self.pools = pools

    def read_pools(self) -> tuple[stages.PoolReading, ...]:
        return self.pools


def arena(tag: str, *ranges: tuple[int, int]) -> stages.PoolReading:
    size = sum(length for _, length in ranges)
    return stages.PoolReading("arena", tag, "cpu", size, size, ranges)


def test_an_arena_is_there_by_its_parts_and_gone() -> None:
    source = Source(arena("weights", (0x1000, 4096), (0x4000, 8192)), arena("kv_cache", (0x9000, 4096)))
    stages.announce(source)
    try:
        assert read().items["arena cpu"] == {
            "weights at 0x1000": 4096,
            "weights at 0x4000": 8192,
            "kv_cache at 0x9000": 4096,
        }
    finally:
        stages.withdraw(source)
    assert "arena cpu" not in read().items


def test_a_pinned_pool_counts_as_pinned() -> None:
    before = read().amounts["pinned"]
    source = Source(stages.PoolReading("pinned", "ring", "cpu", 8192, 4096, ((0x1000, 4096),)))
    stages.announce(source)
    try:
        assert read().amounts["pinned"] == 4096
    finally:
        stages.withdraw(source)
    assert read().amounts["pinned"] == before == 0


def test_frozen_objects_are_counted() -> None:
    before = read().amounts["gc-frozen"]
    gc.freeze()
    try:
        frozen = read().amounts["gc-frozen"]
    finally:
        gc.unfreeze()
    assert before is not None
    assert frozen is not None
    assert frozen > before + 1000
    assert read().amounts["gc-frozen"] == 0


@pytest.mark.parametrize(("count", "counted"), [(0, 0), (375, 0), (2000, 0), (2001, 2001)])
def test_so_few_frozen_objects_as_the_interpreter_starts_with_are_no_program_s(
    monkeypatch: pytest.MonkeyPatch, count: int, counted: int
) -> None:
    monkeypatch.setattr(listed, "_frozen", None)
    monkeypatch.setattr(originals.gc, "get_freeze_count", lambda: count)
    assert read().amounts["gc-frozen"] == counted


def test_the_process_s_own_memory_grows_and_shrinks_with_what_it_touches() -> None:
    size = 64 << 20
    before = anonymous_bytes()
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        assert abs(anonymous_bytes() - before) < 4 << 20
        view = (ctypes.c_char * size).from_buffer(memory)
        ctypes.memset(view, 1, size)
        assert abs(anonymous_bytes() - before - size) < 4 << 20
        del view
    assert abs(anonymous_bytes() - before) < 4 << 20


def test_an_ended_thread_of_c_is_none_though_python_keeps_its_object() -> None:
    goes_on, asked = _thread.allocate_lock(), []

    def asks() -> None:
        asked.append(threading.current_thread())
        with goes_on:
            pass

    with goes_on:
        _thread.start_new_thread(asks, ())
        wait_until(lambda: asked)
        assert thread_key(asked[0]) in map(thread_key, living_threads())
    wait_until(lambda: thread_key(asked[0]) not in map(thread_key, living_threads()))
    if sys.version_info < (3, 13):
        assert asked[0] in threading.enumerate()
        threading._active.pop(asked[0].ident)  # type: ignore[attr-defined]


def test_a_child_of_another_thread_is_a_child_too() -> None:
    started: list[subprocess.Popen[bytes]] = []
    ready, done = threading.Event(), threading.Event()

    def start() -> None:
        started.append(subprocess.Popen(["sleep", "600"]))
        ready.set()
        done.wait(HANG_S)

    other = threading.Thread(target=start)
    other.start()
    assert ready.wait(HANG_S)
    try:
        assert started[0].pid in child_processes()
    finally:
        started[0].kill()
        started[0].wait()
        done.set()
        other.join()
    assert started[0].pid not in child_processes()


def test_a_child_that_has_ended_is_one_until_it_is_waited_for() -> None:
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert child.pid in child_processes()
    child.wait()
    assert child.pid not in child_processes()


def test_a_child_that_ends_without_a_signal_is_one() -> None:
    """As `clone` makes them; the kernel tells of them only who asks for all kinds."""
    stack, library = ctypes.create_string_buffer(1 << 16), ctypes.CDLL(None)
    top = ctypes.c_void_p(ctypes.addressof(stack) + (len(stack) - 64) // 16 * 16)
    pid = library.clone(library._exit, top, 0, None)
    assert pid > 0
    assert pid in child_processes()
    os.waitpid(pid, 0x40000000)
    assert pid not in child_processes()


@contextlib.contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@contextlib.contextmanager
def thresholds() -> Iterator[None]:
    was = gc.get_threshold()
    gc.set_threshold(5000, 5, 5)
    yield
    gc.set_threshold(*was)


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@contextlib.contextmanager
def patched(module: ModuleType, name: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(module, name, lambda *_: None)
        yield


SETTINGS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "torch.get_default_dtype()": default_dtype,
    "torch.get_default_device()": default_device,
    "gc.get_threshold()": thresholds,
    "gc.isenabled()": collector_off,
    "torch.accelerator.synchronize": lambda: patched(torch.accelerator, "synchronize"),
    "torch.accelerator.empty_cache": lambda: patched(torch.accelerator, "empty_cache"),
    "torch.cuda.synchronize": lambda: patched(torch.cuda, "synchronize"),
    "torch.cuda.empty_cache": lambda: patched(torch.cuda, "empty_cache"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_that_changes_has_another_text_and_the_old_one_again(name: str) -> None:
    before = read().settings
    with SETTINGS[name]():
        during = read().settings
    assert [change.setting for change in changes_between(before, during)] == [name]
    assert read().settings == before


def test_reading_leaves_nothing_behind() -> None:
    # What a reading leaves, each one leaves: no two in a row are then alike. A process of another test may make a file
    # in /dev/shm between any two.
    readings = [read() for _ in range(20)]
    for resource in ("threads", "processes", "file-descriptors", "shared-memory"):
        things = [reading.items[resource] for reading in readings]
        assert any(first == second for first, second in itertools.pairwise(things)), resource
    assert readings[0].settings == readings[-1].settings


def test_reading_imports_nothing() -> None:
    code = "import sys; from lowtide.probes.host.counters import CounterReader; CounterReader(None).read(); "
    code += "assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


# One reader, again and again.


@pytest.fixture
def reader() -> CounterReader:
    return CounterReader(None, card=False)


def test_what_has_not_changed_is_the_same_object(reader: CounterReader) -> None:
    first, second = reader.read(), reader.read()
    assert second.settings is first.settings
    assert second.items["file-descriptors"] is first.items["file-descriptors"]


@pytest.mark.parametrize("thing", THINGS)
def test_one_reader_sees_it_come_and_go(reader: CounterReader, thing: str) -> None:
    resource, make = THINGS[thing]
    before = reader.read().items[resource]
    with make() as name:
        # A process of another test may have made another one in /dev/shm.
        assert name in set(reader.read().items[resource]) - set(before)
    # What a process of another test had in /dev/shm may go meanwhile.
    assert reader.read().items[resource].items() <= before.items()


@pytest.mark.parametrize("name", SETTINGS)
def test_one_reader_sees_a_setting_change_and_come_back(reader: CounterReader, name: str) -> None:
    before = reader.read().settings
    with SETTINGS[name]():
        during = reader.read().settings
    assert [change.setting for change in changes_between(before, during)] == [name]
    assert reader.read().settings == before


@pytest.fixture(params=[True, False], ids=["in C", "without C"])
def files_in_c(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare what descriptors are open on in both ways."""
    if not request.param:
        monkeypatch.setattr(counters, "_files_open", counters._slow_files_open)
    elif native.files_open is None:
        pytest.skip("the extension is not built here")


@pytest.mark.usefixtures("files_in_c")
def test_a_descriptor_that_has_another_file_now_has_another_name(reader: CounterReader, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    second.touch()
    with first.open("w") as file:
        number = file.fileno()
        assert f"{number} -> {first}" in reader.read().items["file-descriptors"]
    with second.open() as file:
        assert file.fileno() == number
        names = reader.read().items["file-descriptors"]
    assert f"{number} -> {second}" in names
    assert f"{number} -> {first}" not in names


@pytest.mark.usefixtures("files_in_c")
def test_as_many_descriptors_with_other_numbers_have_other_names(reader: CounterReader) -> None:
    with open(os.devnull) as first:  # noqa: PTH123 - the descriptor is the point
        before = reader.read().items["file-descriptors"]
        assert f"{first.fileno()} -> {os.devnull}" in before
        number = os.dup2(first.fileno(), 200)
    try:
        after = reader.read().items["file-descriptors"]
        assert after.keys() - before.keys() == {f"{number} -> {os.devnull}"}
        assert len(after) == len(before)
    finally:
        os.close(number)


@pytest.mark.skipif(native.files_open is None, reason="the extension is not built here")
def test_descriptors_are_listed_only_where_one_has_changed(
    reader: CounterReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders: list[str] = []
    list_all = os.listdir
    monkeypatch.setattr(originals.os, "listdir", lambda path: folders.append(path) or list_all(path))
    reader.read()
    folders.clear()
    reader.read()
    assert "/proc/self/fd" not in folders
    with open(os.devnull):  # noqa: PTH123 - the descriptor is the point
        reader.read()
    assert "/proc/self/fd" in folders


def test_a_folder_is_listed_again_only_where_it_has_changed(tmp_path: Path) -> None:
    (tmp_path / "old").touch()
    folder = Folder(lambda: str(tmp_path))
    wait_until(lambda: folder.names() is folder.names())
    known = folder.names()
    for number in range(3):
        (tmp_path / f"new{number}").touch()
        # What its own clock says proves nothing: an entry may come within one tick, and anybody may set it.
        os.utime(tmp_path, (0, 0))
        assert folder.names().keys() - known.keys() == {f"new{each}" for each in range(number + 1)}


@pytest.mark.usefixtures("files_in_c")
def test_a_descriptor_is_seen_while_a_thread_has_one_that_nobody_sees(reader: CounterReader) -> None:
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind("")
        server.listen()
        waiting = threading.Thread(target=lambda: server.accept()[0].close())
        waiting.start()
        try:
            # Where it waits for somebody, the folder says one more than there are.
            folder = Path("/proc/self/fd")
            wait_until(lambda: folder.stat().st_size != len(list(folder.iterdir())) - 1)
            before = reader.read().items["file-descriptors"]
            assert reader.read().items["file-descriptors"] is before
            with open(os.devnull) as file:  # noqa: PTH123 - the descriptor is the point
                assert reader.read().items["file-descriptors"].keys() - before.keys() == {
                    f"{file.fileno()} -> {os.devnull}"
                }
            assert reader.read().items["file-descriptors"] == before
        finally:
            client.connect(server.getsockname())
            waiting.join()


@pytest.mark.usefixtures("files_in_c")
def test_an_anonymous_descriptor_that_is_of_another_kind_now_has_another_name(reader: CounterReader) -> None:
    with select.epoll() as poll:
        number = poll.fileno()
        assert f"{number} -> anon_inode:[eventpoll]" in reader.read().items["file-descriptors"]
    event = os.eventfd(0)
    try:
        assert event == number
        assert f"{number} -> anon_inode:[eventfd]" in reader.read().items["file-descriptors"]
    finally:
        os.close(event)


class Card:
    """Stands in for torch with one card, and for its driver; counts who is asked."""

    def __init__(self) -> None:
        self.held: int | None = 1000
        self.reserved: int | None = 20
        self.listed: tuple[tuple[int, int], ...] | None = None
        self.others: dict[int, int] = {}
        self.used = 4000
        self.asked: list[str] = []
        self.torch = ModuleType("torch")
        self.torch.cuda = SimpleNamespace(  # type: ignore[attr-defined]
            device_count=lambda: 1,
            # Another process takes what this one gives back, and the other way round.
            mem_get_info=lambda _: (500, 2000),
            memory_stats_as_nested_dict=self.stats,
        )

    def stats(self, index: int) -> dict[str, object]:
        self.asked.append("torch")
        if self.reserved is None:
            raise RuntimeError("Allocator does not count")
        sizes = {"allocated": 10, "reserved": self.reserved}
        return {f"{kind}_bytes": {"all": {"current": size}} for kind, size in sizes.items()}

    def read(self, index: int) -> SimpleNamespace:
        self.asked.append("driver")
        note = "it is not listed" if self.held is None else ""
        return SimpleNamespace(process_bytes=self.held, card_used=self.used, note=note)

    def processes(self, index: int) -> dict[int, int]:
        return {**self.others}

    def allocations(self, index: int) -> tuple[tuple[int, int], ...] | None:
        self.asked.append("list")
        return self.listed


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card()
    monkeypatch.setattr(counters, "initialized_torch", lambda: card.torch)
    monkeypatch.setattr(counters, "has_context", lambda torch, index: True)
    monkeypatch.setattr(counters, "read_allocations", card.allocations)
    return card


def card_reader(card: Card) -> CounterReader:
    return CounterReader(lambda: card)  # type: ignore[arg-type, return-value]


def on_card(found: Counters) -> dict[str, int | None]:
    return {key: amount for key, amount in found.amounts.items() if key.endswith("cuda:0")}


def test_a_card_has_what_torch_and_its_driver_count_for_this_process(card: Card) -> None:
    reader = card_reader(card)
    assert on_card(reader.read()) == {"allocated cuda:0": 10, "reserved cuda:0": 20, "driver cuda:0": 980}
    card.held = 900
    found = reader.read()
    assert (found.amounts["driver cuda:0"], found.unmeasured) == (880, {})


def test_why_a_driver_s_amount_is_not_known_is_reported(card: Card) -> None:
    reader = card_reader(card)
    card.held = None
    found = reader.read()
    assert (found.amounts["driver cuda:0"], found.unmeasured) == (None, {"driver cuda:0": "it is not listed"})
    # Also by the reading that takes it over.
    assert reader.read(found).unmeasured == found.unmeasured
    card.held, card.reserved = 1000, None
    found = reader.read()
    assert on_card(found) == {"allocated cuda:0": None, "reserved cuda:0": None, "driver cuda:0": None}
    assert found.unmeasured == {"driver cuda:0": "torch's allocator does not say what it has reserved"}


def test_where_the_driver_does_not_know_the_process_its_allocations_are_listed(card: Card) -> None:
    reader = card_reader(card)
    card.held, card.listed = None, ((4096, 20), (8192, 70), (3 * STEP_BYTES - 1, 2), (8 * STEP_BYTES, STEP_BYTES))
    found = reader.read()
    # In whole steps, as NVML would.
    assert (found.amounts["driver cuda:0"], found.unmeasured) == (4 * STEP_BYTES - 20, {})
    # Not where it does: that says more, and costs less.
    card.held = 1000
    assert reader.read().amounts["driver cuda:0"] == 980


@pytest.mark.parametrize(
    ("attribute", "figure"), [("used", 4100), ("reserved", 120), ("others", {7: 100}), ("used", 4000)]
)
def test_they_are_listed_anew_where_a_figure_has_changed(card: Card, attribute: str, figure: object) -> None:
    reader = card_reader(card)
    card.held, card.listed = None, ((STEP_BYTES, STEP_BYTES),)
    reader.read()
    changes = getattr(card, attribute) != figure
    setattr(card, attribute, figure)
    card.listed = ((STEP_BYTES, 3 * STEP_BYTES),)
    card.asked.clear()
    found = reader.read().amounts["driver cuda:0"]
    assert found is not None
    assert found + (card.reserved or 0) == (3 if changes else 1) * STEP_BYTES
    assert ("list" in card.asked) is changes


def test_without_a_card_to_read_none_is_asked(card: Card) -> None:
    assert on_card(CounterReader(lambda: card, card=False).read()) == {}  # type: ignore[arg-type, return-value]
    assert card.asked == []


def test_without_a_driver_its_figures_are_left_out(card: Card) -> None:
    assert on_card(CounterReader(None).read()) == {"allocated cuda:0": 10, "reserved cuda:0": 20}


def test_with_a_last_reading_the_card_s_amounts_are_taken_over_from_it(card: Card) -> None:
    reader = card_reader(card)
    last = reader.read()
    card.asked.clear()
    card.held = 900
    assert on_card(reader.read(last)) == on_card(last)
    assert card.asked == []


@pytest.mark.parametrize("thing", THINGS)
def test_with_a_last_reading_all_else_is_read_anew(reader: CounterReader, thing: str) -> None:
    resource, make = THINGS[thing]
    last = reader.read()
    with make() as name:
        assert name in reader.read(last).items[resource]


NEIGHBOUR = """
import sys, torch
torch.cuda.init()
torch.cuda.synchronize()
print("ready", flush=True)
sys.stdin.readline()
kept = torch.empty(256 << 20, dtype=torch.uint8, device="cuda:0")
torch.cuda.synchronize()
print("taken", flush=True)
sys.stdin.readline()
"""


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm card; torch sees none")
def test_what_another_process_takes_meanwhile_is_not_counted_here() -> None:
    """It takes as much as this one gives back, so that as much of the card is free as before."""
    with contextlib.closing(find_driver()) as driver:
        reader = CounterReader(lambda: driver)
        kept = torch.empty(256 << 20, dtype=torch.uint8, device="cuda:0")
        with subprocess.Popen(
            [sys.executable, "-c", NEIGHBOUR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as neighbour:
            assert neighbour.stdin is not None
            assert neighbour.stdout is not None
            assert neighbour.stdout.readline() == "ready\n"
            before = reader.read().amounts["driver cuda:0"]
            del kept
            torch.cuda.empty_cache()
            neighbour.stdin.write("\n")
            neighbour.stdin.flush()
            assert neighbour.stdout.readline() == "taken\n"
            after = reader.read().amounts["driver cuda:0"]
            neighbour.communicate("\n")
    assert before is not None
    assert after is not None
    assert abs(after - before) <= 8 << 20


def test_what_is_taken_of_free_memory_again_is_memory() -> None:
    free = [200 * MIB, 200 * MIB, 60 * MIB, 200 * MIB]
    asked: list[int] = []

    def free_at_tops() -> int:
        asked.append(free[len(asked)])
        return asked[-1]

    reader = CounterReader(None, card=False, free_at_tops=free_at_tops)
    reader.note_trimmed()
    levels = [reader.read().amounts["host-memory"] or 0 for _ in range(3)]
    assert levels[1] - levels[0] == pytest.approx(140 * MIB, abs=8 * MIB)
    # What is free now may be trimmed yet, and is nothing before it was.
    assert levels[2] - levels[1] == pytest.approx(0, abs=8 * MIB)
    assert asked == free


def test_little_that_is_free_is_not_asked_for_again() -> None:
    asked: list[int] = []

    def free_at_tops() -> int:
        asked.append(MIB)
        return MIB

    reader = CounterReader(None, card=False, free_at_tops=free_at_tops)
    reader.note_trimmed()
    reader.read()
    assert asked == [MIB]
