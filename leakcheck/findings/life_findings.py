"""What an engine keeps in tensors: who holds what its lives left, whether it grows from life to life; what sleeps keep.

A sleep is compared with what was there when it began, on any device: an engine that frees nothing, or wakes with more
than it had, holds its memory twice while another engine counts on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

import msgspec
from msgspec.structs import replace

from lowtide.leakcheck.findings.out_of_memory import OutOfMemoryWatch
from lowtide.leakcheck.findings.remedies import prove
from lowtide.leakcheck.findings.storage_holders import (
    Context,
    behind_frozen_holders,
    explain_storages,
    marked_as_frozen,
)
from lowtide.leakcheck.findings.storage_watch import Collected
from lowtide.leakcheck.findings.tensor_findings import TensorLeak, leaks_at_rungs, leaks_of
from lowtide.leakcheck.judging.fingerprints import fingerprint
from lowtide.leakcheck.judging.owners import Claims, Owner
from lowtide.leakcheck.judging.storages import (
    HeldStorage,
    Key,
    inside,
    is_tensor,
    read_heap,
    tensors_over,
    thaw,
    within,
)
from lowtide.leakcheck.resources.resource import Rung
from lowtide.probes.allocation_stacks import AllocationStacks
from lowtide.probes.device.allocations import asleep_on
from lowtide.probes.heap.births import Births
from lowtide.probes.heap.reach import reach
from lowtide.probes.memory.tensors import StorageReading, keys_of_each, survey_storages
from lowtide.probes.objects.listed import any_frozen, collector_paused, running_locals
from lowtide.probes.originals import gc
from lowtide.probes.stages import PoolReading, announced_pools
from lowtide.reports.schema import Finding, NotMeasured
from lowtide.reports.sizes import format_bytes
from lowtide.reports.statement import reworded

ENGINE = "engine"
"""How paths name the engine that they begin at."""

_IMPORT = "by the "
"""How the births of an import are called, with its owner's name after it."""


class _Turn(msgspec.Struct, frozen=True):
    """One time that a stage has begun, in any life, which are counted from 1; and how often it had begun by then."""

    cycle: int
    stage: str
    times: int


