"""The loop of the engine: requests in, one step at a time, tokens out."""

from __future__ import annotations

from collections.abc import Iterable

from lowtide.engine.request import Request, RequestOutput
from lowtide.engine.scheduler import Scheduler
from lowtide.engine.worker import Worker


class EngineCore:
    """Joins the scheduler, which decides, and the worker, which computes.

    Args:
        scheduler: owns the requests and the accounting of KV blocks.
        worker: owns all that is on the device.
    """

    def __init__(self, scheduler: Scheduler, worker: Worker) -> None:
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
        """
        output = self.scheduler.schedule()
        if not output.scheduled:
            return []
        return self.scheduler.update_from_output(output, self.worker.execute_model(output))

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """End requests now; the last output of each."""
        return self.scheduler.abort(request_ids)

    def abort_all(self) -> list[RequestOutput]:
        """End every request now; the last output of each."""
        return self.scheduler.abort_all()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, with nothing changed, while requests hold blocks."""
        return self.scheduler.reset_prefix_cache()
