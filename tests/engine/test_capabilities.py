"""What a callable takes, and that asking keeps nothing alive."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from lowtide.engine.errors import ConfigError
from lowtide.engine.runner import supports_kw


def plain(first: int, /, second: int, *, third: int = 0) -> None: ...


def anything(**options: int) -> None: ...


class Model:
    def forward(self, tokens: int, *, workspace: int) -> None: ...

    def __call__(self, tokens: int) -> None: ...

    @classmethod
    def load(cls, folder: str) -> None: ...

    @staticmethod
    def check(folder: str) -> None: ...


@pytest.mark.parametrize(
    ("function", "name", "expected"),
    [
        (plain, "second", True),
        (plain, "third", True),
        (plain, "first", False),
        (plain, "fourth", False),
        (anything, "fourth", True),
        (Model().forward, "workspace", True),
        (Model().forward, "self", False),
        (Model.forward, "self", True),
        (Model(), "tokens", True),
        (Model(), "self", False),
        (Model.load, "folder", True),
        (Model.load, "cls", False),
        (Model.check, "folder", True),
        (functools.partial(Model().forward, 1), "tokens", False),
        (functools.partial(Model().forward, 1), "workspace", True),
        (lambda tokens: tokens, "tokens", True),
    ],
)
def test_what_it_takes(function: Callable[..., Any], name: str, expected: bool) -> None:
    assert supports_kw(function, name) is expected
    assert supports_kw(function, name) is expected


def closure_over(model: Model) -> Callable[..., Any]:
    def forward(tokens: int) -> None:
        model(tokens)

    return forward


def with_a_default(model: Model) -> Callable[..., Any]:
    def forward(tokens: Model = model) -> None: ...

    model.step = forward  # type: ignore[attr-defined]
    return forward


@pytest.mark.parametrize(
    "make",
    [
        lambda model: model.forward,
        lambda model: model,
        lambda model: functools.partial(model.forward, 1),
        lambda model: functools.partial(model, 1),
        closure_over,
        with_a_default,
    ],
    ids=["bound method", "callable instance", "partial of a method", "partial of an instance", "closure", "default"],
)
def test_asking_keeps_nothing(make: Callable[[Model], Callable[..., Any]]) -> None:
    model = Model()
    watched = weakref.ref(model)
    assert supports_kw(make(model), "tokens") in (True, False)
    del model
    gc.collect()
    assert watched() is None


def test_what_does_not_say_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match="does not say which arguments it takes"):
        supports_kw(dict, "x")
