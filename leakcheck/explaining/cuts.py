"""Cuts one edge of a path, the first that can be without harm: the smallest change by which a holder lets go."""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Collection, Sequence
from types import CellType, CoroutineType, FunctionType, GeneratorType, MappingProxyType, ModuleType
from typing import Any
from weakref import ReferenceType

from msgspec.structs import replace

from lowtide.leakcheck.explaining import declarations, library_objects
from lowtide.leakcheck.explaining.cut import (
    Cut,
    LinkOwner,
    Names,
    Place,
    Refused,
    delete_from_dict,
    delete_from_sequence,
    delete_keys,
    discard,
    empty_in,
)
from lowtide.leakcheck.explaining.expressions import (
    call,
    entry_of,
    is_plain,
    is_this_threads,
    key_of,
    of_public_global,
    of_root,
    one_step,
    past_override,
)
from lowtide.leakcheck.explaining.path_reading import CodeOfPath, Shown
from lowtide.probes.heap.holders import Traces
from lowtide.probes.heap.paths import Link, Path
from lowtide.probes.heap.roots import is_library
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
from lowtide.probes.originals import loaded, signal, sys, threading
from lowtide.probes.references.entries import is_name
from lowtide.probes.references.unseen_references import object_parts

_OF_WEAK_KEYS = ".data"
"""Where a `weakref.WeakKeyDictionary` has its entries."""

_REGISTRIES = ("_parameters", "_buffers", "_modules")


def cut_of(link: Link, code: str | None, names: Names, words: str = "") -> Cut | None:
    """Return how to cut a link, None if it cannot be: what lies in a tuple, a bound method, a running function.

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
    """Return whether a program's source binds the name of a global or attribute to something, and not to None."""
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
    """Cut an entry of a dict."""
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
        change = functools.partial(empty_in, carrier, link.held)
        return of.emptying(set_none, text, change)
    is_old = bound == "other" or entries.last_old > index
    if not names.are_free and (is_old or entries.has_none):
        # It stands where something stood before the leak, or is one of slots, some of them empty.
        raise Refused
    if not entries.can_delete(index):
        return None
    if bound == "other" and is_definition(value):
        change = functools.partial(empty_in, carrier, link.held)
        return of.emptying(None, text, change, is_replaced=True)
    is_last = index == dict.__len__(carrier) - 1
    delete = None if where is None else _deleting(where, carrier, key_text, is_last=is_last)
    place = _place_in(of, carrier, index, f"[{key_text}]", "dict") if link.owner is carrier else None
    place = place and place._replace(is_plain=delete is not None and delete.startswith("del "))
    return _with_others(of, delete, text, link.held, functools.partial(delete_from_dict, carrier), place)


def _with_others(
    of: LinkOwner,
    delete: str | None,
    text: str,
    held: int,
    together: Callable[[Collection[int]], object],
    place: Place | None,
) -> Cut:
    """Return the deletion of an entry that can be made together with that of other entries."""
    cut = of.deletion(delete, text, lambda: together([held]))
    return replace(cut, place=place, held=held, together=together)


def _key(link: Link, of: LinkOwner, names: Names) -> Cut | None:
    """Cut a key of a dict, with its entry: where the key is new, so is that."""
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
    at = _place_in(of, carrier, place, f"[{key_text}]", "dict")
    at = at._replace(is_plain=delete is not None and delete.startswith("del "))
    return _with_others(of, delete, text, link.held, functools.partial(delete_keys, carrier), at)


def _setting(code: str, entries: object, key: str) -> str:
    return past_override(f"{code}[{key}] = None", code, entries, "__setitem__", key, "None")


def _deleting(code: str, entries: object, key: str | None, *, is_last: bool) -> str | None:
    """Return the deletion of an entry of a dict as code; the last one can go without its key."""
    if key is None:
        return call(code, entries, "popitem") if is_last else None
    return past_override(f"del {code}[{key}]", code, entries, "__delitem__", key)


def _place_in(of: LinkOwner, items: Any, index: int, key: str, ordered: str) -> Place:
    kind: Any = {"dict": dict, "list": list, "deque": deque}[ordered]
    clear = past_override(f"{of.code}.clear()", of.text, items, "clear")
    size = kind.__len__(items)
    return Place(id(items), of.text, key, size, index, clear if of.code is not None else "", True, ordered)


