"""The books: what is new is the test's or an owner's, since a stage; and levels fall back as far as they should."""

from __future__ import annotations

import mmap
import os
import subprocess
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from lowtide.leakcheck.judging.exemptions import waiting_workers
from lowtide.leakcheck.judging.owners import Owner, Ownership
from lowtide.leakcheck.resources.orphaned_files import OwnSegments
from lowtide.probes.host.counters import Counters
from lowtide.probes.host.makers import Makers
from lowtide.probes.objects.foreign import thread_key
from tests.waiting import wait_until

DTYPE = "torch.get_default_dtype()"


def counters(
    *groups: str,
    host: int | None = 0,
    settings: Mapping[str, str] | None = None,
    descriptors: tuple[str, ...] = (),
    memory: tuple[str, ...] = (),
) -> Counters:
    """What the counters say of a process with these process groups."""
    items = {
        "process-groups": dict.fromkeys(groups, 1),
        "file-descriptors": dict.fromkeys(descriptors, 1),
        "shared-memory": dict.fromkeys(memory, 1),
    }
    return Counters(items, {"host-memory": host}, settings or {})


@pytest.fixture
def segments() -> OwnSegments:
    """Never started: it knows the names that a test gives it."""
    return OwnSegments()


@pytest.fixture
def books(segments: OwnSegments) -> Ownership:
    books = Ownership(segments)
    books.begin("setup", counters("main"))
    return books


def new(
    books: Ownership, now: Counters, subject: Owner | None = None, *ended: Owner, key: str = "process-groups"
) -> set[str]:
    return set(books.new_items(key, now, subject, ended))


def owned(books: Ownership, name: str, before: Counters, after: Counters) -> Owner:
    """An owner that was set up between two readings."""
    owner = Owner(name)
    books.enter(owner, before)
    assert books.leave(after) is owner
    return owner


def test_what_was_there_is_nobody_s(books: Ownership) -> None:
    assert new(books, counters("main")) == set()


def test_what_is_new_is_the_test_s(books: Ownership) -> None:
    assert new(books, counters("main", "a")) == {"a"}


def test_what_ended_is_no_matter(books: Ownership) -> None:
    assert new(books, counters()) == set()


def test_what_is_exempt_is_left_out(books: Ownership) -> None:
    now = counters("main", descriptors=("0 -> /dev/null", "9 -> /tmp/file"))
    assert new(books, now, key="file-descriptors") == {"9 -> /tmp/file"}


def test_a_new_test_begins_with_what_is_there(books: Ownership) -> None:
    books.begin("setup", counters("main", "a"))
    assert new(books, counters("main", "a")) == set()


def test_what_a_live_owner_took_is_not_the_test_s(books: Ownership) -> None:
    owned(books, "fixture", counters("main"), counters("main", "a"))
    assert new(books, counters("main", "a", "b")) == {"b"}


def test_an_owner_has_settled_when_its_setup_is_over(books: Ownership) -> None:
    owner = Owner("fixture")
    books.enter(owner, counters("main"))
    assert not owner.has_settled
    books.leave(counters("main"))
    assert owner.has_settled


def test_what_an_ended_owner_took_is_the_owner_s_alone(books: Ownership) -> None:
    owner = owned(books, "fixture", counters("main"), counters("main", "a"))
    books.close([owner])
    now = counters("main", "a", "b")
    assert new(books, now, owner, owner) == {"a"}
    assert new(books, now, None, owner) == {"b"}


def test_an_owner_that_gave_all_back_has_nothing(books: Ownership) -> None:
    owner = owned(books, "fixture", counters("main"), counters("main", "a"))
    books.close([owner])
    assert new(books, counters("main"), owner, owner) == set()


def test_an_owner_survives_the_test_in_which_it_was_set_up(books: Ownership) -> None:
    owner = owned(books, "fixture", counters("main"), counters("main", "a"))
    books.begin("setup", counters("main", "a"))
    assert new(books, counters("main", "a")) == set()
    books.close([owner])
    assert new(books, counters("main", "a"), owner, owner) == {"a"}


