"""This process's tensors, for another one that asks: the same reading and explaining as in the checked process.

And what must survive a sleep here, as its engine has announced it; what there is at one moment, as plain data (`look`),
and who holds what has grown between two of these.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
from msgspec.structs import asdict, replace

from lowtide.leakcheck.findings.growing_objects import Stretch, growth_in_heap
from lowtide.leakcheck.findings.life_findings import LeftoverTensors, SleptTensors
from lowtide.leakcheck.findings.tensor_findings import leaks_of
from lowtide.leakcheck.growth.containers import Course
from lowtide.leakcheck.judging.contract import PreservedState
from lowtide.leakcheck.judging.fingerprints import finding_of
from lowtide.leakcheck.judging.storages import HeldStorage, within
from lowtide.leakcheck.processes.messages import ExplainGrown, FilledCache, Left, Levels, Seen, TensorKind, written
from lowtide.leakcheck.resources.driver_memory import CudaIpc
from lowtide.leakcheck.resources.processes import ProcessGroups
from lowtide.probes.allocation_stacks import AllocationStacks
from lowtide.probes.device.allocations import Outside, OutsideTorch, with_sleepers
from lowtide.probes.device.torch_allocator import (
    AllocatorReading,
    any_exported,
    has_context,
    read_allocators,
    read_pinned,
)
from lowtide.probes.heap.births import Births
from lowtide.probes.heap.caches import read_caches
from lowtide.probes.heap.container_lengths import read_lengths
from lowtide.probes.heap.large_values import owner_of, with_values
from lowtide.probes.heap.roots import is_library
from lowtide.probes.host.counters import anonymous_bytes
from lowtide.probes.host.memory_parts import free_at_tops, malloc_in_use, read_parts
from lowtide.probes.host.readings import read_heaps, resident_in, unnamed_shared_memory
from lowtide.probes.memory.malloc_heaps import in_malloc
from lowtide.probes.memory.ranges import Range, common, total, without
from lowtide.probes.memory.tensors import StorageSurvey, TensorReading, survey_storages
from lowtide.probes.objects.engine_pools import RequestSlots
from lowtide.probes.originals import gc, torch_with_cuda
from lowtide.probes.stages import PoolReading, announced_pools, announced_preserved
from lowtide.reports.schema import Finding, as_written
from lowtide.reports.sizes import format_bytes

if TYPE_CHECKING:
    import torch

_T = TypeVar("_T")

_LISTED = 20
"""Kinds of tensors, and caches, that are listed."""

_MOST_BEHIND_CACHES = 300_000
"""Objects that are looked at behind all caches together."""


class Apart(Protocol):
    """Does where the program does not notice it what goes through the whole heap."""

    def __call__(self, work: Callable[[], _T], kind: Any) -> _T: ...  # noqa: D102


def here(work: Callable[[], _T], kind: Any) -> _T:
    """Do it here."""
    return work()


class OwnTensors:
    """Follows this process's tensors through the stages of a life that another process tells of.

    Args:
        apart: where it is found who holds them.
    """

    def __init__(self, apart: Apart = here) -> None:
        self.slots = RequestSlots()
        self._apart = apart
        self._leftovers: LeftoverTensors | None = None
        self._slept = SleptTensors(beside_arenas=False)
        self._imported: dict[str, int] = {}
        # What waits for importers, by device and address: its bytes, and the cycle in which that began.
        self._waiting: dict[tuple[str, int], tuple[int, int]] = {}
        self._cycle = 0
        self._outside_torch = OutsideTorch()

    def begin(self, stage: str, cycle: int) -> None:
        """Attribute what appears from here on to this stage."""
        if self._leftovers is None:
            self._leftovers = LeftoverTensors(Births(), AllocationStacks(card=_uses_cards()))
            self._leftovers.open()
        self._note_imports()
        self._note_waiting()
        self._cycle = cycle
        self._leftovers.stage(stage, cycle)
        self._slept.begin(stage)

    def asleep(self, cycle: int, kind: str) -> list[Finding]:
        """Return who holds what is left of inferring; the sleep has ended."""
        self._slept.end()
        leftovers = self._leftovers
        if leftovers is None:
            return []

        def explained() -> list[Finding]:
            by_device = [leftovers.explain_asleep(None, cycle, device, ()) for device in _devices(kind)]
            return [finding for found in by_device for finding in found]

        return self._explained(explained)

    def _explained(self, work: Callable[[], Iterable[Finding]]) -> list[Finding]:
        """Return what is found apart from the program."""
        return self._apart(lambda: written(work()), list[Finding])

    def more_awake(self, stage: str, kind: str) -> list[Finding]:
        """Return who holds what there is more after a wake than before the sleep; asked where there is more."""
        leftovers = self._leftovers
        if leftovers is None:
            return []
        if not self._slept.looks_away and not self._slept.is_more():
            return []

        if self._slept.looks_away:
            return self._explained(lambda: leftovers.explain_awake(stage, self._cycle, kind))
        context = lambda: replace(leftovers.context(None), living=True)  # noqa: E731
        return self._explained(lambda: self._slept.more_awake(stage, context))

    def left(self, cycle: int | None, stage: str = "") -> Left:
        """Return who holds what appeared in one cycle, or in any, and is not garbage; with its bytes by cycle.

        Args:
            cycle: which; None: any.
            stage: of which stage alone, with the bytes by how often that had begun; empty: of all stages.
        """
        if self._leftovers is None:
            return []
        gc.collect()
        self._note_imports()
        if not stage:
            self._note_waiting()

        return self._apart(lambda: [(as_written(each), sizes) for each, sizes in self._left(cycle, stage)], Left)

    def _left(self, cycle: int | None, stage: str) -> Left:
        assert self._leftovers is not None
        found = []
        for finding, sizes in self._leftovers.explain_turns(cycle, stage):
            # A stage alone is asked for where something grows: that is no import's.
            imported_in = None if stage else self._imported_in(finding)
            left = {turn: size for turn, size in sizes.items() if turn != imported_in}
            if left:
                found.append((msgspec.structs.replace(finding, bytes=sum(left.values())), left))
        return found if stage else [*found, *self._left_waiting(cycle)]

    def _left_waiting(self, cycle: int | None) -> Left:
        """Return what was exported and given up in one cycle, or in any, and is kept for importers, by card."""
        found = []
        for device in sorted({device for device, _ in self._waiting}):
            sizes: dict[int, int] = {}
            names = []
            for (where, address), (size, since) in self._waiting.items():
                if where == device and since and cycle in (None, since):
                    sizes[since] = sizes.get(since, 0) + size
                    names.append(f"block at {address:#x}")
            if names:
                kind, left = CudaIpc(), sum(sizes.values())
                finding = finding_of(
                    kind.rule.resource,
                    cause="pending-transfer",
                    bytes=left,
                    count=len(names),
                    device=device,
                    stage="test",
                    message=f"{format_bytes(left)} of memory exported by CUDA IPC on {device}{kind.remark(names)}",
                    suspects=("memory exported by CUDA IPC", "pending-transfer"),
                    verdict=kind.rule.verdict,
                    advice=kind.advice(names),
                )
                found.append((finding, sizes))
        return found

    def _note_waiting(self) -> None:
        """Note what waits for importers, and that it began in the cycle that goes on; 0 before the first."""
        known, self._waiting = self._waiting, {}
        if not any_exported():
            return
        claimed = {storage.address for storage in survey_storages().storages}
        for allocator in read_allocators(claimed):
            for pool in allocator.pools:
                for address, size in pool.exported_at:
                    key = allocator.device, address
                    self._waiting[key] = known.get(key, (size, self._cycle))

    def clear_caches(self, holders: Collection[str]) -> list[Finding]:
        """Return what some `lru_cache`s hold of what appeared, each cleared, with what that gave back."""
        return [] if self._leftovers is None else self._leftovers.clear_caches(holders)

    def _note_imports(self) -> None:
        """Note that what is new among the modules was imported in the cycle that goes on."""
        for name in list(sys.modules):
            self._imported.setdefault(name, self._cycle)

    def _imported_in(self, finding: Finding) -> int | None:
        """Return in which cycle the module was imported that has it in its namespace, and so may have made it."""
        if finding.cause != "module-global" or not finding.holder:
            return None
        parts = finding.holder.split(".")
        names = [".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1)]
        return next((self._imported[name] for name in names if name in self._imported), None)

    def held(self, stage: str, kind: str, most: int) -> list[Finding]:
        """Return who holds the largest storages on devices of a kind, arenas aside."""
        return self._explained(lambda: self._held(stage, kind, most))

    def _held(self, stage: str, kind: str, most: int) -> list[Finding]:
        leftovers = self._leftovers or LeftoverTensors(Births(), AllocationStacks(card=False))
        context = leftovers.context(None)
        survey = survey_storages()
        is_pooled = within(announced_pools())
        rows: dict[str, list[HeldStorage]] = {}
        for storage in sorted(survey.storages, key=lambda each: -each.bytes):
            device = storage.device
            is_asked = device.partition(":")[0] == kind and not is_pooled(storage.address)
            if is_asked and len(rows.setdefault(device, [])) < most:
                rows[device].append(HeldStorage.of(storage, stage))
        held = [each for row in rows.values() for each in row]
        return [leak.finding for leak in leaks_of(held, context)]

    def allocated(self) -> dict[str, int]:
        """Return the bytes that torch has given out, by card: by its counters, without a look at the heap."""
        torch = torch_with_cuda()
        if torch is None or not _uses_cards():
            return {}
        try:
            cards = [index for index in range(torch.cuda.device_count()) if has_context(torch, index)]
            return {f"cuda:{index}": torch.cuda.memory_allocated(index) for index in cards}
        except RuntimeError:  # an allocator without counters
            return {}

    def levels(self) -> Levels:
        """Return how much this process holds."""
        # First, since all else takes memory.
        heaps, tops, anonymous = read_heaps(), free_at_tops(), anonymous_bytes()
        pools = announced_pools()
        survey = survey_storages()
        tensors = survey.reading
        arenas: dict[str, dict[str, int]] = {}
        for pool in pools:
            if pool.kind == "arena":
                of_device = arenas.setdefault(pool.device, {})
                of_device[pool.tag] = of_device.get(pool.tag, 0) + pool.mapped
        allocators = read_allocators({storage.address for storage in survey.storages})
        on_host = [*tensors.on("cpu"), *_pooled(pools, "cpu")]
        present = resident_in(on_host)
        reserved = {each.device: _with_pages(each) for each in allocators}
        outside = self._outside(reserved, arenas)
        return Levels(
            # Of a tensor in a pool the pool's own pages count: an engine that sleeps keeps it, and they are gone.
            tensors=outside_pools(tensors, pools),
            arenas=arenas,
            reserved=reserved,
            has_torch=True,
            # What a card's driver has pinned is shared memory without a name, which only this process maps.
            resident=present.anonymous + present.shared + _pinned_for_later(on_host) + tops,
            communicators=_communicators(),
            outside={device: each.bytes for device, each in outside.items()},
            heaps=heaps.beside(in_malloc(on_host), anonymous - present.anonymous - tops),
            libraries={device: dict(each.by_library) for device, each in outside.items() if each.by_library},
        )

    def _outside(
        self, reserved: Mapping[str, int | None], arenas: Mapping[str, Mapping[str, int]]
    ) -> dict[str, Outside]:
        """Return what others than torch and the arenas have asked the driver for, by card."""
        torch, found = torch_with_cuda(), {}
        for device, size in reserved.items():
            if torch is not None and size is not None:
                # Of all processes: where another one's changes, this one's is read once more.
                free, whole = torch.cuda.mem_get_info(device)
                outside = self._outside_torch.read(device, whole - free - size - sum(arenas.get(device, {}).values()))
                if outside is not None:
                    found[device] = outside
        return found


def outside_pools(tensors: TensorReading, pools: Sequence[PoolReading]) -> dict[str, int]:
    """Return the bytes under tensors that lie in no announced pool, by device."""
    return {device: total(without(ranges, _pooled(pools, device))) for device, ranges in tensors.ranges.items()}


def _pooled(pools: Sequence[PoolReading], device: str) -> list[Range]:
    return [part for pool in pools if pool.device == device for part in pool.addresses]


def _communicators() -> tuple[str, ...]:
    """Return the groups of several ranks that have buffers on a card, as `0 (nccl, 2 ranks)`."""
    known = ProcessGroups()
    groups = map(known.describe, known.read())
    # A rank alone has nobody to exchange with: its group is excused asleep, as in the checked process.
    return tuple(group for group in groups if "nccl" in group and not group.endswith(", 1 rank)"))


def _with_pages(allocator: AllocatorReading) -> int | None:
    """Return what torch's allocator took from the driver, without what has no pages while a pool sleeps, in bytes."""
    if allocator.reserved is None:
        return None
    return allocator.reserved - sum(pool.asleep for pool in with_sleepers(allocator).pools)


