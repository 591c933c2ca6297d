"""What pytest knows of a test and holds of it: markers, fixtures of a wider scope, and what it must let go of.

The fixtures are owners of memory; what pytest keeps alive after a test, and does not need any more, is no leak of it.
"""

from __future__ import annotations

import builtins
import inspect
import operator
import re
import sys as sys_module
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR, CO_OPTIMIZED, getattr_static
from pathlib import PurePath
from types import FrameType, FunctionType, MethodType, ModuleType, TracebackType
from typing import Any

import msgspec
import pytest

from lowtide.leakcheck.judging.owners import Owner
from lowtide.probes.objects.described import is_library
from lowtide.probes.objects.foreign import (
    is_a,
    module_of_class,
    mro_of,
    namespace_of,
    qualname_of,
    traceback_of,
    with_errors_behind,
)
from lowtide.probes.objects.listed import frame_locals
from lowtide.probes.originals import gc, loaded, sys, weakref
from lowtide.pytest_plugin.settings import usage_error
from lowtide.reports.sizes import parse_bytes

# pytest wraps what unittest and xunit-style classes and modules set up in fixtures of its own.
_WRAPPED = re.compile(r"_(?:xunit|unittest)_(setup_module|setup_class|setUpModule|setUpClass|setUp_class)_fixture_(.*)")

_MOST_OWN = 5000
"""Objects that are asked what they refer to, for who has a test class's instance: some milliseconds."""


class TestSettings(msgspec.Struct, frozen=True):
    """What the markers of one test say.

    Attributes:
        tolerance: bytes it may leave; None: as the run says.
        cycles: bytes from which on it may leave nothing to the collector; None: as the run says.
        peak: bytes by which memory may rise while it runs; None: by any.
        excused: why it is not judged; empty: it is.
    """

    __test__ = False

    tolerance: int | None = None
    cycles: int | None = None
    peak: int | None = None
    excused: str = ""


def read_markers(item: pytest.Item) -> TestSettings:
    """Return the markers of a test; of several that give one argument the nearest counts.

    Raises:
        pytest.UsageError: a marker has arguments that make no sense; the message names the test.
    """
    sizes: dict[str, int] = {}
    for marker in item.iter_markers("leakcheck"):
        if marker.args or not marker.kwargs or set(marker.kwargs) - {"tolerance", "cycles", "peak"}:
            known = "arguments tolerance=SIZE, cycles=SIZE and peak=SIZE, such as tolerance='1MiB'"
            raise usage_error(f"{item.nodeid}: @pytest.mark.leakcheck takes {known}")
        for name, size in marker.kwargs.items():
            try:
                sizes.setdefault(name, parse_bytes(size))
            except ValueError as error:
                raise usage_error(f"{item.nodeid}: @pytest.mark.leakcheck({name}=…): {error}") from None
    excused = excuse_of(item)
    if excused is None:
        raise usage_error(f"{item.nodeid}: @pytest.mark.no_leakcheck needs one argument, reason='why it is not judged'")
    return TestSettings(**sizes, excused=excused)


def excuse_of(node: pytest.Item | pytest.Collector) -> str | None:
    """Why a test, or all tests of a class or module, are not judged; empty: they are; None: there is no good reason."""
    excuse = node.get_closest_marker("no_leakcheck")
    if excuse is None:
        return ""
    reason = excuse.kwargs.get("reason", excuse.args[0] if len(excuse.args) == 1 else None)
    extra = len(excuse.args) > 1 or set(excuse.kwargs) - {"reason"} or (excuse.args and excuse.kwargs)
    return reason if not extra and isinstance(reason, str) and reason.strip() else None


def fixture_name(fixture: pytest.FixtureDef[Any]) -> str:
    """Return `module fixture 'engine'`, or `setup_module of tests.test_it`."""
    wrapped = _WRAPPED.fullmatch(fixture.argname)
    if wrapped is not None:
        return f"{wrapped[1]} of {wrapped[2]}"
    return f"{fixture.scope} fixture '{fixture.argname}'"


