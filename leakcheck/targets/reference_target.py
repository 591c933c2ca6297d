"""The reference engine as a target of the fuzzer and the fault sweep."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lowtide.engine import (
    EngineConfig,
    EngineError,
    EngineState,
    EngineStateError,
    LLMEngine,
    SamplingParams,
)
from lowtide.engine.config import load_model_config
from lowtide.engine.errors import OutOfMemoryError
from lowtide.leakcheck.targets.faults import Injection, Seam, ShardSeam
from lowtide.leakcheck.targets.reference_seams import reference_seams
from lowtide.leakcheck.targets.remote_faults import ENTERED, injecting_in_core
from lowtide.leakcheck.targets.target import Capabilities

if TYPE_CHECKING:
    from lowtide.engine.kv.block_pool import KVCacheUsage

SMALL: Mapping[str, Any] = {"max_num_seqs": 4, "max_model_len": 128, "dtype": "float64"}
"""Settings of every engine that is fuzzed.  In float64, because then the order of additions, which depends on what else
is in a batch, does not decide between two tokens."""

CHOICES: Mapping[str, Sequence[Any]] = {
    "block_size": (16, 8),
    "num_blocks": (24, 16),
    "max_num_batched_tokens": (64, 16),
    "enable_prefix_caching": (True, True, True, False),
    "num_micro_batches": (1, 2),
    "keep_host_copy": (True, False),
    "poison_pages": (True, False),
    "kv_offload_bytes": (0, 1 << 20),
    "kv_transport_bytes": (0, 1 << 20),
    # These make a life several times as long, so they come less often.
    "process_group": (*[False] * 7, True),
    "freeze_heap": (*[False] * 15, True),
}
"""What lives differ in besides; the first value is the simplest."""

THOROUGH: Mapping[str, Any] = {
    "num_micro_batches": 2,
    "kv_offload_bytes": 1 << 20,
    "kv_transport_bytes": 1 << 20,
    "process_group": True,
}
"""The settings with which most can fail."""

ON_CARD: Mapping[str, Sequence[Any]] = {"cuda_graphs": (False, True)}


class ReferenceTarget:
    """The reference engine with a small random model.

    Args:
        device: "cpu" or "cuda:N".
        settings: of every engine, over `SMALL` and `CHOICES`.
        prompt_scale: how many times as long as usual the prompts are.
    """

    def __init__(self, device: str = "cpu", settings: Mapping[str, Any] | None = None, prompt_scale: int = 1) -> None:
        self._settings = {"device": device, **SMALL, **(settings or {})}
        self._faults = Path(tempfile.gettempdir()) / f"lowtide-faults-{os.getpid()}-{os.urandom(4).hex()}"
        if self._settings.get("engine_process"):
            extensions = (*self._settings.get("process_extensions", ()), f"{ENTERED}={self._faults}")
            self._settings["process_extensions"] = extensions
        choices = {**CHOICES, **({} if device == "cpu" else ON_CARD)}
        if prompt_scale > 1:
            # Then the sizes are those that the settings give.
            sizes = ("num_blocks", "block_size", "kv_offload_bytes")
            choices = {name: values for name, values in choices.items() if name not in sizes}
            for name in ("max_model_len", "max_num_batched_tokens"):
                self._settings.pop(name, None)
                choices.pop(name, None)
        self._capabilities = Capabilities(
            device=device,
            configs={name: values for name, values in choices.items() if name not in (settings or {})},
            prompt_lengths=tuple(length * prompt_scale for length in (3, 17, 40)),
            unfinished=True,
            sleep_levels=(1, 2),
            sleep_modes=("wait", "abort"),
            preserving_levels=(1, 2),
            emptying_levels=(2,),
            wake_tags=("weights", "kv_cache"),
            prefix_cache=True,
            reload=True,
            illegal_call=EngineStateError,
            failure=(EngineError, OutOfMemoryError),
        )
        config = EngineConfig(**self._settings)
        self._vocab_size = load_model_config(config).vocab_size
        self.engine = LLMEngine(config)

    @property
    def capabilities(self) -> Capabilities:
        """What the reference engine can do: all of it."""
        return self._capabilities

    def create(self, config: Mapping[str, Any]) -> None:
        """A new engine, unless there is one."""
        if self.engine.state in (EngineState.NEW, EngineState.CLOSED):
            settings = {**self._settings, **config}
            if settings.get("cuda_graphs"):
                # Graphs are captured for one micro-batch.
                settings["num_micro_batches"] = 1
            if settings.get("tensor_parallel_size", 1) > 1 or not settings.get("enable_prefix_caching", True):
                # Ranks do not offload, and a block on the host is found by its prefix alone.
                settings["kv_offload_bytes"] = 0
            self.engine = LLMEngine(EngineConfig(**settings))
        self.engine.create()

    def infer(self, prompt_lengths: Sequence[int], max_tokens: int) -> Sequence[Sequence[int]]:
        """Greedy tokens of each prompt."""
        outputs = self.engine.generate([self._prompt(length) for length in prompt_lengths], _greedy(max_tokens))
        return [output.token_ids for output in outputs]

    def start(self, prompt_lengths: Sequence[int], max_tokens: int) -> Sequence[str]:
        """Requests for `step`."""
        return [self.engine.add_request(self._prompt(length), _greedy(max_tokens)) for length in prompt_lengths]

    def step(self) -> Mapping[str, Sequence[int]]:
        """One step of the engine."""
        return {output.request_id: output.token_ids for output in self.engine.step() if output.finished}

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests."""
        self.engine.abort(request_ids)

    def sleep(self, level: int, mode: str) -> Mapping[str, Sequence[int]]:
        """Put the engine to sleep; what it aborts is no output."""
        outputs = self.engine.sleep(level, mode)  # type: ignore[arg-type]
        return {output.request_id: output.token_ids for output in outputs if output.finish_reason != "abort"}

    def wake(self, tags: Sequence[str] | None) -> None:
        """Wake it."""
        self.engine.wake(tags)

    def reset_prefix_cache(self) -> bool:
        """Forget all prefixes."""
        return self.engine.reset_prefix_cache()

    def reload(self) -> None:
        """Draw the weights again."""
        self.engine.reload_weights()

    def shutdown(self) -> None:
        """Shut it down."""
        self.engine.shutdown()

    def state(self) -> str:
        """The engine's own word for its state."""
        return self.engine.state.value

    def kv_usage(self) -> KVCacheUsage | None:
        """Who has the KV blocks; None where there are none."""
        alive = self.engine.state in (EngineState.RUNNING, EngineState.ASLEEP)
        return self.engine.kv_cache_usage() if alive else None

    def preserved(self) -> Mapping[str, torch.Tensor]:
        """What must survive a sleep, by name."""
        return self.engine.preserved_tensors()

    def graph_buffers(self) -> Mapping[str, tuple[int, int]]:
        """Address and bytes of what captured graphs read, by name."""
        return self.engine.graph_addresses()

    def pages(self) -> Mapping[str, int] | None:
        """Bytes with pages by arena tag, as the engine counts them in its other processes; None where it has none."""
        return self.engine.memory_mapped() if self._has_processes else None

    def injecting(self, injection: Injection) -> AbstractContextManager[Injection] | None:
        """What fails, in the core's process; None where the core has none of its own."""
        if not self.engine.config.engine_process:
            return None
        return injecting_in_core(self._faults, injection, self._settings["device"])

    def fault_seams(self) -> Sequence[Seam | ShardSeam]:
        """The places outside torch's operators at which the engine can fail."""
        return reference_seams(self._settings["device"])

    @property
    def _has_processes(self) -> bool:
        return self.engine.config.engine_process or self.engine.config.tensor_parallel_size > 1

    def _prompt(self, length: int) -> list[int]:
        # Prompts of lengths that are both odd, or both even, begin alike: prefixes are shared.
        source = random.Random(length % 2)
        return [source.randrange(self._vocab_size) for _ in range(length)]


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def reference(device: str = "cpu") -> ReferenceTarget:
    """The reference engine, as the fuzzer drives it."""
    return ReferenceTarget(device)
