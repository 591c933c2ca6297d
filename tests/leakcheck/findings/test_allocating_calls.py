"""Which call allocates what each turn keeps: by memray with native code, and by tracemalloc where it is not there."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from lowtide.leakcheck.findings.allocating_calls import AllocatingCall, Record, RecordedTurns, largest_call
from lowtide.leakcheck.findings.turn_growth import growth_of_host_memory, with_call
from lowtide.leakcheck.growth.host_levels import LEAST_A_TURN, HostGrowth, HostLevels
from lowtide.leakcheck.growth.series import Slope
from lowtide.probes.allocation_stacks import OWN_FOLDERS
from lowtide.probes.host.memory_parts import NAMES, MemoryParts
from lowtide.probes.memory.stack_frames import StackFrame

MIB = 1 << 20
SERVE = StackFrame("/srv/engine.py", 40, "serve")
LOAD = StackFrame("/srv/engine.py", 9, "load")
OWN = StackFrame(f"{OWN_FOLDERS[0]}host/counters.py", 3, "read")
LIBRARY = StackFrame(json.__file__, 5, "loads")

EXTENSION = """
    #define _GNU_SOURCE
    #include <stdlib.h>
    #include <string.h>

    static __attribute__((noinline)) char *grow(size_t size) { return memset(malloc(size), 1, size); }
    char *encode_batch(size_t size) { char *made = grow(size); return made + (made[0] == 0); }
"""

PROGRAM = """
    import ctypes
    import json
    import sys

    what, missing = sys.argv[1], sys.argv[2:]
    sys.modules.update(dict.fromkeys(missing))

    from lowtide import LeakCheck

    take = ctypes.pythonapi.PyMem_RawMalloc
    take.argtypes, take.restype = [ctypes.c_size_t], ctypes.c_void_p

    class Node:
        def __init__(self, before):
            self.before = before

    LAST = None

    def serve(turn):
        global LAST
        if what == "malloc":
            take(1 << 20)
        if what == "extension":
            EXTENSION.encode_batch(1 << 20)
        if what == "objects":
            for _ in range(4000):
                LAST = Node(LAST)
        if what == "clean" and turn < 5:
            take(1 << 20)

    if what == "extension":
        EXTENSION = ctypes.CDLL("./extension.so")
        EXTENSION.encode_batch.argtypes, EXTENSION.encode_batch.restype = [ctypes.c_size_t], ctypes.c_void_p
    if what == "tracemalloc":
        import tracemalloc
        tracemalloc.start()
        what = "malloc"
    if what == "memray":
        import memray
        tracker = memray.Tracker("own.bin")
        tracker.__enter__()
        what = "malloc"
    with LeakCheck(turns=24, native=True) as check:
        for turn in range(24):
            serve(turn)
            check.turn()
    (subject,) = check.report.subjects
    found = [
        {
            "message": each.message,
            "advice": each.advice,
            "allocated_at": [[at.function, at.source] for at in each.allocated_at],
        }
        for each in subject.findings
    ]
    print(json.dumps([found, [each.what for each in subject.not_measured]]))
