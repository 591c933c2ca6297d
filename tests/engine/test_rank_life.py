"""An engine of two ranks, with real processes: the tokens of one rank through a whole life, and no process after it."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from lowtide.engine import ConfigError, EngineConfig, EngineState, LLMEngine, SamplingParams
from lowtide.engine.ranks import rank_devices

pytestmark = pytest.mark.nightly

PROMPTS = ([1, 2, 3], list(range(40)), [7] * 17)
CACHE = 1 << 20


def generate(engine: LLMEngine, max_tokens: int = 4) -> list[tuple[int, ...]]:
    return [output.token_ids for output in engine.generate(PROMPTS, SamplingParams(max_tokens=max_tokens))]


def test_two_ranks_live_as_one_and_leave_no_process() -> None:
    with LLMEngine(EngineConfig(kv_cache_bytes=2 * CACHE)) as single:
        expected = generate(single, 64)
        whole = single.memory_mapped()
    descriptors = psutil.Process().num_fds()
    engine = LLMEngine(EngineConfig(kv_cache_bytes=CACHE, tensor_parallel_size=2))
    engine.create()
    ranks = [child for child in psutil.Process().children() if child.environ().get("WORLD_SIZE") == "2"]
    assert sorted(child.environ()["RANK"] for child in ranks) == ["0", "1"]
    assert all(child.net_connections("tcp") for child in ranks)
    assert sorted(child.name() for child in ranks) == ["lowtide::Wo_TP0", "lowtide::Wo_TP1"]
    assert all(child.environ()["LOCAL_RANK"] == child.environ()["RANK"] for child in ranks)
    assert generate(engine, 64) == expected
    # Three inferences, so that growth in the ranks can be judged.
    assert generate(engine) == [tokens[:4] for tokens in expected]
    # Norms are on both ranks, all else is cut; the KV caches of both hold as many blocks as the one.
    mapped = engine.memory_mapped()
    assert whole["weights"] < mapped["weights"] < 1.01 * whole["weights"]
    assert mapped["kv_cache"] == whole["kv_cache"]
    engine.sleep(1)
    assert engine.memory_mapped()["weights"] == engine.memory_mapped()["kv_cache"] == 0
    # What gloo talks over; on cards, NCCL's buffers go with it.
    assert not any(child.net_connections("tcp") for child in ranks)
    engine.wake(["weights"])
    assert engine.state is EngineState.ASLEEP
    engine.wake()
    assert engine.memory_mapped()["weights"] == mapped["weights"]
    assert generate(engine) == [tokens[:4] for tokens in expected]
    engine.shutdown()
    assert not any(Path(f"/proc/{child.pid}").exists() for child in ranks)
    assert psutil.Process().num_fds() == descriptors
    engine.shutdown()


@pytest.mark.parametrize(
    ("device", "size", "devices"),
    [
        ("cpu", 2, ["cpu", "cpu"]),
        ("cuda", 3, ["cuda:0", "cuda:1", "cuda:2"]),
        ("cuda:4", 2, ["cuda:4", "cuda:5"]),
        ("cuda", 1, ["cuda"]),
    ],
)
def test_ranks_take_cards_one_after_the_other(device: str, size: int, devices: list[str]) -> None:
    assert rank_devices(EngineConfig(device=device, tensor_parallel_size=size)) == devices


def test_a_model_that_cannot_be_divided_is_refused_before_any_process_starts() -> None:
    children = set(psutil.Process().children())
    with pytest.raises(ConfigError, match="tensor_parallel_size 3 does not divide the model's num_heads 8"):
        LLMEngine(EngineConfig(tensor_parallel_size=3)).create()
    assert set(psutil.Process().children()) == children
