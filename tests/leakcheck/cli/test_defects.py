"""Every defect that shows on a CPU is found with cause, holder and remedy; nothing else is, and nothing without it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from lowtide.engine import ConfigError, EngineConfig
from lowtide.engine.defects import DEFECTS, TURNS, Defect, find_defect, switched_on
from lowtide.engine.device_allocator.arena import Arena
from lowtide.engine.processes import entered
from lowtide.engine.worker import Worker
from lowtide.leakcheck.cli import defects as module
from lowtide.leakcheck.cli.defects import Verified, VerifiedRun, table, verify
from lowtide.leakcheck.lives.lifecycle import LifecycleRun, TargetLife
from lowtide.leakcheck.targets.reference import FixedReference
from lowtide.probes.device.driver import NoDriver
from lowtide.reports.schema import Finding, Remedy, Return, Subject

# Each of them lives in processes of its own, which takes its time on a busy machine.
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

ON_CPU = [name for name, defect in DEFECTS.items() if "cpu" in defect.devices]
_APART = {"tensor_parallel_size", "engine_process", "enable_prefix_caching"}
TWIN_OF_ITS_OWN = [name for name in ON_CPU if _APART & DEFECTS[name].settings.keys()]
IN_CORE = (
    "accelerator-on-cpu",
    "shutdown-noop",
    "workspace-views",
    "block-table-contents",
    "wake-oom",
    "undrained-offload",
    "encoder-cache",
    "sync-of-nothing",
    "lora-pile",
    "request-map",
    "cycle-per-request",
)
"""Those that are run with the core in a process of its own, too."""

# Loads what every run loads, once, and makes a process of its own for each.
FORKING = """
import os, sys, traceback
import lowtide.leakcheck.cli.commands, lowtide.leakcheck.lives.lifecycle, lowtide.leakcheck.targets.reference

for line in sys.stdin:
    said, *arguments = line.rstrip("\\n").split("\\t")
    child = os.fork()
    if not child:
        said = os.open(said, os.O_WRONLY | os.O_CREAT)
        for stream in (1, 2):
            os.dup2(said, stream)
        sys.argv[1:] = arguments
        try:
            lowtide.leakcheck.cli.commands.main()
        except SystemExit:
            pass
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
    print("ended", flush=True)
"""


class Forking:
    """Stands for `subprocess`: runs `python -m lowtide` in a copy of a process that has loaded it already."""

    TimeoutExpired = subprocess.TimeoutExpired

    def __init__(self, folder: Path) -> None:
        self._said = folder / "said"
        env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
        self._server = subprocess.Popen(
            [sys.executable, "-c", FORKING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )

    def run(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert command[:3] == [sys.executable, "-m", "lowtide"]
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._said.unlink(missing_ok=True)
        print(self._said, *command[3:], sep="\t", file=self._server.stdin, flush=True)
        assert self._server.stdout.readline() == "ended\n"
        return subprocess.CompletedProcess(command, 0, self._said.read_text(), "")

    def close(self) -> None:
        self._server.communicate()


@pytest.fixture(scope="module")
def verified(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Verified]:
    """Two lives with each bug, in processes of their own as a user's are; the twins are one engine with everything."""
    # Before the others are there, which are child processes of this one.
    real, twin = module._run, clean_twin()
    forking = Forking(tmp_path_factory.mktemp("forking"))

    def run_one(defect: Defect, device: str, is_twin: bool, in_core: bool) -> VerifiedRun:
        return twin if is_twin and defect.name not in TWIN_OF_ITS_OWN else real(defect, device, is_twin, in_core)

    with pytest.MonkeyPatch.context() as patched, closing(forking):
        patched.setattr(module, "_run", run_one)
        patched.setattr(module, "subprocess", forking)
        return {item.defect.name: item for item in verify([DEFECTS[name] for name in ON_CPU], "cpu", jobs=1)}