def _slot(link: Link, of: LinkOwner, names: Names) -> Cut | None:
    """Cut an item of a list or deque."""
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
        empty = functools.partial(empty_in, carrier, link.held)
        return of.emptying(code, text, empty)
    plain = is_plain(type(carrier), "__delitem__")
    delete = past_override(f"del {text}", of.text, carrier, "__delitem__", str(index))
    together = functools.partial(delete_from_sequence, carrier)
    return _with_others(of, delete, text, link.held, together, place._replace(is_plain=plain))


def _item_of_array(link: Link, of: LinkOwner, names: Names) -> Cut | None:
    """Cut an item of an array of objects; None is what an empty one has."""
    numpy: Any = loaded("numpy")
    if link.kind != "item" or numpy is None or not is_a(link.carrier, numpy.ndarray):
        return None
    if not names.are_free:
        raise Refused
    text = f"{of.text}{link.edge}"
    is_expression = is_plain(type(link.carrier), "__setitem__")
    code = f"{text} = None" if is_expression else None
    return of.emptying(code, text, lambda: _empty_item(link.carrier, link.held))


def _empty_item(array: Any, held: int) -> None:
    """Put None where an array of objects has one, by its identity."""
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
    clear = past_override(f"{of.code}.clear()", of.text, link.carrier, "clear")
    together = functools.partial(discard, link.carrier)
    return of.cut(
        clear if is_only else None,
        f"discard the {elements.type_at(place)} from {of.text}",
        f"one element of {of.text} is gone",
        lambda: together([link.held]),
        held=link.held,
        together=together,
    )


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
    """Return the deletion of an attribute, past a `__delattr__` of the program's own."""
    text = f"{of.text}.{name}"
    code = past_override(f"del {text}", of.text, owner, "__delattr__", repr(name))
    return of.deletion(code if is_name(name) else None, text, apply, where)


def _emptying(
    of: LinkOwner,
    owner: object,
    name: str,
    apply: Callable[[], object],
    where: str = "",
    *,
    is_replaced: bool = False,
) -> Cut:
    """Set an attribute to None, past a `__setattr__` of the program's own; in words where it was a function."""
    text = f"{of.text}.{name}"
    code = past_override(f"{text} = None", of.text, owner, "__setattr__", repr(name), "None")
    return of.emptying(code if is_name(name) else None, text, apply, where, is_replaced=is_replaced)


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
    if type(link.owner) is FunctionType:
        module = link.owner.__module__
        home = sys.modules.get(module) if type(module) is str else None
        bound = "unknown" if home is None else names.bound(declarations.of_attribute, home, name)
    else:
        declared = declarations.of_class_attribute if of_class else declarations.of_instance_attribute
        bound = names.bound(declared, link.owner if of_class else type(link.owner), name)
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
    """Return whether a class has a function of that name, which an instance's own attribute hides."""
    found = next((namespace_of(base)[name] for base in mro_of(cls) if name in namespace_of(base)), None)
    return any(type(found) is kind for kind in (FunctionType, classmethod, staticmethod))


def _is_left_over(owner: object, name: str) -> bool:
    """Return whether an attribute is one that nobody relies on: an exception's traceback, the gradient of a tensor."""
    if is_a(owner, BaseException):
        return name in ("__traceback__", "__context__")
    return name == "grad" and any(type_name(base) == "torch.Tensor" for base in mro_of(type(owner)))


