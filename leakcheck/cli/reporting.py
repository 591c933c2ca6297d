"""The report of a command: its folder and suppressions are checked before anything runs; its head, the same for all."""

from __future__ import annotations

import importlib
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import lowtide
from lowtide.leakcheck.cli.console import refuse, say, write

if TYPE_CHECKING:
    from lowtide.leakcheck.suppressions.entries import Suppressions
    from lowtide.probes.device.driver import Driver
    from lowtide.reports.folder import UnfinishedReport
    from lowtide.reports.schema import Report, Subject


ReportFolder = Annotated[Path | None, typer.Option(help="Folder for the report (JSON, HTML, JUnit, Markdown).")]
KnownLeaks = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Known leaks that may stay; an entry that none needs fails.")
]


def check_writable(folder: Path) -> None:
    """Make sure that the report can be written before hours are spent on what goes into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        refuse(f"--report {folder} cannot be written to ({error.strerror}): choose another folder")


def load_suppressions(path: Path | None) -> Suppressions:
    """Read the user's entries, then the shipped ones."""
    from lowtide.leakcheck.suppressions.entries import Suppressions, load, shipped
    from lowtide.leakcheck.suppressions.toml import SuppressionError

    try:
        own = load(path).entries if path is not None else ()
    except SuppressionError as error:
        refuse(f"--suppressions {error}")
    return Suppressions((*own, *shipped().entries))


def show_on_github(report: Report) -> None:
    """Append the summary to the page of a step of GitHub Actions, and mark the holders' lines."""
    if os.environ.get("GITHUB_ACTIONS") != "true":
        return
    from lowtide.reports.github import append_summary, render_annotations
    from lowtide.reports.schema import ReportError

    try:
        append_summary(report, os.environ)
    except ReportError as error:
        # The exit code is about the engine: it stays what the report says.
        say(f"lowtide: {error}", err=True)
    write(render_annotations(report, Path.cwd()))


@contextmanager
def begin_report(folder: Path | None, driver: Driver, part: str = "") -> Iterator[UnfinishedReport | None]:
    """Keep in a folder what the run in this block finishes, in case that it is killed.

    Args:
        folder: of the report, which is written after the block; after an error in it there is none. None for no report.
        driver: as that of `make_report`.
        part: what is finished one after the other, as `cycle`.
    """
    from lowtide.reports.folder import UnfinishedReport
    from lowtide.reports.schema import Begun

    if folder is None:
        yield None
        return
    unfinished = UnfinishedReport(folder, Begun(report=make_report(None, driver), part=part))
    try:
        yield unfinished
    except BaseException:
        unfinished.remove()
        raise


def make_report(subject: Subject | None, driver: Driver) -> Report:
    """Return the report of one subject, or of none yet, with this machine and the command line."""
    from lowtide.reports.from_snapshot import report_of

    command = shlex.join(["lowtide", *sys.argv[1:]])
    return report_of([] if subject is None else [subject], lowtide.__version__, command, driver, command_settings())


def write_report(report: Report, folder: Path | None, *, is_final: bool = True) -> tuple[Path | None, str]:
    """Write a report; return where it is, and why it could not be written. Both are empty without a folder.

    What was found is shown all the same, and then why: see `ended_with`.

    Args:
        report: what is written.
        folder: where to.
        is_final: as that of `write_folder`.
    """
    from lowtide.reports.folder import write_folder
    from lowtide.reports.schema import ReportError

    try:
        return (None, "") if folder is None else (write_folder(report, folder, is_final=is_final), "")
    except ReportError as error:
        return None, str(error)


def ended_with(code: int, unwritten: str) -> int:
    """Return the exit code of a verdict, or say why its report could not be written and return 2."""
    if unwritten:
        say(f"lowtide: {unwritten}", err=True)
    return 2 if unwritten else code


def command_settings() -> dict[str, str]:
    """Return all arguments and options of the command that runs; nothing outside of one."""
    # click's, which typer takes from elsewhere in some versions.
    package = typer.Context.__mro__[1].__module__.rpartition(".")[0]
    context = importlib.import_module(f"{package}.globals").get_current_context(silent=True)
    given = {} if context is None else context.params
    return {name: _shown(value) for name, value in sorted(given.items()) if value is not None}


def _shown(value: object) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    return shlex.join(map(str, value)) if isinstance(value, list | tuple) else str(value)
