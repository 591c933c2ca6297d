"""What holds a leak has a name that a person can use: each shape of holder once, all of them found by one walk."""

from __future__ import annotations

import asyncio
import functools
import logging
import queue
import re
import sys
import threading
import types
import unittest.mock
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import pytest
import torch

from lowtide.leakcheck.explaining.explain import Explanation, explain
from tests.waiting import HANG_S

Put = Callable[[Any, Any], object]
SHAPES: dict[str, tuple[str, Put]] = {}


class Thing:
    """What leaks."""

    def on(self, *args: object) -> None:
        """A callback."""


def held_by(name: str) -> Callable[[Put], Put]:
    """Registers a function that lets something of the module `helper` hold a thing; `name` is what that is called."""

    def register(put: Put) -> Put:
        SHAPES[put.__name__] = (name, put)
        return put

    return register


@held_by("helper.SHARED.forward.__self__")
def patched_method(helper: Any, thing: Any) -> None:
    helper.SHARED = torch.nn.Linear(1, 1)
    helper.SHARED.forward = thing.on


@held_by("helper.PARAMETER._backward_hooks[0].__self__")
def hook_of_a_parameter(helper: Any, thing: Any) -> None:
    helper.PARAMETER = torch.nn.Parameter(torch.ones(1))
    helper.PARAMETER.register_hook(thing.on)


@held_by("helper.ACCUMULATED._post_accumulate_grad_hooks[0].__self__")
def hook_after_the_gradient(helper: Any, thing: Any) -> None:
    helper.ACCUMULATED = torch.nn.Parameter(torch.ones(1))
    helper.ACCUMULATED.register_post_accumulate_grad_hook(thing.on)


@held_by("helper.BUSY._work_queue (queued item)")
def backlog_of_an_executor(helper: Any, thing: Any) -> Callable[[], None]:
    started, release = threading.Event(), threading.Event()
    helper.BUSY = ThreadPoolExecutor(1)

    def work() -> None:
        started.set()
        release.wait(HANG_S)

    helper.BUSY.submit(work)
    started.wait(HANG_S)
    helper.BUSY.submit(id, thing)

    def end() -> None:
        release.set()
        helper.BUSY.shutdown()

    return end


@held_by("helper.QUEUE (queued item)")
def queue_in_c(helper: Any, thing: Any) -> None:
    helper.QUEUE = queue.SimpleQueue()
    helper.QUEUE.put(("request", thing))


@held_by("helper.TASK.get_coro() f_locals['thing']")
def variable_of_a_task(helper: Any, thing: Any) -> Callable[[], None]:
    loop = asyncio.new_event_loop()

    async def serve(thing: object) -> None:
        await asyncio.sleep(3600)
        del thing

    async def start() -> None:
        helper.TASK = asyncio.ensure_future(serve(thing))
        await asyncio.sleep(0)

    loop.run_until_complete(start())

    def end() -> None:
        helper.TASK.cancel()
        loop.run_until_complete(asyncio.gather(helper.TASK, return_exceptions=True))
        loop.close()

    return end


@held_by("helper.ANSWERED._result['answer']")
def result_of_a_future(helper: Any, thing: Any) -> Callable[[], None]:
    return future(helper, "ANSWERED", lambda made: made.set_result({"answer": thing}))


@held_by("helper.AWAITED._callbacks[1][0].__self__")
def later_callback_of_a_future(helper: Any, thing: Any) -> Callable[[], None]:
    def add(made: asyncio.Future[Any]) -> None:
        made.add_done_callback(print)
        made.add_done_callback(thing.on)

    return future(helper, "AWAITED", add)


def future(helper: Any, name: str, use: Callable[[asyncio.Future[Any]], object]) -> Callable[[], None]:
    loop = asyncio.new_event_loop()
    made = loop.create_future()
    use(made)
    setattr(helper, name, made)
    return loop.close


@held_by("helper.SERVICE.__class__.cache['a']")
def attribute_of_the_class_of_an_instance(helper: Any, thing: Any) -> None:
    helper.SERVICE = type("Service", (), {"cache": {"a": thing}})()


# Until Python 3.10 the dict of an instance was made with it, and has the name.
@held_by("helper.CONFIG (computed name)" if sys.version_info >= (3, 11) else "helper.CONFIG.layer_0[0]")
def attribute_that_no_code_names(helper: Any, thing: Any) -> None:
    helper.CONFIG = Thing()
    setattr(helper.CONFIG, "".join(["lay", "er_", "0"]), [thing])


