"""Process-wide settings by name, as text, each read in microseconds: Python's, its standard library's and numpy's.

What is a setting at all is here, too: those of torch, and what stands in the place of functions, have modules beside.
"""

from __future__ import annotations

import _locale
import _tracemalloc
import contextlib
import copyreg
import ctypes
import faulthandler
import functools
import importlib
import itertools
import operator
import time
import warnings
from collections.abc import Callable, Mapping
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import msgspec

from lowtide.probes.objects.described import LIBRARYS, described, identified, is_installed_module, is_librarys, is_tools
from lowtide.probes.objects.foreign import TOOLS_OF_MONITORING, is_a, module_of_class, mro_of, namespace_of, type_name
from lowtide.probes.originals import contents, gc, loaded, logging, os, resource, signal, sys, threading

Text = Callable[[Any], str]


class Value(msgspec.Struct, frozen=True):
    """One setting that is always there.

    Attributes:
        name: the expression that reads it.
        read: reads what is safe to compare: numbers, strings, identities.
        text: of what was read; code, where there is code for it.
    """

    name: str
    read: Callable[[], Any]
    text: Text = repr


class Values:
    """Settings that are always there while their library is."""

    def __init__(self, *values: Value, libraries: Mapping[str, Callable[[Any], list[Value]]] | None = None) -> None:
        self._own = list(values)
        self._libraries = libraries or {}
        self._bound: dict[str, tuple[Any, list[Value]]] = {}
        self._all = self._own
        self._readers = _once(self._own)

    def raw(self) -> object:
        """Return what they are."""
        for name, bind in self._libraries.items():
            module = loaded(name)
            if module is not self._bound.get(name, (None,))[0]:
                self._bind(name, module, bind)
        try:
            return [read() for read in self._readers]
        except Exception:  # noqa: BLE001 - a library that cannot be asked now, in whatever way
            return [_read(value) for value in self._all]

    def texts(self) -> dict[str, str]:
        """Return each by its name; those that cannot be read are left out."""
        read = ((value, _read(value)) for value in self._all)
        return {value.name: value.text(found) for value, found in read if found is not _UNREADABLE}

    def _bind(self, name: str, module: Any, bind: Callable[[Any], list[Value]]) -> None:
        self._bound.pop(name, None)
        if module is not None and is_loaded(module):
            # What a test has put in a library's place may have none of its functions.
            with contextlib.suppress(AttributeError):
                self._bound[name] = (module, bind(module))
        self._all = [*self._own, *(value for _, values in self._bound.values() for value in values)]
        self._readers = _once(self._all)


def _once(values: list[Value]) -> list[Callable[[], Any]]:
    """Return what reads the values; some read several of them."""
    return list(dict.fromkeys(value.read for value in values))


_UNREADABLE = "unreadable"


def _read(value: Value) -> Any:
    try:
        return value.read()
    except Exception:  # noqa: BLE001 - a library that cannot be asked now, in whatever way
        return _UNREADABLE


def is_loaded(module: object) -> bool:
    """Return whether it is a module, no stand-in, and its import is over."""
    if not any(base is ModuleType for base in mro_of(type(module))):
        return False
    return getattr(vars(module).get("__spec__"), "_initializing", False) is False


TRACING = "tracemalloc.is_tracing()"

checkers_own: set[str] = set()
"""Settings that the checker itself has changed for a while: they are read as they were before."""


def interpreter_values() -> Values:
    """Return what a runner, or a plugin of it, may set between two tests: the interpreter's settings, what it calls."""
    return Values(
        Value("gc.get_threshold()", gc.get_threshold, str),
        Value("gc.isenabled()", gc.isenabled),
        Value("gc.get_debug()", gc.get_debug),
        Value("sys.getrecursionlimit()", sys.getrecursionlimit),
        Value("sys.getswitchinterval()", sys.getswitchinterval),
        Value("os.getcwd()", _cwd),
        Value("faulthandler.is_enabled()", faulthandler.is_enabled),
        Value("sys.get_coroutine_origin_tracking_depth()", sys.get_coroutine_origin_tracking_depth),
        Value("sys.argv", _arguments),
        Value("sys.get_asyncgen_hooks()", _hooks_of_generators, lambda _: _described_hooks()),
        Value("sys.dont_write_bytecode", lambda: sys.dont_write_bytecode is True),
        Value("time.tzname", lambda: time.tzname),
        _object("sys.excepthook", lambda: sys.excepthook),
        _object("sys.unraisablehook", lambda: sys.unraisablehook),
        _object("sys.displayhook", lambda: sys.displayhook),
        _object("sys.breakpointhook", lambda: sys.breakpointhook),
        _object("threading.excepthook", lambda: threading.excepthook),
        _object("sys.gettrace()", sys.gettrace),
        _object("sys.getprofile()", sys.getprofile),
        _object("threading.gettrace()", threading.gettrace),
        _object("threading.getprofile()", threading.getprofile),
        *_monitoring_tools(),
        _object("logging.getLoggerClass()", logging.getLoggerClass, _class),
        _object("logging.getLogRecordFactory()", logging.getLogRecordFactory, _class),
        Value("logging.root.manager.disable", lambda: logging.root.manager.disable, str),
        Value("logging.raiseExceptions", lambda: logging.raiseExceptions is True),
    )


