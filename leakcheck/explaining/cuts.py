"""Cuts one edge of a path: the smallest change to a program by which a holder lets go of what it holds."""

from __future__ import annotations

import functools
import itertools
import sys
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import replace
from types import CellType, CoroutineType, FunctionType, GeneratorType, MappingProxyType, ModuleType
from typing import Any
from weakref import ReferenceType

from lowtide.leakcheck.explaining import declarations
from lowtide.leakcheck.explaining.container_entries import (
    delete_from_dict,
    delete_from_sequence,
    delete_keys,
    discard,
    set_in_dict,
    set_in_sequence,
)
from lowtide.leakcheck.explaining.cut import Cut, LinkOwner, Names, Place, Refused
from lowtide.leakcheck.explaining.expressions import call, entry_of, is_name, is_plain, is_this_threads, key_of
from lowtide.probes.heap.paths import Link
from lowtide.probes.objects.foreign import (
    LRU_CACHE,
    attribute,
    dict_of_module,
    instance_dict,
    is_a,
    is_definition,
    mro_of,
    namespace_of,
    namespace_of_class,
    type_name,
)
from lowtide.probes.originals import loaded, threading
from lowtide.probes.references.unseen_references import object_parts

_PUT_BACK = "put back what {} was"
"""In place of what the program does not run without: a function or class that it calls, a part of a module."""

_OF_WEAK_KEYS = ".data"
"""Where a `weakref.WeakKeyDictionary` has its entries."""

_REGISTRIES = ("_parameters", "_buffers", "_modules")


def cut_of(link: Link, code: str | None, names: Names, words: str = "") -> Cut | None:
    """How to cut a link, None if it cannot be: what lies in a tuple, a bound method, a running function.

    What is new is deleted.  A name or key that the program had before becomes None if it began as None, by the
    program's own source: code that asks for it is prepared for that.

    Args:
        link: the edge.
        code: its owner, as code; None where no expression leads to it.
        names: what was there before.
        words: its owner as a path has it; default: the code.

    Raises:
        Refused: it could be cut, but not without harm.
    """
    owner = LinkOwner(words or code or "", code)
    return next((cut for make in _MAKERS if (cut := make(link, owner, names)) is not None), None)


def is_declared(link: Link, names: Names) -> bool:
    """Whether a program's source binds the name of a global or attribute to something, and not to None."""
    name = link.edge[1:]
    if link.kind == "module-global" and is_a(link.owner, ModuleType):
        return names.bound(declarations.of_global, link.owner, name) == "other"
    if link.kind == "instance-attribute" and name.isidentifier():
        return names.bound(declarations.of_instance_attribute, type(link.owner), name) == "other"
    return False


def _cache(link: Link, of: LinkOwner, names: Names) -> Cut | None:
    if link.kind not in ("lru-cache-key", "lru-cache-value") or type(link.owner) is not LRU_CACHE:
        return None
    clear: Callable[[], None] = LRU_CACHE.__dict__["cache_clear"].__get__(link.owner)
    cut = of.cut(f"{of.code}.cache_clear()", f"clear the cache {of.words}", f"{of.text} is empty", clear)
    return replace(cut, emptied=id(link.owner))


