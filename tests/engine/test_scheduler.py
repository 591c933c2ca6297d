"""The scheduler: what a step may contain, who gives way, and that everybody finishes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.engine.errors import RequestError
from lowtide.engine.kv.kv_cache import KVCacheManager
from lowtide.engine.request import Request, RequestOutput, RequestStatus, SamplingParams, SchedulerOutput
from lowtide.engine.scheduler import Scheduler


def make(num_blocks: int = 16, block_size: int = 4, enable_prefix_caching: bool = True, **limits: Any) -> Scheduler:
    defaults = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 64, "vocab_size": 100}
    return Scheduler(KVCacheManager(num_blocks, block_size, enable_prefix_caching), **{**defaults, **limits})


def add(scheduler: Scheduler, request_id: str, prompt: int | Sequence[int], **params: Any) -> Request:
    # A prompt given by its length is unlike all others, so that no prefix is shared by accident.
    tokens = [(sum(map(ord, request_id)) + 7 * i) % 100 for i in range(prompt)] if isinstance(prompt, int) else prompt
    request = Request(request_id, tokens, SamplingParams(**params))
    scheduler.add_request(request)
    return request


def step(scheduler: Scheduler, token: int = 1) -> tuple[SchedulerOutput, list[RequestOutput]]:
    """A step whose model says `token` to everything."""
    output = scheduler.schedule()
    sampled = {item.request_id: token for item in output.scheduled if item.samples}
    return output, scheduler.update_from_output(output, sampled)


def planned(output: SchedulerOutput) -> dict[str, int]:
    return {item.request_id: item.num_tokens for item in output.scheduled}


def test_a_short_prompt_runs_at_once_and_then_token_by_token() -> None:
    scheduler = make()
    add(scheduler, "a", 5, max_tokens=2)
    first, outputs = step(scheduler)
    assert planned(first) == {"a": 5}
    assert outputs == [RequestOutput("a", outputs[0].prompt_token_ids, (1,), False, None, 0)]
    second, outputs = step(scheduler)
    assert planned(second) == {"a": 1}
    assert (outputs[0].token_ids, outputs[0].finished, outputs[0].finish_reason) == ((1, 1), True, "length")
    assert not scheduler.has_unfinished_requests()


def test_a_long_prompt_is_computed_in_chunks_and_sampled_at_its_end() -> None:
    scheduler = make(max_num_batched_tokens=10)
    add(scheduler, "a", 25, max_tokens=1)
    steps = [step(scheduler) for _ in range(3)]
    assert [sum(planned(output).values()) for output, _ in steps] == [10, 10, 5]
    assert [len(outputs) for _, outputs in steps] == [0, 0, 1]


def test_who_runs_goes_before_who_waits() -> None:
    scheduler = make(max_num_batched_tokens=10)
    add(scheduler, "a", 4)
    step(scheduler)
    add(scheduler, "b", 20)
    output, _ = step(scheduler)
    assert list(planned(output).items()) == [("a", 1), ("b", 9)]


def test_no_more_requests_run_than_there_are_seats() -> None:
    scheduler = make(max_num_seqs=2)
    for name in "abc":
        add(scheduler, name, 2, max_tokens=1)
    assert list(planned(step(scheduler)[0])) == ["a", "b"]
    assert list(planned(step(scheduler)[0])) == ["c"]


def test_a_second_request_starts_after_the_prefix_it_shares() -> None:
    scheduler = make()
    add(scheduler, "a", [5] * 10)
    step(scheduler)
    add(scheduler, "b", [5] * 8 + [6, 7])
    output, outputs = step(scheduler)
    assert planned(output) == {"a": 1, "b": 2}
    assert outputs[1].num_cached_tokens == 8


def test_the_last_to_come_gives_way_when_blocks_run_out() -> None:
    scheduler = make(num_blocks=4)
    first, second = add(scheduler, "a", 8, max_tokens=8), add(scheduler, "b", 8, max_tokens=8)
    step(scheduler)
    output, _ = step(scheduler)
    assert (planned(output), output.preempted_ids) == ({"a": 1}, ("b",))
    assert (first.status, second.status) == (RequestStatus.RUNNING, RequestStatus.PREEMPTED)
    assert second.num_computed_tokens == 0


def test_who_gave_way_does_not_come_back_in_the_same_step() -> None:
    scheduler = make(num_blocks=5, enable_prefix_caching=False, max_num_batched_tokens=5)
    add(scheduler, "a", 4, max_tokens=12)
    add(scheduler, "b", 11, max_tokens=5)
    plans = [step(scheduler)[0] for _ in range(6)]
    # A first chunk of b would fit into what it has just given back.
    assert (plans[-1].preempted_ids, planned(plans[-1])) == (("b",), {"a": 1})


def test_who_gave_way_is_first_in_line_and_keeps_its_tokens() -> None:
    scheduler = make(num_blocks=4)
    add(scheduler, "a", 8, max_tokens=3)
    preempted = add(scheduler, "b", 8, max_tokens=3)
    step(scheduler)
    add(scheduler, "c", 1, max_tokens=1)
    orders = []
    while scheduler.has_unfinished_requests():
        orders.append(list(planned(step(scheduler)[0])))
    assert orders == [["a"], ["a"], ["b", "c"], ["b"]]
    assert preempted.num_preemptions == 1
    assert preempted.output_token_ids == (1, 1, 1)


def test_coming_back_after_preemption_does_not_count_as_a_prefix_hit() -> None:
    scheduler = make(num_blocks=4)
    add(scheduler, "a", 8, max_tokens=2)
    preempted = add(scheduler, "b", 8, max_tokens=2)
    while scheduler.has_unfinished_requests():
        step(scheduler)
    assert preempted.num_preemptions == 1
    assert preempted.num_cached_tokens == 0


@pytest.mark.parametrize(
    ("params", "reason"),
    [({}, "stop"), ({"ignore_eos": True}, "length"), ({"ignore_eos": True, "stop_token_ids": (9,)}, "stop")],
)
def test_what_ends_a_request(params: dict[str, Any], reason: str) -> None:
    scheduler = make(eos_token_ids=(9,))
    add(scheduler, "a", 2, max_tokens=3, **params)
    step(scheduler, token=1)
    outputs = step(scheduler, token=9)[1]
    if reason == "length":
        outputs = step(scheduler, token=9)[1]
    assert (outputs[0].finish_reason, outputs[0].token_ids[-1]) == (reason, 9)
    assert scheduler.kv_cache_manager.usage.held == 0


def test_abort_ends_running_and_waiting_requests_and_frees_their_blocks() -> None:
    scheduler = make(max_num_seqs=1)
    add(scheduler, "a", 8)
    add(scheduler, "b", 8)
    step(scheduler)
    outputs = scheduler.abort(["b", "a", "a", "unknown"])
    assert [(output.request_id, output.finish_reason) for output in outputs] == [("b", "abort"), ("a", "abort")]
    assert outputs[1].token_ids == (1,)
    assert not scheduler.has_unfinished_requests()
    assert scheduler.kv_cache_manager.usage.held == 0


def test_abort_all_ends_everything() -> None:
    scheduler = make()
    add(scheduler, "a", 8)
    add(scheduler, "b", 8)
    assert [output.request_id for output in scheduler.abort()] == ["a", "b"]
    assert not scheduler.has_unfinished_requests()


def test_a_request_aborted_during_a_step_takes_nothing_from_it() -> None:
    scheduler = make()
    request = add(scheduler, "a", 8)
    output = scheduler.schedule()
    scheduler.abort(["a"])
    assert scheduler.update_from_output(output, {"a": 1}) == []
    assert request.output_token_ids == ()


def test_a_request_with_the_id_of_one_aborted_during_a_step_takes_nothing_from_it() -> None:
    scheduler = make()
    add(scheduler, "a", 8)
    output = scheduler.schedule()
    scheduler.abort(["a"])
    later = add(scheduler, "a", 8)
    assert scheduler.update_from_output(output, {"a": 1}) == []
    assert (later.num_computed_tokens, later.output_token_ids) == (0, ())


def test_an_id_is_free_again_once_its_request_is_gone() -> None:
    scheduler = make()
    add(scheduler, "a", 8)
    with pytest.raises(RequestError, match="'a' is in use"):
        add(scheduler, "a", 8)
    scheduler.abort(["a"])
    add(scheduler, "a", 8)


def test_a_step_that_failed_is_planned_again() -> None:
    scheduler = make(num_blocks=4)
    add(scheduler, "a", 8, max_tokens=8)
    add(scheduler, "b", 8, max_tokens=8)
    step(scheduler)
    failed = scheduler.schedule()
    assert planned(scheduler.schedule()) == planned(failed)
    assert scheduler.kv_cache_manager.usage.held == 3


def test_a_step_that_failed_leaves_nothing_in_the_prefix_cache() -> None:
    scheduler = make()
    add(scheduler, "a", [5] * 12)
    scheduler.schedule()
    scheduler.abort()
    assert scheduler.kv_cache_manager.usage.evictable == 0


def test_the_prefix_cache_is_reset_only_when_nothing_runs() -> None:
    scheduler = make()
    add(scheduler, "a", 8, max_tokens=1)
    scheduler.schedule()
    assert not scheduler.reset_prefix_cache()
    scheduler.abort()
    assert scheduler.reset_prefix_cache()


@pytest.mark.parametrize(
    ("limits", "prompt", "max_tokens", "said"),
    [
        ({}, 60, 5, "60 prompt tokens and max_tokens 5 is beyond max_model_len 64"),
        ({"num_blocks": 4}, 10, 8, "beyond the KV cache of 4 blocks x 4 tokens"),
        ({}, [1, 100], 1, "token 100; the vocabulary has 100"),
        ({}, [-1], 1, "token -1"),
        ({}, [], 1, "empty prompt"),
    ],
)
def test_a_request_that_can_never_run_is_refused(
    limits: dict[str, Any], prompt: Any, max_tokens: int, said: str
) -> None:
    scheduler = make(**limits)
    with pytest.raises(RequestError, match=said):
        add(scheduler, "a", prompt, max_tokens=max_tokens)
    assert not scheduler.has_unfinished_requests()


def test_a_request_that_just_fits_runs_to_its_end() -> None:
    scheduler = make(num_blocks=4)
    add(scheduler, "a", 10, max_tokens=7)  # the 17th token is returned and never computed
    for _ in range(7):
        step(scheduler)
    assert not scheduler.has_unfinished_requests()


@settings(max_examples=150)
@given(
    num_blocks=st.integers(3, 12),
    budget=st.integers(1, 20),
    seats=st.integers(1, 4),
    caching=st.booleans(),
    arrivals=st.lists(
        st.tuples(st.integers(0, 6), st.lists(st.integers(0, 1), min_size=1, max_size=7), st.integers(1, 6)),
        min_size=1,
        max_size=8,
    ),
)
def test_every_request_finishes_within_every_limit(
    num_blocks: int, budget: int, seats: int, caching: bool, arrivals: list[tuple[int, list[int], int]]
) -> None:
    """Requests that arrive at any time all finish, in a bounded number of steps, and leave no block held."""
    scheduler = make(num_blocks, 4, caching, max_num_batched_tokens=budget, max_num_seqs=seats)
    requests = []
    for number in range(2000):
        for index, (arrival, prompt, max_tokens) in enumerate(arrivals):
            if arrival == number:
                requests.append(add(scheduler, str(index), prompt, max_tokens=max_tokens))
        oldest = next((request for request in requests if not request.status.is_finished), None)
        before = None if oldest is None else (oldest.num_computed_tokens, oldest.num_output_tokens)
        output, _ = step(scheduler)
        assert sum(planned(output).values()) <= budget
        assert not set(output.preempted_ids) & planned(output).keys()
        assert len(scheduler.running) <= seats
        usage = scheduler.kv_cache_manager.usage
        assert usage.available + usage.evictable == usage.total - usage.held
        if oldest is not None:
            assert (oldest.num_computed_tokens, oldest.num_output_tokens) != before, "the oldest must always get on"
        if number > 6 and not scheduler.has_unfinished_requests():
            break
    assert [request.num_output_tokens for request in requests] == [request.params.max_tokens for request in requests]
    assert scheduler.kv_cache_manager.usage.held == 0
