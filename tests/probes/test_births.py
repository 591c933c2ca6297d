"""Births: what came to life since a mark, by the collector's generations, whatever the collector does meanwhile."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import sys
from collections.abc import Callable, Iterator

import pytest

from lowtide.leakcheck.judging.ladder import trim_heap
from lowtide.probes import originals
from lowtide.probes.heap import births as module
from lowtide.probes.heap.births import Births, young_generations_tell
from lowtide.probes.host.counters import anonymous_bytes
from lowtide.probes.objects import listed
from lowtide.probes.objects.listed import frozen_by_program
from tests.resized_buffers import buffers_resized_meanwhile

pytestmark = pytest.mark.skipif(not young_generations_tell(), reason="this interpreter has no young generations")


IN_C = ("_followers_among", "_old_among", "_of_generations", "_young_with_types")


@pytest.fixture
def births(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Births]:
    if getattr(request, "param", "") == "without C":
        for name in IN_C:
            monkeypatch.setattr(module, name, None)
    watch = Births()
    watch.start()
    gc.collect(1)
    watch.mark("before")
    yield watch
    watch.stop()


in_both_ways = pytest.mark.parametrize("births", ["in C", "without C"], indirect=True)
"""For what goes through the old generation."""


def seen(births: Births, wanted: object) -> list[str]:
    """The labels under which an object is among the newborn ones."""
    return [born.label for born in births.survivors() if born.item is wanted]


def watched() -> object:
    """Make an object of a kind that is watched, as tensors are: `test_births_of_tensors.py` has those."""
    return functools.cache(len)


@pytest.mark.parametrize("make", [functools.lru_cache, functools.cache])
def test_what_is_watched_is_seen_young(births: Births, make: Callable[[object], object]) -> None:
    item = make(len)
    assert seen(births, item) == ["before"]


@pytest.mark.parametrize("make", [list, object, lambda: lambda: 1], ids=["list", "object", "function"])
def test_other_objects_are_not(births: Births, make: Callable[[], object]) -> None:
    item = make()
    assert seen(births, item) == []


@pytest.mark.parametrize("generation", [None, 0, 1, 2])
@pytest.mark.parametrize("drops", [True, False])
def test_what_takes_the_place_of_one_that_died_meanwhile_has_the_label_of_its_own_birth(
    births: Births, drops: bool, generation: int | None
) -> None:
    earlier = [watched() for _ in range(50)]
    births.forget_dead()
    births.begin("later")
    addresses = set(map(id, earlier))
    if drops:
        earlier.clear()
    later = [watched() for _ in range(100)]
    if generation is not None:
        gc.collect(generation)
    labels = {id(born.item): born.label for born in births.survivors()}
    assert {labels[id(item)] for item in later} == {"later"}
    assert {labels[id(item)] for item in earlier} <= {"before"}
    # Else this shows nothing.
    assert addresses.isdisjoint(map(id, later)) is not drops


def test_what_died_is_not_seen(births: Births) -> None:
    watched()
    assert births.survivors() == []


def test_what_was_there_at_the_mark_is_not_newborn(births: Births) -> None:
    item = watched()
    births.mark()
    assert seen(births, item) == []


@in_both_ways
@pytest.mark.parametrize("generations", [(0,), (1,), (2,), (1, 1), (1, 2), (2, 1), (2, 2), (0, 1, 0, 2, 1)])
def test_it_is_seen_after_any_collections(births: Births, generations: tuple[int, ...]) -> None:
    item = watched()
    for generation in generations:
        gc.collect(generation)
    assert seen(births, item) == ["before"]


@in_both_ways
def test_it_is_found_wherever_a_full_collection_has_put_it(births: Births) -> None:
    # What comes before all that refers to it is put at the end, where that is come across: 10,000 that were there
    # before, and only then what was born.
    older: list[list[object]] = [[] for _ in range(10_000)]
    gc.collect()
    around: list[list[object]] = [[older.pop()] for _ in range(10_000)]
    gc.collect(1)
    births.mark("before")
    item = watched()
    around.append([item])
    del item
    gc.collect()
    assert seen(births, around[-1][0]) == ["before"]


@in_both_ways
@pytest.mark.parametrize("generations", [(1,), (2,), (1, 2)])
def test_what_was_known_stays_known_after_any_collections(births: Births, generations: tuple[int, ...]) -> None:
    item = watched()
    births.mark()
    for generation in generations:
        gc.collect(generation)
    assert seen(births, item) == []


@in_both_ways
def test_what_an_earlier_look_has_met_is_found_without_a_list_of_the_old(
    births: Births, monkeypatch: pytest.MonkeyPatch
) -> None:
    item, other, lost = watched(), watched(), watched()
    gc.collect()
    young = watched()
    look = births.look(births.survivors())
    lists: list[object] = []
    listed = Births._old_among
    monkeypatch.setattr(Births, "_old_among", lambda *args: lists.append(1) or listed(*args))
    later = watched()
    del lost
    assert [born.item for born in births.survivors(last=look)] == [item, other, young, later]
    assert not lists
    # What the look has not met has become old.
    gc.collect(1)
    assert [born.item for born in births.survivors(last=look)] == [item, other, young, later]
    assert len(lists) == 1
    look = births.look(births.survivors())
    gc.collect(1)
    assert [born.item for born in births.survivors(last=look)] == [item, other, young, later]
    assert len(lists) == 2


@in_both_ways
def test_it_is_found_among_many_that_were_moved_with_it(births: Births) -> None:
    before = [[] for _ in range(50_000)]
    item = watched()
    after = [[] for _ in range(50_000)]
    gc.collect(1)
    assert len(before) == len(after)
    assert seen(births, item) == ["before"]


@in_both_ways
def test_it_is_found_although_most_of_what_was_moved_with_it_died(births: Births) -> None:
    before = [[] for _ in range(50_000)]
    item = watched()
    gc.collect(1)
    before.clear()
    gc.collect(1)
    assert seen(births, item) == ["before"]


@in_both_ways
def test_a_collection_by_the_collector_itself_is_noticed(births: Births) -> None:
    item = watched()
    kept = [[] for _ in range(20_000)]
    assert not any(other is item for other in gc.get_objects(generation=0)), "no collection moved it"
    assert seen(births, item) == ["before"]
    assert kept


def test_a_label_is_that_of_the_first_sight(births: Births) -> None:
    first = watched()
    births.begin("after")
    second = watched()
    births.begin("last")
    assert (seen(births, first), seen(births, second)) == (["before"], ["after"])


def test_a_collection_keeps_the_label(births: Births) -> None:
    first = watched()
    gc.collect()
    births.begin("after")
    second = watched()
    gc.collect()
    births.begin("last")
    assert (seen(births, first), seen(births, second)) == (["before"], ["after"])


@pytest.fixture
def thaw() -> Iterator[None]:
    assert frozen_by_program(gc.get_freeze_count()) == 0
    yield
    gc.unfreeze()


def test_what_was_seen_under_a_label_is_found_without_what_was_not(
    births: Births, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = watched()
    gc.collect()
    births.begin("import")
    young, old = watched(), watched()
    births.begin("after")
    after = watched()
    assert {id(born.item) for born in births.survivors("import")} == {id(young), id(old)}
    assert {id(born.item) for born in births.survivors()} >= {id(before), id(young), id(old), id(after)}
    gc.collect()
    assert {id(born.item) for born in births.survivors("import")} == {id(young), id(old)}
    # Where all that was seen under the label is young, the old generation is not looked through.
    births.begin("second import")
    second = watched()
    monkeypatch.delattr(Births, "_old_objects")
    assert [born.item is second for born in births.survivors("second import")] == [True]


@pytest.mark.usefixtures("thaw")
@in_both_ways
def test_what_was_noted_is_found_although_it_is_frozen(births: Births) -> None:
    item = watched()
    births.survivors()
    births.begin("after")
    gc.freeze()
    assert births.froze
    assert seen(births, item) == ["before"]


@pytest.mark.usefixtures("thaw")
@in_both_ways
def test_what_was_noted_and_then_frozen_and_unfrozen_is_found(births: Births) -> None:
    item = watched()
    births.survivors()
    gc.freeze()
    gc.unfreeze()
    assert seen(births, item) == ["before"]


def test_what_lies_before_and_behind_a_change_of_the_label_is_distinguished_later(births: Births) -> None:
    first = watched()
    births.begin("second", 3)
    second = watched()
    births.begin("third")
    third = [watched(), watched()]
    found = {id(born.item): (born.label, born.turn) for born in births.survivors()}
    assert [found[id(item)] for item in (first, second, *third)] == [
        ("before", 1),
        ("second", 3),
        ("third", 1),
        ("third", 1),
    ]


@pytest.mark.parametrize("generation", [0, 1, 2])
def test_a_collection_leaves_everything_its_label(births: Births, generation: int) -> None:
    first = watched()
    births.begin("second")
    second = watched()
    gc.collect(generation)
    births.begin("third")
    third = watched()
    assert seen(births, first) + seen(births, second) + seen(births, third) == ["before", "second", "third"]


@pytest.mark.usefixtures("thaw")
@pytest.mark.parametrize("frozen_in", ["before", "second", "third"])
def test_the_label_under_which_the_heap_was_frozen_is_known(births: Births, frozen_in: str) -> None:
    for label in ("second", "third", "fourth"):
        if births.label == frozen_in:
            gc.freeze()
            gc.unfreeze()
        births.begin(label)
    assert births.froze
    assert births.froze_in == frozen_in


@pytest.mark.usefixtures("thaw")
def test_a_freeze_is_noticed_although_it_is_undone(births: Births) -> None:
    assert not births.froze
    gc.freeze()
    gc.unfreeze()
    assert births.froze


@pytest.mark.usefixtures("thaw")
def test_after_the_survivors_a_freeze_is_known_without_another_list(
    births: Births, monkeypatch: pytest.MonkeyPatch
) -> None:
    births.survivors()
    assert not births.froze_until_last_look
    gc.freeze()
    gc.unfreeze()
    births.survivors()
    monkeypatch.setattr(module, "_young", None)
    assert births.froze_until_last_look


def test_what_the_interpreter_itself_keeps_from_the_collector_is_no_freeze(
    births: Births, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an unfreeze the next full collection of Python 3.12 moves its immortal objects back."""
    monkeypatch.setattr(listed, "_frozen", None)
    monkeypatch.setattr(originals.gc, "get_freeze_count", lambda: 0)
    births.mark("unfrozen")
    monkeypatch.setattr(originals.gc, "get_freeze_count", lambda: 375)
    assert not births.froze