def _object(name: str, get: Callable[[], Any], text: Text = described) -> Value:
    """Return a setting that is an object, compared by its identity: what it leads to is not kept."""
    return Value(name, lambda: id(get()), lambda _: text(get()))


def _arguments() -> list[str]:
    """Return the command line's words, as far as they are texts."""
    words = sys.argv
    return [word for word in words if type(word) is str] if type(words) is list else []


def _hooks_of_generators() -> tuple[int, ...]:
    """Return the identities: a loop of asyncio sets them while it runs."""
    return tuple(map(id, sys.get_asyncgen_hooks()))


def _described_hooks() -> str:
    return "(" + ", ".join(map(described, sys.get_asyncgen_hooks())) + ")"


def _monitoring_tools() -> list[Value]:
    """Return the tools that hear of the interpreter's events, from Python 3.12 on: cProfile is one."""
    monitoring: Any = getattr(sys, "monitoring", None)
    if monitoring is None:
        return []

    def named(number: int) -> str | None:
        tool = monitoring.get_tool(number)
        # A class of texts may have a comparison of its own.
        return None if tool is None else str.__str__(tool)

    return [
        Value(f"sys.monitoring.get_tool({number})", functools.partial(named, number))
        for number in range(TOOLS_OF_MONITORING)
    ]


def process_values() -> Values:
    """Return the limits of the process and the like: the kernel is asked for nearly each, and no runner sets them."""
    return Values(
        Value("sys.get_int_max_str_digits()", getattr(sys, "get_int_max_str_digits", int)),
        Value("os.getpriority(os.PRIO_PROCESS, 0)", functools.partial(os.getpriority, os.PRIO_PROCESS, 0)),
        Value("sys.getdlopenflags()", sys.getdlopenflags),
        Value("the child subreaper", _is_subreaper),
        *(
            Value(f"resource.getrlimit(resource.{name})", functools.partial(resource.getrlimit, number))
            for name in _LIMITS
            if (number := getattr(resource, name, None)) is not None
        ),
    )


_LIMITS = ("RLIMIT_NOFILE", "RLIMIT_CORE", "RLIMIT_AS", "RLIMIT_DATA", "RLIMIT_STACK", "RLIMIT_MEMLOCK", "RLIMIT_NPROC")


def library_values() -> Values:
    """Return the settings of the standard library, where it is loaded, of numpy and of cupy."""
    return Values(
        Value("threading.stack_size()", _stack_size),
        # Built into the interpreter: a test that imports what sets them has not imported them.
        Value("locale.setlocale(locale.LC_ALL)", functools.partial(_locale.setlocale, _locale.LC_ALL)),
        Value(TRACING, lambda: _tracemalloc.is_tracing() and TRACING not in checkers_own),
        libraries={
            "decimal": _decimal,
            "socket": lambda module: [Value("socket.getdefaulttimeout()", module.getdefaulttimeout)],
            "multiprocessing.context": lambda module: [
                Value("multiprocessing.get_start_method()", lambda: _start_method(module))
            ],
            "numpy": _numpy,
            "asyncio.events": lambda module: [Value("asyncio.get_event_loop_policy()", lambda: _policy(module), str)],
            # By its identity: to keep an allocator keeps its pool.
            "cupy.cuda.memory": lambda module: [_object("cupy.cuda.get_allocator()", module.get_allocator, identified)],
        },
    )


def _stack_size() -> int:
    """Return the stack size of new threads, which asking for it sets to the default: it is set again."""
    size = threading.stack_size()
    if size:
        threading.stack_size(size)
    return size


