"""The report: what every run writes, as typed, immutable data; its JSON Schema is generated from these types."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from lowtide.reports.escaping import one_line
from lowtide.reports.processes.stage_processes import ProcessName, ProcessStage
from lowtide.reports.reading.json_files import (
    UnreadableError,
    decode_json,
    read_bounded,
    refuse_deep_parts,
    why_unreadable,
)
from lowtide.reports.reading.json_schemas import Float15, Int64, schema_of
from lowtide.reports.sizes import format_amount


def json_bytes(value: Any) -> bytes:
    """Return a value that msgspec knows as JSON; lone surrogates in its texts as `\\udc80`, in characters."""
    return encoded(msgspec.json.encode, value)


def encoded(encode: Callable[[Any], bytes], value: Any) -> bytes:
    """Return what an encoder of msgspec makes of a value, likewise."""
    try:
        return encode(value)
    except UnicodeEncodeError:
        return encode(_whole(msgspec.to_builtins(value)))


def whole_text(text: str) -> str:
    """Return the same without lone surrogates, which no file and no socket can have."""
    return text.encode(errors="backslashreplace").decode()


def _whole(value: Any) -> Any:
    if isinstance(value, str):
        return whole_text(value)
    if isinstance(value, dict):
        return {_whole(key): _whole(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_whole(each) for each in value]
    return value


SCHEMA = "lowtide-report/1"

REPORT_FILE = "leakcheck.json"
"""The file of a report's folder that has the report."""

UNFINISHED_FILE = "unfinished.jsonl"
"""The file that has what a run has finished so far: a `Begun`, then a `Finished` for each part, a line each."""

END_OF_RUN = "the end of the run"
"""The subject of a run that has not come to its end."""

_MOST_INDENTED = 256 << 10
"""Bytes of JSON that are indented, which doubles them."""

Outcome = Literal["clean", "leak", "error", "skipped", "unsupported"]
ResourceName = Literal[
    "tensors",
    "reserved",
    "driver",
    "arena",
    "pinned",
    "host-memory",
    "kv-blocks",
    "gc-frozen",
    "lru-cache",
    "pointers",
    "contents",
    "threads",
    "processes",
    "file-descriptors",
    "shared-memory",
    "temporary-files",
    "process-groups",
    "asyncio-tasks",
    "address-space",
    "cuda-ipc",
    "peak",
    "globals",
    "teardown",
    "state",
]
Cause = Literal[
    "lru-cache",
    "module-global",
    "class-attribute",
    "instance-attribute",
    "closure",
    "frame",
    "thread",
    "cycle",
    "frozen-garbage",
    "autograd",
    "allocator-cache",
    "cuda-graph",
    "compiled-code",
    "library-workspace",
    "native",
    "driver",
    "pending-transfer",
    "not-restored",
    "unknown",
]
Verdict = Literal["reachable", "frozen-holder", "frozen-garbage", "native-held", "cached", "in-flight", "unexplained"]
Rung = Literal[
    "raw",
    "settle",
    "collect",
    "unfreeze",
    "ipc_collect",
    "empty_cache",
    "clear_caches",
    "reset_compiled",
    "clear_workspaces",
    "clear_host_cache",
]


class ReportError(ValueError):
    """A report that cannot be read or written; the message names the file and what is wrong with it."""


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all parts: immutable, named fields only, and unknown ones are an error."""


class LedgerLine(_Record, frozen=True, kw_only=True):
    """One named part of a device's memory."""

    name: str
    bytes: Int64
    note: str = ""


class Ledger(_Record, frozen=True, kw_only=True):
    """A device's bytes, split into lines; lines and `unexplained` add up to `total` where that is known."""

    device: str
    source: str
    total: Int64 | None
    lines: tuple[LedgerLine, ...]
    unexplained: Int64 | None


class Readings(_Record, frozen=True, kw_only=True):
    """What the probes said at one moment; sizes in bytes, None where this machine cannot say.

    `ledgers` is empty before a stage that begins with what the stage before it has ended with. `pinned_beside_tensors`
    is what torch's cache of page-locked memory holds beyond its tensors: rounded up, or given back and kept.
    """

    tensors: Int64
    allocated: Int64 | None
    reserved: Int64 | None
    arenas: dict[str, Int64]
    pinned: Int64 | None
    host_pools: Int64
    driver: Int64 | None
    rss: Int64
    frozen_objects: Int64
    cache_bytes: Int64
    threads: Int64
    native_threads: Int64
    processes: Int64
    descriptors: Int64
    shared_memory: Int64
    ledgers: tuple[Ledger, ...] = ()
    pinned_beside_tensors: Int64 = 0


