"""The agent: a thread that answers questions over a Unix socket, and sleeps until somebody asks.

It comes into processes of programs that know nothing of lowtide, before their own code: only built-in modules are
imported, and nothing that goes wrong here may reach the program. What a question needs is imported with the first one.
"""

from __future__ import annotations

import _socket
import _thread
import os
import sys

# By the main thread: Python takes the one that imports it for that, and waits for it as it ends.
import threading  # noqa: F401
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SOCKETS = "LOWTIDE_AGENTS"
"""The environment variable with the folder of the sockets; an agent's is `PID.sock`, why there is none `PID.error`."""

ROOT = "LOWTIDE_AGENT_ROOT"
"""The environment variable with the folder that has the package `lowtide`, for a program whose path lacks it."""

ANSWERS = "lowtide.leakcheck.processes.answers"
"""The module whose `answer(question)` is called."""

MAGIC = b"LOWTIDE1"
"""Begins each message: eight bytes, the last of which is the version; then the length in eight bytes, big-endian."""

ACCEPTED = b"?"
"""The message that says that the answer follows."""

MOST_BYTES = 16 << 20
"""Bytes of a question, at most."""

_PENDING_CALLS_SINCE = (3, 12)

_listening: Any = None
_ended: Any = None
_thread_id = 0
_is_registered = False
_kept: list[object] = []


def start() -> None:
    """Answer in this process, and in those that it forks; nothing where no folder is given."""
    global _is_registered
    if not os.environ.get(SOCKETS):
        return
    _listen()
    if not _is_registered:
        _is_registered = True
        os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)


def stop() -> None:
    """End the thread, and close the socket; legal without a start."""
    global _listening
    listening, _listening = _listening, None
    if listening is None:
        return
    try:
        # The thread's `accept` returns with an error.
        listening.shutdown(_socket.SHUT_RDWR)
        listening.close()
    except OSError:
        pass
    if _ended is None or not _ended.acquire(timeout=1.0):
        return
    _ended.release()
    # Its last steps are the kernel's: until then it counts as a thread.
    until = time.monotonic() + 0.1
    while os.path.exists(f"/proc/self/task/{_thread_id}") and time.monotonic() < until:
        time.sleep(0.0002)


def descriptor() -> int:
    """Of the socket on which this process is asked; -1 where it is not."""
    return -1 if _listening is None else int(_listening.fileno())


def _listen() -> None:
    global _listening, _ended
    if _listening is not None:
        return
    folder = os.environ.get(SOCKETS, "")
    path = f"{folder}/{os.getpid()}.sock"
    try:
        listening = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        # Under its name only once it listens: whoever sees it may ask.
        listening.bind(f"{path}.new")
        listening.listen(8)
        os.rename(f"{path}.new", path)
        _ended = _thread.allocate_lock()
        _ended.acquire()
        _thread.start_new_thread(_serve, (listening, _ended))
        _listening = listening
    except Exception as error:
        _report(folder, error)


def _report(folder: str, error: BaseException) -> None:
    try:
        with open(f"{folder}/{os.getpid()}.error", "w") as file:
            file.write(f"{type(error).__name__}: {error}")
    except OSError:
        pass


def _serve(listening: Any, ended: Any) -> None:
    global _thread_id
    _thread_id = _thread.get_native_id()
    try:
        while True:
            try:
                descriptor, _ = listening._accept()
            except OSError:
                return
            connection = _socket.socket(fileno=descriptor)
            try:
                _converse(connection)
            except Exception:
                pass
            finally:
                connection.close()
    finally:
        ended.release()


def _converse(connection: Any) -> None:
    credentials = connection.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 12)
    if int.from_bytes(credentials[4:8], sys.byteorder) != os.getuid():
        return
    while True:
        header = _read(connection, 16)
        if header is None:
            return
        length = int.from_bytes(header[8:], "big")
        if header[:8] != MAGIC or length > MOST_BYTES:
            _send(connection, b"!this agent speaks " + MAGIC)
            return
        question = _read(connection, length)
        if question is None:
            return
        # At once, so that who asks can distinguish a process that works on the answer from one that is stuck.
        _send(connection, ACCEPTED)
        _send(connection, _answered(question))


def _answered(question: bytes) -> bytes:
    try:
        answer: bytes = _answers().answer(question)
        return b"=" + answer
    except BaseException as error:
        return f"!{type(error).__name__}: {error}".encode(errors="replace")


def _answers() -> Any:
    known = sys.modules.get(ANSWERS)
    if known is not None and hasattr(known, "answer"):
        return known
    root = os.environ.get(ROOT, "")
    import importlib
    import importlib.util

    if importlib.util.find_spec("lowtide") is None and root:
        sys.path.append(root)
        try:
            return importlib.import_module(ANSWERS)
        finally:
            sys.path.remove(root)
    return importlib.import_module(ANSWERS)


def _read(connection: Any, length: int) -> bytes | None:
    """So many bytes; None where the other side has ended."""
    parts = []
    while length:
        part = connection.recv(min(length, 1 << 20))
        if not part:
            return None
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def _send(connection: Any, message: bytes) -> None:
    view = memoryview(MAGIC + len(message).to_bytes(8, "big") + message)
    while view:
        view = view[connection.send(view) :]


def _before_fork() -> None:
    # A fork of a process with several threads is one that may deadlock, and Python 3.12 warns of it.
    stop()


def _in_child() -> None:
    _listen()


def _after_fork() -> None:
    if sys.version_info < _PENDING_CALLS_SINCE:
        _listen()
        return
    try:
        # Right after the fork Python counts the threads: the agent comes back once the main thread goes on.
        import ctypes

        def again(_: object) -> int:
            _kept.clear()
            _listen()
            return 0

        call = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(again)
        _kept.append(call)
        if ctypes.pythonapi.Py_AddPendingCall(call, None):
            _kept.clear()
            _listen()
    except Exception as error:
        _report(os.environ.get(SOCKETS, ""), error)
