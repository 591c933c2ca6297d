"""The history: what is stored is read back as trends, also while others write, and by an earlier lowtide."""

from __future__ import annotations

import datetime
import random
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import sqlalchemy as sa
from rich.console import Console
from sqlalchemy.engine import Engine
from typer.testing import CliRunner

from lowtide.leakcheck.cli.commands import app
from lowtide.leakcheck.cli.reports import trend_lines
from lowtide.leakcheck.gate.history import (
    METADATA,
    NEWEST,
    RESIDUES,
    RUNS,
    SERIES,
    VERSION,
    HistoryError,
    LevelChange,
    Trend,
    add_report,
    level_changes,
    open_database,
    read_trends,
)
from lowtide.leakcheck.gate.history_page import draw, render_page
from lowtide.reports import schema
from lowtide.reports.folder import write_folder
from tests.reports.small_reports import HOSTILE, finding, report, subject
from tests.reports.test_junit import READINGS

BEGIN = datetime.datetime(2026, 1, 1, 2, 17, tzinfo=datetime.timezone.utc)
MIB = 1 << 20


@pytest.fixture(scope="module")
def empty_history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A history without a run, which is copied in a tenth of the time that its tables take."""
    file = tmp_path_factory.mktemp("history") / "history.sqlite"
    open_database(str(file)).dispose()
    return file


@pytest.fixture
def engine(empty_history: Path, tmp_path: Path) -> Iterator[Engine]:
    shutil.copy(empty_history, tmp_path / "history.sqlite")
    opened = open_database(str(tmp_path / "history.sqlite"))
    yield opened
    opened.dispose()


def night(number: int, *subjects: schema.Subject, card: str = "H200") -> schema.Report:
    made = report(*subjects, created=(BEGIN + datetime.timedelta(days=number)).isoformat())
    return msgspec.structs.replace(made, machine=msgspec.structs.replace(made.machine, devices=(card,) if card else ()))


def add_nights(engine: Engine, nights: int, leaking_from: int) -> None:
    for number in range(nights):
        found = [finding()] if number >= leaking_from else []
        add_report(engine, night(number, subject(*found, name="life")), f"{number:040x}")


def life(*driver: tuple[int, int]) -> schema.Subject:
    stages = [
        schema.Stage(
            name=name,
            cycle=cycle,
            seconds=1.0,
            before=msgspec.structs.replace(READINGS, driver=before),
            after=msgspec.structs.replace(READINGS, driver=after),
        )
        for cycle, (before, after) in enumerate(driver)
        for name in ("create", "shutdown")
    ]
    return subject(name="life", stages=tuple(stages))


@pytest.mark.nightly
def test_a_finding_is_a_trend_with_zeros_where_it_was_not_found(engine: Engine) -> None:
    add_nights(engine, 12, leaking_from=5)
    (trend,) = read_trends(engine)
    assert trend.values == [0] * 5 + [48 * MIB] * 7
    assert trend.sentences() == [
        "life: tensors/module-global on cuda:0 since shutdown, 0123456789abcdef: "
        "0 B until run 5 (2026-01-05 02:17, commit 0000000000), 48.0 MiB since run 6 (2026-01-06 02:17, commit "
        "0000000000)"
    ]
    assert trend.runs[5].commit == f"{5:040x}"


def test_a_run_that_did_not_judge_the_subject_has_no_value(engine: Engine) -> None:
    add_report(engine, night(0, subject(finding(), name="life")), "")
    for number, outcome in enumerate(("error", "unsupported", "skipped"), 1):
        add_report(engine, night(number, subject(name="life", outcome=outcome, reason="why")), "")
    add_report(engine, night(4, subject(name="another")), "")
    add_report(engine, night(5, subject(name="life")), "")
    (trend,) = read_trends(engine)
    assert ([run.id for run in trend.runs], trend.values) == ([1, 6], [48 * MIB, 0])


def test_runs_are_in_the_order_of_their_time_and_each_hardware_has_its_own_trend(engine: Engine) -> None:
    for number in (3, 1, 2, 0):
        add_report(engine, night(number, subject(finding(bytes=number), name="life")), "")
    add_report(engine, night(4, subject(finding(bytes=9), name="life"), card=""), "")
    found = {trend.hardware: trend.values for trend in read_trends(engine)}
    assert found == {"H200": [0, 1, 2, 3], "CPU": [9]}
    assert {trend.hardware: trend.values for trend in read_trends(engine, last=2)} == {"H200": [2, 3], "CPU": [9]}


def test_a_lifes_last_cycle_is_followed_by_its_readings(engine: Engine) -> None:
    add_report(engine, night(0, life((0, 64 * MIB), (64 * MIB, 65 * MIB))), "")
    found = {trend.what: trend.values for trend in read_trends(engine)}
    assert found == {"tensors after shutdown": [0], "driver after shutdown": [MIB], "host-memory after shutdown": [0]}


def test_what_has_no_bytes_is_counted_and_parts_are_followed(engine: Engine) -> None:
    part = finding(resource="threads", bytes=0, count=2, device="", fingerprint="fedcba9876543210")
    add_report(engine, night(0, subject(finding(parts=(part,)), name="life")), "")
    found = {trend.series.resource: (trend.values, trend.amount(trend.values[0])) for trend in read_trends(engine)}
    assert found == {"tensors": ([48 * MIB], "48.0 MiB"), "threads": ([2], "2 threads")}


def test_one_finding_twice_in_a_run_is_summed_and_the_worst_outcome_counts(engine: Engine) -> None:
    same = [subject(finding(), name="life"), subject(finding(), name="life"), subject(name="life")]
    add_report(engine, night(0, *same), "")
    assert [trend.values for trend in read_trends(engine)] == [[96 * MIB]]


def test_the_same_report_is_added_once(engine: Engine) -> None:
    written = night(0, subject(finding()))
    assert (add_report(engine, written, "a"), add_report(engine, written, "a")) == (1, None)


def test_a_report_is_added_whole_or_not_at_all(engine: Engine) -> None:
    broken = night(0, subject(finding(), finding(bytes=1 << 70, fingerprint="other")))
    with pytest.raises((HistoryError, OverflowError)):
        add_report(engine, broken, "")
    with engine.connect() as connection:
        counts = [connection.scalar(sa.select(sa.func.count()).select_from(table)) for table in (RUNS, SERIES)]
    assert counts == [0, 0]


def test_a_report_without_a_time_is_refused(engine: Engine) -> None:
    with pytest.raises(HistoryError, match="the report was created at 'now', which is no time"):
        add_report(engine, report(created="now"), "")


def test_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    """Each with a connection of its own, the first of them onto a file that is not there yet."""

    def write(writer: int) -> None:
        own = open_database(str(tmp_path / "shared.sqlite"))
        for number in range(5):
            found = [finding(), finding(fingerprint=f"{writer:016x}")]
            add_report(own, night(10 * number + writer, subject(*found, name="life")), str(writer))
        own.dispose()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    engine = open_database(str(tmp_path / "shared.sqlite"))
    with engine.connect() as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(RESIDUES)) == 4 * 5 * 2
    found = {trend.series.fingerprint: sum(map(bool, trend.values)) for trend in read_trends(engine)}
    engine.dispose()
    assert found == {"0123456789abcdef": 20, **{f"{writer:016x}": 5 for writer in range(4)}}


def columns_of(metadata: sa.MetaData) -> dict[str, dict[str, tuple[str, bool, bool]]]:
    """What each column of each table is: its type, and whether it may be empty and is a part of the key."""
    return {
        table.name: {each.name: (str(each.type), bool(each.nullable), each.primary_key) for each in table.columns}
        for table in metadata.sorted_tables
    }


def test_the_tables_of_a_history_are_those_that_the_code_uses_whichever_lowtide_made_them(tmp_path: Path) -> None:
    earlier = tmp_path / "history.sqlite"
    with sqlite3.connect(earlier) as connection:
        connection.executescript(Path(__file__).with_name("first_tables.sql").read_text())
    connection.close()
    for file in (earlier, tmp_path / "new.sqlite"):
        engine = open_database(str(file))
        add_nights(engine, 1, leaking_from=0)
        found = sa.MetaData()
        found.reflect(engine)
        with engine.connect() as open_one:
            assert open_one.scalars(sa.select(VERSION.c.version_num)).all() == [NEWEST]
        engine.dispose()
        assert columns_of(found) == columns_of(METADATA)


def test_a_newer_history_is_refused(empty_history: Path, tmp_path: Path) -> None:
    shutil.copy(empty_history, tmp_path / "history.sqlite")
    with sqlite3.connect(tmp_path / "history.sqlite") as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    with pytest.raises(HistoryError, match="written by a newer lowtide: install that version to use it"):
        open_database(str(tmp_path / "history.sqlite"))


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("mysql://host/name", "a history in mysql is not supported"),
        ("sqlite+nothing:///file", "is no driver that there is"),
        pytest.param("postgresql://user:secret@", "cannot be used", marks=pytest.mark.nightly),
        ("://", "the history's address cannot be read"),
    ],
)
def test_an_address_that_cannot_be_used_is_one_line_without_the_password(address: str, said: str) -> None:
    with pytest.raises(HistoryError, match=said) as raised:
        open_database(address)
    assert "secret" not in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_file_that_is_no_history_is_named(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no database " * 100)
    with pytest.raises(HistoryError, match=r"the history .*notes\.txt cannot be used: file is not a database"):
        open_database(str(tmp_path / "notes.txt"))


def test_the_page_names_the_change_and_needs_nothing_else(engine: Engine) -> None:
    add_nights(engine, 12, leaking_from=5)
    page = render_page(read_trends(engine))
    assert '<li class="change">life: tensors/module-global on cuda:0 since shutdown' in page
    assert page.count("<svg") == 1
    assert re.findall(r"(?:src|href)=|<script|@import|url\(", page) == []


def test_a_drawing_holds_each_value_until_the_next_run(engine: Engine) -> None:
    add_nights(engine, 12, leaking_from=6)
    (trend,) = read_trends(engine)
    drawing = draw(trend)
    assert drawing.steps == "M0.0 120.0H360.0V0.0H720.0"
    assert [mark.x for mark in drawing.marks] == [360.0]
    assert (drawing.lowest, drawing.highest) == ("0 B", "48.0 MiB")


def test_no_text_is_markup_on_the_page_or_moves_the_cursor(engine: Engine) -> None:
    text = HOSTILE.replace("\udc80", "\0")
    hostile = finding(stage=text, device=text, fingerprint=text[:60])
    add_report(engine, night(0, subject(hostile, name=text), card=text), text)
    trends = read_trends(engine)
    page = render_page(trends)
    assert "<b>" not in page
    assert "&lt;b&gt;" in page
    console = Console(width=200, color_system=None)
    with console.capture() as captured:
        for line in trend_lines(trends):
            console.print(line)
    assert "\x1b" not in page + captured.get()


def test_on_a_terminal_of_80_columns_a_fingerprint_keeps_all_its_digits(engine: Engine) -> None:
    found = finding(resource="file-descriptors", bytes=0, count=7, fingerprint="afe5010a92f561a6")
    add_report(engine, night(0, subject(found, name="check[target:Target]")), "")
    console = Console(width=80, color_system=None)
    with console.capture() as captured:
        for line in trend_lines(read_trends(engine)):
            console.print(line)
    assert "afe5010a92f561a6" in captured.get()
    assert max(map(len, captured.get().splitlines())) <= 80


def test_a_history_without_runs_shows_no_empty_table() -> None:
    (line,) = map(str, trend_lines([]))
    assert line == "no run is there yet: add its report with --add DIR"


def test_changes_come_first_and_the_newest_of_them_before_the_others(engine: Engine) -> None:
    for number in range(20):
        found = [
            finding(fingerprint="1" * 16, bytes=9 * MIB if number >= 5 else 0),
            finding(fingerprint="2" * 16, bytes=900 * MIB),
            finding(fingerprint="3" * 16, bytes=9 * MIB if number >= 15 else 0),
        ]
        add_report(engine, night(number, subject(*found, name="life")), "")
    assert [trend.series.fingerprint[0] for trend in read_trends(engine)] == ["3", "1", "2"]


def run(*arguments: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["history", *map(str, arguments)], env={"COLUMNS": "300", "GITHUB_SHA": "f" * 40})
    return done.exit_code, done.output


def test_the_command_adds_reports_and_shows_and_writes_the_trends(tmp_path: Path) -> None:
    database = tmp_path / "history.sqlite"
    folders = []
    for number in range(8):
        found = [finding()] if number >= 4 else []
        write_folder(night(number, subject(*found, name="life")), tmp_path / str(number))
        folders += ["--add", tmp_path / str(number)]
    code, said = run("--database", database, *folders, "--page", tmp_path / "page.html")
    assert code == 0, said
    assert f"{tmp_path / '7'} is run 8" in said
    assert "48.0 MiB since run 5 (2026-01-05 02:17, commit ffffffffff)" in said
    assert "▁▁▁▁████" in said
    assert "since run 5" in (tmp_path / "page.html").read_text()
    code, said = run("--database", database, "--add", tmp_path / "7", "--subject", "other*")
    assert (code, f"{tmp_path / '7'} is in the history already" in said, "48.0 MiB" in said) == (0, True, False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--database", "absent.sqlite"], "there is no history in absent.sqlite: add a report with --add DIR"),
        (["--last", "0"], "--last 0 is not possible: use 1 or more"),
        (["--commit", "abc"], "--commit belongs to --add: add it, or leave it out"),
        (["--database", "new.sqlite", "--add", "absent"], "absent/leakcheck.json cannot be read"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, output = run(*arguments)
    assert (code, said in output, output.count("\n")) == (2, True, 1), output


def test_without_its_libraries_the_command_says_what_to_install(tmp_path: Path) -> None:
    code = "import sys; sys.modules['sqlalchemy'] = None; from lowtide.leakcheck.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "history"], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (
        2,
        'lowtide: sqlalchemy is not installed: pip install "lowtide[history]"\n',
    )


def test_trends_are_values_and_can_be_compared(engine: Engine) -> None:
    add_nights(engine, 3, leaking_from=0)
    assert read_trends(engine) == read_trends(engine)
    assert all(isinstance(trend, Trend) for trend in read_trends(engine))


def noisy(levels: list[tuple[int, int]], noise: float, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [round(level + draw.gauss(0, noise)) for level, runs in levels for _ in range(runs)]


@pytest.mark.parametrize("place", [2, 7, 150, 293, 298])
def test_a_step_is_found_at_its_run(place: int) -> None:
    values = [0] * place + [48 * MIB] * (300 - place)
    assert level_changes(values, 1024) == [LevelChange(place, 0, 48 * MIB)]


def test_each_of_several_steps_is_found() -> None:
    values = [0] * 40 + [8 * MIB] * 30 + [24 * MIB] * 20 + [0] * 10
    assert [(change.place, change.after) for change in level_changes(values, 1024)] == [
        (40, 8 * MIB),
        (70, 24 * MIB),
        (90, 0),
    ]


@pytest.mark.parametrize("seed", range(5))
def test_a_step_of_three_times_the_noise_is_found_within_two_runs(seed: int) -> None:
    found = level_changes(noisy([(100 * MIB, 60), (130 * MIB, 60)], 10 * MIB, seed), 4 * MIB)
    assert len(found) == 1
    assert abs(found[0].place - 60) <= 2


def test_noise_alone_has_no_level_to_change() -> None:
    alarms = [seed for seed in range(200) if level_changes(noisy([(500 * MIB, 120)], 10 * MIB, seed), 4 * MIB)]
    assert alarms == []


@pytest.mark.parametrize("place", [0, 1, 25, 48, 49])
def test_one_run_is_a_spike_and_no_level(place: int) -> None:
    values = [0] * 50
    values[place] = 900 * MIB
    assert level_changes(values, 1024) == []


def test_a_change_below_the_smallest_one_is_none() -> None:
    values = [0] * 20 + [1000] * 20
    assert level_changes(values, 1024) == []
    assert len(level_changes(values, 1000)) == 1
    # Two in a hundred of the largest value are not worth a look either.
    assert level_changes([10_000 * MIB] * 20 + [10_100 * MIB] * 20, 1024) == []


@pytest.mark.parametrize("values", [[], [1], [0, 9], [0, 9, 9], [5] * 30])
def test_too_few_runs_or_no_change_at_all_have_no_step(values: list[int]) -> None:
    assert level_changes(values, 1) == []


def test_counts_have_levels_too() -> None:
    assert level_changes([2] * 10 + [3] * 10, 1) == [LevelChange(10, 2, 3)]


def test_a_small_step_beside_a_large_one_is_none() -> None:
    assert level_changes([0] * 20 + [600] * 20 + [9000] * 20, 1024) == [LevelChange(40, 300, 9000)]
