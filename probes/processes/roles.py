"""What part a process plays in an engine, and its rank, as far as its title, threads and environment show it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import msgspec

COMM_LENGTH = 15
"""Characters of a process's or thread's name that the kernel keeps (TASK_COMM_LEN without its end)."""

_NO_RANKS: Mapping[str, int] = MappingProxyType({})


class Role(msgspec.Struct, frozen=True):
    """What part a process plays.

    Attributes:
        engine: the project whose name it was found by: `vllm`, `sglang`, `ray`, `torch`, `python`; empty if none.
        name: its part there, as `engine-core` or `worker`; empty if unknown.
        is_child: whether another process of the same engine starts it, always: one without its parent was left.
        rank: its rank among all, or in the one dimension that its title shows; None if that is not known.
        ranks: its rank by dimension as its title shows it, as `{"dp": 0, "tp": 1}`.
    """

    engine: str = ""
    name: str = ""
    is_child: bool = False
    rank: int | None = None
    ranks: Mapping[str, int] = msgspec.field(default_factory=lambda: _NO_RANKS)

    @property
    def part(self) -> str:
        """`vllm worker`; empty if unknown."""
        return " ".join(filter(None, (self.engine, self.name)))

    @property
    def dimensions(self) -> str:
        """Its rank by dimension in one text, as `dp0 tp1`; empty if its title shows none."""
        return " ".join(f"{name}{rank}" for name, rank in self.ranks.items())

    def __str__(self) -> str:
        """Return `vllm worker, rank 1`; empty where nothing is known."""
        rank = self.dimensions or ("" if self.rank is None else str(self.rank))
        return ", ".join(filter(None, (self.part, rank and f"rank {rank}")))


class _Title(msgspec.Struct, frozen=True):
    """A title that a library gives to its processes, from its beginning."""

    begins: str
    engine: str
    name: str
    is_child: bool


_TITLES = (
    # vllm/v1/engine/core.py, EngineCoreProc.run_engine_core; `VLLM::` is VLLM_PROCESS_NAME_PREFIX in vllm/envs.py.
    _Title("VLLM::EngineCore", "vllm", "engine-core", True),
    # vllm/v1/executor/multiproc_executor.py, setup_proc_title_and_log_prefix: `VLLM::Worker_DP0_PP0_TP1_EP1`.
    _Title("VLLM::Worker", "vllm", "worker", True),
    # vllm/entrypoints/cli/serve.py, run_api_server_worker_proc: `VLLM::APIServer_0`.
    _Title("VLLM::APIServer", "vllm", "api-server", True),
    # vllm/v1/engine/coordinator.py, DPCoordinatorProc.
    _Title("VLLM::DPCoordinator", "vllm", "coordinator", True),
    # sglang/srt/managers/scheduler.py, run_scheduler_process: `sglang::scheduler_DP0_PP0_TP1_EP1`.
    _Title("sglang::scheduler", "sglang", "scheduler", True),
    # sglang/srt/managers/detokenizer_manager.py, run_detokenizer_process.
    _Title("sglang::detokenizer", "sglang", "detokenizer", True),
    # sglang/srt/managers/data_parallel_controller.py, run_data_parallel_controller_process.
    _Title("sglang::data_parallel_controller", "sglang", "data-parallel-controller", True),
    # sglang/srt/managers/multi_tokenizer_mixin.py, TokenizerWorker: `sglang::tokenizer_worker:4711`.
    _Title("sglang::tokenizer_worker", "sglang", "tokenizer", True),
    # engine/core_process.py and engine/ranks.py; without setproctitle the kernel's name: `lowtide::Wo_TP0`.
    _Title("lowtide::EngineCore", "lowtide", "engine-core", True),
    _Title("lowtide::Wo", "lowtide", "worker", True),
    # ray/_private/ray_constants.py, WORKER_PROCESS_TYPE_IDLE_WORKER.
    _Title("ray::IDLE", "ray", "idle-worker", True),
    # ray/_private/worker.py, _changeproctitle: `ray::Name` or `ray::Name.method` while an actor or a task runs.
    _Title("ray::", "ray", "worker", True),
    # ray/autoscaler/_private/constants.py, RAY_PROCESSES.
    _Title("raylet", "ray", "raylet", False),
    _Title("gcs_server", "ray", "gcs-server", False),
    # torch/utils/data/_utils/worker.py, _worker_loop.
    _Title("pt_data_worker", "torch", "data-worker", True),
    # torch/distributed/run.py, run.
    _Title("pt_elastic", "torch", "launcher", False),
    # torch/lib/libshm/manager.cpp: the program's own name, as the kernel cuts it.
    _Title("torch_shm_manag", "torch", "shared-memory-manager", False),
)

_THREADS = (
    # torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp: only a rank of a process group has them.
    _Title("pt_nccl_watchdg", "torch", "rank", False),
    _Title("pt_nccl_heartbt", "torch", "rank", False),
    # torch/csrc/distributed/c10d/ProcessGroupGloo.cpp.
    _Title("pt_gloo_runloop", "torch", "rank", False),
)

_COMMANDS = (
    # CPython, Lib/multiprocessing/spawn.py, get_command_line; forkserver.py and resource_tracker.py, ensure_running.
    ("from multiprocessing.spawn import spawn_main", "spawned-child"),
    ("from multiprocessing.forkserver import main", "fork-server"),
    ("from multiprocessing.resource_tracker import main", "resource-tracker"),
)

# torch/distributed/run.py sets the first; mpirun(1) and srun(1) theirs; vllm/envs.py the last, of data-parallel engines
# that are started one by one.
RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "VLLM_DP_RANK")
"""The environment variables that say a process's rank."""

_VLLM_PREFIX = "VLLM_PROCESS_NAME_PREFIX"
_RANK_IN_TITLE = re.compile(r"_(DP|PP|PCP|TP|DCP|EP)(\d+)(?=_|$)")


def read_role(
    title: str,
    *,
    command: str = "",
    threads: Iterable[str] = (),
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Role:
    """Return what part a process plays.

    What a process calls itself counts before what it has in its environment, which a child has from its parent.

    Args:
        title: the name that it gave itself, or the kernel's, which is cut at 15 characters.
        command: what it was started with.
        threads: the names of its threads.
        environment: the variables that it was started with.
    """
    prefix = environment.get(_VLLM_PREFIX, "")
    if prefix and title.startswith(f"{prefix}::"):
        title = f"VLLM::{title.removeprefix(f'{prefix}::')}"
    known = _by_title(title) or _by_threads(threads) or _by_command(command)
    ranks = {name.lower(): int(rank) for name, rank in _RANK_IN_TITLE.findall(title)} if "::" in title else {}
    said = next((environment[name] for name in RANK_VARIABLES if name in environment), "")
    rank = int(said) if said.isdecimal() else None
    if ranks:
        # With several dimensions the rank among all depends on their sizes, which no title shows.
        rank = next(iter(ranks.values())) if len(ranks) == 1 else None
    return Role(known.engine, known.name, known.is_child, rank, MappingProxyType(ranks))


def _by_title(title: str) -> _Title | None:
    return next((known for known in _TITLES if _is(known.begins, title)), None)


def _is(begins: str, title: str) -> bool:
    return title.startswith(begins) or (len(title) == COMM_LENGTH and begins.startswith(title))


def _by_threads(threads: Iterable[str]) -> _Title | None:
    names = set(threads)
    return next((known for known in _THREADS if known.begins in names), None)


def _by_command(command: str) -> _Title:
    for code, name in _COMMANDS:
        if code in command:
            return _Title("", "python", name, name == "spawned-child")
    return _Title("", "", "", False)
