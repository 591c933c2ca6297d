"""What a program's code does to a container: where it fills it, and whether and by how much it bounds it.

A cache or window that fills is no growth. The code says so where a function compares its length and takes out of it
what is too much, or puts a slice of so many things in its place. It is read, and never run.
"""

from __future__ import annotations

import dis
import math
from collections.abc import Collection, Iterator, Sequence
from pathlib import PurePath
from types import AsyncGeneratorType, CodeType, CoroutineType, FunctionType, GeneratorType, ModuleType
from typing import Any

from lowtide.probes.heap.roots import is_library
from lowtide.probes.objects.foreign import (
    MISSING,
    attribute,
    dict_of_module,
    is_a,
    module_of_class,
    mro_of,
    namespace_of_class,
)
from lowtide.probes.objects.identities import object_at
from lowtide.probes.originals import sys
from lowtide.reports.schema import Hop

_TAKE_OUT = frozenset({"pop", "popleft", "popitem", "clear", "remove", "discard"})

_PUT_IN = frozenset({"append", "appendleft", "add", "extend", "extendleft", "insert", "setdefault", "update"})

_NEAR = 6
"""Steps before the one that sets or deletes an entry in which the container is named."""

_LOADS = ("LOAD_ATTR", "LOAD_GLOBAL", "LOAD_NAME")

_OF_VARIABLES = ("LOAD_FAST", "LOAD_DEREF")
"""What the names of steps begin with that load a function's own variable."""

_VARIABLE = "f_locals['"

_CODE_OF = {GeneratorType: "gi_code", CoroutineType: "cr_code", AsyncGeneratorType: "ag_code"}
"""The attribute that has the code of what waits, by its type."""

_Step = tuple[str, Any]


def is_asked_for_length(module: ModuleType, name: str) -> bool:
    """Return whether a function of a module asks for the length of a global of its: it does so to bound it.

    The caches of `re`, which hold 512 patterns, are no `lru_cache`.
    """
    functions = [each for each in dict_of_module(module).values() if type(each) is FunctionType]
    return any(_lengths_asked(_steps(each.__code__), name) for each in functions if name in each.__code__.co_names)


def bound_in_code(path: Sequence[Hop], through: Collection[int], container: Any) -> float | None:
    """Return how long a container becomes before code takes out of it; NaN where it does at a length that is not known.

    Args:
        path: how it is reached, from a module or class.
        through: the identities of what is alive on the path.
        container: what is reached.

    Returns:
        None where no function of the modules on the path compares its length and takes out of it.
    """
    name, owners, modules = _named_in(path, through, container)
    bounds = [
        _bound(operand, dict_of_module(module), owners)
        for module in modules
        for _, code in _codes_of(module)
        if name in (*code.co_names, *code.co_varnames, *code.co_freevars)
        for operand in _bounds_asked(code, name)
    ]
    known = [bound for bound in bounds if not math.isnan(bound)]
    return max(known) if known else (math.nan if bounds else None)


def places_that_fill(path: Sequence[Hop], through: Collection[int], container: Any) -> list[str]:
    """Return where the program's modules on a path put things into a container.

    The arguments are those of `bound_in_code`. What Python's own modules do is nobody's here to change.
    """
    name, _, modules = _named_in(path, through, container)
    if not name and path and path[-1].edge.startswith(_VARIABLE):
        return _places_in_frame(path[-1].edge, through)
    found = {
        f"{function}, {PurePath(code.co_filename).name}:{line}"
        for module in modules
        if not is_library(module.__name__)
        for function, code in _codes_of(module)
        if name in code.co_names
        for line in _lines_that_fill(code, name)
    }
    return sorted(found)


