"""What is printed of names and messages, which are anybody's: no byte of them acts on a terminal, or on a CI's log."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from lowtide.leakcheck.cli.commands import app
from lowtide.reports import schema
from lowtide.reports.escaping import escape_json, one_line
from tests.reports.generated import filled_report
from tests.reports.small_reports import LIFE, finding, report, subject
from tests.reports.terminals import sent_to_terminal

pytestmark = pytest.mark.nightly

COMMANDS = ("::stop-commands::x", "##[group]x", "##vso[task.complete]x", "section_start:1:x", "##teamcity[x]")
ACTING = "\x1b]0;t\x07\x1b[2J\x9b2J\r\u202e\u2066\u200b\u2028\x85\x00\x7f\ufeff\U000e0041"
HOSTILE = [
    *(f"\n{command}\r\n \u3000{command}" for command in COMMANDS),
    f"a{ACTING}b\nFORGED: everything came back\n",
    *COMMANDS,
    # Where a cell is folded, what follows begins a line.
    f"{'x' * 17} {' '.join(['::stop-commands::'] * 20)}",
    "[bold][/][link=file:///x]y[/link] :smile: \\[",
]
INNOCENT = "modèle 模型 مرحبا 👩\u200d🔬 a::b"

_FORGED = re.compile(r"^\s*(::|FORGED)|##\w*\[|section_(start|end):", re.MULTILINE)
_STYLE = re.compile(r"\x1b\[[0-9;]*m")


def check(printed: str) -> None:
    """Nothing acts, and no text has begun a line of its own."""
    acting = [char for char in printed if char != "\n" and one_line(char) != char]
    assert acting == []
    assert _FORGED.findall(printed) == []


@pytest.mark.parametrize("text", HOSTILE)
def test_no_command_prints_a_text_that_acts(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    schema.write(filled_report(text), tmp_path / "report")
    schema.write(report(subject(finding(fingerprint=text), stages=LIFE)), tmp_path / "earlier")
    for command in (
        "report report",
        "report report --wide",
        "diff earlier report",
        "diff report earlier --format markdown",
        "diff earlier report --format html",
        "suppress report",
        "history --add report --page page.html",
        "snapshot report/leakcheck.json",
    ):
        done = CliRunner().invoke(app, command.split())
        assert not isinstance(done.exception, Exception), command
        check(done.output)
    for name in ("summary.md", "junit.xml"):
        written = (tmp_path / "report" / name).read_text()
        # Markdown has its own escapes, with which the first characters stay: it is read from a file.
        check(written if name == "junit.xml" else written.replace("\\#", "."))


def test_a_damaged_report_and_a_folder_that_is_none_are_quoted_harmlessly(tmp_path: Path) -> None:
    (tmp_path / "leakcheck.json").write_text('{"schema": "\\u001b[2J\\n::x", "version": "\\u202e"}')
    for folder in (tmp_path, tmp_path / "a\n::stop-commands::\x1b"):
        done = CliRunner().invoke(app, ["report", str(folder)])
        assert done.exit_code == 2
        assert done.output.count("\n") == 1
        check(done.output)


def test_a_terminal_gets_styles_and_nothing_else_that_acts(tmp_path: Path) -> None:
    schema.write(filled_report("".join(HOSTILE)), tmp_path)
    code, sent = sent_to_terminal(60, ["-m", "lowtide", "report", "."], tmp_path)
    assert code == 1
    assert "\x1b[" in sent
    check(_STYLE.sub("", sent).replace("\r\n", "\n"))


def test_letters_of_any_script_stay_and_each_character_that_acts_is_shown(tmp_path: Path) -> None:
    found = finding(message=f"{INNOCENT} \x1b\x07\n\u202e")
    schema.write(report(subject(found, stages=LIFE)), tmp_path)
    printed = CliRunner().invoke(app, ["report", str(tmp_path)]).output
    assert rf"{INNOCENT} \x1b\x07\n\u202e" in printed


def test_json_that_is_printed_says_what_the_file_says() -> None:
    for text in (*HOSTILE, INNOCENT):
        data = msgspec.json.format(msgspec.json.encode({text: [text]}), indent=2).decode()
        check(escape_json(data))
        assert msgspec.json.decode(escape_json(data)) == {text: [text]}


def test_the_plugin_prints_names_of_threads_and_tests_harmlessly(tmp_path: Path) -> None:
    (tmp_path / "test_names.py").write_text(
        "import threading\n"
        "STOP = threading.Event()\n"
        f"NAME = {HOSTILE[0] + ACTING!r}\n"
        "def test_leaks():\n"
        "    threading.Thread(target=STOP.wait, name=NAME + '\\nFORGED: all', daemon=True).start()\n"
    )
    options = ["-p", "no:cacheprovider", "--leakcheck", "--leakcheck-device=cpu", "-vv", "-rA"]
    command = [sys.executable, "-m", "pytest", *options, "test_names.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=200)
    assert done.returncode == 1, done.stdout.decode()
    printed = done.stdout.decode()
    assert r"\n\x3a:stop-commands" not in printed  # in the middle of a line it commands nothing
    assert r"\x1b]0;t\x07" in printed
    # The lines that are asserted on are pytest's own otherwise.
    check(printed)
