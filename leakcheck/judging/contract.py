"""What must hold after each stage of an engine's life, besides the baseline after shutdown.

Among it what must survive a sleep in memory: contents, and the places to which captured graphs and tables point; and
what an engine must have after a trainer's weights were sent to it: those weights, and what they say.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from lowtide.leakcheck.judging.fingerprints import finding_of
from lowtide.leakcheck.judging.ladder import ALLOCATOR_HOLDER
from lowtide.leakcheck.judging.metrics import DRIVER_ADVICE, DRIVER_HOLDER, unaccounted_driver_memory
from lowtide.leakcheck.resources.resource import MIB
from lowtide.probes.memory.contents import TensorContents, changed, take_fingerprints
from lowtide.probes.memory.contents import fingerprint as fingerprint_of_tensor
from lowtide.probes.memory.pointers import LabelledRange, Moved, PointerHit, find_pointers, gone_since, moved
from lowtide.probes.memory.ranges import Range
from lowtide.probes.originals import loaded
from lowtide.probes.snapshot import Snapshot
from lowtide.probes.stages import UPDATE, announced_pools
from lowtide.reports.schema import Cause, Finding, Remedy, ResourceName
from lowtide.reports.sizes import first_of, format_amount, format_bytes

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup


if TYPE_CHECKING:
    import torch

    Tensors = Mapping[str, torch.Tensor]

_LISTED = 3


class PreservedState:
    """Remembers, before a sleep, what must be the same after the wake; holds no tensor.

    Args:
        device: where the engine keeps its memory.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._contents: tuple[TensorContents, ...] | None = None
        self._places: Mapping[str, str] = {}
        self._memory: tuple[LabelledRange, ...] = ()

    def warm_up(self, tensors: Tensors) -> None:
        """Load what reading needs, so that it is there before the first baseline."""
        take_fingerprints(tensors)
        find_pointers(tensors, [LabelledRange(1, 2, "nothing")])

    def before_sleep(self, tensors: Tensors) -> None:
        """Remember what must survive until `after_wake`.

        Args:
            tensors: by the names that a reader knows them by.
        """
        self._contents = take_fingerprints(tensors)
        self.mark()
        self._places = {
            tensor.name: part.label
            for tensor in self._contents
            for part in self._memory
            if part.start <= tensor.address < part.stop
        }

    def rewritten(self, tensors: Tensors) -> None:
        """Remember what was written into some of them since, as by an update of the weights while the rest sleeps."""
        if self._contents is None:
            return
        known = {each.name for each in self._contents}
        written = take_fingerprints({name: tensor for name, tensor in tensors.items() if name in known})
        now = {each.name: each for each in written}
        self._contents = tuple(now.get(each.name, each) for each in self._contents)

    def mark(self) -> None:
        """Note what is mapped now: once it is not mapped any more, `dangling` looks for pointers to it."""
        self._memory = tuple(self._arenas())

    def after_wake(self, stage: str, tensors: Tensors, recorded: Mapping[str, Range]) -> list[Finding]:
        """Return what was lost, moved, or points to where nothing is.

        Args:
            stage: which one ends here.
            tensors: as before the sleep.
            recorded: address and length in bytes of the buffers that captured graphs read, as they were at capture.
        """
        before, self._contents = self._contents, None
        if before is None:
            return []
        lost = changed(before, take_fingerprints(tensors))
        sizes = {tensor.name: tensor.bytes for tensor in before}
        findings = []
        if lost:
            findings.append(
                self._finding(
                    "contents",
                    "not-restored",
                    stage,
                    lost,
                    "{} changed its contents between sleep and wake",
                    "{} changed their contents between sleep and wake",
                    sum(sizes[name] for name in lost),
                    self._how_to_keep(lost),
                )
            )
        return findings + self.dangling(stage, tensors, recorded)

    def dangling(self, stage: str, tensors: Tensors, recorded: Mapping[str, Range]) -> list[Finding]:
        """Report what has moved away under captured graphs, and what points to memory unmapped since the mark.

        Args:
            stage: which one ends here.
            tensors: that must be mapped now.
            recorded: see `after_wake`.
        """
        findings = []
        live = [
            LabelledRange(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name)
            for name, tensor in tensors.items()
            if tensor.nbytes
        ]
        # What has a name must be where its name is; anything else must at least have memory behind it.
        names = {item.label for item in live}
        memory = [LabelledRange(part.start, part.stop, "") for part in self._arenas()]
        stale = [
            *moved({name: place for name, place in recorded.items() if name in names}, live),
            *moved({name: place for name, place in recorded.items() if name not in names}, memory),
        ]
        if stale:
            findings.append(
                self._finding(
                    "pointers",
                    "cuda-graph",
                    stage,
                    [item.name for item in stale],
                    "{} is not where a captured graph reads it",
                    "{} are not where captured graphs read them",
                    sum(item.bytes for item in stale),
                    f"leave it at its address in {stage}, or capture the graphs again there",
                    _now_there(stale[0]),
                )
            )
        gone = gone_since(self._memory, [(part.start, part.stop - part.start) for part in self._arenas()])
        dangling = find_pointers(tensors, gone, integers_only=True).pointers if gone else ()
        if dangling:
            findings.append(
                self._finding(
                    "pointers",
                    "not-restored",
                    stage,
                    [item.name for item in dangling],
                    "{} holds pointers to memory that is not mapped any more",
                    "{} hold pointers to memory that is not mapped any more",
                    sum(8 * item.aligned for item in dangling),
                    f"write the addresses again in {stage}, once the memory that they lead to is mapped",
                    _once_there(dangling[0].hits[0]),
                )
            )
        return findings

    def _arenas(self) -> list[LabelledRange]:
        return [
            LabelledRange(address, address + length, f"arena {pool.tag!r}")
            for pool in announced_pools()
            if pool.kind == "arena" and pool.device == self._device
            for address, length in pool.ranges
        ]

    def _how_to_keep(self, lost: Sequence[str]) -> str:
        """Return what would have kept the contents of some tensors, by where they lay."""
        places = sorted({self._places[name] for name in lost if name in self._places})
        where = f"what lies in {' and '.join(places)} is" if places else "it is"
        return f"{where} lost in a sleep: put it where a sleep drops nothing, or write it again before wake returns"

    def _finding(
        self,
        resource: ResourceName,
        cause: Cause,
        stage: str,
        names: Sequence[str],
        one: str,
        many: str,
        amount: int,
        advice: str,
        where: str = "",
    ) -> Finding:
        shown = first_of(names, _LISTED)
        several = f"{format_amount(len(names), 'tensors')} ({shown})"
        text = one.format(shown) if len(names) == 1 else many.format(several)
        return finding_of(
            resource,
            cause=cause,
            bytes=amount,
            count=len(names),
            device=self._device,
            stage=stage,
            message=text + where,
            suspects=(*names, cause),
            holder=shown,
            advice=advice,
        )


