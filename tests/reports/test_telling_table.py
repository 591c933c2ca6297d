"""Which columns of a life's tables are shown where not all of them fit, and that what is shown always fits."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from itertools import starmap
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from rich.console import Console

from lowtide.reports.figure_table import Column, FigureTable
from lowtide.reports.processes.stage_processes import ProcessName, ProcessStage
from lowtide.reports.processes.tree_table import tree_tables
from lowtide.reports.schema import Ledger, LedgerLine, Readings, Stage, Subject
from lowtide.reports.terminal import ledger_table, process_table, render_subject, stage_table
from lowtide.reports.terminal.report import MOST_COLUMNS, most_telling
from tests.reports.small_reports import readings

pytestmark = pytest.mark.nightly

MIB = 1 << 20
LABELS = (Column("line", ("a", "b")),)


def table(*figures: tuple[str, int | None]) -> FigureTable:
    """One with columns that take 12 cells of a terminal each, or 14 where their name has a number."""
    return FigureTable("t", LABELS, tuple(Column(name, ("1234567.89", ""), change) for name, change in figures))


def names(shown: FigureTable) -> list[str]:
    return [column.name for column in shown.figures]


def test_a_table_that_fits_is_shown_whole() -> None:
    whole = table(("a", 1), ("b", None), ("a", 0))
    assert most_telling(whole, 100) is whole


def test_what_changes_most_is_shown_in_the_order_of_the_table() -> None:
    shown = most_telling(table(("small", 1), ("large", 3), ("none", 0), ("middle", 2)), 8 + 24)
    assert names(shown) == ["large", "middle"]
    assert shown.notes == ("left out: small, none (--wide shows them)",)


def test_what_has_no_change_is_always_shown() -> None:
    shown = most_telling(table(("large", 9), ("seconds", None), ("small", 1)), 8 + 12)
    assert names(shown) == ["seconds"]


def test_a_wide_column_gives_way_to_a_smaller_one_that_fits() -> None:
    whole = table(("large", 9), ("middle", 5), ("small", 1))
    wider = replace(whole.figures[1], cells=("1" * 20, ""))
    shown = most_telling(replace(whole, figures=(whole.figures[0], wider, whole.figures[2])), 8 + 24)
    assert names(shown) == ["large", "small"]


def test_a_long_head_is_folded_and_its_figures_are_whole() -> None:
    whole = table(("in a server with a title of many words " * 4, 9), ("small", 1))
    assert names(most_telling(whole, 8 + 50)) == names(whole)
    console = Console(width=80)
    with console.capture() as captured:
        console.print(whole)
    assert "1234567.89" in captured.get()
    assert "…" not in captured.get()


def test_columns_of_one_name_are_numbered_where_one_is_left_out() -> None:
    shown = most_telling(table(("infer", 1), ("sleep", 5), ("infer", 3)), 8 + 24)
    assert (names(shown), shown.notes) == (["sleep", "infer 2"], ("left out: infer 1 (--wide shows them)",))


def test_where_nothing_may_be_left_out_the_rest_goes_on_below() -> None:
    whole = table(("before", None), ("shutdown", None))
    shown = most_telling(whole, 8 + 12)
    assert (names(shown), shown.notes, len(shown.blocks(8 + 12))) == (["before", "shutdown"], (), 2)


def held(**sizes: Any) -> Readings:
    return msgspec.structs.replace(readings(), **sizes)


def stage(name: str, after: Readings, *, before: Readings | None = None, **fields: Any) -> Stage:
    return Stage(name=name, cycle=1, seconds=1.0, before=before or held(), after=after, **fields)


def changes(shown: FigureTable) -> dict[str, int | None]:
    return {column.name: column.change for column in shown.figures}


def test_a_stage_s_figures_change_by_what_lies_between_the_least_and_the_most() -> None:
    core = ProcessStage(
        process=ProcessName(pid=2, name="core"), tensors={}, arenas={}, reserved={}, cards={"cuda:0": 9 * MIB}
    )
    first = held(rss=100 * MIB, arenas={"weights": 40 * MIB}, frozen_objects=10**6)
    last = held(rss=103 * MIB, driver=None)
    stages = [stage("create", first, before=held(rss=90 * MIB), processes=(core,)), stage("shutdown", last)]
    found = changes(stage_table(stages))
    assert {name: found[name] for name in ("weights", "RSS", "in core", "frozen", "seconds")} == {
        "weights": 40 * MIB,
        "RSS": 13 * MIB,
        "in core": 9 * MIB,
        "frozen": 0,
        "seconds": None,
    }


def test_a_stage_of_a_ledger_tells_what_it_changes_in_all_lines_together() -> None:
    def moment(weights: int, cache: int, unexplained: int) -> Ledger:
        lines = (LedgerLine(name="weights", bytes=weights), LedgerLine(name="cache", bytes=cache))
        return Ledger(device="cuda:0", source="nvml", total=None, lines=lines, unexplained=unexplained)

    moments = [moment(0, 0, 0), moment(50, 0, 0), moment(0, 50, 0), moment(0, 50, 7), moment(0, 0, 0)]
    shown = ledger_table(1, ["before", "create", "move", "infer", "shutdown"], moments)
    assert changes(shown) == {"before": None, "create": 50, "move": 100, "infer": 7, "shutdown": None}


NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=90)


def any_life(names: Sequence[str], tags: Sequence[str], processes: Sequence[str], random: Random) -> Subject:
    """A life with stages of these names, and any sizes in arenas, lines and processes of these names."""

    def size() -> int:
        return random.choice((0, 1, random.randrange(1 << 45)))

    def perhaps() -> int | None:
        return random.choice((None, size()))

    def ledger(device: str) -> Ledger:
        lines = tuple(LedgerLine(name=f"arena {tag}", bytes=size()) for tag in tags)
        return Ledger(device=device, source="nvml", total=perhaps(), lines=lines, unexplained=perhaps())

    def moment() -> Readings:
        sizes: dict[str, Any] = {name: size() for name in ("tensors", "rss", "host_pools", "cache_bytes")}
        sizes |= {name: perhaps() for name in ("allocated", "reserved", "pinned", "driver")}
        ledgers = (ledger("cuda:0"), ledger("cpu"))
        return held(arenas={tag: size() for tag in tags}, frozen_objects=size(), ledgers=ledgers, **sizes)

    def process(pid: int, name: str) -> ProcessStage:
        cards = {f"cuda:{pid % 2}": perhaps()}
        known = ProcessName(pid=pid, name=name, rank=pid)
        return ProcessStage(process=known, tensors={}, arenas={}, reserved={}, cards=cards, host=perhaps())

    stages = (
        stage(name, moment(), before=moment(), processes=tuple(starmap(process, enumerate(processes))))
        for name in names
    )
    return Subject(id="a", outcome="clean", stages=tuple(stages))


def printed(subject: Subject, width: int, *, folded: bool, wide: bool = False) -> list[str]:
    """The lines of all tables, as a terminal or as a log gets them."""
    file = io.StringIO()
    console = Console(width=width, file=file, soft_wrap=not folded, color_system=None)
    *tables, _ = render_subject(subject, wide=wide)
    for each in tables:
        console.print(each)
    return file.getvalue().splitlines()


@given(
    subject=st.builds(
        any_life,
        st.lists(NAMES, min_size=1, max_size=20),
        st.lists(NAMES, max_size=6, unique=True),
        st.lists(NAMES, max_size=9),
        st.integers(0, 99).map(Random),
    ),
    width=st.sampled_from([80, 100, 200]),
    folded=st.booleans(),
)
@settings(max_examples=40)
def test_no_table_of_any_life_is_wider_than_its_terminal_or_100_columns(
    subject: Subject, width: int, folded: bool
) -> None:
    console = Console(width=width)
    lines = printed(subject, width, folded=folded)
    assert max(console.measure(line).maximum for line in lines if line) <= min(width, MOST_COLUMNS)
    heads = [line for line in lines if line.startswith("cycle")]
    assert len(heads) == 1
    assert "seconds" in heads[0]
    for line in printed(subject, width, folded=folded, wide=True):
        assert console.measure(line or "x").maximum <= width


@pytest.mark.parametrize("ranks", [1, 2, 8, 64])
@pytest.mark.parametrize("sleeps", [1, 2, 9])
def test_the_tables_of_many_ranks_and_stages_are_one_hundred_columns(ranks: int, sleeps: int) -> None:
    script = ["create", "infer", *[name for turn in range(sleeps) for name in (f"sleep({turn})", "wake", "infer")]]
    stages = []
    for turn, name in enumerate([*script, "shutdown"]):
        processes = tuple(
            ProcessStage(
                process=ProcessName(pid=10_000 + rank, name=f"VLLM::Worker_TP{rank}", rank=rank),
                tensors={},
                arenas={},
                reserved={},
                cards={f"cuda:{rank % 8}": (50_000 + turn * 100 + rank) * MIB},
                host=(9_000 + turn) * MIB,
            )
            for rank in range(ranks)
        )
        stages.append(stage(name, held(rss=turn * MIB, ledgers=()), processes=processes))
    subject = Subject(id="a", outcome="clean", stages=tuple(stages))
    assert max(map(len, printed(subject, 200, folded=False))) <= 100
    # All columns of each table are there where all are asked for, and nothing is said to be left out.
    wide = "\n".join(printed(subject, 100, folded=False, wide=True))
    assert "left out" not in wide
    assert {f"in VLLM::Worker_TP{rank}" for rank in range(ranks)} <= set(re.findall(r"in VLLM::Worker_TP\d+", wide))
    # Where there is room for them only: those of which there is least are left out.
    left_out = re.search(r"left out: (.*?) \(--wide", " ".join(printed(subject, 200, folded=False)))
    assert (left_out is not None) == (ranks > 2 or sleeps > 1)


def test_a_table_of_processes_always_has_its_first_and_last_stage() -> None:
    process = ProcessName(pid=1, name="a server with a title of many words " * 4)
    stages = [
        stage(
            f"stage {turn}",
            held(),
            processes=(ProcessStage(process=process, tensors={}, arenas={}, reserved={}, host=turn**2 * MIB),),
        )
        for turn in range(1, 20)
    ]
    (host,) = tree_tables(stages)
    shown = names(most_telling(process_table(host), 100))
    # Half of the width is for the labels at most, so that more than these two fit.
    assert shown == ["stage 1", "stage 16", "stage 17", "stage 18", "stage 19"]


@pytest.mark.parametrize("name", ["worker CLEAN: everything came back", "worker" + " CLEAN" * 9, "w" * 30 + "CLEAN"])
def test_no_line_begins_with_a_verdict_that_is_part_of_a_name(name: str) -> None:
    whole = FigureTable("t", (Column("line", (name, "b")),), (Column("a", ("1234567.89", "")),))
    for width in range(16, 80):
        console = Console(file=io.StringIO(), width=width)
        console.print(whole)
        lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
        assert not [line for line in lines if line.startswith("CLEAN")]
        assert "".join(line[:-10].strip() for line in lines[3:-1]).replace(" ", "") == name.replace(" ", "") + "b"


def test_a_life_says_how_much_torch_pins_beside_its_tensors_where_that_is_much() -> None:
    def life(*beside: int) -> list[Stage]:
        return [stage(f"turn {at}", held(pinned_beside_tensors=size)) for at, size in enumerate(beside)]

    assert not any(note.startswith("pinned: ") for note in stage_table(life(0, MIB)).notes)
    (note,) = (note for note in stage_table(life(0, 28 * MIB, MIB)).notes if note.startswith("pinned: "))
    assert note.startswith("pinned: 28.0 MiB more than torch's tensors have after turn 1: ")