def has_own_setup(item: pytest.Item) -> bool:
    """Return whether code of the project may run in a test's setup: in a fixture for it alone, and of no plugin."""
    info = getattr(item, "_fixtureinfo", None)
    if info is None:
        return True
    return any(
        fixtures[-1].scope == "function" and not _is_librarys(fixtures[-1].func)
        for fixtures in info.name2fixturedefs.values()
    )


def has_own_teardown(item: pytest.Item, nextitem: pytest.Item | None, *, but: object) -> bool:
    """Return whether code of the project may run in a test's teardown: nothing has ended so far.

    That is a finalizer, of a fixture for it alone or of one that ends with it, or a hook; and of no installed plugin.

    Args:
        item: the test, which has run.
        nextitem: the one that follows: what both have in common lives on.
        but: the plugin that asks.
    """
    if nextitem is None or nextitem.parent is not item.parent:
        return True
    finalizers, _ = item.session._setupstate.stack.get(item, ((None,), None))
    hooks = (hook.function for hook in item.ihook.pytest_runtest_teardown.get_hookimpls() if hook.plugin is not but)
    return not (all(map(_is_pytests, finalizers)) and all(map(_is_librarys, hooks)))


def _is_pytests(finalizer: Any) -> bool:
    """Return whether a finalizer of a test ends what a library has set up, or nothing."""
    if type(finalizer) is MethodType:
        return finalizer.__func__ is pytest.Item.teardown
    fixture = getattr(getattr(finalizer, "func", None), "__self__", None)
    return isinstance(fixture, pytest.FixtureDef) and _is_librarys(fixture.func)


def _is_librarys(function: Callable[..., object]) -> bool:
    if type(function) is MethodType:
        function = function.__func__
    if hasattr(function, "__wrapped__"):
        function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    return code is not None and is_library(code.co_filename)


