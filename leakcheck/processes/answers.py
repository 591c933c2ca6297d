"""What an agent answers, in the process that it is in.

A process without torch answers that it has no tensors, and imports nothing for that but msgspec: numpy starts threads.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from lowtide.leakcheck.processes.messages import (
    Begin,
    ClearCaches,
    ExplainAsleep,
    ExplainHeld,
    ExplainHostMemory,
    ExplainLeft,
    Findings,
    Left,
    Levels,
    Trim,
    Trimmed,
    decode_question,
    encode,
)
from lowtide.probes.processes.roles import RANK_VARIABLES

if TYPE_CHECKING:
    from lowtide.leakcheck.processes.own_tensors import OwnTensors

_own: OwnTensors | None = None


def answer(data: bytes) -> bytes:
    """The answer to a question.

    Args:
        data: a message of `lowtide.leakcheck.processes.messages`.

    Raises:
        msgspec.DecodeError: it is none.
    """
    question = decode_question(data)
    own = _own_tensors()
    if isinstance(question, Begin):
        if own is not None:
            own.begin(question.stage, question.cycle)
        return encode(Findings())
    if isinstance(question, Trim):
        return encode(Trimmed(imported=_trim()))
    if isinstance(question, ExplainAsleep):
        found = [] if own is None else own.asleep(question.cycle, question.kind)
        return encode(Findings(findings=tuple(found)))
    if isinstance(question, ExplainHeld):
        found = [] if own is None else own.held(question.stage, question.kind, question.most)
        return encode(Findings(findings=tuple(found)))
    if isinstance(question, ExplainLeft):
        left = [] if own is None else own.left(question.cycle)
        return encode(Left(findings=tuple(each for each, _ in left), by_cycle=tuple(sizes for _, sizes in left)))
    if isinstance(question, ClearCaches):
        cleared = [] if own is None else own.clear_caches(question.holders)
        return encode(Findings(findings=tuple(cleared)))
    if isinstance(question, ExplainHostMemory):
        from lowtide.leakcheck.processes.own_arrays import named_by_arrays

        named = named_by_arrays(question.finding, question.bytes)
        return encode(Findings(findings=() if named is None else (named,)))
    levels = Levels(tensors={}, arenas={}, reserved={}, has_torch=False) if own is None else own.levels()
    return encode(msgspec.structs.replace(levels, variables=_rank_variables()))


def _rank_variables() -> dict[str, str]:
    return {name: os.environ[name] for name in RANK_VARIABLES if name in os.environ}


def _trim() -> int:
    """Give back what is free; returns the bytes that importing what this and a later explanation need has taken."""
    before = _resident()
    from lowtide.leakcheck.judging.ladder import Rung, release, trim_heap
    from lowtide.leakcheck.processes import own_arrays  # noqa: F401 - who asks for this asks for that next

    imported = max(0, _resident() - before)
    for rung in (Rung.COLLECT, Rung.EMPTY_CACHE):
        release(rung)
    trim_heap()
    return imported


def _resident() -> int:
    """Bytes in memory that are no file's; without a module that is not there yet, since it would count."""
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def _own_tensors() -> OwnTensors | None:
    """Follows this process's tensors from the first question after torch was imported; None before."""
    global _own
    if _own is None and hasattr(sys.modules.get("torch"), "Tensor"):
        from lowtide.leakcheck.processes.own_tensors import OwnTensors

        _own = OwnTensors()
    return _own
