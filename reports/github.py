"""What GitHub Actions shows of a report: the job's summary page, and annotations at the lines of the holders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from lowtide.reports.escaping import one_line
from lowtide.reports.finding_lines import first_line
from lowtide.reports.markdown import open_causes, render_markdown
from lowtide.reports.schema import Report, ReportError, whole_text
from lowtide.reports.source_places import SourcePlace, SourcePlaces

MOST_ANNOTATIONS = 10
"""GitHub shows ten errors of one step, and drops the others without a word."""

_LARGEST_SUMMARY = 1 << 20
"""Bytes; GitHub refuses the whole page of a step beyond that."""

_LONGEST = 1000


def render_annotations(report: Report, root: Path | None = None) -> str:
    """Return a workflow command per finding that counts, the largest first, and per subject that could not be judged.

    Args:
        report: the report.
        root: the folder of the sources, below which holders are looked for.
    """
    lines = list(_annotations(report, SourcePlaces(root)))
    if len(lines) > MOST_ANNOTATIONS:
        rest = f"{len(lines) - MOST_ANNOTATIONS + 1} more are in the summary and the report"
        lines = [*lines[: MOST_ANNOTATIONS - 1], _command(None, "lowtide", rest)]
    return "".join(f"{line}\n" for line in lines)


def append_summary(report: Report, environment: Mapping[str, str]) -> None:
    """Append the summary to the page of the job's step, where there is one (`GITHUB_STEP_SUMMARY`).

    Raises:
        ReportError: the file cannot be written to.
    """
    file = environment.get("GITHUB_STEP_SUMMARY")
    if not file:
        return
    text = whole_text(render_markdown(report)).encode()
    try:
        with Path(file).open("ab") as page:
            if page.tell() + len(text) <= _LARGEST_SUMMARY:
                page.write(text)
            else:
                page.write(b"## lowtide\n\nThe summary is too long for this page; it is in `summary.md`.\n")
    except OSError as error:
        raise ReportError(f"the step summary {file} cannot be written: {error.strerror}") from error


def _annotations(report: Report, places: SourcePlaces) -> Iterator[str]:
    for cause in open_causes(report.subjects):
        subject, finding, *_ = cause.first
        title = f"{finding.resource}/{finding.cause}"
        message = f"{subject.id}: {first_line(finding)}{cause.elsewhere}"
        yield _command(places.find(subject, finding), title, message)
    for subject in report.subjects:
        if subject.outcome in ("error", "unsupported"):
            yield _command(None, "not measured", f"{subject.id}: {subject.reason or subject.outcome}")


def _command(place: SourcePlace | None, title: str, message: str) -> str:
    properties = {} if place is None else {"file": place.file, "line": str(place.line)}
    properties["title"] = title
    pairs = ",".join(f"{name}={_property(value)}" for name, value in properties.items())
    return f"::error {pairs}::{_data(message)}"


# As the runner's own toolkit escapes them: a text can then neither end its command nor begin another one.
def _data(text: str) -> str:
    return one_line(text[:_LONGEST]).replace("%", "%25")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