def test_of_nested_owners_each_has_its_own(books: Ownership) -> None:
    outer, inner = Owner("outer"), Owner("inner")
    books.enter(outer, counters("main"))
    books.enter(inner, counters("main", "a"))
    assert books.leave(counters("main", "a", "b")) is inner
    assert books.leave(counters("main", "a", "b", "c")) is outer
    now = counters("main", "a", "b", "c")
    assert new(books, now, outer, outer, inner) == {"a", "c"}
    assert new(books, now, inner, outer, inner) == {"b"}
    assert new(books, now, None, outer, inner) == set()


def test_closing_one_that_is_not_alive_does_nothing(books: Ownership) -> None:
    owner = owned(books, "fixture", counters("main"), counters("main"))
    assert books.close([Owner("stranger"), owner]) == [owner]
    assert books.close([owner]) == []


# Stages.


def test_an_item_is_there_since_the_stage_in_which_it_was_first_seen(books: Ownership) -> None:
    books.attribute("setup", counters("main", "a"))
    books.attribute("call", counters("main", "a", "b"))
    books.attribute("teardown", counters("main", "a", "b", "c"))
    assert [books.since("process-groups", [name]) for name in "abc"] == ["setup", "call", "teardown"]
    assert books.since("process-groups", ["unheard of"]) == ""


def test_a_setting_is_changed_since_the_stage_in_which_it_was_seen(books: Ownership) -> None:
    books.begin("setup", counters(settings={DTYPE: "float32"}))
    books.attribute("setup", counters(settings={DTYPE: "float32"}))
    books.attribute("call", counters(settings={DTYPE: "float64"}))
    books.attribute("teardown", counters(settings={DTYPE: "float64"}))
    assert books.since("globals", [f"{DTYPE} was float32, is float64"]) == "call"


def test_a_setting_is_changed_whatever_its_text_was(books: Ownership) -> None:
    books.begin("setup", counters(settings={DTYPE: "float64"}))
    books.attribute("call", counters(settings={DTYPE: "float32"}))
    assert books.since("globals", [f"{DTYPE} was float64, is float32"]) == "call"


def test_a_level_is_up_since_the_stage_in_which_it_grew_most(books: Ownership) -> None:
    for stage, host in [("setup", 10), ("call", 40), ("teardown", 50)]:
        books.attribute(stage, counters(host=host))
    assert books.since("host-memory", ()) == "call"


def test_a_level_that_never_grew_is_up_since_no_stage(books: Ownership) -> None:
    books.attribute("call", counters(host=-5))
    assert books.since("host-memory", ()) == ""


def test_another_test_s_stages_are_forgotten(books: Ownership) -> None:
    books.attribute("call", counters("main", "a"))
    books.begin("setup", counters("main"))
    assert books.since("process-groups", ["a"]) == ""


# Settings.


def test_a_changed_setting_is_reported_as_was_and_is(books: Ownership) -> None:
    books.begin("setup", counters(settings={DTYPE: "float32"}))
    assert new(books, counters(settings={DTYPE: "float64"}), key="globals") == {f"{DTYPE} was float32, is float64"}
    assert new(books, counters(settings={DTYPE: "float32"}), key="globals") == set()


def test_each_changed_setting_counts_as_one(books: Ownership) -> None:
    books.begin("setup", counters(settings={DTYPE: "float32", "gc.isenabled()": "True"}))
    now = counters(settings={DTYPE: "float64", "gc.isenabled()": "False"})
    assert list(books.new_items("globals", now, None, ()).values()) == [1, 1]


def test_a_replaced_function_is_reported_as_replaced(books: Ownership) -> None:
    books.begin("setup", counters())
    now = counters(settings={"replaced torch.cuda.empty_cache": "own.nothing at 0x2 in place of empty_cache at 0x1"})
    assert new(books, now, key="globals") == {"torch.cuda.empty_cache was replaced by own.nothing"}


def handlers(*identities: int, kind: str = "StreamHandler") -> Counters:
    return counters(settings={f"handler logging.{kind} of logging.root at {each:#x}": "there" for each in identities})