def _registered(link: Link, of: LinkOwner, names: Names) -> Cut | None:
    """Cut what a `torch.nn.Module` has registered.

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
        return of.deletion(f"del {text}" if is_code else None, text, apply)
    sets = "__setattr__" if link.edge.startswith(".") else "__setitem__"
    plain = is_plain(type(link.owner), sets) and is_plain(type(link.owner), "__getattr__")
    other = None if of.code is None else entry_of(f"{of.code}.{_registry(link)}", entries, link.held)
    code = f"{text} = None" if plain or other is None else f"{other} = None"
    empty = functools.partial(entries.__setitem__, key, None)
    return of.emptying(code, text, empty, is_replaced=bound == "other")


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
    """Cut a variable of a generator or coroutine that waits: closing it ends it."""
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


CACHED = ("lru-cache-key", "lru-cache-value")

_LONGEST_CODE = 2000
"""Characters of an expression; Python itself does not compile one of some thousand parts."""


class Way:
    """A path with its objects, each as the expression that leads to it, and with what of it lies inside a library."""

    def __init__(self, shown: Shown, place: int, found: Traces) -> None:
        self.shown = shown
        self.links = [found.link(place, turn) for turn in range(len(shown.whole.steps))]
        self.begin, root = shown.skipped, shown.path.root_name if shown.path.root_kind == "module" else ""
        code = shown.path.root_name if shown.is_code else None
        if not self.begin:
            code = of_root(shown.whole, found.root(place))
        public = self._public_name()
        if public is not None:
            self.begin, code, root = 1, *public
        self._code: list[str | None] = [*[None] * self.begin, code]
        self._territories = library_objects.territories(root, self.links[self.begin :])
        self._words = CodeOfPath(shown.path)
        opaque = (turn for turn, link in enumerate(self.links) if turn >= self.begin and link.kind == "opaque")
        self._first_opaque = next(opaque, len(self.links))
        self._homes = _Homes(shown.whole)
        # By step, the last one at or before which a library offers a method.
        self._offering: list[int] = []

    def _public_name(self) -> tuple[str, str] | None:
        """Return another module's name for what a module that is written in C holds under no name of its own."""
        if self.begin or len(self.links) < 2 or self.links[0].kind != "opaque":
            return None
        return of_public_global(self.links[1].owner)

    def can_cut(self, turn: int) -> bool:
        """Return whether changing what a step starts from may be of use: not past what nobody can look into.

        Nor where what is leaked is itself what the runner keeps, as a fixture's value: that is not the program's entry.
        """
        if self.shown.skipped and not self.shown.path.steps[0].edge:
            return False
        if self._is_finalizers:
            # It is still called when its object dies, or at exit.
            return False
        return self.begin <= turn < self._first_opaque

    @property
    def _is_finalizers(self) -> bool:
        return self.shown.path.root_name.startswith("weakref.finalize(")

    def code(self, turn: int) -> str | None:
        """Return what a step starts from, as code; None where no expression leads to it that anybody would write."""
        while len(self._code) <= turn:
            before = self._code[-1]
            code = None if before is None else one_step(before, self.links[len(self._code) - 1])
            self._code.append(None if code is None or len(code) > _LONGEST_CODE else code)
        return self._code[turn]

    def words(self, turn: int) -> str:
        """Return what a step starts from, as the path has it."""
        return self._words(turn - self.shown.skipped)

    def names(self, turn: int, known: Names) -> Names:
        """Return what is known of the program for what a step starts from."""
        return known.of(*self._homes(turn))

    def territory(self, turn: int) -> library_objects.Territory:
        """Whose the object is that a step starts from."""
        return self._territories[max(0, turn - self.begin)]

    def advice(self, first: int, *, has_cut: bool) -> str:
        """Return what to do where the first suspect edge lies inside a library, unless it can be cut there."""
        turn = max(first, self.begin)
        if self._is_finalizers:
            return library_objects.advice_for_finalizer(self.shown.path.root_name, [link.owner for link in self.links])
        if has_cut and turn < len(self.links) and not self.territory(turn).is_ground:
            return ""
        if turn >= len(self.links) or self.links[turn].kind in CACHED or not self.territory(turn).is_librarys:
            return ""
        if self.shown.path.root_kind == "thread" and self.territory(turn).inside == "threading":
            # What a running thread has is let go of by ending the thread.
            return ""
        library, words = self.territory(turn).inside, self.words(turn + 1)
        if not library:
            return f"{words} is {self.territory(turn).shared}'s: put back what was there, or take out what was added"
        # What it leads to may itself have a way to end, as a timer has.
        return library_objects.advice_for(library, [link.owner for link in self.links[: turn + 2]], words)

    def traceback_behind(self, turn: int) -> int | None:
        """Return the step behind another one by which an exception has its traceback, if code leads there."""
        turns = (behind for behind in range(turn + 1, len(self.links)) if _is_only_traceback(self.links[behind]))
        trace = next(turns, None)
        if trace is None or not self.can_cut(trace) or self.territory(trace).is_ground:
            return None
        return trace if self.code(trace) is not None else None

    def offer(self, turn: int) -> Cut | None:
        """Return what the library offers by which what lies inside it is let go of."""
        offer = library_objects.offered_function(self.words(turn + 1)) or self._offer_of_module()
        if offer is not None:
            return Cut(offer.call, offer.changed, functools.partial(offer.do, None), ends_anyway=True)
        for at, link in enumerate(self.links[turn : turn + 2], turn):
            if link.kind == "item" and is_a(link.carrier, dict) and library_objects.is_hook(self.words(at + 1)):
                # As its handle does; whoever registered it has that.
                remove = functools.partial(delete_from_dict, link.carrier, [link.held])
                return Cut(
                    f"hook {link.edge}: {library_objects.HANDLE}", f"hook {link.edge} is removed", remove, is_code=False
                )
        owner = self._offering_at(turn)
        if owner < 0:
            return None
        method, code = library_objects.offered_method(self.links[owner].owner), self.code(owner)
        assert method is not None
        do = functools.partial(method.do, self.links[owner].owner)
        return Cut(f"{code}.{method.call}", f"{code} {method.changed}", do, ends_anyway=True)

    def _offer_of_module(self) -> library_objects.Offer | None:
        """Return the function by which a library's module empties the global that the path begins with."""
        link = self.links[0]
        if link.kind != "module-global" or not is_a(link.owner, ModuleType):
            return None
        return library_objects.offered_by_module(link.owner, link.edge[1:])

    def undoing(self, turn: int) -> Cut | None:
        """Return the call by which torch takes out again what it has put into a module, if a step leads to that."""
        link, code = self.links[turn], self.code(turn)
        if link.kind != "instance-attribute" or code is None:
            return None
        behind = self.links[turn + 1].edge if turn + 1 < len(self.links) else ""
        offer = library_objects.offered_by_torch(link.owner, link.edge[1:], behind)
        if offer is None:
            return None
        home, function, parameter = offer
        do: Any = getattr(loaded(home), function)
        undo = functools.partial(do, link.owner, parameter)
        call = f"{home}.{function}({code}, {parameter!r})"
        return Cut(call, f"{parameter} of {code} is plain again", undo, ends_anyway=True)

    def _offering_at(self, turn: int) -> int:
        """Return the last step up to one that starts from what has a method of its own to end; -1 if none does."""
        while len(self._offering) <= turn:
            at, before = len(self._offering), self._offering[-1] if self._offering else -1
            offers = at >= self.begin and library_objects.offered_method(self.links[at].owner) is not None
            self._offering.append(at if offers and self.code(at) is not None else before)
        return self._offering[turn]