def _now_there(stale: Moved) -> str:
    now = f"{' and '.join(stale.now)} is now" if stale.now else f"{format_bytes(stale.gone)} have been released"
    return f"; {stale.name} is read at {stale.address:#x}, where {now}"


def _once_there(hit: PointerHit) -> str:
    return f"; {hit.tensor} has {hit.value:#x} at byte {hit.offset}, which was in {hit.label}"


PENDING = "pending transfers"
"""Who holds KV blocks whose copy to or from the host has not been taken in."""

SLEEPING_ARENAS = ("weights", "kv_cache", "workspace")
"""What a sleep of either level gives up; `runtime` stays."""

_WAKING_ARENAS = ("weights", "kv_cache", "runtime")
"""What must be mapped after a wake as it was before the sleep."""

ASLEEP_DRIVER_TOLERANCE = 64 * MIB
"""Bytes that the driver may count for a process whose engine sleeps at level 2, above what it counted before create."""


_ARENAS = "mapped arenas"

_ADVICE_ASLEEP: Mapping[str, str] = {
    _ARENAS: "unmap in a sleep what only an engine at work needs",
    ALLOCATOR_HOLDER: "let go of its tensors in a sleep, and call torch.cuda.empty_cache() at its end",
    DRIVER_HOLDER: DRIVER_ADVICE,
}
"""Who may hold what a level 2 sleep should have given back, and what to do about it."""


