"""What to do about what a finalizer holds: the program detaches its own; a library's ends by what that offers."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest

from lowtide.leakcheck.explaining.library_objects import advice_for_finalizer


class Target:
    """What a finalizer waits for."""


class Manager:
    """Stands for torch's manager of the graphs of compiled functions."""

    def end(self, *held: object) -> None:
        pass


def ended(*held: object) -> None:
    """A function of the program's."""


COMPILERS = type("Manager", (Manager,), {"__module__": "torch._inductor.cudagraph_trees"})
OF_COMPILER = FunctionType(ended.__code__, {"__name__": "torch._dynamo.guards"})


@pytest.mark.parametrize(
    ("function", "advice"),
    [
        (COMPILERS().end, "F is torch's: torch.compile keeps it: torch._dynamo.reset() drops what was compiled"),
        (OF_COMPILER, "F is torch's: torch.compile keeps it: torch._dynamo.reset() drops what was compiled"),
        (Manager().end, "call detach() of F when what it is for is over"),
        (ended, "call detach() of F when what it is for is over"),
        (print, "call detach() of F when what it is for is over"),
    ],
    ids=["method of the compiler", "function of the compiler", "own method", "own function", "built in"],
)
def test_a_finalizer_is_detached_by_whoever_made_it(function: Callable[..., Any], advice: str) -> None:
    target = Target()
    finalizer = weakref.finalize(target, function, [COMPILERS()])
    finalizer.atexit = False
    registry = vars(weakref.finalize)["_registry"]
    assert advice_for_finalizer("F", [registry, registry[finalizer], function]) == advice
