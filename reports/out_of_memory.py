"""What is known of an error that said that memory was not enough, in plain lines; each medium escapes them itself."""

from __future__ import annotations

from collections.abc import Iterator

from lowtide.reports.finding_lines import SHOWN_FRAMES
from lowtide.reports.schema import Finding, OutOfMemory
from lowtide.reports.sizes import format_amount, format_bytes

TITLE = "Out of memory"


def out_of_memory_lines(found: OutOfMemory) -> list[str]:
    """Return what was asked for, what there was, and who held it; the first line says it in short."""
    return [first_line(found), found.error, *_memory_lines(found), *_held_lines(found), *_last_lines(found)]


def first_line(found: OutOfMemory) -> str:
    """Return `out of memory on cuda:0 in call: 20.0 GiB were asked for`."""
    asked = "" if found.asked is None else f": {format_bytes(found.asked)} were asked for"
    return f"out of memory on {found.device} in {found.stage}{asked}"


def _memory_lines(found: OutOfMemory) -> Iterator[str]:
    for line in found.memory:
        yield f"  {line.name}: {format_bytes(line.bytes)}{f' ({line.note})' if line.note else ''}"
    if found.advice:
        yield f"advice: {found.advice}"


def _held_lines(found: OutOfMemory) -> Iterator[str]:
    if found.held:
        yield "in use then, the largest first:"
    for held in found.held:
        yield f"  {held.message}"
        yield from (f"    {line}" for line in stack_lines(held))
    if found.others:
        yield f"  … {format_amount(found.others, 'others')}: {format_bytes(found.other_bytes)}"


def stack_lines(held: Finding) -> Iterator[str]:
    """Yield the innermost frames of the stack on which something was allocated, if it is known."""
    for frame in held.allocated_at[:SHOWN_FRAMES]:
        yield f"allocated in {frame.function}, {frame.file}:{frame.line}"


def _last_lines(found: OutOfMemory) -> Iterator[str]:
    for missing in found.unread:
        yield f"not read: {missing.what} ({missing.why})"
    if found.snapshot:
        yield f"torch's snapshot: {found.snapshot} in the report's folder (lowtide snapshot FILE)"