def holders(usage: Any) -> dict[str, int]:
    """Return who holds KV blocks, with how many, of a `kv_usage()`: no request does."""
    held = {PENDING: usage.pending_transfer, "no request": usage.held - usage.pending_transfer}
    return {who: blocks for who, blocks in held.items() if blocks}


def held_by_nobody(usage: Any) -> dict[str, int]:
    """Return who holds KV blocks although no request does, where an engine could not forget its prefixes."""
    return (holders(usage) if usage else {}) or {"a holder that the engine does not name": 0}


def after_sleep(stage: str, device: str, baseline: Snapshot, after: Snapshot) -> list[Finding]:
    """Report the arenas of weights, KV cache and workspaces that have pages after a sleep beyond those before create.

    (An earlier engine may have left some; that is the finding of its own shutdown.)
    """
    left = _more_mapped(SLEEPING_ARENAS, device, baseline, after)
    return [
        _of_arena(
            tag,
            stage=stage,
            device=device,
            bytes=size,
            message=f"arena {tag!r} still has {format_bytes(size)} mapped after {stage}",
            advice=f"unmap arena {tag!r} in {stage}",
        )
        for tag, size in left.items()
        if size > 0
    ]


def _more_mapped(tags: Sequence[str], device: str, before: Snapshot, after: Snapshot) -> dict[str, int]:
    return {tag: after.arena_mapped(tag, device) - before.arena_mapped(tag, device) for tag in tags}


def _of_arena(tag: str, *, suspect: str = "", cause: Cause = "unknown", **facts: Any) -> Finding:
    return finding_of("arena", cause=cause, suspects=(suspect or tag, cause), holder=f"arena {tag!r}", **facts)


def after_deep_sleep(stage: str, device: str, baseline: Snapshot, at_work: Snapshot, after: Snapshot) -> list[Finding]:
    """Report what the driver counts more after a level 2 sleep than before create, beyond the tolerance.

    Besides what libraries hold for an engine that is at work, neither in arenas nor in torch's segments (a communicator
    of NCCL has 390 MiB on an H200): that is judged when the engine is shut down.
    """
    before, now = baseline.driver_bytes(device), after.driver_bytes(device)
    if before is None or now is None:
        return []
    outside = [unaccounted_driver_memory(snapshot, device) for snapshot in (baseline, at_work)]
    of_libraries = 0 if None in outside else max(0, outside[1] - outside[0])  # type: ignore[operator]
    if now - before - of_libraries <= ASLEEP_DRIVER_TOLERANCE:
        return []
    grown = {
        _ARENAS: after.arena_mapped(device=device) - baseline.arena_mapped(device=device),
        ALLOCATOR_HOLDER: (after.reserved(device) or 0) - (baseline.reserved(device) or 0),
    }
    grown[DRIVER_HOLDER] = now - before - sum(grown.values())
    holder = max(grown, key=lambda who: grown[who])
    parts = ", ".join(f"{who} {format_bytes(size)}" for who, size in grown.items() if size > 0)
    more = f"the driver counts {format_bytes(now - before)} more after {stage} than before create"
    return [
        finding_of(
            "driver",
            stage=stage,
            device=device,
            bytes=now - before,
            suspects=("asleep", "driver"),
            cause="driver",
            message=f"{more}, of it {parts}",
            holder=holder,
            advice=_ADVICE_ASLEEP[holder],
        )
    ]


