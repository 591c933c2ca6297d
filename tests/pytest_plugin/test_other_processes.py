"""Other processes under `--leakcheck`: one that ended and left nothing is clean, one that may hide a leak is not."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path

import pytest

from lowtide.reports.outcomes import ENDED
from tests.pytest_plugin.conftest import InnerRun, RunInner

TARGET = Path(__file__).parents[1] / "leakcheck" / "spawned_target.py"

TESTS = """
import subprocess, sys
import pytest, torch
from spawned_target import SpawnedTarget

@pytest.fixture(scope="module")
def served():
    target = SpawnedTarget()
    target.create({})
    yield target
    target.shutdown()

def test_staged(leakcheck):
    target = leakcheck.engine(SpawnedTarget(), infer="infer", sleep="sleep")
    target.create({})
    target.infer([3], 1)
    target.sleep(1, "wait")
    target.shutdown()

def test_fails(leakcheck):
    target = leakcheck.engine(SpawnedTarget(), infer="infer")
    target.create({})
    try:
        target.infer([3], 1)
        assert False
    finally:
        target.shutdown()

def test_without():
    subprocess.run([sys.executable, "-c", "held = b'x' * (64 << 20)"], check=True)

def test_served(served):
    served.infer([3], 1)

def test_served_leaks(served):
    global KEPT
    KEPT = torch.ones(1000)
"""

CHILDREN = """
import contextlib, subprocess, sys
import lowtide
import pytest

LIVES = "held = b'x' * (64 << 20); print('ready', flush=True); input()"

@contextlib.contextmanager
def child(*options):
    # Without its environment (-I) Python has no agent.
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, *options, "-c", LIVES], **pipes) as process:
        assert process.stdout.readline() == b"ready\\n"
        yield process
        process.communicate(b"\\n")

@pytest.fixture(scope="module")
def outlives():
    with child("-I") as process:
        yield process

@pytest.mark.parametrize("options", [(), ("-I",)], ids=["agent", "no agent"])
def test_ends(options):
    with child(*options), lowtide.stage("at work"):
        pass

def test_ends_unmarked():
    with child():
        # A process that begins is a moment at which all are looked at.
        subprocess.run([sys.executable, "-c", ""], check=True)

def test_is_ending():
    ends_late = LIVES.replace("input()", "sys.stdin.read(); time.sleep(0.3)")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", f"import sys, time; {ends_late}"], **pipes)
    assert process.stdout.readline() == b"ready\\n"
    subprocess.run([sys.executable, "-c", ""], check=True)
    process.stdin.close()
    process.stdout.close()

def test_slept():
    with child("-I"), lowtide.stage("sleep"):
        pass

def test_outlives_its_test(outlives):
    pass

def test_is_left():
    global LEFT
    LEFT = child("-I")
    LEFT.__enter__()
"""

KILLED = """
import subprocess, sys

ENGINE = '''
import os, subprocess, sys, tempfile
from multiprocessing import resource_tracker, shared_memory
held = []
if sys.argv[1:]:
    quiet = {'stdout': subprocess.DEVNULL, 'stderr': subprocess.DEVNULL}
    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(120)'], **quiet)
    segment = os.open(f'/dev/shm/lowtide_test_{os.getpid()}', os.O_CREAT | os.O_RDWR)
    os.ftruncate(segment, 1 << 20)
    held.append(tempfile.NamedTemporaryFile(prefix='lowtide_test_'))
print('ready', flush=True)
sys.stdin.read()
'''

def kill(*kinds):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", ENGINE, *kinds], **pipes) as process:
        assert process.stdout.readline() == b"ready\\n"
        process.kill()

def test_killed():
    kill("leaves")

def test_killed_tidily():
    kill()
"""

CARD = """
import subprocess, sys

def test_on_a_card():
    # The driver below lists the children that say so.
    with subprocess.Popen([sys.executable, "-c", "input()  # on a card"], stdin=subprocess.PIPE) as child:
        import lowtide
        with lowtide.stage("at work"):
            pass
        child.communicate(b"\\n")
"""

NVML = """
import os
from pathlib import Path
from types import SimpleNamespace

class NVMLError(Exception):
    pass

nvmlInit = nvmlShutdown = lambda: None
nvmlDeviceGetCount = lambda: 1
nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(used=5 << 30, total=80 << 30)
nvmlDeviceGetGraphicsRunningProcesses_v3 = lambda handle: []

def nvmlDeviceGetHandleByIndex(index):
    if index:
        raise NVMLError("Invalid Argument")
    return index

