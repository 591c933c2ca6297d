"""The reference engine: a small LLM engine that goes through a whole life, and gives its memory back."""

from lowtide.engine.config import PRESETS, EngineConfig
from lowtide.engine.errors import (
    CheckpointError,
    ConfigError,
    DriverError,
    EngineError,
    EngineStateError,
    KVTransferError,
    OutOfMemoryError,
    RequestError,
    WeightUpdateError,
)
from lowtide.engine.llm_engine import EngineState, LLMEngine
from lowtide.engine.request import RequestOutput, SamplingParams

__all__ = [
    "PRESETS",
    "CheckpointError",
    "ConfigError",
    "DriverError",
    "EngineConfig",
    "EngineError",
    "EngineState",
    "EngineStateError",
    "KVTransferError",
    "LLMEngine",
    "OutOfMemoryError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "WeightUpdateError",
]
