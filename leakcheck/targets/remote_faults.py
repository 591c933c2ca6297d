"""Makes an operation of an engine fail whose core has a process of its own.

What is to fail is written into a file while a call is made, and the core's process, which looks for that file before
each of the client's orders, writes beside it what it has passed and raised. There is no file at any other time, so that
nothing stays of a process that is killed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from lowtide.engine.core_process.core_process import CoreProcess
from lowtide.engine.core_process.messages import Order
from lowtide.engine.defects.defect import replaced
from lowtide.engine.processes.remote_errors import RemoteError, describe_error, restore_error
from lowtide.leakcheck.baseline.shared_memory import OwnSegments
from lowtide.leakcheck.targets.faults import DamagedShardError, Injection, Kind, Passed, injecting
from lowtide.leakcheck.targets.pauses import Pause
from lowtide.leakcheck.targets.reference_seams import reference_seams

ENTERED = f"{__name__}:followed"
"""What the core's process enters, as `EngineConfig.process_extensions` has it; its argument is the file's path."""


class Armed(msgspec.Struct, frozen=True):
    """What is to fail in a call.

    Attributes:
        call: distinguishes it from an earlier call's.
        kind: of the fault point.
        at: which one, from 0 on; None only counts.
        device: where the engine has its memory.
        points: how many there are, for a process that is to stand still there; None to let it fail.
    """

    call: str
    kind: Kind
    at: int | None
    device: str
    points: int | None = None


class FaultReport(msgspec.Struct, frozen=True):
    """What became of it so far.

    Attributes:
        passed: the points of that kind that were passed, each by its kind and what was asked for.
        raised: what was raised; None before.
        shard: the damaged shard that stands for it.
    """

    passed: list[tuple[Kind, str]]
    raised: RemoteError | None = None
    shard: str | None = None


@contextmanager
def injecting_in_core(path: Path, injection: Injection, device: str) -> Iterator[Injection]:
    """While it lasts, fault points in the core's process reach `injection`.

    Args:
        path: where the core's process looks for what is to fail.
        injection: counts them and says which one fails; filled at the end.
        device: where the engine has its memory.
    """
    points = injection.points if isinstance(injection, Pause) else None
    armed = Armed(os.urandom(8).hex(), injection.kind, injection.at, device, points)
    _write(path, armed)
    try:
        yield injection
    finally:
        path.unlink(missing_ok=True)
        answer = _report_beside(path)
        with suppress(FileNotFoundError):
            _take(injection, msgspec.json.decode(answer.read_bytes(), type=FaultReport))
            answer.unlink()


def _take(injection: Injection, report: FaultReport) -> None:
    injection.passed = [Passed(kind, what) for kind, what in report.passed]
    injection.is_elsewhere = True
    if report.shard is not None:
        injection.raised = DamagedShardError(report.shard)
    elif report.raised is not None:
        injection.raised = restore_error(report.raised, "the engine's core")


@contextmanager
def followed(path: str) -> Iterator[None]:
    """In the core's process: each order is followed with the faults that the file asks for."""
    follow = CoreProcess.follow
    made = OwnSegments()
    made.start()
    injections: dict[str, Injection] = {}

    def follow_with_faults(self: CoreProcess, order: Order) -> object:
        try:
            armed = msgspec.json.decode(Path(path).read_bytes(), type=Armed)
        except FileNotFoundError:
            return follow(self, order)
        injection = injections.get(armed.call) or _make_injection(armed, made)
        injections.clear()
        injections[armed.call] = injection
        try:
            with injecting(injection, reference_seams(armed.device), device=armed.device):
                return follow(self, order)
        finally:
            # Threads of the engine's that are at a fault point by now pass it.
            at, injection.at = injection.at, None
            _write(_report_beside(Path(path)), _report_of(injection))
            injection.at = at

    try:
        with replaced(CoreProcess, "follow", follow_with_faults):
            yield
    finally:
        made.stop()


def _make_injection(armed: Armed, made: OwnSegments) -> Injection:
    if armed.points is None or armed.at is None:
        return Injection(armed.kind, armed.at)
    return Pause(armed.kind, armed.at, made, armed.points)


def _report_of(injection: Injection) -> FaultReport:
    passed = [(each.kind, each.what) for each in injection.passed]
    if isinstance(injection.raised, DamagedShardError):
        return FaultReport(passed, shard=injection.raised.shard)
    return FaultReport(passed, None if injection.raised is None else describe_error(injection.raised))


def _report_beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.report")


def _write(path: Path, content: msgspec.Struct) -> None:
    """Whole or not at all: the other process may read at any time."""
    draft = path.with_name(f"{path.name}.draft")
    draft.write_bytes(msgspec.json.encode(content))
    draft.replace(path)
