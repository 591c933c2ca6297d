"""What can be asked of one walk besides paths: given roots, the inspector's marks, links, and what one cut frees."""

from __future__ import annotations

import functools
import gc
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from lowtide.probes.heap.holders import find_paths, trace
from lowtide.probes.heap.paths import Mark
from lowtide.probes.heap.roots import RootKind
from tests.waiting import HANG_S

pytestmark = pytest.mark.nightly


class Thing:
    """What leaks in these tests."""


class Holder:
    """Holds what it is given."""

    def __init__(self, held: object) -> None:
        self.held = held


@pytest.fixture
def helper() -> Iterator[Any]:
    module = types.ModuleType("helper")
    sys.modules["helper"] = module
    yield module
    del sys.modules["helper"]


@pytest.fixture
def elsewhere() -> Iterator[Any]:
    module = types.ModuleType("elsewhere")
    sys.modules["elsewhere"] = module
    yield module
    del sys.modules["elsewhere"]


def hidden(held: object) -> list[Any]:
    """A list that no path may pass; what only it holds is nowhere to be found."""
    return [held]


def test_what_only_a_given_root_holds_is_found_from_it() -> None:
    pools = hidden(Holder([Thing()]))
    things = [pools[0].held[0]]
    [path] = find_paths(things, ignore={id(pools)}, roots=[("the pool", pools[0])])
    assert path is not None
    assert (path.root_kind, path.root_name, path.root) == ("object", "the pool", "the pool")
    assert str(path) == "the pool .held [0]"


def test_without_the_given_root_it_has_no_path() -> None:
    pools = hidden(Holder([Thing()]))
    things = [pools[0].held[0]]
    assert find_paths(things, ignore={id(pools)}) == [None]


def test_each_given_root_goes_by_its_own_name() -> None:
    pools = hidden(Thing()) + hidden([Thing()])
    things = [pools[0], pools[1][0]]
    paths = find_paths(things, ignore={id(pools)}, roots=[("first", pools[0]), ("second", pools[1])])
    assert list(map(str, paths)) == ["first", "second [0]"]


def test_a_given_root_that_the_collector_does_not_track_is_a_root() -> None:
    pools = hidden(object())
    assert list(map(str, find_paths(list(pools), ignore={id(pools)}, roots=[("the pool", pools[0])]))) == ["the pool"]


def test_a_given_root_that_is_a_module_goes_by_the_given_name(helper: Any) -> None:
    helper.things = [Thing()]
    [path] = find_paths(list(helper.things), roots=[("the plugin", helper)])
    assert str(path) == "the plugin .things [0]"


def test_a_nearer_root_is_taken_before_a_given_one(helper: Any) -> None:
    helper.thing = Thing()
    pools = hidden([[[[helper.thing]]]])
    [path] = find_paths([helper.thing], ignore={id(pools)}, roots=[("the pool", pools[0])])
    assert str(path) == "module 'helper' .thing"


def test_a_given_root_holds_what_a_cut_elsewhere_would_free(helper: Any) -> None:
    helper.things = [Thing()]
    pools = hidden([[[[helper.things[0]]]]])
    things = list(helper.things)
    with trace(things, ignore={id(pools)}) as found:
        assert found.freed_by_cutting(0, 0) == [{0}, {0}]
    with trace(things, ignore={id(pools)}, roots=[("the pool", pools[0])]) as found:
        assert found.freed_by_cutting(0, 0) == [set(), set()]


def closure_over(thing: Thing) -> Callable[..., Thing]:
    return lambda *_: thing


class Inspector:
    """Notes what it is asked, and answers with what it was given."""

    def __init__(self, *answers: Mark | None) -> None:
        self.answers = answers
        self.asked: list[tuple[str, list[int]]] = []

    def __call__(self, root: RootKind, items: Sequence[object]) -> Sequence[Mark | None]:
        self.asked.append((root, list(map(id, items))))
        return self.answers


def test_the_inspector_gets_the_root_and_the_objects_in_order(helper: Any) -> None:
    helper.engine = Holder({"k": Thing()})
    things = [helper.engine.held["k"]]
    inspect = Inspector(None, None, None)
    find_paths(things, inspect=inspect)
    assert inspect.asked == [("module", [id(helper.engine), id(helper.engine.held), id(things[0])])]


