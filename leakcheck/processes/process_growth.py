"""Whether an engine's other processes grow from inference to inference, by their host memory as seen from outside.

The first inference of a process fills what is filled once, so the reading after it is the baseline of that process.
Each life may have processes of its own: those of one name are turns of one.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection
from dataclasses import dataclass, field

from lowtide.leakcheck.judging.fingerprints import fingerprint
from lowtide.leakcheck.judging.level_growth import grows, kept_steps
from lowtide.leakcheck.judging.trend import FEWEST_TURNS
from lowtide.reports.processes.stage_processes import ProcessName
from lowtide.reports.schema import Finding
from lowtide.reports.sizes import format_bytes

ALLOWED = 4 << 20
"""Bytes of host memory that an inference may add for good: allocators take memory in pieces of this order."""


@dataclass
class _Role:
    """The processes of one name.

    Attributes:
        pids: all of them.
        steps: how much each inference but the first of a process has added, less what tensors there account for.
        last: the process of the last step.
    """

    pids: set[int] = field(default_factory=set)
    steps: list[int] = field(default_factory=list)
    last: ProcessName | None = None


class ProcessGrowth:
    """Collects the levels of processes after inferences, and judges them at the end."""

    def __init__(self) -> None:
        self._roles: dict[str, _Role] = {}
        self._levels: dict[int, int] = {}

    def note(self, process: ProcessName, host: int, tensors: int) -> None:
        """A process's level after an inference.

        Args:
            process: which.
            host: bytes of host memory that only it has.
            tensors: bytes of that under live tensors and in arenas: what stays of them is followed by itself.
        """
        role = self._roles.setdefault(role_of(process.name), _Role())
        role.pids.add(process.pid)
        level = host - tensors
        before = self._levels.get(process.pid)
        self._levels[process.pid] = level
        if before is not None:
            role.steps.append(level - before)
            role.last = process

    def correct(self, process: ProcessName, host: int, tensors: int) -> None:
        """Another reading after the same inference, as of a heap that was trimmed; as `note`."""
        role = self._roles[role_of(process.name)]
        level = host - tensors
        role.steps[-1] += level - self._levels[process.pid]
        self._levels[process.pid] = level

    @property
    def noted(self) -> Collection[int]:
        """The processes whose level is known."""
        return self._levels.keys()

    @property
    def judged(self) -> Collection[int]:
        """The processes of which there were enough turns to say whether they grow."""
        return {pid for role in self._roles.values() if len(role.steps) >= FEWEST_TURNS for pid in role.pids}

    def findings(self) -> list[Finding]:
        """One for each name whose processes grow."""
        found = []
        for name, role in self._roles.items():
            # What one inference gave back of what an earlier one had added was not kept.
            steps = kept_steps(list(itertools.accumulate(role.steps, initial=0)))
            kept = [step for step in steps if step > ALLOWED]
            if role.last is None or not grows(steps, [ALLOWED] * len(steps)):
                continue
            usual = sorted(kept)[len(kept) // 2]
            found.append(
                Finding(
                    resource="host-memory",
                    cause="unknown",
                    bytes=sum(kept),
                    count=len(kept),
                    device="cpu",
                    stage="infer",
                    message=(
                        f"pid {role.last.pid} ({role.last.name}): host memory that is under no tensor grows by "
                        f"{format_bytes(usual)} with each infer, {format_bytes(sum(kept))} in "
                        f"{len(kept)} of {len(role.steps)} that were not a process's first"
                    ),
                    fingerprint=fingerprint(
                        resource="host-memory", device="cpu", stage="infer", suspects=("other process", name)
                    ),
                    trend="growth",
                    advice="look in that process for what keeps bytes of each request, as with `memray attach`",
                    process=role.last,
                )
            )
        return found


def role_of(name: str) -> str:
    """A process's name without the numbers in it, which differ from run to run."""
    return re.sub(r"\d+", "", name)
