"""What all lives of one search share: the watch over the process, what a fresh engine says, the coverage."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from lowtide.leakcheck.baseline.import_watch import ImportWatch
from lowtide.leakcheck.baseline.imported_modules import Imported
from lowtide.leakcheck.baseline.owners import Owner
from lowtide.leakcheck.judging.buffer_growth import GrowthWatch
from lowtide.leakcheck.lives.calls import Coverage, simplest
from lowtide.leakcheck.lives.interrupts import Interrupts
from lowtide.leakcheck.lives.life_processes import LifeProcesses
from lowtide.leakcheck.lives.process_state import ProcessState
from lowtide.leakcheck.resources import read_items
from lowtide.leakcheck.targets.target import (
    Capabilities,
    TargetError,
    TargetFactory,
    Unjudged,
    make_target,
    tokens_of_one,
)
from lowtide.leakcheck.watching.verdict import Policy, Verdict
from lowtide.leakcheck.watching.watch import Watch
from lowtide.probes.device.driver import Driver, find_driver
from lowtide.probes.host.counters import CounterReader
from lowtide.probes.objects.listed import frozen_by_program
from lowtide.probes.originals import gc
from lowtide.probes.stages import listening
from lowtide.reports.outcomes import largest_of_each
from lowtide.reports.schema import NotMeasured


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
        """A life begins: what is there now is its baseline."""
        with self._judging():
            self.processes.begin_life()
            self.watch.begin("create")
            self._is_watching = True

    def end(self) -> Verdict:
        """A life is over: what it has left behind."""
        with self._judging():
            return self.watch.end()

    @contextmanager
    def _judging(self) -> Iterator[None]:
        """What this checker itself imports now is nobody's."""
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
        """What a fresh engine with the simplest settings says to this request alone."""
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