@held_by("helper.ITERATOR (inside list_iterator)")
def iterator_over_a_list(helper: Any, thing: Any) -> None:
    helper.ITERATOR = iter([None, thing])


@held_by("helper.MAPPED (inside map)")
def function_of_a_map(helper: Any, thing: Any) -> None:
    helper.MAPPED = map(thing.on, [1])


@held_by("helper.WEAK.data[<weakref to helper.Key>]")
def value_of_a_weak_dict(helper: Any, thing: Any) -> None:
    helper.KEY = type("Key", (), {"__module__": "helper"})()
    helper.WEAK = weakref.WeakKeyDictionary({helper.KEY: thing})


@held_by("helper.TYPES[<class helper.Model>]")
def value_under_a_class(helper: Any, thing: Any) -> None:
    helper.TYPES = {type("Model", (), {"__module__": "helper"}): thing}


@held_by("helper.MOCK.call_args[0][0]")
def argument_of_a_mocks_call(helper: Any, thing: Any) -> None:
    helper.MOCK = unittest.mock.MagicMock()
    helper.MOCK(thing)


@held_by("helper.PATCHED.engine.infer.return_value")
def result_of_a_mock(helper: Any, thing: Any) -> None:
    helper.PATCHED = unittest.mock.Mock()
    helper.PATCHED.engine.infer.return_value = thing


@held_by("logging.getLogger('lowtide.test.names').handlers[0]")
def handler_of_a_logger(helper: Any, thing: Any) -> Callable[[], None]:
    logger = logging.getLogger("lowtide.test.names")
    logger.addHandler(thing)

    def put_back() -> None:
        logger.removeHandler(thing)
        # It is no `logging.Handler`: a level that is set has loggers looked at.
        logger.setLevel(logging.NOTSET)

    return put_back


@held_by("helper.LOGGER.filters[0].__self__")
def filter_of_a_logger_that_has_a_name_here(helper: Any, thing: Any) -> Callable[[], None]:
    helper.LOGGER = logging.getLogger("lowtide.test.other_names")
    helper.LOGGER.addFilter(thing.on)
    return helper.LOGGER.filters.clear  # type: ignore[no-any-return]


@held_by("weakref.finalize(<set>, Thing.on).func.__self__")
def callback_of_a_finalizer(helper: Any, thing: Any) -> Callable[[], object]:
    helper.FINALIZED = set[int]()
    return weakref.finalize(helper.FINALIZED, thing.on).detach


@held_by("sys.modules['helper-plugin'].KEPT[0]")
def module_under_a_name_that_is_no_name(helper: Any, thing: Any) -> Callable[[], object]:
    return module(thing, "helper-plugin", "helper-plugin")


@held_by("sys.modules['helper_gone.part'].KEPT[0]")
def module_without_its_package(helper: Any, thing: Any) -> Callable[[], object]:
    return module(thing, "helper_gone.part", "helper_gone.part")


@held_by("helper_own_name.KEPT[0]")
def module_under_several_names(helper: Any, thing: Any) -> Callable[[], object]:
    return module(thing, "helper_own_name", "helper.alias", "helper_own_name")


def module(thing: object, own: str, *names: str) -> Callable[[], object]:
    made = types.ModuleType(own)
    made.KEPT = [thing]  # type: ignore[attr-defined]
    sys.modules.update(dict.fromkeys(names, made))

    def end() -> None:
        for name in names:
            del sys.modules[name]

    return end


@held_by("helper.PARTIAL.keywords['engine']")
def argument_of_a_partial(helper: Any, thing: Any) -> None:
    helper.PARTIAL = functools.partial(print, engine=thing)


@held_by("helper.CONTEXT['lowtide_test_names']")
def variable_of_a_context(helper: Any, thing: Any) -> None:
    from contextvars import ContextVar

    variable: ContextVar[object] = ContextVar("lowtide_test_names")
    helper.CONTEXT = copy_context()
    helper.CONTEXT.run(variable.set, thing)


# What pytest calls its own is told by the module that its class is from.


def of_pytest(name: str, **attributes: object) -> Any:
    made = type(name, (), {"__module__": "_pytest.made_up"})()
    vars(made).update(attributes)
    return made


