"""Hand-written heaps: what is written is what is found, and of several ways the one that must be cut."""

from __future__ import annotations

import gc

import pytest

from lowtide.probes.heap.holders import find_paths, trace
from lowtide.probes.objects.listed import FROZEN_AT_STARTUP
from tests.probes.small_heaps import SmallHeap


def path_to_leak(text: str, *, freeze: bool = False) -> str | None:
    with SmallHeap(text) as heap:
        things = heap.take("leak")
        assert gc.get_freeze_count() <= FROZEN_AT_STARTUP
        if freeze:
            gc.freeze()
        try:
            (path,) = find_paths(things)
        finally:
            if freeze:
                gc.unfreeze()
    return None if path is None else str(path)


@pytest.mark.parametrize("freeze", [False, True], ids=["unfrozen", "frozen"])
@pytest.mark.parametrize(
    "line",
    [
        "helper .leak @leak",
        "helper .engine .model @leak",
        "helper .engine .blocks ['kv'] [3] @leak",
        "helper .on_step cell 'scale' @leak",
        "helper .supports lru_cache key [0] @leak",
        "helper .table lru_cache value @leak",
        "helper .engine .runner .graphs [0] ['buffers'] [1] cell 'out' .storage @leak",
    ],
)
def test_what_is_written_is_what_is_found(line: str, freeze: bool) -> None:
    assert path_to_leak(line, freeze=freeze) == line.replace("helper", "module 'helper'", 1).removesuffix(" @leak")


@pytest.mark.parametrize(
    ("heap", "path"),
    [
        # The shortest.
        ("helper .a .b .c @leak\n helper .d .e @leak", "module 'helper' .d .e"),
        # Of two of one length, what was set first.
        ("helper .first .x @leak\n helper .second .x @leak", "module 'helper' .first .x"),
        ("helper .b @leak\n helper .a @leak", "module 'helper' .b"),
        # What a library's module holds only where there is no other.
        ("_pytest.of_this_test .kept @leak\n helper .a .b .c .d @leak", "module 'helper' .a .b .c .d"),
        ("_pytest.of_this_test .kept @leak", "module '_pytest.of_this_test' .kept"),
        # Round in a circle, and out of it.
        ("helper .ring @ring .next .next @ring\n helper .ring .last [0] @leak", "module 'helper' .ring .last [0]"),
        # Held by what nobody holds.
        (
            "helper .engine @engine .model .weight\n helper .engine .model .weight @leak",
            "module 'helper' .engine .model .weight",
        ),
    ],
)
def test_of_several_ways_one_is_given(heap: str, path: str) -> None:
    assert path_to_leak(heap) == path


def freed(text: str, first: int, *names: str) -> list[set[str]]:
    with SmallHeap(text) as heap:
        things = heap.take(*names)
        with trace(things) as found:
            return [{names[place] for place in each} for each in found.freed_by_cutting(0, first)]


def test_what_one_edge_holds_goes_with_it_and_what_is_shared_does_not() -> None:
    text = """
        helper .engine .model ['a'] @a
        helper .engine .model ['b'] @b
        helper .engine .model ['shared'] @shared
        helper .cache [0] @shared
    """
    # `.engine`, `.model`, `['a']`
    assert freed(text, 0, "a", "b", "shared") == [{"a", "b"}, {"a", "b"}, {"a"}]
    # What two edges hold, no single one gives back: from where its own path begins, nothing.
    assert freed(text, 0, "shared", "a") == [set(), set()]


def test_a_heap_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        SmallHeap("helper -> engine")
    with (
        pytest.raises(ValueError, match="one object cannot have all of"),
        SmallHeap("helper .a .b @leak\n helper .a [0] @x"),
    ):
        pass
