"""What is new on the cards since the last full reading and is in no tensor: native blocks, empty pools, allocations,
and memory that the driver counts and lists nowhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from lowtide.leakcheck.judging.metrics import UNLISTED_TOLERANCE
from lowtide.leakcheck.judging.storages import Key
from lowtide.probes.device.allocations import (
    STEP_BYTES,
    AllocationsError,
    place_of_small_allocations,
    range_at,
    read_allocations,
    read_mappings_without_access,
)
from lowtide.probes.device.driver_trace import TRACE
from lowtide.probes.device.torch_allocator import read_segments, unexplained_blocks, workspace_sizes_here
from lowtide.probes.host.counters import Counters
from lowtide.probes.memory.ranges import Range, common, total, without
from lowtide.probes.stages import announced_pools
from lowtide.reports.schema import NotMeasured

Segment = tuple[tuple[int, int], int, int, bool]

UNLISTED = (
    "memory to which no address leads: of a context, module, array or stream, in a pool or graph of the program's own, "
    "imported by CUDA IPC, or not mapped (cuMemCreate)"
)
"""What it may be that is left of the driver's figure when all that can be listed is subtracted."""

IDLE_POOL = "the card's default stream-ordered memory pool, or its pool for the memory nodes of graphs"
"""The name of what these pools keep."""

MEMORY_POOL = "memory-pool "
"""The beginning of the key of what a card's own memory pools keep."""


class _Card(msgspec.Struct, frozen=True):
    """One card at one moment.

    Attributes:
        items: by metric's key, what is there, by name, in bytes.
        allocations: all that the driver lists; None where it does not.
        unlisted: bytes that the driver counts for this process and that are neither listed nor idle in its own
            memory pools: the context, code, and memory that has no address; None where one of these is not known.
        beyond_torch: bytes that the driver counts and that torch and the arenas do not explain; None likewise.
        imported: address and bytes of what lies under tensors and is in no list: the memory of another process.
        counted: those of them that the driver counts for this process: once the other one has ended, or from the first.
    """

    items: Mapping[str, Mapping[str, int]] = msgspec.field(default_factory=dict)
    allocations: tuple[Range, ...] | None = None
    unlisted: int | None = None
    beyond_torch: int | None = None
    imported: Mapping[int, int] = msgspec.field(default_factory=dict)
    counted: frozenset[int] = frozenset()


