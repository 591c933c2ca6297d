"""The other processes of an engine's life: what each holds after a stage, what of that nothing explains, and
what it should have given back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from lowtide.leakcheck.findings.life_findings import is_cached
from lowtide.leakcheck.findings.slept_tensors import KEPT_PART, LEAST, not_judged
from lowtide.leakcheck.processes.ended_holders import EndedHolders
from lowtide.leakcheck.processes.kept_asleep import (
    ProcessLevels,
    communicators_kept,
    explain_kept,
    mapped_by_failed_wake,
)
from lowtide.leakcheck.processes.messages import (
    Begin,
    ClearCaches,
    ComparePreserved,
    ExplainAsleep,
    ExplainAwake,
    ExplainHeld,
    ExplainHostMemory,
    ExplainLeft,
    Findings,
    Followed,
    HostHolder,
    Left,
    Levels,
    PreservedAnswer,
    Question,
    Read,
    RememberPreserved,
    Trim,
    Trimmed,
    encode,
)
from lowtide.leakcheck.processes.process_growth import (
    Inferences,
    ProcessGrowth,
    growing_holder,
    held_by,
    levels_of,
    role_of,
)
from lowtide.leakcheck.processes.process_names import describe_process, placed, private_bytes
from lowtide.leakcheck.processes.uneven_ranks import RankLevels, explain_uneven_rank, uneven_ranks
from lowtide.probes.device.driver import Driver
from lowtide.probes.device.driver.card_holders import read_card_holders
from lowtide.probes.host.process_files import name_of, rollup
from lowtide.probes.host.process_tree import ProcessTree
from lowtide.probes.processes.agents import AgentError, Agents, NoAgentError
from lowtide.probes.processes.outside_view import by_process
from lowtide.reports.processes.stage_processes import ProcessName, ProcessStage
from lowtide.reports.schema import Finding, NotMeasured
from lowtide.reports.statement import HolderFacts, with_holder

SHOWN = 16 << 20
"""Bytes of host memory from which on a process without torch and without a card is listed: a bare Python has less."""

NOTHING_SAID = Levels(tensors={}, arenas={}, reserved={}, has_torch=False)
"""Of a process that is seen from outside alone."""


def is_shown(process: ProcessName, levels: Levels, host: int | None, cards: Mapping[str, int | None]) -> bool:
    """Whether a process is listed: it has torch, or a card, or `SHOWN` bytes of host memory and is no helper."""
    is_helper = process.role == "python resource-tracker"
    return levels.has_torch or bool(cards) or ((host or 0) >= SHOWN and not is_helper)


def as_stage(
    process: ProcessName,
    levels: Levels,
    host: int | None,
    cards: Mapping[str, int | None],
    context: Callable[[str], int | None] = lambda device: None,
) -> ProcessStage:
    """What a process holds.

    Args:
        process: which it is.
        levels: what it says itself.
        host: bytes of host memory that only it has; None where that may not be read.
        cards: bytes that the driver counts for it, by device.
        context: gives the bytes of a context alone on a device; None where that is not known.
    """
    contexts = {device: size for device in cards if (size := context(device)) is not None}
    left = {
        device: None if size is None else max(0, size - contexts.get(device, 0))
        for device, size in _on_cards(levels, cards).items()
    }
    return ProcessStage(
        process=process,
        tensors=levels.tensors,
        arenas=levels.arenas,
        reserved=levels.reserved,
        cards=dict(cards),
        host=host,
        contexts=contexts,
        unexplained={"cpu": None if host is None else max(0, host - levels.resident), **left},
    )


def _on_cards(levels: Levels, cards: Mapping[str, int | None]) -> dict[str, int | None]:
    own = {device for device in (*levels.reserved, *levels.arenas) if device != "cpu"}
    # The process numbers the cards that it may use by itself: one card is known under two names, of several none is.
    names = dict(zip(cards, own, strict=True)) if len(own) == len(cards) == 1 else {device: device for device in cards}
    if not own <= set(names.values()):
        return dict.fromkeys(cards, None)
    return {device: _left(levels, names[device], size) for device, size in cards.items()}


def _left(levels: Levels, device: str, size: int | None) -> int | None:
    reserved = levels.reserved.get(device, 0)
    if size is None or reserved is None:
        return None
    return max(0, size - reserved - sum(levels.arenas.get(device, {}).values()))


EXPLAIN_S = 60.0
"""Seconds that a process may take to find who holds something: it goes through its whole heap."""

_Answer = TypeVar("_Answer", bound=msgspec.Struct)


@dataclass
class EngineProcesses:
    """Asks the processes of a tree, side by side, through the stages of lives.

    Attributes:
        tree: whose descendants they are.
        agents: through whom.
        device: where the engine keeps its memory: "cpu" or "cuda:N"; None: on cards if any process has one.
        driver: whom to ask for what each holds on cards; None: nobody.
        not_measured: who did not answer, and why, by process.
        ended: those that have held memory on a card, for when they have ended.
        context: gives the bytes of a context alone on a card; None where that is not known.
        passed_over: those that are findings already, as what an earlier life has left running.
        drivers: those that use the engine and are not it: what they keep of its results is theirs.
    """

    tree: ProcessTree
    agents: Agents
    device: str | None
    driver: Callable[[], Driver] | None
    not_measured: dict[int, NotMeasured] = field(default_factory=dict)
    ended: EndedHolders = field(default_factory=lambda: EndedHolders(None))
    context: Callable[[str], int | None] = lambda device: None
    passed_over: Collection[int] = ()
    drivers: set[int] = field(default_factory=set)
    _now: dict[int, ProcessLevels] = field(default_factory=dict)
    _at_work: dict[int, ProcessLevels] = field(default_factory=dict)
    # What each held when it went to sleep.
    _before_sleep: dict[int, ProcessLevels] = field(default_factory=dict)
    _silent: list[ProcessLevels] = field(default_factory=list)
    _growth: ProcessGrowth = field(default_factory=ProcessGrowth)
    _imported: dict[int, int] = field(default_factory=dict)
    _holders: dict[str, HolderFacts] = field(default_factory=dict)
    _searched: dict[str, int] = field(default_factory=dict)
    # By process, the bytes under tensors after its last inference, by device.
    _after_infer: dict[int, Mapping[str, int]] = field(default_factory=dict)
    # The names of processes that have slept with tensors of their inferences, and who held these.
    _kept_asleep: dict[str, set[str]] = field(default_factory=dict)
    _inferences: Inferences = field(default_factory=Inferences)
    _preserving: list[int] = field(default_factory=list)
    # Those that followed their tensors when the last inference began.
    _watched_inference: Collection[int] = ()
    _unwatched: dict[int, ProcessName] = field(default_factory=dict)
    _slept_unwatched: set[int] = field(default_factory=set)
    # By role and stage, the sleeps that gave back little, and of which nobody says what they should.
    _undeclared: dict[tuple[str, str], NotMeasured] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Ask the same driver about those that have ended."""
        self.ended.driver = self.driver

    @property
    def kind(self) -> str:
        """Of the engine's device: `cpu` or `cuda`. A rank's own number is its own matter."""
        if self.device is not None:
            return self.device.partition(":")[0]
        return "cuda" if any(each.cards for each in self._now.values()) else "cpu"

    @property
    def judged(self) -> frozenset[int]:
        """The processes that have always answered, in turns enough to say whether they grow."""
        return frozenset(self._growth.judged) - self.not_measured.keys()

    @property
    def answering(self) -> frozenset[int]:
        """The processes that have always answered."""
        return frozenset(self._growth.noted) - self.not_measured.keys()

    def findings_at_end(self) -> list[Finding]:
        """What grows from inference to inference, and is not reported as what a sleep has kept."""
        found = [self._with_holder(finding) for finding in self._growth.findings()]
        return [finding for finding in found if not self._is_kept_asleep(finding)]

    def _is_kept_asleep(self, finding: Finding) -> bool:
        if finding.resource != "tensors" or finding.process is None:
            return False
        holders = self._kept_asleep.get(role_of(finding.process.name), set())
        return bool(holders) if finding.holder is None else finding.holder in holders

    @property
    def readings(self) -> tuple[ProcessStage, ...]:
        """What each held when it was read last, for a report; those that have not answered as seen from outside."""
        return tuple(
            as_stage(each.process, each.levels, each.host, each.cards, self.context)
            for each in (*self._now.values(), *self._silent)
            if is_shown(each.process, each.levels, each.host, each.cards)
        )

    @property
    def has_answered(self) -> Collection[int]:
        """The processes that answered at the end of the last stage."""
        return self._now.keys()

    def begin_stage(self, stage: str, cycle: int) -> None:
        """What appears in any of them from here on, appeared in this stage."""
        watching = self.announce(self._pids(), stage, cycle)
        if stage == "infer":
            self._watched_inference = watching

    def before_sleep(self) -> bool:
        """Remember what must survive the sleep that begins; whether any of them has said that something must."""
        answers = self._each(self._pids(), RememberPreserved(kind=self.kind), PreservedAnswer, EXPLAIN_S)
        self._preserving = [pid for pid, preserved in answers.items() if preserved.tensors]
        return bool(self._preserving)

    def after_wake(self, stage: str) -> list[Finding]:
        """What each has lost of what had to survive the sleep before; once everything is awake."""
        pids, self._preserving = [pid for pid in self._preserving if pid in self._now], []
        answers = self._each(pids, ComparePreserved(stage=stage), Findings, EXPLAIN_S)
        return [placed(lost, self._now[pid].process) for pid, answer in answers.items() for lost in answer.findings]

    def more_awake(self, stage: str) -> list[Finding]:
        """What each holds more under tensors than before the sleep, after a wake; right after its `end_stage`."""
        pids = [
            pid
            for pid, now in self._now.items()
            if pid in self._before_sleep
            and sum(now.levels.tensors.values()) >= sum(self._before_sleep[pid].levels.tensors.values()) + LEAST
        ]
        answers = self._each(pids, ExplainAwake(stage=stage), Findings, EXPLAIN_S)
        return [placed(more, self._now[pid].process) for pid, answer in answers.items() for more in answer.findings]

    def announce(self, pids: Collection[int], stage: str, cycle: int) -> Collection[int]:
        """What appears in some of them from here on, appeared in this stage; returns those that follow it."""
        asked = [pid for pid in pids if pid not in self.not_measured]
        answers = self._each(asked, Begin(stage=stage, cycle=cycle), Followed, EXPLAIN_S)
        return {pid for pid, answer in answers.items() if answer.watches}

    def left(self, pid: int, cycle: int | None) -> list[tuple[Finding, dict[int, int]]]:
        """What appeared in a process in one cycle, or in any, and is there; with its bytes by cycle."""
        asked = [] if pid in self.not_measured else [pid]
        answer = self._each(asked, ExplainLeft(cycle=cycle), Left, EXPLAIN_S).get(pid, Left())
        found = [placed(finding, describe_process(pid)) for finding in answer.findings]
        return list(zip(found, answer.by_turn, strict=True))

    def with_caches_cleared(self, pid: int, findings: Sequence[Finding]) -> list[Finding]:
        """Some findings about a process that lives, with what clearing gives back where an `lru_cache` is the cause."""
        holders = tuple(finding.holder for finding in findings if finding.holder and is_cached(finding))
        asked = [pid] if holders and pid not in self.not_measured else []
        answer = self._each(asked, ClearCaches(holders=holders), Findings, EXPLAIN_S).get(pid, Findings())
        remedies = {finding.holder: finding.remedy for finding in answer.findings if finding.remedy is not None}
        return [
            msgspec.structs.replace(finding, remedy=remedies.get(finding.holder, finding.remedy))
            for finding in findings
        ]

    def trim(self, pid: int) -> int | None:
        """Let a process give back what is free in its heap and in torch's, which from outside looks like what it keeps.

        Returns:
            Bytes that the process has ever taken to answer this; None where it does not answer.
        """
        if pid in self.not_measured or not self.agents.has_agent(pid):
            return None
        answer = self._each([pid], Trim(), Trimmed, EXPLAIN_S).get(pid)
        if answer is None:
            return None
        self._imported[pid] = self._imported.get(pid, 0) + answer.imported
        return self._imported[pid]

    def named_by_arrays(self, finding: Finding, size: int) -> Finding:
        """A finding about the host memory of a process with the holder of arrays of a size, if there are such."""
        facts = self._holder_of_arrays(finding, size)
        return finding if facts is None else with_holder(finding, facts)

    def _holder_of_arrays(self, finding: Finding, size: int) -> HolderFacts | None:
        if finding.process is None or finding.resource != "host-memory":
            return None
        pid = finding.process.pid
        if pid in self.not_measured or not self.agents.has_agent(pid):
            return None
        answer = self._each([pid], ExplainHostMemory(bytes=size), HostHolder, EXPLAIN_S)
        return answer[pid].facts if pid in answer else None

    def end_stage(self, stage: str) -> None:
        """Read what each holds after a stage."""
        levels = self._each(self._pids(), Read(), Levels, EXPLAIN_S)
        family = self.tree.descendants()
        asks = bool(family) and self.device != "cpu"
        cards = by_process(read_card_holders(self.driver())) if self.driver is not None and asks else {}
        for pid in cards.keys() & set(family):
            self.ended.note(pid)
        self._silent = [_levels_of(pid, NOTHING_SAID, cards.get(pid, {})) for pid in family if pid not in levels]
        self._now = {pid: _levels_of(pid, levels[pid], cards.get(pid, {})) for pid in sorted(levels)}
        if stage.startswith("sleep"):
            self._before_sleep = self._at_work
        else:
            self._at_work = self._now
        self._inferences.after(stage)
        if stage == "infer":
            self._note_unwatched()
            for pid, now in self._now.items():
                # After the question, whose own memory is in the first level then, too.
                self._growth.note(now.process, self._levels(pid, self._collected(now)), again=self._inferences.follows)
            self._find_holders()

    def _note_unwatched(self) -> None:
        """Note the processes that hold tensors after an inference at whose beginning they were not followed."""
        for pid, now in self._now.items():
            if pid not in self._watched_inference and now.levels.of(self.kind):
                self._unwatched.setdefault(pid, now.process)

    @property
    def not_judged_asleep(self) -> tuple[NotMeasured, ...]:
        """What is not known of sleeps: what inferring has left in a process, and whether as much as came is enough."""
        why = "it was not ready when the first inference began: let create return once it is"
        unwatched = [
            NotMeasured(what=f"what inferring has left asleep in {self._unwatched[pid].text}", why=why)
            for pid in self._slept_unwatched
        ]
        return (*unwatched, *self._undeclared.values())

    def _collected(self, now: ProcessLevels) -> Levels:
        """The levels after an inference, without garbage where tensors have become more since the one before."""
        pid, before = now.process.pid, self._after_infer.get(now.process.pid)
        levels = now.levels
        if before is not None and any(size > before.get(device, 0) for device, size in levels.tensors.items()):
            levels = self._each([pid], Read(collects=True), Levels, EXPLAIN_S).get(pid, levels)
        self._after_infer[pid] = levels.tensors
        return levels

    def _find_holders(self) -> None:
        """Looks for who holds what has grown by now: at the end its process is gone."""
        for process in self._growth.suspects:
            if process.pid in self._now and self.trim(process.pid) is not None:
                now = self._each([process.pid], Read(), Levels, EXPLAIN_S)
                for pid, levels in now.items():
                    self._growth.correct(process, self._levels(pid, levels))
        for finding in self._growth.findings():
            # Each search leaves pieces of the heap in use that are given back at some later time: that looks like
            # growth, and like the opposite.
            if finding.bytes < 2 * self._searched.get(finding.fingerprint, 0):
                continue
            self._searched[finding.fingerprint] = finding.bytes
            facts = self._asked_for_holder(finding)
            if facts is not None:
                self._holders[finding.fingerprint] = facts

    def _levels(self, pid: int, levels: Levels) -> dict[str, int]:
        """The levels by which a process's growth is judged, without what it has taken to answer."""
        host = rollup(pid)
        private = None if host is None else host.private - self._imported.get(pid, 0)
        return levels_of(private, levels.resident, levels.tensors)

    def _asked_for_holder(self, finding: Finding) -> HolderFacts | None:
        """Who holds what a finding is about; what the process has taken for good to answer is none of its growth."""
        before = private_bytes(finding)
        if finding.resource == "tensors":
            facts = self._holder_of_tensors(finding)
        else:
            facts = self._holder_of_arrays(finding, finding.bytes // finding.count)
        if finding.process is not None and self.trim(finding.process.pid) is not None:
            # What an earlier search has left may be given back by this one.
            taken = self._imported[finding.process.pid] + private_bytes(finding) - before
            self._imported[finding.process.pid] = max(0, taken)
        return facts

    def _holder_of_tensors(self, finding: Finding) -> HolderFacts | None:
        """Who holds the tensors of most inferences of the process that a finding is about."""
        if finding.process is None:
            return None
        pid = finding.process.pid
        asked = [] if pid in self.not_measured else [pid]
        answer = self._each(asked, ExplainLeft(stage="infer"), Left, EXPLAIN_S).get(pid, Left())
        return growing_holder(list(zip(answer.findings, answer.by_turn, strict=True)), finding.device)

    def _with_holder(self, finding: Finding) -> Finding:
        facts = self._holders.get(finding.fingerprint)
        return finding if facts is None else held_by(finding, facts)

    def after_sleep(self, stage: str, cycle: int, *, empties: bool) -> list[Finding]:
        """What each has kept that a sleep gives up; right after `end_stage`.

        Args:
            stage: the sleep.
            cycle: the life, from 1.
            empties: whether it leaves nothing on the engine's device.
        """
        found: list[Finding] = []
        self._slept_unwatched |= self._unwatched.keys() & {
            pid for pid, now in self._now.items() if now.levels.of(self.kind)
        }
        of_inferring = self._each(list(self._now), ExplainAsleep(cycle=cycle, kind=self.kind), Findings, EXPLAIN_S)
        for pid, answer in of_inferring.items():
            process = self._now[pid].process
            found += [placed(finding, process) for finding in answer.findings]
            holders = {finding.holder or "" for finding in answer.findings}
            self._kept_asleep.setdefault(role_of(process.name), set()).update(holders)
        # What inferring left is reported by itself.
        left = {pid: sum(finding.bytes for finding in answer.findings) for pid, answer in of_inferring.items()}
        reported_pids: set[int] = set()
        for pid, before in self._at_work.items():
            now = self._now.get(pid)
            sizes = None if now is None else self.kept(before, now, left.get(pid, 0))
            if now is None or sizes is None:
                continue
            # On a card each sleep gives up what it keeps on the host.
            if empties or self.kind == "cuda":
                reported_pids.add(pid)
                found.append(self._explain_kept(stage, sizes, now))
            else:
                role = role_of(now.process.name)
                self._undeclared[role, stage] = not_judged(stage, sizes, self.kind, now.process.text)
        kept_groups = communicators_kept(stage, self._at_work, self._now) if empties else []
        return [*found, *kept_groups, *self._uneven(stage, left, reported_pids)]

    def after_failed_wake(self, stage: str) -> list[Finding]:
        """What a wake that raised has left mapped in each, of what the last sleep had given up."""
        after = self._each(list(self._now), Read(), Levels, EXPLAIN_S)
        return mapped_by_failed_wake(stage, self.kind, self._now, after)

    def _uneven(self, stage: str, left: Mapping[int, int], reported_pids: Collection[int]) -> list[Finding]:
        """The ranks that have kept more than their peers, without those that are reported for what they kept."""
        levels = []
        for pid, now in self._now.items():
            before = self._at_work.get(pid)
            sizes = None if before is None else self._asked_and_kept(before, now, left.get(pid, 0))
            if sizes is not None:
                levels.append(RankLevels(now.process, *sizes, now.arenas(self.kind)))

        def held_by(pid: int) -> Sequence[Finding]:
            answers = self._each([pid], ExplainHeld(stage=stage, kind=self.kind), Findings, EXPLAIN_S)
            return answers[pid].findings if pid in answers else ()

        return [
            explain_uneven_rank(uneven, stage, self.kind, self.device or self.kind, held_by)
            for uneven in uneven_ranks(levels, self.kind)
            if uneven.rank.process.pid not in reported_pids
        ]

    def _asked_and_kept(self, before: ProcessLevels, now: ProcessLevels, left: int) -> tuple[int, int] | None:
        """Bytes that a sleep asks one process for, and those of them that are there; None where that is not known."""
        held, holds = before.held(self.kind), now.held(self.kind)
        if held is None or holds is None:
            return None
        # What is reported elsewhere, or is a context's, is neither asked for nor kept.
        excused = left + (before.of_libraries if self.kind == "cuda" else 0)
        return held - excused, holds - excused

    def kept(self, before: ProcessLevels, now: ProcessLevels, left: int) -> tuple[int, int] | None:
        """What `_asked_and_kept` says of a process that has not given back its part; None where it has."""
        sizes = self._asked_and_kept(before, now, left)
        return None if sizes is None or sizes[0] < LEAST or sizes[1] <= sizes[0] * KEPT_PART else sizes

    def _explain_kept(self, stage: str, sizes: tuple[int, int], now: ProcessLevels) -> Finding:
        """What one process has kept, with the holders of the largest."""
        question = ExplainHeld(stage=stage, kind=self.kind)
        answers = self._each([now.process.pid], question, Findings, EXPLAIN_S)
        holders = answers[now.process.pid].findings if now.process.pid in answers else ()
        return explain_kept(stage, self.device or self.kind, sizes, now.process, now.arenas(self.kind), holders)

    def _pids(self) -> list[int]:
        """Whom to ask; not again who has not answered once: the engine would wait at each stage."""
        self.tree.adopt(self.agents.elsewhere(self.tree.descendants()))
        without = {*self.not_measured, *self.drivers, *self.tree.with_descendants(self.passed_over)}
        return [pid for pid in self.tree.descendants() if pid not in without and self.agents.has_agent(pid)]

    def _each(self, pids: Sequence[int], question: Question, kind: type[_Answer], limit: float) -> dict[int, _Answer]:
        """What each answers, side by side; without those that do not, which are noted."""
        if not pids:
            return {}

        def ask(pid: int) -> tuple[int, _Answer | AgentError]:
            return pid, self._ask(pid, question, kind, limit)

        answers: dict[int, _Answer] = {}
        with ThreadPoolExecutor(len(pids), thread_name_prefix="lowtide-agents") as threads:
            for pid, answer in threads.map(ask, pids):
                if isinstance(answer, NoAgentError):
                    continue
                if isinstance(answer, AgentError):
                    self.not_measured[pid] = NotMeasured(what=f"memory of pid {pid} ({name_of(pid)})", why=str(answer))
                else:
                    answers[pid] = answer
        return answers

    def _ask(self, pid: int, question: Question, kind: type[_Answer], limit: float) -> _Answer | AgentError:
        try:
            return msgspec.msgpack.decode(self.agents.ask(pid, encode(question), limit), type=kind)
        except AgentError as error:
            return error
        except msgspec.DecodeError as error:
            return AgentError(f"the agent of pid {pid} answered something else: {error}")


def _levels_of(pid: int, levels: Levels, cards: Mapping[str, int | None]) -> ProcessLevels:
    held = {device for device, size in levels.tensors.items() if size} | levels.arenas.keys()
    # Each process numbers the cards that it may use from 0; the driver's number is this process's.
    devices = {*cards, *(device for device in held if device == "cpu" or not cards)}
    process, memory = (
        describe_process(pid, variables=levels.variables, devices=devices, called=levels.called),
        rollup(pid),
    )
    return ProcessLevels(process, levels, cards, None if memory is None else memory.private)
