"""One step of a bisection: good and bad only where that was measured."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from lowtide.leakcheck.cli.bisect_step import CommandRun, judge_commit
from lowtide.leakcheck.cli.commands import app, command_line
from lowtide.reports import schema
from tests.reports.small_reports import finding, report, subject

MARK = "0123456789abcdef"
OTHER = "fedcba9876543210"


@pytest.fixture
def reports(tmp_path: Path) -> Path:
    """A folder with reports that a command copies into its report folder."""
    part = finding(fingerprint=MARK, message="the part")
    written = {
        "leak": report(subject(finding())),
        "known": report(subject(finding(suppressed_by="known"))),
        "part": report(subject(finding(fingerprint=OTHER, parts=(part,)))),
        "former": report(subject(finding(fingerprint=OTHER, former_fingerprint=MARK))),
        "other": report(subject(finding(fingerprint=OTHER))),
        "clean": report(subject()),
        "failed": report(subject(), subject(name="life", outcome="error", reason="out of memory")),
        "skipped": report(subject(outcome="skipped", reason="no card")),
    }
    for name, each in written.items():
        (tmp_path / f"{name}.json").write_bytes(schema.encode(each))
    (tmp_path / "broken.json").write_text("{")
    return tmp_path


def shell(text: str) -> tuple[str, ...]:
    return ("/bin/sh", "-c", text)


def copying(folder: Path, name: str, code: int = 0) -> tuple[str, ...]:
    return shell(f'cp {shlex.quote(str(folder / name))}.json "$LOWTIDE_REPORT/leakcheck.json"; exit {code}')


def write_in_turn(monkeypatch: pytest.MonkeyPatch, folder: Path, names: list[str], code: int) -> None:
    """Put a report into each life's folder as its command would, without the processes."""
    turns = iter(names)

    def ended(command: object, result: object, timeout: object, env: Mapping[str, str]) -> dict[str, object]:
        source = folder / f"{next(turns)}.json"
        if source.exists():
            shutil.copy(source, Path(env["LOWTIDE_REPORT"]) / "leakcheck.json")
        return {"code": code, "timed_out": False}

    monkeypatch.setattr("lowtide.leakcheck.gate.cells.run_guarded", ended)


def run(command: Sequence[str], **options: Any) -> tuple[str, list[CommandRun]]:
    lives: list[CommandRun] = []
    return judge_commit(command, MARK, lives.append, **options), lives


@pytest.mark.parametrize(
    ("name", "code", "answer", "why"),
    [
        ("leak", 1, "present", "tests/test_a.py::test_b: 48.0 MiB of tensors did not come back"),
        ("known", 0, "present", "tests/test_a.py::test_b: 48.0 MiB"),
        ("part", 1, "present", "tests/test_a.py::test_b: the part"),
        ("former", 1, "present", "tests/test_a.py::test_b: 48.0 MiB"),
        ("other", 1, "absent", f"{MARK} is not in the report"),
        ("clean", 0, "absent", f"{MARK} is not in the report"),
        ("clean", 3, "unknown", "ended with exit code 3, which its report does not explain"),
        ("failed", 2, "unknown", "life was not judged: out of memory"),
        ("skipped", 0, "unknown", "the report judges nothing"),
        ("broken", 0, "unknown", "is not a lowtide-report/1 report"),
        ("missing", 7, "unknown", "ended with exit code 7 and wrote no report"),
    ],
)
def test_the_report_is_the_answer_and_the_exit_code_must_fit_to_it(
    name: str, code: int, answer: str, why: str, reports: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_in_turn(monkeypatch, reports, [name], code)
    reported, (life,) = run(("true",))
    assert (reported, life.answer) == (answer, answer)
    assert why in life.why


def test_the_folder_is_also_in_the_commands_arguments_and_new_for_each_life(reports: Path) -> None:
    seen = reports / "seen"
    text = f'test -z "$(ls -A {{report}})" && test {{report}} = "$LOWTIDE_REPORT" && echo {{report}} >> {seen}'
    command = shell(f"{text} && cp {reports}/clean.json {{report}}/leakcheck.json")
    assert run(command, lives=2, needed=1)[0] == "absent"
    folders = seen.read_text().split()
    assert len(set(folders)) == 2
    assert [folder for folder in folders if Path(folder).exists()] == []


@pytest.mark.parametrize(
    ("lives", "needed", "shows", "answer", "runs"),
    [
        (3, 1, ["clean", "leak"], "present", 2),
        (3, 2, ["leak", "clean", "leak"], "present", 3),
        (3, 2, ["clean", "clean"], "absent", 2),
        (3, 2, ["leak", "missing", "clean"], "unknown", 3),
        (2, 1, ["missing", "clean"], "unknown", 2),
    ],
)
def test_a_leak_must_show_in_some_of_the_lives(
    lives: int,
    needed: int,
    shows: list[str],
    answer: str,
    runs: int,
    reports: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_in_turn(monkeypatch, reports, shows, 0)
    reported, seen = run(("true",), lives=lives, needed=needed)
    assert (reported, len(seen)) == (answer, runs)


@pytest.mark.nightly
def test_a_run_that_takes_too_long_is_ended_with_its_children(reports: Path) -> None:
    pid = reports / "pid"
    reported, (life,) = run(shell(f"sleep 600 & echo $! > {pid}; wait"), timeout=2.0)
    assert (reported, life.why) == ("unknown", "the command was ended after 2 s, its time limit")
    assert not lives(int(pid.read_text()))


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_command_that_is_not_there_is_not_measured() -> None:
    reported, (life,) = run(("/nowhere/at-all",))
    assert (reported, life.why) == ("unknown", "/nowhere/at-all could not be started, or was killed")


def test_the_command_exits_as_git_wants_it(reports: Path) -> None:
    codes = {}
    for name in ("clean", "leak", "missing"):
        done = CliRunner().invoke(app, ["bisect-step", "--fingerprint", MARK, "--", *copying(reports, name)])
        codes[name] = done.exit_code
        assert "in this commit" in done.stderr
    assert codes == {"clean": 0, "leak": 1, "missing": 125}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--fingerprint", "nothing", "--", "true"], "--fingerprint nothing is none: take the sixteen hex digits"),
        (["--fingerprint", MARK, "--needed", "2", "--", "true"], "--needed 2 of --lives 1 is not possible: use 1 to 1"),
        (["--fingerprint", MARK, "--timeout", "0", "--", "true"], "--timeout 0 is not possible: use seconds above 0"),
        (["--fingerprint", MARK], "Missing argument"),
        (["--unknown", "--", "true"], "No such option: --unknown"),
    ],
)
def test_bad_input_stops_the_bisection_and_is_no_bad_commit(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["lowtide", "bisect-step", *arguments])
    code = command_line()
    error = capsys.readouterr().err
    assert (code, said in error) == (128, True), error
