"""A report as one HTML page that needs nothing else: no network, no fonts; its pictures are drawn from data in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lowtide.reports.finding_lines import GROWTH_HEAD, GROWTH_TITLE, advice_text, remedy_effect
from lowtide.reports.html.entries import filterable
from lowtide.reports.html.jinja_environment import environment
from lowtide.reports.html.life_pictures import draw_life
from lowtide.reports.html.measured import measured_figures
from lowtide.reports.html.scripts import as_stored, copying, drawing, filtering, following, security_policy, unpacking
from lowtide.reports.html.tables import MOST_ROWS, ledger_tables, mib, stage_table
from lowtide.reports.html.trees import allocation_tree, distinct, holder_tree
from lowtide.reports.html.trends import draw_growth, draw_trends
from lowtide.reports.markdown import count_outcomes, not_measured, verdict
from lowtide.reports.processes.tree_table import tree_tables
from lowtide.reports.schema import Finding, Outcome, Report, Subject

if TYPE_CHECKING:
    from jinja2 import Environment

DETAILED = 100
"""Subjects whose stages, ledgers and pictures are on the page."""

LISTED = 200
"""Lines of each list of subjects that are elements from the start; the filter finds the others."""

SHOWN_FINDINGS = 100
"""Findings that are elements from the start; the filter finds the others."""

MOST_OF_ONE = 20
"""Findings of one subject that are elements from the start."""

MOST_NAMED = 5
"""Findings of one subject that are named in the list of what leaked."""

FILTERED_FROM = 10
"""Findings, and subjects without one, beyond which there is a filter."""

MOST_OCCURRENCES = 20
"""Other places of one leak that are linked from it."""

_URGENCY: dict[Outcome, int] = {"leak": 0, "error": 1, "unsupported": 2, "skipped": 3, "clean": 4}


def render_html(report: Report, *, served: bool = False) -> str:
    """The whole page: verdict, what leaked or failed, everything else folded, and what was not measured.

    Args:
        report: what is on it.
        served: whether it is from a server that tells when there is another one.
    """
    from markupsafe import Markup

    templates = environment()
    ordered = sorted(report.subjects, key=lambda subject: (_URGENCY[subject.outcome], not subject.findings))
    # Numbered, because an id may hold what no anchor may.
    numbered = list(enumerate(ordered))
    urgent = [(turn, subject) for turn, subject in numbered if subject.outcome in ("leak", "error")]
    others = [(turn, subject) for turn, subject in numbered if subject.outcome not in ("leak", "error")]
    pictures = _pictures(report, numbered)
    context: dict[str, Any] = {
        "report": report,
        "verdict": verdict(report),
        "counts": count_outcomes(report),
        "urgent": urgent,
        "others": others,
        "shown_findings": _shown_findings([*urgent, *others]),
        "pictures": pictures,
        "measured": measured_figures(report),
        "not_measured": not_measured(report.subjects),
        "detailed": DETAILED,
        "most_named": MOST_NAMED,
        "listed": LISTED,
        "stage_table": stage_table,
        "ledger_tables": ledger_tables,
        "remedy_effect": remedy_effect,
        "occurrences": _occurrences(numbered),
        "advice_text": advice_text,
        "growth_title": GROWTH_TITLE,
        "growth_head": GROWTH_HEAD,
        "tree_tables": tree_tables,
        "mib": mib,
        "most_rows": MOST_ROWS,
        "seconds": lambda subject: sum(stage.seconds for stage in subject.stages),
    }
    stored = {**pictures, **_filterable(templates, context, numbered)}
    run = _scripts(bool(pictures), "index" in stored, any(subject.findings for subject in ordered), served)
    return templates.get_template("report.html.j2").render(
        context,
        policy=Markup(security_policy(run, connects=served)),
        scripts=[Markup(text) for text in run],
        filtered="index" in stored,
        stored={name: Markup(as_stored(value)) for name, value in stored.items()},
    )


def _scripts(draws: bool, filters: bool, copies: bool, follows: bool) -> tuple[str, ...]:
    """The scripts that a page needs, in the order in which they must run."""
    return (
        *(unpacking() if draws or filters else ()),
        *(drawing() if draws else ()),
        *(filtering() if filters else ()),
        *(copying() if copies else ()),
        *(following() if follows else ()),
    )


def _pictures(report: Report, numbered: Sequence[tuple[int, Subject]]) -> dict[str, Any]:
    """The data of all pictures, by the names under which the page has them."""
    pictures: dict[str, Any] = {}
    for turn, subject in numbered[:DETAILED]:
        pictures[f"life-{turn}"] = draw_life(subject.stages)
        pictures[f"trends-{turn}"] = draw_trends(subject)
        pictures[f"growth-{turn}"] = draw_growth(subject)
    # Of one leak alone its own path and stack say the same.
    if sum(1 for _ in distinct(report)) > 1:
        pictures["stacks"] = allocation_tree(report)
        pictures["holders"] = holder_tree(report)
    return {name: picture for name, picture in pictures.items() if picture}


def _shown_findings(numbered: Sequence[tuple[int, Subject]]) -> dict[int, int]:
    """How many findings of each subject are elements of the page from the start."""
    left, shown = SHOWN_FINDINGS, {}
    for turn, subject in numbered:
        shown[turn] = min(left, MOST_OF_ONE, len(subject.findings))
        left -= shown[turn]
    return shown


def _filterable(
    templates: Environment, context: dict[str, Any], numbered: Sequence[tuple[int, Subject]]
) -> dict[str, Any]:
    """The data of the filter; empty for a page that is read faster than filtered."""
    if sum(max(1, len(subject.findings)) for _, subject in numbered) <= FILTERED_FROM:
        return {}
    parts: Any = templates.get_template("parts.html.j2").make_module(context)

    def write(subject: Subject, finding: Finding | None, place: str) -> str:
        return str(parts.reason(subject) if finding is None else parts.finding_section(finding, place, "m"))

    return filterable(numbered, write)


def _occurrences(numbered: Sequence[tuple[int, Subject]]) -> Callable[[Finding, str], list[tuple[str, str]]]:
    """What gives the other places of a finding on the page, with their subjects: those of the same fingerprint."""
    places: dict[str, list[tuple[str, str]]] = {}
    for turn, subject in numbered:
        for place, finding in enumerate(subject.findings):
            places.setdefault(finding.fingerprint, []).append((f"s{turn}f{place}", subject.id))

    def elsewhere(finding: Finding, place: str) -> list[tuple[str, str]]:
        # One more than are shown, which may be this one: thousands of tests may have the same leak.
        first = places[finding.fingerprint][: MOST_OCCURRENCES + 1]
        return [(other, name) for other, name in first if other != place][:MOST_OCCURRENCES]

    return elsewhere
