"""What pytest has of a test: the class's instance, which is emptied where only who runs the test has it."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

from lowtide.probes.objects.listed import collector_paused
from lowtide.pytest_plugin import items
from lowtide.pytest_plugin.items import empty_instance


class Case:
    """Is in cycles with what a test has put on it."""

    def __init__(self) -> None:
        self.parts: list[Any] = [self.run, [self]]

    def run(self) -> None: ...


@pytest.mark.parametrize("is_kept", [False, True])
def test_an_instance_is_emptied_where_only_a_running_function_has_it(is_kept: bool) -> None:
    case = Case()
    kept = [case] if is_kept else []
    empty_instance(weakref.ref(case))
    assert (vars(case) == {}) != bool(kept)


def test_what_garbage_has_is_not_gone_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test's mocks refer to each other: it would take longer than the test."""
    monkeypatch.setattr(items, "_own_references", lambda instance: pytest.fail("it was"))
    with collector_paused():
        held = weakref.ref(Case())
        empty_instance(held)
        left = held()
    assert left is not None
    assert len(left.parts) == 2


def test_what_a_function_alone_has_is_emptied_and_not_gone_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(items, "_own_references", lambda instance: pytest.fail("it was"))
    case = Case()
    case.parts.clear()
    empty_instance(weakref.ref(case))
    assert vars(case) == {}