def _places_in_frame(edge: str, through: Collection[int]) -> list[str]:
    """Return where a function that waits puts things into the container that is its variable."""
    name = edge.removeprefix(_VARIABLE).removesuffix("']")
    # Where more than one waits on the way, each may call another variable so.
    waiting: list[Any] = [each for each in map(object_at, through) if type(each) in _CODE_OF]
    codes: list[tuple[str, CodeType]] = [(each.__qualname__, getattr(each, _CODE_OF[type(each)])) for each in waiting]
    found = {
        f"{function}, {PurePath(code.co_filename).name}:{line}"
        for function, code in codes
        if name in (*code.co_varnames, *code.co_cellvars, *code.co_freevars)
        for line in _lines_that_fill(code, name, _OF_VARIABLES)
    }
    return sorted(found)


def _named_in(
    path: Sequence[Hop], through: Collection[int], container: Any
) -> tuple[str, list[object], list[ModuleType]]:
    """Return the name that code has for a container, what on the way has it by that, and whose code that may be."""
    # Code that says `__dict__` may mean that of any object.
    if len(path) < 2 or not path[-1].edge.startswith(".") or path[-1].edge == ".__dict__":
        return "", [], []
    name = path[-1].edge.removeprefix(".")
    owners = [each for each in map(object_at, through) if attribute(each, name) is container]
    modules = {path[0].edge, *(module_of_class(cls) for each in owners for cls in mro_of(type(each)))}
    return name, owners, [sys.modules[each] for each in sorted(modules) if type(sys.modules.get(each)) is ModuleType]


def _lines_that_fill(code: CodeType, name: str, loads: tuple[str, ...] = _LOADS) -> Iterator[int]:
    """Yield the lines of a function in which it puts something into the container of that name.

    What the names of the steps begin with that load it is in `loads`.
    """
    stores = [load.replace("LOAD", "STORE") for load in loads]
    # What has been loaded, with how many values there are then.
    line, depth, before = code.co_firstlineno, 0, list[tuple[object, int]]()
    for step in dis.get_instructions(code):
        # From Python 3.13 on `starts_line` is no number.
        line = getattr(step, "line_number", step.starts_line) or line
        puts_in = step.argval in _PUT_IN and before[-1:] == [(name, depth)]
        sets_entry = step.opname == "STORE_SUBSCR" and _is_below_key(name, before, depth)
        gives_way = step.opname in stores and step.argval == name
        if puts_in or sets_entry or (gives_way and name in (loaded for loaded, _ in before[-_NEAR:])):
            yield line
        depth += dis.stack_effect(step.opcode, step.arg, jump=False)
        if step.opname not in ("PRECALL", "CACHE"):
            # One step may load two variables.
            loaded = step.argval if type(step.argval) is tuple else (step.argval,)
            loaded = loaded if step.opname.startswith(loads) else (None,)
            before += [(each, depth - above) for above, each in reversed([*enumerate(reversed(loaded))])]


def _is_below_key(name: str, before: Sequence[tuple[object, int]], depth: int) -> bool:
    """Return whether what lies right below the topmost value was loaded by that name."""
    for loaded, height in reversed(before):
        if height < depth:
            return height == depth - 1 and loaded == name
    return False


def _codes_of(module: ModuleType) -> Iterator[tuple[str, CodeType]]:
    """Yield the code of a module's functions and methods by their names, with what is defined in these."""
    own = list(dict_of_module(module).values())
    within = [each for each in own if is_a(each, type) and module_of_class(each) == module.__name__]
    functions = [*own, *(each for cls in within for each in namespace_of_class(cls).values())]
    waiting = [(each.__qualname__, each.__code__) for each in functions if type(each) is FunctionType]
    while waiting:
        name, code = waiting.pop()
        yield name, code
        waiting += [(name, each) for each in code.co_consts if type(each) is CodeType]


def _steps(code: CodeType) -> list[_Step]:
    return [
        (step.opname, step.argval) for step in dis.get_instructions(code) if step.opname not in ("PRECALL", "CACHE")
    ]


