"""Writes the Python expression that leads to an object on a path, or says that there is none.

A remedy that is printed has to run as it stands.  So each step is written only where it is known to give what the path
says: past methods that the program has overridden by those of the built-in type, and never by running any of them.
"""

from __future__ import annotations

import dis
import itertools
import re
import sys
from collections import OrderedDict, deque
from collections.abc import Callable
from contextvars import copy_context
from types import (
    CellType,
    CodeType,
    CoroutineType,
    FunctionType,
    GeneratorType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    ModuleType,
)
from typing import Any

from lowtide.probes.heap.paths import Link, Path
from lowtide.probes.heap.roots import is_library
from lowtide.probes.objects.described import constant_text
from lowtide.probes.objects.foreign import (
    LRU_CACHE,
    MISSING,
    attribute,
    code_of,
    dict_of_module,
    has_plain_hash,
    instance_dict,
    is_a,
    is_callable,
    module_of_class,
    mro_of,
    namespace_of,
    place_of_definition,
    type_name,
)
from lowtide.probes.originals import loaded, threading
from lowtide.probes.references.edges import UNNAMED
from lowtide.probes.references.entries import is_name
from lowtide.probes.references.unseen_references import reader_of

_LONGEST_KEY = 200
_DEEPEST_KEY = 8
_NAME = re.compile(r"\.([^\W\d]\w*)")
# Edges that fold nothing, and are attributes which Python itself or torch gives their owner.
_ATTRIBUTES = frozenset(
    {"__base__", "__bases__", "__dict__", "__func__", "__mro__", "__self__", "__wrapped__", "cr_await", "grad_fn"}
    | {"ag_await", "gi_yieldfrom"}
)
_FRAMES: dict[int, str] = {id(GeneratorType): "gi_frame", id(CoroutineType): "cr_frame"}


def of_root(path: Path, root: object) -> str | None:
    """Return what a path begins at, as code."""
    if path.root_kind == "module":
        return of_module(path.root_name)
    if path.root_kind == "class":
        return of_definition(root)
    if path.root_kind == "context":
        alike = [variable for variable in copy_context() if variable.name == path.root_name]
        search = f"variable for variable in contextvars.copy_context() if variable.name == {path.root_name!r}"
        return f"next({search})" if len(alike) == 1 else None
    if path.root_kind == "thread":
        return of_thread(path.root_name)
    if path.root_kind == "object" and all(map(is_name, path.root_name.split("."))):
        return path.root_name
    return None


def of_thread(name: str) -> str:
    """Return a running thread, as code."""
    return f"next(thread for thread in threading.enumerate() if thread.name == {name!r})"


def of_module(name: str) -> str:
    """Return a module that is loaded, as code that runs where it, or `sys`, is imported."""
    parts = name.split(".")
    whole = parts[0]
    for part in parts[1:]:
        package = sys.modules.get(whole)
        whole = f"{whole}.{part}"
        if package is None or not is_a(package, ModuleType) or not _is_bound(package, part, sys.modules.get(whole)):
            return f"sys.modules[{name!r}]"
    return name if all(map(is_name, parts)) else f"sys.modules[{name!r}]"


def of_definition(item: object) -> str | None:
    """Return a class or function, by the name that it has in its module."""
    place = place_of_definition(item)
    if place is None or not all(map(is_name, place[1].split("."))):
        return None
    module, names = place
    return names if module == "builtins" else f"{of_module(module)}.{names}"


def of_cache(cache: Any) -> str | None:
    """Return a `functools.lru_cache`, by the name that holds it: in the module of its function, or in any other.

    The function's own name may stand for the function itself, where the cache was made of it under another one.
    """
    module = cache.__module__
    places = [sys.modules.get(module)] if type(module) is str else []
    for place in [*places, *list(sys.modules.values())]:
        if place is None or not is_a(place, ModuleType):
            continue
        for name, value in list(dict_of_module(place).items()):
            if value is cache and is_name(name):
                home = attribute(place, "__name__")
                return f"{of_module(home)}.{name}" if type(home) is str and sys.modules.get(home) is place else None
            if is_a(value, type) and module_of_class(value) == module:
                for entry, held in list(namespace_of(value).items()):
                    if held is cache and is_name(entry) and (owner := of_definition(value)) is not None:
                        return f"{owner}.{entry}"
    return None


