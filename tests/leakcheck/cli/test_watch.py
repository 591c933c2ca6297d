"""`lowtide watch`: a server under load, what it keeps of its requests, how it ends, and its metrics."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import textwrap
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

pytest.importorskip("httpx")
pytest.importorskip("opentelemetry.sdk")

import httpx
from prometheus_client.parser import text_string_to_metric_families

from lowtide.leakcheck.cli.running import _listener
from lowtide.leakcheck.growth.quantities import HeldSource
from lowtide.leakcheck.processes.exported_metrics import ExportedMetrics
from lowtide.leakcheck.targets.load import Load
from lowtide.probes.device.driver import find_driver
from lowtide.reports.schema import Finding, Subject, decode
from tests.waiting import HANG_S, wait_until

ROOT = Path(__file__).parents[3]

SERVER = """
import ctypes
import http.server
import json
import os
import signal
import sys
import threading
import time
from multiprocessing import resource_tracker

KEPT, ANSWERED = [], [0]


class Answers(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def say(self, status, text, kind="application/json"):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self):
        if self.path == "/metrics":
            counted = "# TYPE vllm:request_success counter\\nvllm:request_success_total %d\\n" % ANSWERED[0]
            self.say(200, counted, "text/plain")
        elif self.path == "/v1/models":
            self.say(200, json.dumps({"data": [{"id": "small", "max_model_len": 64}]}))
        else:
            self.say(200 if self.path == "/health" else 404, "")

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked["max_tokens"] < 1:
            return self.say(400, "{}")
        ANSWERED[0] += 1
        if MODE == "keeps":
            KEPT.append(os.urandom(2048))
        if MODE == "dies" and ANSWERED[0] > 200:
            os._exit(3)
        if MODE == "refuses":
            return self.say(500, "no")
        time.sleep(0.01)
        self.say(200, json.dumps({"choices": []}))


def take():
    while True:
        # Less than a dozen in one short watch, which would tell that by itself.
        time.sleep(3)
        os.open("/dev/null", os.O_RDONLY)


MODE = sys.argv[1]
if MODE == "takes":
    threading.Thread(target=take, daemon=True).start()
port = int(sys.argv[sys.argv.index("--port") + 1])
server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Answers)
if "--workers" in sys.argv:
    resource_tracker.ensure_running()
    if os.fork() and os.fork():
        while True:
            time.sleep(0.1)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
