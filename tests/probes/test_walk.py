"""The walk over the heap in C and its equal in numpy."""

from __future__ import annotations

import ast
import gc
import io
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lowtide.probes import native
from lowtide.probes.heap import walk
from lowtide.probes.heap.roots import Root
from lowtide.probes.heap.walk import NativeWalk, NumpyWalk, Walk, walk_from
from lowtide.probes.objects.listed import collector_paused

built = pytest.mark.skipif(native.Walk is None, reason="what is written in C was not built here")


class Plain:
    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


class Numbered:
    def __init__(self) -> None:
        self.numbers = [1]


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held: object) -> None:
        self.held = held


class AnswersNothing(dict[str, Any]):
    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(name)


def suspended() -> Any:
    kept = [object()]
    yield kept


def samples() -> list[Any]:
    """One of each kind that is gone through in a manner of its own."""
    waiting = suspended()
    next(waiting)
    base = np.zeros(8)
    shared = Plain(a=[1], b=(2, [3]))
    return [
        [1, "one", None, [], {}, ()],
        (1, (2, (3,))),
        {"of": {"nothing": 1}, (): {"tracked": ()}},
        base[2:],
        np.array([[1], {}], dtype=object),
        waiting,
        shared,
        vars(shared),
        Slotted([Slotted(None)]),
        weakref.ref(shared),
        memoryview(base),
        AnswersNothing(kept=[1]),
        io.StringIO("text"),
        sys.float_info,
        gc,
        lambda: shared,
    ]


def root(held: object) -> Root:
    return Root("object", "root", held, [held, [held]], 0)


def walked(kind: type[Walk], items: list[object], roots: Sequence[Root] = ()) -> Walk:
    """The walk from some objects, read to its end."""
    found = kind([*roots])
    found.add(items)
    found.read()
    return found


def shape(found: Walk) -> list[Any]:
    """All that a walk has read, by the objects' identities."""
    ids = np.array(list(map(id, found.objects)))
    return [
        ids.tolist(),
        found.kinds.tolist(),
        found.offsets.tolist(),
        ids[found.edges].tolist(),
        ids[found.passed_over].tolist(),
        [found.types[kind] for kind in found.kinds.tolist()],
    ]


@built
def test_the_fastest_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(walk_from([])) is NativeWalk
    monkeypatch.setattr(native, "Walk", None)
    assert type(walk_from([])) is NumpyWalk


# In a process of its own, and in one function: nothing of the first walk is left to the second.
_WHOLE_HEAP = """
import gc, sys
from types import FrameType
import tests.probes.test_walk as of_this
from lowtide.probes.heap.walk import NativeWalk, NumpyWalk

def compare():
    kept = of_this.samples()
    items = [item for item in gc.get_objects() if type(item) is not FrameType] + [kept]
    roots = [of_this.root(kept), of_this.root(sys)]
    a = of_this.walked(NativeWalk, items, roots)
    first = of_this.shape(a)
    a.objects.clear()
    b = of_this.walked(NumpyWalk, items, roots)
    second = of_this.shape(b)
    return len(b.objects), len(items), len(b.passed_over), [x == y for x, y in zip(first, second, strict=True)]

gc.collect()
gc.disable()
compare()
print(compare())
"""


@built
def test_in_the_whole_heap_both_read_the_same() -> None:
    done = subprocess.run([sys.executable, "-c", _WHOLE_HEAP], capture_output=True, text=True, cwd=Path.cwd())
    assert not done.returncode, done.stderr
    nodes, listed, passed_over, equal = ast.literal_eval(done.stdout)
    assert nodes > listed > 20_000
    assert passed_over > 100
    assert all(equal), equal


_heaps = st.recursive(
    st.one_of(st.integers(), st.text(), st.none(), st.builds(list), st.builds(dict)),
    lambda inner: st.one_of(
        st.lists(inner),
        st.tuples(inner, inner),
        st.dictionaries(st.integers(), inner),
        st.builds(lambda held: np.array([held, None], dtype=object), inner),
    ),
    max_leaves=40,
)


@built
@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(_heaps, st.lists(_heaps, max_size=3))
def test_in_a_random_heap_both_read_the_same(heap: object, more: list[object]) -> None:
    items = [item for item in (heap, *more) if gc.is_tracked(item)]
    roots = [root([heap])]
    # A collection in between would end the tracking of tuples of numbers.
    with collector_paused():
        native_walk, numpy_walk = walked(NativeWalk, items, roots), walked(NumpyWalk, items, roots)
    assert shape(native_walk) == shape(numpy_walk)


