"""Sampling: what may be drawn, and that a seed decides alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lowtide.engine.errors import RequestError
from lowtide.engine.request import Request, SamplingParams, ScheduledRequest
from lowtide.engine.runner import sample, uniform_draw

LOGITS = torch.log(torch.tensor([0.1, 0.4, 0.2, 0.3]))


def request(num_output_tokens: int = 0, arrival_index: int = 0, **params: Any) -> ScheduledRequest:
    made = Request("r", [1], SamplingParams(**params))
    made.token_ids += [0] * num_output_tokens
    made.arrival_index = arrival_index
    return ScheduledRequest.of(made, 1, ())


def drawn(count: int = 400, logits: torch.Tensor = LOGITS, **params: Any) -> Counter[int]:
    """What one request draws at `count` positions from the same logits."""
    requests = [request(position, **params) for position in range(count)]
    return Counter(sample(logits.expand(count, -1), requests, 0).tolist())


def test_temperature_zero_takes_the_likeliest() -> None:
    assert drawn(3) == {1: 3}


def test_temperature_one_draws_by_probability() -> None:
    counts = drawn(4000, temperature=1.0, seed=5)
    torch.testing.assert_close(
        torch.tensor([counts[token] / 4000 for token in range(4)]), LOGITS.exp(), atol=0.03, rtol=0
    )


def test_a_high_temperature_levels_the_odds() -> None:
    counts = drawn(4000, temperature=100.0, seed=5)
    assert all(abs(counts[token] / 4000 - 0.25) < 0.03 for token in range(4))


@pytest.mark.parametrize("temperature", [1e-3, 1e-310])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    assert drawn(50, LOGITS * 100, temperature=temperature, seed=1) == {1: 50}


@pytest.mark.parametrize(
    ("top_k", "allowed"), [(1, {1}), (2, {1, 3}), (3, {1, 2, 3}), (0, {0, 1, 2, 3}), (9, {0, 1, 2, 3})]
)
def test_top_k_keeps_the_likeliest(top_k: int, allowed: set[int]) -> None:
    assert drawn(temperature=1.0, top_k=top_k, seed=1).keys() == allowed


@pytest.mark.parametrize(
    ("top_p", "allowed"), [(0.01, {1}), (0.39, {1}), (0.5, {1, 3}), (0.85, {1, 2, 3}), (1.0, {0, 1, 2, 3})]
)
def test_top_p_keeps_the_fewest_that_reach_it(top_p: float, allowed: set[int]) -> None:
    assert drawn(temperature=1.0, top_p=top_p, seed=1).keys() == allowed


def test_top_p_is_of_what_top_k_left() -> None:
    # Of tokens 1 and 3, token 1 has 4/7: more than half, though it has less than half of all.
    assert drawn(temperature=1.0, top_k=2, top_p=0.5, seed=1).keys() == {1}


def test_what_top_p_keeps_is_drawn_by_probability() -> None:
    counts = drawn(4000, temperature=1.0, top_p=0.5, seed=1)
    assert abs(counts[1] / 4000 - 4 / 7) < 0.03


def test_a_token_without_probability_is_never_drawn() -> None:
    logits = torch.tensor([0.0, float("-inf"), 0.0, float("-inf")])
    assert drawn(logits=logits, temperature=1.0, seed=1).keys() == {0, 2}


def test_every_request_of_a_batch_has_its_own_parameters() -> None:
    requests = [request(), request(temperature=1.0, top_k=1), request(temperature=5.0, seed=8)]
    logits = torch.stack([LOGITS.roll(shift) for shift in range(3)])
    alone = [sample(row.unsqueeze(0), [one], 0).item() for row, one in zip(logits, requests, strict=True)]
    assert sample(logits, requests, 0).tolist() == alone


def test_a_seeded_draw_depends_on_neither_engine_nor_arrival() -> None:
    early, late = request(temperature=1.0, seed=4), request(arrival_index=9, temperature=1.0, seed=4)
    assert uniform_draw(early, 0) == uniform_draw(late, 1)


def test_without_a_seed_the_engines_seed_and_the_arrival_decide() -> None:
    first, second = request(temperature=1.0), request(arrival_index=1, temperature=1.0)
    numbers = {uniform_draw(first, 0), uniform_draw(second, 0), uniform_draw(first, 1)}
    assert len(numbers) == 3
    assert uniform_draw(first, 0) in numbers


def test_the_numbers_of_one_request_are_spread_evenly() -> None:
    numbers = [uniform_draw(request(position, seed=0), 0) for position in range(2000)]
    assert all(0 <= number < 1 for number in numbers)
    assert all(abs(sum(low <= number < low + 0.25 for number in numbers) - 500) < 80 for low in (0, 0.25, 0.5, 0.75))


def test_a_seed_gives_the_same_tokens_alone_and_in_any_batch(make_loop: Callable[..., Any]) -> None:
    params = SamplingParams(max_tokens=24, temperature=0.9, top_k=50, top_p=0.95, seed=11)
    prompt, other = list(range(20)), list(range(100, 160))
    alone = make_loop(num_blocks=64).generate([prompt], params)[0].token_ids
    busy = make_loop(num_blocks=64, max_num_batched_tokens=16, num_micro_batches=2)
    outputs = busy.generate(
        [other, prompt, other[:7]], [SamplingParams(max_tokens=30, temperature=1.0), params, params]
    )
    assert outputs[1].token_ids == alone
    assert len(set(alone)) > 12


def test_preemption_does_not_change_what_is_drawn(make_loop: Callable[..., Any]) -> None:
    params = [SamplingParams(max_tokens=40, temperature=1.0, seed=seed) for seed in range(4)]
    prompts = [[seed, 5, 9] for seed in range(4)]
    roomy, tight = make_loop(num_blocks=64), make_loop(num_blocks=6)
    expected = [output.token_ids for output in roomy.generate(prompts, params)]
    assert [output.token_ids for output in tight.generate(prompts, params)] == expected
    assert any(step.preempted_ids for step in tight.steps)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"max_tokens": 0}, "max_tokens 0"),
        ({"temperature": -0.1}, "temperature -0.1"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"top_k": -1}, "top_k -1"),
        ({"top_p": 0.0}, "top_p 0.0"),
        ({"top_p": 1.1}, "top_p 1.1"),
        ({"seed": -1}, "seed -1"),
        ({"seed": 2**63}, "seed 9223372036854775808"),
    ],
)
def test_a_parameter_that_cannot_work_is_named(params: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        SamplingParams(**params)
