"""A class is found by its type's name where its module has it, whatever else lies on the way."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from lowtide.leakcheck.explaining.expressions import class_named, ending_of


class Hostile:
    @property
    def __dict__(self) -> dict[str, object]:  # type: ignore[override]
        raise AssertionError("the program's code ran")


class Outer:
    class Inner:
        def stop(self) -> None: ...


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("program_of_endings")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    vars(module).update(Outer=Outer, number=5, hostile=Hostile())
    return module


def test_a_class_is_found_by_its_name(program: ModuleType) -> None:
    assert class_named("program_of_endings.Outer.Inner") is Outer.Inner
    assert ending_of(class_named("program_of_endings.Outer.Inner")) == "stop()"


@pytest.mark.parametrize("name", ["number.<locals>.Engine", "hostile.<locals>.Engine", "absent.Engine", "number", ""])
def test_what_is_no_class_is_none(program: ModuleType, name: str) -> None:
    assert class_named(f"program_of_endings.{name}") is None
    assert class_named(name) is None
