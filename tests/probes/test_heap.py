"""Paths from the roots to what should be gone: found whatever holds it, named as code, true, and without traces."""

from __future__ import annotations

import contextvars
import ctypes
import functools
import gc
import os
import platform
import subprocess
import sys
import threading
import time
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path as File
from typing import Any, NamedTuple

import objgraph
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from lowtide.probes.heap.holders import Traces, find_paths, trace
from lowtide.probes.heap.paths import Link, Path
from lowtide.probes.objects.listed import frozen_by_program
from tests.waiting import HANG_S


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
    paths = find_paths(
        [*things, *special.values()],
        inspect=lambda _, items: ["innocent" if item is helper.engine else None for item in items],
    )
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
    assert [step.mark for step in path.steps] == ["innocent", None]


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
        self.stop.wait(HANG_S)
        del variable

    def __enter__(self) -> Worker:
        self.thread.start()
        assert self.ready.wait(HANG_S)
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

def fail(make, things):
    thing = make()
    things.append(thing)
    raise ValueError
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


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize(("module", "is_holder"), [("lowtide.leakcheck.x", False), ("lowtide.engine.x", True)])
def test_a_frame_of_the_checkers_that_an_error_holds_is_none_either(
    helper: Any, module: str, is_holder: bool, freeze: bool
) -> None:
    namespace: dict[str, Any] = {"__name__": module}
    exec(CHECKERS_CODE, namespace)
    things: list[Thing] = []
    try:
        namespace["fail"](Thing, things)
    except ValueError as error:
        helper.error = error
    frozen_before = frozen_by_program(gc.get_freeze_count())
    if freeze:
        gc.freeze()
    try:
        assert (find_paths(things) != [None]) is is_holder
    finally:
        if freeze and not frozen_before:
            gc.unfreeze()


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
        grown = []
        # Of several, because other threads make objects too.
        for _ in range(5):
            count = len(gc.get_objects())
            find_paths(things)
            grown.append(len(gc.get_objects()) - count)
        assert min(grown) == 0
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


def follow(holder: Any, edge: str) -> list[Any]:
    """What an edge, followed as code, can lead to; several where it does not say to which element."""
    if edge.startswith("cell "):
        return [cell_of(holder, edge).cell_contents]
    if edge.startswith("lru_cache"):
        # A cache shows what it holds to nobody but the collector.
        held = gc.get_referents(holder)
        return held + [item for part in held if type(part) is dict for item in gc.get_referents(part)]
    if edge.startswith("f_locals"):
        return [variable_of(holder, edge.split("'")[1])]
    if edge in ("{…}", "<key>"):
        return list(holder)
    if type(holder) is contextvars.Context:
        return [value for variable, value in holder.items() if f"[{variable.name!r}]" == edge]
    if isinstance(holder, dict):
        return [value for key, value in holder.items() if f"[{key_as_code(key)}]" == edge]
    try:
        return [eval(f"holder{edge}")]
    except (AttributeError, LookupError, TypeError):
        return []  # one of several candidates, and the wrong one


def cell_of(function: Any, edge: str) -> Any:
    name = edge.removeprefix("cell '").removesuffix("'")
    return function.__closure__[function.__code__.co_freevars.index(name)]


def variable_of(holder: Any, name: str) -> Any:
    """A variable of a frame, of a suspended function, or of the namespace that stands for a frame of the test."""
    if type(holder) is types.SimpleNamespace:
        return getattr(holder, name)
    frame = frame_of(holder)
    value = frame.f_locals[name]
    if sys.version_info < (3, 13):
        frame.f_locals.clear()  # the dict that reading leaves in the frame would hold it too
    return value


def frame_of(holder: Any) -> Any:
    return next((getattr(holder, name) for name in ("gi_frame", "cr_frame") if hasattr(holder, name)), holder)


def key_as_code(key: object) -> str:
    if type(key) is tuple:
        return f"({', '.join(map(key_as_code, key))})"
    return f"<{__name__}.{type(key).__name__}>" if type(key) in (Thing, Plain, Bare) else repr(key)


def ways(root: Any, path: Path, may_end: Callable[[int, Any], bool]) -> list[list[Any]]:
    """What the path's edges, followed as code, pass from the root on; more than one way where code is ambiguous.

    `may_end` says whether the step of that number can lead to that object.
    """
    found = [[root]]
    for number, step in enumerate(path.steps):
        found = [[*way, item] for way in found for item in follow(way[-1], step.edge) if may_end(number, item)]
    return found