class FixtureOwner(Owner):
    """A fixture from its setup to the end of its scope.

    Args:
        fixture: pytest's definition of it.
        request: with which it is set up; only the class and module it is for are kept, weakly.

    Attributes:
        excused: why what it leaves is not judged, as the class or module says for which it is; empty: it is.
    """

    def __init__(self, fixture: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> None:
        name = fixture_name(fixture)
        super().__init__(name, self._roots, stage=name if _WRAPPED.fullmatch(fixture.argname) else None)
        self.where = _place(fixture)
        # Of a fixture for one test `node` is that test, which is judged by its own markers.
        self.excused = excuse_of(request.node) or "" if fixture.scope != "function" else ""
        self._fixture = weakref.ref(fixture)
        places = [getattr(request, "cls", None)] if fixture.scope == "class" else []
        places.append(getattr(request, "module", None) if fixture.scope in ("class", "module") else None)
        self._places = [weakref.ref(place) for place in places if place is not None]
        self._bound: list[tuple[weakref.ref[Any], str]] = []
        self._before = [{name: id(value) for name, value in vars(place()).items()} for place in self._places]

    def was_set_up(self) -> None:
        """Note the names that its setup bound in its class and module: what is there belongs to it too."""
        for reference, before in zip(self._places, self._before, strict=True):
            place = reference()
            if place is not None:
                names = [name for name, value in vars(place).items() if before.get(name) != id(value)]
                self._bound += [(reference, name) for name in names]
        self._before = []

    def named(self) -> Iterator[tuple[str, object]]:
        """Yield what the fixture returned, by the fixture's name."""
        fixture = self._fixture()
        if fixture is not None and fixture.cached_result is not None and gc.is_tracked(fixture.cached_result[0]):
            yield self.name, fixture.cached_result[0]

    def _roots(self) -> Iterator[object]:
        fixture = self._fixture()
        if fixture is not None:
            if fixture.cached_result is not None:
                yield fixture.cached_result[0]
            # The generator of a fixture that yields, with its locals, is in what will finish it.
            yield from _finalizers(fixture)
        for reference, name in self._bound:
            place = reference()
            if place is not None and name in vars(place):
                yield vars(place)[name]


class WiderFixtures:
    """The fixtures of a wider scope than one test that are set up, and those that have ended and are not judged yet."""

    def __init__(self) -> None:
        self._owners: dict[int, FixtureOwner] = {}
        self._ended: list[FixtureOwner] = []

    def add(self, fixture: pytest.FixtureDef[Any], owner: FixtureOwner) -> None:
        """Note that it is set up, or has failed to be."""
        self._owners[id(fixture)] = owner

    def end(self, fixture: pytest.FixtureDef[Any]) -> None:
        """Note that its scope has ended."""
        owner = self._owners.pop(id(fixture), None)
        if owner is not None:
            self._ended.append(owner)

    def take_ended(self) -> list[FixtureOwner]:
        """Return those that have ended since this was last called."""
        ended, self._ended = self._ended, []
        return ended

    @property
    def living(self) -> list[FixtureOwner]:
        """Those that are set up."""
        return list(self._owners.values())

    def used_by(self, item: Any) -> list[Owner]:
        """Return those that a test uses, by whatever way it asked for them."""
        fixtures = getattr(getattr(item, "_request", None), "_fixture_defs", {})
        return [self._owners[id(fixture)] for fixture in fixtures.values() if id(fixture) in self._owners]


def _place(fixture: pytest.FixtureDef[Any]) -> str:
    """Return the file that defines it, from the rootdir; the name alone of a plugin's and of the root's conftest.py."""
    code = getattr(inspect.unwrap(fixture.func), "__code__", None)
    return fixture.baseid or ("a plugin" if code is None else PurePath(code.co_filename).name)


def _finalizers(fixture: pytest.FixtureDef[Any]) -> list[Callable[[], object]]:
    found = getattr(fixture, "_finalizers", [])
    # Those of pytest itself lead to other fixtures, which depend on this one.
    return [call for call in found if getattr(getattr(call, "func", call), "__self__", None) is None]


def release_test(item: pytest.Item, *, owns_protocol: bool) -> None:
    """Drop what pytest would drop by itself a little later: at the next test, or never while the session lasts.

    Args:
        item: the test.
        owns_protocol: whether no other plugin runs it, which may still need what it has noted.
    """
    # The last exception, with the locals of all its frames; pytest deletes it when the next test is called.
    for name in ("last_exc", "last_type", "last_value", "last_traceback"):
        if hasattr(sys_module, name):
            delattr(sys_module, name)
    if isinstance(item, pytest.DoctestItem):
        # The value of the last example that showed one, as at a prompt.
        vars(builtins).pop("_", None)
    funcargs = getattr(item, "funcargs", None)
    if funcargs:
        funcargs.clear()
    if isinstance(item, pytest.Function) and item.cls is not None:
        # The test class's instance, with whatever the test put on `self`; pytest makes another one if it is asked for,
        # as by a plugin that runs the test again: not if it finds None.
        _forget_instance(item)
        item._obj = None
        vars(item).pop("_instance", None)
    if owns_protocol:
        # Where it is installed and runs nothing again, pytest-rerunfailures notes what every failed test raised.
        vars(item).pop("_rerun_condition_excinfos", None)
    # A TestCase keeps here what it could not report in time.
    vars(item).pop("_excinfo", None)
    logging = item.config.pluginmanager.get_plugin("logging-plugin")
    if logging is not None:
        # Records of the teardown, whose arguments may be anything, stay until the next setup.
        for handler in (logging.caplog_handler, logging.report_handler):
            handler.reset()


def _forget_instance(item: pytest.Function) -> None:
    """Have hypothesis forget the instance that it called a `@given` method on last.

    It keeps that to see that the next call is on the same one, which it is not: pytest makes another.
    """
    kind = getattr(loaded("hypothesis.utils.threading"), "ThreadLocal", None)
    function = None if kind is None else getattr_static(item.cls, item.originalname, None)
    if not getattr(function, "is_hypothesis_test", False):
        return
    # Hypothesis wraps what it calls in a function with the test's arguments.
    for held in _closures(function, depth=2):
        if type(held) is kind:
            defaults = vars(held).get("_ThreadLocal__kwargs", {})
            if "prev_self" in defaults:
                held.prev_self = defaults["prev_self"]()


def _closures(function: object, depth: int) -> Iterator[Any]:
    """Yield what a function's closure holds, and those of the functions in it."""
    if type(function) is not FunctionType:
        return
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # an empty cell
            yield cell.cell_contents
            if depth > 1:
                yield from _closures(cell.cell_contents, depth - 1)


def clear_unreported(config: pytest.Config) -> None:
    """Drop the local variables of what was raised in threads and finalizers, and pytest has still to report.

    That is reported with the next phase of a test; what is printed of it is text by then.
    """
    for module, name in (("threadexception", "thread_exceptions"), ("unraisableexception", "unraisable_exceptions")):
        key = getattr(sys.modules.get(f"_pytest.{module}"), name, None)
        noted = None if key is None else config.stash.get(key, None)
        if noted:
            clear_tracebacks(
                [error for error in (getattr(entry, "exc_value", entry) for entry in list(noted)) if error is not None]
            )


def empty_instance(held: Callable[[], object]) -> None:
    """Empty the test class's instance where nothing has it but the function that runs the test.

    As `flaky` does, which asks it for its class and keeps it until its test has run for the last time. Whoever else
    has it, and so what the test put on `self`, is to be judged; what only its own attributes lead to is nobody else. It
    may be asked again, once garbage has been collected that has it, too.

    Args:
        held: gives the instance while there is one, as a weak reference does.
    """
    instance = held()
    if instance is None or not hasattr(instance, "__dict__"):
        return
    # 2: this variable's reference, and the argument's of who counts.
    references = sys.getrefcount(instance) - 2
    variables = 0
    for frame in _frames(sys._getframe(1)):
        variables += sum(map(partial(operator.is_, instance), frame_locals(frame)))
    # Counting what it alone has takes long.
    if variables and (variables == references or variables == references - _own_references(instance)):
        _empty(vars(instance), _finalizers_class(type(instance)))


def _own_references(instance: object) -> int:
    """Count the references to an instance from what it alone has: its method that it gave to an engine of its own.

    As the collector finds garbage: what has no more references than the objects here have to it is the instance's own,
    unless what is not leads to it. Only the nearest objects are asked; what they do not explain is somebody else's.
    """
    found, places, edges = [instance], {id(instance): 0}, list[list[int]]()
    inner = Counter[int]()
    while len(edges) < min(len(found), _MOST_OWN):
        here: list[int] = []
        for item in gc.get_referents(found[len(edges)]):
            if gc.is_tracked(item) and not _is_everybodys(item):
                here.append(places.setdefault(id(item), len(found)))
                if here[-1] == len(found):
                    found.append(item)
            del item
        inner.update(here)
        edges.append(here)
    waiting, others = list(range(1, len(found))), set[int]()
    while waiting:
        place = waiting.pop()
        # 2: the list's reference, and the argument's of who counts.
        if place and place not in others and sys.getrefcount(found[place]) - 2 > inner[place]:
            others.add(place)
            leads_to = edges[place] if place < len(edges) else []
            inner.subtract(leads_to)
            waiting += leads_to
    return inner[0]


def _is_everybodys(item: object) -> bool:
    """Return whether an object is there for all of a program: a module, its namespace, or a class of it."""
    if is_a(item, type):
        return "<locals>" not in qualname_of(item)
    return type(item) is ModuleType or (type(item) is dict and "__builtins__" in item)


def _empty(attributes: dict[str, Any], finalizers_class: str) -> None:
    """Give a finalizer what it needs: unittest's its own attributes, one of the program's whatever there is."""
    if not finalizers_class:
        attributes.clear()
    elif finalizers_class.partition(".")[0] == "unittest":
        for name in [name for name in attributes if not name.startswith("_")]:
            del attributes[name]


def _finalizers_class(cls: type) -> str:
    """Return the module of the class that has the `__del__` of a class's instances; empty if there is none."""
    return next((module_of_class(base) or "?" for base in mro_of(cls) if "__del__" in namespace_of(base)), "")


def errors_of_parameters(item: pytest.Item) -> Iterator[BaseException]:
    """Yield what was raised within a `pytest.raises` that is a parameter's value, and so there for the session."""
    callspec = getattr(item, "callspec", None)
    for value in () if callspec is None else callspec.params.values():
        if module_of_class(type(value)).startswith("_pytest."):
            raised = getattr(getattr(value, "excinfo", None), "_excinfo", None)
            if raised is not None:
                yield raised[1]


def clear_tracebacks(errors: Iterable[BaseException]) -> None:
    """Drop the local variables of the frames that some exceptions, and those behind them, have passed through.

    Whoever keeps an exception of a test that is over (pytest-rerunfailures, a log record, a cycle) keeps its frames,
    and those the test's local variables; the exception and its lines stay readable.
    """
    for error in with_errors_behind(errors):
        trace = traceback_of(error)
        if trace is not None:
            traceback.clear_frames(trace)
            _clear_callers(trace)
            _clear_views(trace)


def _clear_callers(trace: TracebackType) -> None:
    """Clear the frames that are over and that a traceback's own frames were called from, as far as they are not in it.

    Where an exception was caught half-way (unittest catches it in the method that runs the test), the frame that caught
    it is still there, as the caller of one that is in the traceback.
    """
    running = _running_frames()
    step: TracebackType | None = trace
    while step is not None:
        frame = step.tb_frame.f_back
        while frame is not None and id(frame) not in running:
            # Clearing a generator would end it.
            if not frame.f_code.co_flags & (CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR):
                with suppress(RuntimeError):  # it runs, in another thread
                    frame.clear()
                    _clear_view(frame)
            frame = frame.f_back
        step = step.tb_next


def _clear_views(trace: TracebackType) -> None:
    """Empty the dicts that reading `f_locals` left in frames that are over: up to Python 3.12 they are not cleared."""
    running = _running_frames()
    step: TracebackType | None = trace
    while step is not None:
        if id(step.tb_frame) not in running:
            _clear_view(step.tb_frame)
        step = step.tb_next


def _clear_view(frame: FrameType) -> None:
    # The namespace of a module or a class is no copy.
    if sys.version_info < (3, 13) and frame.f_code.co_flags & CO_OPTIMIZED:
        frame.f_locals.clear()


def _running_frames() -> set[int]:
    """Return the identities of the frames from here down to where the thread began."""
    return set(map(id, _frames(sys._getframe())))


def _frames(innermost: FrameType) -> Iterator[FrameType]:
    """Yield a frame, and those that it was called from."""
    frame: FrameType | None = innermost
    while frame is not None:
        yield frame
        frame = frame.f_back


def release_warnings() -> None:
    """Drop the objects that recorded warnings are about: a ResourceWarning about an engine holds the engine.

    The recorder is a list whose `append` stands in for showing the warning, as `warnings.catch_warnings(record=True)`
    arranges it. What it says of each warning stays: that is shown at the end.
    """
    recorded = getattr(getattr(warnings, "_showwarnmsg_impl", None), "__self__", None)
    if type(recorded) is list:
        for message in recorded:
            if isinstance(message, warnings.WarningMessage):
                message.source = None
                message.message = _as_text(message.message)


def _as_text(warning: Warning | str) -> Warning | str:
    """Return a warning that says the same and holds nothing else."""
    if not isinstance(warning, Warning) or _holds_text_alone(warning):
        return warning
    kind, text = type(warning), str(warning)
    # One that puts its text together from its attributes cannot do so without.
    kind = kind if kind.__str__ is Warning.__str__ else UserWarning
    said = Warning.__new__(kind, text)
    said.args = (text,)
    return said


def _holds_text_alone(warning: Warning) -> bool:
    behind = (warning.__cause__, warning.__context__, warning.__traceback__)
    is_plain = all(type(arg) in (str, int, float, bool, type(None)) for arg in warning.args)
    return is_plain and not vars(warning) and behind == (None, None, None)


def hints(item: pytest.Item) -> Iterator[tuple[str, object]]:
    """Yield what pytest keeps of a test for the whole session by design, and what to say about a leak there."""
    callspec = getattr(item, "callspec", None)
    if callspec is not None:
        yield (
            "pytest keeps parametrize's values for the whole session: pass a factory, make the object in the test",
            list(callspec.params.values()),
        )
    yield (
        "pytest keeps what record_property was given for the whole session: give it strings and numbers only",
        [value for _, value in item.user_properties],
    )
    for mark in item.iter_markers():
        if mark.name != "parametrize":
            yield (
                f"pytest keeps the arguments of @pytest.mark.{mark.name} for the whole session: pass a factory",
                [*mark.args, *mark.kwargs.values()],
            )
