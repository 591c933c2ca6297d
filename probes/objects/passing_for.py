"""Lets a function that stands in for a library's pass for it, so that no program notices."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])


def passing_for(original: Callable[..., Any], place: Any, name: str) -> Callable[[_F], _F]:
    """Decorates a function that takes the place of `original`: it has its name, signature and documentation.

    A module's function is pickled as that module's: `multiprocessing` sends `os.kill` to another process by its name,
    where the original is found (which calls itself `posix.kill`; there nothing stands in for it).

    Args:
        original: what was there.
        place: the module or class that has it.
        name: its name there.
    """

    def dressed(ours: _F) -> _F:
        functools.update_wrapper(ours, original)
        if type(place) is ModuleType:
            ours.__module__, ours.__qualname__ = place.__name__, name
        return ours

    return dressed
