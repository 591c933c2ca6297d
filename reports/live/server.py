"""Serves the page of a report folder on this machine, and tells it when a life goes on there (server-sent events).

Who may see it is who has its address, which has a token of 128 bits. It listens on the loopback interface alone; a
request for another host (by a page elsewhere whose name was made to point here), or from a page of another origin, gets
nothing. Other users of the machine can connect: those that ask for nothing keep nobody else from the page.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from lowtide.reports import schema
from lowtide.reports.html.live_page import describe_life, render_live
from lowtide.reports.html.page import render_html
from lowtide.reports.html.scripts import as_json
from lowtide.reports.live.broadcast import LIFE, read_live, stop_wanting, want

HOST = "127.0.0.1"

INTERVAL_S = 0.5
"""Seconds between two looks at the folder."""

_SILENCE_S = 5.0
"""Seconds after which a word is sent that means nothing: a browser that is gone is noticed by it."""

_ASKING_S = 10.0
"""Seconds that a connection may take until it has asked for something, the first time or again."""

_WRITING_S = 30.0
"""Seconds without progress after which a browser that reads nothing of its answer is given up."""

_MOST_CONNECTIONS = 64
"""At a time; each has a thread. Beyond it the one goes that has asked for nothing for longest."""

_FORWARDER = """<!doctype html>
<meta charset="utf-8">
<meta name="referrer" content="no-referrer">
<meta http-equiv="refresh" content="0; url={url}">
<title>lowtide</title>
<a href="{url}">the page</a>
"""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = _MOST_CONNECTIONS

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        # Those that have not asked yet, with since when, in this order.
        self._silent: dict[socket.socket, float] = {}
        super().__init__(address, handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Return whether there is room for another connection, after one that asks for nothing has made some."""
        with self._lock:
            if len(self._connections) >= _MOST_CONNECTIONS:
                if not self._silent:
                    return False
                self._drop(next(iter(self._silent)))
            self._connections.add(request)
            self._silent[request] = time.monotonic()
        return True

    def service_actions(self) -> None:
        """Drop those that take too long, however often they send a byte."""
        with self._lock:
            late = time.monotonic() - _ASKING_S
            for connection in [each for each, since in self._silent.items() if since < late]:
                self._drop(connection)

    def has_asked(self, connection: socket.socket) -> None:
        """Note that a connection's request is read: its answer takes as long as it takes."""
        with self._lock:
            self._silent.pop(connection, None)

    def is_silent(self, connection: socket.socket) -> None:
        """Note that a connection may ask again."""
        with self._lock:
            if connection in self._connections:
                self._silent.setdefault(connection, time.monotonic())

    def shutdown_request(self, request: Any) -> None:
        """Forget a connection that has ended."""
        with self._lock:
            self._connections.discard(request)
            self._silent.pop(request, None)
        super().shutdown_request(request)

    def _drop(self, connection: socket.socket) -> None:
        """End a connection: its thread reads the end, and closes it."""
        self._connections.discard(connection)
        self._silent.pop(connection, None)
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A browser that goes away in the middle is no error: it reloads, or its tab was closed, or it reads no more.
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class PageServer:
    """Shows a report folder until it is closed.

    Args:
        folder: where a report is, or will be.
        port: to listen on; 0 takes one that is free.

    Attributes:
        forwarder: a file that leads a browser to the page, until it is there. Its address would be in the browser's
            command line, which all users of the machine can read; the file only its owner can.

    Raises:
        OSError: the port is taken, or the folder cannot be written to.
    """

    def __init__(self, folder: Path, port: int = 0) -> None:
        self._folder = folder
        self._token = secrets.token_urlsafe(16)
        self._closing = threading.Event()
        self._server = _Server((HOST, port), self._handler())
        try:
            want(folder)
            self.forwarder = self._write_forwarder()
        except OSError:
            self._server.server_close()
            raise

    @property
    def url(self) -> str:
        """The page's address, with the token."""
        return f"http://{HOST}:{self._server.server_port}/{self._token}/"

    def _write_forwarder(self) -> Path:
        # In the folder, since some browsers may not read what is in `/tmp`; `mkstemp` makes it for its owner alone.
        descriptor, name = tempfile.mkstemp(prefix="open-", suffix=".html", dir=self._folder)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(_FORWARDER.format(url=self.url))
        return Path(name)

    def _remove_forwarder(self) -> None:
        with suppress(OSError):
            self.forwarder.unlink()

    def serve(self) -> None:
        """Answer until `close`, and keep saying that somebody watches."""
        keeper = threading.Thread(target=self._keep_wanting, daemon=True)
        keeper.start()
        self._server.serve_forever()
        keeper.join()

    def close(self) -> None:
        """Stop; called from another thread, or a signal's handler, than `serve`."""
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._remove_forwarder()
        stop_wanting(self._folder)

    def _keep_wanting(self) -> None:
        while not self._closing.wait(INTERVAL_S):
            with suppress(OSError):
                want(self._folder)

    def page(self) -> str:
        """Return the life that is running, or else the report; a page that waits where there is neither."""
        life = read_live(self._folder)
        if life is not None and life.is_running:
            return render_live(life)
        try:
            return render_html(schema.read(self._folder), served=True)
        except schema.ReportError as error:
            return render_live(None, str(error) if schema.is_in(self._folder) else "")

    def events(self) -> Iterator[bytes]:
        """Yield what happens in the folder, as server-sent events, from now on."""
        before, silence = self._state(), 0.0
        if before[0] is not None:
            yield self._life()
        while not self._closing.wait(INTERVAL_S):
            now, silence = self._state(), silence + INTERVAL_S
            if now != before:
                # With a report the page is another one; with another stage it goes on.
                goes_on = now[0] is not None and before[0] is not None
                yield self._life() if goes_on else _event("reload", None)
                before, silence = now, 0.0
            elif silence >= _SILENCE_S:
                silence = 0.0
                yield b": still here\n\n"

    def _life(self) -> bytes:
        life = read_live(self._folder)
        return _event("reload", None) if life is None else _event("life", describe_life(life))

    def _state(self) -> tuple[int | None, int | None]:
        """Return when the life and the report were written, in nanoseconds; None for one that is not there."""
        life = _written(self._folder / LIFE)
        if life is not None:
            read = read_live(self._folder)
            # A run that was killed has left it.
            life = life if read is not None and read.is_running else None
        return life, _written(self._folder / "leakcheck.json")

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = _WRITING_S

            def handle_one_request(self) -> None:
                server._server.is_silent(self.connection)
                super().handle_one_request()

            def parse_request(self) -> bool:
                parsed = super().parse_request()
                server._server.has_asked(self.connection)
                return parsed

            def do_GET(self) -> None:
                token, slash, name = self.path.lstrip("/").partition("/")
                known = hmac.compare_digest(token.encode(), server._token.encode())
                if not known or not self._is_of_this_page() or name not in ("", "events"):
                    self.send_error(HTTPStatus.NOT_FOUND)
                elif not slash:
                    # The page asks for its events by a name that is relative to its address.
                    self._send_elsewhere(f"/{token}/")
                elif name == "events":
                    self._send_events()
                else:
                    self._send_page(server.page().encode())
                    server._remove_forwarder()

            def _is_of_this_page(self) -> bool:
                """Return whether the address in the browser is this server's, and no page of another one asks."""
                hosts = server._hosts()
                origins = {f"http://{host}" for host in hosts}
                return self.headers.get("Host") in hosts and origins.issuperset(self.headers.get_all("Origin", []))

            def _send_elsewhere(self, path: str) -> None:
                self.send_response(HTTPStatus.PERMANENT_REDIRECT)
                self.send_header("Location", path)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def _send_page(self, data: bytes) -> None:
                self.send_response(HTTPStatus.OK)
                self._send_headers("text/html; charset=utf-8")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def _send_events(self) -> None:
                self.send_response(HTTPStatus.OK)
                self._send_headers("text/event-stream")
                self.send_header("Connection", "close")
                self.end_headers()
                self.close_connection = True
                # The browser went away.
                with suppress(ConnectionError):
                    for event in server.events():
                        self.wfile.write(event)

            def _send_headers(self, kind: str) -> None:
                self.send_header("Content-Type", kind)
                self.send_header("Cache-Control", "no-store")
                self.send_header("X-Content-Type-Options", "nosniff")
                self.send_header("Referrer-Policy", "no-referrer")

            def log_message(self, *_: Any) -> None:
                """Log nothing: the address has the token in it."""

        return Handler

    def _hosts(self) -> tuple[str, str]:
        port = self._server.server_port
        return f"{HOST}:{port}", f"localhost:{port}"


def _written(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def _event(name: str, data: Any) -> bytes:
    # JSON has no line breaks outside of strings, and none in them.
    return f"event: {name}\ndata: {as_json(data)}\n\n".encode()