def cut(holder: Any, edge: str, held: Any) -> None:
    """Really removes one reference and nothing else; of a cache all, since no code clears a single entry."""
    kind = type(holder)
    if edge.startswith("lru_cache"):
        holder.cache_clear()
    elif edge.startswith("cell "):
        del cell_of(holder, edge).cell_contents
    elif edge.startswith("f_locals") and kind is not types.SimpleNamespace:
        # From Python 3.11 on a suspended function keeps its variables itself.
        frame = frame_of(holder)
        overwrite(frame if sys.version_info < (3, 11) else holder, held, length_of_variables(frame.f_code))
    elif edge == "{…}":
        holder.remove(held)
    elif edge == "<key>":
        holder[Bare()] = holder.pop(held)
    elif edge.startswith(".__defaults__["):
        overwrite(holder.__defaults__, held)
    elif edge.startswith(".__kwdefaults__["):
        del holder.__kwdefaults__[edge.split("'")[1]]
    elif kind is types.MappingProxyType:
        cut(gc.get_referents(holder)[0], edge, held)
    elif kind is contextvars.Context:
        holder.run(next(variable for variable in holder if f"[{variable.name!r}]" == edge).set, None)
    elif isinstance(holder, dict):
        # Not `del`, which would remove the key with it.
        holder[next(key for key in holder if f"[{key_as_code(key)}]" == edge and holder[key] is held)] = None
    elif kind in (list, deque):
        holder[int(edge[1:-1])] = None
    elif isinstance(holder, tuple):
        overwrite(holder, held)
    else:
        try:
            delattr(holder, edge.split("'")[1] if edge.startswith("f_locals") else edge[1:])
        except (AttributeError, TypeError):
            overwrite(holder, held)


def length_of_variables(code: types.CodeType) -> int:
    """The words at the end of a frame in which variables and the stack lie; what is before may be left from others."""
    return len({*code.co_varnames, *code.co_cellvars, *code.co_freevars}) + code.co_stacksize


def overwrite(holder: object, held: object, last: int | None = None) -> None:
    """Puts None where an object that no code can change (a tuple, a method, a frame) has its pointer.

    It is looked for in the last so many words of the object; in all but the count of references and the type if not
    given.
    """
    words = type(holder).__sizeof__(holder) // 8
    memory = (ctypes.c_size_t * words).from_address(id(holder))
    memory[list(memory).index(id(held), 2 if last is None else words - last)] = id(None)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(None))
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(held))


def fill_attributes(holder: Any, parts: list[Any]) -> None:
    left, right, *_ = [*parts, None, None]
    holder.left, holder.right = left, right


def fill_attributes_and_ask_for_the_dict(holder: Any, parts: list[Any]) -> None:
    fill_attributes(holder, parts)
    vars(holder)


def fill_dict(holder: dict[object, Any], parts: list[Any]) -> None:
    holder.update(zip((0, "k", (None, 2), b"b"), parts, strict=False))


def make_closure() -> object:
    held: object = None
    return lambda: held


def fill_closure(function: Any, parts: list[Any]) -> None:
    function.__closure__[0].cell_contents = parts[0]


def make_cache(size: int | None) -> Any:
    results: list[Any] = []
    return functools.lru_cache(maxsize=size)(lambda *_: results.pop())


def fill_cache(cached: Any, parts: list[Any]) -> None:
    results = cached.__wrapped__.__closure__[0].cell_contents
    for key, result in zip(parts[::2], parts[1::2], strict=False):
        results.append(result)
        cached(hashable(key))
        results.clear()  # where the key was there already


def hashable(item: Any) -> Any:
    return item if type(item) in (Thing, Plain, Bare) else Plain(item)


# What can hold several objects, such as were made later too, and so can be part of a cycle: how to make it and fill it.
FILLED: dict[str, tuple[Callable[[], Any], Callable[[Any, list[Any]], object]]] = {
    "thing": (Thing, fill_attributes),
    "object": (Bare, fill_attributes),
    "object whose dict was asked for": (Bare, fill_attributes_and_ask_for_the_dict),
    "list": (list, list.extend),
    "dict": (dict, fill_dict),
    "set": (set, lambda holder, parts: holder.update(map(hashable, parts))),
    "closure": (make_closure, fill_closure),
    "bounded cache": (lambda: make_cache(2), fill_cache),
    "unbounded cache": (lambda: make_cache(None), fill_cache),
}
HASHING = ("key_of_dict", "item_of_set", "key_of_bounded_cache", "key_of_unbounded_cache")


