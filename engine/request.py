"""What a user asks for, what the engine keeps of it, what a step computes of it, and what comes back."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from lowtide.engine.errors import RequestError


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen and when they end; a `RequestError` names the field that cannot work.

    Temperature 0 takes the likeliest token (greedy); above 0 it draws, among the `top_k` likeliest (0 is all) and the
    fewest whose probabilities reach `top_p`.  Equal seeds draw equal tokens, whatever else is in the batch; None takes
    one from the engine's.  Stop tokens end the request besides the model's eos, and the last token is returned too.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise RequestError(f"max_tokens {self.max_tokens} must be at least 1")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise RequestError(f"temperature {self.temperature} must be 0 (greedy) or above")
        if self.top_k < 0:
            raise RequestError(f"top_k {self.top_k} must be 0 (all tokens) or above")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p {self.top_p} must be above 0 and at most 1")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise RequestError(f"seed {self.seed} must be from 0 to {2**63 - 1}")


class RequestStatus(enum.Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH = "length"
    FINISHED_ABORTED = "abort"

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will come."""
        return self in (self.FINISHED_STOPPED, self.FINISHED_LENGTH, self.FINISHED_ABORTED)


@dataclass(eq=False)
class Request:
    """One request inside the engine: its tokens so far and how many of them are in the KV cache.

    Prefill and decode are one thing here, as in vLLM V1: a step computes some of the tokens that are not yet computed,
    and a token is sampled when none is left.

    Attributes:
        num_computed_tokens: leading tokens whose keys and values are in the KV cache.
        num_cached_tokens: prompt tokens that the prefix cache had when the request first ran.
        arrival_index: how many requests came before; set by the scheduler.
        block_hashes: hash of each full block of `token_ids`; extended by the KV cache manager.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    status: RequestStatus = RequestStatus.WAITING
    arrival_index: int = 0
    block_hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise RequestError(f"request {self.request_id!r} has an empty prompt; give at least one token")
        self.prompt_token_ids = tuple(self.prompt_token_ids)
        self.token_ids = list(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens so far."""
        return len(self.token_ids)

    @property
    def output_token_ids(self) -> tuple[int, ...]:
        """What has been generated so far."""
        return tuple(self.token_ids[len(self.prompt_token_ids) :])

    @property
    def num_output_tokens(self) -> int:
        """How many tokens have been generated so far."""
        return len(self.token_ids) - len(self.prompt_token_ids)

    def output(self) -> RequestOutput:
        """Return what the user sees of the request now."""
        finished = self.status.is_finished
        return RequestOutput(
            request_id=self.request_id,
            prompt_token_ids=tuple(self.prompt_token_ids),
            token_ids=self.output_token_ids,
            finished=finished,
            finish_reason=self.status.value if finished else None,
            num_cached_tokens=self.num_cached_tokens,
        )


UNREAD = -1
"""In place of a token that the step before samples, and that is on the device still."""


class ScheduledRequest(msgspec.Struct, frozen=True):
    """What one step computes of one request, and all that a worker must know of it, in whichever process.

    Counts are those before the step; of `new_token_ids`, `UNREAD` alone is the one that the step before has sampled.
    The next token is sampled if it `samples`: the request's last one is among them.
    """

    request_id: str
    arrival_index: int
    num_preemptions: int
    num_computed_tokens: int
    num_output_tokens: int
    params: SamplingParams
    new_token_ids: list[int]
    block_ids: list[int]
    samples: bool

    @classmethod
    def of(cls, request: Request, num_tokens: int, block_ids: Iterable[int]) -> ScheduledRequest:
        """Return what computes the request's next `num_tokens` tokens."""
        start, stop = request.num_computed_tokens, request.num_computed_tokens + num_tokens
        return cls(
            request.request_id,
            request.arrival_index,
            request.num_preemptions,
            start,
            request.num_output_tokens,
            request.params,
            request.token_ids[start:stop],
            list(block_ids),
            stop == request.num_tokens,
        )

    @property
    def num_tokens(self) -> int:
        """Tokens to compute."""
        return len(self.new_token_ids)


class SchedulerOutput(msgspec.Struct, frozen=True):
    """What one step computes, in order of arrival, and who lost its KV blocks to others in it."""

    scheduled: tuple[ScheduledRequest, ...]
    preempted_ids: tuple[str, ...]


@dataclass(frozen=True)
class RequestOutput:
    """The state of a request after a step: all tokens so far, a stop token included, and why no more come.

    The reason is `stop`, `length` or `abort`; cached tokens are those that the prefix cache had when it first ran.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    finished: bool
    finish_reason: str | None
    num_cached_tokens: int
