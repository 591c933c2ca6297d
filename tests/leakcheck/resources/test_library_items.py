"""First use of a library: what it makes and keeps once is listed; what becomes more, or is the program's, is told."""

from __future__ import annotations

import _multiprocessing
import contextlib
import ctypes
import enum
import gc
import itertools
import mmap
import multiprocessing.context
import multiprocessing.queues
import multiprocessing.synchronize
import os
import socket
import sys
import sysconfig
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from importlib.machinery import ModuleSpec
from multiprocessing import resource_tracker
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lowtide.leakcheck.resources.first_use import LibraryItems, NewItems, Sorted, unheld_threads
from lowtide.probes.heap.holders import sharing_walk
from lowtide.probes.host.counters import CounterReader, Counters
from lowtide.probes.host.makers import Makers
from lowtide.probes.memory.tensors import survey_storages
from lowtide.probes.objects.foreign import thread_key
from lowtide.probes.objects.identities import Identities
from lowtide.probes.objects.listed import collector_paused
from tests.waiting import wait_until

pytestmark = pytest.mark.nightly

LIBRARY = """
import os, socket, threading, time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

KEPT = []
POOL = []

class Server:
    served = None

SERVER = Server()

def serve(server, done):
    server.served = threading.Thread(target=done.wait, daemon=True)
    server.served.start()

def keep_thread(done):
    thread = threading.Thread(target=done.wait, daemon=True)
    thread.start()
    KEEP = KEPT.append(thread)

def keep_thread_in_class(done):
    Server.served = threading.Thread(target=done.wait, daemon=True)
    Server.served.start()

def start_thread(done):
    threading.Thread(target=done.wait, daemon=True).start()

def keep_pipe():
    KEPT.append(os.pipe())

def keep_socket():
    KEPT.append(socket.socket())

def make_socket():
    return socket.socket()

def submit_work(context):
    if not POOL:
        POOL.append(ProcessPoolExecutor(2, mp_context=context))
    # Another one starts where none is idle.
    return POOL[0].submit(time.sleep, 0.5)

def in_thread(done, function, *args):
    thread = threading.Thread(target=call_and_wait, args=(done, function, *args), daemon=True)
    thread.start()
    KEPT.append(thread)

def call_and_wait(done, function, *args):
    function(*args)
    done.wait()

def submit(done):
    if not POOL:
        POOL.append(ThreadPoolExecutor(3))
    POOL[0].submit(done.wait)

def call(function, *args):
    return function(*args)
"""


class Process:
    """This process, test by test."""

    def __init__(self, makers: Makers) -> None:
        self._items = LibraryItems(makers)
        self._reader = CounterReader(None, card=False)
        self._before = self._read()
        self._midway: Mapping[str, Collection[str]] = {}

    def note_midway(self) -> None:
        self._midway = self._read().items

    def _read(self) -> Counters:
        return self._reader.read()

    def end(self, name: str) -> tuple[dict[str, set[str]], Sorted]:
        """What is told of a test by resource, and how its items were told apart."""
        now = self._read()
        # What is in /dev/shm is everybody's: a test beside this one may have put it there.
        new = {
            key: {item: 1 for item in names if item not in self._before.items[key]}
            for key, names in now.items.items()
            if key != "shared-memory"
        }
        new["shared-memory"] = {
            item: Path("/dev/shm", item).stat().st_size
            for item in now.items["shared-memory"]
            if f"_{os.getpid()}_" in item and item not in self._before.items["shared-memory"]
        }
        tensors = [(held.address, held.bytes) for held in survey_storages().storages if held.device == "cpu"]
        found = self._items.sort(NewItems(new, tensors, midway=self._midway), now, name)
        reported = {key: set(found.applied(key, names, now.items[key])) for key, names in new.items()}
        self._before = now
        return {key: names for key, names in reported.items() if names}, found