_PR_GET_CHILD_SUBREAPER = 37
_prctl: Any = getattr(ctypes.CDLL(None), "prctl", None)
_answer = ctypes.c_int()
_place_of_answer = ctypes.byref(_answer)


def _is_subreaper() -> int:
    """Return whether children of ended children become this process's; -1 where the kernel does not say."""
    failed = _prctl is None or _prctl(_PR_GET_CHILD_SUBREAPER, _place_of_answer, 0, 0, 0)
    return -1 if failed else _answer.value


def _cwd() -> str:
    try:
        return os.getcwd()
    except OSError:
        return "a folder that is gone"


def _decimal(module: Any) -> list[Value]:
    get = module.getcontext
    parts = ("prec", "rounding", "Emin", "Emax", "capitals", "clamp")
    read = operator.attrgetter(*parts)

    def context() -> tuple[Any, ...]:
        found = get()
        return (*read(found), *found.traps.values())

    def traps(_: object) -> str:
        return "[" + ", ".join(trap.__name__ for trap, is_set in get().traps.items() if is_set) + "]"

    values = [Value(f"decimal.getcontext().{part}", context, _part(place)) for place, part in enumerate(parts)]
    return [*values, Value("decimal.getcontext().traps", context, traps)]


def _part(place: int) -> Text:
    return lambda found: repr(found[place])


def _start_method(module: Any) -> str:
    # As `multiprocessing.get_start_method()`, which would settle it.
    context = module._default_context
    actual = context._actual_context
    return str((context._default_context if actual is None else actual)._name)


def _policy(module: Any) -> str:
    # As `asyncio.get_event_loop_policy()`, which would make one.
    policy = vars(module).get("_event_loop_policy")
    name = type_name(type(policy))
    return "default" if policy is None or name.endswith("DefaultEventLoopPolicy") else name


def _numpy(module: Any) -> list[Value]:
    geterr, options, call = module.geterr, module.get_printoptions, module.geterrcall

    def printing() -> tuple[tuple[str, object], ...]:
        return tuple((name, value if type(value) in _PLAIN else id(value)) for name, value in options().items())

    shown = [
        Value(f"numpy.get_printoptions()[{name!r}]", printing, _part_of_options(name))
        for name, value in options().items()
        if type(value) in _PLAIN
    ]
    return [
        Value("numpy.geterr()", lambda: tuple(geterr().items()), lambda items: str(dict(items))),
        _object("numpy.geterrcall()", call),
        *shown,
    ]


_PLAIN = (bool, int, float, str, type(None))


def _part_of_options(name: str) -> Text:
    return lambda found: repr(dict(found)[name])


def _class(item: Any) -> str:
    """Say which class it is, or what makes objects in place of one."""
    is_installed = is_a(item, type) and is_installed_module(module_of_class(item)) and item is not logging.Logger
    return LIBRARYS + identified(item) if is_installed and item is not logging.LogRecord else described(item)


_ENVIRON: Any = type(os.environ)


class Environment:
    """Environment variables, as Python knows them."""

    def raw(self) -> object:
        """Return the variables, but for the one in which pytest says what runs."""
        variables: Any = os.environ
        if type(variables) is not _ENVIRON:
            return id(variables)
        data: dict[bytes, bytes] = dict(variables._data)
        for name in (b"PYTEST_CURRENT_TEST", *_RENDEZVOUS):
            data.pop(name, None)
        return data

    def texts(self) -> dict[str, str]:
        """Return each variable's value as code; what replaced `os.environ` by its name."""
        data = self.raw()
        if not isinstance(data, dict):
            return {}
        return {f"os.environ[{os.fsdecode(name)!r}]": repr(os.fsdecode(value)) for name, value in data.items()}


class ModuleSearchPath:
    """The entries of `sys.path`."""

    def raw(self) -> object:
        """Return the entries in their order."""
        path = sys.path
        return [entry for entry in path if type(entry) is str] if type(path) is list else id(path)

    def texts(self) -> dict[str, str]:
        """Return each entry once, whatever its place."""
        entries = self.raw()
        return {f"sys.path entry {entry!r}": "there" for entry in entries} if isinstance(entries, list) else {}


