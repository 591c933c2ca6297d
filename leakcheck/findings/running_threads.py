"""Threads that did not end: what they run, who started them, who keeps what they work for, and whose call ends them."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import msgspec
from msgspec.structs import replace

from lowtide.leakcheck.explaining.endings import leaves_running
from lowtide.leakcheck.explaining.explain import Holder
from lowtide.leakcheck.explaining.expressions import END_OF_RUNNING_LOOP, class_named, ending_of, on
from lowtide.leakcheck.explaining.library_objects import Offer, offered_method
from lowtide.leakcheck.explaining.path_reading import way_text
from lowtide.leakcheck.findings.item_findings import ItemLeak, only
from lowtide.leakcheck.findings.storage_holders import Context
from lowtide.leakcheck.judging.fingerprints import identity_of
from lowtide.leakcheck.resources.resource import Change, without_numbers
from lowtide.probes.heap.holders import objects_of
from lowtide.probes.heap.roots import is_library
from lowtide.probes.objects.described import name_of
from lowtide.probes.objects.foreign import (
    attribute,
    code_of,
    is_a,
    mro_of,
    namespace_of,
    thread_key,
    thread_name,
    type_name,
)
from lowtide.probes.originals import gc, threading, weakref
from lowtide.reports.schema import Hop
from lowtide.reports.sizes import first_of
from lowtide.reports.statement import noted, restated

_SHOWN = 3
"""Threads of one cause that are named."""

_CALLS: Mapping[str, str] = {
    "concurrent.futures.thread.ThreadPoolExecutor": "shutdown()",
    "multiprocessing.pool.Pool": "terminate()",
    "threading.Timer": "cancel()",
    "threading.Event": "set()",
    "queue.Queue": "put(None)",
    "_queue.SimpleQueue": "put(None)",
    "asyncio.events.AbstractEventLoop": END_OF_RUNNING_LOOP,
}
"""By a class, the call by which one of its instances ends the threads that work for it, or asks them to end."""

_EXECUTOR = "concurrent.futures.thread.ThreadPoolExecutor"
_TIMER = "threading.Timer"
_WORKER = "concurrent.futures.thread._worker"
"""What the threads of such an executor run, and none other."""

_CANCELLING = Offer("cancel()", "is cancelled", lambda timer: timer.cancel())


def by_work(leak: ItemLeak, context: Context) -> list[ItemLeak]:
    """Part threads by what they do, those together that do the same; nothing is said of threads that have ended."""
    groups = _groups(leak.names, context)
    known = {running.name for group in groups for running in group}
    rest = {name: size for name, size in leak.names.items() if name not in known}
    if len(groups) + bool(rest) <= 1:
        return [_told(leak, group) for group in groups] or [leak]
    parts = [only(leak, {running.name: leak.names[running.name] for running in group}) for group in groups]
    told = [_told(part, group) for part, group in zip(parts, groups, strict=True)]
    return [*told, *([only(leak, rest)] if rest else [])]


def with_work(leak: ItemLeak, context: Context) -> ItemLeak:
    """Return a finding about threads with what they do, each kind of them by its name where they do several things."""
    groups = _groups(leak.names, context)
    if len(groups) < 2:
        return _told(leak, groups[0]) if groups else leak
    told = [_told(leak, group) for group in groups]
    notes = [f"; {thread_name(group[0].thread)}: {_work(group)}" for group in groups]
    advice = "; ".join(dict.fromkeys(each.finding.advice for each in told if each.finding.advice))
    endings = itertools.chain(*(each.endings for each in told))
    return replace(
        leak,
        finding=noted(leak.finding, "".join(notes), advice=advice or None),
        endings=tuple({ending.code: ending for ending in endings}.values()),
        through=frozenset[int]().union(*(each.through for each in told)),
    )


def most_work(threads: Collection[threading.Thread]) -> str:
    """Return what most of some threads are called, numbers aside, and run, as part of a sentence."""
    ((name, runs), _), *others = Counter(
        (without_numbers(thread_name(each)), _runs(each)) for each in threads
    ).most_common()
    return f"{'most' if others else 'all'} are called '{name}' and run {runs}"


def _groups(names: Collection[str], context: Context) -> list[list[_Running]]:
    """Return the threads that run, those together that do the same; by their names, as the counters have them."""
    running = [thread for thread in threading.enumerate() if thread_key(thread) in names]
    owners = [list(works_for(thread)) for thread in running]
    targets = list({id(item): item for found in owners for item in found}.values())
    holders = context.first_holders(
        targets,
        ignore={id(running), id(owners), *map(id, owners)},
        not_roots=set(map(id, running)),
        names=context.names(),
    )
    by_target = {id(item): holder for item, holder in zip(targets, holders, strict=True) if _is_programs(holder)}
    wanted = {holder.identity for holder in by_target.values() if holder is not None}
    kept = {id(item): item for item in (objects_of(wanted, context.walk) if wanted else ())}
    groups: dict[Hashable, list[_Running]] = {}
    for thread, own in zip(running, owners, strict=True):
        started = context.made_at("threads", thread_key(thread))
        each = _Running(thread, own, [by_target.get(id(item)) for item in own], started, kept)
        # Exactly what a fingerprint distinguishes, or two findings of a test had the same one.
        groups.setdefault(identity_of("threads", [each.name]), []).append(each)
    return list(groups.values())


class _Running(msgspec.Struct, frozen=True):
    """A thread, the objects that it works for, the most significant first, who holds each, and who started it.

    The objects that hold some are `kept` by their identities.
    """

    thread: threading.Thread
    owners: Sequence[Any]
    holders: Sequence[Holder | None]
    started: str
    kept: Mapping[int, object]

    @property
    def name(self) -> str:
        return thread_key(self.thread)

    @property
    def held(self) -> tuple[Any, Holder] | None:
        """Return the first of the objects that the program keeps."""
        return next(((item, of) for item, of in zip(self.owners, self.holders, strict=True) if of is not None), None)

    @property
    def through(self) -> frozenset[int]:
        """Return the identities of the objects that modules keep, and of those on the ways there."""
        kept = [(id(item), of.through) for item, of in zip(self.owners, self.holders, strict=True) if of is not None]
        return frozenset(identity for own, through in kept for identity in (own, *through))


def _told(leak: ItemLeak, group: Sequence[_Running]) -> ItemLeak:
    """Return a finding about threads that do the same with what that is, who keeps what they work for, and its end."""
    one, runs, text = len(group) == 1, _runs(group[0].thread), _work(group)
    held = [running.held for running in group if running.held is not None]
    holder, path, advice = _kept_by(held, runs, group[0].kept, one=one) if held else ("", (), _unheld(group[0], runs))
    if path == (held[0][1].way if held else ()):
        # Nobody else's end is advised.
        advice = _idle_end(group[0], runs) or advice
    finding = restated(leak.finding, {"path": path or leak.finding.path, "advice": advice}, most=_SHOWN)
    finding = noted(finding, f"; {text}{', held by ' if holder else ''}", holder)
    endings = {ending.code: ending for running in group for ending in _endings(running)}
    through = frozenset[int]().union(*(running.through for running in group))
    return replace(leak, finding=finding, endings=tuple(endings.values()), through=through)


def _work(group: Sequence[_Running]) -> str:
    """Return what threads that do the same run, and where they were started, as part of a sentence."""
    started = list(dict.fromkeys(running.started for running in group if running.started))
    runs = f"{'it runs' if len(group) == 1 else 'they run'} {_runs(group[0].thread)}{_waiting(group)}"
    return runs + (f", started in {first_of(started, _SHOWN)}" if started else "")


def _kept_by(
    held: Sequence[tuple[Any, Holder]], runs: str, kept: Mapping[int, object], *, one: bool
) -> tuple[str, tuple[Hop, ...], str]:
    """Return who keeps what threads work for, as code, the way there, and what to change."""
    owner, holder = held[0]
    ways = list(dict.fromkeys(way_text(of.way) for _, of in held))
    name, path, call = ways[0], holder.way, _call(type(owner), owner)
    is_outer = len(holder.path) < len(holder.way)
    outer = ending_of(class_named(holder.path[-1].type), kept.get(holder.identity)) if is_outer else ""
    if outer:
        # What holds it and has an end of its own is what the program ends.
        ways = list(dict.fromkeys(way_text(of.path) for _, of in held))
        name, path, call = ways[0], holder.path, outer
    others = f" (and {len(ways) - 1} more)" if len(ways) > 1 else ""
    advice = f"let {runs} return, and join {name}{others} in teardown"
    if call:
        advice = f"call {on(name, call)}{others} in teardown"
    return f"{name}{others}", path, advice


def _unheld(running: _Running, runs: str) -> str:
    """Return what to change where nothing of the program knows the thread, or what it works for, any more."""
    for owner in running.owners:
        call, name = _call(type(owner), owner), type_name(type(owner))
        if call:
            verb = "await its" if call.startswith("await ") else "call its"
            end = on("it", call).removeprefix("await ").removeprefix("it.")
            advice = f"keep the {name}, and {verb} {end} at the end"
            return advice + (", or use it in a with statement" if _is_context(type(owner)) else "")
    if _is_executors(running.thread):
        return f"keep the {_EXECUTOR}, and call its shutdown() at the end, or use it in a with statement"
    of = name_of(_target(running.thread)).rpartition(".")[0]
    call = _call(cls) if (cls := class_named(of)) is not None else ""
    if call:
        # What runs is a function of a class that has an end, as `Queue._feed` of multiprocessing's queue.
        return f"call {call} of the {of} in teardown"
    return f"keep the thread, let {runs} return, and join() the thread at the end"


def _idle_end(running: _Running, runs: str) -> str:
    """Return what to change where the object whose method a thread runs has an end that does not end the thread."""
    target = _target(running.thread)
    owner = target.__self__ if type(target) is MethodType else None
    call = _call(type(owner)) if owner is not None else ""
    if not call or not leaves_running(owner, call, running.thread, target):
        return ""
    return f"let {type_name(type(owner))}.{call} end the thread: make {runs} return, and join() it there"


def _call(cls: type, instance: object = None) -> str:
    names = [type_name(base) for base in mro_of(cls)]
    return next((_CALLS[name] for name in names if name in _CALLS), "") or ending_of(cls, instance)


def _is_context(cls: type) -> bool:
    return any("__exit__" in namespace_of(base) for base in mro_of(cls))


def _endings(running: _Running) -> Iterator[Change]:
    """Yield the calls of the standard library that end the thread, as code that runs."""
    for owner, holder in zip(running.owners, running.holders, strict=True):
        code = None if holder is None else holder.target
        if type_name(type(owner)) == _TIMER:
            offer: Offer | None = _CANCELLING
        else:
            offer = offered_method(owner) if type_name(type(owner)) == _EXECUTOR else None
        if offer is not None and code is not None:
            end = functools.partial(_end, weakref.ref(owner), offer)
            yield Change(f"{code}.{offer.call}", f"{code} {offer.changed}", end)


def _end(reference: weakref.ref[Any], offer: Offer) -> None:
    owner = reference()
    if owner is not None:
        offer.do(owner)


def works_for(thread: threading.Thread) -> Iterator[Any]:
    """Yield the objects that a thread works for: its pool, its method's object, itself, and what it was given."""
    target, arguments = _target(thread), _arguments(thread)
    executor = _executor(arguments)
    if executor is not None:
        yield executor
    if _is_executors(thread):
        return
    own = getattr(target, "__self__", None) if type(target) in (MethodType, BuiltinFunctionType) else None
    if own is not None and type(own) is not ModuleType and not is_a(own, type):
        yield own
    if own is not thread:
        yield thread
    cells = (target.__closure__ or ()) if type(target) is FunctionType else ()
    # An empty cell refers to nothing.
    given = [*arguments, *(item for cell in cells for item in gc.get_referents(cell))]
    yield from (item for item in given if item is not own and _is_an_end(type(item)))


