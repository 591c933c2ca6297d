"""The report folder: the report itself, and what people and CI systems read of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lowtide.probes.originals import os
from lowtide.reports import schema
from lowtide.reports.html.page import render_html
from lowtide.reports.junit import render_junit
from lowtide.reports.markdown import render_markdown
from lowtide.reports.openmetrics import render_openmetrics
from lowtide.reports.perfetto import render_trace
from lowtide.reports.sarif import render_sarif
from lowtide.reports.schema import json_bytes, whole_text


def _sarif(report: schema.Report) -> str:
    return render_sarif(report, Path.cwd())


_RENDERERS: Mapping[str, Callable[[schema.Report], str]] = {
    "index.html": render_html,
    "junit.xml": render_junit,
    "summary.md": render_markdown,
    "leakcheck.sarif": _sarif,
    "metrics.txt": render_openmetrics,
    "trace.json": render_trace,
}


class UnfinishedReport:
    """Keeps in a folder what a run has finished, from its beginning on: whatever ends it, that can be read.

    The report of an earlier run goes: it must not pass for that of this one.  `write_folder` takes its place.

    Args:
        folder: of the report.
        begun: what the report says before anything is finished.
    """

    _open, _write, _close = staticmethod(os.open), staticmethod(os.write), staticmethod(os.close)

    def __init__(self, folder: Path, begun: schema.Begun) -> None:
        self._path = (folder / schema.UNFINISHED_FILE).absolute()
        self._unwritten = bytearray()
        for name in (schema.UNFINISHED_FILE, schema.REPORT_FILE, *_RENDERERS):
            with contextlib.suppress(OSError):
                (folder / name).unlink(missing_ok=True)
        self._append(begun)

    def add(self, subjects: Sequence[schema.Subject], *, goes_on: bool = False) -> None:
        """Write what was judged in one part of the run; what cannot be written now is tried again with the next part.

        Args:
            subjects: what was judged.
            goes_on: as that of `schema.Finished`.
        """
        if subjects:
            self._append(schema.Finished(subjects=tuple(subjects), goes_on=goes_on))

    def remove(self) -> None:
        """Take all of it away: the run has ended, and has no report."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _append(self, part: schema.Begun | schema.Finished) -> None:
        self._unwritten += json_bytes(part) + b"\n"
        with contextlib.suppress(OSError):
            # Not kept open: a program may close descriptors by their numbers.
            file = self._open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            try:
                del self._unwritten[: self._write(file, self._unwritten)]
            finally:
                self._close(file)


def write_folder(report: schema.Report, folder: Path, *, is_final: bool = True) -> Path:
    """Write `leakcheck.json` and all that is made from it, each file as a whole or not at all.

    These are `index.html`, `junit.xml`, `summary.md`, `leakcheck.sarif`, `metrics.txt` and `trace.json`.

    Args:
        report: what is written.
        folder: where to.
        is_final: whether this replaces what an `UnfinishedReport` has kept there.

    Returns:
        The path of `leakcheck.json`.

    Raises:
        ReportError: the folder cannot be written to.
    """
    # First, because the others can be made from it again.
    path = schema.write(report, folder)
    if is_final:
        with contextlib.suppress(OSError):
            (folder / schema.UNFINISHED_FILE).unlink(missing_ok=True)
    for name, render in _RENDERERS.items():
        write_whole(folder / name, render(report))
    return path


def write_whole(path: Path, text: str) -> None:
    """Write a file as a whole or not at all.

    Raises:
        ReportError: it cannot be written.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        try:
            partial.write_bytes(whole_text(text).encode())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise schema.ReportError(f"{path} cannot be written: {error.strerror}; choose another report folder") from error
