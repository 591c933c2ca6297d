"""What the plugin says at the end of a run of what it could not judge."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from lowtide.pytest_plugin.session_watch import Spent
from lowtide.pytest_plugin.settings import Settings
from lowtide.pytest_plugin.terminal import MOST_NOT_MEASURED, headline, summary
from lowtide.reports.schema import Hop, NotMeasured, Subject
from tests.reports.small_reports import finding

if TYPE_CHECKING:
    from tests.pytest_plugin.conftest import RunInner

CARD = NotMeasured(what="driver cuda:0", why="NVML does not list process 7: another PID namespace?")


class Reporter:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def section(self, title: str, sep: str) -> None: ...

    def write_line(self, text: str, **markup: Any) -> None:
        self.lines.append(text)


def said(subjects: Sequence[Subject]) -> list[str]:
    reporter = Reporter()
    settings = Settings(
        tolerance=0,
        tolerance_is_final=False,
        settle=0.5,
        action="fail",
        report=None,
        suppressions=None,
        device="cpu",
        stacks="auto",
        remedies=True,
    )
    summary(cast(pytest.TerminalReporter, reporter), subjects, settings, (), Spent(3.14, 6.4))
    return [line for line in reporter.lines if line.startswith("not judged") and "here" not in line]


def clean(name: str, *missing: NotMeasured) -> Subject:
    return Subject(id=name, outcome="clean", not_measured=missing)


def test_what_a_driver_does_not_tell_is_said_once_with_its_reason() -> None:
    assert said([clean("a", CARD), clean("b", CARD), clean("c")]) == [
        "not judged in 2 tests: driver cuda:0 (NVML does not list process 7: another PID namespace?)"
    ]


@pytest.mark.parametrize(
    ("module", "table", "said"),
    [
        ("subprocess", "._active", "leak: processes/module-global: 1 process still running: 7 (cat)"),
        ("engine", "._active", "leak: engine._active[0]: processes/module-global: 1 process still running: 7 (cat)"),
        ("logging", ".root", "leak: logging.root[0]: processes/module-global: 1 process still running: 7 (cat)"),
    ],
)
def test_the_headline_shows_no_holder_that_only_a_library_knows(module: str, table: str, said: str) -> None:
    left = finding(
        resource="processes",
        cause="module-global",
        message="1 process still running: 7 (cat)",
        holder=f"{module}{table}[0]",
        path=(Hop(type="module", edge=module), Hop(type="list", edge=table), Hop(type="subprocess.Popen", edge="[0]")),
    )
    assert headline(Subject(id="a", outcome="leak", findings=(left,))) == said


def test_where_everything_was_judged_nothing_is_said() -> None:
    assert said([clean("a")]) == []


def test_what_concerns_most_tests_comes_first_and_the_rest_is_counted() -> None:
    others = [clean(str(turn), NotMeasured(what=f"thing {turn}", why="it is late")) for turn in range(8)]
    lines = said([*others, clean("a", CARD), clean("b", CARD)])
    assert lines[0].startswith("not judged in 2 tests: driver cuda:0")
    assert lines[1] == "not judged in 1 test: thing 0 (it is late)"
    assert len(lines) == MOST_NOT_MEASURED + 1
    assert lines[-1] == "not judged: 4 more, which a report (--leakcheck-report) lists"


def test_what_may_be_a_library_s_is_counted_on_the_terminal_and_listed_in_a_report_only() -> None:
    pipes = ", ".join(f"{number} -> pipe:[{number}]" for number in range(20, 41))
    missing = NotMeasured(what=f"21 file descriptors still open, since call: {pipes}", why="libnccl.so.2 is new")
    assert said([clean("a", missing)]) == ["not judged in 1 test: 21 file descriptors still open (libnccl.so.2 is new)"]


def test_what_python_will_wait_for_at_its_end_is_named(run_inner: RunInner) -> None:
    left = """
        import threading

        def test_leaving():
            threading.Thread(target=threading.main_thread().join, name="waits").start()
    """
    run = run_inner({"test_left.py": left})
    assert run.code == 1
    assert run.out.splitlines()[-1] == "leakcheck: before Python ends, it waits for thread 'waits'"


@pytest.mark.parametrize(("leaks", "code"), [(True, 1), (False, 4)])
@pytest.mark.nightly
def test_where_the_report_cannot_be_written_all_else_is_said_first(run_inner: RunInner, leaks: bool, code: int) -> None:
    spoils = f"""
        import gc
        from pathlib import Path

        def test_spoiling_the_report():
            Path(__file__).with_name("report").joinpath("leakcheck.json").mkdir()

        def test_leaking():
            first, *others = gc.get_threshold()
            gc.set_threshold(first + {int(leaks)}, *others)
    """
    run = run_inner({"test_spoiled.py": spoils})
    assert run.code == code
    assert ("LEAK test_spoiled.py::test_leaking globals/not-restored" in run.out) is leaks
    assert ("FAILED test_spoiled.py::test_leaking - leak: " in run.out) is leaks
    assert run.totals == ({"failed": 1, "passed": 1} if leaks else {"passed": 2})
    last = run.out.splitlines()[-1]
    assert last.startswith("ERROR: --leakcheck-report: ")
    assert last.endswith("leakcheck.json cannot be written: Is a directory; choose another report folder")
    assert "report: " not in run.out.replace(last, "").partition("= leakcheck =")[2]


def test_the_summary_has_a_line_for_each_cause_with_its_tests(run_inner: RunInner) -> None:
    inner = """
        import os
        import pytest

        KEPT, OTHERS = [], []

        @pytest.mark.parametrize("turn", range(6))
        def test_keeping(turn):
            KEPT.append(open(os.devnull))

        def test_keeping_another():
            OTHERS.append(open(os.devnull))
    """
    run = run_inner({"test_causes.py": inner})
    keeping, another = (line for line in run.out.splitlines() if line.startswith("LEAK "))
    first, more = keeping.split("; also in ")
    assert first.startswith("LEAK test_causes.py::test_keeping[0] file-descriptors/module-global ")
    assert more == ", ".join(f"test_causes.py::test_keeping[{turn}]" for turn in (1, 2, 3)) + " and 2 more"
    assert another.startswith("LEAK test_causes.py::test_keeping_another ")
    assert another.endswith("held by test_causes.OTHERS[0]")
    assert len([line for line in run.out.splitlines() if line.startswith("FAILED ")]) == 7
    matched = re.findall(pattern_for_vs_code(), run.out, re.MULTILINE)
    assert [file for file, _ in matched] == ["test_causes.py"] * 2
    assert [message.partition(" ")[0] for _, message in matched] == ["file-descriptors/module-global"] * 2
    assert all("held by test_causes." in message for _, message in matched)


def pattern_for_vs_code() -> str:
    """Return the pattern by which the task that the docs show finds a leak."""
    page = (Path(__file__).parents[2] / "docs" / "pytest.md").read_text(encoding="utf-8")
    (task,) = re.findall(r"^```json\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (shown,) = json.loads(task)["tasks"]
    return str(shown["problemMatcher"]["pattern"]["regexp"])


def test_a_traceback_of_the_program_s_has_none_of_our_frames(run_inner: RunInner) -> None:
    run = run_inner(
        {
            "conftest.py": """
                import pytest
                @pytest.fixture
                def broken():
                    raise ValueError("broken")
                @pytest.fixture(scope="session")
                def broken_for_all():
                    raise ValueError("broken")
                @pytest.fixture
                def broken_in_the_end():
                    yield
                    raise ValueError("broken")
            """,
            "broken_module.py": "raise ValueError('broken')",
            "test_inner.py": """
                import subprocess
                # First: what is left out once stays so.
                def test_cause():
                    try:
                        subprocess.run(["no-such-command"])
                    except OSError as error:
                        raise ValueError("broken") from error
                def test_setup(broken): pass
                def test_session(broken_for_all): pass
                def test_teardown(broken_in_the_end): pass
                def test_import(): import broken_module
                def test_start(): subprocess.run(["no-such-command"])
                def test_engine(leakcheck):
                    class Engine:
                        def generate(self): raise ValueError("broken")
                    leakcheck.engine(Engine(), infer="generate").generate()
            """,
        }
    )
    assert run.out.count("ValueError: broken") >= 6
    shown = [line for line in run.out.splitlines() if "lowtide/" in line and "Error" not in line]
    assert shown == []
