"""`lowtide heap`: what a kept heap says of types, paths, holders, and of what holds how much alone."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lowtide.leakcheck.cli.console import find_console, refuse, write
from lowtide.reports.escaping import escape_json
from lowtide.reports.figure_table import Column, FigureTable
from lowtide.reports.finding_lines import hop_lines
from lowtide.reports.hanging_text import HangingText
from lowtide.reports.reading.json_files import UnreadableError
from lowtide.reports.schema import json_bytes
from lowtide.reports.sizes import format_amount, format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

    from lowtide.reports.heap.questions import FoundPath, HeldAlone, HolderRow, Overview

_MOST_HOPS = 100
"""Of a path, before what is between its ends is left out."""

_LONGEST_PATH = 40
"""Characters of a path in a table; `--path-to` has all of it."""


def heap(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What --keep-heap has written.")],
    path_to: Annotated[
        str | None,
        typer.Option("--path-to", metavar="ID|TYPE", help="Show a shortest path to an object, or to one of a type."),
    ] = None,
    holds: Annotated[
        str | None, typer.Option("--holds", metavar="ID|TYPE", help="Show by which edges which types hold it.")
    ] = None,
    dominators: Annotated[
        str | None,
        typer.Option(
            "--dominators", metavar="ID|TYPE|all", help="Show what an object, or the whole heap, holds alone, by size."
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=1, max=1000, help="Rows of each table.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Answer what holds what in a heap that was kept by --keep-heap: later, elsewhere, and without its process.

    Without a question: the types that retain most, the memory of tensors, what findings are about, and the objects that
    alone hold most. Objects have numbers, by which further questions name them.

    Exit codes: 0 answered, 2 bad input, or there is no such object.
    """
    if sum(question is not None for question in (path_to, holds, dominators)) > 1:
        refuse("--path-to, --holds and --dominators exclude each other: ask for one of them")
    from lowtide.reports.heap.kept_heap import read_heap
    from lowtide.reports.heap.questions import AskedError, AskedHeap

    try:
        asked = AskedHeap(read_heap(file))
        answer: object
        if path_to is not None:
            # Of several objects of a type the one that is most telling.
            numbers = asked.find(path_to)
            answer = path = asked.path(int(numbers[0]))
            parts = _path(path, path_to, others=len(numbers) - 1)
        elif holds is not None:
            answer = holders = asked.holders(holds)
            parts = _holders(holders, holds, top)
        elif dominators is not None:
            number = None if dominators == "all" else int(asked.find(dominators)[0])
            answer = alone = asked.dominated(number, top)
            parts = iter([_held_alone(f"Held by {dominators} alone", alone)])
        else:
            answer = overview = asked.overview(top)
            parts = _overview(overview)
    except UnreadableError as error:
        refuse(f"{file} {error}")
    except AskedError as error:
        refuse(str(error))
    if as_json:
        write(f"{escape_json(json_bytes(answer).decode())}\n")
        return
    console = find_console()
    for part in parts:
        console.print(part)


def _overview(found: Overview) -> Iterator[RenderableType]:
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(found.time))
    yield HangingText(f"heap after {found.subject}", style="bold")
    yield HangingText(f"kept {moment} UTC by lowtide {found.version}, Python {found.python}")
    tensors = [f"{format_bytes(size)} under tensors on {device}" for device, size in found.devices.items()]
    counts = [format_amount(found.objects, "objects"), format_amount(found.references, "references")]
    yield HangingText(", ".join([*counts, f"{format_bytes(found.bytes)} of objects", *tensors]))
    if found.unreached:
        yield HangingText(f"no root leads to {found.unreached} of them: they are C's or C++'s, lowtide's, or garbage")
    if found.frozen:
        yield HangingText(f"gc.freeze() hides {found.frozen} of them")
    rows = found.types
    yield FigureTable(
        title="Types",
        labels=(Column("type", tuple(row.type for row in rows)),),
        figures=(
            Column("objects", tuple(str(row.count) for row in rows)),
            Column("bytes", tuple(format_bytes(row.bytes) for row in rows)),
            Column("retained", tuple(format_bytes(row.retained) for row in rows)),
            Column("newborn", tuple(str(row.newborn) for row in rows)),
            Column("left", tuple(str(row.left) for row in rows)),
        ),
        notes=_more(found.more_types),
        left=1,
    )
    if found.left:
        yield _held_alone("Left by the test, as its findings say", found.left, _more(found.more_left))
    yield _held_alone("Held by one object alone, and by nothing else", found.dominators)


def _held_alone(title: str, rows: Sequence[HeldAlone], notes: tuple[str, ...] = ()) -> RenderableType:
    if not rows:
        return HangingText(f"{title}: nothing")
    return FigureTable(
        title=title,
        labels=(
            Column("id", tuple(str(row.id) for row in rows)),
            Column("type", tuple(row.type for row in rows)),
            Column("path", tuple(_end(row.path) for row in rows)),
        ),
        figures=(
            Column("retained", tuple(format_bytes(row.retained) for row in rows)),
            Column("objects", tuple(str(row.objects) for row in rows)),
        ),
        notes=notes,
        left=2,
    )


def _holders(rows: Sequence[HolderRow], asked: str, top: int) -> Iterator[RenderableType]:
    if not rows:
        yield HangingText(f"nothing that Python knows holds {asked}: C or C++ does, or it is a root itself")
        return
    shown = rows[:top]
    yield FigureTable(
        title=f"Who holds {asked}",
        labels=(
            Column("holder", tuple(row.holder for row in shown)),
            Column("edge", tuple(row.edge for row in shown)),
        ),
        figures=(
            Column("times", tuple(str(row.count) for row in shown)),
            Column("example", tuple(str(row.example) for row in shown)),
        ),
        notes=_more(len(rows) - len(shown)),
        left=2,
    )


def _path(found: FoundPath, asked: str, others: int) -> Iterator[RenderableType]:
    more = f", one of {others + 1} that are {asked}" if others else ""
    yield HangingText(f"object {found.id}, {found.type}{more}", style="bold")
    if not found.hops:
        yield HangingText("no root leads to it: C or C++ holds it, or it is garbage; --holds says what refers to it")
        return
    lines = [line.text for line in hop_lines(found.hops)]
    left_out = len(lines) - _MOST_HOPS
    if left_out > 0:
        half = _MOST_HOPS // 2
        lines[half:-half] = [f"   … {left_out} more, which --json has"]
    yield HangingText(*lines)


def _end(path: str) -> str:
    return path if len(path) <= _LONGEST_PATH else f"…{path[-_LONGEST_PATH:]}"


def _more(count: int) -> tuple[str, ...]:
    return (f"{count} more: --top shows more of them",) if count > 0 else ()
