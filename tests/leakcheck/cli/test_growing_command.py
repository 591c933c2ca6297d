"""`lowtide exec --growth`: what grows in the processes of a server, by time, while it runs."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from lowtide.reports.schema import Finding, Subject, decode
from tests.waiting import HANG_S

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("no_neighbours")]

WATCH = ("--growth", "12s", "--warm-up", "2s")

SERVER = """
import ctypes
import multiprocessing
import os
import sys
import threading
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
        elif keeps.endswith("threads") or (keeps == "pool" and number <= 10):
            threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        elif keeps == "C":
            ctypes.memset(LIBRARY.malloc(1 << 16), 1, 1 << 16)
        return len(request)


def core(pipe, keeps):
    own = Core()
    while (number := pipe.recv()) is not None:
        pipe.send(own.handle(number, keeps))


def front(pipe, keeps):
    begun = os.path.join(os.path.dirname(__file__), "begun")
    while keeps == "late threads" and not os.path.exists(begun):
        time.sleep(0.05)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=core, args=(there, keeps), name="EngineCore")
    process.start()
    while (number := pipe.recv()) is not None:
        here.send(number)
        pipe.send(here.recv())
    here.send(None)
    process.join()


def main(keeps, end):
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=front, args=(there, keeps), name="front")
    process.start()
    number = 0
    while not os.path.exists(end):
        number += 1
        here.send(number)
        here.recv()
        time.sleep(0.05)
    here.send(None)
    process.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
"""


@pytest.fixture
def server(tmp_path: Path) -> Path:
    script = tmp_path / "server.py"
    script.write_text(textwrap.dedent(SERVER))
    return script


def watched(server: Path, keeps: str, *options: str, until: str = "nothing") -> tuple[int, str, Subject]:
    """Run the server until something is said of it.

    Returns:
        The exit status, what was written to standard error by then, and the subject.
    """
    end, said = server.with_name("end"), ""
    words = [
        "exec",
        "--json",
        "--settle",
        "0.3",
        *(options or WATCH),
        "--",
        sys.executable,
        str(server),
        keeps,
        str(end),
    ]
    with subprocess.Popen(
        [sys.executable, "-m", "lowtide", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        for line in running.stderr:
            said += line
            server.with_name("begun").touch()
            if line.startswith("lowtide: ") and (until in line or "nothing" in line):
                break
        end.touch()
        out, _ = running.communicate(timeout=HANG_S)
    (subject,) = decode(out.encode()).subjects
    return running.returncode, said, subject


def of_core(subject: Subject) -> Finding:
    (finding,) = subject.findings
    assert finding.process is not None
    assert (finding.process.name, finding.trend) == ("EngineCore", "growth")
    return finding


def test_a_list_that_grows_is_named_in_its_process_with_what_it_takes_in_a_second(server: Path) -> None:
    status, said, subject = watched(server, "list", until="takes")
    finding = of_core(subject)
    assert status == 1
    assert str(finding.holder).startswith(".seen of thread 'MainThread', local 'own' of core() in server.py:")
    assert [hop.edge for hop in finding.path[1:]] == ["f_locals['own']", ".seen"]
    assert " of bytes; that is " in finding.message
    assert finding.message.endswith(" a second")
    # While the command runs on.
    assert said.endswith(f"lowtide: {finding.message}\n")


def test_one_that_comes_once_it_is_watched_is_watched_for_as_long(server: Path) -> None:
    status, said, subject = watched(server, "late threads", until="threads more")
    assert (status, of_core(subject).resource) == (1, "threads")
    assert said.startswith("lowtide: growth of 3 processes is watched for 12 s\n")


def test_threads_that_grow_are_told_with_who_holds_them_and_what_they_run(server: Path) -> None:
    status, said, subject = watched(server, "threads", until="threads more")
    finding = of_core(subject)
    assert (status, finding.resource) == (1, "threads")
    assert finding.advice == "end with each interval the threads that it starts"
    assert said.endswith(f"lowtide: {finding.message}\n")


def test_threads_of_a_pool_that_is_full_do_not(server: Path) -> None:
    status, _, subject = watched(server, "pool")
    assert (status, subject.outcome, subject.findings) == (0, "clean", ())


@pytest.mark.parametrize("options", [WATCH, ("--growth", "12s")], ids=["said", "seen"])
def test_its_quiet_twin_is_silent_however_the_start_is_known(server: Path, options: tuple[str, ...]) -> None:
    status, said, subject = watched(server, "nothing", *options)
    assert (status, subject.outcome, subject.findings) == (0, "clean", ())
    assert said.endswith(" intervals of 1 s in 4 processes\n")


def test_growth_that_is_allowed_is_told_as_known(server: Path) -> None:
    status, _, subject = watched(server, "list", *WATCH, "--max-growth", "100MiB", until="takes")
    assert (status, subject.outcome) == (0, "clean")
    assert of_core(subject).suppressed_by == "--max-growth 100.0 MiB"


def test_memory_that_c_keeps_is_told_with_its_part(server: Path) -> None:
    status, _, subject = watched(server, "C", *WATCH, "--max-growth", "1MiB", until="grew")
    finding = of_core(subject)
    assert (status, finding.resource, finding.cause) == (1, "host-memory", "native")
    assert ": malloc in use has " in finding.message
    assert " a second)" in finding.message


def test_a_command_that_ends_too_early_is_not_judged(server: Path) -> None:
    status, _, subject = watched(server, "list", until="watched")
    assert (status, subject.findings) == (2, ())
    (missing,) = subject.not_measured
    assert missing.what == "what grows in its processes"
    assert missing.why.endswith(" of 12 readings that it takes")


STARTING = """
import multiprocessing
import os
import pathlib
import sys
import time

