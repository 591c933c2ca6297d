"""What a trend shows: each figure that moves from one occurrence of a stage to the next, and what was found of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from lowtide.reports import schema
from lowtide.reports.html.trends import FEWEST, LONGEST, MOST_SERIES, MOST_TYPES, draw_growth, draw_trends
from lowtide.reports.processes.stage_processes import ProcessName, ProcessStage
from tests.reports.small_reports import finding, readings, subject


def stage(name: str, cycle: int, *others: ProcessStage, **sizes: Any) -> schema.Stage:
    after = msgspec.structs.replace(readings(), **sizes)
    return schema.Stage(name=name, cycle=cycle, seconds=1.0, before=readings(), after=after, processes=others)


def rank(cycle: int, held: int | None) -> ProcessStage:
    name = ProcessName(pid=100 + cycle, name="Worker", rank=1)
    return ProcessStage(process=name, tensors={}, arenas={}, reserved={}, cards={"cuda:1": held}, host=7)


def test_a_figure_that_moves_is_a_series_and_one_that_does_not_is_none() -> None:
    life = [stage("infer", cycle, tensors=100 * cycle, rss=5) for cycle in range(1, 4)]
    (trend,) = draw_trends(subject(stages=tuple(life)))
    assert (trend.stage, trend.occurrences) == ("infer", ("1", "2", "3"))
    assert [(each.name, each.bytes) for each in trend.series] == [("tensors", (100, 200, 300))]


def test_what_moves_most_comes_first_and_no_more_than_a_legend_has_room_for() -> None:
    cards = {f"cuda:{turn}": 0 for turn in range(MOST_SERIES + 5)}
    life = []
    for cycle in range(1, 4):
        held = {device: turn * cycle for turn, device in enumerate(cards)}
        other = msgspec.structs.replace(rank(cycle, 0), cards=held)
        life.append(stage("infer", cycle, other))
    (trend,) = draw_trends(subject(stages=tuple(life)))
    assert len(trend.series) == MOST_SERIES
    assert trend.series[0].name == f"Worker, rank 1, cuda:{MOST_SERIES + 4}"


def test_too_few_occurrences_show_no_trend() -> None:
    life = [stage("infer", cycle, tensors=cycle) for cycle in range(1, FEWEST)]
    assert draw_trends(subject(stages=tuple(life))) == []
    assert draw_trends(subject()) == []


def test_nothing_that_moves_is_no_trend() -> None:
    assert draw_trends(subject(stages=tuple(stage("infer", cycle, rss=9) for cycle in range(1, 9)))) == []


def test_turns_of_one_cycle_are_numbered() -> None:
    life = [stage("infer", cycle, tensors=cycle * 10 + turn) for cycle in (1, 2) for turn in (1, 2)]
    (trend,) = draw_trends(subject(stages=tuple(life)))
    assert trend.occurrences == ("1.1", "1.2", "2.1", "2.2")


def test_another_process_is_one_series_through_all_lives_with_gaps_where_nothing_is_known() -> None:
    life = [stage("infer", cycle, rank(cycle, held)) for cycle, held in enumerate((5, None, 9), 1)]
    (trend,) = draw_trends(subject(stages=tuple(life)))
    assert [(each.name, each.bytes) for each in trend.series] == [("Worker, rank 1, cuda:1", (5, None, 9))]


@pytest.mark.parametrize(
    ("resource", "series"), [("tensors", "tensors"), ("host-memory", "RSS"), ("threads", ""), ("pinned", "")]
)
def test_a_verdict_belongs_to_the_series_that_it_is_about(resource: str, series: str) -> None:
    leak = finding(resource=resource, trend="growth", stage="infer", bytes=3 << 20)
    life = [stage("infer", cycle, tensors=cycle, rss=9 + cycle) for cycle in range(1, 4)]
    (trend,) = draw_trends(subject(leak, stages=tuple(life)))
    (judged,) = trend.judged
    assert (judged.series, judged.trend) == (series, "growth")
    assert judged.text.startswith(f"{resource}: growth (kept growing), 3.0 MiB")


def test_a_verdict_about_another_process_is_drawn_there() -> None:
    leak = finding(trend="residue", stage="infer", device="cuda:1", process=rank(3, 0).process)
    life = [stage("infer", cycle, rank(cycle, cycle), tensors=cycle) for cycle in range(1, 4)]
    (trend,) = draw_trends(subject(leak, stages=tuple(life)))
    assert [judged.series for judged in trend.judged] == ["Worker, rank 1, cuda:1"]


def test_the_stage_of_a_finding_comes_first_and_else_the_last_one() -> None:
    names = ("create", "infer", "shutdown")
    life = tuple(stage(name, cycle, tensors=cycle) for cycle in range(1, 4) for name in names)
    assert [trend.stage for trend in draw_trends(subject(stages=life))] == ["shutdown", "infer", "create"]
    found = subject(finding(trend="growth", stage="infer"), stages=life)
    assert [trend.stage for trend in draw_trends(found)] == ["infer", "shutdown", "create"]


def test_types_that_became_more_are_the_first_ones_with_names_that_fit() -> None:
    grown = schema.TypeGrowth(type="x\udc80" * LONGEST, since="cycle 1", until="cycle 2", before=1, after=3)
    shown = draw_growth(subject(type_growth=(grown,) * (MOST_TYPES + 9)))
    assert len(shown) == MOST_TYPES
    assert (len(shown[0].type), shown[0].after) == (LONGEST, 3)
    msgspec.json.encode(shown)
