"""The settings of one engine, checked before any memory is taken."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from lowtide.engine.config.checks import int_between, one_of, positive_int
from lowtide.engine.config.hf import read_model_config
from lowtide.engine.config.model import DTYPES, PRESETS, ModelConfig
from lowtide.engine.errors import CheckpointError, ConfigError

_MIB = 1 << 20
_GIB = 1 << 30
_PRESET_KV_CACHE_BYTES: Mapping[str, int] = MappingProxyType({"tiny": 64 * _MIB, "1b": _GIB, "8b": 8 * _GIB})
_FOLDER_KV_CACHE_BYTES = _GIB


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one engine.

    Attributes:
        model: name of a preset, or path of a Hugging Face checkpoint folder.
        device: `cpu`, `cuda` or `cuda:N`.
        seed: of the presets' random weights, and of requests that bring no seed.
        dtype: in place of the model's own.
        block_size: tokens per KV block.
        num_blocks: KV blocks in the cache; None takes as many as `kv_cache_bytes` holds.
        kv_cache_bytes: size of the KV cache; None is 64 MiB for `tiny`, 8 GiB for `8b`, else 1 GiB.
        max_num_seqs: requests that run at the same time.
        max_num_batched_tokens: tokens that one step computes; longer prompts are computed in chunks.
        max_model_len: prompt and output tokens of one request; None takes what the model and the KV cache allow.
        num_micro_batches: parts that a step's batch is split into, each with its own workspace.
        enable_prefix_caching: whether requests share the KV blocks of equal prefixes.
        keep_host_copy: whether the host memory of a level 1 sleep is kept, pinned, while the engine runs, so that the
            next sleep copies at the full rate of the bus. Costs host memory of the size of the weights.
        kv_offload_bytes: host memory for copies of full KV blocks, from which prefixes that the device no longer has
            come back; 0 is no offload.
        freeze_heap: whether what lives as long as the engine is taken out of the garbage collector's way, from create
            to shutdown.
        process_group: whether the engine has a process group of its own (gloo, or NCCL on a card).
        kv_transport_bytes: native host memory registered for sending KV blocks to a peer; 0 is none.
        poison_pages: whether pages that are mapped at a wake are filled with 0xA5 first, so that contents that nobody
            restores cannot pass for zeros.
        cuda_graphs: whether steps that compute one token of each request run as CUDA graphs, captured at create for
            batches of 1, 2, 4, 8, ... `max_num_seqs`. Needs a card, Triton, and one micro-batch.
        tensor_parallel_size: ranks that have a part of the model each, and a process of its own each. The KV cache's
            sizes are then those of one rank. On cards, rank 0 takes the one that `device` names, and the others the
            next ones.
        engine_process: whether the core (scheduler, worker, all memory) has a process of its own, as vLLM's has by
            default.
        process_extensions: what the engine's processes enter before they create anything, each as
            `module:function=argument`; see `processes/extensions.py`.

    Raises:
        ConfigError: a value that cannot work; names the field and what is allowed.
    """

    model: str = "tiny"
    device: str = "cpu"
    seed: int = 0
    dtype: str | None = None
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    num_micro_batches: int = 1
    enable_prefix_caching: bool = True
    keep_host_copy: bool = True
    kv_offload_bytes: int = 0
    freeze_heap: bool = False
    process_group: bool = False
    kv_transport_bytes: int = 0
    poison_pages: bool = False
    cuda_graphs: bool = False
    tensor_parallel_size: int = 1
    engine_process: bool = False
    process_extensions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError(
                f"model is empty; give a preset ({', '.join(PRESETS)}) or the path of a checkpoint folder"
            )
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise ConfigError(f"device {self.device!r} is not known; allowed are cpu, cuda and cuda:N")
        if self.dtype is not None:
            one_of("dtype", self.dtype, DTYPES)
        int_between("seed", self.seed, 0, 2**63 - 1)
        int_between("kv_transport_bytes", self.kv_transport_bytes, 0, 2**40)
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens"):
            positive_int(name, getattr(self, name))
        for name in ("num_blocks", "kv_cache_bytes", "max_model_len"):
            if getattr(self, name) is not None:
                positive_int(name, getattr(self, name))
        int_between("num_micro_batches", self.num_micro_batches, 1, 2)
        if self.num_blocks is not None and self.kv_cache_bytes is not None:
            raise ConfigError("num_blocks and kv_cache_bytes both size the KV cache; give one of them")
        int_between("kv_offload_bytes", self.kv_offload_bytes, 0, 2**63 - 1)
        if self.kv_offload_bytes and not self.enable_prefix_caching:
            raise ConfigError(
                "kv_offload_bytes needs enable_prefix_caching: a block on the host is found by its prefix alone"
            )
        if self.cuda_graphs and self.num_micro_batches != 1:
            raise ConfigError(
                f"cuda_graphs takes a step as one batch, and num_micro_batches is {self.num_micro_batches}; set it to 1"
            )

        int_between("tensor_parallel_size", self.tensor_parallel_size, 1, 64)
        if self.process_extensions and not self.works_elsewhere:
            raise ConfigError(
                "process_extensions are for the engine's other processes, and this engine has none: "
                "set engine_process, or tensor_parallel_size above 1"
            )
        if self.tensor_parallel_size > 1:
            for name in ("cuda_graphs", "kv_offload_bytes"):
                if getattr(self, name):
                    raise ConfigError(f"{name} does not work with tensor_parallel_size above 1: leave one of them off")

    @property
    def works_elsewhere(self) -> bool:
        """Whether the model is in other processes than the engine's user: in a core's, or the ranks'."""
        return self.engine_process or self.tensor_parallel_size > 1

    @property
    def kv_cache_budget(self) -> int:
        """Bytes that the KV cache may take when `num_blocks` does not say."""
        if self.kv_cache_bytes is not None:
            return self.kv_cache_bytes
        return _PRESET_KV_CACHE_BYTES.get(self.model, _FOLDER_KV_CACHE_BYTES)


def load_model_config(config: EngineConfig) -> ModelConfig:
    """The shape of the model that `config` names, with its dtype override.

    Raises:
        CheckpointError: `config.model` is neither a preset nor a folder that can be read.
    """
    preset = PRESETS.get(config.model)
    if preset is None and not Path(config.model).is_dir():
        raise CheckpointError(
            f"{config.model} is neither a preset ({', '.join(PRESETS)}) nor a folder; "
            "give the path of a Hugging Face checkpoint folder"
        )
    model = preset or read_model_config(config.model)
    return model if config.dtype is None else replace(model, dtype=config.dtype)


def resolve_max_model_len(config: EngineConfig, model: ModelConfig, num_blocks: int) -> int:
    """Tokens that one request may span: the setting, or else the most that the model and the KV cache allow.

    Raises:
        ConfigError: the setting is beyond the model's positions or beyond the KV cache.
    """
    cache_tokens = num_blocks * config.block_size
    if config.max_model_len is None:
        return min(model.max_position_embeddings, cache_tokens)
    if config.max_model_len > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is beyond the model's "
            f"max_position_embeddings {model.max_position_embeddings}"
        )
    if config.max_model_len > cache_tokens:
        raise ConfigError(
            f"max_model_len {config.max_model_len} does not fit the KV cache of {num_blocks} blocks x "
            f"{config.block_size} tokens = {cache_tokens}; raise num_blocks or kv_cache_bytes"
        )
    return config.max_model_len
