"""`lowtide defects`: the historical bugs, listed or verified."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.table import Column, Table

from lowtide.leakcheck.cli.console import check_positive, find_console, refuse, say
from lowtide.leakcheck.targets.target import Device, device_name
from lowtide.reports import schema
from lowtide.reports.schema import Finding, Subject
from lowtide.reports.sizes import format_bytes

if TYPE_CHECKING:
    from lowtide.engine.defects import Defect

LIMIT = 300.0
"""Seconds that one run may take."""

LIVES_IN_CORE = 2
"""Lives of an engine whose core has a process of its own."""


def defects(
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Run each, and its twin without it; print what was found as Markdown."),
    ] = False,
    device: Annotated[Device, typer.Option(help="With --verify: where; what cannot show there runs on the CPU.")] = (
        Device.AUTO
    ),
    jobs: Annotated[int, typer.Option(help="With --verify: processes at the same time.")] = 2,
    engine_process: Annotated[
        bool,
        typer.Option("--engine-process", help="With --verify: the engine's core, and the bug, in another process."),
    ] = False,
) -> None:
    """List the historical bugs that the reference engine can switch on.

    Exit codes of --verify: 0 each was found as it must be and nothing without it, 1 not so, 2 could not be measured.
    """
    from lowtide.engine.defects import DEFECTS

    if verify:
        check_positive(jobs=jobs)
        raise typer.Exit(_verify(device, jobs, engine_process))
    table = Table(
        Column("name", no_wrap=True),
        Column("where it happened", overflow="fold"),
        Column("what went wrong", overflow="fold"),
        box=None,
    )
    for known in DEFECTS.values():
        table.add_row(known.name, known.source, known.summary)
    find_console().print(table)


def _verify(device: Device, jobs: int, engine_process: bool) -> int:
    from lowtide.engine.defects import DEFECTS
    from lowtide.engine.errors import ConfigError

    done = []
    try:
        kind = device_name(device).partition(":")[0]
    except ConfigError as error:
        refuse(str(error))
    for verified in verify(DEFECTS.values(), kind, jobs=jobs, in_core=engine_process):
        done.append(verified)
        # It takes minutes, and the table comes when all are done.
        say(f"{len(done)}/{len(DEFECTS)} {verified.defect.name}: {verified.note or 'as it must be'}", err=True)
    say(*table(done))
    wrong = [item for item in done if item.note and item.bug is not None]
    skipped = sum(item.bug is None for item in done)
    right = len(done) - len(wrong) - skipped
    say("", f"{right} of {len(done)} found as they must be, {len(wrong)} not, {skipped} need a card")
    if any(run is not None and run.subject is None for item in done for run in (item.bug, item.twin)):
        return 2
    return 1 if wrong else 0


class VerifiedRun(msgspec.Struct, frozen=True):
    """What came of one run."""

    subject: Subject | None
    seconds: float
    output: str


class Verified(msgspec.Struct, frozen=True):
    """One bug, and the runs of an engine with it (`bug`) and without (`twin`); no device, and None, where none were.

    Attributes:
        note: why it was not run, or what is wrong; empty if all is as it must be.
    """

    defect: Defect
    device: str
    bug: VerifiedRun | None
    twin: VerifiedRun | None
    note: str


def verify(defects: Iterable[Defect], device: str, *, jobs: int = 2, in_core: bool = False) -> Iterator[Verified]:
    """Yield each bug, and the same engine without it, in the order given; as soon as they are known.

    Args:
        defects: which to run.
        device: `cpu`, or `cuda` for those that can show there.
        jobs: processes at the same time.
        in_core: whether the engine's core has a process of its own, with the bug in it.
    """
    twins: dict[tuple[object, ...], Callable[[], VerifiedRun]] = {}
    with ThreadPoolExecutor(jobs) as pool:

        def start(defect: Defect, where: str, *, twin: bool = False) -> Callable[[], VerifiedRun]:
            return pool.submit(_run, defect, where, twin, in_core).result

        waiting: list[tuple[Defect, str, Callable[[], VerifiedRun] | None, Callable[[], VerifiedRun] | None]] = []
        for defect in defects:
            where = device if device in defect.devices else "cpu"
            if where not in defect.devices or not _has_cards(defect.cards):
                waiting.append((defect, "", None, None))
                continue
            # Bugs that need the same engine have the same twin.
            same = (defect.lives_on(where), defect.turns, defect.prompt_scale, defect.trigger)
            kind = (where, *same, tuple(sorted(defect.settings.items())))
            bug = start(defect, where)
            if kind not in twins:
                twins[kind] = start(defect, where, twin=True)
            waiting.append((defect, where, bug, twins[kind]))
        for defect, where, with_it, without_it in waiting:
            if with_it is None or without_it is None:
                needs = "a card" if defect.cards < 2 else f"{defect.cards} cards"
                yield Verified(defect, "", None, None, f"needs {needs}")
            else:
                with_bug, without = with_it(), without_it()
                yield Verified(defect, where, with_bug, without, _problem(defect, where, with_bug, without, in_core))


def _has_cards(number: int) -> bool:
    """Return whether there are so many cards, where one is not enough."""
    if number < 2:
        return True
    import torch

    return torch.cuda.device_count() >= number


def table(verified: Sequence[Verified]) -> list[str]:
    """Return what was verified, as lines of Markdown."""
    rows = ["| bug | where it happened | found | held by | what gives it back | |", "| --- " * 6 + "|"]
    for item in verified:
        findings = () if item.bug is None or item.bug.subject is None else item.bug.subject.findings
        largest = max(findings, key=lambda finding: (finding.remedy is not None, finding.bytes), default=None)
        cells = (
            f"`{item.defect.name}`",
            item.defect.source,
            _found(item, findings),
            f"`{largest.holder}`" if largest is not None and largest.holder else "",
            _remedy(largest),
            item.note or f"{item.device}, {item.bug.seconds if item.bug else 0:.0f} s",
        )
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return rows


def _found(item: Verified, findings: Sequence[Finding]) -> str:
    if item.bug is None:
        return ""
    if findings:
        pairs = dict.fromkeys(f"`{finding.resource}`/`{finding.cause}`" for finding in findings)
        return ", ".join(pairs)
    late = [back for back in (item.bug.subject.returns if item.bug.subject else ()) if back.rung == "settle"]
    if late:
        return f"clean: back after {max(back.seconds for back in late):.1f} s"
    if item.bug.subject is not None and item.bug.subject.outcome != "clean":
        return f"nothing concluded: {item.bug.subject.reason}"
    reason = "" if item.bug.subject is None else item.bug.subject.reason
    return f"clean: {reason}" if reason else "clean"


def _remedy(finding: Finding | None) -> str:
    if finding is None:
        return ""
    if finding.remedy is None:
        return finding.advice or ""
    gives = f": {format_bytes(finding.remedy.returns_bytes)}" if finding.remedy.returns_bytes else ""
    first, *others = finding.remedy.action.split("; ")
    if len(others) < 2:
        return f"`{finding.remedy.action}`{gives}"
    return f"`{first}` and {len(others)} more{gives}"


def _problem(defect: Defect, device: str, bug: VerifiedRun, twin: VerifiedRun, in_core: bool) -> str:
    for run in (bug, twin):
        if run.subject is None:
            return f"could not be measured: {(run.output.strip().splitlines() or ['no output'])[-1]}"
    assert bug.subject is not None
    assert twin.subject is not None
    found = sorted({(finding.resource, finding.cause) for finding in bug.subject.findings})
    expected = sorted(defect.expected_on(device, in_core=in_core))
    if found != expected:
        return f"WRONG: expected {_pairs(expected)}, found {_pairs(found)}"
    if twin.subject.outcome != "clean":
        return f"WRONG: without it there is {twin.subject.outcome}"
    return ""


def _pairs(pairs: Iterable[tuple[str, str]]) -> str:
    return ", ".join("/".join(pair) for pair in pairs) or "nothing"


def _run(defect: Defect, device: str, twin: bool, in_core: bool) -> VerifiedRun:
    env = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    if device == "cpu":
        # What asks for an accelerator there finds none, whatever this machine has.
        env["CUDA_VISIBLE_DEVICES"] = env["HIP_VISIBLE_DEVICES"] = ""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="lowtide-") as folder:
        command = [sys.executable, "-m", "lowtide", "run", "--device", device, "--defect", defect.name]
        # Each life has a core of its own, which infers three times: growth is judged over several.
        lives = LIVES_IN_CORE if in_core else defect.lives_on(device)
        command += ["--cycles", str(lives), *(["--twin"] if twin else []), *(["--engine-process"] if in_core else [])]
        try:
            done = subprocess.run(
                [*command, "--report", folder], capture_output=True, text=True, check=False, timeout=LIMIT, env=env
            )
            output = done.stderr or done.stdout
        except subprocess.TimeoutExpired:
            return VerifiedRun(None, time.perf_counter() - started, f"not done after {LIMIT:.0f} s")
        try:
            (subject,) = schema.read(Path(folder)).subjects
        except (schema.ReportError, ValueError):
            return VerifiedRun(None, time.perf_counter() - started, output)
        return VerifiedRun(subject, time.perf_counter() - started, output)