def _pinned_for_later(on_host: list[Range]) -> int:
    """Return the bytes of pinned host memory that torch keeps for the next tensors that ask for some, beside `on_host`.

    What torch says of it is too little: a block whose tensor is gone counts as handed out until torch sees that the
    copies from it are over, and it looks only when the next tensor asks. So what is pinned and in no tensor is
    measured, up to what torch has; others pin memory too, NCCL among them.
    """
    pinned = read_pinned()
    reserved = pinned.torch_reserved or 0
    if not reserved:
        return 0
    mapped = unnamed_shared_memory()
    free = min(reserved, resident_in(mapped).shared) - resident_in(common(on_host, mapped)).shared
    return max(free, reserved - (pinned.torch_allocated or 0))


def _devices(kind: str) -> list[str]:
    survey = survey_storages()
    return sorted({each.device for each in survey.storages if each.device.partition(":")[0] == kind})


def _uses_cards() -> bool:
    torch = torch_with_cuda()
    return torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized()


class OwnPreserved:
    """Remembers the contents of the tensors that there are on devices of a kind when it is made.

    Attributes:
        tensors: how many there are.
    """

    def __init__(self, kind: str) -> None:
        self.tensors = 0
        self._states: dict[str, PreservedState] = {}
        for device, tensors in _by_device(kind).items():
            state = PreservedState(device)
            with _current(device):
                state.before_sleep(tensors)
            self._states[device] = state
            self.tensors += len(tensors)

    def compare(self, stage: str) -> list[Finding]:
        """Return what was lost, has moved, or points to where nothing is, after the stage that has ended."""
        found: list[Finding] = []
        recorded = announced_preserved().graph_addresses
        for device, state in self._states.items():
            kind = device.partition(":")[0]
            with _current(device):
                # Where a process has one device, as a rank has, its graphs read that one.
                read = recorded if len(self._states) == 1 else {}
                found += state.after_wake(stage, _by_device(kind).get(device, {}), read)
        return found


