"""Who holds memory on a host, as data with stable names; its JSON Schema is generated from these types."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from lowtide.probes.device.driver.card_holders import CardHolders
from lowtide.probes.processes.outside_view import Holders, ProcessView
from lowtide.probes.processes.shared_memory_files import SharedMemoryFile
from lowtide.reports.reading.json_schemas import schema_of
from lowtide.reports.schema import CardMemory, NotMeasured, json_bytes

SCHEMA: Literal["lowtide-ps/1"] = "lowtide-ps/1"


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A part of the listing: keyword arguments only, unknown fields are errors."""


class Card(_Record, frozen=True, kw_only=True):
    """One card, in bytes.

    Attributes:
        used: what programs have in use, without `reserved`; None where the driver does not report it.
        total: its memory, with `reserved`.
        reserved: what driver and firmware keep for themselves.
        unlisted: the part of `used` that belongs to no process which the driver lists, as of another container.
    """

    device: str
    used: int | None
    total: int | None
    reserved: int
    unlisted: int | None


class Process(_Record, frozen=True, kw_only=True):
    """A process that holds memory on a card, or one of an engine; memory in bytes.

    Attributes:
        is_here: false for one that the driver lists and that is not seen here: in another container, or ended.
        parent: its parent's process identifier; None where it is not seen here.
        is_orphan: whether the process that started it has ended.
        since: when it began, in ISO 8601; empty where it is not seen here.
        role: its part in an engine and its rank, as `vllm worker, rank tp1`; empty if unknown.
        resident: what is in physical memory on the host.
        private: what only it has on the host, swapped out or not; None where that may not be read.
        swapped: the part of `private` that is swapped out.
        shared_memory: bytes that it maps of each file in /dev/shm, by name.
    """

    pid: int
    is_here: bool
    name: str
    user: str
    parent: int | None
    is_orphan: bool
    since: str
    status: str
    command: str
    role: str
    rank: int | None
    cards: tuple[CardMemory, ...]
    resident: int | None
    private: int | None
    swapped: int | None
    descriptors: int | None
    shared_memory: dict[str, int] | None


class DeadFile(_Record, frozen=True, kw_only=True):
    """An entry of /dev/shm that no living process uses.

    Attributes:
        library: who makes files with such names; empty where the name tells nothing, and it may be kept on purpose.
        bytes: memory that comes back when it is removed.
        length: bytes as its users would see them.
        age: seconds since it was made, or last written, renamed or resized.
        remove: the command that removes it.
    """

    path: str
    library: str
    bytes: int
    length: int
    age: float
    owner: str
    remove: str


class Exceeded(_Record, frozen=True, kw_only=True):
    """What holds more than `--fail-above` allows."""

    what: str
    bytes: int


class Listing(_Record, frozen=True, kw_only=True):
    """Who holds memory on a host.

    Attributes:
        driver: `nvml`, `amdsmi` or `none`.
        limit: the bytes of `--fail-above`; None without it.
        exceeded: what holds more than that.
        not_measured: what could not be read, and why.
    """

    schema: Literal["lowtide-ps/1"]
    version: str
    created: str
    driver: str
    cards: tuple[Card, ...]
    processes: tuple[Process, ...]
    dead_files: tuple[DeadFile, ...]
    not_measured: tuple[NotMeasured, ...]
    limit: int | None = None
    exceeded: tuple[Exceeded, ...] = ()


