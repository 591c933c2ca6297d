"""A report as JUnit XML, which CI systems read: a test case per subject."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from lowtide.reports.causes import Sighting, seen_before
from lowtide.reports.escaping import one_line
from lowtide.reports.finding_lines import advice_text, amount, finding_lines, first_line, lines_again
from lowtide.reports.markdown import count_outcomes, not_measured
from lowtide.reports.out_of_memory import out_of_memory_lines
from lowtide.reports.schema import Finding, Report, Subject


def render_junit(report: Report) -> str:
    """Return one test suite; a leak is a failure, what was skipped or is unsupported is skipped.

    Names are never cut, however long: CI systems distinguish tests by them.
    """
    counts = count_outcomes(report)
    totals = {
        "name": "lowtide",
        "tests": str(len(report.subjects)),
        "failures": str(counts["leak"]),
        "errors": str(counts["error"]),
        "time": f"{sum(map(_seconds, report.subjects)):.3f}",
    }
    root = Element("testsuites", totals)
    suite = SubElement(root, "testsuite", totals, skipped=str(counts["skipped"] + counts["unsupported"]))
    if _is_time(report.created):
        suite.set("timestamp", one_line(report.created))
    _add_properties(suite, _run_properties(report))
    for subject, before in zip(report.subjects, seen_before(report.subjects), strict=True):
        _add_case(suite, subject, before)
    ElementTree.indent(root)
    # Not ElementTree's own declaration: for text that would name the locale's encoding.
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


def _add_case(suite: Element, subject: Subject, before: Mapping[int, Sighting]) -> None:
    group, name = _split_id(subject.id)
    names = {"classname": one_line(group), "name": one_line(name)}
    case = SubElement(suite, "testcase", names, time=f"{_seconds(subject):.3f}")
    properties = [pair for turn, finding in enumerate(subject.findings, 1) for pair in _facts(turn, finding)]
    _add_properties(case, properties)
    if subject.outcome == "leak":
        _add_failure(case, subject, before)
    elif subject.outcome == "error":
        SubElement(case, "error", type="error", message=one_line(subject.reason)).text = _details(subject, before)
    elif subject.outcome != "clean":
        SubElement(case, "skipped", type=subject.outcome, message=one_line(subject.reason))


def _add_failure(case: Element, subject: Subject, before: Mapping[int, Sighting]) -> None:
    # One failure per case is all that most readers accept: it names the first leak that counts, and its text has all.
    counted = [finding for finding in subject.findings if finding.suppressed_by is None]
    kind, message = "leak", subject.reason
    if counted:
        kind, message = f"{counted[0].resource}/{counted[0].cause}", first_line(counted[0])
    if len(counted) > 1:
        message += f" (and {len(counted) - 1} more)"
    SubElement(case, "failure", type=kind, message=one_line(message)).text = _details(subject, before)


def _add_properties(parent: Element, pairs: Sequence[tuple[str, str]]) -> None:
    if pairs:
        properties = SubElement(parent, "properties")
        for name, value in pairs:
            SubElement(properties, "property", name=one_line(name), value=one_line(value))


def _run_properties(report: Report) -> list[tuple[str, str]]:
    machine = report.machine
    return [
        ("version", report.version),
        ("command", report.command),
        ("platform", machine.platform),
        ("python", machine.python),
        ("torch", machine.torch),
        ("devices", ", ".join(machine.devices)),
        ("driver", machine.driver),
        *((f"not-measured.{missing.what}", missing.why) for missing in not_measured(report.subjects)),
    ]


def _facts(turn: int, finding: Finding) -> Iterator[tuple[str, str]]:
    facts: dict[str, str | None] = {
        "resource": finding.resource,
        "cause": finding.cause,
        "bytes": str(finding.bytes),
        "count": str(finding.count),
        "device": finding.device,
        "stage": finding.stage,
        "fingerprint": finding.fingerprint,
        "verdict": finding.verdict,
        "holder": finding.holder,
        "trend": finding.trend,
        "suppressed_by": finding.suppressed_by,
    }
    if finding.remedy is not None:
        facts |= {"remedy": finding.remedy.action, "returns_bytes": str(finding.remedy.returns_bytes)}
    if advice_text(finding):
        facts["advice"] = advice_text(finding)
    if finding.shared_bytes:
        facts["shared_bytes"] = str(finding.shared_bytes)
    for number, tried in enumerate(finding.tried, 1):
        facts |= {f"tried.{number}": tried.action, f"tried.{number}.returns_bytes": str(tried.returns_bytes)}
    facts |= {f"changed.{number}": change for number, change in enumerate(finding.changed, 1)}
    return ((f"leakcheck.{turn}.{name}", value) for name, value in facts.items() if value is not None)


def _details(subject: Subject, before: Mapping[int, Sighting]) -> str:
    lines = [subject.reason] if subject.reason else []
    lines += out_of_memory_lines(subject.out_of_memory) if subject.out_of_memory is not None else []
    for place, finding in enumerate(subject.findings):
        known = lines_again(finding, before[place], subject) if place in before else finding_lines(finding)
        lines.append(
            f"{finding.resource}/{finding.cause} ({amount(finding)}, since {finding.stage}): {first_line(finding)}"
        )
        lines += [f"  {line.text}" for line in known]
    return "\n".join(map(one_line, lines))


def _split_id(subject_id: str) -> tuple[str, str]:
    """Return `tests/test_a.py::TestB::test_c[1]` as pytest names it in JUnit: `tests.test_a.TestB`, `test_c[1]`."""
    # Parameters may hold any text, `::` included.
    head, bracket, parameters = subject_id.partition("[")
    file, *names = head.split("::")
    if not names:
        return "lowtide", subject_id
    return ".".join([file.removesuffix(".py").replace("/", "."), *names[:-1]]), names[-1] + bracket + parameters


def _seconds(subject: Subject) -> float:
    return sum(stage.seconds for stage in subject.stages)


def _is_time(text: str) -> bool:
    try:
        datetime.datetime.fromisoformat(text)
    except ValueError:
        return False
    return True
