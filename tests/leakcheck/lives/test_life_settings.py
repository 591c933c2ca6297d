"""What an engine's life left changed in its process is told, and put back where that is asked for."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from lowtide.leakcheck.lives.life_reader import LifeReader, setting_left
from lowtide.probes.device.driver import NoDriver
from lowtide.reports.schema import Finding


def replaced(*args: object, **kwargs: object) -> None:
    """What a test puts in the place of a function of torch's."""


CHANGES: dict[str, tuple[Callable[[], Any], str, str]] = {
    "collector off": (gc.disable, "gc.isenabled() was True, is False", "gc.enable()"),
    "thresholds": (
        lambda: gc.set_threshold(5000, 11, 12),
        "gc.get_threshold() was (700, 10, 10), is (5000, 11, 12)",
        "gc.set_threshold(700, 10, 10)",
    ),
    "dtype": (
        lambda: torch.set_default_dtype(torch.float64),
        "torch.get_default_dtype() was torch.float32, is torch.float64",
        "torch.set_default_dtype(torch.float32)",
    ),
    "device": (
        lambda: torch.set_default_device("meta"),
        "torch.get_default_device() was cpu, is meta",
        "torch.set_default_device(None)",
    ),
    "function": (
        lambda: setattr(torch.accelerator, "synchronize", replaced),
        "torch.accelerator.synchronize was replaced",
        "putting torch.accelerator.synchronize back: tried, it returns it",
    ),
}


def undone_by(finding: Finding) -> str | None:
    """What has put a setting back: code, or words where there is none."""
    return finding.advice if finding.remedy is None else finding.remedy.action


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    thresholds, synchronize = gc.get_threshold(), torch.accelerator.synchronize
    gc.set_threshold(700, 10, 10)
    yield
    gc.enable()
    gc.set_threshold(*thresholds)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.accelerator.synchronize = synchronize


class State(LifeReader):
    """This process since the first of some lives began."""

    def __init__(self) -> None:
        super().__init__("cpu", NoDriver("a test"))
        self.start()

    def findings(self, *, remedies: bool) -> list[Finding]:
        return [setting_left(change, remedies=remedies) for change in self.changed_settings()]


@contextmanager
def closing_state() -> Iterator[State]:
    state = State()
    yield state
    state.stop()


@pytest.fixture
def state() -> Iterator[State]:
    with closing_state() as state:
        yield state


def test_where_nothing_changed_nothing_is_found(state: State) -> None:
    assert state.findings(remedies=True) == []


@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_that_was_not_restored_is_reported_and_left_alone(name: str, state: State) -> None:
    change, message, _ = CHANGES[name]
    change()
    for _ in range(2):
        (finding,) = state.findings(remedies=False)
        assert (finding.resource, finding.cause, finding.stage) == ("globals", "not-restored", "shutdown")
        assert finding.message.startswith(message)
        assert (finding.remedy, finding.tried) == (None, ())


@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_that_was_not_restored_is_put_back(name: str, state: State) -> None:
    change, _, action = CHANGES[name]
    change()
    (finding,) = state.findings(remedies=True)
    assert undone_by(finding) == action
    assert state.findings(remedies=True) == []


def test_a_collector_that_was_off_and_is_on_is_put_back_too() -> None:
    gc.disable()
    with closing_state() as state:
        gc.enable()
        (finding,) = state.findings(remedies=True)
    assert finding.remedy is not None
    assert finding.remedy.action == "gc.disable()"
    assert not gc.isenabled()


def test_several_changes_are_several_findings_with_fingerprints_of_their_own(state: State) -> None:
    for change, *_ in CHANGES.values():
        change()
    findings = state.findings(remedies=False)
    assert len({finding.fingerprint for finding in findings}) == len(findings) == len(CHANGES)


def test_what_cannot_be_put_back_is_reported_with_what_was_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_dtype = torch.set_default_dtype
    monkeypatch.setattr(torch, "set_default_dtype", functools.partial(refuse, "not now"))
    with closing_state() as state:
        set_dtype(torch.float64)
        (finding,) = state.findings(remedies=True)
    assert finding.remedy is None
    assert [tried.action for tried in finding.tried] == [
        "torch.set_default_dtype(torch.float32) (raised RuntimeError: not now)"
    ]


def refuse(why: str, *args: object) -> None:
    raise RuntimeError(why)


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_first_life_left_is_put_back_after_the_last_as_it_was_before_all(name: str, state: State) -> None:
    change, message, undo = CHANGES[name]
    change()
    assert len(state.findings(remedies=False)) == 1
    # The next life begins with it.
    change()
    (finding,) = state.findings(remedies=True)
    assert finding.message.startswith(message)
    assert undone_by(finding) == undo
    assert state.findings(remedies=True) == []


def test_a_life_that_puts_back_what_an_earlier_one_left_has_changed_nothing(state: State) -> None:
    gc.disable()
    assert len(state.findings(remedies=False)) == 1
    gc.enable()
    assert state.findings(remedies=True) == []
    assert gc.isenabled()
