"""What a reference is called: the edge between two objects of the heap as code, found without running foreign code."""

from __future__ import annotations

import functools
import gc
import keyword
import re
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import Context, Token
from inspect import CO_OPTIMIZED
from types import (
    AsyncGeneratorType,
    BuiltinFunctionType,
    CellType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    MappingProxyType,
    MemberDescriptorType,
    ModuleType,
    TracebackType,
)
from typing import Any, Literal, NamedTuple
from weakref import CallableProxyType, ProxyType, ReferenceType

from lowtide.probes.heap.code_names import add_names, names_in_class, names_in_module
from lowtide.probes.heap.unseen_references import CALLBACK, edge_of
from lowtide.probes.memory.capsules import CAPSULE, EXPORTED
from lowtide.probes.objects.foreign import (
    LRU_CACHE,
    attribute,
    code_of,
    dict_of_module,
    instance_dict,
    is_a,
    mro_of,
    namespace_of,
    namespace_of_class,
    type_name,
)
from lowtide.probes.objects.listed import frame_locals

Kind = Literal[
    "module-global",
    "class-attribute",
    "instance-attribute",
    "item",
    "closure",
    "default",
    "frame-local",
    "generator-local",
    "thread",
    "context-variable",
    "lru-cache-key",
    "lru-cache-value",
    "bound-self",
    "opaque",
    "other",
]

UNNAMED = ".<computed name>"
"""What an attribute is called that no code names, as one that is set by `setattr` with a name that was put together."""

GENERATORS = {id(GeneratorType): "gi", id(CoroutineType): "cr", id(AsyncGeneratorType): "ag"}
"""What the attributes of suspended functions begin with, by the identity of their type."""

_LONGEST_KEY = 60
# A subclass's own call is foreign code.
_target_of: Callable[[object], object] = ReferenceType.__call__  # type: ignore[assignment]
_HAMT = frozenset({"hamt", "hamt_bitmap_node", "hamt_array_node", "hamt_collision_node"})
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


class Edge(NamedTuple):
    """One edge: its name as code, its kind, and how many references of the heap it folds together."""

    text: str
    kind: Kind
    references: int = 1


# Given the objects of a path from a holder on: what leads to the next, if the rule knows such holders.
_Rule = Callable[[Sequence[Any]], Edge | None]


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

    def undo(self) -> None:
        """Empties the dicts that reading variables left in frames; only once nothing else holds those dicts."""
        for frame in self._read:
            frame_locals(frame)

    def edge(self, way: Sequence[Any]) -> Edge:
        """What leads from the first object on the way to the second, or past it where it only carries the next."""
        edges = (rule(way) for rule in (self._of_frame, self._of_generator, *_RULES))
        return next((edge for edge in edges if edge is not None), None) or self._of_attribute(way)

    def _of_frame(self, way: Sequence[Any]) -> Edge | None:
        frame = way[0]
        if type(frame) is not FrameType:
            return None
        for name, value in self._variables(frame):
            if value is way[1]:
                return Edge(f"f_locals[{name!r}]", "frame-local")
        if way[1] is frame.f_globals and len(way) > 2:
            return Edge(f"f_globals{_item(way[1:])}", "module-global", 2)
        return None

    def _of_generator(self, way: Sequence[Any]) -> Edge | None:
        """A suspended generator or coroutine: one of its variables, or the one that it waits for."""
        prefix = GENERATORS.get(id(type(way[0])))
        if prefix is None:
            return None
        awaited = "gi_yieldfrom" if prefix == "gi" else f"{prefix}_await"
        if getattr(way[0], awaited) is way[1]:
            return Edge(f".{awaited}", "other")
        # On Python 3.10 the generator holds its frame and that the variables, later it holds them itself.
        references = 2 if type(way[1]) is FrameType else 1
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

    def _of_attribute(self, way: Sequence[Any]) -> Edge:
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
                    return Edge(_attribute_text(name), "instance-attribute")
        if any("__dict__" in namespace_of(base) for base in mro_of(type(holder))):
            return _of_hidden_attribute(way) or _of_inline_attribute(holder, held) or Edge(UNNAMED, "opaque")
        return Edge(f"inside {type_name(type(holder))}", "opaque")

    def _candidates(self, cls: type, known: set[str]) -> Iterator[set[str]]:
        yield known
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


def _of_module(way: Sequence[Any]) -> Edge | None:
    if not is_a(way[0], ModuleType) or way[1] is not dict_of_module(way[0]):
        return None
    return _entry(way, "module-global", ".__dict__")


