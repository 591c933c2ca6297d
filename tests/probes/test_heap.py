"""Paths from the roots to what should be gone: found whatever holds it, named as code, true, and without traces."""

from __future__ import annotations

import contextvars
import functools
import gc
import subprocess
import sys
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Generator, Iterator
from pathlib import Path as File
from typing import Any, NamedTuple

import objgraph
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lowtide.probes.heap import Path, find_paths


class Thing:
    """What leaks in these tests."""


class Plain:
    """Holds what it is given, with an attribute that its own code names."""

    def __init__(self, thing: object) -> None:
        self.thing = thing


class Bare:
    """Holds what others put into it."""


class Slotted:
    __slots__ = ("slot",)

    def __init__(self, thing: object) -> None:
        self.slot = thing

    def method(self) -> None: ...


class Pair(NamedTuple):
    first: object
    second: object


class DictOfOurs(dict[str, object]): ...


Holder = Callable[[Any], object]
HOLDERS: dict[str, tuple[str, Holder]] = {}


def held_as(path: str) -> Callable[[Holder], Holder]:
    """Registers a kind of holder; `path` is what leads from the holder to the thing in it."""

    def register(holder: Holder) -> Holder:
        HOLDERS[holder.__name__] = (path, holder)
        return holder

    return register


@held_as("['a'] [0]")
def list_in_dict(thing: Any) -> object:
    return {"a": [thing]}


@held_as("[(1, 'b', <test_heap.Bare>)]")
def dict_with_a_tuple_as_key(thing: Any) -> object:
    return {(1, "b", Bare()): thing}


@held_as("<key>")
def key_of_dict(thing: Any) -> object:
    return {thing: 1}


@held_as("['k']")
def ordered_dict(thing: Any) -> object:
    return OrderedDict(k=thing)


@held_as("[7]")
def default_dict(thing: Any) -> object:
    return defaultdict(list, {7: thing})


@held_as("['k']")
def subclass_of_dict(thing: Any) -> object:
    return DictOfOurs(k=thing)


@held_as("[1]")
def tuple_item(thing: Any) -> object:
    return (None, thing)


@held_as("[1]")
def named_tuple(thing: Any) -> object:
    return Pair(None, thing)


@held_as("[2]")
def item_of_deque(thing: Any) -> object:
    return deque([1, 2, thing])


@held_as("{…}")
def item_of_set(thing: Any) -> object:
    return {thing}


@held_as("['k']")
def mapping_proxy(thing: Any) -> object:
    return types.MappingProxyType({"k": thing})


@held_as(".thing")
def attribute(thing: Any) -> object:
    return Plain(thing)


@held_as(".given_from_outside")
def attribute_that_its_class_does_not_name(thing: Any) -> object:
    holder = Bare()
    holder.given_from_outside = thing  # type: ignore[attr-defined]
    return holder


@held_as(".thing")
def attribute_in_a_dict_that_was_asked_for(thing: Any) -> object:
    holder = Plain(thing)
    vars(holder)
    return holder


@held_as(".table ['k']")
def dict_in_attribute(thing: Any) -> object:
    holder = Bare()
    holder.table = {"k": thing}  # type: ignore[attr-defined]
    return holder


@held_as(".slot")
def slot(thing: Any) -> object:
    return Slotted(thing)


@held_as(".given")
def simple_namespace(thing: Any) -> object:
    return types.SimpleNamespace(given=thing)


@held_as("cell 'thing'")
def closure(thing: Any) -> object:
    return lambda: thing


@held_as(".cell_contents")
def lone_cell(thing: Any) -> object:
    return types.CellType(thing)


@held_as(".__defaults__[0]")
def default(thing: Any) -> object:
    def function(argument: object = thing) -> None: ...

    return function


@held_as(".__kwdefaults__['argument']")
def keyword_default(thing: Any) -> object:
    def function(*, argument: object = thing) -> None: ...

    return function