@pytest.fixture(scope="module")
def verified_in_core(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Verified]:
    """Two lives with each bug in the core's own process; the twins are one engine with everything."""
    real, twin = module._run, clean_twin_in_core()
    forking = Forking(tmp_path_factory.mktemp("forking"))

    def run_one(defect: Defect, device: str, is_twin: bool, in_core: bool) -> VerifiedRun:
        return twin if is_twin else real(defect, device, is_twin, in_core)

    with pytest.MonkeyPatch.context() as patched, closing(forking):
        patched.setattr(module, "_run", run_one)
        patched.setattr(module, "subprocess", forking)
        found = list(verify([DEFECTS[name] for name in IN_CORE], "cpu", jobs=1, in_core=True))
    return {item.defect.name: item for item in found}


def clean_twin_in_core() -> VerifiedRun:
    """Two lives of an engine with all that the bugs need in its core's process, and with what makes them show."""
    config = EngineConfig(engine_process=True)
    for name in IN_CORE:
        config = DEFECTS[name].configure(config, twin=True)
    make = lambda: TargetLife(lambda: FixedReference(config))  # noqa: E731
    run = LifecycleRun("twin", make, device="cpu", driver=NoDriver("a test"), cycles=2, turns=TURNS)
    return VerifiedRun(run.run(), 1.0, "")


def clean_twin() -> VerifiedRun:
    """Two lives of an engine with all that any of the bugs of one process needs, and with what makes them show."""
    defects = [DEFECTS[name] for name in ON_CPU if name not in TWIN_OF_ITS_OWN]
    config = EngineConfig(**{key: value for defect in defects for key, value in defect.settings.items()})
    make = lambda: TargetLife(lambda: FixedReference(config))  # noqa: E731
    with ExitStack() as stack:
        for defect in defects:
            stack.enter_context(defect.trigger())
        run = LifecycleRun("twin", make, device="cpu", driver=NoDriver("a test"), cycles=2, turns=TURNS)
        return VerifiedRun(run.run(), 1.0, "")


def is_a_bound_method_in_a_cache(findings: tuple[Finding, ...]) -> None:
    (found,) = findings
    assert (found.resource, found.cause, found.stage) == ("tensors", "lru-cache", "create")
    assert found.holder == "lowtide.engine.runner.supports_kw (lru_cache key)"
    assert [hop.edge for hop in found.path[:5]] == [
        "lowtide.engine.runner",
        ".supports_kw",
        "lru_cache key",
        "[0]",
        ".__self__",
    ]
    assert found.remedy is not None
    assert found.remedy.action == "lowtide.engine.runner.supports_kw.cache_clear()"
    assert found.remedy.returns_bytes == found.bytes


def is_a_shutdown_that_ends_early(findings: tuple[Finding, ...]) -> None:
    errors = [found for found in findings if found.resource == "teardown"]
    assert errors
    # What it says besides is torch's: that there is no accelerator, or no driver where it was built for cards.
    assert all("RuntimeError: " in found.message for found in errors)
    skipped = [found for found in findings if found.resource != "teardown"]
    # The host's copy of the weights and the transfer ring come after it too.
    assert {found.resource for found in skipped} == {"tensors", "host-memory"}
    assert "engine._core.worker.model_runner" in {found.holder for found in skipped}


def is_everything_that_the_engine_holds(findings: tuple[Finding, ...]) -> None:
    assert {(found.resource, found.cause) for found in findings} == {("tensors", "instance-attribute")}
    # What its model runner holds is one thing: none of its attributes was let go of.
    assert "engine._core.worker.model_runner" in {found.holder for found in findings}
    assert all(found.remedy is not None and found.remedy.returns_bytes == found.bytes for found in findings)


def is_a_frozen_heap(findings: tuple[Finding, ...]) -> None:
    frozen, tensors = findings
    assert frozen.resource == "gc-frozen"
    assert frozen.remedy is not None
    assert frozen.remedy.action == "gc.unfreeze(); gc.collect()"
    assert (tensors.resource, tensors.verdict, tensors.stage) == ("tensors", "frozen-garbage", "create")
    assert tensors.path == ()
    assert tensors.holder == "the heap frozen by gc.freeze()"
    assert tensors.remedy is not None
    assert (tensors.remedy.action, tensors.remedy.returns_bytes) == ("gc.unfreeze(); gc.collect()", tensors.bytes)


