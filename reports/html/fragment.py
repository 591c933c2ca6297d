"""A report as a part of another page: what a notebook shows of it as the output of a cell."""

from __future__ import annotations

from typing import NamedTuple

from lowtide.reports.finding_lines import advice_text, remedy_effect
from lowtide.reports.html.jinja_environment import environment
from lowtide.reports.markdown import not_measured, verdict
from lowtide.reports.schema import Finding, Outcome, Report, Subject

MOST_FINDINGS = 30
"""Findings that are shown, the first subjects' first: a notebook keeps each output in its file."""

MOST_SUBJECTS = 100
"""Subjects that are shown: those that leaked or failed first."""

MOST_MISSING = 50
"""Things that were not measured and are shown."""

_URGENCY: dict[Outcome, int] = {"leak": 0, "error": 1, "unsupported": 2, "skipped": 3, "clean": 4}


class _Shown(NamedTuple):
    subject: Subject
    findings: tuple[Finding, ...]


def render_fragment(report: Report) -> str:
    """Verdict, findings with their holders and remedies, and what was not measured, as one element `div`.

    Its rules of style apply to nothing else on the page, and it can be read without them: a site that shows notebooks
    may take them away. It has no scripts, which a notebook would either remove or run with the rights of its own.
    """
    # The whole page, in a frame (`srcdoc`), is left out on purpose. With its pictures it is half a megabyte in the
    # notebook's file each time it is shown; without a sandbox its scripts would have the notebook's origin, and with
    # one their policy depends on the server's; sites that show notebooks remove frames. `LeakCheck` has no stages to
    # draw, and a report folder has the page as a file.
    ordered = sorted(report.subjects, key=lambda subject: (_URGENCY[subject.outcome], not subject.findings))
    missing = not_measured(report.subjects)
    return (
        environment()
        .get_template("fragment.html.j2")
        .render(
            report=report,
            verdict=verdict(report),
            shown=_with_findings(ordered[:MOST_SUBJECTS]),
            more_subjects=max(len(ordered) - MOST_SUBJECTS, 0),
            missing=list(missing)[:MOST_MISSING],
            more_missing=max(len(missing) - MOST_MISSING, 0),
            remedy_effect=remedy_effect,
            advice_text=advice_text,
        )
    )


def render_line(text: str) -> str:
    """Return one line of text where there is no report yet, as an element `p`."""
    return environment().from_string('<p class="lowtide-report">{{ text }}</p>').render(text=text)


def _with_findings(subjects: list[Subject]) -> list[_Shown]:
    """Return each subject with those of its findings that are shown."""
    shown, room = [], MOST_FINDINGS
    for subject in subjects:
        findings = subject.findings[:room]
        room -= len(findings)
        shown.append(_Shown(subject, findings))
    return shown
