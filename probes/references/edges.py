"""What a reference is called: the edge between two objects of the heap as code, found without running foreign code."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from inspect import CO_OPTIMIZED
from types import (
    AsyncGeneratorType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
)
from typing import Any

from lowtide.probes.objects.foreign import (
    attribute,
    code_of,
    flags_of,
    mro_of,
    namespace_of,
    type_name,
)
from lowtide.probes.objects.listed import frame_locals
from lowtide.probes.references.code_names import add_names, names_in_class, names_in_module
from lowtide.probes.references.definitions import (
    of_cache,
    of_class,
    of_context,
    of_function,
    of_future,
    of_module,
    of_queue,
    of_thread_local,
    of_unseen,
)
from lowtide.probes.references.entries import (
    Containers,
    Edge,
    Rest,
    attribute_text,
    item_text,
    of_container,
    of_proxy,
)
from lowtide.probes.references.instances import (
    of_hidden_attribute,
    of_inline_attribute,
    of_instance_dict,
    of_member,
    of_nn_module,
    of_tensor,
)

_MANAGED_DICT = 1 << 4
"""`Py_TPFLAGS_MANAGED_DICT`: the interpreter decides where the attributes of a type's instances are."""

UNNAMED = ".<computed name>"
"""What an attribute is called that no code names, as one that is set by `setattr` with a name that was put together."""

GENERATORS = {id(GeneratorType): "gi", id(CoroutineType): "cr", id(AsyncGeneratorType): "ag"}
"""What the attributes of suspended functions begin with, by the identity of their type."""


# Given the objects of a path from a holder on: what leads to the next, if the rule knows such holders.
_Rule = Callable[[Rest], Edge | None]


class EdgeNamer:
    """Names the edges of paths through one heap.

    Args:
        objects: all objects of the heap, where a name may have to be looked for in all code there is.
        variables: the local variables of the frames that were read already, by the frame's identity.
    """

    def __init__(self, objects: Iterable[object], variables: Mapping[int, Sequence[tuple[str, object]]]) -> None:
        self._objects = objects
        self._known_variables = variables
        self._read: list[FrameType] = []
        self._known_names: dict[int, set[str]] = {}
        self._nameless: set[int] = set()
        self._containers = Containers()

    def undo(self) -> None:
        """Empties the dicts that reading variables left in frames; only once nothing else holds those dicts."""
        for frame in self._read:
            frame_locals(frame)
        self._containers = Containers()

    def edge(self, objects: Sequence[Any], start: int = 0) -> Edge:
        """What leads from one object of a path to the next, or past that where it only carries the one behind it.

        Args:
            objects: the path's.
            start: the place of the first.
        """
        way = Rest(objects, start, self._containers)
        edges = (rule(way) for rule in (self._of_frame, self._of_generator, *_RULES))
        return next((edge for edge in edges if edge is not None), None) or self._of_attribute(way)

    def _of_frame(self, way: Rest) -> Edge | None:
        frame = way[0]
        if type(frame) is not FrameType:
            return None
        for name, value in self._variables(frame):
            if value is way[1]:
                return Edge(f"f_locals[{name!r}]", "frame-local")
        if way[1] is frame.f_globals and len(way) > 2:
            return Edge(f"f_globals{item_text(way.after(1))}", "module-global", 2)
        return None

    def _of_generator(self, way: Rest) -> Edge | None:
        """A suspended generator or coroutine: one of its variables, or the one that it waits for."""
        prefix = GENERATORS.get(id(type(way[0])))
        if prefix is None:
            return None
        awaited = "gi_yieldfrom" if prefix == "gi" else f"{prefix}_await"
        # On Python 3.10 the generator holds its frame and that what it waits for and the variables; later it holds
        # them itself.
        references = 2 if type(way[1]) is FrameType else 1
        if len(way) > references and getattr(way[0], awaited) is way[references]:
            return Edge(f".{awaited}", "other", references)
        frame = getattr(way[0], f"{prefix}_frame")
        if frame is None or len(way) <= references:
            return None
        for name, value in self._variables(frame):
            if value is way[references]:
                return Edge(f"f_locals[{name!r}]", "generator-local", references)
        return None

    def _variables(self, frame: FrameType) -> Sequence[tuple[str, object]]:
        known = self._known_variables.get(id(frame))
        if known is not None:
            return known
        self._read.append(frame)
        return variables_of(frame)

    def _of_attribute(self, way: Rest) -> Edge:
        """An attribute whose value lies in the instance (Python 3.11 and later), which has no `__dict__` yet.

        Reading `__dict__` would make the dict, which then stays; asking for one attribute by its name does not. So the
        names are tried that the code of the instance's class mentions, then its module's, then all code in the heap.
        """
        holder, held = way[0], way[1]
        # What was found on one instance is tried first on the next; all code there is, which takes 0.2 s to go through,
        # only where nothing else has it.
        known = self._known_names.setdefault(id(type(holder)), set())
        for names in self._candidates(type(holder), known):
            for name in sorted(names):
                if attribute(holder, name) is held:
                    known.add(name)
                    return Edge(attribute_text(name), "instance-attribute")
        self._nameless.add(id(type(holder)))
        if any("__dict__" in namespace_of(base) for base in mro_of(type(holder))):
            return of_hidden_attribute(way) or of_inline_attribute(way) or Edge(UNNAMED, "opaque")
        return Edge(f"inside {type_name(type(holder))}", "opaque")

    def _candidates(self, cls: type, known: set[str]) -> Iterator[set[str]]:
        yield known
        if id(cls) in self._nameless and not _has_values_inside(cls):
            return
        yield names_in_class(cls)
        yield names_in_module(cls)
        yield self._all_names

    @functools.cached_property
    def _all_names(self) -> set[str]:
        names: set[str] = set()
        for item in self._objects:
            if type(item) is FunctionType:
                add_names(code_of(item), names)
            elif type(item) is FrameType:
                add_names(item.f_code, names)
        return names


# In this order: the first that knows the reference names it.
_RULES: tuple[_Rule, ...] = (
    of_module,
    of_class,
    of_cache,
    of_function,
    of_context,
    of_thread_local,
    of_container,
    of_proxy,
    of_unseen,
    of_nn_module,
    of_tensor,
    of_instance_dict,
    of_member,
    of_future,
    of_queue,
)


def _has_values_inside(cls: type) -> bool:
    """Whether instances have attributes in themselves and not in a dict; else what one does not name, none does."""
    return sys.version_info >= (3, 11) and bool(flags_of(cls) & _MANAGED_DICT)


def variables_of(frame: FrameType) -> list[tuple[str, object]]:
    """The function's local variables and their values; none for a module or class body, whose variables are a dict."""
    if not frame.f_code.co_flags & CO_OPTIMIZED:
        return []
    return list(frame.f_locals.items())
