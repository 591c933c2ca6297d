"""The report of a command: its folder is checked before anything runs, its head is the same for all."""

from __future__ import annotations

import datetime
import shlex
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import lowtide
from lowtide.leakcheck.cli.exits import refuse

if TYPE_CHECKING:
    from lowtide.probes.device.driver import Driver
    from lowtide.reports.schema import Report, Subject


def check_writable(folder: Path) -> None:
    """Make sure that the report can be written before hours are spent on what goes into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        refuse(f"--report {folder} cannot be written to ({error.strerror}): choose another folder")


def make_report(subject: Subject, driver: Driver) -> Report:
    """The report of one subject, with this machine and the command line."""
    from lowtide.leakcheck.baseline.readings import this_machine
    from lowtide.reports.schema import Report

    return Report(
        schema="lowtide-report/1",
        version=lowtide.__version__,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        command=shlex.join(["lowtide", *sys.argv[1:]]),
        machine=this_machine(driver),
        subjects=(subject,),
    )
