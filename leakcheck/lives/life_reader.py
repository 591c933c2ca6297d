"""Reads this process while an engine lives in it, and notices meanwhile what no snapshot could show afterwards.

Children, segments, files, and who made what: from the first life to the last. What modules make that a life imports,
and what a library keeps from its first use, is the process's, and is left out of what is judged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from lowtide.leakcheck.findings.item_findings import ItemLeak, still_changed
from lowtide.leakcheck.findings.life_findings import LeftoverTensors
from lowtide.leakcheck.findings.remedies import actions_for, try_actions
from lowtide.leakcheck.judging.device_memory import MEMORY_POOL
from lowtide.leakcheck.judging.exemptions import exempt
from lowtide.leakcheck.judging.fingerprints import finding_of
from lowtide.leakcheck.judging.judge import Excess
from lowtide.leakcheck.judging.ladder import DRIVER_PATIENCE, LadderStep, SettlePolicy, climb, wait_for_release
from lowtide.leakcheck.judging.metrics import Metric, Reading, as_counted, reading_of, shutdown_metrics
from lowtide.leakcheck.judging.owners import Owner
from lowtide.leakcheck.judging.rules import rule_of
from lowtide.leakcheck.lives.tenant import bare_context
from lowtide.leakcheck.processes.engine_processes import EngineProcesses
from lowtide.leakcheck.processes.tree_end import read_running, with_dead_files, with_running
from lowtide.leakcheck.resources import LISTED
from lowtide.leakcheck.resources.first_use import JUDGED, LibraryItems, NewItems
from lowtide.leakcheck.resources.resource import Items, Rung
from lowtide.leakcheck.resources.settings import SettingChange, advice, describe_change
from lowtide.leakcheck.watching.import_watch import ImportWatch, ThreadImports
from lowtide.leakcheck.watching.watched import Policy, Watched
from lowtide.probes.device.allocations import OutsideTorch
from lowtide.probes.device.driver import Driver
from lowtide.probes.device.driver.card_holders import read_card_holders
from lowtide.probes.host.counters import Counters, child_processes
from lowtide.probes.host.process_files import name_of, stat
from lowtide.probes.originals import threading
from lowtide.probes.processes.outside_view import by_process
from lowtide.probes.processes.shared_memory_files import read_shared_memory
from lowtide.probes.snapshot import Snapshot, take_snapshot
from lowtide.probes.stages import announced_pools
from lowtide.reports.schema import Finding, NotMeasured, Return
from lowtide.reports.statement import Statement

_NAMED = ("threads", "file-descriptors", "shared-memory", "temporary-files")
_LISTED = tuple(resource.rule.key for resource in LISTED)


class LifeReading(Reading, frozen=True, kw_only=True):
    """What a life is judged by at one moment, with the counters; and the snapshot that its tables show."""

    snapshot: Snapshot
    counters: Counters


def setting_left(change: SettingChange, *, remedies: bool) -> Finding:
    """Report a process-wide setting that lives have changed.

    Args:
        change: since the first of them began.
        remedies: whether to put it back, to show that this ends it.
    """
    rule, cause = rule_of("globals"), rule_of("globals").life
    assert cause is not None
    finding = finding_of(
        rule.resource,
        cause=cause.cause,
        device="",
        stage="shutdown",
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
    """

    def __init__(
        self, device: str, watched: Watched, importing: Callable[[Owner], None], imported: Callable[[], None]
    ) -> None:
        self.device = device
        self.cards = () if device == "cpu" else (int(device.partition(":")[2] or 0),)
        self.watched = watched
        self.counters = watched.counters
        self.processes = EngineProcesses(watched.tree, watched.others.agents, device, watched.ask_driver)
        self.imports = ImportWatch(importing, imported, ThreadImports(watched.ownership))

    def start(self) -> None:
        """Begin to notice."""
        # First: what it sets in the environment is no life's.
        self.watched.start()
        self.watched.others.agents.start()
        # What else has a name is compared life by life.
        now = self.counters.read()
        self.watched.ownership.begin("create", replace(now, items={key: now.items[key] for key in _LISTED}))
        self.imports.install()
        self.imports.active = True

    def stop(self) -> None:
        """End it; legal twice, and without a start."""
        self.imports.remove()
        self.watched.stop()

    def driver_bytes(self) -> int:
        """Return what the driver counts for this process; 0 where it is not asked or reports nothing."""
        return sum(self.watched.ask_driver().read(index).process_bytes or 0 for index in self.cards)


