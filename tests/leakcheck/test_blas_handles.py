"""Handles of the BLAS library that torch keeps for later threads, told from a leak of the same size by a trial."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from lowtide.leakcheck.resources import warm_up as blas_handles
from lowtide.leakcheck.resources.warm_up import BlasHandles, Trial

MIB = 1 << 20
HANDLE = (64 * MIB, 131072)
"""What one takes: a large part, and a small one."""


@dataclass
class FakeCard:
    """A card on which each thread that multiplies holds a handle while it runs."""

    listed: dict[int, int] = field(default_factory=dict)
    idle: int = 0
    broken: bool = False

    def take(self, *sizes: int) -> dict[str, int]:
        """Allocations, as the cards' readings name them."""
        found = {}
        for size in sizes:
            address = 0x1000 * (len(self.listed) + 1)
            self.listed[address] = size
            found[f"allocation at {address:#x}"] = size
        return found

    def threads(self, count: int) -> dict[str, int]:
        """What so many threads at once take anew."""
        anew, self.idle = max(0, count - self.idle), max(self.idle, count)
        return self.take(*HANDLE * anew)

    def use_at_once(self, index: int, count: int) -> bool:
        self.threads(count)
        return not self.broken

    def read(self, index: int) -> tuple[tuple[int, int], ...]:
        return tuple(self.listed.items())


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCard]:
    fake = FakeCard()
    monkeypatch.setattr(blas_handles, "read_allocations", fake.read)
    monkeypatch.setattr(blas_handles, "read_segments", lambda index: [])
    monkeypatch.setattr(blas_handles, "_use_at_once", fake.use_at_once)
    return fake


@pytest.fixture
def handles(card: FakeCard) -> BlasHandles:
    """That have seen the main thread's handle taken."""
    handles = BlasHandles()
    before = card.read(0)
    card.take(*HANDLE)
    handles.learn(0, before, card.read(0))
    return handles


def test_the_handles_of_threads_that_ended_are_kept(card: FakeCard, handles: BlasHandles) -> None:
    items = card.threads(3)
    assert handles.tried(0, items).kept == set(items)


def test_an_allocation_of_a_handle_s_size_that_no_thread_can_use_is_none(card: FakeCard, handles: BlasHandles) -> None:
    items = card.take(64 * MIB)
    assert handles.tried(0, items).kept == set()


def test_of_a_handle_and_a_leak_of_its_size_one_is_kept(card: FakeCard, handles: BlasHandles) -> None:
    items = {**card.threads(1), **card.take(64 * MIB)}
    kept = handles.tried(0, items).kept
    assert sorted(items[name] for name in kept) == sorted(HANDLE)


def test_idle_handles_of_earlier_tests_excuse_no_later_leak(card: FakeCard, handles: BlasHandles) -> None:
    assert handles.tried(0, card.threads(2)).kept
    assert handles.tried(0, card.take(64 * MIB)).kept == set()


def test_where_no_handle_was_seen_nothing_is_tried(card: FakeCard) -> None:
    assert BlasHandles().tried(0, card.threads(1)) == Trial()


def test_a_trial_that_fails_proves_nothing(card: FakeCard, handles: BlasHandles) -> None:
    items = card.threads(1)
    card.broken = True
    assert handles.tried(0, items).kept == set()


def test_what_a_trial_takes_itself_is_reported(card: FakeCard, handles: BlasHandles) -> None:
    items = card.take(64 * MIB)
    there = set(card.read(0))
    trial = handles.tried(0, items)
    assert trial == Trial(taken=tuple(entry for entry in card.read(0) if entry not in there))
    assert sorted(size for _, size in trial.taken) == sorted(HANDLE)


def test_what_a_trial_that_fails_has_taken_is_reported(card: FakeCard, handles: BlasHandles) -> None:
    items = card.take(64 * MIB)
    card.broken = True
    assert sorted(size for _, size in handles.tried(0, items).taken) == sorted(HANDLE)