def of_public_global(item: object) -> tuple[str, str] | None:
    """Return the public name of a public module that an object is the value of, as code, and that module's name."""
    for name, module in list(sys.modules.items()):
        if type(name) is not str or name == "__main__" or any(part.startswith("_") for part in name.split(".")):
            continue
        if module is not None and is_a(module, ModuleType):
            for key, value in list(dict_of_module(module).items()):
                if value is item and is_name(key) and not key.startswith("_"):
                    return f"{of_module(name)}.{key}", name
    return None


def one_step(code: str, link: Link) -> str | None:
    """Return what a link leads to, as code.

    Args:
        code: the link's owner, as code.
        link: the edge.
    """
    return next((text for write in _WRITERS if (text := write(code, link)) is not None), None)


def entry_of(code: str, entries: Any, held: int) -> str | None:
    """Return the entry of a dict, or of a read-only view of one, as code: by its key if that can be written down.

    Args:
        code: the dict or view.
        entries: the dict itself.
        held: the identity of what it holds.
    """
    place, key = next(
        ((place, key) for place, (key, value) in enumerate(dict.items(entries)) if id(value) == held), (-1, MISSING)
    )
    text = None if place < 0 else key_of(code, entries, place, key)
    return None if text is None else _subscript(code, entries, text)


def key_of(code: str, entries: Any, place: int, key: object) -> str | None:
    """Return a key of a dict as code: as a literal, by the name of a class or function, or by its place.

    None for a key that only its place identifies and that runs the program's code when it is hashed; an ordered dict
    may hash all of them.
    """
    literal = _literal(key)
    if literal is not None:
        return literal
    hashed = dict.keys(entries) if is_a(entries, OrderedDict) else (key,)
    if not all(map(has_plain_hash, hashed)):
        return None
    return f"{listed(code, entries)}[{place}]"


def call(code: str, item: object, method: str, *arguments: str) -> str:
    """Return a call of a special method past an override of the program's own: `dict.__delitem__(x, 'a')`."""
    return f"{_built_in(item)}.{method}({', '.join((code, *arguments))})"


def past_override(plain: str, code: str, item: object, method: str, *arguments: str) -> str:
    """Return code that does what a special method of an object does: `plain`, or a `call` where that is overridden."""
    return plain if is_plain(type(item), method) else call(code, item, method, *arguments)


def is_plain(cls: type, method: str) -> bool:
    """Return whether a special method of a class is the interpreter's, or a library's that this project knows."""
    for base in mro_of(cls):
        if method in namespace_of(base):
            return base is object or module_of_class(base) == "builtins" or is_library(module_of_class(base))
    return True


def attribute_of(code: str, owner: object, name: str) -> str:
    """Return an attribute as code, past a `__getattribute__` of the program's own."""
    if is_plain(type(owner), "__getattribute__"):
        return f"{code}.{name}"
    base = "type" if is_a(owner, type) else "types.ModuleType" if is_a(owner, ModuleType) else "object"
    return f"{base}.__getattribute__({code}, {name!r})"


def _literal(key: object, deepest: int = _DEEPEST_KEY) -> str | None:
    if any(type(key) is kind for kind in (str, bytes, int, bool, type(None))):
        text = constant_text(key)
        return text if len(text) <= _LONGEST_KEY else None
    if type(key) is float:
        text = repr(key)
        return text if re.fullmatch(r"-?[\d.]+(e[-+]?\d+)?", text) else None
    if type(key) is tuple:
        parts = [_literal(part, deepest - 1) if deepest else None for part in key]
        if any(part is None for part in parts):
            return None
        return f"({', '.join(map(str, parts))}{',' if len(parts) == 1 else ''})"
    return of_definition(key) if type(key) is type or type(key) is FunctionType else None


def _subscript(code: str, entries: object, key: str) -> str:
    return past_override(f"{code}[{key}]", code, entries, "__getitem__", key)


def listed(code: str, items: object) -> str:
    """Return a container's keys or items, as code, in a list."""
    return f"list({past_override(code, code, items, '__iter__')})"


def _built_in(item: object) -> str:
    """Return the type whose methods do what the container's would, if the program had not overridden them."""
    kinds = ((OrderedDict, "collections.OrderedDict"), (dict, "dict"), (list, "list"), (deque, "collections.deque"))
    others = (
        (tuple, "tuple"),
        (set, "set"),
        (frozenset, "frozenset"),
        (ModuleType, "types.ModuleType"),
        (type, "type"),
    )
    return next((name for kind, name in (*kinds, *others) if is_a(item, kind)), "object")