class LeftoverTensors:
    """Follows tensors through several lives, by identity.

    Args:
        births: tells what was born when.
        stacks: tells where memory was allocated.

    Attributes:
        out_of_memory: says who held what when memory was not enough.
    """

    def __init__(self, births: Births, stacks: AllocationStacks) -> None:
        self._births = births
        # By its number less 1, which the births of a turn bear.
        self._turns: list[_Turn] = []
        self._stacks = stacks
        self.out_of_memory = OutOfMemoryWatch(self._births, self._stacks.stacks_at, "before the first life")
        self._seen: frozenset[Key] = frozenset()
        # What was left of the last life, at each rung that was tried.
        self._rows: dict[Rung, tuple[HeldStorage, ...]] = {}
        self._was_frozen = False
        self._behind_frozen: frozenset[Key] = frozenset()
        self._earlier: dict[str, Finding] = {}

    @property
    def earlier(self) -> tuple[Finding, ...]:
        """Return what lives that are not the last have left, and was explained."""
        return tuple(self._earlier.values())

    def of_process(self) -> frozenset[Key]:
        """Return the storages that are no engine's: they were there before the first life, or an import made them."""
        return self._seen | {each.key for each in self._made_by_imports()}

    def _made_by_imports(self) -> Sequence[StorageReading]:
        made = [born.item for born in self._births.survivors() if born.label.startswith(_IMPORT)]
        return survey_storages(item for item in made if is_tensor(item)).storages

    def open(self) -> None:
        """Begin: what is there now is not the engine's."""
        self._births.start()
        self._stacks.start()
        # What is young at the mark takes its addresses out of the reckoning, and a run is long.
        gc.collect()
        self._births.mark("create")
        self._was_frozen = any_frozen()
        self._seen = frozenset(survey_storages().sizes)

    def stage(self, name: str, cycle: int) -> None:
        """Attribute what appears from here on to this stage of this life."""
        # Not once a life: what a stage makes takes the address of what an earlier one of the same life let go.
        self._births.forget_dead()
        times = sum(turn.stage == name for turn in self._turns) + 1
        self._turns.append(_Turn(cycle, name, times))
        self._births.begin(name, len(self._turns))

    def importing(self, owner: Owner) -> None:
        """Attribute what appears from here on to a module that a life imports, and that is about to run."""
        self._births.begin_aside(_IMPORT + owner.name)

    def imported(self) -> None:
        """Return to the stage around the import."""
        self._births.end_aside()

    def imported_bytes(self) -> dict[str, int]:
        """Return the bytes, by device, of what modules imported during a life have made for themselves and still have.

        As in tests, that belongs to the process: a module is imported once.
        """
        found: dict[str, int] = {}
        for storage in self._made_by_imports():
            found[storage.device] = found.get(storage.device, 0) + storage.bytes
        return found

    def read(self, rung: Rung) -> None:
        """Take down what is left after a rung."""
        self._rows[rung] = self._held()

    def _held(self) -> tuple[HeldStorage, ...]:
        """Return what is there now and no import has made."""
        held = read_heap(self._births, Claims(()), (), self._seen).held
        return tuple(storage for storage in held if not storage.stage.startswith(_IMPORT))

    @property
    def left(self) -> frozenset[Key]:
        """Return the storages of the last reading."""
        return frozenset(held.key for row in [*self._rows.values()][-1:] for held in row)

    def thaw(self) -> bool:
        """Undo a freeze that a life did, and collect; False if there was none."""
        if self._was_frozen or not any_frozen():
            return False
        context, at_first = self.context(None), self._rows[Rung.RAW]
        self._behind_frozen = behind_frozen_holders({held.key for held in at_first}, context)
        hidden = thaw(self._births.froze_in or self._births.label, at_first, self._seen)
        self._rows[Rung.RAW] = (*at_first, *hidden)
        self.read(Rung.UNFREEZE)
        return True

    def explain(self, engine: object, cycle: int, devices: Collection[str]) -> list[Finding]:
        """Say of what a life that is not the last left on some devices who holds it, and changes nothing."""
        if not devices:
            return []
        leaks = self._leaks_of(cycle, lambda held: held.key[0] in devices, self.context(engine))
        self._earlier.update((leak.finding.fingerprint, leak.finding) for leak in leaks)
        return [leak.finding for leak in leaks]

    def explain_asleep(self, engine: object, cycle: int, device: str, pools: Sequence[PoolReading]) -> list[Finding]:
        """Say of what an engine still has on its device from inferring, while it sleeps, who holds it.

        What lies in pools is judged by them: in those of now, and in `pools` that were announced before it slept.
        """
        leaks = self._alive(engine, cycle, lambda held: held.stage == "infer" and held.key[0] == device, pools)
        return [_advised(leak.finding) for leak in leaks]

    def explain_awake(self, stage: str, cycle: int, kind: str) -> list[Finding]:
        """Say who holds what a sleep and its wake have made on a kind of device, and is there after it, in no pool."""
        leaks = self._alive(
            None,
            cycle,
            lambda held: held.key[0].partition(":")[0] == kind and held.stage.startswith(("sleep", "wake")),
        )
        found = [leak.finding for leak in leaks]
        more = sum(finding.bytes for finding in found)
        count = sum(finding.count for finding in found)
        return [_more_awake(found, stage, kind, size=more, count=count)] if more >= LEAST else []

    def explain_turns(
        self, cycle: int | None, stage: str, engine: object = None
    ) -> list[tuple[Finding, dict[int, int]]]:
        """Say of what appeared in one life, or in any, and is there, who holds it; with its bytes by when it appeared.

        Args:
            cycle: which life; None: any.
            stage: in which stage, whose beginnings are counted, from 1; empty: in any, and the lives are counted.
            engine: the one that lives, where this process has it.
        """
        counted: dict[Key, int] = {}

        def is_asked(held: HeldStorage) -> bool:
            turn = self._turn_of(held)
            counted[held.key] = turn.times if stage else turn.cycle
            return stage in ("", turn.stage)

        return [(leak.finding, leak.sizes_by(counted)) for leak in self._alive(engine, cycle, is_asked)]

    def clear_caches(self, holders: Collection[str]) -> list[Finding]:
        """Return the findings of some `lru_cache`s, named as their holders, each cleared and measured.

        Clearing one is the only remedy that no program notices but by its time: the process goes on.
        """
        leaks = [leak for leak in self._alive(None, None) if is_cached(leak.finding) and leak.finding.holder in holders]
        return prove(leaks, replace(self.context(None), living=True))

    def _alive(
        self,
        engine: object,
        cycle: int | None,
        where: Callable[[HeldStorage], bool] = lambda held: True,
        pools: Sequence[PoolReading] = (),
    ) -> list[TensorLeak]:
        """Explain what is there now while an engine lives, in no pool: what lies in these is judged by them."""
        is_pooled = within([*pools, *announced_pools()])
        context = replace(self.context(engine), living=True)
        return self._leaks_of(cycle, lambda held: where(held) and not is_pooled(held.key[1]), context)

    def _leaks_of(self, cycle: int | None, where: Callable[[HeldStorage], bool], context: Context) -> list[TensorLeak]:
        """Explain what is there now of one life or of all."""
        held = [self._by_life(each) for each in self._held() if where(each)]
        return leaks_of([each for each in held if cycle in (None, each.turn)], context)

    def _by_life(self, held: HeldStorage) -> HeldStorage:
        """Return a storage with its life as the turn in which it appeared."""
        return replace(held, turn=self._turn_of(held).cycle)

    def _turn_of(self, held: HeldStorage) -> _Turn:
        """Return when a storage appeared: before the first stage at its life's beginning."""
        return self._turns[held.turn - 1] if held.turn <= len(self._turns) else _Turn(1, held.stage, 1)

    def leaks_at_end(self, engine: object, cycle: int, devices: Collection[str]) -> list[TensorLeak]:
        """Return what all lives have left on some devices, besides what a freeze had hidden, and who holds it.

        Of the last life, with number `cycle`, the engine is what is left.
        """
        at_first, *thawed = self._rows.values()
        hidden = {held.key[0] for row in thawed for held in at_first if held not in row}
        wanted = {*devices, *hidden}
        rows = {
            rung: [self._by_life(held) for held in row if held.key[0] in wanted] for rung, row in self._rows.items()
        }
        context = self.context(engine, lives=cycle)
        explained = explain_storages({held.key for held in [*rows.values()][-1]}, context)
        return leaks_at_rungs(rows, marked_as_frozen(explained, self._behind_frozen), context)

    def conclude(
        self, leaks: Sequence[TensorLeak], engine: object, cycle: int
    ) -> tuple[list[Finding], tuple[str, ...]]:
        """Return the findings of all lives, what gives each back tried; and the changes that this made, as actions."""
        findings = prove(leaks, self.context(engine, lives=cycle))
        now = {finding.fingerprint for finding in findings}
        # What an earlier life left and a later one gave back does not add up.
        findings += [
            msgspec.structs.replace(finding, trend="bounded")
            for mark, finding in self._earlier.items()
            if mark not in now
        ]
        actions = dict.fromkeys(finding.remedy.action for finding in findings if finding.changed and finding.remedy)
        return findings, tuple(actions)

    def context(self, engine: object, lives: int = 1) -> Context:
        """Return what is known around what so many lives have left, while an engine is held, shut down or asleep."""
        return Context(
            born=self._births.born(),
            # Whoever called shutdown still has the engine, and may.
            roots=[(ENGINE, engine)],
            is_over=True,
            stacks=self._stacks.stacks_at,
            lives=lives,
        )


