"""What a test replaces judges nothing: the checker reads with the functions that there were when it was imported."""

from __future__ import annotations

import ast
import builtins
import decimal
import functools
import gc
import importlib
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from lowtide.leakcheck.resources.settings import changes_between
from lowtide.probes import originals
from lowtide.probes.host.counters import CounterReader

ROOT = Path(__file__).parents[2]

JUDGING = (
    "probes",
    "pytest_plugin",
    *(f"leakcheck/{room}" for room in ("baseline", "explaining", "findings", "judging", "libraries", "processes")),
    *(f"leakcheck/{room}" for room in ("settings", "watching")),
)

MAY_LOOK_UP = {
    "leakcheck/processes/attachment.py": "of a command that looks at another program",
    "leakcheck/processes/tree_end.py": "of a command that looks at another program",
    "leakcheck/watching/notebook.py": "of a cell of a notebook, where no test has replaced anything",
    "probes/device/allocator_snapshots.py": "writes a file that the user asked for",
    "probes/objects/described.py": "while it is imported",
    "probes/kernels/host.py": "called by engines",
    "probes/original_numpy.py": "when numpy is first needed",
    "probes/processes/agents.py": "joins and keeps a path",
    "probes/processes/injection.py": "of a command that looks at another program",
    "probes/processes/outside_view.py": "of a command that looks at other programs",
    "probes/processes/shared_memory_files.py": "of a command that looks at other programs",
    "probes/processes/tree_traces.py": "of a command that looks at another program",
    "probes/stages.py": "called by engines, and imports nothing",
    "pytest_plugin/results.py": "before the first test",
    "pytest_plugin/settings.py": "before the first test",
}
"""Modules that may look up what they call when they call it, and use `pathlib` and `psutil`, which do so."""

KEPT = [name for name, value in vars(originals).items() if type(value) is originals.Kept]


def modules() -> list[Path]:
    return [file for room in JUDGING for file in sorted((ROOT / room).rglob("*.py")) if "bootstrap" not in file.parts]


def replaceable(tree: ast.Module) -> Iterator[str]:
    """What a module looks up where a test may have put something else."""
    plain = {
        name.asname or name.name: name.name
        for node in tree.body
        if isinstance(node, ast.Import)
        for name in node.names
        if name.name in KEPT
    }
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names) if any(name.name in ("numpy", "psutil") for name in names):
                yield f"{node.lineno}: {ast.unparse(node)}"
            case ast.ImportFrom(module="pathlib", names=names) if any(name.name == "Path" for name in names):
                yield f"{node.lineno}: Path"
            case ast.ImportFrom(module=str(module), names=names) if module in KEPT:
                yield from (f"{node.lineno}: {name.name}" for name in names if name.name.islower())
            case ast.Attribute(value=ast.Name(id="dataclasses")):
                yield f"{node.lineno}: dataclasses.{node.attr}"
            case ast.Call(func=ast.Name(id="open")):
                yield f"{node.lineno}: open"
            case ast.Attribute(value=ast.Name(id=name), attr=attribute, ctx=ast.Load()) if name in plain:
                if callable(vars(getattr(originals, plain[name])).get(attribute)):
                    yield f"{node.lineno}: {name}.{attribute}"


def taken_for_modules(tree: ast.Module) -> Iterator[str]:
    """Where the originals of a module stand for the module itself, which they are not."""
    kept = {
        name.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module == "lowtide.probes.originals"
        for name in node.names
        if name.name in KEPT
    }
    looked_into = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in kept and id(node) not in looked_into:
            yield f"{node.lineno}: {node.id}"
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load) and ast.unparse(node.value) in kept:
            yield f"{node.lineno}: {ast.unparse(node)}"


