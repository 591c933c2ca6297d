"""What grows test after test in a process that belongs to a fixture: its levels seen from outside, and its tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from lowtide.leakcheck.findings.owner_growth import ADVICE
from lowtide.leakcheck.judging.fingerprints import fingerprint
from lowtide.leakcheck.judging.level_growth import adding_turns, grows, kept_steps, rate, rises
from lowtide.leakcheck.judging.trend import FEWEST_TURNS
from lowtide.leakcheck.processes.process_growth import ALLOWED, role_of
from lowtide.reports.processes.stage_processes import ProcessName
from lowtide.reports.schema import Finding, ResourceName
from lowtide.reports.sizes import format_bytes

HOST = "host-memory"
"""The key of the level that is no card's."""


class ProcessTurns:
    """The levels of one process after each test that used it, in bytes."""

    def __init__(self) -> None:
        self._last_turn = 0
        self._levels: dict[str, list[int]] = {}
        self._unknown: set[str] = set()

    def note(self, turn: int, private: int | None, cards: Mapping[str, int | None]) -> None:
        """Its levels after a test; what is not known once is never judged.

        Args:
            turn: the test's number; again, the reading replaces that of before.
            private: host memory that only it maps.
            cards: what the driver counts for it, by device.
        """
        known = {HOST: private, **cards}
        for key in {*known, *self._levels}:
            size = known.get(key, 0)
            if size is None:
                self._unknown.add(key)
            levels = self._levels.setdefault(key, [])
            if turn == self._last_turn and levels:
                levels.pop()
            levels.append(size or 0)
        self._last_turn = turn

    @property
    def can_show_growth(self) -> bool:
        """Whether so many tests were noted that growth would show."""
        return len(self._levels.get(HOST, ())) > FEWEST_TURNS

    @property
    def last_turn(self) -> int:
        """The number of the test that was noted last; 0 before the first."""
        return self._last_turn

    def findings(self, process: ProcessName, stage: str, named: Mapping[str, int]) -> list[tuple[Finding, int]]:
        """What grows, each with the usual step.

        Args:
            process: which it is.
            stage: since when.
            named: bytes of tensors that are reported by name, by device.
        """
        found = []
        for key, levels in self._levels.items():
            if key in self._unknown or len(levels) < 2:
                continue
            steps = kept_steps(levels)
            allowed = [ALLOWED] * len(steps)
            if not grows(steps, allowed) or not rises(levels):
                continue
            sizes = [steps[turn - 1] for turn in adding_turns(steps, allowed)]
            if sum(sizes) <= named.get(_device(key), 0) * 2:
                continue
            message = f"{_what(key)} {rate(steps, allowed, format_bytes)}"
            finding = _finding(process, key, stage, sum(sizes), message)
            grown = msgspec.structs.replace(finding, count=len(sizes), trend="growth", advice=ADVICE)
            found.append((grown, sorted(sizes)[len(sizes) // 2]))
        return found


def left_by_test(process: ProcessName, key: str, size: int) -> Finding:
    """What one test has left in a process that no fixture owns.

    Args:
        process: which it is.
        key: `HOST`, or a card as `cuda:0`.
        size: bytes.
    """
    return _finding(process, key, "test", size, f"{format_bytes(size)} more {_what(key)} than before the test")


def _finding(process: ProcessName, key: str, stage: str, size: int, message: str) -> Finding:
    resource: ResourceName = "host-memory" if key == HOST else "driver"
    suspects = ("other process", role_of(process.name))
    return Finding(
        resource=resource,
        cause="unknown",
        bytes=size,
        count=1,
        device=_device(key),
        stage=stage,
        message=f"{process.text}: {message}",
        fingerprint=fingerprint(resource=resource, device=_device(key), stage=stage, suspects=suspects),
        process=process,
    )


def _device(key: str) -> str:
    return "cpu" if key == HOST else key


def _what(key: str) -> str:
    return "host memory" if key == HOST else f"memory on {key}"


def growing_tensors(
    left: Sequence[tuple[Finding, Mapping[int, int]]],
    turns: Collection[int],
    tolerance: int,
    process: ProcessName,
    stage: str,
) -> list[Finding]:
    """Those holders of tensors that have kept some of most tests that used a process.

    A cache that is full keeps what the last tests made, and nothing of the first ones.

    Args:
        left: each holder, with its bytes by the test in which they appeared.
        turns: the tests that used the process, by their numbers.
        tolerance: bytes that a test may leave.
        process: which it is.
        stage: as the finding calls its time.
    """
    found = []
    for finding, by_turn in left:
        steps = [by_turn.get(turn, 0) for turn in turns]
        allowed = [tolerance] * len(steps)
        adding = adding_turns(steps, allowed)
        if not grows(steps, allowed) or adding[0] > (len(steps) + 1) // 2:
            continue
        total = sum(steps[turn - 1] for turn in adding)
        message = f"{rate(steps, allowed, format_bytes)}, {format_bytes(total)} on {finding.device} in all"
        held = f", held by {finding.holder}" if finding.holder else ""
        found.append(
            msgspec.structs.replace(
                finding,
                bytes=total,
                count=len(adding),
                stage=stage,
                message=f"{process.text}: {message}{held}",
                fingerprint=fingerprint(
                    resource="tensors",
                    device=finding.device,
                    stage=stage,
                    suspects=("growth", role_of(process.name), finding.holder or ""),
                ),
                former_fingerprint="",
                trend="growth",
                advice=ADVICE,
                process=process,
            )
        )
    return found
