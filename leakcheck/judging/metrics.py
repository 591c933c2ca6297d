"""What is judged, and how each row of the table (`rules`) is read: from a snapshot, and from a test's reading.

Readings are disjoint: what one metric has counted is left out of the next, coarser one.  A leaked tensor is one finding
and not four (its storage, the arena that it keeps mapped, the driver's bytes behind that, the process's memory).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec
from msgspec.structs import asdict, replace

from lowtide.leakcheck.judging.rules import RULES, bound_of_test
from lowtide.leakcheck.resources.resource import Bound, Items, Rule
from lowtide.probes.device.torch_allocator import PoolSegments
from lowtide.probes.memory.ranges import common
from lowtide.probes.objects.listed import frozen_by_program
from lowtide.probes.snapshot import Snapshot
from lowtide.probes.stages import PoolKind
from lowtide.reports.schema import Finding, ResourceName, Verdict

NOT_OF_PYTHON: tuple[Verdict, ...] = ("native-held", "in-flight")
"""The verdicts on tensors' memory that has no tensor object any more, or never had one."""


class Reading(msgspec.Struct, frozen=True):
    """What a test, a fixture or a life is judged by at one moment.

    Attributes:
        items: per metric's key, what is its own and still there, by name, with bytes or 1 each.
        amounts: per metric's key a level of the whole process; None if it cannot be read.
    """

    items: Mapping[str, Items] = msgspec.field(default_factory=dict)
    amounts: Mapping[str, int | None] = msgspec.field(default_factory=dict)


class Metric(Bound, frozen=True, kw_only=True):
    """Something that must come back: a row of the table on one device, with when it counts as back.

    Attributes:
        resource: see `Rule`.
        device: "cpu", "cuda:0", or "" where the reading belongs to the process.
        key: of the row, with the device: what it is called in a reading.
        is_named: whether it counts what is new by name: one thing that went away must not hide another that stayed.
        unit: see `Rule`.
        verdict: see `Rule`.
        excused: what does not count, as the counters call it.
    """

    resource: ResourceName
    device: str
    key: str = ""
    is_named: bool = False
    unit: str = "bytes"
    verdict: Verdict | None = None
    excused: Collection[str] = ()

    def read(self, reading: Reading) -> int | None:
        """Return the bytes or the count in a reading; None where this machine cannot say."""
        return sum(self.items(reading).values()) if self.is_named else reading.amounts.get(self.key, 0)

    def items(self, reading: Reading) -> Items:
        """Return what there is by name, with bytes or 1 each; nothing of what is a level."""
        found = reading.items.get(self.key, {})
        if not self.excused:
            return found
        return {name: size for name, size in found.items() if as_counted(self.resource, name) not in self.excused}

    def above(self, baseline: Reading, now: Reading) -> int | None:
        """Return how far `now` is above `baseline`; None where one of them cannot say."""
        if self.is_named:
            return sum(self.new_items(baseline, now).values())
        before, after = self.read(baseline), self.read(now)
        return None if before is None or after is None else after - before

    def new_items(self, baseline: Reading, now: Reading) -> dict[str, int]:
        """Return what is there now, by name, and was not at the baseline."""
        known = baseline.items.get(self.key, {})
        return {name: amount for name, amount in self.items(now).items() if name not in known}


def _metric_of(rule: Rule, bound: Bound, device: str, tolerance: int, *, is_named: bool) -> Metric:
    return Metric(
        **asdict(replace(bound, tolerance=tolerance)),
        resource=rule.resource,
        device=device,
        key=_key_of(rule, device),
        is_named=is_named,
        unit=rule.unit,
        verdict=rule.verdict,
    )


def _key_of(rule: Rule, device: str) -> str:
    return rule.key_on(device if rule.place != "process" else "")


def shutdown_metrics(device: str) -> tuple[Metric, ...]:
    """Return what must be back on a device after an engine's shutdown, by the table, as far as snapshots have it.

    `globals` are not among them: `lowtide.leakcheck.lives.life_reader` compares them one by one.
    """
    card, levels = device != "cpu", {*_LEVELS_OF_SNAPSHOT, *_LEVELS_OF_COUNTERS}
    return tuple(
        _metric_of(rule, rule.life, where, rule.life.allowed(card=card), is_named=rule.key not in levels)
        for rule, where in _rows_of_lives(device)
        if rule.life is not None
    )


