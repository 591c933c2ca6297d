"""The other processes of an engine's life: what each holds after a stage, what of that nothing explains, and
what it should have given back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from lowtide.leakcheck.findings.life_findings import LEAST, has_slept, is_cached, not_judged
from lowtide.leakcheck.findings.turn_growth import FEWEST_TURNS as FEWEST_TO_GROW
from lowtide.leakcheck.findings.turn_growth import INFERENCES, OpenEnd, not_decided
from lowtide.leakcheck.growth.quantities import COUNTED, SHARED
from lowtide.leakcheck.growth.series import LevelKey
from lowtide.leakcheck.processes import messages, process_levels
from lowtide.leakcheck.processes.process_growth import (
    CountedThings,
    ProcessGrowth,
    growing_holder,
    held_by,
    levels_of,
    mappings_of,
    one_of_each,
    shared_bytes,
)
from lowtide.leakcheck.processes.process_levels import SleptLevels, private_bytes
from lowtide.leakcheck.processes.tree_end import EndedHolders
from lowtide.probes.device.driver import Driver
from lowtide.probes.host.memory_parts import NAMES
from lowtide.probes.host.process_files import name_of
from lowtide.probes.host.process_tree import ProcessTree
from lowtide.probes.objects.engine_pools import SlotReading
from lowtide.probes.originals import os
from lowtide.probes.processes.agents import AgentError, Agents, NoAgentError
from lowtide.probes.stages import UPDATE
from lowtide.reports.processes.stage_processes import ProcessName, ProcessStage
from lowtide.reports.schema import Finding, NotMeasured
from lowtide.reports.statement import HolderFacts, in_process, with_holder

EXPLAIN_S = 60.0
"""Seconds that a process may take to find who holds something: it goes through its whole heap."""

_Answer = TypeVar("_Answer")


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
        asks_turns: whether somebody has asked what grows with each inference, at any cost.
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
    asks_turns: bool = False
    _now: dict[int, process_levels.ProcessLevels] = field(default_factory=dict)
    _at_work: dict[int, process_levels.ProcessLevels] = field(default_factory=dict)
    # What each held when it went to sleep.
    _before_sleep: dict[int, process_levels.ProcessLevels] = field(default_factory=dict)
    _silent: list[process_levels.ProcessLevels] = field(default_factory=list)
    _growth: ProcessGrowth = field(default_factory=ProcessGrowth)
    _imported: dict[int, int] = field(default_factory=dict)
    _holders: dict[str, HolderFacts] = field(default_factory=dict)
    _searched: dict[str, int] = field(default_factory=dict)
    # By process, the bytes under tensors after its last inference, by device.
    _after_infer: dict[int, Mapping[str, int]] = field(default_factory=dict)
    # The names of processes that have slept with tensors of their inferences, and who held these.
    _kept_asleep: dict[str, set[str]] = field(default_factory=dict)
    # The same for updates of weights: what each leaves, of all stages at whose end the engine is awake.
    _update_growth: ProcessGrowth = field(default_factory=lambda: ProcessGrowth(UPDATE))
    _preserving: list[int] = field(default_factory=list)
    # Those that followed their tensors when the last inference began.
    _watched_inference: Collection[int] = ()
    _unwatched: dict[int, ProcessName] = field(default_factory=dict)
    _slept_unwatched: set[int] = field(default_factory=set)
    # By role and stage, the sleeps that gave back little, and of which nobody says what they should.
    _undeclared: dict[tuple[str, str], NotMeasured] = field(default_factory=dict)
    # Of this life: how many inferences there were, after which of them containers are read, and what grows by process.
    _cycle: int = 0
    _turn: int = 0
    _readings: OpenEnd = field(default_factory=OpenEnd)
    _in_turns: dict[int, tuple[Finding, ...]] = field(default_factory=dict)
    _undecided: dict[int, NotMeasured] = field(default_factory=dict)
    # The processes, with a card of another one's on which they have a context, of which it was said.
    _contexts: set[tuple[int, str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Ask the same driver about those that have ended."""
        self.ended.driver = self.driver
        self._things = CountedThings(self.ask)

    @property
    def kind(self) -> str:
        """Return the kind of the engine's device: `cpu` or `cuda`. A rank's own number is its own matter."""
        if self.device is not None:
            return self.device.partition(":")[0]
        return "cuda" if any(each.cards for each in self._now.values()) else "cpu"

    @property
    def judged(self) -> frozenset[int]:
        """Return the processes that have always answered, in turns enough to say whether they grow."""
        return frozenset(self._growth.judged) - self.not_measured.keys()

    @property
    def answering(self) -> frozenset[int]:
        """Return the processes that have always answered."""
        return frozenset(self._growth.noted) - self.not_measured.keys()

    def findings_at_end(self) -> list[Finding]:
        """Return what grows from inference to inference, and is not reported as what a sleep has kept."""
        found = [self._with_holder(each) for growth in self._growths for each in growth.findings()]
        containers = {each.fingerprint: each for grown in self._in_turns.values() for each in grown}
        return one_of_each(
            [finding for finding in found if not self._is_kept_asleep(finding)], list(containers.values())
        )

    def _is_kept_asleep(self, finding: Finding) -> bool:
        if finding.resource != "tensors" or finding.process is None:
            return False
        holders = self._kept_asleep.get(process_levels.role_of(finding.process.name), set())
        return bool(holders) if finding.holder is None else finding.holder in holders

    @property
    def readings(self) -> tuple[ProcessStage, ...]:
        """Return what each held when it was read last; those that have not answered as seen from outside."""
        return tuple(each.as_stage(self.context) for each in (*self._now.values(), *self._silent) if each.is_shown)

    @property
    def has_answered(self) -> Collection[int]:
        """Return the processes that answered at the end of the last stage."""
        return self._now.keys()

    def begin_stage(self, stage: str, cycle: int) -> None:
        """Attribute what appears in any of them from here on to this stage."""
        if cycle != self._cycle:
            self._cycle, self._turn, self._readings = cycle, 0, OpenEnd()
        watching = self.announce(self._pids(), stage, cycle)
        if stage == "infer":
            self._watched_inference = watching

    def before_sleep(self) -> bool:
        """Remember what must survive the sleep that begins; return whether any has said that something must."""
        answers = self._each(self._pids(), messages.RememberPreserved(kind=self.kind))
        self._preserving = [pid for pid, preserved in answers.items() if preserved]
        return bool(self._preserving)

    def rewritten(self) -> None:
        """Remember anew what must survive the sleep that lasts: weights were updated while the rest sleeps."""
        if self._preserving:
            self.before_sleep()

    def after_wake(self, stage: str) -> list[Finding]:
        """Return what each has lost of what had to survive the sleep before; once everything is awake."""
        pids, self._preserving = [pid for pid in self._preserving if pid in self._now], []
        return self._found_in(pids, messages.ComparePreserved(stage=stage))

    def more_awake(self, stage: str) -> list[Finding]:
        """Return what each holds more under tensors after a wake than before the sleep; right after its `end_stage`."""
        pids = [
            pid
            for pid, now in self._now.items()
            if pid in self._before_sleep
            and sum(now.levels.tensors.values()) >= sum(self._before_sleep[pid].levels.tensors.values()) + LEAST
        ]
        return self._found_in(pids, messages.ExplainAwake(stage=stage, kind=self.kind))

    def _found_in(self, pids: Sequence[int], question: messages.Question[list[Finding]]) -> list[Finding]:
        answers = self._each(pids, question)
        return [in_process(each, self._now[pid].process) for pid, found in answers.items() for each in found]

    def announce(self, pids: Collection[int], stage: str, cycle: int) -> Collection[int]:
        """Attribute what appears in some of them from here on to this stage; return those that follow it."""
        asked = [pid for pid in pids if pid not in self.not_measured]
        answers = self._each(asked, messages.Begin(stage=stage, cycle=cycle))
        return {pid for pid, watches in answers.items() if watches}

    def left(self, pid: int, cycle: int | None) -> messages.Left:
        """Return what appeared in a process in one cycle, or in any, and is there; with its bytes by cycle."""
        left = self.ask(pid, messages.ExplainLeft(cycle=cycle)) or ()
        return [(in_process(finding, process_levels.describe_process(pid)), sizes) for finding, sizes in left]

    def with_caches_cleared(self, pid: int, findings: Sequence[Finding]) -> list[Finding]:
        """Return findings about a process that lives, with what clearing the `lru_cache`s among them gives back."""
        holders = tuple(finding.holder for finding in findings if finding.holder and is_cached(finding))
        cleared = (self.ask(pid, messages.ClearCaches(holders=holders)) if holders else None) or ()
        remedies = {finding.holder: finding.remedy for finding in cleared if finding.remedy is not None}
        return [
            msgspec.structs.replace(finding, remedy=remedies.get(finding.holder, finding.remedy))
            for finding in findings
        ]

    def trim(self, pid: int) -> int | None:
        """Let a process give back what is free in its heap and in torch's, which from outside looks like what it keeps.

        Returns:
            Bytes that the process has ever taken to answer this; None where it does not answer.
        """
        imported = self.ask(pid, messages.Trim()) if self.agents.has_agent(pid) else None
        if imported is None:
            return None
        self._imported[pid] = self._imported.get(pid, 0) + imported
        return self._imported[pid]

    def named_by_arrays(self, finding: Finding, size: int, *, grown: int = 0) -> Finding:
        """Return a finding about the host memory of a process with the holder of arrays of a size, if there are any.

        Args:
            finding: the finding.
            size: bytes, of each turn where it grows.
            grown: bytes of all turns where each has added so many: what is to change is then no single array.
        """
        facts = self._holder_of_arrays(finding, size, grown)
        if facts is None:
            return finding
        return with_holder(finding, msgspec.structs.replace(facts, advice=finding.advice) if grown else facts)

    def _holder_of_arrays(self, finding: Finding, size: int, grown: int) -> HolderFacts | None:
        pid = process_levels.pid_of(finding)
        if finding.resource != "host-memory" or not self.agents.has_agent(pid):
            return None
        return self.ask(pid, messages.ExplainHostMemory(bytes=size, grown=grown))

    def end_stage(self, stage: str) -> None:
        """Read what each holds after a stage."""
        levels = self._each(self._pids(), messages.Read())
        family = self.tree.descendants()
        cards = self.ended.on_cards(family) if self.device != "cpu" else {}
        self._silent = [
            process_levels.ProcessLevels.of(pid, process_levels.NOTHING_SAID, cards.get(pid, {}))
            for pid in family
            if pid not in levels
        ]
        self._now = {
            pid: process_levels.ProcessLevels.of(pid, levels[pid], cards.get(pid, {})) for pid in sorted(levels)
        }
        if stage.startswith("sleep"):
            self._before_sleep = self._at_work
        else:
            self._at_work = self._now
        for growth in self._growths:
            growth.turns.after(stage)
        if stage == "infer":
            self._note_unwatched()
            for pid, now in self._now.items():
                # After the question, whose own memory is in the first level then, too.
                after = self._collected(now)
                # What is free since before would go with what is trimmed later, and hide as much growth.
                if pid not in self._growth.noted and self.trim(pid) is not None:
                    after = self.ask(pid, messages.Read()) or after
                held = self._levels(now, after) | self._things.levels(pid)
                self._growth.note(now.process, held, again=self._growth.turns.follows)
            self._find_holders()
            self._turn += 1
            if self._readings.is_read(self._turn):
                self._read_turn(begins=self._readings.begins)
        if self._update_growth.turns.count and not stage.startswith("sleep"):
            self._note_update(stage)

    def leave_stage(self, path: Sequence[str], cycle: int, *, failed: bool, outside: str) -> list[Finding]:
        """Judge a stage that the program says has ended; it is in the one around that from here on.

        Args:
            path: the stages that it was in, itself last.
            cycle: the life.
            failed: whether it raised.
            outside: what is around the outermost stage.
        """
        found: list[Finding] = []
        if not failed:
            self.end_stage(path[-1])
            if path[-1].startswith("sleep"):
                found = self.after_sleep(path[-1], cycle, empties=False)
            elif path[-1].startswith("wake"):
                found = self.more_awake(path[-1])
        self.begin_stage(path[-2] if len(path) > 1 else outside, cycle)
        return found

    def pass_over(self, count: int) -> None:
        """Count inferences after which nothing is read: what they add is none of the next one's."""
        self._turn += count
        self._growth.turns.break_off()

    def look_at_turns(self) -> int:
        """Look after the last inference for what has grown with each; return how many more may tell, at most."""
        return self._read_turn(begins=False)

    def read_turn(self, pids: Collection[int], question: messages.ReadTurn) -> dict[int, messages.GrownContainers]:
        """Return what grows in some of them with turns that are no inferences, where that is asked."""
        return self._each([pid for pid in pids if pid not in self.not_measured], question)

    def _read_turn(self, *, begins: bool) -> int:
        question = messages.ReadTurn(
            turns=INFERENCES,
            turn=self._turn,
            begins=begins,
            anew=self._turn == self._readings.first,
            asked=self.asks_turns,
            tells=self._turn >= FEWEST_TO_GROW,
        )
        more = 0
        before = {pid: private_bytes(pid) or 0 for pid in self._now}
        answers = self._each(list(self._now), question)
        # Once it has let go of what it needed to answer, which it has before it answers again.
        self._each(list(answers), messages.TellStacks())
        for pid, answer in answers.items():
            self._note_taken(pid, before[pid])
            process, more = self._now[pid].process, max(more, answer.more)
            self._in_turns[pid] = tuple(in_process(each, process) for each in answer.findings)
            self._undecided.pop(pid, None)
            if answer.more and self.asks_turns:
                self._undecided[pid] = not_decided(self._turn, answer.more, process.text)
        return more

    def _note_taken(self, pid: int, before: int) -> None:
        """Note what a process at rest has taken to answer, or given back of that, by what it had before.

        What it gives back beyond that was free of the program's own: its level is that much lower.
        """
        taken = self._imported.get(pid, 0) + (private_bytes(pid) or 0) - before
        self._imported[pid] = max(0, taken)

    def _note_update(self, stage: str) -> None:
        """Note what each process holds after an update, or after another stage, for what the next update adds."""
        is_update = stage == UPDATE
        for pid, now in self._now.items():
            levels = self._levels(now, self._collected(now) if is_update else now.levels) | self._things.levels(pid)
            if is_update:
                # What it has added is none of the next inference's.
                self._growth.note(now.process, levels, again=False)
            shared = shared_bytes(pid)
            levels |= {} if shared is None else {SHARED: shared}
            self._update_growth.note(now.process, levels, again=is_update and self._update_growth.turns.follows)
        if is_update:
            self._find_holders()

    @property
    def _growths(self) -> tuple[ProcessGrowth, ProcessGrowth]:
        return self._growth, self._update_growth

    def _note_unwatched(self) -> None:
        """Note the processes that hold tensors after an inference at whose beginning they were not followed."""
        for pid, now in self._now.items():
            if pid not in self._watched_inference and now.levels.of(self.kind):
                self._unwatched.setdefault(pid, now.process)

    @property
    def not_judged(self) -> tuple[NotMeasured, ...]:
        """Return what is not known: what inferring left in a process asleep, whether enough came back, what grows."""
        why = "it was not ready when the first inference began: let create return once it is"
        unwatched = [
            NotMeasured(what=f"what inferring has left asleep in {self._unwatched[pid].text}", why=why)
            for pid in self._slept_unwatched
        ]
        return (*unwatched, *self._undeclared.values(), *self._undecided.values())

    def _collected(self, now: process_levels.ProcessLevels) -> messages.Levels:
        """Return the levels after a turn, without garbage where tensors have become more since the one before."""
        pid, before = now.process.pid, self._after_infer.get(now.process.pid)
        levels = now.levels
        if before is not None and any(size > before.get(device, 0) for device, size in levels.tensors.items()):
            levels = self.ask(pid, messages.Read(collects=True)) or levels
        self._after_infer[pid] = levels.tensors
        return levels

    def _find_holders(self) -> None:
        """Look for who holds what has grown by now: at the end its process is gone."""
        for growth in self._growths:
            for process in growth.suspects:
                if process.pid in self._now and self.trim(process.pid) is not None:
                    levels = self.ask(process.pid, messages.Read())
                    if levels is not None:
                        growth.correct(process, self._levels(self._now[process.pid], levels))
        for finding in (each for growth in self._growths for each in growth.findings()):
            # Each search leaves pieces of the heap in use that are given back at some later time: that looks like
            # growth, and like the opposite.
            size = finding.bytes or finding.count
            if size < 2 * self._searched.get(finding.fingerprint, 0):
                continue
            self._searched[finding.fingerprint] = size
            facts = self._asked_for_holder(finding)
            if facts is not None:
                self._holders[finding.fingerprint] = facts

    def _levels(self, now: process_levels.ProcessLevels, levels: messages.Levels) -> dict[LevelKey, int]:
        """Return the levels by which a process's growth is judged, without what it has taken to answer.

        Args:
            now: what it held at the end of the stage.
            levels: what it has answered last.
        """
        # To ask the kernel takes 50 ms where it has gigabytes.
        private = now.host if levels is now.levels else private_bytes(now.process.pid)
        private = None if private is None else private - self._imported.get(now.process.pid, 0)
        in_use = sum(levels.heaps.get(NAMES[part], 0) for part in ("python", "malloc"))
        return levels_of(private, levels.resident, levels.tensors, in_use)

    def _asked_for_holder(self, finding: Finding) -> HolderFacts | None:
        """Ask who holds what a finding is about; what the process has taken to answer is none of its growth."""
        pid = process_levels.pid_of(finding)
        if finding.resource == "shared-memory":
            return mappings_of(pid, {os.getpid(), *self.tree.descendants()})
        before = private_bytes(pid) or 0
        if finding.resource == "tensors":
            left = self.ask(pid, messages.ExplainLeft(stage=finding.stage)) if pid else None
            facts = growing_holder(left or (), finding)
        elif finding.resource in COUNTED:
            facts = self._things.named(finding)
        else:
            facts = self._holder_of_arrays(finding, finding.bytes // finding.count, finding.bytes)
        if self.trim(pid) is not None:
            # What an earlier search has left may be given back by this one.
            self._note_taken(pid, before)
        return facts

    def _with_holder(self, finding: Finding) -> Finding:
        facts = self._holders.get(finding.fingerprint)
        return finding if facts is None else held_by(finding, facts)

    def after_sleep(self, stage: str, cycle: int, *, empties: bool) -> list[Finding]:
        """Return what each has kept that a sleep gives up; right after `end_stage`.

        Args:
            stage: the sleep.
            cycle: the life, from 1.
            empties: whether it leaves nothing on the engine's device.
        """
        found: list[Finding] = []
        self._slept_unwatched |= self._unwatched.keys() & {
            pid for pid, now in self._now.items() if now.levels.of(self.kind)
        }
        of_inferring = self._each(list(self._now), messages.ExplainAsleep(cycle=cycle, kind=self.kind))
        for pid, kept in of_inferring.items():
            process = self._now[pid].process
            found += [in_process(finding, process) for finding in kept]
            holders = {finding.holder or "" for finding in kept}
            self._kept_asleep.setdefault(process_levels.role_of(process.name), set()).update(holders)
        # What inferring left is reported by itself.
        left = {pid: sum(finding.bytes for finding in kept) for pid, kept in of_inferring.items()}
        slept = {
            pid: levels
            for pid, now in self._now.items()
            if pid in self._at_work
            and (levels := SleptLevels.between(self._at_work[pid], now, self.kind, left.get(pid, 0))) is not None
        }
        reported_pids: set[int] = set()
        device = self.device or self.kind
        for pid, each in slept.items():
            sizes = each.at_work, each.asleep
            if has_slept(*sizes):
                continue
            # On a card each sleep gives up what it keeps on the host.
            if empties or self.kind == "cuda":
                reported_pids.add(pid)
                largest = self._largest_in(pid, stage)
                found.append(process_levels.explain_kept(stage, device, sizes, each.process, each.arenas, largest))
            else:
                role = process_levels.role_of(each.process.name)
                self._undeclared[role, stage] = not_judged(stage, sizes, self.kind, each.process.text)
        if empties:
            found += process_levels.communicators_kept(stage, self._at_work, self._now)
        for uneven in process_levels.uneven_ranks(list(slept.values()), self.kind):
            if uneven.rank.process.pid not in reported_pids:
                largest_in = functools.partial(self._largest_in, stage=stage)
                found.append(process_levels.explain_uneven_rank(uneven, stage, self.kind, device, largest_in))
        return found

    def contexts_elsewhere(self, stage: str) -> list[Finding]:
        """Return the contexts that processes have where they do not work, each once; right after `end_stage`."""
        told = set(self._contexts)
        found = process_levels.contexts_elsewhere(stage, self._now.values())
        self._contexts |= {(process_levels.pid_of(each), each.device) for each in found}
        return [each for each in found if (process_levels.pid_of(each), each.device) not in told]

    def lost_slots(self, pids: Collection[int]) -> dict[int, SlotReading]:
        """Return the slots of engines' pools that no request has any more, by process."""
        return self._each([pid for pid in pids if pid not in self.not_measured], messages.ReadSlots())

    def after_failed_wake(self, stage: str) -> list[Finding]:
        """Return what a wake that raised has left mapped in each, of what the last sleep had given up."""
        after = self._each(list(self._now), messages.Read())
        return process_levels.mapped_by_failed_wake(stage, self.kind, self._now, after)

    def _largest_in(self, pid: int, stage: str) -> Sequence[Finding]:
        """Ask a process who holds its largest tensors."""
        return self.ask(pid, messages.ExplainHeld(stage=stage, kind=self.kind)) or ()

    def _pids(self) -> list[int]:
        """Whom to ask; not again who has not answered once: the engine would wait at each stage."""
        self.tree.adopt(self.agents.elsewhere(self.tree.descendants()))
        without = {*self.not_measured, *self.drivers, *self.tree.with_descendants(self.passed_over)}
        return [pid for pid in self.tree.descendants() if pid not in without and self.agents.has_agent(pid)]

    def _each(self, pids: Sequence[int], question: messages.Question[_Answer]) -> dict[int, _Answer]:
        """Return what each answers, side by side; without those that do not, which are noted."""
        if not pids:
            return {}

        def ask(pid: int) -> tuple[int, _Answer | AgentError]:
            try:
                return pid, messages.ask_agent(self.agents, pid, question, EXPLAIN_S)
            except AgentError as error:
                return pid, error

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

    def ask(self, pid: int, question: messages.Question[_Answer]) -> _Answer | None:
        """Return what one answers; None where it does not, or has not answered before."""
        return None if pid in self.not_measured else self._each([pid], question).get(pid)
