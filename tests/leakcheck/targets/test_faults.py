"""Fault points: which operations are one, which fails, with what, and that nothing stays patched."""

from __future__ import annotations

import importlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from lowtide.leakcheck.targets import faults
from lowtide.leakcheck.targets.faults import Injection, Kind, Seam, injecting

if sys.version_info < (3, 11):
    from exceptiongroup import ExceptionGroup


class Engine:
    """Has two functions that can fail, one of which calls the other."""

    calls: list[str]

    def __init__(self) -> None:
        self.calls = []

    def map(self) -> int:
        self.calls.append("map")
        return self.reserve(1)

    @staticmethod
    def reserve(size: int) -> int:
        return size


SEAMS = (Seam("map", Engine, "map", MemoryError), Seam("reserve", Engine, "reserve", OSError))


def count(kind: Kind, call: Callable[[], object], *seams: Seam) -> int:
    injection = Injection(kind)
    with injecting(injection, seams):
        call()
    assert injection.raised is None
    return len(injection.passed)


@pytest.mark.parametrize(
    ("call", "points"),
    [
        (lambda x: torch.ones(3), 1),
        (lambda x: x + 1, 1),
        (lambda x: x @ x, 1),
        (lambda x: torch.empty(1), 1),
        (lambda x: torch.empty(0), 0),
        (lambda x: torch.zeros(3, 0), 0),
        # As a library reads a shard: a view of a file's bytes.
        (lambda x: torch.asarray(torch.UntypedStorage(8), dtype=torch.float32), 0),
        (lambda x: x.view(9), 0),
        (lambda x: x[0], 0),
        (lambda x: x.add_(1), 0),
        (lambda x: x.zero_(), 0),
        (lambda x: torch.add(x, 1, out=x), 0),
        (lambda x: x.copy_(x), 0),
    ],
    ids=["ones", "add", "matmul", "one", "empty", "none", "storage", "view", "row", "in place", "zero", "out", "copy"],
)
def test_what_returns_memory_of_its_own_allocates(call: Callable[[torch.Tensor], object], points: int) -> None:
    x = torch.zeros(3, 3)
    assert count("allocation", lambda: call(x)) == points