def nvmlDeviceGetComputeRunningProcesses_v3(handle):
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        pids = file.read().split()
    on_card = [pid for pid in pids if b"on a card" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return [SimpleNamespace(pid=int(pid), usedGpuMemory=4 << 30) for pid in on_card]
"""


@pytest.fixture(scope="module")
def run(run_inner: RunInner) -> InnerRun:
    files = {"test_engines.py": TESTS, "spawned_target.py": TARGET.read_text()}
    return run_inner({**files, "test_zcard.py": CARD, "test_killed.py": KILLED, "pynvml.py": NVML})


@pytest.fixture(scope="module")
def children(run_inner: RunInner) -> InnerRun:
    # One of them ends only a little later.
    return run_inner({"test_children.py": CHILDREN}, settle=6)


@pytest.mark.parametrize("name", ["ends[agent]", "ends[no agent]", "ends_unmarked", "is_ending"])
def test_a_child_that_ended_in_its_test_and_left_nothing_is_clean(children: InnerRun, name: str) -> None:
    subject = children.subject(f"test_children.py::test_{name}")
    assert (subject.outcome, subject.findings, subject.reason) == ("clean", (), "")
    (missing,) = subject.not_measured
    # The report keeps what was seen of it.
    assert re.fullmatch(r"whether pid \d+ \(.+\) grew while it ran; it was seen with \d\d\.\d MiB host", missing.what)
    assert (missing.why, missing.process) == (ENDED, None)


def test_the_summary_says_once_what_was_judged_of_children_that_ended(children: InnerRun) -> None:
    (line,) = [line for line in children.out.splitlines() if "ended in their tests" in line]
    said = "4 processes ended in their tests and left nothing; whether they grew while they ran is not known: mark "
    assert line.startswith(said)
    assert "use lowtide check --turns" in line


@pytest.mark.parametrize(
    ("name", "why"),
    [("slept", "no agent that says what it keeps"), ("outlives_its_test", "too few tests have used it yet")],
)
def test_a_child_that_may_hide_a_leak_is_not_judged(children: InnerRun, name: str, why: str) -> None:
    subject = children.subject(f"test_children.py::test_{name}")
    assert (subject.outcome, subject.findings) == ("unsupported", ())
    assert why in subject.reason


def test_a_child_that_no_fixture_ends_is_a_leak(children: InnerRun) -> None:
    subject = children.subject("test_children.py::test_is_left")
    assert subject.outcome == "leak"
    assert "processes" in [finding.resource for finding in subject.findings]


@pytest.mark.parametrize(
    ("name", "why"), [("staged", "too few inferences tell"), ("served", "whether it grows shows from the fourth on")]
)
def test_a_test_whose_engine_slept_or_lives_on_in_a_child_is_not_judged(run: InnerRun, name: str, why: str) -> None:
    assert run.counted(f"test_engines.py::test_{name}") == "passed"
    subject = run.subject(f"test_engines.py::test_{name}")
    assert (subject.outcome, subject.findings) == ("unsupported", ()), subject.findings
    (missing,) = subject.not_measured
    assert missing.process is not None
    assert missing.process.name == "EngineCore"
    assert (missing.process.host or 0) > 48 << 20
    assert subject.reason == f"not judged: {missing.what}; {missing.why}"
    assert why in missing.why


def test_a_failed_test_stays_failed(run: InnerRun) -> None:
    assert run.counted("test_engines.py::test_fails") == "failed"
    assert run.subject("test_engines.py::test_fails").outcome == "clean"


def test_a_leak_of_this_process_s_own_stays_a_leak(run: InnerRun) -> None:
    subject = run.subject("test_engines.py::test_served_leaks")
    assert (subject.outcome, len(subject.findings), len(subject.not_measured)) == ("leak", 1, 1)


def test_a_test_beside_them_is_clean(run: InnerRun) -> None:
    subject = run.subject("test_engines.py::test_without")
    assert (subject.outcome, subject.not_measured) == ("clean", ())


def test_a_child_with_a_context_on_a_card_is_noted_whatever_it_holds_on_the_host(run: InnerRun) -> None:
    subject = run.subject("test_zcard.py::test_on_a_card")
    assert subject.outcome == "clean"
    (missing,) = subject.not_measured
    assert "; it was seen with 4.0 GiB on cuda:0, " in missing.what


def test_what_a_killed_child_left_fails_its_test(run: InnerRun) -> None:
    found = {finding.resource: finding for finding in run.subject("test_killed.py::test_killed").findings}
    assert set(found) == {"processes", "shared-memory", "temporary-files"}
    assert (found["shared-memory"].bytes, found["temporary-files"].count) == (1 << 20, 1)
    Path("/dev/shm", found["shared-memory"].holder or "").unlink()
    Path(found["temporary-files"].holder or "").unlink()
    # It ends by itself some time after its parent.
    with contextlib.suppress(ProcessLookupError):
        os.kill(int((found["processes"].holder or "").partition(" ")[0]), signal.SIGKILL)


def test_a_killed_child_that_left_nothing_is_clean(run: InnerRun) -> None:
    assert run.subject("test_killed.py::test_killed_tidily").outcome == "clean"


def test_the_summary_says_in_one_line_for_each_reason_what_was_not_judged(run: InnerRun) -> None:
    slept, lives = [line for line in run.out.splitlines() if "not judged in" in line]
    assert slept.startswith("not judged in 1 test: memory of pid ")
    assert lives.startswith("not judged in 1 test: memory of pid ")
    assert "6 judged, 2 with leaks, 2 not judged" in run.out
    assert "2 processes ended in their tests and left nothing; " in run.out