def cut_of_root(way: Way, first: int, names: Names) -> Cut | None:
    """Return the cut of what the interpreter holds and gives back on request."""
    path, held = way.shown.path, way.links[0].owner
    if first or not names.are_free or names.may_have_been_there(held):
        return None
    number = next((number for number in signal.valid_signals() if signal.getsignal(number) is held), None)
    if path.root_name.startswith("signal.") and number is not None:
        default = f"signal.signal({path.root_name.partition('(')[2][:-1]}, signal.SIG_DFL)"
        return Cut(default, "the signal has its default handler", lambda: signal.signal(number, signal.SIG_DFL))
    if path.root_name == "sys.getprofile()":
        return Cut("sys.setprofile(None)", "nothing is profiled", lambda: sys.setprofile(None))
    if path.root_name == "sys.gettrace()":
        return Cut("sys.settrace(None)", "nothing is traced", lambda: sys.settrace(None))
    return None


def cut_of_new_dict(way: Way, first: int, names: Names) -> Cut | None:
    """Return the cut of a name whose dict may be new itself: an empty one would be left there, and not what there was.

    (A dict passes for older, since the collector does not know an empty one.)
    """
    shown, before = way.shown, first - 1
    if names.older is None or not first or shown.whole.steps[before].type_name != "dict" or not way.can_cut(before):
        return None
    link = way.links[before]
    # A cache keeps what was made for it, and fills itself again.
    if link.kind not in CACHED and (link.held in names.older or way.territory(before).is_ground):
        return None
    try:
        known = replace(way.names(before, names), are_free=False)
        return cut_of(link, way.code(before), known, way.words(before))
    except Refused:
        return None