def _is_an_end(cls: type) -> bool:
    """Return whether what a thread was given may be what ends it."""
    return type_name(cls).partition(".")[0] not in ("torch", "_io", "numpy") and bool(_call(cls))


def _target(thread: threading.Thread) -> Any:
    """Return what a thread calls, out of its partials; None where its class has a `run` of its own."""
    run = next(namespace_of(base)["run"] for base in mro_of(type(thread)) if "run" in namespace_of(base))
    if run is not threading.Thread.run:
        return None
    target: Any = attribute(thread, "_target")
    while type(target) is functools.partial:
        target = target.func
    return target


def _arguments(thread: threading.Thread) -> list[Any]:
    arguments, named = attribute(thread, "_args"), attribute(thread, "_kwargs")
    found = [*arguments] if type(arguments) is tuple or type(arguments) is list else []
    found += dict.values(named) if type(named) is dict else ()
    # A pool's worker does not keep its pool alive.
    return [item() if type(item) is weakref.ref else item for item in found]


def _is_executors(thread: threading.Thread) -> bool:
    target = _target(thread)
    return type(target) is FunctionType and name_of(target) == _WORKER


def _executor(arguments: Sequence[Any]) -> Any:
    return next((item for item in arguments if any(type_name(base) == _EXECUTOR for base in mro_of(type(item)))), None)


