"""What the objects on a path say of themselves: meant to live, to be gone by now, or at work that has not ended.

The idea is LeakCanary's object inspectors: many small clues, each about one kind of object.  A clue reads attributes as
they lie in the object and runs no foreign code; where it knows nothing, it says nothing.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Container, Sequence
from types import FunctionType, MemberDescriptorType
from typing import Any

from lowtide.probes.heap.paths import Mark
from lowtide.probes.objects.foreign import attribute, is_a, mro_of, namespace_of, type_name
from lowtide.probes.originals import gc, loaded, threading
from lowtide.probes.references.unseen_references import is_view_of

# What a class calls the method that ends its instances' life, and how an instance says that this has happened.
_ENDINGS = ("close", "shutdown", "stop", "terminate", "destroy")
_FLAGS = (
    "closed",
    "_closed",
    "is_closed",
    "_is_closed",
    "_shutdown",
    "is_shutdown",
    "_is_shutdown",
    "_shut_down",
    "_shutdown_thread",
)
_STATES = ("state", "_state", "status", "_status")
_ENDED = frozenset({"closed", "shutdown", "shut_down", "stopped", "terminated", "destroyed", "dead"})
_ALIVE = frozenset({"running", "asleep", "sleeping", "awake", "ready", "active", "idle", "started"})


def marks(
    items: Sequence[object],
    *,
    innocent: Container[int] = (),
    ages_known: bool = False,
    living: bool = False,
    hollow: bool = False,
) -> list[Mark | None]:
    """One mark for each object that a path leads to, from the root on.

    Args:
        items: the objects.
        innocent: identities of those that were there before the leak.
        ages_known: whether that is all of them.
        living: whether an engine that has not ended is meant to live now, and with it the modules that it owns; at the
            end of a test, what the test started should be gone.
        hollow: whether the path begins at an engine that was shut down and that its caller still has: then its parts
            that were asked to end as well may be there, and should be empty.
    """
    found: list[Mark | None] = []
    owned = False
    young = _young_by_what_they_hold(items, innocent)
    for item in items:
        mark = _clue(item)
        is_live = living and mark == "innocent"
        was_there = mark != "holding" and id(item) in innocent and id(item) not in young
        if ages_known and (type(item) is dict or not gc.is_tracked(item)) and id(item) not in young:
            # The collector does not know an empty dict: one seems born when its first entry comes. Of what it does not
            # track nobody knows when it was made. They are taken for as old as what holds them.
            was_there = (was_there and gc.is_tracked(item)) or not found or found[-1] == "innocent"
        if (hollow and can_end(item)) or was_there or is_live or _is_owned(item, owned):
            mark = "innocent"
        elif mark == "innocent":
            mark = None
        owned = owned or is_live
        found.append(mark)
    return found


def _young_by_what_they_hold(items: Sequence[object], innocent: Container[int]) -> set[int]:
    """Those of the objects on a path of which it is unknown when they were made, but that hold what came later.

    What they hold was there before them: a view's base, the cells of a function.
    """
    young: set[int] = set()
    for item, held in zip(reversed(items[:-1]), reversed(items[1:]), strict=True):
        if is_view_of(item, held) and (id(held) not in innocent or id(held) in young):
            young.add(id(item))
        if type(item) is FunctionType and any(id(cell) not in innocent for cell in item.__closure__ or ()):
            young.add(id(item))
    return young


def _clue(item: object) -> Mark | None:
    return next((mark for clue in _CLUES if (mark := clue(item)) is not None), None)


def _is_owned(item: object, owned: bool) -> bool:
    """Whether an object is a module of the engine that the path has passed."""
    torch: Any = loaded("torch")
    return owned and torch is not None and hasattr(torch, "nn") and is_a(item, torch.nn.Module)


def _future(item: object) -> Mark | None:
    """A future whose result is not there yet."""
    if is_a(item, concurrent.futures.Future):
        return "pending" if attribute(item, "_state") in ("PENDING", "RUNNING") else None
    # A class written in C, whose own method is asked past the object's.
    if is_a(item, asyncio.Future):
        return None if asyncio.Future.done(item) else "pending"  # type: ignore[arg-type]
    return None


def _thread(item: object) -> Mark | None:
    """A thread that has ended."""
    if not is_a(item, threading.Thread):
        return None
    started = attribute(item, "_started")
    if type(started) is not threading.Event or not started.is_set():
        return None
    return None if any(item is thread for thread in threading.enumerate()) else "holding"


def _transfer(item: object) -> Mark | None:
    """A collective operation or another piece of torch's asynchronous work that has not ended."""
    distributed: Any = loaded("torch.distributed")
    if distributed is None or not hasattr(distributed, "Work") or not is_a(item, distributed.Work):
        return None
    return None if distributed.Work.is_completed(item) else "pending"


def _resource(item: object) -> Mark | None:
    """Anything that can be closed or shut down, and says whether it was: executors, pools, connections, engines."""
    if not can_end(item):
        return None
    if any(_flag(item, flag) is True for flag in _FLAGS):
        return "holding"
    for name in _STATES:
        state = attribute(item, name)
        # An enumeration's member has its name in `_name_`.
        text = state if type(state) is str else attribute(state, "_name_")
        if type(text) is str and text.lower() in _ENDED:
            return "holding"
        if type(text) is str and text.lower() in _ALIVE:
            return "innocent"
    return None


def _flag(item: object, name: str) -> object:
    """An attribute, or a slot."""
    for base in mro_of(type(item)):
        member = namespace_of(base).get(name)
        if type(member) is MemberDescriptorType:
            try:
                return member.__get__(item)
            except AttributeError:
                return None  # unset
    return attribute(item, name)


def _file(item: Any) -> Mark | None:
    """A closed file of Python's own, or what reads from one; another one's answer would be foreign code."""
    name = type_name(type(item))
    try:
        if name == "_io.TextIOWrapper":
            return _file(item.buffer)
        if name in ("_io.BufferedReader", "_io.BufferedWriter", "_io.BufferedRandom"):
            return _file(item.raw)
        if name in ("_io.FileIO", "_io.BytesIO", "_io.StringIO", "mmap.mmap"):
            return "holding" if item.closed else None
    except ValueError:  # detached
        return "holding"
    return None


def can_end(item: object) -> bool:
    """Whether an object has a life of its own, by a method that ends it."""
    return any(name in namespace_of(base) for base in mro_of(type(item)) for name in _ENDINGS)


_CLUES: tuple[Callable[[object], Mark | None], ...] = (_future, _thread, _transfer, _file, _resource)
