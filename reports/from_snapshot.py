"""What a report has of a snapshot, and of the machine and the moment in which it is made."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import datetime, timezone

from lowtide.probes.device.driver import Driver, find_driver
from lowtide.probes.objects.listed import frozen_by_program
from lowtide.probes.originals import os, torch_with_cuda
from lowtide.probes.snapshot import LedgerBase, Snapshot, read_ledger
from lowtide.reports.schema import Ledger, LedgerLine, Machine, Readings, Report, Subject


def to_readings(snapshot: Snapshot, device: str, bases: Sequence[LedgerBase]) -> Readings:
    """Return what a report keeps of a snapshot: the figures of `device`, and one ledger per base."""
    arenas: dict[str, int] = {}
    for pool in snapshot.pools:
        if pool.kind == "arena" and pool.device == device:
            arenas[pool.tag] = arenas.get(pool.tag, 0) + pool.mapped
    return Readings(
        tensors=snapshot.tensors.bytes_on(device),
        allocated=snapshot.allocated(device),
        reserved=snapshot.reserved(device),
        arenas=arenas,
        pinned=snapshot.pinned_bytes,
        host_pools=sum(pool.mapped for pool in snapshot.pools if pool.kind == "host"),
        driver=snapshot.driver_bytes(device),
        rss=snapshot.host.rss,
        frozen_objects=frozen_by_program(snapshot.frozen),
        cache_bytes=snapshot.cache_bytes,
        threads=len(snapshot.host.threads),
        native_threads=snapshot.host.native_threads,
        processes=len(snapshot.host.children),
        descriptors=len(snapshot.host.descriptors),
        shared_memory=sum(entry.bytes for entry in snapshot.host.shared_memory if entry.mapped_here),
        ledgers=tuple(to_ledger(snapshot, base) for base in bases),
    )


def to_ledger(snapshot: Snapshot, base: LedgerBase) -> Ledger:
    """Return one device's ledger, as a report keeps it."""
    ledger = read_ledger(snapshot, base.device, base)
    lines = tuple(LedgerLine(name=line.name, bytes=line.bytes, note=line.note) for line in ledger.lines)
    return Ledger(
        device=ledger.device, source=ledger.source, total=ledger.total, lines=lines, unexplained=ledger.unexplained
    )


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
