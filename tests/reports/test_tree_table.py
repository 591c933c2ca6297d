"""The table of an engine's processes: a line per process, what nothing explains, and the sum."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from lowtide.reports.html.page import render_html
from lowtide.reports.processes.stage_processes import ProcessName, ProcessStage
from lowtide.reports.processes.tree_table import tree_tables
from lowtide.reports.schema import Ledger, LedgerLine, Readings, Stage
from lowtide.reports.terminal import process_table
from tests.reports.small_reports import report, subject

MIB = 1 << 20


def readings(total: int, unexplained: int) -> Readings:
    ledger = Ledger(
        device="cpu",
        source="rss",
        total=total * MIB,
        lines=(LedgerLine(name="interpreter", bytes=(total - unexplained) * MIB),),
        unexplained=unexplained * MIB,
    )
    return Readings(
        tensors=0,
        allocated=None,
        reserved=None,
        arenas={},
        pinned=None,
        host_pools=0,
        driver=None,
        rss=total * MIB,
        frozen_objects=0,
        cache_bytes=0,
        threads=1,
        native_threads=1,
        processes=0,
        descriptors=0,
        shared_memory=0,
        ledgers=(ledger,),
    )


def held(rank: int, host: int, *, card: int | None = None) -> ProcessStage:
    """A rank with so many MiB, of which 5 are unexplained on the host and 3 on its card."""
    device = f"cuda:{rank}"
    return ProcessStage(
        process=ProcessName(pid=100 + rank, name=f"VLLM::Worker_TP{rank}", rank=rank),
        tensors={},
        arenas={},
        reserved={},
        cards={} if card is None else {device: card * MIB},
        host=host * MIB,
        unexplained={"cpu": 5 * MIB, **({} if card is None else {device: 3 * MIB})},
    )


def stage(name: str, *processes: ProcessStage, cycle: int = 1) -> Stage:
    after = readings(200, 2)
    return Stage(name=name, cycle=cycle, seconds=1.0, before=after, after=after, processes=processes)


def test_each_library_that_has_asked_a_card_for_memory_has_a_line() -> None:
    blas, nccl = {"libcublas.so.13": 15 * MIB}, {"libcublas.so.13": 15 * MIB, "libnccl.so.2": 9 * MIB}
    of_stages = [replace(held(0, 100, card=500), libraries={"cuda:0": each}) for each in (blas, nccl)]
    tables = {table.device: table for table in tree_tables([stage("infer", each) for each in of_stages])}
    rows = {row.name: row.sizes for row in tables["cuda:0"].rows}
    assert rows["  libcublas.so.13"] == (15 * MIB, 15 * MIB)
    assert rows["  libnccl.so.2"] == (None, 9 * MIB)
    assert rows["all of them"] == (500 * MIB, 500 * MIB)


def test_the_heaps_of_each_process_have_a_line() -> None:
    of_stages = [replace(held(0, 100), heaps={"malloc in use": size * MIB}) for size in (40, 45)]
    (table,) = tree_tables([stage("infer", each) for each in of_stages])
    rows = {row.name: row.sizes for row in table.rows}
    assert rows["  malloc in use"] == (40 * MIB, 45 * MIB)
    assert rows["all of them"] == (300 * MIB, 300 * MIB)


def test_the_host_has_a_line_per_process_and_the_sum() -> None:
    stages = [stage("infer", held(0, 100), held(1, 150)), stage("sleep(1)", held(0, 40)), stage("shutdown")]
    (table,) = tree_tables(stages)
    sizes = [(row.name, [None if size is None else size // MIB for size in row.sizes]) for row in table.rows]
    assert sizes == [
        ("this process", [200, 200, 200]),
        ("  unexplained", [2, 2, 2]),
        ("pid 100 (VLLM::Worker_TP0, rank 0)", [100, 40, None]),
        ("  unexplained", [5, 5, None]),
        ("pid 101 (VLLM::Worker_TP1, rank 1)", [150, None, None]),
        ("  unexplained", [5, None, None]),
        ("all of them", [450, 240, 200]),
    ]
    assert (table.device, table.cycle, table.stages) == ("cpu", 1, ("infer", "sleep(1)", "shutdown"))
    figures = process_table(table)
    assert [column.name for column in figures.figures] == ["infer", "sleep(1)", "shutdown"]
    assert figures.figures[1].cells == ("200.0", "2.0", "40.0", "5.0", "", "", "240.0")


def test_each_card_has_a_table_with_the_processes_that_hold_memory_there() -> None:
    stages = [stage("infer", held(0, 100, card=70), held(1, 100, card=60))]
    tables = {table.device: table for table in tree_tables(stages)}
    assert list(tables) == ["cpu", "cuda:0", "cuda:1"]
    names = [row.name for row in tables["cuda:1"].rows]
    assert names == ["pid 101 (VLLM::Worker_TP1, rank 1)", "  unexplained", "all of them"]
    assert [row.sizes[0] for row in tables["cuda:1"].rows] == [60 * MIB, 3 * MIB, 60 * MIB]


def test_only_the_last_life_is_shown() -> None:
    stages = [stage("infer", held(0, 100)), stage("sleep", held(1, 100), cycle=2)]
    (table,) = tree_tables(stages)
    assert (table.cycle, table.stages) == (2, ("sleep",))
    assert "pid 100 (VLLM::Worker_TP0, rank 0)" not in [row.name for row in table.rows]


def test_an_engine_in_one_process_has_no_such_table() -> None:
    assert tree_tables([stage("infer")]) == []
    assert tree_tables([]) == []


def test_the_page_shows_it() -> None:
    page = render_html(report(subject(stages=(stage("infer", held(1, 150)),))))
    assert "Processes on cpu, cycle 1 (MiB; this process by RSS, others by private memory)" in page
    assert "<th>pid 101 (VLLM::Worker_TP1, rank 1)</th><td>150.0</td>" in page


def test_a_context_and_kernels_have_lines_of_their_own_where_they_were_measured() -> None:
    core = msgspec.structs.replace(
        held(0, 100, card=900),
        contexts={"cuda:0": 500 * MIB},
        kernels={"cuda:0": 90 * MIB},
    )
    _, table = tree_tables([stage("create", core), stage("infer", held(0, 100, card=950))])
    rows = {row.name: [None if size is None else size // MIB for size in row.sizes] for row in table.rows}
    assert rows["  context alone"] == [500, None]
    assert rows["  kernels and libraries"] == [90, None]
    assert rows["all of them"] == [900, 950]
