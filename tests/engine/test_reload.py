"""Weights that are filled anew in place: new ones come, a failure leaves the old ones, no prefix of before is used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lowtide.engine import CheckpointError, EngineConfig, EngineState, EngineStateError, LLMEngine, SamplingParams
from lowtide.engine.model_executor.weights import RandomWeights
from lowtide.probes.stages import announced_pools
from tests.engine.random_checkpoint import write_random_checkpoint

PROMPTS = [[1, 2, 3], list(range(40)), [7] * 20]
SMALL = {"num_blocks": 64, "dtype": "float64"}


def tokens(engine: LLMEngine) -> list[tuple[int, ...]]:
    return [output.token_ids for output in engine.generate(PROMPTS, SamplingParams(max_tokens=8, ignore_eos=True))]


def on_host() -> int:
    return sum(pool.mapped for pool in announced_pools() if pool.kind == "host")


def test_a_new_checkpoint_is_read_into_the_same_memory(tmp_path: Path) -> None:
    folder, other = (write_random_checkpoint(tmp_path / f"model{seed}", seed) for seed in (0, 1))
    with LLMEngine(EngineConfig(model=str(other), **SMALL)) as engine:
        expected = tokens(engine)
    with LLMEngine(EngineConfig(model=str(folder), **SMALL)) as engine:
        before = tokens(engine)
        places = {name: tensor.data_ptr() for name, tensor in engine.preserved_tensors().items()}
        (other / "model.safetensors").replace(folder / "model.safetensors")
        engine.reload_weights()
        assert {name: tensor.data_ptr() for name, tensor in engine.preserved_tensors().items()} == places
        # Also where a prefix of the old weights was cached.
        assert tokens(engine) == expected != before
        engine.sleep(1)
        engine.wake()
        assert tokens(engine) == expected


@pytest.mark.parametrize("keep", [True, False])
def test_the_present_weights_stay_when_the_new_ones_cannot_be_read(monkeypatch: pytest.MonkeyPatch, keep: bool) -> None:
    with LLMEngine(EngineConfig(keep_host_copy=keep, **SMALL)) as engine:
        expected = tokens(engine)
        contents = {name: tensor.clone() for name, tensor in engine.preserved_tensors().items()}
        held = on_host()
        original = RandomWeights._fill_one

        def fail_late(self: RandomWeights, name: str, parameter: torch.Tensor) -> None:
            if name == "model.norm.weight":
                raise CheckpointError("cut short")
            original(self, name, parameter.zero_())
            parameter.zero_()

        with monkeypatch.context() as patched:
            patched.setattr(RandomWeights, "_fill_one", fail_late)
            with pytest.raises(CheckpointError, match="cut short"):
                engine.reload_weights()
        for name, tensor in engine.preserved_tensors().items():
            assert torch.equal(tensor, contents[name]), name
        assert engine.state is EngineState.RUNNING
        assert (on_host() > held) is keep
        assert tokens(engine) == expected
        engine.reload_weights()
        assert tokens(engine) == expected


def test_a_trainer_wakes_the_weights_alone_and_loads_them() -> None:
    with LLMEngine(EngineConfig(**SMALL)) as engine:
        expected = tokens(engine)
        engine.sleep(2)
        with pytest.raises(EngineStateError, match=r"reload_weights is not allowed while the engine is asleep"):
            engine.reload_weights()
        engine.wake("weights")
        engine.preserved_tensors()["lm_head.weight"].zero_()
        engine.reload_weights()
        assert engine.state is EngineState.ASLEEP
        engine.wake("kv_cache")
        assert tokens(engine) == expected


def test_requests_do_not_go_on_with_other_weights() -> None:
    with LLMEngine(EngineConfig(**SMALL)) as engine:
        request = engine.add_request([1, 2, 3])
        with pytest.raises(EngineStateError, match=r"requests are unfinished; finish them first\); allowed now: step"):
            engine.reload_weights()
        engine.abort(request)
        engine.reload_weights()
