"""The agent: answers questions over a Unix socket, and is not there until somebody asks.

It comes into processes of programs that know nothing of lowtide, before their own code, and must change nothing for
them.  At rest it is the handler of one real-time signal: no thread, no descriptor, no hook at forks, no module.
Whoever asks puts `PID.ask` into a folder and sends the signal, if the process handles it and its main thread lets it
in.  The handler starts a thread that blocks all signals, listens on `PID.sock`, and ends once nobody has asked for a
moment.

A process that imports torch has the thread from then on, and so have the forks that `multiprocessing` makes of it: the
main thread may wait for other ranks in a library, where Python handles no signal.
"""

import _imp
import _signal  # type: ignore[import-not-found]
import _thread
import posix
import sys
from _frozen_importlib import _module_locks  # type: ignore[attr-defined]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any

SOCKETS = "LOWTIDE_AGENTS"
"""The environment variable with the folder of the sockets."""

ROOT = "LOWTIDE_AGENT_ROOT"
"""The environment variable with the folder that has the package `lowtide`, for a program whose path lacks it."""

MARKER, ASK, SOCKET, ERROR = ".agent", ".ask", ".sock", ".error"
"""What follows a process's number in the names of files: it has an agent (and where its memory lies), it is asked, it
listens, why it does not."""

FIRST = "first"
"""The file with what an agent that stays is asked by the folder itself, before anybody else asks."""

SIGNAL = 58
"""By which it is woken.  Of the real-time signals, 34 to 64, libraries use the first ones and the last."""

ANSWERS = "lowtide.leakcheck.processes.answers"
"""The module whose `answer(question)` is called."""

MAGIC = b"LOWTIDE1"
"""Begins each message: eight bytes, the last of which is the version; then the length in eight bytes, big-endian."""

ACCEPTED = b"?"
"""The message that says that the answer follows."""

MOST_BYTES = 16 << 20
"""Bytes of a question, at most."""

QUESTION_S = 5.0
"""Seconds for which a connection may be silent."""

LINGER_S = 0.2
"""Seconds for which the thread waits for the next question of the same moment."""

OTHER_IMPORT_S = 10.0
"""Seconds after which a program that is in an import is taken for one that runs in it for good."""

_UNDISTURBED_S = 0.2
"""Seconds for which no other thread runs, while a small module is imported."""

# As they are now: the program may replace them, as gevent does.
_start_new_thread = _thread.start_new_thread
_allocate_lock = _thread.allocate_lock
_mask = _signal.pthread_sigmask


def start() -> None:
    """Answer in this process and its forks from here on; nothing where no folder is given, and in a subinterpreter."""
    folder = posix.environ.get(SOCKETS.encode(), b"").decode(errors="surrogateescape")
    if not folder or not posix.access(folder, posix.W_OK):
        return
    agent = installed()
    if agent is not None and folder not in agent.folders:
        agent.folders.append(folder)
        agent.root = posix.environ.get(ROOT.encode(), b"").decode(errors="surrogateescape")
        _mark(folder)
        _watch_torch(agent)


def installed() -> "Agent | None":
    """Return the agent of this process, which handles its signal from here on.

    Returns:
        None where no handler can be set: in a subinterpreter, in another thread than the main one.
    """
    agent = found()
    if agent is None:
        agent = Agent(_signal.getsignal(SIGNAL))
        try:
            _signal.signal(SIGNAL, agent.wake)
        except ValueError:
            return None
    return agent


def found() -> "Agent | None":
    """Return the agent of this process, by whichever copy of this module it was started."""
    owner = getattr(_signal.getsignal(SIGNAL), "__self__", None)
    return owner if type(owner).__module__ == __name__ else None