def _by_device(kind: str) -> dict[str, dict[str, torch.Tensor]]:
    """Return the announced tensors that can be read, by device."""
    pools = announced_pools()
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in announced_preserved().tensors.items():
        if tensor.device.type == kind and _has_pages(tensor, pools):
            found.setdefault(str(tensor.device), {})[name] = tensor
    return found


def _has_pages(tensor: torch.Tensor, pools: tuple[PoolReading, ...]) -> bool:
    """Return whether a tensor may be read: on a card, to read addresses without pages breaks the process."""
    start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    for pool in pools:
        if pool.span is not None and pool.span[0] <= start < sum(pool.span):
            overlaps = (min(stop, address + length) - max(start, address) for address, length in pool.ranges)
            return sum(overlap for overlap in overlaps if overlap > 0) >= tensor.nbytes
    return True


@contextlib.contextmanager
def _current(device: str) -> Iterator[None]:
    """Make a device current in this thread, which has used none so far."""
    if device.partition(":")[0] != "cuda":
        yield
        return
    import torch

    with torch.cuda.device(device):
        yield


def look(*, lists: bool) -> Seen:
    """Return what there is now.

    Args:
        lists: whether tensors and caches are listed, too, which takes a walk behind the caches.
    """
    # First, since all else takes memory.
    parts, malloc = read_parts(), malloc_in_use()
    lengths = with_values(read_lengths()[0])
    survey = survey_storages()
    return Seen(
        ids=lengths.ids.tobytes(),
        kinds=lengths.kinds.tobytes(),
        lengths=lengths.lengths.tobytes(),
        parts=asdict(parts),
        malloc=malloc,
        tensors={device: total(ranges) for device, ranges in survey.reading.ranges.items()},
        tensor_kinds=_kinds_of(survey) if lists else (),
        caches=_filled_caches() if lists else (),
    )