def first_cut(way: Way, first: int, names: Names) -> tuple[Cut | None, int]:
    """Return the cut of the first edge, from the first suspect on, that can be made without harm.

    Returns:
        The cut, and the step that decided: whatever lies behind that has the same.
    """
    for turn, link in enumerate(way.links[first:], first):
        inside = bool(turn >= way.begin and way.territory(turn).inside and link.kind not in CACHED)
        if inside and names.are_free and (offer := way.offer(turn)) is not None:
            # Once nothing runs any more, the library may be asked to release it.
            return offer, turn
        if names.are_free and way.can_cut(turn) and (undoing := way.undoing(turn)) is not None:
            return undoing, turn
        if not way.can_cut(turn) or _is_part_of_librarys_object(way.links, turn):
            continue
        if names.older is None and not names.are_free and turn < len(way.links) - 1 and link.kind not in CACHED:
            # Nobody knows whether what it leads to was there before; the leaked thing itself, at the end, was not.
            continue
        known = way.names(turn, names)
        is_ground = link.kind not in CACHED and way.territory(turn).is_ground
        if is_ground:
            if inside or names.older is None:
                # Its insides are nobody else's to change.
                return None, turn
            # To what is public the program may have added something, and that it can take back.
            known = replace(known, are_free=False)
        try:
            cut = cut_of(link, way.code(turn), known, way.words(turn))
            if cut is not None and cut.sets_none and (trace := way.traceback_behind(turn)) is not None:
                # The program may still ask for the exception, or whether there is one.
                turn, link = trace, way.links[trace]
                cut = cut_of(link, way.code(turn), known, way.words(turn))
            if is_ground and cut is not None and cut.sets_none:
                return None, turn
        except Refused:
            return None, turn
        if cut is not None or link.kind in ("frame-local", "thread"):
            # Running code that holds something should let go of all of it; what lies behind is only a part.
            return cut, turn
    return None, len(way.links)


def _is_only_traceback(link: Link) -> bool:
    """Return whether an edge leads to the traceback of an exception that has no other exception in it."""
    if link.edge != ".__traceback__" or not is_a(link.owner, BaseException):
        return False
    chained = (BaseException.__dict__[name].__get__(link.owner) for name in ("__context__", "__cause__"))
    return all(exception is None for exception in chained)


def _is_part_of_librarys_object(links: Sequence[Link], turn: int) -> bool:
    """Return whether a link's container is one that an instance of a library's class fills itself, and needs."""
    link = links[turn]
    if link.kind != "instance-attribute" or turn + 1 >= len(links) or not library_objects.library_of(link.owner):
        return False
    return any(type(links[turn + 1].owner) is kind for kind in (list, dict, set, deque))


class _Homes:
    """By step, the module whose code made what it starts from, that of the root, and by which name it is known there.

    It is that of the nearest object of a class of the program's own; containers and libraries' types identify nothing.

    Args:
        path: from the root of the process on.
    """

    def __init__(self, path: Path) -> None:
        self._steps = path.steps
        self._root = sys.modules.get(path.root_name) if path.root_kind == "module" else None
        self._found: list[tuple[ModuleType | None, str]] = [(None, "")]

    def __call__(self, turn: int) -> tuple[ModuleType | None, ModuleType | None, str]:
        """Return the two modules and the name."""
        while len(self._found) <= turn:
            step = self._steps[len(self._found) - 1]
            home, name = self._found[-1]
            name = step.edge[1:] if step.edge.startswith(".") else name
            own = _own_module(step.type_name)
            self._found.append((home if own is None else own, name))
        home, name = self._found[turn]
        return self._root if home is None else home, self._root, name


def _own_module(type_name: str) -> ModuleType | None:
    """Return the module of a class, by the class's name, where it is the program's own."""
    module = type_name.rpartition(".")[0]
    while module and module not in sys.modules:  # a class within a class
        module = module.rpartition(".")[0]
    return sys.modules[module] if module and not is_library(module) else None
