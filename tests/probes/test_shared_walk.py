"""One walk that several questions share: each is answered as by a walk of its own."""

from __future__ import annotations

import ctypes
import gc
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy
import pytest

from lowtide.probes.heap import holders as heap
from lowtide.probes.heap.graph import Graph, NewBehindKnown
from lowtide.probes.heap.holders import SharedWalk, sharing_walk, trace
from lowtide.probes.memory.buffers import LEAST
from lowtide.probes.objects.identities import Identities, identities, object_at
from lowtide.probes.objects.listed import collector_paused


class Thing:
    """What leaks in these tests."""


@pytest.fixture
def helper() -> Iterator[Any]:
    module = types.ModuleType("helper")
    sys.modules["helper"] = module
    yield module
    del sys.modules["helper"]


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each walk over the heap."""
    made: list[int] = []

    def walked(*args: Any) -> Graph:
        made.append(len(made))
        return Graph(*args)

    monkeypatch.setattr(heap, "Graph", walked)
    return made


def paths(things: list[Any], walk: SharedWalk, **more: Any) -> list[str]:
    with trace(things, walk=walk, **more) as found:
        return [str(found.path(place)) for place in range(len(things))]


def test_many_questions_take_one_walk(helper: Any, walks: list[int]) -> None:
    helper.first, helper.second = Thing(), {"a": [Thing()]}
    with sharing_walk() as walk:
        assert paths([helper.first], walk) == ["module 'helper' .first"]
        assert paths([helper.second["a"][0]], walk) == ["module 'helper' .second ['a'] [0]"]
        assert walk.census().exactly(Thing) == [helper.first, helper.second["a"][0]]
    assert len(walks) == 1


def test_for_what_was_made_since_the_walk_is_made_again(helper: Any, walks: list[int]) -> None:
    with sharing_walk() as walk:
        helper.first = Thing()
        assert paths([helper.first], walk) == ["module 'helper' .first"]
        helper.later = Thing()
        assert paths([helper.later], walk) == ["module 'helper' .later"]
    assert len(walks) == 2


def test_the_roots_of_one_question_are_no_roots_of_the_next(helper: Any) -> None:
    pool = [Thing()]
    helper.pool = [pool]
    with sharing_walk() as walk:
        assert paths(list(pool), walk, roots=[("the pool", pool)]) == ["the pool [0]"]
        assert paths(list(pool), walk) == ["module 'helper' .pool [0] [0]"]


def test_only_a_thorough_question_goes_through_what_the_collector_does_not_track(helper: Any) -> None:
    things = [Thing()]
    array = numpy.empty(1, object)
    array[0] = things[0]
    helper.hidden = {1: (array,)}
    del array
    # A tuple of nothing that is tracked is not tracked itself, once the collector has seen it.
    gc.collect()
    assert not gc.is_tracked(helper.hidden[1])
    with sharing_walk() as walk:
        assert paths(things, walk, ignore={id(things)}) == ["None"]
        assert paths(things, walk, ignore={id(things)}, thorough=True) == ["module 'helper' .hidden [1] [0] [0]"]
        assert paths(things, walk, ignore={id(things)}) == ["None"]


def test_what_the_asker_has_made_since_does_not_pass_for_a_holder_in_c(helper: Any) -> None:
    knot: list[Any] = [Thing()]
    knot.append(knot)
    with sharing_walk() as walk:
        assert paths([helper], walk) == ["module 'helper'"]
        kept = {"since": [knot, (knot[0],)]}
        with trace([knot[0]], walk=walk, thorough=True, ignore={id(knot)}) as found:
            assert not found.is_held_from_c(0)
    del kept


def test_what_each_of_many_cuts_frees_is_what_it_frees_alone(helper: Any) -> None:
    shared = [Thing()]
    helper.first = {"a": [Thing(), Thing()], "b": shared}
    helper.second = [shared, [Thing()]]
    things = [*helper.first["a"], shared[0], helper.second[1][0]]
    with trace(things) as found:
        alone = []
        for place in range(len(things)):
            with trace(things) as each:
                alone.append(each.freed_by_cutting(place, 0))
        found.will_be_cut(dict.fromkeys(range(len(things)), 0))
        together = [found.freed_by_cutting(place, 0) for place in range(len(things))]
    assert together == alone
    assert together[0] == [frozenset({0, 1}), frozenset({0, 1}), frozenset({0})]
    assert together[2] == [frozenset(), frozenset(), frozenset({2})]


class Memory(bytearray):
    """Over which an array may lie, and which the collector tracks, other than that."""


def new_behind_known(helper: Any) -> tuple[NewBehindKnown, Memory]:
    """Keep memory behind an array, in an instance of a class of its own; return a walk, and the memory."""
    helper.registry = {"old": Thing()}
    known = {id(helper), id(vars(helper)), id(helper.registry)}
    helper.registry["new"] = kept = type("Own", (Thing,), {})()
    kept.array = numpy.frombuffer(Memory(8), numpy.uint8)
    memory = kept.array.base.obj
    assert (type(memory), gc.is_tracked(memory), gc.is_tracked(kept.array)) == (Memory, True, False)
    cls: Any = type(kept)
    cls.last = kept
    view = kept.array.base
    born = [kept, vars(kept), view, *gc.get_referents(view), memory, cls, *gc.get_referents(cls)]
    born = [item for item in born if type(item) is not str and item not in (Thing, object)]
    with collector_paused():
        graph = NewBehindKnown(known, Identities(identities(born)))
    return graph, memory


def test_what_an_array_holds_is_found_behind_known_ways(helper: Any) -> None:
    graph, memory = new_behind_known(helper)
    try:
        # As long as this function has it, it is not held there alone.
        assert graph.unseen_references([id(memory)])
        identity = id(memory)
        del memory
        assert graph.unseen_references([identity]) == ()
        also = helper.registry["new"].array
        assert graph.unseen_references([identity])
        del also
        assert graph.unseen_references([identity]) == ()
    finally:
        graph.close()


def test_the_list_of_who_asked_first_holds_nothing_for_the_next() -> None:
    thing = ctypes.py_object(Thing())
    identity = id(thing.value)
    ctypes.pythonapi.Py_IncRef(thing)
    del thing
    with sharing_walk() as walk:
        things = [object_at(identity)]
        first = paths(things, walk, ignore={id(things)}, thorough=True)
        assert paths(things, walk, ignore={id(things)}, thorough=True) == first
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(object_at(identity)))


@pytest.mark.parametrize("asked", [True, False])
def test_arrays_that_were_asked_for_need_no_second_walk(asked: bool) -> None:
    old, new = bytes(LEAST), bytes(LEAST + 1)
    walk = SharedWalk()
    if asked:
        found = walk.buffers_besides({(id(old), LEAST)})
        assert [each.bytes for each in found if each.item is old or each.item is new] == [LEAST + 1]
        assert walk.buffers_besides(()) is found
    first = walk.graph()
    assert not first.has(old)
    assert (walk.graph([new]) is first) is asked
    walk.close()
    assert any(each.item is old for each in walk.buffers_besides(()))
    walk.close()