def _advised(finding: Finding) -> Finding:
    """Return a finding of an engine that goes on, so that nothing can be tried: with what to change in its code."""
    if not finding.holder:
        return finding
    return msgspec.structs.replace(finding, advice=f"let go of {finding.holder} before the engine sleeps")


def largest_of_cause(findings: Sequence[Finding]) -> list[Finding]:
    """Return the largest finding of each fingerprint: what one sleep of a loop shows, all later ones show again."""
    found: dict[str, Finding] = {}
    for finding in sorted(findings, key=lambda each: each.bytes):
        found[finding.fingerprint] = finding
    return [finding for finding in findings if found[finding.fingerprint] is finding]


def is_cached(finding: Finding) -> bool:
    """Return whether a finding is of what an `lru_cache` keeps."""
    return finding.cause == "lru-cache"


KEPT_PART = 0.5
"""The part of what an engine held at work from which on it has not slept."""

LEAST = 1 << 20
"""Bytes at work below which nothing is an engine's, and by which a wake may leave more: it may fill what is filled
once."""


def has_slept(held: int, stays: int) -> bool:
    """Return whether who held so many bytes at work has given back its part of them, or had none to give."""
    return held < LEAST or stays <= held * KEPT_PART


_Storages = dict[Key, StorageReading]