def makes_an_object_for_a_thread(tree: ast.Module) -> Iterator[str]:
    """Where a module asks for the running thread's object, which Python makes for a thread of C."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("current_thread", "currentThread"):
            yield f"{node.lineno}: {ast.unparse(node)}"


@functools.cache
def found_by(*rules: Callable[[ast.Module], Iterator[str]]) -> list[dict[str, list[str]]]:
    """What each rule finds in each module; of the trees, which are large, nothing is kept."""
    found: list[dict[str, list[str]]] = [{} for _ in rules]
    for file in modules():
        tree = ast.parse(file.read_bytes())
        for rule, of_rule in zip(rules, found, strict=True):
            of_rule[str(file.relative_to(ROOT))] = list(rule(tree))
    return found


@pytest.fixture
def found() -> list[dict[str, list[str]]]:
    return found_by(taken_for_modules, replaceable, makes_an_object_for_a_thread)


def test_the_originals_are_taken_for_no_modules(found: list[dict[str, list[str]]]) -> None:
    # These read an attribute by its name.
    by_name = ("probes/host/settings.py", "probes/references/interpreter_holders.py")
    assert {name: lines for name, lines in found[0].items() if lines and name not in by_name} == {}


def test_no_module_that_judges_looks_up_what_a_test_may_have_replaced(found: list[dict[str, list[str]]]) -> None:
    assert {name: lines for name, lines in found[1].items() if lines and name not in MAY_LOOK_UP} == {}
    assert [name for name in MAY_LOOK_UP if not found[1][name]] == []


def test_no_module_that_judges_makes_an_object_for_a_thread_of_c(found: list[dict[str, list[str]]]) -> None:
    assert {name: lines for name, lines in found[2].items() if lines} == {}


def test_what_a_test_replaces_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = CounterReader(None)
    before = reader.read()
    with monkeypatch.context() as patched:
        for place, names in REPLACED.items():
            for name in names.split():
                patched.setattr(f"{place}.{name}", refuses)
        after = reader.read()
    assert after.items["file-descriptors"] == before.items["file-descriptors"]
    changes = changes_between(before.settings, after.settings)
    assert {change.setting for change in changes if not change.is_replaced} == set()


REPLACED = {
    "os": "open read close listdir scandir stat fstat readlink getpid waitid",
    "time": "time perf_counter monotonic sleep",
    "threading": "enumerate current_thread gettrace",
    "gc": "get_freeze_count get_objects isenabled",
    "builtins": "open",
    "numpy": "arange array concatenate empty flatnonzero frombuffer fromiter zeros",
}


def refuses(*args: object, **kwargs: object) -> None:
    raise AssertionError("what a test has replaced was called")


def test_what_is_no_function_is_read_where_it_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["/nowhere"])
    monkeypatch.setattr(sys, "excepthook", refuses)
    monkeypatch.setattr(os, "environ", {"NAME": "value"})
    monkeypatch.setattr(os, "getpid", refuses)
    assert (originals.sys.path, originals.sys.excepthook) == (["/nowhere"], refuses)
    assert (dict(originals.os.environ), originals.os.getpid is refuses) == ({"NAME": "value"}, False)


def test_what_is_replaced_is_named_and_a_wrapper_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    before = originals.replaced()
    wrapper = functools.wraps(os.listdir)(lambda path: [])
    monkeypatch.setattr(os, "listdir", wrapper)
    assert originals.replaced() == before
    monkeypatch.setattr(os, "stat", refuses)
    monkeypatch.setattr(builtins, "open", refuses)
    assert set(originals.replaced()) - set(before) == {"os.stat", "builtins.open"}


@pytest.mark.parametrize("entry", [None, ModuleType("decimal"), SimpleNamespace()])
def test_a_loaded_module_is_no_entry_that_a_test_has_made(entry: object, monkeypatch: pytest.MonkeyPatch) -> None:
    assert originals.loaded("decimal") is decimal
    monkeypatch.setitem(sys.modules, "decimal", entry)  # type: ignore[arg-type]
    assert originals.loaded("decimal") is decimal
    monkeypatch.delitem(sys.modules, "decimal")
    assert originals.loaded("decimal") is decimal


def test_a_module_that_is_loaded_anew_is_the_new_one_and_no_module_is_kept(tmp_path: Path) -> None:
    (tmp_path / "short_lived.py").write_text("")
    sys.path.insert(0, str(tmp_path))
    try:
        assert originals.loaded("short_lived") is None
        first = weakref.ref(importlib.import_module("short_lived"))
        assert originals.loaded("short_lived") is first()
        del sys.modules["short_lived"]
        second = importlib.import_module("short_lived")
        assert originals.loaded("short_lived") is second
        gc.collect()
        assert first() is None
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("short_lived", None)


def test_the_lines_of_a_file_end_at_line_breaks_alone(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"first\x0c1\n\xff\nlast")
    assert originals.lines_of(str(file)) == ["first\x0c1", "\ufffd", "last"]
    file.write_bytes(b"")
    assert originals.lines_of(str(file)) == []


def test_numpy_imports_nothing_in_the_middle_of_a_reading() -> None:
    script = (
        "import sys; from lowtide.probes.original_numpy import np; before = set(sys.modules); "
        "np.unique(np.arange(3)); np.isin(np.arange(3), np.arange(2)); print(sorted({*sys.modules} - before))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
