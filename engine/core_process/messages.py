"""What the engine and its core's process say to each other: plain data, encoded by msgspec."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from lowtide.engine.config import EngineConfig
from lowtide.engine.kv.block_pool import KVCacheUsage
from lowtide.engine.processes.remote_errors import RemoteError
from lowtide.engine.request import RequestOutput, SamplingParams
from lowtide.engine.weight_transfer.buckets import SharedBucket


class Create(msgspec.Struct, frozen=True, tag=True):
    """Create the core."""

    config: EngineConfig


class AddRequest(msgspec.Struct, frozen=True, tag=True):
    """Queue a request."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams


class Step(msgspec.Struct, frozen=True, tag=True):
    """Compute one step."""


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End these requests, or with None all of them."""

    request_ids: list[str] | None


class ResetPrefixCache(msgspec.Struct, frozen=True, tag=True):
    """Forget all cached prefixes, if no request holds blocks."""


class PrepareSleep(msgspec.Struct, frozen=True, tag=True):
    """Do all of a sleep that can fail for want of something."""

    level: int


class ForgetPrefixes(msgspec.Struct, frozen=True, tag=True):
    """Forget what the cache's blocks hold."""


class Sleep(msgspec.Struct, frozen=True, tag=True):
    """Give up the pages."""

    level: int


class Wake(msgspec.Struct, frozen=True, tag=True):
    """Map the pages of these tags, and fill them."""

    tags: list[str]


class ReloadWeights(msgspec.Struct, frozen=True, tag=True):
    """Fill the weights from where they came."""


class BeginUpdate(msgspec.Struct, frozen=True, tag=True):
    """Keep the present weights: a trainer's come."""


class LoadBucket(msgspec.Struct, frozen=True, tag=True):
    """Copy what a bucket has into the weights.

    Attributes:
        exports: of it, one for each process that opens it: the core, or its ranks.
    """

    exports: list[SharedBucket]


class UndoUpdate(msgspec.Struct, frozen=True, tag=True):
    """Put the weights back that were there before `BeginUpdate`."""


class EndUpdate(msgspec.Struct, frozen=True, tag=True):
    """Let go of the former weights; where new ones are loaded, forget what the former ones computed."""

    loaded: bool


class ReadWeightChecksums(msgspec.Struct, frozen=True, tag=True):
    """Report the checksum of every parameter."""


class ReadKVCacheUsage(msgspec.Struct, frozen=True, tag=True):
    """Report who has the KV blocks."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Give everything up; the process ends after its answer."""


Order: TypeAlias = (
    Create
    | AddRequest
    | Step
    | Abort
    | ResetPrefixCache
    | PrepareSleep
    | ForgetPrefixes
    | Sleep
    | Wake
    | ReloadWeights
    | BeginUpdate
    | LoadBucket
    | UndoUpdate
    | EndUpdate
    | ReadWeightChecksums
    | ReadKVCacheUsage
    | Shutdown
)


class Answer(msgspec.Struct, frozen=True):
    """What became of an order.

    Attributes:
        outputs: of requests, after a step or an abort.
        was_reset: whether all prefixes were forgotten.
        usage: of the KV blocks, where it was asked for.
        checksums: of the weights, likewise.
        running: requests that steps compute.
        waiting: requests that have not begun, or gave way.
        awake: whether weights and KV cache have all their pages.
        mapped: bytes with pages behind them, by arena tag.
        error: why it failed; None where it did not.
    """

    outputs: list[RequestOutput] = []
    was_reset: bool = False
    usage: KVCacheUsage | None = None
    checksums: dict[str, int] = {}
    running: int = 0
    waiting: int = 0
    awake: bool = False
    mapped: dict[str, int] = {}
    error: RemoteError | None = None
