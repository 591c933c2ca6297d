"""The rules that each module of the house keeps: what it may import, name, call and say."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.package import message_table
from tests.package.house import KEPT, ROOT, Code, modules, read

ARROWS = {
    "probes": set(),
    "reports": {"probes"},
    "leakcheck": {"reports", "probes"},
    "pytest_plugin": {"leakcheck", "reports", "probes"},
    "engine": {"probes"},
}
LAZY = {("leakcheck", "engine")}
REACHING = (
    "reference.py",
    "planted_leaks.py",
)
"""The command line reaches the engine, from inside its functions, or through these of `leakcheck`: what drives the
engine as its users do, or plants leaks in it."""

JUDGING = (
    "probes",
    "pytest_plugin",
    *(f"leakcheck/{room}" for room in ("explaining", "findings", "growth", "judging", "processes", "resources")),
    "leakcheck/watching",
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


def judging() -> list[Code]:
    assert [room for room in JUDGING if not (ROOT / room).is_dir()] == []
    rooms = tuple(f"{room}/" for room in JUDGING)
    return [code for code in modules() if code.path.startswith(rooms) and "bootstrap" not in code.file.parts]


def test_each_room_says_what_it_is_for() -> None:
    rooms = [code for code in modules() if code.file.name == "__init__.py"]
    assert len(rooms) > 15
    assert [code.path for code in rooms if not code.has_docstring] == []


def test_a_name_is_imported_from_where_it_is_defined_or_from_a_room_s_face() -> None:
    defined = {code.name: code.defined for code in modules() if code.file.name != "__init__.py"}
    # These two stand for modules of others, with their functions as they were.
    kept = ("lowtide.probes.originals", "lowtide.probes.original_numpy")
    assert [
        f"{code.path}: {module}.{name}"
        for code in modules()
        for module, name in code.taken
        if module not in kept and module in defined and name not in defined[module]
    ] == []


def test_no_two_classes_have_one_name() -> None:
    # The engine's processes and its ranks speak by messages of their own, which are named alike.
    classes = [(name, code.path) for code in modules() if not code.path.startswith("engine/") for name in code.classes]
    count = Counter(name for name, _ in classes)
    assert [line for line in classes if count[line[0]] > 1] == []


HAVE_DATACLASSES = {
    "leakcheck/cli/running.py": "not records: they have a life of their own",
    "leakcheck/lives/lifecycle.py": "not a record",
    "leakcheck/processes/engine_processes.py": "not a record",
    "leakcheck/processes/server_watch.py": "not a record",
    "probes/objects/collector.py": "imports nothing: it runs in every Python that there is",
    "probes/stages.py": "imports nothing: engines call it",
}


def test_records_are_structs() -> None:
    """To define a dataclass takes fifty times as long, and two hundred of them are defined before the first test."""
    rooms = ("probes/", "pytest_plugin/", "reports/", "leakcheck/")
    judged = [code for code in modules() if code.path.startswith(rooms) and "leakcheck/targets/" not in code.path]
    assert len(judged) > 200
    assert {code.path for code in judged if "\n@dataclass" in code.file.read_text()} == {*HAVE_DATACLASSES}


@pytest.mark.parametrize("folder", list(ARROWS))
def test_no_arrow_runs_back(folder: str) -> None:
    for code in modules():
        for module, lazy in code.imported if code.path.startswith(f"{folder}/") else ():
            target = module.split(".")[1]
            if target == folder or target in ARROWS[folder]:
                continue
            reaches = (folder, target) in LAZY and (lazy or code.file.name in REACHING)
            assert reaches, f"{code.path} must not import {module}"


def test_of_the_probes_the_engine_knows_the_stages_only() -> None:
    probes = {
        module
        for code in modules()
        for module, _ in code.imported
        if code.path.startswith("engine/") and module.startswith("lowtide.probes")
    }
    assert probes <= {"lowtide.probes", "lowtide.probes.stages"}


def test_the_table_has_every_message_of_the_code_and_no_other() -> None:
    written = message_table.TABLE.read_text(encoding="utf-8")
    assert message_table.table((code.path, code.messages) for code in modules()) == written, (
        "messages have changed: read them in the table that python -m tests.package.message_table writes"
    )
    assert written.count("\n") > 300


def test_no_message_is_replaced_where_it_follows_from_what_is_stated() -> None:
    """`replace` would lose it: a finding of which something is stated makes its message anew."""
    others = [code for code in modules() if code.path != "reports/statement.py"]
    assert [place for code in others for place in code.replaced_messages] == []


def test_a_message_that_is_replaced_is_found(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("found = msgspec.structs.replace(\n    found, bytes=1, message='other'\n)\n")
    assert read(tmp_path / "module.py").replaced_messages == ("module.py:1",)


def test_the_originals_are_taken_for_no_modules() -> None:
    # These read an attribute by its name.
    by_name = ("probes/host/settings.py", "probes/references/interpreter_holders.py")
    assert {code.path: code.as_modules for code in judging() if code.as_modules and code.path not in by_name} == {}


def test_no_module_that_judges_looks_up_what_a_test_may_have_replaced() -> None:
    found = {code.path: code.replaceable for code in judging()}
    assert KEPT
    assert {path: lines for path, lines in found.items() if lines and path not in MAY_LOOK_UP} == {}
    assert [path for path in MAY_LOOK_UP if not found[path]] == []


def test_no_module_that_judges_makes_an_object_for_a_thread_of_c() -> None:
    assert {code.path: code.thread_objects for code in judging() if code.thread_objects} == {}
