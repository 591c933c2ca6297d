"""One step as the ranks get it: all that a worker must know of the requests, encoded by msgspec."""

from __future__ import annotations

import msgspec

from lowtide.engine.request import SamplingParams
from lowtide.engine.scheduler import SchedulerOutput


class RankRequest(msgspec.Struct, frozen=True):
    """What a rank must know of a request to compute one step of it; fields as those of `Request`."""

    request_id: str
    arrival_index: int
    num_preemptions: int
    num_computed_tokens: int
    num_output_tokens: int
    params: SamplingParams


class RankItem(msgspec.Struct, frozen=True):
    """What one step computes of one request; fields as those of `ScheduledRequest`."""

    request: RankRequest
    new_token_ids: list[int]
    block_ids: list[int]
    samples: bool

    @property
    def num_tokens(self) -> int:
        """Tokens to compute."""
        return len(self.new_token_ids)


class RankStep(msgspec.Struct, frozen=True):
    """What one step computes; see `SchedulerOutput`."""

    scheduled: list[RankItem]


def rank_step(output: SchedulerOutput) -> RankStep:
    """A step as the ranks get it."""
    return RankStep(
        [
            RankItem(
                RankRequest(**{name: getattr(item.request, name) for name in RankRequest.__struct_fields__}),
                list(item.new_token_ids),
                list(item.block_ids),
                item.samples,
            )
            for item in output.scheduled
        ]
    )
