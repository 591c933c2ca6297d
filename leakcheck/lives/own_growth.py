"""Whether the tensors that an engine in this process keeps grow from inference to inference, judged while it lives.

At its shutdown it may give all of them back, and a server is not shut down for weeks.
"""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.leakcheck.findings.life_findings import ENGINE, LeftoverTensors
from lowtide.leakcheck.judging.ladder import trim_heap
from lowtide.leakcheck.judging.level_growth import FEWEST_TURNS
from lowtide.leakcheck.processes.own_tensors import outside_pools
from lowtide.leakcheck.processes.process_growth import Inferences, Left, grown_under, is_under
from lowtide.probes.originals import gc
from lowtide.probes.snapshot import Snapshot
from lowtide.probes.stages import announced_pools
from lowtide.reports.schema import Finding


class OwnGrowth:
    """Follows the engine of one life.

    Args:
        leftovers: knows what appeared in which inference.
    """

    def __init__(self, leftovers: LeftoverTensors) -> None:
        self._leftovers = leftovers
        self._inferences = Inferences()
        self._found: list[Finding] = []

    def begin_life(self) -> None:
        """Another life begins; what is known of the one before it is forgotten, since each shows the same."""
        self._inferences.again, self._found = [], []

    def after(self, stage: str) -> None:
        """A stage has ended."""
        self._inferences.after(stage)

    @property
    def missing(self) -> int:
        """How many inferences in a row would show growth, at the end of this life."""
        return max(0, FEWEST_TURNS - len(self._inferences.again))

    def keeps_any(self, cycle: int, engine: object) -> bool:
        """Whether an engine keeps anything that it has made while it inferred in this life."""
        return any(is_under(ENGINE, finding) for finding, _ in self._left(cycle, engine))

    def look(self, cycle: int, engine: object) -> None:
        """Look for what an engine keeps that is about to be shut down."""
        self._found = grown_under(ENGINE, self._left(cycle, engine), self._inferences.again)

    def _left(self, cycle: int, engine: object) -> Left:
        # Garbage that waits for the collector looks like what is kept.
        gc.collect()
        left = self._leftovers.explain_turns(cycle, "infer", announced_pools(), engine)
        # What the walk has taken is free, and none of the engine's.
        trim_heap()
        return left

    def findings(self, known: Sequence[Finding]) -> list[Finding]:
        """What has grown under the engine, and is not known as what it has kept asleep or left."""
        holders = {finding.holder for finding in known}
        return [finding for finding in self._found if finding.holder not in holders]


def leaves_more(before: Snapshot, after: Snapshot) -> bool:
    """Return whether there is more under tensors outside pools, on any device."""
    then, now = (outside_pools(each.tensors, each.pools) for each in (before, after))
    return any(size > then.get(device, 0) for device, size in now.items())
