"""Under xdist the workers judge and the controller writes one report."""

from __future__ import annotations

import signal
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from lowtide.probes.processes.agents import Agents

pytestmark = pytest.mark.nightly

if TYPE_CHECKING:
    from tests.pytest_plugin.conftest import InnerRun, RunInner

pytest.importorskip("xdist")

CONFTEST = """
    import gc
    import os
    import sys
    from pathlib import Path

    KEPT = []

    def leak():
        first, *others = gc.get_threshold()
        gc.set_threshold(first + 1, *others)

    def leak_a_file():
        KEPT.append(os.open(os.devnull, os.O_RDONLY))

    WRITTEN = Path(__file__).with_name("written.txt")

    # Other files of these names are in folders of earlier runs, which pytest removes.
    REPORT = str(WRITTEN.with_name("report"))

    def note(event, args):
        if event == "open" and str(args[0]).startswith(REPORT) and "leakcheck.json" in str(args[0]):
            with WRITTEN.open("a") as file:
                who = os.environ.get("PYTEST_XDIST_WORKER", "controller")
                file.write(f"{who}: {Path(str(args[0])).name} {args[1]}\\n")

    def pytest_configure(config):
        sys.modules["helper"] = sys.modules[__name__]
        sys.addaudithook(note)
"""

FILES = {
    "conftest.py": CONFTEST,
    "test_plain.py": """
        import pytest
        from helper import leak

        @pytest.mark.parametrize("size", range(4))
        def test_clean(size):
            pass

        def test_leaking():
            leak()

        def test_failing():
            assert 0

        def test_failing_and_leaking():
            leak()
            assert 0

        @pytest.mark.skip(reason="not here")
        def test_skipped():
            pass

        @pytest.mark.no_leakcheck(reason="it is known")
        def test_excused():
            leak()
    """,
    "test_module.py": """
        import pytest
        from helper import leak_a_file

        @pytest.fixture(scope="module")
        def log():
            leak_a_file()

        def test_first(log):
            pass

        def test_second(log):
            pass
    """,
    "test_session.py": """
        import pytest
        from helper import leak_a_file

        @pytest.fixture(scope="session")
        def session_log():
            leak_a_file()

        def test_session(session_log):
            pass
    """,
}


@pytest.fixture(scope="module")
def run(run_inner: RunInner) -> InnerRun:
    return run_inner(FILES, "-n", "2", "--dist", "loadfile", using=["xdist"])


def test_every_test_is_in_the_report_exactly_once(run: InnerRun) -> None:
    assert run.report is not None
    tests = Counter(subject.id for subject in run.report.subjects if "::" in subject.id)
    assert set(tests) == set(run.phases)
    assert set(tests.values()) == {1}


def test_the_report_is_written_once_and_by_the_controller(run: InnerRun) -> None:
    assert (run.folder / "written.txt").read_text().splitlines() == ["controller: leakcheck.json.partial w"]


def test_the_torch_that_a_worker_has_loaded_is_the_reports(run_inner: RunInner) -> None:
    torch = pytest.importorskip("torch")
    run = run_inner({"test_torch.py": "import torch\n\ndef test_it(): pass\n"}, "-n", "1", using=["xdist"])
    assert run.report is not None
    assert run.report.machine.torch == torch.__version__


def test_a_leak_in_a_worker_fails_its_test(run: InnerRun) -> None:
    assert run.counted("test_plain.py::test_leaking") == "failed"
    assert run.message("test_plain.py::test_leaking").startswith("leak: gc.get_threshold(): globals/not-restored: ")
    assert run.leaks("test_plain.py::test_leaking") == [("globals", "call")]


def test_a_clean_test_in_a_worker_passes(run: InnerRun) -> None:
    assert run.counted("test_plain.py::test_clean[0]") == "passed"
    assert run.is_clean("test_plain.py::test_clean[0]")


def test_a_failing_test_in_a_worker_is_clean(run: InnerRun) -> None:
    assert run.counted("test_plain.py::test_failing") == "failed"
    assert run.is_clean("test_plain.py::test_failing")


def test_an_excused_test_in_a_worker_passes_and_the_report_has_its_reason(run: InnerRun) -> None:
    subject = run.subject("test_plain.py::test_excused")
    assert (subject.outcome, subject.reason) == ("skipped", "it is known")


def test_every_leak_has_its_line_in_the_controllers_summary(run: InnerRun) -> None:
    for name in ("test_plain.py::test_leaking", "module fixture 'log' (test_module.py)"):
        assert run.out.count(f"LEAK {name} ") == 1


def test_the_leak_of_a_failing_test_is_reported_beside_its_failure(run: InnerRun) -> None:
    assert "test_plain.py::test_failing_and_leaking left something behind" in run.out


def test_what_survives_its_module_in_a_worker_is_blamed_on_the_fixture(run: InnerRun) -> None:
    assert [resource for resource, _ in run.leaks("module fixture 'log'")] == ["file-descriptors"]
    assert run.counted("test_module.py::test_second") == "passed error"


def test_what_survives_a_workers_session_is_blamed_on_the_session_fixture(run: InnerRun) -> None:
    assert [resource for resource, _ in run.leaks("session fixture 'session_log'")] == ["file-descriptors"]