def test_what_takes_the_place_of_its_like_that_an_earlier_test_left_is_no_change_but_one_more_is(
    books: Ownership,
) -> None:
    added = "handler logging.{} of logging.root was added"
    books.begin("setup", counters(settings={DTYPE: "float32"}))
    assert new(books, handlers(1), key="globals") == {added.format("StreamHandler")}
    for turn in (1, 2, 3):
        books.begin("setup", handlers(turn))
        assert new(books, handlers(turn + 1), key="globals") == set()
        assert new(books, handlers(turn, turn + 1), key="globals") == {added.format("StreamHandler")}
        assert new(books, handlers(turn + 1, turn + 2), key="globals") == {added.format("StreamHandler")}
        assert new(books, handlers(turn + 1, kind="Handler"), key="globals") == {added.format("Handler")}


def test_a_handler_that_was_there_before_all_tests_is_replaced_once() -> None:
    books = Ownership(OwnSegments())
    books.begin("setup", handlers(1))
    assert len(new(books, handlers(2), key="globals")) == 2
    books.begin("setup", handlers(2))
    assert new(books, handlers(3), key="globals") == set()


@pytest.mark.parametrize("is_open", [True, False])
def test_who_made_a_descriptor_is_known_in_a_test_that_begins_while_it_is_open(is_open: bool) -> None:
    makers = Makers()
    books = Ownership(OwnSegments(), makers=makers)
    makers.start()
    number = os.memfd_create("made here")
    try:
        there = {f"{number} -> /memfd:made here": 1} if is_open else {}
        books.begin("setup", Counters({"file-descriptors": there}, {}, {}))
        assert (makers.of_descriptor(number) is not None) is is_open
    finally:
        os.close(number)
        makers.stop()


def test_an_object_of_the_same_name_in_the_place_of_one_that_an_earlier_test_left_is_no_change(
    books: Ownership,
) -> None:
    name = "signal.getsignal(signal.SIGUSR1)"
    default, *others = (
        counters(settings={name: text})
        for text in ("signal.SIG_DFL", "app.stop at 0x1", "app.stop at 0x2", "b.c at 0x3")
    )
    books.begin("setup", default)
    assert new(books, others[0], key="globals") == {f"{name} was signal.SIG_DFL, is app.stop"}
    books.begin("setup", others[0])
    assert new(books, others[1], key="globals") == set()
    assert new(books, others[2], key="globals") == {f"{name} was app.stop, is b.c"}


def test_a_setting_that_nobody_knew_before_is_not_changed(books: Ownership) -> None:
    assert new(books, counters(settings={DTYPE: "float64"}), key="globals") == set()


def test_a_setting_that_a_live_owner_changed_is_not_the_test_s(books: Ownership) -> None:
    before, after = counters(settings={DTYPE: "float32"}), counters(settings={DTYPE: "float64"})
    books.begin("setup", before)
    owned(books, "fixture", before, after)
    assert new(books, after, key="globals") == set()


def test_what_the_test_makes_of_a_live_owner_s_setting_is_the_test_s(books: Ownership) -> None:
    before, after = counters(settings={DTYPE: "float32"}), counters(settings={DTYPE: "float64"})
    books.begin("setup", before)
    owned(books, "fixture", before, after)
    assert new(books, counters(settings={DTYPE: "float16"}), key="globals") == {f"{DTYPE} was float64, is float16"}


def test_a_live_owner_s_setting_that_the_test_put_back_is_the_test_s(books: Ownership) -> None:
    before, after = counters(settings={DTYPE: "float32"}), counters(settings={DTYPE: "float64"})
    books.begin("setup", before)
    owned(books, "fixture", before, after)
    assert new(books, counters(settings={DTYPE: "float32"}), key="globals") == {f"{DTYPE} was float64, is float32"}


def test_what_an_owner_changed_in_an_earlier_test_is_where_the_next_one_begins(books: Ownership) -> None:
    before, after = counters(settings={DTYPE: "float32"}), counters(settings={DTYPE: "float64"})
    books.begin("setup", before)
    owned(books, "fixture", before, after)
    books.begin("setup", after)
    assert new(books, after, key="globals") == set()
    assert new(books, before, key="globals") == {f"{DTYPE} was float64, is float32"}


