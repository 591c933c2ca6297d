"""What runs in this process: Python's threads, and tasks of asyncio that wait for what nothing will ever do.

After Go's `goroutineleak` profile (1.27): a goroutine has leaked if nothing that may still run leads to what it waits
for. Here a pending task has leaked if its loop is closed, or if only such tasks lead to the future that it awaits.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from types import CoroutineType
from typing import Any

from lowtide.leakcheck.resources.resource import Bound, Items, Name, Resource, Rule, function_name, without_numbers
from lowtide.probes.heap import roots
from lowtide.probes.heap.reach import module_namespaces, reach
from lowtide.probes.objects.described import is_library
from lowtide.probes.objects.foreign import MISSING, attribute, is_a, is_kind_of_module, thread_key, type_name
from lowtide.probes.objects.listed import collector_paused
from lowtide.probes.originals import gc, loaded, os, sys, threading, time, weakref

_MADE_UP = re.compile(
    r"(Thread|Dummy)-\d+( \(.*\))?|ThreadPoolExecutor-\d+_\d+|asyncio_\d+|QueueFeederThread|QueueManagerThread"
)


class Threads(Resource):
    """The living threads, by name and identifier."""

    rule = Rule(
        "threads",
        "threads",
        "process",
        "Python threads, by name",
        test=Bound(settles=True, cause="thread"),
        life=Bound(settles=True),
        unit="threads",
    )

    def identity(self, name: str) -> Name:
        """Return its class, what it runs if that is the program's own, and its name if somebody gave it one.

        Args:
            name: its name, and its identifier in brackets.
        """
        called = name.rpartition(" (")[0] or name
        given = "" if _MADE_UP.fullmatch(called) else without_numbers(called)
        thread = next((known for known in threading.enumerate() if thread_key(known) == name), None)
        if thread is None:
            return Name(given or without_numbers(called), bool(given))
        cls = type_name(type(thread))
        runs = next((text for key in ("_target", "function") if (text := function_name(attribute(thread, key)))), "")
        is_own = any(text and not roots.is_library(text) for text in (cls, runs))
        return Name(" ".join(filter(None, [cls, runs, given])), bool(given) or is_own)


_NUMBERED = re.compile(r"Task-\d+")

_PAUSES = 10
"""Times as long as a look took, for which what it saw holds."""

_BUDGET_S = 1.0
"""Seconds of processor time that a look may take: what it finds does not depend on what else the machine does."""

_MOST_REACHED = 50_000
"""Objects that are looked at from the loops on."""

_MOST_HOLDERS = 200
"""Objects that lead to what a task awaits, beyond which something is taken to wake it."""


class AsyncioTasks(Resource):
    """The pending tasks, by name, coroutine and address; those that something can wake stay."""

    kept_in = ("asyncio.tasks", "_all_tasks.data", "_scheduled_tasks.data", "_eager_tasks")
    rule = Rule(
        "asyncio-tasks",
        "asyncio-tasks",
        "process",
        "pending tasks of asyncio that nothing can wake: no ready queue, timer, descriptor, thread or global leads to "
        "what they await, or their loop is closed",
        test=Bound(),
        life=Bound(),
        unit="asyncio tasks that nothing can wake",
    )

    def __init__(self) -> None:
        # The tasks that were last looked at, by identity, each with whether nothing could wake it; and until when this
        # holds. Another task may come to the same address.
        self._seen: dict[int, tuple[weakref.ref[Any], bool]] = {}
        self._valid_until = 0.0

    def read(self) -> Items:
        """Return the pending tasks; nothing where asyncio was not imported."""
        return dict.fromkeys(map(_name_of, _pending()), 1)

    def staying(self, names: Collection[str]) -> Collection[str]:
        """Return those that something can wake, or that have ended meanwhile."""
        asked = self.objects(names)
        if not asked:
            return set(names)
        if not all(map(self._is_known, asked.values())) or time.perf_counter() > self._valid_until:
            self._look(asked.values())
        return set(names) - {name for name, task in asked.items() if _is_closed(task) or self._was_stuck(task)}

    def _is_known(self, task: Any) -> bool:
        known = self._seen.get(id(task))
        return known is not None and known[0]() is task

    def objects(self, names: Collection[str]) -> Mapping[str, Any]:
        """Return the tasks."""
        return {name: task for task in _pending() if (name := _name_of(task)) in names}

    def describe(self, name: str) -> str:
        """Return the name without the address."""
        return name.rpartition(" (0x")[0]

    def identity(self, name: str) -> Name:
        """Return the coroutine, and the task's name if somebody gave it."""
        given, _, coroutine = self.describe(name).partition(": ")
        given = "" if _NUMBERED.fullmatch(given) else without_numbers(given)
        function, _, place = coroutine.partition(" at ")
        path = place.rpartition(":")[0]
        text = without_numbers(f"{function} in {os.path.basename(path)}")
        return Name(f"{text} {given}".rstrip(), bool(given) or not is_library(path))

    def advice(self, names: Collection[str]) -> str:
        """Return how such a task ends."""
        return "nothing can wake it: cancel() it and await it in teardown, before the loop is closed"

    def _was_stuck(self, task: Any) -> bool:
        return self._is_known(task) and self._seen[id(task)][1]

    def _look(self, asked: Iterable[Any]) -> None:
        """Look anew; while something is waited for, not at every poll."""
        begun = time.perf_counter()
        with collector_paused():
            verdicts = _verdicts(asked)
        self._seen = {key: (weakref.ref(task), is_stuck) for key, (task, is_stuck) in verdicts.items()}
        now = time.perf_counter()
        self._valid_until = now + _PAUSES * (now - begun)


