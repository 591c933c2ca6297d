"""Edges of instances: attributes, slots, the parts of a `torch.nn.Module`, what a tensor holds."""

from __future__ import annotations

import functools
import re
from contextvars import Token
from types import (
    BuiltinFunctionType,
    CellType,
    FrameType,
    MemberDescriptorType,
    TracebackType,
)
from typing import Any
from weakref import CallableProxyType, ProxyType

from lowtide.probes.objects.foreign import (
    attribute,
    instance_dict,
    is_a,
    mro_of,
    namespace_of,
    type_name,
)
from lowtide.probes.originals import loaded
from lowtide.probes.references.entries import (
    Edge,
    Rest,
    attribute_text,
    is_name,
    key_text,
)

_AUTOGRAD_NODE = re.compile(r"(\w+Backward\d*|AccumulateGrad)")
_HOOKS_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
# Attributes of types written in C that give what is there and do nothing else.
_PLAIN_GETTERS: dict[int, tuple[str, ...]] = {
    id(BaseException): ("__traceback__", "__context__", "__cause__", "args"),
    id(TracebackType): ("tb_next",),
    id(FrameType): ("f_back",),
    id(CellType): ("cell_contents",),
    id(BuiltinFunctionType): ("__self__",),
    id(Token): ("old_value", "var"),
}


def of_instance_dict(way: Rest) -> Edge | None:
    """An attribute, past the instance's `__dict__`: it is that dict if the attribute leads where the entry leads."""
    if len(way) > 2 and type(way[1]) is dict:
        for key in way.keys(1):
            if type(key) is str and (attribute(way[0], key) is way[2] or _is_cached_property(type(way[0]), key)):
                return Edge(attribute_text(key), "instance-attribute", 2)
    return None


def of_hidden_attribute(way: Rest) -> Edge | None:
    """An entry of the instance's `__dict__` whose name the class has for a property or the like, which hides it."""
    if len(way) > 2 and type(way[1]) is dict:
        for key in way.keys(1):
            if type(key) is str and any(key in namespace_of(base) for base in mro_of(type(way[0]))):
                return Edge(f".__dict__[{key!r}]", "instance-attribute", 2)
    return None


def of_inline_attribute(way: Rest) -> Edge | None:
    """The same for a value that lies in the instance although it is an entry of its `__dict__`, too."""
    holder, held = way[0], way[1]
    entries = instance_dict(holder)
    for key in () if entries is None else way.containers.keys_of(entries, held):
        if type(key) is str and _is_cached_property(type(holder), key):
            return Edge(attribute_text(key), "instance-attribute")
        if type(key) is str and any(key in namespace_of(base) for base in mro_of(type(holder))):
            return Edge(f".__dict__[{key!r}]", "instance-attribute")
    return None


def of_nn_module(way: Rest) -> Edge | None:
    """A parameter, buffer or part of a `torch.nn.Module`, past the dict in which it registers them."""
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
    """What a `torch.nn.Module` has registered under a key, as code."""
    names = {type_name(base).rpartition(".")[2] for base in mro_of(type(module))}
    if names & {"ModuleDict", "ParameterDict"}:
        return f"[{key_text(key)}]"
    if type(key) is str and re.fullmatch("[0-9]+", key) and names & {"ModuleList", "Sequential", "ParameterList"}:
        return f"[{key}]"
    return f".{key}" if is_name(key) else f".{registry}[{key_text(key)}]"


def _is_cached_property(cls: type, name: str) -> bool:
    """Whether the class computes the attribute once, and then keeps it in the instance's `__dict__` by that name."""
    for base in mro_of(cls):
        if name in namespace_of(base):
            return type(namespace_of(base)[name]) is functools.cached_property
    return False


def of_member(way: Rest) -> Edge | None:
    """A slot, or an attribute of a type written in C that is nothing but a pointer in its struct."""
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


def of_tensor(way: Rest) -> Edge | None:
    """A tensor's autograd node, where Python has seen it, and the hooks that were registered on the tensor."""
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
    """Whether instances of the class are nodes of torch's autograd graph (`MulBackward0`, a `Function`'s context)."""
    names = [type_name(base) for base in mro_of(cls)]
    return "torch._C._FunctionBase" in names or _AUTOGRAD_NODE.fullmatch(names[0]) is not None
