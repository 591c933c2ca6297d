"""How commands tell what has grown in processes that run on: as findings, known up to a size."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from lowtide.leakcheck.cli.console import find_console, make_report, refuse, write

if TYPE_CHECKING:
    from lowtide.reports.schema import Finding, NotMeasured, Outcome


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


def allowed_bytes(max_growth: str | None) -> int:
    """Return the bytes of `--max-growth`, or end the command where these are none."""
    from lowtide.reports.sizes import parse_bytes

    try:
        return 0 if max_growth is None else parse_bytes(max_growth)
    except ValueError as error:
        refuse(f"--max-growth: {error}")


def with_known(found: Sequence[Finding], allowed: int) -> list[Finding]:
    """Return what has grown; in processes where all of it together is no more than some bytes it is known."""
    from lowtide.leakcheck.processes.timed_growth import grown_above
    from lowtide.reports.sizes import format_bytes

    above = grown_above(found, allowed)
    known = f"--max-growth {format_bytes(allowed)}"
    return [
        finding
        # Bytes allow no more threads.
        if not (allowed and finding.bytes) or finding.process is None or finding.process.pid in above
        else msgspec.structs.replace(finding, suppressed_by=known)
        for finding in found
    ]


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
    """Print what has grown; return the exit code.

    Args:
        subject: what the report calls it.
        found: what has grown.
        silent: what could not be measured.
        unknown: what is not judged.
        allowed: bytes that each process may have more.
        as_json: whether the report is printed as JSON.
        where: over what time, or since when.
        processes: how many were looked at.
    """
    from lowtide.probes.device.driver import find_driver
    from lowtide.reports import schema
    from lowtide.reports.escaping import escape_json
    from lowtide.reports.sizes import format_amount
    from lowtide.reports.terminal import render

    told = with_known(found, allowed)
    is_more = any(finding.suppressed_by is None for finding in told)
    outcome: Outcome = "leak" if is_more else "unsupported" if silent else "clean"
    judged = schema.Subject(
        id=subject,
        outcome=outcome,
        findings=tuple(told),
        not_measured=(*silent, *unknown),
    )
    driver = find_driver()
    try:
        report = make_report(judged, driver)
    finally:
        driver.close()
    if as_json:
        write(escape_json(schema.encode(report).decode()))
    else:
        nothing = () if found else (f"nothing has grown {where} in {format_amount(processes, 'processes')}",)
        find_console().print(render(report, *nothing))
    return schema.exit_code(report)