def _pending() -> list[Any]:
    tasks: Any = loaded("asyncio.tasks")
    if tasks is None:
        return []
    # The references themselves: the set may change meanwhile in another thread. Under one of these names (3.12).
    sets: tuple[Any, ...] = tuple(getattr(tasks, name, None) for name in ("_all_tasks", "_scheduled_tasks"))
    listed = [reference() for each in sets if each is not None for reference in list(each.data)]
    listed += list(getattr(tasks, "_eager_tasks", ()))
    # By the class's own function, whatever a class of the program makes of it.
    return [task for task in listed if is_a(task, tasks.Task) and not tasks.Task.done(task)]


def _name_of(task: Any) -> str:
    kind: Any = loaded("asyncio.tasks").Task
    coroutine: Any = kind.get_coro(task)
    where = f"{type(coroutine).__name__}()"
    if type(coroutine) is CoroutineType:
        # Not its module: asking for its frame makes an object that the coroutine keeps.
        code = coroutine.cr_code
        where = f"{coroutine.__qualname__}() at {code.co_filename}:{code.co_firstlineno}"
    return f"{kind.get_name(task)}: {where} ({id(task):#x})"


def _loop_of(task: Any) -> Any:
    return loaded("asyncio.tasks").Task.get_loop(task)


def _is_closed(task: Any) -> bool:
    """Return whether the loop of a task is closed; of a loop that is none of asyncio's own, False."""
    return attribute(_loop_of(task), "_closed") is True


def _awaited(task: Any) -> Any:
    """Return the future that a task waits for; None where it runs or is about to."""
    # A task written in C computes it; one written in Python has it.
    computed = vars(loaded("asyncio.tasks").Task).get("_fut_waiter")
    waiter = attribute(task, "_fut_waiter") if computed is None else computed.__get__(task)
    return None if waiter is MISSING else waiter


def _verdicts(asked: Iterable[Any]) -> dict[int, tuple[Any, bool]]:
    """Return some pending tasks, and those that lead to what they await, with whether nothing can wake them.

    By identity; the collector is paused. What is not looked at in time is taken to be woken.
    """
    tasks = _pending()
    # Most tasks of a server wait for what a timer or a descriptor leads to: one walk from there for all of them.
    reached = _reached_by_loops(tasks)
    # Not by `gc.get_referrers`, which does not see all that a task written in C refers to.
    by_referent: dict[int, list[Any]] = {id(task): [] for task in tasks}
    for task in tasks:
        for item in gc.get_referents(task):
            by_referent.setdefault(id(item), []).append(task)
    own, roots = frozenset(map(id, tasks)), module_namespaces() | _running_frames()
    looked_at: dict[int, Any] = {}
    wakers: dict[int, frozenset[int] | None] = {}
    waiting, until = list(asked), time.thread_time() + _BUDGET_S
    while waiting:
        task = waiting.pop()
        if id(task) in looked_at:
            continue
        looked_at[id(task)] = task
        is_seen = id(_awaited(task)) in reached and not _is_closed(task)
        others = None
        if not is_seen and time.thread_time() < until:
            others = _wakers(task, own, by_referent, roots)
        wakers[id(task)] = None if others is None else frozenset(map(id, others)) - {id(task)}
        waiting += others or ()
    # A task may be woken by another one that may.
    awake = {task for task, others in wakers.items() if others is None}
    while more := {task for task, others in wakers.items() if others and others & awake} - awake:
        awake |= more
    return {key: (task, key not in awake) for key, task in looked_at.items()}


