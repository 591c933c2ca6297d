"""What all lives of one search share: the watch over the process, what a fresh engine says, the coverage.

The other processes of an engine are asked call by call, each by its agent, for what they must give back.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import msgspec

from lowtide.leakcheck.judging.fingerprints import fingerprint
from lowtide.leakcheck.judging.growth import GrowthWatch
from lowtide.leakcheck.judging.metrics import host_memory_tolerance
from lowtide.leakcheck.judging.owners import Owner
from lowtide.leakcheck.lives.interrupts import Interrupts
from lowtide.leakcheck.lives.process_state import ProcessState
from lowtide.leakcheck.lives.script import Coverage, simplest
from lowtide.leakcheck.processes.engine_processes import EngineProcesses
from lowtide.leakcheck.processes.process_growth import role_of
from lowtide.leakcheck.resources import read_items
from lowtide.leakcheck.targets.target import (
    Capabilities,
    TargetError,
    TargetFactory,
    Unjudged,
    make_target,
    tokens_of_one,
)
from lowtide.leakcheck.watching.import_watch import Imported, ImportWatch
from lowtide.leakcheck.watching.verdict import Policy, Verdict
from lowtide.leakcheck.watching.watch import Watch
from lowtide.probes.device.driver import Driver, find_driver
from lowtide.probes.host.counters import CounterReader
from lowtide.probes.host.process_files import rollup
from lowtide.probes.host.process_tree import ProcessTree
from lowtide.probes.objects.listed import frozen_by_program
from lowtide.probes.originals import gc
from lowtide.probes.processes.agents import Agents
from lowtide.probes.stages import listening
from lowtide.reports.outcomes import largest_of_each
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
        """Another life begins."""
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
        suspects = ("other process", role_of(reading.process.name))
        return Finding(
            resource="host-memory",
            cause="unknown",
            bytes=grown,
            count=1,
            device="cpu",
            stage=stage,
            message=f"{reading.process.text}: {format_bytes(grown)} of host memory are nobody's after {stage}",
            fingerprint=fingerprint(resource="host-memory", device="cpu", stage=stage, suspects=suspects),
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


class SharedLives:
    """What all lives of one search share: the watch over the process, what a fresh engine says, the coverage.

    Args:
        factory: makes a target; one for each life.
        explain: whether the holders of what a life leaves are reported, which takes a second or two each time.
        growth: whether it must be known of other processes that they do not grow with each inference.

    Raises:
        TargetError: what it makes cannot be driven.
    """

    def __init__(self, factory: TargetFactory, *, explain: bool = True, growth: bool = True) -> None:
        self.factory = factory
        self.explain = explain
        self._judges_growth = growth
        self.capabilities: Capabilities = make_target(factory).capabilities
        self.coverage = Coverage()
        # Other processes are asked by `processes`, whose growth counts over all lives.
        self.watch = Watch(Policy(remedies="never", explain=explain, processes=False))
        self.growth = GrowthWatch(self.capabilities.device)
        self._frozen = 0
        self._listening = ExitStack()
        # An engine, or Python in a finalizer, may have dropped one: then no further life begins.
        self.interrupts = Interrupts()
        self._driver: Driver | None = None
        # What libraries take from the driver for an engine at work, such as a communicator of NCCL: at most, in bytes.
        self.of_libraries = 0
        # What engines have at work, awake and asleep, that they give back and that is in no arena or pool, in bytes.
        self.driver_at_work = 0
        self.host_at_work: dict[str, int] = {}
        self.counters = CounterReader(self._ask_driver, resources=read_items)
        self._process = ProcessState(lambda: 0, self.counters.read)
        # What modules make and change belongs to the process, whichever call imports them first.
        self.imports = ImportWatch(self._importing, self._import_done)
        self.imported = Imported(self.counters.read)
        self._is_watching = False
        self.processes = LifeProcesses(self.capabilities.device, self._ask_driver, self.capabilities.emptying_levels)
        # What could not be judged, once each.
        self.not_measured: dict[NotMeasured, None] = {}
        # By prompt length: how many tokens were asked for, and what came.
        self._tokens: dict[int, tuple[int, tuple[int, ...]]] = {}

    @property
    def unmeasured(self) -> tuple[NotMeasured, ...]:
        """What could not be judged; of other processes of one program only the largest, since each life has its own."""
        return largest_of_each(self.processes.unseen(self.not_measured, growth=self._judges_growth))

    def open(self) -> None:
        """Load what a first life loads, so that it is no life's, and begin to watch."""
        self._listening.enter_context(self.interrupts)
        # First: what it sets in the environment is no life's to put back.
        self._listening.callback(self.processes.stop)
        self.processes.start()
        self._listening.callback(self.imports.remove)
        self.imports.install()
        self._process.mark()
        self._frozen = frozen_by_program(gc.get_freeze_count())
        try:
            self.imports.active = True
            for length in self.capabilities.prompt_lengths:
                self.expected(length, self.capabilities.max_tokens)
            self.warm_up()
        except BaseException:
            self._listening.close()
            raise
        gc.collect()
        with self._judging():
            self.put_back()
            self.watch.open()
        self._listening.enter_context(listening(self.growth))

    def close(self) -> None:
        """End the watch."""
        self._listening.close()
        self.watch.close()
        if self._driver is not None:
            self._driver.close()
            self._driver = None

    def begin(self) -> None:
        """Take what is there when a life begins as its baseline."""
        with self._judging():
            self.processes.begin_life()
            self.watch.begin("create")
            self._is_watching = True

    def end(self) -> Verdict:
        """Report what a life that is over has left behind."""
        with self._judging():
            return self.watch.end()

    @contextmanager
    def _judging(self) -> Iterator[None]:
        """Count what this checker itself imports now as nobody's."""
        self.imports.active = False
        try:
            yield
        finally:
            self.imports.active = True

    def put_back(self) -> None:
        """Undo what lives have changed in the process, so that the next one can be seen to change it again.

        A heap that stays frozen, a setting that stays replaced: what the first life leaves of these, the others find.
        """
        self._process.findings("shutdown", remedies=True)
        self.watch.forget_settings()
        if frozen_by_program(gc.get_freeze_count()) > self._frozen:
            gc.unfreeze()
            gc.collect()

    def expected(self, prompt_length: int, max_tokens: int) -> Sequence[int]:
        """Return what a fresh engine with the simplest settings says to this request alone."""
        asked, tokens = self._tokens.get(prompt_length, (0, ()))
        if asked < max_tokens:
            asked = max(self.capabilities.max_tokens, max_tokens)
            target: Any = Unjudged(make_target(self.factory))
            target.create(simplest(self.capabilities))
            try:
                said = target.infer([prompt_length], asked)
            except TargetError:
                # What the shutdown of an engine that has failed raises would say less.
                with suppress(TargetError):
                    target.shutdown()
                raise
            target.shutdown()
            tokens = tokens_of_one(said)
            self._tokens[prompt_length] = (asked, tokens)
        return tokens[:max_tokens]

    def _importing(self, owner: Owner) -> None:
        if self._is_watching:
            self.watch.enter(owner)
        self.imported.begin(owner)

    def _import_done(self) -> None:
        self._process.adopt(self.imported.end())
        if self._is_watching:
            self.watch.leave()

    @abstractmethod
    def warm_up(self) -> None:
        """Goes through one life unjudged, so that what libraries keep from their first use is there."""

    def _ask_driver(self) -> Driver:
        if self._driver is None:
            self._driver = find_driver()
        return self._driver
