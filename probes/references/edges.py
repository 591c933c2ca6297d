"""What a reference is called: the edge between two objects of the heap as code, found without running foreign code.

An instance's are its attributes and slots, the parts of a `torch.nn.Module`, what a tensor holds.
"""

from __future__ import annotations

import functools
import itertools
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from contextvars import Token
from inspect import CO_OPTIMIZED
from types import (
    AsyncGeneratorType,
    BuiltinFunctionType,
    CellType,
    CodeType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    MemberDescriptorType,
    TracebackType,
)
from typing import Any, TypeVar
from weakref import CallableProxyType, ProxyType

from lowtide.probes.objects.attribute_names import AttributeNames, has_values_inside
from lowtide.probes.objects.foreign import (
    attribute,
    code_of,
    instance_dict,
    is_a,
    mro_of,
    namespace_of,
    type_name,
)
from lowtide.probes.objects.listed import frame_locals
from lowtide.probes.originals import gc, loaded
from lowtide.probes.references.definitions import (
    of_cache,
    of_class,
    of_context,
    of_function,
    of_future,
    of_module,
    of_queue,
    of_thread_local,
    of_type,
    of_unseen,
)
from lowtide.probes.references.entries import (
    Containers,
    Edge,
    Rest,
    attribute_text,
    is_name,
    item_text,
    key_text,
    of_container,
    of_proxy,
)


def names_in_class(cls: type) -> set[str]:
    """Return what the functions of a class and of its bases mention."""
    names: set[str] = set()
    for base in mro_of(cls):
        for value in namespace_of(base).values():
            if type(value) is FunctionType:
                add_names(code_of(value), names)
    return names


def add_names(code: CodeType, names: set[str]) -> None:
    """Add what the code could call an attribute: the names that it uses, and strings it could give to `setattr`."""
    names.update(code.co_names)
    for constant in code.co_consts:
        if type(constant) is CodeType:
            add_names(constant, names)
        for text in constant if type(constant) is tuple or type(constant) is frozenset else (constant,):
            if type(text) is str and text.isidentifier():
                names.add(text)


_AUTOGRAD_NODE = re.compile(r"(\w+Backward\d*|AccumulateGrad)")
_HOOKS_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
# Attributes of types written in C that give what is there and do nothing else.
_PLAIN_GETTERS: dict[int, tuple[str, ...]] = {
    id(BaseException): ("__traceback__", "__context__", "__cause__", "args"),
    id(TracebackType): ("tb_next",),
    id(CellType): ("cell_contents",),
    id(BuiltinFunctionType): ("__self__",),
    id(Token): ("old_value", "var"),
    id(FunctionType): ("__type_params__",),
    # Python 3.11 has none.
    id(vars(typing).get("TypeAliasType", FunctionType)): ("__type_params__",),
}


def of_instance_dict(way: Rest) -> Edge | None:
    """Return an attribute, past the instance's `__dict__`: that dict if the attribute leads where its entry does."""
    if len(way) > 2 and type(way[1]) is dict:
        for key in way.keys(1):
            if type(key) is str and (attribute(way[0], key) is way[2] or _is_cached_property(type(way[0]), key)):
                return Edge(attribute_text(key), "instance-attribute", 2)
    return None


def of_hidden_attribute(way: Rest) -> Edge | None:
    """Return an entry of the instance's `__dict__` whose name the class has for a property or the like."""
    if len(way) > 2 and type(way[1]) is dict:
        for key in way.keys(1):
            if type(key) is str and any(key in namespace_of(base) for base in mro_of(type(way[0]))):
                return Edge(f".__dict__[{key!r}]", "instance-attribute", 2)
    return None


def of_attributes(way: Rest) -> Edge | None:
    """Return the instance's `__dict__` itself: an attribute leads where an entry of it does."""
    if len(way) != 2 or type(way[1]) is not dict:
        return None
    entries = itertools.islice(dict.items(way[1]), _ENTRIES)
    is_own = any(type(key) is str and attribute(way[0], key) is value for key, value in entries)
    return Edge(".__dict__", "instance-attribute") if is_own else None


