"""How many objects a program has frozen: not counted each time in C, and as the collector counts them in Python."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from lowtide.probes import native
from lowtide.probes.objects import listed
from lowtide.probes.objects.listed import FrozenCount, any_frozen, frozen_by_program

if native.frozen is None:
    pytest.skip("what is written in C was not built here", allow_module_level=True)


@pytest.fixture(params=["in C", "in Python"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    assert not any_frozen()
    if request.param == "in Python":
        monkeypatch.setattr(listed, "_frozen", None)
    yield request.param
    gc.unfreeze()


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How far was counted each time."""
    asked: list[int] = []
    count = native.frozen
    assert count is not None

    def note(most: int) -> tuple[int, int, int]:
        asked.append(most)
        return count(most)

    monkeypatch.setattr(listed, "_frozen", note)
    return asked


def of_collector() -> int:
    return frozen_by_program(gc.get_freeze_count())


def test_it_is_used_on_this_interpreter(way: str) -> None:
    assert (listed._frozen is native.frozen) is (way == "in C")


def test_each_freeze_and_each_unfreeze_is_seen() -> None:
    count = FrozenCount()
    assert (count.read(), any_frozen()) == (0, False)
    gc.freeze()
    first = count.read()
    assert (first, any_frozen()) == (of_collector(), True)
    kept = [[] for _ in range(100)]
    gc.freeze()
    assert count.read() == of_collector() >= first + len(kept)
    gc.unfreeze()
    assert (count.read(), any_frozen()) == (0, False)


def test_a_heap_that_was_unfrozen_and_frozen_again_is_counted_anew() -> None:
    count = FrozenCount()
    gc.freeze()
    first = count.read()
    gc.unfreeze()
    kept = [[] for _ in range(100)]
    gc.freeze()
    assert count.read() == of_collector() >= first + len(kept)


def test_what_was_frozen_is_not_counted_again(counted: list[int]) -> None:
    gc.freeze()
    count = FrozenCount()
    first = count.read()
    counted.clear()
    kept = [[] for _ in range(100)]
    gc.collect()
    assert (count.read(), count.read(), len(kept)) == (first, first, 100)
    assert counted == [0, 0]


def test_to_know_whether_anything_is_frozen_no_more_is_counted_than_needed(counted: list[int]) -> None:
    gc.freeze()
    # A checker of this very test may have asked, too.
    counted.clear()
    assert any_frozen()
    assert counted == [listed.FROZEN_AT_STARTUP + 1]


def test_objects_that_die_are_no_freeze() -> None:
    kept = [[] for _ in range(100)]
    gc.freeze()
    count = FrozenCount()
    before = count.read()
    kept.clear()
    assert count.read() <= before
    kept = [[]]
    gc.freeze()
    assert count.read() == of_collector() < before
    assert len(kept) == 1


def test_where_the_last_one_died_the_others_are_counted() -> None:
    gc.collect()
    last: list[list[object]] = [[]]
    # Behind all that is older: the objects of a generation are frozen in their order.
    gc.collect()
    gc.freeze()
    count = FrozenCount()
    before = count.read()
    last.clear()
    assert before - 100 <= count.read() <= before


@pytest.mark.parametrize("text", ["1", None])
def test_how_many_to_count_is_a_number(text: object) -> None:
    assert native.frozen is not None
    with pytest.raises(TypeError):
        native.frozen(text)  # type: ignore[arg-type]
