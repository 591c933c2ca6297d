"""The watch of a session: made as the settings say, and entered and left so that its own errors harm no test.

With it what it costs, and the readings on both sides of each stage of a test, for the report.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import pytest

from lowtide.leakcheck.judging.owners import Owner
from lowtide.leakcheck.watching.engine_watch import EngineGrowth, SleepWatch
from lowtide.leakcheck.watching.import_watch import ImportWatch
from lowtide.leakcheck.watching.watch import Watch
from lowtide.leakcheck.watching.watched import Policy
from lowtide.probes.device.driver import Driver, find_driver
from lowtide.probes.device.torch_allocator import has_context
from lowtide.probes.originals import initialized_torch, replaced, threading, time
from lowtide.probes.snapshot import Snapshot, take_snapshot
from lowtide.probes.stages import EnteredStage
from lowtide.pytest_plugin.settings import Settings, usage_error
from lowtide.reports.from_snapshot import to_readings
from lowtide.reports.processes.stage_processes import ProcessStage
from lowtide.reports.schema import Finding, NotMeasured, Stage


class Spent:
    """Seconds spent with judging and with trying remedies; what runs inside of a block of either counts once.

    Attributes:
        judging: seconds with readings, verdicts and explanations.
        remedies: seconds with trying, at the end, what gives the leaks back.
    """

    def __init__(self, judging: float = 0.0, remedies: float = 0.0) -> None:
        self.judging = judging
        self.remedies = remedies
        self._is_running = False

    @contextlib.contextmanager
    def on_judging(self) -> Iterator[None]:
        """Count the block's time as judging."""
        started = self.begin_judging()
        try:
            yield
        finally:
            self.end_judging(started)

    def begin_judging(self) -> float | None:
        """Begin as `on_judging` does; return what `end_judging` takes."""
        return None if self._is_running else self._start()

    def end_judging(self, started: float | None) -> None:
        """End what `begin_judging` has begun."""
        if started is not None:
            self.judging += self._stop(started)

    @contextlib.contextmanager
    def on_remedies(self) -> Iterator[None]:
        """Count the block's time as remedies."""
        started = self._start()
        try:
            yield
        finally:
            self.remedies += self._stop(started)

    def add(self, others: Sequence[float]) -> None:
        """Add what another process of the same session has spent: judging, remedies."""
        judging, remedies = others
        self.judging += judging
        self.remedies += remedies

    def both(self) -> tuple[float, float]:
        """Judging and remedies, for `add`."""
        return self.judging, self.remedies

    def __str__(self) -> str:
        return f"judging {self.judging:.1f} s, remedies {self.remedies:.1f} s"

    def _start(self) -> float:
        self._is_running = True
        return time.perf_counter()

    def _stop(self, started: float) -> float:
        self._is_running = False
        return time.perf_counter() - started


_MAIN_THREAD = threading.main_thread().ident


class _Guard:
    """A block that reads: its time counts as judging. A class, since each test has eight, and a generator takes twice.

    Args:
        session: is told of an error.
        spent: where its time is counted.
        errors: what may end it, and nothing more.
    """

    def __init__(self, session: SessionWatch, spent: Spent, errors: tuple[type[BaseException], ...]) -> None:
        self._session, self._spent, self._errors = session, spent, errors
        self._started: float | None = None

    def __enter__(self) -> None:
        self._started = self._spent.begin_judging()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        self._spent.end_judging(self._started)
        if error is None or not isinstance(error, self._errors):
            return False
        self._session.fails(error)
        return True


class SessionWatch:
    """The watch, what enters and leaves it, and which of its readings failed.

    Args:
        policy: how it judges.
        spent: where its time is counted.

    Attributes:
        watch: the watch itself.
        imports: reports imports to it.
        sleeps: what engines leave behind that sleep.
        engines: what they keep of each inference.
        has_stages: whether an engine has said since the last verdict where it is in its life.
        is_open: whether it reads anything yet.
        failure: the first error in a guarded block since this was emptied; empty if there was none.
        replaced: functions of Python's that the program had replaced when that error came.
    """

    def __init__(self, policy: Policy, spent: Spent) -> None:
        self.watch = Watch(policy)
        self.imports = ImportWatch(self._import_entered, self._import_left, self.watch.thread_imports)
        self.sleeps = SleepWatch(lambda: bool(self.watch.others.readings))
        self.engines = EngineGrowth(self.watch)
        self.is_open = self.has_stages = False
        self.failure = ""
        self.replaced: list[str] = []
        self._spent = spent
        self._stages: list[str] = []

    def start_agents(self, config: pytest.Config) -> None:
        """Start agents before test modules are imported, which may start processes.

        Args:
            config: pytest's. xdist's controller runs no tests, and would put agents into the workers that it starts.
        """
        if hasattr(config, "workerinput") or not config.getoption("tx", None):
            self.watch.others.start()

    def open(self) -> None:
        """Open the watch before the first test."""
        self.watch.open()
        self.imports.install()
        self.is_open = True

    def close(self) -> None:
        """Leave nothing behind; legal twice."""
        self.imports.remove()
        self.watch.close()
        self.is_open = False

    def guarded(self, errors: tuple[type[BaseException], ...] = (Exception,)) -> _Guard:
        """Return a reading that fails must not keep a test from being set up or torn down; its verdict says so.

        Args:
            errors: what may end the reading, and nothing more.
        """
        return _Guard(self, self._spent, errors)

    def fails(self, error: BaseException) -> None:
        """Note the first error of a reading."""
        if not self.failure:
            *_, (frame, line) = traceback.walk_tb(error.__traceback__)
            self.failure = f"{type(error).__name__}: {error} ({frame.f_code.co_name}, line {line})"
            self.replaced = replaced()
            del frame

    @contextlib.contextmanager
    def owned_by(self, owner: Owner) -> Iterator[None]:
        """Attribute what appears in the block to the owner."""
        entered = False
        with self.guarded():
            self.watch.enter(owner)
            entered = True
        try:
            yield
        finally:
            if entered:
                with self.guarded():
                    self.watch.leave()

    def stage_entered(self, stage: EnteredStage) -> None:
        """Hear where an engine is in its life."""
        if stage.thread == _MAIN_THREAD:
            self.has_stages = True
            self._stages.append(self.watch.stage_now)
            with self.guarded():
                self.watch.stage("/".join(stage.path), again=True)
                self.sleeps.entered(stage)
                self.watch.others.entered(stage)

    def stage_left(self, stage: EnteredStage, error: BaseException | None) -> None:
        """And that it is there no more."""
        if error is not None:
            with self.guarded():
                self.watch.out_of_memory.stage_left(stage, error)
        if stage.thread == _MAIN_THREAD:
            with self.guarded():
                self.watch.stage(self._stages.pop())
                self.sleeps.left(stage, error)
                self.watch.others.left(stage, error)
                self.watch.slots_after(stage)

    def take_of_engines(self, known: Sequence[Finding]) -> tuple[list[Finding], tuple[NotMeasured, ...]]:
        """Return what sleeps and inferences have left since the last verdict, and what of them cannot be judged.

        Args:
            known: what the test has left: what an engine still keeps is told by that alone.
        """
        if not self.has_stages:
            return [], ()
        self.has_stages = False
        unjudged = (*self.sleeps.take_unjudged(), *self.engines.take_unjudged())
        return [*self.sleeps.take(), *self.engines.take(known)], unjudged

    def _import_entered(self, owner: Owner) -> None:
        with self._spent.on_judging():
            self.watch.enter(owner)

    def _import_left(self) -> None:
        with self._spent.on_judging():
            self.watch.leave()