def _lengths_asked(steps: Sequence[_Step], name: str) -> list[tuple[int, int]]:
    """Return the places where `len(name)`, or that of an attribute of that name, is asked, and behind that."""
    found = []
    for place, step in enumerate(steps):
        if step == ("LOAD_GLOBAL", "len"):
            end = next((at for at in range(place + 1, len(steps)) if not steps[at][0].startswith("LOAD")), len(steps))
            if end > place + 1 and steps[end - 1][1] == name and end < len(steps) and "CALL" in steps[end][0]:
                found.append((place, end + 1))
    return found


def _bounds_asked(code: CodeType, name: str) -> Iterator[Sequence[_Step]]:
    """Yield what a function compares a container's length with, or how much of it is kept, as steps that load that."""
    steps = _steps(code)
    yield from _slices_kept(steps, name)
    asked = _lengths_asked(steps, name)
    if not asked or not _takes_out(steps, name):
        return
    for place, behind in asked:
        loads = behind
        while loads < len(steps) and steps[loads][0].startswith("LOAD"):
            loads += 1
        if loads < len(steps) and steps[loads][0] == "COMPARE_OP" and ">" in str(steps[loads][1]):
            yield steps[behind:loads]
        elif behind < len(steps) and steps[behind][0] == "COMPARE_OP" and "<" in str(steps[behind][1]):
            yield steps[place - (2 if steps[place - 1][0] == "LOAD_ATTR" else 1) : place]


def _slices_kept(steps: Sequence[_Step], name: str) -> Iterator[Sequence[_Step]]:
    """Yield of how many things the slices are that are put in a container's place: `[-8:]` of the last, or `[:8]`."""
    for place, (kind, value) in enumerate(steps):
        if not kind.startswith("STORE") or value != name:
            continue
        end = place
        # Between them only what has the container is loaded.
        while end and (steps[end - 1][0].startswith("LOAD") or steps[end - 1][0] == "BINARY_SUBSCR"):
            if type(steps[end - 1][1]) is slice:
                break
            end -= 1
        *before, (kind, value) = steps[:end] or [("", None)]
        if type(value) is slice:
            before += [("LOAD_CONST", value.start), ("LOAD_CONST", value.stop)]
        elif kind not in ("BUILD_SLICE", "BINARY_SLICE"):
            continue
        if before[-1] == _OPEN:
            yield from _of_negative(before[:-1])
        elif _OPEN in before[-3:-1]:
            yield before[before.index(_OPEN, len(before) - 3) + 1 :]


_OPEN = ("LOAD_CONST", None)
"""The end of a slice that is not given."""


def _of_negative(steps: Sequence[_Step]) -> Iterator[Sequence[_Step]]:
    """Yield the steps that load the number of which the last of some steps have made the negative one."""
    kind, value = steps[-1]
    if type(value) is int and value < 0:
        yield [(kind, -value)]
    elif kind == "UNARY_NEGATIVE":
        yield steps[-3:-1] if steps[-2][0] == "LOAD_ATTR" else steps[-2:-1]


def _takes_out(steps: Sequence[_Step], name: str) -> bool:
    """Return whether steps call what takes out of the container, delete an entry, or put another one in its place."""
    for place, (kind, value) in enumerate(steps):
        before = steps[max(0, place - _NEAR) : place]
        if value in _TAKE_OUT and before and before[-1][1] == name:
            return True
        if kind == "DELETE_SUBSCR" and any(each[1] == name for each in before):
            return True
        if kind.startswith("STORE") and value == name:
            return True
    return False


def _bound(loads: Sequence[_Step], names: dict[str, Any], owners: Sequence[object]) -> float:
    """Return the number that some steps load, of a module's names or an owner's attributes; NaN where it is unknown."""
    value: Any = MISSING
    if len(loads) == 1:
        kind, said = loads[0]
        value = names.get(said, MISSING) if kind == "LOAD_GLOBAL" else said
    elif len(loads) == 2 and loads[1][0] == "LOAD_ATTR":
        found = (attribute(each, loads[1][1]) for each in owners)
        value = next((each for each in found if each is not MISSING), MISSING)
    return float(value) if type(value) in (int, float) else math.nan
