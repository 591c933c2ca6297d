"""`lowtide exec --growth`: what grows in the processes of a server, by time, while it runs."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from lowtide.reports.schema import Finding, Subject, decode

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("no_neighbours")]

WATCH = ("--growth", "12s", "--warm-up", "2s")

SERVER = """
import ctypes
import multiprocessing
import os
import sys
import time

LIBRARY = ctypes.CDLL(None)
LIBRARY.malloc.restype = ctypes.c_void_p


class Core:
    def __init__(self):
        self.seen, self.running = [], {}

    def handle(self, number, keeps):
        request = os.urandom(2048)
        self.running[number % 8] = request
        if keeps == "list":
            self.seen.append(request)
        elif keeps == "C":
            ctypes.memset(LIBRARY.malloc(1 << 16), 1, 1 << 16)
        return len(request)


def core(pipe, keeps):
    own = Core()
    while (number := pipe.recv()) is not None:
        pipe.send(own.handle(number, keeps))


def front(pipe, keeps):
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=core, args=(there, keeps), name="EngineCore")
    process.start()
    while (number := pipe.recv()) is not None:
        here.send(number)
        pipe.send(here.recv())
    here.send(None)
    process.join()


def main(keeps, seconds):
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=front, args=(there, keeps), name="front")
    process.start()
    end, number = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        number += 1
        here.send(number)
        here.recv()
        time.sleep(0.05)
    here.send(None)
    process.join()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
"""


@pytest.fixture
def server(tmp_path: Path) -> Path:
    script = tmp_path / "server.py"
    script.write_text(textwrap.dedent(SERVER))
    return script


def watched(
    server: Path, keeps: str, *options: str, seconds: float = 19
) -> tuple[subprocess.CompletedProcess[str], Subject]:
    words = ["exec", "--json", "--settle", "0.3", *(options or WATCH), "--", sys.executable, str(server), keeps]
    done = subprocess.run([sys.executable, "-m", "lowtide", *words, str(seconds)], capture_output=True, text=True)
    (subject,) = decode(done.stdout.encode()).subjects
    return done, subject


def of_core(subject: Subject) -> Finding:
    (finding,) = subject.findings
    assert finding.process is not None
    assert (finding.process.name, finding.trend) == ("EngineCore", "growth")
    return finding


def test_a_list_that_grows_is_named_in_its_process_with_what_it_takes_in_a_second(server: Path) -> None:
    done, subject = watched(server, "list")
    finding = of_core(subject)
    assert done.returncode == 1
    assert finding.holder == "thread 'MainThread', local 'own' of core() in server.py:29"
    assert [hop.edge for hop in finding.path[1:]] == ["f_locals['own']", ".seen"]
    assert " of bytes; that is " in finding.message
    assert finding.message.endswith(" a second")
    # While the command runs on.
    assert f"lowtide: {finding.message}" in done.stderr.replace("\n", " ")


def test_its_quiet_twin_is_silent_however_the_start_is_seen(server: Path) -> None:
    done, subject = watched(server, "nothing", "--growth", "12s", seconds=22)
    assert (done.returncode, subject.outcome, subject.findings) == (0, "clean", ())
    assert "lowtide: nothing grows over 12 intervals of 1 s in 4 processes" in done.stderr


def test_growth_that_is_allowed_is_told_as_known(server: Path) -> None:
    done, subject = watched(server, "list", *WATCH, "--max-growth", "10MiB")
    assert (done.returncode, subject.outcome) == (0, "clean")
    assert of_core(subject).suppressed_by == "--max-growth 10.0 MiB"


def test_memory_that_c_keeps_is_told_with_its_part(server: Path) -> None:
    done, subject = watched(server, "C", *WATCH, "--max-growth", "1MiB")
    finding = of_core(subject)
    assert (done.returncode, finding.resource, finding.cause) == (1, "host-memory", "native")
    assert ": malloc in use has " in finding.message
    assert " a second)" in finding.message


def test_a_command_that_ends_too_early_is_not_judged(server: Path) -> None:
    done, subject = watched(server, "list", seconds=6)
    assert (done.returncode, subject.findings) == (2, ())
    (missing,) = subject.not_measured
    assert missing.what == "what grows in its processes"
    assert missing.why.endswith(" of 12 readings that it takes")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--growth", "5s"], "lowtide: --growth 5s is not possible: what grows shows after 12 s or more"),
        (
            ["--growth", "soon"],
            "lowtide: --growth 'soon' is no time: use seconds such as 30, or a unit such as 30s, 5m",
        ),
        (["--warm-up", "5s"], "lowtide: --warm-up needs --growth TIME: that is what it is about"),
        (["--max-growth", "5MB"], "lowtide: --max-growth needs --growth TIME: that is what it is about"),
        (["--growth", "1m", "--max-growth", "much"], "lowtide: --max-growth: 'much' is no size: use bytes"),
    ],
    ids=["short", "no time", "warm-up alone", "max-growth alone", "no size"],
)
def test_bad_input_is_one_line(words: list[str], said: str) -> None:
    done = subprocess.run([sys.executable, "-m", "lowtide", "exec", *words, "true"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == 1
