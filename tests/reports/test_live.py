"""A life that is running, as a server shows it: who may see it, what it says, and what it costs the run."""

from __future__ import annotations

import ast
import http.client
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import psutil
import pytest

from lowtide.reports import schema
from lowtide.reports.live.broadcast import FRESH_S, LIFE, MOST_STAGES, WANTED, Broadcast, read_live, want
from lowtide.reports.live.server import PageServer
from tests.reports.small_reports import HOSTILE, report, subject
from tests.reports.small_reports import LIFE as STAGES
from tests.waiting import HANG_S, wait_until

pytestmark = pytest.mark.nightly

EMPTY = report()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PageServer]:
    made = PageServer(tmp_path)
    answering = threading.Thread(target=made.serve)
    answering.start()
    yield made
    made.close()
    answering.join(HANG_S)
    assert not answering.is_alive()


def get(url: str, path: str | None = None, **headers: str | None) -> tuple[int, str, http.client.HTTPMessage]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=HANG_S)
    given = {name: value for name, value in headers.items() if value is not None}
    connection.request("GET", parts.path if path is None else path, headers=given)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text, answer.headers


class Events:
    """The events of a page, one after the other."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=HANG_S)
        self._connection.request("GET", f"{parts.path}events")
        self._answer = self._connection.getresponse()
        assert self._answer.headers["Content-Type"] == "text/event-stream"

    def following(self) -> tuple[str, object]:
        lines = []
        while (line := self._answer.readline().decode().rstrip("\n")) or not lines:
            if line and not line.startswith(":"):
                lines.append(line)
        name, data = (line.partition(": ")[2] for line in lines)
        return name, msgspec.json.decode(data)

    def close(self) -> None:
        self._connection.close()


def write(folder: Path, written: schema.Report) -> None:
    (folder / "leakcheck.json").write_bytes(msgspec.json.encode(written))


def begin(folder: Path, now: str = "cycle 1 of 2: infer", stages: Sequence[schema.Stage] = STAGES) -> Broadcast:
    broadcast = Broadcast(folder, lambda: EMPTY)
    broadcast.stage_begins(now, lambda most: stages[-most:])
    return broadcast


def test_nobody_watches_and_nothing_is_written_or_asked(tmp_path: Path) -> None:
    def asked(most: int = 0) -> Any:
        raise AssertionError("for nobody")

    Broadcast(tmp_path, asked).stage_begins("infer", asked)
    want(tmp_path)
    os.utime(tmp_path / WANTED, (time.time() - FRESH_S - 1,) * 2)
    Broadcast(tmp_path, asked).stage_begins("infer", asked)
    assert [path.name for path in tmp_path.iterdir()] == [WANTED]


def test_somebody_watches_and_the_last_stages_are_written_until_the_end(tmp_path: Path) -> None:
    want(tmp_path)
    broadcast = begin(tmp_path, stages=STAGES * MOST_STAGES)
    life = read_live(tmp_path)
    assert life is not None
    assert (life.now, len(life.stages), life.is_running) == ("cycle 1 of 2: infer", MOST_STAGES, True)
    assert life.stages[-1] == STAGES[-1]
    broadcast.close()
    assert read_live(tmp_path) is None
    broadcast.close()


def test_a_folder_that_cannot_be_written_costs_the_run_nothing(tmp_path: Path) -> None:
    want(tmp_path)
    (tmp_path / f"{LIFE}.half").mkdir()
    begin(tmp_path).close()


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[" * 100_000, b'{"pid": 1}'])
def test_a_file_that_is_no_life_is_none(tmp_path: Path, data: bytes) -> None:
    (tmp_path / LIFE).write_bytes(data)
    assert read_live(tmp_path) is None


def test_a_life_whose_process_is_gone_runs_no_more(tmp_path: Path) -> None:
    want(tmp_path)
    begin(tmp_path)
    life = read_live(tmp_path)
    assert life is not None
    other = subprocess.Popen([sys.executable, "-c", "pass"])
    started = psutil.Process(other.pid).create_time()
    other.wait()
    assert not msgspec.structs.replace(life, pid=other.pid, started=started).is_running
    # Its number may be another process's.
    assert not msgspec.structs.replace(life, started=life.started - 1).is_running


def test_only_who_has_the_token_and_asks_for_this_host_gets_the_page(server: PageServer, tmp_path: Path) -> None:
    write(tmp_path, report(subject(name="a")))
    status, text, headers = get(server.url)
    assert status == 200
    assert "CLEAN: 1 subject" in text
    assert "connect-src 'self'" in text
    assert headers["Cache-Control"] == "no-store"
    port = urlsplit(server.url).port
    token = urlsplit(server.url).path.strip("/")
    assert len(token) >= 20
    assert get(server.url, Host=f"localhost:{port}")[0] == 200
    for path, host in (
        ("/", None),
        ("/events", None),
        (f"/{token[:-1]}/", None),
        (f"/{token}x/events", None),
        (f"/{token}/leakcheck.json", None),
        (f"/{token}/../leakcheck.json", None),
        (f"/{token}/", "evil.example"),
        (f"/{token}/events", f"evil.example:{port}"),
    ):
        status, text, _ = get(server.url, path, Host=host)
        assert (status, token in text) == (404, False), path


def test_a_page_of_another_origin_gets_nothing(server: PageServer) -> None:
    own = server.url.rsplit("/", 2)[0]
    port = urlsplit(server.url).port
    for origin in (own, f"http://localhost:{port}"):
        assert get(server.url, Origin=origin)[0] == 200
    for origin in ("http://evil.example", "null", f"https://127.0.0.1:{port}", "http://127.0.0.1:1", own + "1", ""):
        status, text, _ = get(server.url, Origin=origin)
        assert (status, "lowtide" in text) == (404, False), origin


def test_who_connects_and_asks_for_nothing_keeps_nobody_from_the_page(server: PageServer, tmp_path: Path) -> None:
    events = Events(server.url)
    begin(tmp_path)
    assert events.following()[0] in ("reload", "life")
    address = ("127.0.0.1", urlsplit(server.url).port)
    others = [socket.create_connection(address) for _ in range(258)]
    for each in others[::2]:
        each.sendall(b"GET / HTTP/1.1\r\nHost: ")
    assert get(server.url)[0] == 200
    assert threading.active_count() < 100
    # Who watches goes on to.
    write(tmp_path, report(subject(name="a")))
    assert events.following()[0] in ("reload", "life")
    events.close()
    for each in others:
        each.close()


def test_a_request_has_a_time_limit_however_often_it_sends_a_byte(
    server: PageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowtide.reports.live.server._ASKING_S", 0.2)
    slow = socket.create_connection(("127.0.0.1", urlsplit(server.url).port))
    slow.settimeout(0.05)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with suppress(TimeoutError, BrokenPipeError):
            slow.sendall(b"G")
            if slow.recv(1) == b"":
                break
    assert time.monotonic() < end
    slow.close()


def test_an_address_without_its_last_slash_leads_to_the_page(server: PageServer, tmp_path: Path) -> None:
    path = urlsplit(server.url).path.rstrip("/")
    status, _, headers = get(server.url, path)
    # From elsewhere the browser would ask for `/events`.
    assert (status, headers["Location"]) == (308, f"{path}/")
    assert get(server.url, path, Host="evil.example")[0] == 404
    assert get(server.url, path[:-1])[0] == 404


@pytest.mark.parametrize("sent", ["GET", "GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n"])
def test_a_browser_that_goes_away_is_no_error(
    server: PageServer, tmp_path: Path, capfd: pytest.CaptureFixture[str], sent: str
) -> None:
    # More than fits into what the system keeps for one that reads nothing.
    write(tmp_path, report(*(subject(name=f"{turn}{'x' * 1000}", reason="y" * 1000) for turn in range(5000))))
    parts = urlsplit(server.url)
    for _ in range(3):
        browser = socket.socket()
        browser.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        browser.connect((parts.hostname, parts.port))
        browser.sendall(sent.format(path=parts.path, host=parts.netloc).encode())
        if sent != "GET":
            assert browser.recv(16).startswith(b"HTTP/1.1 200")
        browser.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        browser.close()
    assert get(server.url)[0] == 200
    assert capfd.readouterr().err == ""


BROWSER = """\
import os, pathlib, re, stat, sys, time, urllib.parse, urllib.request
file = pathlib.Path(urllib.parse.unquote(urllib.parse.urlsplit(sys.argv[1]).path))
url = re.search(r"url=(http\\S+/)", file.read_text())[1]
mode = stat.S_IMODE(file.stat().st_mode)
page = urllib.request.urlopen(url, timeout=600).read().decode()
while file.exists():
    time.sleep(0.05)
