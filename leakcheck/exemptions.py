"""What is there to stay, and so is no leak: each entry with its reason, all of them in one list."""

from __future__ import annotations

import gc
import io
import re
import sys
import sysconfig
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from lowtide.probes.objects import Census
from lowtide.probes.reach import reach
from lowtide.reports.schema import Resource


@dataclass(frozen=True)
class Exemption:
    """One thing that a process starts once and keeps.

    Attributes:
        resource: of which resource.
        what: its name for people.
        reason: why it stays.
        applies: whether an item, by the name that it has in the counters, is it.
    """

    resource: Resource
    what: str
    reason: str
    applies: Callable[[str], bool]


def is_exempt(resource: str, name: str) -> bool:
    """Whether an item of `resource` is there to stay."""
    return any(entry.resource == resource and entry.applies(name) for entry in EXEMPTIONS)


def _command_line(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:  # it ended meanwhile
        return ""


def _runs(*modules: str) -> Callable[[str], bool]:
    return lambda pid: any(module in _command_line(pid) for module in modules)


def _has_ended(pid: str) -> bool:
    try:
        return bool(psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE)
    except psutil.Error:  # it ended meanwhile
        return True


def _opens(pattern: str) -> Callable[[str], bool]:
    return lambda name: re.fullmatch(pattern, name.partition(" -> ")[2]) is not None


def _is_installed(name: str) -> bool:
    target = name.partition(" -> ")[2]
    return any(
        target.startswith(f"{place}/") for place in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    )


def _is_torchs_own(name: str) -> bool:
    held, _, cache = name.rpartition(" in ")
    return held.startswith("torch.") and cache.startswith("torch.")


def _compile_worker_pipe(name: str) -> bool:
    pools: Any = sys.modules.get("torch._inductor.compile_worker.subproc_pool")
    if pools is None:
        return False
    found, _ = reach(Census(gc.get_objects()).instances_of(pools.SubprocPool), max_objects=20_000)
    numbers = {file.fileno() for file in Census(found).instances_of(io.FileIO) if not file.closed}
    return int(name.partition(" ")[0]) in numbers


def _pipe_to(command: str) -> Callable[[str], bool]:
    """Whether a descriptor is a pipe that a child process of that name has open as well."""

    def applies(name: str) -> bool:
        target = name.partition(" -> ")[2]
        if not target.startswith("pipe:"):
            return False
        children = [child.pid for child in psutil.Process().children() if command in _command_line(str(child.pid))]
        return any(target in _open_files(pid) for pid in children)

    return applies


def _open_files(pid: int) -> set[str]:
    try:
        return {str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()}
    except OSError:  # it ended meanwhile
        return set()


def _multiprocessing_pipe(name: str) -> bool:
    number = int(name.partition(" ")[0])
    tracker: Any = sys.modules.get("multiprocessing.resource_tracker")
    server: Any = sys.modules.get("multiprocessing.forkserver")
    owned = [getattr(getattr(tracker, "_resource_tracker", None), "_fd", None)]
    owned += [
        getattr(getattr(server, "_forkserver", None), key, None) for key in ("_forkserver_fd", "_forkserver_alive_fd")
    ]
    return number in owned


def _thread_of(*modules: str) -> Callable[[str], bool]:
    """Whether the thread of that name is of a class, or runs a function, of one of these modules."""

    def applies(name: str) -> bool:
        for thread in threading.enumerate():
            if f"{thread.name} ({thread.ident})" != name:
                continue
            target = getattr(thread, "_target", None)
            places = (type(thread).__module__, str(getattr(target, "__module__", "")))
            return any(place == module or place.startswith(f"{module}.") for place in places for module in modules)
        return True  # it ended meanwhile

    return applies


def _serves_torchs_pool(name: str) -> bool:
    """Whether the thread of that name is one of an executor that torch makes once, and keeps."""
    compiler: Any = sys.modules.get("torch._inductor.async_compile")
    functions: Any = sys.modules.get("torch.utils._functools")
    # Nothing is asked of the cache: that would start the pool.
    kept = gc.get_referents(getattr(getattr(compiler, "AsyncCompile", None), "pool", None))
    kept.append(getattr(functions, "_prefetch_executor", None))
    own = [thread for pool in kept if isinstance(pool, ThreadPoolExecutor) for thread in pool._threads]
    return any(f"{thread.name} ({thread.ident})" == name for thread in own)


EXEMPTIONS: tuple[Exemption, ...] = (
    Exemption(
        "processes",
        "multiprocessing's resource tracker and fork server",
        "Python starts one of each per process, when shared memory, a semaphore or a start method first asks for it",
        _runs("multiprocessing.resource_tracker", "multiprocessing.forkserver"),
    ),
    Exemption(
        "processes",
        "a child that has ended",
        "only its exit code is left, until somebody asks for it",
        _has_ended,
    ),
    Exemption(
        "processes",
        "torch.compile's compile workers",
        "torch starts one pool per process at the first compilation and ends it at exit",
        _runs("torch/_inductor/compile_worker"),
    ),
    Exemption(
        "processes",
        "torch's addr2line",
        "torch starts some to name the C++ frames of a recorded allocation, and keeps them",
        _runs("addr2line"),
    ),
    Exemption(
        "threads",
        "the threads of torch.compile's compile workers",
        "they serve the pool of compile workers, one per process",
        _thread_of("torch._inductor.compile_worker", "torch._inductor.async_compile"),
    ),
    Exemption(
        "threads",
        "the threads in which torch.compile compiles",
        "torch starts one pool per process at the first compilation and keeps it",
        _serves_torchs_pool,
    ),
    Exemption(
        "threads",
        "tqdm's monitor",
        "one daemon thread per process, started by the first progress bar",
        _thread_of("tqdm._monitor"),
    ),
    Exemption(
        "threads",
        "the debugger's threads",
        "pydevd serves the development environment for the whole process",
        _thread_of("pydevd", "_pydevd_bundle", "debugpy"),
    ),
    Exemption(
        "threads",
        "pytest-timeout's timer",
        "it watches the very test that is judged",
        _thread_of("pytest_timeout"),
    ),
    Exemption(
        "file-descriptors",
        "the pipes to multiprocessing's resource tracker and fork server",
        "they live as long as those two do",
        _multiprocessing_pipe,
    ),
    Exemption(
        "lru-cache",
        "torch's own caches of torch's own objects",
        "they are built once: empty modules that the compiler uses, and the like",
        _is_torchs_own,
    ),
    Exemption(
        "file-descriptors",
        "the pipes to torch.compile's compile workers",
        "they live as long as the pool does",
        _compile_worker_pipe,
    ),
    Exemption(
        "file-descriptors",
        "the pipes to torch's addr2line",
        "they live as long as those processes do",
        _pipe_to("addr2line"),
    ),
    Exemption(
        "file-descriptors",
        "the standard streams",
        "a test runner that captures output points them elsewhere and back",
        lambda name: name.partition(" ")[0] in ("0", "1", "2"),
    ),
    Exemption(
        "file-descriptors",
        "the card's driver",
        "CUDA and ROCm open their devices at the first call and keep them until the process ends",
        _opens(r"/dev/(nvidia.*|kfd|dri/.*|dxg)|/proc/driver/nvidia.*"),
    ),
    Exemption(
        "file-descriptors",
        "a library's own files",
        "fonts, tables and the like, which a library opens where it is installed when they are first asked for",
        _is_installed,
    ),
    Exemption(
        "file-descriptors",
        "the kernel's random numbers",
        "libraries open them once and keep them",
        _opens(r"/dev/u?random"),
    ),
)
"""Checked in this order; asked only about what is new after a test."""
