"""Ranks as threads of one process: the arithmetic of tensor parallelism without processes and their collectives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from tests.waiting import HANG_S

Result = TypeVar("Result")


class Meeting:
    """Where the threads exchange tensors; one that fails breaks it off for all."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=HANG_S)
        self._brought: list[torch.Tensor] = [torch.empty(0)] * size

    def exchange(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._brought[rank] = tensor
        self._barrier.wait()
        everyone = list(self._brought)
        self._barrier.wait()
        return everyone

    def break_off(self) -> None:
        self._barrier.abort()


class ThreadRank:
    """One thread's place in the group."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting = meeting
        self.rank = rank
        self.size = meeting.size

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._meeting.exchange(self.rank, partial)).sum(0)

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._meeting.exchange(self.rank, part), dim=-1)


def on_ranks(size: int, run: Callable[[ThreadRank], Result]) -> list[Result]:
    """What `run` returns on each rank; it is called in one thread per rank."""
    meeting = Meeting(size)

    def guarded(rank: int) -> Result:
        try:
            return run(ThreadRank(meeting, rank))
        except BaseException:
            meeting.break_off()
            raise

    with ThreadPoolExecutor(size) as threads:
        running = [threads.submit(guarded, rank) for rank in range(size)]
        # The error that broke the meeting off, not those of the ranks that then waited in vain.
        errors = [error for future in running if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in running]
