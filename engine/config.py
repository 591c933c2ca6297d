"""What an engine is built from: the model's shape and the engine's settings, checked before any memory is taken."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec
import torch

from lowtide.engine.errors import CheckpointError, ConfigError

Allocator: TypeAlias = Callable[[Sequence[int], torch.dtype], torch.Tensor]
"""Gives an uninitialised, contiguous tensor of a shape and dtype: how memory's owner lends it to those who use it."""


def one_of(name: str, value: str, allowed: Sequence[str] | Mapping[str, Any]) -> None:
    """Refuse a value that is not among those allowed."""
    if value not in allowed:
        raise ConfigError(f"{name} {value!r} is not supported; supported are {', '.join(allowed)}")


def positive(name: str, value: float) -> None:
    """Refuse a number that is not finite and above 0."""
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{name} {value} must be above 0")


def whole_number(name: str, value: object, low: int = 1, high: int | None = None) -> None:
    """Refuse what is no whole number from `low` to `high`, or of at least `low`."""
    is_one = isinstance(value, int) and not isinstance(value, bool) and low <= value
    if not is_one or (high is not None and value > high):  # type: ignore[operator]
        allowed = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise ConfigError(f"{name} {value!r} must be a whole number {allowed}")


DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
)
ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM")
ROPE_TYPES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    }
)
"""What each needs besides its base."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding; `factor` is of `linear` and `llama3`, the three fields after it of `llama3` alone."""

    theta: float = 10_000.0
    rope_type: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        one_of("rope_type", self.rope_type, ROPE_TYPES)
        positive("rope_theta", self.theta)
        positive("rope factor", self.factor)
        positive("original_max_position_embeddings", self.original_max_position_embeddings)
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ConfigError(
                f"rope low_freq_factor {self.low_freq_factor} must be above 0 and below "
                f"high_freq_factor {self.high_freq_factor}"
            )


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a Llama-family decoder, as Hugging Face's config.json gives it.

    `attention_bias` is the bias of the q, k and v projections, `attention_output_bias` that of the o projection.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"

    def __post_init__(self) -> None:
        one_of("architecture", self.architecture, ARCHITECTURES)
        one_of("dtype", self.dtype, DTYPES)
        for each in fields(self):
            if each.type == "int":
                whole_number(each.name, getattr(self, each.name))
        positive("rms_norm_eps", self.rms_norm_eps)
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim {self.head_dim} must be even: rotary embedding turns pairs of dimensions")

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of weights, activations and KV cache."""
        return DTYPES[self.dtype]

    def shard(self, size: int) -> ModelConfig:
        """Return the shape of the layers that one of `size` ranks has: its part of heads, neurons and vocabulary."""
        parts = {name: getattr(self, name) for name in ("num_heads", "num_kv_heads", "intermediate_size")}
        for name, whole in parts.items():
            if whole % size:
                raise ConfigError(f"tensor_parallel_size {size} does not divide the model's {name} {whole}")
        return replace(self, **{name: whole // size for name, whole in parts.items()})


# The shapes of Llama-3.2-1B.
_1B = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128_256,
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    max_position_embeddings=131_072,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=500_000.0, rope_type="llama3", factor=32.0),
    tie_word_embeddings=True,
    dtype="bfloat16",
)

# Random weights give no token the meaning "end", so the presets have no eos: every request runs to its max_tokens.
PRESETS: Mapping[str, ModelConfig] = MappingProxyType(
    {
        "tiny": ModelConfig(
            architecture="LlamaForCausalLM",
            vocab_size=1024,
            hidden_size=128,
            intermediate_size=384,
            num_layers=4,
            num_heads=8,
            num_kv_heads=4,
            head_dim=16,
            max_position_embeddings=2048,
            rms_norm_eps=1e-5,
        ),
        "1b": _1B,
        # The shapes of Llama-3.1-8B.
        "8b": replace(
            _1B,
            hidden_size=4096,
            intermediate_size=14_336,
            num_layers=32,
            head_dim=128,
            rope=replace(_1B.rope, factor=8.0),
            tie_word_embeddings=False,
        ),
    }
)


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
        async_scheduling: whether a step is launched before the tokens of the one before it are read, so that the card
            need not wait for the host; a request that ends with a stop token has one step computed in vain. None is
            with CUDA graphs, where nothing is offloaded.
        tensor_parallel_size: ranks that have a part of the model each, and a process of its own each. The KV cache's
            sizes are then those of one rank. On cards, rank 0 takes the one that `device` names, and the others the
            next ones.
        engine_process: whether the core (scheduler, worker, all memory) has a process of its own, as vLLM's has by
            default.
        process_extensions: what the engine's processes enter before they create anything, each as
            `module:function=argument`; see `processes.py`.

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
    async_scheduling: bool | None = None
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
        whole_number("seed", self.seed, 0, 2**63 - 1)
        whole_number("kv_transport_bytes", self.kv_transport_bytes, 0, 2**40)
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens"):
            whole_number(name, getattr(self, name))
        for name in ("num_blocks", "kv_cache_bytes", "max_model_len"):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name))
        whole_number("num_micro_batches", self.num_micro_batches, 1, 2)
        if self.num_blocks is not None and self.kv_cache_bytes is not None:
            raise ConfigError("num_blocks and kv_cache_bytes both size the KV cache; give one of them")
        whole_number("kv_offload_bytes", self.kv_offload_bytes, 0, 2**63 - 1)
        if self.kv_offload_bytes and not self.enable_prefix_caching:
            raise ConfigError(
                "kv_offload_bytes needs enable_prefix_caching: a block on the host is found by its prefix alone"
            )
        if self.cuda_graphs and self.num_micro_batches != 1:
            raise ConfigError(
                f"cuda_graphs takes a step as one batch, and num_micro_batches is {self.num_micro_batches}; set it to 1"
            )

        whole_number("tensor_parallel_size", self.tensor_parallel_size, 1, 64)
        if self.process_extensions and not self.works_elsewhere:
            raise ConfigError(
                "process_extensions are for the engine's other processes, and this engine has none: "
                "set engine_process, or tensor_parallel_size above 1"
            )
        if self.tensor_parallel_size > 1:
            for name in ("cuda_graphs", "kv_offload_bytes", "async_scheduling"):
                if getattr(self, name):
                    raise ConfigError(f"{name} does not work with tensor_parallel_size above 1: leave one of them off")
        if self.async_scheduling and self.kv_offload_bytes:
            raise ConfigError("async_scheduling does not work with kv_offload_bytes: leave one of them off")

    @property
    def runs_ahead(self) -> bool:
        """Whether steps are launched before the tokens of those before them are read."""
        if self.async_scheduling is None:
            return self.cuda_graphs and not self.kv_offload_bytes
        return self.async_scheduling

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
    """Return the shape of the model that `config` names, with its dtype override; `CheckpointError`: there is none."""
    preset = PRESETS.get(config.model)
    if preset is None and not Path(config.model).is_dir():
        raise CheckpointError(
            f"{config.model} is neither a preset ({', '.join(PRESETS)}) nor a folder; "
            "give the path of a Hugging Face checkpoint folder"
        )
    model = preset or read_model_config(config.model)
    return model if config.dtype is None else replace(model, dtype=config.dtype)


def resolve_max_model_len(config: EngineConfig, model: ModelConfig, num_blocks: int) -> int:
    """Tokens that one request may span: the setting, or else the most that the model and the KV cache allow."""
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


class _Architectures(msgspec.Struct):
    """The part of config.json that says whether the rest can be understood."""

    architectures: list[str]


class _RopeFields(msgspec.Struct):
    """`rope_parameters` (transformers 5) or `rope_scaling` (earlier; the oldest call the type `type`)."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = None
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    partial_rotary_factor: float = 1.0