def is_memory_of_a_transport(findings: tuple[Finding, ...]) -> None:
    (found,) = findings
    # That of both lives.
    assert (found.resource, found.cause, found.bytes) == ("host-memory", "native", 128 << 20)
    assert (found.holder or "").startswith("kv transport at 0x")
    assert found.advice == "release or deregister the memory before shutdown ends"


def is_patched_functions(findings: tuple[Finding, ...]) -> None:
    names = {"torch.accelerator.synchronize", "torch.accelerator.empty_cache"}
    assert {found.holder for found in findings} == names
    assert {(found.resource, found.cause) for found in findings} == {("globals", "not-restored")}
    # Of the other one the original has no name any more.
    returned = [found.remedy.action for found in findings if found.remedy]
    assert returned == ["torch.accelerator.empty_cache = torch.accelerator.memory.empty_cache"]
    (advice,) = [found.advice for found in findings if not found.remedy]
    assert advice == "putting torch.accelerator.synchronize back: tried, it returns it"


def is_a_process_group(findings: tuple[Finding, ...]) -> None:
    (found,) = findings
    assert (found.resource, found.cause, found.count) == ("process-groups", "not-restored", 1)
    assert found.remedy is not None
    assert (found.holder or "").partition(" ")[2] == "(gloo, 1 rank)"
    assert found.remedy.action == "torch.distributed.destroy_process_group()"


def is_a_view_of_an_old_workspace(findings: tuple[Finding, ...]) -> None:
    assert findings
    for found in findings:
        assert (found.resource, found.cause, found.stage) == ("tensors", "instance-attribute", "infer")
        assert (found.holder or "").startswith("engine._core.worker.model_runner._workspaces[")
        assert "._views" in (found.holder or "")
        # The engine goes on, so that it is not tried.
        assert found.advice == f"let go of {found.holder} before the engine sleeps"


def is_a_lost_block_table(findings: tuple[Finding, ...]) -> None:
    (found,) = findings
    assert (found.resource, found.cause, found.stage) == ("contents", "not-restored", "wake")
    assert found.holder == "block_table.table_ptrs, block_table.table_sizes, block_table.table_strides"
    assert (found.count, found.bytes) == (3, 20)
    assert (found.advice or "").startswith("what lies in arena 'kv_cache' is lost in a sleep: put it where")


def is_blocks_of_an_offload(findings: tuple[Finding, ...]) -> None:
    (found,) = findings
    assert (found.resource, found.cause, found.stage) == ("kv-blocks", "pending-transfer", "infer")
    assert (found.holder, found.count >= 1) == ("pending transfers", True)
    assert found.remedy is not None
    assert found.remedy.action == "engine.step()"


def is_an_arena_half_mapped(findings: tuple[Finding, ...]) -> None:
    (found,) = findings
    assert (found.resource, found.cause, found.stage) == ("arena", "not-restored", "wake")
    assert found.holder == "arena 'weights'"
    assert found.bytes > 4 << 20
    assert found.advice == "where wake fails, unmap what it has mapped before it raises"


def is_a_rank_that_stays_awake(findings: tuple[Finding, ...]) -> None:
    beside_its_peer, on_its_own = sorted(findings, key=lambda found: found.stage)
    for found, stage in ((beside_its_peer, "sleep(1)"), (on_its_own, "sleep(2)")):
        assert (found.resource, found.cause, found.stage) == ("arena", "unknown", stage)
        assert found.process is not None
        assert found.process.name == "lowtide::Wo_TP1"
        # Its KV cache, and its half of the weights.
        assert found.bytes > (64 << 20) + (2 << 20)
    assert beside_its_peer.advice == "let sleep(1) reach that rank as it reaches the others"
    assert on_its_own.holder == "arena 'kv_cache'"


def is_an_encoder_cache(findings: tuple[Finding, ...]) -> None:
    (found,) = findings
    assert (found.resource, found.cause, found.stage) == ("tensors", "instance-attribute", "infer")
    # One image for each prompt, of which two are equal.
    assert (found.count, found.bytes) == (7, 7 * (128 << 10))
    assert (found.holder or "").endswith(".worker.model_runner.encoder_cache.outputs")
    assert found.advice == f"let go of {found.holder} before the engine sleeps"


