"""Whether one rank of an engine has kept more in a sleep than its peers.

As where a sleep does not reach one rank, or one rank alone has something that no sleep knows (sglang#28902,
NeMo-RL#223).  Ranks need not hold the same: the first may have an embedding, the last a head.  So a rank is compared
with the peer that kept the least part of what it had, and what it had more than that peer at work, it may keep.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lowtide.leakcheck.judging.fingerprints import fingerprint
from lowtide.leakcheck.judging.metrics import DRIVER_TOLERANCE
from lowtide.leakcheck.processes.process_growth import role_of
from lowtide.reports.processes.stage_processes import ProcessName
from lowtide.reports.schema import Finding
from lowtide.reports.sizes import format_bytes
from lowtide.reports.statement import reworded

LEAST_ON_HOST = 1 << 20
"""Bytes of tensors and arenas on the CPU that a rank may keep more than its peers: these are counted exactly."""

LEAST_PART = 0.02
"""The part of what a rank had at work that it may keep more: allocators round, and ranks are never quite even."""


@dataclass(frozen=True)
class RankLevels:
    """What one rank had and has, in bytes on the engine's kind of device.

    Attributes:
        process: which it is.
        at_work: what it held before the sleep, without what the sleep is not asked for.
        asleep: what of that is there.
        arenas: what it has mapped now, by tag.
    """

    process: ProcessName
    at_work: int
    asleep: int
    arenas: Mapping[str, int]


@dataclass(frozen=True)
class UnevenRank:
    """A rank that kept more than its peers.

    Attributes:
        rank: which.
        peer: the one that kept the least of what it had.
        excess: bytes.
    """

    rank: RankLevels
    peer: RankLevels
    excess: int


def uneven_ranks(levels: Sequence[RankLevels], kind: str) -> list[UnevenRank]:
    """The ranks that have clearly kept more than the least of their peers.

    Args:
        levels: of all processes after a sleep; those without a rank are passed over.
        kind: of the engine's device: `cpu` or `cuda`.
    """
    groups: dict[tuple[str, str], list[RankLevels]] = {}
    for each in levels:
        if _rank_of(each.process) and each.at_work > 0:
            groups.setdefault((each.process.role, role_of(each.process.name)), []).append(each)
    found = []
    for group in groups.values():
        if len({_rank_of(each.process) for each in group}) < 2:
            continue
        peer = min(group, key=lambda each: each.asleep / each.at_work)
        for each in group:
            excess = _excess(each, peer)
            floor = LEAST_ON_HOST if kind == "cpu" else DRIVER_TOLERANCE
            if excess > max(floor, LEAST_PART * each.at_work):
                found.append(UnevenRank(each, peer, excess))
    return found


def _rank_of(process: ProcessName) -> str:
    return process.ranks or ("" if process.rank is None else str(process.rank))


def _excess(rank: RankLevels, peer: RankLevels) -> int:
    # Not by parts: a sleep that leaves weights on the host gives up a smaller part of a rank with more weights.
    return rank.asleep - peer.asleep - max(0, rank.at_work - peer.at_work)


def explain_uneven_rank(
    uneven: UnevenRank, stage: str, kind: str, device: str, held_by: Callable[[int], Sequence[Finding]]
) -> Finding:
    """The finding about a rank, with the holder of what it has and its peer has not, where its agent names one.

    Args:
        uneven: the rank.
        stage: the sleep.
        kind: of the engine's device: `cpu` or `cuda`.
        device: the engine's, for a rank of which no own one is known.
        held_by: asks a process who holds its largest tensors.
    """
    rank, peer = uneven.rank, uneven.peer
    message = (
        f"{rank.process.text} keeps {format_bytes(uneven.excess)} more in {stage} than {peer.process.text}: "
        f"{format_bytes(rank.asleep)} of {format_bytes(rank.at_work)}, the other "
        f"{format_bytes(peer.asleep)} of {format_bytes(peer.at_work)}"
    )
    mark = fingerprint(
        resource="tensors", device=kind, stage=stage, suspects=("uneven ranks", role_of(rank.process.name))
    )
    holder, more = _own_holder(held_by(rank.process.pid), held_by(peer.process.pid))
    tag, mapped = _own_arena(rank.arenas, peer.arenas)
    if holder is not None and more >= mapped:
        return reworded(
            holder,
            f"{message}; {format_bytes(more)} held by {holder.holder}",
            bytes=uneven.excess,
            stage=stage,
            fingerprint=mark,
            former_fingerprint="",
            process=rank.process,
            advice=f"let go of {holder.holder} in {stage}, in that rank",
        )
    return Finding(
        resource="arena" if mapped else "driver" if kind == "cuda" else "tensors",
        cause="unknown",
        bytes=uneven.excess,
        count=1,
        device=rank.process.device or device,
        stage=stage,
        message=f"{message}; {format_bytes(mapped)} in arena {tag!r}" if mapped else message,
        fingerprint=mark,
        holder=f"arena {tag!r}" if mapped else None,
        advice=f"let {stage} reach that rank as it reaches the others",
        process=rank.process,
    )


def _own_holder(ours: Sequence[Finding], theirs: Sequence[Finding]) -> tuple[Finding | None, int]:
    """The holder that has most beyond what the same one has in the peer, and by how many bytes."""
    of_peer: dict[str | None, int] = {}
    for finding in theirs:
        of_peer[finding.holder] = of_peer.get(finding.holder, 0) + finding.bytes
    more = [(finding.bytes - of_peer.get(finding.holder, 0), finding) for finding in ours if finding.holder]
    size, holder = max(more, key=lambda pair: pair[0], default=(0, None))
    return (holder, size) if size > 0 else (None, 0)


def _own_arena(ours: Mapping[str, int], theirs: Mapping[str, int]) -> tuple[str, int]:
    """The arena that has most beyond its counterpart in the peer, and by how many bytes; 0 where none has more."""
    more = {tag: size - theirs.get(tag, 0) for tag, size in ours.items()}
    tag = max(more, key=lambda each: more[each], default="")
    return tag, max(0, more.get(tag, 0))