@held_as(".mark")
def attribute_of_function(thing: Any) -> object:
    def function() -> None: ...

    function.mark = thing  # type: ignore[attr-defined]
    return function


@held_as(".kept")
def class_attribute(thing: Any) -> object:
    return type("Local", (), {"kept": thing})


@held_as(".__self__ .slot")
def bound_method(thing: Any) -> object:
    return Slotted(thing).method


@held_as(".__self__ [0]")
def bound_method_of_a_type_in_c(thing: Any) -> object:
    return [thing].append


@held_as(".args [0]")
def partial_argument(thing: Any) -> object:
    return functools.partial(print, thing)


@held_as(".keywords ['end']")
def partial_keyword(thing: Any) -> object:
    return functools.partial(print, end=thing)


@held_as(".func cell 'thing'")
def partial_function(thing: Any) -> object:
    return functools.partial(lambda: thing)


@held_as(".fget cell 'thing'")
def property_function(thing: Any) -> object:
    return property(lambda self: thing)


@held_as("lru_cache key [0]")
def key_of_bounded_cache(thing: Any) -> object:
    cached = functools.lru_cache(maxsize=4)(lambda argument: None)
    cached(thing)
    return cached


@held_as("lru_cache value")
def result_of_bounded_cache(thing: Any) -> object:
    results = [thing]
    cached = functools.lru_cache(maxsize=4)(lambda argument: results.pop())
    cached("argument")
    return cached


@held_as("lru_cache value [0]")
def result_of_bounded_cache_that_is_a_tuple(thing: Any) -> object:
    results = [(thing,)]
    cached = functools.lru_cache(maxsize=4)(lambda argument: results.pop())
    cached("argument")
    return cached


@held_as("lru_cache key [0]")
def key_of_unbounded_cache(thing: Any) -> object:
    cached = functools.lru_cache(maxsize=None)(lambda argument: None)
    cached(thing)
    return cached


@held_as("lru_cache value")
def result_of_unbounded_cache(thing: Any) -> object:
    results = [thing]
    cached = functools.lru_cache(maxsize=None)(lambda argument: results.pop())
    cached("argument")
    return cached


@held_as(".__wrapped__ cell 'thing'")
def function_in_a_cache(thing: Any) -> object:
    cached = functools.lru_cache(lambda: [thing is None])
    cached()
    return cached


@held_as("f_locals['variable']")
def suspended_generator(thing: Any) -> object:
    def generate() -> Iterator[int]:
        variable = thing
        yield 1
        del variable

    generator = generate()
    next(generator)
    return generator


async def wait_with(variable: object) -> None:
    await Pause()


class Pause:
    def __await__(self) -> Generator[None, None, None]:
        yield


@held_as("f_locals['variable']")
def suspended_coroutine(thing: Any) -> object:
    coroutine = wait_with(thing)
    coroutine.send(None)
    return coroutine


@held_as(".__traceback__ .tb_next .tb_frame f_locals['variable']")
def local_of_a_frame_in_a_traceback(thing: Any) -> object:
    def fail(variable: object) -> None:
        raise ValueError

    try:
        fail(thing)
    except ValueError as error:
        # This function's frame is in the traceback too, and is not to hold the thing.
        del thing
        caught = error
    return caught


@held_as(".__callback__ cell 'thing'")
def callback_of_weak_reference(thing: Any) -> object:
    return weakref.ref(Thing, lambda _: thing)


@held_as("['variable']")
def copied_context(thing: Any) -> object:
    context = contextvars.Context()
    context.run(contextvars.ContextVar[object]("variable").set, thing)
    return context


@held_as(".value")
def thread_local(thing: Any) -> object:
    local = threading.local()
    local.value = thing
    return local


@pytest.fixture
def helper() -> Iterator[types.ModuleType]:
    module = types.ModuleType("helper")
    sys.modules["helper"] = module
    yield module
    del sys.modules["helper"]


def path_to(thing: object) -> str:
    return str(find_paths([thing])[0])


