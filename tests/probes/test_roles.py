"""Roles and ranks by the titles, threads, commands and variables of the engines."""

from __future__ import annotations

import pytest

from lowtide.probes.processes.roles import Role, read_role


@pytest.mark.parametrize(
    ("title", "role"),
    [
        ("VLLM::EngineCore", "vllm engine-core"),
        ("VLLM::EngineCore_DP1", "vllm engine-core, rank dp1"),
        # As the kernel cuts it.
        ("VLLM::EngineCor", "vllm engine-core"),
        ("VLLM::Worker_TP0", "vllm worker, rank tp0"),
        ("VLLM::Worker_DP0_PP1_TP3_EP3", "vllm worker, rank dp0 pp1 tp3 ep3"),
        ("VLLM::APIServer_0", "vllm api-server"),
        ("VLLM::DPCoordinator", "vllm coordinator"),
        ("sglang::scheduler", "sglang scheduler"),
        ("sglang::schedul", "sglang scheduler"),
        ("sglang::scheduler_DP0_TP2", "sglang scheduler, rank dp0 tp2"),
        ("sglang::detokenizer", "sglang detokenizer"),
        ("lowtide::Engine", "lowtide engine-core"),
        ("lowtide::Worker_TP1", "lowtide worker, rank tp1"),
        ("lowtide::Wo_TP0", "lowtide worker, rank tp0"),
        ("sglang::data_parallel_controller", "sglang data-parallel-controller"),
        ("sglang::tokenizer_worker:4711", "sglang tokenizer"),
        ("ray::IDLE", "ray idle-worker"),
        ("ray::RolloutWorker.generate", "ray worker"),
        ("raylet", "ray raylet"),
        ("pt_data_worker", "torch data-worker"),
        ("pt_elastic", "torch launcher"),
        ("torch_shm_manag", "torch shared-memory-manager"),
        ("python", ""),
        ("my_TP1_tool", ""),
        # Not a title that the kernel has cut: these have 15 characters.
        ("VLLM", ""),
    ],
)
def test_a_title_tells_the_role(title: str, role: str) -> None:
    assert str(read_role(title)) == role


def test_one_dimension_is_the_rank_and_several_are_not() -> None:
    assert read_role("VLLM::Worker_TP3").rank == 3
    several = read_role("VLLM::Worker_PP1_TP3", environment={"RANK": "0"})
    assert (several.rank, dict(several.ranks)) == (None, {"pp": 1, "tp": 3})


def test_a_title_counts_before_what_the_parent_had_in_its_environment() -> None:
    inherited = {"RANK": "5"}
    assert read_role("sglang::scheduler_TP1", environment=inherited).rank == 1
    assert read_role("python", environment=inherited) == Role(rank=5)


@pytest.mark.parametrize(
    "environment",
    [
        {"OMPI_COMM_WORLD_RANK": "2"},
        {"SLURM_PROCID": "2"},
    ],
)
def test_other_launchers_variables_tell_the_rank(environment: dict[str, str]) -> None:
    assert read_role("python", environment=environment) == Role(rank=2)


def test_a_variable_that_is_no_number_is_no_rank() -> None:
    assert read_role("python", environment={"RANK": "first"}) == Role()


def test_vllm_s_own_prefix_may_be_another() -> None:
    mine = {"VLLM_PROCESS_NAME_PREFIX": "prod"}
    assert str(read_role("prod::EngineCore", environment=mine)) == "vllm engine-core"
    assert str(read_role("prod::EngineCore")) == ""


def test_threads_and_commands_tell_what_a_title_does_not() -> None:
    assert str(read_role("python", threads=["python", "pt_nccl_watchdg"])) == "torch rank"
    spawned = "python -c from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=5)"
    assert read_role("python", command=spawned) == Role("python", "spawned-child", is_child=True)
    assert str(read_role("VLLM::EngineCore", threads=["pt_nccl_watchdg"], command=spawned)) == "vllm engine-core"