def _entry(link: Link, of: LinkOwner, names: Names) -> Cut | None:
    """An entry of a dict."""
    carrier = link.carrier
    if link.kind not in ("item", "module-global") or not is_a(carrier, dict) or is_a(link.owner, ModuleType):
        return None
    entries = names.entries(carrier)
    index = entries.place(link.held)
    if index is None:
        return None
    key, value = entries.keys[index], next(itertools.islice(dict.values(carrier), index, None))
    # A function that was registered, as by `functools.singledispatch`, goes from behind the view that is shown.
    is_registry = type(link.owner) is MappingProxyType and is_definition(value)
    if carrier is not link.owner and link.kind == "item" and not is_registry:
        return None
    if type(key) is ReferenceType and of.text.endswith(_OF_WEAK_KEYS):
        of = LinkOwner(of.words.removesuffix(_OF_WEAK_KEYS), of.code and of.code.removesuffix(_OF_WEAK_KEYS))
    found = [names.bound_key(module, key) for module in names.modules if names.holder]
    bound = "none" if "none" in found else "other" if "other" in found else "absent"
    where = of.code if link.owner is carrier else None
    if type(link.owner) is FunctionType and of.code is not None:
        where = f"{of.code}.__globals__"
    key_text = None if where is None else key_of(where, carrier, index, key)
    text = f"{of.text}[{key_text}]" if key_text is not None and link.owner is carrier else f"{of.words}{link.edge}"
    if bound == "none":
        set_none = None if where is None or key_text is None else _setting(where, carrier, key_text)
        change = functools.partial(set_in_dict, carrier, link.held, None)
        return of.cut(set_none, f"set {text} to None", f"{text} is None", change, sets_none=True)
    is_old = bound == "other" or entries.last_old > index
    if not names.are_free and (is_old or entries.has_none):
        # It stands where something stood before the leak, or is one of slots, some of them empty.
        raise Refused
    if not entries.can_delete(index):
        return None
    if bound == "other" and is_definition(value):
        change = functools.partial(set_in_dict, carrier, link.held, None)
        return of.cut(None, _PUT_BACK.format(text), f"{text} is None", change, sets_none=True)
    is_last = index == dict.__len__(carrier) - 1
    delete = None if where is None else _deleting(where, carrier, key_text, is_last=is_last)
    place = _place_in(of, carrier, index, f"[{key_text}]", "dict") if link.owner is carrier else None
    cut = of.cut(
        delete,
        f"delete {text}",
        f"{text} is deleted",
        lambda: delete_from_dict(carrier, [link.held]),
        place=place and place._replace(is_plain=delete is not None and delete.startswith("del ")),
    )
    return _with_others(cut, link.held, functools.partial(delete_from_dict, carrier))


def _with_others(cut: Cut, held: int, together: Callable[[Collection[int]], object]) -> Cut:
    """The same, which can be made together with the deletion of other entries."""
    return replace(cut, held=held, together=together)


def _key(link: Link, of: LinkOwner, names: Names) -> Cut | None:
    """A key of a dict, with its entry: where the key is new, so is that."""
    carrier = link.carrier
    if link.kind != "item" or not link.edge.startswith("<key") or not is_a(carrier, dict) or carrier is not link.owner:
        return None
    entries = names.entries(carrier)
    place = entries.place_of_key(link.held)
    if place is None or not entries.can_delete_key(place):
        return None
    if not names.are_free and (names.older is None or link.held in names.older):
        raise Refused
    key_text = None if of.code is None else key_of(of.code, carrier, place, entries.keys[place])
    is_last = place == dict.__len__(carrier) - 1
    delete = None if of.code is None else _deleting(of.code, carrier, key_text, is_last=is_last)
    text = f"{of.text}[{key_text}]" if key_text is not None else f"the entry of {of.words}{link.edge}"
    is_plain_del = delete is not None and delete.startswith("del ")
    cut = of.cut(
        delete,
        f"delete {text}",
        f"{text} is deleted",
        lambda: delete_keys(carrier, [link.held]),
        place=_place_in(of, carrier, place, f"[{key_text}]", "dict")._replace(is_plain=is_plain_del),
    )
    return _with_others(cut, link.held, functools.partial(delete_keys, carrier))


def _setting(code: str, entries: object, key: str) -> str:
    if is_plain(type(entries), "__setitem__"):
        return f"{code}[{key}] = None"
    return call(code, entries, "__setitem__", key, "None")


def _deleting(code: str, entries: object, key: str | None, *, is_last: bool) -> str | None:
    """The deletion of an entry of a dict as code; the last one can go without its key."""
    if key is None:
        return call(code, entries, "popitem") if is_last else None
    if is_plain(type(entries), "__delitem__"):
        return f"del {code}[{key}]"
    return call(code, entries, "__delitem__", key)


def _place_in(of: LinkOwner, items: Any, index: int, key: str, ordered: str) -> Place:
    kind: Any = {"dict": dict, "list": list, "deque": deque}[ordered]
    clear = f"{of.code}.clear()" if is_plain(type(items), "clear") else call(of.text, items, "clear")
    size = kind.__len__(items)
    return Place(id(items), of.text, key, size, index, clear if of.code is not None else "", True, ordered)


