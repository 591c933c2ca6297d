"""The end of a tree of processes: what is a finding when the program has ended that started it."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from lowtide.leakcheck.judging.exemptions import exempt
from lowtide.leakcheck.judging.fingerprints import finding_of
from lowtide.leakcheck.processes.messages import Levels, Read, ask_agent
from lowtide.leakcheck.processes.process_levels import describe_process, private_bytes, role_of
from lowtide.leakcheck.resources.resource import UUIDS, without_numbers
from lowtide.probes.device.driver import Driver
from lowtide.probes.device.driver.card_holders import read_card_holders
from lowtide.probes.host.process_files import stat
from lowtide.probes.host.process_tree import ProcessTree
from lowtide.probes.originals import time
from lowtide.probes.processes.agents import AgentError, Agents
from lowtide.probes.processes.outside_view import ByCard, by_process
from lowtide.probes.processes.shared_memory_files import SharedMemoryFile
from lowtide.probes.processes.tree_traces import MADE_UP, SystemVObject, TreeTraces, gone_on_cards
from lowtide.reports.processes.stage_processes import ProcessName
from lowtide.reports.schema import Finding, NotMeasured
from lowtide.reports.sizes import first_of, format_bytes
from lowtide.reports.statement import restated

STAGE = "end"

_of_end = functools.partial(finding_of, device="cpu", stage=STAGE)
"""Returns a finding on what a tree has left on the host."""

_STEP_S = 0.05

_SHOWN_NAMES = 3
_TOLD_FILES = 8


_Left = TypeVar("_Left")


class TreeEnd(msgspec.Struct, frozen=True):
    """What a tree has left.

    Attributes:
        findings: what stays.
        not_measured: what could not be seen, and why.
        not_judged: what is most likely another program's, and why that is not known.
    """

    findings: tuple[Finding, ...] = ()
    not_measured: tuple[NotMeasured, ...] = ()
    not_judged: tuple[NotMeasured, ...] = ()


class EndJudgement(msgspec.Struct):
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
    is_cut: Callable[[], bool] = lambda: False

    def judge(self) -> TreeEnd:
        """Wait until nothing is left, or for `settle` seconds, and report what stays."""
        orphans, gone = self._settled()
        running = [read_running(pid, self.agents, self.traces.of_living(pid)) for pid in orphans]
        findings = _by_kind(running, lambda each: role_of(each.process.name), _orphan, _orphans_of_a_kind)
        for pid, by_card in gone.items():
            findings.append(held_by_a_gone(ProcessName(pid=pid, name=self.traces.name(pid) or "unknown"), by_card))
        # Before the agents are gone, whose names say which processes there were.
        system_v, of_nobody, of_unseen = self.traces.system_v()
        # Its sockets and its number are in names that would pass for the program's.
        self.agents.stop()
        dead, undecided, why = self.traces.shared_memory()
        findings += _by_kind(dead, _kind_of_file, _left, _left_of_a_kind)
        files, unknown = self.traces.files()
        alike: dict[str, list[Path]] = {}
        for path in files:
            alike.setdefault(_lasting_name(str(path)), []).append(path)
        findings += map(self._left_files, alike.values())
        findings += map(_system_v, system_v)
        unseen = {"/dev/shm": why} if why else {}
        unseen |= {each.file.path: each.why for each in undecided}
        unseen |= {str(path): reason for path, reason in unknown}
        unseen |= {_named(each): reason for each, reason in of_nobody}
        not_measured = [NotMeasured(what=what, why=reason) for what, reason in unseen.items()]
        if self.traces.cards_not_measured:
            cards = NotMeasured(what="memory of ended processes on cards", why=self.traces.cards_not_measured)
            not_measured.append(cards)
        return TreeEnd(
            tuple(findings),
            tuple(not_measured),
            tuple(NotMeasured(what=_named(each), why=reason) for each, reason in of_unseen),
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

    def _left_files(self, paths: Sequence[Path]) -> Finding:
        """Return what is said of temporary files that differ only in what is drawn anew in each run."""
        told = [str(path) for path in paths[:_TOLD_FILES]]
        more = [f"{len(paths) - len(told)} more"] if len(paths) > len(told) else []
        makers = dict.fromkeys(filter(None, (self.traces.listener(str(path)) for path in paths)))
        bound = ", ".join(f"pid {pid} ({self.traces.name(pid)})" for pid in makers)
        users = dict.fromkeys(filter(None, (self.traces.opener(str(path)) for path in paths)))
        opened = "" if bound else ", ".join(f"pid {pid} ({self.traces.name(pid)})" for pid in users)
        are, them, files = ("is", "it", "the file") if len(paths) == 1 else ("are", "them", "the files")
        return _of_end(
            "temporary-files",
            count=len(paths),
            message=f"{', '.join(told + more)} {are} left, and no living process uses {them}"
            + (f"; bound in {bound}" if bound else "")
            + (f"; open last in {opened}" if opened else ""),
            suspects=("left file", _lasting_name(told[0])),
            advice=f"remove {files} when the process that made {them} ends; now: {_removal(paths)}",
        )


def _by_kind(
    left: Sequence[_Left],
    kind_of: Callable[[_Left], str],
    one: Callable[[_Left], Finding],
    many: Callable[[Sequence[_Left]], Finding],
) -> list[Finding]:
    """Return a finding on each thing that is left, and one on all of a kind of which there are many."""
    kinds: dict[str, list[_Left]] = {}
    for each in left:
        kinds.setdefault(kind_of(each), []).append(each)
    found: list[Finding] = []
    for alike in kinds.values():
        found += [many(alike)] if len(alike) > _TOLD_FILES else map(one, alike)
    return found


class Running(msgspec.Struct, frozen=True):
    """A process that runs on.

    Attributes:
        process: which it is.
        bytes: what it holds, on the host and on cards.
        amounts: the same in words.
    """

    process: ProcessName
    bytes: int
    amounts: str


def _orphan(running: Running) -> Finding:
    pid = running.process.pid
    return _of_end(
        "processes",
        bytes=running.bytes,
        message=f"{running.process.text} runs on after the command has ended; it holds {running.amounts}",
        suspects=(role_of(running.process.name),),
        advice=f"end pid {pid} when the program that started it ends; now: kill {pid}",
        process=running.process,
    )


def _orphans_of_a_kind(running: Sequence[Running]) -> Finding:
    """Return what is said of many processes of one role; their fingerprint is that of each."""
    largest = max(running, key=lambda each: each.bytes)
    size = sum(each.bytes for each in running)
    others = f"{largest.process.text} and {len(running) - 1} more of its kind run on after the command has ended"
    pids = " ".join(str(each.process.pid) for each in running)
    return _of_end(
        "processes",
        bytes=size,
        count=len(running),
        message=f"{others}; they hold {format_bytes(size)}",
        suspects=(role_of(largest.process.name),),
        advice=f"end the {len(running)} processes when the program that started them ends; now: kill {pids}",
        process=largest.process,
    )


def read_running(pid: int, agents: Agents, cards: ByCard) -> Running:
    """Return what a process holds, as seen from outside, with what the driver counts for it, and as its agent says."""
    size, held = private_bytes(pid) or 0, _asked(pid, agents)
    process = describe_process(pid, variables={} if held is None else held.variables, devices=cards)
    amounts = ", ".join([f"{format_bytes(size)} on the host", *_amounts(cards)])
    of_tensors = 0 if held is None else sum(held.tensors.values())
    of_arenas = 0 if held is None else sum(sum(tags.values()) for tags in held.arenas.values())
    inside = [
        f"{format_bytes(each)} {what}" for each, what in ((of_tensors, "are tensors"), (of_arenas, "in arenas")) if each
    ]
    return Running(
        process, size + sum(each or 0 for each in cards.values()), "; ".join([amounts, ", ".join(inside)]).rstrip("; ")
    )


def _asked(pid: int, agents: Agents) -> Levels | None:
    if not agents.has_agent(pid):
        return None
    try:
        return ask_agent(agents, pid, Read())
    except AgentError:  # what is seen from outside is reported all the same
        return None


def with_running(finding: Finding, running: Sequence[Running]) -> Finding:
    """Return a finding about processes that a life has left, with what each of them holds, and what ends them now.

    Args:
        finding: as far as their numbers show it.
        running: those of them that are there.
    """
    if not running:
        return finding
    pids = " ".join(str(each.process.pid) for each in running)
    many = len(running) > 1
    said = ", and ".join(f"{each.process.text} runs on and holds {each.amounts}" for each in running)
    which = f"the {len(running)} processes" if many else f"pid {pids}"
    changes = {
        "bytes": sum(each.bytes for each in running),
        "advice": f"end {which} in {finding.stage}, and wait for {'their' if many else 'its'} end; now: kill {pids}",
        "process": max(running, key=lambda each: each.bytes).process,
    }
    return restated(finding, changes, things=(said,), notes=())


def with_dead_files(finding: Finding, files: Sequence[SharedMemoryFile]) -> Finding:
    """Return a finding about shared memory that a life has left, with where it is, who made it, and what removes it.

    Args:
        finding: as far as their names show it.
        files: those of the entries that no living process uses.
    """
    if not files:
        return finding
    told = files[:_TOLD_FILES]
    parts = [f"{each.path}{_amount(each.bytes, _made_by(each))}" for each in told]
    commands = "; ".join(each.remove for each in told)
    more = len(files) - len(told)
    are, them = ("is", "it") if len(files) == 1 else ("are", "them")
    said = ", ".join(parts) + (f" and {more} more" if more else "") + f" {are} left, and no living process uses {them}"
    changes = {
        "holder": first_of([each.path for each in files], _SHOWN_NAMES),
        "advice": f"unlink shared memory when its process ends, also when it is killed; now: {commands}",
    }
    return restated(finding, changes, things=(said,), notes=())


def held_by_a_gone(process: ProcessName, by_card: ByCard) -> Finding:
    """Return what the driver counts for a process that has ended.

    Args:
        process: which it was.
        by_card: bytes by device; None where the driver does not say.
    """
    return finding_of(
        "driver",
        cause="driver",
        bytes=sum(size or 0 for size in by_card.values()),
        device=next(iter(by_card)),
        stage=STAGE,
        message=f"{process.text} has ended, and the driver counts {', '.join(_amounts(by_card))} for it",
        suspects=("ended process", role_of(process.name)),
        advice="look for what has its memory open: a child that inherited its card, or an export by CUDA's IPC",
        process=process,
    )


def _amounts(cards: ByCard) -> list[str]:
    return [f"{'memory' if size is None else format_bytes(size)} on {device}" for device, size in cards.items()]


def _left(file: SharedMemoryFile) -> Finding:
    return _of_end(
        "shared-memory",
        bytes=file.bytes,
        message=f"{file.path}{_amount(file.bytes, _made_by(file))} is left, and no living process uses it",
        suspects=("left file", file.library or _lasting_name(file.path)),
        advice=f"unlink shared memory when its process ends; now: {file.remove}",
    )


def _kind_of_file(file: SharedMemoryFile) -> str:
    return file.library or without_numbers(_lasting_name(file.path))


def _left_of_a_kind(files: Sequence[SharedMemoryFile]) -> Finding:
    """Return what is said of many files of a library's, or whose names differ by numbers alone."""
    told = first_of([file.path for file in files], _SHOWN_NAMES)
    size = sum(file.bytes for file in files)
    made = _amount(size, _made_by(files[0]))
    return _of_end(
        "shared-memory",
        bytes=size,
        count=len(files),
        message=f"{told}{made} are left, and no living process uses them",
        suspects=("left file", _kind_of_file(files[0])),
        advice=f"unlink shared memory when its process ends; now: {_removal([Path(file.path) for file in files])}",
    )


