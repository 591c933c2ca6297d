"""How many bytes some things of a container keep: they themselves, and what they refer to that is their own."""

from __future__ import annotations

import builtins
import math
import mmap
from collections.abc import Callable, Collection, Iterable, Sequence
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodDescriptorType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import msgspec

from lowtide.leakcheck.judging.storages import is_tensor
from lowtide.probes.heap.roots import is_library
from lowtide.probes.memory.buffers import CTYPES_DATA, bytes_of_c, bytes_of_map
from lowtide.probes.objects.foreign import (
    dict_of_module,
    flags_of,
    is_a,
    module_of_class,
    mro_of,
    namespace_of_class,
    place_of_definition,
)
from lowtide.probes.objects.listed import collector_paused
from lowtide.probes.originals import gc, loaded, sys

_MOST_BEHIND = 2000
"""Objects behind one entry that are looked at, on the average."""

_SHARED_BY = 0.5
"""What more than such a part of the entries refers to, at the same distance, is none's own: an engine, a class."""

_FEWEST_SHARING = 3
"""Entries of which that can be said."""

_HAS_HEADER = 1 << 14
_HEADER = 16
"""The collector's, before each object of a type that it tracks."""

_HEAP_TYPE = 1 << 9

_MANAGES_ATTRIBUTES = 1 << 4
_BEFORE = 16
"""What lies before an object whose attributes the interpreter manages."""

_COUNTS_ATTRIBUTES = sys.version_info >= (3, 13)
"""Whether an object's size has the attributes in it for which no dict was made."""

_WORD = 8

_INTERPRETERS = frozenset(sys.builtin_module_names) - {"builtins"}
"""Modules whose types have nothing elsewhere, as locks. (What names no module seems to be of `builtins`.)"""

_METHODS_IN_C = (MethodDescriptorType, WrapperDescriptorType)

_DEFINING = (BuiltinFunctionType, CodeType, FunctionType, ModuleType, type)


class KeptBytes(msgspec.Struct):
    """What some entries of a container keep.

    Attributes:
        bytes: of all of them, without what is under tensors.
        objects: how many were looked at.
        tensors: the tensors and storages among it.
    """

    bytes: int = 0
    objects: int = 0
    tensors: list[Any] = msgspec.field(default_factory=list)


class _Met(msgspec.Struct):
    """An object that was met behind some entries, by the same number of steps."""

    item: Any
    entry: int
    entries: int = 1
    last: int = 0


@collector_paused()
def kept_by(
    entries: Sequence[tuple[Any, ...]],
    *,
    besides: Collection[object] = (),
    enough: float = math.inf,
    most: int | None = None,
) -> KeptBytes:
    """Return what entries keep, each object once; what many of them refer to was there without them.

    Step by step from all entries at once: what lies nearest to one of them is its own, though others lead to it through
    what they share.

    Args:
        entries: of a container, each the things that it has taken with it.
        besides: what is not looked at, nor what only it refers to.
        enough: bytes after which nobody asks how many more there are.
        most: objects that are looked at; None: 2,000 for each entry.
    """
    kept = KeptBytes()
    classes: dict[int, _Class] = {}
    seen = {*map(id, besides), id(vars(builtins))}
    # A module, or code, is somebody else's, but of what keeps such.
    taken = {id(item) for entry in entries for item in entry if is_a(item, ModuleType) or type(item) is CodeType}
    following = _met(((number, entry) for number, entry in enumerate(entries)), seen)
    left = _MOST_BEHIND * len(entries) if most is None else most
    shared_by = _SHARED_BY * len(entries) if len(entries) >= _FEWEST_SHARING else len(entries)
    while following and left > 0:
        level = list[tuple[int, Sequence[Any]]]()
        for met in following:
            seen.add(id(met.item))
            if met.entries > shared_by:
                continue
            its = classes.get(id(type(met.item))) or classes.setdefault(id(type(met.item)), _Class(met.item))
            if its.may_define and is_of_a_module(met.item) and id(met.item) not in taken:
                continue
            left -= 1
            kept.objects += 1
            behind = its.referents(met.item)
            kept.bytes += its.own_size(met.item, behind)
            level.append((met.entry, behind))
            if its.is_tensor:
                kept.tensors.append(met.item)
            if kept.bytes >= enough:
                return kept
        following = _met(level, seen)
    return kept


def _met(level: Iterable[tuple[int, Sequence[Any]]], seen: Collection[int]) -> list[_Met]:
    """Return the objects that are behind a level for the first time; its entries come in their order."""
    found = dict[int, _Met]()
    for number, items in level:
        for item in items:
            if id(item) in seen:
                continue
            met = found.get(id(item))
            if met is None:
                found[id(item)] = _Met(item, number, last=number)
            elif met.last != number:
                met.entries, met.last = met.entries + 1, number
    return list(found.values())


def is_of_a_module(item: Any) -> bool:
    """Return whether something was defined once: a class or function that is no other one's product, code, a module."""
    kind = type(item)
    if kind is BuiltinFunctionType:
        # Else it is a method of an object's.
        return item.__self__ is None or is_a(item.__self__, ModuleType)
    if kind is CodeType or is_a(item, ModuleType):
        return True
    return (kind is FunctionType or is_a(item, type)) and place_of_definition(item) is not None


