"""Reads this process while an engine lives in it, and notices meanwhile what no snapshot could show afterwards.

Children, segments, files, and who made what: from the first life to the last. What modules make that a life imports,
and what a library keeps from its first use, is the process's, and is left out of what is judged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lowtide.leakcheck.findings.item_findings import ItemLeak, still_changed
from lowtide.leakcheck.findings.life_findings import LeftoverTensors
from lowtide.leakcheck.findings.remedies import actions_for, try_actions
from lowtide.leakcheck.judging.exemptions import exempt
from lowtide.leakcheck.judging.fingerprints import finding_of
from lowtide.leakcheck.judging.judge import Excess
from lowtide.leakcheck.judging.ladder import (
    DRIVER_PATIENCE,
    LadderStep,
    Late,
    SettlePolicy,
    climb,
    wait_for_release,
)
from lowtide.leakcheck.judging.metrics import Metric, Reading, as_counted, reading_of, shutdown_metrics
from lowtide.leakcheck.judging.owners import Owner
from lowtide.leakcheck.judging.rules import rule_of
from lowtide.leakcheck.lives.tenant import BareContexts
from lowtide.leakcheck.processes.engine_processes import EngineProcesses
from lowtide.leakcheck.processes.tree_end import read_running, with_dead_files, with_running
from lowtide.leakcheck.resources import read_items
from lowtide.leakcheck.resources.first_use import JUDGED, LibraryItems, NewItems
from lowtide.leakcheck.resources.resource import Items, Rung
from lowtide.leakcheck.resources.settings import (
    ABSENT,
    EnvironmentSetters,
    SettingChange,
    advice,
    changes_between,
    describe_change,
)
from lowtide.leakcheck.watching.import_watch import Imported, ImportWatch
from lowtide.leakcheck.watching.watched import Policy, Watched
from lowtide.probes.device.driver import Driver
from lowtide.probes.device.driver.card_holders import read_card_holders
from lowtide.probes.host.counters import Counters, child_processes
from lowtide.probes.host.process_files import name_of, stat
from lowtide.probes.originals import threading
from lowtide.probes.processes.outside_view import by_process
from lowtide.probes.processes.shared_memory_files import read_shared_memory
from lowtide.probes.snapshot import Snapshot, take_snapshot
from lowtide.probes.stages import announced_pools
from lowtide.reports.schema import Finding, NotMeasured
from lowtide.reports.statement import Statement


@dataclass(frozen=True)
class LifeReading(Reading):
    """What a life is judged by at one moment, and the snapshot that its tables show."""

    snapshot: Snapshot = field(kw_only=True)


class LifeSettings:
    """Compares process-wide settings after a life with what they were when it began.

    Args:
        read: gives what they are, by name.
        environment: who set which environment variable; None: what is added, and not only replaced or removed, is left
            alone, as where lives follow that may need it.
    """

    def __init__(self, read: Callable[[], Mapping[str, str]], environment: EnvironmentSetters | None = None) -> None:
        self._read = read
        self._environment = environment
        self._before: Mapping[str, str] = {}
        # What earlier lives left, with what was there before the first that did: a later life begins with it.
        self._left: dict[str, SettingChange] = {}

    def mark(self) -> None:
        """Note what they are when a life begins."""
        self._before = self._read()

    def adopt(self, owner: Owner) -> None:
        """Take what the import of a module has set for what lives must leave as it is."""
        known = {**self._before, **owner.settings}
        self._before = {name: text for name, text in known.items() if text != ABSENT}

    def findings(self, stage: str, *, remedies: bool) -> list[Finding]:
        """Report each that is not what it was at the mark.

        Args:
            stage: after which this is.
            remedies: whether to put each back, to show that this ends it; then also those that earlier lives left.
        """
        changes = {
            change.name: change
            for change in changes_between(self._before, self._read())
            if self._is_judged(change) and not self._puts_back(change)
        }
        if remedies:
            changes |= {first.name: first for first in self._left.values() if still_changed((first,))}
        for name, change in changes.items():
            self._left.setdefault(name, change)
        if remedies:
            self._left.clear()
        return [_changed(change, stage, remedies=remedies) for change in changes.values()]

    def _puts_back(self, change: SettingChange) -> bool:
        """Return whether a change undoes that of an earlier life, and so is none."""
        return change.name in self._left and self._left[change.name].before == change.now

    def _is_judged(self, change: SettingChange) -> bool:
        if self._environment is None:
            return change.before != ABSENT or change.is_replaced
        return not self._environment.is_own_of_library(change)


def _changed(change: SettingChange, stage: str, *, remedies: bool) -> Finding:
    rule, cause = rule_of("globals"), rule_of("globals").life
    assert cause is not None
    finding = finding_of(
        rule.resource,
        cause=cause.cause,
        device="",
        stage=stage,
        suspects=(change.setting, cause.cause),
        statement=Statement(unit=rule.unit, amount=describe_change(change), came=", and not restored"),
        holder=change.setting,
        advice=None if remedies else advice((change,)),
    )
    if not remedies:
        return finding
    leak = ItemLeak(finding, rule.key, {change.setting: 1}, 0, changes=(change,))

    def left() -> Mapping[str, int]:
        return {each.setting: 1 for each in still_changed((change,))}

    return try_actions(leak, actions_for(leak, patience=0, may_unfreeze=False), left, lambda: 0)


class LivedProcess:
    """This process around the lives of one run: its settings, its other processes, and what imports take of it.

    Args:
        device: "cpu" or "cuda:N", where engines keep their memory.
        watched: what is followed of it; started and stopped with this.
        importing: hears of each module that a life is about to import, with whom what it makes belongs to.
        imported: hears when that is done.
        environment: who set which environment variable, where what is added is judged.
    """

    def __init__(
        self,
        device: str,
        watched: Watched,
        importing: Callable[[Owner], None],
        imported: Callable[[], None],
        environment: EnvironmentSetters | None = None,
    ) -> None:
        self.device = device
        self.cards = () if device == "cpu" else (int(device.partition(":")[2] or 0),)
        self.watched = watched
        self.counters = watched.counters
        self.settings = LifeSettings(lambda: self.counters.read().settings, environment)
        self.processes = EngineProcesses(watched.tree, watched.others.agents, device, watched.ask_driver)
        self.imports = ImportWatch(self._begin_import, self._end_import)
        self.imported = Imported(self.counters.read)
        self._importing, self._after_import = importing, imported

    def start(self) -> None:
        """Begin to notice."""
        # First: what it sets in the environment is no life's.
        self.watched.start()
        self.watched.others.agents.start()
        self.imports.install()
        self.imports.active = True

    def stop(self) -> None:
        """End it; legal twice, and without a start."""
        self.imports.remove()
        self.watched.stop()

    def driver_bytes(self) -> int:
        """Return what the driver counts for this process; 0 where it is not asked or reports nothing."""
        return sum(self.watched.ask_driver().read(index).process_bytes or 0 for index in self.cards)

    def _begin_import(self, owner: Owner) -> None:
        """Count what a module makes and changes when a life imports it as the process's own, as in tests."""
        self._importing(owner)
        self.imported.begin(owner)

    def _end_import(self) -> None:
        self.settings.adopt(self.imported.end())
        self._after_import()
        # A library may have come with it that binds sockets in C.
        self.watched.makers.start()