server.serve_forever()
"""


@pytest.fixture
def port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@pytest.fixture
def server(tmp_path: Path) -> Path:
    script = tmp_path / "server.py"
    script.write_text(textwrap.dedent(SERVER))
    return script


@contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.terminate()


def watch(*words: str) -> tuple[int, str, Subject]:
    done = subprocess.run(
        [sys.executable, "-m", "lowtide", "watch", "--json", *words], capture_output=True, text=True, timeout=HANG_S
    )
    assert done.stdout, done.stderr
    (subject,) = decode(done.stdout.encode()).subjects
    return done.returncode, done.stderr, subject


def watched(server: Path, mode: str, port: int, *options: str, seconds: str = "40s") -> tuple[int, str, Subject]:
    command = (sys.executable, str(server), mode, "--port", str(port))
    return watch("--for", seconds, "--warm-up", "1s", "--load", "4", *options, "--", *command)


def of_list(subject: Subject) -> Finding:
    (finding,) = subject.findings
    assert (finding.holder, finding.trend) == ("__main__.KEPT", "growth")
    return finding


def per_request(finding: Finding) -> float:
    said = re.search(r"; ([\d.]+) KiB a request over (\d+) requests$", finding.message)
    assert said is not None, finding.message
    assert int(said[2]) > 100
    return float(said[1])


@pytest.mark.nightly
def test_a_list_that_takes_two_kilobytes_of_each_request_is_named_with_them(server: Path, port: int) -> None:
    status, said, subject = watched(server, "keeps", port)
    assert status == 1
    assert 1.8 < per_request(of_list(subject)) < 2.2
    assert re.search(r"^lowtide: whether that goes on is watched for 2\d s more$", said, re.MULTILINE)
    assert subject.not_measured == ()


@pytest.mark.nightly
@pytest.mark.parametrize(("mode", "outcome"), [("keeps", "leak"), ("nothing", "clean")])
def test_a_command_that_runs_on_is_told_by_request_where_its_address_is_given(
    mode: str, outcome: str, server: Path, port: int
) -> None:
    url = f"http://127.0.0.1:{port}"
    words = ["exec", "--json", "--growth", "40s", "--warm-up", "1s", "--url", url, "--", sys.executable, str(server)]
    done = subprocess.Popen(
        [sys.executable, "-m", "lowtide", *words, mode, "--port", str(port)], stdout=subprocess.PIPE, text=True
    )
    with done, Load(url, 4, is_needed=True):
        # It has been watched for all the time by then, and was not ended when that was over.
        time.sleep(60)
        assert done.poll() is None
        (child,) = psutil.Process(done.pid).children()
        done.terminate()
        out, _ = done.communicate(timeout=HANG_S)
    assert not child.is_running()
    (subject,) = decode(out.encode()).subjects
    assert (subject.outcome, subject.not_measured) == (outcome, ())
    if mode == "keeps":
        assert 1.8 < per_request(of_list(subject)) < 2.2


@pytest.mark.nightly
def test_that_a_command_ends_by_itself_is_no_finding_though_its_address_is_given(server: Path, port: int) -> None:
    url = f"http://127.0.0.1:{port}"
    words = ["exec", "--json", "--growth", "40s", "--warm-up", "1s", "--url", url, "--", sys.executable, str(server)]
    done = subprocess.Popen(
        [sys.executable, "-m", "lowtide", *words, "dies", "--port", str(port)], stdout=subprocess.PIPE, text=True
    )
    with done, Load(url, 4, is_needed=True):
        out, _ = done.communicate(timeout=HANG_S)
    (subject,) = decode(out.encode()).subjects
    # It ends too early to tell what grows, and that is all.
    assert (subject.outcome, subject.findings) == ("unsupported", ())
    assert [each.what for each in subject.not_measured] == ["what grows in its processes"]


@pytest.mark.nightly
def test_its_quiet_twin_is_clean_for_all_the_time(server: Path, port: int) -> None:
    status, said, subject = watched(server, "nothing", port)
    assert (status, subject.outcome, subject.findings, subject.not_measured) == (0, "clean", (), ())
    assert said.count("lowtide: nothing grows over ") == 2


@pytest.mark.nightly
def test_a_server_that_dies_is_a_finding_with_what_it_held(server: Path, port: int) -> None:
    status, _, subject = watched(server, "dies", port)
    (finding,) = subject.findings
    assert status == 1
    assert finding.message.startswith("the server ended with exit code 3 while it was watched; its processes held ")


@pytest.mark.nightly
def test_a_server_that_refuses_all_is_not_judged(server: Path, port: int) -> None:
    status, _, subject = watched(server, "refuses", port, seconds="12s")
    assert status == 2
    assert "a request was refused: 500 no" in " ".join(each.why for each in subject.not_measured)


def test_one_that_never_answers_is_told_with_the_address_that_was_asked() -> None:
    ends = [sys.executable, "-c", "import time; time.sleep(2)"]
    done = subprocess.run(
        [sys.executable, "-m", "lowtide", "watch", "--", *ends], capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 1
    assert "the server is asked at http://127.0.0.1:8000: --url says another address" in done.stderr
    assert "the server ended with exit code 0 while it was watched" in done.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("has_agents", [True, False])
def test_one_that_runs_is_found_by_its_address(server: Path, port: int, has_agents: bool) -> None:
    command = (sys.executable, str(server), "keeps", "--port", str(port))
    lowtide = (sys.executable, "-m", "lowtide", "exec", "--") if has_agents else ()
    url = f"http://127.0.0.1:{port}"
    with running(*lowtide, *command), Load(url, 0, is_needed=True) as load:
        wait_until(lambda: load.silent_for() is not None)
        # It counts its requests itself, too.
        with Load(url, 2, is_needed=True):
            status, _, subject = watch("--for", "40s", "--warm-up", "1s", "--url", url)
    assert status == 1
    assert 1.8 < per_request(of_list(subject)) < 2.2


def test_of_workers_that_share_a_socket_whoever_has_it_above_them_is_watched() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        worker = [sys.executable, "-c", "input()"]
        with subprocess.Popen(worker, stdin=subprocess.PIPE, pass_fds=[listening.fileno()]) as process:
            assert _listener(url) == os.getpid()
            process.communicate(b"\n")
        assert _listener(url) == os.getpid()


@pytest.mark.nightly
def test_all_workers_of_a_server_are_watched_and_no_helper_of_theirs(server: Path, port: int) -> None:
    command = (sys.executable, str(server), "keeps", "--port", str(port), "--workers")
    url = f"http://127.0.0.1:{port}"
    with running(*command), Load(url, 4, is_needed=True) as load:
        wait_until(lambda: load.silent_for() is not None)
        status, said, subject = watch("--for", "40s", "--warm-up", "1s", "--url", url)
    assert "growth of 3 processes is watched" in said
    assert status == 1
    assert {finding.holder for finding in subject.findings} == {"__main__.KEPT"}
    assert len({finding.process for finding in subject.findings}) == 2


@pytest.mark.nightly
def test_one_whose_agent_does_not_answer_is_not_clean(server: Path, port: int) -> None:
    command = (sys.executable, str(server), "nothing", "--port", str(port))
    url = f"http://127.0.0.1:{port}"
    with running(sys.executable, "-m", "lowtide", "exec", "--", *command), Load(url, 0, is_needed=True) as load:
        wait_until(lambda: load.silent_for() is not None)
        (pid,) = (
            each.pid for each in psutil.net_connections("tcp") if each.laddr.port == port and each.status == "LISTEN"
        )
        os.kill(pid, signal.SIGSTOP)
        try:
            status, _, subject = watch("--for", "12s", "--warm-up", "1s", "--pid", str(pid))
        finally:
            os.kill(pid, signal.SIGCONT)
    assert (status, subject.outcome) == (2, "unsupported")


@pytest.mark.nightly
def test_metrics_have_opentelemetry_s_names_and_say_what_grows(server: Path, port: int) -> None:
    command = ("--", sys.executable, str(server), "keeps", "--port", str(port))
    options = ("--for", "60s", "--warm-up", "1s", "--load", "2", "--metrics", "0")
    with subprocess.Popen(
        [sys.executable, "-m", "lowtide", "watch", *options, *command], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        address = ""
        for line in process.stderr:
            if said := re.search(r"metrics for Prometheus are at (\S+)", line):
                address = said[1]
            if "whether that goes on" in line:
                break
        text = urllib.request.urlopen(address).read().decode()
        process.terminate()
        process.communicate()
    samples = {each.name: each for family in text_string_to_metric_families(text) for each in family.samples}
    assert samples["process_memory_usage_bytes"].value > 1 << 20
    assert samples["process_unix_file_descriptor_count"].value > 3
    assert samples["process_thread_count"].value >= 1
    assert samples["lowtide_requests_total"].labels["outcome"] in ("answered", "failed")
    rate = samples["lowtide_growth_rate_bytes_per_second"]
    assert rate.labels["lowtide_holder"] == "__main__.KEPT"
    assert rate.value > 1000


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["takes", "nothing"])
def test_one_that_was_killed_and_begun_again_decides_from_all_its_readings(
    mode: str, server: Path, port: int, tmp_path: Path
) -> None:
    database = str(tmp_path / "history.sqlite")
    with running(sys.executable, str(server), mode, "--port", str(port)) as process:
        options = ("--history", database, "--pid", str(process.pid))
        command = [sys.executable, "-m", "lowtide", "watch", "--for", "90s", *options]
        with subprocess.Popen([*command, "--metrics", "0"], stderr=subprocess.PIPE, text=True) as first:
            assert first.stderr is not None
            said = next(line for line in first.stderr if "a page of them at" in line)
            page = said.split()[-1]
            wait_until(lambda: watched_seconds(database) > 40)
            shown = urllib.request.urlopen(page).read().decode()
            first.kill()
        status, _, subject = watch("--for", "12s", *options)
    assert f"pid {process.pid} (" in shown
    # On a busy machine a fork is looked at too seldom to say that nothing grows.
    assert (status == 1) is (mode == "takes")
    assert [finding.resource for finding in subject.findings] == ["file-descriptors"] * (mode == "takes")
    assert all("in 2 watches" in finding.message for finding in subject.findings)
    shown = subprocess.run(
        [sys.executable, "-m", "lowtide", "history", "--database", database], capture_output=True, text=True
    ).stdout
    assert (": no verdict yet\n" in shown, ": leak; pid" in shown) == (True, mode == "takes")


def watched_seconds(database: str) -> float:
    """Over how many seconds the history has readings; read alone, so that the watch can write meanwhile."""
    time.sleep(0.5)
    connection = sqlite3.connect(database)
    try:
        (seconds,) = connection.execute("SELECT max(at) - min(at) FROM watched_levels").fetchone()
    except sqlite3.OperationalError:  # no table yet
        return 0.0
    finally:
        connection.close()
    return float(seconds or 0.0)


def test_the_dashboard_shows_metrics_that_there_are() -> None:
    driver = find_driver()
    finding = Finding(
        resource="host-memory",
        cause="unknown",
        bytes=1,
        count=1,
        device="",
        stage="intervals",
        message="it grows",
        fingerprint="0",
    )
    source = HeldSource(lambda: [os.getpid()], driver, lambda: {os.getpid(): {"cuda:0": 1 << 20}})
    with ExportedMetrics(source, lambda: (5, 1), lambda: [(finding, 2.5)], lambda: "page", 0, sends=False) as exported:
        assert urllib.request.urlopen(f"http://127.0.0.1:{exported.port}/").read() == b"page"
        text = urllib.request.urlopen(f"http://127.0.0.1:{exported.port}/metrics").read().decode()
        of_another = urllib.request.Request(f"http://127.0.0.1:{exported.port}/", headers={"Host": "else.example"})
        with pytest.raises(urllib.error.HTTPError, match="421"):
            urllib.request.urlopen(of_another)
    driver.close()
    there = {each.name for family in text_string_to_metric_families(text) for each in family.samples}
    # Of a card only where there is one.
    there.add("hw_gpu_memory_usage_bytes")
    panels = json.loads((ROOT / "examples" / "grafana.json").read_text())["panels"]
    shown = {name for panel in panels for name in re.findall(r"[a-z]\w+_\w+", panel["targets"][0]["expr"])}
    assert shown == there - {"target_info"}


def test_the_load_asks_in_all_ways_and_counts(server: Path, port: int) -> None:
    with running(sys.executable, str(server), "nothing", "--port", str(port)):
        with Load(f"http://127.0.0.1:{port}", 3, is_needed=True) as load:
            wait_until(lambda: load.answered >= 30)
            assert load.silent_for() is not None
        assert (load.failed, load.failure) == (0, "")
        counted = Load(f"http://127.0.0.1:{port}", 0, is_needed=True).requests()
    assert counted is not None
    assert load.answered <= counted <= load.answered + 3


@pytest.mark.parametrize(("status", "is_there"), [(200, True), (404, True), (401, True), (503, False)])
def test_a_server_that_knows_no_health_has_answered(status: int, *, is_there: bool) -> None:
    load = Load("http://127.0.0.1:9", 0, is_needed=True)

    async def ask() -> bool:
        transport = httpx.MockTransport(lambda request: httpx.Response(status))
        async with httpx.AsyncClient(base_url="http://127.0.0.1:9", transport=transport) as client:
            return await load._is_well(client)

    assert asyncio.run(ask()) is is_there
    assert (load.silent_for() is not None) is is_there


def test_of_the_requests_that_fail_the_most_frequent_kind_is_told() -> None:
    load = Load("http://127.0.0.1:9", 1, is_needed=False)
    load._fail("a request was not refused", "200 fine")
    load._fail("a request was refused", "500 of\nnumber 1")
    load._fail("a request was refused", "500 of\nnumber 2")
    assert (load.failed, load.failure) == (3, "a request was refused: 500 of number 1")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "say what to watch: a command behind --, or --url or --pid of what runs"),
        (["--pid", "1", "--", "x"], "--pid names a process that runs: leave the command and --url out"),
        (["--pid", "1", "--load", "2"], "--load needs the address of a server: give --url in place of --pid"),
        (["--load", "-1", "--", "x"], "--load -1 is not possible: give clients, and --url, or a command"),
        (["--url", "here", "--", "x"], "--url 'here' is no address of a server: use one such as http://127.0.0.1:8000"),
        (["--for", "5s", "--", "x"], "--for 5s is not possible: what grows shows after 12 s or more"),
        (["--url", "http://127.0.0.1:9"], "no process of this machine that can be seen listens on port 9: "),
        (["--for", "12s", "--metrics", "99999", "--", "true"], "--metrics 99999 is not possible"),
        (["--", "lowtide-no-such-program"], "lowtide-no-such-program was not found"),
        (["--pid", "1", "--suppressions", "x"], "--suppressions needs a command: "),
        (["--pid", "1", "--report", "x"], "--report needs a command: "),
        (["--pid", "4194303"], "there is no process 4194303: `lowtide ps` lists engines"),
    ],
)
def test_bad_input_is_one_line(words: list[str], said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lowtide", "watch", *words], capture_output=True, text=True, timeout=HANG_S
    )
    (line,) = done.stderr.splitlines()
    assert (done.returncode, line.startswith(f"lowtide: {said}")) == (2, True), line
