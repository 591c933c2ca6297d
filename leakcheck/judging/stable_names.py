"""What stays the same of a thing's name from run to run and from machine to machine, so that a fingerprint can have it.

Numbers, addresses, process ids, descriptor numbers and temporary folders say nothing about which leak it is. What has
no name of its own but one that the interpreter or a library has made up (`Thread-7`, a socket, `psm_1f0a93bc`) is known
by its type only: its fingerprint then also says in which test module it leaked, and where it was allocated.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from lowtide.leakcheck.resources import resource_of
from lowtide.leakcheck.resources.names import UUIDS, Name, without_numbers
from lowtide.probes.heap.roots import is_library
from lowtide.probes.objects.foreign import MISSING, attribute, is_a, type_name
from lowtide.probes.objects.thread_names import thread_key
from lowtide.probes.originals import contents, loaded, os, temporary_folder, threading

_MADE_UP_THREADS = re.compile(
    r"(Thread|Dummy)-\d+( \(.*\))?|ThreadPoolExecutor-\d+_\d+|asyncio_\d+|QueueFeederThread|QueueManagerThread"
)
_MADE_UP_PROCESSES = re.compile(r"(\w*Process|\w*PoolWorker)-[\d:]+")
_MADE_UP_SEGMENTS = re.compile(
    r"(psm_|wnsm_|sem\.mp-|sem\.loky-|mp-|pym-|torch_|nccl-|cuda\.shm\.|__KMP_REGISTERED_LIB_)[\w.-]*"
)
# What pytest calls `tmp_path`, wherever `--basetemp` is.
_FOLDER_OF_A_TEST = re.compile(r"/(test_\w*\d(/.*)?)$")
_TMP = ("*", "tmp*")
_PYTESTS_OWN = re.compile(r"pytest-of-[^/]*/pytest-[^/]*/(popen-gw\d+/)?")
# What `tempfile` adds to a prefix.
_RANDOM = re.compile(r"[a-z0-9_]{8}(?=(\.\w+)?$)")


@dataclass(frozen=True)
class Identity:
    """Some things of one resource.

    Attributes:
        names: what they are called, without what changes from run to run; each once, sorted.
        are_named: whether each of them has a name that somebody gave it.
    """

    names: tuple[str, ...] = ()
    are_named: bool = False


def identity_of(key: str, items: Iterable[str]) -> Identity:
    """The identity of some things, by their names in the counters.

    Args:
        key: a metric's key, or its resource: `threads`, `native cuda:0`.
        items: the names, as the counters or a snapshot have them.
    """
    resource = resource_of(key)
    name_of = _NAMERS.get(key.partition(" ")[0], _tagged) if resource is None else resource.identity
    found = [name_of(item) for item in items]
    return Identity(tuple(sorted({name.text for name in found})), bool(found) and all(name.is_given for name in found))


def _thread(item: str) -> Name:
    """`name (ident)`: the name if somebody gave it, its class, and what it runs if that is the program's own."""
    given = item.rpartition(" (")[0] or item
    name = "" if _MADE_UP_THREADS.fullmatch(given) else without_numbers(given)
    thread = next((known for known in threading.enumerate() if thread_key(known) == item), None)
    if thread is None:
        return Name(name or without_numbers(given), bool(name))
    cls = type_name(type(thread))
    runs = next((text for key in ("_target", "function") if (text := _function(attribute(thread, key)))), "")
    is_own = any(text and not is_library(text) for text in (cls, runs))
    return Name(" ".join(filter(None, [cls, runs, name])), bool(name) or is_own)


def _function(item: Any) -> str:
    """Module and qualified name of a function, or of what else can be called the class; empty if there is nothing."""
    while is_a(item, functools.partial):
        item = functools.partial.__dict__["func"].__get__(item)
    if item is MISSING or item is None:
        return ""
    if type(item) is MethodType:
        return _function(item.__func__)
    if type(item) is FunctionType or type(item) is BuiltinFunctionType:
        module = item.__module__ if type(item.__module__) is str else ""
        return without_numbers(f"{module}.{item.__qualname__}")
    return type_name(type(item))


