"""Steps that are launched before the tokens of those before them are read: same tokens, nothing lost, nothing left."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.engine import EngineConfig, LLMEngine, RequestOutput, SamplingParams
from lowtide.engine.core import EngineCore
from lowtide.engine.errors import EngineError
from lowtide.engine.request import UNREAD, SchedulerOutput
from lowtide.engine.runner import SampledTokens

CONFIG = EngineConfig(kv_cache_bytes=1 << 20, max_num_seqs=4, async_scheduling=True)
PROMPTS = [[1, 2, 3], list(range(100, 140)), [7] * 16, list(range(300)), [9], [9, 9]]
LENGTHS = (12, 3, 20, 1, 7, 9)


def core_of(engine: LLMEngine) -> EngineCore:
    assert isinstance(engine._core, EngineCore)
    return engine._core


def tokens(outputs: Sequence[RequestOutput]) -> list[tuple[tuple[int, ...], str | None]]:
    return [(output.token_ids, output.finish_reason) for output in outputs]


def generated(config: EngineConfig, params: Sequence[SamplingParams]) -> list[tuple[tuple[int, ...], str | None]]:
    with LLMEngine(config) as engine:
        return tokens(engine.generate(PROMPTS, params))


class Launches:
    """Which steps a core launches, and how many of them are under way when another one is."""

    def __init__(self, core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.outputs: list[SchedulerOutput] = []
        self.fails: Callable[[SchedulerOutput], bool] = lambda output: False
        self._execute = core.worker.execute_model
        monkeypatch.setattr(core.worker, "execute_model", self)

    def __call__(self, output: SchedulerOutput) -> Mapping[str, int]:
        if self.fails(output):
            raise ArithmeticError("a planted error of a step")
        self.outputs.append(output)
        return self._execute(output)

    @property
    def ahead(self) -> int:
        """How many were launched on tokens that nobody had read."""
        return sum(item.new_token_ids == [UNREAD] for output in self.outputs for item in output.scheduled[:1])


@pytest.mark.parametrize("others", [{}, {"num_micro_batches": 2}, {"num_blocks": 26, "kv_cache_bytes": None}])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_tokens_are_those_of_steps_one_after_the_other(others: dict[str, Any], temperature: float) -> None:
    config = replace(CONFIG, **others)
    params = [SamplingParams(max_tokens=count, temperature=temperature) for count in LENGTHS]
    assert generated(config, params) == generated(replace(config, async_scheduling=False), params)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12), st.booleans()), min_size=1, max_size=6), st.data())
def test_a_stop_token_an_abort_or_a_request_that_comes_changes_no_tokens(
    wanted: list[tuple[int, int, bool]], data: st.DataObject
) -> None:
    prompts = [[1 + (7 * row + at) % 90 for at in range(length)] for row, (length, _, _) in enumerate(wanted)]
    with LLMEngine(replace(CONFIG, async_scheduling=False)) as plain:
        full = [output.token_ids for output in plain.generate(prompts, SamplingParams(max_tokens=12))]
    # Each ends with a token that it will say, or at a length.
    params = [
        SamplingParams(max_tokens=12, stop_token_ids=(said[count - 1],)) if stops else SamplingParams(max_tokens=count)
        for said, (_, count, stops) in zip(full, wanted, strict=True)
    ]
    comes = data.draw(st.lists(st.integers(0, 10), min_size=len(wanted), max_size=len(wanted)))
    aborted = data.draw(st.integers(-1, len(wanted) - 1))
    last: dict[str, tuple[int, ...]] = {}
    with LLMEngine(CONFIG) as engine:
        for at in range(200):
            for index in (index for index, step in enumerate(comes) if step == at):
                engine.add_request(prompts[index], params[index], request_id=str(index))
            if at == 6:
                last |= {output.request_id: output.token_ids for output in engine.abort(str(aborted))}
            last |= {output.request_id: output.token_ids for output in engine.step()}
            if not engine.has_unfinished_requests():
                assert (engine.kv_cache_usage().held, core_of(engine)._ahead) == (0, None)
                if at > max(comes):
                    break
    for index, (said, own) in enumerate(zip(full, params, strict=True)):
        stop = said.index(own.stop_token_ids[0]) + 1 if own.stop_token_ids else own.max_tokens
        got = last[str(index)]
        assert got == said[: len(got) if index == aborted else stop]


def test_steps_are_launched_before_their_tokens_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    with LLMEngine(CONFIG) as engine:
        launches = Launches(core_of(engine), monkeypatch)
        known = SampledTokens.__iter__
        monkeypatch.setattr(
            SampledTokens, "__iter__", lambda self: (reads.append(len(launches.outputs)), known(self))[1]
        )
        engine.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=6))
    # The first step computes prompts, and what comes after it is known to be as long as asked for.
    assert (len(launches.outputs), launches.ahead) == (6, 4)
    assert reads == [1, 3, 4, 5, 6, 6]


@pytest.mark.parametrize("before", [1, 3])
def test_a_step_whose_follower_cannot_be_launched_is_computed_again(
    before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLMEngine(CONFIG) as engine:
        (expected,) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=8))
        launches = Launches(core_of(engine), monkeypatch)
        engine.add_request([1, 2, 3], SamplingParams(max_tokens=8))
        for _ in range(before):
            engine.step()
        launches.fails = lambda output: output.scheduled[0].new_token_ids == [UNREAD]
        with pytest.raises(ArithmeticError):
            engine.step()
        (request,) = core_of(engine).scheduler.running
        assert request.num_output_tokens == before
        launches.fails = lambda output: False
        launches.outputs.clear()
        engine.step()
        assert launches.outputs[0].scheduled[0].new_token_ids == request.token_ids[-2:-1]
        while engine.has_unfinished_requests():
            (output,) = engine.step()
        assert output.token_ids == expected.token_ids


@pytest.mark.parametrize("level", [1, 2])
def test_nothing_is_under_way_when_an_engine_sleeps(level: int) -> None:
    with LLMEngine(CONFIG) as engine:
        (expected,) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=8))
        engine.add_request([1, 2, 3], SamplingParams(max_tokens=8))
        for _ in range(3):
            engine.step()
        assert core_of(engine)._ahead is not None
        (aborted,) = engine.sleep(level, mode="abort")
        assert core_of(engine)._ahead is None
        assert aborted.token_ids == expected.token_ids[:3]
        engine.wake()
        assert engine.generate([[1, 2, 3]], SamplingParams(max_tokens=8))[0].token_ids == expected.token_ids


def test_nothing_is_under_way_when_the_last_request_is_aborted() -> None:
    with LLMEngine(CONFIG) as engine:
        request_id = engine.add_request([1, 2, 3], SamplingParams(max_tokens=8))
        for _ in range(3):
            engine.step()
        engine.abort(request_id)
        assert core_of(engine)._ahead is None


def test_a_request_that_could_start_is_not_kept_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLMEngine(CONFIG) as engine:
        launches = Launches(core_of(engine), monkeypatch)
        engine.add_request([1, 2, 3], SamplingParams(max_tokens=20), request_id="a")
        for _ in range(3):
            engine.step()
        engine.add_request([4, 5], SamplingParams(max_tokens=20), request_id="b")
        engine.step()
        engine.step()
        assert [item.request_id for item in launches.outputs[-1].scheduled] == ["a", "b"]


def test_what_a_step_needs_of_one_that_is_gone_is_an_error() -> None:
    with LLMEngine(CONFIG) as engine:
        engine.add_request([1, 2, 3], SamplingParams(max_tokens=20))
        engine.step()
        core = core_of(engine)
        following = core.scheduler.schedule_next(core.scheduler.schedule())
        assert following is not None
        with pytest.raises(EngineError, match="plan it anew"):
            core.worker.execute_model(following)
