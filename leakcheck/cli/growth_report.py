"""How commands tell what has grown in processes that run on: as findings, known up to a size."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import closing
from typing import Annotated

import msgspec
import typer

from lowtide.leakcheck.cli.console import find_console, make_report, refuse, write_json
from lowtide.reports.schema import Finding, NotMeasured, Outcome, Subject, exit_code
from lowtide.reports.sizes import format_amount, format_bytes, parse_bytes
from lowtide.reports.terminal import render

MaxGrowth = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="What a process may grow by meanwhile and be told as known [default: 0]."),
]
CommandsJson = Annotated[
    bool,
    typer.Option("--json", help="Print the report as JSON (lowtide-report/1); the command's own output: stderr."),
]


def seconds_of(option: str, text: str) -> float:
    """Return the seconds that an option gives, or end the command where it gives none."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h|)", text.strip())
    if found is None:
        refuse(f"{option} {text!r} is no time: use seconds such as 30, or a unit such as 30s, 5m, 8h")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


def watched_seconds(option: str, text: str) -> float:
    """Return the seconds for which an option says to watch; end the command where these are too few."""
    from lowtide.leakcheck.processes.timed_growth import SHORTEST_S

    seconds = seconds_of(option, text)
    if seconds < SHORTEST_S:
        refuse(f"{option} {text} is not possible: what grows shows after {SHORTEST_S:g} s or more")
    return seconds


def bytes_of(option: str, text: str) -> int:
    """Return the bytes that an option gives, or end the command where it gives none."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        refuse(f"{option}: {error}")


def allowed_bytes(max_growth: str | None) -> int:
    """Return the bytes of `--max-growth`."""
    return 0 if max_growth is None else bytes_of("--max-growth", max_growth)


def with_known(found: Sequence[Finding], allowed: int) -> list[Finding]:
    """Return what has grown; in processes where all of it together is no more than some bytes it is known."""
    from lowtide.leakcheck.processes.timed_growth import grown_above

    above = grown_above(found, allowed)
    known = f"--max-growth {format_bytes(allowed)}"
    return [
        finding
        # Bytes allow no more threads.
        if not (allowed and finding.bytes) or finding.process is None or finding.process.pid in above
        else msgspec.structs.replace(finding, suppressed_by=known)
        for finding in found
    ]


def judged(
    name: str,
    findings: Sequence[Finding],
    not_measured: Sequence[NotMeasured],
    not_judged: Sequence[NotMeasured],
    reason: str = "",
) -> Subject:
    """Return a subject: a leak where something is found that is not known, clean only where all was measured."""
    is_leak = any(finding.suppressed_by is None for finding in findings)
    outcome: Outcome = "leak" if is_leak else "unsupported" if not_measured else "clean"
    everything = (*not_measured, *not_judged)
    return Subject(id=name, outcome=outcome, reason=reason, findings=tuple(findings), not_measured=everything)


def report_growth(
    subject: str,
    found: Sequence[Finding],
    silent: Sequence[NotMeasured],
    unknown: Sequence[NotMeasured],
    allowed: int,
    as_json: bool,
    where: str,
    processes: int,
) -> int:
    """Print what has grown (`where`: since when, or over what time) in so many processes; return the exit code."""
    from lowtide.probes.device.driver import find_driver

    with closing(find_driver()) as driver:
        report = make_report(judged(subject, with_known(found, allowed), silent, unknown), driver)
    if as_json:
        write_json(report)
    else:
        nothing = () if found else (f"nothing has grown {where} in {format_amount(processes, 'processes')}",)
        find_console().print(render(report, *nothing))
    return exit_code(report)
