"""Exemptions: what a process starts once and keeps is let through, and what only resembles it is not."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import resource_tracker
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lowtide import LeakCheck
from lowtide.leakcheck.judging import exemptions
from lowtide.leakcheck.judging.exemptions import EXEMPTIONS, exempt
from lowtide.probes import originals
from tests.waiting import HANG_S, wait_until


def is_exempt(resource: str, name: str) -> bool:
    return bool(exempt(resource, (name,)))


@pytest.mark.parametrize(
    "name",
    [
        "0 -> /dev/null",
        "1 -> pipe:[77]",
        "2 -> /dev/pts/1",
        "1 -> /tmp/captured (deleted)",
        "9 -> /dev/nvidia0",
        "9 -> /dev/nvidiactl",
        "9 -> /dev/nvidia-uvm",
        "9 -> /dev/kfd",
        "9 -> /dev/dri/renderD128",
        "9 -> /proc/driver/nvidia/params",
        "9 -> /dev/urandom",
        "9 -> /dev/random",
    ],
)
def test_a_descriptor_that_stays_is_exempt(name: str) -> None:
    assert is_exempt("file-descriptors", name)


@pytest.mark.parametrize(
    "name",
    [
        "10 -> /dev/null",
        "12 -> pipe:[77]",
        "9 -> socket:[1]",
        "9 -> /dev/null",
        "9 -> /home/user/dev/nvidia0",
        "9 -> /tmp/nvidia0",
        "9 -> /dev/shm/dev/urandom",
        "9 -> /dev/urandom.txt",
        "21 -> /dev/pts/1",
    ],
)
def test_a_descriptor_that_resembles_one_is_not(name: str) -> None:
    assert not is_exempt("file-descriptors", name)


@pytest.mark.parametrize("place", ["purelib", "platlib"])
def test_a_file_of_an_installed_library_is_exempt(place: str) -> None:
    assert is_exempt("file-descriptors", f"9 -> {sysconfig.get_path(place)}/matplotlib/fonts/DejaVuSans.ttf")


@pytest.mark.parametrize("target", ["{place}-of-mine/fonts.ttf", "/tmp{place}/fonts.ttf", "{place}"])
def test_a_file_whose_place_resembles_that_of_libraries_is_not(target: str) -> None:
    assert not is_exempt("file-descriptors", f"9 -> {target.format(place=sysconfig.get_path('purelib'))}")


def test_an_object_of_torch_in_a_cache_of_torch_is_exempt() -> None:
    assert is_exempt("lru-cache", "torch.nn.modules.linear.Identity at 0x1 in torch._dynamo.utils.identity")


@pytest.mark.parametrize(
    "name",
    [
        "torch.nn.modules.linear.Linear at 0x1 in engine.layers.build",
        "engine.layers.Block at 0x1 in torch._dynamo.utils.identity",
        "torchvision.models.ResNet at 0x1 in torchvision.models.build",
    ],
)
def test_another_object_or_cache_is_not(name: str) -> None:
    assert not is_exempt("lru-cache", name)


def test_an_exemption_is_for_its_resource_only() -> None:
    assert not is_exempt("globals", "9 -> /dev/urandom")
    assert not is_exempt("shared-memory", "0 -> /dev/null")


def named(*numbers: int) -> set[str]:
    return {f"{number} -> {Path(f'/proc/self/fd/{number}').readlink()}" for number in numbers}


def test_the_pipe_of_the_resource_tracker_is_exempt_and_no_other_one() -> None:
    resource_tracker.ensure_running()
    numbers = os.pipe()
    try:
        own = named(resource_tracker.getfd())
        assert exempt("file-descriptors", own | named(*numbers)) == own
    finally:
        for number in numbers:
            os.close(number)


def test_what_the_resource_tracker_has_inherited_as_a_stream_is_not_exempt(tmp_path: Path) -> None:
    code = """
    import os, sys
    from multiprocessing import resource_tracker
    from lowtide.leakcheck.judging.exemptions import exempt
    resource_tracker.ensure_running()
    print(*exempt("file-descriptors", {f"{os.dup(1)} -> {os.readlink('/proc/self/fd/1')}"}))
    """
    printed = tmp_path / "printed.txt"
    with printed.open("w") as output:
        subprocess.run([sys.executable, "-c", textwrap.dedent(code)], stdout=output, check=True, timeout=HANG_S)
    assert printed.read_text() == "\n"


def test_the_resource_tracker_is_exempt_and_another_child_is_not() -> None:
    resource_tracker.ensure_running()
    tracker = resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]
    assert is_exempt("processes", str(tracker))
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        assert not is_exempt("processes", str(child.pid))
    finally:
        child.kill()
        child.wait()


def test_a_child_that_has_ended_is_exempt_and_one_that_runs_is_not() -> None:
    child = subprocess.Popen(["sleep", "600"])
    try:
        assert not is_exempt("processes", str(child.pid))
        child.kill()
        # Until it has ended, and without asking for its exit code.
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert is_exempt("processes", str(child.pid))
    finally:
        child.kill()
        child.wait()


ENDS = """
import mmap