def watch_policy(config: pytest.Config, settings: Settings, *, shares_card: bool) -> Policy:
    """Return how the watch of this run judges.

    Args:
        config: pytest's.
        settings: of this run.
        shares_card: whether other workers use the same card, whose figures then say nothing of this one.
    """
    return Policy(
        tolerance=settings.tolerance,
        settle=settings.settle,
        stacks=settings.stacks,
        remedies="later" if settings.remedies else "never",
        card=settings.device != "cpu",
        warm_up=_warm_up(settings),
        driver=not shares_card,
        processes=settings.processes,
        growth=settings.growth,
        native=settings.native,
        budget=settings.budget,
        # It puts them back after each test.
        warnings_filters=not config.pluginmanager.has_plugin("warnings"),
    )


def count_workers(config: pytest.Config) -> int:
    """Return how many xdist workers this run has; 1 without."""
    worker = getattr(config, "workerinput", None)
    return int(worker["workercount"]) if worker is not None else len(config.getoption("tx", None) or ()) or 1


def insist_on_a_card() -> None:
    """Refuse a run that wants a card where torch sees none.

    Raises:
        pytest.UsageError: there is none.
    """
    import torch

    if not torch.cuda.is_available():
        raise usage_error("--leakcheck-device cuda: torch sees no card here; use auto, or cpu to judge the host only")


def _warm_up(settings: Settings) -> Literal["now", "first-use", "off"]:
    """Return when a card is used for the first time: a run that insists on one has it from the beginning."""
    if not settings.warmup or settings.device == "cpu":
        return "off"
    return "now" if settings.device == "cuda" else "first-use"


MOST_STAGES = 32
"""Stages of one test with readings; each reading goes through the heap, and a loop may have thousands."""


class StageRecords:
    """Collects the stages of one test.

    Args:
        card: whether to read cards.
        others: what the program's other processes held at the end of the last stage.
    """

    def __init__(self, *, card: bool, others: Callable[[], tuple[ProcessStage, ...]]) -> None:
        self._card = card
        self._others = others
        self._driver: Driver | None = None
        self.stages: list[Stage] = []
        self.left_out = 0

    @contextlib.contextmanager
    def record(self, name: str, spent: Spent) -> Iterator[None]:
        """Take the block for one stage; the readings on both sides count as judging."""
        if len(self.stages) >= MOST_STAGES:
            self.left_out += 1
            yield
            return
        with spent.on_judging():
            before = self._snapshot()
        started = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - started
            with spent.on_judging():
                after = self._snapshot()
            device = f"cuda:{self._cards()[0]}" if self._cards() else "cpu"
            self.stages.append(
                Stage(
                    name=name,
                    cycle=1,
                    seconds=seconds,
                    before=to_readings(before, device, ()),
                    after=to_readings(after, device, ()),
                    processes=self._others(),
                )
            )

    def not_measured(self) -> tuple[NotMeasured, ...]:
        """Return the stages without readings."""
        if not self.left_out:
            return ()
        why = f"a test's first {MOST_STAGES} stages are recorded"
        return (NotMeasured(what=f"{self.left_out} further stages", why=why),)

    def close(self) -> None:
        """Let go of the driver; legal twice."""
        if self._driver is not None:
            self._driver.close()
            self._driver = None

    def _snapshot(self) -> Snapshot:
        if self._driver is None:
            self._driver = find_driver()
        return take_snapshot(driver=self._driver, devices=self._cards())

    def _cards(self) -> list[int]:
        torch = initialized_torch() if self._card else None
        return [] if torch is None else [i for i in range(torch.cuda.device_count()) if has_context(torch, i)]
