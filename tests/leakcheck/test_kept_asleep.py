"""What a process of an engine has that is to be gone while it sleeps: NCCL's communicators, and what a wake mapped."""

from __future__ import annotations

import pytest

from lowtide.leakcheck.processes import own_tensors
from lowtide.leakcheck.processes.messages import Levels
from lowtide.leakcheck.processes.process_levels import ProcessLevels, communicators_kept, mapped_by_failed_wake
from lowtide.leakcheck.resources.process_groups import ProcessGroups
from lowtide.reports.processes.stage_processes import ProcessName

MIB = 1 << 20
GROUP = "0 (nccl, 2 ranks)"


def rank(number: int, of_driver: int | None, *groups: str, arenas: dict[str, int] | None = None) -> ProcessLevels:
    """A rank on a card: 100 MiB of torch's, and the rest of the driver's figure is of contexts and libraries."""
    levels = Levels(
        tensors={"cuda:0": 90 * MIB},
        arenas={"cuda:0": arenas or {}},
        reserved={"cuda:0": 100 * MIB},
        has_torch=True,
        communicators=groups,
    )
    process = ProcessName(pid=40 + number, name=f"lowtide::Worker_TP{number}", rank=number, device=f"cuda:{number}")
    return ProcessLevels(process, levels, {f"cuda:{number}": of_driver})


@pytest.mark.parametrize(
    ("at_work", "asleep", "groups", "found"),
    [
        pytest.param(1100 * MIB, 1100 * MIB, (GROUP,), 1, id="kept"),
        pytest.param(1100 * MIB, 1130 * MIB, (GROUP, "1 (nccl, 2 ranks)"), 2, id="two, and kernels that were loaded"),
        pytest.param(1100 * MIB, 712 * MIB, (GROUP,), 0, id="suspended"),
        pytest.param(1100 * MIB, 1100 * MIB, (), 0, id="no communicator"),
        pytest.param(1100 * MIB, None, (GROUP,), 0, id="the driver does not say"),
    ],
)
def test_communicators_that_a_sleep_keeps_are_found(
    at_work: int, asleep: int | None, groups: tuple[str, ...], found: int
) -> None:
    findings = communicators_kept(
        "sleep(2)", {40: rank(0, at_work, *groups)}, {40: rank(0, asleep, *groups), 41: rank(1, asleep, *groups)}
    )
    assert [finding.count for finding in findings] == ([found] if found else [])
    for finding in findings:
        assert (finding.resource, finding.cause, finding.device) == ("process-groups", "not-restored", "cuda:0")
        assert finding.message.startswith("pid 40 (lowtide::Worker_TP0, rank 0) keeps ")
        assert finding.holder == ", ".join(groups)
        assert "1000.0 MiB" in finding.message or "1.0 GiB" in finding.message
        assert "ncclCommSuspend" in (finding.advice or "")


def test_all_ranks_keep_them_in_one_way() -> None:
    levels = {40 + number: rank(number, 1100 * MIB, GROUP) for number in range(2)}
    first, second = communicators_kept("sleep(2)", levels, levels)
    assert first.fingerprint == second.fingerprint


@pytest.mark.parametrize(
    ("described", "listed"),
    [
        (GROUP, (GROUP,)),
        ("0 (cpu:gloo,cuda:nccl, 8 ranks)", ("0 (cpu:gloo,cuda:nccl, 8 ranks)",)),
        ("0 (gloo, 2 ranks)", ()),
        ("0 (nccl, 1 rank)", ()),
    ],
    ids=["nccl", "nccl beside gloo", "gloo", "a rank alone"],
)
def test_an_agent_lists_the_groups_of_several_ranks_on_cards(
    monkeypatch: pytest.MonkeyPatch, described: str, listed: tuple[str, ...]
) -> None:
    monkeypatch.setattr(ProcessGroups, "read", lambda self: {"0": 1})
    monkeypatch.setattr(ProcessGroups, "describe", lambda self, name: described)
    assert own_tensors.OwnTensors().levels().communicators == listed


@pytest.mark.parametrize(
    ("after", "found"),
    [
        ({"weights": 4 * MIB, "runtime": MIB}, ["arena 'weights'"]),
        ({"weights": 4 * MIB, "kv_cache": 2 * MIB, "runtime": MIB}, ["arena 'weights'", "arena 'kv_cache'"]),
        ({"runtime": MIB}, []),
    ],
    ids=["half of it", "all of it", "nothing"],
)
def test_what_a_failed_wake_leaves_mapped_is_found(after: dict[str, int], found: list[str]) -> None:
    asleep, now = rank(0, 900 * MIB, arenas={"runtime": MIB}), rank(0, 900 * MIB, arenas=after)
    findings = mapped_by_failed_wake("wake", "cuda", {40: asleep}, {40: now.levels})
    assert [finding.holder for finding in findings] == found
    for finding in findings:
        assert (finding.resource, finding.cause, finding.stage) == ("arena", "not-restored", "wake")
        assert finding.bytes == after[(finding.holder or "").split("'")[1]]
        assert finding.process == asleep.process