def reading_of(snapshot: Snapshot, device: str) -> Reading:
    """Return what the life of an engine on a device is judged by at the moment of a snapshot, as far as that has it."""
    items: dict[str, Items] = {}
    amounts: dict[str, int | None] = {}
    for rule, where in _rows_of_lives(device):
        key = _key_of(rule, where)
        if rule.key in _ITEMS_OF_SNAPSHOT:
            items[key] = _ITEMS_OF_SNAPSHOT[rule.key](snapshot, where)
        elif rule.key in _LEVELS_OF_SNAPSHOT:
            amounts[key] = _LEVELS_OF_SNAPSHOT[rule.key](snapshot, where)
    return Reading(items, amounts)


def _rows_of_lives(device: str) -> list[tuple[Rule, str]]:
    """Return the rows that are judged in a life, but for settings, each with where it is on a device."""
    return [(rule, where) for rule in RULES if rule.life and rule.key != "globals" for where in _places(rule, device)]


def _places(rule: Rule, device: str) -> Sequence[str]:
    """Return where a row is judged in the life of an engine on one device."""
    if rule.key == "host-memory":
        return ("cpu",)
    if rule.place == "process":
        return ("",)
    if device == "cpu":
        return ("cpu",) if rule.place == "device" else ()
    # An engine's arenas are on its device.
    return ("cpu", device) if rule.key == "tensors" else (device,)


def as_counted(resource: str, name: str) -> str:
    """Return what the counters call an item of a snapshot: a child process by its number alone."""
    return name.partition(" ")[0] if resource == "processes" else name


def _pools(snapshot: Snapshot, kind: PoolKind) -> dict[str, int]:
    return {
        f"{pool.tag} at {address:#x}": length
        for pool in snapshot.pools
        if pool.kind == kind
        for address, length in pool.ranges
    }


def _torch_pools(snapshot: Snapshot, device: str) -> tuple[PoolSegments, ...] | None:
    """Return the pools of torch's allocator on a device; None where its counters do not say what is there."""
    allocator = snapshot.allocator(device)
    if allocator is None:
        return ()
    return allocator.pools if allocator.trusted else None


def _in_torch_pools(amount: Callable[[PoolSegments], int]) -> Callable[[Snapshot, str], int | None]:
    """Return the reading of bytes that each pool of torch's allocator has some of."""

    def level(snapshot: Snapshot, device: str) -> int | None:
        pools = _torch_pools(snapshot, device)
        return None if pools is None else sum(map(amount, pools))

    return level


def _exported_memory(snapshot: Snapshot, device: str) -> dict[str, int]:
    """Return the bytes of torch's blocks that wait for who has opened them by CUDA IPC, by name."""
    pools = _torch_pools(snapshot, device) or ()
    return {f"block at {address:#x}": size for pool in pools for address, size in pool.exported_at}


def _arena_without_tensors(snapshot: Snapshot, device: str) -> int:
    """Return the bytes mapped by arenas over which no tensor lives: one with a tensor over it is that tensor's leak."""
    tensors = snapshot.tensors.on(device)
    return sum(
        pool.mapped
        for pool in snapshot.pools
        if pool.kind == "arena" and pool.device == device and not common(pool.ranges, tensors)
    )


def _empty_private_pools(snapshot: Snapshot, device: str) -> dict[str, int]:
    """Return the bytes of private pools' segments with nothing in use, by name: no library's first use makes these.

    They go back only when the pool's owner is gone.
    """
    return {
        f"pool {pool.pool_id}, segment at {address:#x}": size
        for pool in _torch_pools(snapshot, device) or ()
        if pool.private
        for address, size in pool.empty_at
    }


DRIVER_HOLDER = "the driver or native code"
"""Who holds a card's memory that is neither in arenas nor in torch's segments."""

DRIVER_ADVICE = "give it back where native code took it; what the driver keeps by itself ends with the process"


def unaccounted_driver_memory(snapshot: Snapshot, device: str) -> int | None:
    """Return the driver's bytes of this process less what arenas and torch's segments hold of them."""
    total, reserved = snapshot.driver_bytes(device), snapshot.reserved(device)
    if total is None or reserved is None:
        return None
    return total - reserved + snapshot.asleep(device) - snapshot.arena_mapped(device=device)


