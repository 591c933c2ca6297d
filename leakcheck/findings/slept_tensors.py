"""What a sleep gives back in this process, and what a wake makes beside what the sleep has kept.

A sleep is compared with what was there when it began, on any device: an engine that frees nothing, or wakes with more
than it had, holds its memory twice while another engine counts on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

from lowtide.leakcheck.findings.storage_holders import Context
from lowtide.leakcheck.findings.storage_watch import Collected
from lowtide.leakcheck.findings.tensor_findings import leaks_of
from lowtide.leakcheck.judging.fingerprints import fingerprint
from lowtide.leakcheck.judging.storages import HeldStorage, Key, tensors_over, within
from lowtide.probes.memory.tensors import StorageReading, survey_storages
from lowtide.probes.objects.listed import Census, all_objects, collector_paused
from lowtide.probes.originals import gc
from lowtide.probes.stages import announced_pools
from lowtide.reports.schema import Finding, NotMeasured
from lowtide.reports.sizes import format_bytes
from lowtide.reports.statement import reworded

KEPT_PART = 0.5
"""The part of what an engine held at work from which on it has not slept."""

LEAST = 1 << 20
"""Bytes at work below which nothing is an engine's, and by which a wake may leave more: it may fill what is filled
once."""

_Storages = dict[Key, StorageReading]


class SleptTensors:
    """Follows the storages of this process through sleeps and wakes.

    What is made between them, as by the training that has the card meanwhile, is not compared.

    Args:
        kind: of the engine's device, `cpu` or `cuda`; empty: of cards where any holds something when a sleep begins.
        others: gives the storages that are none of the engine's, when a sleep begins.
        beside_arenas: whether an engine that announces arenas is looked at, too: its pages tell most, and a reading
            takes as long as going through the heap.
    """

    def __init__(
        self, kind: str = "", others: Callable[[], Collection[Key]] = tuple, *, beside_arenas: bool = True
    ) -> None:
        self._beside_arenas = beside_arenas
        self._wanted = kind
        self._ask_others = others
        self._others: Collection[Key] = ()
        self.kind = kind
        self._at_work = 0
        self._is_in = False
        self._before: _Storages = {}
        self._begun: _Storages = {}
        self._now: _Storages = {}
        # Of what was there when the sleep began, what has been there ever since.
        self._kept: set[Key] = set()
        # What sleeps and wakes have made since.
        self._made: set[Key] = set()

    def begin(self, stage: str) -> None:
        """Note what is there when a stage begins; nothing is read at any but sleeps, and wakes from them."""
        self.end()
        sleeps = stage.startswith("sleep")
        if sleeps and not self._beside_arenas and any(pool.kind == "arena" for pool in announced_pools()):
            self._at_work, self._before, self._kept, self._made, sleeps = 0, {}, set(), set(), False
        self._is_in = sleeps or (stage.startswith("wake") and bool(self._at_work))
        if sleeps:
            storages, self._others = _outside_pools(), self._ask_others()
            self.kind = self._wanted or ("cuda" if any(device.startswith("cuda") for device, _ in storages) else "cpu")
            self._before = self._now = self._of_engine(storages)
            self._kept, self._made = set(self._before), set()
            self._at_work = _bytes_of(self._before) + self._in_arenas()
        elif self._is_in:
            self._look()
        self._begun = self._now

    def end(self) -> None:
        """Note what is there when that stage has ended, or has failed; legal again."""
        if self._is_in:
            self._look()
            self._made |= self._now.keys() - _unchanged(self._begun, self._now)
            self._is_in = False

    def only_collected(self, stage: str) -> list[Finding]:
        """Find what was there when the sleep began and comes back only when Python's collector runs.

        Args:
            stage: the sleep that ends.
        """
        self.end()
        if sum(self._before[key].bytes for key in self._kept) < LEAST:
            return []
        collected = Collected.before(tensors_over(self._kept), LEAST)
        self._collect()
        finding = None if collected is None else collected.finding(stage, came=f", at the end of {stage}")
        return [] if finding is None or finding.bytes < LEAST else [finding]

    def kept_asleep(self) -> tuple[int, int] | None:
        """Return the bytes held when the sleep began, and those of them that stay; None where most came back."""
        self.end()
        if self._at_work < LEAST or self._stays() <= self._at_work * KEPT_PART:
            return None
        self._collect()
        return (self._at_work, self._stays()) if self._stays() > self._at_work * KEPT_PART else None

    def explain_kept(self, stage: str, context: Context) -> list[Finding]:
        """Say who holds what was there when the sleep began, and is there still."""
        return _explained({key: self._before[key] for key in self._kept}, stage, context)

    def more_awake(self, stage: str, context: Callable[[], Context]) -> list[Finding]:
        """Find what there is more after a wake than when the sleep began, and who holds it.

        Args:
            stage: the wake that ends.
            context: gives what is known around it, where something is found.
        """
        self.end()
        if self._excess() < LEAST:
            return []
        self._collect()
        excess = self._excess()
        if excess < LEAST:
            return []
        kept, made = self._not_replaced()
        culprits = kept or made
        found = _explained(culprits, stage, context())
        found.sort(key=lambda finding: (-finding.bytes, finding.holder or ""))
        largest = found[0]
        more = f"there are {format_bytes(excess)} more on {largest.device} after {stage} than before the sleep"
        holder = " and ".join(dict.fromkeys(each.holder or "what has no name" for each in found[:2]))
        how = "kept what the wake has made again" if kept else "got more than the sleep had given up"
        suspects = ("more awake", "kept" if kept else "made", largest.fingerprint)
        return [
            reworded(
                largest,
                f"{more}: {holder} {how}",
                bytes=excess,
                count=len(culprits),
                fingerprint=fingerprint(resource="tensors", device=self.kind, stage=stage, suspects=suspects),
                former_fingerprint="",
                advice=f"let go of {holder} {'before the engine sleeps' if kept else f'in {stage}'}",
            )
        ]

    def _look(self) -> None:
        self._now = self._of_engine(_outside_pools())
        self._kept &= _unchanged(self._before, self._now)
        self._made &= self._now.keys()

    def _collect(self) -> None:
        """Look again without garbage, which looks like what is kept."""
        gc.collect()
        self._look()

    def _of_engine(self, storages: _Storages) -> _Storages:
        return {
            key: each
            for key, each in storages.items()
            if key[0].partition(":")[0] == self.kind and key not in self._others
        }

    def _in_arenas(self) -> int:
        return sum(
            pool.mapped
            for pool in announced_pools()
            if pool.kind == "arena" and pool.device.partition(":")[0] == self.kind
        )

    def _stays(self) -> int:
        return _bytes_of({key: self._before[key] for key in self._kept}) + self._in_arenas()

    def _excess(self) -> int:
        made = sum(self._now[key].bytes for key in self._made)
        return made - sum(each.bytes for key, each in self._before.items() if key not in self._kept)

    def _not_replaced(self) -> tuple[_Storages, _Storages]:
        """Return what was kept though its like was made again, and what was made more often than it had gone."""
        gone = Counter(each.bytes for key, each in self._before.items() if key not in self._kept)
        sizes = +(Counter(self._now[key].bytes for key in self._made) - gone)
        kept = {key: self._before[key] for key in self._kept if self._before[key].bytes in sizes}
        return kept, {key: self._now[key] for key in self._made if self._now[key].bytes in sizes}


def not_judged(stage: str, sizes: tuple[int, int], kind: str, where: str = "") -> NotMeasured:
    """Say that a sleep has given back little, where nobody has said what it should.

    Args:
        stage: the sleep.
        sizes: bytes held when it began, and those of them that stay.
        kind: of the device.
        where: in which other process; empty: in this one.
    """
    held, stays = sizes
    given = f"{format_bytes(held - stays)} of {format_bytes(held)} came back"
    return NotMeasured(
        what=f"what {stage} gives back on {kind}{f' in {where}' if where else ''}: {given}",
        why="nobody says how much it should be, as `emptying_levels` of a target does",
    )


def _outside_pools() -> _Storages:
    """Read the storages that lie in no announced pool: the pages of a pool may be gone."""
    with collector_paused():
        survey = survey_storages(Census(all_objects()))
    is_pooled = within(announced_pools())
    return {(each.device, each.address): each for each in survey.storages if each.bytes and not is_pooled(each.address)}


def _unchanged(then: _Storages, now: _Storages) -> set[Key]:
    """Return the storages that are in both readings with one size: an address may be another's by now."""
    return {key for key, each in then.items() if key in now and now[key].bytes == each.bytes}


def _bytes_of(storages: _Storages) -> int:
    return sum(each.bytes for each in storages.values())


def _explained(storages: _Storages, stage: str, context: Context) -> list[Finding]:
    return [leak.finding for leak in leaks_of([HeldStorage.of(each, stage) for each in storages.values()], context)]