class LifeReader(LivedProcess):
    """Reads before, between and after the lives of one run.

    Args:
        device: "cpu" or "cuda:N", where engines keep their memory.
        driver: whom to ask for the driver's figures.
        native: whether it is recorded which library asks the driver for memory.

    Attributes:
        leftovers: follows the tensors.
        left_running: the processes that are findings, since an earlier life has left them.
        used_before: by resource, the lives that left some of what libraries had from their first use and that is more
            since.
        once_so_far: what to say of a first use as long as no life has followed.
    """

    def __init__(self, device: str, driver: Driver, *, native: bool = False) -> None:
        card = device != "cpu"
        policy = Policy(processes=False, stacks="auto" if card else "off", native=native and card)
        watched = Watched(policy, driver)
        self.leftovers = LeftoverTensors(watched.births, watched.stacks)
        super().__init__(device, watched, self._importing, self._imported)
        self._driver = driver
        self.left_running: set[int] = set()
        self.makers, self.unseen = watched.makers, watched.others.unmeasured
        if self.cards:
            self.processes.context = self._bare_context
        self.processes.passed_over = self.left_running
        self._library_items = LibraryItems(self.makers)
        # By resource, what libraries have from their first use, with the life.
        self._first_use: dict[str, dict[str, int]] = {}
        self.used_before: dict[str, set[int]] = {}
        self.once_so_far: tuple[NotMeasured, ...] = ()
        # By card, as far as it was asked for; no `lru_cache`, which the ladder would clear.
        self._contexts: dict[str, int | None] = {}
        self._outside_torch = OutsideTorch()

    def _bare_context(self, device: str) -> int | None:
        if device not in self._contexts:
            ended = self.unseen.is_reported
            self._contexts[device] = bare_context(device, self.watched.ask_driver, lambda pid: ended([pid]))
        return self._contexts[device]

    def start(self) -> None:
        """Begin to notice."""
        self.leftovers.open()
        super().start()
        self.watched.orphaned_files.mark()
        self.unseen.begin()

    def _importing(self, owner: Owner) -> None:
        """Count what a module makes and changes when a life imports it as the process's own, as in tests."""
        self.leftovers.importing(owner)
        self.watched.ownership.enter(owner, self.counters.read())

    def _imported(self) -> None:
        self.watched.ownership.leave(self.counters.read())
        self.leftovers.imported()
        # A library may have come with it that binds sockets in C.
        self.makers.start()

    def changed_settings(self) -> list[SettingChange]:
        """Return the process-wide settings that are not what they were before the first life."""
        return self.watched.ownership.left(self.counters.read(), None, ())

    def look(self) -> None:
        """Note what the engine's processes hold, and have in /dev/shm: one that has ended says nothing."""
        # A library may have come in another thread that binds sockets in C.
        self.makers.start()
        self.unseen.look(always=True)
        self.watched.orphaned_files.look()

    def snapshot(self) -> Snapshot:
        """Take a snapshot, with those children alone that are the program's to end."""
        snapshot = take_snapshot(driver=self._driver, devices=self.cards, outside_torch=self._outside_torch)
        # Those that serve a library for the whole process are no engine's; those whose parent has ended are.
        children = {name.partition(" ")[0]: name for name in snapshot.host.children}
        children |= {str(pid): f"{pid} {name_of(pid)}" for pid in self.watched.tree.orphans()}
        stays = exempt("processes", children)
        left = sorted(int(pid) for pid in children if pid not in stays)
        host = replace(snapshot.host, children=tuple(children[str(pid)] for pid in left))
        return replace(snapshot, host=host)

    def read(self) -> LifeReading:
        """Read what a life is judged by, less what modules took for themselves when a life imported them."""
        snapshot = self.snapshot()
        found = reading_of(snapshot, self.device)
        amounts = dict(found.amounts)
        of_imports = self.leftovers.imported_bytes()
        # Tensors are counted by themselves.
        growth = self.watched.ownership.growth
        host = max(0, growth("host-memory") - of_imports.get("cpu", 0))
        driver = f"driver {self.device}"
        taken = {f"tensors {device}": size for device, size in of_imports.items()}
        taken |= {"host-memory": host, driver: growth(driver)}
        for key, size in taken.items():
            if (level := amounts.get(key)) is not None:
                amounts[key] = level - size
        now = self.counters.read()
        pool = f"{MEMORY_POOL}{self.device}"
        if (idle := now.amounts.get(pool)) is not None:
            # What the driver counts has it, too.
            amounts[pool], level = idle, amounts.get(driver)
            amounts[driver] = None if level is None else level - idle
        return LifeReading({**found.items, **self._named(snapshot, now)}, amounts, snapshot=snapshot, counters=now)

    def _named(self, snapshot: Snapshot, now: Counters) -> dict[str, Items]:
        """Return what has a name and is not there to stay, without what imports made."""
        ownership = self.watched.ownership
        named = {key: ownership.new_items(key, now, None, ()) for key in (*_NAMED, *_LISTED)}
        of_imports = {pid for owner in ownership.live for pid in owner.items.get("processes", ())}
        # With those of each child.
        children = (name for name in snapshot.host.children if as_counted("processes", name) not in of_imports)
        return {**named, "processes": dict.fromkeys(children, 1)}

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Return all that is judged, without what libraries have from their first use."""
        return tuple(
            replace(metric, excused=self._first_use.get(metric.resource, ()))
            for metric in shutdown_metrics(self.device)
        )

    def note_first_use(self, cycle: int, baseline: Reading, now: LifeReading) -> None:
        """Tell apart what a library made and keeps: it is a leak once a later life makes more of it."""
        new: dict[str, Items] = {}
        for key in JUDGED:
            named = now.items[key]
            new[key] = {as_counted(key, name): named[name] for name in named.keys() - baseline.items[key].keys()}
        tensors = now.snapshot.tensors.on("cpu")
        found = self._library_items.sort(NewItems(new, tensors), now.counters, f"cycle {cycle}")
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
            self.read,
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

    def wait_for_driver(self, stage: str, cycle: int, before: Snapshot) -> list[Return]:
        """Wait until the driver counts as much less as the arenas dropped since `before`, or does not move any more.

        Return what of that came late, in this stage of this life.
        """
        held = before.driver_bytes(self.device) if self.cards else None
        if held is None:
            return []
        arenas = [pool for pool in announced_pools() if pool.kind == "arena" and pool.device == self.device]
        dropped = before.arena_mapped(device=self.device) - sum(pool.mapped for pool in arenas)
        late = wait_for_release(self.driver_bytes, held, dropped, DRIVER_PATIENCE)
        if late is None:
            return []
        came = Return(
            resource="driver",
            device=self.device,
            stage=stage,
            cycle=cycle,
            bytes=late.bytes,
            rung=Rung.SETTLE.value,
            seconds=late.seconds,
        )
        return [came]

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
