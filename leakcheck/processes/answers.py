"""What an agent answers, in the process that it is in.

A process without torch answers that it has no tensors, and imports nothing for that but msgspec: numpy starts threads.
"""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from lowtide.leakcheck.processes import messages
from lowtide.probes.objects.foreign import thread_name
from lowtide.probes.originals import contents, gc, loaded, os, sys
from lowtide.probes.processes.roles import RANK_VARIABLES
from lowtide.reports.schema import Finding, as_written
from lowtide.reports.statement import HolderFacts

if TYPE_CHECKING:
    from types import FrameType

    from lowtide.leakcheck.findings.turn_growth import TurnGrowth
    from lowtide.leakcheck.processes.own_tensors import OwnPreserved, OwnTensors

_own: OwnTensors | None = None
_own_preserved: OwnPreserved | None = None

_turns: dict[str, TurnGrowth] = {}
"""What is followed, by what a turn is."""

_modules = 0
"""How many modules there were after the last turn that was read."""

_OWN = "lowtide.leakcheck.processes.own_tensors"
"""What a process without torch does not import, unless somebody looks."""

_EXPLAINING = "lowtide.leakcheck.findings.host_memory"
"""What a process without suspicion does not import."""

_CAUSES = "lowtide.leakcheck.findings.causes"
"""The same, where things of one kind become more."""

_DRIVER = "lowtide.probes.device.driver_trace"
"""The same, where it is recorded what is asked of a card's driver."""

_GROWTH = "lowtide.leakcheck.findings.turn_growth"
"""What a process imports in which it is read what grows."""

_FRAMES = 30
"""Frames of a thread that are told."""

Importing = Callable[[str], AbstractContextManager[object]]
"""Makes the block in which a module is imported: the agent's makes sure that nobody else imports anything."""


_T = TypeVar("_T")


def apart(work: Callable[[], _T], kind: Any) -> _T:
    """Return what work gives that goes through the whole heap: in a fork, so that the program notices nothing.

    Raises:
        ForkError: it failed, or took too long.
    """
    from lowtide.probes.processes.forked import in_a_fork

    return msgspec.msgpack.decode(in_a_fork(lambda: messages.encode(work())), type=kind)  # type: ignore[no-any-return]


def _by_container(work: Callable[[], dict[int, Finding]]) -> dict[int, Finding]:
    """Do the same for findings on containers, by their identities."""
    return apart(lambda: {each: as_written(found) for each, found in work().items()}, dict[int, Finding])


def answer(data: bytes, importing: Importing = nullcontext, *, is_fork: bool = False) -> bytes:
    """Answer a question.

    Args:
        data: a message of `lowtide.leakcheck.processes.messages`.
        importing: in which everything is imported that the agent has not needed before.
        is_fork: whether this process is a fork already, of that which is asked about.

    Raises:
        msgspec.DecodeError: it is none.
    """
    return messages.encode(_answer(messages.QUESTIONS.decode(data), importing, is_fork=is_fork))


def _answer(question: messages.Question[Any], importing: Importing, *, is_fork: bool) -> object:
    if isinstance(question, messages.Look | messages.ExplainGrown):
        with importing(_OWN):
            from lowtide.leakcheck.processes.own_tensors import explain_grown, look

        if isinstance(question, messages.ExplainGrown):
            return explain_grown(question) if is_fork else apart(lambda: explain_grown(question), list[Finding])
        return msgspec.structs.replace(look(lists=question.lists), **_names())
    if isinstance(question, messages.RecordDriver):
        with importing(_DRIVER):
            from lowtide.probes.device.driver_trace import record_from_first_use

        record_from_first_use()
        return None
    if isinstance(question, messages.TellStacks):
        return list(_stacks())
    own = _own_tensors(importing)
    if isinstance(question, messages.Begin):
        if own is not None:
            own.begin(question.stage, question.cycle)
        return own is not None
    if isinstance(question, messages.Trim):
        return _trim(importing)
    if isinstance(question, messages.ExplainHostMemory):
        with importing(_EXPLAINING):
            from lowtide.leakcheck.findings.host_memory import memory_holder
            from lowtide.leakcheck.findings.storage_holders import Context

        def holder() -> HolderFacts | None:
            # Which of this process's arrays are the memory that the other one has seen grow.
            by_arrays = memory_holder(question.bytes, Context(living=True), grown=question.grown)
            return None if by_arrays is None else by_arrays[0]

        return apart(holder, HolderFacts | None)
    if isinstance(question, messages.ExplainNew):
        with importing(_CAUSES):
            from lowtide.leakcheck.findings.causes import holder_of_new

        return holder_of_new(question.resource, question.known)
    if isinstance(question, messages.RememberPreserved | messages.ComparePreserved):
        return _preserved(question, importing)
    if isinstance(question, messages.ReadTurn):
        return _after_turn(question, own, importing)
    if isinstance(question, messages.ReadSlots):
        return ((), {}) if own is None else own.slots.read()
    if isinstance(question, messages.Read):
        if question.collects:
            gc.collect()
        levels = messages.Levels(tensors={}, arenas={}, reserved={}, has_torch=False) if own is None else own.levels()
        return msgspec.structs.replace(levels, **_names())
    return [] if own is None else _of_tensors(question, own)


def _of_tensors(question: messages.Question[Any], own: OwnTensors) -> object:
    if isinstance(question, messages.ExplainLeft):
        return own.left(question.cycle, question.stage)
    if isinstance(question, messages.ExplainAsleep):
        return own.asleep(question.cycle, question.kind)
    if isinstance(question, messages.ExplainAwake):
        return own.more_awake(question.stage, question.kind)
    if isinstance(question, messages.ExplainHeld):
        return own.held(question.stage, question.kind, question.most)
    assert isinstance(question, messages.ClearCaches)
    return messages.written(own.clear_caches(question.holders))