class Heap(NamedTuple):
    """A heap to be built.

    Attributes:
        objects: of each the kind, and what it holds: any object, or one of the last before it if its kind can hold only
            what was there when it was made.
        held_by: what each root holds, counted from the last object on.
    """

    objects: list[tuple[str, list[int]]]
    held_by: dict[str, list[int]]


KINDS_OF_OBJECTS = [*["thing"] * 30, *FILLED, *FILLED, *HOLDERS, *HOLDERS]


def heap_from(noise: bytes) -> Heap:
    """Reads a heap off bytes: as many choices of their own would take Hypothesis longer than the walks."""
    byte = iter(noise)
    objects = []
    for _ in range(30 + next(byte) % 20):
        kind = KINDS_OF_OBJECTS[next(byte) % len(KINDS_OF_OBJECTS)]
        count = next(byte) % 3 if kind == "thing" else 1 + next(byte) % 4
        objects.append((kind, [next(byte) for _ in range(count)]))
    counts = {"helper": 5 + next(byte) % 6, "elsewhere": next(byte) % 3, "frame": next(byte) % 2}
    return Heap(objects, {root: [next(byte) % 20 for _ in range(count)] for root, count in counts.items()})


HEAPS = st.binary(min_size=400, max_size=400).map(heap_from)


def one_chain_of_all_kinds() -> Heap:
    """Every kind holds the one before it; a thing among them now and then."""
    objects: list[tuple[str, list[int]]] = []
    for turn, kind in enumerate([*HOLDERS, *FILLED]):
        # A cache's first part is a key, its second the result.
        objects.append((kind, [len(objects)] * 2 if kind in FILLED else [0]))
        if turn % 10 == 9:
            objects.append(("thing", [len(objects)]))
    return Heap(objects, {"helper": [0], "elsewhere": [], "frame": []})


class Built:
    """A heap that was built; only its roots keep it alive.

    Attributes:
        roots: two modules, and a namespace with the variables that are to be a frame's.
        things: weak references to the things, by their numbers.
        numbers: the numbers of all objects, by their identity.
    """

    def __init__(self, heap: Heap) -> None:
        objects: list[Any] = [Thing()]
        for kind, parts in heap.objects:
            if kind in FILLED:
                objects.append(FILLED[kind][0]())
            else:
                part = objects[-1 - parts[0] % min(8, len(objects))]  # of the last ones, so that there are long paths
                objects.append(HOLDERS[kind][1](hashable(part) if kind in HASHING else part))
        for item, (kind, parts) in zip(objects[1:], heap.objects, strict=True):
            if kind in FILLED:
                FILLED[kind][1](item, [objects[part % len(objects)] for part in parts])
        self.roots: dict[str, Any] = {name: types.ModuleType(name) for name in ("helper", "elsewhere")}
        self.roots["frame"] = types.SimpleNamespace()
        for name, held in heap.held_by.items():
            self.roots[name].variable = [objects[-1 - part] for part in held]
        self.things = {number: weakref.ref(item) for number, item in enumerate(objects) if type(item) is Thing}
        self.numbers = {id(item): number for number, item in enumerate(objects)}
        # A traceback in the heap holds this frame, with all its variables.
        objects.clear()
        item = part = None

    def alive(self) -> dict[int, Thing]:
        """The things that are alive, by their numbers."""
        gc.collect()
        things = {number: thing() for number, thing in self.things.items()}
        return {number: thing for number, thing in things.items() if thing is not None}


class Answer(NamedTuple):
    """What the walk says of one thing.

    Attributes:
        thing: its number.
        path: who holds it.
        ends: the numbers of the objects that the path's steps lead to; None for one that is a part of another.
        freed: for each step the numbers of the things that are gone once it is cut.
    """

    thing: int
    path: Path | None
    ends: list[int | None]
    freed: list[set[int]]

    def ways(self, built: Built) -> list[list[Any]]:
        """What the path, followed as code, passes in this or another copy of the heap."""
        assert self.path is not None, f"no path to {self.thing}, which is alive"
        root = built.roots["frame" if self.path.root_kind == "frame" else self.path.root_name]
        return ways(root, self.path, lambda step, item: built.numbers.get(id(item)) == self.ends[step])


