"""More cells under `%%leakcheck`: advice that is tried, options, errors, and a real kernel of Jupyter."""

from __future__ import annotations

import json
import re
import sys
import traceback
import weakref
from pathlib import Path

import pytest

pytest.importorskip("IPython")

from tests.leakcheck.watching.notebook_shell import Notebook, notebook

pytestmark = pytest.mark.nightly

__all__ = ["notebook"]


def test_what_was_there_before_is_to_be_emptied_and_not_deleted(notebook: Notebook) -> None:
    assert notebook.finding("engine.infer(keep=True)").advice == (
        "Engine was there before the cell, which has added Engine.kept[0]: take it out where its use ends"
    )


def test_a_variable_that_the_cell_binds_anew_is_the_cell_s(notebook: Notebook) -> None:
    notebook.run("x = torch.zeros(10)")
    assert (notebook.finding("x = torch.zeros(1000)").advice or "").startswith("the cell binds the variable x: ")


def test_what_a_semicolon_hides_does_not_stay(notebook: Notebook) -> None:
    assert notebook.check("torch.zeros(1000);").subjects[0].findings == ()


def test_a_value_that_is_shown_and_not_cached_does_not_stay(notebook: Notebook) -> None:
    notebook.shell.displayhook.cache_size = 0
    assert notebook.check("torch.zeros(1000)").subjects[0].findings == ()


def test_a_variable_that_is_shown_too_is_given_back_by_xdel(notebook: Notebook) -> None:
    finding = notebook.finding("x = torch.zeros(1000)", "x")
    number = notebook.shell.execution_count - 1
    assert finding.holder == "x"
    assert finding.advice == (
        f"the cell binds the variable x, and IPython keeps it as Out[{number}]: `%xdel x` gives both back"
    )
    tensor = weakref.ref(notebook.names["x"])
    notebook.run("%xdel x")
    assert tensor() is None


def test_advice_that_is_better_than_to_delete_a_variable_stays(notebook: Notebook) -> None:
    notebook.run("import threading", "done = threading.Event()")
    finding = notebook.finding("t = threading.Thread(target=done.wait)", "t.start()", options="--settle 0.05")
    assert finding.advice == "call done.set() in teardown"
    notebook.run("done.set()", "t.join()")


def test_what_the_last_error_holds_is_given_back_as_advised(notebook: Notebook) -> None:
    finding = notebook.finding("def fail(z):", "    return 1 / 0", "fail(torch.zeros(1000))")
    notebook.error = None
    ends = list(traceback.walk_tb(sys.last_value.__traceback__))
    tensor = weakref.ref(ends[-1][0].f_locals["z"])
    del ends
    _, advised, effect = (finding.advice or "").split("`")
    assert effect == " gives it back"
    notebook.run(advised)
    assert notebook.error is None
    assert tensor() is None


def test_what_an_error_behind_the_last_one_holds_is_given_back_as_advised(notebook: Notebook) -> None:
    # With `sys` among the user's names, too.
    notebook.run("import sys, weakref")
    finding = notebook.finding(
        "def fail(z):", "    global tensor", "    tensor = weakref.ref(z)", "    raise KeyError",
        "try:", "    fail(torch.zeros(1000))", "except KeyError as error:", "    raise RuntimeError from error",
    )  # fmt: skip
    notebook.error = None
    notebook.run((finding.advice or "").split("`")[1])
    assert notebook.error is None
    assert notebook.names["tensor"]() is None


def test_what_an_exception_group_holds_is_the_last_error_s(notebook: Notebook) -> None:
    if sys.version_info < (3, 11):
        pytest.skip("needs ExceptionGroup")
    notebook.run("import sys, weakref")
    finding = notebook.finding(
        "def fail(z):", "    global tensor", "    tensor = weakref.ref(z)", "    try:", "        1 / 0",
        "    except ZeroDivisionError as error:", "        raise ExceptionGroup('two', [error])",
        "fail(torch.zeros(1000))",
    )  # fmt: skip
    notebook.error = None
    assert finding.holder == "the variable z in the traceback of the last error (ExceptionGroup)"
    notebook.run((finding.advice or "").split("`")[1])
    assert notebook.names["tensor"]() is None


