"""What `--leakcheck` says on the terminal: the header, one line per cause, and the details of each."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from lowtide.leakcheck.judging.judge import REMEDIES_SHARE, UNTRIED
from lowtide.leakcheck.judging.metrics import HOST_MEMORY_TOLERANCE, plain_metrics
from lowtide.leakcheck.judging.rules import PEAK
from lowtide.probes.heap.roots import is_library
from lowtide.probes.originals import loaded, os, sys
from lowtide.pytest_plugin.session_watch import Spent
from lowtide.pytest_plugin.settings import Settings
from lowtide.pytest_plugin.turns import SESSION
from lowtide.reports.causes import Sighting, causes_of
from lowtide.reports.escaping import one_line
from lowtide.reports.finding_lines import amount, first_line, holder_text, lines_again, terminal_lines
from lowtide.reports.heap.kept_heap import kept_files
from lowtide.reports.markdown import not_measured
from lowtide.reports.outcomes import ENDED, KNOW_GROWTH, held_by_process
from lowtide.reports.schema import Finding, Hop, NotMeasured, Subject
from lowtide.reports.sizes import format_amount, format_bytes

MOST_NOT_MEASURED = 5
"""How many lines say what could not be judged; the others are in a report."""

_MOST_NOTES = 5
"""Lines that say what a clean test did, the first ones; the others are in a report."""

NOTHING_BEFORE: Mapping[int, Sighting] = {}
"""Of a subject that none of whose causes was seen before."""


def header(settings: Settings, *, shares_card: bool) -> list[str]:
    """Return the lines at the top of the run."""
    tolerance = format_bytes(settings.tolerance) if settings.tolerance else "none"
    host = max(settings.tolerance, HOST_MEMORY_TOLERANCE)
    lines = [
        f"leakcheck: tolerance {tolerance}, host memory {format_bytes(host)}; a leak "
        + ("fails its test" if settings.action == "fail" else "is reported and fails nothing")
    ]
    lines.append(f"leakcheck: judged: {', '.join(_judged(settings, shares_card=shares_card))}")
    lines += [f"leakcheck: not judged here: {reason}" for reason in not_judged(settings, shares_card=shares_card)]
    return lines


def _judged(settings: Settings, *, shares_card: bool) -> list[str]:
    """Return the resources of `leakcheck/judging/metrics.py`, as far as they can be read here."""
    devices = ["cpu"] if settings.device == "cpu" else ["cpu", "cuda"]
    resources = list(dict.fromkeys(metric.resource for metric in plain_metrics(devices)))
    return [name for name in resources if not (shares_card and name == "driver")]


def not_judged(settings: Settings, *, shares_card: bool) -> Iterator[str]:
    """Yield what cannot be measured in this run, and why."""
    if settings.device == "cpu":
        yield "cards (device cpu)"
    elif shares_card:
        yield "the driver's figures of a card (workers share it)"
    torch: Any = loaded("torch")
    if torch is not None and settings.device != "cpu" and not torch.cuda.is_available():
        yield "cards (torch sees none)"
    if torch is not None and settings.device != "cpu" and torch.cuda.is_initialized():
        backend = torch.cuda.get_allocator_backend()
        if backend != "native":
            yield f"torch's memory on cards past its tensors (the {backend} allocator does not say what it holds)"


def summary(
    reporter: pytest.TerminalReporter,
    subjects: Sequence[Subject],
    settings: Settings,
    problems: Sequence[str],
    spent: Spent,
) -> None:
    """Write the section at the end of the run; `problems` are those of the suppressions."""
    skipped = [subject for subject in subjects if subject.outcome in ("skipped", "unsupported")]
    leaking = [subject for subject in subjects if subject.outcome == "leak"]
    if not subjects:
        return
    reporter.section("leakcheck", sep="=")

    def write(text: str, **colors: bool) -> None:
        reporter.write_line(one_line(text), **colors)

    # What is known only now that torch is loaded.
    for reason in not_judged(settings, shares_card=False):
        write(f"not judged here: {reason}", yellow=True)
    for text in _not_measured(subjects):
        write(text, yellow=True)
    for text in _ended_processes(subjects):
        write(text)
    for subject in subjects:
        if subject.outcome == "error":
            write(f"ERROR {subject.id}: {subject.reason}", red=True)
    for cause in causes_of(subjects):
        known = cause.first.finding.suppressed_by is not None
        word = "known" if known else ("LEAK" if settings.action == "fail" else "warning")
        text = line(cause.first.subject, cause.first.finding) + cause.elsewhere
        write(f"{word} {text}", yellow=known, red=not known)
    notes = [subject for subject in subjects if subject.outcome == "clean" and subject.reason]
    for subject in notes[:_MOST_NOTES]:
        write(f"note {subject.id}: {subject.reason}", yellow=True)
    if len(notes) > _MOST_NOTES:
        write(f"{format_amount(len(notes) - _MOST_NOTES, 'more notes')}: a report (--leakcheck-report) lists them")
    for problem in problems:
        write(f"SUPPRESSION {problem}", red=True)
    left_out = sum(UNTRIED in (finding.advice or "") for subject in subjects for finding in subject.findings)
    if left_out:
        number = "1 remedy" if left_out == 1 else f"{left_out} remedies"
        seconds = f"{REMEDIES_SHARE * settings.budget:g} s ({REMEDIES_SHARE} times --leakcheck-budget) were over"
        write(f"{number} not tried: {seconds}", yellow=True)
    judged = len(subjects) - len(skipped)
    counts = f"{judged} judged, {len(leaking)} with leaks"
    if skipped:
        counts += f", {len(skipped)} not judged"
    write(counts, green=not leaking, red=bool(leaking))
    write(str(spent))
    if settings.report is not None:
        write(f"report: {os.fspath(settings.report)}/index.html")
        if settings.keep_heap:
            for kept in kept_files(settings.report):
                write(f"kept heap: lowtide heap {shlex.quote(os.fspath(kept))}")


def last_lines(reporter: pytest.TerminalReporter | None, awaited: Sequence[str], unwritten: str) -> None:
    """Write what is said below pytest's last line.

    Args:
        reporter: pytest's; None where it has none.
        awaited: the threads and processes that Python waits for when it ends.
        unwritten: why the report could not be written; empty if it was.
    """
    if awaited and reporter is not None:
        reporter.write_line(one_line(f"leakcheck: before Python ends, it waits for {', '.join(awaited)}"), yellow=True)
    if unwritten and reporter is not None:
        reporter.write_line(one_line(f"ERROR: {unwritten}"), red=True)
    elif unwritten:
        sys.stderr.write(f"{one_line(f'ERROR: {unwritten}')}\n")


def _not_measured(subjects: Sequence[Subject]) -> Iterator[str]:
    """Yield what tests could not be judged by, and why: what concerns most of them first."""
    yield from _other_processes(subjects)
    known = (
        (missing, tests)
        for missing, tests in not_measured(subjects).items()
        if missing.process is None and missing.why != ENDED
    )
    found = sorted(known, key=lambda item: -item[1])
    of_session = {missing for subject in subjects if subject.id == SESSION for missing in subject.not_measured}
    for missing, tests in found[:MOST_NOT_MEASURED]:
        # The names of what may be a library's are in a report: here they would be lines of pipes.
        amount_of = missing.what.partition(", since ")[0]
        where = "" if missing in of_session else f" in {format_amount(tests, 'tests')}"
        yield f"not judged{where}: {amount_of} ({missing.why})"
    if len(found) > MOST_NOT_MEASURED:
        yield f"not judged: {len(found) - MOST_NOT_MEASURED} more, which a report (--leakcheck-report) lists"


def _other_processes(subjects: Sequence[Subject]) -> Iterator[str]:
    """Yield in one line for each advice: in how many tests other processes held memory that was not seen."""
    advice: dict[str, list[tuple[str, NotMeasured]]] = {}
    for subject in subjects:
        for missing in subject.not_measured:
            if missing.process is not None:
                advice.setdefault(missing.why, []).append((subject.id, missing))
    for why, found in advice.items():
        tests = len({name for name, _ in found})
        pids = {missing.process.pid for _, missing in found if missing.process is not None}
        largest = max((missing for _, missing in found), key=held_by_process)
        others = "" if len(pids) == 1 else f", the largest of {len(pids)} processes"
        yield f"not judged in {format_amount(tests, 'tests')}: {largest.what}{others}; {why}"


def _ended_processes(subjects: Sequence[Subject]) -> Iterator[str]:
    """Say in one line what is known of the processes that ended within tests that left nothing, if there were any."""
    ended = {
        missing
        for subject in subjects
        if not subject.findings
        for missing in subject.not_measured
        if missing.why == ENDED
    }
    if ended:
        tests, they = ("its test", "it") if len(ended) == 1 else ("their tests", "they")
        said = f"{format_amount(len(ended), 'processes')} ended in {tests} and left nothing"
        yield f"{said}; whether {they} grew while {they} ran is not known: {KNOW_GROWTH}"


def line(subject: Subject, finding: Finding) -> str:
    """Return one leak on one line: test, resource, bytes, holder."""
    said = f"{subject.id} {finding.resource}/{finding.cause} {amount(finding)} {holder_text(finding)}"
    return one_line(said.rstrip())


def headline(subject: Subject, before: Mapping[int, Sighting] = NOTHING_BEFORE) -> str:
    """Return what stands behind FAILED in pytest's summary: of its one line a narrow terminal shows the holder.

    Args:
        subject: what left something.
        before: by their places those of its findings whose causes were seen before, and where.
    """
    if subject.outcome == "error":
        return one_line(subject.reason)
    found = [(turn, finding) for turn, finding in enumerate(subject.findings) if finding.suppressed_by is None]
    turn, first = min(found, key=lambda item: item[0] in before)
    others = len(subject.findings) - 1
    more = f" (and {others} more)" if others else ""
    same = f"as in {before[turn].subject.id}: " if turn in before else ""
    if first.resource == PEAK.resource:
        return one_line(f"peak: {first.message}{more}")
    holder = f"{first.holder}: " if first.holder and not _is_of_a_librarys_own(first.path) else ""
    return one_line(f"leak: {holder}{same}{first.resource}/{first.cause}: {first.message}{more}")


def _is_of_a_librarys_own(path: Sequence[Hop]) -> bool:
    """Return whether a path begins at a table of a library's own, as `subprocess._active`: nobody knows it by that."""
    return [hop.type for hop in path[:1]] == ["module"] and is_library(path[0].edge) and path[1].edge.startswith("._")


def details(subject: Subject, verbosity: int, before: Mapping[int, Sighting] = NOTHING_BEFORE) -> str:
    """Return everything about a subject's leaks; paths and stacks in full with `-v`.

    Args:
        subject: what left something.
        verbosity: pytest's.
        before: see `headline`; of these nothing is told again.
    """
    if subject.outcome == "error":
        return one_line(f"{subject.id}: {subject.reason}")
    is_left = any(finding.resource != PEAK.resource for finding in subject.findings)
    lines = [f"{subject.id} {'left something behind' if is_left else 'took more memory than it may'}:"]
    for turn, finding in enumerate(subject.findings):
        if finding.suppressed_by is not None:
            continue
        lines.append(f"  {finding.resource}/{finding.cause}: {first_line(finding)}")
        shown = terminal_lines(finding, "with -v", whole=verbosity > 0)
        if turn in before:
            shown = lines_again(finding, before[turn], subject)
        lines += [f"    {detail.text}" for detail in shown]
    return "\n".join(map(one_line, lines))