"""


def run(folder: Path, what: str, *missing: str) -> list[dict[str, Any]]:
    """Return what is found in a program, where some modules cannot be imported."""
    (folder / "engine.py").write_text(textwrap.dedent(PROGRAM))
    done = subprocess.run(
        [sys.executable, "engine.py", what, *missing], cwd=folder, capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr
    found, unmeasured = json.loads(done.stdout)
    assert unmeasured == []
    return found  # type: ignore[no-any-return]


def line_of(text: str) -> int:
    lines = textwrap.dedent(PROGRAM).split("\n")
    return next(number for number, line in enumerate(lines, 1) if line.strip() == text)


def said_of_call(finding: dict[str, Any]) -> str:
    return str(finding["message"].partition("; ")[2])


@pytest.mark.nightly
@pytest.mark.parametrize("missing", [(), ("memray",)], ids=["memray", "tracemalloc"])
def test_what_is_allocated_in_each_turn_is_told_with_its_line(missing: tuple[str, ...], tmp_path: Path) -> None:
    (finding,) = run(tmp_path, "malloc", *missing)
    assert (
        said_of_call(finding)
        == f"1.0 MiB of it with each turn allocated at engine.py:{line_of('take(1 << 20)')} in serve"
    )
    assert finding["allocated_at"] == [["serve", "take(1 << 20)"], ["<module>", "serve(turn)"]]
    assert finding["advice"].startswith("free in each turn what this call allocates")


@pytest.mark.nightly
@pytest.mark.parametrize("missing", [(), ("memray",)], ids=["memray", "tracemalloc"])
def test_objects_that_hold_each_other_are_told_by_who_holds_them(missing: tuple[str, ...], tmp_path: Path) -> None:
    (finding,) = run(tmp_path, "objects", *missing)
    assert finding["message"].startswith("__main__.LAST takes 4000 items")
    assert "__main__.Node behind each other by .before" in finding["message"]


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler")
def test_the_native_function_is_named_with_its_library(tmp_path: Path) -> None:
    (tmp_path / "extension.c").write_text(EXTENSION)
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", "extension.so", "extension.c"], cwd=tmp_path, check=True)
    (finding,) = run(tmp_path, "extension")
    line = line_of("EXTENSION.encode_batch(1 << 20)")
    assert said_of_call(finding) == (
        f"1.0 MiB of it with each turn allocated in encode_batch (extension.so), called at engine.py:{line} in serve"
    )


@pytest.mark.nightly
@pytest.mark.parametrize("missing", [(), ("memray",)], ids=["memray", "tracemalloc"])
def test_what_fills_is_none(missing: tuple[str, ...], tmp_path: Path) -> None:
    assert run(tmp_path, "clean", *missing) == []


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("what", "missing", "why"),
    [
        ("tracemalloc", ("memray",), "the program runs tracemalloc itself"),
        ("memray", (), "memray cannot record them: No more than one Tracker instance can be active at the same time"),
    ],
)
def test_where_the_program_records_itself_that_is_said(
    what: str, missing: tuple[str, ...], why: str, tmp_path: Path
) -> None:
    (finding,) = run(tmp_path, what, *missing)
    assert said_of_call(finding) == f"which call allocates it is not known: {why}"


def test_the_line_that_keeps_most_is_the_call() -> None:
    records = [
        Record(3 * MIB, 5, (LIBRARY, LOAD)),
        Record(2 * MIB, 10, (SERVE,)),
        Record(4 * MIB, 10, (LIBRARY, SERVE)),
    ]
    found = largest_call(records, 10)
    assert found is not None
    assert (found[0], found[1].bytes, found[2]) == (6 * MIB, 4 * MIB, SERVE)


def test_what_few_turns_have_allocated_is_no_call() -> None:
    assert largest_call([Record(9 * MIB, 2, (LOAD,))], 10) is None


def test_what_the_checker_allocates_is_no_call() -> None:
    assert largest_call([Record(9 * MIB, 10, (OWN, SERVE))], 10) is None


GROWN = HostGrowth(Slope(MIB, MIB, MIB), 20, 20 * MIB, NAMES["malloc"], 20 * MIB, (0, 0))


def test_a_call_that_explains_little_is_not_named() -> None:
    finding = growth_of_host_memory(GROWN, "tests", "")
    little, much = (
        with_call(finding, RecordedTurns(10, AllocatingCall(each * MIB, SERVE, (SERVE,))), "tests", MIB)
        for each in (2, 3)
    )
    assert little.message.endswith("; no call has kept as much of what it allocated in the last 10 tests")
    assert little.allocated_at == ()
    assert much.message.endswith("; 307.2 KiB of it with each test allocated at engine.py:40 in serve")


def test_without_records_the_advice_names_what_makes_them() -> None:
    assert "`LeakCheck(native=True)` names the calls" in (
        growth_of_host_memory(GROWN, "turns", "", option="LeakCheck(native=True)").advice or ""
    )


@pytest.mark.parametrize(
    ("steps", "may"),
    [
        ([LEAST_A_TURN] * 4, True),
        ([LEAST_A_TURN] * 3, False),
        ([LEAST_A_TURN - 1] * 4, False),
        ([5 * LEAST_A_TURN, 0, LEAST_A_TURN, LEAST_A_TURN], False),
    ],
)
def test_memory_that_has_risen_four_times_in_a_row_is_suspect(steps: list[int], may: bool) -> None:
    levels, level = HostLevels(parts=lambda: MemoryParts(0, 0, 0, 0, 0, 0, 0, 0), modules=lambda: 0), MIB
    levels.note((level, 0))
    for step in steps:
        level += step
        levels.note((level, 0))
    assert levels.may_grow() is may