def is_an_update_that_moves_nothing(findings: tuple[Finding, ...]) -> None:
    (found,) = findings
    assert (found.resource, found.cause, found.stage) == ("contents", "not-restored", "update_weights")
    # Norms are ones in both versions.
    said = "update_weights moved nothing: 30 of 39 weights are what the engine had before: model.embed_tokens.weight, "
    assert found.message.startswith(said)


def is_a_pile_of_adapters(findings: tuple[Finding, ...]) -> None:
    (found,) = findings
    assert (found.resource, found.cause, found.stage) == ("tensors", "instance-attribute", "update_weights")
    assert (found.trend, found.count, found.bytes) == ("growth", 5, 5 * (32 << 10))
    assert (found.holder or "").endswith("_core.worker.model_runner.lora_adapters.loaded")


def is_a_bucket_that_stays_open(findings: tuple[Finding, ...]) -> None:
    (found,) = findings
    assert (found.resource, found.stage, found.trend) == ("shared-memory", "update_weights", "growth")
    assert found.process is not None
    assert found.process.name == "lowtide::Engine"
    assert found.count == 5
    assert "mappings of /memfd:lowtide-weights (deleted), which nobody else maps" in found.message


def is_a_core_that_runs_on(findings: tuple[Finding, ...]) -> None:
    (found,) = findings
    assert (found.resource, found.cause, found.stage, found.count) == ("processes", "unknown", "shutdown", 2)
    assert found.process is not None
    assert found.process.name == "lowtide::Engine"
    cores = re.findall(
        r"pid (\d+) \(lowtide::Engine\) runs on and holds (\d+)\.\d MiB on the host; 68\.\d MiB", found.message
    )
    assert len(cores) == 2
    assert all(int(size) > 68 for _, size in cores)
    ending = f"; now: kill {' '.join(pid for pid, _ in cores)}"
    assert (found.advice or "").endswith(ending)
    # The run that has left them has ended them.
    assert not any(Path(f"/proc/{pid}").exists() for pid, _ in cores)


def is_a_file_of_the_dead(findings: tuple[Finding, ...]) -> None:
    (found,) = findings
    assert (found.resource, found.cause, found.stage, found.bytes) == ("shared-memory", "unknown", "shutdown", 16 << 20)
    paths = (found.holder or "").split(", ")
    assert len(paths) == 2
    for path in paths:
        assert re.fullmatch(r"/dev/shm/vllm_offload_\S+\.mmap", path)
        assert f"{path} (8.0 MiB, made by vLLM's KV offloading)" in found.message
        assert f"rm -- {path}" in (found.advice or "")
        assert not Path(path).exists()


def grows(holder: str, *, entries: str = "") -> Callable[[tuple[Finding, ...]], None]:
    """Return what checks that a container of the engine is told, and of what it has more."""

    def check(findings: tuple[Finding, ...]) -> None:
        (found,) = findings
        assert (found.resource, found.cause, found.trend) == ("host-memory", "instance-attribute", "growth")
        assert found.holder == holder
        assert f" in each of {TURNS - 5} inferences, " in found.message
        assert f" of {entries}" in found.message

    return check


def is_memory_of_c(findings: tuple[Finding, ...]) -> None:
    (found,) = findings
    assert (found.resource, found.cause, found.trend) == ("host-memory", "native", "growth")
    # 64 KiB with each of eight prompts.
    each = re.search(r" over 23 inferences, (\S+) KiB with each", found.message)
    assert each is not None
    assert 500 < float(each[1]) < 800
    assert "what C holds by a reference too many included" in (found.advice or "")


def is_nothing(findings: tuple[Finding, ...]) -> None:
    assert findings == ()


def is_a_cycle_of_requests(findings: tuple[Finding, ...]) -> None:
    (found,) = findings
    assert (found.resource, found.cause, found.holder) == ("host-memory", "cycle", "Request.omni_data")
    assert found.bytes >= 16 << 20
    assert found.remedy is not None
    assert (found.remedy.action, found.remedy.returns_bytes) == ("gc.collect()", found.bytes)