def test_of_two_live_owners_that_changed_a_setting_the_later_one_s_is_expected(books: Ownership) -> None:
    first, second = counters(settings={DTYPE: "float64"}), counters(settings={DTYPE: "float16"})
    books.begin("setup", counters(settings={DTYPE: "float32"}))
    owned(books, "outer", books.baseline, first)
    owned(books, "inner", first, second)
    assert new(books, second, key="globals") == set()
    assert new(books, first, key="globals") == {f"{DTYPE} was float16, is float64"}


def test_a_setting_that_an_earlier_test_changed_may_be_put_back(books: Ownership) -> None:
    first, second, third = (counters(settings={DTYPE: value}) for value in ("float32", "float64", "float16"))
    books.begin("setup", first)
    books.begin("setup", second)
    assert new(books, third, key="globals") == {f"{DTYPE} was float64, is float16"}
    books.begin("setup", third)
    assert new(books, second, key="globals") == set()
    assert new(books, first, key="globals") == set()
    books.begin("setup", first)
    assert new(books, second, key="globals") == {f"{DTYPE} was float32, is float64"}


def test_what_was_there_from_the_first_test_on_is_missed_when_it_is_removed(segments: OwnSegments) -> None:
    books, there = Ownership(segments), {"os.environ['HOME']": "'/root'", "sys.path entry '/lib'": "there"}
    for _ in range(2):
        books.begin("setup", counters(settings=there))
        assert new(books, counters(settings={}), key="globals") == {
            "os.environ['HOME'] was '/root', is not set any more",
            "sys.path entry '/lib' was removed",
        }


@pytest.mark.parametrize("setting", ["level", "propagate"])
@pytest.mark.parametrize("logger", ["tests.test_retry.Retry.test_logs", "retry_test_logs0"])
def test_what_a_test_sets_of_the_logger_named_after_it_is_its_own(books: Ownership, setting: str, logger: str) -> None:
    name = f"{setting} of logging.getLogger({logger!r})"
    before, after = counters(settings={}), counters(settings={name: "10"})
    books.begin("setup", before, "tests/test_retry.py::Retry::test_logs[a::b]")
    assert new(books, after, key="globals") == set()


@pytest.mark.parametrize(
    "setting", ["level of logging.getLogger('app')", "handler X of logging.getLogger('test_logs')"]
)
@pytest.mark.parametrize("test", ["tests/test_app.py::test_logs", "app", ""])
def test_a_level_of_another_logger_and_a_handler_of_the_tests_own_stay(
    books: Ownership, setting: str, test: str
) -> None:
    books.begin("setup", counters(settings={}), test)
    assert new(books, counters(settings={setting: "10"}), key="globals")


def test_a_setting_that_a_live_owner_put_back_is_a_change_when_it_is_changed_again(books: Ownership) -> None:
    first, second, third = (counters(settings={DTYPE: value}) for value in ("float32", "float64", "float16"))
    for now in (first, second, third):
        books.begin("setup", now)
    owned(books, "fixture", third, first)
    books.begin("setup", first)
    assert new(books, second, key="globals") == {f"{DTYPE} was float32, is float64"}


def test_a_setting_that_an_ended_owner_left_changed_may_be_put_back(books: Ownership) -> None:
    before, after = counters(settings={DTYPE: "float32"}), counters(settings={DTYPE: "float64"})
    books.begin("setup", before)
    owner = owned(books, "fixture", before, after)
    books.close([owner])
    books.begin("setup", after)
    assert new(books, before, key="globals") == set()


def test_to_set_what_an_ended_owner_had_set_and_put_back_is_a_change(books: Ownership) -> None:
    before, after = counters(settings={DTYPE: "float32"}), counters(settings={DTYPE: "float64"})
    books.begin("setup", before)
    owner = owned(books, "fixture", before, after)
    books.begin("setup", after)
    books.close([owner])
    books.begin("setup", before)
    assert new(books, after, key="globals") == {f"{DTYPE} was float32, is float64"}


