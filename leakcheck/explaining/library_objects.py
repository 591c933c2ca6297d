"""Tells what on a path belongs to an installed library, and so is not to be changed but by what the library offers.

Inside is what a library keeps under a private name, in a closure or in C.  What is public may be added to by anybody,
and what the program has added it may take back.
"""

from __future__ import annotations

import functools
import re
import sysconfig
from collections.abc import Callable, Sequence
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import msgspec

from lowtide.probes.heap.paths import Link
from lowtide.probes.heap.roots import is_library
from lowtide.probes.objects.foreign import (
    attribute,
    dict_of_module,
    is_a,
    is_definition,
    module_of_class,
    mro_of,
    type_name,
)
from lowtide.probes.originals import loaded, os, threading, weakref
from lowtide.probes.references.edges import names_in_class

_DUNDER = re.compile(r"__\w+__")
# Instances of these have no names but those that the program gives them.
_BARE = (threading.local, SimpleNamespace, BaseException)
FINALIZER = vars(weakref.finalize)["_Info"]
"""The type of what `weakref.finalize` keeps of each object whose end it waits for."""

# Where a project keeps its package; what is installed under that name is the project's own.
_SOURCES = (".", "src")


class Territory(msgspec.Struct, frozen=True):
    """Whose something on a path is.

    Attributes:
        shared: the installed library whose module, class or function it belongs to; empty if it is the program's own,
            as an instance of a library's class is that the program has made.
        inside: the library that a private name, a closure or a part in C was passed of on the way; empty if none was.
    """

    shared: str = ""
    inside: str = ""

    @property
    def is_librarys(self) -> bool:
        """Return whether it is not the program's own."""
        return bool(self.shared or self.inside)

    @property
    def is_ground(self) -> bool:
        """Return whether it is the interpreter's, torch's or the test runner's, which a process needs to its last step.

        Of another library, as an engine that is installed, what a leak added is taken out like the program's own: when
        no test follows, and only where the name had no other value before.
        """
        return is_library(self.shared) or is_library(self.inside)


def territories(root: str, links: Sequence[Link]) -> list[Territory]:
    """Return, for each step of a path, the library that owns its object, and that whose inside the path entered.

    Args:
        root: the module that the path begins at; empty if it begins elsewhere.
        links: its steps with their objects.
    """
    found: list[Territory] = []
    library = shared = inside = ""
    if root and is_installed(root):
        library = shared = top_of(root)
        inside = library if any(part.startswith("_") for part in root.split(".")) else ""
    for link in links:
        own = library_of(link.owner)
        library = library if own is None else own
        if own == "" or (own and is_definition(link.owner)):
            shared = own
        if _is_private(link):
            inside = inside or library or _library_of_private(link)
        found.append(Territory(shared, inside))
    return found


def library_of(owner: object) -> str | None:
    """Return the installed library that an object, or its class, is a part of: empty for the program's own.

    None where the object says nothing of that: a container is whose what holds it is.
    """
    if is_a(owner, ModuleType):
        name = dict_of_module(owner).get("__name__")
        return _library(name) if type(name) is str else None
    if type(owner) is FunctionType:
        return _library(owner.__module__) if type(owner.__module__) is str else None
    cls: Any = owner if is_a(owner, type) else type(owner)
    if cls is not owner and any(base is kind for base in mro_of(cls)[:1] for kind in _BARE):
        return ""
    module = module_of_class(cls)
    if cls is not owner and module in ("builtins", "collections", "functools", "types", "_contextvars"):
        return None
    if cls is not owner and any(base is BaseException for base in mro_of(cls)):
        return ""
    return _library(module)


def advice_for(library: str, owners: Sequence[object], words: str) -> str:
    """Return what to do about something that lies inside a library.

    Args:
        library: its name.
        owners: the objects on the path to it.
        words: the path to it, for a reader.
    """
    known = known_advice(words)
    bases = (type_name(base) for owner in reversed(owners) for base in mro_of(type(owner)))
    offered = next((_OFFERED[name] for name in bases if name in _OFFERED), "")
    advice = known or offered or f"undo what put it there, by what {library} offers for that"
    return f"{words} lies inside {library}: {advice}"


