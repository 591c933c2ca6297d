"""A server that was not started with lowtide, under load whose answers are compared, and what is inside it."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from lowtide.probes.host.process_files import descriptors_of, mapped_files, status
from tests.waiting import wait_until

SERVER = """
import functools
import hashlib
import json
import os
import selectors
import signal
import socket
import sys
import threading

KEPT = []
LATEST = [None] * 64
LOCK = threading.Lock()


@functools.lru_cache(maxsize=8)
def salt(number):
    return str(number)


def inside():
    handlers = [str(signal.getsignal(number)) for number in signal.valid_signals()]
    namespace = sorted(vars(sys.modules["__main__"]))
    filters = sys.modules["warnings"].filters if "warnings" in sys.modules else []
    return json.dumps([sorted(sys.modules), namespace, handlers, len(filters), sys.path, threading.active_count()])


def answer(text):
    if text == b"inside":
        return inside().encode()
    request = os.urandom(2000 - len(text)) + text
    with LOCK:
        if KEEPS:
            KEPT.append(request)
        LATEST[request[0] % 64] = request
    total = 0
    for number in range(100):
        total += len([number] * 10) + len(salt(number % 16))
    return hashlib.sha256(text).hexdigest().encode()


def serve(connection):
    with connection:
        while text := connection.recv(4096):
            connection.sendall(answer(text))


def in_threads(listening):
    while True:
        connection, _ = listening.accept()
        threading.Thread(target=serve, args=(connection,), daemon=True).start()


def in_one_thread(listening):
    selector = selectors.DefaultSelector()
    selector.register(listening, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is listening:
                selector.register(listening.accept()[0], selectors.EVENT_READ)
            elif text := key.fileobj.recv(4096):
                key.fileobj.sendall(answer(text))
            else:
                selector.unregister(key.fileobj)
                key.fileobj.close()


if __name__ == "__main__":
    KEEPS = sys.argv[2] == "keeps"
    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    (in_threads if sys.argv[1] == "threads" else in_one_thread)(listening)
"""

CLIENTS = 4


class LoadedServer:
    """Runs a server in a process of its own, and asks it without a pause that would let it rest, while the block lasts.

    Args:
        folder: where its script is written.
        keeps: whether it keeps 2 KB of each request, in a list of its module.
        kind: `threads`: a thread for each connection, while the main one waits; `one`: all in the main one.
        python: the interpreter.
        pause: seconds between two requests of a client.
        wrapped_by: what starts it, with its arguments.

    Attributes:
        requests: how many were answered.
        wrong: how many otherwise than they should be.
        slowest: seconds of the slowest answer.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keeps: bool,
        kind: str = "threads",
        python: str = sys.executable,
        pause: float = 0.01,
        wrapped_by: tuple[str, ...] = (),
    ) -> None:
        script = folder / "server.py"
        script.write_text(SERVER)
        self._command = [*wrapped_by, python, str(script), kind, "keeps" if keeps else "keeps not"]
        self._pause = pause
        self._is_over, self._works = threading.Event(), threading.Event()
        self._works.set()
        self._served: set[int] = set()
        self.requests = self.wrong = 0
        self.slowest = 0.0

    def __enter__(self) -> LoadedServer:
        self.process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self._port = int(self.process.stdout.readline())
        self._clients = [threading.Thread(target=self._ask_on) for _ in range(CLIENTS)]
        for client in self._clients:
            client.start()
        wait_until(lambda: len(self._served) == CLIENTS)
        return self

    @property
    def pid(self) -> int:
        return self.process.pid

    def _connected(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._port))

    def _ask_on(self) -> None:
        with self._connected() as connection:
            while not self._is_over.is_set():
                self._works.wait()
                text = os.urandom(16).hex().encode()
                began = time.monotonic()
                connection.sendall(text)
                answer = connection.recv(4096)
                self.slowest = max(self.slowest, time.monotonic() - began)
                self.wrong += answer != hashlib.sha256(text).hexdigest().encode()
                self.requests += 1
                self._served.add(threading.get_ident())
                if not answer:
                    return
                time.sleep(self._pause)

    def serve(self, requests: int) -> int:
        """Let it answer so many requests or a few more, and rest then; return how many there were."""
        before = self.requests
        self._works.set()
        wait_until(lambda: self.requests >= before + requests)
        return self.rest() - before

    def rest(self) -> int:
        """Let it rest, once what is asked is answered; return how many requests it has had."""
        self._works.clear()
        time.sleep(0.2)
        return self.requests

    def inside(self) -> dict[str, Any]:
        """Return what is in the server: what it says itself, and what the kernel does."""
        with self._connected() as connection:
            connection.sendall(b"inside")
            data = b""
            while not data.endswith(b"]"):
                data += connection.recv(1 << 20)
        names = ("modules", "names", "handlers", "filters", "path", "threads")
        said = dict(zip(names, json.loads(data), strict=True))
        time.sleep(0.1)  # the connection's thread ends
        fields = status(self.pid)
        return {
            **said,
            "tasks": fields["Threads"],
            "signals": [fields[name] for name in ("SigBlk", "SigIgn", "SigCgt")],
            "descriptors": sorted(descriptors_of(self.pid)),
            "files": sorted({file for file, _ in mapped_files(self.pid)}),
            "children": sorted(Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()),
        }

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._works.set()
        for client in self._clients:
            client.join()
        self.process.terminate()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