memory = mmap.mmap(-1, 256 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(mmap.MADV_NOHUGEPAGE)
memory[:: mmap.PAGESIZE] = bytes(len(memory) // mmap.PAGESIZE)
print("ready", flush=True)
input()
"""


def is_exempt_before_it_is_a_zombie() -> bool:
    with subprocess.Popen([sys.executable, "-c", ENDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline()
        child.kill()
        while not is_exempt("processes", str(child.pid)):
            pass
        return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None


def test_a_child_whose_memory_the_kernel_frees_has_ended_before_it_is_a_zombie() -> None:
    # While this process waits for a core, all of the child's end may pass.
    assert any(is_exempt_before_it_is_a_zombie() for _ in range(8))


@pytest.fixture
def done() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def started(thread: threading.Thread) -> str:
    thread.daemon = True
    thread.start()
    return f"{thread.name} ({thread.ident})"


def test_a_thread_of_a_class_of_an_exempt_module_is_exempt(done: threading.Event) -> None:
    kind = type("TMonitor", (threading.Thread,), {"__module__": "tqdm._monitor"})
    assert is_exempt("threads", started(kind(target=done.wait)))


def test_a_thread_that_runs_a_function_of_an_exempt_module_is_exempt(done: threading.Event) -> None:
    def target() -> None:
        done.wait()

    target.__module__ = "torch._inductor.compile_worker.subproc_pool"
    assert is_exempt("threads", started(threading.Thread(target=target)))


def test_a_thread_of_anybody_else_is_not(done: threading.Event) -> None:
    kind = type("Monitor", (threading.Thread,), {"__module__": "tqdm._monitoring"})
    assert not is_exempt("threads", started(kind(target=done.wait)))
    assert not is_exempt("threads", started(threading.Thread(target=done.wait, name="tqdm._monitor")))


@pytest.mark.parametrize(("module", "outcome"), [("tqdm._monitor", "clean"), ("tqdm._monitoring", "leak")])
def test_a_thread_is_exempt_too_where_a_thread_has_started_it_that_has_ended(
    module: str, outcome: str, done: threading.Event
) -> None:
    """As the first progress bar of a process may be shown by a worker."""
    kind = type("TMonitor", (threading.Thread,), {"__module__": module})
    with LeakCheck(settle=0.05) as check:
        worker = threading.Thread(target=lambda: started(kind(target=done.wait)))
        worker.start()
        worker.join()
    assert [subject.outcome for subject in check.report.subjects] == [outcome]


def test_a_worker_of_trio_is_exempt_while_it_waits_and_not_while_it_works(done: threading.Event) -> None:
    module: dict[str, Any] = {"__name__": "trio._core._thread_cache", "lock": threading.Lock()}
    exec("def handle(job):\n    job()\ndef work(job):\n    handle(job)\n    wait(lock)", module)
    # As blockbuster wraps what may block.
    module["wait"] = lambda lock: lock.acquire()
    module["lock"].acquire()
    thread = threading.Thread(target=module["work"], args=(done.wait,))
    name = started(thread)
    assert not is_exempt("threads", name)
    done.set()
    wait_until(lambda: is_exempt("threads", name))
    module["lock"].release()
    thread.join()


def test_arenas_of_multiprocessing_are_exempt_while_nothing_is_in_them() -> None:
    def arenas() -> set[str]:
        found = {f"{link.name} -> {link.readlink()}" for link in Path("/proc/self/fd").iterdir() if link.exists()}
        return {name for name in found if "/pym-" in name}

    kept = multiprocessing.Array("d", 1 << 16)
    held = arenas()
    assert held
    assert not exempt("file-descriptors", held)
    del kept
    gc.collect()
    assert exempt("file-descriptors", held & arenas()) == held & arenas()
    assert held & arenas()


@pytest.mark.parametrize("package", ["multiprocessing", "multiprocess", "joblib.externals.loky.backend"])
def test_resource_trackers_of_all_that_is_derived_from_multiprocessing_are_exempt(
    monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    command = f"/usr/bin/python -c from {package}.resource_tracker import main; main(11, False)"
    monkeypatch.setattr(exemptions, "_command_line", lambda pid: command)
    assert is_exempt("processes", str(os.getpid()))
    monkeypatch.setattr(exemptions, "_command_line", lambda pid: f"/usr/bin/python {package}/resource_tracker.py")
    assert not is_exempt("processes", str(os.getpid()))


def test_a_thread_of_a_pool_that_torch_keeps_is_exempt_and_another_pool_s_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class AsyncCompile:
        @staticmethod
        @functools.lru_cache(1)
        def pool() -> ThreadPoolExecutor:
            return ThreadPoolExecutor(1)

    compiler = SimpleNamespace(AsyncCompile=AsyncCompile)
    monkeypatch.setitem(sys.modules, "torch._inductor.async_compile", compiler)  # type: ignore[arg-type]
    prefetch = ThreadPoolExecutor(1)
    functions = SimpleNamespace(_prefetch_executor=prefetch)
    monkeypatch.setitem(sys.modules, "torch.utils._functools", functions)  # type: ignore[arg-type]
    another = ThreadPoolExecutor(1)

    def thread_of(pool: ThreadPoolExecutor) -> str:
        thread = pool.submit(threading.current_thread).result()
        return f"{thread.name} ({thread.ident})"

    try:
        # Looking does not start it.
        assert not is_exempt("threads", thread_of(another))
        assert AsyncCompile.pool.cache_info().currsize == 0
        assert is_exempt("threads", thread_of(AsyncCompile.pool()))
        assert is_exempt("threads", thread_of(prefetch))
        assert not is_exempt("threads", thread_of(another))
    finally:
        for pool in (another, prefetch, AsyncCompile.pool()):
            pool.shutdown()


def test_a_thread_that_ended_meanwhile_is_exempt() -> None:
    assert is_exempt("threads", "gone (1)")


class SubprocPool:
    """As torch's: two pipes to a process, both ends of each open here, too, and a file that it writes to."""

    def __init__(self, script: str) -> None:
        self.numbers = [*os.pipe(), *os.pipe()]
        self._log = Path(os.devnull).open("w")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)", script],
            pass_fds=(self.numbers[0], self.numbers[3]),
            stdout=self._log,
            stderr=self._log,
        )

    def names(self) -> set[str]:
        return named(*self.numbers, self._log.fileno())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()
        for number in self.numbers:
            os.close(number)


