"""Which code made the threads, child processes and nameless descriptors of a process: a library's or the program's."""

from __future__ import annotations

import contextlib
import multiprocessing.process
import os as os_module
import selectors
import socket
import subprocess
from collections.abc import Callable, Collection, Iterator
from types import FrameType
from typing import Any

import msgspec
from msgspec.structs import replace

from lowtide.probes.host.process_files import began_at, stat
from lowtide.probes.objects.described import is_library, is_of_site
from lowtide.probes.objects.foreign import thread_ident, thread_key
from lowtide.probes.originals import StandIns, contents, loaded, os, sys, threading, time, weakref

_PLUMBING = frozenset(
    {"threading", "socket", "selectors", "subprocess", "os", "multiprocessing.process", "multiprocessing.context"}
    | {f"multiprocessing.popen_{way}" for way in ("fork", "spawn_posix", "forkserver")}
)
"""Modules through which everybody makes such things: who calls them has made it."""

_OF_ZMQ = "zmq.sugar.socket"
"""The module in which pyzmq binds, in C++: it closes a socket and leaves its file."""

_OF_GROUPS = "torch.distributed.distributed_c10d"
"""The module in which torch makes process groups, whichever function it was asked by."""

_LAST_ENDPOINT = 32
"""The option of ZeroMQ that says what a socket was bound to last."""

_CHECKER = "lowtide.probes."

_OF_SOCKET = socket.SocketType
"""What sockets are in C: a class derived from Python's may answer otherwise."""

_MOST_FRAMES = 60

_TURN = 0.01
"""Seconds: twice the time after which a thread of Python's gives way to another one that waits."""


class Maker(msgspec.Struct, frozen=True):
    """The code that made something.

    Attributes:
        modules: the library's modules whose functions were running, the innermost first; empty if the program's own
            code made it, and not a library that it called.
        identity: distinguishes a descriptor from another one that gets its number later.
        place: the line that made it, `function, file.py:12`: not of Python's own library, but of whoever called that;
            where it is an installed package's, with the program's that called it, if one did; empty if nobody did.
        thread: the thread in which it was made; empty for the main one.
        line: the first of the threads of which each started the next one, up to `thread`; empty for the main one.
        functions: the functions that were running, up to that of the program, each by its file and first line.
    """

    modules: tuple[str, ...]
    identity: tuple[int, int] = (0, 0)
    place: str = ""
    thread: str = ""
    line: str = ""
    functions: frozenset[tuple[str, int]] = frozenset()