@pytest.mark.parametrize("kind", [pytest.param(NativeWalk, marks=built), NumpyWalk])
class TestEach:
    """What holds for either."""

    def test_an_object_is_one_node_and_has_its_edges(self, kind: type[Walk]) -> None:
        leaf, text = [0], "met only"
        top = [leaf, leaf, text, {"leaf": leaf}]
        found = walked(kind, [top, leaf])
        assert found.objects[:2] == [top, leaf]
        assert found.find(np.array([id(leaf), id(text), id(top)])).tolist() == [1, -1, 0]
        edges = found.edges[found.offsets[0] : found.offsets[1]].tolist()
        # From its end on, as a list shows them.
        assert [found.objects[node] for node in edges] == [{"leaf": leaf}, leaf, leaf]

    def test_a_dict_of_nothing_tracked_is_passed_over(self, kind: type[Walk]) -> None:
        plain = {"number": 1}
        found = walked(kind, [[plain]])
        assert [found.objects[node] for node in found.passed_over.tolist()] == ([] if gc.is_tracked(plain) else [plain])

    @pytest.mark.parametrize("more", [0, 40])
    def test_an_instance_leads_once_to_its_dict_whether_that_shares_its_values(
        self, kind: type[Walk], more: int
    ) -> None:
        item = Numbered()
        # Of so many names there is no room in the instance, and it has its dict alone.
        vars(item).update((f"more_{number}", []) for number in range(more))
        found = walked(kind, [item])
        held = [found.objects[node] for node in found.edges[: found.offsets[1]].tolist()]
        assert sum(each is vars(item) for each in held) == 1

    @pytest.mark.parametrize("module", ["program", "lowtide.probes.program"])
    def test_a_frame_of_the_checker_leads_to_its_caller_alone(self, kind: type[Walk], module: str) -> None:
        names: dict[str, Any] = {"__name__": module}
        exec("def call(function):\n    looked_at = [1]\n    function()", names)

        def caller() -> None:
            names["call"](None)

        with pytest.raises(TypeError) as raised:
            caller()
        _, of_caller, called = (entry.frame.raw for entry in raised.traceback)
        found = walked(kind, [[called]])
        [place] = found.find(np.array([id(called)])).tolist()
        held = [found.objects[node] for node in found.edges[found.offsets[place] : found.offsets[place + 1]].tolist()]
        assert any(item is of_caller for item in held)
        assert [item for item in held if type(item) is list] == ([] if module.startswith("lowtide") else [[1]])

    def test_it_goes_on_from_what_is_added(self, kind: type[Walk]) -> None:
        late = [[]]
        found = walked(kind, [[1]])
        before = len(found.objects)
        found.add([late])
        found.read()
        assert [type(item) for item in found.objects[before:]] == [list, list]
        assert len(found.offsets) == len(found.objects) + 1

    def test_what_fails_while_it_reads_fails_the_walk(self, kind: type[Walk], monkeypatch: pytest.MonkeyPatch) -> None:
        def fails(_: object) -> object:
            raise OSError("cannot be read")

        monkeypatch.setattr(walk, "is_checkers", fails)
        with pytest.raises(OSError, match="cannot be read"):
            walked(kind, [[sys._getframe()]])
        monkeypatch.setattr(walk, "mro_of", fails)
        with pytest.raises(OSError, match="cannot be read"):
            walked(kind, [[]])

    def test_no_reference_is_left(self, kind: type[Walk]) -> None:
        items = [object(), [Slotted(None)], np.zeros(2)[1:], (1, [2]), Plain(held=[])]
        before = [sys.getrefcount(item) for item in items]
        found = walked(kind, [items], list(map(root, items)))
        assert [sys.getrefcount(item) for item in items] != before
        found.objects.clear()
        del found
        gc.collect()
        assert [sys.getrefcount(item) for item in items] == before

    def test_what_goes_while_it_is_read_is_held_until_then(
        self, kind: type[Walk], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Unknown:
            pass

        # (From its end on, as a list shows them.)
        kept = [{1, 2}, {3}, Unknown()]
        last = weakref.ref(kept[0])
        found = kind([])
        known, alive = found._manner_of, []

        def drops(cls: type) -> int:
            if cls is Unknown:
                kept.clear()
                alive.append(last() is not None)
            return known(cls)

        monkeypatch.setattr(found, "_manner_of", drops)
        found.add([kept])
        found.read()
        assert alive == [True]
        assert [type(item) for item in found.objects[:4]] == [list, Unknown, set, set]
        found.objects.clear()
        assert last() is None

    def test_other_threads_may_change_what_is_read(self, kind: type[Walk]) -> None:
        kept: list[Any] = [[np.array([None], dtype=object)] for _ in range(500)]
        over = threading.Event()

        def change() -> None:
            while not over.is_set():
                for place, item in enumerate(kept):
                    item[:] = [[place], {place: np.zeros(1)}, np.array([[place], []], dtype=object)] if not item else []

        thread = threading.Thread(target=change)
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        thread.start()
        try:
            for _ in range(50):
                # Each array is asked for by a function of Python's, in which the other thread has its turn.
                found = walked(kind, [kept])
                assert len(found.offsets) == len(found.objects) + 1
                assert int(found.edges.max()) < len(found.objects)
        finally:
            over.set()
            thread.join()
            sys.setswitchinterval(interval)
