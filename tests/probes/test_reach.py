"""What some objects keep alive: the walk forward follows what holds, and stops where everything would be reached."""

from __future__ import annotations

import functools
import gc
import sys
import types
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from lowtide.probes import native
from lowtide.probes.heap.reach import BoundSince, led_to, module_namespaces, reach, ways_to
from lowtide.probes.objects.identities import Identities, identities


class Thing:
    def __init__(self, held: object = None) -> None:
        self.held = held

    def method(self) -> None: ...


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held: object) -> None:
        self.held = held


def reaches(start: object, wanted: object, **options: Any) -> bool:
    found, _ = reach([start], **options)
    return sum(item is wanted for item in found) == 1


def suspended(held: object) -> Iterator[object]:
    yield held


async def suspended_too(held: object) -> AsyncIterator[object]:
    yield held


async def waiting(held: object) -> object:
    return held


def started(held: object) -> Iterator[object]:
    generator = suspended(held)
    next(generator)
    return generator


def closing_over(held: object) -> Callable[[], object]:
    return lambda: held


@pytest.mark.parametrize(
    "hold",
    [
        lambda held: held,
        lambda held: [held],
        lambda held: {"key": held},
        lambda held: (1, [held]),
        lambda held: {held},
        Thing,
        Slotted,
        lambda held: held.method,
        lambda held: functools.partial(len, held),
        closing_over,
        lambda held: lambda value=held: value,
        lambda held: lambda *, value=held: value,
        started,
        suspended,
        suspended_too,
        lambda held: [[[[held]]]],
    ],
)
def test_what_holds_an_object_reaches_it(hold: Callable[[Thing], object]) -> None:
    wanted = Thing()
    assert reaches(hold(wanted), wanted)


def test_a_coroutine_reaches_its_arguments() -> None:
    wanted = Thing()
    coroutine = waiting(wanted)
    assert reaches(coroutine, wanted)
    coroutine.close()


def test_a_cycle_ends_and_each_object_is_found_once() -> None:
    first, second = Thing(), Thing()
    first.held, second.held = second, first
    found, truncated = reach([first])
    assert sum(item is second for item in found) == sum(item is first for item in found) == 1
    assert not truncated


def test_a_weak_reference_does_not_reach_its_target() -> None:
    wanted = Thing()
    assert not reaches([weakref.ref(wanted), weakref.proxy(wanted)], wanted)


@pytest.mark.parametrize(
    "boundary",
    [sys.modules[__name__], Thing, test_a_weak_reference_does_not_reach_its_target.__code__, sys._getframe()],
    ids=["module", "class", "code", "frame"],
)
def test_it_stops_where_everything_would_be_reached(boundary: object) -> None:
    found, _ = reach([boundary])
    assert found == []


def test_it_stops_at_a_module_s_namespace() -> None:
    assert reach([vars(sys.modules[__name__])]) == ([], False)


def test_a_function_does_not_reach_what_its_module_holds() -> None:
    assert not reaches(reaches, Slotted)
    assert not reaches(reaches, vars(sys.modules[__name__]))


def test_it_stops_at_the_types_that_the_caller_names() -> None:
    wanted = Thing()
    assert not reaches([Slotted(wanted)], wanted, boundaries=(Slotted,))
    assert reaches([Slotted(wanted)], wanted, boundaries=(types.BuiltinFunctionType,))


def test_it_stops_at_subclasses_of_them() -> None:
    class Special(Slotted):
        pass

    wanted = Thing()
    assert not reaches([Special(wanted)], wanted, boundaries=(Slotted,))


def test_it_looks_into_those_classes_and_at_those_functions_that_the_caller_names() -> None:
    wanted, other = Thing(), Thing()

    class Made:
        kept: ClassVar[list[Thing]] = [wanted]

    def made() -> None: ...

    vars(made)["kept"] = other
    for holder, held in ((Made(), wanted), (Made, wanted), (made, other)):
        assert not reaches([holder], held)
        assert reaches([holder], held, enters=lambda item: item is Made or item is made)
        assert not reaches([holder], held, enters=lambda item: item is Thing)
    assert not reaches([Made], vars(sys.modules[__name__]), enters=lambda item: True)


def test_it_does_not_look_into_objects_of_the_packages_that_the_caller_names() -> None:
    wanted = Thing()
    foreign = type("Foreign", (Thing,), {"__module__": "someones.inner"})(wanted)
    assert not reaches([foreign], wanted, packages=("someones",))
    assert reaches([foreign], wanted, packages=("some",))


def test_past_its_limit_it_says_so() -> None:
    things = [Thing([]) for _ in range(100)]
    found, truncated = reach([things], max_objects=10)
    assert (len(found), truncated) == (10, True)
    assert reach([things])[1] is False