def _kinds_of(survey: StorageSurvey) -> tuple[TensorKind, ...]:
    counts, sizes = Counter[tuple[str, str, str]](), Counter[tuple[str, str, str]]()
    for storage in survey.storages:
        kind = storage.dtype, storage.shape, storage.device
        counts[kind] += 1
        sizes[kind] += storage.bytes
    return tuple(TensorKind(*kind, counts[kind], size) for kind, size in sizes.most_common(_LISTED))


def _filled_caches() -> tuple[FilledCache, ...]:
    """Return the largest caches; of libraries' those alone that reach tensors."""
    caches = [
        cache
        for cache in read_caches(max_in_all=_MOST_BEHIND_CACHES)
        if cache.tensor_bytes or not is_library(cache.name)
    ]
    largest = sorted(caches, key=lambda cache: (-cache.tensor_bytes, -cache.entries))
    return tuple(
        FilledCache(cache.name, cache.entries, cache.maxsize, cache.tensor_bytes) for cache in largest[:_LISTED]
    )


def explain_grown(question: ExplainGrown) -> list[Finding]:
    """Return a finding on each of some containers that have grown and that the program holds."""
    asked = [Course(*each) for each in question.containers]
    courses = [course for course in asked if owner_of(course.identity) == course.identity]
    values = [course for course in asked if owner_of(course.identity) != course.identity]
    _, there = read_lengths({course.identity for course in courses})
    stretch = Stretch(
        question.turns,
        by_frames=True,
        seconds=question.seconds,
        since=question.since,
        tensors=True,
        fixed=question.fixed,
    )
    found = growth_in_heap(courses, there, stretch, values)
    return written(found.values())