def answers_for(built: Built, *, cuts: bool) -> list[Answer]:
    """Asks who holds each thing that is alive, and if wanted what each edge of its path retains."""
    variable = vars(built.roots["frame"]).pop("variable")  # from here on a variable of this frame
    alive = built.alive()
    numbers, things = list(alive), list(alive.values())
    del alive
    sys.modules.update(helper=built.roots["helper"], elsewhere=built.roots["elsewhere"])
    answers = []
    try:
        with trace(things) as found:
            for place, number in enumerate(numbers):
                path, ends = path_with_ends(found, place, built)
                freed = found.freed_by_cutting(place, 0) if cuts else []
                answers.append(Answer(number, path, ends, [{numbers[held] for held in each} for each in freed]))
    finally:
        del sys.modules["helper"], sys.modules["elsewhere"]
        built.roots["frame"].variable = variable
    return answers


def path_with_ends(found: Traces, place: int, built: Built) -> tuple[Path | None, list[int | None]]:
    ends: list[int | None] = []

    def inspect(_: str, items: Sequence[object]) -> list[None]:
        ends.extend(built.numbers.get(id(item)) for item in items)
        return [None for _ in items]

    return found.path(place, inspect), ends


def dead_after_cutting(heap: Heap, answer: Answer, step: int) -> set[int]:
    """Builds the heap anew, really removes the reference of one step, and sees which things die."""
    built = Built(heap)
    before = set(built.alive())
    assert answer.path is not None
    way = answer.ways(built)[0]
    cut(way[step], answer.path.steps[step].edge, way[step + 1])
    del way
    return before - set(built.alive())


class Tally:
    """What a long run went through."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.counts: dict[str, int] = defaultdict(int)
        self.kinds: set[str] = set()

    def add_paths(self, heap: Heap, answers: list[Answer]) -> None:
        self.counts["heaps"] += 1
        self.counts["things"] += len(answers)
        self.counts["found"] += sum(answer.path is not None for answer in answers)
        self.kinds |= {heap.objects[number - 1][0] for answer in answers for number in answer.ends if number}


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Iterator[Tally]:
    """Counts; a long run (`LOWTIDE_HEAPS=1000 pytest -s --timeout 0 -k random_heap`) prints them."""
    tally = Tally()
    yield tally
    if "LOWTIDE_HEAPS" in os.environ:
        missing = sorted({*FILLED, *HOLDERS} - tally.kinds)
        seconds = time.monotonic() - tally.started
        reported = f"{dict(tally.counts)}, {seconds:.0f} s, kinds on no path: {missing}"
        sys.stdout.write(f"\n{request.node.name}, Python {platform.python_version()}: {reported}\n")


many_heaps = settings(
    max_examples=int(os.environ.get("LOWTIDE_HEAPS", 8)),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@many_heaps
@given(heap=HEAPS)
@example(heap=one_chain_of_all_kinds())
def test_in_a_random_heap_every_path_leads_to_its_object(tally: Tally, heap: Heap) -> None:
    built = Built(heap)
    answers = answers_for(built, cuts=False)
    tally.add_paths(heap, answers)
    for answer in answers:
        assert answer.ways(built), f"{answer.path} does not lead to {answer.thing}"


@many_heaps
@given(heap=HEAPS)
@example(heap=one_chain_of_all_kinds())
def test_in_a_random_heap_what_a_cut_frees_is_what_dies(tally: Tally, heap: Heap) -> None:
    answers = answers_for(Built(heap), cuts=True)
    tally.add_paths(heap, answers)
    gc.freeze()  # so that a collection takes no time
    try:
        for answer in answers:
            for step, freed in enumerate(answer.freed):
                dead = dead_after_cutting(heap, answer, step)
                tally.counts["cuts"] += 1
                tally.counts["freeing"] += bool(freed)
                # What does not give back the thing itself is no remedy, whatever else it frees.
                assert freed == (dead if answer.thing in dead else set()), f"{answer.path}, step {step}"
    finally:
        gc.unfreeze()


class Linked(NamedTuple):
    """What the path, followed as code, passes, and the walk's links for its steps."""

    way: list[Any]
    links: list[Link]


