"""Births of tensors, and of what else is torch's: apart, because a heap with torch is many times as large."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

from lowtide.probes.heap import births as module
from lowtide.probes.heap.births import Births, young_generations_tell
from tests.probes.test_births import births, seen

__all__ = ["births"]

pytestmark = pytest.mark.skipif(not young_generations_tell(), reason="this interpreter has no young generations")


def tensor() -> torch.Tensor:
    return torch.zeros(10)


@pytest.mark.parametrize(
    "make",
    [tensor, lambda: torch.UntypedStorage(10), lambda: nn.Parameter(torch.zeros(1)), lambda: nn.ReLU()],
    ids=["tensor", "storage", "parameter", "module"],
)
def test_what_is_watched_is_seen_young(births: Births, make: Callable[[], object]) -> None:
    item = make()
    assert seen(births, item) == ["before"]
    gc.collect()
    assert seen(births, item) == ["before"]


def test_other_objects_of_torch_are_not(births: Births) -> None:
    item = torch.device("cpu")
    assert seen(births, item) == []


class Forbidding(type):
    """Of a class whose metaclass is asked nothing."""

    def __hash__(cls) -> int:
        raise AssertionError("hashed")

    def __eq__(cls, other: object) -> bool:
        raise AssertionError("compared")

    def __instancecheck__(cls, item: object) -> bool:
        raise AssertionError("asked")

    __subclasscheck__ = __instancecheck__


@pytest.mark.parametrize("others", [0, 2 * module._FEW], ids=["few", "many"])
def test_among_few_and_many_others_the_same_is_seen_and_no_class_is_asked(births: Births, others: int) -> None:
    class Foreign(metaclass=Forbidding):
        pass

    class Derived(nn.ReLU):
        pass

    gc.disable()
    try:
        items = [tensor(), functools.cache(len), Derived(), nn.Parameter(torch.zeros(1))]
        kept = [Foreign(), *([] for _ in range(others))]
        assert [seen(births, item) for item in items] == [["before"]] * 4
        assert all(born.item is not kept[0] for born in births.survivors())
    finally:
        gc.enable()


def test_tensors_can_be_swapped_while_they_are_watched(births: Births) -> None:
    first, second = torch.zeros(3), torch.zeros(5)
    births.survivors()
    torch.utils.swap_tensors(first, second)
    assert len(first) == 5


def test_a_tensor_at_the_address_of_another_kind_of_object_that_died_is_found(births: Births) -> None:
    # What lies before an object, and so the space that it takes, differs between versions of Python.
    slots = (("__dict__", "__weakref__", *(f"slot_{number}" for number in range(count))) for count in range(6))
    kinds = [type("OfAboutItsSize", (), {"__slots__": names}) for names in slots]
    gc.disable()
    try:
        others = [kind() for kind in kinds for _ in range(2000)]
        births.mark()
        addresses = set(map(id, others))
        others.clear()
        tensors = [tensor() for _ in range(2000)]
        assert addresses.intersection(map(id, tensors))
        assert {id(born.item) for born in births.survivors()} >= set(map(id, tensors))
    finally:
        gc.enable()


def freeze() -> None:
    gc.collect()
    gc.freeze()


@pytest.mark.parametrize(
    "before", [lambda: None, lambda: gc.collect(1), gc.collect, freeze], ids=["young", "old", "reordered", "frozen"]
)
def test_all_that_is_watched_is_found_whenever_it_was_born(births: Births, before: Callable[[], object]) -> None:
    items: list[object] = [tensor(), nn.Parameter(tensor())]
    gc.collect()
    births.mark()
    items += [nn.ReLU(), tensor().untyped_storage(), functools.lru_cache(tensor)]
    before()
    items += [tensor()]
    try:
        census = births.all_watched()
        found = census.instances_of(torch.Tensor, torch.UntypedStorage, nn.Module, module.LRU_CACHE)
    finally:
        gc.unfreeze()
    assert set(map(id, items)) <= set(map(id, found))
    assert len(found) == len(set(map(id, found)))