def known_advice(words: str) -> str:
    """Return what takes back what lies at a path, where that is known; else empty."""
    return next((text for pattern, text in _KNOWN if pattern.fullmatch(words)), "")


class Offer(msgspec.Struct, frozen=True):
    """A call by which a library lets go of what it holds.

    Attributes:
        call: as code; after a dot where it is a method.
        changed: what is different afterwards.
        do: makes it; of the object whose method it is, None for a function.
    """

    call: str
    changed: str
    do: Callable[[Any], object]


def advice_for_root(name: str) -> str:
    """Return what to do about what the interpreter or torch holds in C, by its name; empty if unknown."""
    return next((f"{name}: {text}" for start, text in _OF_ROOTS.items() if name.startswith(start)), "")


def advice_for_finalizer(name: str, owners: Sequence[object]) -> str:
    """Return what to do about what a `weakref.finalize` holds.

    Args:
        name: the finalizer, for a reader.
        owners: the objects on the path to it and from it.
    """
    # What it keeps beside the weak reference: its function, and what that is called with.
    held: Any = next((owner for owner in owners if type(owner) is FINALIZER), None)
    function: Any = None if held is None else held.func
    origin: Any = ""
    if type(function) is MethodType:
        origin = type_name(type(function.__self__))
    elif type(function) is FunctionType:
        origin = function.__module__
    # A library keeps its finalizers to itself.
    known = next((text for pattern, text in _KNOWN if type(origin) is str and pattern.fullmatch(origin)), "")
    return f"{name} is {top_of(origin)}'s: {known}" if known else f"call detach() of {name} when what it is for is over"


_KERNELS = (
    "torch keeps what is registered for an operator for as long as the process runs, whatever becomes of its "
    "torch.library.Library: let the registered function hold no tensors, but look them up when it is called"
)
_LEAVING = "leave the mode again: use it in a with statement"
_OF_ROOTS = {
    "torch.library kernel": _KERNELS,
    "destroyed torch.library kernel": _KERNELS,
    "callback of a torch.futures.Future": (
        "complete the future with set_result() or set_exception(): until then it and its callbacks keep each other, "
        "even if nobody else has it"
    ),
    "hook of a tensor that a graph has saved": "detach what has the graph before it is kept",
    "atexit.register(": "call atexit.unregister() with the function that was registered",
    "os.register_at_fork()": (
        "Python keeps what is registered for as long as the process runs: register once, when the module is imported, "
        "a function that looks its object up, as by a weakref.WeakMethod"
    ),
    "torch._C._autograd._top_saved_tensors_default_hooks": "leave saved_tensors_hooks: use it in a with statement",
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack": _LEAVING,
    "torch.overrides._get_current_function_mode_stack": _LEAVING,
    "codecs.register()": "call codecs.unregister() with the function that was registered",
}


def offered_function(words: str) -> Offer | None:
    """Return the function that a library offers for what lies on a path."""
    if not words.startswith("unittest.mock._patch._active_patches"):
        return None
    # It undoes what `start()` of a patch does, and nothing else.
    return Offer(
        "unittest.mock.patch.stopall()",
        "all started patches are stopped",
        lambda _: loaded("unittest.mock").patch.stopall(),
    )


def offered_by_module(module: ModuleType, name: str) -> Offer | None:
    """Return the function of a library's module that empties what the module keeps in a global; None where it has none.

    It is public, needs no arguments, says by its name what it does, and mentions the global.
    """
    home = dict_of_module(module).get("__name__")
    if type(home) is not str or not _library(home):
        return None
    for function in list(dict_of_module(module).values()):
        if type(function) is not FunctionType or function.__module__ != home or not _EMPTIES.match(function.__name__):
            continue
        code, defaults = function.__code__, function.__defaults__ or ()
        if name in code.co_names and code.co_argcount == len(defaults) and not code.co_kwonlyargcount:
            return Offer(f"{home}.{function.__name__}()", f"{home}.{name} is empty", functools.partial(_call, function))
    return None


