"""The finding on host memory that grows with each turn and that no container and no tensor explains."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING

from lowtide.leakcheck.findings.tensor_findings import frames
from lowtide.leakcheck.growth.host_levels import HostGrowth
from lowtide.leakcheck.judging.fingerprints import fingerprint
from lowtide.probes.host.memory_parts import NAMES
from lowtide.reports.schema import Cause, Finding
from lowtide.reports.sizes import format_bytes
from lowtide.reports.statement import Note, StatedFinding, Statement, noted

if TYPE_CHECKING:
    from lowtide.leakcheck.findings.allocating_calls import RecordedTurns

_CAUSES: dict[str, Cause] = {NAMES["malloc"]: "native", NAMES["malloc_free"]: "native", NAMES["other"]: "native"}

_ADVICE = {
    NAMES["malloc"]: (
        "look for what is allocated in each turn and not freed, what C holds by a reference too many included: "
        "{tool} names the calls"
    ),
    NAMES["python"]: (
        "look for small objects that each turn leaves, in no container that grows: {tool} names the line"
    ),
    NAMES["malloc_free"]: "the heap is fragmented, and keeps free memory: no leak; try MALLOC_ARENA_MAX=2",
    NAMES["other"]: "look for what maps memory in each turn: {tool} names the calls",
}

_TOOLS = {
    NAMES["malloc"]: "`memray run --native`",
    NAMES["python"]: "`tracemalloc`",
    NAMES["other"]: "`strace -e mmap,munmap -k`",
}
"""What names the calls where nothing of lowtide's does."""

_FREE = "free in each turn what this call allocates, or give back the reference by which C holds it"

_MATTERS = 4
"""A call that has allocated less than such a part of what the turns add is not what grows."""


def growth_of_host_memory(
    grown: HostGrowth, turns: str, module: str, seconds: float = 0.0, since: str = "", option: str = ""
) -> Finding:
    """Return the finding on host memory that grows.

    Args:
        grown: by how much.
        turns: what a turn is, in the plural: `tests`.
        module: the module to which the turns belong; empty if to none.
        seconds: how long a turn takes; 0 where it may take any time.
        since: the moment from which it has grown, where nobody has counted the turns.
        option: what asks for recording the calls that allocate; empty where nothing does.
    """
    rate, low, high = (format_bytes(round(size)) for size in (grown.slope.rate, grown.slope.low, grown.slope.high))
    each = f"{rate} with each" if low == high else f"{rate} with each ({low} to {high})"
    each += f" ({format_bytes(round(grown.slope.rate / seconds))} a second)" if seconds else ""
    said = f"host memory grew by {format_bytes(grown.bytes)} over {grown.turns} {turns}, {each}"
    if since:
        said = f"host memory is {format_bytes(grown.bytes)} more than at {since}"
    return StatedFinding(
        resource="host-memory",
        cause=_CAUSES.get(grown.part, "unknown"),
        bytes=grown.bytes,
        count=grown.turns,
        device="",
        stage=f"{turns} of {module}" if module else turns,
        statement=Statement(
            amount=said, came=None, notes=(Note(f": {grown.part} has {format_bytes(grown.part_bytes)} more"),)
        ),
        fingerprint=fingerprint(
            resource="host-memory", device="", stage=turns, suspects=("growth", grown.part), module=module
        ),
        advice=_advice(grown.part, f"`{option}`" if option else _TOOLS.get(grown.part, "")),
        trend="growth",
    )


def with_call(finding: Finding, recorded: RecordedTurns, turns: str, rate: float) -> Finding:
    """Return the finding with the call that has allocated most of what grew, or why none is known.

    Args:
        finding: what `growth_of_host_memory` has given.
        recorded: what was recorded meanwhile.
        turns: as there.
        rate: bytes that a turn adds.
    """
    call, turn = recorded.call, turns.removesuffix("s")
    if recorded.why:
        return noted(finding, f"; which call allocates it is not known: {recorded.why}")
    each = 0 if call is None else call.bytes // max(1, recorded.turns)
    if call is None or each * _MATTERS < rate:
        return noted(finding, f"; no call has kept as much of what it allocated in the last {recorded.turns} {turns}")
    line = f"{PurePath(call.place.file).name}:{call.place.line}"
    where = f"at {line} in {call.place.function}"
    if call.native:
        where = f"in {call.native} ({PurePath(call.library).name}), called {where}"
    said = f"; {format_bytes(each)} of it with each {turn} allocated {where}"
    return noted(finding, said, allocated_at=frames(call.stack), advice=_FREE)


def _advice(part: str, tool: str) -> str | None:
    return _ADVICE[part].format(tool=tool) if part in _ADVICE else None
