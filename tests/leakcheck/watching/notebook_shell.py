"""A real IPython in which tests run cells."""

from __future__ import annotations

import atexit
import builtins
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config

from lowtide.reports.schema import Finding, Report

ENGINE = """
class Engine:
    kept = []
    def infer(self, keep):
        made = torch.ones(1000)
        if keep:
            self.kept.append(made)
engine = Engine()
"""


class Notebook:
    """Runs cells, and has what each showed."""

    def __init__(self, shell: InteractiveShell) -> None:
        self.shell = shell
        self.names: dict[str, Any] = shell.user_ns
        self.output = ""
        self.html: list[str] = []
        self.texts: list[str] = []
        self.error: BaseException | None = None

    def run(self, *lines: str) -> None:
        with capture_output() as shown:
            result = self.shell.run_cell("\n".join(lines), store_history=True)
        self.error = result.error_before_exec or result.error_in_exec
        self.output = shown.stdout + shown.stderr
        bundles = [output.data for output in shown.outputs]
        self.html = [data["text/html"] for data in bundles if "text/html" in data]
        self.texts = [data["text/plain"] for data in bundles if "text/html" in data]

    def check(self, *lines: str, options: str = "") -> Report:
        self.run(f"%%leakcheck --into report {options}", *lines)
        report: Report = self.names["report"]
        return report

    def finding(self, *lines: str, options: str = "") -> Finding:
        (finding,) = self.check(*lines, options=options).subjects[0].findings
        return finding


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    for name in ("displayhook", "excepthook"):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    # IPython says that it never takes its flag back.
    monkeypatch.setitem(vars(builtins), "__IPYTHON__", True)
    module = types.ModuleType("notebook_of_a_test")
    config = Config()
    config.HistoryManager.enabled = False
    # The one of the process, or IPython makes another where it looks for that.
    shell = InteractiveShell.instance(user_module=module, user_ns=vars(module), config=config, colors="nocolor")
    made = Notebook(shell)
    made.run("import torch, lowtide", "%load_ext lowtide", ENGINE)
    assert made.error is None, made.output
    yield made
    atexit.unregister(shell.atexit_operations)
    shell.reset()
    shell.atexit_operations()
    InteractiveShell.clear_instance()
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        vars(sys).pop(name, None)
    sys.modules.pop(module.__name__, None)
