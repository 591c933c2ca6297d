"""The stages of a program, by the annotations in a snapshot of torch's allocator."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

_LONGEST = 200
"""Characters of a stage's name, at most: some programs put more than a name into an annotation."""


OUTSIDE = ""
"""The stage of what was allocated outside of all, which no annotation has as its name."""


class Annotation(NamedTuple):
    """The begin or the end of a `torch.profiler.record_function`.

    Attributes:
        time: microseconds since 1970.
        begins: whether it is the begin.
        name: of the stage.
    """

    time: int
    begins: bool
    name: str


class StageTimeline:
    """Says which stage a moment was in: of stages in each other the innermost.

    A stage that ends without having begun was there when recording began. One that does not end is there until the
    snapshot. torch records no threads: the end of a stage ends the last one of that name.

    Args:
        annotations: of one device.
    """

    def __init__(self, annotations: Iterable[Annotation]) -> None:
        ordered = sorted(annotations, key=lambda each: each.time)
        self._times = [each.time for each in ordered]
        self._stages: list[str | None] = []
        stages = _OpenStages()
        for name in _open_at_first(ordered):
            stages.begin(name)
        self._stages.append(stages.innermost)
        for each in ordered:
            if each.begins:
                stages.begin(each.name)
            else:
                stages.end(each.name)
            self._stages.append(stages.innermost)

    def at(self, time: int) -> str | None:
        """The stage at a moment in microseconds since 1970; `OUTSIDE` of all, None where no stages were recorded."""
        if not self._times:
            return None
        stage = self._stages[bisect_right(self._times, time)]
        return OUTSIDE if stage is None else stage


def stage_name(text: object) -> str:
    """A stage's name as it is shown.

    Raises:
        TypeError: it is no text.
    """
    if not isinstance(text, str):
        raise TypeError(f"the name of a stage is no text but {type(text).__name__}")
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


class _OpenStages:
    """The stages that are open; each step takes the same time, however many there are."""

    def __init__(self) -> None:
        self._begun: list[str] = []
        # Those that have not ended, the outermost first; one that ended inside of others stays until these have.
        self._open: list[int] = []
        self._by_name: dict[str, list[int]] = {}
        self._ended: set[int] = set()

    @property
    def innermost(self) -> str | None:
        return self._begun[self._open[-1]] if self._open else None

    def begin(self, name: str) -> None:
        number = len(self._begun)
        self._begun.append(name)
        self._open.append(number)
        self._by_name.setdefault(name, []).append(number)

    def end(self, name: str) -> None:
        self._ended.add(self._by_name[name].pop())
        while self._open and self._open[-1] in self._ended:
            self._ended.remove(self._open.pop())


def _open_at_first(ordered: Iterable[Annotation]) -> list[str]:
    """The stages that end without a begin, the outermost first: that one ends last."""
    begun: dict[str, int] = {}
    found = []
    for each in ordered:
        count = begun.get(each.name, 0) + (1 if each.begins else -1)
        if count < 0:
            found.append(each.name)
        begun[each.name] = max(0, count)
    return found[::-1]