def _call(function: Callable[[], object], _: object) -> object:
    return function()


_EMPTIES = re.compile(r"(clear|reset|empty|flush|purge)(_|$)|\w+_(clear|reset|purge)$|clearcache$")
"""The names of functions that empty what their module keeps."""


def is_hook(words: str) -> bool:
    """Return whether a path leads to the function of a hook that is still registered."""
    return _HOOK.fullmatch(words) is not None


def offered_method(owner: object) -> Offer | None:
    """Return the method by which an object of the standard library ends, and with it what it holds."""
    name = type_name(type(owner))
    return next((offer for names, offer in _METHODS if name in names), None)


def offered_by_torch(module: Any, name: str, behind: str) -> tuple[str, str, str] | None:
    """Return the function of `torch.nn.utils` that takes out of a module what another one has put there.

    Args:
        module: whatever has the attribute.
        name: the attribute.
        behind: the next step of the path.

    Returns:
        The module of torch that has the function, its name, and the parameter that it is called with beside the module;
        None where nothing of torch has put the attribute there.
    """
    if name == "parametrizations" and any(module_of_class(base) == _PARAMETRIZE for base in mro_of(type(module))):
        return _PARAMETRIZE, "remove_parametrizations", behind.strip(".[']")
    hooks: Any = attribute(module, "_forward_pre_hooks")
    for hook in list(dict.values(hooks)) if is_a(hooks, dict) else ():
        names = {type_name(base) for base in mro_of(type(hook))}
        for kind, (home, function, field) in _UNDOING.items():
            parameter = attribute(hook, field)
            if kind in names and type(parameter) is str and name.startswith(parameter):
                return home, function, parameter
    return None


_UNDOING = {
    "torch.nn.utils.prune.BasePruningMethod": ("torch.nn.utils.prune", "remove", "_tensor_name"),
    "torch.nn.utils.spectral_norm.SpectralNorm": ("torch.nn.utils", "remove_spectral_norm", "name"),
    "torch.nn.utils.weight_norm.WeightNorm": ("torch.nn.utils", "remove_weight_norm", "name"),
}
"""By the class of a hook of a module: where the function is that undoes it, and what names its parameter."""

_PARAMETRIZE = "torch.nn.utils.parametrize"


_METHODS: tuple[tuple[tuple[str, ...], Offer], ...] = (
    # What waits in its queue is cancelled, and nobody waits for what runs.
    (
        ("concurrent.futures.thread.ThreadPoolExecutor", "concurrent.futures.process.ProcessPoolExecutor"),
        Offer(
            "shutdown(wait=False, cancel_futures=True)",
            "is shut down",
            lambda pool: pool.shutdown(wait=False, cancel_futures=True),
        ),
    ),
    # Its callbacks are called, as at the end of a `with` block.
    (("contextlib.ExitStack",), Offer("close()", "is closed", lambda stack: stack.close())),
)
"""By classes of the standard library, and by no class derived from one: what that does may be anything."""


_OFFERED = {
    "asyncio.queues.Queue": "take it out with get_nowait()",
    "concurrent.futures._base.Executor": "end the executor with shutdown(cancel_futures=True)",
    "_asyncio.Future": "end it with set_result() or cancel() while its loop runs, or call its remove_done_callback()",
    "asyncio.events.Handle": "keep what call_later() or call_soon() returned, and call its cancel()",
    "concurrent.futures._base.Future": "let go of the future: it keeps its result or exception, and its callbacks",
    "contextlib.ExitStack": "end the stack with close()",
    "contextlib.AsyncExitStack": "end the stack with aclose()",
    "multiprocessing.pool.Pool": "end the pool with terminate() and join()",
    "multiprocessing.util.Finalize": "call cancel() of the multiprocessing.util.Finalize that registered it",
    "selectors.BaseSelector": "call unregister() of the selector with what was registered",
    "threading.Thread": "tell the thread's function to return, and wait for it with join()",
    "threading.Timer": "end the timer with cancel()",
    "torch.jit.Future": "complete the future with set_result() or set_exception(): then it lets go of its callbacks",
}
"""By a class, what it offers to let go of what its instances keep."""

