"""What a process of an engine holds after a stage, and what it has kept or taken that is to be gone while it sleeps.

Of ranks one may have kept more in a sleep than its peers, as where a sleep does not reach it, or it alone has something
that no sleep knows (sglang#28902, NeMo-RL#223).  Ranks need not hold the same: the first may have an embedding, the
last a head.  So a rank is compared with the peer that kept the least part of what it had, and what it had more than
that peer at work, it may keep.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from lowtide.leakcheck.findings.life_findings import SleptTensors, not_judged
from lowtide.leakcheck.findings.storage_holders import Context
from lowtide.leakcheck.judging.fingerprints import finding_of, fingerprint
from lowtide.leakcheck.judging.metrics import DRIVER_TOLERANCE
from lowtide.leakcheck.processes.messages import Levels
from lowtide.probes.host.process_files import name_of, rollup, stat
from lowtide.probes.processes.outside_view import read_role_of
from lowtide.reports.processes.stage_processes import ProcessName, ProcessStage
from lowtide.reports.schema import Finding, NotMeasured, ResourceName
from lowtide.reports.sizes import format_amount, format_bytes
from lowtide.reports.statement import HolderFacts, Statement, reworded, with_holder

SHOWN = 16 << 20
"""Bytes of host memory from which on a process without torch and without a card is listed: a bare Python has less."""

LEAST_ON_HOST = 1 << 20
"""Bytes of tensors and arenas on the CPU that a rank may keep more than its peers: these are counted exactly."""

LEAST_PART = 0.02
"""The part of what a rank had at work that it may keep more: allocators round, and ranks are never quite even."""

_OF_A_CONTEXT = 1 << 20
"""Bytes of tensors below which a process has nothing on a card but its context: what made that may be there still."""

NOTHING_SAID = Levels(tensors={}, arenas={}, reserved={}, has_torch=False)
"""Of a process that is seen from outside alone."""

_NONE: Mapping[str, str] = MappingProxyType({})


def describe_process(
    pid: int, *, variables: Mapping[str, str] = _NONE, devices: Iterable[str] = (), called: str = ""
) -> ProcessName:
    """Return a process that is there as a report names it: its parent, its role and rank, and where it holds memory.

    Args:
        pid: its process identifier.
        variables: those of its environment that it says itself: what an engine sets in the process is not seen outside.
        devices: where it holds memory.
        called: its name in `multiprocessing`, as it says itself.
    """
    process, role = stat(pid), read_role_of(pid, variables)
    return ProcessName(
        pid=pid,
        name=name_of(pid, called),
        parent=None if process is None else process.parent,
        role=role.part,
        rank=role.rank,
        ranks=role.dimensions,
        device=", ".join(sorted(devices)),
    )


def is_helper(process: ProcessName) -> bool:
    """Return whether `multiprocessing` has the process for itself: nothing of the program's runs in it."""
    return process.role in ("python resource-tracker", "python fork-server")


def pid_of(finding: Finding) -> int:
    """Return the number of the process that a finding is about; 0 for this one."""
    return 0 if finding.process is None else finding.process.pid


def private_bytes(pid: int) -> int | None:
    """Return the bytes of host memory that a process alone has; None where that may not be read."""
    memory = rollup(pid)
    return None if memory is None else memory.private


def role_of(name: str) -> str:
    """Return a process's name without the numbers in it, which differ from run to run."""
    return re.sub(r"\d+", "", name)


