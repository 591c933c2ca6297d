"""Files of processes under `--leakcheck`: whose they are that a fixture's processes made, and what removes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pytest_plugin.conftest import InnerRun, RunInner

pytestmark = pytest.mark.nightly

TESTS = """
import os, socket, subprocess, sys, tempfile, uuid
import pytest

SERVE = '''
import os, socket, sys, time
if os.fork() == 0:
    inner = socket.socket(socket.AF_UNIX)
    inner.bind(sys.argv[1] + ".worker")
    inner.listen()
    print("ready", flush=True)
    time.sleep(600)
outer = socket.socket(socket.AF_UNIX)
outer.bind(sys.argv[1] + ".core")
outer.listen()
print("ready", flush=True)
for line in sys.stdin:
    with open(f"/dev/shm/lowtide_test_{os.getpid()}", "wb") as file:
        file.write(bytes(4096))
    print("made", flush=True)
'''


class Served:
    def __init__(self):
        self.path = f"{tempfile.gettempdir()}/lowtide_test_{uuid.uuid4()}"
        self.own = socket.socket(socket.AF_UNIX)
        self.own.bind(self.path)
        self.core = subprocess.Popen(
            [sys.executable, "-c", SERVE, self.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        self.core.stdout.readline(), self.core.stdout.readline()

    def infer(self):
        self.core.stdin.write("1\\n")
        self.core.stdin.flush()
        self.core.stdout.readline()

    def end(self):
        os.killpg(self.core.pid, 9)
        self.core.wait()
        self.core.stdin.close()
        self.core.stdout.close()
        self.own.close()


@pytest.fixture(scope="module", params=[False, True], ids=["leaves", "removes"])
def served(request):
    made = Served()
    yield made
    made.end()
    if request.param:
        for each in (made.path, made.path + ".core", made.path + ".worker"):
            os.unlink(each)
        os.unlink(f"/dev/shm/lowtide_test_{made.core.pid}")


def test_one(served): served.infer()


def test_two(served): pass


def test_that_leaves_them():
    Served().end()


def test_after(): pass
"""


@pytest.fixture(scope="module")
def run(run_inner: RunInner) -> InnerRun:
    return run_inner({"test_inner.py": TESTS}, settle=0.3)


@pytest.fixture(scope="module", autouse=True)
def tidy(run: InnerRun) -> None:
    assert run.report is not None
    for subject in run.report.subjects:
        for finding in subject.findings:
            for path in (finding.holder or "").split(", "):
                Path("/dev/shm", path).unlink(missing_ok=True)


def test_the_files_of_all_its_processes_are_the_fixture_s_and_the_tests_are_clean(run: InnerRun) -> None:
    segment, finding = sorted(run.subject("module fixture 'served'").findings, key=lambda each: each.resource)
    assert (segment.resource, segment.bytes) == ("shared-memory", 4096)
    assert (finding.resource, finding.count) == ("temporary-files", 3)
    assert finding.stage.startswith("setup of module fixture 'served'")
    assert "bound in Served.__init__, test_inner.py:" in finding.message
    assert finding.message.count("process ") >= 2
    assert run.blamed == ["module fixture 'served' (test_inner.py)", "test_inner.py::test_that_leaves_them"]


def test_the_twin_that_removes_them_is_clean(run: InnerRun) -> None:
    assert run.report is not None
    fixtures = [subject for subject in run.report.subjects if subject.id.startswith("module fixture 'served'")]
    assert sum(map(bool, (subject.findings for subject in fixtures))) == 1
    assert run.is_clean("test_inner.py::test_two[removes]")


def test_the_remedy_removes_all_of_them_though_other_tests_ran_meanwhile(run: InnerRun) -> None:
    (finding,) = run.subject("test_inner.py::test_that_leaves_them").findings
    assert finding.remedy is not None
    assert (finding.count, finding.remedy.action.count("os.unlink(")) == (3, 3)
    # Nobody has measured one of them alone.
    assert "gives nothing back" not in run.out
