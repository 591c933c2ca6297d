"""Holds what one watch follows, how strictly, and what its judgement says of a test."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Literal

import msgspec

from lowtide.leakcheck.findings.remedies import DeferredRemedies
from lowtide.leakcheck.judging.device_memory import DeviceMemory
from lowtide.leakcheck.judging.filled_caches import FilledCaches
from lowtide.leakcheck.judging.owners import Ownership
from lowtide.leakcheck.processes.other_processes import OtherProcesses
from lowtide.leakcheck.resources import read_items
from lowtide.leakcheck.resources.first_use import BlasHandles, FirstUse
from lowtide.leakcheck.resources.orphaned_files import OrphanedFiles, OwnSegments
from lowtide.leakcheck.resources.settings import EnvironmentSetters
from lowtide.probes.allocation_stacks import AllocationStacks
from lowtide.probes.device.driver import Driver, find_driver
from lowtide.probes.heap.births import Births
from lowtide.probes.host.counters import CounterReader
from lowtide.probes.host.makers import Makers
from lowtide.probes.host.memory_parts import free_at_tops
from lowtide.probes.host.process_tree import ProcessEvents, ProcessTree
from lowtide.probes.objects.listed import FROZEN_AT_STARTUP
from lowtide.reports.schema import Finding, NotMeasured


class Policy(msgspec.Struct, frozen=True):
    """How strictly to watch.

    Attributes:
        tolerance: bytes that may stay of each resource that is counted in bytes.
        settle: seconds without any movement after which waiting for threads, processes or the driver ends.
        stacks: whose memory's allocation is recorded with its stack: `auto`: that of cards, which is cheap; `all`: the
            process's own too, which takes a dispatch mode around every operation; `off`: none.
        remedies: whether to try what would give a leak back, which changes the program: `now`, with the verdict;
            `later`, when `prove` is called and nothing of the program runs any more; `never`.
        names_changes: whether what is never tried is advised, as code.
        explain: whether the holder of a tensor that stays is reported, which takes walks through the whole heap.
        card: whether cards are judged.
        warm_up: whether a card is used once before a test uses it: `now`, as soon as the watch opens; `first-use`, when
            torch initialises it; `off`.
        processes: whether agents in the program's other processes are asked what these keep.
        driver: whether the driver's figures are; not where several workers share a card, and make what nobody has open.
        growth: bytes by which an owner may grow, test after test, before that is reported at once; None: it is reported
            when the owner ends.
        warnings_filters: whether these are (not where the test runner puts them back itself).
        native: whether it is recorded which library asks a card's driver for memory.
        budget: seconds that may be spent for one test on what its holders retain; on the remedies of a session, four
            times as many.
    """

    tolerance: int = 0
    settle: float = 0.5
    stacks: Literal["auto", "all", "off"] = "auto"
    remedies: Literal["now", "later", "never"] = "later"
    names_changes: bool = True
    explain: bool = True
    card: bool = True
    warm_up: Literal["now", "first-use", "off"] = "off"
    processes: bool = True
    driver: bool = True
    growth: int | None = None
    warnings_filters: bool = True
    native: bool = False
    budget: float = math.inf


Thing = tuple[str, str, int | str]
"""What a finding is about: `storage` with device and address, or `item` with a metric's key and the item's name."""


class Verdict(msgspec.Struct, frozen=True):
    """What a test, and the owners that ended with it, left behind.

    Attributes:
        findings: the test's own.
        of_owners: those of each owner that ended, by its label.
        not_measured: what a driver does not report, and what may be a leak or what a library keeps from its first use,
            which cannot be distinguished.
        swept: whether all garbage was collected for it.
        collected: what came back only because this judgement collected, where it is worth a note.
        unproven: what is to be given to `prove` at the end, for the test and for each owner.
        things: what each of the test's findings is about, by the finding's fingerprint.
    """

    findings: tuple[Finding, ...] = ()
    of_owners: Mapping[str, tuple[Finding, ...]] = msgspec.field(default_factory=dict)
    not_measured: tuple[NotMeasured, ...] = ()
    swept: bool = False
    collected: Finding | None = None
    unproven: DeferredRemedies = msgspec.field(default_factory=DeferredRemedies)
    unproven_of_owners: Mapping[str, DeferredRemedies] = msgspec.field(default_factory=dict)
    things: Mapping[str, frozenset[Thing]] = msgspec.field(default_factory=dict)


class Watched:
    """What the parts of one watch share: who reads, and what is known of the process so far.

    Args:
        policy: how strictly is watched.
        driver: whom to ask for the driver's figures, and not to close; None: one that is found when it is needed.

    Attributes:
        makers: which code made threads, processes and descriptors.
        segments: the names that `multiprocessing.shared_memory` has made.
        environment: who set environment variables.
        tree: the descendants.
        others: what these hold.
        orphaned_files: what ended processes have left.
        ownership: who owns what.
        births: what was born.
        caches: the filled caches.
        device_memory: what is on the cards besides tensors.
        counters: what is counted.
        first_use: which libraries were used for the first time.
        handles: the BLAS library's handles.
        stacks: from where memory was allocated.
        events: processes that begin and end.
    """

    def __init__(self, policy: Policy, driver: Driver | None = None) -> None:
        self.policy = policy
        self._given = self._driver = driver
        self.makers = Makers()
        self.segments = OwnSegments(functools.partial(self.makers.note_made, "shared-memory"))
        self.first_use = FirstUse()
        self.environment = EnvironmentSetters(self.first_use.communicates)
        self.tree = ProcessTree(self.makers.processes)
        self.others = OtherProcesses(
            self.tree,
            self.ask_driver if policy.card else None,
            asks=policy.processes,
            records=policy.native and policy.card,
            clears=policy.remedies != "never",
            tolerance=policy.tolerance,
        )
        self.orphaned_files = OrphanedFiles(
            self.tree, self.segments, self.makers, self.others.agents.began, alone=policy.driver
        )
        self.births = Births()
        self.ownership = Ownership(
            self.segments,
            self.orphaned_files.shared_memory,
            self.environment,
            self.makers,
            self.orphaned_files.sockets_of,
            self.births.may_be_new,
        )
        self.caches = FilledCaches()
        self.device_memory = DeviceMemory(driver=policy.driver, native=policy.native and policy.card)
        self.counters = CounterReader(
            self.ask_driver if policy.driver else None,
            card=policy.card,
            orphans=self.tree.orphans,
            temporary_files=self.orphaned_files.temporary_files,
            warnings_filters=policy.warnings_filters,
            resources=read_items,
            free_at_tops=free_at_tops,
        )
        self.handles = BlasHandles()
        self.stacks = AllocationStacks(card=policy.card and policy.stacks != "off", cpu=policy.stacks == "all")
        self.events = ProcessEvents(self.others.look, self.orphaned_files.note_ended)

    def start(self) -> None:
        """Begin to follow all of it."""
        self.device_memory.start()
        self.counters.note_trimmed()
        self.births.start()
        self.segments.start()
        self.tree.start()
        self.others.start()
        self.makers.start()
        self.events.start()
        self.orphaned_files.start()
        self.environment.start()

    def stop(self) -> None:
        """End it; legal twice."""
        self.device_memory.stop()
        self.stacks.stop()
        self.births.stop()
        self.segments.stop()
        self.orphaned_files.stop()
        self.others.stop()
        self.tree.stop()
        self.events.stop()
        self.makers.stop()
        self.environment.stop()
        if self._driver is not None and self._driver is not self._given:
            self._driver.close()
        self._driver = self._given

    @property
    def froze_before(self) -> bool:
        """Return whether the heap was frozen before the test, or an owner that is alive has frozen it in its setup."""
        at_baseline = self.ownership.baseline.amounts.get("gc-frozen") or 0
        owners = any(owner.growth.get("gc-frozen", 0) > 0 for owner in self.ownership.live)
        return at_baseline > FROZEN_AT_STARTUP or owners

    def ask_driver(self) -> Driver:
        """Return whom to ask for the driver's figures."""
        if self._driver is None:
            self._driver = find_driver()
        return self._driver
