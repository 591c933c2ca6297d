"""The other processes of a watched program, test by test: what each of them keeps, named by its own agent.

What a test leaves in a process that nobody owns is a leak of the test, as it would be in the test's own process.  What
it leaves in one that belongs to a fixture of a wider scope is that fixture's, and only a growth that goes on is
reported, when the fixture ends.  One that begins and ends within a test is judged by the stages that the test marks:
it holds nothing any more, and may have leaked all along.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lowtide.leakcheck.baseline.owners import Owner
from lowtide.leakcheck.judging.tolerances import host_memory_tolerance
from lowtide.leakcheck.processes.engine_processes import EngineProcesses
from lowtide.leakcheck.processes.process_turns import ProcessTurns, growing_tensors
from lowtide.leakcheck.processes.unmeasured_processes import UnmeasuredProcesses
from lowtide.probes.device.driver import Driver
from lowtide.probes.device.driver.card_holders import read_card_holders
from lowtide.probes.host.counters import Counters
from lowtide.probes.host.process_files import rollup, stat
from lowtide.probes.host.process_tree import ProcessTree, name_of
from lowtide.probes.processes.agents import Agents
from lowtide.probes.processes.mapped_files import maps_library
from lowtide.probes.stages import Stage
from lowtide.reports.processes.stage_processes import ProcessName, ProcessStage
from lowtide.reports.schema import Finding, NotMeasured, OtherProcess
from lowtide.reports.sizes import format_bytes

TORCH = "libtorch"
"""Part of the names of the libraries that a process with torch maps: only such a one is asked for tensors."""

_UNNAMED = "no large array in it is of that size: a leak, or a library that it has loaded; use it once before"
_NOT_TRIMMED = "it has no agent that could give back what is free in its heap: start it after the check has begun"
_NO_AGENT = "it has no agent: start it after the check has begun to have it named"


@dataclass(frozen=True)
class _Outside:
    """What is seen of a process without asking it, in bytes; None where that may not be read.

    Attributes:
        started: in ticks since boot, which distinguishes it from a later one of the same number.
        private: memory that only it maps.
        cards: what the driver counts for it, by device.
    """

    started: int
    private: int | None
    cards: Mapping[str, int | None]


@dataclass
class _Owned:
    """The processes of one owner.

    Attributes:
        turns: the tests that used the owner, by their numbers.
        levels: the levels of each process after these.
    """

    turns: list[int] = field(default_factory=list)
    levels: dict[int, ProcessTurns] = field(default_factory=dict)


class OtherProcesses:
    """Follows the descendants of a watched process.

    Args:
        tree: whose descendants they are.
        driver: gives whom to ask for memory on cards, once there is a process to ask about; None if cards do not count.
        asks: whether there are agents in them that are asked.
        tolerance: bytes that a test may leave.
    """

    def __init__(
        self, tree: ProcessTree, driver: Callable[[], Driver] | None, *, asks: bool = False, tolerance: int = 0
    ) -> None:
        self._tree = tree
        self._driver = driver
        self._asks = asks
        self._tolerance = tolerance
        self._unmeasured = UnmeasuredProcesses(tree, driver)
        self._agents = Agents()
        self._engine = EngineProcesses(tree, self._agents, None, driver)
        self._is_marked = False
        self._turn = 0
        self._before: dict[int, _Outside] = {}
        self._followed: dict[int, int] = {}
        self._reported: set[int] = set()
        self._judged: set[int] = set()
        self._owned: dict[str, _Owned] = {}
        self._found: list[Finding] = []
        self._unexplained: list[NotMeasured] = []

    def start(self) -> None:
        """Put agents into the processes that start from here on; legal twice."""
        if self._asks:
            self._agents.start()

    def stop(self) -> None:
        """End it; legal without a start."""
        self._agents.stop()

    def begin(self, now: Counters) -> None:
        """A test begins: what is there now is its baseline.

        Args:
            now: the counters, which have just been read: they say whether there is a tree.
        """
        self._unmeasured.begin(now)
        self._turn += 1
        self._is_marked = False
        self._engine = EngineProcesses(self._tree, self._agents, None, self._driver, dict(self._engine.not_measured))
        self._found, self._unexplained, self._before = [], [], {}
        if self._asks and now.items["processes"]:
            self.follow()
            # What an agent takes that is asked for the first time is there before.
            self._before = self._outside()

    def follow(self) -> None:
        """What appears in any process with torch from here on, appears in this test."""
        if not self._asks or not self._tree.any_alive():
            return
        pids = [pid for pid in self._tree.descendants() if self._has_torch(pid)]
        self._followed = {pid: self._followed.get(pid, self._turn) for pid in pids}
        self._engine.announce(pids, "test", self._turn)

    def look(self, *, always: bool = False, now: Counters | None = None) -> None:
        """See `UnmeasuredProcesses.look`."""
        self._unmeasured.look(always=always, now=now)

    def is_reported(self, pids: Iterable[int]) -> None:
        """These processes are findings: what they and their children hold is not reported again."""
        known = set(pids)
        self._unmeasured.is_reported(known)
        self._reported |= self._tree.with_descendants(known)

    def entered(self, stage: Stage) -> None:
        """The program says where it is in its life."""
        if self._asks and self._tree.any_alive():
            self._is_marked = True
            self._engine.begin_stage(stage.name, self._turn)

    def left(self, stage: Stage, error: BaseException | None) -> None:
        """And that it is there no more."""
        if not self._asks or not self._tree.any_alive():
            return
        if error is None:
            self._engine.end_stage(stage.name)
            if stage.name.startswith("sleep"):
                self._found += self._engine.after_sleep(stage.name, self._turn, empties=False)
        outer = stage.path[-2] if len(stage.path) > 1 else "test"
        self._engine.begin_stage(outer, self._turn)

    @property
    def readings(self) -> tuple[ProcessStage, ...]:
        """What each held at the end of the last stage."""
        return self._engine.readings

    def used(self, owners: Iterable[Owner]) -> None:
        """The test uses these owners: what it leaves in their processes may be growth."""
        for owner in owners:
            turns = self._owned.setdefault(owner.label, _Owned()).turns
            if self._turn not in turns[-1:]:
                turns.append(self._turn)

    def judge(self, owners: Sequence[Owner]) -> tuple[Finding, ...]:
        """The test is over: what it has left in processes that nobody owns, and what their stages have shown.

        Args:
            owners: those that are alive; what has grown in their processes is theirs.
        """
        now = self._outside() if self._before or self._owned else {}
        stayed = [
            pid
            for pid, before in self._before.items()
            if pid in now and now[pid].started == before.started and pid not in self._reported
        ]
        owned = self._note_levels(owners, now)
        for pid in stayed:
            if pid not in owned:
                self._found += self._left_in(pid, self._before[pid], now[pid])
        found = (*self._found, *self._engine.findings_at_end())
        self._found = []
        return found

    def growth_of(self, owner: Owner) -> list[Finding]:
        """What has grown test after test in the processes of an owner, asked while they live."""
        if owner.label not in self._owned or not self._asks:
            return []
        self._note_levels([owner], self._outside())
        owned = self._owned.pop(owner.label)
        found: list[Finding] = []
        for pid, turns in owned.levels.items():
            if stat(pid) is None or pid in self._reported:
                continue
            process = ProcessName(pid=pid, name=name_of(pid))
            stage = f"tests with {owner.name}"
            tensors = []
            if self._has_torch(pid):
                left = self._engine.left(pid, None)
                seen = [turn for turn in owned.turns if turn >= self._followed.get(pid, self._turn)]
                tensors = growing_tensors(left, seen, self._tolerance, process, stage)
            found += tensors
            on_host = sum(finding.bytes for finding in tensors if finding.device == "cpu")
            found += self._grown(process, turns, stage, on_host)
        return found

    def _grown(self, process: ProcessName, turns: ProcessTurns, stage: str, named: int) -> list[Finding]:
        """Which levels of a process grow, once what is free in its heap is given back."""
        suspects = turns.findings(process, stage, named)
        memory = rollup(process.pid)
        if not suspects or memory is None:
            return []
        if self._engine.trim(process.pid):
            trimmed = rollup(process.pid)
            turns.correct(memory.private if trimmed is None else trimmed.private)
            found = turns.findings(process, stage, named)
            return [self._engine.named_by_arrays(finding, step) for finding, step in found]
        self._unexplained += [
            NotMeasured(what=finding.message, why=_NOT_TRIMMED, process=_other(process, memory.private))
            for finding, _ in suspects
            if finding.resource == "host-memory"
        ]
        return [finding for finding, _ in suspects if finding.resource != "host-memory"]

    def unseen(self) -> tuple[NotMeasured, ...]:
        """The processes whose memory had to be seen since the test began, and could not be; as of now."""
        self.look()
        return self.not_measured

    @property
    def not_measured(self) -> tuple[NotMeasured, ...]:
        """The processes of which something had to be seen that could not be."""
        if not self._asks:
            return self._unmeasured.not_measured
        kept = [item for item in self._unmeasured.not_measured if self._is_unknown(item)]
        return (*kept, *self._engine.not_measured.values(), *self._unexplained)

    def _is_unknown(self, item: NotMeasured) -> bool:
        """Whether nobody has judged a process: one that has begun and ended within a test may have leaked all along."""
        if item.process is None:
            return True
        pid = item.process.pid
        if pid in self._engine.not_measured:
            return False  # which says why
        if item.process.host is None or None in [card.bytes for card in item.process.cards]:
            return True
        # What a process keeps asleep, only its agent can say.
        if self._is_marked and pid not in self._engine.has_answered and pid not in self._engine.judged:
            return True
        return pid not in self._judged and pid not in self._engine.judged

    def _note_levels(self, owners: Sequence[Owner], now: Mapping[int, _Outside]) -> set[int]:
        """Notes the levels of the owners' processes after a test that used them; returns these processes."""
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
                levels = known.levels.setdefault(pid, ProcessTurns())
                levels.note(self._turn, now[pid].private, now[pid].cards)
                if levels.can_show_growth:
                    self._judged.add(pid)
        return owned

    def _left_in(self, pid: int, before: _Outside, now: _Outside) -> list[Finding]:
        """What a test has left in a process that was there before it, and that no fixture owns."""
        self._judged.add(pid)
        process = ProcessName(pid=pid, name=name_of(pid))
        found: list[Finding] = []
        if self._has_torch(pid) and self._followed.get(pid, self._turn + 1) <= self._turn:
            found = [finding for finding, _ in self._engine.left(pid, self._turn) if finding.bytes > self._tolerance]
        allowed = max(self._tolerance, host_memory_tolerance(()))
        on_host = sum(finding.bytes for finding in found if finding.device == "cpu")
        grown = (now.private or 0) - (before.private or 0) - on_host
        if before.private is not None and grown > allowed and self._engine.trim(pid):
            memory = rollup(pid)
            grown = (0 if memory is None else memory.private) - before.private - on_host
        if before.private is not None and grown > allowed:
            finding = ProcessTurns.left(process, grown)
            named = self._engine.named_by_arrays(finding, grown)
            if named.holder:
                return [*found, named]
            what = f"{format_bytes(grown)} that pid {pid} ({process.name}) has more of host memory than before"
            why = _UNNAMED if self._agents.has_agent(pid) else _NO_AGENT
            self._unexplained.append(NotMeasured(what=what, why=why, process=_other(process, now.private)))
        return found

    def _has_torch(self, pid: int) -> bool:
        return pid in self._followed or (self._agents.has_agent(pid) and maps_library(pid, TORCH))

    def _outside(self) -> dict[int, _Outside]:
        """What is seen of each descendant."""
        pids = self._tree.descendants()
        cards: dict[int, dict[str, int | None]] = {}
        if pids and self._driver is not None:
            for card in read_card_holders(self._driver()):
                for pid, size in card.processes.items():
                    cards.setdefault(pid, {})[card.device] = size
        found = {}
        for pid in pids:
            process, memory = stat(pid), rollup(pid)
            if process is not None:
                private = None if memory is None else memory.private
                found[pid] = _Outside(process.started, private, cards.get(pid, {}))
        return found


def _other(process: ProcessName, private: int | None) -> OtherProcess:
    return OtherProcess(pid=process.pid, name=process.name, host=private, cards=())