def make_listing(holders: Holders, *, version: str, now: datetime.datetime, limit: int | None = None) -> Listing:
    """Return what was read, as it is written.

    Args:
        holders: what was read.
        version: lowtide's.
        now: the time of the reading.
        limit: bytes that a card, an orphan, or all files that dead libraries have left may hold; None for any.
    """
    processes = [*map(_process, holders.processes), *(_unseen(pid, held) for pid, held in holders.unseen.items())]
    return Listing(
        schema=SCHEMA,
        version=version,
        created=now.isoformat(timespec="seconds"),
        driver=holders.driver,
        cards=tuple(map(_card, holders.cards)),
        processes=tuple(sorted(processes, key=_size, reverse=True)),
        dead_files=tuple(map(_dead_file, holders.files.dead)),
        not_measured=tuple(_not_measured(holders)),
        limit=limit,
        exceeded=() if limit is None else tuple(found for found in _amounts(holders) if found.bytes > limit),
    )


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a listing, as shipped in `lowtide-ps-1.schema.json`."""
    return schema_of(Listing, SCHEMA)


def encode(listing: Listing) -> str:
    """Return the listing as indented JSON."""
    return msgspec.json.format(json_bytes(listing), indent=2).decode()


def _amounts(holders: Holders) -> Iterator[Exceeded]:
    """Yield what `--fail-above` compares."""
    for card in holders.cards:
        yield Exceeded(what=f"{card.device} in use", bytes=card.used or 0)
    for view in holders.processes:
        if view.is_orphan:
            held = view.private + sum(size or 0 for size in view.cards.values())
            yield Exceeded(what=f"orphan {view.pid} ({view.name})", bytes=held)
    yield Exceeded(what="files that dead processes left in /dev/shm", bytes=holders.files.left_by_libraries)


def _not_measured(holders: Holders) -> Iterator[NotMeasured]:
    if holders.driver_note:
        yield NotMeasured(what="cards", why=holders.driver_note)
    for card in holders.cards:
        if card.used is None:
            yield NotMeasured(what=card.device, why=card.note)
    for view in holders.processes:
        for what, why in view.not_measured.items():
            yield NotMeasured(what=f"{what} of pid {view.pid}", why=why)
    if holders.files.not_measured:
        yield NotMeasured(what="/dev/shm", why=holders.files.not_measured)
    for undecided in holders.files.undecided:
        yield NotMeasured(what=undecided.file.path, why=undecided.why)


def _card(card: CardHolders) -> Card:
    return Card(device=card.device, used=card.used, total=card.total, reserved=card.reserved, unlisted=card.unlisted)


def _process(view: ProcessView) -> Process:
    memory = view.memory
    return Process(
        pid=view.pid,
        is_here=True,
        name=view.name,
        user=view.user,
        parent=view.parent,
        is_orphan=view.is_orphan,
        since=datetime.datetime.fromtimestamp(view.created, datetime.timezone.utc).isoformat(timespec="seconds"),
        status=view.status,
        command=view.command,
        role=str(view.role),
        rank=view.role.rank,
        cards=_on_cards(view.cards),
        resident=view.resident,
        private=None if memory is None else memory.private,
        swapped=None if memory is None else memory.swapped,
        descriptors=view.descriptors,
        shared_memory=None if view.shared_memory is None else dict(view.shared_memory),
    )


def _unseen(pid: int, held: Mapping[str, int | None]) -> Process:
    return Process(
        pid=pid,
        is_here=False,
        name="",
        user="",
        parent=None,
        is_orphan=False,
        since="",
        status="",
        command="",
        role="",
        rank=None,
        cards=_on_cards(held),
        resident=None,
        private=None,
        swapped=None,
        descriptors=None,
        shared_memory=None,
    )


def _on_cards(held: Mapping[str, int | None]) -> tuple[CardMemory, ...]:
    return tuple(CardMemory(device=device, bytes=size) for device, size in held.items())


def _dead_file(file: SharedMemoryFile) -> DeadFile:
    return DeadFile(
        path=file.path,
        library=file.library,
        bytes=file.bytes,
        length=file.length,
        age=round(file.age, 1),
        owner=file.owner,
        remove=file.remove,
    )


def _size(process: Process) -> tuple[int, int]:
    on_cards = sum(card.bytes or 0 for card in process.cards)
    return on_cards, process.private or process.resident or 0