class SleptTensors:
    """Follows the storages of this process through sleeps and wakes.

    What is made between them, as by the training that has the card meanwhile, is not compared.

    Args:
        kind: of the engine's device, `cpu` or `cuda`; empty: of cards where any holds something when a sleep begins.
        others: gives the storages that are none of the engine's, when a sleep begins.
        beside_arenas: whether an engine that announces arenas is looked at, too: its pages tell most, and a reading
            takes as long as going through the heap.

    Attributes:
        kind: of the engine's device, once it is known.
        looks_away: whether the last sleep was that of an engine that is not looked at.
    """

    def __init__(
        self, kind: str = "", others: Callable[[], Collection[Key]] = tuple, *, beside_arenas: bool = True
    ) -> None:
        self._beside_arenas = beside_arenas
        self._wanted = kind
        self._ask_others = others
        self._others: Collection[Key] = ()
        self.kind = kind
        self.looks_away = False
        self._at_work = 0
        self._is_in = False
        self._before: _Storages = {}
        self._begun: _Storages = {}
        self._now: _Storages = {}
        # Of what was there when the sleep began, what has been there ever since.
        self._kept: set[Key] = set()
        # Of what is kept, what was seen to be held after the last sleep: no collection would give it back.
        self._held: set[Key] = set()
        # What sleeps and wakes have made since.
        self._made: set[Key] = set()

    def begin(self, stage: str) -> None:
        """Note what is there when a stage begins; nothing is read at any but sleeps, and wakes from them."""
        self.end()
        sleeps = stage.startswith("sleep")
        if sleeps:
            has_arenas = any(pool.kind == "arena" for pool in announced_pools())
            self.looks_away = has_arenas and not self._beside_arenas
        if sleeps and self.looks_away:
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
        """Find what was there when the sleep began and comes back, when it ends, only as Python's collector runs."""
        self.end()
        self._held = set()
        if self._unproven() < LEAST:
            return []
        self._held = _held_by_frames()
        if self._unproven() < LEAST:
            return []
        collected = Collected.before(tensors_over(self._kept), LEAST)
        self._collect()
        finding = None if collected is None else collected.finding(stage, came=f", at the end of {stage}")
        return [] if finding is None or finding.bytes < LEAST else [finding]

    def kept_asleep(self) -> tuple[int, int] | None:
        """Return the bytes held when the sleep began, and those of them that stay; None where most came back."""
        self.end()
        if has_slept(self._at_work, self._stays()):
            return None
        if self._unproven() < LEAST:
            return self._at_work, self._stays()
        self._collect()
        return None if has_slept(self._at_work, self._stays()) else (self._at_work, self._stays())

    def explain_kept(self, stage: str, context: Context) -> list[Finding]:
        """Say who holds what was there when the sleep began, and is there still."""
        return _explained({key: self._before[key] for key in self._kept}, stage, context)

    def is_more(self) -> bool:
        """Return whether there is more after a wake, which ends, than when the sleep began; it is no garbage."""
        self.end()
        if self._excess() < LEAST:
            return False
        self._collect()
        return self._excess() >= LEAST

    def more_awake(self, stage: str, context: Callable[[], Context]) -> list[Finding]:
        """Find what there is more after a wake than when the sleep began, and who holds it."""
        if not self.is_more():
            return []
        excess = self._excess()
        kept, made = self._not_replaced()
        culprits = kept or made
        found = _explained(culprits, stage, context())
        return [_more_awake(found, stage, self.kind, size=excess, count=len(culprits), is_kept=bool(kept))]

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

    def _unproven(self) -> int:
        """Return the bytes that are kept as far as is known, and may be garbage."""
        return sum(self._before[key].bytes for key in self._kept - self._held)

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


