"""What a running thread is called, past whatever a class of the program makes of `name` and `ident`."""

from __future__ import annotations

from lowtide.probes.objects.foreign import attribute, type_name
from lowtide.probes.originals import os, threading

_PLAIN = frozenset(map(id, (threading.Thread, threading.Timer, type(threading.main_thread()), threading._DummyThread)))


def living_threads() -> list[threading.Thread]:
    """Return the threads that Python knows and that have not ended.

    For a thread of C in which somebody asked for the current thread (logging does) Python makes an object, and keeps it
    past the thread's end (until 3.13).
    """
    return [each for each in threading.enumerate() if type(each) is not threading._DummyThread or _goes_on(each)]


def _goes_on(thread: threading.Thread) -> bool:
    try:
        os.stat(f"/proc/self/task/{thread.native_id}")
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return True


def thread_name(thread: threading.Thread) -> str:
    """The name; that of the class where the thread has none."""
    if id(type(thread)) in _PLAIN:
        return thread.name
    name = attribute(thread, "_name")
    return name if type(name) is str else type_name(type(thread))


def thread_ident(thread: threading.Thread) -> int:
    """The identifier; 0 where it does not run yet."""
    ident = thread.ident if id(type(thread)) in _PLAIN else attribute(thread, "_ident")
    return ident if type(ident) is int else 0


def thread_key(thread: threading.Thread) -> str:
    """`name (identifier)`, as the counters name it."""
    return f"{thread_name(thread)} ({thread_ident(thread) or None})"