class Finders:
    """The entries of `sys.meta_path` and `sys.path_hooks` that are the program's own: libraries add theirs for good."""

    def raw(self) -> object:
        """Return their identities."""
        return [tuple(map(id, found)) if type(found) is list else id(found) for _, found in self._lists()]

    def texts(self) -> dict[str, str]:
        """Return each by what it is."""
        return {
            f"{name} entry {identified(item)}": "there"
            for name, found in self._lists()
            for item in (found if type(found) is list else ())
            if not is_of_library(item)
        }

    def _lists(self) -> list[tuple[str, Any]]:
        return [("sys.meta_path", sys.meta_path), ("sys.path_hooks", sys.path_hooks)]


def is_of_library(item: Any) -> bool:
    """Return whether a function, a class or an object is an installed library's, or a tool's that runs tests."""
    if is_librarys(item):
        return True
    module = item.__module__ if type(item) in (FunctionType, BuiltinFunctionType) else None
    if module is None:
        module = module_of_class(item if is_a(item, type) else type(item))
    return type(module) is not str or module in ("builtins", "zipimport") or is_installed_module(module)


class Signals:
    """The handlers of the standard signals."""

    def __init__(self) -> None:
        self._numbers = sorted(number for number in signal.valid_signals() if number < _FIRST_REAL_TIME_SIGNAL)

    def raw(self) -> object:
        """Return the identities of the handlers."""
        return tuple(map(id, map(HANDLER_OF, self._numbers)))

    def texts(self) -> dict[str, str]:
        """Return each handler by its signal's name."""
        return {
            f"signal.getsignal(signal.{_SIGNAL_NAMES[number]})": _handler(HANDLER_OF(number))
            for number in self._numbers
            if number in _SIGNAL_NAMES
        }


_FIRST_REAL_TIME_SIGNAL = 32
# Of the module in C: the one in Python looks for a name of the handler each time.
# Where the processes of a group meet: whoever uses torch.distributed sets these, and reads what stands there.
_RENDEZVOUS = (b"MASTER_ADDR", b"MASTER_PORT", b"RANK", b"WORLD_SIZE", b"LOCAL_RANK", b"LOCAL_WORLD_SIZE")
_SIGNALS: Any = importlib.import_module("_signal")
HANDLER_OF: Any = _SIGNALS.getsignal
_SIGNAL_NAMES = {int(each): each.name for each in signal.Signals}
_DEFAULT_HANDLERS = {int(signal.SIG_DFL): "signal.SIG_DFL", int(signal.SIG_IGN): "signal.SIG_IGN"}


def _handler(handler: object) -> str:
    if handler is signal.default_int_handler:
        return "signal.default_int_handler"
    if handler is None:
        return "one that Python did not set"
    for value, name in _DEFAULT_HANDLERS.items():
        if type(handler) is int and handler == value:
            return name
    return described(handler)


class Timers:
    """The interval timers that are armed, but for those that a tool that runs tests hears of: time limits."""

    def raw(self) -> object:
        """Return which are armed, and who hears of them."""
        return [(_TIMER_OF(number)[0] > 0, id(HANDLER_OF(sent))) for number, sent in _TIMERS.values()]

    def texts(self) -> dict[str, str]:
        """Return each by its name."""
        return {
            f"interval timer {name}": "armed"
            for name, (number, sent) in _TIMERS.items()
            if _TIMER_OF(number)[0] > 0 and not is_librarys(HANDLER_OF(sent))
        }


_TIMER_OF: Any = _SIGNALS.getitimer
_TIMERS = {
    f"signal.{timer}": (int(getattr(signal, timer)), int(getattr(signal, sent)))
    for timer, sent in (("ITIMER_REAL", "SIGALRM"), ("ITIMER_VIRTUAL", "SIGVTALRM"), ("ITIMER_PROF", "SIGPROF"))
}


class Reducers:
    """What `copyreg.pickle` has registered that is the program's own."""

    def raw(self) -> object:
        """Return the identities of the classes and of the functions."""
        table = copyreg.dispatch_table
        return (*map(id, table), *map(id, table.values())) if type(table) is dict else id(table)

    def texts(self) -> dict[str, str]:
        """Return each by its class."""
        table = copyreg.dispatch_table
        return {
            f"copyreg.dispatch_table entry {identified(cls)}": "there"
            for cls, function in (table.items() if type(table) is dict else ())
            if not is_of_library(function)
        }


