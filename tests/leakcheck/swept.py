"""A sweep in this process, one life after the other: what `shared_sweep` must give, too."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from lowtide.leakcheck.lives.checked_life import Lives
from lowtide.leakcheck.lives.script import Fault
from lowtide.leakcheck.lives.sweep import Swept, live, stages
from lowtide.leakcheck.targets.faults import KINDS, Kind
from lowtide.leakcheck.targets.target import TargetFactory


def sweep(
    factory: TargetFactory,
    *,
    config: Mapping[str, Any],
    kinds: Sequence[Kind] = KINDS,
    among: Collection[str] | None = None,
    every: int = 1,
    listener: Callable[[str, Kind, int, int], None] = lambda stage, kind, at, points: None,
) -> Iterator[Swept]:
    """Fail every point; of each, the error that comes out must be the one that was raised, the state and the memory
    those of before, a second try must work, and the life must end with nothing left.

    Args:
        factory: makes a target.
        config: of every engine.
        kinds: what is to fail.
        among: the names of the stages in which it is; None for all.
        every: only each so-many-th point is failed, from the first on.
        listener: hears of each point before its life: stage, kind, which one, of how many.

    Raises:
        TargetError: the target cannot be driven.
    """
    # Whether inferring leaves something in another process is for random lives: they infer often enough.
    with Lives(factory, growth=False) as lives:
        for stage in stages(lives.capabilities, config):
            if among is not None and stage.name not in among:
                continue
            for kind in kinds:
                counted = live(lives, stage, Fault(kind, None))
                raised = 0
                bad = counted
                for at in range(0, counted.points, every):
                    if bad.findings:
                        break
                    listener(stage.name, kind, at, counted.points)
                    bad = live(lives, stage, Fault(kind, at))
                    raised += bad.raised
                unmeasured = lives.unmeasured
                yield Swept(stage.name, kind, counted.points, raised, bad.findings, bad.life, unmeasured)
                if counted.findings:
                    # It goes wrong without anything that fails: what fails in it besides says nothing.
                    break