@pytest.mark.parametrize(
    ("code", "holder"),
    [
        ("x = {'layer 1': torch.zeros(10)}", "x['layer 1']"),
        ("x = {(1, 2): torch.zeros(10)}", "x[(1, 2)]"),
        ("x = (lambda z: lambda: z)(torch.zeros(10))", "x, closure cell 'z'"),
        ("def values(z):\n    yield 1\n    yield z\nx = values(torch.zeros(10)); next(x);", "x f_locals['z']"),
    ],
)
def test_a_variable_is_deleted_however_it_holds(notebook: Notebook, code: str, holder: str) -> None:
    finding = notebook.finding(code)
    assert (finding.holder, finding.advice) == (
        holder,
        "the cell binds the variable x: `del x` gives it back, if it is not to stay",
    )


def test_an_error_that_a_variable_holds_is_that_variable_s(notebook: Notebook) -> None:
    finding = notebook.finding(
        "def fail(z):", "    raise ValueError", "try:", "    fail(torch.zeros(1000))", "except ValueError as error:",
        "    kept = error",
    )  # fmt: skip
    assert (finding.holder or "").startswith("kept.__traceback__")


def test_a_cell_that_is_no_python_fails_as_any_other(notebook: Notebook) -> None:
    notebook.run("%%leakcheck", "1 +")
    assert isinstance(notebook.error, SyntaxError)
    assert notebook.output.count("SyntaxError: invalid syntax") == 1


def test_the_error_of_a_later_cell_is_shown_again(notebook: Notebook) -> None:
    notebook.run(
        "try:", "    get_ipython().run_cell_magic('leakcheck', '', '1 / 0')", "except ZeroDivisionError:", "    pass"
    )
    assert notebook.error is None
    notebook.run("[][1]")
    assert "IndexError: list index out of range" in notebook.output


def test_a_warm_up_is_not_judged(notebook: Notebook) -> None:
    notebook.run("runs = []", "first = []")
    code = ("runs.append(1)", "if not first:", "    first.append(torch.zeros(1000))")
    assert notebook.check(*code, options="--warmup").subjects[0].findings == ()
    assert notebook.names["runs"] == [1, 1]


def test_a_warm_up_that_fails_ends_it(notebook: Notebook) -> None:
    notebook.run("runs = []")
    notebook.run("%%leakcheck --warmup", "runs.append(1)", "1 / 0")
    assert isinstance(notebook.error, ZeroDivisionError)
    assert (notebook.names["runs"], notebook.html) == ([1], [])


@pytest.mark.parametrize(
    ("options", "outcome"), [("--tolerance 4000", "clean"), ("--tolerance 4kB", "clean"), ("--tolerance 3999", "leak")]
)
def test_options_are_those_of_leakcheck(notebook: Notebook, options: str, outcome: str) -> None:
    assert notebook.check("engine.infer(keep=True)", options=options).subjects[0].outcome == outcome


def test_a_remedy_is_tried_only_if_asked_for(notebook: Notebook) -> None:
    finding = notebook.finding("engine.infer(keep=True)", options="--remedies")
    assert [tried.returns_bytes for tried in finding.tried] == [4000]
    assert notebook.names["Engine"].kept == []


def test_a_magic_in_the_cell_stays_one(notebook: Notebook) -> None:
    notebook.check("%%capture shown", "print('hidden')")
    assert notebook.names["shown"].stdout == "hidden\n"


def test_the_help_has_each_option(notebook: Notebook) -> None:
    magic = notebook.shell.find_cell_magic("leakcheck")
    for option in ("--tolerance SIZE", "--warmup", "--fail", "--into NAME"):
        assert option in magic.__doc__


