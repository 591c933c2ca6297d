"""The other processes of a watched program, test by test: what each of them keeps, named by its own agent.

What a test leaves in a process that nobody owns is a leak of the test, as it would be in the test's own process.  What
it leaves in one that belongs to a fixture of a wider scope is that fixture's, and only a growth that goes on is
reported, when the fixture ends.  One that begins and ends within a test holds nothing any more, and what it has left
behind is judged; whether it grew while it ran is known by the stages that the test marks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from lowtide.leakcheck.findings.life_findings import largest_of_cause
from lowtide.leakcheck.growth.quantities import COUNTED, HOST, SHARED
from lowtide.leakcheck.growth.series import LevelKey
from lowtide.leakcheck.judging.metrics import DRIVER_TOLERANCE, host_memory_tolerance
from lowtide.leakcheck.judging.owners import Owner
from lowtide.leakcheck.processes import messages
from lowtide.leakcheck.processes.engine_processes import EngineProcesses
from lowtide.leakcheck.processes.process_growth import (
    CountedThings,
    ProcessGrowth,
    growing_tensors,
    held_by,
    left_by_test,
)
from lowtide.leakcheck.processes.process_levels import describe_process, pid_of
from lowtide.leakcheck.processes.tree_end import EndedHolders
from lowtide.leakcheck.processes.unmeasured_processes import UnmeasuredProcesses
from lowtide.probes.device.driver import Driver
from lowtide.probes.host.counters import Counters, anonymous_bytes
from lowtide.probes.host.process_files import PrivateMemory, has_ended, stat
from lowtide.probes.host.process_tree import ProcessTree
from lowtide.probes.objects.engine_pools import SlotReading
from lowtide.probes.originals import os
from lowtide.probes.processes.agents import Agents
from lowtide.probes.processes.mapped_files import maps_library
from lowtide.probes.stages import EnteredStage
from lowtide.reports.outcomes import KNOW_GROWTH
from lowtide.reports.processes.stage_processes import ProcessName, ProcessStage
from lowtide.reports.schema import Finding, NotMeasured, OtherProcess
from lowtide.reports.statement import in_process

_TORCH = "libtorch"
"""Part of the names of the libraries that a process with torch maps: only such a one is asked for tensors."""

_UNNAMED = "no large array in it is of that size: a leak, or a library that it has loaded; use it once before"
_FIRST_USE = "a leak, or what its first use of the card takes; use it once before"
_NO_AGENT = "it has no agent that could give back what is free: start it after the check has begun to have it judged"
_TOO_FEW = f"too few inferences tell whether it grows: {KNOW_GROWTH}"
_SAYS_NOTHING = "its stages are marked, and it has no agent that says what it keeps: start it after the check has begun"
_UNREADABLE = "it runs on, and this system does not say how much it holds"
_TOO_FEW_TESTS = "it runs on, and too few tests have used it yet: whether it grows shows from the fourth on"


class _Outside(msgspec.Struct, frozen=True):
    """What is seen of a process without asking it, in bytes; None where that may not be read.

    Attributes:
        started: in ticks since boot, which distinguishes it from a later one of the same number.
        private: memory that only it maps.
        cards: what the driver counts for it, by device.
    """

    started: int
    private: int | None
    cards: Mapping[str, int | None]

    @property
    def levels(self) -> dict[LevelKey, int | None]:
        """Return both as the levels by which growth is judged."""
        return {HOST: self.private, **{LevelKey("driver", device): size for device, size in self.cards.items()}}


class _Owned(msgspec.Struct):
    """The processes of one owner.

    Attributes:
        things: the threads and descriptors of these.
        turns: the tests that used the owner, by their numbers.
        levels: the levels of each process after these.
    """

    things: CountedThings
    turns: list[int] = msgspec.field(default_factory=list)
    levels: dict[int, ProcessGrowth] = msgspec.field(default_factory=dict)


class OtherProcesses:
    """Follows the descendants of a watched process.

    Args:
        tree: whose descendants they are.
        driver: gives whom to ask for memory on cards, once there is a process to ask about; None if cards do not count.
        asks: whether there are agents in them that are asked.
        records: whether these record which library asks a card's driver for memory.
        clears: whether an `lru_cache` that has grown under a fixture is cleared at its end, to measure what comes back.
        tolerance: bytes that a test may leave.

    Attributes:
        agents: in them, where anybody has started these.
        unmeasured: which of them held memory that had to be seen.
    """

    def __init__(
        self,
        tree: ProcessTree,
        driver: Callable[[], Driver] | None,
        *,
        asks: bool = False,
        records: bool = False,
        clears: bool = False,
        tolerance: int = 0,
    ) -> None:
        self._clears = clears
        self._tree = tree
        self._driver = driver
        self._asks = asks
        self._tolerance = tolerance
        self.unmeasured = UnmeasuredProcesses(tree, driver)
        self.agents = Agents(messages.encode(messages.RecordDriver()) if records else b"")
        self._ended = EndedHolders(driver)
        self._memory = PrivateMemory()
        self._engine = EngineProcesses(tree, self.agents, None, driver, ended=self._ended)
        self._is_marked = False
        # Those that were there at the end of a sleep of this test.
        self._asleep: set[int] = set()
        # Whether no other process has been there since the test began, and how much this one held when it last was so.
        self._is_alone, self._leaves_any = False, True
        self._held: int | None = None
        self._turn = 0
        self._before: dict[int, _Outside] = {}
        self._followed: dict[int, int] = {}
        self._reported_pids: set[int] = set()
        self._judged: set[int] = set()
        self._owned: dict[str, _Owned] = {}
        # What grew in processes when the fixture ended whose tests had used them, which may have ended them.
        self._foreseen: dict[int, list[Finding]] = {}
        # Bytes of the containers that were found to grow, by process.
        self._in_containers: Counter[int] = Counter()
        self._reads_anew = False
        self._found: list[Finding] = []
        self._unexplained: list[NotMeasured] = []

    def start(self) -> None:
        """Put agents into the processes that start from here on; legal twice."""
        if self._asks:
            self.agents.start()

    def stop(self) -> None:
        """End it; legal without a start."""
        self.agents.stop()

    def begin(self, now: Counters) -> None:
        """Begin a test: what is there now is its baseline.

        Args:
            now: the counters, which have just been read: they say whether there is a tree.
        """
        self._turn += 1
        self._forget_dead(now)
        if self._asks and self.agents.began():
            self._tree.adopt(self.agents.elsewhere(self._tree.descendants()))
        self._held = now.own
        # Of one that has ended since the last test, it is said in this one what it has left on a card.
        self._is_alone = not (self._leaves_any or now.items["processes"])
        if self._is_alone:
            return
        self._forget_last_test()
        if self._asks and now.items["processes"]:
            self.follow()
            # What an agent takes that is asked for the first time is there before.
            self._before = self._outside()

    def _forget_last_test(self) -> None:
        self.unmeasured.begin(self._held)
        self._is_marked = False
        silent = {pid: why for pid, why in self._engine.not_measured.items() if stat(pid) is not None}
        self._engine = EngineProcesses(self._tree, self.agents, None, self._driver, silent, self._ended)
        self._found, self._unexplained, self._before, self._asleep = [], [], {}, set()

    def _forget_dead(self, now: Counters) -> None:
        """Another process may get the number of one that has ended."""
        if self._reported_pids or self._judged or self._followed:
            alive = set(self._tree.descendants()) if now.items["processes"] else set()
            self._reported_pids &= alive
            self._judged &= alive
            self._followed = {pid: turn for pid, turn in self._followed.items() if pid in alive}

    def follow(self) -> None:
        """Attribute what appears in any process with torch from here on to this test."""
        if not self._asks or not self._tree.any_alive():
            return
        pids = [pid for pid in self._tree.descendants() if self._has_torch(pid)]
        self._followed = {pid: self._followed.get(pid, self._turn) for pid in pids}
        self._engine.announce(pids, "test", self._turn)

    def look(self, *, always: bool = False, now: Counters | None = None) -> None:
        """See `UnmeasuredProcesses.look`; nothing else is asked here before there is another process."""
        if self._is_alone:
            if not (self._tree.any_alive() if now is None else now.items["processes"]):
                self._held = anonymous_bytes() if now is None else now.own
                return
            self._is_alone = False
            self._forget_last_test()
        self.unmeasured.look(always=always, now=now)
        for process in self.unmeasured.on_cards if self._asks else ():
            self._ended.note(process)

    def is_reported(self, pids: Iterable[int]) -> None:
        """Note that these processes are findings: what they and their children hold is not reported again."""
        known = set(pids)
        self.unmeasured.is_reported(known)
        self._reported_pids |= self._tree.with_descendants(known)

    def entered(self, stage: EnteredStage) -> None:
        """Note where the program says that it is in its life."""
        if self._asks and self._tree.any_alive():
            self._is_marked = True
            self._engine.begin_stage(stage.name, self._turn)

    def left(self, stage: EnteredStage, error: BaseException | None) -> None:
        """Judge a stage that the program says has ended."""
        if not self._asks or not self._tree.any_alive():
            return
        if stage.name.startswith("sleep"):
            self._asleep.update(self._tree.descendants())
        failed = error is not None
        self._found += self._engine.leave_stage(stage.path, self._turn, failed=failed, outside="test")

    @property
    def readings(self) -> tuple[ProcessStage, ...]:
        """Return what each held at the end of the last stage."""
        return () if self._is_alone else self._engine.readings

    def used(self, owners: Iterable[Owner]) -> None:
        """Note that the test uses some owners: what it leaves in their processes may be growth."""
        for owner in owners if self._asks else ():
            if owner.label not in self._owned:
                self._owned[owner.label] = _Owned(CountedThings(lambda pid, asked: self._engine.ask(pid, asked)))
            turns = self._owned[owner.label].turns
            if self._turn not in turns[-1:]:
                turns.append(self._turn)

    def break_off(self) -> None:
        """Leave out what has grown since the last reading of containers, and grows until the next one."""
        self._reads_anew = True

    def read_turn(self, turn: int, *, begins: bool) -> None:
        """Read how much each container holds, in the processes with torch that were there when the test began.

        Args:
            turn: the test's number, by which its readings are told apart.
            begins: whether it is the first that is read of a stretch.
        """
        self._ask_turn(messages.ReadTurn(turns="tests", turn=turn, begins=begins, anew=self._reads_anew))
        self._reads_anew = False

    def grown_in_turns(self, turn: int, module: str, since: int) -> list[Finding]:
        """Return the containers of other processes that have taken something in every test; each once.

        Args:
            turn: the test's number, after which it was read.
            module: the module to which the tests belong; empty if to none.
            since: the turn before its first one.
        """
        question = messages.ReadTurn(turns="tests", turn=turn, tells=True, ends=True, module=module, since=since)
        found = self._ask_turn(question)
        for finding in found:
            self._in_containers[pid_of(finding)] += finding.bytes
        return found

    def _ask_turn(self, question: messages.ReadTurn) -> list[Finding]:
        if self._is_alone or not self._asks:
            return []
        pids = (self._before.keys() & self._followed.keys()) - self._reported_pids
        answers = self._engine.read_turn(sorted(pids), question)
        return [
            in_process(finding, describe_process(pid)) for pid, answer in answers.items() for finding in answer.findings
        ]

    def owner_of(self, pid: int) -> str:
        """Return the label of the owner whose process it is; empty if nobody's."""
        return next((label for label, owned in self._owned.items() if pid in owned.levels), "")

    def judge(self, owners: Sequence[Owner]) -> tuple[Finding, ...]:
        """Return what the test that is over has left in processes that nobody owns, and what their stages have shown.

        Args:
            owners: those that are alive; what has grown in their processes is theirs.
        """
        self._leaves_any = self._tree.any_alive()
        if self._is_alone:
            return ()
        is_any = self._before or any(owner.items.get("processes") for owner in owners)
        now = self._outside() if self._asks and is_any else {}
        stayed = [
            pid
            for pid, before in self._before.items()
            if pid in now and now[pid].started == before.started and pid not in self._reported_pids
        ]
        owned = self._note_levels(owners, now)
        for pid in stayed:
            if pid not in owned:
                self._found += self._left_in(pid, self._before[pid], now[pid])
        found = (*largest_of_cause(self._found), *self._engine.findings_at_end(), *self._ended.findings())
        self._found = []
        return found

    def lost_slots(self) -> dict[int, SlotReading]:
        """Return the slots of engines' pools that no request has any more, by process."""
        if not self._asks or not self._tree.any_alive():
            return {}
        pids = set(self._tree.descendants()) - self._reported_pids
        return self._engine.lost_slots([pid for pid in pids if self._has_torch(pid) and self.agents.has_agent(pid)])

    def growth_of(self, owner: Owner) -> list[Finding]:
        """Return what has grown test after test in the processes of an owner, asked while they live."""
        if owner.label not in self._owned or not self._asks:
            return []
        self._note_levels([owner], self._outside())
        owned = self._owned.pop(owner.label)
        self._foresee(owned, owner)
        found: list[Finding] = []
        stage = _stage_of(owner)
        for pid, turns in owned.levels.items():
            if pid in self._reported_pids:
                continue
            foreseen = self._foreseen.pop(pid, [])
            if has_ended(pid):
                found += foreseen
                continue
            process = describe_process(pid)
            # Before it is asked for more, for which it takes memory itself.
            untrimmed = {(each.resource, each.device): (each, turns.usual_step(each)) for each in turns.findings()}
            is_trimmed = not untrimmed or self._trim(process, turns)
            tensors = []
            if self._has_torch(pid):
                seen = self._seen_by(pid, owned)
                tensors = growing_tensors(self._engine.left(pid, None), seen, self._tolerance, process, stage)
                if self._clears:
                    tensors = self._engine.with_caches_cleared(pid, tensors)
            found += tensors
            named = _by_device(tensors)
            named["cpu"] += self._in_containers.pop(pid, 0)
            for finding in turns.findings(named):
                if finding.resource in (*COUNTED, SHARED.resource):
                    found.append(self._held_in(pid, finding, owned.things))
                elif is_trimmed:
                    # Arrays are as large as they were.
                    whole, step = untrimmed.get(
                        (finding.resource, finding.device), (finding, turns.usual_step(finding))
                    )
                    found.append(self._engine.named_by_arrays(finding, step, grown=whole.bytes))
                else:
                    self._leave_unexplained(process, finding, _NO_AGENT)
        return found

    def _held_in(self, pid: int, finding: Finding, things: CountedThings) -> Finding:
        """Return a finding on what a process is seen to have from outside with who holds it, where that is known."""
        if finding.resource in COUNTED:
            facts = things.named(finding)
        else:
            facts = things.of_mappings(pid, {os.getpid(), *self._tree.descendants()})
        return finding if facts is None else held_by(finding, facts)

    def _foresee(self, ending: _Owned, owner: Owner) -> None:
        """Note what grew in the processes of others with the tests of an owner that ends."""
        for pid in {pid for owned in self._owned.values() for pid in owned.levels if self._has_torch(pid)}:
            seen = self._seen_by(pid, ending)
            if seen and not has_ended(pid):
                left, process = self._engine.left(pid, None), describe_process(pid)
                self._foreseen[pid] = growing_tensors(left, seen, self._tolerance, process, _stage_of(owner))

    def _seen_by(self, pid: int, owned: _Owned) -> list[int]:
        """Return the tests that have used a process since it is followed."""
        return [turn for turn in owned.turns if turn >= self._followed.get(pid, self._turn)]

    def _trim(self, process: ProcessName, turns: ProcessGrowth) -> bool:
        """Note anew the levels of a process that has given back what is free in it; False where it did not."""
        trimmed = self._trimmed(process.pid)
        if trimmed is not None:
            turns.correct(process, trimmed.levels)
        return trimmed is not None

    def _trimmed(self, pid: int) -> _Outside | None:
        """Return what a process has once it has given back what is free; without what it has taken to answer this."""
        imported = self._engine.trim(pid)
        now = self._outside().get(pid) if imported is not None else None
        if now is None or imported is None or now.private is None:
            return now
        return replace(now, private=now.private - imported)

    def _leave_unexplained(self, process: ProcessName, finding: Finding, why: str) -> None:
        other = OtherProcess(pid=process.pid, name=process.name, host=None, cards=())
        self._unexplained.append(NotMeasured(what=finding.message, why=why, process=other))

    def unseen(self) -> tuple[NotMeasured, ...]:
        """Return the processes whose memory had to be seen since the test began, and could not be; as of now."""
        self.look()
        return self.not_measured

    @property
    def not_measured(self) -> tuple[NotMeasured, ...]:
        """Return the processes of which something had to be seen that could not be."""
        if self._is_alone:
            return ()
        if not self._asks:
            return self.unmeasured.not_measured
        silent = self._engine.not_measured
        kept = [self._said_of(item) for item in self.unmeasured.not_measured if self._is_unknown(item)]
        listed = {item.process.pid for item in kept if item.process is not None}
        silent_ones = (why for pid, why in silent.items() if pid not in listed)
        return (*kept, *silent_ones, *self._engine.not_judged, *self._unexplained)

    def _said_of(self, item: NotMeasured) -> NotMeasured:
        """Return what is said of a process that nobody has judged, and why nobody could.

        One that has ended holds nothing any more, and what it has left elsewhere is judged: only whether it grew is not
        known of it.  Where its engine slept, it may have kept what a sleep gives back.
        """
        if item.process is None:
            return item
        pid = item.process.pid
        if pid in self._engine.not_measured:
            return msgspec.structs.replace(item, why=self._engine.not_measured[pid].why)
        has_slept, is_known = pid in self._asleep, pid in self._engine.answering
        if not has_slept and has_ended(pid):
            return self.unmeasured.growth_unseen(pid)
        if has_slept or self._is_marked:
            why = _TOO_FEW if is_known else _SAYS_NOTHING
        else:
            why = _UNREADABLE if _is_unreadable(item.process) else _TOO_FEW_TESTS
        return msgspec.structs.replace(item, why=why)

    def _is_unknown(self, item: NotMeasured) -> bool:
        """Return whether nobody has judged a process: one that lives within a test may have leaked all along."""
        if item.process is None:
            return True
        pid = item.process.pid
        if pid in self._engine.not_measured:
            return True
        if _is_unreadable(item.process):
            return True
        # What a process keeps asleep, only its agent can say.
        if self._is_marked and pid not in self._engine.has_answered and pid not in self._engine.judged:
            return True
        return pid not in self._judged and pid not in self._engine.judged

    def _note_levels(self, owners: Sequence[Owner], now: Mapping[int, _Outside]) -> set[int]:
        """Note the levels of the owners' processes after a test that used them; returns these processes."""
        owned: set[int] = set()
        for owner in owners:
            pids = {int(name) for name in owner.items.get("processes", ())}
            known = self._owned.get(owner.label)
            if not pids:
                continue
            family = self._tree.with_descendants(pids)
            owned |= family
            if known is None or known.turns[-1:] != [self._turn]:
                continue
            for pid in family & now.keys():
                seen = now[pid]
                if pid not in known.levels:
                    # What is free since its imports would go with what is trimmed at the end, and hide as much growth.
                    if self._has_torch(pid) and self._engine.trim(pid) is not None:
                        seen = self._outside().get(pid, seen)
                    known.levels[pid] = ProcessGrowth(_stage_of(owner), of_tests=True)
                levels = known.levels[pid]
                # As the kernel lists them: each test must leave so many of them as there were.
                counted = known.things.all_levels(pid)
                levels.note(describe_process(pid), {**seen.levels, **counted}, turn=self._turn)
                self._judged.update(levels.judged)
        return owned

    def _left_in(self, pid: int, before: _Outside, now: _Outside) -> list[Finding]:
        """Return what a test has left in a process that was there before it, and that no fixture owns."""
        self._judged.add(pid)
        process = describe_process(pid)
        # Before it is asked for more, for which it takes memory itself.
        if self._more(before, now, {}):
            now = self._trimmed(pid) or now
        found: list[Finding] = []
        if self._has_torch(pid) and self._followed.get(pid, self._turn + 1) <= self._turn:
            found = [finding for finding, _ in self._engine.left(pid, self._turn) if finding.bytes > self._tolerance]
        named = _by_device(found)
        for key, size in self._more(before, now, named).items():
            finding = self._engine.named_by_arrays(left_by_test(process, key, size), size)
            if not self.agents.has_agent(pid):
                self._leave_unexplained(process, finding, _NO_AGENT)
            elif finding.holder:
                found.append(finding)
            else:
                self._leave_unexplained(process, finding, _UNNAMED if key == HOST else _FIRST_USE)
        return found

    def _more(self, before: _Outside, now: _Outside, named: Mapping[str, int]) -> dict[LevelKey, int]:
        """Return by how many bytes each level of a process has risen, where that is more than it may."""
        risen: dict[LevelKey, int] = {}
        for key, size in now.levels.items():
            then = before.levels.get(key, 0)
            allowed = host_memory_tolerance(()) if key == HOST else DRIVER_TOLERANCE
            if size is not None and then is not None:
                more = size - then - named.get(key.device, 0)
                risen |= {key: more} if more > max(self._tolerance, allowed) else {}
        return risen

    def _has_torch(self, pid: int) -> bool:
        return pid in self._followed or (self.agents.has_agent(pid) and maps_library(pid, _TORCH))

    def _outside(self) -> dict[int, _Outside]:
        """Return what is seen of each descendant."""
        pids = self._tree.descendants()
        cards = self._ended.on_cards(pids)
        self._memory.keep(pids)
        found = {}
        for pid in pids:
            if (process := stat(pid)) is not None:
                memory = self._memory.read(process)
                private = None if memory is None else memory.private
                found[pid] = _Outside(process.started, private, cards.get(pid, {}))
        return found


def _is_unreadable(process: OtherProcess) -> bool:
    return process.host is None or None in [card.bytes for card in process.cards]


def _stage_of(owner: Owner) -> str:
    return f"tests with {owner.name}"


def _by_device(findings: Sequence[Finding]) -> Counter[str]:
    """Return the bytes of some findings, by their device."""
    found = Counter[str]()
    for finding in findings:
        found[finding.device] += finding.bytes
    return found