class Makers:
    """Notes, from `start` to `stop`, who makes threads, child processes, sockets and their files, pipes and the like.

    The functions of Python's library that make them are stood in for meanwhile.

    Attributes:
        began: when the child processes that were seen to start began, ended ones too, in seconds since the epoch.
    """

    def __init__(self) -> None:
        self._threads: dict[int, Maker] = {}
        # An identifier is soon that of another thread, but not with the same name.
        self._named: dict[str, Maker] = {}
        # By their identity, from before they run until it is known what they are called.
        self._starting: dict[int, Maker] = {}
        self._gave_way = 0.0
        self._processes: dict[int, Maker] = {}
        self.began: dict[int, float] = {}
        self._descriptors: dict[int, Maker] = {}
        # By path, with the socket's descriptor; -1 where that is unknown.
        self._bound: dict[str, tuple[int, Maker]] = {}
        # By resource and name, what is made by others than the functions that are stood in for.
        self._told: dict[tuple[str, str], Maker] = {}
        self._stand_ins = StandIns()

    def start(self) -> None:
        """Begin to note; legal twice: then in libraries that were imported meanwhile, too."""
        for module, owner, name, note in (
            (_OF_ZMQ, "Socket", "bind", self._note_bound_by_zmq),
            (_OF_GROUPS, "", "_new_process_group_helper", self._note_group),
            ("torch", "UntypedStorage", "_share_filename_cpu_", self._note_shared),
        ):
            library: Any = loaded(module)
            if library is not None:
                self._after(getattr(library, owner, None) if owner else library, name, note)
        if self.originals:
            return
        self._after(threading.Thread, "start", lambda thread, result: self._note_thread(thread), self._note_starting)
        self._after(subprocess.Popen, "__init__", lambda child, result: self._note_process(child.pid, sys._getframe(2)))
        kind = multiprocessing.process.BaseProcess
        self._after(kind, "start", lambda child, result: self._note_process(child.pid, sys._getframe(2)))
        self._after(socket.socket, "__init__", lambda made, result: self._note_descriptor(made.fileno()))
        self._after(socket.socket, "bind", self._note_bound)
        self._after(selectors._PollLikeSelector, "__init__", lambda made, result: self._note_descriptor(made.fileno()))
        if hasattr(selectors, "EpollSelector"):
            # Else the next one that C code opens has the number, and the very inode, of all that have no file.
            self._after(selectors.EpollSelector, "close", lambda made, result: None, self._forget_selector)
        nameless = ("pipe", "pipe2", "dup", "eventfd", "memfd_create", "pidfd_open", "openpty", "timerfd_create")
        for name in ("open", *nameless):
            self._after(os_module, name, lambda first, result: self._note_descriptors(result))
        _FORKS.tell(self)

    def stop(self) -> None:
        """End it; legal twice. What somebody else has replaced meanwhile stays as it is."""
        self._stand_ins.restore()
        _FORKS.tell_no_more(self)

    @property
    def originals(self) -> tuple[Callable[..., Any], ...]:
        """The functions of `os` that are stood in for: who imported one by name calls it unseen."""
        return self._stand_ins.of(os_module)

    def of_thread(self, ident: int) -> Maker | None:
        """Return who started a Python thread; None if that was not seen."""
        return self._threads.get(ident)

    def of_process(self, pid: int) -> Maker | None:
        """Return who started a child process; None if that was not seen."""
        return self._processes.get(pid)

    def processes(self) -> Collection[int]:
        """Return the numbers of the child processes that were seen to start, ended or not."""
        return self.began.keys()

    def of_descriptor(self, number: int) -> Maker | None:
        """Return who made what a descriptor is open on; None if that was not seen."""
        maker = self._descriptors.get(number)
        return maker if maker is not None and maker.identity == _identity(number) else None

    def closed_sockets(self) -> dict[str, Maker]:
        """Return who bound the Unix sockets that are closed here, by the path of the file to which each was bound.

        Of one that ZeroMQ has bound nobody knows whether it is closed.
        """
        return {
            path: maker
            for path, (number, maker) in list(self._bound.items())
            if number < 0 or _identity(number) != maker.identity
        }

    def bound_files(self) -> set[str]:
        """Return the paths of the files to which sockets were bound here, closed or not."""
        return set(self._bound)

    def note_made(self, key: str, name: str, place: str = "") -> None:
        """Note who made a thing: the code that calls, where no place is given.

        Args:
            key: its resource, as for `of_item`.
            name: its name there.
            place: as `Maker.place`, of what another process has made.
        """
        self._told[key, name] = Maker((), place=place) if place else self._maker(sys._getframe(2))

    def forget_made(self, key: str, there: Collection[str]) -> None:
        """Forget who made the things of a resource that are not there any more."""
        for told in [told for told in self._told if told[0] == key and told[1] not in there]:
            del self._told[told]

    def forget_file(self, path: str) -> None:
        """Forget that a socket was bound to a file, which is gone."""
        self._bound.pop(path, None)

    def forget_ended_threads(self) -> None:
        """Forget who started the threads that have ended."""
        # In this order: threads start and are noted meanwhile.
        known = list(self._named)
        living = set(map(thread_key, threading.enumerate()))
        for name in known:
            if name not in living:
                del self._named[name]

    def forget_closed(self, there: Collection[str]) -> None:
        """Forget who made the descriptors that are closed, whose numbers another one may have that C code opens.

        Args:
            there: those that are open, as the counters call them.
        """
        numbers = {int(name.partition(" ")[0]) for name in there}
        for number in [number for number in list(self._descriptors) if number not in numbers]:
            self._descriptors.pop(number, None)

    def of_item(self, key: str, name: str) -> Maker | None:
        """Return who made what the counters call so; None if that was not seen, or the key means something else.

        Args:
            key: `threads`, `processes`, `file-descriptors` or another resource.
            name: its name there.
        """
        if key == "threads":
            starting = (self._starting.get(id(each)) for each in threading.enumerate() if thread_key(each) == name)
            return next(starting, None) or self._named.get(name)
        if key == "processes":
            pid = name.partition(" ")[0]
            return (self.of_process(int(pid)) or self._forked(int(pid))) if pid.isdigit() else None
        if key == "temporary-files" and name in self._bound:
            return self._bound[name][1]
        if (key, name) in self._told:
            return self._told[key, name]
        number, _, target = name.partition(" -> ")
        if key != "file-descriptors" or not number.isdigit():
            return None
        if maker := self.of_descriptor(int(number)):
            return maker
        # Another thread may have made it and wait for its turn to note that: one turn for all that were read together.
        if time.monotonic() > self._gave_way + 10 * _TURN:
            time.sleep(_TURN)
            self._gave_way = time.monotonic()
        # One that is closed again was made by whoever used the number last.
        gone = self._descriptors.get(int(number)) if not _leads_to(int(number), target) else None
        return self.of_descriptor(int(number)) or gone

    def place_of(self, key: str, name: str) -> str:
        """Return the line that made something, as `Maker.place`; empty where that is not known.

        Args:
            key: its resource, as for `of_item`.
            name: its name there.
        """
        maker = self.of_item(key, name)
        return "" if maker is None else maker.place

    def note_fork(self, pid: int, frame: FrameType) -> None:
        """Note who has called `os.fork`.

        Args:
            pid: the child's.
            frame: the one that called it.
        """
        self._note_process(pid, frame)

    def _note_process(self, pid: int | None, frame: FrameType) -> None:
        if pid is not None:
            self._processes[pid] = self._maker(frame)
            process = stat(pid)
            self.began[pid] = time.time() if process is None else began_at(process)

    def _forked(self, pid: int) -> Maker | None:
        """Return who made a child by a fork that was not seen: the kernel lists it with its thread."""
        for thread in threading.enumerate():
            with contextlib.suppress(OSError):  # it ended, or the kernel was built without this file
                if str(pid).encode() in contents(f"/proc/self/task/{thread.native_id}/children").split():
                    return Maker((), (0, 0), "", *self._line_of(thread))
        return None

    def _after(
        self,
        place: Any,
        name: str,
        note: Callable[[Any, Any], None],
        before: Callable[[Any], None] = lambda first: None,
    ) -> None:
        def noting(original: Callable[..., Any]) -> Callable[..., Any]:
            def ours(*args: Any, **kwargs: Any) -> Any:
                with contextlib.suppress(Exception):
                    before(args[0] if args else None)
                result = original(*args, **kwargs)
                try:
                    note(args[0] if args else None, result)
                except Exception:  # noqa: BLE001 - the program's call has succeeded, and nothing here may change that
                    return result
                return result

            return ours

        self._stand_ins.put(place, name, noting)

    def _note_starting(self, thread: threading.Thread) -> None:
        self._starting[id(thread)] = self._maker(sys._getframe(2))

    def _note_thread(self, thread: threading.Thread) -> None:
        maker = self._starting[id(thread)]
        self._threads[thread_ident(thread)] = self._named[thread_key(thread)] = maker
        del self._starting[id(thread)]

    def _forget_selector(self, closing: Any) -> None:
        self._descriptors.pop(closing.fileno(), None)

    def _note_descriptor(self, number: int) -> None:
        self._note_descriptors(number, depth=4)

    def _note_descriptors(self, made: int | tuple[int, int], depth: int = 3) -> None:
        maker = self._maker(sys._getframe(depth))
        for number in (made,) if type(made) is int else made:  # type: ignore[union-attr]
            self._descriptors[number] = replace(maker, identity=_identity(number))

    def _note_bound(self, bound: socket.socket, result: object) -> None:
        path = _OF_SOCKET.getsockname(bound) if bound.family == socket.AF_UNIX else b""
        if type(path) is str and path:
            number = bound.fileno()
            self._note_file(path, number, _identity(number))

    def _note_bound_by_zmq(self, bound: Any, result: object) -> None:
        transport, _, path = bound.getsockopt(_LAST_ENDPOINT).rstrip(b"\0").decode().partition("://")
        # What begins with an `@` is no file.
        if transport == "ipc" and path.startswith("/"):
            self._note_file(path, -1, (0, 0))

    def _note_group(self, size: object, made: tuple[Any, Any]) -> None:
        names = loaded(_OF_GROUPS)._world.pg_names
        if made[0] in names:  # else this process is not in it
            self.note_made("process-groups", str(names[made[0]]))

    def _note_shared(self, storage: object, made: tuple[bytes, bytes, int]) -> None:
        self.note_made("shared-memory", made[1].decode().lstrip("/"))

    def _note_file(self, path: str, number: int, identity: tuple[int, int]) -> None:
        self._bound[os.path.abspath(path)] = number, replace(self._maker(sys._getframe(3)), identity=identity)

    def _maker(self, frame: FrameType | None) -> Maker:
        """Return who makes something: a library's functions from a frame outwards, up to the program's own.

        Where an installed package is what made it, its line comes first, and then the program's that called it.
        """
        modules: dict[str, None] = {}
        functions = []
        made = ""
        for caller in _callers(frame):
            code, module = caller.f_code, dict.get(caller.f_globals, "__name__")
            # Another one notes it, too, or somebody is told of it.
            if type(module) is str and module.startswith(_CHECKER):
                continue
            functions.append((code.co_filename, code.co_firstlineno))
            if not is_library(code.co_filename):
                made = f"{made}, called in {_place(caller)}" if made else _place(caller)
                break
            made = made or (_place(caller) if is_of_site(code.co_filename) else "")
            if type(module) is str and module not in _PLUMBING:
                modules[module] = None
        return Maker(tuple(modules), (0, 0), made, *self._thread(), frozenset(functions))

    def _thread(self) -> tuple[str, str]:
        """Return the running thread and the first one of its line; empty ones in the main thread."""
        # Not `current_thread`, which makes an object for a thread that it does not know.
        return self._line_of(threading._active.get(threading.get_ident()))  # type: ignore[attr-defined]

    def _line_of(self, thread: threading.Thread | None) -> tuple[str, str]:
        if thread is None or thread is threading.main_thread():
            return "", ""
        name = thread_key(thread)
        # In this order: it may start another one before its own start has returned, which moves it.
        maker = self._starting.get(id(thread)) or self._named.get(name)
        return name, (maker.line if maker is not None else "") or name


