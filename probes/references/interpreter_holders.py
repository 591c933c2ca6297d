"""What the interpreter and torch hold in C, with the name of each: signal handlers, trace functions, mode stacks."""

from __future__ import annotations

import atexit
import builtins
import codecs
import ctypes
import encodings
import functools
import sys as sys_module
from collections.abc import Callable, Iterator
from typing import Any

from lowtide.probes.objects.address_table import Ints
from lowtide.probes.objects.foreign import TOOLS_OF_MONITORING, described, is_a, type_name
from lowtide.probes.objects.identities import object_at
from lowtide.probes.original_numpy import np
from lowtide.probes.originals import loaded, os, signal, sys, threading

_WORD = 8
_STATE_BYTES = 1 << 20
"""Of the interpreter's state are read at most so many; all that is looked for lies in its first half."""

_NEAR = 1024
"""Words."""

_LINK = -16
"""Where an object that the collector may track has its link to the next one; zero while it is not tracked."""

_MONITORED = 8 * 20
"""Words: a function of each of eight tools for each event, of which CPython 3.12 has seventeen."""

_MOST_HOOKS = 1000

_MOST_EXIT_FUNCTIONS = 10_000


def named_holders() -> Iterator[tuple[str, object]]:
    """Yield each object that C holds and that can be asked for, with what it is asked by; this thread's of each.

    Takes some tens of microseconds.
    """
    for number in range(1, signal.NSIG):
        handler = signal.getsignal(number)
        if handler is not None and not is_a(handler, int):
            yield f"signal.getsignal({_signal_name(number)})", handler
    for name, function in (("sys.getprofile()", sys.getprofile()), ("sys.gettrace()", sys.gettrace())):
        if function is not None:
            yield name, function
    hooks = sys.get_asyncgen_hooks()
    for part, hook in (("firstiter", hooks.firstiter), ("finalizer", hooks.finalizer)):
        if hook is not None:
            yield f"sys.get_asyncgen_hooks().{part}", hook
    error = sys.exc_info()[1]
    if error is not None:
        yield "sys.exc_info()[1]", error
    yield from _torchs_holders()


def exit_functions() -> list[tuple[str, object]]:
    """Return what `atexit` has registered, with the arguments of each, and the names of all of it."""
    return [named for entry in exit_entries() if entry for named in _exit_function(*entry)]


def exit_entries() -> list[list[object]]:
    """Return the places that `atexit` has given out; empty where the interpreter's memory cannot be read.

    No function lists them, so they are looked for in the interpreter's state, by their number and their types: there is
    an array of so many pointers to a function, a tuple and, maybe, a dict. (As CPython 3.10 to 3.13 have it.) It is
    read by way of the kernel, which refuses an address that is not mapped.

    Returns:
        Of each, in their order, the function, its arguments and, if there are any, those by name; nothing of one whose
        function is registered no more.
    """
    count = atexit._ncallbacks()
    if not 0 < count <= _MOST_EXIT_FUNCTIONS:
        return []
    try:
        file = os.open("/proc/self/mem", os.O_RDONLY)
    except OSError:
        return []
    try:
        state = interpreter_words(file)
        # The number of entries, and of those that there is room for, share the word behind the array's address.
        fits = (state[1:] & 0xFFFFFFFF == count) & (state[1:] >> 32 >= count)
        for place in np.flatnonzero(fits).tolist():
            found = _callbacks(file, int(state[place]), count)
            # (An array of zeros looks like one of which all are unregistered.)
            if found and any(found):
                return found
    finally:
        os.close(file)
    return []


def interpreter_words(file: int) -> Ints:
    """Return the words of the interpreter's state, as many as can be read.

    Args:
        file: the process's memory, `/proc/self/mem`.
    """
    address = ctypes.pythonapi.PyInterpreterState_Get
    address.restype = ctypes.c_void_p
    return _read(file, int(address()), _STATE_BYTES)


class InterpretersTables:
    """Names what only the interpreter's own tables hold, by what else is in them; they are read when first asked."""

    def of(self, item: Any) -> str:
        """Return the function that puts an object into such a table, as code; empty where it is in none."""
        if type(item) is dict:
            strict = dict.get(item, "strict") if all(type(key) is str for key in dict.keys(item)) else None
            return "codecs.register_error()" if strict is codecs.strict_errors else ""
        if type(item) is list:
            if any(entry is encodings.search_function for entry in item):
                return "codecs.register()"
            known = (threading._after_fork, *_at_fork_of_logging())  # type: ignore[attr-defined]
            return "os.register_at_fork()" if any(entry is each for entry in item for each in known) else ""
        if id(item) in self._audit_hooks:
            return f"sys.addaudithook({described(item)})"
        return f"sys.monitoring.register_callback({described(item)})" if id(item) in self._monitoring else ""

    @functools.cached_property
    def _audit_hooks(self) -> frozenset[int]:
        """The identities of the functions that hear of audit events: a list that the collector is not shown.

        It is looked for among what the interpreter's state refers to near the namespace of `sys`, or near the class
        `ExceptionGroup`: the allocator's state, which is large, lies between the two in CPython 3.12.
        """
        # Python 3.10 has no such class.
        marks = (vars(sys_module), vars(builtins).get("ExceptionGroup", sys.modules))

        def found(file: int, state: Ints) -> Iterator[int]:
            anchors = [place for mark in marks for place in np.flatnonzero(state == id(mark))[:1].tolist()]
            near = [word for place in anchors for word in state[max(0, place - _NEAR) : place + _NEAR].tolist()]
            for word in dict.fromkeys(near):
                yield from _items_of_hidden_list(file, word)

        return _found_in_state(found)

    @functools.cached_property
    def _monitoring(self) -> frozenset[int]:
        """The identities of the functions that `sys.monitoring` calls, while there is a tool of it.

        In the interpreter's state the array of all tools' functions lies before the names of the tools.
        """
        get: Any = getattr(getattr(sys, "monitoring", None), "get_tool", None)
        tools = [tool for number in range(TOOLS_OF_MONITORING) if (tool := get(number)) is not None] if get else []

        def found(_: int, state: Ints) -> Iterator[int]:
            for place in (place for tool in tools for place in np.flatnonzero(state == id(tool)).tolist()):
                yield from state[max(0, place - _MONITORED) : place].tolist()

        return _found_in_state(found) if tools else frozenset()


