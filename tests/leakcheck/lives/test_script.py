"""The model of a life: what is legal when, and what each call makes of it."""

from __future__ import annotations

import pytest

from lowtide.leakcheck.lives.script import LifeModel
from lowtide.leakcheck.targets.target import Capabilities, calls_of

WHOLE = Capabilities(
    unfinished=True,
    sleep_levels=(1, 2),
    wake_tags=("weights", "kv_cache"),
    prefix_cache=True,
    reload=True,
    illegal_call=RuntimeError,
)
RUNNING = ("infer", "start", "step", "abort", "sleep", "reset_prefix_cache", "reload", "shutdown")


def running() -> LifeModel:
    model = LifeModel(WHOLE)
    model.created()
    return model


def test_a_whole_life() -> None:
    model = LifeModel(WHOLE)
    assert (model.phase, model.legal) == ("new", ("create", "shutdown"))
    model.created()
    assert (model.phase, model.legal) == ("running", RUNNING)
    model.slept(2)
    assert (model.phase, model.legal, model.situation) == ("asleep", ("wake", "shutdown"), "asleep at level 2")
    model.woke(["weights"])
    assert model.legal == ("wake", "reload", "shutdown")
    assert (model.wakeable, model.situation) == (("kv_cache",), "asleep at level 2, weights awake")
    model.woke(["kv_cache"])
    assert model.phase == "running"
    model.shut_down()
    assert (model.phase, model.legal) == ("closed", ("create", "shutdown"))
    model.created()
    assert model.phase == "running"


def test_what_is_not_legal_is_illegal_where_that_is_promised() -> None:
    assert set(running().illegal) == {"create", "wake"}
    assert LifeModel(Capabilities(sleep_levels=(1,))).illegal == ()


def test_calls_that_are_not_declared_are_never_made() -> None:
    model = LifeModel(Capabilities(illegal_call=RuntimeError))
    assert calls_of(model.capabilities) == ("create", "infer", "shutdown")
    model.created()
    assert (model.legal, model.illegal) == (("infer", "shutdown"), ("create",))


def test_without_tags_a_wake_wakes_all() -> None:
    model = LifeModel(Capabilities(sleep_levels=(1,)))
    model.created()
    model.slept(1)
    model.woke(None)
    assert (model.phase, model.wakeable) == ("running", ())


def test_unfinished_requests_end_one_way_or_another() -> None:
    model = running()
    model.started(["a", "b"], [3, 17], 4)
    assert model.situation == "running, requests unfinished"
    assert "infer" not in model.legal
    assert {"infer", "reload"} <= set(model.illegal)
    assert model.ended(["b", "nobody"]) == {"b": (17, 4)}
    assert model.unfinished == {"a": (3, 4)}
    model.slept(1)
    assert model.unfinished == {}


@pytest.mark.parametrize("phase", ["running", "asleep"])
def test_a_shutdown_ends_everything(phase: str) -> None:
    model = running()
    model.started(["a"], [3], 4)
    if phase == "asleep":
        model.slept(1)
    model.shut_down()
    assert (model.phase, model.unfinished, model.awake) == ("closed", {}, set())


def test_what_was_never_made_is_still_new_after_a_shutdown() -> None:
    model = LifeModel(WHOLE)
    model.shut_down()
    assert model.phase == "new"
