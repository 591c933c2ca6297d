"""The finding on host memory that grows with each turn and that no container and no tensor explains."""

from __future__ import annotations

from lowtide.leakcheck.growth.host_levels import HostGrowth
from lowtide.leakcheck.judging.fingerprints import fingerprint
from lowtide.probes.host.memory_parts import NAMES
from lowtide.reports.schema import Cause, Finding
from lowtide.reports.sizes import format_bytes
from lowtide.reports.statement import Note, StatedFinding, Statement

_CAUSES: dict[str, Cause] = {NAMES["malloc"]: "native", NAMES["malloc_free"]: "native", NAMES["other"]: "native"}

_ADVICE = {
    NAMES["malloc"]: (
        "look for what is allocated in each turn and not freed: `memray run --native` names the calls; what C holds by "
        "a reference too many is among it"
    ),
    NAMES["python"]: (
        "look for small objects that each turn leaves, in no container that grows: `tracemalloc` names the line"
    ),
    NAMES["malloc_free"]: "the heap is fragmented, and keeps free memory: no leak; try MALLOC_ARENA_MAX=2",
    NAMES["other"]: "look for what maps memory in each turn: `strace -e mmap,munmap -k` names the calls",
}


def growth_of_host_memory(grown: HostGrowth, turns: str, module: str, seconds: float = 0.0, since: str = "") -> Finding:
    """Return the finding on host memory that grows.

    Args:
        grown: by how much.
        turns: what a turn is, in the plural: `tests`.
        module: the module to which the turns belong; empty if to none.
        seconds: how long a turn takes; 0 where it may take any time.
        since: the moment from which it has grown, where nobody has counted the turns.
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
        advice=_ADVICE.get(grown.part),
        trend="growth",
    )