def _found_in_state(find: Callable[[int, Ints], Iterator[int]]) -> frozenset[int]:
    """Return what is found in the words of the interpreter's state; nothing where memory may not be read.

    Args:
        find: gives it, from an open descriptor of the process's memory and these words.
    """
    try:
        file = os.open("/proc/self/mem", os.O_RDONLY)
    except OSError:
        return frozenset()
    try:
        return frozenset(find(file, interpreter_words(file)))
    finally:
        os.close(file)


def _at_fork_of_logging() -> tuple[object, ...]:
    logging = loaded("logging")
    return tuple(
        getattr(logging, name, None) for name in ("_acquireLock", "_releaseLock", "_prepareFork", "_afterFork")
    )


def _callbacks(file: int, array: int, count: int) -> list[list[object]] | None:
    """Return function and arguments of each entry of an array of exit functions; None if it is no such array."""
    entries = _read(file, array, count * _WORD)
    if len(entries) < count:
        return None
    found: list[list[object]] = []
    for entry in entries.tolist():
        if not entry:
            found.append([])
            continue
        words = _read(file, entry, 3 * _WORD)
        if len(words) < 3:
            return None
        function, arguments, keywords = words.tolist()
        if (
            not _is(file, arguments, tuple)
            or (keywords and not _is(file, keywords, dict))
            or not _is_object(file, function)
        ):
            return None
        found.append([object_at(item) for item in (function, arguments, keywords) if item])
    return found


def _exit_function(function: object, *arguments: object) -> Iterator[tuple[str, object]]:
    name = f"atexit.register({described(function)})"
    yield name, function
    yield from ((f"{name} with", item) for item in arguments)


def _items_of_hidden_list(file: int, address: int) -> list[int]:
    """Return the addresses of what is in a list that the collector does not track; none if none lies there.

    Only words are read: of what lies there nobody knows that it is alive.
    """
    if not _is(file, address, list):
        return []
    before, (_, _, size, items) = _read(file, address + _LINK, _WORD), _read(file, address, 4 * _WORD)
    if len(before) != 1 or before[0] or not 0 < size <= _MOST_HOOKS:
        return []
    return [int(word) for word in _read(file, int(items), int(size) * _WORD)]


def _is(file: int, address: int, kind: type) -> bool:
    """Return whether an object of a type lies at an address, and is referred to."""
    words = _read(file, address, 4 * _WORD)
    return len(words) == 4 and int(words[0]) > 0 and int(words[1]) == id(kind)


def _is_object(file: int, address: int) -> bool:
    """Return whether what lies at an address has a type, which is a class."""
    words = _read(file, address, 2 * _WORD)
    kinds = _read(file, int(words[1]), 2 * _WORD) if len(words) == 2 and int(words[0]) > 0 else words[:0]
    return len(kinds) == 2 and (int(kinds[1]) == id(type) or _is(file, int(kinds[1]), type))


def _read(file: int, address: int, size: int) -> Ints:
    """Words of this process's memory; fewer than asked for, or none, where nothing is mapped."""
    if address <= 0 or address % _WORD:
        return np.zeros(0, np.int64)
    try:
        data = os.pread(file, size, address)
    except (OSError, OverflowError):
        return np.zeros(0, np.int64)
    return np.frombuffer(data, np.int64, len(data) // _WORD)


def _signal_name(number: int) -> str:
    try:
        return f"signal.{signal.Signals(number).name}"
    except ValueError:  # one of those without a name
        return str(number)


def _torchs_holders() -> Iterator[tuple[str, object]]:
    """Yield the modes that are entered, and the hooks that pack what graphs save."""
    torch: Any = loaded("torch")
    of_c = getattr(torch, "_C", None)
    stacks = (
        ("dispatch", "torch.utils._python_dispatch._get_current_dispatch_mode_stack()"),
        ("function", "torch.overrides._get_current_function_mode_stack()"),
    )
    for stack, name in stacks:
        count: Any = getattr(of_c, f"_len_torch_{stack}_stack", None)
        at: Any = getattr(of_c, f"_get_{stack}_stack_at", None)
        for place in range(count()) if count and at else ():
            mode = at(place)
            if not type_name(type(mode)).startswith("lowtide."):
                yield f"{name}[{place}]", mode
    hooks = getattr(getattr(of_c, "_autograd", None), "_top_saved_tensors_default_hooks", None)
    # The innermost only: those below it show themselves when it has gone.
    pair = hooks(True) if hooks is not None else None
    for place, hook in enumerate(pair or ()):
        yield f"torch._C._autograd._top_saved_tensors_default_hooks(True)[{place}]", hook
