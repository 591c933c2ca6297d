"""What each command prints of itself: without colours where nobody wants them, plain where there is no terminal."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lowtide.leakcheck.cli.commands import app
from lowtide.reports import schema
from tests.reports.small_reports import LIFE, finding, report, subject
from tests.reports.terminals import sent_to_terminal

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]

EACH = """
import contextlib, shlex, sys
from lowtide.leakcheck.cli.commands import command_line
for line in sys.argv[1:]:
    sys.argv = ["lowtide", *shlex.split(line)]
    with contextlib.suppress(SystemExit):
        command_line()
"""

COMMANDS = [info.name or getattr(info.callback, "__name__", "").replace("_", "-") for info in app.registered_commands]


@pytest.fixture
def lines(tmp_path: Path) -> list[str]:
    """Command lines that print help, a report, a comparison, and errors of each kind."""
    schema.write(report(subject(finding(), stages=LIFE)), tmp_path)
    shown = [f"report {tmp_path}", f"report --wide {tmp_path}", f"diff {tmp_path} {tmp_path}", "--version"]
    wrong = ["run --nope", "run --cycles 0", "nope", "snapshot", f"report {tmp_path}/none", f"suppress {ROOT}"]
    return ["", "--help", *(f"{name} --help" for name in COMMANDS), *shown, *wrong]


def test_a_terminal_is_sent_colors(lines: list[str]) -> None:
    _, sent = sent_to_terminal(100, ["-c", EACH, *lines], ROOT)
    assert re.search(r"\x1b\[[0-9;]*3[1-6]m", sent)
    assert "LEAK: 1 finding" in sent


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"NO_COLOR": "1", "FORCE_COLOR": "1"}, {"TERM": "dumb"}])
def test_with_no_color_and_on_a_dumb_terminal_no_command_prints_a_style(
    environment: dict[str, str], lines: list[str]
) -> None:
    _, sent = sent_to_terminal(100, ["-c", EACH, *lines], ROOT, **environment)
    assert "\x1b" not in sent
    assert "LEAK: 1 finding" in sent
    assert sent.count("Usage:") == len(COMMANDS) + 2


def test_without_a_terminal_no_command_prints_a_control_code_whatever_is_forced(lines: list[str]) -> None:
    forced = dict.fromkeys(("FORCE_COLOR", "PY_COLORS", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE"), "1")
    done = subprocess.run(
        [sys.executable, "-c", EACH, *lines],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, **forced, "GITHUB_ACTIONS": "true"},
    )
    assert "\x1b" not in done.stdout + done.stderr
    assert "LEAK: 1 finding" in done.stdout
    assert done.stdout.count("Usage:") == len(COMMANDS) + 2
