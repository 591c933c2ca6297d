"""Kills an engine's process in the middle of a stage, and looks from outside at what stays.

No handler of the engine's runs then: what goes, goes because the kernel and the driver take it back. What stays is what
was made to outlive its maker: a child process that waits for nobody, a segment in /dev/shm that has a name.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec

from lowtide.leakcheck.judging.fingerprints import finding_of
from lowtide.leakcheck.lives.script import Call, LifeModel
from lowtide.leakcheck.lives.sweep import SweptCall, stages
from lowtide.leakcheck.resources.orphaned_files import OwnSegments
from lowtide.leakcheck.targets.faults import STANDING, Injection, Pause, injecting_into
from lowtide.leakcheck.targets.target import (
    Capabilities,
    TargetError,
    TargetFactory,
    TargetSource,
    make_target,
    start_program,
)
from lowtide.probes.device.driver import Driver, DriverError
from lowtide.probes.host.process_files import (
    all_pids,
    descendants_of,
    environment,
    lives,
    numbers_in,
    program_name,
    stat,
)
from lowtide.probes.host.readings import mapped_shared_memory
from lowtide.reports.schema import Finding, NotMeasured, ResourceName
from lowtide.reports.sizes import format_amount, format_bytes

PATIENCE_S = 10.0
"""How long the kernel and the driver may take to give back what a killed process had, in seconds."""

START_S = 300.0
"""How long a process may take to come to the middle of its stage, in seconds."""

DRIVER_TOLERANCE = 64 << 20
"""Bytes by which what a card has in use may have moved by itself, as by the contexts of other processes."""

_SHARED_MEMORY = Path("/dev/shm")
_MARK = "LOWTIDE_WITNESS"
"""The variable by which a process is known that has been started by a killed one, whoever its parent is by now."""


_Child = tuple[int, int]
"""A process by its number, and when it began, in ticks since boot: another one may have its number by then."""


class Killed(msgspec.Struct, frozen=True):
    """What stayed of a process that was killed in a stage.

    Attributes:
        stage: its name.
        at: after how many of its fault points it was killed.
        points: how many it has.
        findings: what stayed.
        not_measured: what could not be looked at.
    """

    stage: str
    at: int
    points: int
    findings: tuple[Finding, ...]
    not_measured: tuple[NotMeasured, ...] = ()


def kill_in_each_stage(
    source: TargetSource,
    able: Capabilities,
    *,
    config: Mapping[str, Any],
    driver: Driver,
    listener: Callable[[str], None] = lambda stage: None,
) -> Iterator[Killed]:
    """Kill a process in the middle of each stage of an engine's life, one process after the other.

    What stays is ended and removed once it has been seen: nobody else would.

    Args:
        source: how a program gets at the target.
        able: the target's capabilities.
        config: of every engine.
        driver: reports what a card counts.
        listener: hears of each stage before its process is started.

    Raises:
        TargetError: a process does not come to the middle of its stage.
    """
    for index, stage in enumerate(stages(able, config)):
        listener(stage.name)
        yield _kill_in(stage, source.program(__name__, stand_still.__name__, dict(config), index), able.device, driver)


def stand_still(factory: TargetFactory, config: Mapping[str, Any], index: int) -> None:
    """Come to the middle of a stage, say so, and stay there, in the process that will be killed."""
    made = OwnSegments()
    made.start()
    target: Any = make_target(factory)
    stage = stages(target.capabilities, config)[index]
    # Once to count: the middle is not known before.
    counted = _come_to(target, stage, Injection("interrupt"))
    target.shutdown()
    again = Pause("interrupt", counted // 2, made, counted)
    _come_to(make_target(factory), stage, again)
    # Nothing in it can fail, so it was never in the middle: then it is killed at its end.
    again.stand()


def _come_to(target: Any, stage: SweptCall, injection: Injection) -> int:
    """Make the stage's calls up to its last, and that one with an injection; return how many points it passed."""
    for call in stage.before:
        _perform(target, call)
    with injecting_into(target, injection):
        _perform(target, stage.call)
    return len(injection.passed)


def _perform(target: Any, call: Call) -> None:
    getattr(target, call.name)(*LifeModel(target.capabilities).given(call))


def _kill_in(stage: SweptCall, program: str, device: str, driver: Driver) -> Killed:
    before = _segments()
    card = EngineCard(device, driver)
    with ExitStack() as stack:
        # Engines say a lot: what nobody reads must not stop them, and what is read must not wait in a buffer.
        errors = stack.enter_context(tempfile.TemporaryFile("w+", errors="replace"))
        # Its temporary files have nobody else to remove them.
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="lowtide-", ignore_cleanup_errors=True))
        process = stack.enter_context(
            start_program(
                program, env={"TMPDIR": folder, _MARK: folder}, stdout=subprocess.PIPE, stderr=errors, bufsize=0
            )
        )
        try:
            message = _wait_until_it_stands(process, errors, stage.name)
            started = {*_noted(descendants_of(process.pid)), *_marked(folder, process.pid)}
            pids = {process.pid, *(pid for pid, _ in started)}
            card.is_used_by(pids)
            known = mapped_shared_memory(pids) | set(message["segments"])
            segments = {name for name in _segments() - before if name in known or pids & numbers_in(name)}
        finally:
            process.kill()
        process.wait()
        # What they have started since, too.
        started |= _marked(folder, process.pid)
        findings = _what_stays(stage.name, started, segments, card)
        _end(started)
        for name in segments:
            (_SHARED_MEMORY / name).unlink(missing_ok=True)
    return Killed(stage.name, message["at"], message["points"], tuple(findings), card.not_measured)


