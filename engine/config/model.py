"""The shape of a model, and the shapes that have a name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

import torch

from lowtide.engine.config.checks import one_of, positive, positive_int
from lowtide.engine.errors import ConfigError

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
)
ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM")
ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: its base and how it is stretched beyond the context of its training.

    The last three fields matter to `llama3` alone, `factor` to `linear` and `llama3`.
    """

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

    Raises:
        ConfigError: a size is not positive, the heads cannot be grouped, or a name is not known.
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
        for name in _MODEL_SIZES:
            positive_int(name, getattr(self, name))
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
        """The shape of the layers that one of `size` ranks has: its heads and neurons; the vocabulary stays whole.

        Raises:
            ConfigError: the ranks cannot have equal parts.
        """
        parts = {name: getattr(self, name) for name in ("num_heads", "num_kv_heads", "intermediate_size")}
        for name, whole in parts.items():
            if whole % size:
                raise ConfigError(f"tensor_parallel_size {size} does not divide the model's {name} {whole}")
        return replace(self, **{name: whole // size for name, whole in parts.items()})


_MODEL_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_position_embeddings",
)


def _llama3_rope(factor: float) -> RopeConfig:
    return RopeConfig(theta=500_000.0, rope_type="llama3", factor=factor)


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
        # The shapes of Llama-3.2-1B.
        "1b": ModelConfig(
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
            rope=_llama3_rope(factor=32.0),
            tie_word_embeddings=True,
            dtype="bfloat16",
        ),
        # The shapes of Llama-3.1-8B.
        "8b": ModelConfig(
            architecture="LlamaForCausalLM",
            vocab_size=128_256,
            hidden_size=4096,
            intermediate_size=14_336,
            num_layers=32,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            max_position_embeddings=131_072,
            rms_norm_eps=1e-5,
            rope=_llama3_rope(factor=8.0),
            dtype="bfloat16",
        ),
    }
)