def test_a_setting_that_an_ended_owner_changed_and_left_is_the_owner_s(books: Ownership) -> None:
    before, after = counters(settings={DTYPE: "float32"}), counters(settings={DTYPE: "float64"})
    books.begin("setup", before)
    owner = owned(books, "fixture", before, after)
    books.begin("setup", after)
    books.close([owner])
    assert new(books, after, owner, owner, key="globals") == {f"{DTYPE} was float32, is float64"}


@pytest.mark.parametrize("since", ["this test", "an earlier test"])
def test_a_setting_that_an_ended_owner_changed_and_left_is_not_the_test_s_too(books: Ownership, since: str) -> None:
    before, after = counters(settings={DTYPE: "float32"}), counters(settings={DTYPE: "float64"})
    books.begin("setup", before)
    owner = owned(books, "fixture", before, after)
    if since == "an earlier test":
        books.begin("setup", after)
    books.close([owner])
    # Not the very object that the baseline has: another setting changed and changed back meanwhile.
    now = counters(settings={DTYPE: "float64"})
    assert new(books, now, None, owner, key="globals") == set()


def test_a_setting_that_an_ended_owner_put_back_is_nobody_s(books: Ownership) -> None:
    before, after = counters(settings={DTYPE: "float32"}), counters(settings={DTYPE: "float64"})
    books.begin("setup", before)
    owner = owned(books, "fixture", before, after)
    books.begin("setup", after)
    books.close([owner])
    assert new(books, before, owner, owner, key="globals") == set()
    assert new(books, before, None, owner, key="globals") == set()


# Levels.


def shares(books: Ownership, host: int | None, *ended: Owner) -> list[int | None]:
    """The test's share, then each ended owner's."""
    found = books.shares("host-memory", counters(host=host), ended)
    return [found[id(subject)] for subject in (None, *ended)]


def test_without_owners_all_growth_is_the_test_s(books: Ownership) -> None:
    assert shares(books, 7) == [7]
    assert shares(books, -7) == [-7]


@pytest.mark.parametrize(("only_adds", "left"), [(True, []), (False, [DTYPE])])
def test_to_put_back_what_an_import_set_is_no_change(books: Ownership, only_adds: bool, left: list[str]) -> None:
    books.begin("setup", counters(settings={DTYPE: "float8"}))
    owner = Owner("import of heavy", only_adds=only_adds)
    books.enter(owner, counters(settings={DTYPE: "float32"}))
    books.leave(counters(settings={DTYPE: "float64"}))
    for before in ("float8", "float32"):
        assert [change.name for change in books.left(counters(settings={DTYPE: before}), None, ())] == left
    assert [change.name for change in books.left(counters(settings={DTYPE: "float64"}), None, ())] == []
    assert [change.name for change in books.left(counters(settings={DTYPE: "float16"}), None, ())] == [DTYPE]


def test_what_falls_while_a_module_is_imported_leaves_no_room_for_an_alarm(books: Ownership) -> None:
    books.begin("setup", counters(host=100))
    owner = Owner("import of heavy", only_adds=True)
    books.enter(owner, counters(host=150))
    books.leave(counters(host=110))
    assert shares(books, 100) == [0]
    assert shares(books, 117) == [17]


def test_what_a_live_owner_took_is_expected_to_stay(books: Ownership) -> None:
    owned(books, "fixture", counters(host=0), counters(host=100))
    assert shares(books, 107) == [7]


def test_an_ended_owner_that_gave_all_back_has_no_share(books: Ownership) -> None:
    owner = owned(books, "fixture", counters(host=0), counters(host=100))
    books.begin("setup", counters(host=100))
    books.close([owner])
    assert shares(books, 0, owner) == [0, 0]


def test_an_ended_owner_answers_for_what_it_took_and_the_test_for_the_rest(books: Ownership) -> None:
    owner = owned(books, "fixture", counters(host=0), counters(host=100))
    books.begin("setup", counters(host=100))
    books.close([owner])
    assert shares(books, 60, owner) == [0, 60]
    assert shares(books, 130, owner) == [30, 100]


def test_an_owner_opened_and_ended_in_the_same_test_answers_for_what_it_took(books: Ownership) -> None:
    owner = owned(books, "fixture", counters(host=0), counters(host=100))
    books.close([owner])
    assert shares(books, 0, owner) == [0, 0]
    assert shares(books, 40, owner) == [0, 40]
    assert shares(books, 107, owner) == [7, 100]


