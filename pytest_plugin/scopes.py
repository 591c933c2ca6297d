"""What pytest knows of a test: its markers, and its fixtures of a wider scope, as owners of memory."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import pytest

from lowtide.leakcheck.judging.owners import Owner
from lowtide.probes.objects.described import is_library
from lowtide.probes.originals import gc, weakref
from lowtide.pytest_plugin.settings import usage_error
from lowtide.reports.sizes import parse_bytes

# pytest wraps what unittest and xunit-style classes and modules set up in fixtures of its own.
_WRAPPED = re.compile(r"_(?:xunit|unittest)_(setup_module|setup_class|setUpModule|setUpClass|setUp_class)_fixture_(.*)")


@dataclass(frozen=True)
class TestSettings:
    """What the markers of one test say.

    Attributes:
        tolerance: bytes it may leave; None: as the run says.
        cycles: bytes from which on it may leave nothing to the collector; None: as the run says.
        excused: why it is not judged; empty: it is.
    """

    __test__ = False

    tolerance: int | None = None
    cycles: int | None = None
    excused: str = ""


def read_markers(item: pytest.Item) -> TestSettings:
    """The nearest markers of a test.

    Raises:
        pytest.UsageError: a marker has arguments that make no sense; the message names the test.
    """
    sizes: dict[str, int] = {}
    marker = item.get_closest_marker("leakcheck")
    if marker is not None:
        if marker.args or not marker.kwargs or set(marker.kwargs) - {"tolerance", "cycles"}:
            known = "arguments tolerance=SIZE and cycles=SIZE, such as tolerance='1MiB'"
            raise usage_error(f"{item.nodeid}: @pytest.mark.leakcheck takes {known}")
        for name, size in marker.kwargs.items():
            try:
                sizes[name] = parse_bytes(size)
            except ValueError as error:
                raise usage_error(f"{item.nodeid}: @pytest.mark.leakcheck({name}=…): {error}") from None
    excused = excuse_of(item)
    if excused is None:
        raise usage_error(f"{item.nodeid}: @pytest.mark.no_leakcheck needs one argument, reason='why it is not judged'")
    return TestSettings(sizes.get("tolerance"), sizes.get("cycles"), excused)


def excuse_of(node: pytest.Item | pytest.Collector) -> str | None:
    """Why a test, or all tests of a class or module, are not judged; empty: they are; None: there is no good reason."""
    excuse = node.get_closest_marker("no_leakcheck")
    if excuse is None:
        return ""
    reason = excuse.kwargs.get("reason", excuse.args[0] if len(excuse.args) == 1 else None)
    extra = len(excuse.args) > 1 or set(excuse.kwargs) - {"reason"} or (excuse.args and excuse.kwargs)
    return reason if not extra and isinstance(reason, str) and reason.strip() else None


def fixture_name(fixture: pytest.FixtureDef[Any]) -> str:
    """`module fixture 'engine'`, or `setup_module of tests.test_it`."""
    wrapped = _WRAPPED.fullmatch(fixture.argname)
    if wrapped is not None:
        return f"{wrapped[1]} of {wrapped[2]}"
    return f"{fixture.scope} fixture '{fixture.argname}'"


def has_own_setup(item: pytest.Item) -> bool:
    """Whether code of the project may run in a test's setup: in a fixture for it alone, and of no installed plugin."""
    info = getattr(item, "_fixtureinfo", None)
    if info is None:
        return True
    for fixtures in info.name2fixturedefs.values():
        if fixtures[-1].scope == "function":
            code = getattr(inspect.unwrap(fixtures[-1].func), "__code__", None)
            if code is None or not is_library(code.co_filename):
                return True
    return False


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
        """What the fixture returned, by the fixture's name."""
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

    @property
    def living(self) -> list[FixtureOwner]:
        """Those that are set up."""
        return list(self._owners.values())

    def add(self, fixture: pytest.FixtureDef[Any], owner: FixtureOwner) -> None:
        """It is set up, or has failed to be."""
        self._owners[id(fixture)] = owner

    def end(self, fixture: pytest.FixtureDef[Any]) -> None:
        """Its scope has ended."""
        owner = self._owners.pop(id(fixture), None)
        if owner is not None:
            self._ended.append(owner)

    def take_ended(self) -> list[FixtureOwner]:
        """Those that have ended since this was last called."""
        ended, self._ended = self._ended, []
        return ended

    def used_by(self, item: Any) -> list[Owner]:
        """Those that a test uses, by whatever way it asked for them."""
        fixtures = getattr(getattr(item, "_request", None), "_fixture_defs", {})
        return [self._owners[id(fixture)] for fixture in fixtures.values() if id(fixture) in self._owners]


def _place(fixture: pytest.FixtureDef[Any]) -> str:
    """The file that defines it, from the rootdir; of a plugin's, and of the root's conftest.py, the name only."""
    code = getattr(inspect.unwrap(fixture.func), "__code__", None)
    return fixture.baseid or ("a plugin" if code is None else PurePath(code.co_filename).name)


def _finalizers(fixture: pytest.FixtureDef[Any]) -> list[Callable[[], object]]:
    found = getattr(fixture, "_finalizers", [])
    # Those of pytest itself lead to other fixtures, which depend on this one.
    return [call for call in found if getattr(getattr(call, "func", call), "__self__", None) is None]