def _slot(link: Link, of: LinkOwner, names: Names) -> Cut | None:
    """An item of a list or deque."""
    carrier: Any = link.carrier
    base: Any = list if is_a(carrier, list) else deque
    if link.kind != "item" or not is_a(carrier, base) or carrier is not link.owner:
        return None
    items = names.entries(carrier)
    index = items.place(link.held)
    if index is None:
        return None
    # What stands behind it would move; where some are None, it is a list of slots.
    if not names.are_free and (items.last_slot > index or items.has_none):
        raise Refused

    place = _place_in(of, carrier, index, f"[{index}]", "list" if base is list else "deque")
    text = f"{of.text}{place.key}"
    if items.has_none:
        code = _setting(of.text, carrier, str(index))
        empty = functools.partial(set_in_sequence, carrier, link.held, None)
        return of.cut(code, f"set {text} to None", f"{text} is None", empty, sets_none=True)
    plain = is_plain(type(carrier), "__delitem__")
    delete = f"del {text}" if plain else call(of.text, carrier, "__delitem__", str(index))
    cut = of.cut(
        delete,
        f"delete {text}",
        f"{text} is deleted",
        lambda: delete_from_sequence(carrier, [link.held]),
        place=place._replace(is_plain=plain),
    )
    return _with_others(cut, link.held, functools.partial(delete_from_sequence, carrier))


def _item_of_array(link: Link, of: LinkOwner, names: Names) -> Cut | None:
    """An item of an array of objects; None is what an empty one has."""
    numpy: Any = loaded("numpy")
    if link.kind != "item" or numpy is None or not is_a(link.carrier, numpy.ndarray):
        return None
    if not names.are_free:
        raise Refused
    text = f"{of.text}{link.edge}"
    is_expression = is_plain(type(link.carrier), "__setitem__")
    return of.cut(
        f"{text} = None" if is_expression else None,
        f"set {text} to None",
        f"{text} is None",
        lambda: _empty_item(link.carrier, link.held),
        sets_none=True,
    )


def _empty_item(array: Any, held: int) -> None:
    """Puts None where an array of objects has one, by its identity."""
    numpy: Any = loaded("numpy")
    for _, part in object_parts(array):
        flat = numpy.ndarray.flat.__get__(part)
        for place in [place for place, item in enumerate(flat) if id(item) == held]:
            flat[place] = None


def _member_of_set(link: Link, of: LinkOwner, names: Names) -> Cut | None:
    if link.kind != "item" or not is_a(link.carrier, set):
        return None
    elements = names.entries(link.carrier)
    place = elements.place(link.held)
    if place is None or not elements.can_discard(place):
        return None
    is_only = set.__len__(link.carrier) == 1
    clear = f"{of.code}.clear()" if is_plain(type(link.carrier), "clear") else call(of.text, link.carrier, "clear")
    cut = of.cut(
        clear if is_only else None,
        f"discard the {elements.type_at(place)} from {of.text}",
        f"one element of {of.text} is gone",
        lambda: discard(link.carrier, [link.held]),
    )
    return _with_others(cut, link.held, functools.partial(discard, link.carrier))


def _global(link: Link, of: LinkOwner, names: Names) -> Cut | None:
    if not is_a(link.owner, ModuleType) or link.kind != "module-global":
        return None
    namespace, name = dict_of_module(link.owner), link.edge[1:]
    if id(namespace.get(name)) != link.held:
        return None
    bound = names.bound(declarations.of_global, link.owner, name)
    if names.is_new_global(namespace, name, bound):
        return _removal(of, link.owner, name, lambda: namespace.pop(name, None))
    if not names.are_free and bound != "none":
        raise Refused
    is_replaced = bound == "other" and is_definition(namespace[name])
    return _emptying(of, link.owner, name, lambda: namespace.__setitem__(name, None), is_replaced=is_replaced)


