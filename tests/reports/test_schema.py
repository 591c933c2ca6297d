"""The report: its schema is the one that is shipped, what is written can be read, what is wrong is named."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from lowtide.reports import schema
from lowtide.reports.sizes import format_amount, format_bytes
from lowtide.reports.terminal import render

SHIPPED = Path(__file__).parents[2] / "reports" / "lowtide-report-1.schema.json"


def readings(tensors: int = 0, driver: int | None = None) -> schema.Readings:
    lines = (schema.LedgerLine(name="context", bytes=100), schema.LedgerLine(name="arena weights", bytes=tensors))
    ledger = schema.Ledger(device="cuda:0", source="nvml", total=110 + tensors, lines=lines, unexplained=10)
    return schema.Readings(
        tensors=tensors,
        allocated=None,
        reserved=0,
        arenas={"weights": tensors},
        pinned=0,
        host_pools=0,
        driver=driver,
        rss=1 << 30,
        frozen_objects=7,
        cache_bytes=0,
        threads=1,
        native_threads=2,
        processes=0,
        descriptors=3,
        shared_memory=0,
        ledgers=(ledger,),
    )


def report(outcome: schema.Outcome = "leak") -> schema.Report:
    finding = schema.Finding(
        resource="tensors",
        cause="lru-cache",
        bytes=112 << 20,
        count=1,
        device="cuda:0",
        stage="shutdown",
        message="112.0 MiB of tensors on cuda:0 still held after shutdown [not markup]",
        fingerprint="0123456789abcdef",
        holder="supports_kw",
        remedy=schema.Remedy(action="supports_kw.cache_clear()", returns_bytes=112 << 20),
    )
    stage = schema.Stage(name="create", cycle=1, seconds=0.5, before=readings(), after=readings(5 << 20))
    back = schema.Return(
        resource="driver", device="cuda:0", stage="shutdown", cycle=1, bytes=64 << 20, rung="settle", seconds=1.25
    )
    subject = schema.Subject(
        id="run[tiny]",
        outcome=outcome,
        stages=(stage,),
        findings=(finding,) if outcome == "leak" else (),
        returns=(back,),
        not_measured=(schema.NotMeasured(what="host-memory", why="one life only"),),
    )
    machine = schema.Machine(
        platform="Linux", python="3.11", torch="2.13", cpus=2, memory=1 << 34, devices=(), driver="none"
    )
    return schema.Report(
        schema="lowtide-report/1",
        version="0.1.0",
        created="now",
        command="lowtide run",
        machine=machine,
        subjects=(subject,),
    )


def test_the_shipped_json_schema_is_that_of_the_types() -> None:
    assert json.loads(SHIPPED.read_text()) == json.loads(json.dumps(schema.json_schema()))


def test_what_is_written_is_read_back_equal(tmp_path: Path) -> None:
    path = schema.write(report(), tmp_path / "deep" / "folder")
    assert path.name == "leakcheck.json"
    assert schema.read(path.parent) == report()
    assert [entry.name for entry in path.parent.iterdir()] == ["leakcheck.json"]


def test_a_report_that_is_not_there_or_not_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(schema.ReportError, match=r"leakcheck\.json cannot be read: No such file"):
        schema.read(tmp_path)
    (tmp_path / "leakcheck.json").write_text('{"schema": "lowtide-report/2"}')
    with pytest.raises(schema.ReportError, match=r"leakcheck\.json was written as lowtide-report/2, which is newer"):
        schema.read(tmp_path)


def test_an_unknown_field_is_an_error_and_not_lost() -> None:
    document = json.loads(schema.encode(report()))
    document["subjects"][0]["color"] = "red"
    with pytest.raises(schema.ReportError, match="color"):
        schema.decode(json.dumps(document).encode())


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(schema.ReportError, match=r"cannot be written: .*choose another report folder"):
        schema.write(report(), tmp_path / "file")


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        (["clean"], 0),
        (["clean", "skipped"], 0),
        (["clean", "leak", "error"], 1),
        (["clean", "error"], 2),
        (["unsupported"], 2),
    ],
)
def test_exit_codes(outcomes: list[schema.Outcome], code: int) -> None:
    subjects = tuple(report(outcome).subjects[0] for outcome in outcomes)
    assert schema.exit_code(msgspec.structs.replace(report(), subjects=subjects)) == code


def shown(written: schema.Report) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(render(written, wide=True))
    return captured.get()


def test_the_terminal_shows_stages_ledger_findings_and_what_was_not_judged() -> None:
    text = shown(report())
    assert "create" in text
    for line in ("context", "arena weights", "unexplained", "total"):
        assert line in text
    assert "tensors/lru-cache 112.0 MiB of tensors on cuda:0 still held after shutdown [not markup]" in text
    assert "held by supports_kw" in text
    assert "cycle 1: driver on cuda:0 (64.0 MiB) came back at rung settle, 1.25 s after shutdown" in text
    assert "not judged: host-memory (one life only)" in text
    assert "LEAK: 1 finding in 1 cycle" in text


def test_what_is_not_known_is_a_dash_and_not_a_zero() -> None:
    row = next(line for line in shown(report()).splitlines() if "create" in line and "0.500" in line)
    assert row.count("—") == 2


def test_a_clean_run_that_could_not_judge_all_says_so() -> None:
    assert "CLEAN: 1 cycle, everything that was judged came back" in shown(report("clean"))


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (64 << 20, "64.0 MiB"), (3 << 40, "3.0 TiB"), (None, "—")],
)
def test_sizes_as_people_read_them(size: int | None, text: str) -> None:
    assert format_bytes(size) == text


def test_amounts_of_other_things() -> None:
    assert format_amount(3, "threads") == "3 threads"
    assert format_amount(2048, "bytes") == "2.0 KiB"


def test_a_report_that_nobody_reads_as_text_is_not_indented() -> None:
    small = schema.encode(report())
    assert b'\n  "schema"' in small
    many = msgspec.structs.replace(report(), subjects=report().subjects * 500)
    large = schema.encode(many)
    assert large.count(b"\n") == 1
    assert schema.decode(large) == many
