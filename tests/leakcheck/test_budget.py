"""What is left out when the time for it is over, and that it is said."""

from __future__ import annotations

import pytest

from lowtide.leakcheck.judging import judge as budgets
from lowtide.leakcheck.judging.judge import UNTRIED, Budget, untried
from tests.waiting import SleptClock


def test_without_a_limit_it_is_never_spent() -> None:
    assert not Budget().is_spent
    assert not Budget().within(100.0).is_spent


def test_it_is_spent_when_its_seconds_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SleptClock()
    monkeypatch.setattr(budgets, "time", clock)
    budget = Budget(0.02)
    assert not budget.is_spent
    clock.sleep(0.03)
    assert budget.is_spent


def test_a_part_ends_with_the_whole() -> None:
    assert Budget(0.0).within(100.0).is_spent
    assert Budget(100.0).within(0.0).is_spent


def test_an_advice_that_was_not_tried_stays_advice() -> None:
    assert untried("detach it") == f"detach it ({UNTRIED})"
    assert untried(None) == UNTRIED