def test_a_collection_is_no_freeze(births: Births) -> None:
    for generation in (0, 1, 2):
        gc.collect(generation)
        assert not births.froze


@pytest.mark.usefixtures("thaw")
def test_what_is_born_while_the_heap_is_frozen_is_found(births: Births) -> None:
    gc.freeze()
    births.mark("frozen")
    item = watched()
    gc.collect()
    assert not births.froze
    assert seen(births, item) == ["frozen"]


def test_with_the_collector_off_it_is_found(births: Births) -> None:
    gc.disable()
    try:
        item = watched()
        kept = [[] for _ in range(20_000)]
        assert seen(births, item) == ["before"]
        assert kept
    finally:
        gc.enable()


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_left_as_it_was(births: Births, enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    try:
        births.survivors()
        assert gc.isenabled() is enabled
    finally:
        gc.enable()


def test_watching_keeps_nothing_alive(births: Births) -> None:
    item = watched()
    gc.collect()
    births.survivors()
    address = id(item)
    del item
    assert not any(id(born.item) == address for born in births.survivors())


def test_started_twice_it_listens_once_and_stopped_twice_not_at_all() -> None:
    before = list(gc.callbacks)
    watch = Births()
    watch.start()
    watch.start()
    assert len(gc.callbacks) == len(before) + 3
    watch.stop()
    watch.stop()
    assert gc.callbacks == before


@pytest.mark.parametrize("moved", [False, True])
def test_the_identities_of_what_was_born_are_those_of_objects_of_any_kind(births: Births, moved: bool) -> None:
    births.mark()
    born = [[]]
    if moved:
        gc.collect()
    identities = births.born()
    assert identities is not None
    assert id(born[0]) in identities


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("age", ["old", "young"])
def test_what_was_there_at_the_mark_was_not_born_since(births: Births, age: str, moved: bool) -> None:
    older = [[]]
    if age == "old":
        gc.collect()
    births.mark()
    if moved:
        gc.collect()
    identities = births.born()
    assert identities is not None
    assert id(older[0]) not in identities


@pytest.mark.parametrize("most", [100, 10_000])
def test_too_many_births_are_not_remembered(births: Births, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(module, "_MOST_IDENTITIES", most)
    kept = [[] for _ in range(1000)]
    gc.collect()
    assert (births.born() is None) is (len(kept) > most)


@pytest.mark.nightly
def test_who_was_there_is_known_after_half_a_million_births(births: Births) -> None:
    older = [[]]
    births.mark()
    kept = [[] for _ in range(500_000)]
    gc.collect()
    identities = births.born()
    assert identities is not None
    assert id(older[0]) not in identities
    assert all(id(item) in identities for item in kept[::10_000])


def test_once_there_were_too_many_births_no_more_are_noted(births: Births, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_IDENTITIES", 100)
    kept = [[] for _ in range(1000)]
    gc.collect()
    assert births.born() is None
    kept += [[] for _ in range(1000)]
    gc.collect()
    assert births.born() is None
    assert births._born == []
    births.mark()
    monkeypatch.undo()
    assert births.born() is not None


@pytest.mark.usefixtures("births")
def test_watching_keeps_none_of_the_memory_of_many_small_objects() -> None:
    trim_heap()
    before = anonymous_bytes()
    kept = [(number,) for number in range(700_000)]
    del kept
    gc.collect(1)
    trim_heap()
    # With a number of Python's for each of the first 200,000 it was 50 MiB.
    assert anonymous_bytes() - before < 24 << 20


@pytest.mark.usefixtures("thaw")
def test_after_a_freeze_nobody_knows_what_was_born(births: Births) -> None:
    gc.freeze()
    assert births.born() is None


def test_what_a_collection_moves_right_before_a_mark_is_not_noted(births: Births) -> None:
    garbage = watched()
    with births.forgetting():
        gc.collect(1)
    births.mark("next")
    item = watched()
    gc.collect(1)
    assert (seen(births, garbage), seen(births, item)) == ([], ["next"])
    assert not births.froze


def nothing() -> None:
    """Nothing happens."""


@pytest.mark.parametrize(
    "happens",
    [
        nothing,
        lambda: gc.collect(0),
        lambda: gc.collect(1),
        lambda: gc.collect(2),
        lambda: [gc.collect(0), gc.collect(0), gc.collect(1)],
    ],
    ids=["nothing", "youngest", "young", "full", "several"],
)
@pytest.mark.parametrize("at", ["before", "in it", "after"])
def test_what_is_born_aside_has_another_label(births: Births, happens: Callable[[], object], at: str) -> None:
    items = {"before": [watched()]}
    if at == "before":
        happens()
    births.begin_aside("aside")
    items["aside"] = [watched()]
    if at == "in it":
        happens()
    items["aside"].append(watched())
    born = births.end_aside()
    items["before"].append(watched())
    if at == "after":
        happens()
    for label, of_label in items.items():
        assert [seen(births, item) for item in of_label] == [[label]] * len(of_label)
    survivors = births.survivors("aside") if born is None else born
    assert {id(each.item) for each in survivors} == set(map(id, items["aside"]))
    # Only what else is noted meanwhile makes it look at all that is young.
    assert (born is None) == (at == "in it" and happens is not nothing)


def test_asides_nest_and_a_stage_may_begin_in_one(births: Births) -> None:
    births.begin_aside("outer")
    outer = [watched()]
    births.begin_aside("inner")
    inner = watched()
    assert [born.label for born in births.end_aside() or ()] == ["inner"]
    outer.append(watched())
    births.begin("stage")
    staged = watched()
    births.begin("outer")
    assert [born.item for born in births.end_aside() or ()] == outer
    assert births.label == "before"
    assert [seen(births, item) for item in (*outer, inner, staged)] == [["outer"], ["outer"], ["inner"], ["stage"]]


def test_no_aside_looks_at_all_that_is_young(births: Births, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    look = module._young
    monkeypatch.setattr(module, "_young", lambda oldest=1: looks.append(oldest) or look(oldest))
    gc.disable()
    try:
        for place in range(100):
            births.begin_aside(f"aside {place}")
            births.end_aside()
    finally:
        gc.enable()
    assert set(looks) == {0}


def test_a_freeze_in_an_aside_is_noticed(births: Births) -> None:
    births.begin_aside("aside")
    try:
        gc.freeze()
        assert births.end_aside() is None
        assert births.froze
    finally:
        gc.unfreeze()
        gc.collect()


def test_an_aside_keeps_no_young_object_though_the_collector_is_off(births: Births) -> None:
    def parts() -> Iterator[int]:
        births.begin_aside("aside")
        births.end_aside()
        yield from range(20)

    gc.disable()
    try:
        # Python resizes a tuple that it fills, which must have no reference more than it has itself.
        assert tuple(parts()) == tuple(range(20))
    finally:
        gc.enable()


def test_a_record_that_fails_keeps_no_young_object(births: Births, monkeypatch: pytest.MonkeyPatch) -> None:
    record = births._record
    monkeypatch.setattr(sys, "unraisablehook", [].append)
    listed = record._young
    # The first step is done; of the phase "stop" nothing is known, which fails.
    steps = {"start": {1: map(listed.append, itertools.repeat([[]]))}}
    monkeypatch.setitem(module._steps_of, id(record), steps)
    gc.collect(1)
    assert (record.is_incomplete, list(listed)) == (True, [])


def test_a_collection_near_the_end_of_the_stack_is_recorded_and_prints_nothing(
    births: Births, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", failed.append)
    limit, left = sys.getrecursionlimit(), 6
    made = births._record.made
    try:
        for depth in range(1, limit):
            with contextlib.suppress(RecursionError):
                sys.setrecursionlimit(depth)
                break
        sys.setrecursionlimit(depth + left)
        births._record.record_next()
        gc.collect(0)
        gc.collect(1)
    finally:
        sys.setrecursionlimit(limit)
    assert (len(failed), births._record.made - made) == (0, 2)


def aside(births: Births) -> None:
    births.begin_aside("aside")
    births.end_aside()


def moved(births: Births) -> None:
    """Record what is young, as before a collection, after which there would be less of it."""
    births._record.record_next()
    next(births._record._at_next)


@pytest.mark.skipif(module._of_generations is None, reason="the extension is not built here")
@pytest.mark.parametrize(
    "look",
    [Births.mark, Births.survivors, Births.born, lambda births: births.unfrozen_among([1]), aside, moved],
    ids=["mark", "survivors", "born", "unfrozen", "aside", "collection"],
)
def test_no_other_thread_sees_what_it_lets_go_of_alive(births: Births, look: Callable[[Births], object]) -> None:
    gc.disable()
    # What is done with so many takes long enough that the other thread gets a turn.
    young = [[] for _ in range(200_000)]
    try:
        with buffers_resized_meanwhile() as errors:
            for _ in range(5):
                look(births)
    finally:
        gc.enable()
    assert errors == []
    assert young


@pytest.mark.parametrize("is_in_c", [True, False])
@pytest.mark.parametrize("is_young", [True, False])
@pytest.mark.usefixtures("thaw")
def test_what_the_collector_lists_is_told_from_what_is_gone_or_frozen(
    births: Births, monkeypatch: pytest.MonkeyPatch, *, is_in_c: bool, is_young: bool
) -> None:
    for name in IN_C if not is_in_c else ():
        monkeypatch.setattr(module, name, None)
    frozen: list[object] = []
    gc.freeze()
    old: list[object] = []
    gc.collect()
    births.mark("test")
    alive, gone = [[]], [[]]
    wanted = [id(old), id(alive), id(gone), id(frozen)]
    del gone
    if not is_young:
        gc.collect(1)
    assert births.unfrozen_among(wanted) == {id(old), id(alive)}
    assert births.unfrozen_among([]) == set()