@pytest.fixture(scope="module")
def found() -> dict[str, Path | None]:
    """One walk for one thing per kind of holder, and for some things that are special themselves."""
    helper: Any = types.ModuleType("helper")
    sys.modules["helper"] = helper
    things: list[Any] = []
    for name, (_, hold) in HOLDERS.items():
        things.append(Thing())
        setattr(helper, name, hold(things[-1]))
    helper.untracked = [object()]
    helper.engine = Plain(Thing())
    helper.shallow = [Thing()]
    helper.deep = [[[helper.shallow[0]]]]
    special = {
        "a root": helper,
        "untracked": helper.untracked[0],
        "of a class written in C": vars(memoryview)["tobytes"],
        "held by an innocent object": helper.engine.thing,
        "held at two depths": helper.shallow[0],
    }
    paths = find_paths([*things, *special.values()], innocent={id(helper.engine)})
    helper.suspended_coroutine.close()
    del sys.modules["helper"]
    return dict(zip([*HOLDERS, *special], paths, strict=True))


@pytest.mark.parametrize("kind", HOLDERS)
def test_the_edges_are_named_as_code(found: dict[str, Path | None], kind: str) -> None:
    assert str(found[kind]) == f"module 'helper' .{kind} {HOLDERS[kind][0]}".replace("test_heap.", f"{__name__}.")


KINDS = {
    "item_of_deque": "item",
    "attribute": "instance-attribute",
    "slot": "instance-attribute",
    "class_attribute": "class-attribute",
    "closure": "closure",
    "default": "default",
    "keyword_default": "default",
    "key_of_bounded_cache": "lru-cache-key",
    "result_of_bounded_cache": "lru-cache-value",
    "key_of_unbounded_cache": "lru-cache-key",
    "result_of_unbounded_cache": "lru-cache-value",
    "suspended_generator": "generator-local",
    "suspended_coroutine": "generator-local",
    "bound_method": "bound-self",
    "bound_method_of_a_type_in_c": "bound-self",
    "copied_context": "context-variable",
    "thread_local": "thread",
}


@pytest.mark.parametrize("name", KINDS)
def test_the_first_edge_after_the_global_is_of_its_kind(found: dict[str, Path | None], name: str) -> None:
    path = found[name]
    assert path is not None
    assert [step.kind for step in path.steps[:2]] == ["module-global", KINDS[name]]


def test_references_count_what_a_step_folds_together(found: dict[str, Path | None]) -> None:
    path = found["list_in_dict"]
    assert path is not None
    # The module, its namespace, the dict, the list.
    assert (path.references, len(path.steps)) == (4, 3)


def test_steps_tell_the_type_they_lead_to_and_the_kind_of_edge(found: dict[str, Path | None]) -> None:
    path = found["dict_in_attribute"]
    assert path is not None
    assert [(step.type_name, step.kind) for step in path.steps] == [
        (f"{__name__}.Bare", "module-global"),
        ("dict", "instance-attribute"),
        (f"{__name__}.Thing", "item"),
    ]


def test_a_definition_is_marked(found: dict[str, Path | None]) -> None:
    path = found["default"]
    assert path is not None
    assert [step.definition for step in path.steps] == [True, False]


def test_an_innocent_object_is_marked(found: dict[str, Path | None]) -> None:
    path = found["held by an innocent object"]
    assert path is not None
    assert [step.innocent for step in path.steps] == [True, False]


def test_the_shortest_path_is_given(found: dict[str, Path | None]) -> None:
    assert str(found["held at two depths"]) == "module 'helper' .shallow [0]"


def test_a_root_itself_has_a_path_without_steps(found: dict[str, Path | None]) -> None:
    path = found["a root"]
    assert path is not None
    assert (path.root, path.steps) == ("module 'helper'", ())


def test_an_object_that_the_collector_does_not_track_is_found(found: dict[str, Path | None]) -> None:
    assert str(found["untracked"]) == "module 'helper' .untracked [0]"