class DeviceMemory:
    """Keeps what was there at the last full reading, per card, by address.

    Args:
        driver: whether to list the driver's own allocations.
        native: whether to record which library asks the driver for them.
    """

    def __init__(self, *, driver: bool, native: bool = False) -> None:
        self._driver, self._native = driver, native
        self._is_recorded = False
        self._known: dict[str, _Card] = {}
        # The last list, with the bytes that the driver counted beyond it; only while one judgement lasts.
        self._listed: dict[str, tuple[int, tuple[Range, ...]]] = {}
        # Looked for where the driver counts more than it lists, and only then.
        self._mappings: dict[str, Mapping[str, int]] = {}
        # What was found last, with the figures for which it was; only while one judgement lasts.
        self._mapped: dict[str, tuple[object, dict[str, int]]] = {}
        # Where the driver put small allocations at the first reading.
        self._small: dict[str, Sequence[Range]] = {}
        # Why a card's allocations are not listed any more.
        self._unlisted: dict[str, str] = {}

    @property
    def not_measured(self) -> tuple[NotMeasured, ...]:
        """Return the cards whose allocations could not be listed, which are not asked for again."""
        return tuple(NotMeasured(what=f"allocations {device}", why=why) for device, why in self._unlisted.items())

    @property
    def unrecorded(self) -> tuple[NotMeasured, ...]:
        """Return why it is not known which library asks the driver for memory, where it was to be recorded."""
        what = "which library asks a card's driver for memory"
        return (NotMeasured(what=what, why=TRACE.why),) if self._is_recorded and TRACE.why else ()

    def start(self) -> None:
        """Begin to record, where that is asked for; legal twice."""
        if self._native and not self._is_recorded:
            self._is_recorded = True
            TRACE.start()

    def stop(self) -> None:
        """End it; legal twice, and without a start."""
        if self._is_recorded:
            self._is_recorded = False
            TRACE.stop()

    def forget(self) -> None:
        """Forget all cards: each is to be read again."""
        self._known.clear()
        self._mappings.clear()

    def knows(self, device: str) -> bool:
        """Return whether there was a reading of this card."""
        return device in self._known

    def adopt(self, now: Counters, devices: Iterable[str], storages: Mapping[Key, int]) -> None:
        """Take what is there now for known.

        Args:
            now: the counters.
            devices: the cards, as `cuda:0`.
            storages: all live storages, with the bytes of those of which they are known.
        """
        for device in devices:
            card = self._read(device, storages, now)
            if self._grown(device, card) > UNLISTED_TOLERANCE:
                self._mappings[device] = self._found_mappings(device, card)
            self._known[device] = replace(card, counted=self._counted(device, card))
        self._listed.clear()
        self._mapped.clear()

    def adopt_first_use(self, now: Counters, device: str, sizes: Collection[int]) -> None:
        """Take for known what a card's first use has taken, where the program has something there by now, too.

        Args:
            now: the counters.
            device: the card.
            sizes: in bytes, those of the allocations that a first use makes: the rest is the program's.
        """
        card = self._read(device, {}, now)
        key = f"allocations {device}"
        own = {name: size for name, size in card.items.get(key, {}).items() if size in sizes}
        self._known[device] = replace(card, items={key: own})
        self._listed.clear()

    def new_items(
        self, now: Counters, devices: Iterable[str], storages: Mapping[Key, int], begin: Counters
    ) -> dict[str, dict[str, int]]:
        """Return what was not there then, by metric's key (`native cuda:0`, `reserved cuda:0`, …).

        Small allocations share a step of the driver's, whose figure they move where they begin one. Where it has not
        risen since the test began, they may have come in an earlier one, in which nothing was suspect for them: they
        are left out.

        Args:
            now: the counters.
            devices: the cards, as `cuda:0`.
            storages: all live storages, with the bytes of those of which they are known.
            begin: the counters when the test began.
        """
        found: dict[str, dict[str, int]] = {}
        for device in devices:
            known = self._known.get(device, _Card())
            card = self._read(device, storages, now)
            for key, items in card.items.items():
                old = known.items.get(key, {})
                found[key] = {name: size for name, size in items.items() if name not in old}
            grown = self._grown(device, card)
            if grown > UNLISTED_TOLERANCE:
                old = self._mappings.get(device, {})
                mapped = {name: size for name, size in self._found_mappings(device, card).items() if name not in old}
                found[f"allocations {device}"].update(mapped)
                found[f"unlisted {device}"] = {UNLISTED: max(0, grown - sum(mapped.values()))}
            before, after = (counters.amounts.get(f"driver {device}") for counters in (begin, now))
            if before is not None and after is not None and after <= before:
                key = f"allocations {device}"
                found[key] = {name: size for name, size in found.get(key, {}).items() if size >= STEP_BYTES}
        return found

    def all_items(self, now: Counters, device: str, storages: Mapping[Key, int]) -> dict[str, dict[str, int]]:
        """Return the same as `new_items`, for one card and with what was there then."""
        card = self._read(device, storages, now)
        items = {key: dict(found) for key, found in card.items.items()}
        if device in self._mappings:
            items.setdefault(f"allocations {device}", {}).update(self._found_mappings(device, card))
        items[f"unlisted {device}"] = {} if card.unlisted is None else {UNLISTED: card.unlisted}
        return items

    def has_new_empty_pools(self, device: str) -> bool:
        """Return whether a private pool has an empty segment that it had not before; cheap."""
        known = self._known.get(device, _Card()).items.get(f"reserved {device}", {})
        return any(name not in known for name in _empty_pools(read_segments(_index(device)) or ()))

    def has_shrunk(self, device: str, now: Counters) -> bool:
        """Return whether the driver counts less than at the last full reading, where growth would not show; cheap."""
        known, level = self._known.get(device, _Card()).beyond_torch, now.amounts.get(f"driver {device}")
        return known is not None and level is not None and known - level > UNLISTED_TOLERANCE

    def adopt_allocations(self, now: Counters, device: str) -> dict[str, int]:
        """Take what the driver lists of a card for known from here on, but blocks and pools only as they were.

        Returns:
            The allocations that were not known, in bytes, by name.
        """
        key = f"allocations {device}"
        known, card = self._known[device], self._read(device, {}, now)
        items = {name: size for name, size in card.items.get(key, {}).items() if name not in known.items.get(key, {})}
        self._known[device] = replace(card, items={**known.items, key: card.items.get(key, {})})
        return items

    def forget_allocations(self, device: str, names: Iterable[str]) -> None:
        """Take these allocations for known: a library keeps them."""
        known = self._known[device]
        key = f"allocations {device}"
        items = {**known.items, key: {**known.items.get(key, {}), **dict.fromkeys(names, 0)}}
        self._known[device] = replace(known, items=items)

    def lists_allocations(self, device: str) -> bool:
        """Return whether the driver's allocations can be listed; else its byte count is all there is."""
        is_asked = self._driver and device not in self._unlisted
        return is_asked and self._known.get(device, _Card()).allocations is not None

    def _grown(self, device: str, card: _Card) -> int:
        """Return the bytes that the driver counts more than at the last full reading, unlisted; 0 where nobody knows.

        What tensors have imported is judged as theirs, once the driver counts it here.
        """
        counted = self._counted(device, card) - self._known.get(device, _Card()).counted
        return self._more(device, card) - sum(card.imported[address] for address in counted)

    def _more(self, device: str, card: _Card) -> int:
        last = self._known.get(device, _Card())
        return 0 if last.unlisted is None or card.unlisted is None else card.unlisted - last.unlisted

    def _counted(self, device: str, card: _Card) -> frozenset[int]:
        """Return the imports that the driver counts for this process by now: as many as its figure has grown by."""
        last, more = self._known.get(device, _Card()), self._more(device, card)
        found = set(last.counted & card.imported.keys())
        for address in sorted(card.imported.keys() - found, key=lambda address: -card.imported[address]):
            if card.imported[address] <= more:
                more -= card.imported[address]
                found.add(address)
        return frozenset(found)

    def _found_mappings(self, device: str, card: _Card) -> dict[str, int]:
        """Return the physical memory that is mapped without access, by name; none where the driver took too long."""
        figures = (card.unlisted, card.allocations)
        if device in self._mapped and self._mapped[device][0] == figures:
            return self._mapped[device][1]
        try:
            found = read_mappings_without_access(_index(device), card.allocations or ())
        except AllocationsError as error:
            self._unlisted[device] = str(error)
            return {}
        mapped = {f"mapping without access at {address:#x}": size for address, size in found}
        self._mapped[device] = figures, mapped
        return mapped

    def _allocations(self, device: str, now: Counters) -> tuple[Range, ...] | None:
        """Return what the driver lists, None where it does not, or did not in time: then it is not asked again."""
        if device in self._unlisted:
            return None
        try:
            return self._listed_now(device, now)
        except AllocationsError as error:
            self._unlisted[device] = str(error)
            return None

    def _listed_now(self, device: str, now: Counters) -> tuple[Range, ...] | None:
        """Return what the driver lists: what is left of this judgement's last list, where nothing can have come since.

        A new allocation raises what the driver counts, and the rest of that list does not explain it. Where the driver
        counts as much beyond the rest as it did beyond the list, all that has changed is that some of the list went.
        Less is no proof: what it gave back elsewhere, such as code, may be as much as what is new.
        """
        counted, (beyond, listed) = _counted(now, device), self._listed.get(device, (None, ()))
        if counted is not None and beyond is not None:
            rest = read_allocations(_index(device), listed)
            if rest is not None and counted - total(rest) == beyond:
                self._listed[device] = (beyond, rest)
                return rest
        if device not in self._small:
            place = place_of_small_allocations(_index(device))
            self._small[device] = () if place is None else (place,)
        known = self._known.get(device, _Card()).allocations or ()
        found = read_allocations(_index(device), known=(*known, *self._small[device]))
        if found is not None and counted is not None:
            self._listed[device] = (counted - total(found), found)
        return found

    def _read(self, device: str, storages: Mapping[Key, int], now: Counters) -> _Card:
        index = _index(device)
        readings: dict[str, dict[str, int]] = {}
        claimed = {address for _, address in storages}
        blocks = unexplained_blocks(index, claimed)
        if blocks is not None:
            named = {
                f"native {device}": ("block", blocks.native),
                f"workspaces {device}": ("workspace", blocks.workspaces),
                f"in-flight {device}": ("block", blocks.pending),
                f"cuda-ipc {device}": ("block", blocks.exported),
            }
            for key, (word, found) in named.items():
                readings[key] = {f"{word} at {address:#x}": size for address, size in found.items()}
        segments = read_segments(index) or []
        readings[f"reserved {device}"] = _empty_pools(segments)
        allocations = self._allocations(device, now) if self._driver else None
        if allocations is None:
            return _Card(readings)
        explained = [(address, size) for _, address, size, _ in segments]
        explained += [part for pool in announced_pools() if pool.device == device for part in pool.ranges]
        sizes = {address: size for (where, address), size in storages.items() if where == device}
        outside = {
            address: size
            for address, size in allocations
            if not common([(address, size)], explained) and not _is_filled(address, size, sizes)
        }
        if blocks is None:
            # An allocator without a list, such as cudaMallocAsync, takes each workspace from the driver.
            of_blas = workspace_sizes_here(index)
            workspaces = {address: size for address, size in outside.items() if size in of_blas}
            readings[f"workspaces {device}"] = {f"workspace at {each:#x}": size for each, size in workspaces.items()}
            outside = {address: size for address, size in outside.items() if address not in workspaces}
        arrays = {f"array at {each.address:#x}": each.bytes for each in TRACE.arrays_on(index)}
        names = {allocation_name(address): size for address, size in outside.items()}
        readings[f"allocations {device}"] = names | arrays
        counted = _counted(now, device)
        unlisted = None if counted is None else counted - total(allocations) - sum(arrays.values())
        unseen = without([(address, 1) for address in sorted(sizes)], sorted([*explained, *allocations]))
        imported: dict[int, int] = {}
        for address, _ in unseen:
            start, size = range_at(index, address) or (address, sizes[address])
            imported[start] = size
        return _Card(readings, allocations, unlisted, now.amounts.get(f"driver {device}"), imported)


