"""What `lowtide run` prints in terminals of several widths: each figure is whole, and no line is too long."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from rich.console import Console

from lowtide.leakcheck.cli.console import progress_line
from lowtide.reports import schema
from tests.reports.terminals import in_terminal, tables

ROOT = Path(__file__).parents[2]
WIDTHS = (80, 100, 120, 200)
MIB = 1 << 20

SHOW = """
import sys
from pathlib import Path
from lowtide.leakcheck.cli.console import find_console
from lowtide.reports import schema
from lowtide.reports.terminal import render
find_console().print(render(schema.read(Path(sys.argv[1])), "report: somewhere", wide=sys.argv[2:] == ["wide"]))
"""

STAGES = ("create", "infer", "sleep(1)", "wake(weights)", "wake", "infer", "sleep(2)", "wake", "infer", "shutdown")
LINES = (
    "context",
    "libraries, loaded lazily",
    "arena kv_cache",
    "arena weights",
    "torch pool 3:1, allocated",
    "torch pool 3:1, reserved and free",
    "cuda graphs of 67 batch sizes",
)


def readings(turn: int) -> schema.Readings:
    """As large as those of a real engine on a card, and no two alike."""
    on_card = tuple(
        schema.LedgerLine(name=name, bytes=(700 if at < 2 else 12_345 + 1_111 * turn + 97 * at) * MIB)
        for at, name in enumerate(LINES)
    )
    total = sum(line.bytes for line in on_card) + 13 * MIB
    on_host = (schema.LedgerLine(name="interpreter", bytes=177 * MIB),)
    return schema.Readings(
        tensors=(48_414 + turn) * MIB,
        allocated=(49_000 + turn) * MIB,
        reserved=(50_762 + turn) * MIB,
        arenas={"weights": (14_500 + turn) * MIB, "kv_cache": (33_000 + turn) * MIB, "a_tag_of_somebody": turn * MIB},
        pinned=(1_000 + turn) * MIB,
        host_pools=0,
        driver=total,
        rss=(9_500 + turn) * MIB,
        frozen_objects=997_000 + turn,
        cache_bytes=turn * MIB,
        threads=1,
        native_threads=2,
        processes=0,
        descriptors=3,
        shared_memory=0,
        ledgers=(
            schema.Ledger(device="cuda:0", source="nvml", total=total, lines=on_card, unexplained=13 * MIB),
            schema.Ledger(device="cpu", source="rss", total=178 * MIB, lines=on_host, unexplained=MIB),
        ),
    )


FINDING = schema.Finding(
    resource="tensors",
    cause="lru-cache",
    bytes=32 * MIB,
    count=8,
    device="cuda:0",
    stage="create",
    message="32.0 MiB in 8 tensors on cuda:0, since create (float32 [1024x1024]), held by " + "engine.core." * 12,
    fingerprint="0123456789abcdef",
    remedy=schema.Remedy(action="engine.supports_kw.cache_clear()", returns_bytes=32 * MIB),
)

UNEXPLAINED = schema.Finding(
    resource="host-memory",
    cause="unknown",
    bytes=8 * MIB,
    count=1,
    device="",
    stage="shutdown",
    message="8.0 MiB of host memory",
    fingerprint="fedcba9876543210",
)


def large_report() -> schema.Report:
    """Two lives on a card, with a finding and something that was not judged."""
    names = [(cycle, name) for cycle in (1, 2) for name in STAGES]
    stages = tuple(
        schema.Stage(
            name=name,
            cycle=cycle,
            seconds=1234.5 + turn,
            before=readings(turn),
            after=readings(turn + 1),
            tokens_per_second=98_765.0 + turn if name == "infer" else None,
            bytes_per_second=43.2e9 + turn * 1e9 if name.startswith("sleep") else None,
        )
        for turn, (cycle, name) in enumerate(names)
    )
    return schema.Report(
        schema="lowtide-report/1",
        version="0.1.0",
        created="now",
        command="lowtide run",
        machine=schema.Machine(
            platform="Linux",
            python="3.11.7",
            torch="2.11.0+cu130",
            cpus=224,
            memory=2000 << 30,
            devices=("NVIDIA H200",) * 8,
            driver="nvml",
        ),
        subjects=(
            schema.Subject(
                id="run[8b]",
                outcome="leak",
                stages=stages,
                findings=(FINDING, UNEXPLAINED),
                not_measured=(schema.NotMeasured(what="host-memory", why="one life only " * 12),),
                type_growth=(
                    schema.TypeGrowth(
                        type="a.module.of.some.depth." * 4 + "Request",
                        since="the end of cycle 1",
                        until="the end of cycle 2",
                        before=1_234_567,
                        after=2_345_678,
                    ),
                ),
            ),
        ),
    )


def mib(size: int | None) -> str:
    return "—" if size is None else f"{size / MIB:.1f}"


def figures(report: schema.Report) -> Iterator[tuple[str, str, list[str]]]:
    """Table, column and cells as the report has them, worked out without the code that prints them."""
    (subject,) = report.subjects
    after = [stage.after for stage in subject.stages]
    for name in ("tensors", "allocated", "reserved", "pinned", "driver"):
        yield "After", name, [mib(getattr(item, name)) for item in after]
    for tag in sorted({tag for item in after for tag in item.arenas}):
        yield "After", tag.replace("_", " "), [mib(item.arenas.get(tag, 0)) for item in after]
    yield "After", "host", [mib(item.host_pools) for item in after]
    yield "After", "RSS", [mib(item.rss) for item in after]
    yield "After", "frozen", [str(item.frozen_objects) for item in after]
    yield "After", "caches", [mib(item.cache_bytes) for item in after]
    yield "After", "seconds", [f"{stage.seconds:.3f}" for stage in subject.stages]
    speeds = [stage.bytes_per_second for stage in subject.stages]
    yield "After", "GB/s", ["" if speed is None else f"{speed / 1e9:.1f}" for speed in speeds]
    rates = [stage.tokens_per_second for stage in subject.stages]
    yield "After", "tok/s", ["" if rate is None else f"{rate:.0f}" for rate in rates]


def check_figures(report: schema.Report, lines: Sequence[str]) -> None:
    """Every figure of the stages and of the last life's ledgers is there whole, or its column is named below."""
    text = " ".join(" ".join(lines).split())
    printed = list(tables(lines))
    (stages,) = [columns for title, columns in printed if title.startswith("After each stage")]
    for _, name, cells in figures(report):
        if name != "seconds" and len({*cells}) == 1:
            what = name if cells[0] in ("", "—") else f"{name} {cells[0]}"
            assert what in text
            assert name not in stages
        else:
            assert stages[name] == cells, name
    of_last = [stage for stage in report.subjects[0].stages if stage.cycle == 2]
    for turn, device in enumerate(ledger.device for ledger in of_last[0].after.ledgers):
        (columns,) = [columns for title, columns in printed if title.startswith(f"Ledger of {device}, cycle 2")]
        moments = [of_last[0].before.ledgers[turn], *(stage.after.ledgers[turn] for stage in of_last)]
        cells = [columns[name] for name in columns if name != "line"]
        assert len(cells) == len(moments)
        rows = dict(zip(columns["line"], zip(*cells, strict=True), strict=True))
        assert rows["total"] == tuple(mib(moment.total) for moment in moments)
        assert rows["unexplained"] == tuple(mib(moment.unexplained) for moment in moments)
        for name in {line.name for moment in moments for line in moment.lines}:
            sizes = [{line.name: line.bytes for line in moment.lines}.get(name, 0) for moment in moments]
            if len({*sizes}) > 1:
                assert rows[name] == tuple(map(mib, sizes))
            elif any(sizes):
                assert f"{name} {mib(sizes[0])}" in text