def _preserved(
    question: messages.RememberPreserved | messages.ComparePreserved, importing: Importing
) -> int | list[Finding]:
    """Return what must survive a sleep here; an engine that announces none costs nothing."""
    global _own_preserved
    stages = loaded("lowtide.probes.stages")
    if stages is None or not (stages.announced_preserved().tensors or _own_preserved):
        return 0 if isinstance(question, messages.RememberPreserved) else []
    if isinstance(question, messages.RememberPreserved):
        with importing(_OWN):
            from lowtide.leakcheck.processes.own_tensors import OwnPreserved

        _own_preserved = OwnPreserved(question.kind)
        return _own_preserved.tensors
    preserved, _own_preserved = _own_preserved, None
    return [] if preserved is None else messages.written(preserved.compare(question.stage))


def _after_turn(question: messages.ReadTurn, own: OwnTensors | None, importing: Importing) -> messages.GrownContainers:
    """Return what grows, with what names this process, and the modules that it has imported in this turn."""
    global _modules
    imported = len(sys.modules) - (_modules or len(sys.modules))
    is_read = own is not None or question.asked
    grown = _grown(question, importing) if is_read else messages.GrownContainers()
    cards = own.allocated() if own is not None and question.seconds else {}
    # What was imported here, to read and to explain, is none of the program's.
    _modules = len(sys.modules)
    return msgspec.structs.replace(grown, cards=cards, imported=max(0, imported), **_names())


def _grown(question: messages.ReadTurn, importing: Importing) -> messages.GrownContainers:
    """Read the containers of this process after a turn, and return which of them grow."""
    with importing(_GROWTH):
        from lowtide.leakcheck.findings.turn_growth import TurnGrowth
        from lowtide.leakcheck.judging.ladder import trim_heap

    # What a running function holds is the program's: no test runner is in here.
    growth = _turns.get(question.turns)
    # Each window of a watch has intervals of another length.
    if growth is None or (question.anew and question.seconds):
        growth = _turns[question.turns] = TurnGrowth(
            question.turns, by_frames=True, asked=question.asked, seconds=question.seconds, apart=_by_container
        )
    elif question.anew:
        growth.break_off()
    growth.last(question.seconds)
    if question.seconds and not question.ends:
        growth.note("")
    growth.read(question.turn, begins=question.begins, ends=question.ends)
    if not question.asked:
        # What the reading has taken and freed would be in the next level, and given back at some time.
        trim_heap()
    if not question.tells:
        return messages.GrownContainers()
    more = growth.undecided("")
    if question.ends:
        grown = growth.end("", question.module, since=question.since)
        found = grown.containers if grown.host is None else (*grown.containers, grown.host)
    else:
        found = growth.so_far()
    return messages.GrownContainers(findings=tuple(messages.written(found)), more=more)


def _stacks() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Return what each thread does; without a lock that one of them may hold."""
    running = getattr(loaded("threading"), "_active", {})
    for ident, innermost in sys._current_frames().items():
        frames: list[str] = []
        frame: FrameType | None = innermost
        while frame is not None and len(frames) < _FRAMES:
            frames.append(f"{frame.f_code.co_name} {frame.f_code.co_filename}:{frame.f_lineno}")
            frame = frame.f_back
        if ident != get_ident():
            yield thread_name(running[ident]) if ident in running else f"thread {ident}", tuple(frames)


def _names() -> dict[str, Any]:
    """Return what names this process: the variables that say its rank, and its name in `multiprocessing`."""
    variables = {name: os.environ[name] for name in RANK_VARIABLES if name in os.environ}
    process = loaded("multiprocessing.process")
    # Where another process has started it by that name.
    own = None if process is None or process.parent_process() is None else process.current_process()
    return {"variables": variables, "called": str(own.name) if own is not None else ""}


def _trim(importing: Importing) -> int:
    """Give back what is free; returns the bytes that importing what this and a later explanation need has taken."""
    before = _resident()
    with importing("lowtide.leakcheck.judging.ladder"):
        from lowtide.leakcheck.judging.ladder import release, trim_heap
        from lowtide.leakcheck.resources.resource import Rung

    imported = max(0, _resident() - before)
    if _EXPLAINING not in sys.modules:
        # What importing needs for a moment is free after it, and would be subtracted for good.
        _give_back_heap(trim_heap)
        before = _resident()
        with importing(_EXPLAINING):
            from lowtide.leakcheck.findings import host_memory, storage_holders  # noqa: F401 - asked for next

        _give_back_heap(trim_heap)
        imported += max(0, _resident() - before)
    for rung in (Rung.COLLECT, Rung.EMPTY_CACHE):
        release(rung)
    trim_heap()
    return imported


def _give_back_heap(trim_heap: Callable[[], bool]) -> None:
    gc.collect()
    trim_heap()


def _resident() -> int:
    """Return the bytes in memory that are no file's; without a module that is not there yet, since it would count."""
    _, resident, shared, *_ = map(int, contents("/proc/self/statm").split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def _own_tensors(importing: Importing) -> OwnTensors | None:
    """Follow this process's tensors from the first question after torch was imported; None before."""
    global _own
    if _own is None and hasattr(loaded("torch"), "Tensor"):
        with importing(_OWN):
            from lowtide.leakcheck.processes.own_tensors import OwnTensors

        _own = OwnTensors(apart)
    return _own