def test_all_that_compile_workers_were_given_is_exempt_and_nothing_of_another_process() -> None:
    pool, another = SubprocPool("torch/_inductor/compile_worker/__main__.py"), SubprocPool("worker.py")
    try:
        assert exempt("file-descriptors", pool.names() | another.names()) >= pool.names()
        pipes = {name for name in another.names() if "pipe:" in name}
        assert len(pipes) == 4
        assert not exempt("file-descriptors", pipes)
    finally:
        pool.close()
        another.close()


def test_what_is_asked_of_many_items_is_read_once_and_never_from_the_whole_heap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr(originals.gc, "get_objects", lambda *args: asked.append("the heap"))
        patched.setattr(originals.os, "listdir", lambda folder: asked.append("all processes") or [])
        patched.setattr(exemptions, "child_processes", lambda: asked.append("the children") or [os.getpid()])
        numbers = range(1000, 1100)
        assert not exempt("file-descriptors", {f"{number} -> pipe:[{number}]" for number in numbers})
        exempt("threads", {f"gone ({number})" for number in numbers})
        exempt("processes", {str(number) for number in numbers})
        exempt("lru-cache", {f"engine.Block at {number:#x} in engine.cache" for number in numbers})
    assert asked == ["the children"]


def test_every_exemption_has_a_reason() -> None:
    for entry in EXEMPTIONS:
        assert entry.what
        assert len(entry.reason) > 20


def test_an_empty_folder_in_shared_memory_is_exempt_and_one_with_a_file_is_not() -> None:
    folder = Path("/dev/shm", f"lowtide_{os.getpid()}_folder")
    folder.mkdir()
    try:
        assert is_exempt("shared-memory", folder.name)
        (folder / "file").touch()
        assert not is_exempt("shared-memory", folder.name)
        assert not is_exempt("shared-memory", f"{folder.name}/file")
    finally:
        shutil.rmtree(folder)
