"""Whether an engine's other processes grow from inference to inference, by their host memory as seen from outside.

The first inference of a process fills what is filled once, and so does the first one after a sleep: what an inference
adds is judged where it comes right after another one. Each life may have processes of its own: those of one name are
turns of one.
"""

from __future__ import annotations

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
        levels: of each process, in the order in which they were first seen, the levels after its inferences.
        again: for each of these, whether the inference came right after another one.
        processes: each of them as it was described last: its device may be known only later.
    """

    levels: dict[int, list[int]] = field(default_factory=dict)
    again: dict[int, list[bool]] = field(default_factory=dict)
    processes: dict[int, ProcessName] = field(default_factory=dict)

    @property
    def steps(self) -> dict[ProcessName, list[int]]:
        """What each inference has added to a process for good that came right after another one.

        Not one with a sleep before it: its host copy, or a cache of pinned memory, is there from then on, once.
        """
        found = {}
        for pid, levels in self.levels.items():
            steps = [step for step, again in zip(kept_steps(levels), self.again[pid][1:], strict=True) if again]
            if steps:
                found[self.processes[pid]] = steps
        return found

    def growing(self) -> tuple[ProcessName, list[int]] | None:
        """The process that grows most and its steps; the last one and those of all, if only all together show it.

        One rank of several may grow alone; and of lives with few inferences each, no process shows growth by itself.
        """
        steps = self.steps
        alone = {process: own for process, own in steps.items() if _grows(own)}
        if alone:
            process = max(alone, key=lambda each: sum(alone[each]))
            return process, alone[process]
        together = [step for own in steps.values() for step in own]
        # That steps of different processes alternate with others says nothing: what fills once in each does so, too.
        often = sum(step > ALLOWED for step in together) * 3 > len(together)
        return (list(steps)[-1], together) if often and _grows(together) else None


def _grows(steps: list[int]) -> bool:
    return grows(steps, [ALLOWED] * len(steps))


class ProcessGrowth:
    """Collects the levels of processes after inferences, and judges them at the end."""

    def __init__(self) -> None:
        self._roles: dict[str, _Role] = {}

    def note(self, process: ProcessName, host: int, named: int, *, again: bool = True) -> None:
        """A process's level after an inference.

        Args:
            process: which.
            host: bytes of host memory that only it has.
            named: bytes of that under live tensors and in announced pools: what stays of them is followed by itself.
            again: whether the inference came right after another one.
        """
        role = self._roles.setdefault(role_of(process.name), _Role())
        role.levels.setdefault(process.pid, []).append(host - named)
        role.again.setdefault(process.pid, []).append(again)
        role.processes[process.pid] = process

    def correct(self, process: ProcessName, host: int, named: int) -> None:
        """Another reading after the same inference, as of a heap that was trimmed; as `note`."""
        self._roles[role_of(process.name)].levels[process.pid][-1] = host - named

    @property
    def noted(self) -> Collection[int]:
        """The processes whose level is known."""
        return {pid for role in self._roles.values() for pid in role.levels}

    @property
    def judged(self) -> Collection[int]:
        """The processes of which there were enough turns to say whether they grow."""
        return {
            pid
            for role in self._roles.values()
            if sum(map(len, role.steps.values())) >= FEWEST_TURNS
            for pid in role.levels
        }

    @property
    def suspects(self) -> Collection[ProcessName]:
        """The processes of all names that grow."""
        growing = [role for role in self._roles.values() if role.growing() is not None]
        return [process for role in growing for process in role.processes.values()]

    def findings(self) -> list[Finding]:
        """One for each name whose processes grow."""
        found = []
        for name, role in self._roles.items():
            growing = role.growing()
            if growing is None:
                continue
            process, steps = growing
            kept = [step for step in steps if step > ALLOWED]
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
                        f"{process.text}: host memory that is under no tensor grows by "
                        f"{format_bytes(usual)} with each infer, {format_bytes(sum(kept))} in "
                        f"{len(kept)} of {len(steps)} that followed another one"
                    ),
                    fingerprint=fingerprint(
                        resource="host-memory", device="cpu", stage="infer", suspects=("other process", name)
                    ),
                    trend="growth",
                    advice="look in that process for what keeps bytes of each request, as with `memray attach`",
                    process=process,
                )
            )
        return found


def role_of(name: str) -> str:
    """A process's name without the numbers in it, which differ from run to run."""
    return re.sub(r"\d+", "", name)
