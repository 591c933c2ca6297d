"""Who holds memory on this host beyond an engine's life: on cards, as orphans, in files of the dead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lowtide.probes.device.driver import Driver
from lowtide.probes.device.driver.card_holders import CardHolders, read_card_holders
from lowtide.probes.host.process_files import REAPERS, count_descriptors, open_files, stat
from lowtide.probes.processes.outside_view import ByCard, ProcessView, by_process, is_left_by_an_engine, read_processes
from lowtide.probes.processes.shared_memory_files import SharedMemoryReading, read_shared_memory
from lowtide.probes.processes.side_by_side import PATIENCE_S, read_side_by_side

_CARD_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/kfd"), Path("/dev/dxg"))
_CARD_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/dxg")


@dataclass(frozen=True, slots=True)
class Holders:
    """Who holds what.

    Attributes:
        driver: which driver was asked: `nvml`, `amdsmi` or `none`.
        driver_note: why no card was found; empty if one was.
        cards: what the driver says of each card.
        processes: those that the driver lists and that are seen here, and orphans of engines; sorted by beginning.
        unseen: what the driver counts for processes that are not seen here, by process identifier: they are in another
            container, or have ended.
        files: what is in /dev/shm.
    """

    driver: str
    driver_note: str
    cards: tuple[CardHolders, ...]
    processes: tuple[ProcessView, ...]
    unseen: Mapping[int, ByCard]
    files: SharedMemoryReading


def read_holders(driver: Driver) -> Holders:
    """Read all cards, their processes, orphans of engines, and the files of the dead.

    Args:
        driver: reports who holds what on cards.
    """
    cards = read_card_holders(driver)
    listed = by_process(cards)
    here = [pid for pid in listed if _is_here(pid)]
    processes = read_processes({*here, *_left_processes()}, listed)
    seen = {view.pid for view in processes}
    return Holders(
        driver=driver.name,
        driver_note="" if cards else driver.read(0).note,
        cards=cards,
        # A number of another container's may be that of a process here.
        processes=tuple(view for view in processes if view.pid in here or view.is_orphan),
        unseen={pid: by_card for pid, by_card in listed.items() if pid not in here or pid not in seen},
        files=read_shared_memory(),
    )


def _is_here(pid: int) -> bool:
    """Whether a number of the driver's is that of a process here, and not of another container's."""
    if stat(pid) is None:
        return False
    if count_descriptors(pid) is None or not any(device.exists() for device in _CARD_DEVICES):
        return True
    return any(file.startswith(_CARD_FILES) for file in open_files(pid))


def _left_processes() -> list[int]:
    """Orphans of engines, and of programs that lowtide has watched."""
    left = read_side_by_side(is_left_by_an_engine, _children_of_init(), PATIENCE_S)
    return [pid for pid, is_left in left.items() if is_left]


def _children_of_init() -> Iterator[int]:
    """Processes that the system has started, and orphans."""
    for entry in Path("/proc").iterdir():
        process = stat(int(entry.name)) if entry.name.isdigit() else None
        parent = stat(process.parent) if process is not None else None
        if process is not None and parent is not None and (parent.pid == 1 or parent.command in REAPERS):
            yield process.pid