FILLED = {}


def core(folder, end, keeps):
    sys.path.insert(0, folder)
    for number in range(200):
        FILLED[number] = os.urandom(2048)
        pathlib.Path(folder, f"part_{number}.py").write_text("")
        __import__(f"part_{number}")
        time.sleep(0.1)
    while not os.path.exists(end):
        time.sleep(0.05)
        if keeps == "list":
            FILLED[len(FILLED)] = os.urandom(2048)


if __name__ == "__main__":
    keeps, end = sys.argv[1:]
    # As one that waits for a file from elsewhere.
    time.sleep(5)
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=core, args=(os.path.dirname(end), end, keeps), name="EngineCore")
    process.start()
    process.join()
"""


@pytest.mark.parametrize("keeps", ["nothing", "list"])
def test_what_a_late_start_fills_is_no_growth(tmp_path: Path, keeps: str) -> None:
    script = tmp_path / "starting.py"
    script.write_text(STARTING)
    status, said, subject = watched(script, keeps, "--growth", "12s", until="takes")
    assert "lowtide: the program was starting still" in said
    if keeps == "nothing":
        assert (status, subject.outcome, subject.findings) == (0, "clean", ())
    else:
        assert str(of_core(subject).holder).endswith(".FILLED")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--growth", "5s"], "lowtide: --growth 5s is not possible: what grows shows after 12 s or more"),
        (
            ["--growth", "soon"],
            "lowtide: --growth 'soon' is no time: use seconds such as 30, or a unit such as 30s, 5m",
        ),
        (["--warm-up", "5s"], "lowtide: --warm-up applies only with --growth TIME"),
        (["--max-growth", "5MB"], "lowtide: --max-growth applies only with --growth TIME"),
        (["--url", "http://127.0.0.1:1"], "lowtide: --url applies only with --growth TIME"),
        (["--growth", "1m", "--url", "here"], "lowtide: --url 'here' is no address of a server"),
        (["--growth", "1m", "--max-growth", "much"], "lowtide: --max-growth: 'much' is no size: use bytes"),
    ],
    ids=["short", "no time", "warm-up alone", "max-growth alone", "url alone", "no url", "no size"],
)
def test_bad_input_is_one_line(words: list[str], said: str) -> None:
    done = subprocess.run([sys.executable, "-m", "lowtide", "exec", *words, "true"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == 1
