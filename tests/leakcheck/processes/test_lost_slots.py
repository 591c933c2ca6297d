"""A slot counts as lost that stays so; what an engine at work moves while it is read does not."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from lowtide.leakcheck.processes import lost_slots
from lowtide.leakcheck.processes.lost_slots import LostSlots
from lowtide.probes.objects.engine_pools import NOBODY, LostSlot, SlotReading

PID = 1 << 22
"""Of no process."""


def slot(number: int) -> LostSlot:
    return LostSlot("a pool", "KV block", str(number), NOBODY)


def looked(*lost: Sequence[LostSlot]) -> LostSlots:
    """Sees these in another process, one reading after the other, and then the last again and again."""
    readings = itertools.chain(lost, itertools.repeat(lost[-1]))
    return LostSlots(lambda: {PID: SlotReading(tuple(next(readings)))})


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_slots, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(lost_slots, "_PAUSE_S", 0.01)


def test_what_another_reading_does_not_have_is_not_lost() -> None:
    slots = looked([slot(1)], [slot(2)], [slot(3)])
    assert slots.look("call") == []
    assert not slots.any_lost


def test_what_stays_is_told_once_and_again_when_it_was_given_back_between() -> None:
    lost = [slot(7)]
    slots = LostSlots(lambda: {PID: SlotReading(tuple(lost))})
    (finding,) = slots.look("call")
    assert finding.count == 1
    assert slots.look("call") == []
    assert slots.any_lost
    lost.clear()
    assert slots.look("call") == []
    assert not slots.any_lost
    lost.append(slot(7))
    assert len(slots.look("call")) == 1
