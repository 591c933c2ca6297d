"""The pictures of a life: what lies on each other, when the engine slept, and which one is shown first."""

from __future__ import annotations

import msgspec

from lowtide.reports import schema
from lowtide.reports.html.life_pictures import Band, Line, Picture, View, draw_life
from lowtide.reports.processes.stage_processes import ProcessName, ProcessStage
from tests.reports.small_reports import LIFE, MIB, ledger, readings, stage


def drawn(*stages: schema.Stage) -> Picture:
    picture = draw_life(stages)
    assert picture is not None
    return picture


def core(pid: int, card: int, *, segments: int, pool: int) -> ProcessStage:
    """A core with so many MiB of its card, 3 of them a context's and 2 unexplained; and 9 of the host's."""
    return ProcessStage(
        process=ProcessName(pid=pid, name="VLLM::EngineCore"),
        tensors={},
        arenas={"cuda:0": {"weights": pool * MIB}},
        reserved={"cuda:0": segments * MIB},
        cards={"cuda:1": card * MIB},
        host=9 * MIB,
        contexts={"cuda:1": 3 * MIB},
        unexplained={"cpu": 4 * MIB, "cuda:1": 2 * MIB},
    )


def test_each_moment_is_the_end_of_a_stage_and_the_first_is_the_beginning() -> None:
    picture = drawn(*LIFE)
    assert picture.moments == ("before create", "create", "infer", "sleep(1)")
    assert picture.cycles == (1, 1, 1, 1)
    (view,) = [view for view in picture.views if view.process == "this process"]
    assert view.lines == (
        Line("weights", (0, 40 * MIB, 40 * MIB, 0)),
        Line("unexplained", (MIB,) * 4),
    )
    assert view.total == (MIB, 41 * MIB, 41 * MIB, MIB)


def test_the_engine_is_asleep_from_the_end_of_a_sleep_to_the_wake() -> None:
    names = ("create", "sleep(1)", "infer", "wake", "infer", "sleep(2)", "wake", "sleep(2)", "shutdown")
    picture = drawn(*(stage(name, 1.0, MIB) for name in names))
    assert picture.asleep == (Band(1, 2), Band(5, 5), Band(7, 7))


def test_a_process_that_each_life_has_anew_is_one_picture() -> None:
    life = [
        msgspec.structs.replace(stage(name, 1.0, 0), cycle=cycle, processes=processes)
        for name, cycle, processes in (
            ("create", 1, (core(70, 30, segments=5, pool=20),)),
            ("shutdown", 1, ()),
            ("create", 2, (core(80, 31, segments=6, pool=20),)),
        )
    ]
    views = {(view.process, view.device): view for view in drawn(*life).views}
    on_card = views["VLLM::EngineCore", "cuda:1"]
    # Between them there is no such process, which is not the same as one that could not be read.
    assert on_card.total == (30 * MIB, 0, 31 * MIB)
    assert on_card.lines == (
        Line("arena weights", (20 * MIB, 0, 20 * MIB)),
        Line("torch's segments", (5 * MIB, 0, 6 * MIB)),
        Line("context", (3 * MIB, 0, 3 * MIB)),
        Line("unexplained", (2 * MIB, 0, 2 * MIB)),
    )
    on_host = views["VLLM::EngineCore", "cpu"]
    assert on_host.lines == (
        Line("tensors and pools", (5 * MIB, 0, 5 * MIB)),
        Line("unexplained", (4 * MIB, 0, 4 * MIB)),
    )


def test_all_processes_on_one_device_are_a_picture_and_the_first_on_a_card() -> None:
    own = readings(ledger("cpu", 2 * MIB, interpreter=2 * MIB), ledger("cuda:1", 7 * MIB, weights=7 * MIB))
    life = [
        msgspec.structs.replace(
            stage(name, 1.0, 0), before=readings(), after=own, processes=(core(70, 30, segments=5, pool=20),)
        )
        for name in ("create", "infer")
    ]
    first, *others = drawn(*life).views
    assert first == View(
        "all processes",
        "cuda:1",
        (Line("VLLM::EngineCore", (30 * MIB,) * 2), Line("this process", (7 * MIB,) * 2)),
        (37 * MIB,) * 2,
    )
    assert [(view.process, view.device) for view in others] == [
        ("VLLM::EngineCore", "cuda:1"),
        ("this process", "cuda:1"),
        ("all processes", "cpu"),
        ("VLLM::EngineCore", "cpu"),
        ("this process", "cpu"),
    ]


def test_what_is_not_known_is_a_gap() -> None:
    unknown = msgspec.structs.replace(ledger("cuda:0", MIB), total=None, unexplained=None)
    life = (LIFE[0], msgspec.structs.replace(LIFE[1], after=readings(unknown)))
    (view,) = [view for view in drawn(*life).views if view.process == "this process"]
    assert view.total == (MIB, 41 * MIB, None)
    assert view.lines[-1] == Line("unexplained", (MIB, MIB, None))


def test_what_one_process_holds_unknown_the_sum_is_a_gap() -> None:
    own = readings(ledger("cuda:1", 7 * MIB, weights=7 * MIB))
    unknown = msgspec.structs.replace(own.ledgers[0], total=None, unexplained=None)
    core_stage = core(70, 30, segments=5, pool=20)
    life = [
        msgspec.structs.replace(stage(name, 1.0, 0), before=readings(), after=after, processes=(core_stage,))
        for name, after in (("create", own), ("infer", readings(unknown)))
    ]
    first = drawn(*life).views[0]
    assert (first.process, first.total) == ("all processes", (37 * MIB, None))


def test_a_single_stage_and_a_life_without_figures_have_no_picture() -> None:
    assert draw_life(LIFE[:1]) is None
    bare = msgspec.structs.replace(LIFE[1], after=readings(), processes=())
    assert draw_life([bare, bare]) is None