class Agent:
    """Answers in one process, and in those that it forks.

    Attributes:
        before: the handler that there was.
        folders: in which it is asked: those of a run, and of a run that this one is part of.
        root: the folder that has the package `lowtide`; empty where the program's path has it.
    """

    def __init__(self, before: "Any") -> None:
        self.before = before
        self.folders: list[str] = []
        self.root = ""
        self._sockets: list[_Socket] = []
        self._pid = 0
        self._answering = _allocate_lock()

    def wake(self, number: int, frame: "FrameType | None") -> None:
        """Start a thread in each folder in which this process is asked: the handler of the signal.

        What the handler of another signal raises meanwhile goes on to the program, as from anywhere in its own code.
        """
        for folder in self.folders:
            if posix.access(f"{folder}/{posix.getpid()}{ASK}", posix.F_OK):
                self.serve(folder, stays=False)

    def serve(self, folder: str, *, stays: bool) -> None:
        """Start a thread that answers in a folder, and that no signal of the program's can reach.

        Args:
            folder: in which the process is asked.
            stays: whether it waits for questions for ever, and not just for the one that is there.
        """
        if self._pid != posix.getpid():
            # In a fork, whose lock a thread of its parent may have held.
            self._pid, self._answering, self._sockets = posix.getpid(), _allocate_lock(), []
        if "threading" not in sys.modules:
            # By the main thread: Python takes the one that imports it for that, and waits for it as it ends.
            import threading  # noqa: F401
        # Read before it is set: setting it may raise what the handler of another signal raises.
        before = _mask(_signal.SIG_BLOCK, ())
        try:
            _mask(_signal.SIG_BLOCK, _signal.valid_signals())
            _start_new_thread(self._answer_in, (folder, stays))
        except RuntimeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise  # by a handler of the program's
            _report(folder, _told(error))
        finally:
            _mask(_signal.SIG_SETMASK, before)

    def stay(self) -> None:
        """Start threads that stay; nothing in a process that has had one."""
        if self._pid != posix.getpid():
            for folder in self.folders:
                self.serve(folder, stays=True)

    @property
    def descriptors(self) -> frozenset[int]:
        """Those that are not the program's."""
        return frozenset(each.number for each in list(self._sockets) if each.is_own)

    def _answer_in(self, folder: str, stays: bool) -> None:
        try:
            if stays:
                self._answer_first(folder)
            while stays or _is_asked(folder):
                self._listen(folder, stays)
                # The program may have closed the socket by its number: then it is woken like any other.
                stays = False
        except Exception as error:
            _report(folder, _told(error))

    def _answer_first(self, folder: str) -> None:
        question = _content(f"{folder}/{FIRST}")
        if question:
            with self._answering:
                answer = self._answered(question)
            if answer[:1] == b"!":
                _report(folder, answer[1:].decode())

    def _listen(self, folder: str, stays: bool) -> None:
        import _socket

        path = f"{folder}/{posix.getpid()}{SOCKET}"
        listening = self._hold(_socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM))
        try:
            # Under its name only once it listens: whoever sees it may ask.
            fresh = f"{path}.{_thread.get_native_id()}"
            listening.own.bind(fresh)
            listening.own.listen(128)
            identity = posix.stat(fresh).st_ino
            posix.rename(fresh, path)
            self._answer_all(listening, None if stays else LINGER_S)
            if _inode(path) == identity:
                posix.unlink(path)
            # Whoever has found it until now is answered.
            self._answer_all(listening, 0.0)
        finally:
            self._close(listening)

    def _answer_all(self, listening: "_Socket", patience: "float | None") -> None:
        """Answer whoever asks, one after the other, until nobody has asked for so many seconds.

        Whoever has connected and says nothing holds up nobody: only what is there is read.  All is done by one thread,
        since another one would have a heap of its own, which looks like growth from outside.
        """
        import select
        from time import monotonic

        asking: dict[int, _Question] = {}
        try:
            while asking or self._accept(listening, asking, patience):
                if not asking:  # it was another user's
                    continue
                poll = select.poll()
                for number in (listening.number, *asking):
                    poll.register(number, select.POLLIN)
                ready = [number for number, _ in poll.poll(QUESTION_S * 1000)]
                for number in asking.keys() & ready:
                    self._go_on(asking, number)
                if listening.number in ready and not self._accept(listening, asking, 0.0) and not listening.is_own:
                    return
                for number in [each for each, question in asking.items() if question.until < monotonic()]:
                    self._close(asking.pop(number).connection)
        finally:
            for question in asking.values():
                self._close(question.connection)

    def _accept(self, listening: "_Socket", asking: "dict[int, _Question]", patience: "float | None") -> bool:
        """Wait for the next one who asks; whether there is one.

        `accept` waits on the socket even if the program closes it by its number meanwhile; `poll` would wait for ever.
        """
        import _socket
        from time import monotonic

        try:
            listening.own.settimeout(patience)
            number, _ = listening.own._accept()
        except OSError:  # nobody asks, or the socket is gone
            return False
        connection = self._hold(_socket.socket(fileno=number))
        credentials = connection.own.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 12)
        if int.from_bytes(credentials[4:8], sys.byteorder) == posix.getuid():
            asking[number] = _Question(connection, monotonic() + QUESTION_S)
        else:
            self._close(connection)
        return True

    def _go_on(self, asking: "dict[int, _Question]", number: int) -> None:
        """Read more of a question, and answer it if that is all."""
        question = asking[number]
        try:
            if question.is_read():
                # At once, so that who asks can distinguish a process that works on the answer from one that is stuck.
                question.connection.own.settimeout(QUESTION_S)
                _send(question.connection, question.refusal or ACCEPTED)
                if not question.refusal:
                    with self._answering:
                        answer = self._answered(question.text)
                    _send(question.connection, answer)
            elif not question.has_ended:
                return
        except OSError:  # whoever asks has ended
            pass
        self._close(asking.pop(number).connection)

    def _answered(self, question: bytes) -> bytes:
        try:
            answer: bytes = self._answers().answer(question, Importing)
            return b"=" + answer
        except BaseException as error:
            return b"!" + _told(error).encode(errors="replace")

    def _answers(self) -> "Any":
        with Importing(ANSWERS):
            if ANSWERS in sys.modules:
                return sys.modules[ANSWERS]
            import importlib
            import importlib.util

            if importlib.util.find_spec("lowtide") is None and self.root:
                sys.path.append(self.root)
                try:
                    return importlib.import_module(ANSWERS)
                finally:
                    sys.path.remove(self.root)
            return importlib.import_module(ANSWERS)

    def _hold(self, socket: "Any") -> "_Socket":
        held = _Socket(socket)
        self._sockets.append(held)
        return held

    def _close(self, held: "_Socket") -> None:
        self._sockets.remove(held)
        held.close()


