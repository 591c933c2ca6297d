"""What must survive a sleep in this process, as its engine has announced it, for another process that judges it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lowtide.leakcheck.judging.preserved_state import PreservedState
from lowtide.probes.stages import PoolReading, announced_pools, announced_preserved
from lowtide.reports.schema import Finding

if TYPE_CHECKING:
    import torch


class OwnPreserved:
    """Remembers the contents of the tensors that there are when it is made.

    Args:
        kind: of their devices: `cpu` or `cuda`.

    Attributes:
        tensors: how many there are.
    """

    def __init__(self, kind: str) -> None:
        self.tensors = 0
        self._states: dict[str, PreservedState] = {}
        for device, tensors in _by_device(kind).items():
            state = PreservedState(device)
            with _current(device):
                state.before_sleep(tensors)
            self._states[device] = state
            self.tensors += len(tensors)

    def compare(self, stage: str) -> list[Finding]:
        """What was lost, has moved, or points to where nothing is.

        Args:
            stage: which one has ended.
        """
        found: list[Finding] = []
        recorded = announced_preserved().graph_addresses
        for device, state in self._states.items():
            kind = device.partition(":")[0]
            with _current(device):
                # Where a process has one device, as a rank has, its graphs read that one.
                read = recorded if len(self._states) == 1 else {}
                found += state.after_wake(stage, _by_device(kind).get(device, {}), read)
        return found


def _by_device(kind: str) -> dict[str, dict[str, torch.Tensor]]:
    """The announced tensors that can be read, by device."""
    pools = announced_pools()
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in announced_preserved().tensors.items():
        if tensor.device.type == kind and _has_pages(tensor, pools):
            found.setdefault(str(tensor.device), {})[name] = tensor
    return found


def _has_pages(tensor: torch.Tensor, pools: tuple[PoolReading, ...]) -> bool:
    """Whether a tensor may be read: on a card, to read addresses without pages breaks the process."""
    start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    for pool in pools:
        if pool.span is not None and pool.span[0] <= start < sum(pool.span):
            overlaps = (min(stop, address + length) - max(start, address) for address, length in pool.ranges)
            return sum(overlap for overlap in overlaps if overlap > 0) >= tensor.nbytes
    return True


@contextlib.contextmanager
def _current(device: str) -> Iterator[None]:
    """The device made current in this thread, which has used none so far."""
    if device.partition(":")[0] != "cuda":
        yield
        return
    import torch

    with torch.cuda.device(device):
        yield