@pytest.fixture(scope="module")
def linked() -> Iterator[dict[str, Linked]]:
    """One walk for one thing per kind of holder."""
    helper: Any = types.ModuleType("helper")
    sys.modules["helper"] = helper
    things = [Thing() for _ in HOLDERS]
    for thing, (name, (_, hold)) in zip(things, HOLDERS.items(), strict=True):
        setattr(helper, name, hold(thing))
    linked = {}
    with trace(things) as found:
        for place, (name, thing) in enumerate(zip(HOLDERS, things, strict=True)):
            path = found.path(place)
            assert path is not None
            [way, *_] = [way for way in ways(helper, path, lambda *_: True) if way[-1] is thing]
            linked[name] = Linked(way, [found.link(place, step) for step in range(len(path.steps))])
    del sys.modules["helper"]
    yield linked
    helper.suspended_coroutine.close()


@pytest.mark.parametrize("kind", HOLDERS)
def test_a_link_leads_from_the_owner_of_its_edge(linked: dict[str, Linked], kind: str) -> None:
    way, links = linked[kind]
    assert list(map(id, way[:-1])) == [id(link.owner) for link in links]
    assert list(map(id, way[1:])) == [link.held for link in links]


@pytest.mark.parametrize("kind", HOLDERS)
def test_the_reference_of_a_link_lies_in_its_carrier(linked: dict[str, Linked], kind: str) -> None:
    for link in linked[kind].links:
        assert link.held in map(id, gc.get_referents(link.carrier))


# Kinds of which the reference to the thing lies in a part of its owner; an instance keeps its attributes itself from
# Python 3.11 on, and if its dict was asked for from 3.13 on; a generator its variables from 3.11 on.
CARRIERS = {
    "mapping_proxy": dict,
    "closure": types.CellType,
    "partial_function": types.CellType,
    "property_function": types.CellType,
    "function_in_a_cache": types.CellType,
    "callback_of_weak_reference": types.CellType,
    "default": tuple,
    "keyword_default": dict,
    "attribute_of_function": dict,
    "class_attribute": dict,
    "simple_namespace": dict,
    "result_of_unbounded_cache": dict,
    "thread_local": dict,
    "attribute": dict if sys.version_info < (3, 11) else None,
    "attribute_that_its_class_does_not_name": dict if sys.version_info < (3, 11) else None,
    "attribute_in_a_dict_that_was_asked_for": dict if sys.version_info < (3, 13) else None,
    "suspended_generator": types.FrameType if sys.version_info < (3, 11) else None,
    "suspended_coroutine": types.FrameType if sys.version_info < (3, 11) else None,
}


@pytest.mark.parametrize("kind", HOLDERS)
def test_the_carrier_of_a_link_is_its_owner_or_the_part_that_has_the_reference(
    linked: dict[str, Linked], kind: str
) -> None:
    link = linked[kind].links[-1]
    if kind == "copied_context":
        assert type(link.carrier).__name__ == "hamt_bitmap_node"
    elif CARRIERS.get(kind) is None:
        assert link.carrier is link.owner
    else:
        assert type(link.carrier) is CARRIERS[kind]


def test_a_global_lies_in_the_namespace_of_its_module(linked: dict[str, Linked]) -> None:
    link = linked["closure"].links[0]
    assert (link.edge, link.kind) == (".closure", "module-global")
    assert link.carrier is vars(link.owner)


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
from lowtide.probes.heap.holders import find_paths

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


@pytest.mark.parametrize("older", ["first", "second"])
def test_of_two_paths_of_one_length_it_is_that_of_what_was_set_first_whatever_is_older(helper: Any, older: str) -> None:
    things = [Thing()]
    helper.holders = {"first": [], "second": {}}
    # An object that is made later has another place in the heap.
    gc.collect()
    helper.holders[older] = type(helper.holders[older])()
    helper.holders["second"]["key"] = things[0]
    helper.holders["first"].append(things[0])
    assert str(find_paths(things)[0]) == "module 'helper' .holders ['first'] [0]"


def test_a_frozen_heap_has_the_same_paths() -> None:
    root = str(File(__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", FROZEN, root], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
