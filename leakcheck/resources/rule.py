"""A row of the table of what must come back: where on the ladder, within what tolerance, and how it is counted."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal

from lowtide.reports.schema import Cause, ResourceName, Verdict

MIB = 1 << 20

Place = Literal["process", "device", "card"]
"""Of what there is one reading: the process, each device (the host is one), or each card."""


class Rung(enum.Enum):
    """One kind of release, in the order in which they are tried."""

    RAW = "raw"
    SETTLE = "settle"
    COLLECT = "collect"
    UNFREEZE = "unfreeze"
    EMPTY_CACHE = "empty_cache"
    CLEAR_CACHES = "clear_caches"
    RESET_COMPILED = "reset_compiled"
    CLEAR_WORKSPACES = "clear_workspaces"
    CLEAR_HOST_CACHE = "clear_host_cache"

    @property
    def order(self) -> int:
        """Its place on the ladder, from 0."""
        return list(Rung).index(self)


@dataclass(frozen=True)
class Bound:
    """When something counts as back.

    Attributes:
        tolerance: how far above the baseline it may stay, in the rule's unit. A test's own tolerance of bytes counts
            where it is larger.
        with_card: the same in a process that uses a card; None: no other.
        rung: where on the ladder it must be back: what comes back later is somebody else's work.
        first_use: whether libraries move it when they are first used in a process (kernels that load, threads that
            start), so that it is judged from the second life on.
        settles: whether it comes back in the driver's own time, so that waiting is worth while.
        what: how a finding calls it, if not by the resource.
        cause: what a finding says when no rung brings it back.
    """

    tolerance: int = 0
    with_card: int | None = None
    rung: Rung = Rung.COLLECT
    first_use: bool = False
    settles: bool = False
    what: str = ""
    cause: Cause = "unknown"

    def allowed(self, *, card: bool) -> int:
        """Return the tolerance in a process that uses a card, or none."""
        return self.tolerance if self.with_card is None or not card else self.with_card


@dataclass(frozen=True)
class Rule:
    """One row: something that must come back.

    Attributes:
        key: its name in readings; those of devices have the device behind it.
        resource: the word that findings use.
        place: of what there is one reading.
        counts: what is counted, as the documentation says it.
        test: when it is back after a test; None: not judged there.
        life: when it is back after an engine's shutdown; None: not judged there.
        unit: "bytes" or the plural of what is counted.
        verdict: what a finding says of it when no rung brings it back.
    """

    key: str
    resource: ResourceName
    place: Place
    counts: str
    test: Bound | None
    life: Bound | None
    unit: str = "bytes"
    verdict: Verdict | None = None

    def key_on(self, device: str) -> str:
        """Return the key of its reading on a device; of the process for ""."""
        return f"{self.key} {device}".strip()
