"""The Llama-family decoder (Llama and Qwen2), over flattened tokens and a paged KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from lowtide.engine.config import Allocator, ModelConfig
from lowtide.engine.device_allocator.arena import WorkspaceViews
from lowtide.engine.model_executor.attention import StepMetadata, paged_attention
from lowtide.engine.model_executor.fused_ops import add_rms_norm, rotate_and_cache, silu_and_mul
from lowtide.engine.model_executor.parallel_layers import (
    ColumnParallelLinear,
    MergedColumns,
    RowParallelLinear,
    TensorParallelGroup,
    VocabParallelEmbedding,
    gather_logits,
    parameter,
    split,
)

if TYPE_CHECKING:
    from lowtide.engine.kv.kv_cache import KVCache


class RMSNorm(nn.Module):
    """Adds to the residual stream and normalises it; see `add_rms_norm`."""

    def __init__(self, config: ModelConfig, allocate: Allocator) -> None:
        super().__init__()
        self.weight = parameter((config.hidden_size,), config.torch_dtype, allocate)
        self.eps = config.rms_norm_eps

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, hidden_size] -> the normalised sum and the sum, each [T, hidden_size]."""
        return add_rms_norm(x, residual, self.weight, self.eps)


class LlamaAttention(nn.Module):
    """Grouped-query attention (Ainslie et al., "GQA", 2023) with rotary positions over the layer's KV cache."""

    def __init__(self, config: ModelConfig, layer_index: int, allocate: Allocator, group: TensorParallelGroup) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.head_dim = config.head_dim
        hidden, dtype = config.hidden_size, config.torch_dtype
        query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self._qkv = MergedColumns(hidden, (query, kv, kv), config.attention_bias, dtype, allocate)
        self.q_proj, self.k_proj, self.v_proj = self._qkv.layers()
        self.o_proj = RowParallelLinear(query, hidden, config.attention_output_bias, dtype, allocate, group)
        self.kv_cache: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(
        self, x: torch.Tensor, rotation: torch.Tensor, attention_metadata: StepMetadata, workspace: WorkspaceViews
    ) -> torch.Tensor:
        """[T, hidden_size] -> [T, hidden_size]."""
        assert self.kv_cache is not None
        projected = self._qkv(x).view(x.shape[0], -1, self.head_dim)
        turned = rotate_and_cache(projected, rotation, *self.kv_cache, attention_metadata.slot_mapping)
        attended = paged_attention(*turned, *self.kv_cache, attention_metadata, workspace)
        output: torch.Tensor = self.o_proj(attended.flatten(1))
        return output


class LlamaMLP(nn.Module):
    """SwiGLU (Shazeer, "GLU Variants Improve Transformer", 2020)."""

    def __init__(self, config: ModelConfig, allocate: Allocator, group: TensorParallelGroup) -> None:
        super().__init__()
        hidden, inner, dtype = config.hidden_size, config.intermediate_size, config.torch_dtype
        self._gate_and_up = MergedColumns(hidden, (inner, inner), config.mlp_bias, dtype, allocate)
        self.gate_proj, self.up_proj = self._gate_and_up.layers()
        self.down_proj = RowParallelLinear(inner, hidden, config.mlp_bias, dtype, allocate, group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] -> [T, hidden_size]."""
        output: torch.Tensor = self.down_proj(silu_and_mul(self._gate_and_up(x)))
        return output


class LlamaDecoderLayer(nn.Module):
    """Attention and MLP, each on the normalised residual stream and added back to it by the next norm."""

    def __init__(self, config: ModelConfig, layer_index: int, allocate: Allocator, group: TensorParallelGroup) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(config, layer_index, allocate, group)
        self.mlp = LlamaMLP(config, allocate, group)
        self.input_layernorm = RMSNorm(config, allocate)
        self.post_attention_layernorm = RMSNorm(config, allocate)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        rotation: torch.Tensor,
        attention_metadata: StepMetadata,
        workspace: WorkspaceViews,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what is to be added to the residual stream, and the stream, each [T, hidden_size] -> the same."""
        normed, residual = self.input_layernorm(x, residual)
        attended = self.self_attn(normed, rotation, attention_metadata, workspace)
        normed, residual = self.post_attention_layernorm(attended, residual)
        return self.mlp(normed), residual


class LlamaModel(nn.Module):
    """Embedding, decoder layers, final norm."""

    def __init__(self, config: ModelConfig, allocate: Allocator, group: TensorParallelGroup) -> None:
        super().__init__()
        dtype, own = config.torch_dtype, config.shard(group.size)
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, dtype, allocate, group)
        self.layers = nn.ModuleList(LlamaDecoderLayer(own, index, allocate, group) for index in range(own.num_layers))
        self.norm = RMSNorm(config, allocate)

    def forward(
        self,
        input_ids: torch.Tensor,
        rotation: torch.Tensor,
        attention_metadata: StepMetadata,
        workspace: WorkspaceViews,
    ) -> torch.Tensor:
        """[T] -> [T, hidden_size]."""
        x: torch.Tensor = self.embed_tokens(input_ids)
        residual: torch.Tensor | None = None
        for layer in self.layers:
            x, residual = layer(x, residual, rotation, attention_metadata, workspace)
        normed: torch.Tensor = self.norm(x, residual)[0]
        return normed


class LlamaForCausalLM(nn.Module):
    """The decoder with its head; Qwen2 is the same with biases on q, k and v.

    Its parameters have the names of a Hugging Face checkpoint and the shapes of `parameter_shapes(config)`; they are
    asked of `allocate` one by one and hold nothing until a `WeightSource` fills them. The rotary table is no part of
    the module: the engine owns it and lends it.  The ranks of `group` have a part of the model each.
    """

    def __init__(
        self,
        config: ModelConfig,
        allocate: Allocator,
        rotary_table: torch.Tensor,
        group: TensorParallelGroup | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.rotary_table = rotary_table
        self._group = group or TensorParallelGroup()
        self.model = LlamaModel(config, allocate, self._group)
        self.lm_head = None
        if not config.tie_word_embeddings:
            start, stop = split(config.vocab_size, self._group.rank, self._group.size)
            self.lm_head = ColumnParallelLinear(allocate((stop - start, config.hidden_size), config.torch_dtype))

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention_metadata: StepMetadata,
        workspace: WorkspaceViews,
    ) -> torch.Tensor:
        """Compute new tokens of several sequences, int64 [T], to hidden states [T, hidden_size]."""
        rotation = self.rotary_table[positions]
        hidden: torch.Tensor = self.model(input_ids, rotation, attention_metadata, workspace)
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, hidden_size] -> [N, vocab_size], in the model's dtype."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return gather_logits(hidden, head.weight, self.config.vocab_size, self._group)


class StaticForwardContext:
    """The attention layers of one model by name, each bound to its keys and values.

    What vLLM keeps in its compilation config under this name; here it belongs to the model runner, and goes with it.
    The layers do not refer to it: everything of an engine goes by reference count alone.
    """

    def __init__(self, model: LlamaForCausalLM, kv_cache: KVCache) -> None:
        attention = ((name, each) for name, each in model.named_modules() if isinstance(each, LlamaAttention))
        self.layers: dict[str, LlamaAttention] = dict(attention)
        for layer in self.layers.values():
            layer.kv_cache = kv_cache.layers[layer.layer_index]

    def clear(self) -> None:
        """Unbinds all layers; they can compute nothing any more."""
        for layer in self.layers.values():
            layer.kv_cache = None
        self.layers.clear()
