"""Which call allocates what each turn keeps: recorded while memory seems to grow, by memray, else by tracemalloc.

A recorder is for the turns that follow a suspicion, and costs nothing before: memray slows what allocates down by a few
times, with stacks of native code.  What it has written is read in a process of its own, since the names of native
functions take tens of megabytes that are never given back: by `python -m` and this module, which writes the call that
has allocated most as JSON.
"""

from __future__ import annotations

import ast
import itertools
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from lowtide.probes.allocation_stacks import OWN_FOLDERS
from lowtide.probes.host.memory_parts import malloc_in_use
from lowtide.probes.host.native_symbols import defining_library, loaded_libraries
from lowtide.probes.host.settings import TRACING, checkers_own
from lowtide.probes.memory.stack_frames import StackFrame, telling_frames
from lowtide.probes.objects.described import is_library
from lowtide.probes.originals import lines_of, os, sys, tempfile, threading

if TYPE_CHECKING:
    from memray import AllocationRecord

_MOST_TURNS = 16
"""Turns that memray records at most: a call that allocates in each of them is known by then."""

_MOST_BYTES = 1 << 30
"""Bytes of a record of memray's at most: a turn that makes millions of objects writes tens of megabytes."""

_FRAMES = 16
"""Frames that tracemalloc keeps of each stack."""

_SECONDS = 120.0
"""How long reading a record may take."""

_UNNAMED = "<unknown>"
"""The native function of which memray knows no name."""

_INTERPRETER = "_PyEval_EvalFrame"
"""How the function is called that runs a line of Python: what comes before it in a stack, the line has called."""

_LONGEST_NAME = 80
"""Characters of a native function's name: those of Rust and C++ may have hundreds."""


class AllocatingCall(msgspec.Struct, frozen=True):
    """The call that has allocated most of what was not freed.

    Attributes:
        bytes: of this, in all recorded turns.
        place: the program's line that made it.
        stack: how the program came there, the innermost frame first.
        native: the native function that it called; empty where none is known.
        library: the file that has this function.
    """

    bytes: int
    place: StackFrame
    stack: tuple[StackFrame, ...]
    native: str = ""
    library: str = ""


class Record(NamedTuple):
    """What was allocated on one way, and not freed.

    Attributes:
        bytes: of it.
        allocations: how many they were.
        stack: the calls that led there, the innermost first.
        native: gives the names of the native functions within the innermost of these, the innermost first.
    """

    bytes: int
    allocations: int
    stack: tuple[StackFrame, ...]
    native: Callable[[], Sequence[str]] = tuple


def largest_call(records: Iterable[Record], turns: int) -> tuple[int, Record, StackFrame] | None:
    """Return how much the line that has allocated most keeps of some turns, its largest record, and it; None if none.

    What was allocated in fewer than half of the turns is no growth: a table that was enlarged, a last result.
    """
    sizes, counts, largest = Counter[StackFrame](), Counter[StackFrame](), dict[StackFrame, Record]()
    for record in records:
        place = _place_of(record.stack)
        if place is not None:
            sizes[place] += record.bytes
            counts[place] += record.allocations
            if place not in largest or record.bytes > largest[place].bytes:
                largest[place] = record
    return next(
        ((size, largest[place], place) for place, size in sizes.most_common() if 2 * counts[place] >= turns), None
    )


def _place_of(stack: Sequence[StackFrame]) -> StackFrame | None:
    """Return the program's line in a stack, else one of a library that is built on others; None of the checker's."""
    for frame in stack:
        if frame.file.startswith(OWN_FOLDERS):
            return None
        if not is_library(frame.file):
            return frame
    return stack[telling_frames(stack)[0]] if stack else None


class CannotRecordError(RuntimeError):
    """Allocations cannot be recorded; the message says why."""


class _Memray:
    """Records by memray, with native stacks."""

    def __init__(self, memray: Any) -> None:
        self._folder = tempfile.mkdtemp(prefix="lowtide-native-")
        self._file = os.path.join(self._folder, "record.bin")
        errors = list[BaseException]()

        def begin() -> None:
            # It leaves the outermost frames, as many as there are here, out of this thread's stacks: the checker's are
            # gone when the program goes on, and some of the program's would be left out in their place.
            try:
                destination = memray.FileDestination(self._file, compress_on_exit=False)
                self._tracker = memray.Tracker(
                    destination=destination, native_traces=True, trace_python_allocators=True
                )
                self._tracker.__enter__()
            except (RuntimeError, OSError) as error:
                errors.append(error)

        thread = threading.Thread(target=begin, name="lowtide-memray", daemon=True)
        thread.start()
        thread.join()
        if errors:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise CannotRecordError(f"memray cannot record them: {errors.pop()}")

    def own_bytes(self) -> int:
        # In a file, not in memory.
        return 0

    def is_full(self, turns: int) -> bool:
        return turns >= _MOST_TURNS or os.stat(self._file).st_size > _MOST_BYTES

    def stop(self, turns: int) -> AllocatingCall | None:
        self._tracker.__exit__(None, None, None)
        command = [sys.executable, "-m", "lowtide.leakcheck.findings.allocating_calls"]
        try:
            arguments = [self._file, str(turns), str(os.getpid())]
            done = subprocess.run([*command, *arguments], capture_output=True, timeout=_SECONDS, check=True)
            return msgspec.json.decode(done.stdout, type=AllocatingCall | None)
        except (OSError, subprocess.SubprocessError, msgspec.DecodeError) as error:
            raise CannotRecordError(f"what memray has recorded cannot be read: {error}") from None
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def drop(self) -> None:
        self._tracker.__exit__(None, None, None)
        shutil.rmtree(self._folder, ignore_errors=True)