def _runs(thread: threading.Thread) -> str:
    """Return what a thread runs, as part of a sentence."""
    if _is_executors(thread):
        executor = _executor(_arguments(thread))
        return f"tasks of a {_EXECUTOR if executor is None else type_name(type(executor))}"
    if is_a(thread, threading.Timer):
        return f"a {type_name(type(thread))} of {_named(attribute(thread, 'function'))}"
    target = _target(thread)
    return f"{type_name(type(thread))}.run" if target is None else _named(target)


def _named(function: Any) -> str:
    item = function.__func__ if type(function) is MethodType else function
    code: Any = code_of(item) if type(item) is FunctionType else None
    return name_of(function) + (f" ({code.co_filename.rpartition('/')[2]}:{code.co_firstlineno})" if code else "")


def _waiting(group: Sequence[_Running]) -> str:
    """Return how many tasks wait for a thread of their executor."""
    given = [item for running in group if _is_executors(running.thread) for item in _arguments(running.thread)]
    queues = {id(item): item for item in given if type_name(type(item)) == "_queue.SimpleQueue"}
    waiting = sum(queue.qsize() for queue in queues.values())
    return f" ({waiting} more wait)" if waiting else ""


def _is_programs(holder: Holder | None) -> bool:
    """Return whether the way to an object begins at the program's, and not in the interpreter's own lists."""
    return holder is not None and not (holder.way[0].type == "module" and is_library(holder.way[0].edge))
