"""The stages of one test with the readings on both sides of each, for the report."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from lowtide.probes.device.driver import Driver, find_driver
from lowtide.probes.device.torch_allocator import has_context
from lowtide.probes.originals import initialized_torch, time
from lowtide.probes.snapshot import Snapshot, take_snapshot
from lowtide.pytest_plugin.spent import Spent
from lowtide.reports.from_snapshot import to_readings
from lowtide.reports.processes.stage_processes import ProcessStage
from lowtide.reports.schema import NotMeasured, Stage

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
        """The block is one stage; the readings on both sides count as judging."""
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
        """The stages without readings."""
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
