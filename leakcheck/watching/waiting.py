"""Waits for what comes back by itself: threads and processes that are ending, a driver that takes its time."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from collections.abc import Callable, Sequence

from lowtide.leakcheck.baseline.owners import Owner
from lowtide.leakcheck.baseline.records import Ownership
from lowtide.leakcheck.judging.ladder import LadderStep, SettlePolicy, climb
from lowtide.leakcheck.resources.rule import Rung
from lowtide.probes.host.counters import Counters

LONGEST_WAIT = 60.0
"""Seconds after which waiting ends even if something still moves."""

_WAITED_FOR = ("threads", "processes", "file-descriptors", "shared-memory", "temporary-files")


def wait_for_return(
    read: Callable[[], Counters],
    ownership: Ownership,
    ended: Sequence[Owner],
    *,
    slack: Callable[[str], int],
    let_go: Callable[[], None],
    settle: float,
) -> None:
    """Wait while something of a test's or of the ended owners' is missing, as long as anything of that moves.

    What appears only later is waited for, too, but moves nothing: a thread may make something all the time.

    Args:
        read: reads the counters.
        ownership: who owns what.
        ended: the owners that are judged with the test.
        slack: by a level's key, the bytes by which it may have risen.
        let_go: lets go of what the test runner holds.
        settle: seconds without any movement after which it ends.
    """

    def missing(now: Counters) -> set[tuple[str, str | int]]:
        _reap_children()
        let_go()
        items = {
            (key, name)
            for subject in (None, *ended)
            for key in _WAITED_FOR
            for name in ownership.new_items(key, now, subject, ended)
        }
        shares = {key: ownership.shares(key, now, ended)[id(None)] for key in now.amounts if key.startswith("driver ")}
        return items | {(key, share) for key, share in shares.items() if share is not None and share > slack(key)}

    start = read()

    first = missing(start)

    def moves(now: Counters) -> set[tuple[str, str | int]]:
        return {(key, thing) for key, thing in missing(now) if type(thing) is int or (key, thing) in first}

    climb(
        read,
        lambda now: not missing(now),
        still_waiting=lambda now: bool(missing(now)),
        moved=lambda then, now: moves(then) != moves(now),
        policy=SettlePolicy(stability=settle, limit=max(LONGEST_WAIT, settle)),
        rungs=(Rung.SETTLE,),
        climbed=[LadderStep(Rung.RAW, start, 0.0)],
    )


def _reap_children() -> None:
    """Have multiprocessing and subprocess take note of children that have ended and that nobody has waited for."""
    if "multiprocessing.process" in sys.modules:
        multiprocessing.active_children()
    if "subprocess" in sys.modules:
        subprocess._cleanup()  # type: ignore[attr-defined]
