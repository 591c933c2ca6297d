"""Whether the tensors that an engine in this process keeps grow from inference to inference, judged while it lives.

At its shutdown it may give all of them back, and a server is not shut down for weeks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lowtide.leakcheck.findings.life_findings import LeftoverTensors
from lowtide.leakcheck.processes.engine_processes import FILLING
from lowtide.leakcheck.processes.own_tensors import outside_pools
from lowtide.leakcheck.processes.process_growth import ProcessGrowth, growing_holder, held_by, levels_of
from lowtide.probes.memory.tensors import summarize, survey_storages
from lowtide.probes.objects.listed import census_of_all, collector_paused
from lowtide.probes.originals import gc
from lowtide.probes.snapshot import Snapshot
from lowtide.probes.stages import announced_pools
from lowtide.reports.processes.stage_processes import ProcessName
from lowtide.reports.schema import Finding
from lowtide.reports.statement import HolderFacts

_ENGINE = "engine"
"""How paths name the engine that they begin at, as `LeftoverTensors.context` gives it to them."""


class OwnGrowth:
    """Follows the levels of some lives, one after the other.

    Args:
        leftovers: knows what appeared in which inference.
    """

    def __init__(self, leftovers: LeftoverTensors) -> None:
        self._leftovers = leftovers
        self._growth = ProcessGrowth()
        self._life = ProcessName(pid=0, name="")
        self._inferences = self._first = 0
        self._has_inferred = False
        self._last: Mapping[str, int] = {}
        self._searched: dict[str, int] = {}
        self._holders: dict[str, HolderFacts] = {}

    def begin_life(self, cycle: int) -> None:
        """Another life begins, of another engine."""
        # Each as a process of its own would be: what one gives back at its end, the next one does not keep.
        self._life = ProcessName(pid=cycle, name="")
        self._first = self._inferences + 1
        self._has_inferred = False

    def after(self, stage: str, levels: Mapping[str, int], engine: object) -> None:
        """A stage has ended.

        Args:
            stage: its name.
            levels: bytes under tensors outside pools, by device, as of `levels_now`.
            engine: the one that lives.
        """
        if stage == "infer":
            self._inferences += 1
            if any(size > self._last.get(device, 0) for device, size in levels.items()):
                # Garbage that waits for the collector looks like what is kept.
                gc.collect()
                levels = levels_now()
            self._last = levels
            self._growth.note(self._life, levels_of(None, 0, levels), again=self._has_inferred)
            self._has_inferred = True
            if self._growth.suspects:
                self._search(engine)
        elif stage.startswith(FILLING):
            self._has_inferred = False

    def _search(self, engine: object) -> None:
        """Look for who holds what grows by now: at the end its engine is gone."""
        for finding in self._growth.findings():
            if finding.bytes < 2 * self._searched.get(finding.fingerprint, 0):
                continue
            self._searched[finding.fingerprint] = finding.bytes
            left = self._leftovers.explain_turns(self._life.pid, "infer", announced_pools(), engine)
            # What others keep of the results is theirs.
            own = [(each, sizes) for each, sizes in left if each.path and each.path[0].edge == _ENGINE]
            facts = growing_holder(own, finding.device, self._first)
            if facts is not None:
                self._holders[finding.fingerprint] = facts

    def findings(self, known: Sequence[Finding]) -> list[Finding]:
        """What has grown under engines, and is not known as what they have kept asleep or left."""
        holders = {finding.holder for finding in known}
        found = [
            held_by(finding, self._holders[finding.fingerprint])
            for finding in self._growth.findings()
            if finding.fingerprint in self._holders
        ]
        return [finding for finding in found if finding.holder not in holders]


def levels_of_snapshot(snapshot: Snapshot) -> dict[str, int]:
    """Return the bytes under tensors outside pools, by device."""
    return outside_pools(snapshot.tensors, snapshot.pools)


def levels_now() -> dict[str, int]:
    """Return the same as of now."""
    pools = announced_pools()
    with collector_paused():
        survey = survey_storages(census_of_all())
    return outside_pools(summarize(survey, pools), pools)