def _more_awake(
    found: Sequence[Finding], stage: str, kind: str, *, size: int, count: int, is_kept: bool = False
) -> Finding:
    """Return what there is more after a wake than when the sleep began, as one finding.

    Of `count` culprits, by their holders, `size` bytes are more; they were kept, if they were there before the sleep.
    """
    found = sorted(found, key=lambda finding: (-finding.bytes, finding.holder or ""))
    largest = found[0]
    more = f"there are {format_bytes(size)} more on {largest.device} after {stage} than before the sleep"
    holder = " and ".join(dict.fromkeys(each.holder or "what has no name" for each in found[:2]))
    how = "kept what the wake has made again" if is_kept else "got more than the sleep had given up"
    suspects = ("more awake", "kept" if is_kept else "made", largest.fingerprint)
    return reworded(
        largest,
        f"{more}: {holder} {how}",
        bytes=size,
        count=count,
        fingerprint=fingerprint(resource="tensors", device=kind, stage=stage, suspects=suspects),
        former_fingerprint="",
        advice=f"let go of {holder} {'before the engine sleeps' if is_kept else f'in {largest.stage}'}",
    )


def not_judged(stage: str, sizes: tuple[int, int], kind: str, where: str = "") -> NotMeasured:
    """Say that a sleep has given back little, in another process if one is named, where nobody has said what it should.

    The sizes are bytes that were held when it began, and those of them that stay.
    """
    held, stays = sizes
    given = f"{format_bytes(held - stays)} of {format_bytes(held)} came back"
    return NotMeasured(
        what=f"what {stage} gives back on {kind}{f' in {where}' if where else ''}: {given}",
        why="nobody says how much it should be, as `emptying_levels` of a target does",
    )


def _outside_pools() -> _Storages:
    """Read the storages that lie in no announced pool, whose pages may be gone, and behind which there is memory.

    vLLM's and SGLang's engines unmap their tensors in a sleep, and keep them.
    """
    storages, is_pooled = survey_storages().storages, within(announced_pools())
    outside = [each for each in storages if each.bytes and not is_pooled(each.address)]
    is_asleep = {device: inside(asleep_on(device)) for device in {each.device for each in outside}}
    return {each.key: each for each in outside if not is_asleep[each.device](each.address)}


def _held_by_frames() -> set[Key]:
    """Return storages that running functions lead to, an engine's among them: a tenth of what a collection takes.

    One that is missing says nothing: the way to it may be longer, hidden, or from a module on.
    """
    with collector_paused():
        reached, _ = reach(running_locals())
        return set().union(*keys_of_each([item for item in reached if is_tensor(item)]))


def _unchanged(then: _Storages, now: _Storages) -> set[Key]:
    """Return the storages that are in both readings with one size: an address may be another's by now."""
    return {key for key, each in then.items() if key in now and now[key].bytes == each.bytes}


def _bytes_of(storages: _Storages) -> int:
    return sum(each.bytes for each in storages.values())


def _explained(storages: _Storages, stage: str, context: Context) -> list[Finding]:
    return [leak.finding for leak in leaks_of([HeldStorage.of(each, stage) for each in storages.values()], context)]
