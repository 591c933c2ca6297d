"""Reads a model's shape from a Hugging Face checkpoint folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from lowtide.engine.config.model import ARCHITECTURES, DTYPES, ROPE_TYPES, ModelConfig, RopeConfig
from lowtide.engine.errors import CheckpointError, ConfigError


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
    """Reads config.json (and the eos of generation_config.json) of a Hugging Face checkpoint folder.

    Both spellings are understood: `rope_theta` with `rope_scaling`, and transformers 5's `rope_parameters`.

    Raises:
        CheckpointError: config.json is missing or malformed, a key is missing, or it asks for something that the
            engine does not do; names the file and the key.
    """
    path = Path(folder) / "config.json"
    names = _read_json(path, _Architectures).architectures
    known = [name for name in names if name in ARCHITECTURES]
    if not known:
        raise CheckpointError(
            f"{path}: architecture {', '.join(names) or '(none)'} is not supported; supported are "
            f"{', '.join(ARCHITECTURES)}"
        )
    fields = _read_json(path, _HFConfig)
    _refuse_unsupported(path, fields)
    qwen2 = known[0] == "Qwen2ForCausalLM"
    try:
        return ModelConfig(
            architecture=known[0],
            vocab_size=fields.vocab_size,
            hidden_size=fields.hidden_size,
            intermediate_size=fields.intermediate_size,
            num_layers=fields.num_hidden_layers,
            num_heads=fields.num_attention_heads,
            num_kv_heads=_default(fields.num_key_value_heads, fields.num_attention_heads),
            head_dim=_head_dim(fields),
            max_position_embeddings=fields.max_position_embeddings,
            rms_norm_eps=fields.rms_norm_eps,
            rope=_rope_config(fields),
            tie_word_embeddings=fields.tie_word_embeddings,
            # Qwen2 always has biases on q, k and v and none on o, and no key for it in its config.
            attention_bias=qwen2 or fields.attention_bias,
            attention_output_bias=not qwen2 and fields.attention_bias,
            mlp_bias=not qwen2 and fields.mlp_bias,
            eos_token_ids=_eos_token_ids(path, fields),
            dtype=(fields.dtype or fields.torch_dtype or "float32").removeprefix("torch."),
        )
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _refuse_unsupported(path: Path, fields: _HFConfig) -> None:
    if fields.hidden_act != "silu":
        raise CheckpointError(f"{path}: hidden_act {fields.hidden_act!r} is not supported; supported is 'silu'")
    if fields.quantization_config is not None:
        raise CheckpointError(f"{path}: quantization_config is not supported; use a checkpoint in {', '.join(DTYPES)}")
    if fields.use_sliding_window or any(kind != "full_attention" for kind in fields.layer_types or ()):
        raise CheckpointError(
            f"{path}: sliding-window attention (use_sliding_window, layer_types) is not supported; "
            "supported is full attention in every layer"
        )


def _head_dim(fields: _HFConfig) -> int:
    if fields.head_dim is not None:
        return fields.head_dim
    if fields.num_attention_heads <= 0 or fields.hidden_size % fields.num_attention_heads:
        raise ConfigError(
            f"there is no head_dim, and hidden_size {fields.hidden_size} is not a multiple of "
            f"num_attention_heads {fields.num_attention_heads}"
        )
    return fields.hidden_size // fields.num_attention_heads


def _rope_config(fields: _HFConfig) -> RopeConfig:
    rope = fields.rope_parameters or fields.rope_scaling or _RopeFields()
    rope_type = rope.rope_type or rope.type or "default"
    if rope.partial_rotary_factor != 1.0:
        raise ConfigError(f"partial_rotary_factor {rope.partial_rotary_factor} is not supported; supported is 1.0")
    theta = _default(rope.rope_theta, fields.rope_theta)
    if rope_type == "linear":
        return RopeConfig(theta, "linear", factor=_required(rope, rope_type, "factor"))
    if rope_type == "llama3":
        return RopeConfig(
            theta,
            "llama3",
            factor=_required(rope, rope_type, "factor"),
            low_freq_factor=_required(rope, rope_type, "low_freq_factor"),
            high_freq_factor=_required(rope, rope_type, "high_freq_factor"),
            original_max_position_embeddings=int(_required(rope, rope_type, "original_max_position_embeddings")),
        )
    if rope_type == "default":
        return RopeConfig(theta)
    raise ConfigError(f"rope_type {rope_type!r} is not supported; supported are {', '.join(ROPE_TYPES)}")


def _required(rope: _RopeFields, rope_type: str, key: str) -> float:
    value: float | None = getattr(rope, key)
    if value is None:
        raise ConfigError(f"rope_type {rope_type!r} needs the key {key!r}")
    return value


def _eos_token_ids(path: Path, fields: _HFConfig) -> tuple[int, ...]:
    """generation_config.json wins over config.json, as in transformers: chat models name their end of turn there."""
    eos = fields.eos_token_id
    generation = path.with_name("generation_config.json")
    if generation.is_file():
        eos = _default(_read_json(generation, _HFGenerationConfig).eos_token_id, eos)
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(eos)


_Struct = TypeVar("_Struct", bound=msgspec.Struct)
_Value = TypeVar("_Value")


def _read_json(path: Path, kind: type[_Struct]) -> _Struct:
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