def _is_filled(address: int, size: int, storages: Mapping[int, int]) -> bool:
    """Return whether an allocation is under tensors, as cupy's is that torch has a view of: it is judged as theirs.

    Args:
        address: of the allocation.
        size: its bytes.
        storages: bytes of the storages by address; 0 for one that is older, which may fill it.
    """
    inside = [(start, held) for start, held in storages.items() if address <= start < address + size]
    return any(not held for _, held in inside) or 2 * sum(held for _, held in inside) >= size


def allocation_name(address: int) -> str:
    """Return how an allocation of the driver is called in the items of a reading."""
    return f"allocation at {address:#x}"


def _index(device: str) -> int:
    return int(device.partition(":")[2])


def _counted(now: Counters, device: str) -> int | None:
    """Return the bytes that the driver counts for this process, but for what is idle in its own memory pools."""
    beyond, reserved = now.amounts.get(f"driver {device}"), now.amounts.get(f"reserved {device}")
    if beyond is None or reserved is None:
        return None
    mapped = sum(now.items.get(f"arena {device}", {}).values())
    return beyond + reserved + mapped - (now.amounts.get(f"memory-pool {device}") or 0)


def _empty_pools(segments: Iterable[Segment]) -> dict[str, int]:
    """Return the segments of private pools in which nothing is in use.

    One of the default pool goes back as soon as anybody empties the cache; one of a private pool only if the pool's
    owner is gone.
    """
    return {
        f"pool {pool}, segment at {address:#x}": size
        for pool, address, size, used in segments
        if not used and pool != (0, 0)
    }