class Subinterpreters:
    """The interpreters besides the first one, once something is loaded that makes any."""

    def raw(self) -> object:
        """Return their numbers."""
        return [number for _, number in self._listed()]

    def texts(self) -> dict[str, str]:
        """Each by the module that ends it and its number."""
        return {f"interpreter {number} of {name}": "there" for name, number in self._listed()}

    def _listed(self) -> list[tuple[str, int]]:
        for name in _INTERPRETERS:
            listed: Any = getattr(loaded(name), "list_all", None)
            if listed is not None:
                # A number, or from Python 3.13 on a pair that begins with one; the first one is the program's.
                numbers = (int(item[0]) if type(item) is tuple else int(item) for item in listed())
                return [(name, number) for number in numbers if number]
        return []


_INTERPRETERS = ("_interpreters", "_xxsubinterpreters")
"""The modules that make interpreters, from Python 3.13 on and before."""


class Filters:
    """The warnings filters, but for those that came with the module that defines their category.

    An installed library adds them as it is imported (sympy does), and a reader cannot see who imported it:
    another thread, or the checker in the middle of a reading.
    """

    def __init__(self) -> None:
        self._seen: set[str] | None = None
        self._with_modules: set[str] = set()
        # Modules come to the end of `sys.modules`: those behind this many came since the filters were as last seen.
        self._modules = 0
        self._raw: object = None

    def raw(self) -> object:
        """Return their identities."""
        filters = warnings.filters
        raw = tuple(map(id, filters)) if type(filters) is list else id(filters)
        if raw == self._raw:
            self._modules = len(sys.modules)
        self._raw = raw
        return raw

    def texts(self) -> dict[str, str]:
        """Return each filter by what it says."""
        filters: Any = warnings.filters
        if type(filters) is not list:
            return {}
        found = {_filter(entry): entry for entry in filters if type(entry) is tuple}
        if self._seen is not None:
            new = [text for text in found if text not in self._seen]
            came = set(itertools.islice(sys.modules, self._modules, None)) if new else set()
            self._with_modules.update(text for text in new if _module_of(found[text]) in came)
        self._seen, self._modules = set(found), len(sys.modules)
        return {f"warnings filter {text}": "there" for text in found if text not in self._with_modules}


def _module_of(entry: tuple[Any, ...]) -> str:
    """Return the module that defines a filter's category, if it is an installed one; else empty."""
    category = entry[2] if len(entry) > 2 else None
    module = module_of_class(category) if type(category) is type else ""
    return module if is_installed_module(module) else ""


def _filter(entry: tuple[Any, ...]) -> str:
    action, message, category, module, _ = (*entry, *(None,) * 5)[:5]
    parts = [str(action) if type(action) is str else "?"]
    parts += [repr(pattern) for part in (message, module) if (pattern := getattr(part, "pattern", part)) is not None]
    parts.insert(1, f"{category.__module__}.{category.__qualname__}" if type(category) is type else "a category")
    return "(" + ", ".join(parts).replace("builtins.", "") + ")"


class CollectorCallbacks:
    """What is called before and after each garbage collection."""

    def raw(self) -> object:
        """Return their identities."""
        return tuple(map(id, gc.callbacks))

    def texts(self) -> dict[str, str]:
        """Return each by its name."""
        return {f"gc.callbacks entry {described(item)}": "there" for item in list(gc.callbacks)}


class KernelStatus:
    """What the kernel says of the main thread: the umask, which processors it may run on, which signals it blocks.

    From /proc: asking for the umask would change it for a moment, for every thread.

    Args:
        status: gives the kernel's /proc/self/status; default: it is read.
    """

    def __init__(self, status: Callable[[], bytes] | None = None) -> None:
        self._status = status or functools.partial(contents, "/proc/self/status")

    def raw(self) -> object:
        """Return the lines about them; nothing where /proc does not show it."""
        try:
            status = self._status()
            return tuple(_line(status, name) for name in (b"\nUmask:", b"\nCpus_allowed:", b"\nSigBlk:"))
        except (OSError, ValueError):  # not this kernel
            return ()

    def texts(self) -> dict[str, str]:
        """Return the umask in octal digits, the others as sets."""
        raw: Any = self.raw()
        if not raw:
            return {}
        umask, processors, blocked = raw
        return {
            "umask": f"{int(umask, 8):#o}",
            "os.sched_getaffinity(0)": _members(processors.replace(b",", b""), 0),
            "signal.pthread_sigmask(signal.SIG_BLOCK, ())": _members(blocked, 1),
        }


def _line(status: bytes, name: bytes) -> bytes:
    start = status.index(name) + len(name)
    return status[start : status.index(b"\n", start)].strip()


