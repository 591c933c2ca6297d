"""The loop of the engine: requests in, one step at a time, tokens out."""

from __future__ import annotations

from collections.abc import Iterable

from lowtide.engine.errors import KVTransferError
from lowtide.engine.ranks.executor import MultiprocExecutor
from lowtide.engine.request import Request, RequestOutput
from lowtide.engine.scheduler import Scheduler
from lowtide.engine.worker import Worker


class EngineCore:
    """Joins the scheduler, which decides, and the worker, which computes.

    Args:
        scheduler: owns the requests and the accounting of KV blocks.
        worker: owns all that is on the device, or the ranks that do.
    """

    def __init__(self, scheduler: Scheduler, worker: Worker | MultiprocExecutor) -> None:
        self.scheduler = scheduler
        self.worker = worker

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: it could never run to its end, or its id is in use.
        """
        self.scheduler.add_request(request)

    def has_unfinished_requests(self) -> bool:
        """Whether a step has something to do."""
        return self.scheduler.has_unfinished_requests()

    def step(self) -> list[RequestOutput]:
        """Compute one step; one output for each request that has a new token.

        When the step fails, no request has moved on, and the next step computes the same again.

        Raises:
            KVTransferError: copies of KV blocks failed since the last step; only they are lost.
        """
        self.take_in_transfers()
        output = self.scheduler.schedule()
        self._submit_transfers()
        if not output.scheduled:
            if self.has_unfinished_requests():
                # Whoever waits, waits for blocks that are copied.
                self.drain_transfers()
            return []
        outputs = self.scheduler.update_from_output(output, self.worker.execute_model(output))
        self._submit_transfers()
        return outputs

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """End requests now; the last output of each."""
        return self.scheduler.abort(request_ids)

    def abort_all(self) -> list[RequestOutput]:
        """End every request now; the last output of each."""
        return self.scheduler.abort_all()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes, on the host too; False, with nothing forgotten, while requests hold blocks.

        Raises:
            KVTransferError: as `drain_transfers`; nothing was forgotten.
        """
        self.drain_transfers()
        return self.scheduler.reset_prefix_cache()

    def take_in_transfers(self) -> None:
        """Take in the transfers of KV blocks that have ended, and give their blocks back; waits for none.

        Raises:
            KVTransferError: some had failed; all are taken in nevertheless.
        """
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

        Without it, blocks stay held until a request happens to come by (vllm#38503).

        Raises:
            KVTransferError: some failed, and all are taken in; or they do not end, and those under way still hold
                their blocks.  It can be called again.
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
