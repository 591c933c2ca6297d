"""First use of torch.compile: constants in what it made are listed; what the program keeps besides is told."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from lowtide.leakcheck.findings.cached_values import FEWEST_TURNS, MOST_ADDED, CachedValues, SortedValues
from lowtide.leakcheck.judging.storages import HeldStorage, live_keys, storage_keys

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.no_leakcheck(reason="dynamo keeps the globals of what it has compiled as long as their module"),
]

COMPILED = """
import torch

KEPT = []
OUTSIDE = torch.ones(100)

def keeping(size):
    def backend(module, inputs):
        kept = torch.ones(size)
        return lambda *inputs: (module(*inputs), kept)[0]
    return backend

def doubled(x):
    return (x.sin() * 2).sum()

def table(x):
    return x * torch.tensor([1.0, 2.0])

def outside(x):
    return (x * OUTSIDE * 2).sum()

def appending(x):
    y = x * 2
    KEPT.append(y)
    return y.sum()

def plain(x):
    return x + x

class Scaled(torch.nn.Module):
    def forward(self, x):
        return x / 3**0.5

layered = torch.nn.Sequential(Scaled())
"""


class Compiling:
    """A program that compiles its functions, test by test."""

    def __init__(self, program: Any) -> None:
        self.program = program
        self._values = CachedValues()
        self.begin()

    def begin(self) -> None:
        """A test begins."""
        self._values.mark()
        self._before = live_keys()

    def calls(self, name: str, backend: Any, *, length: int = 2) -> SortedValues:
        """Call a compiled function with gradients; return what of that is excused."""
        compiled = torch.compile(getattr(self.program, name), backend=backend, dynamic=False)
        compiled(torch.ones(length, requires_grad=True)).sum().backward()
        return self.found()

    def found(self) -> SortedValues:
        """What is excused of what came since the test began."""
        gc.collect()
        self.left = {key for key in live_keys() - self._before if key[1]}
        held = [HeldStorage(key, 8, "int64 []", "call", None) for key in self.left]
        return self._values.sort(held, (), "test")


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiling]:
    """A module of a program."""
    module = ModuleType("compiled_program")
    exec(compile(COMPILED, "compiled_program.py", "exec"), vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    torch._dynamo.reset()
    yield Compiling(module)
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_the_constants_of_a_compiled_function_are_listed(compiling: Compiling, backend: str) -> None:
    for name in ("doubled", "table"):
        compiling.begin()
        found = compiling.calls(name, backend)
        assert compiling.left == found.excused
        for line in found.listed:
            assert f"in what torch.compile made of {name}, compiled_program.py:" in line.what
            assert "torch._dynamo.reset() empties it" in line.why
    assert found.listed or backend == "eager"


def test_the_constants_of_a_librarys_compiled_function_are_listed(compiling: Compiling) -> None:
    found = compiling.calls("layered", "aot_eager")
    assert compiling.left
    assert compiling.left == found.excused


def test_what_the_program_keeps_beside_what_it_compiles_is_not_excused(compiling: Compiling) -> None:
    found = compiling.calls("appending", "eager")
    (kept,) = compiling.program.KEPT
    own = storage_keys([kept])
    assert own <= compiling.left
    assert not own & found.excused
    compiling.program.OUTSIDE = torch.ones(2)
    found = compiling.calls("outside", "eager")
    assert storage_keys([compiling.program.OUTSIDE]) <= compiling.left - found.excused
    # What a graph of the program's own has saved, nothing in Python leads to.
    compiling.begin()
    compiling.program.KEPT.append((torch.ones(10, requires_grad=True) * torch.ones(10)).sum())
    found = compiling.calls("doubled", "eager")
    assert len(compiling.left - found.excused) == 3


@pytest.mark.parametrize("name", ["plain", "layered"])
def test_more_than_constants_in_what_is_compiled_is_not_excused(compiling: Compiling, name: str) -> None:
    found = compiling.calls(name, compiling.program.keeping(MOST_ADDED))
    assert compiling.left
    assert not found.excused


def test_what_is_compiled_anew_in_each_test_is_told_once_as_growth(compiling: Compiling) -> None:
    told = []
    with torch._dynamo.config.patch(recompile_limit=100):  # type: ignore[attr-defined]
        for length in range(2, FEWEST_TURNS + 4):
            compiling.begin()
            found = compiling.calls("doubled", "eager", length=length)
            told += [advice for advice, _ in dict(found.hints).items()]
            assert found.excused or found.hints
    assert {f"+8 B in each of {FEWEST_TURNS} tests" in advice for advice in told} == {True}
    assert len(set(told)) == 1