class Stage(_Record, frozen=True, kw_only=True):
    """One stage of a life, with the readings on both sides of it, and of the engine's other processes after it."""

    name: str
    cycle: Int64
    seconds: Float15
    before: Readings
    after: Readings
    tokens_per_second: Float15 | None = None
    bytes_per_second: Float15 | None = None
    processes: tuple[ProcessStage, ...] = ()


class Hop(_Record, frozen=True, kw_only=True):
    """One step of a path: the object's type, and the edge that led to it, as code.

    Attributes:
        type: module and qualified name of the object's type; of a path's first hop the kind of root.
        edge: how the object is held, as code; of a path's first hop the root's name.
        suspect: whether cutting this edge may be the fix.
        mark: `innocent` if the object is meant to live, `holding` if it is known that it should be gone, else None.
        retains_bytes: bytes that would be free if this edge alone were cut, as Python's graph has it; None where that
            was not worked out.
    """

    type: str
    edge: str
    suspect: bool = False
    mark: Literal["innocent", "holding"] | None = None
    retains_bytes: Int64 | None = None


class Frame(_Record, frozen=True, kw_only=True):
    """One frame of an allocation stack; `source` is the line's text, empty where it could not be read."""

    file: str
    line: Int64
    function: str
    source: str = ""


class Remedy(_Record, frozen=True, kw_only=True):
    """One action, and the bytes that it gave back when it was tried."""

    action: str
    returns_bytes: Int64


class TypeGrowth(_Record, frozen=True, kw_only=True):
    """How many more objects of one type there were at a later moment than at an earlier one."""

    type: str
    since: str
    until: str
    before: Int64
    after: Int64


class Finding(_Record, frozen=True, kw_only=True):
    """One thing that did not come back.

    Attributes:
        bytes: how much of it; 0 where it is counted only.
        process: where it is, if that is another process than the checked one.
        count: how many things are in it (tensors, threads, …).
        fingerprint: what stays the same about the leak from run to run.
        former_fingerprint: that which lowtide 0.1 would have given, where it is another one.
        shared_bytes: those of the bytes that more than one edge holds, so that no single cut gives them back.
        remedy: what gave it back when it was tried; None if nothing did.
        tried: every action that was tried, in order, with what each one alone gave back; of what is
            only counted without what the advice names.
        changed: what trying them changed in the program.
        advice: what to change where that cannot be tried from outside: in the engine's code, or while it goes on.
        parts: what else the same cause left, each as the finding that it would be by itself: the threads and
            descriptors of a pool whose processes did not end. What suppresses the finding suppresses them.
    """

    resource: ResourceName
    cause: Cause
    bytes: Int64
    count: Int64
    device: str
    stage: str
    message: str
    fingerprint: str
    verdict: Verdict | None = None
    holder: str | None = None
    path: tuple[Hop, ...] = ()
    allocated_at: tuple[Frame, ...] = ()
    remedy: Remedy | None = None
    shared_bytes: Int64 = 0
    tried: tuple[Remedy, ...] = ()
    changed: tuple[str, ...] = ()
    advice: str | None = None
    suppressed_by: str | None = None
    trend: Literal["residue", "bounded", "growth"] | None = None
    parts: tuple[Finding, ...] = ()
    former_fingerprint: str = ""
    process: ProcessName | None = None


def as_written(finding: Finding) -> Finding:
    """Return a finding with nothing but what a report has of it."""
    if type(finding) is Finding and all(type(part) is Finding for part in finding.parts):
        return finding
    fields: dict[str, Any] = {name: getattr(finding, name) for name in Finding.__struct_fields__}
    return Finding(**{**fields, "parts": tuple(map(as_written, finding.parts))})


class Return(_Record, frozen=True, kw_only=True):
    """How one resource came back after a stage: at which rung of the ladder, and after how many seconds of waiting."""

    resource: ResourceName
    device: str
    stage: str
    cycle: Int64
    bytes: Int64
    rung: Rung
    seconds: Float15


