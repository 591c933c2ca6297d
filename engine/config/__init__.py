"""What an engine is built from: the model's shape and the engine's settings, checked before any memory is taken."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from lowtide.engine.config.engine import EngineConfig, load_model_config, resolve_max_model_len
from lowtide.engine.config.hf import read_model_config
from lowtide.engine.config.model import PRESETS, ModelConfig, RopeConfig

__all__ = [
    "PRESETS",
    "Allocator",
    "EngineConfig",
    "ModelConfig",
    "RopeConfig",
    "load_model_config",
    "read_model_config",
    "resolve_max_model_len",
]

Allocator: TypeAlias = Callable[[Sequence[int], torch.dtype], torch.Tensor]
"""Gives an uninitialised, contiguous tensor of a shape and dtype: how memory's owner lends it to those who use it."""