class ProcessLevels(msgspec.Struct, frozen=True):
    """What one process held after a stage.

    Attributes:
        process: which it is.
        levels: what it holds, as it says itself.
        cards: what the driver counts for it, by card; None where it does not say.
        host: bytes of host memory that only it has; None where that may not be read.
    """

    process: ProcessName
    levels: Levels
    cards: Mapping[str, int | None] = msgspec.field(default_factory=dict)
    host: int | None = None

    @classmethod
    def of(cls, pid: int, levels: Levels, cards: Mapping[str, int | None]) -> ProcessLevels:
        """Return the levels of a process that is there, with what is seen of it from outside."""
        held = {device for device, size in levels.tensors.items() if size} | levels.arenas.keys()
        # Each process numbers the cards that it may use from 0; the driver's number is this process's.
        devices = {*cards, *(device for device in held if device == "cpu" or not cards)}
        process = describe_process(pid, variables=levels.variables, devices=devices, called=levels.called)
        return cls(process, levels, cards, private_bytes(pid))

    def devices_held(self) -> dict[str, int]:
        """Return the bytes of tensors and in arenas by card, as the process numbers these."""
        devices = {device for device in (*self.levels.tensors, *self.levels.arenas) if device != "cpu"}
        return {
            device: self.levels.tensors.get(device, 0) + sum(self.levels.arenas.get(device, {}).values())
            for device in devices
        }

    def held(self, kind: str) -> int | None:
        """Return the bytes on the devices of a kind; None where the driver does not say.

        On cards by the driver: a tensor whose pages are gone while an engine sleeps is alive all the same.
        """
        if kind == "cpu":
            return self.levels.of(kind)
        sizes = list(self.cards.values())
        return None if not sizes or None in sizes else sum(size or 0 for size in sizes)

    def arenas(self, kind: str) -> dict[str, int]:
        """Return the bytes mapped by announced arenas on the devices of a kind, by tag; without empty ones."""
        return {
            tag: size
            for device, tags in self.levels.arenas.items()
            for tag, size in tags.items()
            if size and device.partition(":")[0] == kind
        }

    @property
    def of_libraries(self) -> int:
        """Return what of the driver's figure is neither in torch's segments nor in arenas: contexts and libraries."""
        cards = self.held("cuda")
        arenas = sum(sum(tags.values()) for device, tags in self.levels.arenas.items() if device != "cpu")
        own = sum(size or 0 for size in self.levels.reserved.values()) + arenas
        return max(0, cards - own) if cards is not None else 0

    @property
    def is_shown(self) -> bool:
        """Return whether it is listed: it has torch, or a card, or `SHOWN` bytes of host memory and is no helper."""
        is_own = not is_helper(self.process)
        return self.levels.has_torch or bool(self.cards) or ((self.host or 0) >= SHOWN and is_own)

    def as_stage(self, context: Callable[[str], int | None]) -> ProcessStage:
        """Return what a report says of it.

        Args:
            context: gives the bytes of a context alone on a device; None where that is not known.
        """
        contexts = {device: size for device in self.cards if (size := context(device)) is not None}
        names = self._names_of_cards() or {}
        left: dict[str, int | None] = {}
        kernels: dict[str, int] = {}
        libraries: dict[str, dict[str, int]] = {}
        for device, size in self._left_on_cards().items():
            beside = None if size is None else max(0, size - contexts.get(device, 0))
            name = names.get(device, "")
            asked = self.levels.outside.get(name)
            if beside is not None and asked is not None and device in contexts:
                # What the driver counts and lists nowhere is in no allocation that anybody has asked for.
                kernels[device] = max(0, beside - asked)
                beside -= kernels[device]
            if beside is not None and (of_libraries := self.levels.libraries.get(name)):
                libraries[device] = of_libraries
                beside = max(0, beside - sum(of_libraries.values()))
            left[device] = beside
        known = self.levels.resident + sum(self.levels.heaps.values())
        on_host = None if self.host is None else max(0, self.host - known)
        return ProcessStage(
            process=self.process,
            tensors=self.levels.tensors,
            arenas=self.levels.arenas,
            reserved=self.levels.reserved,
            cards=dict(self.cards),
            host=self.host,
            contexts=contexts,
            kernels=kernels,
            libraries=libraries,
            heaps=self.levels.heaps,
            unexplained={"cpu": on_host, **left},
        )

    def _left_on_cards(self) -> dict[str, int | None]:
        """Return what of each card's figure is neither in torch's segments nor in arenas; None where unknown."""
        names = self._names_of_cards()
        if names is None:
            return dict.fromkeys(self.cards, None)
        found: dict[str, int | None] = {}
        for device, size in self.cards.items():
            reserved = self.levels.reserved.get(names[device], 0)
            known = size is not None and reserved is not None
            arenas = sum(self.levels.arenas.get(names[device], {}).values())
            found[device] = max(0, (size or 0) - (reserved or 0) - arenas) if known else None
        return found

    def _names_of_cards(self) -> dict[str, str] | None:
        """Return what the process calls each card; None where that is not known.

        It numbers the cards that it may use by itself: one card is known under two names, of several none.
        """
        own = {device for device in (*self.levels.reserved, *self.levels.arenas) if device != "cpu"}
        is_one = len(own) == len(self.cards) == 1
        names = dict(zip(self.cards, own if is_one else self.cards, strict=True))
        return names if own <= set(names.values()) else None


