"""A listing of who holds memory, as text of one line for each holder."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Sequence

from lowtide.reports.escaping import one_line
from lowtide.reports.processes.listing import Card, Listing, Process
from lowtide.reports.sizes import format_bytes

_GAP = "  "

_OF_OTHERS = 64 << 20
"""Bytes that belong to no process, up to which they are the driver's own: an H100 counts 15 MiB with two processes."""


def render(listing: Listing) -> str:
    """Return the listing: cards with their processes, engines without one, files of the dead, what was not measured."""
    parts = [list(_cards(listing)), list(_engines(listing, left=False)), list(_engines(listing, left=True))]
    parts += [list(_files(listing)), list(_not_measured(listing))]
    parts.append(
        [
            f"ABOVE {format_bytes(listing.limit)}: {found.what}: {format_bytes(found.bytes)}"
            for found in listing.exceeded
        ]
    )
    # Any user's process is in it, by the name that it gives itself.
    return "\n\n".join("\n".join(map(one_line, part)) for part in parts if part) + "\n"


def _cards(listing: Listing) -> Iterator[str]:
    if not listing.cards:
        why = next((each.why for each in listing.not_measured if each.what == "cards"), "no driver to ask")
        yield f"no card: {why}"
    for card in listing.cards:
        yield f"{card.device}: {format_bytes(card.used)} of {format_bytes(card.total)} in use{_reserve(card)}"
        held = [(each, size.bytes) for each in listing.processes for size in each.cards if size.device == card.device]
        rows = [_row(process, size, listing) for process, size in sorted(held, key=lambda pair: -(pair[1] or 0))]
        yield from table(("pid", "name", "user", "bytes", "parent", "since"), rows) if rows else ()
        if card.unlisted:
            whose = ": another container's?" if card.unlisted > _OF_OTHERS else ", as the driver needs for contexts"
            yield f"  {format_bytes(card.unlisted)} held by no process that the driver lists{whose}"


def _reserve(card: Card) -> str:
    return f"; the driver keeps {format_bytes(card.reserved)} more" if card.reserved else ""


def _row(process: Process, size: int | None, listing: Listing) -> tuple[str, ...]:
    if not process.is_here:
        return str(process.pid), "not seen here (another container, or ended)", "", _amount(size), "", ""
    name = f"{process.name} [{process.role}]" if process.role else process.name
    return str(process.pid), name, process.user, _amount(size), _parent(process), _since(process, listing)


def _amount(size: int | None) -> str:
    return "not reported" if size is None else format_bytes(size)


def _parent(process: Process) -> str:
    words = "orphan" if process.is_orphan else str(process.parent)
    return words if process.status in ("running", "sleeping") else f"{words}, {process.status}"


def _since(process: Process, listing: Listing) -> str:
    begun, now = (datetime.datetime.fromisoformat(text) for text in (process.since, listing.created))
    return f"{begun:%Y-%m-%d %H:%M:%S} ({_duration((now - begun).total_seconds())})"


def _duration(seconds: float) -> str:
    """Return `2 h 3 min`, of the two largest units that are not 0."""
    left, words = max(0, round(seconds)), []
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, left = divmod(left, length)
        if count:
            words.append(f"{count} {unit}")
    return " ".join(words[:2]) or "0 s"


def _engines(listing: Listing, *, left: bool) -> Iterator[str]:
    rows = [
        _row(each, each.private or each.resident, listing)
        for each in listing.processes
        if not each.cards and each.is_orphan is left
    ]
    if rows:
        yield f"{'orphans of engines' if left else 'engines'}, without a card:"
        yield from table(("pid", "name", "user", "host memory", "parent", "since"), rows)


def _files(listing: Listing) -> Iterator[str]:
    if not listing.dead_files:
        return
    total = sum(file.bytes for file in listing.dead_files)
    yield f"/dev/shm: {format_bytes(total)} in files that no living process uses:"
    rows = [
        (
            format_bytes(file.bytes),
            file.owner,
            f"{_duration(file.age)} old",
            file.library or "may be kept on purpose",
            file.remove,
        )
        for file in listing.dead_files
    ]
    yield from table(("bytes", "owner", "age", "made by", "to remove it"), rows)


def _not_measured(listing: Listing) -> Iterator[str]:
    for each in listing.not_measured:
        if each.what != "cards":
            yield f"not measured: {each.what}: {each.why}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table: its head, and a line for each row."""
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    for line in lines:
        yield ("  " + _GAP.join(word.ljust(width) for word, width in zip(line, widths, strict=True))).rstrip()
