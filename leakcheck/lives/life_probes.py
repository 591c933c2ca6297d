"""What watches a run from its first life to its last: children, files, descriptors, imports; and its snapshots."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from pathlib import Path

from lowtide.leakcheck.baseline.orphaned_files import OrphanedFiles
from lowtide.leakcheck.baseline.shared_memory import OwnSegments
from lowtide.leakcheck.judging.exemptions import exempt
from lowtide.leakcheck.processes.engine_processes import EngineProcesses
from lowtide.leakcheck.processes.tree_end import read_running, with_dead_files, with_running
from lowtide.leakcheck.processes.unmeasured_processes import UnmeasuredProcesses
from lowtide.leakcheck.resources import read_items
from lowtide.leakcheck.settings.environment_setters import EnvironmentSetters
from lowtide.leakcheck.tenant.bare_context import context_sizes
from lowtide.probes.device.driver import Driver
from lowtide.probes.device.driver.card_holders import read_card_holders
from lowtide.probes.host.counters import CounterReader
from lowtide.probes.host.makers import Makers
from lowtide.probes.host.process_events import ProcessEvents
from lowtide.probes.host.process_files import name_of, stat
from lowtide.probes.host.process_tree import ProcessTree
from lowtide.probes.processes.agents import Agents
from lowtide.probes.processes.outside_view import by_process
from lowtide.probes.processes.shared_memory_files import read_shared_memory
from lowtide.probes.snapshot import Snapshot
from lowtide.reports.schema import Finding


class LifeProbes:
    """The probes that notice while lives run what no snapshot could show afterwards.

    Args:
        driver: gives whom to ask for the card's figures.
        card: whether a card is judged.

    Attributes:
        left_running: the processes that are findings, since an earlier life has left them.
    """

    def __init__(self, driver: Callable[[], Driver], *, card: bool) -> None:
        self._ask_driver = driver
        self._driver = driver if card else None
        self.left_running: set[int] = set()
        self.tree = ProcessTree()
        self.agents = Agents()
        self._segments = OwnSegments()
        self._orphaned_files = OrphanedFiles(self.tree, self._segments, self.agents.began)
        self.unseen = UnmeasuredProcesses(self.tree, driver)
        self._events = ProcessEvents(
            self.unseen.look, self._orphaned_files.note_sockets, starting=self._orphaned_files.before_start
        )
        self.environment = EnvironmentSetters()
        self.makers = Makers()
        self.counters = CounterReader(
            driver,
            card=card,
            orphans=self.tree.orphans,
            temporary_files=self._orphaned_files.temporary_files,
            resources=read_items,
        )

    def engine_processes(self, device: str) -> EngineProcesses:
        """What asks the other processes of an engine on a device."""
        asked = EngineProcesses(self.tree, self.agents, device, self._ask_driver)
        asked.context = context_sizes(device, self._ask_driver, lambda pid: self.unseen.is_reported([pid]))
        asked.passed_over = self.left_running
        return asked

    def start(self) -> None:
        """Begin to notice."""
        self.tree.start()
        self.agents.start()
        self._segments.start()
        self.makers.start()
        self._events.start()
        self.environment.start()
        self._orphaned_files.start()
        self._orphaned_files.mark()
        self.unseen.begin()

    def stop(self) -> None:
        """End it; legal without a start."""
        self._orphaned_files.stop()
        self._segments.stop()
        self._events.stop()
        self.environment.stop()
        self.makers.stop()
        self.agents.stop()
        self.tree.stop()

    def look(self) -> None:
        """Note what the engine's processes hold, and have in /dev/shm: one that has ended says nothing."""
        self.unseen.look(always=True)
        self._orphaned_files.look()

    def explained(self, finding: Finding, names: Collection[str]) -> Finding:
        """A finding about what a shutdown has left outside of this process, with what it holds and what ends it.

        Args:
            finding: about any resource; of another one it stays as it is.
            names: what is there and should not be, as a snapshot has it.
        """
        if finding.resource == "processes":
            pids = sorted(int(name.partition(" ")[0]) for name in names)
            self.left_running.update(pids)
            self.unseen.is_reported(pids)
            cards = {} if self._driver is None else by_process(read_card_holders(self._driver()))
            living = [pid for pid in pids if stat(pid) is not None]
            return with_running(finding, [read_running(pid, self.agents, cards.get(pid, {})) for pid in living])
        if finding.resource == "shared-memory":
            dead = read_shared_memory().dead
            return with_dead_files(finding, [file for file in dead if Path(file.path).name in names])
        return finding

    def judged(self, snapshot: Snapshot) -> Snapshot:
        """A snapshot, taken just now, with those children, segments and files that are the program's to end."""
        # Those that serve a library for the whole process are no engine's; those whose parent has ended are.
        children = {name.partition(" ")[0]: name for name in snapshot.host.children}
        children |= {str(pid): f"{pid} {name_of(pid)}" for pid in self.tree.orphans()}
        stays = exempt("processes", children)
        left = sorted(int(pid) for pid in children if pid not in stays)
        segments = {entry.name for entry in snapshot.host.shared_memory}
        remain = self._orphaned_files.shared_memory(segments) | self._segments.names
        host = dataclasses.replace(
            snapshot.host,
            children=tuple(children[str(pid)] for pid in left),
            shared_memory=tuple(
                dataclasses.replace(entry, left_here=entry.name in remain) for entry in snapshot.host.shared_memory
            ),
            temporary_files=tuple(self._orphaned_files.temporary_files()),
        )
        return dataclasses.replace(snapshot, host=host)
