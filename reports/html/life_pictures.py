"""The life of a subject as pictures: what each process held on each device from stage to stage, as stacked lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec

from lowtide.reports.escaping import one_line
from lowtide.reports.processes.stage_processes import ProcessName, ProcessStage
from lowtide.reports.schema import Ledger, Stage

UNEXPLAINED = "unexplained"

_THIS = "this process"
_ALL = "all processes"

_Sizes = tuple[int | None, ...]


class Line(msgspec.Struct, frozen=True):
    """One line of a picture.

    Attributes:
        name: what it is.
        bytes: at each moment; None where it is not known.
    """

    name: str
    bytes: _Sizes


class View(msgspec.Struct, frozen=True):
    """One picture: lines that lie on each other, and what they are to add up to.

    Attributes:
        process: whose memory it is; `all processes` where each line is one.
        device: where it is.
        lines: from the largest to the smallest, what nothing explains last.
        total: what the driver, or the kernel, counts.
    """

    process: str
    device: str
    lines: tuple[Line, ...]
    total: _Sizes

    @property
    def most(self) -> int:
        """Bytes at the highest moment."""
        return max((size or 0 for size in self.total), default=0)


class Band(NamedTuple):
    """The moments from the end of a sleep to the last one before the wake."""

    first: int
    last: int


class Picture(msgspec.Struct, frozen=True):
    """All views of one life.

    Attributes:
        moments: the ends of stages, as `sleep(1)`; the first may be the beginning, `before create`.
        cycles: of each moment.
        asleep: when the engine slept.
        views: the most telling one first.
    """

    moments: tuple[str, ...]
    cycles: tuple[int, ...]
    asleep: tuple[Band, ...]
    views: tuple[View, ...]


def draw_life(stages: Sequence[Stage]) -> Picture | None:
    """Return the pictures of some stages; None where there are too few of them, or nothing was measured."""
    if len(stages) < 2:
        return None
    has_start = bool(stages[0].before.ledgers)
    moments = [f"before {stages[0].name}"] * has_start + [stage.name for stage in stages]
    cycles = [stages[0].cycle] * has_start + [stage.cycle for stage in stages]
    sides = [stages[0].before.ledgers] * has_start + [stage.after.ledgers for stage in stages]
    others = [()] * has_start + [stage.processes for stage in stages]
    views = [*_of_this_process(sides), *_of_other_processes(others)]
    views += _of_all(views)
    views.sort(key=lambda view: (view.device == "cpu", view.process != _ALL, -view.most))
    if not views:
        return None
    return Picture(tuple(map(one_line, moments)), tuple(cycles), tuple(_asleep(moments)), tuple(views))


def _asleep(moments: Sequence[str]) -> Iterable[Band]:
    since: int | None = None
    for turn, (name, following) in enumerate(pairwise([*moments, "shutdown"])):
        if name.startswith("sleep") and since is None:
            since = turn
        if since is not None and following.startswith(("wake", "shutdown")):
            yield Band(since, turn)
            since = None


def _of_this_process(sides: Sequence[Sequence[Ledger]]) -> Iterable[View]:
    for device in dict.fromkeys(ledger.device for side in sides for ledger in side):
        ledgers = [next((ledger for ledger in side if ledger.device == device), None) for side in sides]
        parts = [{} if ledger is None else _parts(ledger) for ledger in ledgers]
        total = [None if ledger is None else ledger.total for ledger in ledgers]
        yield _view(_THIS, device, parts, total)


def _parts(ledger: Ledger) -> dict[str, int | None]:
    sizes: dict[str, int | None] = {}
    for line in ledger.lines:
        sizes[line.name] = (sizes.get(line.name) or 0) + line.bytes
    return {**sizes, UNEXPLAINED: ledger.unexplained}


def _of_other_processes(others: Sequence[Sequence[ProcessStage]]) -> Iterable[View]:
    """Return a view for each process and device; those that each life has anew are one, by their name and rank."""
    names = dict.fromkeys(lasting_name(each.process) for side in others for each in side)
    for name in names:
        readings = [next((each for each in side if lasting_name(each.process) == name), None) for side in others]
        present = [each for each in readings if each is not None]
        for device in dict.fromkeys(["cpu", *(device for each in present for device in each.cards)]):
            parts = [{} if each is None else _parts_of_process(each, device) for each in readings]
            # Where there is no such process it holds nothing.
            total = [0 if each is None else _held(each, device) for each in readings]
            yield _view(name, device, parts, total)


def lasting_name(process: ProcessName) -> str:
    """Return what is the same about a process in each life: its name and rank, not its number."""
    return process.text.removeprefix(f"pid {process.pid} (").removesuffix(")")


def _parts_of_process(each: ProcessStage, device: str) -> dict[str, int | None]:
    left = each.unexplained.get(device)
    if device == "cpu":
        beside = each.beside_tensors
        known = None if each.host is None or beside is None else each.host - beside
        return {"tensors and pools": known, **each.heaps, UNEXPLAINED: left}
    # Each process numbers its cards by itself: what it says fits to the driver's figure where it has one card.
    own = {name for name in (*each.arenas, *each.reserved) if name != "cpu"}
    where = next(iter(own)) if len(own) == len(each.cards) == 1 else device
    arenas = {f"arena {tag}": size for tag, size in each.arenas.get(where, {}).items()}
    reserved = each.reserved.get(where)
    drivers = {"context": each.contexts.get(device), "kernels and libraries": each.kernels.get(device)}
    return {"torch's segments": reserved, **arenas, **drivers, **each.libraries.get(device, {}), UNEXPLAINED: left}


def _held(each: ProcessStage, device: str) -> int | None:
    return each.host if device == "cpu" else each.cards.get(device)


def _of_all(views: Sequence[View]) -> Iterable[View]:
    for device in dict.fromkeys(view.device for view in views):
        of_device = [view for view in views if view.device == device]
        if len(of_device) > 1:
            parts = [{view.process: view.total[turn] for view in of_device} for turn in range(len(views[0].total))]
            yield _view(_ALL, device, parts, [_sum_of([*moment.values()]) for moment in parts])


def _sum_of(sizes: Sequence[int | None]) -> int | None:
    """Add up sizes; None where one is not known: a sum of the others would look like all."""
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def _view(process: str, device: str, parts: Sequence[Mapping[str, int | None]], total: Sequence[int | None]) -> View:
    lines = [
        Line(one_line(name), tuple(part.get(name, 0) for part in parts))
        for name in dict.fromkeys(name for part in parts for name in part)
    ]
    held = [line for line in lines if any(line.bytes)]
    held.sort(key=lambda line: (line.name == UNEXPLAINED, -max(size or 0 for size in line.bytes)))
    return View(one_line(process), one_line(device), tuple(held), tuple(total))