EXPECTED: dict[str, Callable[[tuple[Finding, ...]], None]] = {
    "bound-method-cache": is_a_bound_method_in_a_cache,
    "frozen-heap": is_a_frozen_heap,
    "accelerator-on-cpu": is_a_shutdown_that_ends_early,
    "accelerator-patched": is_patched_functions,
    "shutdown-noop": is_everything_that_the_engine_holds,
    "process-group": is_a_process_group,
    "workspace-views": is_a_view_of_an_old_workspace,
    "block-table-contents": is_a_lost_block_table,
    "wake-oom": is_an_arena_half_mapped,
    "rank-keeps": is_a_rank_that_stays_awake,
    "worker-keeps-everything": is_everything_that_the_engine_holds,
    "undrained-offload": is_blocks_of_an_offload,
    "transport-registration": is_memory_of_a_transport,
    "encoder-cache": is_an_encoder_cache,
    "sync-of-nothing": is_an_update_that_moves_nothing,
    "lora-pile": is_a_pile_of_adapters,
    "ipc-double-open": is_a_bucket_that_stays_open,
    "orphan-core": is_a_core_that_runs_on,
    "core-ignores-shutdown": is_a_core_that_runs_on,
    "shared-memory-of-the-dead": is_a_file_of_the_dead,
    "frozen-list": grows("engine._core.scheduler.kv_cache_manager.new_block_ids", entries="int"),
    "request-map": grows("engine._core.scheduler.seq_id_to_seq_group", entries="lowtide.engine.request.Request"),
    "aborted-outputs": grows("engine.completed_outputs", entries="concurrent.futures._base.Future"),
    "native-refcount": is_memory_of_c,
    "arena-fragmentation": is_nothing,
    "cycle-per-request": is_a_cycle_of_requests,
}


def test_every_defect_of_a_cpu_is_expected_here() -> None:
    assert list(EXPECTED) == ON_CPU


@pytest.mark.parametrize("name", EXPECTED)
def test_a_defect_is_found_and_named(name: str, verified: dict[str, Verified]) -> None:
    item = verified[name]
    assert item.note == ""
    assert item.bug is not None
    assert item.bug.subject is not None
    assert item.bug.subject.outcome == ("leak" if item.defect.expected else "clean")
    # It is no leak, and a user sees the memory all the same.
    assert (name == "arena-fragmentation") == ("came back at malloc_trim: no leak" in item.bug.subject.reason)
    EXPECTED[name](item.bug.subject.findings)


@pytest.mark.parametrize("name", ["frozen-heap", *TWIN_OF_ITS_OWN])
def test_without_any_of_the_defects_nothing_is_found(name: str, verified: dict[str, Verified]) -> None:
    twin = verified[name].twin
    assert twin is not None
    assert twin.subject is not None
    assert (twin.subject.outcome, twin.subject.findings) == ("clean", ())
    assert all("nothing grows over" in said for said in [twin.subject.reason] if said)


@pytest.mark.parametrize("name", IN_CORE)
def test_a_defect_of_a_core_in_another_process_is_found_there(name: str, verified_in_core: dict[str, Verified]) -> None:
    item = verified_in_core[name]
    assert item.note == ""
    assert item.bug is not None
    assert item.bug.subject is not None
    findings = item.bug.subject.findings
    if name == "accelerator-on-cpu":
        # What was skipped went with the process.
        assert [found.resource for found in findings] == ["teardown"]
    elif name == "encoder-cache":
        is_an_encoder_cache(findings)
    elif name == "undrained-offload":
        is_blocks_of_an_offload(findings)
    elif name == "shutdown-noop":
        assert item.bug.subject.outcome == "clean"
    elif name == "block-table-contents":
        is_a_lost_block_table(findings)
        (found,) = findings
        assert found.process is not None
        assert found.process.name == "lowtide::Engine"
    elif name == "sync-of-nothing":
        # What was sent is known here, and asked of the core.
        (found,) = findings
        assert (found.resource, found.cause, found.stage) == ("contents", "not-restored", "update_weights")
    else:
        (found,) = findings
        assert found.process is not None
        assert found.process.name == "lowtide::Engine"
        # Of two workspaces of one size either is named.
        holders = {
            "wake-oom": r"arena 'weights'",
            "workspace-views": r"\._workspaces\[[01]\]\._views\[0\]",
            "lora-pile": r"\.lora_adapters\.loaded",
            "request-map": r"\.scheduler\.seq_id_to_seq_group",
            "cycle-per-request": r"^Request\.omni_data",
        }
        assert re.search(f"{holders[name]}$", found.holder or "")


