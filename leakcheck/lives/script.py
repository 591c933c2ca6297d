"""What a life is made of: the engine that is driven, the stages of its script, and how one is performed."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lowtide.reports.schema import Stage

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup

SCRIPT = ("create", "infer", "sleep(1)", "wake", "infer", "sleep(2)", "wake", "infer", "shutdown")
"""One whole life."""


class Life(Protocol):
    """An engine that can be driven through a script; new ones are made for every life.

    It may have an attribute `engine`: what a caller of `shutdown` still has, and from which paths are reported; without
    one that is the life itself.  It may have `preserved()`, which gives by name the tensors whose contents must survive
    a sleep, `graph_buffers()`, which gives by name address and bytes of what captured graphs read, and
    `kv_blocks_held()`, which gives who holds how many KV blocks although no request does, with `step()` to try whether
    one more step ends that.  A script that has the stage `reload` needs a `reload()`.
    """

    def create(self) -> None:
        """Take memory and be ready."""

    def infer(self) -> Sequence[Sequence[int]]:
        """Generate for a fixed set of prompts; the new tokens of each."""

    def sleep(self, level: int) -> None:
        """Give device memory back until `wake`."""

    def wake(self) -> None:
        """Take all of it again."""

    def shutdown(self) -> None:
        """Give everything back; legal at any time."""


JUDGEMENT = "judgement"
"""What an event calls the time after a shutdown, in which it is judged what the life has left."""


class Recorded(Protocol):
    """What a run has read so far."""

    def sizes(self) -> Mapping[str, int]:
        """Bytes at the latest reading, by name."""

    def latest_stages(self, most: int) -> Sequence[Stage]:
        """The last stages that have ended, as a report has them."""


@dataclass(frozen=True)
class Event:
    """What a listener hears before each stage, and before a life is judged: how far the run is, and what it has read.

    Attributes:
        cycle: the life, from 1 on.
        cycles: how many lives there are to be.
        stage: what starts now, `JUDGEMENT` after a shutdown.
        done: stages of all lives that are done.
        total: stages of all lives.
        sizes: bytes at the latest reading, by name; whole numbers alone, so that whoever keeps them keeps nothing of
            what is measured.
        latest_stages: gives some of the last stages as a report has them; to be asked while the listener hears of it.
    """

    cycle: int
    cycles: int
    stage: str
    done: int
    total: int
    sizes: Mapping[str, int] = field(default_factory=dict)
    latest_stages: Callable[[int], Sequence[Stage]] = lambda most: ()

    @classmethod
    def at(cls, turn: int, script: Sequence[str], cycle: int, cycles: int, record: Recorded) -> Event:
        """The event before the stage `turn` of a life's script; past its end, before the judgement."""
        done, total = (cycle - 1) * len(script) + turn, cycles * len(script)
        doing = (*script, JUDGEMENT)[turn]
        return cls(cycle, cycles, doing, done, total, record.sizes(), record.latest_stages)

    @property
    def text(self) -> str:
        """`cycle 1/2: infer`."""
        return f"cycle {self.cycle}/{self.cycles}: {self.stage}"


def perform(life: Life, name: str) -> Sequence[Sequence[int]]:
    """One stage of the script; the tokens of an infer, nothing for the others."""
    if name == "infer":
        return life.infer()
    level = re.fullmatch(r"sleep\((\d+)\)", name)
    if level is not None:
        life.sleep(int(level[1]))
    else:
        getattr(life, name)()
    return ()


def asked(life: Life, name: str) -> Mapping[str, Any]:
    """What a life says of itself, if it does."""
    method = getattr(life, name, None)
    return {} if method is None else method()


def is_out_of_memory(error: Exception) -> bool:
    """Python's, torch's, or an engine's own, by its name."""
    return isinstance(error, MemoryError) or any(base.__name__ == "OutOfMemoryError" for base in type(error).__mro__)


def failures(error: BaseException) -> list[BaseException]:
    """The parts of an error that are no interrupt."""
    if isinstance(error, BaseExceptionGroup):
        return [part for inner in error.exceptions for part in failures(inner)]
    return [] if isinstance(error, KeyboardInterrupt) else [error]


def was_interrupted(error: BaseException) -> bool:
    """Whether a Ctrl-C is in it."""
    if isinstance(error, BaseExceptionGroup):
        return any(was_interrupted(part) for part in error.exceptions)
    return isinstance(error, KeyboardInterrupt)