def test_what_one_step_folds_together_is_no_object_of_its_own(helper: Any) -> None:
    helper.function = closure_over(Thing())
    things = [helper.function()]
    inspect = Inspector(None, None)
    [path] = find_paths(things, inspect=inspect)
    assert path is not None
    assert (path.references, inspect.asked) == (5, [("module", [id(helper.function), id(things[0])])])


def test_marks_land_on_their_steps(helper: Any) -> None:
    helper.engine = Holder({"k": (Thing(),)})
    [path] = find_paths([helper.engine.held["k"][0]], inspect=Inspector("innocent", None, "pending", "holding"))
    assert path is not None
    assert [(step.edge, step.mark) for step in path.steps] == [
        (".engine", "innocent"),
        (".held", None),
        ("['k']", "pending"),
        ("[0]", "holding"),
    ]


def test_each_path_is_inspected_on_its_own(helper: Any) -> None:
    helper.first, helper.second = Thing(), Holder(Thing())
    inspect = Inspector(None)
    with trace([helper.second.held, helper.first]) as found:
        found.path(1, inspect)
        assert inspect.asked == [("module", [id(helper.first)])]


def test_a_root_itself_leaves_nothing_to_inspect(helper: Any) -> None:
    inspect = Inspector()
    find_paths([helper], inspect=inspect)
    assert inspect.asked == [("module", [])]


def test_what_has_no_path_is_not_inspected() -> None:
    things = hidden(Thing())
    inspect = Inspector()
    assert find_paths(things, inspect=inspect) == [None]
    assert inspect.asked == []


def test_the_inspector_is_told_of_a_frame() -> None:
    holder = Holder(Thing())
    inspect = Inspector("innocent", None)
    [path] = find_paths([holder.held], inspect=inspect)
    assert path is not None
    assert inspect.asked == [("frame", [id(holder), id(holder.held)])]
    assert [step.mark for step in path.steps] == ["innocent", None]


def test_the_inspector_is_told_of_a_given_root() -> None:
    pools = hidden([Thing()])
    inspect = Inspector("holding")
    [path] = find_paths([pools[0][0]], ignore={id(pools)}, inspect=inspect, roots=[("the pool", pools[0])])
    assert path is not None
    assert inspect.asked == [("object", [id(pools[0][0])])]
    assert path.steps[0].mark == "holding"


def test_the_link_of_a_frames_variable_starts_from_the_frame() -> None:
    thing = Thing()
    with trace([thing]) as found:
        link = found.link(0, 0)
    assert (link.edge, link.kind, link.held) == ("f_locals['thing']", "frame-local", id(thing))
    assert link.owner is link.carrier is sys._getframe()


def test_the_link_of_a_threads_attribute_starts_from_the_thread() -> None:
    stop = threading.Event()
    thread: Any = threading.Thread(target=stop.wait, args=(20,))
    thread.start()
    try:
        thread.marked = hidden(Thing())
        things = list(thread.marked)
        with trace(things) as found:
            link = found.link(0, 0)
        assert (link.edge, link.kind, link.held) == (".marked", "thread", id(thread.marked))
        assert link.owner is thread
    finally:
        stop.set()
        thread.join()


def freed(get: Callable[[], Any], first: int = 0) -> list[bool]:
    """Whether each step of the path to a thing, if it alone were cut, frees the thing.

    It is not given itself: what an assertion calls is kept in hidden variables of the test.
    """
    things = [get()]
    with trace(things) as found:
        return [each == {0} for each in found.freed_by_cutting(0, first)]


def test_cutting_any_edge_of_the_only_path_frees_the_thing(helper: Any) -> None:
    helper.engine = Holder({"k": [Thing()]})
    assert freed(lambda: helper.engine.held["k"][0]) == [True, True, True, True]


def test_the_steps_are_those_from_the_first_on(helper: Any) -> None:
    helper.first, helper.second = [[Thing()]], [Thing()]
    helper.second.append(helper.first[0])
    # The inner list is in both; the path leads over the first.
    assert freed(lambda: helper.first[0][0]) == [False, False, True]
    assert freed(lambda: helper.first[0][0], 1) == [False, True]
    assert freed(lambda: helper.first[0][0], 3) == []


def test_what_is_held_twice_by_one_list_is_not_freed_by_cutting_one(helper: Any) -> None:
    thing = Thing()
    helper.twice = [thing, thing]
    del thing
    assert freed(lambda: helper.twice[0]) == [True, False]


