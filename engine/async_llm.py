"""The engine behind an event loop: one thread drives it, and any number of tasks ask it; named as vLLM's `AsyncLLM`."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from lowtide.engine.errors import ConfigError, EngineDeadError, EngineError, KVTransferError
from lowtide.engine.llm_engine import EngineState, LLMEngine
from lowtide.engine.request import RequestOutput, SamplingParams
from lowtide.engine.worker import SLEEPING_TAGS

HEALTH_S = 1.0
"""Seconds between two looks at the core's process while there is nothing to compute."""

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_Metric = TypeVar("_Metric", Counter, Gauge)


class Metrics:
    """What the requests have come to, and how the engine is, by the names of vLLM's metrics with our own prefix."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model
        self._running = self._new(Gauge, "num_requests_running", "Requests that steps compute.")
        self._waiting = self._new(Gauge, "num_requests_waiting", "Requests that have not begun, or gave way to others.")
        self._usage = self._new(Gauge, "kv_cache_usage_perc", "Part of the KV blocks that requests hold; 1 is all.")
        self._sleep_state = self._new(
            Gauge, "engine_sleep_state", "1 for the state that the engine is in, of these.", "sleep_state"
        )
        self._mapped = self._new(Gauge, "memory_mapped_bytes", "Bytes with pages behind them.", "arena")
        self._prompt = self._new(Counter, "prompt_tokens", "Tokens of prompts.")
        self._cached = self._new(Counter, "prompt_tokens_cached", "Those of them that the prefix cache had.")
        self._generated = self._new(Counter, "generation_tokens", "Tokens generated.")
        self._finished = self._new(Counter, "request_success", "Requests that have ended.", "finished_reason")

    def _new(self, kind: type[_Metric], name: str, text: str, *labels: str) -> _Metric:
        return kind(f"lowtide:{name}", text, ("model_name", *labels), registry=self.registry)

    def count(self, output: RequestOutput, before: int, reason: str | None) -> None:
        """Count what is new of a request since it had `before` tokens; the reason for its end, if not its own."""
        if output.token_ids and not before:
            self._prompt.labels(self._model).inc(len(output.prompt_token_ids))
            self._cached.labels(self._model).inc(output.num_cached_tokens)
        self._generated.labels(self._model).inc(len(output.token_ids) - before)
        if output.finished:
            self._finished.labels(self._model, reason or str(output.finish_reason)).inc()

    def read(self, engine: LLMEngine, postponed: int, sleep_level: int) -> None:
        """Take in how the engine is now; the sleep level is 0 while it is awake."""
        (running, waiting), usage = engine.num_requests(), engine.kv_cache_usage()
        self._running.labels(self._model).set(running)
        self._waiting.labels(self._model).set(waiting + postponed)
        self._usage.labels(self._model).set(1 - usage.free / usage.total)
        for level, state in enumerate(("awake", "weights_offloaded", "discard_all")):
            self._sleep_state.labels(self._model, state).set(level == sleep_level)
        for arena, mapped in engine.memory_mapped().items():
            self._mapped.labels(self._model, arena).set(mapped)


class _Outputs:
    """What the requests of one caller have come to, of each the latest: a caller that is slow holds no more."""

    def __init__(self) -> None:
        self._latest: dict[str, RequestOutput] = {}
        self._error: Exception | None = None
        self._has_come = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        self._latest[output.request_id] = output
        self._has_come.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._has_come.set()

    async def next(self) -> Iterable[RequestOutput]:
        """Wait for something new, and return it."""
        await self._has_come.wait()
        self._has_come.clear()
        if self._error is not None:
            raise self._error.with_traceback(None)
        latest, self._latest = self._latest, {}
        return latest.values()


@dataclass
class _Order:
    """A call for the engine's thread; one with `requests` waits for the wake, one that `drains` for all requests."""

    call: Callable[[], Any]
    result: Future[Any] = field(default_factory=Future)
    requests: int = 0
    drains: bool = False


@dataclass
class _Live:
    """A request in the engine: who hears of it, and how many of its tokens are counted."""

    outputs: _Outputs
    num_tokens: int = 0


