"""Second processes on an engine's card: one that takes what a sleep has freed, and one with a context alone.

What the first cannot have was not freed; what the second takes is no leak of the engine's processes. `card_memory` is
the program of both.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from lowtide.leakcheck.judging.fingerprints import finding_of
from lowtide.leakcheck.lives.card_memory import kind_of_cards
from lowtide.probes.device.driver import Driver, DriverError
from lowtide.probes.device.driver.card_holders import read_card_holders
from lowtide.probes.processes.outside_view import by_process
from lowtide.probes.snapshot import Snapshot
from lowtide.reports.schema import Finding, NotMeasured
from lowtide.reports.sizes import format_bytes

TOLERANCE = 64 << 20
"""Bytes that the tenant may get less: the driver keeps some for page tables and for its own use."""

LIMIT_S = 120.0
"""How long the tenant may take, in seconds."""

CONTEXT_LIMIT_S = 20.0
"""How long a process with a context alone may take to end, in seconds."""

_PROGRAM = (sys.executable, "-m", "lowtide.leakcheck.lives.card_memory")


class Tenant(msgspec.Struct):
    """Takes a card's memory in a second process, and gives it back.

    Attributes:
        device: the engine's, as torch names it: `cuda:0`.
        kind: of the card: `cuda` or `hip`.
        command: the program's, without its arguments.
        not_measured: what could not be tried, by stage.
    """

    device: str
    kind: str = msgspec.field(default_factory=kind_of_cards)
    command: Sequence[str] = _PROGRAM
    not_measured: dict[str, NotMeasured] = msgspec.field(default_factory=dict)

    def after_sleep(self, stage: str, freed: int | None) -> list[Finding]:
        """Report what another process cannot have of what a sleep freed; return once it has given all of it back.

        Args:
            stage: the sleep.
            freed: bytes that the driver counts less for the engine's process; None if it does not say.
        """
        if freed is None:
            return self._missed(stage, "the driver does not say what this process holds")
        if freed <= TOLERANCE:
            return []
        index = self.device.partition(":")[2] or "0"
        try:
            done = subprocess.run(
                [*self.command, self.kind, index, str(freed)],
                env=dict(os.environ),
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )
            said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        except subprocess.TimeoutExpired:
            return self._missed(stage, f"the second process did not end within {LIMIT_S:g} s")
        except (OSError, IndexError, ValueError) as error:
            return self._missed(stage, f"the second process failed: {error}")
        if "error" in said:
            return self._missed(stage, said["error"])
        return self._judged(stage, freed, **said)

    def _missed(self, stage: str, why: str) -> list[Finding]:
        self.not_measured[stage] = NotMeasured(what=f"what another process can allocate after {stage}", why=why)
        return []

    def _judged(self, stage: str, freed: int, *, free: int, wanted: int, whole: int, pieces: int) -> list[Finding]:
        if free + TOLERANCE < freed:
            # Its own context takes some of it; the rest is another process's, or was never freed.
            why = f"the engine's process gave back {format_bytes(freed)}, and {format_bytes(free)} are free on the card"
            self.not_measured[stage] = NotMeasured(
                what=f"{format_bytes(freed - free)} of what {stage} freed", why=f"{why} beside the second process"
            )
        found = []
        for got, how in ((pieces, "in pieces of 2 MiB"), (whole, "in one piece")):
            if got + TOLERANCE < wanted:
                found.append(self._finding(stage, free, wanted, got, how))
        return found[:1]

    def _finding(self, stage: str, free: int, wanted: int, got: int, how: str) -> Finding:
        could = f"{format_bytes(got)} of {format_bytes(wanted)} could be allocated {how} by another process"
        return finding_of(
            "driver",
            cause="driver",
            bytes=wanted - got,
            device=self.device,
            stage=stage,
            message=f"the driver says {format_bytes(free)} are free after {stage}, {could}",
            suspects=("another process", how),
            advice=f"unmap and release the physical memory at {stage}, and check that the driver has done it",
        )


def tenant_of(device: str) -> Tenant | None:
    """Return the tenant of an engine's device; None on the CPU, whose memory the kernel gives to whoever asks."""
    return None if device == "cpu" else Tenant(device)


def freed_between(before: Snapshot, after: Snapshot, device: str) -> int | None:
    """Return the bytes that the driver counts less for this process; None if it does not say."""
    held, holds = before.driver_bytes(device), after.driver_bytes(device)
    return None if held is None or holds is None else held - holds


def bare_context(
    device: str,
    driver: Callable[[], Driver],
    ended: Callable[[int], object] = lambda pid: None,
    command: Sequence[str] = _PROGRAM,
) -> int | None:
    """Measure it with a process of its own; return None where the card has no room or the driver does not say.

    Args:
        device: the card, as `cuda:0`.
        driver: gives whom to ask.
        ended: hears of the process that was started for it, once it has ended.
        command: the program that makes a context, without its arguments.
    """
    arguments = [*command, kind_of_cards(), device.partition(":")[2] or "0"]
    try:
        with subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            assert process.stdout is not None
            ready = process.stdout.readline()
            size = by_process(read_card_holders(driver())).get(process.pid, {}).get(device) if ready else None
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=CONTEXT_LIMIT_S)
            process.kill()
        ended(process.pid)
    except (OSError, DriverError):
        return None
    return size
