"""`lowtide mcp`, asked by the SDK's own client over standard input about a real report and a real kept heap."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from lowtide.reports import schema
from tests.leakcheck.cli.test_heap import suite

pytestmark = pytest.mark.nightly

mcp = pytest.importorskip("mcp")

Answers = list[Any]

TOOLS = {
    "list_reports",
    "findings",
    "finding",
    "heap_overview",
    "heap_path",
    "heap_holders",
    "next_measurement",
}


def ask(folder: Path, *calls: tuple[str, dict[str, Any]]) -> Answers:
    """The answers of one server to some calls, one after the other; of a refusal its text."""

    async def talk() -> Answers:
        answers = []
        command = ["-m", "lowtide", "mcp", str(folder)]
        server = mcp.StdioServerParameters(command=sys.executable, args=command, env=dict(os.environ))
        async with mcp.Client(server) as client:
            answers.append(await client.list_tools())
            for name, arguments in calls:
                answer = await client.call_tool(name, arguments)
                text = "".join(getattr(part, "text", "") for part in answer.content)
                answers.append(text if answer.is_error else json.loads(text))
        return answers

    tools, *answers = anyio.run(talk)
    assert {tool.name for tool in tools.tools} == TOOLS
    assert all(tool.annotations.read_only_hint for tool in tools.tools)
    return answers


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    (folder / "suite").mkdir()
    done = suite(folder / "suite", "--leakcheck-report=report", "--leakcheck-keep-heap=5")
    assert done.returncode == 1, done.stdout + done.stderr
    return folder


@pytest.mark.nightly
def test_a_report_and_its_heap_say_what_leaks_who_holds_it_and_what_frees_it(served: Path) -> None:
    (subject,) = [each for each in schema.read(served / "suite" / "report").subjects if each.findings]
    (finding,) = subject.findings
    (listed,) = ask(served, ("list_reports", {}))
    assert listed["reports"] == ["suite/report"]
    (heap,) = listed["heaps"]
    report = {"report": "suite/report"}
    found, whole, overview, path, holders = ask(
        served,
        ("findings", report),
        ("finding", {**report, "fingerprint": finding.fingerprint}),
        ("heap_overview", {"heap": heap}),
        ("heap_path", {"heap": heap, "what": "torch.Tensor"}),
        ("heap_holders", {"heap": heap, "what": "helper.Model"}),
    )
    assert [row["fingerprint"] for row in found["findings"]] == [finding.fingerprint]
    assert found["findings"][0]["holder"] == finding.holder == overview["left"][0]["path"]
    assert whole["seen_in"] == [subject.id]
    assert whole["finding"]["remedy"]["action"] == "del helper.ENGINES['served']"
    assert any("gives back 1.0 MiB of 1.0 MiB" in line for line in whole["text"])
    assert [hop["edge"] for hop in path["hops"]] == [hop.edge for hop in finding.path]
    assert [(row["holder"], row["edge"]) for row in holders["holders"]] == [("helper.Engine", ".model")]


def write_report(folder: Path, *subjects: dict[str, Any], command: str = "pytest -q --leakcheck") -> None:
    machine = {"platform": "Linux", "python": "3", "torch": "", "cpus": 1, "memory": 1, "devices": [], "driver": ""}
    folder.mkdir(parents=True)
    (folder / schema.REPORT_FILE).write_text(
        json.dumps(
            {
                "schema": schema.SCHEMA,
                "version": "0.1",
                "created": "2026-01-01T00:00:00+00:00",
                "command": command,
                "machine": machine,
                "subjects": subjects,
            }
        )
    )


def a_finding(turn: int, **fields: Any) -> dict[str, Any]:
    found = {"resource": "threads", "cause": "thread", "bytes": 0, "count": 1, "device": "cpu", "stage": "call"}
    given = {"verdict": "unexplained", "holder": f"holder {turn}", "path": [], "allocated_at": [], "remedy": None}
    rest = {"fingerprint": f"{turn:016x}", "suppressed_by": None, "trend": None, "message": f"message {turn}"}
    return {**found, **given, **rest, **fields}


@pytest.mark.nightly
def test_what_to_run_next_follows_from_the_report_s_own_advice(tmp_path: Path) -> None:
    unknown = a_finding(1, resource="host-memory", cause="unknown")
    missing = {"what": "tensors", "why": "nobody asked: use --cycles=3", "process": None}
    write_report(tmp_path / "tests", {"id": "test_a.py::test_b[x y]", "outcome": "leak", "findings": [unknown]})
    life = {"id": "check[x]", "outcome": "unsupported", "reason": "no card here", "not_measured": [missing]}
    write_report(tmp_path / "life", life, command="lowtide check x:Y --report r")
    of_tests, of_life = ask(
        tmp_path, ("next_measurement", {"report": "tests"}), ("next_measurement", {"report": "life"})
    )
    (row,) = of_tests["next"]
    assert row["command"] == (
        "pytest 'test_a.py::test_b[x y]' --leakcheck --leakcheck-report=next --leakcheck-stacks=all "
        "--leakcheck-keep-heap=1"
    )
    assert [(row["what"], row["command"]) for row in of_life["next"]] == [
        ("tensors", "lowtide check x:Y --report r --cycles=3"),
        ("unsupported", ""),
    ]


@pytest.mark.nightly
def test_answers_are_bounded_and_have_pages(tmp_path: Path) -> None:
    many = [a_finding(turn, message=f"{turn} \x1b[31m\u202e" + "x" * 5000) for turn in range(250)]
    write_report(tmp_path / "report", {"id": "a life", "outcome": "leak", "findings": many})
    pages = [{"report": "report", "offset": offset, "limit": 9999} for offset in (0, 100, 200)]
    some = {"report": "report", "resource": "tensors"}
    *found, none = ask(tmp_path, *(("findings", page) for page in pages), ("findings", some))
    assert [(len(page["findings"]), page["next_offset"]) for page in found] == [(100, 100), (100, 200), (50, None)]
    assert [row["holder"] for page in found for row in page["findings"]] == [each["holder"] for each in many]
    assert all(len(row["message"]) < 600 and row["message"].isprintable() for row in found[0]["findings"])
    assert none == {"total": 0, "findings": [], "next_offset": None}


@pytest.mark.nightly
def test_nothing_outside_of_the_folder_is_read(served: Path, tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    outside = served / "suite" / "report"
    (inside / "linked").symlink_to(outside)
    (inside / "half").mkdir()
    (inside / "half" / schema.REPORT_FILE).symlink_to(outside / schema.REPORT_FILE)
    (heap,) = (outside / "heaps").iterdir()
    (inside / "one.heap.npz").symlink_to(heap)
    paths = [
        str(outside),
        f"/{outside}",
        os.path.relpath(outside, inside),
        "linked",
        "half",
        "linked/../linked",
        "a\0b",
    ]
    heaps = [str(heap), os.path.relpath(heap, inside), "one.heap.npz", f"linked/heaps/{heap.name}"]
    calls: Sequence[tuple[str, dict[str, Any]]] = [("findings", {"report": path}) for path in paths]
    listed, *answers = ask(inside, ("list_reports", {}), *calls, *(("heap_overview", {"heap": path}) for path in heaps))
    assert (listed["reports"], listed["heaps"]) == ([], [])
    assert [type(answer) for answer in answers] == [str] * len(answers)
    assert all("leads out of the folder, or through a link" in answer for answer in answers)


@pytest.mark.nightly
def test_what_is_damaged_or_not_there_is_said_to_the_agent(tmp_path: Path) -> None:
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / schema.REPORT_FILE).write_text('{"schema": "lowtide-report/1", ')
    (tmp_path / "x.heap.npz").write_bytes(b"nothing")
    write_report(tmp_path / "good")
    cut, absent, long, itself, unknown, heap = ask(
        tmp_path,
        ("findings", {"report": "report"}),
        ("findings", {"report": "absent"}),
        ("findings", {"report": "x" * 5000}),
        ("findings", {"report": ""}),
        ("finding", {"report": "good", "fingerprint": "0" * 16}),
        ("heap_path", {"heap": "x.heap.npz", "what": "1"}),
    )
    assert "cut off" in cut
    assert "cannot be read" in absent
    assert "cannot be read: File name too long" in long
    assert "leakcheck.json cannot be read" in itself
    assert "has no finding" in unknown
    assert "lowtide-heap/1" in heap


def test_without_the_extra_one_line_says_what_to_install(tmp_path: Path) -> None:
    code = "import sys; sys.modules['mcp'] = None; from lowtide.leakcheck.cli.commands import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "mcp", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert 'pip install "lowtide[mcp]"' in line


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lowtide", "mcp", str(tmp_path / "absent")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