def test_an_attribute_of_a_class_written_in_c_is_found(found: dict[str, Path | None]) -> None:
    # The collector shows nothing that such a class holds.
    assert gc.get_referents(memoryview) == []
    assert str(found["of a class written in C"]) == "class 'memoryview' .tobytes"


def test_no_targets_no_paths() -> None:
    assert find_paths([]) == []


def test_a_local_of_a_running_function_is_found() -> None:
    thing = Thing()
    [path] = find_paths([thing])
    assert path is not None
    line = sys._getframe().f_lineno - 2
    here = f"test_a_local_of_a_running_function_is_found in test_heap.py:{line}"
    assert (path.root, path.steps[0].edge, path.thread) == (f"frame of {here}", "f_locals['thing']", "")


def test_a_global_of_a_namespace_that_is_no_module_is_found(helper: Any) -> None:
    namespace: dict[str, Any] = {"kept": Thing()}
    exec("def function(): pass", namespace)
    helper.function = namespace["function"]
    thing = namespace.pop("kept")
    helper.function.__globals__["kept"] = thing
    del namespace
    assert path_to(thing) == "module 'helper' .function __globals__['kept']"


def test_a_context_variable_of_the_running_context_is_a_root() -> None:
    variable = contextvars.ContextVar[list[Thing]]("scope")

    def run() -> str:
        variable.set([Thing()])
        return path_to(variable.get()[0])

    assert contextvars.copy_context().run(run) == "context variable 'scope' .get() [0]"


class Worker:
    """A thread that runs until it is told to stop."""

    def __init__(self, *args: object, in_frame: object = None) -> None:
        self.ready, self.stop = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.run, args=(in_frame, *args), name="worker")

    def run(self, variable: object, *_: object) -> None:
        del _
        self.ready.set()
        self.stop.wait(20)
        del variable

    def __enter__(self) -> Worker:
        self.thread.start()
        assert self.ready.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join()


def test_an_argument_of_a_running_thread_is_found_at_the_thread() -> None:
    with Worker(Thing()) as worker:
        thing = worker.thread._args[1]  # type: ignore[attr-defined]
        [path] = find_paths([thing])
    assert path is not None
    assert (str(path), path.steps[0].kind) == ("thread 'worker' ._args [1]", "thread")


def test_a_variable_of_another_thread_names_the_thread() -> None:
    with Worker(in_frame=Thing()) as worker:
        things = [worker.thread._args[0]]  # type: ignore[attr-defined]
        worker.thread._args = ()  # type: ignore[attr-defined]
        [path] = find_paths(things)
    assert path is not None
    assert (path.thread, path.steps[0].edge) == ("worker", "f_locals['variable']")


def test_what_no_root_reaches_has_no_path(helper: Any) -> None:
    in_garbage, watched, in_nothing_else = [Thing()], Thing(), Thing()
    in_garbage.append(in_garbage)  # type: ignore[arg-type]
    helper.weak = weakref.ref(watched)
    things = [in_garbage[0], watched, in_nothing_else]
    del in_garbage, watched, in_nothing_else
    assert find_paths(things) == [None, None, None]
    gc.collect()


def test_a_path_avoids_what_is_to_be_ignored(helper: Any) -> None:
    thing = Thing()
    helper.shallow = [thing]
    helper.deep = [[thing]]
    targets = [thing]
    del thing
    assert [str(path) for path in find_paths(targets, ignore={id(helper.shallow)})] == ["module 'helper' .deep [0] [0]"]
    assert find_paths(targets, ignore={id(helper.shallow), id(helper.deep)}) == [None]


def test_a_library_comes_last_however_short_its_path(helper: Any) -> None:
    thing = Thing()
    helper.deep = [[[thing]]]
    functools.kept_by_this_test = thing  # type: ignore[attr-defined]
    try:
        assert path_to(thing) == "module 'helper' .deep [0] [0] [0]"
        del helper.deep
        assert path_to(thing) == "module 'functools' .kept_by_this_test"
    finally:
        del functools.kept_by_this_test  # type: ignore[attr-defined]