def _removal(of: LinkOwner, owner: object, name: str, apply: Callable[[], object], where: str = "") -> Cut:
    """The deletion of an attribute, past a `__delattr__` of the program's own."""
    text = f"{of.text}.{name}"
    code = f"del {text}" if is_plain(type(owner), "__delattr__") else call(of.text, owner, "__delattr__", repr(name))
    return of.cut(code if is_name(name) else None, f"delete {text}", f"{text}{where} is deleted", apply)


def _emptying(
    of: LinkOwner,
    owner: object,
    name: str,
    apply: Callable[[], object],
    where: str = "",
    *,
    is_replaced: bool = False,
) -> Cut:
    """None for an attribute, past a `__setattr__` of the program's own; words where a function was in its place."""
    text = f"{of.text}.{name}"
    if is_replaced:
        return of.cut(None, _PUT_BACK.format(text), f"{text}{where} is None", apply, sets_none=True)
    plain = is_plain(type(owner), "__setattr__")
    code = f"{text} = None" if plain else call(of.text, owner, "__setattr__", repr(name), "None")
    own = code if is_name(name) else None
    return of.cut(own, f"set {text} to None", f"{text}{where} is None", apply, sets_none=True)


def _attribute(link: Link, of: LinkOwner, names: Names) -> Cut | None:
    name = link.edge[1:]
    if link.kind not in ("instance-attribute", "class-attribute"):
        return None
    if any(link.carrier is attribute(link.owner, registry) for registry in _REGISTRIES):
        return _registered(link, of, names)
    if not name.isidentifier():
        return None
    of_class = link.kind == "class-attribute"
    if of_class:
        namespace = namespace_of_class(link.owner)
        setter: Callable[..., None] = type.__setattr__
        deleter: Callable[..., None] = type.__delattr__
    else:
        namespace = link.carrier if type(link.carrier) is dict else instance_dict(link.owner)
        setter, deleter = object.__setattr__, object.__delattr__
    if of_class:
        bound = names.bound(declarations.of_class_attribute, link.owner, name)
        if bound == "absent" and names.is_bound_elsewhere(name):
            bound = "other"
    elif type(link.owner) is FunctionType:
        module = link.owner.__module__
        home = sys.modules.get(module) if type(module) is str else None
        bound = "unknown" if home is None else names.bound(declarations.of_attribute, home, name)
    else:
        bound = names.bound(declarations.of_instance_attribute, type(link.owner), name)
        if bound == "absent" and names.is_bound_elsewhere(name):
            bound = "other"
    if bound == "absent" and namespace is not None and names.is_new(namespace, name):
        return _removal(of, link.owner, name, lambda: deleter(link.owner, name))
    value = namespace.get(name) if of_class and namespace is not None else attribute(link.owner, name)
    if not of_class and id(value) == link.held and _has_method(type(link.owner), name):
        # The class has it as well.
        return _removal(of, link.owner, name, lambda: deleter(link.owner, name))
    # An exception's traceback, the gradient of a tensor: nobody relies on them.
    if not (names.are_free or bound == "none" or _is_left_over(link.owner, name)):
        raise Refused
    is_replaced = bound == "other" and is_definition(value)
    return _emptying(of, link.owner, name, lambda: setter(link.owner, name, None), is_replaced=is_replaced)


def _has_method(cls: type, name: str) -> bool:
    """Whether a class has a function of that name, which an instance's own attribute hides."""
    found = next((namespace_of(base)[name] for base in mro_of(cls) if name in namespace_of(base)), None)
    return any(type(found) is kind for kind in (FunctionType, classmethod, staticmethod))


def _is_left_over(owner: object, name: str) -> bool:
    """Whether an attribute is one that nobody relies on: an exception's traceback, the gradient of a tensor."""
    if is_a(owner, BaseException):
        return name in ("__traceback__", "__context__")
    return name == "grad" and any(type_name(base) == "torch.Tensor" for base in mro_of(type(owner)))


