"""How far memory rises while a test runs, where it says how far it may, and who had it at the peak.

Nobody samples: the kernel knows the peak of the process's resident memory (`VmHWM`), and torch that of its memory on a
card. Both are of all time. A peak that was there before hides a lower one only where it is higher than what is allowed:
then, and only then, they are told to count anew (`/proc/self/clear_refs`, `reset_peak_memory_stats`), and the program
reads the peak since then, too. Where the program has torch count anew itself, what there was before is read first.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from lowtide.leakcheck.explaining.explain import Explanation
from lowtide.leakcheck.findings.storage_holders import Context, explain_storages
from lowtide.leakcheck.findings.tensor_findings import frames
from lowtide.leakcheck.judging.fingerprints import finding_of
from lowtide.leakcheck.judging.judge import Budget
from lowtide.leakcheck.judging.ladder import trim_heap
from lowtide.leakcheck.judging.rules import PEAK
from lowtide.leakcheck.judging.storages import Key
from lowtide.probes.allocation_stacks import AllocationStacks
from lowtide.probes.device.allocation_history import PeakBlock
from lowtide.probes.device.card_peaks import ResetsOfPeaks, forget_card_peak, read_card_peaks
from lowtide.probes.host.memory_parts import forget_high_water, read_high_water
from lowtide.probes.memory.stack_frames import StackFrame, telling_frames
from lowtide.probes.originals import time
from lowtide.reports.schema import Finding, NotMeasured
from lowtide.reports.sizes import format_amount, format_bytes
from lowtide.reports.statement import Note, Statement

_HOST = "cpu"

_SHOWN = 3
"""Of what was there at the peak, so many parts are shown, the largest."""

_SECONDS = 2.0
"""For what each holder retains besides."""

_OTHERS = ""
"""The stage of what is allocated for who lives longer."""

_HIDDEN = "it was higher before, and the kernel does not let it be counted anew (/proc/self/clear_refs)"

_OTHER_MEMORY = (
    "what is not named was allocated by no operation of torch's: Python's objects, numpy, native code, mapped files; "
    "`memray run --native` names it"
)

_ALL = "--leakcheck-stacks=all (LeakCheck: stacks='all') says which lines have allocated the tensors"
_NO_STACKS = "record stacks (--leakcheck-stacks=auto, LeakCheck: stacks='auto') to see which lines have allocated it"


class _Part(NamedTuple):
    """What was there at the peak and was allocated in one place in one stage, in bytes, and what is said of it."""

    bytes: int
    stack: tuple[StackFrame, ...]
    text: str


class _Level(msgspec.Struct):
    """How high one device's memory was; bytes.

    Attributes:
        base: what does not count.
        floor: the peak of all time when it was last read.
        now: how much there was then.
        most: by how much there was more than the base, at most.
        stage: in which stage that was.
        hidden: whether a peak may have been missed.
    """

    base: int = 0
    floor: int = 0
    now: int = 0
    most: int = 0
    stage: str = ""
    hidden: bool = False

    def note(self, now: int, peak: int, stage: str) -> None:
        """Take in what is read at the end of a stage, or in it."""
        # A peak that is lower than before was counted anew by somebody.
        reached = peak if peak != self.floor else now
        if reached - self.base > self.most:
            self.most, self.stage = reached - self.base, stage
        self.now, self.floor = now, peak


class PeakWatch:
    """Follows how far memory rises from `begin` to `end`, on the host and on each card; for one test.

    Args:
        stacks: where memory is allocated.
        stage: gives the stage of now.
        limit: bytes by which it may rise.
        card: whether cards are looked at.
    """

    def __init__(self, stacks: AllocationStacks, stage: Callable[[], str], limit: int, *, card: bool) -> None:
        self._stacks = stacks
        self._stage = stage
        self._limit = limit
        self._card = card
        self._resets = ResetsOfPeaks(self.look)
        self._levels: dict[str, _Level] = {}
        self._entered = 0
        # When the stages began, and those that are somebody else's, in microseconds since 1970.
        self._times: list[int] = []
        self._stages: list[str] = []

    def begin(self) -> None:
        """Begin: what there is now does not count."""
        if self._card:
            self._resets.start()
        self._stacks.start_peak()
        # What is free in the heap would be taken without a rise.
        trim_heap()
        self._open()
        self._note_stage(self._stage())

    def look(self) -> None:
        """Read how high it is, where a stage ends."""
        if self._entered:
            return
        for device, (now, peak) in self._readings().items():
            # A card that had no context had nothing.
            self._levels.setdefault(device, _Level()).note(now, peak, self._stage())

    def stage_ended(self, following: str) -> None:
        """Look, and note which stage begins."""
        self.look()
        if not self._entered:
            self._note_stage(following)

    def entered(self) -> None:
        """Leave what is allocated from here to `left` to who lives longer: a fixture, a module; nests."""
        self.look()
        self._entered += 1
        self._note_stage(_OTHERS)
        self._stacks.pause_peak(paused=True)

    def left(self) -> None:
        """Leave out what is there now, and was not when it was entered."""
        self._entered -= 1
        if not self._entered:
            self._open()
            self._note_stage(self._stage())
            self._stacks.pause_peak(paused=False)

    def end(self, subject: str) -> tuple[list[Finding], list[NotMeasured]]:
        """End it, and return a finding on each device on which it rose by more than it may, and what could not be seen.

        By its subject a finding is known again.
        """
        self._entered = 0
        self.look()
        self.stop()
        over = {device: level for device, level in self._levels.items() if level.most > self._limit}
        hidden = [device for device, level in self._levels.items() if level.hidden and device not in over]
        blocks = self._stacks.take_peak(over, self._counts)
        holders = _holders(blocks)
        findings = [
            self._finding(device, level, blocks.get(device), holders, subject) for device, level in over.items()
        ]
        return findings, [NotMeasured(what=f"the peak of {_named(device)}", why=_HIDDEN) for device in hidden]

    def stop(self) -> None:
        """Leave nothing behind in torch, where it is not ended; legal twice."""
        self._resets.stop()

    def _readings(self) -> dict[str, tuple[int, int]]:
        readings: dict[str, tuple[int, int]] = {_HOST: read_high_water()}
        if self._card:
            readings.update(read_card_peaks())
        return readings

    def _open(self) -> None:
        """Begin to look: by how much there is more than when it was read last is somebody else's."""
        for device, (now, peak) in self._readings().items():
            level = self._levels.setdefault(device, _Level())
            level.base += now - level.now
            level.now, level.floor = now, peak
            if peak - level.base > max(self._limit, level.most):
                if forget_high_water() if device == _HOST else forget_card_peak(device):
                    level.floor = now
                else:
                    level.hidden = True

    def _note_stage(self, stage: str) -> None:
        self._times.append(time.time_ns() // 1000)
        self._stages.append(stage)

    def _stage_at(self, moment: int) -> str:
        """Return the stage at a time, in microseconds since 1970; 0 is some time."""
        place = bisect.bisect_right(self._times, moment) - 1 if moment else 0
        return self._stages[place] if place >= 0 else _OTHERS

    def _counts(self, moment: int) -> bool:
        return self._stage_at(moment) != _OTHERS

    def _finding(
        self,
        device: str,
        level: _Level,
        blocks: Sequence[PeakBlock] | None,
        holders: Mapping[Key, Explanation],
        subject: str,
    ) -> Finding:
        rise = f"{_named(device)} rose by {format_bytes(level.most)} above the start in {level.stage}"
        parts = self._parts(device, blocks or (), holders)
        known = sum(part.bytes for part in parts)
        advice = None
        if device == _HOST:
            advice = _ALL if blocks is None else _OTHER_MEMORY if 2 * known < level.most else None
        elif not parts:
            advice = _NO_STACKS
        shown = "; ".join(part.text for part in parts[:_SHOWN])
        more = sum(part.bytes for part in parts[_SHOWN:])
        rest = f"; and {format_bytes(more)} in {len(parts) - _SHOWN} other places" if more else ""
        return finding_of(
            PEAK.resource,
            bytes=level.most,
            device=device,
            stage=level.stage,
            statement=Statement(
                amount=f"{rise}: {format_bytes(self._limit)} is allowed",
                came=None,
                notes=(Note(f"; at the peak: {shown}{rest}"),) if parts else (),
            ),
            suspects=(PEAK.key,),
            known_by={"stage": "", "module": subject},
            allocated_at=frames(parts[0].stack) if parts else (),
            advice=advice,
        )

    def _parts(self, device: str, blocks: Sequence[PeakBlock], holders: Mapping[Key, Explanation]) -> list[_Part]:
        """Return what was there at the peak by where it was allocated, the largest first."""
        groups: dict[tuple[str, tuple[StackFrame, ...]], list[PeakBlock]] = {}
        for block in blocks:
            groups.setdefault((self._stage_at(block.time), block.stack), []).append(block)
        parts = []
        for (stage, stack), group in groups.items():
            size = sum(block.bytes for block in group)
            what = "tensors" if device == _HOST else "blocks"
            text = f"{format_bytes(size)} in {format_amount(len(group), what)} since {stage}"
            if stack:
                line = stack[telling_frames(stack)[0]]
                text += f", allocated in {line.function}, {line.file}:{line.line}"
            held = next((holders[device, block.address] for block in group if (device, block.address) in holders), None)
            text += f", held by {held.holder}" if held is not None else ""
            parts.append(_Part(size, stack, text))
        return sorted(parts, key=lambda part: -part.bytes)


def _named(device: str) -> str:
    return "host memory" if device == _HOST else f"memory on {device}"


def _holders(blocks: Mapping[str, Sequence[PeakBlock]]) -> Mapping[Key, Explanation]:
    """Return who holds those of some blocks that are there still."""
    keys = {(device, block.address) for device, found in blocks.items() for block in found if block.is_alive}
    found = explain_storages(keys, Context(living=True, budget=Budget(_SECONDS))).by_key if keys else {}
    return {key: explanation for key, explanation in found.items() if explanation.holder}