def test_a_thread_local_comes_after_what_else_there_is(helper: Any) -> None:
    local = threading.local()
    local.value = Thing()
    helper.local = local
    helper.deep = [[[[[local.value]]]]]
    assert path_to(local.value) == "module 'helper' .deep [0] [0] [0] [0] [0]"


CHECKERS_CODE = """
def check(find_paths, make):
    thing = make()
    return find_paths([thing])

def generate(make):
    thing = make()
    yield thing
"""


@pytest.mark.parametrize("module", ["lowtide.leakcheck.x", "lowtide.pytest_plugin.x"])
def test_the_checkers_own_frames_are_no_holders(module: str) -> None:
    namespace: dict[str, Any] = {"__name__": module}
    exec(CHECKERS_CODE, namespace)
    assert namespace["check"](find_paths, Thing) == [None]


def test_a_frame_of_the_program_is_a_holder() -> None:
    namespace: dict[str, Any] = {"__name__": "lowtide.engine.x"}
    exec(CHECKERS_CODE, namespace)
    assert namespace["check"](find_paths, Thing) != [None]


@pytest.mark.parametrize(("package", "is_holder"), [("lowtide.leakcheck", False), ("lowtide.engine", True)])
def test_the_checkers_suspended_generators_are_no_holders(helper: Any, package: str, is_holder: bool) -> None:
    module = types.ModuleType(f"{package}.of_this_test")
    module.__file__ = "of_this_test.py"
    exec(compile(CHECKERS_CODE, "of_this_test.py", "exec"), vars(module))
    sys.modules[module.__name__] = module
    try:
        helper.generator = vars(module)["generate"](Thing)
        things = [next(helper.generator)]
        assert (find_paths(things) != [None]) is is_holder
    finally:
        del sys.modules[module.__name__]


def test_a_result_keeps_nothing_alive(helper: Any) -> None:
    helper.holder = [Thing()]
    watched = weakref.ref(helper.holder[0])
    paths = find_paths(list(helper.holder))
    del helper.holder
    assert watched() is None
    assert paths


def test_an_instance_stays_as_it_was(helper: Any) -> None:
    helper.holder = Plain(Thing())
    things = [helper.holder.thing]
    before = list(map(id, gc.get_referents(helper.holder)))
    gc.collect()
    gc.disable()
    try:
        path = str(find_paths(things)[0])
        count = len(gc.get_objects())
        find_paths(things)
        assert len(gc.get_objects()) == count
    finally:
        gc.enable()
    assert path == "module 'helper' .holder .thing"
    assert list(map(id, gc.get_referents(helper.holder))) == before


def test_a_local_dies_when_its_function_drops_it_although_its_frame_was_read() -> None:
    thing = Thing()
    watched = weakref.ref(thing)
    find_paths([thing])
    del thing
    assert watched() is None


class Foreign(Exception): ...  # noqa: N818


class HostileMeta(type):
    def _run(cls, *_: object) -> Any:
        raise Foreign

    __eq__ = __hash__ = __instancecheck__ = __subclasscheck__ = __getattr__ = __repr__ = _run
    __module__ = property(_run)


class Hostile(metaclass=HostileMeta):
    def _run(self, *_: object) -> Any:
        raise Foreign

    __eq__ = __hash__ = __repr__ = __bool__ = __len__ = __iter__ = _run
    __getattr__ = __getattribute__ = _run
    __class__ = __dict__ = property(_run)
    thing = property(_run)


def test_no_foreign_code_runs(helper: Any) -> None:
    hostile = object.__new__(Hostile)
    object.__setattr__(hostile, "given_from_outside", [Thing()])
    helper.holder = {"k": hostile, "other": [hostile]}
    thing = object.__getattribute__(hostile, "given_from_outside")[0]
    path = path_to(thing)
    assert path.startswith("module 'helper' .holder ['k'] ")
    assert path.endswith(" [0]")


