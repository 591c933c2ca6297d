"""What a run writes about its life so far, into the folder of its report, while somebody watches there.

A watcher touches one file again and again; while that is fresh, the run writes another one as each stage begins.
A run that nobody watches writes nothing: what it writes could move its own figures.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil

from lowtide.reports.schema import Report, Stage, json_bytes

WANTED = "live.wanted"
"""The file that a watcher touches."""

LIFE = "live.json"
"""The file that a run writes."""

FRESH_S = 10.0
"""Seconds for which a touch counts."""

MOST_STAGES = 200
"""The last stages of a life that are written: the whole life is in the report, once it is there."""

_LARGEST = 64 << 20
"""Bytes of a file that is read."""


class LiveLife(msgspec.Struct, frozen=True, kw_only=True):
    """A life that is running.

    Attributes:
        pid: of the run's process.
        started: when that process was started, in seconds since 1970: another one may get its number.
        report: with what the report will have, too, and no subject yet.
        now: the stage that is running, with its cycle, for a person.
        stages: the last `MOST_STAGES` that have ended.
    """

    pid: int
    started: float
    report: Report
    now: str
    stages: tuple[Stage, ...] = ()

    @property
    def is_running(self) -> bool:
        """Whether the run's process is there still."""
        try:
            return bool(psutil.Process(self.pid).create_time() == self.started)
        except psutil.NoSuchProcess:
            return False


class Broadcast:
    """Writes the life so far while somebody watches.

    Args:
        folder: of the report.
        make_report: makes what the report will have, without subjects; not called where nobody watches.
    """

    def __init__(self, folder: Path, make_report: Callable[[], Report]) -> None:
        self._folder = folder
        self._make_report = make_report

    def stage_begins(self, now: str, latest_stages: Callable[[int], Sequence[Stage]]) -> None:
        """Write what there is so far, if somebody watches; what cannot be written is left out.

        Args:
            now: the stage that begins, for a person.
            latest_stages: gives the last stages that have ended, that many at most; not called where nobody watches.
        """
        if not _is_fresh(self._folder / WANTED):
            return
        life = LiveLife(
            pid=os.getpid(),
            started=psutil.Process().create_time(),
            report=self._make_report(),
            now=now,
            stages=tuple(latest_stages(MOST_STAGES)),
        )
        # A watcher must not cost the run anything, and no half of a file may be seen.
        with suppress(OSError):
            half = self._folder / f"{LIFE}.half"
            half.write_bytes(json_bytes(life))
            half.replace(self._folder / LIFE)

    def close(self) -> None:
        """End the broadcast with the life."""
        with suppress(OSError):
            (self._folder / LIFE).unlink(missing_ok=True)


def want(folder: Path) -> None:
    """Say that somebody watches a folder, for the next `FRESH_S` seconds.

    Raises:
        OSError: nothing can be written there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / WANTED).touch()


def stop_wanting(folder: Path) -> None:
    """Nobody watches any more; where the file cannot be removed it is old soon."""
    with suppress(OSError):
        (folder / WANTED).unlink(missing_ok=True)


def read_live(folder: Path) -> LiveLife | None:
    """Return the life that is running, or was when its process was killed; None where there is none."""
    path = folder / LIFE
    try:
        if path.stat().st_size > _LARGEST:
            return None
        return msgspec.json.decode(path.read_bytes(), type=LiveLife)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _is_fresh(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime < FRESH_S
    except OSError:
        return False