class CardMemory(_Record, frozen=True, kw_only=True):
    """What a process holds on one card; None where it has a context there and the driver does not report its size."""

    device: str
    bytes: Int64 | None


class OtherProcess(_Record, frozen=True, kw_only=True):
    """A process of the program's whose memory had to be seen, and was not.

    Attributes:
        host: bytes of host memory that only it maps; None where that may not be read.
    """

    pid: Int64
    name: str
    host: Int64 | None
    cards: tuple[CardMemory, ...] = ()


class NotMeasured(_Record, frozen=True, kw_only=True):
    """Something that could not be judged here, and why.

    Attributes:
        process: whose memory it is, where it is that of another process; then nothing else makes its subject clean.
    """

    what: str
    why: str
    process: OtherProcess | None = None


class OutOfMemory(_Record, frozen=True, kw_only=True):
    """What there was when the memory of a device was not enough, and an error with which a subject ended said so.

    Attributes:
        error: its type and the first line of its message.
        device: on which; `cpu` for the host.
        stage: in which stage.
        asked: bytes that were asked for; None where the error does not say it.
        memory: the device's memory and the allocator's, each line for itself: they do not add up.
        held: the largest of what was in use there, each with who held it and where it was allocated.
        others: how many more such parts there were.
        other_bytes: bytes of these.
        advice: what to change, where the figures say it.
        unread: what could not be read.
        snapshot: the file with torch's snapshot, in the report's folder; empty where there is none.
    """

    error: str
    device: str
    stage: str
    asked: Int64 | None = None
    memory: tuple[LedgerLine, ...] = ()
    held: tuple[Finding, ...] = ()
    others: Int64 = 0
    other_bytes: Int64 = 0
    advice: str = ""
    unread: tuple[NotMeasured, ...] = ()
    snapshot: str = ""

    def __post_init__(self) -> None:
        """Keep of what was held what is written."""
        msgspec.structs.force_setattr(self, "held", tuple(map(as_written, self.held)))


class Subject(_Record, frozen=True, kw_only=True):
    """What was judged: a test, a run, a life."""

    id: str
    outcome: Outcome
    reason: str = ""
    stages: tuple[Stage, ...] = ()
    findings: tuple[Finding, ...] = ()
    returns: tuple[Return, ...] = ()
    not_measured: tuple[NotMeasured, ...] = ()
    type_growth: tuple[TypeGrowth, ...] = ()
    out_of_memory: OutOfMemory | None = None

    def __post_init__(self) -> None:
        """Keep of the findings what is written."""
        msgspec.structs.force_setattr(self, "findings", tuple(map(as_written, self.findings)))


class Machine(_Record, frozen=True, kw_only=True):
    """Where it was measured."""

    platform: str
    python: str
    torch: str
    cpus: Int64
    memory: Int64
    devices: tuple[str, ...]
    driver: str


class Begun(_Record, frozen=True, kw_only=True):
    """A run that has begun: its report, without subjects yet, and what `Finished` parts are called, as `test`."""

    report: Report
    part: str = ""


class Finished(_Record, frozen=True, kw_only=True):
    """What was judged in one part of a run.

    Attributes:
        goes_on: whether a subject of an earlier part goes on: it has its new stages, and all else as it is known now.
    """

    subjects: tuple[Subject, ...]
    goes_on: bool = False


class LeaksFoundError(AssertionError):
    """A report has findings that nobody has suppressed; the message lists them."""


class Report(_Record, frozen=True, kw_only=True):
    """One run of lowtide; `settings` are those in effect, given or not, by name."""

    schema: Literal["lowtide-report/1"]
    version: str
    created: str
    command: str
    machine: Machine
    subjects: tuple[Subject, ...]
    settings: dict[str, str] = {}

    def raise_for_leaks(self) -> None:
        """Do nothing if everything came back.

        Raises:
            LeaksFoundError: something did not, or could not be judged.
        """
        # Its words are made of these classes.
        from lowtide.reports.finding_lines import first_line

        unjudged = ("error", "unsupported")
        lines = [
            f"{subject.id}: {finding.resource}/{finding.cause}: {first_line(finding)}"
            for subject in self.subjects
            for finding in subject.findings
            if finding.suppressed_by is None
        ]
        lines += [f"{subject.id}: {subject.reason}" for subject in self.subjects if subject.outcome in unjudged]
        if lines:
            raise LeaksFoundError("\n".join(map(one_line, lines)))

    def _repr_html_(self) -> str:
        # Here, because whoever reads or writes reports needs no templates.
        from lowtide.reports.html.fragment import render_fragment

        return render_fragment(self)


