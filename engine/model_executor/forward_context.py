"""Which KV cache each attention layer writes and reads, by the layer's name: bound once, not handed down every call."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lowtide.engine.kv.kv_cache import KVCache
    from lowtide.engine.model_executor.model import LlamaForCausalLM


class StaticForwardContext:
    """The attention layers of one model by name, each bound to its keys and values.

    What vLLM keeps in its compilation config under this name; here it belongs to the model runner, and goes with it.
    The layers do not refer to it: everything of an engine goes by reference count alone.
    """

    def __init__(self, model: LlamaForCausalLM, kv_cache: KVCache) -> None:
        self.layers = model.attention_layers()
        for layer in self.layers.values():
            layer.kv_cache = kv_cache.layers[layer.layer_index]

    def clear(self) -> None:
        """Unbinds all layers; they can compute nothing any more."""
        for layer in self.layers.values():
            layer.kv_cache = None
        self.layers.clear()
