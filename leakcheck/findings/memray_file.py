"""Reads what memray has recorded: `python -m lowtide.leakcheck.findings.memray_file FILE TURNS PID`.

It writes the call that has allocated most, as JSON, or `null`.  In a process of its own: see `allocating_calls`.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Sequence

import msgspec
from memray import AllocationRecord, FileReader

from lowtide.leakcheck.findings.allocating_calls import AllocatingCall, Record, largest_call
from lowtide.probes.host.native_symbols import defining_library, loaded_libraries
from lowtide.probes.memory.stack_frames import StackFrame
from lowtide.probes.originals import lines_of

_UNNAMED = "<unknown>"
"""The native function of which memray knows no name."""

_INTERPRETER = "_PyEval_EvalFrame"
"""How the function is called that runs a line of Python: what comes before it in a stack, the line has called."""

_LONGEST_NAME = 80
"""Characters of a native function's name: those of Rust and C++ may have hundreds."""


def read_call(file: str, turns: int, pid: int) -> AllocatingCall | None:
    """Return the call that has allocated most of what was not freed; None if there is none.

    Args:
        file: what memray has written.
        turns: how many turns were recorded.
        pid: the process that was.
    """
    reader = FileReader(file)
    found = largest_call(map(_record_of, reader.get_leaked_allocation_records(merge_threads=True)), turns)
    if found is None:
        return None
    size, record, place = found
    native, library = _called(record.native(), place, pid)
    return AllocatingCall(size, place, record.stack, native, library)


def _record_of(leaked: AllocationRecord) -> Record:
    stack = tuple(StackFrame(file, line, name) for name, file, line in leaked.stack_trace())

    def native() -> list[str]:
        return [name for name, _, _ in leaked.native_stack_trace()]

    return Record(leaked.size, leaked.n_allocations, stack, native)


def _called(names: Sequence[str], place: StackFrame, pid: int) -> tuple[str, str]:
    """Return the native function that a line has called, and its library; of several the one that the line names.

    Args:
        names: native functions, the innermost first.
        place: the line.
        pid: the process.
    """
    own = itertools.takewhile(lambda name: not name.startswith(_INTERPRETER), names)
    known = list(dict.fromkeys(name for name in own if name != _UNNAMED))
    try:
        library, functions = defining_library(known, loaded_libraries(pid))
        source = lines_of(place.file)[place.line - 1]
    except (OSError, ValueError, IndexError):
        return "", ""
    if not functions:
        return "", ""
    words = set(re.findall(r"(\w{3,})\s*\(", source))
    # Those of Rust and C++ have it among other names, and Python's may be a part of theirs.
    by_line = [word for word in sorted(words, key=len, reverse=True) if any(word in name for name in functions)]
    return (by_line[0] if by_line else functions[0])[:_LONGEST_NAME], library


if __name__ == "__main__":
    found = read_call(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    sys.stdout.buffer.write(msgspec.json.encode(found))
