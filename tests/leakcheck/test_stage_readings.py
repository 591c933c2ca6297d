"""What nothing explains of a process's memory: on the host by its own figures, on cards by the driver's."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lowtide.leakcheck.processes.messages import Levels
from lowtide.leakcheck.processes.process_levels import NOTHING_SAID, ProcessLevels
from lowtide.reports.processes.stage_processes import ProcessName, ProcessStage

MIB = 1 << 20
CORE = ProcessName(pid=7, name="VLLM::EngineCore")


def as_stage(
    process: ProcessName,
    levels: Levels,
    host: int | None,
    cards: Mapping[str, int | None],
    context: Callable[[str], int | None] = lambda device: None,
) -> ProcessStage:
    return ProcessLevels(process, levels, cards, host).as_stage(context)


def is_shown(process: ProcessName, levels: Levels, host: int | None, cards: Mapping[str, int | None]) -> bool:
    return ProcessLevels(process, levels, cards, host).is_shown


def levels(reserved: dict[str, int | None], arenas: dict[str, int] | None = None) -> Levels:
    """In MiB; 30 of host memory are under tensors."""
    return Levels(
        tensors={},
        arenas={device: {"weights": size * MIB} for device, size in (arenas or {}).items()},
        reserved={device: None if size is None else size * MIB for device, size in reserved.items()},
        has_torch=True,
        resident=30 * MIB,
    )


def test_what_is_under_no_tensor_and_in_no_arena_is_unexplained() -> None:
    own = levels({"cuda:0": 500}, {"cuda:0": 200})
    stage = as_stage(CORE, own, 100 * MIB, {"cuda:0": 1200 * MIB})
    assert stage.unexplained == {"cpu": 70 * MIB, "cuda:0": 500 * MIB}
    assert stage.host == 100 * MIB


def test_a_context_alone_is_explained_on_each_card() -> None:
    sizes = {"cuda:0": 450 * MIB, "cuda:1": None}
    cards: dict[str, int | None] = {"cuda:0": 1200 * MIB, "cuda:1": 600 * MIB}
    stage = as_stage(CORE, levels({"cuda:0": 500, "cuda:1": 100}), None, cards, sizes.get)
    assert stage.contexts == {"cuda:0": 450 * MIB}
    assert stage.unexplained == {"cpu": None, "cuda:0": 250 * MIB, "cuda:1": 500 * MIB}


def test_a_rank_calls_its_only_card_by_another_number() -> None:
    assert as_stage(CORE, levels({"cuda:0": 500}), None, {"cuda:3": 1200 * MIB}).unexplained == {
        "cpu": None,
        "cuda:3": 700 * MIB,
    }


def test_of_several_cards_under_other_numbers_nothing_is_said() -> None:
    own = levels({"cuda:0": 500, "cuda:1": 500})
    cards: dict[str, int | None] = {"cuda:2": 900 * MIB, "cuda:3": 900 * MIB}
    assert as_stage(CORE, own, None, cards).unexplained == {"cpu": None, "cuda:2": None, "cuda:3": None}
    same: dict[str, int | None] = {"cuda:0": 900 * MIB, "cuda:1": 600 * MIB}
    assert as_stage(CORE, own, None, same).unexplained == {"cpu": None, "cuda:0": 400 * MIB, "cuda:1": 100 * MIB}


def test_what_the_driver_or_torch_does_not_say_is_not_known() -> None:
    assert as_stage(CORE, levels({"cuda:0": None}), None, {"cuda:0": MIB}).unexplained["cuda:0"] is None
    assert as_stage(CORE, levels({"cuda:0": 1}), None, {"cuda:0": None}).unexplained["cuda:0"] is None


def test_of_a_process_that_says_nothing_all_is_unexplained() -> None:
    stage = as_stage(CORE, NOTHING_SAID, 100 * MIB, {"cuda:0": 600 * MIB})
    assert stage.unexplained == {"cpu": 100 * MIB, "cuda:0": 600 * MIB}


def test_helpers_without_torch_are_not_listed() -> None:
    assert not is_shown(CORE, NOTHING_SAID, 10 * MIB, {})
    assert not is_shown(CORE, NOTHING_SAID, None, {})
    assert is_shown(CORE, NOTHING_SAID, 20 * MIB, {})
    assert is_shown(CORE, NOTHING_SAID, 0, {"cuda:0": None})
    assert is_shown(CORE, levels({}), None, {})
    tracker = ProcessName(pid=8, name="python", role="python resource-tracker")
    assert not is_shown(tracker, NOTHING_SAID, 20 * MIB, {})
