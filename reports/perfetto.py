"""A report as a trace that Perfetto and Chrome's `about:tracing` open: stages, ledgers and findings on a time line.

The format is Chrome's JSON trace events, which trace_processor reads. One after the other, each subject has the time
that its stages took; what passed between them, when lowtide measured, is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lowtide.reports.escaping import one_line
from lowtide.reports.finding_lines import first_line
from lowtide.reports.processes.stage_processes import ProcessName, ProcessStage
from lowtide.reports.schema import Finding, Ledger, Report, Stage, Subject, json_bytes

_Event = dict[str, Any]

_SHORTEST_US = 1.0
"""Microseconds of a stage that took no time that could be measured: one of 0 would not be seen."""

_STAGES = 1
"""The thread of each process on which its stages and findings are."""


def render_trace(report: Report) -> str:
    """Return the subjects with stages or findings, as processes of a trace, and then the engine's other processes.

    A stage is a slice, each line of a ledger a counter in bytes, and a finding an instant in the stage since which it
    is there.
    """
    trace = _Trace()
    for subject in report.subjects:
        if subject.stages or subject.findings:
            trace.add(subject)
    known = {"version": report.version, "created": report.created, "command": report.command}
    other = {name: one_line(text) for name, text in known.items()}
    return json_bytes({"traceEvents": trace.events, "displayTimeUnit": "ms", "otherData": other}).decode()


class _Trace:
    """Numbers processes and collects events; times are microseconds from the beginning of the first stage."""

    def __init__(self) -> None:
        self.events: list[_Event] = []
        self._now = 0.0
        self._processes = 0

    def add(self, subject: Subject) -> None:
        own = self._new_process(subject.id)
        others: dict[int, int] = {}
        ends: dict[str, float] = {}
        for turn, stage in enumerate(subject.stages):
            began, took = self._now, max(stage.seconds * 1e6, _SHORTEST_US)
            self._now = ends[stage.name] = began + took
            if stage.before.ledgers:
                # Else it begins with what the stage before it has ended with.
                self.events += _counters(own, began, stage.before.ledgers)
            elif not turn:
                self.events += _counters(own, began, stage.after.ledgers)
            self.events.append(_slice(own, began, took, stage))
            self.events += _counters(own, self._now, stage.after.ledgers)
            for each in stage.processes:
                there = self._other(others, subject, each.process)
                self.events.append(_slice(there, began, took, stage))
                self.events += _counters_of_process(there, self._now, each)
        for finding in subject.findings:
            where = own if finding.process is None else self._other(others, subject, finding.process)
            # Right before its stage ends: at the end itself it would be in the next one.
            self.events.append(_instant(where, ends.get(finding.stage, self._now) - _SHORTEST_US / 2, finding))
        self._now += _SHORTEST_US

    def _other(self, others: dict[int, int], subject: Subject, process: ProcessName) -> int:
        if process.pid not in others:
            others[process.pid] = self._new_process(f"{subject.id}: {process.text}")
        return others[process.pid]

    def _new_process(self, name: str) -> int:
        self._processes += 1
        number = self._processes
        self.events += [
            _of(number, "M", name="process_name", args={"name": one_line(name)}),
            _of(number, "M", name="process_sort_index", args={"sort_index": number}),
            _of(number, "M", name="thread_name", args={"name": "stages"}),
        ]
        return number


def _of(process: int, phase: str, **fields: Any) -> _Event:
    return {"ph": phase, "pid": process, "tid": _STAGES, **fields}


def _slice(process: int, began: float, took: float, stage: Stage) -> _Event:
    args: dict[str, Any] = {"cycle": stage.cycle}
    if stage.tokens_per_second is not None:
        args["tokens per second"] = stage.tokens_per_second
    if stage.bytes_per_second is not None:
        args["bytes per second"] = stage.bytes_per_second
    return _of(process, "X", name=one_line(stage.name), cat="stage", ts=began, dur=took, args=args)


def _counters(process: int, time: float, ledgers: tuple[Ledger, ...]) -> Iterator[_Event]:
    """Yield a group of counters for each device: its lines, what is unexplained, and its sum by itself; in bytes."""
    for ledger in ledgers:
        sizes: dict[str, int | None] = {}
        for line in ledger.lines:
            sizes[line.name] = (sizes.get(line.name) or 0) + line.bytes
        yield from _counted(process, time, ledger.device, {**sizes, "unexplained": ledger.unexplained})
        yield from _counted(process, time, f"all of {ledger.device}", {"total": ledger.total})


def _counters_of_process(process: int, time: float, reading: ProcessStage) -> Iterator[_Event]:
    for device in dict.fromkeys((*reading.tensors, *reading.arenas, *reading.unexplained)):
        arenas = {f"arena {tag}": size for tag, size in reading.arenas.get(device, {}).items()}
        sizes = {"tensors": reading.tensors.get(device), **arenas, "unexplained": reading.unexplained.get(device)}
        yield from _counted(process, time, device, sizes)
    for device, size in reading.cards.items():
        yield from _counted(process, time, f"all of {device}", {"total": size})
    yield from _counted(process, time, "host memory", {"of its own": reading.host})


def _counted(process: int, time: float, group: str, sizes: Mapping[str, int | None]) -> Iterator[_Event]:
    # What could not be read has no sample, and not a 0. Perfetto names each counter by its group and its own name.
    known = {one_line(name): size for name, size in sizes.items() if size is not None}
    if known:
        yield _of(process, "C", name=one_line(group), ts=time, args=known)


def _instant(process: int, time: float, finding: Finding) -> _Event:
    known = {
        "what": first_line(finding),
        "since": finding.stage,
        "held by": finding.holder,
        "path": " ".join(hop.edge for hop in finding.path),
        "remedy": None if finding.remedy is None else finding.remedy.action,
        "fingerprint": finding.fingerprint,
        "suppressed by": finding.suppressed_by,
    }
    texts = {name: one_line(value) for name, value in known.items() if value}
    args = {**texts, "bytes": finding.bytes, "count": finding.count}
    name = f"{finding.resource}/{finding.cause}"
    return _of(process, "i", s="p", name=name, cat="finding", ts=max(0.0, time), args=args)
