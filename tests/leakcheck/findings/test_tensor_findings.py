"""What tensors are one finding, and the frames of an allocation: up to the test, each with the text of its line."""

from __future__ import annotations

import collections
import sys
import types
from collections.abc import Callable
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


def found_after(test: Callable[[], object]) -> dict[str | None, Finding]:
    """Return the findings about a test, by holder."""
    watch = Watch(Policy(card=False, settle=0.01, remedies="never"))
    watch.open()
    try:
        watch.begin(module="test_program.py")
        test()
        return {finding.holder: finding for finding in watch.end([]).findings}
    finally:
        watch.close()


def named(*names: str) -> dict[str, torch.Tensor]:
    return {name: torch.ones(8) for name in names}


def test_many_entries_or_attributes_are_one_finding_and_few_and_globals_are_one_each(program: Any) -> None:
    program.ENGINE = types.SimpleNamespace()

    def leave_many() -> None:
        program.TABLE.update(named("norm", "up", "gate", "down"))
        program.ORDERED.update(named("norm", "up", "gate", "down"))
        for name, tensor in named("norm", "up", "gate", "down").items():
            setattr(program.ENGINE, name, tensor)
        vars(program).update(named("norm", "up", "gate", "down"))
        # Tables that a list takes.
        program.LISTED.extend(named("logits", "hidden") for _ in range(3))

    def leave_others() -> None:
        program.TABLE.update(named("embed", "head", "bias", "rope", "mask"))
        program.ORDERED.update(named("embed", "head", "bias"))

    def leave_few() -> None:
        program.TABLE.update(named("one", "two", "three"))

    many, others, few = map(found_after, (leave_many, leave_others, leave_few))
    assert {holder: finding.count for holder, finding in many.items()} == {
        "program.TABLE": 4,
        "program.ORDERED": 4,
        "program.ENGINE": 4,
        "program.LISTED": 6,
        **dict.fromkeys(("program.norm", "program.up", "program.gate", "program.down"), 1),
    }
    assert {holder: finding.count for holder, finding in others.items()} == {
        "program.TABLE": 5,
        **dict.fromkeys(("program.ORDERED['embed']", "program.ORDERED['head']", "program.ORDERED['bias']"), 1),
    }
    assert {holder: finding.count for holder, finding in few.items()} == dict.fromkeys(
        ("program.TABLE['one']", "program.TABLE['two']", "program.TABLE['three']"), 1
    )
    # Many have one fingerprint, whatever their names, and few have others.
    of_many = many["program.TABLE"].fingerprint
    assert of_many == others["program.TABLE"].fingerprint
    assert of_many not in {finding.fingerprint for finding in few.values()}