def test_what_the_cell_shows_is_named_as_output_with_what_gives_it_back(notebook: Notebook) -> None:
    finding = notebook.finding("torch.zeros(1000)")
    number = notebook.shell.execution_count - 1
    assert finding.holder == f"Out[{number}]"
    assert finding.message.endswith(f"held by Out[{number}]")
    assert f"`%xdel _{number}` gives it back" in (finding.advice or "")
    tensor = weakref.ref(notebook.names["Out"][number])
    notebook.run(f"%xdel _{number}")
    assert tensor() is None


def test_fail_raises_after_the_report_was_shown(notebook: Notebook) -> None:
    notebook.run("%%leakcheck --fail", "engine.infer(keep=True)")
    assert type(notebook.error).__name__ == "LeaksFoundError"
    assert len(notebook.html) == 1


def test_a_wrong_option_is_one_line(notebook: Notebook) -> None:
    notebook.run("%%leakcheck --stacks most", "ran = True")
    assert type(notebook.error).__name__ == "UsageError"
    assert "ran" not in notebook.names


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--into 1x", "argument --into: '1x' is no name of a variable"),
        ("--into class", "argument --into: 'class' is no name of a variable"),
        ("--settle nan", "argument --settle: 'nan' is no number of seconds"),
        ("--settle -1", "argument --settle: '-1' is no number of seconds"),
        (
            "--tolerance -5",
            "argument --tolerance: '-5' is no size: "
            "use bytes such as 4096, or a unit such as 512KiB, 1.5MiB, 2GiB, 10MB",
        ),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused(notebook: Notebook, option: str, said: str) -> None:
    notebook.run(f"%%leakcheck {option}", "ran = True")
    assert str(notebook.error) == said
    assert "ran" not in notebook.names


KERNEL_CELLS = (
    "import torch\n%load_ext lowtide",
    "%%leakcheck\nx = torch.zeros(1000)\nx",
    "%xdel x",
    "%%leakcheck\ntorch.zeros(1000);",
    "%%leakcheck\nimport asyncio\nawait asyncio.sleep(0)",
    "%%leakcheck\n1 / 0",
    "print('after')",
)


@pytest.mark.no_leakcheck(reason="nbclient keeps its event loop for the process")
def test_a_kernel_of_jupyter_shows_the_report_and_stops_at_a_cell_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = tmp_path / "kernels" / "this" / "kernel.json"
    spec.parent.mkdir(parents=True)
    spec.write_text(json.dumps({"argv": argv, "display_name": "this", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    written = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in KERNEL_CELLS])
    # A cell that is refused fails; what is looked at is whether each failed, and what it showed.
    nbclient.NotebookClient(written, timeout=120, kernel_name="this", allow_errors=True).execute()
    outputs = [cell.outputs for cell in written.cells]
    (leak,) = [output.data for output in outputs[1] if "text/html" in output.get("data", {})]
    assert "held by x" in leak["text/html"]
    assert "`%xdel x` gives both back" in " ".join(leak["text/plain"].split())
    assert ["CLEAN" in output.data["text/plain"] for output in outputs[3]] == [True]
    assert "write `with lowtide.LeakCheck() as check:` around the await" in outputs[4][0].text
    error, report = outputs[5]
    assert (error.output_type, error.ename) == ("error", "ZeroDivisionError")
    assert "CLEAN" in report.data["text/plain"]
    assert outputs[6][0].text == "after\n"


def test_the_page_has_each_option(notebook: Notebook) -> None:
    page = (Path(__file__).parents[3] / "docs" / "notebooks.md").read_text(encoding="utf-8")
    options = re.findall(r"(?<![\w-])--[a-z][a-z-]*", notebook.shell.find_cell_magic("leakcheck").__doc__)
    assert len(set(options)) > 8
    assert [option for option in options if f"| `{option}" not in page] == []
