"""The runner: micro-batches, rows of the block table, steps that failed, and what a callable takes."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from lowtide.engine.errors import ConfigError
from lowtide.engine.model_executor.block_table import BlockTable
from lowtide.engine.request import Request, SamplingParams, ScheduledRequest
from lowtide.engine.runner import split_micro_batches, supports_kw

GREEDY = SamplingParams(max_tokens=12)
PROMPTS = [[1, 2, 3], list(range(30)), [7], list(range(50, 90))]


def item(name: str, num_tokens: int, num_computed: int = 0) -> ScheduledRequest:
    request = Request(name, [1] * (num_computed + num_tokens), SamplingParams())
    request.num_computed_tokens = num_computed
    return ScheduledRequest.of(request, num_tokens, ())


def names(parts: list[list[ScheduledRequest]]) -> list[str]:
    return ["".join(part.request_id for part in items) for items in parts]


@pytest.mark.parametrize(
    ("tokens", "parts"),
    [
        ([1], ["a"]),
        ([1, 1], ["a", "b"]),
        ([1, 1, 1, 1], ["ab", "cd"]),
        ([8, 1, 1], ["a", "bc"]),
        ([1, 1, 8], ["ab", "c"]),
        ([5, 5], ["a", "b"]),
    ],
)
def test_micro_batches_share_the_tokens(tokens: list[int], parts: list[str]) -> None:
    scheduled = [item(name, count) for name, count in zip("abcdefg", tokens, strict=False)]
    assert names(split_micro_batches(scheduled, 2)) == parts


def test_single_tokens_come_first_and_the_longest_sequence_leads() -> None:
    scheduled = [item("p", 3), item("s", 1, 4), item("q", 2), item("l", 1, 9)]
    assert names(split_micro_batches(scheduled, 1)) == ["lspq"]


def test_an_empty_step_computes_nothing(make_loop: Callable[..., Any]) -> None:
    loop = make_loop(num_blocks=4)
    assert loop.runner.execute_model(loop.scheduler.schedule()) == {}


def test_each_micro_batch_has_its_own_workspace(make_loop: Callable[..., Any]) -> None:
    loop = make_loop(num_blocks=32, num_micro_batches=2)
    asked: list[int] = []
    for index, workspace in enumerate(loop.runner._workspaces):
        workspace.get = lambda *specs, index=index, get=workspace.get: (asked.append(index), get(*specs))[1]
    loop.generate([[1, 2, 3], [4, 5, 6]], SamplingParams(max_tokens=2))
    assert set(asked) == {0, 1}


def test_a_step_that_failed_can_be_run_again(make_loop: Callable[..., Any]) -> None:
    expected = [output.token_ids for output in make_loop(num_blocks=64).generate(PROMPTS, GREEDY)]
    loop = make_loop(num_blocks=6, max_num_batched_tokens=20)
    forward, calls = loop.model.forward, iter(range(10_000))

    def fails_every_other_time(*arguments: Any, **options: Any) -> torch.Tensor:
        hidden: torch.Tensor = forward(*arguments, **options)
        if next(calls) % 2 == 0:
            raise MemoryError
        return hidden

    loop.model.forward = fails_every_other_time
    for index, prompt in enumerate(PROMPTS):
        loop.scheduler.add_request(Request(str(index), prompt, GREEDY))
    tokens: dict[str, tuple[int, ...]] = {}
    failures = 0
    while loop.scheduler.has_unfinished_requests():
        with contextlib.suppress(MemoryError):
            failures += 1
            tokens.update({output.request_id: output.token_ids for output in loop.step()})
            failures -= 1
    assert [tokens[str(index)] for index in range(len(PROMPTS))] == expected
    assert failures > 10
    assert any(step.preempted_ids for step in loop.steps)


def test_a_request_whose_preemption_was_never_run_gets_its_new_blocks(make_loop: Callable[..., Any]) -> None:
    loop = make_loop(num_blocks=6, enable_prefix_caching=False)
    params = SamplingParams(max_tokens=20)
    first, second = (Request(name, [index] * 48, params) for index, name in enumerate("ab"))
    loop.scheduler.add_request(first)
    loop.scheduler.add_request(second)
    loop.step()
    assert loop.scheduler.schedule().preempted_ids == ("b",)
    loop.scheduler.abort(["a"])
    loop.step()
    row = loop.runner._row_of[1, 1]
    blocks = list(loop.kv_cache_manager.block_ids("b"))
    assert loop.runner.block_table.device_table[row, : len(blocks)].tolist() == blocks
    assert loop.runner.block_table.num_blocks(row) == len(blocks)


def test_micro_batches_have_their_own_part_of_the_input_buffers(make_loop: Callable[..., Any]) -> None:
    loop = make_loop(num_blocks=8, num_micro_batches=2)
    forward, seen = loop.model.forward, []
    loop.model.forward = lambda *arguments, **options: (seen.append(arguments[:2]), forward(*arguments, **options))[1]
    for name, prompt in (("a", [1, 2, 3]), ("b", [4, 5, 6])):
        loop.scheduler.add_request(Request(name, prompt, GREEDY))
    loop.step()
    assert [input_ids.tolist() for input_ids, _ in seen] == [[1, 2, 3], [4, 5, 6]]
    assert [positions.tolist() for _, positions in seen] == [[0, 1, 2], [0, 1, 2]]
    assert loop.runner._rows[:2].tolist() == [loop.runner._row_of[0, 0], loop.runner._row_of[1, 0]]


def test_input_buffers_keep_their_addresses_and_are_allocated_once(make_loop: Callable[..., Any]) -> None:
    loop = make_loop(num_blocks=64)
    buffers = [value for value in vars(loop.runner).values() if isinstance(value, torch.Tensor)]
    before = [buffer.data_ptr() for buffer in buffers]
    loop.generate(PROMPTS, GREEDY)
    assert [value.data_ptr() for value in vars(loop.runner).values() if isinstance(value, torch.Tensor)] == before
    assert len(buffers) == 4


def test_a_model_in_bfloat16_generates(make_loop: Callable[..., Any]) -> None:
    outputs = make_loop(num_blocks=64, dtype="bfloat16", max_num_batched_tokens=16).generate(PROMPTS, GREEDY)
    assert [len(output.token_ids) for output in outputs] == [12] * 4


def allocate(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.full(tuple(shape), 99, dtype=dtype)


def test_rows_come_to_the_device_with_commit() -> None:
    table = BlockTable(3, 4, 16, allocate)
    table.append(1, [5, 6])
    assert table.device_table.tolist() == [[0] * 4] * 3
    table.commit()
    table.append(1, [7])
    table.commit()
    assert table.device_table.tolist() == [[0] * 4, [5, 6, 7, 0], [0] * 4]


def test_a_cleared_row_begins_anew() -> None:
    table = BlockTable(1, 4, 16, allocate)
    table.append(0, [5, 6, 7])
    table.clear(0)
    table.append(0, [9])
    table.commit()
    assert (table.num_blocks(0), table.device_table[0, 0].item()) == (1, 9)


def test_slots_follow_the_blocks_of_a_row() -> None:
    table = BlockTable(2, 4, 4, allocate)
    table.append(0, [3])
    table.append(1, [5, 2])
    rows, positions = np.array([0, 1, 1, 1, 1, 1]), np.array([1, 2, 3, 4, 5, 6])
    assert table.slots(rows, positions).tolist() == [13, 22, 23, 8, 9, 10]


def plain(first: int, /, second: int, *, third: int = 0) -> None: ...


def anything(**options: int) -> None: ...


class Model:
    def forward(self, tokens: int, *, workspace: int) -> None: ...

    def __call__(self, tokens: int) -> None: ...

    @classmethod
    def load(cls, folder: str) -> None: ...

    @staticmethod
    def check(folder: str) -> None: ...


@pytest.mark.parametrize(
    ("function", "name", "expected"),
    [
        (plain, "second", True),
        (plain, "third", True),
        (plain, "first", False),
        (plain, "fourth", False),
        (anything, "fourth", True),
        (Model().forward, "workspace", True),
        (Model().forward, "self", False),
        (Model.forward, "self", True),
        (Model(), "tokens", True),
        (Model(), "self", False),
        (Model.load, "folder", True),
        (Model.load, "cls", False),
        (Model.check, "folder", True),
        (functools.partial(Model().forward, 1), "tokens", False),
        (functools.partial(Model().forward, 1), "workspace", True),
        (lambda tokens: tokens, "tokens", True),
    ],
)
def test_what_it_takes(function: Callable[..., Any], name: str, expected: bool) -> None:
    assert supports_kw(function, name) is expected
    assert supports_kw(function, name) is expected


def closure_over(model: Model) -> Callable[..., Any]:
    def forward(tokens: int) -> None:
        model(tokens)

    return forward


def with_a_default(model: Model) -> Callable[..., Any]:
    def forward(tokens: Model = model) -> None: ...

    model.step = forward  # type: ignore[attr-defined]
    return forward


@pytest.mark.parametrize(
    "make",
    [
        lambda model: model.forward,
        lambda model: model,
        lambda model: functools.partial(model.forward, 1),
        lambda model: functools.partial(model, 1),
        closure_over,
        with_a_default,
    ],
    ids=["bound method", "callable instance", "partial of a method", "partial of an instance", "closure", "default"],
)
def test_asking_keeps_nothing(make: Callable[[Model], Callable[..., Any]]) -> None:
    model = Model()
    watched = weakref.ref(model)
    assert supports_kw(make(model), "tokens") in (True, False)
    del model
    gc.collect()
    assert watched() is None


def test_what_does_not_say_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match="does not say which arguments it takes"):
        supports_kw(dict, "x")