@pytest.fixture
def process() -> Iterator[Process]:
    makers = Makers()
    makers.start()
    yield Process(makers)
    makers.stop()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module as if it were installed."""
    module = ModuleType("installed_library")
    module.__file__ = f"{sysconfig.get_path('purelib')}/installed_library.py"
    exec(compile(LIBRARY, module.__file__, "exec"), vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    yield module
    for kept in module.KEPT:
        if type(kept) is tuple:
            os.close(kept[0])
            os.close(kept[1])
        elif type(kept) is socket.socket:
            kept.close()


@pytest.fixture
def done() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_nothing_new_is_nothing(process: Process) -> None:
    reported, found = process.end("test_a")
    assert (reported, found.listed) == ({}, ())


@pytest.mark.parametrize(
    ("use", "resource", "listed"),
    [
        (lambda library, done: library.keep_thread(done), "threads", "1 thread of installed_library: "),
        (lambda library, done: library.keep_pipe(), "file-descriptors", "2 file descriptors of installed_library: "),
        (lambda library, done: library.keep_socket(), "file-descriptors", "1 file descriptor of installed_library: "),
    ],
    ids=["thread", "pipe", "socket"],
)
def test_what_a_library_keeps_is_listed_once_and_reported_with_the_first_if_it_becomes_more(
    process: Process,
    library: Any,
    done: threading.Event,
    use: Callable[[Any, threading.Event], object],
    resource: str,
    listed: str,
) -> None:
    use(library, done)
    gc.collect()
    reported, first = process.end("test_a")
    assert reported == {}
    assert [item.what.startswith(listed) for item in first.listed] == [True]
    assert "once so far" in first.listed[0].why
    reported, nothing = process.end("test_b")
    assert (reported, nothing.listed) == ({}, ())
    use(library, done)
    reported, second = process.end("test_c")
    assert reported.keys() == {resource}
    assert reported[resource] > set(first.excused[resource])
    assert len(reported[resource]) == 2 * len(first.excused[resource])
    assert "test_a" in second.addition(resource, reported[resource])
    use(library, done)
    reported, third = process.end("test_d")
    assert reported.keys() == {resource}
    assert not third.listed


def test_what_takes_the_place_of_a_library_s_first_is_no_more(
    process: Process, library: Any, done: threading.Event
) -> None:
    library.keep_socket()
    process.end("test_a")
    library.KEPT.pop().close()
    library.keep_socket()
    reported, found = process.end("test_b")
    assert reported == {}
    assert len(found.listed) == 1


def test_it_is_noted_where_another_watch_notes_it_too(process: Process, library: Any) -> None:
    inner = Makers()
    inner.start()
    try:
        library.keep_socket()
    finally:
        inner.stop()
    assert process.end("test_a")[0] == {}


def test_a_thread_in_a_class_of_the_library_is_the_library_s(
    process: Process, library: Any, done: threading.Event
) -> None:
    library.keep_thread_in_class(done)
    assert process.end("test_a")[0] == {}


def test_a_pool_of_a_library_may_start_all_of_its_threads(
    process: Process, library: Any, done: threading.Event
) -> None:
    for _ in range(3):
        library.submit(done)
        assert process.end("test")[0] == {}
    library.POOL[:] = [ThreadPoolExecutor(3)]
    library.submit(done)
    assert process.end("test")[0].keys() == {"threads"}


HELD: list[object] = []


@pytest.fixture
def own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives Python's named semaphores names by which this process knows its own."""
    names = (f"/python_{os.getpid()}_{turn}" for turn in itertools.count())
    monkeypatch.setattr(multiprocessing.synchronize.SemLock, "_make_name", lambda lock: next(names))


def test_a_pool_of_a_library_may_start_all_of_its_processes_with_what_they_are_given(
    process: Process, library: Any, own_names: None
) -> None:
    context = multiprocessing.get_context("spawn")
    resource_tracker.ensure_running()
    process.end("test_tracker")
    try:
        for workers in (1, 2):
            working = [library.submit_work(context) for _ in range(workers)]
            wait_until(lambda: all(thread.ident for thread in threading.enumerate()))
            assert process.end("test")[0] == {}
            assert len(library.POOL[0]._processes) == workers
            for work in working:
                work.result()
        own = ProcessPoolExecutor(1)
        HELD.append(own)
        own.submit(os.getpid).result()
        assert process.end("test")[0].keys() == {"processes", "threads", "file-descriptors"}
    finally:
        for pool in (*library.POOL, *HELD):
            pool.shutdown()
        HELD.clear()


def wait_beside(done: Any) -> None:
    threading.Thread(target=done.wait, daemon=True).start()
    done.wait_beside = True


def feed_beside(done: Any) -> None:
    queue: Any = multiprocessing.Queue()
    queue.put(1)
    done.feed_beside = True
    done.wait()