def unaccounted_host_memory(snapshot: Snapshot) -> int:
    """Return the process's own bytes (`lowtide.probes.host.counters.own_bytes`) that nothing else explains.

    What announced pools, tensors, files of /dev/shm and torch's page-locked cache hold of them is judged by itself;
    what is free at the tops of threads' arenas nobody holds.
    """
    pools = [pool.resident for pool in snapshot.pool_residency]
    tensors = snapshot.tensor_residency
    private = snapshot.host.own - snapshot.host.shared - snapshot.host.kept_free
    private -= sum(part.anonymous + part.swapped for part in (*pools, tensors))
    # A page that only other processes have touched is resident, and not this one's.
    named = sum(part.shared for part in (*pools, snapshot.file_residency))
    named += max(tensors.shared, snapshot.pinned.torch_reserved or 0)
    return private + max(0, snapshot.host.shared - named)


_LEVELS_OF_SNAPSHOT: Mapping[str, Callable[[Snapshot, str], int | None]] = {
    "tensors": lambda snapshot, device: snapshot.tensors.bytes_on(device),
    "unreadable": lambda snapshot, _: snapshot.tensors.unreadable,
    # Of blocks in use what no tensor that Python sees explains, and no library's workspace.
    "native": _in_torch_pools(lambda pool: pool.unclaimed),
    "in-flight": _in_torch_pools(lambda pool: pool.pending),
    "arena": _arena_without_tensors,
    "empty-segments": _in_torch_pools(lambda pool: 0 if pool.private else pool.empty),
    "driver": unaccounted_driver_memory,
    "pinned-cache": lambda snapshot, _: snapshot.pinned.torch_reserved,
    "host-memory": lambda snapshot, _: unaccounted_host_memory(snapshot),
    "gc-frozen": lambda snapshot, _: frozen_by_program(snapshot.frozen),
}
"""How a row of the table is read from a snapshot on a device, by the row's key, where it is one figure."""

_ITEMS_OF_SNAPSHOT: Mapping[str, Callable[[Snapshot, str], Items]] = {
    "cuda-ipc": _exported_memory,
    "reserved": _empty_private_pools,
    "pinned": lambda snapshot, _: _pools(snapshot, "pinned"),
    "host-pools": lambda snapshot, _: _pools(snapshot, "host"),
}
"""How others are read that have names; the rest are in the counters."""


_LEVELS_OF_COUNTERS = ("memory-pool",)
"""The keys of rows that are one figure and in the counters."""


HOST_MEMORY_TOLERANCE = bound_of_test("host-memory").allowed(card=False)
"""Bytes of the process's own memory that may stay."""

DRIVER_TOLERANCE = bound_of_test("driver").tolerance
"""Bytes that the driver may count more where its allocations cannot be listed."""

UNLISTED_TOLERANCE = bound_of_test("unlisted").tolerance
"""Bytes that the driver may count more beyond what it lists."""

_LEVELS = ("pinned", "gc-frozen", "host-memory", "driver")
"""The keys of what a test's reading has as one figure, without names."""


def host_memory_tolerance(devices: Collection[str]) -> int:
    """Return the bytes of the process's own memory that may stay, by the devices that it uses."""
    return bound_of_test("host-memory").allowed(card=not set(devices) <= {"cpu"})


def may_be_of_libraries(finding: Finding, devices: Collection[str]) -> bool:
    """Return whether host memory that no object of Python's explains may be what a card's libraries take."""
    return finding.resource == "host-memory" and finding.bytes <= host_memory_tolerance(devices)


def plain_metrics(devices: Collection[str], tolerance: int = 0) -> tuple[Metric, ...]:
    """Return what a plain test is judged by; a metric's key is that of its row and its device, as `tensors cuda:0`.

    Args:
        devices: the devices that are judged, `cpu` included.
        tolerance: bytes that may stay of each resource that is counted in bytes; the coarse levels (`driver` without a
            list of allocations, `host-memory`) keep their own tolerance where that is larger.
    """
    card = not set(devices) <= {"cpu"}
    metrics = []
    for device in ("", *devices):
        places = ("process",) if not device else ("device",) if device == "cpu" else ("device", "card")
        for rule in RULES:
            if rule.test is not None and rule.place in places:
                # What arrays explain has no more room in a process that uses a card: see `may_be_of_libraries`.
                allowed = rule.test.allowed(card=card and rule.key != "host-memory")
                if rule.unit == "bytes":
                    allowed = max(allowed, tolerance)
                metrics.append(_metric_of(rule, rule.test, device, allowed, is_named=rule.key not in _LEVELS))
    return tuple(metrics)