def _is_bound(module: ModuleType, name: str, value: object) -> bool:
    return value is not None and dict_of_module(module).get(name) is value


def _of_module(code: str, link: Link) -> str | None:
    if link.kind != "module-global" or not is_a(link.owner, ModuleType):
        return None
    name = link.edge[1:]
    if is_name(name):
        return attribute_of(code, link.owner, name)
    return entry_of(f"{code}.__dict__", dict_of_module(link.owner), link.held)


def _of_class(code: str, link: Link) -> str | None:
    if link.kind != "class-attribute":
        return None
    name, namespace = link.edge[1:], namespace_of(link.owner)
    if not is_name(name):
        return None
    value = namespace.get(name)
    gives_itself = type(value) is FunctionType or type(value) is LRU_CACHE or not _has(type(value), "__get__")
    if gives_itself and not any(name in namespace_of(base) for base in mro_of(type(link.owner))):
        return attribute_of(code, link.owner, name)
    return f"{attribute_of(code, link.owner, '__dict__')}[{name!r}]"


def _of_function(code: str, link: Link) -> str | None:
    if type(link.owner) is not FunctionType:
        return None
    if link.kind == "closure":
        cells = link.owner.__closure__ or ()
        wanted, rest = (id(link.carrier), ".cell_contents") if type(link.carrier) is CellType else (link.held, "")
        place = next((place for place, cell in enumerate(cells) if id(cell) == wanted), None)
        return None if place is None else f"{code}.__closure__[{place}]{rest}"
    if link.kind == "module-global":
        return entry_of(f"{code}.__globals__", link.owner.__globals__, link.held)
    if link.kind == "default":
        if link.edge.startswith(".__kwdefaults__["):
            return entry_of(f"{code}.__kwdefaults__", link.carrier, link.held)
        return f"{code}{link.edge}"
    return None


def _of_suspended(code: str, link: Link) -> str | None:
    frame = _FRAMES.get(id(type(link.owner)))
    return f"{code}.{frame}.{link.edge}" if link.kind == "generator-local" and frame is not None else None


def _of_attribute(code: str, link: Link) -> str | None:
    """Return an attribute of an instance; what a `torch.nn.Module` has registered is one too."""
    if link.kind not in ("instance-attribute", "bound-self", "thread", "other"):
        return None
    for registry in ("_parameters", "_buffers", "_modules"):
        if link.kind == "instance-attribute" and link.carrier is attribute(link.owner, registry):
            asks = "__getattr__" if link.edge.startswith(".") else "__getitem__"
            if is_plain(type(link.owner), asks) and is_plain(type(link.owner), "__getattribute__"):
                return f"{code}{link.edge}"
            return entry_of(f"{attribute_of(code, link.owner, registry)}", link.carrier, link.held)
    named = _NAME.fullmatch(link.edge)
    if named is None or link.edge == UNNAMED or not is_name(named[1]):
        entries = _entries_of(link)
        if link.kind == "instance-attribute" and link.edge.startswith(".__dict__[") and entries is not None:
            return entry_of(attribute_of(code, link.owner, "__dict__"), entries, link.held)
        return None
    name = named[1]
    if link.kind == "other" and name == "__class__":
        return f"type({code})"
    if link.kind == "other" and name not in _ATTRIBUTES:
        return None
    if is_a(link.owner, threading.local) and not is_this_threads(link):
        return None
    if _is_shadowed(type(link.owner), name) and _entries_of(link) is not None:
        return f"{attribute_of(code, link.owner, '__dict__')}[{name!r}]"
    return attribute_of(code, link.owner, name)


def _entries_of(link: Link) -> dict[Any, object] | None:
    """Return the `__dict__` in which an instance's attribute lies."""
    return link.carrier if type(link.carrier) is dict else instance_dict(link.owner)


def is_this_threads(link: Link) -> bool:
    """Return whether an edge of a `threading.local` is of the thread that asks."""
    cls = type(link.owner)
    # A subclass with an `__init__` of its own would run it where this thread has not used it yet.
    if cls is not threading.local and any("__init__" in namespace_of(base) for base in mro_of(cls)[:-2]):
        return False
    return threading.local.__getattribute__(link.owner, "__dict__") is link.carrier


