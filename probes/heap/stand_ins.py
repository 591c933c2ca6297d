"""The Python objects that stand for threads, processes, descriptors and shared memory, which a system only numbers."""

from __future__ import annotations

import io
import re
import select
import selectors
import socket
import subprocess
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from typing import Any

from lowtide.probes.objects.foreign import MISSING, attribute, type_name
from lowtide.probes.objects.listed import Census
from lowtide.probes.objects.thread_names import thread_key
from lowtide.probes.originals import loaded, threading

_NUMBER = re.compile(r"\d+")
_SHARED_MEMORY = "/dev/shm/"


def stand_ins(census: Census, items: dict[str, list[str]]) -> dict[tuple[str, str], Any]:
    """For things that the counters name, by resource and name, the object that owns each; those that have one.

    Args:
        census: the objects to look among.
        items: the names by resource: `threads`, `processes`, `file-descriptors`, `shared-memory`.
    """
    numbers = {found.group(): name for name in items.get("file-descriptors", ()) if (found := _NUMBER.match(name))}
    segments = {name.partition(f" -> {_SHARED_MEMORY}")[2]: name for name in numbers.values() if _SHARED_MEMORY in name}
    known: dict[tuple[str, str], Any] = {}
    running = (("threads", thread_key(thread), thread) for thread in threading.enumerate())
    mapped: dict[tuple[str, str], Any] = {}
    for resource, name, item in (*running, *owned(census)):
        if resource == "shared-memory" and name in segments:
            mapped["file-descriptors", segments[name]] = item
        if resource == "file-descriptors":
            name = numbers.get(name, "")
        if name in items.get(resource, ()):
            known.setdefault((resource, name), item)
    return known | mapped


def owned(census: Census) -> Iterator[tuple[str, str, Any]]:
    """Give resource, name and owner of each thing that some objects stand for; a descriptor's name is its number."""
    for thread in census.instances_of(threading.Thread):
        yield "threads", thread_key(thread), thread
    for kind in (BaseProcess, subprocess.Popen):
        for process in census.instances_of(kind):
            yield "processes", str(_pid(process)), process
            yield from (("file-descriptors", str(number), process) for number in _descriptors_of(process))
    memory: Any = loaded("multiprocessing.shared_memory")
    for segment in census.instances_of(memory.SharedMemory) if memory is not None else ():
        yield "shared-memory", str(attribute(segment, "_name")).lstrip("/"), segment
    synchronize: Any = loaded("multiprocessing.synchronize")
    for lock in census.instances_of(synchronize.SemLock) if synchronize is not None else ():
        # A type written in C, whose attribute is nothing but a pointer in its struct.
        inner: Any = attribute(lock, "_semlock")
        if type_name(type(inner)) == "_multiprocessing.SemLock":
            yield "shared-memory", f"sem.{str(inner.name).lstrip('/')}", lock
    for selector in census.instances_of(selectors.BaseSelector):
        # The collector does not track an epoll itself.
        epoll: Any = attribute(selector, "_selector")
        if type_name(type(epoll)) in ("select.epoll", "select.kqueue"):
            yield "file-descriptors", str(_number(type(epoll), epoll)), selector
    for file_kind in (socket.SocketType, io.FileIO, select.epoll):
        for file in census.instances_of(file_kind):
            yield "file-descriptors", str(_number(file_kind, file)), file
    connection: Any = loaded("multiprocessing.connection")
    for end in census.instances_of(connection._ConnectionBase) if connection is not None else ():
        yield "file-descriptors", str(_plain(attribute(end, "_handle"))), end


def _pid(process: Any) -> int:
    own = _plain(attribute(process, "pid"))
    return own if own >= 0 else _plain(attribute(attribute(process, "_popen"), "pid"))


def _descriptors_of(process: Any) -> list[int]:
    """By which multiprocessing learns of the end of a process: its sentinel, and what it closes with that."""
    popen: Any = attribute(process, "_popen")
    if popen is MISSING or popen is None:
        return []
    closed: Any = attribute(attribute(popen, "finalizer"), "_args")
    found = [attribute(popen, "sentinel")]
    if type(closed) is tuple or type(closed) is list:
        found += closed
    return [number for number in map(_plain, found) if number >= 0]


def _plain(value: object) -> int:
    return value if type(value) is int else -1


def _number(kind: Any, file: Any) -> int:
    try:
        return int(kind.fileno(file))
    except (ValueError, OSError):  # closed
        return -1
