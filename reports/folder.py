"""The report folder: the report itself, and what people and CI systems read of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from lowtide.reports import schema
from lowtide.reports.html.page import render_html
from lowtide.reports.junit import render_junit
from lowtide.reports.markdown import render_markdown
from lowtide.reports.openmetrics import render_openmetrics
from lowtide.reports.perfetto import render_trace
from lowtide.reports.sarif import render_sarif
from lowtide.reports.whole_texts import whole_text


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


def write_folder(report: schema.Report, folder: Path) -> Path:
    """Write `leakcheck.json` and all that is made from it, each file as a whole or not at all.

    These are `index.html`, `junit.xml`, `summary.md`, `leakcheck.sarif`, `metrics.txt` and `trace.json`.

    Returns:
        The path of `leakcheck.json`.

    Raises:
        ReportError: the folder cannot be written to.
    """
    # First, because the others can be made from it again.
    path = schema.write(report, folder)
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