def is_namespace(space: dict[str, Any]) -> bool:
    """Return whether a module has its names in a dict."""
    name = dict.get(space, "__name__")
    home = sys.modules.get(name) if type(name) is str else None
    return is_a(home, ModuleType) and dict_of_module(home) is space


class _Class:
    """What the class of objects says of each of them, asked once: thousands of objects are of few classes.

    Attributes:
        cls: the class, which is kept, so that its identity stays its own.
        size: its `__sizeof__`; that of a class in Python may answer anything, and is not asked.
        before: bytes that lie before the object.
        manages: whether the interpreter manages attributes of it.
        may_define: whether `is_of_a_module` can say yes.
        is_tensor: whether it is a tensor's or a storage's.
        base: what shows the array that an array is a view of.
        outside: gives the bytes that ctypes has allocated, or that are mapped, for an object; None if there are none.
        members: what gives the attributes of an object that the collector is shown nothing of.
    """

    __slots__ = ("base", "before", "cls", "is_tensor", "manages", "may_define", "members", "outside", "size")

    def __init__(self, item: Any) -> None:
        self.cls = cls = type(item)
        bases = mro_of(cls)
        sizes = [vars(base)["__sizeof__"] for base in bases if "__sizeof__" in vars(base)]
        # What stands there need not be a function.
        self.size: Callable[[Any], int] = next(size for size in sizes if type(size) is MethodDescriptorType)
        flags = flags_of(cls)
        self.manages = bool(flags & _MANAGES_ATTRIBUTES)
        self.before = (_HEADER if flags & _HAS_HEADER else 0) + (_BEFORE if self.manages else 0)
        self.may_define = any(base is each for base in bases for each in _DEFINING)
        self.is_tensor = is_tensor(item)
        array: Any = getattr(loaded("numpy"), "ndarray", None)
        # The collector is not shown what an array is a view of.
        self.base = array.base.__get__ if array is not None and is_a(item, array) else None
        kinds = ((CTYPES_DATA, bytes_of_c), (mmap.mmap, bytes_of_map))
        self.outside = next((size for kind, size in kinds if is_a(item, kind)), None)
        # As of a `msgspec.Struct` with `gc=False`, of which vLLM's requests and outputs are.
        is_hidden = flags & _HEAP_TYPE and not flags & _HAS_HEADER
        own = [each for base in bases for each in vars(base).values()] if is_hidden else []
        self.members = [each.__get__ for each in own if type(each) is MemberDescriptorType]

    def referents(self, item: Any) -> Sequence[Any]:
        """Return what an object of the class refers to; a function, not to the names of its module."""
        behind = gc.get_referents(item)
        if self.cls is FunctionType:
            return [each for each in behind if each is not item.__globals__ or not is_namespace(each)]
        if self.cls is CodeType:
            # The collector is shown nothing of it.
            return [item.co_consts, item.co_names, item.co_linetable, item.co_filename]
        if self.members:
            return [value for value in (_member(get, item) for get in self.members) if value is not None]
        base = None if self.base is None else self.base(item)
        return behind if base is None else [*behind, base]

    def own_size(self, item: Any, behind: Sequence[Any] | None = None) -> int:
        """Return the bytes of an object of the class itself; `behind` is what it refers to, where known."""
        size = self.size(item) + self.before
        if self.manages and not _COUNTS_ATTRIBUTES:
            behind = gc.get_referents(item) if behind is None else behind
            if not any(type(each) is dict for each in behind):
                size += _WORD * len(behind)
        return size + (0 if self.outside is None else self.outside(item))


def hides_memory(cls: type) -> bool:
    """Return whether objects of a class may have memory in C that nothing in Python tells, as an image or a session.

    One of C that is no value and does not say its size; one of the interpreter's own has what the collector is shown.
    """
    return any(_hides_memory(base) for base in mro_of(cls)[:-1])


def _hides_memory(cls: type) -> bool:
    is_of_c = any(type(each) in _METHODS_IN_C for each in namespace_of_class(cls).values())
    if not is_of_c or _says(cls, "__sizeof__") or (_says(cls, "__hash__") and _method(cls, "__hash__") is not None):
        return False
    module = module_of_class(cls)
    is_shown = bool(flags_of(cls) & _HAS_HEADER) and is_library(module)
    return not is_shown and module not in _INTERPRETERS


def _says(cls: type, name: str) -> bool:
    """Return whether a class has another method than `object`."""
    return _method(cls, name) is not vars(object)[name]


def _method(cls: type, name: str) -> object:
    spaces = map(namespace_of_class, mro_of(cls))
    return next(space[name] for space in spaces if name in space)


def _member(get: Callable[[Any], Any], item: Any) -> Any:
    """Return an attribute that lies in a slot; None where it has none."""
    try:
        return get(item)
    except AttributeError:
        return None


def own_size(item: Any) -> int:
    """Return the bytes of an object itself, as `sys.getsizeof` does; an array's with its data, a tensor's without."""
    return _Class(item).own_size(item)