def _of_class(way: Sequence[Any]) -> Edge | None:
    cls = way[0]
    if not is_a(cls, type):
        return None
    if way[1] is namespace_of_class(cls):
        return _entry(way, "class-attribute", ".__dict__")
    for name in ("__mro__", "__bases__", "__base__"):
        if type.__dict__[name].__get__(cls) is way[1]:
            return Edge(f".{name}", "other")
    return None


def _of_function(way: Sequence[Any]) -> Edge | None:
    function, held = way[0], way[1]
    if type(function) is not FunctionType:
        return None
    if function.__closure__ is not None and held is function.__closure__ and len(way) > 2:
        names = function.__code__.co_freevars
        name = next(name for name, cell in zip(names, held, strict=True) if cell is way[2])
        return Edge(f"cell {name!r}", "closure", min(3, len(way) - 1))
    if held is function.__globals__:
        return Edge(f"__globals__{_item(way[1:])}", "module-global", 2) if len(way) > 2 else None
    for name in ("__defaults__", "__kwdefaults__"):
        if held is getattr(function, name):
            if len(way) == 2:
                return Edge(f".{name}", "default")
            return Edge(f".{name}{_item(way[1:])}", "default", 2)
    return None


def _of_cache(way: Sequence[Any]) -> Edge | None:
    """A `functools.lru_cache`: a bounded one shows its keys and results itself, an unbounded one the dict of them."""
    cache: Any = way[0]
    held = way[1]
    if type(way[0]) is not LRU_CACHE or held is vars(cache):
        return None
    if held is vars(cache).get("__wrapped__"):
        return Edge(".__wrapped__", "other")
    if cache.cache_info().maxsize is None:
        return _cache_entry(held, way[2], 2) if type(held) is dict and len(way) > 2 else None
    for entries in gc.get_referents(cache):
        if is_dict_of_cache(cache, entries):
            return _cache_entry(entries, held, 1)
    return None


def is_dict_of_cache(cache: Any, item: Any) -> bool:
    """Whether an object that a cache refers to is the dict of its entries."""
    if type(item) is not dict or item is vars(cache):
        return False
    # A bounded one leads from the keys to links of a type of their own, which hold the results.
    return cache.cache_info().maxsize is None or any(map(_is_cache_link, item.values()))


def _is_cache_link(item: object) -> bool:
    return type_name(type(item)) == "functools._lru_list_elem"


def _cache_entry(entries: dict[object, object], held: object, references: int) -> Edge:
    if any(key is held for key in entries):
        return Edge("lru_cache key", "lru-cache-key", references)
    return Edge("lru_cache value", "lru-cache-value", references)


def _of_context(way: Sequence[Any]) -> Edge | None:
    """A copied context: its variables, past the tree in which it keeps them."""
    if type(way[0]) is not Context:
        return None
    references = next((place for place, item in enumerate(way) if place and type_name(type(item)) not in _HAMT), 0)
    for variable, value in way[0].items():
        if references and value is way[references]:
            return Edge(f"[{variable.name!r}]", "context-variable", references)
    return None


def _of_thread_local(way: Sequence[Any]) -> Edge | None:
    """A `threading.local`: past its dict of the threads and the thread's own dict."""
    if len(way) < 4 or not is_a(way[0], threading.local) or type(way[1]) is not dict or type(way[2]) is not dict:
        return None
    return _entry(way[1:], "thread", "")._replace(references=3)


def _of_container(way: Sequence[Any]) -> Edge | None:
    holder, held = way[0], way[1]
    for base in mro_of(type(holder)):
        if base is dict:
            for key in _keys_of(holder, held):
                return Edge(f"[{_key_text(key)}]", "item")
            if any(key is held for key in dict.keys(holder)):
                return Edge(f"<key {_definition_text(held)}>" if is_a(held, type) else "<key>", "item")
        elif base is list or base is tuple or base is deque:
            for place, item in enumerate(base.__iter__(holder)):
                if item is held:
                    return Edge(f"[{place}]", "item")
        elif (base is set or base is frozenset) and any(item is held for item in base.__iter__(holder)):
            return Edge("{…}", "item")
    return None


def _of_proxy(way: Sequence[Any]) -> Edge | None:
    """A read-only view of a dict, such as a class's `__dict__`: past the dict."""
    if type(way[0]) is not MappingProxyType or len(way) == 2:
        return None
    edge = _of_container(way[1:])
    return None if edge is None else edge._replace(references=2)


