"""The frames of an allocation as a report has them: up to the test, each with the text of its line."""

from __future__ import annotations

from pathlib import Path

from lowtide.leakcheck.findings.tensor_findings import frames
from lowtide.probes.memory.stack_frames import StackFrame

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
