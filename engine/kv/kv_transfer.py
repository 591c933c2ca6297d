"""What the scheduler's and the worker's side of KV offload say to each other: transfers, and who carries them out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class BlockTransfer:
    """Copies of whole KV blocks in one direction.

    Attributes:
        transfer_id: by which its end is known.
        blocks: KV block and host slot of each copy.
    """

    transfer_id: int
    blocks: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class CompletedTransfer:
    """The end of a transfer, after which nothing reads or writes its blocks.

    Attributes:
        transfer_id: of the transfer.
        error: what its copies raised; then nothing can be said of what they wrote.
        cancelled: whether it was given up; likewise.
    """

    transfer_id: int
    error: BaseException | None = None
    cancelled: bool = False


class KVConnector(Protocol):
    """Copies KV blocks between the device and host slots, one transfer after the other, in the order given."""

    def save(self, transfer: BlockTransfer) -> None:
        """Begin to copy KV blocks to host slots, after all that the device was asked to compute so far."""

    def load(self, transfer: BlockTransfer) -> None:
        """Begin to copy host slots to KV blocks, after all that the device was asked to compute so far."""

    def flush(self) -> None:
        """Wait until every transfer that was begun has ended; taken in they are not.

        Raises:
            KVTransferError: they do not end.
        """

    def take_completed(self) -> list[CompletedTransfer]:
        """The transfers that have ended and were not reported before; waits for none."""

    def close(self) -> None:
        """Cancel what has not been copied, and give everything up; calling it again does nothing.

        Raises:
            KVTransferError: a copy does not end; its memory goes when it does.
        """
