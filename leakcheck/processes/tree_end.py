"""The end of a tree of processes: what is a finding when the program has ended that started it."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from lowtide.leakcheck.judging.exemptions import exempt
from lowtide.leakcheck.judging.fingerprints import fingerprint
from lowtide.leakcheck.processes.messages import Levels, Read, encode
from lowtide.leakcheck.processes.process_growth import role_of
from lowtide.leakcheck.processes.process_names import describe_process
from lowtide.probes.host.process_files import rollup
from lowtide.probes.host.process_tree import ProcessTree
from lowtide.probes.processes.agents import AgentError, Agents
from lowtide.probes.processes.outside_view import ByCard
from lowtide.probes.processes.tree_traces import SystemVObject, TreeTraces
from lowtide.reports.processes.stage_processes import ProcessName
from lowtide.reports.schema import Finding, NotMeasured, Resource
from lowtide.reports.sizes import format_bytes

STAGE = "end"

_STEP_S = 0.05


@dataclass(frozen=True)
class TreeEnd:
    """What a tree has left.

    Attributes:
        findings: what stays.
        not_measured: what could not be seen, and why.
    """

    findings: tuple[Finding, ...] = ()
    not_measured: tuple[NotMeasured, ...] = ()


@dataclass
class EndJudgement:
    """Judges a tree once the program that started it has ended.

    Attributes:
        tree: the descendants that are left.
        traces: what they have used.
        agents: asked what an orphan holds.
        settle: seconds that orphans and the driver have to end and to give back.
        is_cut: whether not to wait any longer, as after Ctrl-C.
    """

    tree: ProcessTree
    traces: TreeTraces
    agents: Agents
    settle: float
    is_cut: Callable[[], bool] = field(default=lambda: False)

    def judge(self) -> TreeEnd:
        """Wait until nothing is left, or for `settle` seconds, and report what stays."""
        orphans, gone = self._settled()
        findings = [self._orphan(pid) for pid in orphans]
        findings += [self._on_card(pid, by_card) for pid, by_card in gone.items()]
        # Its sockets and its number are in names that would pass for the program's.
        self.agents.stop()
        dead, undecided, why = self.traces.shared_memory()
        for file in dead:
            made = f", made by {file.library}" if file.library else ""
            findings.append(_left("shared-memory", file.path, file.bytes, made, file.remove, file.library))
        findings += [_left("temporary-files", str(path), 0, "", _removal(path)) for path in self.traces.files()]
        findings += [_system_v(each) for each in self.traces.system_v()]
        return TreeEnd(
            tuple(findings), tuple(self._not_measured(why, [(each.file.path, each.why) for each in undecided]))
        )

    def _settled(self) -> tuple[list[int], Mapping[int, ByCard]]:
        until = time.monotonic() + self.settle
        while True:
            self.traces.look()
            orphans, gone = self._orphans(), self.traces.on_cards()
            if not (orphans or gone) or time.monotonic() >= until or self.is_cut():
                return orphans, gone
            time.sleep(_STEP_S)

    def _orphans(self) -> list[int]:
        pids = self.tree.descendants() if self.tree.any_alive() else []
        stays = exempt("processes", [str(pid) for pid in pids])
        return [pid for pid in pids if str(pid) not in stays]

    def _orphan(self, pid: int) -> Finding:
        memory, held = rollup(pid), self._asked(pid)
        process = describe_process(pid, variables={} if held is None else held.variables)
        size = 0 if memory is None else memory.private
        cards = self.traces.of_living(pid)
        amounts = [f"{format_bytes(size)} on the host", *_amounts(cards)]
        of_tensors = 0 if held is None else sum(held.tensors.values())
        tensors = f"; {format_bytes(of_tensors)} are tensors" if of_tensors else ""
        return _finding(
            "processes",
            f"{process.text} runs on after the command has ended; it holds {', '.join(amounts)}{tensors}",
            f"end it with the program that starts it; now: kill {pid}",
            size=size + sum(held or 0 for held in cards.values()),
            suspects=(role_of(process.name),),
            process=msgspec.structs.replace(process, device=", ".join(cards)),
        )

    def _asked(self, pid: int) -> Levels | None:
        if not self.agents.has_agent(pid):
            return None
        try:
            return msgspec.msgpack.decode(self.agents.ask(pid, encode(Read())), type=Levels)
        except (AgentError, msgspec.DecodeError):  # what is seen from outside is reported all the same
            return None

    def _on_card(self, pid: int, by_card: ByCard) -> Finding:
        return held_by_a_gone(ProcessName(pid=pid, name=self.traces.name(pid) or "unknown"), by_card)

    def _not_measured(self, shared_memory: str, undecided: Sequence[tuple[str, str]]) -> Iterator[NotMeasured]:
        if shared_memory:
            yield NotMeasured(what="/dev/shm", why=shared_memory)
        for path, why in undecided:
            yield NotMeasured(what=path, why=why)
        if self.traces.cards_not_measured:
            yield NotMeasured(what="memory of ended processes on cards", why=self.traces.cards_not_measured)


def held_by_a_gone(process: ProcessName, by_card: ByCard) -> Finding:
    """What the driver counts for a process that has ended.

    Args:
        process: which it was.
        by_card: bytes by device; None where the driver does not say.
    """
    return _finding(
        "driver",
        f"{process.text} has ended, and the driver counts {', '.join(_amounts(by_card))} for it",
        "look for what has its memory open: a child that inherited its card, or an export by CUDA's IPC",
        size=sum(size or 0 for size in by_card.values()),
        device=next(iter(by_card)),
        suspects=("ended process", role_of(process.name)),
        process=process,
    )


def _amounts(cards: ByCard) -> list[str]:
    return [f"{'memory' if size is None else format_bytes(size)} on {device}" for device, size in cards.items()]


def _left(resource: Resource, path: str, size: int, made: str, remove: str, library: str = "") -> Finding:
    amount = f" ({format_bytes(size)}{made})" if size or made else ""
    return _finding(
        resource,
        f"{path}{amount} is left, and no living process uses it",
        f"remove it where its process ends; now: {remove}",
        size=size,
        # Most names are drawn anew in each run.
        suspects=("left file", library or re.sub(r"[0-9a-f]{6,}|tmp\w{8}", "*", path.rpartition("/")[2])),
    )


def _removal(path: Path) -> str:
    return shlex.join(["rm", *(["-r"] if path.is_dir() else []), "--", str(path)])


def _system_v(left: SystemVObject) -> Finding:
    what = "shared memory" if left.kind == "shm" else "a set of semaphores"
    amount = f" ({format_bytes(left.bytes)})" if left.bytes else ""
    return _finding(
        "shared-memory",
        f"{what} of System V, number {left.number}{amount}, is left",
        f"remove it where its process ends; now: ipcrm -{'m' if left.kind == 'shm' else 's'} {left.number}",
        size=left.bytes,
        suspects=("System V", left.kind),
    )


def _finding(
    resource: Resource,
    message: str,
    advice: str,
    *,
    size: int,
    suspects: Sequence[str],
    device: str = "cpu",
    process: ProcessName | None = None,
) -> Finding:
    return Finding(
        resource=resource,
        cause="driver" if resource == "driver" else "unknown",
        bytes=size,
        count=1,
        device=device,
        stage=STAGE,
        message=message,
        fingerprint=fingerprint(resource=resource, device=device, stage=STAGE, suspects=suspects),
        advice=advice,
        process=process,
    )