def after_wake(stage: str, device: str, before_sleep: Snapshot, after: Snapshot) -> list[Finding]:
    """Report where weights, KV cache and runtime have not the pages after a wake that they had before the sleep."""
    return [
        _of_arena(
            tag,
            stage=stage,
            device=device,
            bytes=abs(more),
            cause="not-restored",
            message=f"arena {tag!r} has {format_bytes(after.arena_mapped(tag, device))} mapped after {stage}, "
            f"{format_bytes(before_sleep.arena_mapped(tag, device))} before",
            advice=f"map in {stage} what was mapped before the sleep, no more and no less",
        )
        for tag, more in _more_mapped(_WAKING_ARENAS, device, before_sleep, after).items()
        if more
    ]


def after_failed_wake(stage: str, device: str, before: Snapshot, after: Snapshot) -> list[Finding]:
    """Report what a wake that raised has mapped: what was asleep still is, and its memory must be where it was."""
    return [
        _of_arena(
            tag,
            stage=stage,
            device=device,
            bytes=left,
            suspect=f"failed {tag}",
            cause="not-restored",
            message=f"{format_bytes(left)} of arena {tag!r} stay mapped after a {stage} that failed",
            advice=f"where {stage} fails, unmap what it has mapped before it raises",
        )
        for tag, left in _more_mapped(_WAKING_ARENAS, device, before, after).items()
        if left > 0
    ]


Tokens = Sequence[Sequence[int]]


def _unlike(expected: Tokens, tokens: Tokens) -> int:
    """Return how many prompts have other tokens than were expected."""
    return sum(list(then) != list(now) for then, now in zip_longest(expected, tokens, fillvalue=()))


def after_infer(stage: str, expected: Tokens, tokens: Tokens) -> list[Finding]:
    """Report other tokens for the same prompts than at an earlier point of the life: contents come back, too."""
    if not any(expected):
        message = f"{stage} gave no token"
        return [finding_of("contents", stage=stage, device="", suspects=("none", "unknown"), message=message)]
    wrong = _unlike(expected, tokens)
    if not wrong:
        return []
    return [
        finding_of(
            "contents",
            stage=stage,
            device="",
            count=wrong,
            suspects=("tokens", "not-restored"),
            cause="not-restored",
            message=f"{wrong} of {len(expected)} prompts give other tokens after a wake than before any sleep",
        )
    ]


def after_idle(
    stage: str, device: str, held: Mapping[str, int], after_a_step: Mapping[str, int] | None
) -> list[Finding]:
    """Report who holds KV blocks although no request runs: each of them can be had then.

    Args:
        stage: after which this is.
        device: where the blocks are.
        held: who holds blocks, with how many.
        after_a_step: the same after one more step of the engine, which shows whether it is the step that was missing;
            None where no step can be made.
    """
    findings = []
    for who, blocks in held.items():
        cause: Cause = "pending-transfer" if who == PENDING else "unknown"
        remedy = None
        if after_a_step is not None and who not in after_a_step:
            remedy = Remedy(action="engine.step()", returns_bytes=0)
        gives = "; engine.step() returns them" if remedy is not None else ""
        findings.append(
            finding_of(
                "kv-blocks",
                stage=stage,
                device=device,
                count=blocks,
                suspects=(who, cause),
                cause=cause,
                holder=who,
                remedy=remedy,
                message=f"{blocks} KV blocks are held by {who} after {stage}, and the prefix cache cannot be reset"
                f"{gives}",
            )
        )
    return findings


def failed_teardown(error: BaseException) -> Finding:
    """Report a shutdown that raised, with each step that failed; what it skipped shows in the other findings."""
    parts = error.exceptions if isinstance(error, BaseExceptionGroup) else (error,)
    reasons = [f"{type(part).__name__}: {part}" for part in parts]
    return finding_of(
        "teardown",
        stage="shutdown",
        device="",
        count=len(parts),
        suspects=(type(parts[0]).__name__, "unknown"),
        message=f"shutdown raised: {'; '.join(reasons)}",
        advice="run all steps of shutdown whichever of them fails, and raise what failed at its end",
    )


_WHERE_SENT = "look where its parameters are looked up and copied: it says that it is done, and the engine has others"


