"""Decides what each step computes: which requests run, how many tokens of each, and who must give way."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

import msgspec

from lowtide.engine.errors import RequestError
from lowtide.engine.kv.kv_cache import KVCacheManager
from lowtide.engine.request import (
    UNREAD,
    Request,
    RequestOutput,
    RequestStatus,
    ScheduledRequest,
    SchedulerOutput,
)


class Scheduler:
    """Continuous batching in order of arrival, with chunked prefill and preemption by recomputing, as in vLLM V1.

    `schedule` takes blocks, but a request advances only in `update_from_output`: when the step between them fails, the
    next `schedule` plans the same again.  Settings are those of `EngineConfig`; a token beyond `vocab_size` would be an
    illegal address on a card.
    """

    def __init__(
        self,
        kv_cache_manager: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        self.kv_cache_manager = kv_cache_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        # Whoever runs came before whoever waits, and both are in order of arrival: the last that runs is always the
        # one to give way, and the first always gets on.
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._requests: dict[str, Request] = {}
        self._num_arrived = 0

    def has_unfinished_requests(self) -> bool:
        """Return whether a step has something to do."""
        return bool(self._requests)

    def add_request(self, request: Request) -> None:
        """Queue a request; a `RequestError` where its id is in use, or it could never run to its end."""
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is in use; ids must be unique until they finish")
        strange = next((token for token in request.token_ids if not 0 <= token < self.vocab_size), None)
        if strange is not None:
            raise RequestError(
                f"request {request.request_id!r} has token {strange}; the vocabulary has {self.vocab_size}"
            )
        asked = f"{request.num_tokens} prompt tokens and max_tokens {request.params.max_tokens}"
        num_tokens = request.num_tokens + request.params.max_tokens
        if num_tokens > self.max_model_len:
            raise RequestError(
                f"request {request.request_id!r} with {asked} is beyond max_model_len {self.max_model_len}"
            )
        # The last token is returned and never computed, so it needs no room.
        manager = self.kv_cache_manager
        if num_tokens - 1 > manager.num_blocks * manager.block_size:
            raise RequestError(
                f"request {request.request_id!r} with {asked} is beyond the KV cache of {manager.num_blocks} blocks x "
                f"{manager.block_size} tokens"
            )
        request.arrival_index = self._num_arrived
        self._num_arrived += 1
        self._requests[request.request_id] = request
        self.waiting.append(request)

    def schedule(self) -> SchedulerOutput:
        """Plans one step: running requests first, then waiting ones as far as tokens, blocks and seats go."""
        scheduled: list[ScheduledRequest] = []
        preempted: list[str] = []
        budget = self.max_num_batched_tokens
        index = 0
        has_room = True
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            num_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            if self._make_room(request, num_tokens, preempted):
                scheduled.append(self._planned(request, num_tokens))
                budget -= num_tokens
            else:
                has_room = False
            index += 1
        # Whoever just gave way would take blocks back at once, and lose them again; and blocks that one who runs waits
        # for are not for one who comes.
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs and has_room and not preempted:
            num_tokens = self._start(self.waiting[0], budget)
            if num_tokens == 0:
                break
            scheduled.append(self._planned(self.running[-1], num_tokens))
            budget -= num_tokens
        return SchedulerOutput(tuple(scheduled), tuple(preempted))

    def schedule_next(self, output: SchedulerOutput) -> SchedulerOutput | None:
        """Plans the step after one that is being computed; None where it depends on tokens that nobody knows yet.

        It is the next token of the same requests.  So none of them may end with the step but by a stop token, which
        makes what is computed after it vain, and none that waits could start.
        """
        # Some who run were not in the step, or some who were have ended since; nobody starts but in `schedule`.
        if len(output.scheduled) != len(self.running) or (self.waiting and len(self.running) < self.max_num_seqs):
            return None
        following = []
        for item, request in zip(output.scheduled, self.running, strict=True):
            is_last = request.num_output_tokens + 1 == request.params.max_tokens
            if item.num_tokens > 1 or is_last or self.kv_cache_manager.allocate_slots(request, 2) is None:
                return None
            after = msgspec.structs.replace(
                item,
                num_computed_tokens=item.num_computed_tokens + 1,
                num_output_tokens=item.num_output_tokens + 1,
                new_token_ids=[UNREAD],
                block_ids=list(self.kv_cache_manager.block_ids(item.request_id)),
            )
            following.append(after)
        return SchedulerOutput(tuple(following), ())

    def update_from_output(self, output: SchedulerOutput, sampled_tokens: Mapping[str, int]) -> list[RequestOutput]:
        """Take in what a step computed and sampled; one output for each request with a new token."""
        outputs = []
        for item in output.scheduled:
            request = self._requests.get(item.request_id)
            if request is None or request.arrival_index != item.arrival_index:
                continue  # aborted since
            request.num_computed_tokens += item.num_tokens
            self.kv_cache_manager.cache_blocks(request, item.num_tokens)
            if request.num_computed_tokens < request.num_tokens:
                continue
            request.token_ids.append(sampled_tokens[request.request_id])
            status = self._finish_status(request)
            if status is not None:
                self._finish(request, status)
            outputs.append(request.output())
        return outputs

    def abort(self, request_ids: Iterable[str] | None = None) -> list[RequestOutput]:
        """End requests now, all of them if not told which, and take their blocks back; the last output of each."""
        outputs = []
        for request_id in list(self._requests) if request_ids is None else request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._finish(request, RequestStatus.FINISHED_ABORTED)
                outputs.append(request.output())
        return outputs

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; False, with nothing changed, while requests or transfers hold blocks."""
        return self.kv_cache_manager.reset_prefix_cache()

    def _planned(self, request: Request, num_tokens: int) -> ScheduledRequest:
        return ScheduledRequest.of(request, num_tokens, self.kv_cache_manager.block_ids(request.request_id))

    def _make_room(self, request: Request, num_tokens: int, preempted: list[str]) -> bool:
        """Take blocks for a running request, from those that came last if need be.

        False when it had to go itself, or when nobody need give way, because blocks are about to come free.
        """
        while self.kv_cache_manager.allocate_slots(request, num_tokens) is None:
            if self.kv_cache_manager.blocks_are_coming:
                return False
            victim = self.running.pop()
            self.kv_cache_manager.free(victim)
            victim.status = RequestStatus.PREEMPTED
            victim.num_computed_tokens = 0
            victim.num_preemptions += 1
            self.waiting.appendleft(victim)
            preempted.append(victim.request_id)
            if victim is request:
                return False
        return True

    def _start(self, request: Request, budget: int) -> int:
        """Lets the first waiting request run; the tokens to compute, 0 when its blocks are missing or on their way."""
        manager = self.kv_cache_manager
        computed_blocks = manager.get_computed_blocks(request)
        if manager.await_offloaded(request, computed_blocks, budget):
            return 0
        num_computed = len(computed_blocks) * manager.block_size
        num_tokens = min(request.num_tokens - num_computed, budget)
        if manager.allocate_slots(request, num_tokens, computed_blocks) is None:
            return 0
        self.waiting.popleft()
        self.running.append(request)
        if request.status is RequestStatus.WAITING:
            request.num_cached_tokens = num_computed
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_computed
        return num_tokens

    def _finish_status(self, request: Request) -> RequestStatus | None:
        params, token = request.params, request.token_ids[-1]
        if token in params.stop_token_ids or (token in self.eos_token_ids and not params.ignore_eos):
            return RequestStatus.FINISHED_STOPPED
        return RequestStatus.FINISHED_LENGTH if request.num_output_tokens == params.max_tokens else None

    def _finish(self, request: Request, status: RequestStatus) -> None:
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        request.status = status
        self.kv_cache_manager.free(request)
        del self._requests[request.request_id]