def communicators_kept(
    stage: str, at_work: Mapping[int, ProcessLevels], asleep: Mapping[int, ProcessLevels]
) -> list[Finding]:
    """Find the processes that have NCCL communicators in a sleep that leaves nothing on the device (vllm#51485).

    Their buffers are in nothing that torch counts, so a communicator counts as kept where there is one and the driver's
    figure beside torch's segments and arenas has not fallen: `ncclCommSuspend` gives up the buffers and keeps groups.
    """
    found = []
    for pid, now in asleep.items():
        before = at_work.get(pid)
        groups = now.levels.communicators
        if before is None or not groups or now.held("cuda") is None:
            continue
        if before.of_libraries - now.of_libraries > DRIVER_TOLERANCE:
            continue
        amount = format_amount(len(groups), "NCCL communicators")
        found.append(
            _not_given_up(
                "process-groups",
                now.process,
                "cuda",
                stage,
                "nccl",
                bytes=0,
                count=len(groups),
                message=f"{now.process.text} keeps {amount} in {stage}: {', '.join(groups)}; of what the driver counts "
                f"for it {format_bytes(now.of_libraries)} are under no tensor, in no arena and in nothing of torch's, "
                f"and at work it was {format_bytes(before.of_libraries)}",
                holder=", ".join(groups),
                advice=f"destroy its process groups in {stage} or suspend them (ncclCommSuspend), and make them again "
                "in the wake",
            )
        )
    return found


def contexts_elsewhere(stage: str, now: Iterable[ProcessLevels]) -> list[Finding]:
    """Find the processes that have a context on a card where they keep nothing, beside that on which they work.

    Each costs half a gigabyte of a card that belongs to another rank (vime#4). Where a process numbers its cards in
    another way than this one, which card is which is not known, and nothing is said.

    Args:
        stage: after which this is.
        now: what each process holds.
    """
    found = []
    for each in now:
        held = each.devices_held()
        own = max(held, key=lambda device: held[device], default="")
        # Another order of the cards shows in what the driver counts.
        if not held.get(own) or (each.cards.get(own) or 0) < held[own]:
            continue
        for device, size in each.cards.items():
            if not size or held.get(device, 0) >= _OF_A_CONTEXT or device == own:
                continue
            message = f"{each.process.text} has {format_bytes(size)} on {device} after {stage}: a context, and "
            message += f"{format_bytes(held[device])} of tensors" if held.get(device) else "no tensor"
            found.append(
                finding_of(
                    "driver",
                    cause="driver",
                    bytes=size,
                    device=device,
                    stage=stage,
                    suspects=("context elsewhere", role_of(each.process.name)),
                    process=each.process,
                    message=f"{message}; it works on {own}",
                    holder="a context of CUDA",
                    advice=f"call torch.cuda.set_device in that process before {stage}, and name the device by its "
                    "index wherever a tensor, a stream or an event is made",
                )
            )
    return found


def mapped_by_failed_wake(
    stage: str, kind: str, asleep: Mapping[int, ProcessLevels], after: Mapping[int, Levels]
) -> list[Finding]:
    """Find the arenas that a wake which raised has mapped in each process and not unmapped again.

    Args:
        stage: the wake.
        kind: of the engine's device: `cpu` or `cuda`.
        asleep: what each process held before it.
        after: what each holds since.
    """
    return [
        _not_given_up(
            "arena",
            process,
            kind,
            stage,
            f"failed {tag}",
            bytes=left,
            count=1,
            message=f"{process.text}: {format_bytes(left)} of arena {tag!r} stay mapped after a {stage} that failed",
            holder=f"arena {tag!r}",
            advice=f"where {stage} fails, unmap what it has mapped before it raises",
        )
        for pid, levels in after.items()
        for process in [asleep[pid].process]
        for tag, mapped in ProcessLevels(process, levels).arenas(kind).items()
        if (left := mapped - asleep[pid].arenas(kind).get(tag, 0)) > 0
    ]


