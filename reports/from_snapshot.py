"""What a report has of a snapshot, and of the machine and the moment in which it is made."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from datetime import datetime, timezone

import msgspec

from lowtide.probes.device.allocations import Outside
from lowtide.probes.device.driver import Driver, find_driver
from lowtide.probes.device.torch_allocator import PoolSegments
from lowtide.probes.host.memory_parts import GIVEN_OUT
from lowtide.probes.objects.listed import frozen_by_program
from lowtide.probes.originals import os, torch_with_cuda
from lowtide.probes.snapshot import Snapshot
from lowtide.reports.schema import Ledger, LedgerLine, Machine, Readings, Report, Subject


class LedgerBase(msgspec.Struct, frozen=True):
    """What a device costs before anything is kept on it: constants of the run, measured by the caller.

    Attributes:
        device: `cuda:0`, `cpu`.
        context: bytes; on a card the driver's context, right after initialisation, on `cpu` what no heap has: stacks
            and the data of libraries.
        libraries: bytes; kernels and libraries, which load lazily, after one warm-up; not asked for where `outside`
            is known.
        outside: on a card what others than torch and the arenas had asked the driver for; None where it did not list
            that.
    """

    device: str
    context: int
    libraries: int = 0
    outside: Outside | None = None


def to_readings(snapshot: Snapshot, device: str, bases: Sequence[LedgerBase]) -> Readings:
    """Return what a report keeps of a snapshot: the figures of `device`, and one ledger per base."""
    return Readings(
        tensors=snapshot.tensors.bytes_on(device),
        allocated=snapshot.allocated(device),
        reserved=snapshot.reserved(device),
        arenas=_arenas(snapshot, device),
        pinned=snapshot.pinned_bytes,
        host_pools=sum(pool.mapped for pool in snapshot.pools if pool.kind == "host"),
        driver=snapshot.driver_bytes(device),
        rss=snapshot.host.rss,
        frozen_objects=frozen_by_program(snapshot.frozen),
        cache_bytes=snapshot.cache_bytes,
        threads=snapshot.host.threads,
        native_threads=snapshot.host.native_threads,
        processes=len(snapshot.host.children),
        descriptors=snapshot.host.descriptors,
        shared_memory=snapshot.host.shared_memory,
        ledgers=tuple(to_ledger(snapshot, base) for base in bases),
        pinned_beside_tensors=max(0, (snapshot.pinned.torch_reserved or 0) - snapshot.pinned_tensors),
    )


def to_ledger(snapshot: Snapshot, base: LedgerBase) -> Ledger:
    """Return one device's ledger: its used bytes as named lines, and what none of them explains.

    Where nothing is said of a base (0 bytes), what is unexplained right after initialisation is its `context`; taken
    again after a warm-up, less the first, it is its `libraries`.
    """
    device = base.device
    total: int | None
    if device == "cpu":
        total, source, lines = snapshot.host.rss, "rss", _host_lines(snapshot, base)
    else:
        driver = next((reading for reading in snapshot.drivers if reading.device == device), None)
        total, source = (None, "none") if driver is None else (driver.process_bytes, driver.source)
        lines = _device_lines(snapshot, device, base, total)
    explained = sum(line.bytes for line in lines)
    unexplained = None if total is None else total - explained
    return Ledger(device=device, source=source, total=total, lines=lines, unexplained=unexplained)


def _line(name: str, size: int, note: str = "") -> LedgerLine:
    return LedgerLine(name=name, bytes=size, note=note)


def _arenas(snapshot: Snapshot, device: str) -> dict[str, int]:
    """Return the bytes that announced arenas have mapped on a device, by tag."""
    arenas: dict[str, int] = {}
    for pool in snapshot.pools:
        if pool.kind == "arena" and pool.device == device:
            arenas[pool.tag] = arenas.get(pool.tag, 0) + pool.mapped
    return arenas


def _host_lines(snapshot: Snapshot, base: LedgerBase) -> tuple[LedgerLine, ...]:
    names = {"arena": "arena {}", "pinned": "pinned pool {}", "host": "host pool {}"}
    pools = tuple(
        _line(names[pool.kind].format(pool.tag), pool.resident.total, "resident") for pool in snapshot.pool_residency
    )
    # The kernel counts shared memory with mapped files, so a pool in shared memory is taken out of their line again.
    # Tensors over mapped files (weights read in place) stay in it.
    shared = sum(pool.resident.file_backed for pool in snapshot.pool_residency)
    mapped_tensors = snapshot.tensor_residency.file_backed
    tensors = snapshot.tensor_residency.anonymous
    pooled = sum(pool.resident.anonymous for pool in snapshot.pool_residency)
    beside = snapshot.host.anonymous - tensors - pooled - base.context - base.libraries
    return (
        _line("stacks and data of libraries", base.context, "at baseline"),
        _line(
            "code, libraries and mapped files",
            snapshot.host.file_backed - shared,
            f"{mapped_tensors} bytes of it under tensors" if mapped_tensors else "",
        ),
        *((_line("libraries, loaded lazily", base.libraries, "at warm-up"),) if base.libraries else ()),
        *_heap_lines(snapshot, beside),
        *pools,
        _line("tensors outside pools", tensors, "resident"),
    )


def _heap_lines(snapshot: Snapshot, resident: int) -> Iterator[LedgerLine]:
    """Yield what the heaps of Python and C hold besides pools and tensors, of so many resident bytes."""
    if snapshot.host.heaps is None:
        return
    for name, size in snapshot.host.heaps.beside(snapshot.in_malloc, resident).items():
        yield _line(name, size, "beside pools and tensors" if name == GIVEN_OUT else "")


def _device_lines(snapshot: Snapshot, device: str, base: LedgerBase, total: int | None) -> tuple[LedgerLine, ...]:
    arenas = (_line(f"arena {tag}", mapped, "mapped") for tag, mapped in sorted(_arenas(snapshot, device).items()))
    known = (_line("context", base.context, "at baseline"), *arenas, *_torch_lines(snapshot, device))
    outside = snapshot.outside.get(device)
    if outside is None or base.outside is None or total is None:
        return (known[0], _line("kernels and libraries", base.libraries, "at warm-up"), *known[1:])
    # What the driver counts and lists nowhere is in no allocation that anybody has asked for.
    own = total - sum(line.bytes for line in known) - (outside.bytes - base.outside.bytes)
    asked = {name: size - base.outside.by_library.get(name, 0) for name, size in outside.by_library.items()}
    libraries = (_line(name, size, "past torch") for name, size in asked.items() if size > 0)
    return (known[0], _line("kernels and libraries", max(0, own), "in no allocation"), *libraries, *known[1:])


def _torch_lines(snapshot: Snapshot, device: str) -> tuple[LedgerLine, ...]:
    allocator = snapshot.allocator(device)
    if allocator is None:
        return ()
    if allocator.library_workspaces is None:  # no snapshot, so no pools
        if allocator.reserved is None:
            return ()
        return (_line("torch allocator", allocator.reserved, allocator.note),)
    default = [pool for pool in allocator.pools if not pool.private]
    private = [pool for pool in allocator.pools if pool.private]
    return (
        *_pool_lines("torch default pool", default),
        *_pool_lines("torch private pools", [pool for pool in private if not pool.owner]),
        *(
            line
            for owner in sorted({pool.owner for pool in private} - {""})
            for line in _pool_lines(owner, [pool for pool in private if pool.owner == owner])
        ),
        _line("library workspaces", allocator.library_workspaces, "kept by BLAS libraries between calls"),
    )


def _pool_lines(name: str, pools: list[PoolSegments]) -> tuple[LedgerLine, ...]:
    used = sum(pool.allocated - pool.workspaces - pool.asleep_in_use for pool in pools)
    free = sum(pool.reserved - pool.allocated - pool.asleep + pool.asleep_in_use for pool in pools)
    ids = " ".join(f"{first}.{second}" for first, second in (pool.pool_id for pool in pools if pool.private))
    return (_line(f"{name}, in use", used, ids), _line(f"{name}, cached", free, ids))


def this_machine(driver: Driver | None = None) -> Machine:
    """Return where this process runs; asks torch only if it is loaded.

    Args:
        driver: of the cards; None: finds it, and closes it again.
    """
    if driver is None:
        with closing(find_driver()) as found:
            return this_machine(found)
    torch = torch_with_cuda()
    devices: tuple[str, ...] = ()
    if torch is not None and torch.cuda.is_available():
        devices = tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    return Machine(
        platform=platform.platform(),
        python=platform.python_version(),
        torch="" if torch is None else str(torch.__version__),
        cpus=os.cpu_count() or 0,
        memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        devices=devices,
        driver=driver.name,
    )


def report_of(
    subjects: Sequence[Subject],
    version: str,
    command: str,
    driver: Driver | None = None,
    settings: Mapping[str, str] | None = None,
) -> Report:
    """Return a report that is made now, on this machine.

    Args:
        subjects: what was judged.
        version: lowtide's.
        command: how that was called.
        driver: as that of `this_machine`.
        settings: the command's, as texts.
    """
    return Report(
        schema="lowtide-report/1",
        version=version,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=command,
        machine=this_machine(driver),
        subjects=tuple(subjects),
        settings=dict(settings or {}),
    )