class Importing:
    """In the block, this thread imports what it needs, and no other thread imports anything.

    Python does not wait for a package that another thread is importing before it imports a module in it.  So the
    program's `import numpy.linalg` would find a numpy of which the agent has made half, and the other way round.  The
    lock is the one that a fork takes, and that is held wherever an import begins. A fork has taken that of `logging`
    before it, which an import takes for its logger: each would wait for the other, so that is held as well.

    Args:
        name: a module that is imported in the block: nothing is locked where it is there.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_locked = False

    def __enter__(self) -> None:
        spec = getattr(sys.modules.get(self._name), "__spec__", None)
        if spec is None or getattr(spec, "_initializing", False):
            self._is_locked = _is_alone_in_importing()

    def __exit__(self, *_: object) -> None:
        if self._is_locked:
            sys.modules["logging"]._lock.release()
            _imp.release_lock()


def _is_alone_in_importing() -> bool:
    """Take the locks once no other thread is in an import; false where one does not come out of it.

    Whoever is in one may need the lock to end it, and so it is not waited for with the lock.
    """
    from time import monotonic, sleep

    end = monotonic() + OTHER_IMPORT_S
    while monotonic() < end:
        _imp.acquire_lock()
        if all(lock() is None for lock in list(_module_locks.values())) and _has_locked_logging():
            return True
        _imp.release_lock()
        sleep(0.01)
    return False


def _has_locked_logging() -> bool:
    """Take the lock of `logging`, which no fork may do while it comes into being; false where somebody has it."""
    if "logging" not in sys.modules:
        _import_logging()
    locked: bool = sys.modules["logging"]._lock.acquire(blocking=False)
    return locked


def _import_logging() -> None:
    """Import `logging` so that no other thread runs between its hook for forks and the end of it."""
    import io
    import re
    import string
    import traceback
    import types
    import warnings
    import weakref
    from time import sleep

    del io, re, string, traceback, types, warnings, weakref
    interval = sys.getswitchinterval()
    sys.setswitchinterval(max(interval, _UNDISTURBED_S))
    try:
        # Who waits already goes by the old one.
        sleep(2 * interval)
        import logging

        del logging
    finally:
        sys.setswitchinterval(interval)


class _Socket:
    """A socket whose descriptor the program may close by its number, and give to a file of its own."""

    def __init__(self, socket: "Any") -> None:
        self._socket = socket
        self.number: int = socket.fileno()
        self._identity = self._now()

    def _now(self) -> tuple[int, int]:
        facts = posix.fstat(self.number)
        return facts.st_dev, facts.st_ino

    @property
    def is_own(self) -> bool:
        """Whether the number leads to the socket yet."""
        try:
            return self._now() == self._identity
        except OSError:
            return False

    @property
    def own(self) -> "Any":
        """The socket, for the next call alone.

        Raises:
            OSError: the number leads to something else by now.
        """
        if not self.is_own:
            raise OSError("the program has closed it")
        return self._socket

    def close(self) -> None:
        """Close it if it is there yet."""
        if self.is_own:
            self._socket.close()
        else:
            self._socket.detach()


class _Question:
    """What has been read of a question.

    Args:
        connection: by which it comes.
        until: the time at which it must be there.
    """

    def __init__(self, connection: _Socket, until: float) -> None:
        self.connection = connection
        self.until = until
        self.refusal = b""
        self.has_ended = False
        self._read = b""

    @property
    def text(self) -> bytes:
        """What is asked."""
        return self._read[16:]

    def is_read(self) -> bool:
        """Read what is there; whether that is all, or makes it clear that it is no question."""
        length = int.from_bytes(self._read[8:16], "big") if len(self._read) >= 16 else 0
        part = self.connection.own.recv(min(16 + length - len(self._read), 1 << 20))
        self._read += part
        self.has_ended = not part
        if len(self._read) < 16 or self.has_ended:
            return False
        length = int.from_bytes(self._read[8:16], "big")
        if self._read[:8] != MAGIC or length > MOST_BYTES:
            self.refusal = b"!this agent speaks " + MAGIC
            return True
        return len(self._read) == 16 + length


class _TorchFinder:
    """Stands for torch's folder in the import system until a module of torch is looked for there, which is once.

    A finder in front of all others would run with each import of the program.

    Args:
        folder: torch's.
        agent: has a thread from then on.
    """

    def __init__(self, folder: str, agent: "Agent") -> None:
        self._folder = folder
        self._agent = agent

    def find_spec(self, name: str, target: "Any" = None) -> "Any":
        """Find a module of torch as if this finder were not there."""
        from _frozen_importlib_external import PathFinder

        if sys.path_importer_cache.pop(self._folder, None) is self:
            self._agent.stay()
            stay_in_forks()
        return PathFinder.find_spec(name, [self._folder], target)


_has_hook = False


def stay_in_forks() -> None:
    """Have threads that stay in each child of `multiprocessing` that is a fork of this process and has torch."""
    from multiprocessing.util import register_after_fork

    global _has_hook
    if not _has_hook:
        _has_hook = True
        # For the class, which does not end: the registry has a weak reference, whose callback is Python code.
        register_after_fork(Agent, _stay_with_torch)


def _stay_with_torch(_: object) -> None:
    agent = found()
    if agent is not None and "torch" in sys.modules:
        agent.stay()


def _watch_torch(agent: "Agent") -> None:
    for entry in sys.path:
        folder = f"{entry}/torch"
        if posix.access(f"{folder}/__init__.py", posix.F_OK):
            sys.path_importer_cache.setdefault(folder, _TorchFinder(folder, agent))


def _mark(folder: str) -> None:
    """Say that this process has an agent, and where its memory lies, by which its forks are known."""
    path = f"{folder}/{posix.getpid()}{MARKER}"
    try:
        _write(f"{path}.new", _image())
        posix.rename(f"{path}.new", path)
    except OSError:  # the folder is gone, or its disk is full
        pass


def _image() -> bytes:
    return image_of(_content("/proc/self/stat"))


def image_of(line: bytes) -> bytes:
    """Return where a program's data and heap lie, by its line of `/proc/PID/stat`: a fork has them there, too."""
    return b" ".join(line.rpartition(b")")[2].split()[42:45])


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _report(folder: str, text: str) -> None:
    try:
        _write(f"{folder}/{posix.getpid()}{ERROR}", text.encode(errors="replace"))
    except OSError:
        pass


def _write(path: str, text: bytes) -> None:
    number = posix.open(path, posix.O_WRONLY | posix.O_CREAT | posix.O_TRUNC | posix.O_CLOEXEC, 0o600)
    try:
        posix.write(number, text)
    finally:
        posix.close(number)


def _is_asked(folder: str) -> bool:
    """Return whether there is a question; once for each."""
    try:
        posix.unlink(f"{folder}/{posix.getpid()}{ASK}")
    except OSError:
        return False
    return True


def _content(path: str) -> bytes:
    """Return what a small file has; empty where there is none."""
    try:
        number = posix.open(path, posix.O_RDONLY | posix.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return posix.read(number, 4096)
    finally:
        posix.close(number)


def _inode(path: str) -> int:
    try:
        return posix.stat(path).st_ino
    except OSError:
        return 0


def _send(connection: "_Socket", message: bytes) -> None:
    view = memoryview(MAGIC + len(message).to_bytes(8, "big") + message)
    while view:
        view = view[connection.own.send(view) :]
