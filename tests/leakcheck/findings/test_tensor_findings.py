"""What tensors are one finding, and the frames of an allocation: up to the test, each with the text of its line."""

from __future__ import annotations

import collections
import functools
import sys
import types
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide.leakcheck.findings.tensor_findings import frames
from lowtide.leakcheck.watching.watch import Watch
from lowtide.leakcheck.watching.watched import Policy
from lowtide.probes.memory.stack_frames import StackFrame
from lowtide.reports.schema import Finding

HERE = str(Path(__file__))


def test_each_frame_has_the_text_of_its_line(tmp_path: Path) -> None:
    source = tmp_path / "engine.py"
    source.write_bytes(b"import torch\n\n    KEPT.append(torch.ones(9))  # \xff\n")
    (frame,) = frames([StackFrame(str(source), 3, "forward")])
    assert (frame.file, frame.line, frame.function) == (str(source), 3, "forward")
    assert frame.source == "KEPT.append(torch.ones(9))  # \N{REPLACEMENT CHARACTER}"


def test_a_line_that_cannot_be_read_has_no_text(tmp_path: Path) -> None:
    short = tmp_path / "short.py"
    short.write_text("x = 1\n")
    places = [("<string>", 1), (str(tmp_path), 1), (str(tmp_path / "gone.py"), 1), (str(short), 99), (str(short), 0)]
    found = frames([StackFrame(file, line, "f") for file, line in places])
    assert [frame.source for frame in found] == ["", "", "", "", "x = 1"]


def test_a_line_of_a_generated_file_is_cut(tmp_path: Path) -> None:
    generated = tmp_path / "generated.py"
    generated.write_text("x = " + "1 + " * 10_000 + "1\n")
    (frame,) = frames([StackFrame(str(generated), 1, "f")])
    assert len(frame.source) == 200


def test_who_called_the_test_is_left_out() -> None:
    stack = [StackFrame(HERE, 1, "test"), StackFrame("/site/_pytest/python.py", 2, "pytest_pyfunc_call")]
    assert [frame.function for frame in frames(stack)] == ["test"]


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Any:
    module: Any = types.ModuleType("program")
    module.TABLE, module.ORDERED, module.LISTED = {}, collections.OrderedDict[str, Any](), list[Any]()
    monkeypatch.setitem(sys.modules, "program", module)
    return module


def findings_in(table: Callable[[Collection[str]], None], names: Collection[str]) -> tuple[Finding, ...]:
    """Return the findings about a test that fills a table."""
    watch = Watch(Policy(card=False, settle=0.01, remedies="never"))
    watch.open()
    try:
        watch.begin(module="test_program.py")
        table(names)
        return watch.end([]).findings
    finally:
        watch.close()


def left_in(table: Callable[[Collection[str]], None], names: Collection[str]) -> list[tuple[str | None, int]]:
    """Return the holder and the number of tensors of each of them."""
    return [(finding.holder, finding.count) for finding in findings_in(table, names)]


@pytest.mark.parametrize("name", ["TABLE", "ORDERED"])
def test_many_entries_of_one_table_are_one_finding_and_few_are_one_each(name: str, program: Any) -> None:
    table = getattr(program, name)

    def fill(names: Collection[str]) -> None:
        table.update({name: torch.ones(8) for name in names})

    assert left_in(fill, ["norm", "up", "gate", "down"]) == [(f"program.{name}", 4)]
    few = left_in(fill, ["embed", "head", "bias"])
    assert sorted(few) == [(f"program.{name}['{each}']", 1) for each in ("bias", "embed", "head")]


def test_many_entries_have_one_fingerprint_whatever_their_names_and_few_have_others(program: Any) -> None:
    def fill(names: Collection[str]) -> None:
        program.TABLE.update({name: torch.ones(8) for name in names})

    runs = (["norm", "up", "gate", "down"], ["embed", "head", "bias", "rope", "mask"], ["one"])
    marks = [{finding.fingerprint for finding in findings_in(fill, names)} for names in runs]
    assert [len(each) for each in marks] == [1, 1, 1]
    assert marks[0] == marks[1] != marks[2]


def test_many_attributes_of_one_instance_are_one_finding_and_globals_are_one_each(program: Any) -> None:
    program.ENGINE = types.SimpleNamespace()

    def put(holder: Any, names: Collection[str]) -> None:
        for name in names:
            setattr(holder, name, torch.ones(8))

    names = ["norm", "up", "gate", "down"]
    assert left_in(functools.partial(put, program.ENGINE), names) == [("program.ENGINE", 4)]
    assert sorted(left_in(functools.partial(put, program), names)) == sorted((f"program.{name}", 1) for name in names)


def test_tables_that_a_list_took_are_one_finding(program: Any) -> None:
    def append(names: Collection[str]) -> None:
        program.LISTED.extend({name: torch.ones(8) for name in names} for _ in range(3))

    assert left_in(append, ["logits", "hidden"]) == [("program.LISTED", 6)]