class LifeReader(LivedProcess):
    """Reads before, between and after the lives of one run.

    Attributes:
        leftovers: follows the tensors.
        left_running: the processes that are findings, since an earlier life has left them.
        used_before: by resource, the lives that left some of what libraries had from their first use and that is more
            since.
        once_so_far: what to say of a first use as long as no life has followed.
    """

    def __init__(self, device: str, driver: Driver) -> None:
        watched = Watched(Policy(processes=False, stacks="off" if device == "cpu" else "auto"), driver)
        self.leftovers = LeftoverTensors(watched.births, watched.stacks)
        super().__init__(device, watched, self.leftovers.importing, self.leftovers.imported, watched.environment)
        self._driver = driver
        self.left_running: set[int] = set()
        self.makers, self.unseen = watched.makers, watched.others.unmeasured
        if self.cards:
            contexts = BareContexts(watched.ask_driver, ended=lambda pid: self.unseen.is_reported([pid]))
            self.processes.context = contexts.size
        self.processes.passed_over = self.left_running
        self._library_items = LibraryItems(self.makers)
        self._at_first: Mapping[str, Items] = {}
        # By resource, what libraries have from their first use, with the life.
        self._first_use: dict[str, dict[str, int]] = {}
        self.used_before: dict[str, set[int]] = {}
        self.once_so_far: tuple[NotMeasured, ...] = ()

    def start(self) -> None:
        """Begin to notice."""
        self.leftovers.open()
        super().start()
        self.watched.orphaned_files.mark()
        self.unseen.begin()

    def look(self) -> None:
        """Note what the engine's processes hold, and have in /dev/shm: one that has ended says nothing."""
        # A library may have come in another thread that binds sockets in C.
        self.makers.start()
        self.unseen.look(always=True)
        self.watched.orphaned_files.look()

    def snapshot(self, label: str) -> Snapshot:
        """Take a snapshot, with those children, segments and files alone that are the program's to end."""
        snapshot = take_snapshot(label, driver=self._driver, devices=self.cards)
        # Those that serve a library for the whole process are no engine's; those whose parent has ended are.
        children = {name.partition(" ")[0]: name for name in snapshot.host.children}
        children |= {str(pid): f"{pid} {name_of(pid)}" for pid in self.watched.tree.orphans()}
        stays = exempt("processes", children)
        left = sorted(int(pid) for pid in children if pid not in stays)
        segments = {entry.name for entry in snapshot.host.shared_memory}
        remain = self.watched.orphaned_files.shared_memory(segments) | self.watched.segments.names
        host = dataclasses.replace(
            snapshot.host,
            children=tuple(children[str(pid)] for pid in left),
            shared_memory=tuple(
                dataclasses.replace(entry, left_here=entry.name in remain) for entry in snapshot.host.shared_memory
            ),
            temporary_files=tuple(self.watched.orphaned_files.temporary_files()),
        )
        return dataclasses.replace(snapshot, host=host)

    def read(self, label: str) -> LifeReading:
        """Read what a life is judged by, less what modules took for themselves when a life imported them."""
        snapshot = self.snapshot(label)
        found = reading_of(snapshot, self.device)
        amounts = dict(found.amounts)
        of_imports = self.leftovers.imported_bytes()
        # Tensors are counted by themselves.
        host = max(0, self.imported.growth("host-memory") - of_imports.get("cpu", 0))
        driver = f"driver {self.device}"
        taken = {f"tensors {device}": size for device, size in of_imports.items()}
        taken |= {"host-memory": host, driver: self.imported.growth(driver)}
        for key, size in taken.items():
            if (level := amounts.get(key)) is not None:
                amounts[key] = level - size
        return LifeReading({**found.items, **self._listed()}, amounts, snapshot=snapshot)

    def _listed(self) -> dict[str, Items]:
        """Read what no snapshot has, without what is new since the first reading and there to stay."""
        now = read_items()
        self._at_first = self._at_first or now
        new = {key: items.keys() - self._at_first[key].keys() for key, items in now.items()}
        stays = {key: exempt(key, names) for key, names in new.items() if names}
        return {
            key: {name: size for name, size in items.items() if name not in stays.get(key, ())}
            for key, items in now.items()
        }

    def read_after_shutdown(self) -> LifeReading:
        """Read when a life is over."""
        return self.read("after shutdown")

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Return all that is judged, without what libraries have from their first use and what imports left."""
        return tuple(self._excusing(self._first_use))

    def _excusing(self, first_use: Mapping[str, Collection[str]]) -> Iterator[Metric]:
        """Yield all that is judged, without what imports left and these items of each resource."""
        for metric in shutdown_metrics(self.device):
            excused = {*self.imported.names(metric.resource), *first_use.get(metric.resource, ())}
            yield dataclasses.replace(metric, excused=excused) if metric.is_named else metric

    def note_first_use(self, cycle: int, baseline: Reading, now: LifeReading) -> None:
        """Tell apart what a library made and keeps: it is a leak once a later life makes more of it."""
        new: dict[str, dict[str, int]] = {}
        there: dict[str, dict[str, int]] = {}
        for metric in self._excusing({}):
            key: str = metric.resource
            if key in JUDGED and metric.is_named:
                new[key] = {as_counted(key, name): size for name, size in metric.new_items(baseline, now).items()}
                there[key] = {as_counted(key, name): size for name, size in metric.items(now).items()}
        tensors = now.snapshot.tensors.on("cpu").ranges
        found = self._library_items.sort(NewItems(new, tensors), Counters(there, {}, {}), f"cycle {cycle}")
        for key in JUDGED:
            known = self._first_use.setdefault(key, {})
            for name in found.excused.get(key, ()):
                known.setdefault(name, cycle)
            for name in {name for names in found.earlier.get(key, {}).values() for name in names if name in known}:
                self.used_before.setdefault(key, set()).add(known.pop(name))
        self.once_so_far = found.listed

    def climb(
        self,
        missing: Callable[[Reading], Sequence[Excess]],
        rungs: Sequence[Rung],
        climbed: Sequence[LadderStep[LifeReading]] = (),
    ) -> list[LadderStep[LifeReading]]:
        """Climb some rungs after some steps as long as something is missing, with a driver's patience on a card."""

        def waiting(now: Reading) -> list[int | None]:
            return [item.above for item in missing(now) if item.metric.settles]

        return climb(
            self.read_after_shutdown,
            lambda now: not missing(now),
            still_waiting=lambda now: bool(waiting(now)),
            moved=lambda then, now: waiting(then) != waiting(now),
            rungs=rungs,
            climbed=climbed,
            policy=DRIVER_PATIENCE if self.cards else SettlePolicy(),
            peek=lambda: (
                self.driver_bytes(),
                threading.active_count(),
                len(child_processes()),
                self.watched.tree.orphans(),
            ),
        )

    def wait_for_driver(self, before: Snapshot) -> Late | None:
        """Wait until the driver counts as much less as the arenas dropped since `before`, or does not move any more."""
        held = before.driver_bytes(self.device) if self.cards else None
        if held is None:
            return None
        arenas = [pool for pool in announced_pools() if pool.kind == "arena" and pool.device == self.device]
        dropped = before.arena_mapped(device=self.device) - sum(pool.mapped for pool in arenas)
        return wait_for_release(self.driver_bytes, held, dropped, DRIVER_PATIENCE)

    def explained(self, finding: Finding, names: Collection[str]) -> Finding:
        """Complete a finding about what a shutdown left outside of this process by what it holds and what ends it.

        Args:
            finding: about any resource; of another one it stays as it is.
            names: what is there and should not be, as a snapshot has it.
        """
        if finding.resource == "processes":
            pids = sorted(int(name.partition(" ")[0]) for name in names)
            self.left_running.update(pids)
            self.unseen.is_reported(pids)
            cards = by_process(read_card_holders(self._driver)) if self.cards else {}
            living = [pid for pid in pids if stat(pid) is not None]
            return with_running(
                finding, [read_running(pid, self.watched.others.agents, cards.get(pid, {})) for pid in living]
            )
        if finding.resource == "shared-memory":
            dead = read_shared_memory().dead
            return with_dead_files(finding, [file for file in dead if Path(file.path).name in names])
        return finding