def replay(path: Path) -> list[object]:
    """What the path's edges, followed as code, can lead to; several where an edge does not say which element."""
    reached: list[Any] = [sys.modules[path.root_name]]
    for step in path.steps:
        reached = [thing for holder in reached for thing in follow(holder, step.edge)]
    return reached


def follow(holder: Any, edge: str) -> list[Any]:
    if edge.startswith("cell "):
        names = holder.__code__.co_freevars
        return [holder.__closure__[names.index(edge[6:-1])].cell_contents]
    if edge.startswith("lru_cache"):
        # A cache shows what it holds to nobody but the collector.
        held = gc.get_referents(holder)
        return held + [item for part in held if type(part) is dict for item in gc.get_referents(part)]
    if edge.startswith("f_locals"):
        return [holder.f_locals[edge.split("'")[1]]]
    if edge == "{…}":
        return list(holder)
    try:
        return [eval(f"holder{edge}")]
    except (AttributeError, LookupError, TypeError):
        return []  # one of several candidates, and the wrong one


# Those whose edges are code that can be followed.
SHAPES = [
    hold for path, hold in HOLDERS.values() if "<" not in path and not path.startswith(("f_locals", "['variable']"))
]
HEAPS = st.recursive(
    st.just(None),
    lambda part: st.one_of(
        st.tuples(st.sampled_from(SHAPES), part),
        st.lists(part, min_size=2, max_size=4).map(lambda parts: (list, parts)),
    ),
    max_leaves=20,
)


def build(shape: Any, things: list[Thing]) -> object:
    if shape is None:
        things.append(Thing())
        return things[-1]
    hold, part = shape
    return (
        [build(one, things) for one in part] if hold is list else hold(Plain(build(part, things)))
    )  # hashable, whatever is in it


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shapes=st.lists(HEAPS, min_size=5, max_size=20))
def test_every_path_leads_to_its_object(helper: Any, shapes: list[Any]) -> None:
    things: list[Thing] = []
    helper.heap = [build(shape, things) for shape in shapes]
    paths = find_paths(things)
    for thing, path in zip(things, paths, strict=True):
        assert path is not None
        assert path.root == "module 'helper'"
        assert any(reached is thing for reached in replay(path))


def test_objgraph_finds_a_path_of_the_same_length(helper: Any) -> None:
    helper.holder = {"k": [Plain([(Thing(),)])]}
    things = [helper.holder["k"][0].thing[0][0]]
    [path] = find_paths(things)
    chain = objgraph.find_backref_chain(things[0], lambda item: item is helper, extra_ignore=[id(things)])
    assert chain[0] is helper
    assert path is not None
    assert path.references == len(chain) - 1


FROZEN = """
import functools, gc, sys, types
sys.path.insert(0, sys.argv[1])
from lowtide.probes.heap import find_paths

class Engine:
    def __init__(self):
        self.model = [object()]

helper = types.ModuleType("helper")
sys.modules["helper"] = helper
helper.engine = Engine()
helper.cached = functools.lru_cache(lambda argument: None)
helper.cached(Engine())
things = [helper.engine.model[0]]
things += [key[0].model[0] for key in gc.get_referents(helper.cached) if type(key) is tuple]
before = find_paths(things)
gc.freeze()
after = find_paths(things)
assert [str(path) for path in after] == [str(path) for path in before], after
assert str(after[0]) == "module 'helper' .engine .model [0]", after
assert str(after[1]) == "module 'helper' .cached lru_cache key [0] .model [0]", after
assert not any(step.frozen for path in before for step in path.steps)
assert [step.frozen for step in after[0].steps] == [True, True, False], "object() is not tracked"
helper.fresh = [Engine()]
things = [helper.fresh[0].model[0]]
assert [step.frozen for step in find_paths(things)[0].steps] == [False, False, False, False]
cycle = Engine()
cycle.itself = cycle
gc.freeze()
things = [cycle.model[0]]
del cycle
assert find_paths(things) == [None], "frozen garbage"
"""


def test_a_frozen_heap_has_the_same_paths() -> None:
    root = str(File(__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", FROZEN, root], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
