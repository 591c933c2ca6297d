"""The engine behind HTTP, as vLLM serves one: `/v1/completions`, sleep and wake, health and metrics."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec
import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from lowtide.engine.async_llm import AsyncLLM
from lowtide.engine.config import PRESETS
from lowtide.engine.errors import (
    CheckpointError,
    ConfigError,
    EngineDeadError,
    EngineError,
    EngineStateError,
    RequestError,
)
from lowtide.engine.llm_engine import LLMEngine
from lowtide.engine.request import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from tokenizers import Tokenizer

GRACEFUL_S = 5
"""Seconds that clients have to take the rest of their answers when the server ends."""

MOST_ANSWERS = 128
"""Answers to one prompt, as OpenAI allows them."""

_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (),
    "min_p": (0,),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "suffix": ("",),
    "use_beam_search": (False,),
}
"""What would change an answer and is not there, with the values besides null at which it changes nothing."""

_STATUS: tuple[tuple[type[Exception], HTTPStatus], ...] = (
    (RequestError, HTTPStatus.BAD_REQUEST),
    (ConfigError, HTTPStatus.BAD_REQUEST),
    (CheckpointError, HTTPStatus.BAD_REQUEST),
    (msgspec.MsgspecError, HTTPStatus.BAD_REQUEST),
    (ClientDisconnect, HTTPStatus.BAD_REQUEST),
    (EngineStateError, HTTPStatus.CONFLICT),
    (EngineDeadError, HTTPStatus.SERVICE_UNAVAILABLE),
    (EngineError, HTTPStatus.INTERNAL_SERVER_ERROR),
)

_KINDS = {400: "BadRequestError", 404: "NotFoundError", 500: "InternalServerError", 503: "ServiceUnavailableError"}

_log = logging.getLogger("uvicorn.error")

CONTEXT = 4
"""Tokens of the prompt that the first new token's text may depend on, as vLLM has it."""

_LONGEST = 4
"""Tokens that one character may take: UTF-8 has up to 4 bytes."""

_SPELLED = re.compile(r"<(\d{1,9})>")
_PLAIN = frozenset({10, *range(32, 127)} - {ord("<")})


class TokenText:
    """Text of tokens.

    Without a tokenizer, as with random weights, a text's bytes in UTF-8 are its tokens. In a token's text, what can be
    printed in ASCII stands for itself, and all else as `<845>`, which is read as that token again: the text of any
    tokens has these very tokens.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        if self._tokenizer is not None:
            return list(self._tokenizer.encode(text).ids)
        # In turns: what stands between, and a number.
        parts = _SPELLED.split(text)
        return [
            token
            for index, part in enumerate(parts)
            for token in ([int(part)] if index % 2 else part.encode(errors="replace"))
        ]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without the special ones of a tokenizer."""
        if self._tokenizer is not None:
            return str(self._tokenizer.decode(list(tokens)))
        return "".join(chr(token) if token in _PLAIN else f"<{token}>" for token in tokens)