def _wait_until_it_stands(process: subprocess.Popen[bytes], errors: IO[str], stage: str) -> dict[str, Any]:
    assert process.stdout is not None
    deadline = time.monotonic() + START_S
    said = ""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while selector.select(max(0.0, deadline - time.monotonic())):
            line = process.stdout.readline().decode(errors="replace")
            if line.startswith(STANDING):
                message: dict[str, Any] = json.loads(line.removeprefix(STANDING))
                return message
            said += line
            if not line:
                process.wait()
                errors.seek(0)
                said += errors.read()
                last = said.strip().rpartition("\n")[2]
                raise TargetError(f"the process that was to be killed in {stage} ended by itself: {last}")
    raise TargetError(f"the process that was to be killed in {stage} was not there after {START_S:g} s")


class _CardUse(NamedTuple):
    """Bytes in use on a card, by all processes, and by identifier as far as the driver lists and counts them."""

    used: int
    processes: Mapping[int, int | None]


class EngineCard:
    """The card of an engine that will be killed, beside its neighbours; on a CPU none, of which nothing stays."""

    def __init__(self, device: str, driver: Driver) -> None:
        self.device = device
        self.not_measured: tuple[NotMeasured, ...] = ()
        self._driver = driver
        self._own: set[int] = set()
        # Whether the driver was seen to list one of the engine's processes by its identifier. If not, it may number
        # processes otherwise (a PID namespace), and what is new in its list may be their memory.
        self._distinguished = False
        self._before = self._use()

    def is_used_by(self, pids: Collection[int]) -> None:
        """Take these processes for the engine's: all others are neighbours."""
        now = self._use()
        self._own.update(pids)
        self._distinguished = now is not None and not self._own.isdisjoint(now.processes)

    def grown(self) -> int:
        """Return the bytes that it has more in use than at the start, less what neighbours have taken or given back."""
        before, now = self._before, self._use()
        if before is None or now is None:
            return 0
        grown = now.used - before.used
        for pid in before.processes.keys() | now.processes.keys():
            if pid not in self._own and (self._distinguished or pid in before.processes):
                grown -= (now.processes.get(pid, 0) or 0) - (before.processes.get(pid, 0) or 0)
        return grown

    def _use(self) -> _CardUse | None:
        if self.device == "cpu" or self.not_measured:
            return None
        index = int(self.device.partition(":")[2])
        try:
            reading = self._driver.read(index)
            if reading.card_used is None:
                raise DriverError(reading.note)
            return _CardUse(reading.card_used, self._driver.processes(index))
        except DriverError as error:
            what = f"what killed processes leave on {self.device}"
            self.not_measured = (NotMeasured(what=what, why=str(error)),)
            return None


def _what_stays(stage: str, started: set[_Child], segments: set[str], card: EngineCard) -> list[Finding]:
    """Report what is still there when the kernel and the driver have had their time."""
    deadline = time.monotonic() + PATIENCE_S
    device = card.device
    while True:
        alive = [pid for pid, began in started if lives(pid, began)]
        left = segments & _segments()
        grown = card.grown()
        if not (alive or left or grown > DRIVER_TOLERANCE) or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    where = f"after its parent was killed in {stage}"
    found = []
    if alive:
        programs = {pid: program_name(pid) or "gone" for pid in alive}
        names = sorted(f"{pid} {name}" for pid, name in programs.items())
        said = f"{format_amount(len(alive), 'child processes')} ran on {where}, and had to be ended: {', '.join(names)}"
        found.append(_finding("processes", stage, device, said, sorted({*programs.values()}), len(alive)))
    if left:
        size = sum((_SHARED_MEMORY / name).stat().st_size for name in left)
        said = f"{format_bytes(size)} stayed in /dev/shm {where}, and had to be unlinked: {', '.join(sorted(left))}"
        found.append(_finding("shared-memory", stage, device, said, sorted(left), len(left), size))
    if grown > DRIVER_TOLERANCE:
        said = f"{device} counts {format_bytes(grown)} more {PATIENCE_S:g} s {where}"
        found.append(_finding("driver", stage, device, said, [], 1, grown))
    return found


def _end(children: set[_Child]) -> None:
    """Kill them, and see them end."""
    deadline = time.monotonic() + PATIENCE_S
    while (left := [pid for pid, began in children if lives(pid, began)]) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _finding(
    resource: ResourceName, stage: str, device: str, message: str, holders: Sequence[str], count: int, amount: int = 0
) -> Finding:
    return finding_of(
        resource,
        cause="not-restored",
        bytes=amount,
        count=count,
        device="cpu" if resource != "driver" else device,
        stage=stage,
        message=message,
        suspects=("killed", *holders),
        known_by={"device": device},
        holder=", ".join(holders) or None,
    )


def _segments() -> set[str]:
    return {entry.name for entry in _SHARED_MEMORY.iterdir()}


def _marked(mark: str, besides: int) -> set[_Child]:
    """Return the processes that have a mark in their environment: also those that have left their parent."""
    pids = {*all_pids()} - {besides}
    # The environment of another user's process cannot be read.
    return _noted(pid for pid in pids if (environment(pid) or {}).get(_MARK) == mark)


def _noted(pids: Iterable[int]) -> set[_Child]:
    return {(pid, process.started) for pid in pids if (process := stat(pid)) is not None}
