"""What an engine loses in its own pools: slots (KV blocks) that no request has any more, in whichever process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from lowtide.leakcheck.judging.fingerprints import finding_of
from lowtide.leakcheck.processes.process_levels import describe_process
from lowtide.probes.objects.engine_pools import LostSlot, RequestSlots, SlotReading
from lowtide.probes.originals import os, time
from lowtide.reports.schema import Finding, NotMeasured
from lowtide.reports.sizes import first_of, format_amount
from lowtide.reports.statement import in_process

_PATIENCE_S, _PAUSE_S = 1.0, 0.05
"""Seconds in which slots of requests that were aborted may come back, and between two looks at them."""

_SHOWN = 3

_ADVICE = "give them back wherever a request ends: finished, aborted and failed"


class LostSlots:
    """Finds the slots that are lost from one look to the next, in this process and in others.

    They are waited for: what a client has aborted, an engine in another process gives back in a later step. And what an
    engine at work moves while it is read is lost in one look and not in the next.

    Args:
        ask: returns what other processes say of theirs, by process.
        device: where the engine is; empty where that is not known.
        at_once: whether each look has to find the pools that were made since the last.
    """

    def __init__(
        self, ask: Callable[[], Mapping[int, SlotReading]], device: str = "", *, at_once: bool = False
    ) -> None:
        self._ask = ask
        self._device = device
        self._own = RequestSlots(at_once=at_once)
        self._known: dict[int, frozenset[LostSlot]] = {}
        self._unread: dict[str, NotMeasured] = {}

    def look(self, stage: str) -> list[Finding]:
        """Return the slots that were lost since the last look, each once.

        Args:
            stage: after which this is.
        """
        until = time.perf_counter() + _PATIENCE_S
        lost = self._read()
        while self._new(lost) and time.perf_counter() < until:
            time.sleep(_PAUSE_S)
            now = self._read()
            lost = {pid: [slot for slot in slots if slot in now.get(pid, ())] for pid, slots in lost.items()}
        new, self._known = self._new(lost), {pid: frozenset(slots) for pid, slots in lost.items()}
        return [
            finding if pid == os.getpid() else in_process(finding, describe_process(pid))
            for pid, slots in new.items()
            for finding in lost_slots(stage, self._device, slots)
        ]

    def adopt(self) -> None:
        """Take what is lost now for known: an engine that is gone has lost it, and is kept by somebody."""
        self._known = {pid: frozenset(slots) for pid, slots in self._read().items()}

    @property
    def any_lost(self) -> bool:
        """Return whether any was lost at the last look, told then or before."""
        return any(self._known.values())

    @property
    def not_measured(self) -> tuple[NotMeasured, ...]:
        """Return the pools that could not be read at the last look."""
        return tuple(self._unread.values())

    def _read(self) -> dict[int, Sequence[LostSlot]]:
        readings = {os.getpid(): self._own.read(), **self._ask()}
        self._unread = {
            what: NotMeasured(what=what, why=why)
            for reading in readings.values()
            for what, why in reading.unread.items()
        }
        return {pid: reading.lost for pid, reading in readings.items() if reading.lost}

    def _new(self, lost: Mapping[int, Sequence[LostSlot]]) -> dict[int, Sequence[LostSlot]]:
        known = {pid: self._known.get(pid, frozenset()) for pid in lost}
        new = {pid: [slot for slot in slots if slot not in known[pid]] for pid, slots in lost.items()}
        return {pid: slots for pid, slots in new.items() if slots}


def lost_slots(stage: str, device: str, lost: Sequence[LostSlot]) -> Iterator[Finding]:
    """Yield the findings about slots of one process, one for each pool and kind of owner.

    Args:
        stage: after which this is.
        device: where the engine is.
        lost: the slots.
    """
    for pool, unit, owner in dict.fromkeys((slot.pool, slot.unit, slot.owner) for slot in lost):
        own = [slot for slot in lost if (slot.pool, slot.owner) == (pool, owner)]
        requests = first_of([*dict.fromkeys(slot.request for slot in own if slot.request)], _SHOWN)
        requests = f" ({requests})" if requests else ""
        amount = format_amount(len(own), f"{unit}s")
        numbers = first_of([slot.number for slot in own], _SHOWN)
        yield finding_of(
            "kv-blocks",
            stage=stage,
            device=device,
            count=len(own),
            suspects=(pool, owner),
            holder=owner,
            message=f"{amount} of {pool} ({numbers}) not given back after {stage}, held by {owner}{requests}",
            advice=_ADVICE,
        )