def _not_given_up(
    resource: ResourceName, process: ProcessName, kind: str, stage: str, suspect: str, **facts: Any
) -> Finding:
    """Return a finding about what a process holds on its devices of a kind while the engine sleeps."""
    return finding_of(
        resource,
        cause="not-restored",
        device=process.device or kind,
        stage=stage,
        suspects=(suspect, role_of(process.name)),
        known_by={"device": kind},
        process=process,
        **facts,
    )


def judged_asleep(
    slept: SleptTensors, stage: str, device: str, *, empties: bool, context: Callable[[], Context]
) -> tuple[list[Finding], NotMeasured | None]:
    """Return what an engine of this process has kept in a sleep, if most of what it held; and what nobody can judge.

    Args:
        slept: followed the sleep.
        stage: it.
        device: where the engine keeps its memory.
        empties: whether somebody says that the sleep leaves nothing there.
        context: gives what is known around the engine, where something is found.
    """
    collected = slept.only_collected(stage)
    sizes = slept.kept_asleep()
    if sizes is None:
        return collected, None
    # On a card each sleep gives up what it keeps on the host.
    if not empties and device == "cpu":
        return collected, not_judged(stage, sizes, slept.kind)
    holders = slept.explain_kept(stage, context())
    return [*collected, explain_kept(stage, device, sizes, None, {}, holders)], None


def explain_kept(
    stage: str,
    device: str,
    sizes: tuple[int, int],
    process: ProcessName | None,
    arenas: Mapping[str, int],
    holders: Sequence[Finding],
) -> Finding:
    """Return the finding about what a process has kept that a sleep gives up, with the largest of its holders.

    Args:
        stage: the sleep.
        device: where the engine keeps its memory.
        sizes: bytes that the sleep asks the process for, and those of them that are there.
        process: which it is; None: this one.
        arenas: bytes that arenas have mapped there, by tag.
        holders: of its tensors, as it has found them itself.
    """
    asked_for, stays = sizes
    who = "the engine" if process is None else process.text
    back = format_bytes(max(0, asked_for - stays))
    message = f"{stage} gave back {back} of {format_bytes(asked_for)} that {who} held at work"
    largest = max(holders, key=lambda finding: finding.bytes, default=None)
    arena = max(arenas, key=lambda tag: arenas[tag], default="")
    let_go = "it"
    if largest is not None:
        let_go = largest.holder or "it"
        largest = msgspec.structs.replace(largest, count=sum(finding.count for finding in holders))
        message += f"; {format_bytes(stays)} stay, the largest held by {largest.holder or 'no name'}"
    elif arena:
        message += f"; {format_bytes(stays)} stay, held by arena {arena!r}"
    advice = f"let go of {let_go} in {stage}{'' if process is None else ', in that process'}"
    kind = device.partition(":")[0]
    return _of_sleep(message, stays, stage, kind, device, "kept asleep", process, largest or arena, advice)


def explain_kept_on_host(stage: str, held: int, stays: int, holder: HolderFacts | None) -> Finding:
    """Return the finding about host memory in no tensor and no arena that an engine on the CPU has kept in a sleep.

    Args:
        stage: the sleep.
        held: its bytes at work.
        stays: those of them that are there.
        holder: who holds them, if anybody is known to.
    """
    amount = f"{stage} gave back {format_bytes(max(0, held - stays))} of {format_bytes(held)} of host memory"
    found = finding_of(
        "host-memory",
        device="cpu",
        bytes=stays,
        stage=stage,
        statement=Statement(amount=f"{amount} that the engine held at work", came=None),
        suspects=("kept asleep", "host-memory"),
        advice=f"let go in {stage} of what it says it gives up there",
    )
    if holder is None:
        return found
    return msgspec.structs.replace(with_holder(found, holder), advice=f"let go of {holder.note.holder} in {stage}")