def _read_call(file: str, turns: int, pid: int) -> AllocatingCall | None:
    """Return the call that has allocated most of what was not freed in some turns of a process; None if there is none.

    It reads what memray has written.
    """
    from memray import FileReader

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
    """Return which of some native functions a line has called, and its library; of several the one that it names."""
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


class _Tracemalloc:
    """Records by tracemalloc: what Python's allocators give out, and no native code by itself."""

    def __init__(self, tracemalloc: Any) -> None:
        if tracemalloc.is_tracing():
            raise CannotRecordError("the program runs tracemalloc itself")
        self._module = tracemalloc
        checkers_own.add(TRACING)
        tracemalloc.start(_FRAMES)

    def own_bytes(self) -> int:
        return int(self._module.get_tracemalloc_memory())

    def is_full(self, turns: int) -> bool:
        # What a snapshot has taken of Python's heap and given back would hide what grows for some turns.
        return False

    def stop(self, turns: int) -> AllocatingCall | None:
        # Nothing was traced before it began: what the snapshot has, has come since.
        statistics = self._module.take_snapshot().statistics("traceback")
        self.drop()
        records = (Record(each.size, each.count, _stack_of(each.traceback)) for each in statistics)
        found = largest_call(records, turns)
        if found is None:
            return None
        size, record, place = found
        named, *stack = _with_functions([place, *record.stack])
        return AllocatingCall(size, named, tuple(stack))

    def drop(self) -> None:
        self._module.stop()
        checkers_own.discard(TRACING)


def _stack_of(traceback: Any) -> tuple[StackFrame, ...]:
    return tuple(StackFrame(frame.filename, frame.lineno, "") for frame in reversed(traceback))


_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def _with_functions(frames: Iterable[StackFrame]) -> Iterator[StackFrame]:
    """Yield frames with their functions, which tracemalloc does not note; `<module>` where none is known."""
    known: dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef]] = {}
    for frame in frames:
        if frame.file not in known:
            known[frame.file] = [each for each in _nodes_of(frame.file) if isinstance(each, _FUNCTION)]
        around = [each for each in known[frame.file] if each.lineno <= frame.line <= (each.end_lineno or each.lineno)]
        # The innermost one begins last.
        yield frame._replace(function=max(around, key=lambda each: each.lineno).name if around else "<module>")


def _nodes_of(file: str) -> Iterable[ast.AST]:
    try:
        return ast.walk(ast.parse("\n".join(lines_of(file))))
    except (OSError, ValueError, SyntaxError, RecursionError):
        return ()


class RecordedTurns(msgspec.Struct, frozen=True):
    """What is known of the turns that were recorded.

    Attributes:
        turns: how many there were.
        call: the call that has allocated most in them; None if none has allocated in half of them.
        why: why nothing is known; empty where something is.
    """

    turns: int
    call: AllocatingCall | None = None
    why: str = ""


class CallRecorder:
    """Records allocations of the turns that follow a suspicion, until it is asked what they were.

    Both recorders are loaded here, before what is judged begins: the first import is none of a turn's.

    Attributes:
        took: bytes that the last recording has taken, and has given back.
    """

    def __init__(self) -> None:
        import tracemalloc

        self._tracemalloc: Any = tracemalloc
        self._memray: Any = None
        try:
            import memray

            self._memray = memray
            # Its first use opens a pipe for good, and loads what reads stacks.
            _Memray(memray).drop()
        except (ImportError, CannotRecordError):
            pass  # which is said where it is needed
        self._running: _Memray | _Tracemalloc | None = None
        self._turns = self.took = 0
        self._known: RecordedTurns | None = None

    @property
    def may_begin(self) -> bool:
        """Whether nothing is recorded yet, or was recorded in vain: what seemed to grow has stopped."""
        in_vain = self._known is None or (self._known.call is None and not self._known.why)
        return self._running is None and in_vain

    def own_bytes(self) -> int:
        """Return the memory that recording says to take now; it takes in proportion to that: see `took`."""
        return 0 if self._running is None else self._running.own_bytes()

    def begin(self) -> None:
        """Record from here on."""
        self._turns = 0
        try:
            self._running = _Tracemalloc(self._tracemalloc) if self._memray is None else _Memray(self._memray)
        except CannotRecordError as error:
            self._known = RecordedTurns(0, why=str(error))

    def turn(self) -> bool:
        """Return a turn has ended; return whether recording has ended with it, as enough is known."""
        if self._running is None:
            return False
        self._turns += 1
        if not self._running.is_full(self._turns):
            return False
        self.stop()
        return True

    def stop(self) -> None:
        """Stop, and keep what is known."""
        if self._running is None:
            return
        running, self._running = self._running, None
        before = malloc_in_use()
        try:
            self._known = RecordedTurns(self._turns, running.stop(max(1, self._turns)))
        except CannotRecordError as error:
            self._known = RecordedTurns(self._turns, why=str(error))
        self.took = max(0, before - malloc_in_use())

    def recorded(self) -> RecordedTurns:
        """Stop, and return what is known."""
        self.stop()
        return self._known or RecordedTurns(0, why="memory has grown too late, or too unevenly")

    def drop(self) -> bool:
        """Stop, and forget what was recorded; return whether anything was running."""
        running, self._running, self._known = self._running, None, None
        if running is None:
            return False
        before = malloc_in_use()
        running.drop()
        self.took = max(0, before - malloc_in_use())
        return True


if __name__ == "__main__":
    _, record, recorded_turns, recorded_pid = sys.argv
    sys.stdout.buffer.write(msgspec.json.encode(_read_call(record, int(recorded_turns), int(recorded_pid))))