_HOOK = re.compile(r".*\._(?:\w*_)?hooks(?:_\w+)?\[[^\[\]]*\]")
HANDLE = "the hook is still registered: keep the handle that registering it returned, and call its remove()"
_KNOWN: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r".*\._(?:\w*_)?hooks(?:_\w+)?\b.*"), HANDLE),
    (
        re.compile(r"unittest\.mock\._patch\._active_patches\b.*"),
        "the patch was started and not stopped: call its stop(), or unittest.mock.patch.stopall()",
    ),
    (
        re.compile(r"multiprocessing\.util\._finalizer_registry\b.*"),
        "call cancel() of the multiprocessing.util.Finalize that registered it",
    ),
    (
        re.compile(r"multiprocessing\.resource_sharer\b.*"),
        "it waits for whoever was sent it: get() it from its queue, or call multiprocessing.resource_sharer.stop()",
    ),
    (re.compile(r"weakref\.finalize\._registry\b.*"), "call detach() of the weakref.finalize that registered it"),
    (re.compile(r"atexit\b.*"), "call atexit.unregister() with the function that was registered"),
    (
        re.compile(r"torch\.(_library|library|_ops|_C)\b.*"),
        _KERNELS,
    ),
    (
        re.compile(r"torch\.(_dynamo|_inductor|_functorch|compiler)\b.*"),
        "torch.compile keeps it: torch._dynamo.reset() drops what was compiled",
    ),
    (
        re.compile(r"torch\.distributed\.tensor\b.*"),
        "DTensor keeps its plans, and each mesh with them: "
        "torch.distributed.tensor._redistribute.clear_redistribute_planner_cache(), "
        "torch.distributed.tensor._redistribute._gen_transform_infos.cache_clear() and "
        "torch.distributed.tensor.debug._clear_sharding_prop_cache() drop them",
    ),
)
"""By a path, what its owner offers: each an entry that a program registers, and that has a way to take it back."""


def is_installed(module: str) -> bool:
    """Return whether a module is the interpreter's or an installed library's, and not the tested project's."""
    return is_library(module) or _is_installed(top_of(module))


def top_of(module: str) -> str:
    """Return the library that a module is of."""
    return module.partition(".")[0]


def _library(module: str) -> str:
    return top_of(module) if module and is_installed(module) else ""


def _library_of_private(link: Link) -> str:
    """Return the library from whose class an instance of the program's own has a private attribute; empty if from none.

    As `_forward_hooks` of a `torch.nn.Module`: that library's code mentions it.
    """
    name = link.edge[1:]
    if link.kind != "instance-attribute" or not name.isidentifier():
        return ""
    bases = (base for base in mro_of(type(link.owner)) if _library(module_of_class(base)))
    return next((_library(module_of_class(base)) for base in bases if name in names_in_class(base)), "")


def _is_private(link: Link) -> bool:
    if link.kind in ("closure", "default", "frame-local", "generator-local") or link.kind == "opaque":
        return True
    name = link.edge[1:] if link.edge.startswith(".") else ""
    return name.startswith("_") and _DUNDER.fullmatch(name.partition("[")[0]) is None


@functools.lru_cache(maxsize=4096)
def _is_installed(top: str) -> bool:
    module = loaded(top)
    file = attribute(module, "__file__") if module is not None and is_a(module, ModuleType) else None
    if type(file) is not str:
        return False
    home, name = os.path.split(file)
    home = os.path.dirname(home) if name.startswith("__init__.") else home
    if any(top in _names_in(folder) for folder in _SOURCES):
        return False
    places = {sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib", "platstdlib")}
    # Where `pip install --target` and the like put libraries, what was installed is noted beside it.
    is_noted = any(entry.endswith(".dist-info") for entry in _names_in(home))
    return home in places or os.path.basename(home) in ("site-packages", "dist-packages") or is_noted


def _names_in(folder: str) -> list[str]:
    """Return what is in a folder; nothing if it is none, or may not be read."""
    try:
        return os.listdir(folder)
    except OSError:
        return []