def _of_item(code: str, link: Link) -> str | None:
    if link.kind != "item":
        return None
    items: Any = link.carrier
    is_view = type(link.owner) is MappingProxyType
    if items is not link.owner and not is_view:
        return None
    if is_a(items, dict):
        if not link.edge.startswith("<key"):
            return entry_of(code, items, link.held)
        place = next((place for place, key in enumerate(dict.keys(items)) if id(key) == link.held), None)
        return None if place is None else f"{listed(code, items)}[{place}]"
    for base in (list, tuple, deque):
        if is_a(items, base):
            return _subscript(code, items, link.edge[1:-1]) if re.fullmatch(r"\[\d+\]", link.edge) else None
    for kind in (set, frozenset):
        # The order of several is unknown in another run.
        if is_a(items, kind) and kind.__len__(items) == 1:
            return f"next(iter({code}))" if is_plain(type(items), "__iter__") else f"{listed(code, items)}[0]"
    return None


def _of_unseen(code: str, link: Link) -> str | None:
    """Return what an object does not show the collector: an array's base and objects, a future's result."""
    is_view = type(link.owner) is memoryview and link.edge == ".obj"
    if not is_view and (link.edge == UNNAMED or reader_of(type(link.owner), thorough=True) is None):
        return None
    asks = "__getitem__" if link.kind == "item" else "__getattribute__"
    return f"{code}{link.edge}" if is_plain(type(link.owner), asks) else None


def _of_variable(code: str, link: Link) -> str | None:
    return f"{code}.get()" if link.kind == "context-variable" and link.edge == ".get()" else None


def _has(cls: type, name: str) -> bool:
    return any(name in namespace_of(base) for base in mro_of(cls))


def _is_shadowed(cls: type, name: str) -> bool:
    """Return whether the class answers for an attribute by something of its own, whatever the instance's dict has."""
    for base in mro_of(cls):
        if name in namespace_of(base):
            kind = type(namespace_of(base)[name])
            is_slot = kind is MemberDescriptorType or kind is GetSetDescriptorType
            return not is_slot and (_has(kind, "__set__") or _has(kind, "__delete__"))
    return False


_WRITERS: tuple[Callable[[str, Link], str | None], ...] = (
    _of_module,
    _of_class,
    _of_function,
    _of_suspended,
    _of_attribute,
    _of_item,
    _of_unseen,
    _of_variable,
)


_NAMES = (
    *("shutdown", "terminate", "close", "stop", "cancel", "destroy", "term", "disconnect", "release"),
    *("cleanup", "aclose", "dispose", "quit"),
)
_COROUTINES = 0x80 | 0x200
"""The flags of a coroutine's and of an asynchronous generator's code."""

_VARIABLE_ARGUMENTS = 0x04

_OF_SEMAPHORES = (".synchronize", "multiprocessing.sharedctypes")
"""Modules of multiprocessing, and of who derives from it, whose `release` opens a lock, and ends no semaphore."""


def class_named(name: str) -> type | None:
    """Return the class of a name such as `package.module.Class`; None where its module does not have it."""
    module, _, rest = name.rpartition(".")
    while module and module not in sys.modules:
        module, _, rest = module.rpartition(".")[0], "", f"{module.rpartition('.')[2]}.{rest}"
    item: Any = sys.modules.get(module)
    for part in rest.split("."):
        # Under the name of a function in which a class was made there may be anything by now.
        if is_a(item, ModuleType):
            item = dict_of_module(item).get(part)
        else:
            item = namespace_of(item).get(part) if is_a(item, type) else None
    return item if is_a(item, type) else None


_ITSELF = "ITSELF"
"""Stands in an ending for what it is the end of."""

END_OF_RUNNING_LOOP = f"call_soon_threadsafe({_ITSELF}.stop), join its thread and close() it"
"""That of a loop of asyncio: while it runs `close` raises, and `stop` alone is heard by its own thread only."""

END_OF_FULL_QUEUE = f"get() for each that nobody has taken, then {_ITSELF}.close()"
"""That of a queue of multiprocessing: of a shared tensor in it, who has sent it keeps memory or a descriptor."""

END_OF_SHARED_MEMORY = f"close() and {_ITSELF}.unlink()"
"""That of shared memory: closed it keeps its name, unlinked its descriptors."""


def _is_ended_process(instance: object) -> bool:
    """Return whether it is a process of multiprocessing that was joined: what is left of it are its pipes."""
    module = loaded("multiprocessing.process")
    if module is None or not is_a(instance, module.BaseProcess):
        return False
    popen = attribute(instance, "_popen")
    return popen is not None and attribute(popen, "returncode") is not None