class _HFConfig(msgspec.Struct):
    """The keys of config.json that the engine reads; those without a default must be there."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: _RopeFields | None = None
    rope_parameters: _RopeFields | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    layer_types: list[str] | None = None
    quantization_config: dict[str, Any] | None = None
    eos_token_id: int | list[int] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None


class _HFGenerationConfig(msgspec.Struct):
    """The one key of generation_config.json that the engine reads."""

    eos_token_id: int | list[int] | None = None


def read_model_config(folder: str | Path) -> ModelConfig:
    """Read config.json (and the eos of generation_config.json) of a checkpoint folder, with either spelling of rope.

    A `CheckpointError` names the file and the key that is missing, malformed, or of what the engine does not do.
    """
    path = Path(folder) / "config.json"
    names = read_json(path, _Architectures).architectures
    known = [name for name in names if name in ARCHITECTURES]
    if not known:
        raise CheckpointError(
            f"{path}: architecture {', '.join(names) or '(none)'} is not supported; supported are "
            f"{', '.join(ARCHITECTURES)}"
        )
    hf = read_json(path, _HFConfig)
    _refuse_unsupported(path, hf)
    qwen2 = known[0] == "Qwen2ForCausalLM"
    try:
        return ModelConfig(
            architecture=known[0],
            vocab_size=hf.vocab_size,
            hidden_size=hf.hidden_size,
            intermediate_size=hf.intermediate_size,
            num_layers=hf.num_hidden_layers,
            num_heads=hf.num_attention_heads,
            num_kv_heads=_default(hf.num_key_value_heads, hf.num_attention_heads),
            head_dim=_head_dim(hf),
            max_position_embeddings=hf.max_position_embeddings,
            rms_norm_eps=hf.rms_norm_eps,
            rope=_rope_config(hf),
            tie_word_embeddings=hf.tie_word_embeddings,
            # Qwen2 always has biases on q, k and v and none on o, and no key for it in its config.
            attention_bias=qwen2 or hf.attention_bias,
            attention_output_bias=not qwen2 and hf.attention_bias,
            mlp_bias=not qwen2 and hf.mlp_bias,
            eos_token_ids=_eos_token_ids(path, hf),
            dtype=(hf.dtype or hf.torch_dtype or "float32").removeprefix("torch."),
        )
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _refuse_unsupported(path: Path, hf: _HFConfig) -> None:
    if hf.hidden_act != "silu":
        raise CheckpointError(f"{path}: hidden_act {hf.hidden_act!r} is not supported; supported is 'silu'")
    if hf.quantization_config is not None:
        raise CheckpointError(f"{path}: quantization_config is not supported; use a checkpoint in {', '.join(DTYPES)}")
    if hf.use_sliding_window or any(kind != "full_attention" for kind in hf.layer_types or ()):
        raise CheckpointError(
            f"{path}: sliding-window attention (use_sliding_window, layer_types) is not supported; "
            "supported is full attention in every layer"
        )


def _head_dim(hf: _HFConfig) -> int:
    if hf.head_dim is not None:
        return hf.head_dim
    if hf.num_attention_heads <= 0 or hf.hidden_size % hf.num_attention_heads:
        raise ConfigError(
            f"there is no head_dim, and hidden_size {hf.hidden_size} is not a multiple of "
            f"num_attention_heads {hf.num_attention_heads}"
        )
    return hf.hidden_size // hf.num_attention_heads


def _rope_config(hf: _HFConfig) -> RopeConfig:
    rope = hf.rope_parameters or hf.rope_scaling or _RopeFields()
    rope_type = rope.rope_type or rope.type or "default"
    if rope.partial_rotary_factor != 1.0:
        raise ConfigError(f"partial_rotary_factor {rope.partial_rotary_factor} is not supported; supported is 1.0")
    one_of("rope_type", rope_type, ROPE_TYPES)
    needed: dict[str, Any] = {key: getattr(rope, key) for key in ROPE_TYPES[rope_type]}
    for key, value in needed.items():
        if value is None:
            raise ConfigError(f"rope_type {rope_type!r} needs the key {key!r}")
    return RopeConfig(_default(rope.rope_theta, hf.rope_theta), rope_type, **needed)  # type: ignore[arg-type]


def _eos_token_ids(path: Path, hf: _HFConfig) -> tuple[int, ...]:
    """generation_config.json wins over config.json, as in transformers: chat models name their end of turn there."""
    eos = hf.eos_token_id
    generation = path.with_name("generation_config.json")
    if generation.is_file():
        eos = _default(read_json(generation, _HFGenerationConfig).eos_token_id, eos)
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(eos)


_Struct = TypeVar("_Struct", bound=msgspec.Struct)
_Value = TypeVar("_Value")


def read_json(path: Path, kind: type[_Struct]) -> _Struct:
    """Return what a file of a checkpoint folder holds; `CheckpointError`: it is missing, or something else."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing; {path.parent} is not a Hugging Face checkpoint folder (config.json and *.safetensors)"
        ) from None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _default(value: _Value | None, otherwise: _Value) -> _Value:
    return otherwise if value is None else value
