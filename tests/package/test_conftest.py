"""What the tests' own conftests do for all of them: shared fixtures and inner runs that fail, and signals."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pytest_plugin.conftest import RunInner, run_inner

__all__ = ["run_inner"]

TESTS = """
import signal

import pytest

@pytest.fixture(scope="module")
def shared_run():
    assert not "a run that failed", "its whole output"

@pytest.mark.parametrize("turn", range(3))
def test_of_the_run(shared_run, turn): pass

def test_of_the_run_too(shared_run): pass

@pytest.fixture(scope="module")
def hangs():
    pytest.fail("Timeout")

def test_first(hangs): pass

def test_second(hangs): pass

@pytest.fixture(scope="module")
def card():
    pytest.skip("no card here")

def test_of_a_card(card): pass

def test_of_a_card_too(card): pass

@pytest.fixture
def own():
    raise ValueError("of each test")

def test_with_its_own(own): pass

def test_with_its_own_too(own): pass

def test_ctrl_c_is_heard():
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""


def test_a_shared_fixture_that_fails_is_one_error_and_its_other_tests_are_skipped(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).parents[1] / "conftest.py", tmp_path)
    (tmp_path / "test_it.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rsE", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path],
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
        # As a script has its background jobs.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert done.stdout.splitlines()[-1].startswith("1 passed, 6 skipped, 4 errors"), done.stdout + done.stderr
    assert done.stdout.count("E       AssertionError: its whole output") == 1
    assert "a fixture that it shares with test_it.py::test_of_the_run[0] failed there" in done.stdout
    assert "no card here" in done.stdout


def test_files_run_in_the_order_in_which_they_are_given(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).parents[1] / "conftest.py", tmp_path)
    # pytest alone would put those together that share a parameter of the whole run.
    shared = "import pytest\n\n@pytest.mark.parametrize('shared', [1, 2], indirect=True)\ndef test_it(shared): pass\n"
    fixture = "\n\n@pytest.fixture(scope='session')\ndef shared(request): return request.param\n"
    (tmp_path / "conftest.py").write_text((tmp_path / "conftest.py").read_text() + fixture)
    for name, text in {"c": shared, "b": "def test_it(): pass\n", "a": shared}.items():
        (tmp_path / f"test_{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "--rootdir", "."]
    done = subprocess.run(
        [*command, "test_c.py", "test_b.py", "test_a.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    files = [line.partition(".py")[0] for line in done.stdout.splitlines() if "::" in line]
    assert files == ["test_c", "test_c", "test_b", "test_a", "test_a"], done.stdout + done.stderr


def test_an_inner_run_that_cannot_collect_fails_with_its_output(run_inner: RunInner) -> None:
    with pytest.raises(AssertionError, match="No module named 'no_such_module'"):
        run_inner({"test_it.py": "import no_such_module"}, leakcheck=False)
