"""How many files a test under `--leakcheck` enters: what has nothing to do is not asked, and one idea is one file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest

torch = pytest.importorskip("torch")

# With a torch for CUDA one file more: which history the program has switched on is a setting.
HISTORY = {"probes/device/allocation_history.py"} if hasattr(torch._C, "_cuda_isHistoryEnabled") else set()

CLEAN, LEAKING = 35 + len(HISTORY), 88 + len(HISTORY)
"""Files that a clean test and a leaking one may enter, on a CPU; to be lowered.

They are 30 and 83; five more where it is read after the test what grows with each.
"""

OF_NEIGHBOURS = {
    "leakcheck/judging/exemptions.py",
    "leakcheck/resources/files.py",
    "probes/host/process_files.py",
    "probes/host/readings.py",
}
"""What is entered besides where another program makes files in /dev/shm meanwhile."""

RECORDER = """
import json
import os
import sys
from pathlib import Path

import pytest

import lowtide

HOUSE = os.path.dirname(lowtide.__file__) + os.sep

@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    entered = set()
    sys.setprofile(lambda frame, event, argument: entered.add(frame.f_code.co_filename) if event == "call" else None)
    try:
        return (yield)
    finally:
        sys.setprofile(None)
        own = sorted(file.removeprefix(HOUSE) for file in entered if file.startswith(HOUSE))
        Path(__file__).with_name(f"{item.name}.json").write_text(json.dumps(own))
"""

TESTS = """
import functools

import torch

class Model:
    def __init__(self):
        self.weights = torch.ones(1000)

    @functools.lru_cache
    def forward(self):
        return 1

def test_first(): torch.ones(3)
def test_second(): torch.ones(3)
def test_clean(): torch.ones(3)
def test_leak(): Model().forward()
"""


@pytest.fixture(scope="module")
def entered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Run a clean test and a leaking one; the first tests load and learn."""
    folder = tmp_path_factory.mktemp("entered")
    (folder / "conftest.py").write_text(RECORDER)
    (folder / "test_it.py").write_text(textwrap.dedent(TESTS))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "lowtide.pytest_plugin.plugin", "--leakcheck", "test_it.py"]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert "1 failed, 3 passed" in run.stdout, run.stdout + run.stderr
    return {file.stem: json.loads(file.read_text()) for file in folder.glob("test_*.json")}


@pytest.mark.parametrize(("test", "most"), [("test_clean", CLEAN), ("test_leak", LEAKING)])
def test_no_more_files_are_entered(test: str, most: int, entered: dict[str, list[str]]) -> None:
    files = [file for file in entered[test] if file not in OF_NEIGHBOURS]
    listed = "\n".join(files)
    assert len(files) <= most, f"{len(files)} files:\n{listed}"


def test_without_other_processes_cards_and_engines_nothing_of_these_is_entered(entered: dict[str, list[str]]) -> None:
    idle = {
        "leakcheck/processes/engine_processes.py",
        "leakcheck/processes/process_growth.py",
        "leakcheck/processes/tree_end.py",
        "leakcheck/processes/unmeasured_processes.py",
        "leakcheck/resources/asyncio_tasks.py",
        "leakcheck/resources/process_groups.py",
        "leakcheck/resources/warm_up.py",
        "leakcheck/judging/device_memory.py",
        "leakcheck/findings/remedies.py",
        "leakcheck/watching/engine_watch.py",
        "leakcheck/suppressions/entries.py",
        "probes/allocation_stacks.py",
        "probes/device/allocation_history.py",
        "probes/device/torch_allocator.py",
    }
    assert not (idle - HISTORY) & set(entered["test_clean"])