@pytest.mark.nightly
def test_counting_does_not_load_torch_s_compiler() -> None:
    program = """
import sys
import torch
from lowtide.leakcheck.targets.faults import Injection, injecting
with injecting(Injection("allocation")) as counted:
    torch.zeros(3)
assert len(counted.passed) == 1
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def negated(x: torch.Tensor) -> torch.Tensor:
    return -x


def negated_again(x: torch.Tensor) -> torch.Tensor:
    return -x


def test_what_counts_is_not_compiled() -> None:
    compiled = torch.compile(faults._uncompiled(negated), backend=refuse)
    assert compiled(torch.ones(2)).tolist() == [-1, -1]


@pytest.mark.nightly
def test_what_counts_is_not_compiled_where_torch_has_no_mark_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # Its own import needs the mark.
    importlib.import_module("torch._dynamo")
    with monkeypatch.context() as other:
        other.delattr(torch._C._dynamo.eval_frame, "set_code_exec_strategy")
        kept = faults._uncompiled(negated_again)
    compiled = torch.compile(lambda x: kept(x), backend=refuse)
    assert compiled(torch.ones(2)).tolist() == [-1, -1]


def test_what_is_compiled_passes_each_of_its_points() -> None:
    compiled = torch.compile(lambda x: x.sin() + 1, backend=refuse)
    assert count("allocation", lambda: compiled(torch.ones(2))) == 3


def refuse(graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
    raise AssertionError(f"compiled {graph.code}")


def test_copies_are_a_kind_of_their_own() -> None:
    x = torch.zeros(3)
    assert count("copy", lambda: x.copy_(torch.ones(3))) == 1
    assert count("copy", lambda: x.double()) == 1
    assert count("copy", lambda: x + 1) == 0


def test_the_one_that_is_asked_for_fails_as_torch_would_and_those_after_it_do_not() -> None:
    injection = Injection("allocation", 1)
    made: list[torch.Tensor] = []
    with injecting(injection):
        made.append(torch.ones(1))
        with pytest.raises(RuntimeError, match=r"can't allocate memory for aten\.ones\.default \(injected\)") as caught:
            made.append(torch.ones(1))
        made.append(torch.ones(1))
    assert injection.raised is caught.value
    assert len(made) == 2
    assert [point.what for point in injection.passed] == ["aten.ones.default"] * 3


def test_a_card_s_errors_are_torch_s_own() -> None:
    for kind, error in (("allocation", torch.OutOfMemoryError), ("copy", RuntimeError)):
        x = torch.zeros(1)
        with injecting(Injection(kind, 0), device="cuda:0"), pytest.raises(error, match="CUDA"):  # type: ignore[arg-type]
            x.copy_(x + 1)


def test_seams_are_counted_and_fail_with_their_own_error() -> None:
    assert count("map", lambda: Engine().map(), *SEAMS) == 1
    assert count("reserve", lambda: Engine().map(), *SEAMS) == 1
    engine = Engine()
    with injecting(Injection("map", 0), SEAMS), pytest.raises(MemoryError, match="map"):
        engine.map()
    # It failed before anything was done.
    assert engine.calls == []
    with injecting(Injection("reserve", 0), SEAMS), pytest.raises(OSError, match="reserve"):
        engine.map()


def test_what_is_inside_a_seam_that_covers_it_is_part_of_it() -> None:
    covering = Seam("map", Engine, "map", MemoryError, covers=True)
    assert count("interrupt", lambda: Engine().map(), *SEAMS) == 2
    assert count("interrupt", lambda: Engine().map(), covering, SEAMS[1]) == 1
    assert count("reserve", lambda: (Engine().map(), Engine.reserve(1)), covering, SEAMS[1]) == 1


class Inheriting(Engine):
    """Has the seams of another class."""


def test_a_seam_that_a_class_inherits_is_its_own_alone_and_gone_afterwards() -> None:
    seam = Seam("map", Inheriting, "map", MemoryError)
    assert count("map", lambda: (Inheriting().map(), Engine().map()), seam) == 1
    assert "map" not in vars(Inheriting)


@pytest.fixture
def untouched() -> Iterator[None]:
    before = dict(vars(Engine))
    yield
    assert dict(vars(Engine)) == before


@pytest.mark.usefixtures("untouched")
def test_nothing_stays_patched() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), injecting(Injection("map"), SEAMS):
        fail()
    assert Engine.reserve(2) == 2
    assert isinstance(vars(Engine)["reserve"], staticmethod)


def test_ctrl_c_comes_at_any_point_of_the_main_thread() -> None:
    injection = Injection("interrupt", 1)
    engine = Engine()
    with injecting(injection, SEAMS):
        torch.ones(1)
        with pytest.raises(KeyboardInterrupt):
            engine.map()
    injection = Injection("interrupt", 0)
    with injecting(injection, SEAMS):
        thread = threading.Thread(target=engine.map)
        thread.start()
        thread.join()
    assert (injection.passed, engine.calls) == ([], ["map"])


def raised(*chain: type[BaseException]) -> Any:
    """An error of the first type, raised from one of the second, and so on; and the last of them."""
    error: BaseException = chain[-1]("injected")
    last = error
    for kind in reversed(chain[:-1]):
        outer = kind("outer")
        outer.__cause__ = error
        error = outer
    return error, last


class OwnError(Exception):
    """The engine's."""


@pytest.mark.parametrize(
    ("chain", "is_it"),
    [
        ((MemoryError,), True),
        ((OwnError, MemoryError), True),
        ((OwnError, OwnError, MemoryError), True),
        ((KeyError, MemoryError), False),
    ],
)
def test_an_error_is_the_original_or_one_that_may_wrap_it(chain: tuple[type[BaseException], ...], is_it: bool) -> None:
    error, original = raised(*chain)
    injection = Injection("map", 0, raised=original)
    assert injection.caused(error, (OwnError,)) is is_it
    assert injection.caused(ExceptionGroup("several", [ValueError(), error])) is (len(chain) == 1)


def test_an_error_that_only_happened_while_it_was_handled_is_not_it() -> None:
    _, original = raised(MemoryError)
    masking = OwnError("undoing failed")
    masking.__context__ = original
    assert not Injection("map", 0, raised=original).caused(masking, (OwnError,))