def exit_code(report: Report) -> int:
    """0 clean, 1 a leak was found, 2 something could not be measured or failed."""
    outcomes = {subject.outcome for subject in report.subjects}
    if "leak" in outcomes:
        return 1
    return 2 if outcomes & {"error", "unsupported"} else 0


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a report, as shipped in `lowtide-report-1.schema.json`."""
    return schema_of(Report, SCHEMA)


def encode(report: Report) -> bytes:
    """Return the report as JSON: indented, but for one so large that nobody reads it as text."""
    data = json_bytes(report)
    return (data if len(data) > _MOST_INDENTED else msgspec.json.format(data, indent=2)) + b"\n"


def decode(data: bytes, name: str = "report") -> Report:
    """Return the report in `data`.

    Raises:
        ReportError: not JSON, or not of this schema; `name`, what is wrong and what to do are in the message, one line.
    """
    try:
        report = decode_json(data, Report)
        refuse_deep_parts(_findings_of(report.subjects))
    except UnreadableError as error:
        raise ReportError(f"{name} {why_unreadable(data, error, SCHEMA)}") from error
    return report


def _findings_of(subjects: Iterable[Subject]) -> Iterator[Finding]:
    for subject in subjects:
        yield from subject.findings
        yield from () if subject.out_of_memory is None else subject.out_of_memory.held


def is_in(folder: Path) -> bool:
    """Return whether a folder has a report, if only that of a run which has not come to its end."""
    return any((folder / name).exists() for name in (REPORT_FILE, UNFINISHED_FILE))


def read(folder: Path) -> Report:
    """Return the report in a report folder; of a run that has not come to its end what it had finished, as an error.

    Raises:
        ReportError: there is none, it cannot be read, or it is larger than 512 MiB.
    """
    unfinished = folder / UNFINISHED_FILE
    path = unfinished if unfinished.exists() else folder / REPORT_FILE
    try:
        data = read_bounded(path)
    except UnreadableError as error:
        raise ReportError(f"{path} {error}") from error
    return _decode_unfinished(data, str(path)) if path == unfinished else decode(data, str(path))


def _decode_unfinished(data: bytes, name: str) -> Report:
    # What follows the last line break is half of a line, or nothing.
    head, *lines = data.split(b"\n")[:-1] or [data]
    try:
        begun = decode_json(head, Begun)
    except UnreadableError as error:
        raise ReportError(f"{name} {why_unreadable(head, error, SCHEMA)}") from error
    subjects: dict[object, Subject] = {}
    stages: dict[object, list[Stage]] = {}
    damaged = 0
    for number, line in enumerate(lines):
        try:
            part = decode_json(line, Finished)
            refuse_deep_parts(_findings_of(part.subjects))
        except UnreadableError:
            damaged += 1
            continue
        for turn, subject in enumerate(part.subjects):
            key = subject.id if part.goes_on else (number, turn)
            subjects[key] = subject
            stages.setdefault(key, []).extend(subject.stages)
    whole = [msgspec.structs.replace(subject, stages=tuple(stages[key])) for key, subject in subjects.items()]
    were = "was" if len(lines) == 1 else "were"
    counted = f": {format_amount(len(lines), f'{begun.part}s')} {were} finished" if begun.part else ""
    lost = f"; {damaged} cannot be read" if damaged else ""
    reason = f"the run has not come to its end{counted}{lost}"
    end = Subject(id=END_OF_RUN, outcome="error", reason=reason)
    return msgspec.structs.replace(begun.report, subjects=(*whole, end))


def write(report: Report, folder: Path) -> Path:
    """Write `leakcheck.json` into `folder`, as a whole or not at all; returns its path.

    Raises:
        ReportError: the folder cannot be written to.
    """
    path = folder / REPORT_FILE
    partial = path.with_suffix(".json.partial")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_bytes(encode(report))
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise ReportError(f"{path} cannot be written: {error.strerror}; choose another report folder") from error
    return path
