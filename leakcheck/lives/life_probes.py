"""What watches a run from its first life to its last: children, files, descriptors, imports; and its snapshots."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from lowtide.leakcheck.baseline.orphaned_files import OrphanedFiles
from lowtide.leakcheck.baseline.shared_memory import OwnSegments
from lowtide.leakcheck.judging.exemptions import exempt
from lowtide.leakcheck.processes.unmeasured_processes import UnmeasuredProcesses
from lowtide.leakcheck.settings.environment_setters import EnvironmentSetters
from lowtide.probes.device.driver import Driver
from lowtide.probes.host.counters import CounterReader
from lowtide.probes.host.makers import Makers
from lowtide.probes.host.process_events import ProcessEvents
from lowtide.probes.host.process_tree import ProcessTree, name_of
from lowtide.probes.processes.agents import Agents
from lowtide.probes.snapshot import Snapshot


class LifeProbes:
    """The probes that notice while lives run what no snapshot could show afterwards.

    Args:
        driver: gives whom to ask for the card's figures.
        card: whether a card is judged.
    """

    def __init__(self, driver: Callable[[], Driver], *, card: bool) -> None:
        self.tree = ProcessTree()
        self.agents = Agents()
        self._segments = OwnSegments()
        self._remains = OrphanedFiles(self.tree, self._segments, self.agents.began)
        self.unseen = UnmeasuredProcesses(self.tree, driver)
        self._events = ProcessEvents(self.unseen.look)
        self.environment = EnvironmentSetters()
        self.makers = Makers()
        self.counters = CounterReader(
            driver, card=card, orphans=self.tree.orphans, temporary_files=self._remains.temporary_files
        )

    def start(self) -> None:
        """Begin to notice."""
        self.tree.start()
        self.agents.start()
        self._segments.start()
        self.makers.start()
        self._events.start()
        self.environment.start()
        self._remains.start()
        self._remains.mark()
        self.unseen.begin()

    def stop(self) -> None:
        """End it; legal without a start."""
        self._remains.stop()
        self._segments.stop()
        self._events.stop()
        self.environment.stop()
        self.makers.stop()
        self.agents.stop()
        self.tree.stop()

    def judged(self, snapshot: Snapshot) -> Snapshot:
        """A snapshot, taken just now, with those children, segments and files that are the program's to end."""
        # Those that serve a library for the whole process are no engine's; those whose parent has ended are.
        children = {name.partition(" ")[0]: name for name in snapshot.host.children}
        children |= {str(pid): f"{pid} {name_of(pid)}" for pid in self.tree.orphans()}
        stays = exempt("processes", children)
        left = sorted(int(pid) for pid in children if pid not in stays)
        segments = {entry.name for entry in snapshot.host.shared_memory}
        remain = self._remains.shared_memory(segments) | self._segments.names
        host = dataclasses.replace(
            snapshot.host,
            children=tuple(children[str(pid)] for pid in left),
            shared_memory=tuple(
                dataclasses.replace(entry, left_here=entry.name in remain) for entry in snapshot.host.shared_memory
            ),
            temporary_files=tuple(self._remains.temporary_files()),
        )
        return dataclasses.replace(snapshot, host=host)
