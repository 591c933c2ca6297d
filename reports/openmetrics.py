"""A report as OpenMetrics text (version 1.0), which Prometheus scrapes or a textfile collector picks up."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterator
from typing import get_args

from lowtide.reports.escaping import one_line
from lowtide.reports.schema import Outcome, Report

_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})

_Key = tuple[str, str, str, str]
"""Resource, device, stage and subject."""


def render_openmetrics(report: Report) -> str:
    """Return the residue by resource, device, stage and subject, known findings included, and each subject's outcome.

    A subject without findings has no residue samples; its outcome says that it was judged.
    """
    return "\n".join([*_residue(report), *_outcomes(report), *_run(report), "# EOF"]) + "\n"


def _residue(report: Report) -> Iterator[str]:
    sizes: Counter[_Key] = Counter()
    counts: Counter[_Key] = Counter()
    for subject in report.subjects:
        for finding in subject.findings:
            for each in (finding, *finding.parts):
                key: _Key = (each.resource, each.device, each.stage, subject.id)
                sizes[key] += each.bytes
                counts[key] += each.count
    # One sample per set of labels: two with the same would make the whole text invalid.
    yield "# TYPE lowtide_residue_bytes gauge"
    yield "# UNIT lowtide_residue_bytes bytes"
    yield "# HELP lowtide_residue_bytes Memory that did not come back."
    for key, size in sizes.items():
        yield f"lowtide_residue_bytes{_residue_labels(key)} {size}"
    yield "# TYPE lowtide_residue_things gauge"
    yield "# HELP lowtide_residue_things How many things did not come back: tensors, threads, descriptors."
    for key, count in counts.items():
        yield f"lowtide_residue_things{_residue_labels(key)} {count}"


def _residue_labels(key: _Key) -> str:
    resource, device, stage, subject = key
    return _labels(resource=resource, device=device, stage=stage, subject=subject)


def _outcomes(report: Report) -> Iterator[str]:
    yield "# TYPE lowtide_outcome stateset"
    yield "# HELP lowtide_outcome How a subject was judged."
    judged = {subject.id: subject.outcome for subject in report.subjects}
    for name, outcome in judged.items():
        for state in get_args(Outcome):
            yield f"lowtide_outcome{_labels(subject=name, lowtide_outcome=state)} {int(state == outcome)}"


def _run(report: Report) -> Iterator[str]:
    machine = report.machine
    devices = ", ".join(machine.devices)
    labels = _labels(version=report.version, torch=machine.torch, devices=devices, driver=machine.driver)
    yield "# TYPE lowtide_run info"
    yield "# HELP lowtide_run What was judged with, and where."
    yield f"lowtide_run_info{labels} 1"
    try:
        created = datetime.datetime.fromisoformat(report.created).timestamp()
    except ValueError:
        return
    yield "# TYPE lowtide_run_timestamp_seconds gauge"
    yield "# UNIT lowtide_run_timestamp_seconds seconds"
    yield "# HELP lowtide_run_timestamp_seconds When the run began."
    yield f"lowtide_run_timestamp_seconds {created:.0f}"


def _labels(**labels: str) -> str:
    pairs = (f'{name}="{_value(value)}"' for name, value in labels.items())
    return f"{{{','.join(pairs)}}}"


def _value(text: str) -> str:
    # A line end has an escape of the format's own.
    return "\n".join(map(one_line, text.split("\n"))).translate(_ESCAPES)
