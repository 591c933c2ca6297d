"""The other processes of an engine in a life whose every call is checked: each is asked, by its agent, call by call."""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec

from lowtide.leakcheck.judging.fingerprints import finding_of
from lowtide.leakcheck.judging.metrics import host_memory_tolerance
from lowtide.leakcheck.processes.engine_processes import EngineProcesses
from lowtide.leakcheck.processes.process_levels import role_of
from lowtide.probes.device.driver import Driver
from lowtide.probes.host.process_files import rollup
from lowtide.probes.host.process_tree import ProcessTree
from lowtide.probes.processes.agents import Agents
from lowtide.reports.processes.stage_processes import ProcessStage
from lowtide.reports.schema import Finding, NotMeasured
from lowtide.reports.sizes import format_bytes

_TOO_FEW = "it infers too rarely to say whether it grows: try more lives, so that three inferences follow another one"


class LifeProcesses:
    """Judges the processes that engines start, through all lives of one search.

    Args:
        device: where the engine keeps its memory, "cpu" or "cuda:N".
        driver: gives whom to ask for what each process holds on cards.
        emptying: the levels of a sleep that leave nothing on the device.
    """

    def __init__(self, device: str, driver: Callable[[], Driver], emptying: Collection[int]) -> None:
        self._device = device
        self._tree = ProcessTree()
        self._agents = Agents()
        self._engine = EngineProcesses(self._tree, self._agents, device, driver)
        self._emptying = {f"sleep({level})" for level in emptying}
        self._life = 0
        # By process: host memory that nothing explained when it was read first.
        self._at_first: dict[int, int] = {}
        # Those that were there at the end of a call, and those of them that have answered then.
        self._present: set[int] = set()
        self._answered: set[int] = set()

    def start(self) -> None:
        """Put agents into the processes that start from here on."""
        self._tree.start()
        self._agents.start()

    def stop(self) -> None:
        """End it; legal twice, and without a start."""
        self._agents.stop()
        self._tree.stop()

    def begin_life(self) -> None:
        """Begin another life."""
        self._life += 1

    def begin_call(self, name: str) -> None:
        """Take what appears in any process from here on for what appeared in this call."""
        if self._tree.any_alive():
            self._engine.begin_stage(name, self._life)

    def before_sleep(self) -> None:
        """Have each process remember what must survive the sleep that begins."""
        if self._tree.any_alive():
            self._engine.before_sleep()

    def after_wake(self) -> list[Finding]:
        """Report what any process has lost of it, once everything is awake."""
        return self._engine.after_wake("wake")

    def end_call(self, name: str, level: int | None = None) -> list[Finding]:
        """Report what is not as it must be in any process after a call, also after one that failed.

        Args:
            name: of the call.
            level: of a sleep that did not fail.
        """
        found = self._engine.ended.findings()
        if not self._tree.any_alive():
            return found
        stage = name if level is None else f"{name}({level})"
        self._engine.end_stage(stage)
        self._present.update(self._tree.descendants())
        self._answered.update(self._engine.has_answered)
        if level is not None:
            found += self._engine.after_sleep(stage, self._life, empties=stage in self._emptying)
        elif name == "wake":
            found += self._engine.more_awake(stage)
        found += [left for reading in self._engine.readings if (left := self._nobodys(reading, stage)) is not None]
        return found

    def grown(self) -> list[Finding]:
        """Report what has grown from inference to inference in the processes of all lives so far."""
        return self._engine.findings_at_end()

    def _nobodys(self, reading: ProcessStage, stage: str) -> Finding | None:
        """Report host memory of one process under no tensor and in no arena, where it has grown too much."""
        pid, now = reading.process.pid, reading.unexplained.get("cpu")
        if now is None or reading.host is None:
            return None
        allowed = self._at_first.setdefault(pid, now) + host_memory_tolerance([self._device])
        if now > allowed:
            imported = self._engine.trim(pid)
            trimmed = rollup(pid)
            if imported is None or trimmed is None:
                return None  # it is listed as not measured, or has ended
            now -= reading.host - trimmed.private + imported
        if now <= allowed:
            return None
        grown = now - self._at_first[pid]
        return finding_of(
            "host-memory",
            bytes=grown,
            device="cpu",
            stage=stage,
            message=f"{reading.process.text}: {format_bytes(grown)} of host memory are nobody's after {stage}",
            suspects=("other process", role_of(reading.process.name)),
            process=reading.process,
        )

    def unseen(self, noted: Collection[NotMeasured], *, growth: bool) -> list[NotMeasured]:
        """Return what was not judged of what was noted from outside: no answer of a process, or too few inferences.

        A process that begins and ends within one call has nothing left that could be judged but what it made for
        others to find, and one that never infers does not grow with its inferences.

        Args:
            noted: the processes that had to be seen, among other things.
            growth: whether it must be known that processes do not grow with each inference.
        """
        left = []
        for item in noted:
            pid = None if item.process is None else item.process.pid
            if pid is None or pid in self._present - self._answered:
                left.append(item)
            elif growth and pid in self._engine.answering - self._engine.judged:
                left.append(msgspec.structs.replace(item, why=_TOO_FEW))
        return [*left, *self._engine.not_measured.values()]
