"""Who made a thread is known from its first moment on, and of which line of threads it is."""

from __future__ import annotations

import asyncio
import os
import select
import selectors
import socket
import sysconfig
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lowtide.probes.host import makers as module
from lowtide.probes.host.makers import Forks, Maker, Makers
from lowtide.probes.objects.foreign import thread_key
from tests.waiting import HANG_S


@pytest.fixture
def slow_to_return(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Until it is set, the start of a thread called "slow" does not return to who has started it."""
    released = threading.Event()
    start = threading.Thread.start

    def slow(thread: threading.Thread) -> None:
        start(thread)
        if thread.name.startswith("slow"):
            released.wait(HANG_S)

    monkeypatch.setattr(threading.Thread, "start", slow)
    yield released
    released.set()


def test_a_thread_that_starts_another_before_its_own_start_has_returned_hands_its_line_on(
    slow_to_return: threading.Event,
) -> None:
    makers = Makers()
    makers.start()
    lines: list[str | None] = []

    def third() -> None:
        maker = makers.of_item("threads", thread_key(threading.current_thread()))
        lines.append(None if maker is None else maker.line)
        slow_to_return.set()

    def second() -> None:
        last = threading.Thread(target=third)
        last.start()
        last.join()

    def first() -> None:
        lines.append(thread_key(threading.current_thread()))
        following = threading.Thread(target=second, name="slow")
        following.start()
        following.join()

    try:
        thread = threading.Thread(target=first)
        thread.start()
        thread.join()
    finally:
        makers.stop()
    assert lines == [lines[0], lines[0]]


def test_another_thread_gets_one_turn_for_all_descriptors_that_were_read_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turns: list[float] = []
    monkeypatch.setattr(module.time, "sleep", turns.append)
    monkeypatch.setattr(module.time, "monotonic", lambda: 1.0)
    makers = Makers()
    here, there = os.pipe()
    try:
        names = [f"{number} -> {Path(f'/proc/self/fd/{number}').readlink()}" for number in (here, there)]
        assert [makers.of_item("file-descriptors", name) for name in names] == [None, None]
    finally:
        os.close(here)
        os.close(there)
    assert len(turns) == 1


def test_a_socket_file_is_known_until_it_is_gone_with_who_bound_it(tmp_path: Path) -> None:
    before = vars(socket.socket).get("bind")
    makers = Makers()
    makers.start()
    try:
        with socket.socket(socket.AF_UNIX) as bound, socket.socket(socket.AF_UNIX) as nameless:
            bound.bind(str(tmp_path / "socket"))
            nameless.bind("")
            assert makers.closed_sockets() == {}
        path = str(tmp_path / "socket")
        assert makers.closed_sockets().keys() == {path}
        assert makers.place_of("temporary-files", path).startswith("test_a_socket_file_is_known")
        makers.forget_file(path)
        assert (makers.closed_sockets(), makers.place_of("temporary-files", path)) == ({}, "")
    finally:
        makers.stop()
    assert vars(socket.socket).get("bind") is before


def test_a_library_that_binds_in_c_is_heard_once_it_was_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zmq = pytest.importorskip("zmq")
    makers = Makers()
    with monkeypatch.context() as patched:
        patched.setattr(module, "loaded", lambda name: None)
        makers.start()
    makers.start()
    try:
        with zmq.Context() as context, context.socket(zmq.REP) as answers:
            answers.bind("tcp://127.0.0.1:*")
            answers.bind("ipc://@abstract-name-of-a-test")
            answers.bind(f"ipc://{tmp_path}/socket")
        assert makers.closed_sockets().keys() == {f"{tmp_path}/socket"}
    finally:
        makers.stop()


def test_who_makes_a_process_group_is_known_until_it_is_no_more_asked_for() -> None:
    import torch.distributed as dist

    original = dist.distributed_c10d._new_process_group_helper
    makers = Makers()
    makers.start()
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        second = dist.new_group([0])
        for name in ("0", second.group_name):
            made = makers.place_of("process-groups", name)
            assert "called in test_who_makes_a_process_group_is_known_until_it_is_no_more_asked_for" in made
    finally:
        makers.stop()
        dist.destroy_process_group()
    assert dist.distributed_c10d._new_process_group_helper is original


OF_A_PACKAGE = """
import threading
from concurrent.futures import ThreadPoolExecutor


class Engine:
    def __init__(self, target):
        self._begin(target)

    def _begin(self, target):
        self.thread = threading.Thread(target=target, daemon=True)
        self.thread.start()


def submit(target):
    pool = ThreadPoolExecutor(1)
    pool.submit(target)
    return pool
"""


@pytest.fixture
def package() -> dict[str, Any]:
    """The names of a package that is installed."""
    file = f"{sysconfig.get_path('purelib')}/anengine/engine.py"
    names: dict[str, Any] = {"__name__": "anengine.engine"}
    # So its code has that file, without being installed.
    exec(compile(OF_A_PACKAGE, file, "exec"), names)
    return names


@pytest.mark.parametrize(
    ("start", "line"),
    [
        (lambda package, target: package["Engine"](target), "Engine._begin, engine.py:12"),
        (lambda package, target: package["submit"](target), "submit, engine.py:17"),
        (lambda package, target: threading.Thread(target=target, daemon=True).start(), ""),
        (lambda package, target: asyncio.run(asyncio.to_thread(target)), ""),
    ],
    ids=["a package's", "its executor's", "the program's own", "asyncio's"],
)
def test_a_threads_start_is_the_line_that_calls_it_and_not_who_called_the_package(
    package: dict[str, Any], start: Callable[[dict[str, Any], Callable[[], object]], Any], line: str
) -> None:
    makers, names = Makers(), list[str]()
    began = threading.Event()

    def run() -> None:
        names.append(thread_key(threading.current_thread()))
        began.set()

    makers.start()
    try:
        kept = start(package, run)
        assert began.wait(HANG_S)
        place = makers.place_of("threads", names[0])
    finally:
        makers.stop()
    del kept
    own = "<lambda>, test_makers.py:"
    assert place.startswith(f"{line}, called in " if line else own)
    assert own in place


def test_forks_are_heard_of_once_however_often_somebody_begins_and_ends_to_note_them() -> None:
    registered: list[dict[str, object]] = []
    forks = Forks(lambda **when: registered.append(when))
    for _ in range(3):
        makers = Makers()
        forks.tell(makers)
        forks.tell_no_more(makers)
    assert [[*when] for when in registered] == [["after_in_parent"]]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_who_forked_is_noted_while_that_is_noted() -> None:
    makers = Makers()
    children = []
    makers.start()
    try:
        children.append(fork())
    finally:
        makers.stop()
    children.append(fork())
    for pid in children:
        os.waitpid(pid, 0)
    assert [(makers.of_process(pid) or Maker(())).place.partition(",")[0] for pid in children] == ["fork", ""]


def fork() -> int:
    pid = os.fork()
    if not pid:
        os._exit(0)
    return pid


def test_who_opened_a_file_by_its_descriptor_is_known(tmp_path: Path) -> None:
    makers = Makers()
    makers.start()
    number = os.open(tmp_path / "opened", os.O_CREAT | os.O_RDWR)
    made = makers.of_item("file-descriptors", f"{number} -> {tmp_path / 'opened'}")
    os.close(number)
    makers.stop()
    assert made is not None
    assert made.place.startswith("test_who_opened_a_file_by_its_descriptor_is_known, test_makers.py:")


def test_what_others_open_under_the_number_of_a_selector_that_was_closed_was_made_by_nobody_who_is_known() -> None:
    makers = Makers()
    makers.start()
    try:
        selector = selectors.EpollSelector()
        number = selector.fileno()
        assert makers.of_descriptor(number) is not None
        selector.close()
        # As C code of a library does, which calls nothing of Python's.
        with select.epoll() as opened:
            assert (opened.fileno(), makers.of_descriptor(number)) == (number, None)
    finally:
        makers.stop()


def test_who_made_what_is_closed_when_a_test_begins_is_forgotten() -> None:
    makers = Makers()
    makers.start()
    try:
        stays, number = os.eventfd(0), os.eventfd(0)
        os.close(number)
        makers.forget_closed([f"{stays} -> anon_inode:[eventfd]"])
        with select.epoll() as opened:
            assert (opened.fileno(), makers.of_descriptor(number)) == (number, None)
        assert makers.of_descriptor(stays) is not None
        os.close(stays)
    finally:
        makers.stop()
