"""The watch of a session: made as the settings say, and entered and left so that its own errors harm no test."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Sequence
from typing import Literal

import pytest

from lowtide.leakcheck.judging.owners import Owner
from lowtide.leakcheck.watching.engine_watch import EngineGrowth, SleepWatch
from lowtide.leakcheck.watching.import_watch import ImportWatch
from lowtide.leakcheck.watching.watch import Watch
from lowtide.leakcheck.watching.watched import Policy
from lowtide.probes.originals import replaced, threading
from lowtide.probes.stages import EnteredStage
from lowtide.pytest_plugin.settings import Settings, usage_error
from lowtide.pytest_plugin.spent import Spent
from lowtide.reports.schema import Finding, NotMeasured

_MAIN_THREAD = threading.main_thread().ident


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
        self.imports = ImportWatch(self._import_entered, self._import_left)
        self.sleeps = SleepWatch(lambda: bool(self.watch.others.readings))
        self.engines = EngineGrowth(self.watch)
        self.is_open = self.has_stages = False
        self.failure = ""
        self.replaced: list[str] = []
        self._spent = spent
        self._stages: list[str] = []

    def start_agents(self, config: pytest.Config) -> None:
        """Before test modules are imported, which may start processes.

        Args:
            config: pytest's. xdist's controller runs no tests, and would put agents into the workers that it starts.
        """
        if hasattr(config, "workerinput") or not config.getoption("tx", None):
            self.watch.others.start()

    def open(self) -> None:
        """Before the first test."""
        self.watch.open()
        self.imports.install()
        self.is_open = True

    def close(self) -> None:
        """Leave nothing behind; legal twice."""
        self.imports.remove()
        self.watch.close()
        self.is_open = False

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """A reading that fails must not keep a test from being set up or torn down; its verdict says so."""
        try:
            with self._spent.on_judging():
                yield
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this checker's
            if not self.failure:
                *_, (frame, line) = traceback.walk_tb(error.__traceback__)
                self.failure = f"{type(error).__name__}: {error} ({frame.f_code.co_name}, line {line})"
                self.replaced = replaced()
                del frame

    @contextlib.contextmanager
    def owned_by(self, owner: Owner) -> Iterator[None]:
        """What appears in the block is the owner's."""
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
        """An engine says where it is in its life."""
        if stage.thread == _MAIN_THREAD:
            self.has_stages = True
            self._stages.append(self.watch.stage_now)
            with self.guarded():
                self.watch.stage("/".join(stage.path), again=True)
                self.sleeps.entered(stage)
                self.watch.others.entered(stage)

    def stage_left(self, stage: EnteredStage, error: BaseException | None) -> None:
        """And that it is there no more."""
        if stage.thread == _MAIN_THREAD:
            with self.guarded():
                self.watch.stage(self._stages.pop())
                self.sleeps.left(stage, error)
                self.watch.others.left(stage, error)

    def take_of_engines(self, known: Sequence[Finding]) -> tuple[list[Finding], tuple[NotMeasured, ...]]:
        """Return what sleeps and inferences have left since the last verdict, and what of them cannot be judged.

        Args:
            known: what the test has left: what an engine still keeps is told by that alone.
        """
        if not self.has_stages:
            return [], ()
        self.has_stages = False
        return [*self.sleeps.take(), *self.engines.take(known)], self.sleeps.take_unjudged()

    def _import_entered(self, owner: Owner) -> None:
        with self._spent.on_judging():
            self.watch.enter(owner)

    def _import_left(self) -> None:
        with self._spent.on_judging():
            self.watch.leave()


def watch_policy(config: pytest.Config, settings: Settings, *, shares_card: bool) -> Policy:
    """How the watch of this run judges.

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
        budget=settings.budget,
        # It puts them back after each test.
        warnings_filters=not config.pluginmanager.has_plugin("warnings"),
    )


def count_workers(config: pytest.Config) -> int:
    """How many xdist workers this run has; 1 without."""
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
    """When a card is used for the first time: a run that insists on one has it from the beginning."""
    if not settings.warmup or settings.device == "cpu":
        return "off"
    return "now" if settings.device == "cuda" else "first-use"
