"""Environment variables: what a library sets for itself is told from what the project, or its test, sets."""

from __future__ import annotations

import logging
import os
import sys
import sysconfig
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from lowtide.leakcheck.resources.settings import ABSENT, EnvironmentSetters, SettingChange, changes_between, put_back

NAME = "os.environ['LOWTIDE_SETTER']"


@pytest.fixture
def setters() -> Iterator[EnvironmentSetters]:
    setters = EnvironmentSetters()
    with mock.patch.dict(os.environ):
        setters.start()
        yield setters
        setters.stop()


def as_library(code: str) -> dict[str, Any]:
    """Run it as an installed library's code, and return its names."""
    names: dict[str, Any] = {"__name__": "library", "logging": logging, "os": os}
    exec(compile(code, f"{sysconfig.get_path('purelib')}/library/__init__.py", "exec"), names)
    return names


def test_what_a_test_sets_is_its_own_with_the_line(setters: EnvironmentSetters) -> None:
    os.environ["LOWTIDE_SETTER"] = "1"
    assert not setters.is_librarys(NAME)
    assert setters.place_of(NAME).startswith(f"set in {test_what_a_test_sets_is_its_own_with_the_line.__name__}, test_")


def test_what_a_library_sets_is_the_library_s(setters: EnvironmentSetters) -> None:
    as_library("os.environ.setdefault('LOWTIDE_SETTER', '1')")
    assert setters.is_librarys(NAME)
    assert setters.place_of(NAME) == ""


def test_who_deletes_it_is_noted_too(setters: EnvironmentSetters) -> None:
    os.environ["LOWTIDE_SETTER"] = "1"
    as_library("os.environ.pop('LOWTIDE_SETTER')")
    assert setters.is_librarys(NAME)
    os.environ["LOWTIDE_SETTER"] = "1"
    del os.environ["LOWTIDE_SETTER"]
    assert not setters.is_librarys(NAME)
    assert setters.place_of(NAME).startswith(f"deleted in {test_who_deletes_it_is_noted_too.__name__}, test_")


def test_who_sets_it_last_has_set_it(setters: EnvironmentSetters) -> None:
    as_library("os.environ['LOWTIDE_SETTER'] = '1'")
    os.environ["LOWTIDE_SETTER"] = "2"
    assert not setters.is_librarys(NAME)
    as_library("os.environ['LOWTIDE_SETTER'] = '1'")
    assert setters.is_librarys(NAME)


@pytest.mark.parametrize(
    ("before", "now", "communicates", "is_own"),
    [
        ("1024", "1760", True, True),
        ("1024", "1760", False, False),
        ("1760", "1024", True, False),
        (ABSENT, "1760", True, False),
    ],
)
def test_room_for_stacks_is_a_librarys_where_cards_began_to_communicate(
    before: str, now: str, communicates: bool, is_own: bool
) -> None:
    change = SettingChange("the card's cudaLimitStackSize", before, now)
    assert EnvironmentSetters(lambda: communicates).is_own_of_library(change) == is_own
    assert not EnvironmentSetters().is_own_of_library(change)


@pytest.mark.parametrize("found", ["nothing", "its own", "the user's"])
def test_a_library_may_replace_what_it_has_set_itself(setters: EnvironmentSetters, found: str) -> None:
    """As an engine names each of its lives anew."""
    if found == "the user's":
        os.environ["LOWTIDE_SETTER"] = "0"
    elif found == "its own":
        as_library("os.environ['LOWTIDE_SETTER'] = '0'")
    as_library("os.environ['LOWTIDE_SETTER'] = '1'")
    assert setters.is_own_of_library(SettingChange(NAME, "0", "1")) == (found != "the user's")


@pytest.mark.parametrize(
    ("logger", "maker", "beside", "is_own"),
    [
        ("library.error", "library", 0, True),
        # Each use adds one more.
        ("library.error", "library", 1, False),
        ("library.error", "test", 0, False),
        ("app", "library", 0, False),
    ],
)
def test_a_librarys_first_handler_of_its_own_logger_is_its_own(
    setters: EnvironmentSetters, logger: str, maker: str, beside: int, is_own: bool
) -> None:
    code = "handler = logging.StreamHandler()"
    names = as_library(code) if maker == "library" else {"handler": logging.StreamHandler()}
    name = f"handler logging.StreamHandler of logging.getLogger({logger!r}) at {id(names['handler']):#x}"
    assert setters.is_own_of_library(SettingChange(name, ABSENT, "there", beside)) == is_own


@pytest.mark.parametrize("then", ["renewed", "removed", "doubled"])
def test_a_library_may_put_another_handler_in_the_place_of_its_own(setters: EnvironmentSetters, then: str) -> None:
    handlers = as_library("handlers = [logging.StreamHandler(), logging.StreamHandler()]")["handlers"]
    kind = "handler logging.StreamHandler of logging.getLogger('library.error') at "
    first, second = (f"{kind}{id(handler):#x}" for handler in handlers)
    now = {"renewed": (second,), "removed": (), "doubled": (first, second)}[then]
    changes = changes_between({first: "there"}, dict.fromkeys(now, "there"))
    left = {"renewed": [], "removed": [first], "doubled": [second]}[then]
    assert [change.name for change in setters.without_own_of_libraries(changes)] == left


def test_what_python_or_pytest_sets_is_of_who_asked_for_it(setters: EnvironmentSetters) -> None:
    mock.patch.dict(os.environ, {"LOWTIDE_SETTER": "1"}).start()
    assert not setters.is_librarys(NAME)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOWTIDE_SETTER", "2")
        assert not setters.is_librarys(NAME)
    mock.patch.stopall()


def test_it_stands_in_for_putenv_meanwhile_only() -> None:
    before = os.putenv, os.unsetenv
    setters = EnvironmentSetters()
    for _ in range(2):
        setters.start()
    assert before[0] is not os.putenv
    assert before[1] is not os.unsetenv
    for _ in range(2):
        setters.stop()
    assert before == (os.putenv, os.unsetenv)


@pytest.mark.parametrize("times", [0, 1, 3])
def test_a_folder_that_was_added_to_the_path_is_taken_out_however_often_it_is_there(
    times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later tests may have added it again, which is no other change."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    others = [*sys.path]
    for place in range(times):
        sys.path.insert(2 * place, "lowtide-tests")
    put_back([SettingChange("sys.path entry 'lowtide-tests'", ABSENT, "there")])
    assert sys.path == others
