"""Processes that have ended and for which the driver still counts memory on a card."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from lowtide.leakcheck.processes.process_names import describe_process
from lowtide.leakcheck.processes.tree_end import held_by_a_gone
from lowtide.probes.device.driver import Driver
from lowtide.probes.device.driver.card_holders import read_card_holders
from lowtide.probes.host.process_files import stat
from lowtide.probes.originals import time
from lowtide.probes.processes.outside_view import ByCard, by_process
from lowtide.probes.processes.tree_traces import gone_on_cards
from lowtide.reports.processes.stage_processes import ProcessName
from lowtide.reports.schema import Finding

PATIENCE_S = 3.0
"""Seconds that the driver has to give back what an ended process held: it does so after the process is gone."""

_STEP_S = 0.05


@dataclass
class EndedHolders:
    """Remembers which processes held memory on cards.

    Attributes:
        driver: gives whom to ask; None: nobody.
        patience: seconds that the driver has to give back.
    """

    driver: Callable[[], Driver] | None
    patience: float = PATIENCE_S
    _started: dict[int, int] = field(default_factory=dict)
    _names: dict[int, ProcessName] = field(default_factory=dict)

    def note(self, pid: int) -> None:
        """A process that is there holds memory on a card."""
        process = stat(pid)
        if process is not None and self._started.get(pid) != process.started:
            self._started[pid] = process.started
            self._names[pid] = describe_process(pid)

    def findings(self) -> list[Finding]:
        """One for each noted process that has ended and is listed; each is reported once."""
        until = time.monotonic() + self.patience
        while (gone := self._gone()) and time.monotonic() < until:
            time.sleep(_STEP_S)
        found = [held_by_a_gone(self._names[pid], by_card) for pid, by_card in gone.items()]
        for pid in [pid for pid in self._started if stat(pid) is None]:
            del self._started[pid], self._names[pid]
        return found

    def _gone(self) -> dict[int, ByCard]:
        if self.driver is None or all(stat(pid) is not None for pid in self._started):
            return {}
        return gone_on_cards(by_process(read_card_holders(self.driver())), self._started)