def test_what_python_makes_in_a_library_s_thread_is_the_library_s(
    process: Process, library: Any, done: threading.Event
) -> None:
    queue: Any = multiprocessing.Queue()
    library.KEPT.append(queue)
    process.end("test_queue")
    # The queue starts a thread that feeds it.
    library.in_thread(done, queue.put, 1)
    wait_until(lambda: queue._thread is not None and queue._thread.is_alive())
    assert process.end("test_a")[0] == {}
    queue.close()


@pytest.mark.parametrize("beside", [wait_beside, feed_beside])
def test_what_the_program_makes_in_a_library_s_thread_is_reported_at_once(
    process: Process, library: Any, done: threading.Event, beside: Callable[[Any], None]
) -> None:
    library.in_thread(done, beside, done)
    wait_until(lambda: hasattr(done, beside.__name__))
    (reported,) = process.end("test_a")[0]["threads"]
    assert "call_and_wait" not in reported


@pytest.fixture
def semaphore(monkeypatch: pytest.MonkeyPatch, library: Any) -> Iterator[Callable[[], Any]]:
    """Makes a semaphore with a name, of a class that is derived from no other, as loky does."""
    module = ModuleType("installed_library.synchronize")
    module.__file__ = library.__file__
    exec("class SemLock: ...", vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    made: list[str] = []

    def make() -> Any:
        lock = module.SemLock()
        made.append(f"/installed_{os.getpid()}_{len(made)}")
        lock._semlock = _multiprocessing.SemLock(1, 1, 1, made[-1], False)
        return lock

    yield make
    for name in made:
        _multiprocessing.sem_unlink(name)


def test_a_named_semaphore_that_a_library_keeps_is_listed_and_one_of_the_program_reported(
    process: Process, library: Any, semaphore: Callable[[], Any]
) -> None:
    HELD.append(semaphore())
    # Although the library holds it as well.
    library.KEPT.append(HELD[0])
    assert process.end("test_a")[0].keys() == {"shared-memory"}
    HELD.clear()
    library.KEPT.append(semaphore())
    reported, found = process.end("test_b")
    assert reported == {}
    assert found.listed[0].what.startswith("1 file in /dev/shm of installed_library: sem.installed_")


def test_python_s_own_lock_in_a_library_s_class_is_listed_and_a_second_one_reported(
    process: Process, library: Any, own_names: None
) -> None:
    context = multiprocessing.get_context("spawn")
    resource_tracker.ensure_running()
    process.end("test_tracker")
    HELD.append(context.Lock())
    assert process.end("test_a")[0].keys() == {"shared-memory"}
    HELD.clear()
    library.Server.lock = context.RLock()
    reported, found = process.end("test_b")
    assert reported == {}
    assert found.listed[0].what.startswith("1 file in /dev/shm of installed_library: sem.python_")
    library.Server.other = context.RLock()
    assert process.end("test_c")[0].keys() == {"shared-memory"}


def own_pool(library: Any, done: threading.Event) -> None:
    HELD.append(ThreadPoolExecutor(1))
    HELD[0].submit(done.wait)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "leak",
    [
        lambda library, done: threading.Thread(target=done.wait, daemon=True).start(),
        lambda library, done: library.start_thread(done),
        lambda library, done: library.call(threading.Thread(target=done.wait, daemon=True).start),
        own_pool,
    ],
    ids=["started here", "kept by nobody", "started for us", "pool"],
)
def test_a_thread_that_no_library_keeps_is_reported_at_once(
    process: Process, library: Any, done: threading.Event, leak: Callable[[Any, threading.Event], None]
) -> None:
    leak(library, done)
    reported, found = process.end("test_a")
    assert reported.keys() == {"threads"}
    assert not found.listed
    HELD.clear()


@pytest.mark.parametrize("made", [lambda library: library.make_socket(), lambda library: socket.socket()])
def test_what_the_program_holds_is_reported_at_once(
    process: Process, library: Any, made: Callable[[Any], socket.socket]
) -> None:
    HELD.append(made(library))
    # Although the library holds it as well.
    library.KEPT.append(HELD[0])
    try:
        assert process.end("test_a")[0].keys() == {"file-descriptors"}
    finally:
        HELD.clear()