class Forks:
    """Tells those that note at present who has called `os.fork`, which nothing stands in for.

    Hears of forks from the first of them on, once for all of them and for good: Python has no way to take that back.

    Args:
        register: has a function called after each fork; default: `os.register_at_fork`.
    """

    def __init__(self, register: Callable[..., None] | None = None) -> None:
        self._register = register
        self._is_hearing = False
        self._noting: weakref.WeakSet[Makers] = weakref.WeakSet()

    def tell(self, makers: Makers) -> None:
        """Tell somebody of forks from now on; legal twice."""
        self._noting.add(makers)
        if not self._is_hearing:
            self._is_hearing = True
            (self._register or os.register_at_fork)(after_in_parent=self._note)

    def tell_no_more(self, makers: Makers) -> None:
        """Tell somebody of none any more; legal twice."""
        self._noting.discard(makers)

    def _note(self) -> None:
        if self._noting:
            # The kernel was built without this file, or the child has ended.
            with contextlib.suppress(OSError, IndexError):
                pid = int(contents("/proc/thread-self/children").split()[-1])
                for makers in list(self._noting):
                    makers.note_fork(pid, sys._getframe(1))


_FORKS = Forks()


def _identity(number: int) -> tuple[int, int]:
    try:
        facts = os.fstat(number)
    except OSError:  # closed
        return (0, 0)
    return (facts.st_dev, facts.st_ino)


def _leads_to(number: int, target: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{number}") == target
    except OSError:  # closed
        return False


def _place(frame: FrameType) -> str:
    code = frame.f_code
    # Python 3.10 knows no more than the last part of it.
    name = getattr(code, "co_qualname", code.co_name)
    return f"{name}, {os.path.basename(code.co_filename)}:{frame.f_lineno}"


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return
        yield frame
        frame = frame.f_back