def _members(mask: bytes, first: int) -> str:
    """Return the places of the bits of a mask in hexadecimal digits, as code."""
    number = int(mask, 16)
    return repr({place + first for place in range(number.bit_length()) if number >> place & 1})


class Loggers:
    """The levels and handlers of all loggers, and whether they are switched off or propagate.

    What an installed library's logger has when it is first seen is the library's own, as of a library that sets its
    logger up when it is first used. So is a handler that the library's own class formats, or is; and what else its
    loggers, and the levels' names, have got together with such a handler, as `uvicorn.Config` sets all of that at once.

    There may be a thousand loggers.  So none but the root and its next are looked at while nothing says that another
    one may have changed: `setLevel` and `disable` empty what each logger remembers, so also what this module's own
    logger does; and a handler that is new, or gone, is in the module's list of all of them.  What goes past both is
    seen with the next change: a handler that is kept and moved between loggers further down, an assignment to `level`,
    `disabled` or `propagate`.
    """

    def __init__(self) -> None:
        self._count = -1
        self._places: list[str] = []
        self._placeholders: list[object] = []
        self._loggers: list[tuple[str, logging.Logger]] = []
        self._next: list[logging.Logger] = []
        self._changes = 0
        self._known: set[str] | None = None
        self._seen: dict[str, tuple[list[int], bool, bool]] = {}
        self._levels_given: dict[str, int] = {}
        self._handlers_given: dict[str, frozenset[int]] = {}
        self._disabled_given: set[str] = set()
        self._kept_given: set[str] = set()
        self._names_given: dict[int, str] = {}
        self._names: set[int] = set(_names_of_levels())
        self._own_handlers: set[int] = set()

    def raw(self) -> object:
        """Return what says that a level or a handler may have changed."""
        known: dict[str, Any] = logging.root.manager.loggerDict
        if len(known) != self._count or any(map(operator.is_not, map(known.get, self._places), self._placeholders)):
            self._list(known)
        if not _own_logger._cache:
            self._changes += 1
            _own_logger.isEnabledFor(logging.DEBUG)
        try:
            handlers = tuple(map(id, itertools.chain.from_iterable(map(_HANDLERS, self._next))))
        except TypeError:  # something else stands where one had a list of them
            handlers = ()
        names = _names_of_levels()
        return (
            len(self._loggers),
            self._changes,
            logging.root.level,
            handlers,
            tuple(map(id, itertools.chain.from_iterable(map(_SWITCHES, self._next)))),
            tuple(map(id, _all_handlers())),
            tuple(names),
            tuple(map(id, names.values())),
        )

    def texts(self) -> dict[str, str]:
        """Return each level that is set, each handler, and the names that `logging.addLevelName` has given."""
        self._take_configured()
        found = {
            f"name of logging level {level}": repr(name)
            for level, name in _names_of_levels().items()
            if self._names_given.get(level) != name and type(level) is int and type(name) is str
        }
        for name, logger in self._loggers:
            level, handlers = _LEVEL(logger), _HANDLERS(logger)
            identities = list(map(id, handlers)) if type(handlers) is list else []
            disabled, propagate = logger.disabled is True, logger.propagate is not False
            seen = (identities, disabled, propagate)
            if self._seen.setdefault(name, seen) != seen and id(logger) not in map(id, self._next):
                # What has changed once may change again with nothing to say so: it is looked at from now on.
                self._next.append(logger)
                self._changes += 1
            self._seen[name] = seen
            shown = "logging.root" if logger is logging.root else f"logging.getLogger({name!r})"
            if disabled and name not in self._disabled_given:
                found[f"disabled of {shown}"] = "True"
            if not propagate and name not in self._kept_given:
                found[f"propagate of {shown}"] = "False"
            if level and type(level) is int and level != self._levels_given.get(name):
                found[f"level of {shown}"] = str(level)
            for handler in handlers if type(handlers) is list else ():
                if id(handler) in self._handlers_given.get(name, ()) or is_tools(type(handler)):
                    continue
                if _is_of_same_library(handler, name):
                    continue
                if type(handler) is not logging.NullHandler:
                    found[f"handler {_handler_name(handler)} of {shown} at {id(handler):#x}"] = "there"
        return found

    def _take_configured(self) -> None:
        """Take what has changed together with a new handler of a library's own on its loggers for the library's."""
        own = {
            id(handler): name.partition(".")[0]
            for name, logger in self._loggers
            for handler in (_HANDLERS(logger) if type(_HANDLERS(logger)) is list else ())
            if _is_of_same_library(handler, name)
        }
        configured = {top for identity, top in own.items() if identity not in self._own_handlers}
        names = _names_of_levels()
        if configured and self._known is not None:
            for name, logger in self._loggers:
                if name.partition(".")[0] in configured:
                    self._give(name, logger)
            self._names_given.update((level, name) for level, name in names.items() if level not in self._names)
        self._own_handlers, self._names = set(own), set(names)

    def _give(self, name: str, logger: logging.Logger) -> None:
        """Note a library's logger's level and switches as the library's own."""
        self._levels_given[name] = _LEVEL(logger)
        self._disabled_given.update([name] if logger.disabled is True else ())
        self._kept_given.update([name] if logger.propagate is False else ())

    def _list(self, known: Mapping[str, Any]) -> None:
        self._count = len(known)
        # A logger takes the place of what stands for it while only its children are there.
        waiting = {name: item for name, item in known.items() if type(item) is logging.PlaceHolder}
        self._places, self._placeholders = list(waiting), list(waiting.values())
        # One class of loggers may have properties of its own: nothing of it is to run.
        plain = {cls for cls in set(map(type, known.values())) if _is_plain(cls)}
        self._loggers = [("", logging.root), *((name, item) for name, item in known.items() if type(item) in plain)]
        kept = set(map(id, self._next))
        self._next = [logger for name, logger in self._loggers if "." not in name or id(logger) in kept]
        names = {name for name, _ in self._loggers}
        if self._known is not None:
            for name, logger in self._loggers:
                if name not in self._known and is_installed_module(name):
                    self._give(name, logger)
                    self._handlers_given[name] = frozenset(map(id, _HANDLERS(logger)))
        self._known = names