def test_what_is_below_where_the_owner_began_excuses_no_one(books: Ownership) -> None:
    # An earlier test gave 50 back of what was there: the owner is not to be judged against that.
    owner = owned(books, "fixture", counters(host=50), counters(host=150))
    books.begin("setup", counters(host=120))
    books.close([owner])
    assert shares(books, 50, owner) == [0, 0]
    assert shares(books, 60, owner) == [0, 10]


def test_nested_owners_that_end_together_share_by_what_each_took(books: Ownership) -> None:
    outer, inner = Owner("outer"), Owner("inner")
    books.enter(outer, counters(host=0))
    books.enter(inner, counters(host=10))
    books.leave(counters(host=30))
    books.leave(counters(host=100))
    assert (outer.growth["host-memory"], inner.growth["host-memory"]) == (80, 20)
    books.begin("setup", counters(host=100))
    books.close([outer, inner])
    assert shares(books, 0, outer, inner) == [0, 0, 0]
    assert sum(share or 0 for share in shares(books, 50, outer, inner)) == 50
    assert shares(books, 110, outer, inner) == [10, 80, 20]


def test_an_inner_owner_ends_and_the_outer_one_s_stays(books: Ownership) -> None:
    outer = owned(books, "outer", counters(host=0), counters(host=100))
    inner = owned(books, "inner", counters(host=100), counters(host=150))
    books.begin("setup", counters(host=150))
    books.close([inner])
    assert shares(books, 100, inner) == [0, 0]
    assert shares(books, 120, inner) == [0, 20]
    books.begin("setup", counters(host=100))
    books.close([outer])
    assert shares(books, 0, outer) == [0, 0]


def test_the_outer_one_ends_and_the_inner_one_s_stays(books: Ownership) -> None:
    outer = owned(books, "outer", counters(host=0), counters(host=100))
    owned(books, "inner", counters(host=100), counters(host=150))
    books.begin("setup", counters(host=150))
    books.close([outer])
    assert shares(books, 50, outer) == [0, 0]
    assert shares(books, 80, outer) == [0, 30]


def test_the_level_falls_to_where_the_outer_one_began_and_the_inner_one_s_stays_on_top(books: Ownership) -> None:
    # The test had 5 of its own before it asked for the fixtures.
    outer = owned(books, "outer", counters(host=5), counters(host=15))
    owned(books, "inner", counters(host=15), counters(host=35))
    books.close([outer])
    assert shares(books, 25, outer) == [0, 0]
    assert shares(books, 32, outer) == [0, 7]


@pytest.mark.parametrize("before", [{}, {"pinned": 0}])
@pytest.mark.parametrize("now", [{}, {"pinned": 0}])
def test_a_level_that_no_reading_has_is_nothing(
    segments: OwnSegments, before: Mapping[str, int], now: Mapping[str, int]
) -> None:
    books = Ownership(segments)
    books.begin("setup", Counters({}, before, {}))
    owner = owned(books, "fixture", Counters({}, before, {}), Counters({}, now, {}))
    assert books.shares("pinned", Counters({}, now, {}), ()) == {id(None): 0}
    books.close([owner])
    assert books.shares("pinned", Counters({}, now, {}), (owner,)) == {id(None): 0, id(owner): 0}
    assert books.shares("pinned", Counters({}, {"pinned": 9}, {}), (owner,)) == {id(None): 9, id(owner): 0}


def test_an_owner_under_which_the_level_fell_has_no_share(books: Ownership) -> None:
    owner = owned(books, "fixture", counters(host=0), counters(host=-100))
    books.close([owner])
    assert shares(books, -100, owner) == [-100, 0]
    assert shares(books, 5, owner) == [5, 0]


@pytest.mark.parametrize(("before", "now"), [(None, 5), (5, None), (None, None)])
def test_a_level_that_cannot_be_reported_has_no_shares(books: Ownership, before: int | None, now: int | None) -> None:
    books.begin("setup", counters(host=before))
    assert shares(books, now) == [None]


