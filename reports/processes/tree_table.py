"""What all processes of an engine hold on one device through one life: a line per process, and their sum."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from lowtide.reports.processes.stage_processes import ProcessStage
from lowtide.reports.schema import Ledger, Stage

_PART = "  "
"""Begins the name of a row whose bytes are in the row of its process."""

_UNEXPLAINED = f"{_PART}unexplained"
_CONTEXT = f"{_PART}context alone"
_KERNELS = f"{_PART}kernels and libraries"


class TreeRow(msgspec.Struct, frozen=True):
    """One line; the sizes are bytes after each stage, None where they are not known or the process was not there."""

    name: str
    sizes: tuple[int | None, ...]

    @property
    def is_part(self) -> bool:
        """Whether it is in what the line of its process says."""
        return self.name.startswith(_PART)


class TreeTable(msgspec.Struct, frozen=True):
    """What the processes hold on one device.

    Attributes:
        device: `cpu` or `cuda:0`.
        cycle: the life.
        stages: the names of its stages.
        rows: for each process what it holds, with what of that a context and kernels take and what nothing explains;
            the last one is the sum.
    """

    device: str
    cycle: int
    stages: tuple[str, ...]
    rows: tuple[TreeRow, ...]

    @property
    def title(self) -> str:
        """What the table is about."""
        source = "this process by RSS, others by private memory" if self.device == "cpu" else "as the driver counts"
        return f"Processes on {self.device}, cycle {self.cycle} (MiB; {source})"


def tree_tables(stages: Sequence[Stage]) -> list[TreeTable]:
    """Return one table for the host and one for each card, over the last life; none where no other process was seen."""
    if not stages:
        return []
    cycle = stages[-1].cycle
    shown = [stage for stage in stages if stage.cycle == cycle]
    others = [each for stage in shown for each in stage.processes]
    if not others:
        return []
    devices = dict.fromkeys(["cpu", *sorted(device for each in others for device in each.cards)])
    return [_table(device, cycle, shown) for device in devices]


def _table(device: str, cycle: int, stages: Sequence[Stage]) -> TreeTable:
    rows = []
    own = [_ledger(stage, device) for stage in stages]
    if any(own):
        rows.append(TreeRow("this process", tuple(None if each is None else each.total for each in own)))
        rows.append(TreeRow(_UNEXPLAINED, tuple(None if each is None else each.unexplained for each in own)))
    latest = {each.process.pid: each.process for stage in stages for each in stage.processes}
    for pid, process in latest.items():
        readings = [next((each for each in stage.processes if each.process.pid == pid), None) for stage in stages]
        sizes = tuple(None if each is None else _held(each, device) for each in readings)
        if any(sizes):
            rows.append(TreeRow(process.text, sizes))
            contexts = tuple(None if each is None else each.contexts.get(device) for each in readings)
            if any(contexts):
                rows.append(TreeRow(_CONTEXT, contexts))
            kernels = tuple(None if each is None else each.kernels.get(device) for each in readings)
            if any(kernels):
                rows.append(TreeRow(_KERNELS, kernels))
            named = [{} if each is None else _named(each, device) for each in readings]
            names = dict.fromkeys(name for parts in named for name in parts)
            rows += [TreeRow(f"{_PART}{name}", tuple(parts.get(name) for parts in named)) for name in names]
            left = (None if each is None else each.unexplained.get(device) for each in readings)
            rows.append(TreeRow(_UNEXPLAINED, tuple(left)))
    held = [row for row in rows if not row.is_part]
    whole = tuple(sum(row.sizes[turn] or 0 for row in held) for turn in range(len(stages)))
    return TreeTable(device, cycle, tuple(stage.name for stage in stages), (*rows, TreeRow("all of them", whole)))


def _ledger(stage: Stage, device: str) -> Ledger | None:
    return next((ledger for ledger in stage.after.ledgers if ledger.device == device), None)


def _named(process: ProcessStage, device: str) -> dict[str, int]:
    return process.heaps if device == "cpu" else process.libraries.get(device, {})


def _held(process: ProcessStage, device: str) -> int | None:
    return process.host if device == "cpu" else process.cards.get(device)