class Detokenizer:
    """The text of one answer while its tokens come, until one of the texts comes that end it.

    Text is held back as long as it may change: the bytes of a character that is not whole, and what may begin a text
    that ends the answer.
    """

    def __init__(self, text: TokenText, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self._text = text
        self._stops = stops
        self._window = list(prompt[-CONTEXT:])
        self._read = len(self._window)
        self._held = ""

    def add(self, token: int) -> str | None:
        """Take in the next token, and return the text that ends the answer, if it is there now."""
        self._window.append(token)
        before, after = self._text.decode(self._window[: self._read]), self._text.decode(self._window)
        if after.endswith("\ufffd") and len(self._window) - self._read < _LONGEST:
            return None
        self._held += after[len(before) :]
        self._window, self._read = self._window[self._read :], len(self._window) - self._read
        found = [(place, stop) for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if not found:
            return None
        place, stop = min(found)
        self._held = self._held[:place]
        return stop

    def take(self, *, is_last: bool) -> str:
        """Return the text that has come since the last time, all of it where no more comes."""
        if is_last:
            whole = self._text.decode(self._window)[len(self._text.decode(self._window[: self._read])) :]
            taken, self._held = self._held + whole, ""
            self._read = len(self._window)
            return taken
        kept = len(self._held) - max((len(stop) - 1 for stop in self._stops), default=0)
        taken, self._held = self._held[: max(kept, 0)], self._held[max(kept, 0) :]
        return taken


class StreamOptions(msgspec.Struct):
    """What a stream has besides."""

    include_usage: bool | None = None


class WorkerCall(msgspec.Struct):
    """A call of a method of all workers, as vLLM has it; the one that is there is `reload_weights`."""

    method: Literal["reload_weights"]
    kwargs: dict[str, str] = {}


class CompletionRequest(msgspec.Struct):
    """The fields of a request that count; null is the default, and what is not named here is passed over."""

    prompt: str | list[str | int | list[int]]
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    echo: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None

    def prompts(self) -> Sequence[str | list[int]]:
        """Return what is to be completed: texts, and lists of tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        tokens = [each for each in self.prompt if isinstance(each, int)]
        others = [each for each in self.prompt if not isinstance(each, int)]
        if tokens and others:
            raise RequestError("prompt has tokens beside texts or lists: give the tokens of one, or a list of prompts")
        return others or [tokens]

    def stops(self) -> list[str]:
        """Return the texts that end an answer."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if "" in stops:
            raise RequestError("stop has an empty text, which would end each answer at once: leave it out")
        return stops

    def params(self) -> Sequence[SamplingParams]:
        """Return how each of the answers to a prompt is sampled; OpenAI's defaults, which are not greedy."""
        number = 1 if self.n is None else self.n
        if not 1 <= number <= MOST_ANSWERS:
            raise RequestError(f"n {number} must be from 1 to {MOST_ANSWERS}")
        first = SamplingParams(
            max_tokens=16 if self.max_tokens is None else self.max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=0 if self.top_k is None or self.top_k == -1 else self.top_k,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=self.seed,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
        )
        return [first if first.seed is None else replace(first, seed=first.seed + index) for index in range(number)]


@dataclass
class Choice:
    """One answer to one prompt, while its tokens come; `echo` is what its text begins with."""

    index: int
    request_id: str
    prompt: Sequence[int]
    params: SamplingParams
    detokenizer: Detokenizer
    echo: str
    has_token_ids: bool
    num_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: str | None = None

    def take(self, output: RequestOutput) -> dict[str, Any]:
        """Return what is new since the last time, as a chunk of a stream has it, however many tokens come at once."""
        is_first = self.num_tokens == 0
        stop_reason: int | str | None = None
        new = []
        for token in output.token_ids[self.num_tokens :]:
            new.append(token)
            self.num_tokens += 1
            if output.finish_reason == "stop" and self.num_tokens == len(output.token_ids):
                # It ends the answer, and is no part of its text.
                stop_reason = token if token in self.params.stop_token_ids else None
            else:
                stop_reason = self.detokenizer.add(token)
                if stop_reason is not None:
                    self.finish_reason = "stop"
                    break
        self.num_cached_tokens = output.num_cached_tokens
        self.finish_reason = self.finish_reason or output.finish_reason
        text = self.detokenizer.take(is_last=self.finish_reason is not None)
        piece: dict[str, Any] = {
            "index": self.index,
            "text": self.echo + text,
            "logprobs": None,
            "finish_reason": self.finish_reason,
            "stop_reason": stop_reason,
        }
        self.echo = ""
        if self.has_token_ids:
            piece["token_ids"] = new
            piece["prompt_token_ids"] = self.prompt if is_first else None
        return piece


@dataclass
class Completion:
    """The answer to one call of `/v1/completions`, as an application of ASGI; it ends when its client goes.

    The answers to one prompt stand together in `choices`; `head` is what a response and each chunk begin with.
    """

    llm: AsyncLLM
    choices: Sequence[Choice]
    head: dict[str, Any]
    num_prompts: int
    streams: bool
    has_usage: bool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; what cannot be answered at all is raised."""
        answering = asyncio.ensure_future(self._stream(send) if self.streams else self._answer(scope, receive, send))
        leaving = asyncio.ensure_future(_client_leaves(receive))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            answering.cancel()
            leaving.cancel()
            error, _ = await asyncio.gather(answering, leaving, return_exceptions=True)
        if isinstance(error, Exception):
            raise error

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        whole: dict[int, dict[str, Any]] = {}
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                so_far = whole.setdefault(piece["index"], piece)
                if so_far is not piece:
                    so_far["text"] += piece["text"]
                    so_far.get("token_ids", []).extend(piece.get("token_ids", ()))
                    so_far.update({name: piece[name] for name in ("finish_reason", "stop_reason")})
        choices = [whole[index] for index in sorted(whole)]
        await _json({**self.head, "choices": choices, "usage": self._usage()})(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        has_begun = False

        async def say(data: bytes) -> None:
            nonlocal has_begun
            if not has_begun:
                has_begun = True
                headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})

        usage = {"usage": None} if self.has_usage else {}
        try:
            async with aclosing(self._pieces()) as pieces:
                async for piece in pieces:
                    await say(msgspec.json.encode({**self.head, "choices": [piece], **usage}))
            if self.has_usage:
                await say(msgspec.json.encode({**self.head, "choices": [], "usage": self._usage()}))
        except EngineError as error:
            if not has_begun:
                raise
            # The status is sent already.
            await say(msgspec.json.encode(_described(str(error), _status(error))))
        await say(b"[DONE]")
        await send({"type": "http.response.body", "body": b""})

    async def _pieces(self) -> AsyncGenerator[dict[str, Any], None]:
        unfinished = {choice.request_id: choice for choice in self.choices}
        requests = [(choice.request_id, choice.prompt, choice.params) for choice in self.choices]
        async with aclosing(self.llm.generate(requests)) as outputs:
            async for output in outputs:
                choice = unfinished.get(output.request_id)
                if choice is None:
                    continue
                yield choice.take(output)
                if choice.finish_reason is not None:
                    del unfinished[output.request_id]
                    if not output.finished:
                        self.llm.abort([output.request_id], "stop")
                if not unfinished:
                    return

    def _usage(self) -> dict[str, Any]:
        # A prompt counts once, however many answers it has.
        each = self.choices[:: len(self.choices) // self.num_prompts]
        asked, answered = sum(len(one.prompt) for one in each), sum(choice.num_tokens for choice in self.choices)
        return {
            "prompt_tokens": asked,
            "completion_tokens": answered,
            "total_tokens": asked + answered,
            "prompt_tokens_details": {"cached_tokens": sum(one.num_cached_tokens for one in each)},
        }


class Server(uvicorn.Server):
    """Serves one engine; a signal to end shuts the engine down first."""

    def __init__(self, engine: LLMEngine) -> None:
        self._model = engine.config.model
        self._engine = engine
        self._text = TokenText(None)
        self._since = int(time.time())
        self.llm = AsyncLLM(engine, partial(setattr, self, "should_exit", True))
        routes = [
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/health", self._health),
            Route("/metrics", self._read_metrics),
            Route("/sleep", self._sleep, methods=["POST"]),
            Route("/wake_up", self._wake_up, methods=["POST"]),
            Route("/is_sleeping", self._is_sleeping),
            Route("/reset_prefix_cache", self._reset_prefix_cache, methods=["POST"]),
            Route("/collective_rpc", self._call_workers, methods=["POST"]),
        ]
        handlers: dict[Any, Any] = dict.fromkeys((HTTPException, *(kind for kind, _ in _STATUS)), _failure)
        app = Starlette(routes=routes, exception_handlers=handlers)
        super().__init__(
            uvicorn.Config(
                app, loop="asyncio", http="h11", ws="none", lifespan="off", timeout_graceful_shutdown=GRACEFUL_S
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to serve."""
        self._text = TokenText(self._engine.tokenizer)
        self.llm.start()
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the engine, whose requests are aborted, then the connections; a second Ctrl-C waits for neither."""
        self.llm.close()
        while self.llm.is_alive and not self.force_exit:
            await asyncio.sleep(0.02)
        await super().shutdown(sockets)

    async def _completions(self, request: Request) -> Completion:
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise RequestError("the body must be JSON, with the header Content-Type: application/json")
        try:
            body = msgspec.json.decode(await request.body())
        except msgspec.DecodeError as error:
            raise RequestError(f"the body is no JSON: {error}") from None
        asked = msgspec.convert(body, CompletionRequest)
        for name, neutral in _UNSUPPORTED.items():
            if (value := body.get(name)) is not None and value not in neutral:
                raise RequestError(f"{name} is not supported: leave it out")
        if asked.model not in (None, self._model):
            raise HTTPException(404, f"The model `{asked.model}` does not exist; there is `{self._model}`.")
        completion_id = f"cmpl-{uuid.uuid4().hex}"
        head = {"id": completion_id, "object": "text_completion", "created": int(time.time()), "model": self._model}
        prompts = asked.prompts()
        choices: list[Choice] = []
        for prompt in prompts:
            tokens = self._text.encode(prompt) if isinstance(prompt, str) else prompt
            shown = "" if not asked.echo else prompt if isinstance(prompt, str) else self._text.decode(prompt)
            for params in asked.params():
                index, detokenizer = len(choices), Detokenizer(self._text, tokens, asked.stops())
                name, has_ids = f"{completion_id}-{index}", bool(asked.return_token_ids)
                choices.append(Choice(index, name, tokens, params, detokenizer, shown, has_ids))
        options = asked.stream_options or StreamOptions()
        return Completion(self.llm, choices, head, len(prompts), bool(asked.stream), bool(options.include_usage))

    async def _models(self, request: Request) -> Response:
        root = "" if self._model in PRESETS else self._model
        card = {"id": self._model, "object": "model", "created": self._since, "owned_by": "lowtide", "root": root}
        return _json({"object": "list", "data": [card]})

    async def _health(self, request: Request) -> Response:
        return Response(status_code=200 if self.llm.death is None else 503)

    async def _read_metrics(self, request: Request) -> Response:
        return Response(await self.llm.read_metrics(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def _sleep(self, request: Request) -> Response:
        level, mode = request.query_params.get("level", "1"), request.query_params.get("mode", "abort")
        if level not in ("1", "2"):
            raise RequestError(f"sleep level {level!r} does not exist: use 1 (weights stay in host memory) or 2")
        reached = await self.llm.sleep(int(level), cast(Literal["wait", "abort"], mode))
        return _json({"status": "sleeping", "level": reached})

    async def _wake_up(self, request: Request) -> Response:
        tags = request.query_params.getlist("tags") or None
        return _json({"status": "awake" if await self.llm.wake(tags) else "sleeping", "tags": tags})

    async def _is_sleeping(self, request: Request) -> Response:
        return _json({"is_sleeping": await self.llm.is_sleeping()})

    async def _call_workers(self, request: Request) -> Response:
        asked = msgspec.json.decode(await request.body(), type=WorkerCall)
        await self.llm.reload_weights(asked.kwargs.get("weights_path", ""))
        return _json({"results": [None] * self._engine.config.tensor_parallel_size})

    async def _reset_prefix_cache(self, request: Request) -> Response:
        return _json({"success": await self.llm.reset_prefix_cache()})


def serve(engine: LLMEngine, host: str, port: int) -> None:
    """Create an engine, whose core has a process of its own, and serve it until SIGINT or SIGTERM; port 0 is any.

    A `ConfigError` where nobody can listen there, and the engine's errors, also of one that has ended by itself.
    """
    with _bound(host, port) as listening:
        server = Server(engine)
        engine.create()
        try:
            address, number = listening.getsockname()[:2]
            _log.info("Serving %s on http://%s:%d", engine.config.model, address, number)
            server.run([listening])
        except KeyboardInterrupt:
            # As uvicorn's own command: what Ctrl-C asks for is done by now.
            pass
        finally:
            # Else the engine's thread is at it, and was not waited for: the core ends with this process.
            if not server.llm.is_alive:
                engine.shutdown()
        if server.llm.death is not None:
            raise server.llm.death


def _bound(host: str, port: int) -> socket.socket:
    """Return a socket that has the address, and does not listen yet: who asks is refused until the engine is there."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with ExitStack() as stack:
            bound = stack.enter_context(socket.socket(family, kind, protocol))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            stack.pop_all()
    except OSError as error:
        raise ConfigError(f"port {port} of {host} cannot be listened at ({error.strerror}): choose others") from error
    return bound


async def _client_leaves(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _failure(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        return _json(_described(error.detail, error.status_code), error.status_code)
    return _json(_described(str(error), _status(error)), _status(error))


def _status(error: Exception) -> HTTPStatus:
    return next(status for kind, status in _STATUS if isinstance(error, kind))


def _described(text: str, status: int) -> dict[str, Any]:
    kind = _KINDS.get(status, HTTPStatus(status).phrase)
    return {"error": {"message": text, "type": kind, "param": None, "code": int(status)}}


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
