"""The cycle that keeps an object is found and named, and none where a module or a variable holds it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from lowtide.probes.heap.cycles import cycles_behind


class Thing:
    """What a cycle keeps."""


class Request:
    batch: Any
    data: Any
    done: Any
    others: Any
    parts: Any
    requests: Any

    def __init__(self) -> None:
        self.thing = Thing()


class Slotted:
    __slots__ = ("itself", "thing")


def by_attribute() -> Thing:
    request = Request()
    request.data = request
    return request.thing


def by_list() -> Thing:
    request, batch = Request(), Request()
    batch.requests = [request]
    request.batch = batch
    return request.thing


def by_slot() -> Thing:
    slotted = Slotted()
    slotted.itself, slotted.thing = slotted, Thing()
    return slotted.thing


def by_method() -> Thing:
    request = Request()
    request.done = request.__init__  # type: ignore[misc]
    return request.thing


def by_plain_list() -> Thing:
    items: list[object] = [Thing()]
    items.append(items)
    return items[0]  # type: ignore[return-value]


def behind_a_cycle() -> Thing:
    request = Request()
    request.data = request
    request.parts = {"first": [request.thing]}
    thing, request.thing = request.thing, None  # type: ignore[assignment]
    return thing


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (by_attribute, {"Request.data"}),
        (by_list, {"Request.requests", "list[0]", "Request.batch"}),
        (by_slot, {"Slotted.itself"}),
        (by_method, {"Request.done", "method.__self__"}),
        (by_plain_list, {"list[1]"}),
        (behind_a_cycle, {"Request.data"}),
    ],
)
def test_the_references_of_a_cycle_are_named(make: Callable[[], Thing], names: set[str]) -> None:
    thing = make()
    (edges,) = cycles_behind([thing])
    assert {edge.text for edge in edges} == names
    assert {edge.text for edge in edges if edge.is_attribute} <= names - {"list[0]", "list[1]", "method.__self__"}
    alive = weakref.ref(thing)
    del thing
    assert alive() is not None
    gc.collect()
    assert alive() is None


KEPT = Request()


def test_what_is_in_no_cycle_or_held_by_a_module_has_none() -> None:
    alone = Request()
    assert cycles_behind([alone.thing, KEPT.thing]) == [[], []]


def test_of_many_objects_each_has_its_own_cycle() -> None:
    """One is nearer to its cycle than another, one hangs on that of the first, one is held by a module, one by none."""
    far, beside, alone, request = behind_a_cycle(), Thing(), Request(), Request()
    near = request.thing
    request.data, request.others = request, [[[beside]]]
    del request
    found = cycles_behind([near, KEPT.thing, far, alone.thing, beside])
    assert [{edge.text for edge in edges} for edges in found] == [
        {"Request.data"},
        set(),
        {"Request.data"},
        set(),
        {"Request.data"},
    ]
