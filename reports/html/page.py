"""A report as one HTML page that needs nothing else: no network, no fonts; its pictures are drawn from data in it.

What findings hold is drawn as trees, by the stack that allocated it and by the path that holds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from lowtide.reports.causes import Cause, Sighting, causes_of
from lowtide.reports.finding_lines import GROWTH_HEAD, GROWTH_TITLE, advice_text, next_step, remedy_effect
from lowtide.reports.html.entries import filterable
from lowtide.reports.html.jinja_environment import environment
from lowtide.reports.html.life_pictures import draw_life
from lowtide.reports.html.scripts import as_stored, copying, drawing, filtering, following, security_policy, unpacking
from lowtide.reports.html.tables import MOST_ROWS, ledger_tables, mib, stage_table
from lowtide.reports.html.trends import draw_growth, draw_trends
from lowtide.reports.markdown import count_outcomes, not_measured, verdict
from lowtide.reports.processes.tree_table import tree_tables
from lowtide.reports.schema import Finding, Outcome, Report, Subject

if TYPE_CHECKING:
    from jinja2 import Environment


from collections.abc import Iterable, Iterator
from typing import NamedTuple

from lowtide.reports.escaping import one_line
from lowtide.reports.html.tables import sizes_of
from lowtide.reports.schema import Readings

_BY = {"allocated": "torch", "reserved": "torch", "pinned": "torch", "RSS": "the kernel", "shared memory": "the kernel"}
"""Who counts a figure, where it is neither the driver nor lowtide itself."""


class Measured(NamedTuple):
    """One figure.

    Attributes:
        name: what it is.
        by: who counts it.
        known: in how many readings it is known.
        readings: how many there were.
        lowest: bytes; None where it is known in no reading.
        highest: bytes.
    """

    name: str
    by: str
    known: int
    readings: int
    lowest: int | None
    highest: int | None


def measured_figures(report: Report) -> list[Measured]:
    """Return the figures of all subjects' stages; none where no subject has any."""
    found: dict[str, tuple[str, list[int | None]]] = {}
    for readings in _readings(report):
        for name, by, size in _figures(readings, report.machine.driver):
            found.setdefault(name, (by, []))[1].append(size)
    return [_measured(name, by, sizes) for name, (by, sizes) in found.items()]


def _measured(name: str, by: str, sizes: list[int | None]) -> Measured:
    known = [size for size in sizes if size is not None]
    return Measured(one_line(name), by, len(known), len(sizes), min(known, default=None), max(known, default=None))


def _readings(report: Report) -> Iterator[Readings]:
    for subject in report.subjects:
        for stage in subject.stages:
            yield stage.before
            yield stage.after


def _figures(readings: Readings, driver: str) -> Iterator[tuple[str, str, int | None]]:
    for name, size in sizes_of(readings, sorted(readings.arenas)).items():
        yield name, driver if name == "driver" else _BY.get(name, "lowtide"), size
    for ledger in readings.ledgers:
        yield f"ledger of {ledger.device}", ledger.source, ledger.total
        yield f"unexplained on {ledger.device}", "lowtide", ledger.unexplained


MOST_CHILDREN = 60
"""Nodes below one node, the largest ones; the others are together in one."""

MOST_DEEP = 100
"""Levels of a tree: a linked list may be a path of thousands, which no chart shows and no encoder of JSON takes."""

LONGEST = 120
"""Characters of a node's name: a chart has no room for more."""


class Node(msgspec.Struct):
    """A part of a tree.

    Attributes:
        name: what it is.
        bytes: of all that is below it, and its own.
        children: the largest first.
    """

    name: str
    bytes: int = 0
    children: list[Node] = msgspec.field(default_factory=list)


def allocation_tree(report: Report) -> Node | None:
    """Return what did not come back by the stack that allocated it, the outermost frame on top; None if unknown."""
    return _grown(
        ([f"{frame.function} ({frame.file}:{frame.line})" for frame in reversed(finding.allocated_at)], finding.bytes)
        for finding in distinct(report)
    )


def holder_tree(report: Report) -> Node | None:
    """Return what did not come back by the path that holds it, the root on top; None if no path is known.

    Each node dominates what is below it as far as the findings tell: to cut its edge lets that go.
    """
    return _grown(([hop.edge or hop.type for hop in finding.path], finding.bytes) for finding in distinct(report))


def distinct(report: Report) -> Iterator[Finding]:
    """Yield what did not come back and is no suppression's; the largest one of a cause that was seen several times."""
    for cause in causes_of(report.subjects):
        if cause.first.finding.suppressed_by is None and cause.first.finding.resource != "peak":
            yield cause.by_largest().first.finding


def _grown(ways: Iterable[tuple[Sequence[str], int]]) -> Node | None:
    root = Node("all")
    # By the node above, which lives as long as the tree, and the step from it.
    index: dict[tuple[int, str], Node] = {}
    for way, size in ways:
        if not way or size <= 0:
            continue
        node = root
        node.bytes += size
        for step in _bounded(way):
            key = (id(node), step)
            below = index.get(key)
            if below is None:
                below = index[key] = Node(_shown(step))
                node.children.append(below)
            node = below
            node.bytes += size
    if not root.children:
        return None
    _fold(root)
    return root


def _bounded(way: Sequence[str]) -> Sequence[str]:
    """Return the steps, those in the middle of a long way as one."""
    if len(way) <= MOST_DEEP:
        return way
    first = MOST_DEEP // 2
    last = MOST_DEEP - first - 1
    return [*way[:first], f"… {len(way) - first - last} more …", *way[-last:]]


