"""Stages that a program tells the command that runs it: in order, while it waits, and never in its way."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lowtide.probes.reported_stages import MOST, SOCKET, StageReport, StageReports, StagesOfCommand

MARKS = """
from lowtide import stage
with stage("life"):
    with stage("infer"):
        print("inferred", flush=True)
try:
    with stage("sleep"):
        raise ValueError
except ValueError:
    print("over", flush=True)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A path that is short enough for a socket."""
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        yield Path(made)


@pytest.fixture
def heard(folder: Path) -> Iterator[Callable[[], list[StageReport]]]:
    """Ends the listening when it is called; returns what was reported."""
    found: list[StageReport] = []
    reports = StageReports(str(folder), found.append)
    reports.start()
    ended, end = os.pipe()
    serving = threading.Thread(target=reports.serve, args=(600, ended))
    serving.start()

    def heard_by_now() -> list[StageReport]:
        os.write(end, b"x")
        serving.join()
        return found

    yield heard_by_now
    if serving.is_alive():
        heard_by_now()
    reports.stop()
    os.close(ended)
    os.close(end)


def run(folder: Path, code: str = MARKS) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LOWTIDE_AGENTS": str(folder)}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)


def test_a_program_reports_where_each_stage_begins_and_ends(
    folder: Path, heard: Callable[[], list[StageReport]]
) -> None:
    assert run(folder).stdout == "inferred\nover\n"
    found = heard()
    assert [(each.path, each.begins, each.failed) for each in found] == [
        (("life",), True, False),
        (("life", "infer"), True, False),
        (("life", "infer"), False, False),
        (("life",), False, False),
        (("sleep",), True, False),
        (("sleep",), False, True),
    ]
    assert len({each.pid for each in found}) == 1


def test_a_program_waits_until_the_command_has_looked(folder: Path) -> None:
    order: list[str] = []
    reports = StageReports(str(folder), lambda report: order.append("looked"))
    reports.start()

    def mark() -> None:
        StagesOfCommand(str(folder / SOCKET), lambda listener: True).stage_entered(Marked())
        order.append("went on")

    marking = threading.Thread(target=mark)
    marking.start()
    ended, end = os.pipe()
    while "looked" not in order:
        reports.serve(0.1, ended)
    marking.join()
    assert order == ["looked", "went on"]
    reports.stop()
    os.close(ended)
    os.close(end)


class Marked:
    path = ("infer",)


STEPS = """
from lowtide import stage
for _ in range(1000):
    with stage("infer"), stage("step"):
        pass
for _ in range(2):
    with stage("sleep"):
        pass
    with stage("infer"):
        pass
"""


def test_of_stages_that_repeat_only_the_first_are_told_and_the_others_counted(
    folder: Path, heard: Callable[[], list[StageReport]]
) -> None:
    run(folder, STEPS)
    found = heard()
    begun = [each for each in found if each.begins]
    # Each has its end, and what is inside of one that is not told is not told either.
    assert len(found) == 2 * len(begun)
    assert [each.path for each in begun[:-4]] == [("infer",), ("infer", "step")] * (MOST // 2)
    assert [each.path[0] for each in begun[-4:]] == ["sleep", "infer"] * 2
    assert [each.passed for each in begun] == [0] * MOST + [1000 - MOST // 2, 0, 0, 0]


def test_only_the_first_process_that_marks_stages_is_listened_to(
    folder: Path, heard: Callable[[], list[StageReport]]
) -> None:
    child = (
        "import subprocess, sys\nfrom lowtide import stage\nwith stage('a'):\n subprocess.run([sys.executable, '-c', "
    )
    run(folder, child + "'from lowtide import stage\\nwith stage(\"b\"): pass'], check=True)")
    assert [each.path for each in heard()] == [("a",), ("a",)]


def test_where_no_command_listens_any_more_a_program_goes_on(folder: Path) -> None:
    reports = StageReports(str(folder), lambda report: None)
    reports.start()
    reports._listening.close()
    assert run(folder).stdout == "inferred\nover\n"
    (folder / SOCKET).unlink()
    assert run(folder).stdout == "inferred\nover\n"


def test_a_checker_in_the_program_judges_by_its_stages_alone(
    folder: Path, heard: Callable[[], list[StageReport]]
) -> None:
    run(folder, "import lowtide\nwith lowtide.LeakCheck():\n with lowtide.stage('infer'): pass")
    assert heard() == []


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\n",
        b"{}\n",
        b"[1, [], true, false, 0]\n",
        b"[1, [2], 1, 0, 0]\n",
        b'[1, ["a"], 1, 0, -1]\n',
        b'[1, ["a"], 1, 0]\n',
        b"\xff\n",
        b"[1",
    ],
)
def test_what_is_no_report_is_passed_over(folder: Path, heard: Callable[[], list[StageReport]], text: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(str(folder / SOCKET))
        connection.sendall(text)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""
    assert run(folder).returncode == 0
    assert len(heard()) == 6
