"""The loop of the engine: requests in, one step at a time, tokens out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lowtide.engine.config import EngineConfig
from lowtide.engine.errors import KVTransferError
from lowtide.engine.kv.kv_cache import KVCacheManager, KVCacheUsage
from lowtide.engine.ranks import MultiprocExecutor
from lowtide.engine.request import Request, RequestOutput, SamplingParams, SchedulerOutput
from lowtide.engine.scheduler import Scheduler
from lowtide.engine.teardown import Teardown
from lowtide.engine.worker import Plan, Worker


def create_core(config: EngineConfig, plan: Plan) -> EngineCore:
    """Return the engine's core, with all its memory; errors as `LLMEngine.create`."""
    manager = KVCacheManager(plan.num_blocks, config.block_size, config.enable_prefix_caching, plan.num_host_blocks)
    scheduler = Scheduler(
        manager,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=plan.max_model_len,
        vocab_size=plan.model_config.vocab_size,
        eos_token_ids=plan.model_config.eos_token_ids,
    )
    # Last, so that nothing can fail once there is memory to give back.
    worker = MultiprocExecutor(config) if config.tensor_parallel_size > 1 else Worker(config, plan)
    return EngineCore(scheduler, worker, runs_ahead=config.runs_ahead)


class _Step(NamedTuple):
    """A step that was launched: what it computes, and the tokens that it samples, which are waited for when asked."""

    output: SchedulerOutput
    sampled: Mapping[str, int]


class EngineCore:
    """Joins the scheduler, which owns the requests and decides, and the worker, which owns the memory and computes.

    Where it `runs_ahead`, a step is launched before the tokens of the one before it are read: the host plans under the
    card's work (as vLLM's asynchronous scheduling).  At most one is under way when a call returns, and none when no
    request is left.
    """

    def __init__(self, scheduler: Scheduler, worker: Worker | MultiprocExecutor, *, runs_ahead: bool = False) -> None:
        self.scheduler = scheduler
        self.worker = worker
        self._runs_ahead = runs_ahead
        self._ahead: _Step | None = None

    def add_request(self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """Queue a request; errors as `Request` and `Scheduler.add_request`."""
        self.scheduler.add_request(Request(request_id, prompt_token_ids, params))

    def has_unfinished_requests(self) -> bool:
        """Return whether a step has something to do."""
        return self.scheduler.has_unfinished_requests()

    def num_requests(self) -> tuple[int, int]:
        """Return how many requests run, and how many wait."""
        return len(self.scheduler.running), len(self.scheduler.waiting)

    def step(self) -> list[RequestOutput]:
        """Compute one step; one output for each request with a new token.  One that fails moves no request on."""
        self.take_in_transfers()
        step, self._ahead = self._ahead, None
        if step is None:
            output = self.scheduler.schedule()
            self._submit_transfers()
            if not output.scheduled:
                if self.has_unfinished_requests():
                    # Whoever waits, waits for blocks that are copied.
                    self.drain_transfers()
                return []
            step = self._launched(output)
        following = self.scheduler.schedule_next(step.output) if self._runs_ahead else None
        ahead = None if following is None else self._launched(following)
        # All of them at once, before anything advances: here the device is waited for, and may fail.
        outputs = self.scheduler.update_from_output(step.output, dict(step.sampled))
        self._submit_transfers()
        self._ahead = ahead
        self._settle()
        return outputs

    def _launched(self, output: SchedulerOutput) -> _Step:
        return _Step(output, self.worker.execute_model(output))

    def _settle(self) -> None:
        """Wait for the step that was launched ahead, if nobody is left who could want its tokens."""
        if self._ahead is not None and not self.has_unfinished_requests():
            ahead, self._ahead = self._ahead, None
            dict(ahead.sampled)

    def abort(self, request_ids: Sequence[str] | None = None) -> list[RequestOutput]:
        """End requests now, all of them if not told which; the last output of each."""
        outputs = self.scheduler.abort(request_ids)
        self._settle()
        return outputs

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes, on the host too; False, with nothing forgotten, while requests hold blocks."""
        self.drain_transfers()
        return self.scheduler.reset_prefix_cache()

    def forget_prefixes(self) -> None:
        """Forget what the cache's blocks hold, on the host too: it goes with their pages, or with the weights."""
        self.scheduler.kv_cache_manager.forget()

    def prepare_sleep(self, level: int) -> None:
        """Do all of a sleep that can fail for want of something."""
        self.drain_transfers()
        self.worker.prepare_sleep(level)

    def reload_weights(self) -> None:
        """Fill the weights in place from where they came, and forget what the former ones computed."""
        self.drain_transfers()
        try:
            self.worker.begin_reload()
        finally:
            self.worker.end_reload()
        self.forget_prefixes()

    def begin_update(self) -> None:
        """Keep the present weights on the host, until `end_update`."""
        self.drain_transfers()
        self.worker.begin_update()

    def end_update(self, loaded: bool) -> None:
        """Let go of the former weights, and where new ones are `loaded`, forget what the former ones computed."""
        self.worker.end_reload()
        if loaded:
            self.forget_prefixes()

    def kv_cache_usage(self) -> KVCacheUsage:
        """Return who has the KV blocks."""
        return self.scheduler.kv_cache_manager.usage

    def shutdown(self) -> None:
        """Give everything back; errors as `LLMEngine.shutdown`."""
        teardown = Teardown("shutting the engine down")
        teardown.run("the requests", self.abort)
        teardown.run("the worker", self.worker.shutdown)
        teardown.run("the KV transfers", self.take_in_transfers)
        teardown.finish()

    def take_in_transfers(self) -> None:
        """Take in the transfers of KV blocks that have ended; `KVTransferError`: some had failed."""
        connector, offload = self.worker.kv_connector, self.scheduler.kv_cache_manager.offload
        if connector is None or offload is None:
            return
        errors = offload.take_in(connector.take_completed())
        if errors:
            said = "; ".join(dict.fromkeys(map(repr, errors)))
            raise KVTransferError(
                f"{len(errors)} transfers of KV blocks to or from the host failed ({said}); their blocks are free, and "
                "what they held is computed again when it is needed: carry on, or look for what is wrong with the host"
            ) from errors[0]

    def drain_transfers(self) -> None:
        """Wait until every transfer of KV blocks has ended, and take them in without a step.

        Without it, blocks stay held until a request happens to come by (vllm#38503).  A `KVTransferError` where some
        failed, or do not end: those still hold their blocks.
        """
        connector, offload = self.worker.kv_connector, self.scheduler.kv_cache_manager.offload
        if connector is None or offload is None:
            return
        self._submit_transfers()
        connector.flush()
        try:
            self.take_in_transfers()
        finally:
            offload.abandon()

    def _submit_transfers(self) -> None:
        connector, offload = self.worker.kv_connector, self.scheduler.kv_cache_manager.offload
        if connector is not None and offload is not None:
            offload.submit(connector)
