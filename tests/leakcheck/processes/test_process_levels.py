"""What a process of an engine holds, how it is called, and what it has kept that is to be gone while it sleeps."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import msgspec
import pytest

from lowtide.leakcheck.growth.quantities import HOST
from lowtide.leakcheck.processes import own_tensors
from lowtide.leakcheck.processes.engine_processes import EngineProcesses
from lowtide.leakcheck.processes.messages import Levels, Read, encode
from lowtide.leakcheck.processes.process_growth import ProcessGrowth
from lowtide.leakcheck.processes.process_levels import (
    NOTHING_SAID,
    ProcessLevels,
    SleptLevels,
    communicators_kept,
    contexts_elsewhere,
    describe_process,
    explain_uneven_rank,
    mapped_by_failed_wake,
    uneven_ranks,
)
from lowtide.leakcheck.resources.processes import ProcessGroups
from lowtide.probes.host.process_tree import ProcessTree
from lowtide.probes.processes.agents import Agents
from lowtide.reports.processes.stage_processes import ProcessName, ProcessStage
from lowtide.reports.schema import Finding, decode
from tests.waiting import wait_until

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


def on_cards(
    cards: dict[str, int | None], tensors: dict[str, int], arenas: dict[str, int] | None = None
) -> ProcessLevels:
    """The second rank, with what the driver counts for it, and what it has there."""
    of_arenas = {device: {"kv_cache": size} for device, size in (arenas or {}).items()}
    levels = Levels(tensors=tensors, arenas=of_arenas, reserved={}, has_torch=True)
    return ProcessLevels(
        ProcessName(pid=41, name="lowtide::Worker_TP1", rank=1, device=", ".join(cards)), levels, cards
    )


@pytest.mark.parametrize(
    "levels",
    [
        on_cards({"cuda:0": 520 * MIB, "cuda:1": 2000 * MIB}, {"cuda:1": 900 * MIB}),
        on_cards({"cuda:0": 520 * MIB, "cuda:1": 2000 * MIB}, {"cuda:0": 512}, {"cuda:1": 900 * MIB}),
    ],
)
def test_a_context_on_another_rank_s_card_is_told_once(levels: ProcessLevels) -> None:
    engine = EngineProcesses(ProcessTree(), Agents(), None, None, _now={41: levels})
    (finding,) = engine.contexts_elsewhere("update_weights")
    assert (finding.resource, finding.device, finding.bytes) == ("driver", "cuda:0", 520 * MIB)
    assert "has 520.0 MiB on cuda:0 after update_weights: a context, and" in finding.message
    assert finding.message.endswith("it works on cuda:1")
    assert "torch.cuda.set_device" in (finding.advice or "")
    assert engine.contexts_elsewhere("infer") == []


@pytest.mark.parametrize(
    "levels",
    [
        pytest.param(on_cards({"cuda:1": 2000 * MIB}, {"cuda:1": 900 * MIB}), id="one card"),
        pytest.param(
            on_cards({"cuda:0": 900 * MIB, "cuda:1": 2000 * MIB}, {"cuda:0": 200 * MIB, "cuda:1": 900 * MIB}),
            id="works on both",
        ),
        pytest.param(on_cards({"cuda:2": 520 * MIB, "cuda:3": 2000 * MIB}, {"cuda:0": 900 * MIB}), id="other numbers"),
        pytest.param(
            on_cards({"cuda:0": 520 * MIB, "cuda:1": 2000 * MIB}, {"cuda:0": 900 * MIB}), id="in another order"
        ),
        pytest.param(on_cards({"cuda:0": 520 * MIB, "cuda:1": 520 * MIB}, {}), id="has no tensor yet"),
        pytest.param(on_cards({"cuda:0": None, "cuda:1": None}, {"cuda:1": 900 * MIB}), id="the driver does not say"),
        pytest.param(rank(1, 2000 * MIB), id="each rank sees its own card only"),
    ],
)
def test_a_context_where_a_process_works_is_not(levels: ProcessLevels) -> None:
    assert contexts_elsewhere("infer", [levels]) == []


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


WAITING = "import sys; print('ready', flush=True); sys.stdin.read()"


@contextmanager
def child(code: str = WAITING, *, title: str = "", variables: Mapping[str, str] | None = None) -> Iterator[int]:
    """A Python that waits; `title` is what it calls itself."""
    clean = {name: value for name, value in os.environ.items() if "RANK" not in name}
    process = subprocess.Popen(
        [title or sys.executable, "-c", code],
        executable=sys.executable,
        env={**clean, **(variables or {})},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process.pid
        finally:
            process.kill()


def test_a_title_says_role_and_rank() -> None:
    with child(title="VLLM::Worker_TP1") as pid:
        named = describe_process(pid, devices=("cuda:1",))
    assert named == ProcessName(
        pid=pid,
        name="VLLM::Worker_TP1",
        parent=os.getpid(),
        role="vllm worker",
        rank=1,
        ranks="tp1",
        device="cuda:1",
    )
    assert named.text == f"pid {pid} (VLLM::Worker_TP1, rank 1)"


def test_several_dimensions_are_named_instead_of_one_number() -> None:
    with child(title="sglang::scheduler_DP0_TP2") as pid:
        named = describe_process(pid)
    assert (named.role, named.rank, named.ranks) == ("sglang scheduler", None, "dp0 tp2")
    assert named.text == f"pid {pid} (sglang::scheduler_DP0_TP2, rank dp0 tp2)"


def test_the_environment_says_the_rank() -> None:
    with child(variables={"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}) as pid:
        assert describe_process(pid).rank == 3
    with child(variables={"VLLM_DP_RANK": "2"}) as pid:
        assert describe_process(pid).rank == 2


def test_a_rank_that_a_process_gives_itself_is_known_by_its_agent() -> None:
    agents = Agents()
    agents.start()
    try:
        with child(f"import os; os.environ['RANK'] = '1'; {WAITING}") as pid:
            wait_until(lambda: agents.has_agent(pid))
            levels = msgspec.msgpack.decode(agents.ask(pid, encode(Read())), type=Levels)
            assert describe_process(pid).rank is None
            assert describe_process(pid, variables=levels.variables).rank == 1
    finally:
        agents.stop()


def test_a_process_without_any_of_that_says_nothing() -> None:
    with child() as pid:
        named = describe_process(pid)
    assert (named.role, named.rank, named.ranks, named.device) == ("", None, "", "")
    assert named.text == f"pid {pid} ({named.name})"


def test_a_process_that_has_ended_says_nothing() -> None:
    with child(title="VLLM::Worker_TP1") as pid:
        pass
    named = describe_process(pid)
    assert (named.parent, named.role, named.rank) == (None, "", None)


def test_a_finding_names_the_rank() -> None:
    growth = ProcessGrowth()
    for level in (100, 116, 132, 148):
        # The device is known from the second turn on: it is one process all the same.
        device = "cuda:1" if level > 100 else ""
        growth.note(ProcessName(pid=7, name="VLLM::Worker_TP1", rank=1, device=device), {HOST: level << 20})
    (finding,) = growth.findings()
    assert finding.message.startswith("pid 7 (VLLM::Worker_TP1, rank 1): host memory")
    assert finding.process is not None
    assert finding.process.device == "cuda:1"


def test_a_report_of_an_earlier_version_is_readable() -> None:
    report = (
        '{"schema": "lowtide-report/1", "version": "0.2", "created": "", "command": "", "machine": {"platform": "",'
        ' "python": "", "torch": "", "cpus": 1, "memory": 1, "devices": [], "driver": ""}, "subjects": [{"id": "x",'
        ' "outcome": "clean", "stages": [], "findings": [{"resource": "tensors", "cause": "unknown", "bytes": 1,'
        ' "count": 1, "device": "cpu", "stage": "infer", "message": "", "fingerprint": "", "process":'
        ' {"pid": 7, "name": "core"}}]}]}'
    )
    assert decode(report.encode()).subjects[0].findings[0].process == ProcessName(pid=7, name="core")


def levels_of(
    number: int | None, at_work: int, asleep: int, *, role: str = "vllm worker", ranks: str = ""
) -> SleptLevels:
    """Sizes in MiB."""
    name = ProcessName(pid=100 + (number or 0), name=f"VLLM::Worker_TP{number}", role=role, rank=number, ranks=ranks)
    return SleptLevels(name, at_work * MIB, asleep * MIB, {})


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_rank_that_a_sleep_did_not_reach_is_found_with_its_excess(kind: str) -> None:
    ranks = [levels_of(0, 5000, 200), levels_of(1, 5000, 1200), levels_of(2, 5000, 200)]
    (uneven,) = uneven_ranks(ranks, kind)
    assert (uneven.rank, uneven.peer, uneven.excess) == (ranks[1], ranks[0], 1000 * MIB)


@pytest.mark.parametrize(
    "ranks",
    [
        [levels_of(0, 5000, 200), levels_of(1, 5000, 200)],
        [levels_of(0, 5000, 200), levels_of(1, 5000, 260)],
        # Rank 0 has an embedding that the others lack: it keeps the same part.
        [levels_of(0, 7500, 300), levels_of(1, 5000, 200)],
        # It has a buffer that no sleep gives up, at work and asleep.
        [levels_of(0, 6000, 1200), levels_of(1, 5000, 200)],
        [levels_of(0, 5000, 200)],
        [levels_of(None, 5000, 200), levels_of(None, 5000, 1200)],
        # A detokenizer and a scheduler with the rank of their environment are no peers.
        [levels_of(0, 5000, 200), levels_of(1, 5000, 1200, role="sglang detokenizer")],
        # Two lives' workers of the same rank.
        [levels_of(0, 5000, 200), levels_of(0, 5000, 1200)],
        [levels_of(0, 0, 0), levels_of(1, 5000, 1200)],
    ],
    ids=[
        "equal",
        "rounded",
        "more at work, and the same part asleep",
        "more by the same at work and asleep",
        "alone",
        "without ranks",
        "of other roles",
        "of one rank",
        "empty",
    ],
)
@pytest.mark.parametrize("kind", ["cuda"])
def test_ranks_that_do_not_keep_more_are_silent(ranks: list[SleptLevels], kind: str) -> None:
    assert uneven_ranks(ranks, kind) == []


def test_what_is_counted_exactly_has_a_smaller_limit() -> None:
    ranks = [levels_of(0, 100, 10), levels_of(1, 100, 20)]
    assert [each.excess for each in uneven_ranks(ranks, "cpu")] == [10 * MIB]
    assert uneven_ranks(ranks, "cuda") == []


def test_ranks_are_told_apart_by_all_dimensions() -> None:
    workers = [levels_of(None, 5000, 200, ranks="dp0 tp1"), levels_of(None, 5000, 1200, ranks="dp1 tp1")]
    assert len(uneven_ranks(workers, "cuda")) == 1


def held(holder: str, size: int) -> Finding:
    return Finding(
        resource="tensors",
        cause="module-global",
        bytes=size * MIB,
        count=1,
        device="cuda:0",
        stage="",
        message="",
        fingerprint="",
        holder=holder,
    )


def test_the_holder_is_what_the_peer_does_not_have() -> None:
    (uneven,) = uneven_ranks([levels_of(0, 5000, 200), levels_of(1, 5000, 1200)], "cuda")
    answers = {100: [held("model.weights", 150)], 101: [held("model.weights", 150), held("model.CACHE", 100)]}
    finding = explain_uneven_rank(uneven, "sleep(1)", "cuda", "cuda:0", answers.__getitem__)
    assert (finding.holder, finding.bytes, finding.stage) == ("model.CACHE", 1000 * MIB, "sleep(1)")
    assert finding.process == uneven.rank.process
    assert finding.message == (
        "pid 101 (VLLM::Worker_TP1, rank 1) keeps 1000.0 MiB more in sleep(1) than pid 100 (VLLM::Worker_TP0, rank 0): "
        "1.2 GiB of 4.9 GiB, the other 200.0 MiB of 4.9 GiB; 100.0 MiB held by model.CACHE"
    )


def test_without_a_holder_an_arena_is_named_or_nothing() -> None:
    def nobody(pid: int) -> Sequence[Finding]:
        return ()

    levels = [levels_of(0, 5000, 200), levels_of(1, 5000, 1200)]
    (uneven,) = uneven_ranks(levels, "cuda")
    plain = explain_uneven_rank(uneven, "sleep(1)", "cuda", "cuda:0", nobody)
    assert (plain.resource, plain.holder, plain.device) == ("driver", None, "cuda:0")
    mapped = SleptLevels(levels[1].process, levels[1].at_work, levels[1].asleep, {"kv_cache": 900 * MIB})
    (uneven,) = uneven_ranks([levels[0], mapped], "cuda")
    finding = explain_uneven_rank(uneven, "sleep(1)", "cuda", "cuda:0", nobody)
    assert (finding.resource, finding.holder) == ("arena", "arena 'kv_cache'")


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


def test_what_the_heaps_have_is_explained_and_counts_as_beside_tensors() -> None:
    said = msgspec.structs.replace(levels({}), heaps={"malloc in use": 40 * MIB, "Python's heap in use": 10 * MIB})
    stage = as_stage(CORE, said, 100 * MIB, {})
    assert stage.unexplained["cpu"] == 20 * MIB
    assert stage.beside_tensors == 70 * MIB
    assert as_stage(CORE, said, None, {}).beside_tensors is None


def test_a_context_alone_is_explained_on_each_card() -> None:
    sizes = {"cuda:0": 450 * MIB, "cuda:1": None}
    cards: dict[str, int | None] = {"cuda:0": 1200 * MIB, "cuda:1": 600 * MIB}
    stage = as_stage(CORE, levels({"cuda:0": 500, "cuda:1": 100}), None, cards, sizes.get)
    assert stage.contexts == {"cuda:0": 450 * MIB}
    assert stage.unexplained == {"cpu": None, "cuda:0": 250 * MIB, "cuda:1": 500 * MIB}


@pytest.mark.parametrize(("own", "outside"), [("cuda:0", {"cuda:0": 20 * MIB}), ("cuda:3", {"cuda:0": 20 * MIB})])
def test_what_nobody_has_asked_the_driver_for_is_kernels_and_libraries(own: str, outside: dict[str, int]) -> None:
    said = msgspec.structs.replace(levels({"cuda:0": 500}), outside=outside)
    stage = as_stage(CORE, said, None, {own: 1200 * MIB}, lambda device: 450 * MIB)
    assert stage.kernels == {own: 230 * MIB}
    assert stage.unexplained[own] == 20 * MIB


def test_what_a_library_was_seen_to_ask_for_is_its_own() -> None:
    asked = {"libcublas.so.13": 15 * MIB, "libnccl.so.2": 3 * MIB}
    said = msgspec.structs.replace(levels({"cuda:0": 500}), outside={"cuda:0": 20 * MIB}, libraries={"cuda:0": asked})
    stage = as_stage(CORE, said, None, {"cuda:0": 1200 * MIB}, lambda device: 450 * MIB)
    assert stage.libraries == {"cuda:0": asked}
    assert stage.unexplained["cuda:0"] == 2 * MIB


def test_without_the_size_of_a_context_nothing_is_said_of_kernels() -> None:
    said = msgspec.structs.replace(levels({"cuda:0": 500}), outside={"cuda:0": 20 * MIB})
    stage = as_stage(CORE, said, None, {"cuda:0": 1200 * MIB})
    assert stage.kernels == {}
    assert stage.unexplained["cuda:0"] == 700 * MIB


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