def _shown(step: str) -> str:
    text = one_line(step)
    return text if len(text) <= LONGEST else f"…{text[-LONGEST:]}"


def _fold(root: Node) -> None:
    """Sort each node's children, and put those beyond the largest into one; without recursion, for deep paths."""
    waiting = [root]
    while waiting:
        node = waiting.pop()
        node.children.sort(key=lambda child: -child.bytes)
        rest = node.children[MOST_CHILDREN:]
        if len(rest) > 1:
            node.children[MOST_CHILDREN:] = [Node(f"{len(rest)} more", sum(child.bytes for child in rest))]
        waiting += node.children


DETAILED = 100
"""Subjects whose stages, ledgers and pictures are on the page."""

LISTED = 200
"""Lines of each list of subjects that are elements from the start; the filter finds the others."""

SHOWN_FINDINGS = 100
"""Findings that are elements from the start; the filter finds the others."""

MOST_OF_ONE = 20
"""Findings of one subject that are elements from the start."""

MOST_CAUSES = 5
"""Causes that are named first, with what to do: more would not be on the first screen."""

MOST_NAMED = 5
"""Findings of one subject that are named in the list of what leaked."""

FILTERED_FROM = 10
"""Findings, and subjects without one, beyond which there is a filter."""

MOST_OCCURRENCES = 20
"""Other places of one leak that are linked from it."""

_URGENCY: dict[Outcome, int] = {"leak": 0, "error": 1, "unsupported": 2, "skipped": 3, "clean": 4}


def render_html(report: Report, *, served: bool = False) -> str:
    """Return the whole page: verdict, what leaked or failed, everything else folded, and what was not measured.

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
    pictures, shown = _pictures(report, numbered), _shown_findings([*urgent, *others])
    context: dict[str, Any] = {
        "report": report,
        "verdict": verdict(report),
        "causes": _largest_causes(ordered),
        "most_causes": MOST_CAUSES,
        "anchor": lambda seen: _anchor(seen) if seen.place < shown.get(seen.turn, 0) else f"s{seen.turn}",
        "next_step": next_step,
        "counts": count_outcomes(report),
        "urgent": urgent,
        "others": others,
        "shown_findings": shown,
        "pictures": pictures,
        "measured": measured_figures(report),
        "not_measured": not_measured(report.subjects),
        "detailed": DETAILED,
        "most_named": MOST_NAMED,
        "listed": LISTED,
        "stage_table": stage_table,
        "ledger_tables": ledger_tables,
        "remedy_effect": remedy_effect,
        "places": _Places(ordered),
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


def _largest_causes(subjects: Sequence[Subject]) -> list[Cause]:
    """Return what left something, the largest first, each where it was seen first; not what is suppressed."""
    causes = [cause for cause in causes_of(subjects) if cause.first.finding.suppressed_by is None]
    return sorted(causes, key=lambda cause: -cause.by_largest().first.finding.bytes)


def _scripts(draws: bool, filters: bool, copies: bool, follows: bool) -> tuple[str, ...]:
    """Return the scripts that a page needs, in the order in which they must run."""
    return (
        *(unpacking() if draws or filters else ()),
        *(drawing() if draws else ()),
        *(filtering() if filters else ()),
        *(copying() if copies else ()),
        *(following() if follows else ()),
    )


def _pictures(report: Report, numbered: Sequence[tuple[int, Subject]]) -> dict[str, Any]:
    """Return the data of all pictures, by the names under which the page has them."""
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
    """Return how many findings of each subject are elements of the page from the start."""
    left, shown = SHOWN_FINDINGS, {}
    for turn, subject in numbered:
        shown[turn] = min(left, MOST_OF_ONE, len(subject.findings))
        left -= shown[turn]
    return shown


def _filterable(
    templates: Environment, context: dict[str, Any], numbered: Sequence[tuple[int, Subject]]
) -> dict[str, Any]:
    """Return the data of the filter; empty for a page that is read faster than filtered."""
    if sum(max(1, len(subject.findings)) for _, subject in numbered) <= FILTERED_FROM:
        return {}
    parts: Any = templates.get_template("parts.html.j2").make_module(context)

    def write(subject: Subject, finding: Finding | None, place: str) -> str:
        return str(parts.reason(subject) if finding is None else parts.finding_section(finding, place, "m"))

    return filterable(numbered, write)


class _Places:
    """Where else on the page the cause of a finding is.

    Args:
        subjects: in the order of their anchors.
    """

    def __init__(self, subjects: Sequence[Subject]) -> None:
        self._causes: dict[str, Cause] = {}
        for cause in causes_of(subjects):
            self._causes.update((_anchor(seen), cause) for seen in (cause.first, *cause.again))

    def first(self, place: str) -> tuple[str, str] | None:
        """Return the anchor at which all is said of the cause, with its subject; None if it is this one."""
        first = self._causes[place].first
        return None if _anchor(first) == place else (_anchor(first), first.subject.id)

    def again(self, place: str) -> list[tuple[str, str]]:
        """Return the anchors at which it was seen again, with their subjects: thousands of tests may have one leak."""
        return [(_anchor(seen), seen.subject.id) for seen in self._causes[place].again[:MOST_OCCURRENCES]]


def _anchor(seen: Sighting) -> str:
    return f"s{seen.turn}f{seen.place}"