@held_by("fixture 'served'.sessions[0]")
def value_of_a_fixture(helper: Any, thing: Any) -> None:
    served = types.SimpleNamespace(sessions=[thing])
    helper.loader = types.SimpleNamespace(session=of_pytest("Session", items=[None]))
    helper.loader.session.items.append(of_pytest("Function", funcargs={"served": served}))


@held_by("fixture 'alone'")
def fixture_that_is_the_leak(helper: Any, thing: Any) -> None:
    helper.alone = types.SimpleNamespace(item=of_pytest("Function", funcargs={"alone": thing}))


@held_by("fixture 'cached'.model")
def value_of_a_fixture_for_its_scope(helper: Any, thing: Any) -> None:
    cached = (types.SimpleNamespace(model=thing), None, None)
    helper.definitions = {"cached": (of_pytest("FixtureDef", argname="cached", cached_result=cached),)}


@held_by("fixture 'yielding' f_locals['model']")
def variable_of_a_fixture_that_yields(helper: Any, thing: Any) -> None:
    def yielding(model: object) -> Iterator[int]:
        yield 1
        del model

    generator = yielding(thing)
    next(generator)
    finalizers = [functools.partial(print, None, generator)]
    helper.yielding = [of_pytest("FixtureDef", argname="yielding", _finalizers=finalizers)]


@held_by("test parameter 'model'[0]")
def parameter_of_a_test(helper: Any, thing: Any) -> None:
    helper.callspec = of_pytest("CallSpec2", params={"model": [thing]})


@held_by("helper.PLUGIN.funcargs['served']")
def funcargs_of_somebody_else(helper: Any, thing: Any) -> None:
    helper.PLUGIN = types.SimpleNamespace(funcargs={"served": thing})


@pytest.fixture(scope="module")
def reported() -> Iterator[dict[str, Explanation]]:
    helper: Any = types.ModuleType("helper")
    sys.modules["helper"] = helper
    things = [Thing() for _ in SHAPES]
    ends = [put(helper, thing) for (_, put), thing in zip(SHAPES.values(), things, strict=True)]
    found = explain(things, ignore={id(things)})
    yield dict(zip(SHAPES, found, strict=True))
    for end in ends:
        if callable(end):
            end()
    del sys.modules["helper"]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_holder_has_a_name_that_a_person_can_use(shape: str, reported: dict[str, Explanation]) -> None:
    # torch numbers all hooks of a process.
    assert re.sub(r"_hooks\[\d+\]", "_hooks[0]", reported[shape].holder) == SHAPES[shape][0]


def test_no_path_leads_through_the_insides_of_the_test_runner(reported: dict[str, Explanation]) -> None:
    shown = [reported[shape].path for shape in SHAPES if SHAPES[shape][0].startswith(("fixture", "test parameter"))]
    assert len(shown) == 5
    assert all(not hop.type.startswith("_pytest") for path in shown for hop in path)
    assert [path[0].edge for path in shown] == [
        "fixture 'served'",
        "fixture 'alone'",
        "fixture 'cached'",
        "fixture 'yielding'",
        "test parameter 'model'",
    ]


def test_what_is_shown_has_the_suspects_and_what_they_retain_beside_the_right_hops(
    reported: dict[str, Explanation],
) -> None:
    for explanation in reported.values():
        assert any(hop.suspect for hop in explanation.path[1:])
        assert len(explanation.freed) <= len(explanation.path)
    # The first hop behind the fixture, and what would be free without it: the thing at its place.
    place = list(SHAPES).index("value_of_a_fixture")
    fixture = reported["value_of_a_fixture"]
    assert [hop.edge for hop in fixture.path] == ["fixture 'served'", ".sessions", "[0]"]
    assert fixture.freed[1:] == (frozenset({place}), frozenset({place}))


def test_a_fingerprint_does_not_depend_on_the_plugin_at_which_a_path_begins(reported: dict[str, Explanation]) -> None:
    assert reported["value_of_a_fixture"].suspects[0] == "fixture 'served' .sessions"


def test_what_has_no_expression_is_cut_in_words_only(reported: dict[str, Explanation]) -> None:
    nameless = {
        shape for shape, (name, _) in SHAPES.items() if name.startswith(("fixture", "test parameter", "weakref"))
    }
    cuts = {shape: cut for shape in nameless if (cut := reported[shape].cut) is not None}
    assert {shape for shape, cut in cuts.items() if cut.is_code} == set()


def test_what_the_test_runner_itself_keeps_is_not_cut(reported: dict[str, Explanation]) -> None:
    assert reported["fixture_that_is_the_leak"].cut is None
