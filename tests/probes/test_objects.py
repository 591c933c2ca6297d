"""The enumeration of the heap: complete, frozen or not, and without traces."""

from __future__ import annotations

import contextlib
import gc
import shutil
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from lowtide.probes.objects.identities import Identities, identities
from lowtide.probes.objects.listed import FROZEN_AT_STARTUP, Census, all_objects, collector_paused, frame_locals
from tests.waiting import HANG_S


@pytest.fixture
def thaw() -> Iterator[None]:
    """Undoes the freezing of a test (and nothing else: the test process itself freezes nothing)."""
    assert gc.get_freeze_count() <= FROZEN_AT_STARTUP
    yield
    gc.unfreeze()


def holds(objects: list[object], wanted: object) -> bool:
    return sum(item is wanted for item in objects) == 1


def test_an_unfrozen_object_is_found_once() -> None:
    wanted = [object()]
    assert holds(all_objects(), wanted)


@pytest.mark.usefixtures("thaw")
def test_a_frozen_object_that_a_running_function_holds_is_found_once() -> None:
    wanted = ["frozen"]
    gc.freeze()
    assert not holds(gc.get_objects(), wanted)
    assert holds(all_objects(), wanted)


@pytest.mark.usefixtures("thaw")
def test_a_frozen_object_that_only_a_module_holds_is_found() -> None:
    module = types.ModuleType("a_module_of_this_test")
    sys.modules[module.__name__] = module
    try:
        module.held = {"deep": [1, []]}  # type: ignore[attr-defined]
        identity = id(module.held["deep"][1])  # type: ignore[attr-defined]
        del module
        gc.freeze()
        assert any(id(item) == identity for item in all_objects())
    finally:
        del sys.modules["a_module_of_this_test"]


@pytest.mark.usefixtures("thaw")
def test_of_a_frozen_heap_each_object_is_given_once_and_only_if_it_is_tracked() -> None:
    shared: list[object] = []
    untracked = 10**30
    module = types.ModuleType("a_module_of_this_test")
    sys.modules[module.__name__] = module
    try:
        vars(module)["held"] = [[shared, untracked], [shared]]
        gc.freeze()
        objects = all_objects()
        assert holds(objects, shared)
        assert all(map(gc.is_tracked, objects))
        assert len(set(map(id, objects))) == len(objects)
    finally:
        del sys.modules["a_module_of_this_test"]


@pytest.mark.usefixtures("thaw")
def test_a_frozen_object_that_only_another_thread_holds_is_found() -> None:
    ready, done = threading.Event(), threading.Event()
    identity: list[int] = []

    def hold() -> None:
        mine = [object()]
        identity.append(id(mine))
        ready.set()
        done.wait(HANG_S)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert ready.wait(HANG_S)
        gc.freeze()
        assert any(id(item) == identity[0] for item in all_objects())
    finally:
        done.set()
        thread.join()


@pytest.mark.usefixtures("thaw")
def test_objects_of_a_frozen_heap_come_with_the_unfrozen_ones() -> None:
    old = ["frozen"]
    gc.freeze()
    new = ["fresh"]
    objects = all_objects()
    assert holds(objects, old)
    assert holds(objects, new)


@pytest.mark.usefixtures("thaw")
def test_what_is_frozen_stays_frozen_and_nothing_joins_it() -> None:
    gc.freeze()
    before = gc.get_freeze_count()
    kept = [[] for _ in range(100)]
    all_objects()
    assert gc.get_freeze_count() <= before
    assert len(kept) == 100


@pytest.mark.usefixtures("thaw")
def test_a_local_dies_when_its_function_drops_it_although_the_frame_was_read() -> None:
    class Watched:
        alive = 1

        def __del__(self) -> None:
            Watched.alive = 0

    watched = Watched()
    gc.freeze()
    all_objects()
    del watched
    assert Watched.alive == 0


def test_the_locals_of_a_frame_are_its_variables() -> None:
    marker = object()
    assert any(value is marker for value in frame_locals(sys._getframe()))


def test_locals_that_the_function_itself_asked_for_are_left_as_they_are() -> None:
    marker = object()
    mine = locals()
    frame_locals(sys._getframe())
    assert mine["marker"] is marker


@pytest.mark.parametrize("make", [lambda ids: set(ids.tolist()), Identities], ids=["set", "array"])
def test_a_census_of_some_of_its_objects_has_these_alone(make: Callable[[Any], Collection[int]]) -> None:
    objects: list[object] = [set(), [], set(), {}]
    ids = identities(objects[1:3])
    census = Census(objects)
    some = census.among(make(ids))
    assert [id(item) for item in some.instances_of(object)] == ids.tolist()
    assert (set(some.types()), census.among(()).types()) == ({list, set}, [])