def after_update(
    device: str, before: Mapping[str, Any], sent: Mapping[str, Any], held: Mapping[str, Any]
) -> list[Finding]:
    """Report what an engine has after an update that is not what was sent, as far as both sides say what that is.

    Args:
        device: where the engine keeps its memory.
        before: what it had before, by name.
        sent: what was sent: tensors, or whatever else distinguishes their contents.
        held: what it has now, likewise.
    """
    wanted, now = digests(sent), digests(held)
    differ = [name for name in wanted if name in now and now[name] != wanted[name]]
    wrong = [name for name in differ if not _is_rounded(sent[name], held[name])]
    if not wrong:
        return []
    then = digests(before)
    some = f"{len(wrong)} of {format_amount(len(wanted), 'weights')}"
    if all(name in then and then[name] == now[name] for name in wrong):
        # Not all of what was sent need differ from what was there, as norms seldom do.
        moved = "only a part" if any(now[name] != then.get(name) for name in wanted if name in now) else "nothing"
        message = f"{UPDATE} moved {moved}: {some} {_are(wrong)} what the engine had before"
    else:
        message = f"{some} {_are(wrong)} not what {UPDATE} has sent"
    return [_of_weights(device, UPDATE, f"{message}: {first_of(wrong, _LISTED)}", len(wrong), "sent weights")]


def after_failed_update(device: str, before: Mapping[str, Any], held: Mapping[str, Any]) -> list[Finding]:
    """Report the weights that an engine has not as before, after an update that failed."""
    then, now = digests(before), digests(held)
    changed = [name for name in then if now.get(name) != then[name]]
    if not changed:
        return []
    some = f"{len(changed)} of {format_amount(len(then), 'weights')}"
    message = f"{some} {_are(changed)} not what the engine had before {UPDATE}, which failed: "
    return [_of_weights(device, UPDATE, message + first_of(changed, _LISTED), len(changed), "failed update")]


def says_the_same(stage: str, tokens: Tokens, former: Tokens) -> list[Finding]:
    """Report that other weights give the same tokens, for every prompt.

    Args:
        stage: that gave the tokens.
        tokens: with the weights that were sent.
        former: of the same prompts with those of before.
    """
    if [list(each) for each in tokens] != [list(each) for each in former]:
        return []
    prompts = format_amount(len(tokens), "prompts")
    message = f"{UPDATE} moved nothing: with other weights the engine gives the same tokens for {prompts}"
    return [_of_weights("", stage, message, len(tokens), "sent weights")]


def says_otherwise(stage: str, tokens: Tokens, expected: Tokens) -> list[Finding]:
    """Report that the same weights, sent again, give other tokens.

    Args:
        stage: that gave the tokens.
        tokens: with the weights that were sent.
        expected: of the same prompts with the same weights, when the engine had these first.
    """
    wrong = _unlike(expected, tokens)
    if not wrong:
        return []
    message = f"{wrong} of {len(expected)} prompts give other tokens after {UPDATE} than the same weights gave before"
    return [_of_weights("", stage, message, wrong, "tokens after an update")]


def digests(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return what distinguishes the contents of weights, by name: a tensor's fingerprint, anything else as it is."""
    torch = loaded("torch")
    return {
        name: fingerprint_of_tensor(value) if torch is not None and isinstance(value, torch.Tensor) else value
        for name, value in weights.items()
    }


def _is_rounded(sent: Any, held: Any) -> bool:
    """Return whether an engine has what was sent in a type of its own, as bfloat16 of a trainer's float32."""
    torch = loaded("torch")
    if torch is None or not (isinstance(sent, torch.Tensor) and isinstance(held, torch.Tensor)):
        return False
    if sent.dtype == held.dtype or sent.shape != held.shape:
        return False
    return fingerprint_of_tensor(sent.to(device=held.device, dtype=held.dtype)) == fingerprint_of_tensor(held)


def _are(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _of_weights(device: str, stage: str, message: str, count: int, suspect: str) -> Finding:
    return finding_of(
        "contents",
        cause="not-restored",
        count=count,
        device=device,
        stage=stage,
        message=message,
        suspects=(suspect, "not-restored"),
        advice=_WHERE_SENT,
    )