def _of_unseen(way: Sequence[Any]) -> Edge | None:
    """A reference that the collector is not shown: an array's base, what a memory view is of."""
    if type(way[0]) is memoryview and len(way) > 2 and type_name(type(way[1])) == "managedbuffer":
        return Edge(".obj", "other", 2)
    if type(way[0]) is CAPSULE:
        return Edge(EXPORTED, "opaque")
    text = edge_of(way[0], way[1])
    if text == CALLBACK:
        return Edge(text, "opaque")
    return None if text is None else Edge(text, "item" if text.startswith("[") else "other")


def _of_instance_dict(way: Sequence[Any]) -> Edge | None:
    """An attribute, past the instance's `__dict__`: it is that dict if the attribute leads where the entry leads."""
    if len(way) > 2 and type(way[1]) is dict:
        for key in _keys_of(way[1], way[2]):
            if type(key) is str and (attribute(way[0], key) is way[2] or _is_cached_property(type(way[0]), key)):
                return Edge(_attribute_text(key), "instance-attribute", 2)
    return None


def _of_hidden_attribute(way: Sequence[Any]) -> Edge | None:
    """An entry of the instance's `__dict__` whose name the class has for a property or the like, which hides it."""
    if len(way) > 2 and type(way[1]) is dict:
        for key in _keys_of(way[1], way[2]):
            if type(key) is str and any(key in namespace_of(base) for base in mro_of(type(way[0]))):
                return Edge(f".__dict__[{key!r}]", "instance-attribute", 2)
    return None


def _of_inline_attribute(holder: object, held: object) -> Edge | None:
    """The same for a value that lies in the instance although it is an entry of its `__dict__`, too."""
    entries = instance_dict(holder)
    for key in () if entries is None else _keys_of(entries, held):
        if type(key) is str and _is_cached_property(type(holder), key):
            return Edge(_attribute_text(key), "instance-attribute")
        if type(key) is str and any(key in namespace_of(base) for base in mro_of(type(holder))):
            return Edge(f".__dict__[{key!r}]", "instance-attribute")
    return None


def _attribute_text(name: str) -> str:
    return f".{name}" if _is_name(name) else f".__dict__[{name!r}]"


def _of_nn_module(way: Sequence[Any]) -> Edge | None:
    """A parameter, buffer or part of a `torch.nn.Module`, past the dict in which it registers them."""
    torch: Any = sys.modules.get("torch")
    kind = getattr(getattr(torch, "nn", None), "Module", None)
    if kind is None or not is_a(way[0], kind):
        return None
    for registry in ("_parameters", "_buffers", "_modules"):
        entries = attribute(way[0], registry)
        for place in (1, 2):
            if len(way) > place + 1 and way[place] is entries and type(entries) is dict:
                for key in _keys_of(entries, way[place + 1]):
                    return Edge(_registered_text(way[0], registry, key), "instance-attribute", place + 1)
    return None


def _registered_text(module: object, registry: str, key: object) -> str:
    """What a `torch.nn.Module` has registered under a key, as code."""
    names = {type_name(base).rpartition(".")[2] for base in mro_of(type(module))}
    if names & {"ModuleDict", "ParameterDict"}:
        return f"[{_key_text(key)}]"
    if type(key) is str and re.fullmatch("[0-9]+", key) and names & {"ModuleList", "Sequential", "ParameterList"}:
        return f"[{key}]"
    return f".{key}" if _is_name(key) else f".{registry}[{_key_text(key)}]"


def _is_name(key: object) -> bool:
    """Whether it can stand behind a dot."""
    return type(key) is str and key.isidentifier() and not keyword.iskeyword(key)


def _is_cached_property(cls: type, name: str) -> bool:
    """Whether the class computes the attribute once, and then keeps it in the instance's `__dict__` by that name."""
    for base in mro_of(cls):
        if name in namespace_of(base):
            return type(namespace_of(base)[name]) is functools.cached_property
    return False


def _of_member(way: Sequence[Any]) -> Edge | None:
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


def _of_tensor(way: Sequence[Any]) -> Edge | None:
    """A tensor's autograd node, where Python has seen it, and the hooks that were registered on the tensor."""
    base = next((base for base in mro_of(type(way[0])) if type_name(base) == "torch._C.TensorBase"), None)
    if base is None:
        return None
    if is_autograd_node(type(way[1])):
        return Edge(".grad_fn", "other")
    # Asking a tensor by its class's own getter can run a subclass's code.
    with sys.modules["torch"]._C.DisableTorchFunctionSubclass():
        for name in _HOOKS_OF_TENSORS:
            if name in namespace_of(base) and namespace_of(base)[name].__get__(way[0]) is way[1]:
                return Edge(f".{name}", "other")
    return None