def test_what_is_held_under_two_keys_is_not_freed_by_cutting_one(helper: Any) -> None:
    thing = Thing()
    helper.twice = {"first": thing, "second": thing}
    del thing
    assert freed(lambda: helper.twice["first"]) == [True, False]


def test_what_is_held_under_two_names_is_not_freed_by_cutting_one(helper: Any) -> None:
    helper.first = helper.second = Thing()
    assert freed(lambda: helper.first) == [False]


def test_what_a_cycle_holds_is_freed_with_it(helper: Any) -> None:
    helper.cycle = [Thing()]
    helper.cycle.append(helper.cycle)
    helper.cycle[0].back = helper.cycle
    assert freed(lambda: helper.cycle[0]) == [True, True]


def test_what_another_module_holds_is_not_freed(helper: Any, elsewhere: Any) -> None:
    helper.near = [Thing()]
    elsewhere.far = [[helper.near[0]]]
    assert freed(lambda: helper.near[0]) == [False, False]


def test_what_a_running_function_holds_is_not_freed(helper: Any) -> None:
    helper.near = [Thing()]
    variable = [helper.near[0]]
    assert freed(lambda: helper.near[0]) == [False, False]
    del variable
    assert freed(lambda: helper.near[0]) == [True, True]


def test_what_another_thread_holds_is_not_freed(helper: Any) -> None:
    def run(variable: object) -> None:
        ready.set()
        stop.wait(HANG_S)
        del variable

    ready, stop = threading.Event(), threading.Event()
    helper.near = [Thing()]
    thread: Any = threading.Thread(target=run, args=(helper.near[0],))
    thread.start()
    try:
        assert ready.wait(HANG_S)
        thread._args = ()
        assert freed(lambda: helper.near[0]) == [False, False]
    finally:
        stop.set()
        thread.join()


def test_what_a_thread_local_holds_is_not_freed(helper: Any) -> None:
    helper.near = [Thing()]
    helper.local = threading.local()
    helper.local.value = helper.near[0]
    assert freed(lambda: helper.near[0]) == [False, False]


def test_a_weak_reference_holds_nothing(helper: Any) -> None:
    helper.near = [Thing()]
    helper.weak = weakref.ref(helper.near[0])
    assert freed(lambda: helper.near[0]) == [True, True]


def test_all_that_one_edge_retains_is_reported_for_each_of_them(helper: Any) -> None:
    helper.engine = Holder([Thing(), Thing()])
    helper.other = Thing()
    things = [*helper.engine.held, helper.other]
    with trace(things) as found:
        assert found.freed_by_cutting(0, 0) == [{0, 1}, {0, 1}, {0}]
        assert found.freed_by_cutting(1, 0) == [{0, 1}, {0, 1}, {1}]
        assert found.freed_by_cutting(2, 0) == [{2}]


def test_one_thing_asked_for_twice_is_freed_twice(helper: Any) -> None:
    helper.thing = Thing()
    with trace([helper.thing, helper.thing]) as found:
        assert found.freed_by_cutting(0, 0) == [{0, 1}]


def test_nothing_is_reported_of_what_has_no_path() -> None:
    things = hidden(Thing())
    with trace(things) as found:
        assert found.path(0) is None
        assert found.freed_by_cutting(0, 0) == []


@pytest.mark.parametrize("size", [None, 4])
def test_clearing_a_cache_frees_all_that_its_entries_hold(helper: Any, size: int | None) -> None:
    results = [[Thing()], [Thing()], [Thing()]]
    things = [result[0] for result in results]
    helper.cached = functools.lru_cache(maxsize=size)(lambda *_: results.pop())
    for key in (1, "text", Thing()):
        helper.cached(key)
    with trace(things) as found:
        # The global, the cache, the list.
        assert found.freed_by_cutting(0, 0) == [{0, 1, 2}, {0, 1, 2}, {0}]
    assert results == []


@pytest.mark.parametrize("size", [None, 4])
def test_clearing_a_cache_frees_the_keys_with_the_results(helper: Any, size: int | None) -> None:
    thing = Thing()
    helper.cached = functools.lru_cache(maxsize=size)(lambda argument: [argument])
    helper.cached(thing)
    things = [thing]
    del thing
    with trace(things) as found:
        # The key tuple and the result both hold it.
        assert found.freed_by_cutting(0, 0)[:2] == [{0}, {0}]