def test_without_a_defect_in_the_core_nothing_is_found(verified_in_core: dict[str, Verified]) -> None:
    twin = verified_in_core["wake-oom"].twin
    assert twin is not None
    assert twin.subject is not None
    assert (twin.subject.outcome, twin.subject.findings) == ("clean", ())
    assert "nothing grows over" in twin.subject.reason


def test_the_processes_of_an_engine_get_the_bug_and_those_of_its_twin_what_makes_it_show() -> None:
    alone, several = EngineConfig(), EngineConfig(engine_process=True, process_extensions=("own:extension=1",))
    defect = find_defect("wake-oom")
    assert defect.configure(alone).process_extensions == ()
    bug, twin = defect.configure(several), defect.configure(several, twin=True)
    assert bug.process_extensions == ("own:extension=1", "lowtide.engine.defects:switched_on=wake-oom")
    assert twin.process_extensions == ("own:extension=1", "lowtide.engine.defects:triggered=wake-oom")
    wake, map_part = Worker.wake, Arena.map_part
    with entered(twin.process_extensions[1:]):
        assert (Worker.wake is wake, Arena.map_part is map_part) == (True, False)
    with entered(bug.process_extensions[1:]):
        assert (Worker.wake is wake, Arena.map_part is map_part) == (False, False)
    with pytest.raises(ConfigError, match="there is no defect 'no-such'"):
        switched_on("no-such")


def test_a_defect_of_another_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="'never-release' cannot show on cpu: use --device cuda"):
        find_defect("never-release").configure(EngineConfig(device="cpu"))


# --- what verifying says ------------------------------------------------------------------------------------------

BUG = DEFECTS["bound-method-cache"]


def finding(resource: str = "tensors", cause: str = "lru-cache") -> Finding:
    return Finding(
        resource=resource,  # type: ignore[arg-type]
        cause=cause,  # type: ignore[arg-type]
        bytes=1 << 20,
        count=1,
        device="cpu",
        stage="create",
        message="m",
        fingerprint="0" * 16,
        holder="cache|d",
    )


def run(*findings: Finding, returns: tuple[Return, ...] = ()) -> VerifiedRun:
    outcome = "leak" if findings else "clean"
    return VerifiedRun(Subject(id="run", outcome=outcome, findings=findings, returns=returns), 1.0, "")  # type: ignore[arg-type]


def verified_with(
    monkeypatch: pytest.MonkeyPatch, bug: VerifiedRun, twin: VerifiedRun, defect: str = "bound-method-cache"
) -> Verified:
    monkeypatch.setattr(module, "_run", lambda defect, device, is_twin, in_core: twin if is_twin else bug)
    (item,) = verify([DEFECTS[defect]], "cuda" if defect == "late-release" else "cpu")
    return item


@pytest.mark.parametrize(
    ("bug", "twin", "note"),
    [
        (run(finding()), run(), ""),
        (run(finding(), finding()), run(), ""),
        (run(), run(), "WRONG: expected tensors/lru-cache, found nothing"),
        (run(finding(cause="closure")), run(), "WRONG: expected tensors/lru-cache, found tensors/closure"),
        (
            run(finding(), finding("threads", "thread")),
            run(),
            "WRONG: expected tensors/lru-cache, found tensors/lru-cache, threads/thread",
        ),
        (run(finding()), run(finding()), "WRONG: without it there is leak"),
        (VerifiedRun(None, 1.0, "x\nno report"), run(), "could not be measured: no report"),
        (run(finding()), VerifiedRun(None, 1.0, ""), "could not be measured: no output"),
    ],
)
def test_a_run_is_compared_with_what_must_be(
    monkeypatch: pytest.MonkeyPatch, bug: VerifiedRun, twin: VerifiedRun, note: str
) -> None:
    assert verified_with(monkeypatch, bug, twin).note == note