def is_autograd_node(cls: type) -> bool:
    """Whether instances of the class are nodes of torch's autograd graph (`MulBackward0`, a `Function`'s context)."""
    names = [type_name(base) for base in mro_of(cls)]
    return "torch._C._FunctionBase" in names or _AUTOGRAD_NODE.fullmatch(names[0]) is not None


def _of_future(way: Sequence[Any]) -> Edge | None:
    """A future or task of asyncio that is written in C."""
    module: Any = sys.modules.get("_asyncio")
    if module is None:
        return None
    for base in mro_of(type(way[0])):
        names = _TEXT_OF_TASK if base is module.Task else _TEXT_OF_FUTURE if base is module.Future else {}
        for name, text in names.items():
            if name in namespace_of(base) and namespace_of(base)[name].__get__(way[0]) is way[1]:
                return Edge(text, "other")
        if base is module.Future:
            return _callback(way, namespace_of(base)["_callbacks"].__get__(way[0]) or [])
    return None


_TEXT_OF_TASK = {"_coro": ".get_coro()", "_fut_waiter": "._fut_waiter"}
_TEXT_OF_FUTURE = {"_result": "._result", "_exception": "._exception", "_loop": "._loop"}


def _callback(way: Sequence[Any], callbacks: Sequence[tuple[object, object]]) -> Edge | None:
    """The first callback and its context lie in the future itself, the others in a list of pairs."""
    for place, pair in enumerate(callbacks):
        for part, item in enumerate(pair):
            if item is way[1]:
                return Edge(f"._callbacks[{place}][{part}]", "other")
        if len(way) > 2 and pair is way[2]:
            return Edge(f"._callbacks[{place}]", "other", 2)
    return Edge("its context", "opaque") if type(way[1]) is Context else None


def _of_queue(way: Sequence[Any]) -> Edge | None:
    """A `queue.SimpleQueue`, which shows its items to nobody: past the list in which it keeps them."""
    if not any(type_name(base) == "_queue.SimpleQueue" for base in mro_of(type(way[0]))):
        return None
    if sys.version_info >= (3, 13):
        return Edge("queued item", "opaque")
    return Edge("queued item", "opaque", 2) if type(way[1]) is list and len(way) > 2 else None


# In this order: the first that knows the reference names it.
_RULES: tuple[_Rule, ...] = (
    _of_module,
    _of_class,
    _of_cache,
    _of_function,
    _of_context,
    _of_thread_local,
    _of_container,
    _of_proxy,
    _of_unseen,
    _of_nn_module,
    _of_tensor,
    _of_instance_dict,
    _of_member,
    _of_future,
    _of_queue,
)


def _entry(way: Sequence[Any], kind: Kind, alone: str) -> Edge:
    """The entry of a namespace, past the dict: `way` is its owner, the dict, and what the dict holds."""
    if len(way) == 2:
        return Edge(alone, "other")
    for key in _keys_of(way[1], way[2]):
        if _is_name(key):
            return Edge(f".{key}", kind, 2)
    return Edge(f".__dict__{_item(way[1:])}", kind, 2)


def _item(way: Sequence[Any]) -> str:
    edge = _of_container(way)
    return "[…]" if edge is None else edge.text


def _keys_of(holder: dict[Any, object], held: object) -> list[object]:
    return [key for key, value in list(dict.items(holder)) if value is held]


def _key_text(key: object) -> str:
    """A key as code; only its type where writing it would run foreign code."""
    if any(type(key) is plain for plain in (str, bytes, int, float, bool, type(None))):
        text = repr(key)
        return text if len(text) <= _LONGEST_KEY else f"{text[:_LONGEST_KEY]}…"
    if type(key) is tuple:
        return f"({', '.join(map(_key_text, key))})"
    if is_a(key, type):
        return f"<{_definition_text(key)}>"
    if is_a(key, ReferenceType):
        referent: object = _target_of(key)
        return f"<weakref to {type_name(type(referent))}>"
    return f"<{type_name(type(key))}>"


def _definition_text(cls: Any) -> str:
    return f"class {type_name(cls)}"


def variables_of(frame: FrameType) -> list[tuple[str, object]]:
    """The function's local variables and their values; none for a module or class body, whose variables are a dict."""
    if not frame.f_code.co_flags & CO_OPTIMIZED:
        return []
    return list(frame.f_locals.items())