def of_inline_attribute(way: Rest) -> Edge | None:
    """Return the same for a value that lies in the instance although it is an entry of its `__dict__`, too."""
    holder, held = way[0], way[1]
    entries = instance_dict(holder)
    for key in () if entries is None else way.containers.keys_of(entries, held):
        if type(key) is str and _is_cached_property(type(holder), key):
            return Edge(attribute_text(key), "instance-attribute")
        if type(key) is str and any(key in namespace_of(base) for base in mro_of(type(holder))):
            return Edge(f".__dict__[{key!r}]", "instance-attribute")
    return None


def of_nn_module(way: Rest) -> Edge | None:
    """Return a parameter, buffer or part of a `torch.nn.Module`, past the dict in which it registers them."""
    torch: Any = loaded("torch")
    kind = getattr(getattr(torch, "nn", None), "Module", None)
    if kind is None or not is_a(way[0], kind):
        return None
    for registry in ("_parameters", "_buffers", "_modules"):
        entries = attribute(way[0], registry)
        for place in (1, 2):
            if len(way) > place + 1 and way[place] is entries and type(entries) is dict:
                for key in way.keys(place):
                    return Edge(_registered_text(way[0], registry, key), "instance-attribute", place + 1)
    return None


def _registered_text(module: object, registry: str, key: object) -> str:
    """Return what a `torch.nn.Module` has registered under a key, as code."""
    names = {type_name(base).rpartition(".")[2] for base in mro_of(type(module))}
    if names & {"ModuleDict", "ParameterDict"}:
        return f"[{key_text(key)}]"
    if type(key) is str and re.fullmatch("[0-9]+", key) and names & {"ModuleList", "Sequential", "ParameterList"}:
        return f"[{key}]"
    return f".{key}" if is_name(key) else f".{registry}[{key_text(key)}]"


def _is_cached_property(cls: type, name: str) -> bool:
    """Return whether the class computes the attribute once, and keeps it in the instance's `__dict__` by that name."""
    for base in mro_of(cls):
        if name in namespace_of(base):
            return type(namespace_of(base)[name]) is functools.cached_property
    return False


def of_member(way: Rest) -> Edge | None:
    """Return a slot, or an attribute of a type written in C that is nothing but a pointer in its struct."""
    holder, held = way[0], way[1]
    for base in mro_of(type(holder)):
        for name, member in namespace_of(base).items():
            if type(member) is MemberDescriptorType or name in _PLAIN_GETTERS.get(id(base), ()):
                try:
                    value = member.__get__(holder)
                except (AttributeError, ValueError):
                    continue  # unset, as a slot or a cell can be
                if value is held:
                    return Edge(f".{name}", "bound-self" if name == "__self__" else "instance-attribute")
    if type(holder) is ProxyType or type(holder) is CallableProxyType:
        return Edge(".__callback__", "other")  # asked for it, a proxy would ask its target
    return None


def of_type_variable(way: Rest) -> Edge | None:
    """What a type variable written in C (Python 3.12 and later) is bound by.

    Asked for what it has not evaluated yet it runs the program's code. Before the first thing that it has, behind its
    type, there is nothing to evaluate.
    """
    if type(way[0]) is TypeVar and any(item is way[1] for item in gc.get_referents(way[0])[1:2]):
        for name in ("__bound__", "__constraints__", "__default__"):
            if getattr(way[0], name, None) is way[1]:
                return Edge(f".{name}", "instance-attribute")
    return None


def of_tensor(way: Rest) -> Edge | None:
    """Return a tensor's autograd node, where Python has seen it, and the hooks that were registered on the tensor."""
    base = next((base for base in mro_of(type(way[0])) if type_name(base) == "torch._C.TensorBase"), None)
    if base is None:
        return None
    if is_autograd_node(type(way[1])):
        return Edge(".grad_fn", "other")
    # Asking a tensor by its class's own getter can run a subclass's code.
    with loaded("torch")._C.DisableTorchFunctionSubclass():
        for name in _HOOKS_OF_TENSORS:
            if name in namespace_of(base) and namespace_of(base)[name].__get__(way[0]) is way[1]:
                return Edge(f".{name}", "other")
    return None