@pytest.mark.parametrize("columns", WIDTHS)
def test_no_figure_is_cut_and_no_line_is_too_long(columns: int, tmp_path: Path) -> None:
    report = large_report()
    schema.write(report, tmp_path)
    code, lines = in_terminal(columns, ["-c", SHOW, str(tmp_path), "wide"], ROOT)
    assert code == 0, lines
    assert max(map(len, lines)) <= columns
    assert "…" not in "".join(lines)
    check_figures(report, lines)
    # Nor is a figure of the table of types.
    assert any("1234567" in line and "2345678" in line and "+1111111" in line for line in lines)
    said = "report: somewhere LEAK: 2 findings in 2 cycles; to do first: engine.supports_kw.cache_clear() gives back"
    assert " ".join(" ".join(lines).split()).endswith(f"{said} 32.0 MiB of 32.0 MiB")


def test_without_a_terminal_tables_have_100_columns_and_prose_is_not_folded(tmp_path: Path) -> None:
    report = large_report()
    schema.write(report, tmp_path)
    env = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    command = [sys.executable, "-c", SHOW, str(tmp_path), "wide"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=env)
    lines = done.stdout.splitlines()
    check_figures(report, lines)
    assert max(len(line) for line in lines[: first(lines, "not judged")]) <= 100
    assert f"tensors/lru-cache {FINDING.message}" in lines
    reported = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=ROOT, env={**env, "COLUMNS": "200"}
    )
    lines = reported.stdout.splitlines()
    assert 100 < max(len(line) for line in lines[: first(lines, "not judged")]) <= 200


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_a_long_stage_name_gives_way_to_the_figures_of_the_progress_line(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    console = Console(width=columns, file=io.StringIO())
    line = progress_line(console)
    line.add_task("cycle 1/2: sleep(level=1, tags=weights and kv_cache, mode=abort)", total=123_456, completed=98_765)
    with console.capture() as captured:
        console.print(line.get_renderable())
    (shown,) = captured.get().splitlines()
    assert len(shown) <= columns
    assert "98765/123456" in shown


def first(lines: Sequence[str], start: str) -> int:
    return next(turn for turn, line in enumerate(lines) if line.startswith(start))


@pytest.mark.parametrize("columns", [*WIDTHS, None])
def test_tables_take_100_columns_at_most_and_name_what_they_leave_out(columns: int | None, tmp_path: Path) -> None:
    schema.write(large_report(), tmp_path)
    arguments = ["-c", SHOW, str(tmp_path)]
    if columns is None:
        done = subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
            env={**os.environ, "COLUMNS": "200"},
        )
        lines = done.stdout.splitlines()
    else:
        code, lines = in_terminal(columns, arguments, ROOT)
        assert code == 0, lines
    upper = lines[: first(lines, "not judged")]
    assert max(map(len, upper)) <= min(columns or 100, 100)
    (stages,) = [shown for title, shown in tables(lines) if title.startswith("After each stage")]
    assert {"cycle", "stage", "seconds"} <= stages.keys()
    left_out = re.findall(r"left out: (.*?) \(--wide shows them\)", " ".join(" ".join(upper).split()))
    assert len(left_out) == 3
    varying = [name for _, name, cells in figures(large_report()) if len({*cells}) > 1]
    assert sorted([*(stages.keys() - {"cycle", "stage"}), *left_out[0].split(", ")]) == sorted(varying)