def _lasting_name(path: str) -> str:
    """Return a file's name without what is drawn anew in each run."""
    return MADE_UP.sub("*", re.sub(r"[0-9a-f]{6,}|tmp\w{8}", "*", UUIDS.sub("*", path.rpartition("/")[2])))


def _amount(size: int, made: str) -> str:
    # Nothing was written into what has no bytes: that it is there is what leaks.
    told = [*([format_bytes(size)] if size else []), *([made] if made else [])]
    return f" ({', '.join(told)})" if told else ""


def _made_by(file: SharedMemoryFile) -> str:
    return f"made by {file.library}" if file.library else ""


def _removal(paths: Sequence[Path]) -> str:
    return shlex.join(["rm", *(["-r"] if any(path.is_dir() for path in paths) else []), "--", *map(str, paths)])


_SYSTEM_V = {"shm": ("shared memory", "-m"), "sem": ("a set of semaphores", "-s"), "msg": ("a message queue", "-q")}
"""By kind, what it is, and the option by which `ipcrm` removes it."""


def _named(left: SystemVObject) -> str:
    return f"{_SYSTEM_V[left.kind][0]} of System V, number {left.number}"


def _system_v(left: SystemVObject) -> Finding:
    what, option = _SYSTEM_V[left.kind]
    amount = f" ({format_bytes(left.bytes)})" if left.bytes else ""
    return _of_end(
        "shared-memory",
        bytes=left.bytes,
        message=f"{_named(left)}{amount}, is left",
        suspects=("System V", left.kind),
        advice=f"remove {what} when its process ends; now: ipcrm {option} {left.number}",
    )