def is_autograd_node(cls: type) -> bool:
    """Return whether instances of the class are nodes of torch's autograd graph (`MulBackward0`, a context)."""
    names = [type_name(base) for base in mro_of(cls)]
    return "torch._C._FunctionBase" in names or _AUTOGRAD_NODE.fullmatch(names[0]) is not None


_ENTRIES = 10
"""Entries of a dict that are looked at to say whether it has an instance's attributes."""

UNNAMED = ".<computed name>"
"""What an attribute is called whose name cannot be read and that no code of its class names."""

GENERATORS = {id(GeneratorType): "gi", id(CoroutineType): "cr", id(AsyncGeneratorType): "ag"}
"""What the attributes of suspended functions begin with, by the identity of their type."""


# Given the objects of a path from a holder on: what leads to the next, if the rule knows such holders.
_Rule = Callable[[Rest], Edge | None]


class EdgeNamer:
    """Names the edges of paths through one heap.

    Args:
        variables: the local variables of the frames that were read already, by the frame's identity.
    """

    def __init__(self, variables: Mapping[int, Sequence[tuple[str, object]]]) -> None:
        self._known_variables = variables
        self._read: list[FrameType] = []
        self._names = AttributeNames()
        self._containers = Containers()

    def names_inside(self, cls: type) -> list[str]:
        """Return the names that attributes may have whose values lie in instances of a class; none where none do."""
        # Where they cannot be read, what the code of the class mentions.
        return self._names.of(cls) or (sorted(names_in_class(cls)) if has_values_inside(cls) else [])

    def undo(self) -> None:
        """Empty the dicts that reading variables left in frames; only once nothing else holds those dicts."""
        for frame in self._read:
            frame_locals(frame)
        self._containers = Containers()

    def edge(self, objects: Sequence[Any], start: int = 0) -> Edge:
        """Return what leads from one object of a path to the next, or past that where it only carries the one behind.

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
        if frame.f_back is way[1]:
            return _of_callers(way)
        for name, value in self._variables(frame):
            if value is way[1]:
                return Edge(f"f_locals[{name!r}]", "frame-local")
        if way[1] is frame.f_globals and len(way) > 2:
            return Edge(f"f_globals{item_text(way.after(1))}", "module-global", 2)
        return None

    def _of_generator(self, way: Rest) -> Edge | None:
        """Return a suspended generator or coroutine: one of its variables, or the one that it waits for."""
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
        """Return an attribute whose value lies in the instance (Python 3.11 and later), which has no `__dict__` yet."""
        holder, held = way[0], way[1]
        for name in self.names_inside(type(holder)):
            if attribute(holder, name) is held:
                return Edge(attribute_text(name), "instance-attribute")
        if any("__dict__" in namespace_of(base) for base in mro_of(type(holder))):
            of_dict = of_hidden_attribute(way) or of_inline_attribute(way) or of_attributes(way)
            return of_dict or Edge(UNNAMED, "opaque")
        return Edge(f"inside {type_name(type(holder))}", "opaque")


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
    of_type_variable,
    of_future,
    of_queue,
    of_type,
)


def _of_callers(way: Rest) -> Edge:
    """Return the way from a frame to one of its callers; how many lie between says nothing."""
    references = 1
    while len(way) > references + 1 and way[references].f_back is way[references + 1]:
        references += 1
    return Edge(".f_back" if references == 1 else ".f_back … .f_back", "other", references)


def variables_of(frame: FrameType) -> list[tuple[str, object]]:
    """Return the function's local variables and their values; none for the body of a module or class."""
    if not frame.f_code.co_flags & CO_OPTIMIZED:
        return []
    return list(frame.f_locals.items())