def ending_of(cls: type | None, instance: object = None) -> str:
    """Return the call that ends an instance of a class, as `stop()`, `await close()`; empty where it has none.

    Args:
        cls: the class; None: it is not known.
        instance: one that may have a call of its own, as a manager of multiprocessing has its `shutdown`.
    """
    if cls is None:
        return ""
    names: dict[str, object] = {}
    for base in mro_of(cls):
        for name, value in namespace_of(base).items():
            names.setdefault(name, value)
    for name in _NAMES if instance is not None else ():
        if name not in names and is_callable(own := attribute(instance, name)):
            names[name] = own
    if "run_forever" in names and type(attribute(instance, "_thread_id")) is int:
        return END_OF_RUNNING_LOOP
    if _is_ended_process(instance):
        return "close()"
    if _is_full_queue(instance):
        return END_OF_FULL_QUEUE
    # What has a descriptor of its own is closed; `shutdown` of a socket takes an argument and ends no descriptor.
    endings = ["close", *_NAMES] if "fileno" in names else [*_NAMES]
    if module_of_class(cls).endswith(_OF_SEMAPHORES):
        endings.remove("release")
    if "close" in names and "unlink" in names:
        # Shared memory that is closed keeps its name in /dev/shm, and its pages with that.
        endings = ["unlink", *endings]
    name = next((ending for ending in endings if names.get(ending) is not None), "")
    # What calls another one does more: `cleanup` of aiohttp's runners shuts down, and closes what that leaves.
    # (But one that wants arguments is no better advice.)
    while broader := next((each for each in endings if name and _calls_plainly(names.get(each), name)), ""):
        endings = [each for each in endings if each != name]
        name = broader
    return f"{_call(name, names[name])}" if name else ""


def _is_full_queue(instance: object) -> bool:
    """Return whether something was put into a queue of multiprocessing that nobody has taken out of it."""
    limit, lock = attribute(instance, "_maxsize"), attribute(attribute(instance, "_sem"), "_semlock")
    read: Any = namespace_of(type(lock)).get("_get_value")
    is_lock = type_name(type(lock)) == "_multiprocessing.SemLock"
    return type(limit) is int and is_lock and bool(read(lock) < limit)


def ends_part(cls: type | None, name: str) -> bool:
    """Return whether the call that ends an instance of a class has to do with an attribute of its."""
    ending = ending_of(cls).removeprefix("await ").partition("(")[0]
    functions = (namespace_of(base).get(ending) for base in (mro_of(cls) if cls is not None else ()))
    return any(name in code_of(each).co_names for each in functions if type(each) is FunctionType)


def _calls_plainly(function: object, name: str) -> bool:
    """Return whether a method that needs no arguments calls another one of the same object."""
    if type(function) is not FunctionType or "…" in _call(name, function):
        return False
    code = code_of(function)
    steps = list(dis.get_instructions(code))
    first = code.co_varnames[:1]
    return any(
        attribute.argval == name and loading.opname.startswith("LOAD_FAST") and first == (_last(loading.argval),)
        for loading, attribute in itertools.pairwise(steps)
    )


def _last(loaded: object) -> object:
    """Return the variable that an instruction has loaded last, of two since Python 3.12."""
    return loaded[-1] if type(loaded) is tuple else loaded


def on(code: str, ending: str) -> str:
    """Return the call of an ending on an object that is given as code."""
    if ending.startswith("await "):
        return f"await {code}.{ending.removeprefix('await ')}"
    return f"{code}.{ending.replace(_ITSELF, code)}"


def all_of(ending: str) -> str:
    """Return an ending for objects that no code leads to, as part of a sentence."""
    return ending.replace(f"{_ITSELF}.", "")


def ended(code: str, ending: str) -> str:
    """Return the advice to end an object that is given as code, with its ending if one is known."""
    if not ending:
        return f"end {code} in teardown"
    call = on(code, ending)
    return f"{call} in teardown" if call.startswith("await ") else f"call {call} in teardown"


def _call(name: str, function: object) -> str:
    if type(function) is not FunctionType:
        return f"{name}()"
    code: CodeType = code_of(function)
    needed = code.co_argcount - len(function.__defaults__ or ())
    arguments = "…" if needed > 1 and not code.co_flags & _VARIABLE_ARGUMENTS else ""
    return f"{'await ' if code.co_flags & _COROUTINES else ''}{name}({arguments})"