def test_a_modules_namespace_is_never_emptied() -> None:
    namespace: dict[str, object] = {"sys": sys, "frame_locals": frame_locals}
    exec("kept = object(); frame_locals(sys._getframe())", namespace)
    assert "kept" in namespace


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_left_as_it_was(enabled: bool) -> None:
    was = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with contextlib.suppress(KeyError), collector_paused():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was else gc.disable)()


AS_A_PLAIN_WALK = """
import collections, functools, sys, types
from types import FrameType, ModuleType
sys.path.insert(0, sys.argv[1])
import numpy
from lowtide.probes.objects import identities
from lowtide.probes.objects.listed import Census, _roots, all_objects
from lowtide.probes.originals import gc
if sys.argv[2] == "slow":
    identities._LAID_OUT = False

inner = set()

def noted(item):
    # By identity only: nothing but the structure itself may hold it.
    inner.add(id(item))
    return item

def heap():
    made = [type(f"Made{number}", (), {"slot": noted({"n": noted([number])})}) for number in range(50)]
    class Slotted:
        __slots__ = ("a", "__weakref__")
    slotted = Slotted()
    slotted.a = noted([slotted])
    def generator():
        inside = noted({"in": noted(["a frame"])})
        yield inside
    running = generator()
    next(running)
    cached = functools.lru_cache(lambda number: noted([number]))
    cached(1)
    untracked = ((1, "a", (2.5, b"x")), frozenset([1]), range(3))
    others = [{"a": 1}, {"b": noted([])}, (noted([]),), collections.deque([noted([])]), made[0]()]
    return [made, slotted, running, cached, untracked, *others]

def plainly():
    found, seen = [], set()
    waiting = [*gc.get_objects(), *_roots()]
    while waiting:
        item = waiting.pop()
        if id(item) in seen or not gc.is_tracked(item):
            continue
        seen.add(id(item))
        found.append(item)
        waiting += gc.get_referents(item)
    return [item for item in found if type(item) is not FrameType]

kept = heap()
gc.collect()
gc.disable()
all_objects(); plainly()
gc.freeze()
kept += heap()
own = set()
def ids(list_them):
    objects = list_them()
    found = collections.Counter(map(id, objects))
    assert max(found.values()) == 1
    return set(found), {id(item): type(item).__name__ for item in objects}
for round in range(2):
    ours, names = ids(all_objects)
    plain, more = ids(plainly)
    # Each walk meets what it makes for itself, and what the other has just made.
    only = {**names, **more}
    left = [only[key] for key in (ours ^ plain)]
assert len(plain) > 10_000, len(plain)
assert len(left) < 40, collections.Counter(left)
assert {id(item) for item in kept if gc.is_tracked(item)} <= ours
assert len(inner) > 200 and inner <= ours, len(inner - ours)
census = Census(all_objects())
kinds = [kind for kind in {type(item) for item in kept}]
for kind in kinds:
    told = census.exactly(kind)
    assert {id(item) for item in told} >= {id(item) for item in kept if type(item) is kind and gc.is_tracked(item)}
    assert all(type(item) is kind for item in told)
"""


@pytest.mark.parametrize("way", ["fast", "slow"])
def test_a_frozen_heap_is_listed_as_by_a_plain_walk(way: str) -> None:
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", AS_A_PLAIN_WALK, root, way]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


LEAVES_NOTHING = """
import gc, sys, weakref
sys.path.insert(0, sys.argv[1])
from lowtide.probes.objects.listed import all_objects

class Witness:
    pass

def seen_and_dropped():
    witness = Witness()
    objects = all_objects()
    assert any(item is witness for item in objects)
    del objects
    return weakref.ref(witness)

gc.collect()
gc.disable()
assert seen_and_dropped()() is None, "unfrozen"
gc.freeze()
assert seen_and_dropped()() is None, "frozen"
"""


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def test_reading_keeps_nothing_alive_in_any_python(version: str) -> None:
    # How frames come to be objects differs from version to version; from 3.12 on a walk can meet its own.
    python = find_python(version)
    if python is None:
        pytest.skip(f"there is no Python {version} with numpy and msgspec here")
    root = str(Path(__file__).parents[2])
    done = subprocess.run([python, "-c", LEAVES_NOTHING, root], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def find_python(version: str) -> str | None:
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        return sys.executable
    installed = [str(path) for path in (Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python")]
    others = filter(None, [*sorted(installed, reverse=True), shutil.which(f"python{version}")])
    return next((python for python in others if has_what_is_needed(python)), None)


def has_what_is_needed(python: str) -> bool:
    asked = subprocess.run([python, "-c", "import numpy, msgspec"], capture_output=True, check=False)
    return asked.returncode == 0