def _of_sleep(
    message: str,
    size: int,
    stage: str,
    kind: str,
    device: str,
    suspect: str,
    process: ProcessName | None,
    holder: Finding | str,
    advice: str,
) -> Finding:
    """Return a finding about what a sleep has left, as its holder's: a finding of the process's own, or an arena."""
    suspects = (suspect, "" if process is None else role_of(process.name))
    mark = fingerprint(resource="tensors", device=kind, stage=stage, suspects=suspects)
    facts: dict[str, Any] = {"bytes": size, "stage": stage, "fingerprint": mark, "process": process, "advice": advice}
    if isinstance(holder, Finding):
        return reworded(holder, message, former_fingerprint="", **facts)
    return Finding(
        resource="arena" if holder else "driver" if kind == "cuda" else "tensors",
        cause="unknown",
        count=1,
        device=device,
        message=message,
        holder=f"arena {holder!r}" if holder else None,
        **facts,
    )


class SleptLevels(msgspec.Struct, frozen=True):
    """What one process had and has after a sleep, in bytes on the engine's kind of device.

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

    @classmethod
    def between(cls, before: ProcessLevels, now: ProcessLevels, kind: str, left: int) -> SleptLevels | None:
        """Return that of a process that held `before` at work; None where the driver does not say.

        What is reported elsewhere (`left`), or is a context's, is neither asked for nor kept.
        """
        held, holds = before.held(kind), now.held(kind)
        if held is None or holds is None:
            return None
        excused = left + (before.of_libraries if kind == "cuda" else 0)
        return cls(now.process, held - excused, holds - excused, now.arenas(kind))


class UnevenRank(NamedTuple):
    """A rank that kept more than its peers, the peer that kept the least of what it had, and the bytes more."""

    rank: SleptLevels
    peer: SleptLevels
    excess: int


def uneven_ranks(levels: Sequence[SleptLevels], kind: str) -> list[UnevenRank]:
    """Return the ranks that have clearly kept more than the least of their peers.

    Args:
        levels: of all processes after a sleep; those without a rank are passed over.
        kind: of the engine's device: `cpu` or `cuda`.
    """
    groups: dict[tuple[str, str], list[SleptLevels]] = {}
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


def _excess(rank: SleptLevels, peer: SleptLevels) -> int:
    # Not by parts: a sleep that leaves weights on the host gives up a smaller part of a rank with more weights.
    return rank.asleep - peer.asleep - max(0, rank.at_work - peer.at_work)


def explain_uneven_rank(
    uneven: UnevenRank, stage: str, kind: str, device: str, held_by: Callable[[int], Sequence[Finding]]
) -> Finding:
    """Return the finding about a rank, with the holder of what it has and its peer has not, where its agent names one.

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
    holder, more = _own_holder(held_by(rank.process.pid), held_by(peer.process.pid))
    tag, mapped = _own_arena(rank.arenas, peer.arenas)
    advice = f"let {stage} reach that rank as it reaches the others"
    if holder is not None and more >= mapped:
        message += f"; {format_bytes(more)} held by {holder.holder}"
        advice = f"let go of {holder.holder} in {stage}, in that rank"
    elif mapped:
        holder = None
        message += f"; {format_bytes(mapped)} in arena {tag!r}"
    culprit = holder or (tag if mapped else "")
    where = rank.process.device or device
    return _of_sleep(message, uneven.excess, stage, kind, where, "uneven ranks", rank.process, culprit, advice)


def _own_holder(ours: Sequence[Finding], theirs: Sequence[Finding]) -> tuple[Finding | None, int]:
    """Return the holder that has most beyond what the same one has in the peer, and by how many bytes."""
    of_peer: dict[str | None, int] = {}
    for finding in theirs:
        of_peer[finding.holder] = of_peer.get(finding.holder, 0) + finding.bytes
    more = [(finding.bytes - of_peer.get(finding.holder, 0), finding) for finding in ours if finding.holder]
    size, holder = max(more, key=lambda pair: pair[0], default=(0, None))
    return (holder, size) if size > 0 else (None, 0)


def _own_arena(ours: Mapping[str, int], theirs: Mapping[str, int]) -> tuple[str, int]:
    """Return the arena that has most beyond its counterpart in the peer, and by how many bytes; 0 where none has."""
    more = {tag: size - theirs.get(tag, 0) for tag, size in ours.items()}
    tag = max(more, key=lambda each: more[each], default="")
    return tag, max(0, more.get(tag, 0))
