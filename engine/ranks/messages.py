"""What the executor and its ranks say to each other: plain data, encoded by msgspec."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from lowtide.engine.config import EngineConfig
from lowtide.engine.processes.remote_errors import RemoteError
from lowtide.engine.request import SamplingParams
from lowtide.engine.scheduler import SchedulerOutput
from lowtide.engine.weight_transfer.buckets import SharedBucket


class StepRequest(msgspec.Struct, frozen=True):
    """What a rank must know of a request to compute one step of it; fields as those of `Request`."""

    request_id: str
    arrival_index: int
    num_preemptions: int
    num_computed_tokens: int
    num_output_tokens: int
    params: SamplingParams


class StepItem(msgspec.Struct, frozen=True):
    """What one step computes of one request; fields as those of `ScheduledRequest`."""

    request: StepRequest
    new_token_ids: list[int]
    block_ids: list[int]
    samples: bool

    @property
    def num_tokens(self) -> int:
        """Tokens to compute."""
        return len(self.new_token_ids)


class Create(msgspec.Struct, frozen=True, tag=True):
    """Create the rank's worker.

    Attributes:
        config: of the engine, with this rank's device.
        num_blocks: KV blocks of every rank.
        max_model_len: tokens that one request may span.
        rank: of the receiver.
        store: path of the file in which the ranks find each other.
    """

    config: EngineConfig
    num_blocks: int
    max_model_len: int
    rank: int
    store: str


class Execute(msgspec.Struct, frozen=True, tag=True):
    """Compute one step."""

    scheduled: list[StepItem]


class PrepareSleep(msgspec.Struct, frozen=True, tag=True):
    """Do all of a sleep that can fail for want of something."""

    level: int


class UndoPrepareSleep(msgspec.Struct, frozen=True, tag=True):
    """Another rank could not prepare."""


class Sleep(msgspec.Struct, frozen=True, tag=True):
    """Give up the pages."""

    level: int


class BeginWake(msgspec.Struct, frozen=True, tag=True):
    """Map the pages of these tags, and fill them."""

    tags: list[str]


class UndoWake(msgspec.Struct, frozen=True, tag=True):
    """Another rank could not wake, or not fall asleep."""

    tags: list[str]


class EndWake(msgspec.Struct, frozen=True, tag=True):
    """All ranks are awake."""

    tags: list[str]


class SuspendGroup(msgspec.Struct, frozen=True, tag=True):
    """Give up what the process group holds: all ranks are asleep."""


class ResumeGroup(msgspec.Struct, frozen=True, tag=True):
    """Make the process group again: all ranks are awake, and come to it together."""


class BeginReload(msgspec.Struct, frozen=True, tag=True):
    """Fill the weights from where they came."""


class UndoReload(msgspec.Struct, frozen=True, tag=True):
    """Another rank could not read its weights."""


class BeginUpdate(msgspec.Struct, frozen=True, tag=True):
    """Keep the present weights: a trainer's come, until `EndReload`, or `UndoReload` before it."""


class LoadBucket(msgspec.Struct, frozen=True, tag=True):
    """Copy this rank's part of what a bucket has."""

    bucket: SharedBucket


class ReadWeightChecksums(msgspec.Struct, frozen=True, tag=True):
    """Report the checksums of this rank's part of the weights."""


class EndReload(msgspec.Struct, frozen=True, tag=True):
    """The weights stay as they are now."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Give everything up; the process ends after its answer."""


Order: TypeAlias = (
    Create
    | Execute
    | PrepareSleep
    | UndoPrepareSleep
    | Sleep
    | BeginWake
    | UndoWake
    | EndWake
    | SuspendGroup
    | ResumeGroup
    | BeginReload
    | UndoReload
    | EndReload
    | BeginUpdate
    | LoadBucket
    | ReadWeightChecksums
    | Shutdown
)


class Answer(msgspec.Struct, frozen=True):
    """What became of an order.

    Attributes:
        tokens: next token by request id, after a step.
        awake: whether weights and KV cache have all their pages.
        mapped: bytes with pages behind them, by arena tag.
        checksums: of the weights, where they were asked for.
        error: why it failed; None where it did not.
    """

    tokens: dict[str, int] = {}
    awake: bool = False
    mapped: dict[str, int] = {}
    checksums: dict[str, int] = {}
    error: RemoteError | None = None


def step_message(output: SchedulerOutput) -> Execute:
    """A step as the ranks get it."""
    return Execute(
        [
            StepItem(
                StepRequest(
                    item.request.request_id,
                    item.request.arrival_index,
                    item.request.num_preemptions,
                    item.request.num_computed_tokens,
                    item.request.num_output_tokens,
                    item.request.params,
                ),
                list(item.new_token_ids),
                list(item.block_ids),
                item.samples,
            )
            for item in output.scheduled
        ]
    )
