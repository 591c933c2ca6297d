"""Of which types there are more than before: planted objects are counted right, frozen or not, the checker's never."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lowtide.leakcheck.lives.shutdown_judgement import MOST_TYPES, TypeCounts
from lowtide.reports.schema import TypeGrowth


class Planted:
    """What there is more of."""


@pytest.fixture(autouse=True)
def quiet_heap() -> Iterator[None]:
    """No garbage of other tests that a collection between two counts could take away."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def row_of(rows: tuple[TypeGrowth, ...], cls: type) -> TypeGrowth | None:
    return next((row for row in rows if row.type == f"{cls.__module__}.{cls.__name__}"), None)


def test_what_was_planted_is_in_the_table_with_both_numbers() -> None:
    kept = [Planted() for _ in range(3)]
    counts = TypeCounts("before cycle 1")
    kept += [Planted() for _ in range(500)]
    assert row_of(counts.growth("after shutdown"), Planted) == TypeGrowth(
        type=f"{__name__}.Planted", since="before cycle 1", until="after shutdown", before=3, after=503
    )


def test_a_type_of_which_there_are_no_more_is_not_in_the_table() -> None:
    kept = [Planted() for _ in range(500)]
    counts = TypeCounts("before")
    assert row_of(counts.growth("after"), Planted) is None
    del kept[100:]
    rows = counts.growth("after")
    assert row_of(rows, Planted) is None
    assert all(row.after > row.before for row in rows)


def test_types_of_the_same_name_are_one_row() -> None:
    namesakes = [type("Namesake", (), {"__module__": __name__}) for _ in range(2)]
    counts = TypeCounts("before")
    kept = [cls() for cls in namesakes for _ in range(300)]
    assert row_of(counts.growth("after"), namesakes[0]) == TypeGrowth(
        type=f"{__name__}.Namesake", since="before", until="after", before=0, after=600
    )
    del kept


def test_what_came_and_went_is_not_in_the_table() -> None:
    counts = TypeCounts("before")
    come_and_gone = [Planted() for _ in range(500)]
    del come_and_gone
    assert row_of(counts.growth("after"), Planted) is None


def test_what_grew_most_comes_first_and_the_table_is_short() -> None:
    types = [type(f"Grown{number}", (), {}) for number in range(MOST_TYPES + 3)]
    counts = TypeCounts("before")
    kept = [[cls() for _ in range(1000 + 10 * number)] for number, cls in enumerate(types)]
    rows = counts.growth("after")
    assert [row.type for row in rows] == [f"{__name__}.{cls.__name__}" for cls in types[: -MOST_TYPES - 1 : -1]]
    assert [row.after - row.before for row in rows] == [len(part) for part in kept[: -MOST_TYPES - 1 : -1]]


def test_the_programs_own_types_come_before_those_that_grew_more() -> None:
    counts = TypeCounts("before")
    kept: list[Any] = [[str(number) for number in range(10)] for _ in range(20_000)]
    kept += [Planted(), Planted()]
    rows = counts.growth("after")
    assert (rows[0].type, rows[0].after - rows[0].before) == (f"{__name__}.Planted", 2)
    assert ("list", True) in [(row.type, row.after - row.before > 10_000) for row in rows[1:]]


def test_types_that_grew_alike_come_by_their_names() -> None:
    types = [type(name, (), {}) for name in ("Beta", "Alpha", "Gamma")]
    counts = TypeCounts("before")
    kept = [cls() for cls in types for _ in range(700)]
    names = [row.type for row in counts.growth("after")]
    assert names[:3] == [f"{__name__}.{name}" for name in ("Alpha", "Beta", "Gamma")]
    del kept


@pytest.mark.parametrize(("module", "counts_as"), [("lowtide.leakcheck.x", 0), ("lowtide.engine.x", 600)])
def test_the_checkers_own_types_are_not_in_the_table(module: str, counts_as: int) -> None:
    cls = type("Reading", (), {"__module__": module})
    counts = TypeCounts("before")
    kept = [cls() for _ in range(600)]
    row = row_of(counts.growth("after"), cls)
    assert (0 if row is None else row.after) == counts_as
    del kept


def test_counting_leaves_nothing_behind_that_it_counts() -> None:
    counts = TypeCounts("before")
    counts.growth("between")
    assert [row for row in counts.growth("after") if row.after - row.before > 50] == []


def raising(*_: object) -> Any:
    raise ValueError


class HostileMeta(type):
    __eq__ = __hash__ = __instancecheck__ = __getattr__ = __repr__ = raising
    __module__ = __name__ = property(raising)


class Hostile(metaclass=HostileMeta):
    __class__ = property(raising)


def test_no_foreign_code_runs_and_nothing_else_is_counted_otherwise() -> None:
    counts = TypeCounts("before")
    kept = [object.__new__(Hostile) for _ in range(900)]
    (most, *others) = counts.growth("after")
    assert (most.type, most.before, most.after) == (f"{__name__}.Hostile", 0, len(kept))
    assert [row for row in others if row.after - row.before > 200] == []


FROZEN = """
import gc, sys
sys.path.insert(0, sys.argv[1])
from lowtide.leakcheck.lives.shutdown_judgement import TypeCounts

class Planted:
    pass

kept = [Planted() for _ in range(10)]
gc.collect()
counts = TypeCounts("before")
kept += [Planted() for _ in range(500)]
gc.freeze()
kept += [Planted() for _ in range(20)]
(row,) = [row for row in counts.growth("after") if row.type == "__main__.Planted"]
assert (row.before, row.after) == (10, 530), row
counts = TypeCounts("frozen")
gc.unfreeze()
assert not [row for row in counts.growth("unfrozen") if row.type == "__main__.Planted"]
"""


def test_frozen_objects_count_too() -> None:
    root = str(Path(__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", FROZEN, root], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