def test_the_header_says_what_is_left_out(run: InnerRun) -> None:
    (line,) = [line for line in run.out.splitlines() if line.startswith("leakcheck: not judged here: the driver")]
    assert "workers share it" in line


def test_the_exit_code_is_that_of_failed_tests(run: InnerRun) -> None:
    assert run.code == pytest.ExitCode.TESTS_FAILED


CRASHING = {
    "conftest.py": CONFTEST,
    "test_crash.py": """
        import os
        import pytest
        from helper import leak

        @pytest.mark.parametrize("turn", range(6))
        def test_clean(turn):
            pass

        def test_leaking():
            leak()

        def test_crashing():
            os._exit(7)

        @pytest.mark.parametrize("turn", range(6))
        def test_clean_later(turn):
            pass
    """,
}


@pytest.fixture(scope="module")
def crashed(run_inner: RunInner) -> InnerRun:
    return run_inner(CRASHING, "-n", "2", using=["xdist"])


def test_a_worker_that_dies_does_not_lose_what_was_judged(crashed: InnerRun) -> None:
    assert crashed.report is not None
    judged = Counter(subject.id for subject in crashed.report.subjects)
    assert judged == Counter(test for test in crashed.phases if "crashing" not in test)
    assert len(judged) == 13
    assert crashed.blamed == ["test_crash.py::test_leaking"]


def test_a_test_in_which_a_worker_dies_is_not_judged(crashed: InnerRun) -> None:
    assert crashed.report is not None
    assert crashed.message("test_crash.py::test_crashing").startswith("worker ")
    found = [subject for subject in crashed.report.subjects if subject.id.endswith("::test_crashing")]
    assert all(subject.outcome == "error" for subject in found)


def test_a_worker_that_dies_ends_no_run(crashed: InnerRun) -> None:
    assert crashed.code == pytest.ExitCode.TESTS_FAILED
    assert "INTERNALERROR" not in crashed.out
    assert crashed.counted("test_crash.py::test_clean_later[5]") == "passed"


@pytest.fixture(scope="module")
def refused(run_inner: RunInner) -> InnerRun:
    source = "import pytest\n\n@pytest.mark.no_leakcheck\ndef test_marked():\n    pass\n"
    return run_inner({"conftest.py": CONFTEST, "test_marked.py": source}, "-n", "2", using=["xdist"])


def test_a_marker_that_makes_no_sense_is_refused_under_xdist_too(refused: InnerRun) -> None:
    # No worker may end at collection, so the test itself fails.
    assert refused.code == pytest.ExitCode.TESTS_FAILED
    assert refused.counted("test_marked.py::test_marked") == "error"
    assert "test_marked.py::test_marked: @pytest.mark.no_leakcheck needs one argument" in refused.out + refused.err


@pytest.fixture(scope="module")
def stopped(run_inner: RunInner) -> InnerRun:
    """The worker stops, so that its session fixture ends after its last test's report."""
    source = """
        import pytest
        from helper import leak_a_file

        @pytest.fixture(scope="session")
        def session_log():
            leak_a_file()

        def test_failing(session_log):
            assert 0

        def test_never_run():
            pass
    """
    files = {"conftest.py": CONFTEST, "test_stop.py": source}
    return run_inner(files, "-n", "1", "-x", using=["xdist"])


def test_what_is_judged_after_a_workers_last_test_is_in_the_report(stopped: InnerRun) -> None:
    assert stopped.blamed == ["session fixture 'session_log' (test_stop.py)"]


def test_with_one_worker_nothing_is_left_out(stopped: InnerRun) -> None:
    assert "workers share it" not in stopped.out


ENDS_THE_SESSION = {
    "test_ending.py": """
        import gc
        import os
        import signal
        import time
        from pathlib import Path

        from lowtide.reports import schema

        def test_clean():
            pass

        def test_leaking():
            first, *others = gc.get_threshold()
            gc.set_threshold(first + 1, *others)

        def test_ending():
            report = Path(__file__).with_name("report")
            while len(schema.read(report).subjects) < 3:
                time.sleep(0.01)
            session = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
            os.kill(session, getattr(signal, Path(__file__).with_name("signal.txt").read_text()))
            time.sleep(60)
    """
}


@pytest.mark.parametrize(
    ("name", "workers"), [("SIGTERM", 0), ("SIGKILL", 1)], ids=["terminated", "killed under xdist"]
)
def test_a_session_that_is_ended_from_outside_has_reported_what_was_finished(
    run_inner: RunInner, name: str, workers: int
) -> None:
    xdist = ["-n", str(workers)] if workers else []
    files, number = {**ENDS_THE_SESSION, "signal.txt": name}, getattr(signal, name)
    run = run_inner(files, *xdist, using=["xdist"] if workers else [], ends_by=number)
    # A later run removes the folder that this one could not.
    agents = Agents()
    agents.start()
    agents.stop()
    assert run.code == -number
    assert run.report is not None
    assert [(subject.id, subject.outcome) for subject in run.report.subjects] == [
        ("test_ending.py::test_clean", "clean"),
        ("test_ending.py::test_leaking", "leak"),
        ("the end of the run", "error"),
    ]
    assert run.report.subjects[-1].reason == "the run has not come to its end: 2 tests were finished"
