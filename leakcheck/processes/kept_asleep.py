"""What a process of an engine holds after a stage, and what it has kept or taken that is to be gone while it sleeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lowtide.leakcheck.judging.fingerprints import fingerprint
from lowtide.leakcheck.judging.metrics import DRIVER_TOLERANCE
from lowtide.leakcheck.processes.messages import Levels
from lowtide.leakcheck.processes.process_growth import role_of
from lowtide.reports.processes.stage_processes import ProcessName
from lowtide.reports.schema import Finding
from lowtide.reports.sizes import format_amount, format_bytes
from lowtide.reports.statement import reworded


@dataclass(frozen=True)
class ProcessLevels:
    """What one process held after a stage.

    Attributes:
        process: which it is.
        levels: what it holds.
        cards: what the driver counts for it, by card; None where it does not say.
        host: bytes of host memory that only it has; None where that may not be read.
    """

    process: ProcessName
    levels: Levels
    cards: Mapping[str, int | None] = field(default_factory=dict)
    host: int | None = None

    def held(self, kind: str) -> int | None:
        """Bytes on the devices of a kind; None where the driver does not say.

        On cards by the driver: a tensor whose pages are gone while an engine sleeps is alive all the same.
        """
        if kind == "cpu":
            return self.levels.of(kind)
        sizes = list(self.cards.values())
        return None if not sizes or None in sizes else sum(size or 0 for size in sizes)

    def arenas(self, kind: str) -> dict[str, int]:
        """Bytes mapped by announced arenas on the devices of a kind, by tag; without empty ones."""
        return {
            tag: size
            for device, tags in self.levels.arenas.items()
            for tag, size in tags.items()
            if size and device.partition(":")[0] == kind
        }

    @property
    def of_libraries(self) -> int:
        """Of what the driver counts, what is neither in torch's segments nor in arenas: contexts and libraries."""
        cards = self.held("cuda")
        arenas = sum(sum(tags.values()) for device, tags in self.levels.arenas.items() if device != "cpu")
        own = sum(size or 0 for size in self.levels.reserved.values()) + arenas
        return max(0, cards - own) if cards is not None else 0


def communicators_kept(
    stage: str, at_work: Mapping[int, ProcessLevels], asleep: Mapping[int, ProcessLevels]
) -> list[Finding]:
    """The processes that have NCCL communicators in a sleep that leaves nothing on the device (vllm#51485).

    Their buffers are in nothing that torch counts, so a communicator counts as kept where there is one and the driver's
    figure beside torch's segments and arenas has not fallen: `ncclCommSuspend` gives up the buffers and keeps groups.

    Args:
        stage: the sleep.
        at_work: what each process held before it.
        asleep: what it holds now.
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
            Finding(
                resource="process-groups",
                cause="not-restored",
                bytes=0,
                count=len(groups),
                device=now.process.device or "cuda",
                stage=stage,
                message=f"{now.process.text} keeps {amount} in {stage}: {', '.join(groups)}; of what the driver counts "
                f"for it {format_bytes(now.of_libraries)} are under no tensor, in no arena and in nothing of torch's, "
                f"and at work it was {format_bytes(before.of_libraries)}",
                fingerprint=fingerprint(
                    resource="process-groups", device="cuda", stage=stage, suspects=("nccl", role_of(now.process.name))
                ),
                holder=", ".join(groups),
                advice=f"destroy its process groups in {stage} or suspend them (ncclCommSuspend), and make them again "
                "in the wake",
                process=now.process,
            )
        )
    return found


def mapped_by_failed_wake(
    stage: str, kind: str, asleep: Mapping[int, ProcessLevels], after: Mapping[int, Levels]
) -> list[Finding]:
    """The arenas that a wake which raised has mapped in each process and not unmapped again.

    Args:
        stage: the wake.
        kind: of the engine's device: `cpu` or `cuda`.
        asleep: what each process held before it.
        after: what each holds since.
    """
    found = []
    for pid, levels in after.items():
        before = asleep[pid]
        now = ProcessLevels(before.process, levels).arenas(kind)
        for tag, mapped in now.items():
            left = mapped - before.arenas(kind).get(tag, 0)
            if left <= 0:
                continue
            suspects = (f"failed {tag}", role_of(before.process.name))
            found.append(
                Finding(
                    resource="arena",
                    cause="not-restored",
                    bytes=left,
                    count=1,
                    device=before.process.device or kind,
                    stage=stage,
                    message=f"{before.process.text}: {format_bytes(left)} of arena {tag!r} stay mapped after a {stage} "
                    "that failed",
                    fingerprint=fingerprint(resource="arena", device=kind, stage=stage, suspects=suspects),
                    holder=f"arena {tag!r}",
                    advice=f"unmap in {stage} what it has mapped, where it fails, before its error leaves it",
                    process=before.process,
                )
            )
    return found


def explain_kept(
    stage: str,
    device: str,
    sizes: tuple[int, int],
    process: ProcessName | None,
    arenas: Mapping[str, int],
    holders: Sequence[Finding],
) -> Finding:
    """What a process has kept that a sleep gives up, with the largest of its holders.

    Args:
        stage: the sleep.
        device: where the engine keeps its memory.
        sizes: bytes that the sleep asks the process for, and those of them that are there.
        process: which it is; None: this one.
        arenas: bytes that arenas have mapped there, by tag.
        holders: of its tensors, as it has found them itself.
    """
    kind = device.partition(":")[0]
    asked_for, stays = sizes
    who = "the engine" if process is None else process.text
    where = "" if process is None else ", in that process"
    back = format_bytes(max(0, asked_for - stays))
    message = f"{stage} gave back {back} of {format_bytes(asked_for)} that {who} held at work"
    suspects = ("kept asleep", "" if process is None else role_of(process.name))
    mark = fingerprint(resource="tensors", device=kind, stage=stage, suspects=suspects)
    largest = max(holders, key=lambda finding: finding.bytes, default=None)
    if largest is not None:
        return reworded(
            largest,
            f"{message}; {format_bytes(stays)} stay, the largest held by {largest.holder or 'no name'}",
            bytes=stays,
            count=sum(finding.count for finding in holders),
            stage=stage,
            fingerprint=mark,
            former_fingerprint="",
            process=process,
            advice=f"let go of {largest.holder or 'it'} in {stage}{where}",
        )
    holder = f"arena {max(arenas, key=lambda tag: arenas[tag])!r}" if arenas else None
    return Finding(
        resource="arena" if arenas else "driver" if kind == "cuda" else "tensors",
        cause="unknown",
        bytes=stays,
        count=1,
        device=device,
        stage=stage,
        message=f"{message}; {format_bytes(stays)} stay, held by {holder}" if holder else message,
        fingerprint=mark,
        holder=holder,
        advice=f"let go of it in {stage}{where}",
        process=process,
    )
