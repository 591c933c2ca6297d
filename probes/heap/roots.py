"""Where paths start: modules, threads, contexts, running frames, classes written in C, what the interpreter holds."""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextvars import copy_context
from types import FrameType, FunctionType, ModuleType
from typing import Any, Literal

import msgspec

from lowtide.probes.objects.foreign import (
    attribute,
    dict_of_module,
    flags_of,
    is_a,
    mro_of,
    namespace_of_class,
    thread_name,
    type_name,
)
from lowtide.probes.objects.listed import CHECKER, all_classes, frame_locals, is_checkers
from lowtide.probes.originals import gc, loaded, sys, threading
from lowtide.probes.references.edges import variables_of
from lowtide.probes.references.interpreter_holders import exit_functions, named_holders

RootKind = Literal["module", "frame", "thread", "class", "context", "object", "interpreter", "native"]
# The search's queues: most objects, then library internals and thread locals, then running frames.
FIRST, LATER, LAST = range(3)
_HEAP_TYPE = 1 << 9

# A path through one of these modules comes last: what is theirs is seldom what must be cut.
_LIBRARIES = frozenset({"_pytest", "execnet", "hypothesis", "numpy", "pluggy", "pytest", "torch", "triton", "xdist"})
# A path through an instance of one of these modules' classes comes last.
_REGISTRIES = frozenset(
    {
        "_frozen_importlib",
        "_frozen_importlib_external",
        "_pytest",
        "execnet",
        "hypothesis",
        "logging",
        "pluggy",
        "xdist",
    }
)


class Root(msgspec.Struct, frozen=True):
    """Where paths start: an object, and what it holds besides what the collector shows (`also`)."""

    kind: RootKind
    name: str
    held: object
    also: list[object]
    turn: int
    thread: str = ""
    variables: list[tuple[str, object]] = msgspec.field(default_factory=list)


def roots() -> Iterator[Root]:
    """Yield all roots of the process, those of the program's own modules first."""
    modules = _modules()
    seen = {id(module) for _, module in modules}
    yield from map(_root_at, modules)
    running = _running()
    names = {ident: thread_name(thread) for ident, thread in running.items()}
    for ident, thread in running.items():
        if id(thread) not in seen:
            seen.add(id(thread))
            yield _root_of_thread(thread, names[ident])
    for variable, value in copy_context().items():
        yield Root("context", variable.name, variable, [value], LATER)
    for name, held in (*named_holders(), *exit_functions()):
        if id(held) not in seen and (gc.is_tracked(held) or type(held) is dict or type(held) is tuple):
            seen.add(id(held))
            yield Root("interpreter", name, held, [], LAST)
    for frame, ident in running_frames():
        yield _root_of_frame(frame, "" if ident == threading.get_ident() else names.get(ident, str(ident)))
    # A class written in C shows the collector nothing, and lives as long as the process.
    for cls in all_classes():
        if not flags_of(cls) & _HEAP_TYPE and id(cls) not in seen:
            yield Root("class", type_name(cls), cls, [namespace_of_class(cls), mro_of(cls)], LATER)


def modules_among(identities: Container[int]) -> list[Root]:
    """Return those modules that have one of some identities, in the order of `roots`."""
    return [_root_at(each) for each in _modules() if id(each[1]) in identities]


def threads_among(identities: Container[int]) -> list[Root]:
    """Return the running threads that have one of some identities, and behind them their frames, in `roots`' order."""
    running = {ident: thread for ident, thread in _running().items() if id(thread) in identities}
    names = {ident: thread_name(thread) for ident, thread in running.items()}
    frames = running_frames() if running else ()
    return [
        *(_root_of_thread(thread, names[ident]) for ident, thread in running.items()),
        *(_root_of_frame(frame, names[ident]) for frame, ident in frames if ident in running),
    ]


def lists_of_threads() -> list[object]:
    """Return the module that lists the running threads, and on the way from it that list: it alone keeps them."""
    module = loaded("threading")
    return [module, dict_of_module(module), threading._active]  # type: ignore[attr-defined]


def _running() -> dict[int, Any]:
    return dict(threading._active)  # type: ignore[attr-defined]


def _root_of_thread(thread: object, name: str) -> Root:
    return Root("thread", name, thread, [], LATER if _runs_for_a_library(thread) else FIRST)


def _root_of_frame(frame: FrameType, running_in: str) -> Root:
    variables = variables_of(frame)
    frame_locals(frame)  # undoes what reading them left behind
    also = [*(value for _, value in variables), frame.f_globals]
    if sys.version_info < (3, 11):
        # There the collector shows most of it already, and each reference counts once.
        shown = set(map(id, gc.get_referents(frame)))
        also = [item for item in also if id(item) not in shown]
    return Root("frame", _frame_name(frame), frame, also, LAST, running_in, variables)


def _modules() -> list[tuple[str, object]]:
    """Return every module once, by the first name that it is imported as."""
    found: dict[int, tuple[str, object]] = {}
    for name, module in list(sys.modules.items()):
        if module is not None:
            found.setdefault(id(module), (str(name), module))
    return list(found.values())


def _root_at(named: tuple[str, object]) -> Root:
    known_as = _own_name(named[1], named[0])
    return Root("module", known_as, named[1], [], turn=LATER if is_library(known_as) else FIRST)


def _own_name(module: object, name: str) -> str:
    """Return the name that a module has itself, where it is found by that too; else the one that it is found by."""
    own = dict.get(dict_of_module(module), "__name__") if is_a(module, ModuleType) else None
    return own if type(own) is str and sys.modules.get(own) is module else name


def _runs_for_a_library(thread: object) -> bool:
    """Return whether a thread runs a library's function, as a pool's does: what it was given has a name elsewhere."""
    target = attribute(thread, "_target")
    if type(target) is not FunctionType:
        return False
    module = dict.get(target.__globals__, "__name__")
    return type(module) is str and is_library(module)


def running_frames(*, of_checker: bool = False) -> Iterator[tuple[FrameType, int]]:
    """Yield the frames of all threads, the checker's or all others, each with its thread's identifier."""
    waiting: list[tuple[FrameType | None, int]] = [(frame, ident) for ident, frame in sys._current_frames().items()]
    while waiting:
        # Nothing of this is left in a local variable at the end: one of the frames is this function's own.
        frame, ident = waiting.pop()
        if frame is not None:
            waiting.append((frame.f_back, ident))
            if is_checkers(frame) is of_checker:
                yield frame, ident


def is_library(module: str) -> bool:
    """Return whether a module is the interpreter's, torch's, the test runner's or the checker's own."""
    top = module.partition(".")[0]
    return top in sys.stdlib_module_names or top in _LIBRARIES or f"{module}.".startswith(CHECKER)


def _frame_name(frame: FrameType) -> str:
    code = frame.f_code
    return f"{code.co_name} in {code.co_filename.replace(chr(92), '/').rpartition('/')[2]}:{frame.f_lineno}"


def frames_of(ident: int) -> list[str]:
    """Return the frames in which a thread is, as roots are called; none where it has ended.

    Args:
        ident: the thread's, as Python has it.
    """
    return [_frame_name(frame) for frame, of in running_frames() if of == ident]


def comes_later(cls: type) -> bool:
    """Return whether paths through instances of a class are given only where there is no other."""
    name = type_name(cls)
    return name.partition(".")[0] in _REGISTRIES or any(base is threading.local for base in mro_of(cls))
