"""What must survive a sleep: the contents of an engine's tensors, the addresses that its graphs and tables hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lowtide.leakcheck.judging.fingerprints import finding_of
from lowtide.probes.memory.contents import Contents, changed, take_fingerprints
from lowtide.probes.memory.pointers import LabelledRange, Moved, PointerHit, find_pointers, gone_since, moved
from lowtide.probes.memory.ranges import Range
from lowtide.probes.stages import announced_pools
from lowtide.reports.schema import Cause, Finding, ResourceName
from lowtide.reports.sizes import first_of, format_amount, format_bytes

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
        self._contents: Contents | None = None
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
            for tensor in self._contents.tensors
            for part in self._memory
            if part.start <= tensor.address < part.stop
        }

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
        after = take_fingerprints(tensors)
        lost = [change.name for change in changed(before, after)]
        sizes = {tensor.name: tensor.bytes for tensor in before.tensors}
        findings = []
        if lost:
            findings.append(
                self._finding(
                    "contents",
                    "not-restored",
                    stage,
                    list(dict.fromkeys(lost)),
                    "{} changed its contents between sleep and wake",
                    "{} changed their contents between sleep and wake",
                    sum(sizes[name] for name in set(lost)),
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
    now = f"{' and '.join(stale.now)} is now" if stale.now else f"{format_bytes(stale.gone)} are nobody's now"
    return f"; {stale.name} is read at {stale.address:#x}, where {now}"


def _once_there(hit: PointerHit) -> str:
    return f"; {hit.tensor} has {hit.value:#x} at byte {hit.offset}, which was in {hit.label}"
