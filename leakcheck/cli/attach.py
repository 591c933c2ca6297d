"""`lowtide attach`: a look into a process that was not started with us, and what grows in it while it is watched."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from lowtide.leakcheck.cli.console import interruptible, refuse, say
from lowtide.leakcheck.cli.growth_report import allowed_bytes, report_growth, watched_seconds

if TYPE_CHECKING:
    from lowtide.leakcheck.processes.attachment import Attachment
    from lowtide.leakcheck.processes.messages import Seen
    from lowtide.reports.processes.stage_processes import ProcessName

_LISTED_DESCRIPTORS = 5
"""Kinds of descriptors that are named."""

_LOOKS_S = 0.05
"""Seconds between two looks at whether the next one at the process is due."""


def attach(
    pid: Annotated[int, typer.Argument(metavar="PID", help="A Python process, of whatever program.")],
    watch: Annotated[
        str | None, typer.Option(metavar="TIME", help="Watch so long what grows in it: 60s, 5m, 8h.")
    ] = None,
    max_growth: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="With --watch: what it may grow by and be told as known [default: 0]."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --watch: print the report as JSON (lowtide-report/1) and no tables.")
    ] = False,
) -> None:
    """Look into a process that was not started with lowtide: memory, tensors, caches, and with --watch what grows.

    It runs on meanwhile: each look is at a fork of it, which a thread of ours makes and which ends with it. Nothing of
    that stays. Needs Python 3.14 on both sides, or gdb; and the right to trace the process.

    Exit codes: 0 looked, and nothing grows; 1 something grows, 2 it could not be looked into, or bad input.
    """
    if watch is None and (max_growth is not None or as_json):
        refuse(f"{'--json' if as_json else '--max-growth'} needs --watch TIME: that is what it is about")
    seconds = 0.0 if watch is None else watched_seconds("--watch", watch)
    allowed = allowed_bytes(max_growth)
    with interruptible("interrupted: the process runs on, and nothing of lowtide is in it"):
        raise typer.Exit(_attach(pid, seconds, allowed, as_json))


def _attach(pid: int, seconds: float, allowed: int, as_json: bool) -> int:
    from lowtide.leakcheck.processes.attachment import Attachment
    from lowtide.leakcheck.processes.messages import Look, Seen
    from lowtide.leakcheck.processes.process_levels import describe_process
    from lowtide.probes.processes.agents import AgentError
    from lowtide.probes.processes.injection import InjectionError

    # Before there is anything of ours in it.
    outside = _outside(pid)
    try:
        with Attachment(pid) as attachment:
            if not as_json:
                seen = attachment.ask(Look(lists=True), Seen)
                process = describe_process(pid, variables=seen.variables, called=seen.called)
                say(*_lines(process, outside, seen))
            return _watch(attachment, seconds, allowed, as_json) if seconds else 0
    except (InjectionError, AgentError) as error:
        refuse(str(error))


def _watch(attachment: Attachment, seconds: float, allowed: int, as_json: bool) -> int:
    from lowtide.leakcheck.processes.look_growth import LookedGrowth
    from lowtide.probes.originals import time

    pid = attachment.pid
    growth = LookedGrowth({pid: attachment}, seconds)
    say(f"lowtide: growth of {growth.processes[pid].text} is watched for {seconds:g} s", err=True)
    while not growth.is_over:
        growth.look()
        time.sleep(_LOOKS_S)
    where = f"over {growth.seconds_read / growth.interval:.0f} intervals of {growth.interval:g} s"
    return report_growth(
        f"attach[{pid}]", growth.findings(), growth.not_measured, growth.not_judged, allowed, as_json, where, 1
    )


def _outside(pid: int) -> str:
    """Say what is seen of a process without a look into it."""
    from lowtide.leakcheck.processes.look_growth import counted
    from lowtide.probes.host.process_files import descriptors_of, thread_names
    from lowtide.probes.processes.injection import python_of
    from lowtide.reports.sizes import first_of, format_amount

    python, threads, descriptors = python_of(pid), thread_names(pid), descriptors_of(pid)
    kinds = [f"{count} {kind}" for kind, count in counted(descriptors).most_common()]
    return (
        f"Python {'' if python is None else python[0]}, {format_amount(len(threads), 'threads')}, "
        f"{format_amount(len(descriptors), 'descriptors')} ({first_of(kinds, _LISTED_DESCRIPTORS)})"
    )


def _lines(process: ProcessName, outside: str, seen: Seen) -> Iterator[str]:
    """Say what there is in a process."""
    from lowtide.leakcheck.processes.look_growth import anonymous_bytes_of
    from lowtide.reports.sizes import format_bytes

    yield f"{process.text}: {outside}"
    yield ""
    yield f"host memory: {format_bytes(anonymous_bytes_of(process.pid))} are no file's"
    yield from _table(("bytes", "what"), _parts(seen))
    for device, size in sorted(seen.tensors.items()):
        yield ""
        yield f"tensors on {device}: {format_bytes(size)}"
        rows = [
            (format_bytes(kind.bytes), str(kind.count), kind.dtype or "storage", kind.shape or "seen by no tensor")
            for kind in seen.tensor_kinds
            if kind.device == device
        ]
        yield from _table(("bytes", "count", "type", "shape"), rows)
    if seen.caches:
        yield ""
        yield "caches with entries:"
        rows = [
            (
                str(cache.entries),
                "no bound" if cache.maxsize is None else str(cache.maxsize),
                format_bytes(cache.tensor_bytes),
                cache.name,
            )
            for cache in seen.caches
        ]
        yield from _table(("entries", "most", "under tensors", "function"), rows)


def _parts(seen: Seen) -> list[tuple[str, str]]:
    from lowtide.probes.host.memory_parts import NAMES
    from lowtide.reports.sizes import format_bytes

    return [(format_bytes(seen.parts[name]), said) for name, said in NAMES.items()]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    from lowtide.reports.processes.text import table

    yield from table(head, rows)
