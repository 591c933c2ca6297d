"""Waits for what a driver gives back seconds after an engine has given it up (vllm#37533, on ROCm)."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

from lowtide.leakcheck.judging.ladder import SettlePolicy, settle
from lowtide.leakcheck.resources.rule import MIB
from lowtide.probes.originals import time

DRIVER_PATIENCE = SettlePolicy(stability=4.0)
"""A driver may be still for seconds before it gives anything back (vllm#43023); what never moves costs all of it."""

RELEASE_SLACK = 8 * MIB
"""Bytes by which a driver's figure for a process may move by itself."""


@dataclass(frozen=True)
class Late:
    """What came back while it was waited for.

    Attributes:
        bytes: as the driver counts them.
        seconds: from the first look to the one that saw them gone.
    """

    bytes: int
    seconds: float


def wait_for_release(read: Callable[[], int], held: int, dropped: int, policy: SettlePolicy) -> Late | None:
    """Until the driver counts as much less as was given up, or does not move any more.

    Args:
        read: the driver's bytes of this process.
        held: what it counted before.
        dropped: bytes that were given up since.
        policy: how long to wait.

    Returns:
        What came late; None where all of it was back at once, or not all of it came.
    """
    target = held - dropped + RELEASE_SLACK
    started, first = time.perf_counter(), read()
    if first <= target:
        return None
    left = wait_until_within(read, target, policy, first)
    return Late(first - left, time.perf_counter() - started) if left <= target else None


def wait_until_within(read: Callable[[], int], allowed: int, policy: SettlePolicy, first: int | None = None) -> int:
    """Until the driver counts no more than what is allowed, or does not move any more.

    Args:
        read: what the driver counts, in bytes.
        allowed: bytes.
        policy: how long to wait.
        first: what it counted just now; read where it is not given.

    Returns:
        What it counted last.
    """
    now = read() if first is None else first
    return now if now <= allowed else settle(read, lambda left: left > allowed, operator.ne, now, policy)