@pytest.mark.parametrize("size", [None, 4])
def test_clearing_a_cache_leaves_it_its_function(helper: Any, size: int | None) -> None:
    helper.cached = functools.lru_cache(maxsize=size)(closure_over(Thing()))
    things = [helper.cached(1)]
    with trace(things) as found:
        path = found.path(0)
        freed = found.freed_by_cutting(0, 0)
    assert str(path) == "module 'helper' .cached lru_cache value"
    assert freed == [{0}, set()]


@pytest.mark.parametrize("size", [None, 4])
def test_a_dict_among_the_results_of_a_cache_is_cut_as_itself(helper: Any, size: int | None) -> None:
    results = [{"k": Thing()}]
    helper.cached = functools.lru_cache(maxsize=size)(lambda _: results.pop())
    assert freed(lambda: helper.cached(1)["k"]) == [True, True, True]


@pytest.mark.parametrize("size", [None, 4])
def test_a_dict_among_the_results_of_a_cache_that_is_held_elsewhere_keeps_what_it_holds(
    helper: Any, elsewhere: Any, size: int | None
) -> None:
    results: list[Any] = [{"k": Thing()}, Thing()]
    elsewhere.far = [[[results[0]]]]
    things = [results[0]["k"], results[1]]
    helper.cached = functools.lru_cache(maxsize=size)(lambda _: results.pop())
    helper.cached(1)
    helper.cached(2)
    with trace(things) as found:
        assert found.freed_by_cutting(0, 0) == [set(), set(), {0}]
        assert found.freed_by_cutting(1, 0) == [{1}, {1}]


def test_walking_twice_says_the_same(helper: Any) -> None:
    helper.engine = Holder([Thing(), Thing()])
    assert freed(lambda: helper.engine.held[0]) == freed(lambda: helper.engine.held[0]) == [True, True, True]


def test_frozen_holders_retain_what_they_did(helper: Any) -> None:
    helper.engine = Holder([Thing()])
    gc.freeze()
    try:
        assert freed(lambda: helper.engine.held[0]) == [True, True, True]
    finally:
        gc.unfreeze()


def test_what_is_not_tracked_is_found_in_containers_that_are_not_either(helper: Any) -> None:
    helper.table = {"k": object()}
    helper.pair = (object(), [object()])
    helper.deep = {"k": (object(), ("text", object()))}
    gc.collect()
    assert not gc.is_tracked(helper.table)
    things = [helper.table["k"], helper.pair[0], helper.pair[1][0], helper.deep["k"][1][1]]
    assert list(map(str, find_paths(things))) == [
        "module 'helper' .table ['k']",
        "module 'helper' .pair [0]",
        "module 'helper' .pair [1] [0]",
        "module 'helper' .deep ['k'] [1] [1]",
    ]


def test_a_container_that_is_not_tracked_holds_what_it_holds(helper: Any) -> None:
    helper.near = [object()]
    helper.far = [[{"k": helper.near[0]}]]
    gc.collect()
    assert freed(lambda: helper.near[0]) == [False, False]


@pytest.mark.xfail(
    sys.version_info >= (3, 13),
    reason="while the instance lives, its dict shows the collector none of the values that lie in the instance",
    strict=False,
)
def test_the_dict_of_an_instance_that_is_held_elsewhere_holds_its_attributes(helper: Any) -> None:
    helper.holder = Holder(Thing())
    helper.deep = [[[vars(helper.holder)]]]
    assert freed(lambda: helper.holder.held) == [False, True]
    watched = weakref.ref(helper.holder.held)
    del helper.holder
    gc.collect()
    assert watched() is not None


def test_what_one_variable_of_a_running_function_holds_is_freed_by_cutting_it() -> None:
    variable = [Thing()]
    things = [variable[0]]
    with trace(things) as found:
        assert found.freed_by_cutting(0, 0) == [{0}, {0}]


def test_what_two_variables_of_a_running_function_hold_is_not_freed_by_cutting_one() -> None:
    variable = [Thing()]
    other = variable
    things = [variable[0]]
    with trace(things) as found:
        assert found.freed_by_cutting(0, 0) == [set(), {0}]
    del other
