"""Every defect that can show on a card is found there with stage, holder and remedy, and nothing else is.

Each runs in a process of its own, as a user's does, eight at a time: four minutes on two H100.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch

from lowtide.engine.defects import DEFECTS, LATE_BY
from lowtide.leakcheck.cli.defects import Verified, verify
from lowtide.reports.schema import Finding, Subject

pytestmark = [
    pytest.mark.cuda,
    # All runs are in one fixture.
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm card; torch sees none"),
]


class Told(NamedTuple):
    """What every finding of one resource says.

    Attributes:
        resource: of the findings.
        cause: theirs.
        stages: where they may be said to be from.
        holder: a pattern of their holder.
        remedy: a pattern of what gave them back, or else of the advice; None for neither.
        message: a pattern of what their message has, too.
    """

    resource: str
    cause: str
    stages: tuple[str, ...]
    holder: str | None
    remedy: str | None
    message: str = ""


TABLES = r"block_table\.table_ptrs, block_table\.table_sizes, block_table\.table_strides"
UNFREEZE = r"gc\.unfreeze\(\); gc\.collect\(\)"
SETTING = r"torch\.accelerator\.\w+"
PART = r"engine\._core\.worker\..*"
LIVING = ("create", "infer")
ENDINGS = ("sleep(1)", "sleep(2)", "shutdown")
CORE = Told("processes", "unknown", ("shutdown",), None, "end .* in shutdown, and wait .*; now: kill .*")
GROWING = ("inferences",)
BOUND = "remove entries once they are no longer needed, or bound the container"
CONTAINER = ("host-memory", "instance-attribute", GROWING)
SET = rf"{PART} = None.*|for name in .*: setattr\({PART}, name, None\)"
WHOLE_ENGINE = Told("tensors", "instance-attribute", LIVING, PART, SET)

EXPECTED: dict[str, Sequence[Told]] = {
    "bound-method-cache": [
        Told(
            "tensors",
            "lru-cache",
            ("create",),
            r"lowtide\.engine\.runner\.supports_kw \(lru_cache key\)",
            r"lowtide\.engine\.runner\.supports_kw\.cache_clear\(\)",
        )
    ],
    "frozen-heap": [
        Told("gc-frozen", "not-restored", ("shutdown",), None, UNFREEZE),
        Told(
            "tensors",
            "frozen-garbage",
            LIVING,
            r"the heap frozen by gc\.freeze\(\)",
            r"gc\.unfreeze\(\); gc\.collect\(\)",
        ),
    ],
    "accelerator-patched": [
        Told(
            "globals",
            "not-restored",
            ("shutdown",),
            SETTING,
            f"{SETTING} = .*|{SETTING}: keep what was there before, .*|keep what was there before, .*",
        )
    ],
    "shutdown-noop": [WHOLE_ENGINE],
    "process-group": [
        Told(
            "process-groups",
            "not-restored",
            ("shutdown",),
            r"0 \(.*nccl.*, 1 rank\), \w+ \(.*nccl.*, 1 rank\)",
            r"torch\.distributed\.destroy_process_group\(\)",
        )
    ],
    "late-release": [],
    "never-release": [
        Told(
            "driver",
            "driver",
            ("sleep(1)", "sleep(2)", "shutdown"),
            "the driver or native code",
            "give it back where .*",
        )
    ],
    "workspace-resize": [
        Told("reserved", "allocator-cache", ("infer",), "grow_workspace", r"torch\.cuda\.empty_cache\(\)")
    ],
    "workspace-views": [
        Told(
            "tensors",
            "instance-attribute",
            ("infer",),
            r"engine\._core\.worker\.model_runner\._workspaces\[.*\]\._views.*",
            "let go of engine.* before the engine sleeps",
        )
    ],
    "block-table-contents": [
        Told("contents", "not-restored", ("wake",), TABLES, "what lies in arena 'kv_cache' is lost in a sleep: .*")
    ],
    "block-table-moved": [Told("pointers", "cuda-graph", ("wake",), TABLES, "leave it at its address in wake, .*")],
    "wake-oom": [
        Told(
            "arena",
            "not-restored",
            ("wake",),
            "arena 'weights'",
            "where wake fails, unmap what it has mapped before it raises",
        )
    ],
    "unfreeze-too-late": [
        Told("reserved", "allocator-cache", ("shutdown",), "torch's caching allocator", r"torch\.cuda\.empty_cache\(\)")
    ],
    "worker-keeps-everything": [WHOLE_ENGINE],
    "undrained-offload": [Told("kv-blocks", "pending-transfer", ("infer",), "pending transfers", r"engine\.step\(\)")],
    "transport-registration": [
        Told(
            "pinned",
            "native",
            ("shutdown",),
            "kv transport at 0x.*",
            "release or deregister the memory before shutdown ends",
        )
    ],
    "encoder-cache": [
        Told(
            "tensors",
            "instance-attribute",
            ("infer",),
            r"engine\._core\.worker\.model_runner\.encoder_cache.*",
            "let go of engine.* before the engine sleeps",
        )
    ],
    "sync-of-nothing": [
        Told(
            "contents",
            "not-restored",
            ("update_weights",),
            None,
            "look where its parameters are looked up and copied: .*",
            "update_weights moved nothing",
        )
    ],
    "lora-pile": [
        Told(
            "tensors",
            "instance-attribute",
            ("update_weights",),
            r"engine\._core\.worker\.model_runner\.lora_adapters\.loaded",
            "let go in update_weights of what was sent, .*",
        )
    ],
    "ipc-counter": [
        Told(
            "cuda-ipc",
            "pending-transfer",
            ("shutdown",),
            None,
            None,
            r", exported by pid \d+; counter -1: freed by nobody",
        )
    ],
    "stranded-streams": [
        Told(
            "reserved",
            "allocator-cache",
            ("update_weights",),
            None,
            None,
            r" for \d+ streams that no longer exist, which \d+ calls of update_weights",
        )
    ],
    "orphan-core": [CORE],
    "core-ignores-shutdown": [CORE],
    "shared-memory-of-the-dead": [
        Told(
            "shared-memory",
            "unknown",
            ("shutdown",),
            r"/dev/shm/vllm_offload_.*\.mmap",
            "unlink shared memory when .*; now: rm -- .*",
        )
    ],
    "nccl-kept": [
        Told(
            "process-groups",
            "not-restored",
            ("sleep(2)",),
            r"0 \(.*nccl.*, 2 ranks\)",
            r"destroy its process groups in sleep\(2\) or suspend them .*",
        )
    ],
    "bridge-context": [
        Told(
            "driver",
            "driver",
            ("update_weights",),
            "a context of CUDA",
            r"call torch\.cuda\.set_device in that process .*",
        )
    ],
    "frozen-list": [Told(*CONTAINER, r"engine\._core\.scheduler\.kv_cache_manager\.new_block_ids", BOUND)],
    "request-map": [Told(*CONTAINER, r"engine\._core\.scheduler\.seq_id_to_seq_group", BOUND)],
    "aborted-outputs": [Told(*CONTAINER, r"engine\.completed_outputs", BOUND)],
    "native-refcount": [
        Told("host-memory", "native", GROWING, None, "look for .*, what C holds by a reference too many included: .*")
    ],
    "arena-fragmentation": [],
    "cycle-per-request": [Told("host-memory", "cycle", GROWING, r"Request\.omni_data", r"gc\.collect\(\)")],
    "pinned-rounding": [
        Told("pinned", "allocator-cache", ("shutdown",), "torch's cache of pinned memory", r".*_host_emptyCache.*")
    ],
    "pool-threshold": [
        Told(
            "driver",
            "allocator-cache",
            ("shutdown",),
            "the card's default stream-ordered memory pool, .*",
            r"cuda\.bindings\.runtime\.cudaMemPoolTrimTo\(.*\)",
        )
    ],
}
HERE = [name for name in EXPECTED if DEFECTS[name].cards <= max(1, torch.cuda.device_count())]
"""Those for which there are cards enough."""


@pytest.fixture(scope="module")
def verified() -> dict[str, Verified]:
    return {item.defect.name: item for item in verify([DEFECTS[name] for name in HERE], "cuda", jobs=8)}


def test_every_defect_of_a_card_is_expected_here() -> None:
    assert list(EXPECTED) == [name for name, defect in DEFECTS.items() if "cuda" in defect.devices]


def of_run(item: Verified) -> Subject:
    assert item.note == ""
    assert item.bug is not None
    assert item.bug.subject is not None, item.bug.output
    return item.bug.subject


def is_as_reported(finding: Finding, reported: Told) -> bool:
    way_out = finding.advice if finding.remedy is None else finding.remedy.action
    return (
        (finding.resource, finding.cause) == (reported.resource, reported.cause)
        and finding.stage in reported.stages
        and (reported.holder is None or re.fullmatch(reported.holder, finding.holder or "") is not None)
        and (reported.remedy is None or re.fullmatch(reported.remedy, way_out or "") is not None)
        and re.search(reported.message, finding.message) is not None
    )


@pytest.mark.parametrize("name", [name for name in HERE if EXPECTED[name]])
def test_a_defect_is_found_and_named_and_nothing_else_is(name: str, verified: dict[str, Verified]) -> None:
    subject = of_run(verified[name])
    assert subject.outcome == "leak"
    for finding in subject.findings:
        assert any(is_as_reported(finding, reported) for reported in EXPECTED[name]), finding
    for reported in EXPECTED[name]:
        assert any(is_as_reported(finding, reported) for finding in subject.findings), reported


@pytest.mark.parametrize("name", HERE)
def test_without_the_defect_nothing_is_found(name: str, verified: dict[str, Verified]) -> None:
    twin = verified[name].twin
    assert twin is not None
    assert twin.subject is not None, twin.output
    grows = "nothing grows over " if DEFECTS[name].turns else ""
    assert (twin.subject.outcome, twin.subject.findings) == ("clean", ())
    assert twin.subject.reason.startswith(grows) if grows else twin.subject.reason == ""


def test_what_the_driver_gives_back_late_is_clean_and_waited_for_no_longer_than_it_takes(
    verified: dict[str, Verified],
) -> None:
    subject = of_run(verified["late-release"])
    assert (subject.outcome, subject.findings) == ("clean", ())
    waited = [back.seconds for back in subject.returns if back.rung == "settle"]
    assert waited
    assert LATE_BY - 0.5 < max(waited) < LATE_BY + 0.5