# /dev/shm.


def test_shared_memory_of_this_process_counts_with_its_bytes(books: Ownership) -> None:
    memory = shared_memory.SharedMemory(create=True, size=8192)
    try:
        now = counters("main", memory=(memory.name.lstrip("/"),))
        assert books.new_items("shared-memory", now, None, ()) == {memory.name.lstrip("/"): 8192}
    finally:
        memory.close()
        memory.unlink()
    assert books.new_items("shared-memory", now, None, ()) == {}


@pytest.mark.parametrize("made_here", [True, False])
def test_shared_memory_that_nobody_maps_counts_only_if_this_process_made_it(
    books: Ownership, segments: OwnSegments, made_here: bool
) -> None:
    memory = shared_memory.SharedMemory(create=True, size=4096)
    memory.close()
    name = memory.name.lstrip("/")
    if made_here:
        segments.names.add(name)
    try:
        found = books.new_items("shared-memory", counters("main", memory=(name,)), None, ())
        assert found == ({name: 4096} if made_here else {})
    finally:
        memory.unlink()


@pytest.mark.parametrize("owner", ["its own", "another process"])
def test_shared_memory_that_bears_the_number_of_this_process_counts(books: Ownership, owner: str) -> None:
    # So torch's does: torch_<number>_<random>_<counter>.
    number = os.getpid() if owner == "its own" else os.getppid()
    name = f"lowtide-of-a-test_{number}_0"
    segment = Path("/dev/shm", name)
    segment.write_bytes(b"12345678")
    try:
        found = books.new_items("shared-memory", counters("main", memory=(name,)), None, ())
        assert found == ({name: 8} if owner == "its own" else {})
    finally:
        segment.unlink()


@pytest.mark.parametrize("whose", ["of a living owner", "nobody's"])
def test_shared_memory_of_an_owner_s_process_is_the_owner_s(books: Ownership, whose: str) -> None:
    with subprocess.Popen(["sleep", "1000"]) as process:
        segment = Path("/dev/shm", f"lowtide-of-a-test_{process.pid}_0")
        try:
            started = Counters({"processes": {str(process.pid): 1}}, {}, {})
            owner = owned(books, "engine", counters("main"), started)
            if whose == "nobody's":
                books.close([owner])
            segment.write_bytes(b"12345678")
            now = counters("main", memory=(segment.name,))
            books.attribute("call", now)
            found = {segment.name: 8}
            assert books.new_items("shared-memory", now, None, ()) == ({} if whose == "of a living owner" else found)
            # Where it is still there when the owner ends, it is what the owner has left.
            books.close([owner])
            left = books.new_items("shared-memory", now, owner, [owner])
            assert left == (found if whose == "of a living owner" else {})
            with segment.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
                # What this process maps is its own as well.
                books.begin("setup", counters("main"))
                books.live.append(owner)
                owner.items.pop("shared-memory", None)
                books.attribute("call", now)
                assert books.new_items("shared-memory", now, None, ()) == found
        finally:
            process.kill()
            segment.unlink(missing_ok=True)


@pytest.mark.parametrize("works", [True, False])
@pytest.mark.parametrize("whose", ["older", "of the test", "of an owner that has ended"])
def test_a_worker_that_waits_in_a_pool_that_was_there_before_is_the_pool_s(whose: str, works: bool) -> None:
    is_new = whose == "of the test"
    books = Ownership(OwnSegments(), may_be_new=lambda pool: is_new and isinstance(pool, ThreadPoolExecutor))
    books.begin("setup", Counters({"threads": {}}, {}, {}))
    owner = Owner("fixture 'pool'", stage="setup") if "owner" in whose else None
    done = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        pool.submit(int).result()
        (worker,) = pool._threads
        now = Counters({"threads": {thread_key(worker): 1}}, {}, {})
        if owner is not None:
            owner.items["threads"] = {thread_key(worker)}
        if works:
            pool.submit(done.wait)
        wait_until(lambda: bool(waiting_workers([thread_key(worker)])) is not works)
        found = new(books, now, owner, key="threads")
        done.set()
    assert found == (set() if whose == "older" and not works else {thread_key(worker)})
