"""How the command ends where something is wrong with itself, with who interrupts it, or with what it has run.

The exit code of a leak is for leaks alone, a traceback for nobody, and a command that has spoken ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.nightly

PLAIN = """
import os, signal, sys, threading
from lowtide.leakcheck.cli import commands
from lowtide.leakcheck.processes import process_exit

process_exit.LINGER_S = process_exit._KILL_S = 0.1

def app(**_):
{app}

commands.app = app
commands.main()
"""
"""The command with something else in place of what it does."""


def python(code: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        # Against a hang.
        timeout=300,
        env={**os.environ, "TMPDIR": str(folder)},
        # A shell starts its background jobs, and with them all their children, deaf to it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def command(app: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return python(PLAIN.format(app=textwrap.indent(app, "    ")), *(arguments or ("run",)), folder=folder)


def test_an_error_of_lowtide_itself_is_one_line_with_its_traceback_in_a_file(tmp_path: Path) -> None:
    done = command("raise KeyError('oops\\nand more')", folder=tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    (file,) = tmp_path.glob("lowtide-error-*.txt")
    assert line.startswith("lowtide: an error of lowtide itself: KeyError: 'oops\\nand more'; please report it with")
    assert line.endswith(f"in {file}")
    assert file.read_text().startswith("Traceback (most recent call last)")


def test_an_error_whose_traceback_cannot_be_written_is_printed_with_it(tmp_path: Path) -> None:
    app = "import tempfile\ntempfile.NamedTemporaryFile = lambda *_, **__: open('/nowhere/file', 'w')\nraise KeyError"
    done = command(app, folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("Traceback (most recent call last)")
    assert done.stderr.splitlines()[-1].endswith("please report it with this traceback")


@pytest.mark.parametrize(
    ("app", "said"),
    [
        ("raise SystemExit(0)", "nothing was judged: the program that ran ended the process by sys.exit(0)"),
        ("import nowhere.at_all", "this command needs nowhere, which cannot be imported (No module named 'nowhere')"),
        # typer ends with 1 after it.
        ("try:\n    raise BrokenPipeError\nexcept OSError:\n    sys.exit(1)", "of lowtide itself: BrokenPipeError"),
        (
            "import typer\ntry:\n    raise EOFError\nexcept EOFError:\n    raise typer.Abort",
            "of lowtide itself: EOFError",
        ),
    ],
    ids=["exit", "not installed", "broken pipe", "end of input"],
)
def test_what_is_no_verdict_ends_with_2_and_one_line(app: str, said: str, tmp_path: Path) -> None:
    done = command(app, folder=tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert said in line


def test_without_torch_a_run_says_so_in_one_line(tmp_path: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; from lowtide.leakcheck.cli import main; main()"
    done = python(code, "run", folder=tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("lowtide: this command needs torch, which cannot be imported")
    assert list(tmp_path.iterdir()) == []


def test_git_stops_at_an_error_of_bisect_step_itself(tmp_path: Path) -> None:
    assert command("raise KeyError", "bisect-step", folder=tmp_path).returncode == 128


def test_ctrl_c_while_the_command_is_loaded_is_no_traceback(tmp_path: Path) -> None:
    code = """
import signal, sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "rich.console":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
import lowtide.__main__
"""
    done = python(code, "report", "nowhere", folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(
    "app",
    [
        "signal.raise_signal(signal.SIGINT)",
        # One that got lost, and what it has broken.
        "try:\n    signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt:\n    pass\nraise BrokenPipeError",
        "try:\n    signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt:\n    return 2",
        # An engine's teardown puts it into a group with what failed besides.
        "try:\n    signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt as error:\n"
        "    import builtins\n    group = getattr(builtins, 'BaseExceptionGroup', None)\n"
        "    raise (group or __import__('exceptiongroup').BaseExceptionGroup)('', [error, OSError()])",
        # Python notes one that goes through a library in C, and then ends by SIGINT.
        "import ctypes\nctypes.pythonapi.PyRun_SimpleString(b'raise KeyboardInterrupt')\nreturn 130",
    ],
    ids=["plain", "broken pipe after it", "refused after it", "in a group", "through C"],
)
def test_a_command_that_was_interrupted_ends_with_130(app: str, tmp_path: Path) -> None:
    assert command(app, folder=tmp_path).returncode == 130


def test_a_ctrl_c_that_harmed_nothing_does_not_change_a_clean_end(tmp_path: Path) -> None:
    app = "try:\n    signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt:\n    return 0"
    assert command(app, folder=tmp_path).returncode == 0


@pytest.mark.parametrize("code", [0, 1])
@pytest.mark.parametrize("left", ["thread", "process"])
def test_a_command_ends_with_its_verdict_whatever_was_left(left: str, code: int, tmp_path: Path) -> None:
    start = {
        "thread": "threading.Thread(target=threading.Event().wait, name='left').start()",
        "process": "import multiprocessing, time\n"
        "child = multiprocessing.get_context('fork').Process(target=time.sleep, args=(1000,), name='left')\n"
        "child.start()\nprint(child.pid)",
    }
    cleanup = f"import atexit, pathlib\natexit.register(pathlib.Path({str(tmp_path / 'cleaned')!r}).touch)\n"
    done = command(f"{cleanup}{start[left]}\nreturn {code}", folder=tmp_path)
    assert done.returncode == code
    assert done.stderr.startswith("lowtide: ended without waiting for what was left: ")
    assert "left" in done.stderr.partition("what was left: ")[2]
    assert (tmp_path / "cleaned").exists()
    assert left == "thread" or not psutil.pid_exists(int(done.stdout))


def test_an_idle_executor_and_a_daemon_do_not_count_as_left(tmp_path: Path) -> None:
    app = (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "global pool\n"
        "pool = ThreadPoolExecutor()\n"
        "pool.submit(int).result()\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "print(process_exit.awaited())"
    )
    done = command(app, folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