def _registered(link: Link, of: LinkOwner, names: Names) -> Cut | None:
    """What a `torch.nn.Module` has registered.

    None is legal for each of them, but a module of whose class one is does not run without.
    """
    entries = link.carrier
    registered = names.entries(entries)
    place = registered.place(link.held)
    if place is None:
        return None
    key = registered.keys[place]
    if not names.are_free:
        raise Refused
    text = f"{of.text}{link.edge}"
    bound = names.bound(declarations.of_instance_attribute, type(link.owner), link.edge[1:])
    if names.older is not None and registered.last_old < place and bound not in ("none", "other"):
        deletes = "__delattr__" if link.edge.startswith(".") else "__delitem__"
        is_code = is_plain(type(link.owner), deletes)
        apply = functools.partial(delete_from_dict, entries, [link.held])
        return of.cut(f"del {text}" if is_code else None, f"delete {text}", f"{text} is deleted", apply)
    sets = "__setattr__" if link.edge.startswith(".") else "__setitem__"
    plain = is_plain(type(link.owner), sets) and is_plain(type(link.owner), "__getattr__")
    other = None if of.code is None else entry_of(f"{of.code}.{_registry(link)}", entries, link.held)
    code = f"{text} = None" if plain or other is None else f"{other} = None"
    empty = functools.partial(entries.__setitem__, key, None)
    instead = f"set {text} to None" if bound != "other" else _PUT_BACK.format(text)
    return of.cut(code if bound != "other" else None, instead, f"{text} is None", empty, sets_none=True)


def _registry(link: Link) -> str:
    return next(name for name in _REGISTRIES if link.carrier is attribute(link.owner, name))


def _cell(link: Link, of: LinkOwner, names: Names) -> Cut | None:
    if link.kind != "closure" or type(link.carrier) is not CellType:
        return None
    if not names.are_free:
        raise Refused
    name = link.edge.removeprefix("cell ").strip("'")
    index = f"{of.code}.__closure__[{_cell_index(link)}].cell_contents = None"
    changed = f"{name}, in the closure of {of.text}, is None"
    words = f"set {name}, in the closure of {of.words}, to None"
    return of.cut(index, words, changed, lambda: _empty(link.carrier), sets_none=True)


def _empty(cell: CellType) -> None:
    cell.cell_contents = None


def _cell_index(link: Link) -> int:
    cells = link.owner.__closure__ or ()
    return next((place for place, cell in enumerate(cells) if cell is link.carrier), 0)


def _suspended(link: Link, of: LinkOwner, names: Names) -> Cut | None:
    """A generator or coroutine that waits: closing it ends it."""
    if link.kind != "generator-local" or not (type(link.owner) is GeneratorType or type(link.owner) is CoroutineType):
        return None
    if not names.are_free and names.may_have_been_there(link.owner):
        # It may be waiting for the next thing to do.
        raise Refused
    return of.cut(f"{of.code}.close()", f"close {of.words}", f"{of.text} is closed", link.owner.close, ends_anyway=True)


def _thread_local(link: Link, of: LinkOwner, names: Names) -> Cut | None:
    if link.kind != "thread" or type(link.carrier) is not dict or not is_a(link.owner, threading.local):
        return None
    values, name = link.carrier, link.edge[1:]
    if id(values.get(name)) != link.held:
        return None
    bound = "unknown" if names.home is None else names.bound(declarations.of_attribute, names.home, name)
    where = " of this thread"
    if not is_this_threads(link):
        of, where = LinkOwner(of.words, None), " of another thread"
    if bound == "none" or (names.are_free and bound != "absent"):
        return _emptying(of, link.owner, name, lambda: values.__setitem__(name, None), where)
    if bound != "absent":
        raise Refused
    return _removal(of, link.owner, name, lambda: values.pop(name, None), where)


def _context_variable(link: Link, of: LinkOwner, names: Names) -> Cut | None:
    if link.kind != "context-variable" or link.edge != ".get()":
        return None
    if not names.are_free:
        # What it was before is unknown.
        raise Refused
    changed = f"{of.words} is None in this context"
    return of.cut(f"{of.code}.set(None)", f"set {of.words} to None", changed, lambda: link.owner.set(None))


_MAKERS = (
    _cache,
    _entry,
    _key,
    _slot,
    _item_of_array,
    _member_of_set,
    _global,
    _attribute,
    _cell,
    _suspended,
    _thread_local,
    _context_variable,
)