def test_it_runs_no_foreign_code() -> None:
    class Touchy:
        def __getattribute__(self, name: str) -> object:
            raise AssertionError(name)

        def __eq__(self, other: object) -> bool:
            raise AssertionError

        __hash__ = None  # type: ignore[assignment]

    found, _ = reach([[Touchy()]])
    assert len(found) == 2


def test_it_keeps_nothing_alive() -> None:
    wanted = Thing([Thing()])
    reference = weakref.ref(wanted)
    reach([wanted])
    del wanted
    gc.collect()
    assert reference() is None


def test_what_arrays_hold_is_reached_and_so_is_what_untracked_containers_do() -> None:
    """An engine that keeps its weights as numpy arrays owns the tensors under them."""
    tensor, item = torch.zeros(3), [1]
    view = tensor.numpy()
    table = np.array([None, item], dtype=object)
    engine = {"weights": {"a": (view,)}}
    gc.collect()
    found, _ = reach([engine, [table]])
    assert any(held is view.base for held in found)
    assert any(held is item for held in found)


class TestLedTo:
    """From the objects back to a dict."""

    @pytest.mark.parametrize(
        "hold",
        [
            lambda thing: thing,
            lambda thing: [thing],
            lambda thing: {"a": [thing]},
            lambda thing: types.SimpleNamespace(held=[thing]),
            lambda thing: functools.partial(print, [thing]),
        ],
    )
    def test_what_leads_to_an_object_is_found(self, hold: Callable[[Thing], object]) -> None:
        thing, other = Thing(), Thing()
        namespace, elsewhere = {"name": hold(thing)}, {"name": [other]}
        assert led_to([other, thing], {id(namespace)}) == [False, True]
        assert led_to([other, thing], {id(namespace), id(elsewhere)}) == [True, True]

    def test_one_that_holds_both_leads_to_both(self) -> None:
        things = [Thing(), Thing()]
        namespace = {"name": {"first": things[0], "rest": (things[1],)}}
        assert led_to(things, {id(namespace)}) == [True, True]

    def test_what_is_far_away_or_held_by_too_much_is_not_looked_for(self) -> None:
        far, near = Thing(), Thing()
        namespace = {"far": [[[[[far]]]]], "near": [near]}
        assert led_to([far, near], {id(namespace)}) == [False, True]
        crowd = [[near] for _ in range(600)]
        assert led_to([near], {id({}), id(crowd)}) == [False]

    def test_it_keeps_nothing_alive(self) -> None:
        thing = Thing()
        namespace = {"name": [thing]}
        before = sys.getrefcount(thing)
        led_to([thing], {id(namespace)})
        assert sys.getrefcount(thing) == before


def test_only_some_objects_are_gone_through_and_what_the_roots_hold_that_is_not_plain() -> None:
    wanted: list[object] = []
    inner = [wanted]
    start = Thing([inner, [wanted]])
    some = identities([vars(start), start.held, inner, wanted])
    assert reaches(start, wanted, only=Identities(some))
    assert not reaches(start, wanted, only=Identities(some[[0, 1, 3]]))


def test_of_a_way_its_objects_are_told() -> None:
    wanted: list[object] = []
    short, longer = [wanted], [[[wanted]]]
    start = Slotted({"longer": longer, "short": short})
    found = reach([start])[0]
    way = {id(item) for item in (start, start.held, short, wanted)}
    assert ways_to([id(wanted)], [id(start)], found) == way


def test_where_no_way_is_seen_there_is_none() -> None:
    wanted: list[object] = []
    found = [*reach([wanted])[0], *reach([start := Thing()])[0]]
    assert ways_to([id(wanted)], [id(start)], found) == set()
    assert ways_to([id(wanted)], [id(wanted)], found) == {id(wanted)}
    assert ways_to([], [id(start)], found) == set()


def test_a_long_chain_is_no_way() -> None:
    wanted: list[object] = []
    chain: list[object] = wanted
    for _ in range(200):
        chain = [chain]
    found = reach([chain])[0]
    assert len(found) == 201
    assert ways_to([id(wanted)], [id(chain)], found) == set()


@pytest.mark.parametrize("is_in_c", [True, False])
def test_what_a_module_was_bound_to_since_is_told(is_in_c: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_in_c:
        monkeypatch.setattr(native, "marks_of", None)
    module = types.ModuleType("a_module_of_this_test")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    before, after, elsewhere = [0], [1], [2]
    vars(module).update(before=before)
    bound = BoundSince()
    assert bound.stops() >= {id(before)} | module_namespaces()
    bound.note()
    assert (id(before) in bound.stops()) is not is_in_c
    vars(module).update(after=after)
    stops = bound.stops()
    assert stops >= {id(before), id(after)} | module_namespaces()
    assert id(elsewhere) not in stops
    other = types.ModuleType("another_module_of_this_test")
    vars(other).update(elsewhere=elsewhere)
    monkeypatch.setitem(sys.modules, other.__name__, other)
    assert bound.stops() >= {id(after), id(elsewhere), id(vars(other))}
