"""A model cut over ranks computes what the whole model computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lowtide.engine.config import PRESETS, ModelConfig
from lowtide.engine.errors import CheckpointError, ConfigError
from lowtide.engine.model_executor.parallel_layers import (
    RowParallelLinear,
    VocabParallelEmbedding,
    gather_logits,
    shard_parameter,
    split,
)
from lowtide.engine.model_executor.weights import CheckpointWeights, RandomWeights, WeightSource, parameter_shapes
from lowtide.engine.request import SamplingParams
from tests.engine.rank_threads import ThreadRank, on_ranks

TINY = PRESETS["tiny"]
BIASED = replace(TINY, num_layers=1, attention_bias=True, attention_output_bias=True, mlp_bias=True)
WHOLE = ("norm.weight", "o_proj.bias", "down_proj.bias")
PROMPTS = ([1, 2, 3], list(range(40)), [7] * 17)


def filled(source: WeightSource) -> dict[str, torch.Tensor]:
    parameters = {name: torch.full(shape, float("nan")) for name, shape in source.shapes().items()}
    source.fill(parameters)
    return parameters


def joined(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """The whole parameter: cut parts side by side, others once, after a look that all ranks have the same."""
    if name.endswith(WHOLE):
        assert all(torch.equal(part, parts[0]) for part in parts)
        return parts[0]
    return torch.cat(parts, dim=1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("config", [BIASED, replace(TINY, num_layers=1, vocab_size=1001)], ids=["biases", "odd"])
def test_the_ranks_random_weights_are_the_parts_of_one_rank_s(config: ModelConfig, size: int) -> None:
    whole = filled(RandomWeights(config, seed=3))
    parts = [filled(RandomWeights(config, 3, rank, size)) for rank in range(size)]
    for name, tensor in whole.items():
        assert torch.equal(joined(name, [part[name] for part in parts]), tensor), name
    num_cut = sum(parts[0][name].numel() < tensor.numel() for name, tensor in whole.items())
    assert num_cut == len(whole) - sum(
        name.endswith(("norm.weight", "o_proj.bias", "down_proj.bias")) for name in whole
    )


def test_the_ranks_parts_of_a_checkpoint(tmp_path: Path) -> None:
    whole = {name: torch.randn(shape) for name, shape in parameter_shapes(BIASED).items()}
    save_file(whole, tmp_path / "model.safetensors")
    parts = [filled(CheckpointWeights(tmp_path, BIASED, rank, 2)) for rank in range(2)]
    for name, tensor in whole.items():
        assert torch.equal(joined(name, [part[name] for part in parts]), tensor), name


def test_a_checkpoint_that_became_larger_is_refused_though_a_part_would_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = parameter_shapes(BIASED)
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, tmp_path / "model.safetensors")
    source = CheckpointWeights(tmp_path, BIASED, 0, 2)
    larger = {**shapes, "lm_head.weight": (2 * TINY.vocab_size, TINY.hidden_size)}
    located = {tmp_path / "model.safetensors": list(shapes)}
    monkeypatch.setattr("lowtide.engine.model_executor.weights.locate_tensors", lambda *_: located)
    save_file({name: torch.zeros(shape) for name, shape in larger.items()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head.weight has shape \[2048, 128\]; the model has \[1024, 128\]"):
        source.fill({name: torch.zeros(shape) for name, shape in source.shapes().items()})


def test_parts_are_adjacent_and_differ_by_one_at_most() -> None:
    parts = [split(1001, rank, 4) for rank in range(4)]
    assert [stop for _, stop in parts[:-1]] == [start for start, _ in parts[1:]]
    assert (parts[0][0], parts[-1][1]) == (0, 1001)
    assert {stop - start for start, stop in parts} == {250, 251}


def test_a_single_rank_has_all_of_every_parameter() -> None:
    assert all(shard_parameter(name, shape).shape == shape for name, shape in parameter_shapes(BIASED).items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 1}, "tensor_parallel_size 2 does not divide the model's num_kv_heads 1"),
        ({"num_heads": 3, "num_kv_heads": 3}, "does not divide the model's num_heads 3"),
        ({"intermediate_size": 383}, "does not divide the model's intermediate_size 383"),
    ],
)
def test_a_model_that_has_no_equal_parts_is_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(TINY, **changes).shard(2)


def test_a_bias_is_added_once_to_the_sum_of_all_ranks() -> None:
    def compute(rank: ThreadRank) -> torch.Tensor:
        layer = RowParallelLinear(2, 3, True, torch.float32, lambda shape, dtype: torch.ones(*shape, dtype=dtype), rank)
        return layer(torch.ones(1, 2))

    # Two ranks with two inputs each, and the bias.
    assert [out.tolist() for out in on_ranks(2, compute)] == [[[5.0, 5.0, 5.0]]] * 2


def test_a_token_s_row_comes_from_the_rank_that_has_it() -> None:
    table = torch.randn(5, 4)

    def compute(rank: ThreadRank) -> torch.Tensor:
        layer = VocabParallelEmbedding(5, 4, torch.float32, lambda shape, dtype: torch.empty(*shape), rank)
        layer.weight.copy_(table[slice(*split(5, rank.rank, 2))])
        return layer(torch.tensor([4, 0, 1, 2, 3]))

    for rows in on_ranks(2, compute):
        assert torch.equal(rows, table[[4, 0, 1, 2, 3]])


@pytest.mark.parametrize("vocab_size", [4, 5])
def test_every_rank_gets_the_logits_of_all_tokens(vocab_size: int) -> None:
    head, hidden = torch.randn(vocab_size, 3), torch.randn(2, 3)

    def compute(rank: ThreadRank) -> torch.Tensor:
        return gather_logits(hidden, head[slice(*split(vocab_size, rank.rank, 2))], vocab_size, rank)

    for logits in on_ranks(2, compute):
        torch.testing.assert_close(logits, hidden @ head.T)


@pytest.mark.parametrize("settings", [{"max_num_batched_tokens": 24, "num_micro_batches": 2}])
def test_two_ranks_give_one_rank_s_logits_and_its_64_greedy_tokens(
    settings: dict[str, Any], make_loop: Callable[..., Any]
) -> None:
    params = SamplingParams(max_tokens=64)

    def generate(rank: ThreadRank | None = None) -> tuple[list[tuple[int, ...]], torch.Tensor]:
        loop = make_loop(num_blocks=64, max_num_seqs=4, group=rank, **settings)
        logits: list[torch.Tensor] = []
        compute = loop.model.compute_logits
        loop.model.compute_logits = lambda hidden: (logits.append(compute(hidden)), logits[-1])[1]
        return [output.token_ids for output in loop.generate(PROMPTS, params)], torch.cat(logits)

    tokens, logits = generate()
    for own_tokens, own_logits in on_ranks(2, generate):
        torch.testing.assert_close(own_logits, logits, rtol=1e-4, atol=1e-4)
        assert own_tokens == tokens
