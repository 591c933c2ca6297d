"""What is stated of a finding, and the message that is made of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from lowtide.reports.processes.stage_processes import ProcessName
from lowtide.reports.schema import Finding, Subject, as_written
from lowtide.reports.statement import (
    HolderFacts,
    Note,
    StatedFinding,
    Statement,
    in_process,
    noted,
    restated,
    restated_as,
    reworded,
    with_holder,
)


def finding(statement: Statement, **facts: Any) -> StatedFinding:
    known: dict[str, Any] = {"bytes": 0, "count": 3, "device": "", "stage": "call", "fingerprint": "f"}
    return StatedFinding(resource="threads", cause="unknown", statement=statement, **{**known, **facts})


@pytest.mark.parametrize(
    ("statement", "facts", "message"),
    [
        (Statement(unit="threads"), {}, "3 threads still running after call"),
        (Statement(unit="threads"), {"count": 1}, "1 thread still running after call"),
        (
            Statement(what="driver on cuda:0"),
            {"bytes": 4 << 20},
            "4.0 MiB of driver on cuda:0 still held after call",
        ),
        (Statement(unit="threads", is_since=True), {}, "3 threads still running, since call"),
        (Statement(unit="threads", things=("a", "b", "c")), {}, "3 threads still running after call: a, b, c"),
        (
            Statement(unit="threads", things=tuple("abcdefghijkl"), notes=(Note(", held by ", "A.b"),)),
            {"count": 12},
            "12 threads still running after call: a, b, c, d, e, f, g, h and 4 more, held by A.b",
        ),
        (
            Statement(unit="threads", things=("a", "b", "c"), most=1),
            {},
            "3 threads still running after call: a and 2 more",
        ),
        (Statement(amount="x is 1 now", came=", and not restored"), {}, "x is 1 now, and not restored after call"),
        (
            Statement(amount="grows", came=None, notes=(Note(", held by ", "A.b", " too"),)),
            {},
            "grows, held by A.b too",
        ),
        (
            Statement(unit="threads", process="pid 7 (worker)"),
            {},
            "pid 7 (worker): 3 threads still running after call",
        ),
    ],
)
def test_the_message_is_made_of_what_is_stated(statement: Statement, facts: dict[str, Any], message: str) -> None:
    assert finding(statement, **facts).message == message


def test_whatever_changes_the_message_follows() -> None:
    one = finding(Statement(unit="threads", things=("a", "b")))
    assert (
        msgspec.structs.replace(one, stage="shutdown", count=2).message
        == "2 threads still running after shutdown: a, b"
    )
    changed = restated(one, {"count": 1}, things=("b",), is_since=True)
    assert (changed.message, changed.count) == ("1 thread still running, since call: b", 1)
    assert restated_as(one, changed, {"count": 5}).message == "5 threads still running, since call: b"


def test_notes_come_in_their_order_and_a_holder_is_the_finding_s() -> None:
    told = noted(
        noted(finding(Statement(unit="threads")), "; made in f"), ", held by ", "m.POOL", " (and 1 more)", count=2
    )
    assert told.message == "2 threads still running after call; made in f, held by m.POOL (and 1 more)"
    assert told.holder == "m.POOL"
    assert noted(told, "; seen").holder == "m.POOL"


def test_who_holds_it_may_be_said_by_another_process() -> None:
    facts = HolderFacts(
        note=Note("; held by ", "m.POOL"), cause="module-global", verdict=None, path=(), advice="end it"
    )
    sent = msgspec.json.decode(msgspec.json.encode(facts), type=HolderFacts)
    told = with_holder(finding(Statement(unit="threads")), sent)
    assert told.message == "3 threads still running after call; held by m.POOL"
    assert (told.holder, told.cause, told.advice) == ("m.POOL", "module-global", "end it")


def test_of_a_finding_from_elsewhere_its_message_is_stated_as_a_whole() -> None:
    read = as_written(finding(Statement(unit="threads")))
    assert type(read) is Finding
    process = ProcessName(pid=7, name="worker")
    assert noted(read, "; seen").message == "3 threads still running after call; seen"
    assert in_process(read, process).message == f"{process.text}: 3 threads still running after call"
    assert in_process(read, process).process == process


def test_another_sentence_stays_though_something_was_stated() -> None:
    told = reworded(in_process(finding(Statement(unit="threads")), ProcessName(pid=7, name="worker")), "grows", count=5)
    assert (told.message, told.count) == ("grows", 5)
    assert msgspec.structs.replace(told, stage="shutdown").message == "grows"


def test_what_is_written_is_the_finding_alone() -> None:
    part = finding(Statement(unit="threads"), count=1)
    whole = finding(Statement(unit="threads"), parts=(part,))
    (written,) = Subject(id="t", outcome="leak", findings=(whole,)).findings
    assert (type(written), type(written.parts[0])) == (Finding, Finding)
    assert (written.message, written.parts[0].message) == (whole.message, part.message)
    assert as_written(written) is written
    assert msgspec.json.decode(msgspec.json.encode(written), type=Finding) == written