def _process(item: str) -> Name:
    """A child's process id, or id and name: the name that multiprocessing has for it, or else its command line."""
    pid, _, name = item.partition(" ")
    if name:
        return Name(without_numbers(name))
    module: Any = loaded("multiprocessing.process")
    for child in () if module is None else list(module._children):
        if str(attribute(attribute(child, "_popen"), "pid")) == pid:
            given = attribute(child, "_name")
            if type(given) is not str or _MADE_UP_PROCESSES.fullmatch(given):
                return Name(type_name(type(child)), not is_library(type_name(type(child))))
            return Name(without_numbers(given))
    words = _command_line(pid)
    if not words or words == _command_line("self"):
        return Name("fork", is_given=False)
    program = re.sub(r"^python[\d.]*$", "python", os.path.basename(words[0]))
    arguments = [without_numbers(re.sub(r"/[^\s'\"]+", lambda found: _path(found[0]).text, word)) for word in words[1:]]
    return Name(" ".join([program, *arguments]))


def _command_line(pid: str) -> list[str]:
    try:
        text = contents(f"/proc/{pid}/cmdline").decode(errors="replace")
    except OSError:  # it ended meanwhile
        return []
    return text.rstrip("\0").split("\0") if text else []


def _descriptor(item: str) -> Name:
    """`number -> target`: the path of a file; of a socket, a pipe and the like the kind."""
    target = item.partition(" -> ")[2].removesuffix(" (deleted)")
    if target.startswith("/dev/shm/"):
        return _segment(target.removeprefix("/dev/shm/"))
    if target.startswith("/"):
        return _path(target)
    return Name(target.partition(":[")[0] if target.endswith("]") and target[-2].isdigit() else target, is_given=False)


def _path(text: str) -> Name:
    """A path from the working directory, the temporary folder or the user's own folder, wherever these are."""
    of_test = _FOLDER_OF_A_TEST.search(text)
    if of_test is not None:
        return Name(without_numbers(f"<tmp>/{of_test[1]}"))
    places = {"<tmp>": temporary_folder(), "<var-tmp>": "/var/tmp", "~": os.environ.get("HOME", ""), ".": _here()}
    inside = [word for word, place in places.items() if len(place) > 1 and text.startswith(f"{place}/")]
    if not inside:
        return Name(without_numbers(re.sub(r"^.*/(site|dist)-packages/", "<packages>/", text)))
    word = max(inside, key=lambda word: len(places[word]))
    rest = text[len(places[word]) + 1 :]
    if not word.startswith("<"):
        return Name(without_numbers(f"{word}/{rest}"))
    if _PYTESTS_OWN.match(rest):
        return Name(without_numbers(f"{word}/{_PYTESTS_OWN.sub('', rest, count=1)}"))
    first, slash, behind = rest.partition("/")
    kept = _RANDOM.sub("*", UUIDS.sub("*", first))
    return Name(without_numbers(f"{word}/{kept}{slash}{behind}"), bool(behind) or kept.partition(".")[0] not in _TMP)


def _here() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return ""


def _segment(item: str) -> Name:
    """An entry of /dev/shm."""
    made_up = _MADE_UP_SEGMENTS.fullmatch(item)
    return Name(f"{made_up[1]}*", is_given=False) if made_up else Name(without_numbers(item))


def _setting(item: str) -> Name:
    """`name was …, is …`."""
    return Name(without_numbers(re.sub(r" was .*", "", item, flags=re.DOTALL)))


def _cached(item: str) -> Name:
    """`type at 0x… in cache`."""
    return Name(without_numbers(re.sub(r" at 0x[0-9a-f]+", "", item)))


def _tagged(item: str) -> Name:
    """`tag at 0x…`, of announced memory."""
    return Name(without_numbers(re.sub(r" at 0x[0-9a-f]+", "", item)))


def _unnamed(item: str) -> Name:
    """`block at 0x…`, `SomeTensor 140…`: what it is, and nothing more."""
    return Name(without_numbers(re.sub(r" (at )?0x[0-9a-f]+", "", item)), is_given=False)


_NAMERS: dict[str, Callable[[str], Name]] = {
    "threads": _thread,
    "processes": _process,
    "file-descriptors": _descriptor,
    "shared-memory": _segment,
    "temporary-files": _path,
    "globals": _setting,
    "lru-cache": _cached,
    "native": _unnamed,
    "workspaces": _unnamed,
    "in-flight": _unnamed,
    "driver": _unnamed,
    "allocations": _unnamed,
    "reserved": _unnamed,
    "unreadable": _unnamed,
    "gc-frozen": _unnamed,
    "tensors": _unnamed,
}