class AsyncLLM:
    """Lets the tasks of one event loop use an engine at the same time; their requests are computed together.

    A request that comes while the engine sleeps waits until it is woken, as vLLM's does. Of a request that has ended,
    in whatever way, nothing is kept.
    """

    def __init__(self, engine: LLMEngine, on_death: Callable[[], None]) -> None:
        self.death: EngineDeadError | None = None
        """Why the engine is of no use any more."""
        self._engine = engine
        self.metrics = Metrics(engine.config.model)
        self._on_death = on_death
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="lowtide-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closing = False
        # The engine's thread alone uses what follows.
        self._live: dict[str, _Live] = {}
        self._postponed: list[_Order] = []
        self._draining: list[_Order] = []
        self._sleep_level = 0

    def start(self) -> None:
        """Begin, in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def close(self) -> None:
        """Have all requests aborted and the engine shut down; returns at once, see `is_alive`."""
        if not self._is_closing:
            self._is_closing = True
            self._orders.put(None)

    @property
    def is_alive(self) -> bool:
        """Whether the engine's thread runs: until the engine is shut down."""
        return self._thread.is_alive()

    async def generate(
        self, requests: Sequence[tuple[str, Sequence[int], SamplingParams]]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run requests, by id, prompt and sampling parameters, to their end: all are begun, or none.

        Yields the latest output of each request that has new tokens; closed before the end, it aborts them.

        Raises:
            RequestError: one can never be served.
            EngineError: the engine could not go on with them.
        """
        outputs = _Outputs()
        unfinished = {request_id for request_id, _, _ in requests}
        try:
            await self._call(lambda: self._add(requests, outputs), requests=len(requests))
            while unfinished:
                for output in await outputs.next():
                    if output.finished:
                        unfinished.discard(output.request_id)
                    yield output
        finally:
            if unfinished:
                self.abort(unfinished)

    def abort(self, request_ids: Iterable[str], reason: Literal["abort", "stop"] = "abort") -> None:
        """End requests soon, of which nothing more is heard; ids of none are passed over."""
        ids = tuple(request_ids)
        if not self._is_closing:
            self._orders.put(_Order(lambda: self._abort(ids, reason)))

    async def sleep(self, level: int, mode: Literal["wait", "abort"]) -> int:
        """Do as `LLMEngine.sleep`; one that sleeps already sleeps on.  Returns the level at which it sleeps.

        With `wait`, what runs goes on as ever until its end, and what comes meanwhile waits until the wake.
        """
        return await self._call(lambda: self._sleep(level, mode), drains=mode == "wait")

    async def wake(self, tags: Sequence[str] | None) -> bool:
        """Do as `LLMEngine.wake`; what is awake already stays so.  Returns whether all of it is awake."""
        return await self._call(lambda: self._wake(tags))

    async def reset_prefix_cache(self) -> bool:
        """Do as `LLMEngine.reset_prefix_cache`; True while it sleeps, because a sleep forgets them."""
        return await self._call(lambda: self._sleep_level > 0 or self._engine.reset_prefix_cache())

    async def reload_weights(self, folder: str) -> None:
        """Do as `LLMEngine.reload_weights`, for which no request may be unfinished."""
        await self._call(lambda: self._engine.reload_weights(folder))

    async def is_sleeping(self) -> bool:
        """Return whether anything of it is asleep, or will be when what runs has ended."""
        return await self._call(lambda: self._is_paused)

    async def read_metrics(self) -> bytes:
        """Return the metrics as they are now, in Prometheus' text format."""
        return await self._call(self._read)

    async def _call(self, call: Callable[[], _Result], *, requests: int = 0, drains: bool = False) -> _Result:
        if self.death is not None:
            raise self.death.with_traceback(None)
        if self._is_closing:
            raise _ended()
        order = _Order(call, requests=requests, drains=drains)
        self._orders.put(order)
        result: _Result = await asyncio.wrap_future(order.result)
        return result

    # In the engine's thread.

    def _run(self) -> None:
        while (order := self._next_order()) is not None:
            if order.requests and self._is_paused:
                self._postponed.append(order)
            elif order.drains and self._is_busy:
                self._draining.append(order)
            else:
                self._follow(order)
                while self._postponed and not self._is_paused:
                    self._follow(self._postponed.pop(0))
        self._try(lambda: self._abort(tuple(self._live), "abort", told=True))
        self._fail_orders(_ended())
        try:
            self._engine.shutdown()
        except BaseException:  # noqa: BLE001 - nobody is left to whom it could be raised
            _log.exception("the engine's shutdown failed")

    @property
    def _is_busy(self) -> bool:
        return self._engine.state is EngineState.RUNNING and self._engine.has_unfinished_requests()

    @property
    def _is_paused(self) -> bool:
        return self._engine.state is EngineState.ASLEEP or bool(self._draining)

    def _next_order(self) -> _Order | None:
        """Return the next order, and compute until there is one; None to end."""
        while True:
            is_busy = self._is_busy
            if self._draining and not is_busy:
                return self._draining.pop(0)
            try:
                return self._orders.get(block=not is_busy, timeout=HEALTH_S)
            except queue.Empty:
                self._try(self._step if is_busy else self._engine.check_health)

    def _follow(self, order: _Order) -> None:
        if not order.result.set_running_or_notify_cancel():
            return
        try:
            result = order.call()
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is waited for
            self._note_death(error)
            order.result.set_exception(_told(error))
        else:
            order.result.set_result(result)

    def _try(self, call: Callable[[], None]) -> None:
        """Do what nobody waits for; after an error all requests are given up, for they would fail again."""
        try:
            call()
        except KVTransferError as error:
            # Only copies are lost, and the next step goes on.
            _log.warning("%s", error)
        except KeyboardInterrupt:
            # A terminal's Ctrl-C is the core's, too; the step can be made again, and this process's own one ends it.
            pass
        except Exception as error:  # noqa: BLE001 - the requests' callers hear of it
            self._note_death(error)
            self._fail_live(_told(error))

    def _note_death(self, error: BaseException) -> None:
        if isinstance(error, EngineDeadError) and self.death is None:
            self.death = error
            _log.error("%s", error)
            self._fail_live(error)
            self._fail_orders(error)
            self._tell(self._on_death)

    def _fail_live(self, error: Exception) -> None:
        for live in {id(live.outputs): live for live in self._live.values()}.values():
            self._tell(live.outputs.fail, error)
        # Where this fails, too, whoever asks next hears why.
        with suppress(EngineError, KeyboardInterrupt):
            self._abort(tuple(self._live), "error")

    def _fail_orders(self, error: Exception) -> None:
        """Let nobody wait for what is not done any more."""
        orders = [*self._postponed, *self._draining]
        self._postponed, self._draining = [], []
        for order in orders:
            if order.result.set_running_or_notify_cancel():
                order.result.set_exception(error)

    def _add(self, requests: Sequence[tuple[str, Sequence[int], SamplingParams]], outputs: _Outputs) -> None:
        try:
            for request_id, prompt, params in requests:
                # First: an interrupted call may have added it.
                self._live[request_id] = _Live(outputs)
                self._engine.add_request(prompt, params, request_id=request_id)
        except BaseException:
            self._abort([request_id for request_id, _, _ in requests], "error")
            raise

    def _abort(self, request_ids: Iterable[str], reason: str, *, told: bool = False) -> None:
        self._postponed = [order for order in self._postponed if not order.result.cancelled()]
        live = [request_id for request_id in request_ids if request_id in self._live]
        try:
            for output in self._engine.abort(live) if live else ():
                self._deliver(output, reason, told=told)
        finally:
            for request_id in live:
                self._live.pop(request_id, None)

    def _step(self) -> None:
        for output in self._engine.step():
            self._deliver(output)

    def _deliver(self, output: RequestOutput, reason: str | None = None, *, told: bool = True) -> None:
        live = self._live.get(output.request_id)
        if live is None:
            return
        self.metrics.count(output, live.num_tokens, reason)
        live.num_tokens = len(output.token_ids)
        if output.finished:
            del self._live[output.request_id]
        if told:
            self._tell(live.outputs.put, output)

    def _tell(self, hear: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None
        # It is closed where the server is ended at once.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(hear, *arguments)

    def _sleep(self, level: int, mode: Literal["wait", "abort"]) -> int:
        if self._sleep_level == 0:
            try:
                for output in self._engine.sleep(level, mode):
                    self._deliver(output)
            finally:
                self._sleep_level = level if self._engine.state is EngineState.ASLEEP else 0
        return self._sleep_level

    def _wake(self, tags: Sequence[str] | None) -> bool:
        if unknown := set(tags or ()) - {*SLEEPING_TAGS, "scheduling"}:
            raise ConfigError(f"there is no tag {min(unknown)!r} to wake: use 'weights', 'kv_cache' or none for both")
        asleep = [tag for tag in SLEEPING_TAGS if tag not in self._engine.awake_tags and (not tags or tag in tags)]
        if asleep:
            self._engine.wake(asleep)
        is_awake = self._engine.state is EngineState.RUNNING
        self._sleep_level = 0 if is_awake else self._sleep_level
        return is_awake

    def _read(self) -> bytes:
        self.metrics.read(self._engine, sum(order.requests for order in self._postponed), self._sleep_level)
        return generate_latest(self.metrics.registry)


def _ended() -> EngineDeadError:
    reason = "the server is shutting down: ask another one"
    return EngineDeadError(reason)


def _told(error: BaseException) -> Exception:
    """Return an error as its caller gets it: without the frames, which would hold what holds the error."""
    if isinstance(error, EngineError):
        return error.with_traceback(None)
    if isinstance(error, KeyboardInterrupt):
        return EngineError("the call was interrupted: make it again")
    _log.error("an error of the engine", exc_info=error)
    return EngineError(f"an error of the engine: {type(error).__name__}: {error}")
