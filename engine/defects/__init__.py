"""Lifecycle bugs that happened elsewhere, each put back into this engine where it was there, by a context manager.

The engine itself knows nothing of them: a defect replaces one method for as long as its context lasts.  The processes
that the engine starts enter `switched_on`, `activated` or `triggered` as a process extension.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType

from lowtide.engine.defects import memory, processes, shutdowns, weight_updates
from lowtide.engine.defects.defect import Defect
from lowtide.engine.defects.memory import LATE_BY
from lowtide.engine.errors import ConfigError

__all__ = ["DEFECTS", "LATE_BY", "Defect", "activated", "find_defect", "switched_on", "triggered"]

DEFECTS: Mapping[str, Defect] = MappingProxyType(
    {
        defect.name: defect
        for defect in (
            Defect(
                "bound-method-cache",
                "vllm#38503",
                "a capability check is an `lru_cache` keyed by the model's bound `forward`, which keeps the model",
                shutdowns.bound_method_cache,
                (("tensors", "lru-cache"),),
                expected_in_core=(),
            ),
            Defect(
                "frozen-heap",
                "vllm#38503",
                "`gc.freeze()` at create, no `gc.unfreeze()` at shutdown: cycles that hold weights are never collected",
                shutdowns.frozen_heap,
                (("gc-frozen", "not-restored"), ("tensors", "frozen-garbage")),
                settings={"freeze_heap": True},
                expected_in_core=(),
            ),
            Defect(
                "accelerator-on-cpu",
                "vllm#41034",
                "the worker's shutdown waits for an accelerator that is not there, and what comes after it is skipped",
                shutdowns.accelerator_on_cpu,
                (
                    ("host-memory", "native"),
                    ("teardown", "unknown"),
                    ("tensors", "instance-attribute"),
                ),
                devices=("cpu",),
                lives=2,
                expected_in_core=(("teardown", "unknown"),),
            ),
            Defect(
                "accelerator-patched",
                "vllm#41034, the merged fix",
                "`torch.accelerator.synchronize` and `empty_cache` become no-ops for the whole process, for good",
                shutdowns.accelerator_patched,
                (("globals", "not-restored"),),
                expected_in_core=(),
            ),
            Defect(
                "shutdown-noop",
                "vllm#41034, first try",
                "the CPU model runner overrides shutdown with `pass`",
                shutdowns.shutdown_noop,
                (("tensors", "instance-attribute"),),
                expected_in_core=(),
            ),
            Defect(
                "process-group",
                "vllm#43023",
                "the process group and its store survive the shutdown: only the reference to it is dropped",
                shutdowns.process_group,
                (("process-groups", "not-restored"),),
                settings={"process_group": True},
                expected_in_core=(),
            ),
            Defect(
                "late-release",
                "vllm#43023 (ROCm)",
                "the driver gives memory back seconds after it was freed: no leak, but the next engine must wait",
                memory.late_release,
                (),
                devices=("cuda",),
            ),
            Defect(
                "never-release",
                "vllm#37533 (ROCm)",
                "memory is reported free and physically still there",
                memory.never_release,
                (("driver", "driver"),),
                devices=("cuda",),
            ),
            Defect(
                "workspace-resize",
                "vllm#39226",
                "a workspace that grows drops its buffer and takes a new one: twice its bytes stay reserved",
                memory.workspace_resize,
                (("reserved", "allocator-cache"),),
                # A workspace of more than a hundred MiB: more than anything else that torch has cached.
                settings={"model": "1b", "kv_cache_bytes": 2 << 30},
                devices=("cuda",),
                prompt_scale=60,
            ),
            Defect(
                "workspace-views",
                "vllm#39226 (DBO)",
                "one micro-batch's growth replaces every micro-batch's workspace; views keep the old storages",
                memory.workspace_views,
                (("tensors", "instance-attribute"),),
                # Where kernels decode, only later chunks of prompts gather keys and values in a workspace.
                settings={"num_micro_batches": 2, "max_num_batched_tokens": 24},
            ),
            Defect(
                "block-table-contents",
                "vllm#40648",
                "pointer, stride and size tensors lie in the KV cache's pages, which a sleep drops: contents undefined",
                memory.block_table_contents,
                (("contents", "not-restored"),),
                settings={"poison_pages": True},
            ),
            Defect(
                "block-table-moved",
                "vllm#40648, the merged fix",
                "those tensors are made anew at every wake: a captured graph still reads the old addresses",
                memory.block_table_moved,
                (("pointers", "cuda-graph"),),
                settings={"cuda_graphs": True},
                devices=("cuda",),
            ),
            Defect(
                "wake-oom",
                "vllm#34600",
                "out of memory half-way through a wake leaves the mapped half mapped",
                memory.wake_oom,
                (("arena", "not-restored"),),
                trigger=memory.no_room_in_the_first_wake,
            ),
            Defect(
                "unfreeze-too-late",
                "vllm 0.20",
                "`gc.unfreeze()` runs after the last collection and `empty_cache()`: what it frees stays reserved",
                shutdowns.unfreeze_too_late,
                (("reserved", "allocator-cache"),),
                settings={"freeze_heap": True, "cuda_graphs": True},
                devices=("cuda",),
            ),
            Defect(
                "rank-keeps",
                "sglang#28902, NeMo-RL#223",
                "a sleep does not reach one of two ranks, which keeps its weights and its KV cache",
                memory.rank_keeps,
                (("arena", "unknown"),),
                settings={"tensor_parallel_size": 2},
                # One card is what most machines have.
                devices=("cpu",),
            ),
            Defect(
                "worker-keeps-everything",
                "vllm#38503",
                "the worker's shutdown drops neither weights nor KV cache, rope table or workspaces",
                shutdowns.worker_keeps_everything,
                (("tensors", "instance-attribute"),),
                expected_in_core=(),
            ),
            Defect(
                "undrained-offload",
                "vllm#38503",
                "blocks of an async offload are given back by the next step only: `reset_prefix_cache()` is never True",
                shutdowns.undrained_offload,
                (("kv-blocks", "pending-transfer"),),
                settings={"kv_offload_bytes": 16 << 20},
            ),
            Defect(
                "transport-registration",
                "vllm#38503 (UCX/NIXL)",
                "memory registered with a native transport is never deregistered; torch's counters are clean",
                shutdowns.transport_registration,
                (("host-memory", "native"),),
                settings={"kv_transport_bytes": 64 << 20},
                expected_on_card=(("pinned", "native"),),
                lives=2,
                expected_in_core=(),
            ),
            Defect(
                "encoder-cache",
                "EasyR1#11002",
                "encoder outputs stay in the model runner's cache: they go only for want of room, and in no sleep",
                memory.encoder_cache_kept,
                (("tensors", "instance-attribute"),),
                trigger=memory.encoder_cache,
            ),
            Defect(
                "sync-of-nothing",
                "tokenspeed#1373",
                "an update of the weights says that it is done and moved nothing: no name was found, none was missed",
                weight_updates.sync_of_nothing,
                (("contents", "not-restored"),),
            ),
            Defect(
                "lora-pile",
                "peft#1639, ACE-Step#705",
                "each update brings a LoRA adapter under a new name, and those of the updates before are never removed",
                weight_updates.lora_pile,
                (("tensors", "instance-attribute"),),
                trigger=weight_updates.lora_adapters,
            ),
            Defect(
                "ipc-double-open",
                "sglang#17870",
                "the process that loads a bucket of weights opens it twice and closes it once: it stays mapped",
                weight_updates.ipc_double_open,
                (("shared-memory", "unknown"),),
                settings={"engine_process": True},
                # On a card a second import of one handle is the first one.
                devices=("cpu",),
            ),
            Defect(
                "ipc-counter",
                "vllm#51258, pytorch#149187",
                "the process that loads a bucket of weights opens and closes it twice: its counter falls below 0, and "
                "torch never frees it",
                weight_updates.ipc_counter,
                (("cuda-ipc", "pending-transfer"),),
                settings={"engine_process": True},
                devices=("cuda",),
            ),
            Defect(
                "stranded-streams",
                "vllm#52950",
                "each update takes the memory of its buckets on a new stream: torch keeps it for that stream alone",
                weight_updates.stranded_streams,
                (("reserved", "allocator-cache"),),
                devices=("cuda",),
            ),
            Defect(
                "orphan-core",
                "vllm#55510, vllm#55846",
                "the core's process takes no notice of its client's end, runs on and keeps all its memory",
                processes.orphan_core,
                (("processes", "unknown"),),
                settings={"engine_process": True},
                lives=2,
            ),
            Defect(
                "core-ignores-shutdown",
                "vllm#55510, the same from a client that lives",
                "the core confirms its shutdown, gives nothing up and does not end, and its client does not kill it",
                processes.core_ignores_shutdown,
                (("processes", "unknown"),),
                settings={"engine_process": True},
                lives=2,
            ),
            Defect(
                "shared-memory-of-the-dead",
                "vllm#51579",
                "a file of KV offloading in /dev/shm is removed in the core's shutdown only, and the core was killed",
                processes.shared_memory_of_the_dead,
                (("shared-memory", "unknown"),),
                settings={"engine_process": True},
                trigger=processes.core_with_an_offload_region,
                lives=2,
            ),
            Defect(
                "nccl-kept",
                "vllm#51485",
                "the ranks' communicators keep their buffers on each card while the engine sleeps",
                processes.nccl_kept,
                (("process-groups", "not-restored"),),
                settings={"tensor_parallel_size": 2},
                devices=("cuda",),
            ),
        )
    }
)


def find_defect(name: str) -> Defect:
    """The defect of that name; `ConfigError`: there is none; the message lists those there are."""
    try:
        return DEFECTS[name]
    except KeyError:
        raise ConfigError(f"there is no defect {name!r}: use one of {', '.join(DEFECTS)}") from None


def switched_on(name: str) -> AbstractContextManager[None]:
    """The defect of that name, and what makes it show, in this process."""
    return find_defect(name).switched_on()


def activated(name: str) -> AbstractContextManager[None]:
    """A bug alone, without what makes it show; `ConfigError`: there is no bug of that name."""
    return find_defect(name).activate()


def triggered(name: str) -> AbstractContextManager[None]:
    """What makes the defect of that name show, in this process, without the defect."""
    return find_defect(name).trigger()