def test_the_table_names_holder_and_remedy_and_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = table([verified_with(monkeypatch, run(finding()), run())])
    assert lines[2] == "| `bound-method-cache` | vllm#38503 | `tensors`/`lru-cache` | `cache\\|d` |  | cpu, 1 s |"
    wrong = table([verified_with(monkeypatch, run(), run())])[2]
    assert wrong.endswith("| clean |  |  | WRONG: expected tensors/lru-cache, found nothing |")


def test_of_many_actions_the_first_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for action, reported in [("a(); b()", "`a(); b()`: 1.0 MiB"), ("a(); b(); c()", "`a()` and 2 more: 1.0 MiB")]:
        remedied = msgspec.structs.replace(finding(), remedy=Remedy(action=action, returns_bytes=1 << 20))
        assert f"| {reported} |" in table([verified_with(monkeypatch, run(remedied), run())])[2]


def test_what_ended_early_is_no_clean_run_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    early = VerifiedRun(Subject(id="run", outcome="error", reason="infer raised"), 1.0, "")
    assert "| nothing concluded: infer raised |" in table([verified_with(monkeypatch, early, run())])[2]


def test_a_late_release_is_clean_with_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    late = Return(resource="driver", device="cuda:0", stage="shutdown", cycle=1, bytes=1, rung="settle", seconds=2.04)
    item = verified_with(monkeypatch, run(returns=(late,)), run(), "late-release")
    assert item.note == ""
    assert "| clean: back after 2.0 s |" in table([item])[2]


def test_what_needs_a_card_is_not_run_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_run", lambda *_: pytest.fail("it was run"))
    (item,) = verify([DEFECTS["never-release"]], "cpu")
    assert (item.device, item.bug, item.note) == ("", None, "needs a card")


def test_what_needs_two_cards_is_not_run_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_run", lambda *_: pytest.fail("it was run"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    (item,) = verify([DEFECTS["nccl-kept"]], "cuda")
    assert (item.device, item.bug, item.note) == ("", None, "needs 2 cards")


def test_bugs_that_need_the_same_engine_share_its_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, bool]] = []

    def run_one(defect: Defect, device: str, is_twin: bool, in_core: bool) -> VerifiedRun:
        asked.append((defect.name, is_twin))
        return run()

    monkeypatch.setattr(module, "_run", run_one)
    names = ("shutdown-noop", "worker-keeps-everything", "frozen-heap", "request-map", "native-refcount")
    list(verify([DEFECTS[name] for name in names], "cpu"))
    # That of those which take many inferences makes as many.
    assert sorted(name for name, is_twin in asked if is_twin) == ["frozen-heap", "request-map", "shutdown-noop"]


def test_a_defect_is_gone_when_its_context_ends() -> None:
    for defect in DEFECTS.values():
        replaced = {key: vars(key[0])[key[1]] for key in _watched()}
        with defect.switched_on():
            during = {key: vars(key[0])[key[1]] for key in _watched()}
        assert {key: vars(key[0])[key[1]] for key in _watched()} == replaced
        assert during != replaced or defect.name == "accelerator-patched"


def _watched() -> list[tuple[type, str]]:
    """Everything in the engine's modules and classes that a defect could replace."""
    names = [name for name in sys.modules if name.startswith("lowtide.engine.") and name != "lowtide.engine.defects"]
    modules = [sys.modules[name] for name in sorted(names)]
    return [(item, name) for item in modules for name in vars(item) if not name.startswith("__")] + [  # type: ignore[misc]
        (cls, name)
        for item in modules
        for cls in vars(item).values()
        if isinstance(cls, type) and cls.__module__ == item.__name__
        for name in vars(cls)
        if callable(vars(cls)[name])
    ]