seen = pathlib.Path(__file__).with_name("seen")
seen.with_suffix(".part").write_text(repr((sys.argv[1], url, mode, page)))
seen.with_suffix(".part").rename(seen)
"""


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_a_browser_is_led_to_the_page_and_no_command_line_has_its_address(
    tmp_path: Path, signal_number: signal.Signals
) -> None:
    folder, browser = tmp_path / "report", tmp_path / "browser.py"
    folder.mkdir()
    write(folder, report(subject(name="a")))
    browser.write_text(BROWSER)
    command = [sys.executable, "-m", "lowtide", "open", str(folder), "--serve"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "BROWSER": f"{sys.executable} {browser} %s"}
    ) as serving:
        wait_until((tmp_path / "seen").exists)
        serving.send_signal(signal_number)
        printed, _ = serving.communicate(timeout=HANG_S)
    given, url, mode, page = ast.literal_eval((tmp_path / "seen").read_text())
    assert printed.strip() == url
    assert urlsplit(url).path.strip("/") not in given
    assert mode == 0o600
    assert "CLEAN: 1 subject" in page
    assert [path.name for path in folder.iterdir()] == ["leakcheck.json"]


def test_it_listens_on_this_machine_alone(server: PageServer) -> None:
    port = urlsplit(server.url).port
    listening = [each for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    assert [each.laddr.ip for each in listening if each.laddr.port == port] == ["127.0.0.1"]


def test_a_folder_without_anything_waits_and_says_what_is_wrong_with_what_is_there(
    server: PageServer, tmp_path: Path
) -> None:
    assert "WAITING: no life runs here yet" in get(server.url)[1]
    (tmp_path / "leakcheck.json").write_text('{"schema": "lowtide-report/9"')
    text = get(server.url)[1]
    assert "WAITING" in text
    assert "leakcheck.json" in text


def test_a_life_is_followed_stage_by_stage_to_its_report(server: PageServer, tmp_path: Path) -> None:
    events = Events(server.url)
    broadcast = begin(tmp_path)
    # What waited is another page.
    assert events.following()[0] in ("reload", "life")
    text = get(server.url)[1]
    assert "RUNNING: cycle 1 of 2: infer" in text
    events.close()
    events = Events(server.url)
    name, said = events.following()
    assert name == "life"
    assert isinstance(said, dict)
    assert said["now"] == "cycle 1 of 2: infer"
    assert said["life"]["moments"] == ["before create", "create", "infer", "sleep(1)"]
    broadcast.stage_begins("cycle 1 of 2: wake", lambda most: STAGES)
    name, said = events.following()
    assert isinstance(said, dict)
    assert (name, said["now"]) == ("life", "cycle 1 of 2: wake")
    write(tmp_path, report(subject(name="a")))
    broadcast.close()
    while events.following()[0] != "reload":
        pass
    assert "CLEAN" in get(server.url)[1]
    events.close()


def test_texts_of_any_kind_stay_in_their_event(server: PageServer, tmp_path: Path) -> None:
    clean = HOSTILE.replace("\udc80", "")
    broadcast = Broadcast(tmp_path, lambda: EMPTY)
    broadcast.stage_begins(f"{clean}\n\nevent: reload\ndata: 1\n\n", lambda most: STAGES)
    events = Events(server.url)
    name, said = events.following()
    assert name == "life"
    assert isinstance(said, dict)
    assert "event: reload" in said["now"]
    events.close()


def test_a_folder_that_is_gone_does_not_keep_a_server_from_its_end(tmp_path: Path) -> None:
    folder = tmp_path / "report"
    made = PageServer(folder)
    answering = threading.Thread(target=made.serve)
    answering.start()
    shutil.rmtree(folder)
    folder.write_text("another thing")
    made.close()
    answering.join(HANG_S)
    assert not answering.is_alive()


def test_who_stops_watching_costs_the_next_run_nothing(tmp_path: Path) -> None:
    made = PageServer(tmp_path)
    answering = threading.Thread(target=made.serve)
    answering.start()
    assert (tmp_path / WANTED).exists()
    made.close()
    answering.join(HANG_S)
    assert list(tmp_path.iterdir()) == []
