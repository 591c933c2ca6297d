"""Gradients that no Python code has read: no objects until somebody asks, and memory all the same."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch

from lowtide.leakcheck.findings.storage_holders import Context, explain_storages
from lowtide.leakcheck.judging.owners import Claims, Owner
from lowtide.leakcheck.judging.storages import HeapReading, read_heap
from lowtide.probes.heap.births import Births, Newborn

KEPT: list[Any] = []
FLOATS = 1000


@pytest.fixture(autouse=True)
def nothing_kept() -> Any:
    yield
    KEPT.clear()


@pytest.fixture
def births() -> Any:
    births = Births()
    births.start()
    try:
        gc.collect()
        births.mark("call")
        yield births
    finally:
        births.stop()


def backward(parameter: torch.Tensor) -> None:
    (parameter * 2).sum().backward()


def read(births: Births, owners: Collection[Owner] = ()) -> HeapReading:
    return read_heap(births, Claims(owners), (), ())


def test_what_a_kept_parameter_has_collected_counts_and_is_named_by_it(births: Births) -> None:
    KEPT.append(torch.nn.Parameter(torch.ones(FLOATS)))
    backward(KEPT[0])
    # Read in a later stage, it is still of the one in which it was made.
    births.begin("teardown")
    held = read(births).held
    assert sorted(each.bytes for each in held) == [4 * FLOATS, 4 * FLOATS]
    assert {each.stage for each in held} == {"call"}
    reported = explain_storages({each.key for each in held}, Context(born=births.born())).by_key
    assert sorted(reported[each.key].holder.partition("KEPT")[2] for each in held) == ["[0]", "[0].grad"]
    # A second reading finds them again, and says the same.
    assert {(each.key, each.stage) for each in read(births).held} == {(each.key, each.stage) for each in held}


def test_a_gradient_that_was_seen_in_a_stage_is_of_that_stage(births: Births) -> None:
    KEPT.append(torch.nn.Parameter(torch.ones(FLOATS)))
    births.begin("teardown")
    backward(KEPT[0])
    seen = KEPT[0].grad
    births.begin("later")
    stages = {each.key[1]: each.stage for each in read(births).held}
    assert stages == {KEPT[0].data_ptr(): "call", seen.data_ptr(): "teardown"}


def frozen() -> torch.Tensor:
    return torch.ones(FLOATS)


def untouched() -> torch.Tensor:
    return torch.nn.Parameter(torch.ones(FLOATS))


def inner() -> torch.Tensor:
    leaf = torch.nn.Parameter(torch.ones(FLOATS))
    KEPT.append(leaf)
    product = leaf * 2
    product.sum().backward()
    leaf.grad = None
    return product


@pytest.mark.parametrize(("make", "storages"), [(frozen, 1), (untouched, 1), (inner, 2)])
def test_what_collects_none_is_asked_for_none(
    births: Births, make: Callable[[], torch.Tensor], storages: int, recwarn: pytest.WarningsRecorder
) -> None:
    KEPT.append(make())
    assert len(read(births).held) == storages
    assert not recwarn.list


def test_a_gradient_that_was_there_before_is_not_new() -> None:
    old = torch.ones(FLOATS)
    births = Births()
    births.start()
    try:
        gc.collect()
        births.mark("call")
        parameter = torch.nn.Parameter(torch.zeros(FLOATS))
        parameter.grad = old
        KEPT.append(parameter)
        assert [each.key[1] for each in read(births).held] == [parameter.data_ptr()]
    finally:
        births.stop()


def test_one_at_the_address_of_what_was_there_before_is_found_again(births: Births) -> None:
    KEPT.append(torch.nn.Parameter(torch.ones(FLOATS)))
    backward(KEPT[0])
    # Made here, as the reading would make it, and taken for one that was there at the mark.
    births._known.add(id(KEPT[0].grad))
    KEPT.append(births.add(KEPT[0].grad, Newborn(KEPT[0], "call")))
    assert {each.stage for each in read(births).held} == {"call"}
    assert len(read(births).held) == 2


def test_the_gradients_of_a_living_fixtures_tensors_are_its_own(births: Births) -> None:
    model = torch.nn.Linear(100, 10, bias=False)
    owner = Owner("module fixture 'model'", lambda: [model])
    backward(model.weight)
    reading = read(births, [owner])
    assert reading.held == ()
    assert set(reading.claimed.values()) == {owner}
    assert len(reading.claimed) == 2