def _is_of_same_library(handler: Any, logger: str) -> bool:
    """Return whether a handler, or its formatter, is of the library whose logger has it.

    torch takes its lazy one away when it is first used; uvicorn formats its own with each configuration.
    """
    top = logger.partition(".")[0]
    formatter = vars(handler).get("formatter") if is_a(handler, logging.Handler) else None
    classes = (type(handler), type(formatter))
    is_own = any(module_of_class(cls).partition(".")[0] == top for cls in classes)
    return is_own and top not in ("", "logging") and is_installed_module(top)


_own_logger: Any = logging.getLogger("lowtide")


def _names_of_levels() -> Mapping[int, str]:
    """Return the names of levels by their numbers; none where something else stands there."""
    names: Any = logging._levelToName
    return names if type(names) is dict else {}


def _all_handlers() -> list[object]:
    return logging._handlerList  # type: ignore[attr-defined,no-any-return]


_LEVEL = operator.attrgetter("level")
_HANDLERS = operator.attrgetter("handlers")
_SWITCHES = operator.attrgetter("disabled", "propagate")


def _is_plain(cls: type) -> bool:
    bases = mro_of(cls)
    own = {name for base in bases if base is not object for name in namespace_of(base)}
    return logging.Logger in bases and not own & {
        "level",
        "handlers",
        "disabled",
        "propagate",
        "__getattribute__",
        "__getattr__",
    }


def _handler_name(handler: Any) -> str:
    cls = type(handler)
    file = vars(handler).get("baseFilename") if logging.FileHandler in mro_of(cls) else None
    return f"{cls.__module__}.{cls.__qualname__}" + (f"({file!r})" if type(file) is str else "")


REPLACED = "replaced "
"""How the name of a setting begins that is an attribute, or an entry of `sys.modules`, in whose place is another."""

_ENTRIES = (
    "os.environ[",
    "sys.path entry ",
    "sys.meta_path entry ",
    "sys.path_hooks entry ",
    "gc.callbacks entry ",
    "handler ",
    "level of ",
    "name of logging level ",
    "copyreg.dispatch_table entry ",
    "interval timer ",
    "interpreter ",
    "disabled of ",
    "propagate of ",
    "warnings filter ",
    "torch dispatch mode ",
    "torch function mode ",
    "torch hook ",
    REPLACED,
)


def is_entry(name: str) -> bool:
    """Return whether a setting is one of many of its kind, so that it may be added or removed.

    Of any other one that a reading does not have it is not known what it was: its library was not there yet.
    """
    return name.startswith(_ENTRIES)
