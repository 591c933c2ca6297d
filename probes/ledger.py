"""The breakdown that adds up: one device's used bytes as named lines, and what none of them explains."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from lowtide.probes.device.torch_allocator import PoolSegments
from lowtide.probes.snapshot import Snapshot


class LedgerError(ValueError):
    """A ledger that cannot be drawn up from this snapshot; the message says what to do."""


@dataclass(frozen=True, slots=True)
class DeviceLedgerLine:
    """One named part of the total.

    Attributes:
        name: what holds the bytes.
        bytes: how many.
        note: what the name does not say; may be empty.
    """

    name: str
    bytes: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class LedgerBase:
    """What a device costs before anything is kept on it: constants of the run, measured by the caller.

    Attributes:
        device: `cuda:0`, `cpu`.
        context: bytes; on a card the driver's context, right after initialisation, on `cpu` the interpreter with
            what it imported.
        libraries: bytes; kernels and libraries, which load lazily, after one warm-up.
    """

    device: str
    context: int
    libraries: int = 0


@dataclass(frozen=True, slots=True)
class DeviceLedger:
    """One device's bytes; `sum(line.bytes for line in lines) + unexplained == total`.

    Attributes:
        device: `cuda:0`, `cpu`.
        total: bytes that the source says this process holds; None if it does not report it.
        source: who says so: `nvml`, `amdsmi`, `none`; for `cpu` the kernel's `rss`.
        lines: the parts that are known.
        unexplained: the rest; negative where lines overlap; None without a total.
    """

    device: str
    total: int | None
    source: str
    lines: tuple[DeviceLedgerLine, ...]
    unexplained: int | None


def base_from(snapshot: Snapshot, device: str) -> int:
    """Bytes on `device` that no line explains at this moment.

    Taken right after initialisation it is `LedgerBase.context`; taken again after a warm-up, less the first, it is
    `LedgerBase.libraries`.

    Raises:
        LedgerError: the driver does not report what this process holds on `device`.
    """
    left = read_ledger(snapshot, device, LedgerBase(device, context=0)).unexplained
    if left is None:
        raise LedgerError(
            f"nothing in this snapshot says how much this process holds on {device} in all; take it with a driver that "
            "knows and with the device's index in `devices`, or use LedgerBase(device, context=0)"
        )
    return left


def read_ledger(snapshot: Snapshot, device: str, base: LedgerBase) -> DeviceLedger:
    """Draws up the ledger of one device from one snapshot; reads nothing else.

    Raises:
        LedgerError: `base` was measured on another device.
    """
    if base.device != device:
        raise LedgerError(f"the base was measured on {base.device} and cannot serve {device}; measure one there")
    if device == "cpu":
        total: int | None = snapshot.host.rss
        source = "rss"
        lines = _host_lines(snapshot, base)
    else:
        driver = next((reading for reading in snapshot.drivers if reading.device == device), None)
        total = None if driver is None else driver.process_bytes
        source = "none" if driver is None else driver.source
        lines = _device_lines(snapshot, device, base)
    explained = sum(line.bytes for line in lines)
    return DeviceLedger(device, total, source, lines, None if total is None else total - explained)


def _host_lines(snapshot: Snapshot, base: LedgerBase) -> tuple[DeviceLedgerLine, ...]:
    names = {"arena": "arena {}", "pinned": "pinned pool {}", "host": "host pool {}"}
    pools = tuple(
        DeviceLedgerLine(names[pool.kind].format(pool.tag), pool.resident.total, "resident")
        for pool in snapshot.pool_residency
    )
    # The kernel counts shared memory with mapped files, so a pool in shared memory is taken out of their line again.
    # Tensors over mapped files (weights read in place) stay in it.
    shared = sum(pool.resident.file_backed for pool in snapshot.pool_residency)
    mapped_tensors = snapshot.tensor_residency.file_backed
    return (
        DeviceLedgerLine("interpreter", base.context, "at baseline"),
        DeviceLedgerLine(
            "code, libraries and mapped files",
            snapshot.host.file_backed - shared,
            f"{mapped_tensors} bytes of it under tensors" if mapped_tensors else "",
        ),
        *((DeviceLedgerLine("libraries, loaded lazily", base.libraries, "at warm-up"),) if base.libraries else ()),
        *pools,
        DeviceLedgerLine("tensors outside pools", snapshot.tensor_residency.anonymous, "resident"),
    )


def _device_lines(snapshot: Snapshot, device: str, base: LedgerBase) -> tuple[DeviceLedgerLine, ...]:
    arenas: dict[str, int] = defaultdict(int)
    for pool in snapshot.pools:
        if pool.kind == "arena" and pool.device == device:
            arenas[pool.tag] += pool.mapped
    return (
        DeviceLedgerLine("context", base.context, "at baseline"),
        DeviceLedgerLine("kernels and libraries", base.libraries, "at warm-up"),
        *(DeviceLedgerLine(f"arena {tag}", mapped, "mapped") for tag, mapped in sorted(arenas.items())),
        *_torch_lines(snapshot, device),
    )


def _torch_lines(snapshot: Snapshot, device: str) -> tuple[DeviceLedgerLine, ...]:
    allocator = snapshot.allocator(device)
    if allocator is None:
        return ()
    if allocator.library_workspaces is None:  # no snapshot, so no pools
        if allocator.reserved is None:
            return ()
        return (DeviceLedgerLine("torch allocator", allocator.reserved, allocator.note),)
    default = [pool for pool in allocator.pools if not pool.private]
    private = [pool for pool in allocator.pools if pool.private]
    return (
        *_pool_lines("torch default pool", default),
        *_pool_lines("torch private pools", private),
        DeviceLedgerLine("library workspaces", allocator.library_workspaces, "kept by BLAS libraries between calls"),
    )


def _pool_lines(name: str, pools: list[PoolSegments]) -> tuple[DeviceLedgerLine, ...]:
    used = sum(pool.allocated - pool.workspaces for pool in pools)
    free = sum(pool.reserved - pool.allocated for pool in pools)
    ids = " ".join(f"{first}.{second}" for first, second in (pool.pool_id for pool in pools if pool.private))
    return (DeviceLedgerLine(f"{name}, in use", used, ids), DeviceLedgerLine(f"{name}, cached", free, ids))
