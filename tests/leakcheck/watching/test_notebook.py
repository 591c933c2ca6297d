"""`%%leakcheck` in a real IPython: what is shown, by which names, and how a cell ends."""

from __future__ import annotations

import subprocess
import sys
import weakref

import pytest

pytest.importorskip("IPython")

from tests.leakcheck.watching.notebook_shell import Notebook, notebook

pytestmark = pytest.mark.nightly

__all__ = ["notebook"]


def test_a_clean_cell_is_clean_and_runs_in_the_user_s_namespace(notebook: Notebook) -> None:
    report = notebook.check("engine.infer(keep=False)", "answer = 41 + 1", "print(answer)")
    assert [subject.outcome for subject in report.subjects] == ["clean"]
    assert notebook.names["answer"] == 42
    assert notebook.output.startswith("42\n")
    assert notebook.error is None


def test_a_leak_is_shown_as_html_and_as_text_and_raises_nothing(notebook: Notebook) -> None:
    finding = notebook.finding("engine.infer(keep=True)")
    assert (finding.holder, finding.bytes) == ("Engine.kept[0]", 4000)
    assert notebook.error is None
    (html,), (text,) = notebook.html, notebook.texts
    assert html.startswith('<div class="lowtide-report">')
    assert "LEAK: 1 of 1 subject leaked" in html
    assert "held by Engine.kept[0]" in " ".join(text.split())
    assert "\x1b" not in text


def test_a_variable_of_the_cell_is_named_with_what_gives_it_back(notebook: Notebook) -> None:
    finding = notebook.finding("x = {'a': [torch.zeros(1000)]}")
    assert finding.holder == "x['a'][0]"
    assert finding.message.endswith("held by x['a'][0]")
    assert finding.advice == "the cell binds the variable x: `del x` gives it back, if it is not to stay"
    tensor = weakref.ref(notebook.names["x"]["a"][0])
    notebook.run("del x")
    assert tensor() is None


def test_an_error_is_shown_once_as_ipython_shows_it_and_the_report_says_what_stays(notebook: Notebook) -> None:
    finding = notebook.finding("def fail():", "    z = torch.zeros(1000)", "    return 1 / 0", "fail()")
    assert isinstance(notebook.error, ZeroDivisionError)
    assert notebook.output.count("ZeroDivisionError: division by zero") == 1
    # The numbers of the lines are those of the cell with its first line; no frame of lowtide's is in between.
    assert "----> 4     return 1 / 0" in notebook.output
    assert "run_cell_magic" not in notebook.output
    assert "lowtide/" not in notebook.output
    assert finding.holder == "the variable z in the traceback of the last error (ZeroDivisionError)"
    assert len(notebook.html) == 1


def test_before_the_block_has_ended_a_check_says_so(notebook: Notebook) -> None:
    notebook.run("with lowtide.LeakCheck() as check:", "    early = check._repr_html_()", "check")
    early = notebook.names["early"]
    assert early.startswith("<p")
    assert "the block has not ended" in early
    assert "CLEAN: 1 subject" in notebook.names["check"]._repr_html_()


def test_importing_lowtide_does_not_import_ipython() -> None:
    code = "import sys, lowtide.leakcheck.watching.check, lowtide.reports.schema; print('IPython' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
