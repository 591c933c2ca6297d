"""Load on a server that speaks OpenAI's completions: the same requests again and again, from some clients at once.

What is asked is the same in each round, so that what a server's caches take is there after the first ones, and what
grows on is kept from requests. Nothing of what is asked or answered is kept.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from lowtide.leakcheck.targets.server import TOKENS
from lowtide.probes.originals import time

_ANSWER_S = 300.0
_HEALTH_S = 5.0
_PAUSE_S = 0.5
_LONGEST = 512
"""Tokens of the longest prompt, where the server's model takes as many."""

_COUNTERS = ("request_success_total", "num_requests_total")
"""How the names of counters of requests end: vLLM's and lowtide's, SGLang's."""


@dataclass(frozen=True)
class _Kind:
    """One kind of request."""

    body: dict[str, Any]
    is_refused: bool = False
    is_aborted: bool = False


def _kinds(most: int) -> list[_Kind]:
    """Return what is asked, for a model that takes so many tokens."""
    drawn = random.Random(0)

    def prompt(length: int) -> list[int]:
        return [drawn.choice(TOKENS) for _ in range(length)]

    longest = max(8, min(_LONGEST, most // 2))
    shared, short = prompt(longest // 2), prompt(5)
    few, many = max(1, min(4, most // 8)), max(2, min(32, most // 4))
    plain = {"temperature": 0, "ignore_eos": True}
    return [
        _Kind({**plain, "prompt": short, "max_tokens": few}),
        _Kind({**plain, "prompt": prompt(longest), "max_tokens": few}),
        _Kind({**plain, "prompt": short, "max_tokens": many, "stream": True}),
        _Kind({**plain, "prompt": [*shared, *prompt(3)], "max_tokens": few}),
        _Kind({**plain, "prompt": prompt(longest), "max_tokens": many, "stream": True}, is_aborted=True),
        _Kind({**plain, "prompt": [*shared, *prompt(4)], "max_tokens": few, "stream": True}),
        _Kind({**plain, "prompt": short, "max_tokens": -1}, is_refused=True),
        _Kind({**plain, "prompt": [short, prompt(9)], "max_tokens": few}),
    ]


class Load:
    """Asks a server from threads of its own, while the block lasts.

    Args:
        url: the server's.
        clients: how many ask at once, each the next thing as soon as it is answered; 0: only whether it is well.
        is_needed: whether the server is known to be there, or to come.

    Attributes:
        answered: how many requests were answered, or broken off by the client, those to be refused aside.
        failed: how many have not.
        failure: what went wrong with the first of the kind of these that is most frequent.
        is_needed: as given.
        url: as given.
    """

    def __init__(self, url: str, clients: int, *, is_needed: bool) -> None:
        self.url, self._clients, self.is_needed = url.rstrip("/"), clients, is_needed
        self.answered = self.failed = 0
        # By its kind, with how many there were and the first of them.
        self._failures: dict[str, tuple[int, str]] = {}
        self._latest: float | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._ask_all()), name="lowtide-load", daemon=True)

    @property
    def failure(self) -> str:
        """See the class; empty where none has failed."""
        return max(self._failures.values(), default=(0, ""))[1]

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    def __enter__(self) -> Load:
        self.start()
        return self

    def stop(self) -> None:
        """Ask no more."""
        self._is_over.set()
        self._thread.join()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def silent_for(self) -> float | None:
        """Return the seconds since it has answered last; None before it ever has."""
        return None if self._latest is None else time.monotonic() - self._latest

    def requests(self) -> int | None:
        """Return how many requests the server has answered: those asked here, or else what it counts itself."""
        return self.answered if self._clients else self._counted()

    def _counted(self) -> int | None:
        try:
            with httpx.Client(trust_env=False, timeout=_HEALTH_S) as client:
                text = client.get(f"{self.url}/metrics").raise_for_status().text
            samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        except (httpx.HTTPError, ValueError):
            return None
        counts = [sample.value for sample in samples if sample.name.rpartition(":")[2] in _COUNTERS]
        return round(sum(counts)) if counts else None

    async def _ask_all(self) -> None:
        # Whatever proxy the environment names is for others.
        async with httpx.AsyncClient(base_url=self.url, trust_env=False, timeout=_ANSWER_S) as client:
            asking = asyncio.ensure_future(self._ask_on(client))
            while not self._is_over.is_set() and not asking.done():
                await asyncio.sleep(0.1)
            asking.cancel()
            (ended,) = await asyncio.gather(asking, return_exceptions=True)
            if isinstance(ended, Exception):
                self._fail("asking has ended", f"{type(ended).__name__}: {ended}")

    async def _ask_on(self, client: httpx.AsyncClient) -> None:
        while not await self._is_well(client):
            await asyncio.sleep(_PAUSE_S)
        if not self._clients:
            while True:
                await self._is_well(client)
                await asyncio.sleep(_HEALTH_S)
        models = await self._models(client)
        kinds = _kinds(min(most for _, most in models))
        await asyncio.gather(*(self._ask_as(client, number, kinds, models) for number in range(self._clients)))

    async def _is_well(self, client: httpx.AsyncClient) -> bool:
        try:
            # A server that knows no such path, or wants a key, answers too.
            well = (await client.get("/health", timeout=_HEALTH_S)).status_code < httpx.codes.INTERNAL_SERVER_ERROR
        except httpx.HTTPError:
            return False
        if well:
            self._latest = time.monotonic()
        return well

    async def _models(self, client: httpx.AsyncClient) -> Sequence[tuple[str, int]]:
        """Return the names that can be asked for, adapters among them, and how many tokens each takes."""
        while True:
            try:
                listed = (await client.get("/v1/models")).raise_for_status().json()["data"]
                return [(str(each["id"]), int(each.get("max_model_len") or 2 * _LONGEST)) for each in listed]
            except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
                self._fail("GET /v1/models", str(error))
            await asyncio.sleep(_PAUSE_S)

    async def _ask_as(
        self, client: httpx.AsyncClient, number: int, kinds: Sequence[_Kind], models: Sequence[tuple[str, int]]
    ) -> None:
        for turn in itertools.count(number):
            kind, (model, _) = kinds[turn % len(kinds)], models[turn // len(kinds) % len(models)]
            try:
                await self._ask(client, {"model": model, **kind.body}, kind)
            except httpx.HTTPError as error:
                self._fail(type(error).__name__, str(error))
                await asyncio.sleep(_PAUSE_S)

    async def _ask(self, client: httpx.AsyncClient, body: dict[str, Any], kind: _Kind) -> None:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            is_right = 400 <= answer.status_code < 500 if kind.is_refused else answer.is_success
            parts = answer.aiter_bytes()
            if kind.is_aborted and is_right:
                await anext(parts, b"")
                self._note()
                return
            said = b""
            async for part in parts:
                said = said or part[:200]
                self._latest = time.monotonic()
        if is_right:
            self._note(counts=not kind.is_refused)
        else:
            wanted = "was not refused" if kind.is_refused else "was refused"
            self._fail(f"a request {wanted}", f"{answer.status_code} {said.decode(errors='replace').strip()}")
            await asyncio.sleep(_PAUSE_S)

    def _note(self, *, counts: bool = True) -> None:
        self.answered += counts
        self._latest = time.monotonic()

    def _fail(self, kind: str, why: str) -> None:
        self.failed += 1
        many, first = self._failures.get(kind, (0, " ".join(f"{kind}: {why}".split())))
        self._failures[kind] = many + 1, first