def _reached_by_loops(tasks: Iterable[Any]) -> frozenset[int]:
    """Return the identities of what the queues, timers and descriptors of the tasks' loops lead to, past no task."""
    loops = {id(loop): loop for loop in map(_loop_of, tasks)}.values()
    starts = [attribute(loop, name) for loop in loops for name in ("_ready", "_scheduled", "_selector")]
    kinds = (loaded("asyncio.tasks").Task, *map(type, loops))
    objects, _ = reach(starts, boundaries=kinds, max_objects=_MOST_REACHED)
    return frozenset(map(id, objects))


def _running_frames() -> frozenset[int]:
    both = (False, True)
    return frozenset(id(frame) for of_checker in both for frame, _ in roots.running_frames(of_checker=of_checker))


def _wakers(
    task: Any, tasks: frozenset[int], by_referent: Mapping[int, list[Any]], roots: frozenset[int]
) -> list[Any] | None:
    """Return the pending tasks that lead to what a task awaits; None if anything else does, or nobody knows.

    Args:
        task: the one that waits.
        tasks: the identities of all that are pending.
        by_referent: the pending tasks that refer to an object, by its identity.
        roots: those of the modules' namespaces, and of the frames that run.
    """
    if _is_closed(task):
        return []
    found = _holders(task, tasks, by_referent, roots)
    if found is None:
        return None
    holders, others = found
    if _has_unseen_references(holders, others):
        return None
    return others


def _holders(
    task: Any, tasks: frozenset[int], by_referent: Mapping[int, list[Any]], roots: frozenset[int]
) -> tuple[dict[int, Any], list[Any]] | None:
    """Return what leads to what a task awaits, by identity, that included, and the pending tasks among the holders.

    Returns:
        None where something that runs is among them, or there are too many to look at.
    """
    future: Any = loaded("asyncio.futures").Future
    loop = _loop_of(task)
    awaited = _awaited(task)
    if awaited is None or not is_a(awaited, future) or future.done(awaited):
        return None
    if id(awaited) in tasks:
        return {}, [awaited]
    holders: dict[int, Any] = {id(awaited): awaited}
    others: dict[int, Any] = {}
    asked = [awaited]
    while asked:
        fresh: list[Any] = []
        others.update((id(each), each) for item in asked for each in by_referent.get(id(item), ()))
        # Nothing else of this function's refers to what is asked about.
        for holder in gc.get_referrers(*asked):
            if holder is asked or holder is holders or id(holder) == id(sys._getframe()) or _is_of(holder, asked):
                continue
            if holder is loop or id(holder) in roots or is_kind_of_module(type(holder)):
                return None
            if id(holder) not in holders and id(holder) not in tasks:
                holders[id(holder)] = holder
                fresh.append(holder)
        if len(holders) > _MOST_HOLDERS:
            return None
        asked = fresh
    return holders, list(others.values())


def _is_of(holder: object, asked: list[Any]) -> bool:
    """Return whether something is the tuple of a call's arguments, which is among the referrers since 3.13."""
    return type(holder) is tuple and list(map(id, holder)) == list(map(id, asked))


def _has_unseen_references(holders: dict[int, Any], others: list[Any]) -> bool:
    """Return whether more refers to one of the holders than is known: C, a running frame, a container of none."""
    known = Counter(id(item) for holder in (*holders.values(), *others) for item in gc.get_referents(holder))
    counted = list(map(sys.getrefcount, holders.values()))
    one: Any = {0: object()}
    (own,) = map(sys.getrefcount, one.values())
    return any(count - own > known[key] for key, count in zip(holders, counted, strict=True))
