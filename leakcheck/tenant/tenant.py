"""While an engine sleeps, a second process takes what the sleep claims to have freed; judges what it got."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lowtide.leakcheck.judging.fingerprints import fingerprint
from lowtide.leakcheck.tenant.device_memory import kind_of_cards
from lowtide.probes.snapshot import Snapshot
from lowtide.reports.schema import Finding, NotMeasured
from lowtide.reports.sizes import format_bytes

TOLERANCE = 64 << 20
"""Bytes that the tenant may get less: the driver keeps some for page tables and for its own use."""

LIMIT_S = 120.0
"""How long the tenant may take, in seconds."""


@dataclass
class Tenant:
    """Takes a card's memory in a second process, and gives it back.

    Attributes:
        device: the engine's, as torch names it: `cuda:0`.
        kind: of the card: `cuda` or `hip`.
        command: the occupier's, without its arguments.
        not_measured: what could not be tried, by stage.
    """

    device: str
    kind: str = "cuda"
    command: Sequence[str] = (sys.executable, "-m", "lowtide.leakcheck.tenant.occupier")
    not_measured: dict[str, NotMeasured] = field(default_factory=dict)

    def after_sleep(self, stage: str, freed: int | None) -> list[Finding]:
        """What another process cannot have of what a sleep freed; returns once it has given all of it back.

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
        return Finding(
            resource="driver",
            cause="driver",
            bytes=wanted - got,
            count=1,
            device=self.device,
            stage=stage,
            message=f"the driver says {format_bytes(free)} are free after {stage}, {could}",
            fingerprint=fingerprint(
                resource="driver", device=self.device, stage=stage, suspects=("another process", how)
            ),
            advice=f"unmap and release the physical memory at {stage}, and check that the driver has done it",
        )


def tenant_of(device: str) -> Tenant | None:
    """The tenant of an engine's device; None on the CPU, whose memory the kernel gives to whoever asks."""
    return None if device == "cpu" else Tenant(device, kind_of_cards())


def freed_between(before: Snapshot, after: Snapshot, device: str) -> int | None:
    """Bytes that the driver counts less for this process; None if it does not say."""
    held, holds = before.driver_bytes(device), after.driver_bytes(device)
    return None if held is None or holds is None else held - holds