@pytest.mark.parametrize("whose", ["library", "program"])
def test_a_container_that_the_program_imports_by_its_name_is_the_library_s(
    process: Process, library: Any, done: threading.Event, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    """As zarr's tests import the list in which it keeps its event loop."""
    library.keep_thread(done)
    monkeypatch.setattr(sys.modules[__name__], "HELD", library.KEPT if whose == "library" else library.KEPT[:])
    reported, found = process.end("test_a")
    assert (reported.keys(), len(found.listed)) == ((set(), 1) if whose == "library" else ({"threads"}, 0))


@pytest.mark.parametrize("whose", ["library", "program"])
def test_an_object_that_the_program_imports_by_its_name_is_the_library_s(
    process: Process, library: Any, done: threading.Event, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    """As pyzmq's tests import its collector, which starts a thread when it is first asked for something."""
    library.__spec__ = ModuleSpec(library.__name__, None, origin=library.__file__)
    server = library.SERVER if whose == "library" else library.Server()
    library.serve(server, done)
    # The library holds both.
    library.KEPT.append(server)
    monkeypatch.setattr(sys.modules[__name__], "HELD", server)
    reported, found = process.end("test_a")
    assert (reported.keys(), len(found.listed)) == ((set(), 1) if whose == "library" else ({"threads"}, 0))


def test_what_leads_from_the_loader_of_a_module_of_the_programs_is_none_of_that(
    process: Process, library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.keep_socket()
    # As from pytest's, which has the session, and so whatever an object in that leads to.
    monkeypatch.setattr(sys.modules[__name__], "__loader__", SimpleNamespace(session=library.KEPT))
    reported, found = process.end("test_a")
    assert reported == {}
    assert len(found.listed) == 1


@pytest.mark.parametrize("held", ["constant", "tuple of constants", "signal", "line"])
def test_a_number_that_never_changes_is_no_descriptor_s(process: Process, library: Any, held: str) -> None:
    """Python 3.12's `multiprocessing` has the lengths of digests; 3.13 keeps in each class the line where it begins."""
    made = library.call(os.pipe)
    if held == "constant":
        library.MESSAGE_LENGTH, library.DIGEST_LENGTH = made
    elif held == "tuple of constants":
        library.LENGTHS = made
    elif held == "signal":
        library.ignored = list(enum.IntEnum("Signals", {"FIRST": made[0], "SECOND": made[1]}))
    else:
        library.Server.__firstlineno__, library.Server.__lastlineno__ = made
    try:
        assert len(process.end("test_a")[0]["file-descriptors"]) == 2
    finally:
        for number in made:
            os.close(number)


@pytest.mark.parametrize("place", ["global", "class", "object", "closure"])
def test_a_number_that_a_library_keeps_is_a_descriptor_s(process: Process, library: Any, place: str) -> None:
    """As `multiprocessing.resource_tracker` keeps its pipe's."""
    made = library.call(os.pipe)
    if place == "global":
        library._read, library._write = made
    elif place == "class":
        library.Server.read, library.Server.write = made
    elif place == "object":
        library.KEPT.append(SimpleNamespace(read=made[0], write=made[1]))
    else:
        library.wake = lambda: made
    try:
        reported, found = process.end("test_a")
        assert reported == {}
        assert found.listed[0].what.startswith("2 file descriptors of ")
    finally:
        for number in made:
            os.close(number)


def test_an_end_of_multiprocessing_s_pipe_that_the_program_holds_is_reported_at_once(process: Process) -> None:
    """Of which the program has only an object with the number, and the code that made it is a library's."""
    HELD.append(multiprocessing.Queue())
    # Beside it, `multiprocessing` itself happens to have these numbers.
    ends = (HELD[0]._reader.fileno(), HELD[0]._writer.fileno())
    vars(multiprocessing.context)["_happens_to_be"] = ends
    try:
        reported = process.end("test_a")[0]["file-descriptors"]
        assert {int(name.partition(" ")[0]) for name in reported} == set(ends)
    finally:
        del vars(multiprocessing.context)["_happens_to_be"]
        HELD.pop().close()


def test_a_descriptor_of_the_program_is_reported_at_once(process: Process) -> None:
    made = [*os.pipe(), os.dup(0), os.eventfd(0) if hasattr(os, "eventfd") else os.dup(0)]
    try:
        assert len(process.end("test_a")[0]["file-descriptors"]) == 4
    finally:
        for number in made:
            os.close(number)


def test_a_file_is_reported_at_once_whoever_opened_it(process: Process, library: Any) -> None:
    number = library.call(os.open, "/dev/zero", os.O_RDONLY)
    try:
        assert process.end("test_a")[0].keys() == {"file-descriptors"}
    finally:
        os.close(number)


@pytest.fixture
def native_pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Makes a pipe past Python, as libuv does for its signals when it is first used."""
    made: list[int] = []
    libc = ctypes.CDLL(None)

    def make() -> None:
        ends = (ctypes.c_int * 2)()
        assert libc.pipe(ends) == 0
        made.extend(ends)

    yield make
    for number in made:
        with contextlib.suppress(OSError):
            os.close(number)


def test_what_native_code_makes_is_listed_once_and_reported_with_the_first_if_it_becomes_more(
    process: Process, native_pipe: Callable[[], None]
) -> None:
    native_pipe()
    reported, found = process.end("test_a")
    assert reported == {}
    assert found.listed[0].what.startswith("2 file descriptors of native code (pipe): ")
    native_pipe()
    assert len(process.end("test_b")[0]["file-descriptors"]) == 4
    native_pipe()
    assert len(process.end("test_c")[0]["file-descriptors"]) == 2


def test_what_native_code_makes_of_another_kind_is_another_first_use(
    process: Process, native_pipe: Callable[[], None]
) -> None:
    native_pipe()
    process.end("test_a")
    number = ctypes.CDLL(None).eventfd(0, 0)
    try:
        reported, found = process.end("test_b")
    finally:
        os.close(number)
    assert reported == {}
    assert found.listed[0].what.startswith("1 file descriptor of native code (eventfd): ")


def test_what_two_libraries_make_by_the_code_of_a_third_are_two_first_uses(
    process: Process, library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("first_caller", "second_caller"):
        module = ModuleType(name)
        module.__file__ = f"{sysconfig.get_path('purelib')}/{name}.py"
        exec(compile("def call(function):\n    function()", module.__file__, "exec"), vars(module))
        monkeypatch.setitem(sys.modules, name, module)
        vars(module)["call"](library.keep_pipe)
        reported, found = process.end(name)
        assert not reported
        (line,) = found.listed
        assert f"installed_library for {name}: " in line.what
    sys.modules["first_caller"].call(library.keep_pipe)
    assert len(process.end("third")[0]["file-descriptors"]) == 4


def test_where_the_program_may_have_made_it_unseen_it_is_reported_at_once(
    process: Process, native_pipe: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As after `from os import pipe` in a module that was imported earlier.
    monkeypatch.setattr(sys.modules[__name__], "pipe", os.pipe.__wrapped__, raising=False)  # type: ignore[attr-defined]
    native_pipe()
    assert process.end("test_a")[0].keys() == {"file-descriptors"}


LIBC = ctypes.CDLL(None)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

COUNTERS = 80_064


@pytest.fixture
def native_file() -> Iterator[Callable[..., int]]:
    """Makes a file in /dev/shm past Python, and maps it, as torch and a card's driver do for what processes share."""
    made: list[tuple[Path, int, int, int]] = []

    def make(name: str, size: int = COUNTERS, *, mapped: bool = True) -> int:
        file = Path(f"/dev/shm/{name}_{os.getpid()}_{len(made)}")
        number = LIBC.open(str(file).encode(), os.O_RDWR | os.O_CREAT, 0o600)
        assert number >= 0
        assert LIBC.ftruncate(number, ctypes.c_long(size)) == 0
        address = LIBC.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, number, 0) if mapped else 0
        made.append((file, number, address, size))
        return number

    yield make
    for file, number, address, size in made:
        file.unlink(missing_ok=True)
        os.close(number)
        if address:
            LIBC.munmap(address, size)


def test_the_books_of_native_code_in_shared_memory_are_listed_once_and_reported_if_they_become_more(
    process: Process, native_file: Callable[..., int]
) -> None:
    native_file("torch")
    reported, first = process.end("test_a")
    assert not reported
    assert sorted(line.what.partition(": ")[0] for line in first.listed) == [
        "1 file descriptor of native code (torch)",
        "1 file in /dev/shm of native code (torch)",
    ]
    native_file("cuda.shm")
    reported, second = process.end("test_b")
    assert not reported
    assert [line.what.partition(": ")[0].partition(" of ")[2] for line in second.listed] == [
        "native code (cuda.shm)",
        "native code (cuda.shm)",
    ]
    native_file("torch")
    reported, third = process.end("test_c")
    assert {key: len(names) for key, names in reported.items()} == {"file-descriptors": 2, "shared-memory": 2}
    more = third.applied(
        "shared-memory", dict.fromkeys(reported["shared-memory"], COUNTERS), dict.fromkeys(reported["shared-memory"], 1)
    )
    assert set(more.values()) == {COUNTERS}


@pytest.mark.parametrize("kind", ["large", "not mapped", "semaphore", "mapped by Python", "a tensor", "open here"])
def test_a_shared_file_with_data_of_the_program_is_reported_at_once(
    process: Process, native_file: Callable[..., int], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "sem.mp" if kind == "semaphore" else "torch"
    number = native_file(name, (2 << 20) if kind == "large" else COUNTERS, mapped=kind != "not mapped")
    held: list[Any] = []
    if kind == "mapped by Python":
        held.append(mmap.mmap(number, COUNTERS))
    elif kind == "a tensor":
        torch = pytest.importorskip("torch")
        file = f"/dev/shm/torch_{os.getpid()}_0"
        held.append(torch.from_file(file, shared=True, size=COUNTERS, dtype=torch.uint8))
    elif kind == "open here":
        held.append(Path(f"/dev/shm/torch_{os.getpid()}_0").open("rb"))  # noqa: SIM115 - it leaks
        monkeypatch.setattr(sys.modules[__name__], "HELD", held)
    reported, found = process.end("test_a")
    if kind == "open here":
        assert [name.partition(" ")[0] for name in reported["file-descriptors"]] == [str(held[0].fileno())]
        held[0].close()
    else:
        assert {"shared-memory", "file-descriptors"} == reported.keys()
        assert not found.listed


# Which modules have a thread shows in a walk over the heap that is there anyway.


def of_nobody(library: Any, thread: threading.Thread) -> None:
    pass


@pytest.mark.parametrize(
    ("keep", "is_unheld"),
    [
        (of_nobody, True),
        (lambda library, thread: library.KEPT.append({"thread": thread}), False),
        (lambda library, thread: setattr(library.Server, "served", thread), False),
        (lambda library, thread: HELD.append(thread), False),
    ],
    ids=["nobody", "a library", "a library's class", "the program"],
)
def test_a_thread_is_unheld_if_no_module_leads_to_it(
    library: Any, done: threading.Event, keep: Callable[[Any, threading.Thread], None], is_unheld: bool
) -> None:
    with collector_paused():
        before = set(map(id, gc.get_objects()))
        thread = threading.Thread(target=done.wait, daemon=True)
        thread.start()
        keep(library, thread)
        born = Identities(np.array([id(item) for item in gc.get_objects() if id(item) not in before], np.int64))
    names = [thread_key(thread)]
    del thread
    with sharing_walk() as walk:
        assert unheld_threads(names, walk, born) == ()
        walk.graph()
        assert (unheld_threads(names, walk, born) == names) is is_unheld
        # Nobody knows what is new.
        assert unheld_threads(names, walk, None) == ()
    HELD.clear()


def test_nothing_is_gone_through_for_a_thread_that_is_unheld(library: Any, done: threading.Event) -> None:
    makers = Makers()
    makers.start()
    before = set(threading.enumerate())
    library.keep_thread(done)
    makers.stop()
    (name,) = (thread_key(thread) for thread in threading.enumerate() if thread not in before)
    now = CounterReader(None, card=False).read()
    assert LibraryItems(makers).sort(NewItems({"threads": {name: 1}}), now, "test").listed
    assert not LibraryItems(makers).sort(NewItems({"threads": {name: 1}}, unheld=[name]), now, "test").listed


@pytest.mark.parametrize(("early", "late", "is_told"), [(4, 4, True), (8, 0, False), (2, 2, False), (7, 1, False)])
def test_what_native_code_makes_in_both_halves_of_turns_is_no_first_use(
    process: Process, native_pipe: Callable[[], None], early: int, late: int, is_told: bool
) -> None:
    for _ in range(early):
        native_pipe()
    process.note_midway()
    for _ in range(late):
        native_pipe()
    reported, found = process.end("block")
    assert bool(reported) == is_told
    assert bool(found.listed) != is_told
    assert found.addition("file-descriptors", reported.get("file-descriptors", ())) == ""
