"""One engine for the tasks of an event loop: what they get, and that nothing is kept of a request that has ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager

import pytest

from lowtide.engine import EngineConfig, EngineState, LLMEngine, RequestError, RequestOutput, SamplingParams
from lowtide.engine.async_llm import AsyncLLM
from lowtide.engine.errors import EngineDeadError, EngineError
from lowtide.engine.worker import Worker

LONG = SamplingParams(max_tokens=1500)


class Subject:
    """An engine in this process that runs.

    Attributes:
        llm: asks it.
    """

    def __init__(self) -> None:
        self.engine = LLMEngine(EngineConfig(kv_cache_bytes=8 << 20))
        self.llm = AsyncLLM(self.engine, lambda: None)

    async def last(self, name: str, prompt: list[int], params: SamplingParams) -> RequestOutput:
        """The last output of a request."""
        async with aclosing(self.llm.generate([(name, prompt, params)])) as outputs:
            last = [output async for output in outputs][-1]
        assert last.finished
        return last

    def metric(self, name: str, **labels: str) -> float:
        """What one of its metrics is; 0 where there is none yet."""
        return self.llm.metrics.registry.get_sample_value(f"lowtide:{name}", {"model_name": "tiny", **labels}) or 0

    def ended(self, reason: str) -> float:
        """How many requests have ended so."""
        return self.metric("request_success_total", finished_reason=reason)

    async def requests(self) -> tuple[float, float]:
        """How many requests run, and how many wait."""
        await self.llm.read_metrics()
        return self.metric("num_requests_running"), self.metric("num_requests_waiting")

    async def settled(self) -> None:
        """Wait until the engine has nothing to do, and see that nothing is kept."""
        while any(await self.requests()):
            await asyncio.sleep(0.01)
        assert (self.llm._live, self.llm._postponed, self.engine.num_requests()) == ({}, [], (0, 0))


@asynccontextmanager
async def running() -> AsyncIterator[Subject]:
    """An engine whose end is waited for."""
    subject = Subject()
    subject.engine.create()
    subject.llm.start()
    try:
        yield subject
    finally:
        subject.llm.close()
        while subject.llm.is_alive:
            await asyncio.sleep(0.01)
        assert subject.engine.state is EngineState.CLOSED
        assert (subject.llm._live, subject.llm._postponed) == ({}, [])


def in_a_loop(test: Callable[[Subject], Awaitable[None]]) -> Callable[[], None]:
    """A test with an engine, in an event loop of its own."""

    async def run() -> None:
        async with running() as subject:
            await test(subject)

    return lambda: asyncio.run(run())


@in_a_loop
async def test_a_request_is_computed_beside_those_that_came_before(subject: Subject) -> None:
    begun = asyncio.ensure_future(subject.last("long", [1, 2], SamplingParams(max_tokens=200)))
    await subject.last("short", [3], SamplingParams(max_tokens=3))
    assert not begun.done()
    assert len((await begun).token_ids) == 200
    await subject.settled()
    assert (subject.metric("prompt_tokens_total"), subject.metric("generation_tokens_total")) == (3, 203)
    assert subject.ended("length") == 2


@in_a_loop
async def test_for_who_reads_slowly_the_latest_alone_is_kept(subject: Subject) -> None:
    async with aclosing(subject.llm.generate([("a", [1], SamplingParams(max_tokens=100))])) as outputs:
        await anext(outputs)
        while (await subject.requests())[0]:
            await asyncio.sleep(0.01)
        rest = [output async for output in outputs]
    assert [len(output.token_ids) for output in rest] == [100]
    await subject.settled()


@in_a_loop
async def test_of_who_leaves_nothing_is_kept(subject: Subject) -> None:
    async with aclosing(subject.llm.generate([("a", [1], LONG), ("b", [2], LONG)])) as outputs:
        await anext(outputs)
    await subject.settled()
    waiting = asyncio.ensure_future(subject.last("c", [1], LONG))
    while (await subject.requests())[0] < 1:
        await asyncio.sleep(0.01)
    waiting.cancel()
    await subject.settled()
    assert subject.ended("abort") == 3


@in_a_loop
async def test_of_requests_of_which_one_is_refused_none_is_kept(subject: Subject) -> None:
    requests = [("a", [1], LONG), ("b", [5000], LONG)]
    with pytest.raises(RequestError, match="has token 5000"):
        async with aclosing(subject.llm.generate(requests)) as outputs:
            await anext(outputs)
    await subject.settled()
    # Not later, when a step has computed it.
    assert (subject.ended("error"), subject.metric("generation_tokens_total")) == (1, 0)


@in_a_loop
async def test_of_who_leaves_while_it_sleeps_nothing_is_kept(subject: Subject) -> None:
    await subject.llm.sleep(1, "abort")
    staying = asyncio.ensure_future(subject.last("stays", [1], SamplingParams(max_tokens=3)))
    leaving = [asyncio.ensure_future(subject.last(f"leaves {turn}", [1], LONG)) for turn in range(20)]
    while (await subject.requests())[1] < 21:
        await asyncio.sleep(0.01)
    for each in leaving:
        each.cancel()
    while (await subject.requests())[1] > 1:
        await asyncio.sleep(0.01)
    assert len(subject.llm._postponed) == 1
    await subject.llm.wake(None)
    assert len((await staying).token_ids) == 3
    await subject.settled()
    assert (subject.ended("length"), subject.ended("abort")) == (1, 0)


def test_a_step_that_fails_ends_its_requests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    execute, fails = Worker.execute_model, [False]

    def failing(self: Worker, output: object) -> object:
        if fails.pop():
            raise ArithmeticError("planted")
        fails.append(False)
        return execute(self, output)  # type: ignore[arg-type]

    @in_a_loop
    async def run(subject: Subject) -> None:
        first, second = (asyncio.ensure_future(subject.last(name, [1], LONG)) for name in "ab")
        while (await subject.requests())[0] < 2:
            await asyncio.sleep(0.01)
        fails[:] = [False, True]
        for each in (first, second):
            with pytest.raises(EngineError, match="ArithmeticError: planted"):
                await each
        assert len((await subject.last("c", [1], SamplingParams(max_tokens=3))).token_ids) == 3
        await subject.settled()

    monkeypatch.setattr(Worker, "execute_model", failing)
    run()


def test_its_end_aborts_what_runs_and_refuses_what_waits() -> None:
    async def run(is_asleep: bool) -> RequestOutput | BaseException:
        async with running() as subject:
            if is_asleep:
                await subject.llm.sleep(1, "abort")
            asked = asyncio.ensure_future(subject.last("a", [1], LONG))
            while not any(await subject.requests()):
                await asyncio.sleep(0.01)
        with pytest.raises(EngineDeadError, match="shutting down"):
            await subject.llm.read_metrics()
        (result,) = await asyncio.gather(asked, return_exceptions=True)
        return result

    ended = asyncio.run(run(is_asleep=False))
    assert isinstance(ended, RequestOutput)
    assert ended.finish_reason == "abort"
    assert isinstance(asyncio.run(run(is_asleep=True)), EngineDeadError)