PATIENCE_S = 3.0
"""Seconds that the driver has to give back what an ended process held: it does so after the process is gone."""


class EndedHolders(msgspec.Struct):
    """Remembers which processes held memory on cards.

    Attributes:
        driver: gives whom to ask; None: nobody.
        patience: seconds that the driver has to give back.
    """

    driver: Callable[[], Driver] | None
    patience: float = PATIENCE_S
    _started: dict[int, int] = msgspec.field(default_factory=dict)
    _names: dict[int, ProcessName] = msgspec.field(default_factory=dict)

    def note(self, pid: int) -> None:
        """Note that a process that is there holds memory on a card."""
        process = stat(pid)
        if process is not None and self._started.get(pid) != process.started:
            self._started[pid] = process.started
            self._names[pid] = describe_process(pid)

    def on_cards(self, pids: Collection[int]) -> Mapping[int, ByCard]:
        """Return what the driver counts for each process; those of some that hold anything are noted."""
        cards = by_process(read_card_holders(self.driver())) if pids and self.driver is not None else {}
        for pid in cards.keys() & set(pids):
            self.note(pid)
        return cards

    def findings(self) -> list[Finding]:
        """Return one for each noted process that has ended and is listed; each is reported once."""
        until = time.monotonic() + self.patience
        while (gone := self._gone()) and time.monotonic() < until:
            time.sleep(_STEP_S)
        found = [held_by_a_gone(self._names[pid], by_card) for pid, by_card in gone.items()]
        for pid in [pid for pid in self._started if stat(pid) is None]:
            del self._started[pid], self._names[pid]
        return found

    def _gone(self) -> dict[int, ByCard]:
        if self.driver is None or all(stat(pid) is not None for pid in self._started):
            return {}
        return gone_on_cards(by_process(read_card_holders(self.driver())), self._started)
