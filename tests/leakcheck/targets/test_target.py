"""What a target must have, and what is said of one that lacks it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lowtide.leakcheck.targets.target import (
    ANSWERS,
    Capabilities,
    TargetError,
    Unjudged,
    answered,
    load_factory,
    make_target,
    named_target,
)


class Bare:
    """No more than a target must have."""

    capabilities = Capabilities()

    def create(self, config: Mapping[str, Any]) -> None: ...

    def infer(self, prompt_lengths: Sequence[int], max_tokens: int) -> Sequence[Sequence[int]]:
        return []

    def shutdown(self) -> None: ...


def test_a_target_with_what_it_declares_is_taken() -> None:
    target = make_target(Bare)
    assert isinstance(target, Bare)


@pytest.mark.parametrize(
    ("declared", "missing"),
    [
        ({"unfinished": True}, "start, step, abort"),
        ({"sleep_levels": (1,)}, "sleep, wake"),
        ({"prefix_cache": True}, "reset_prefix_cache"),
        ({"reload": True}, "reload"),
    ],
)
def test_what_is_declared_must_be_there(declared: dict[str, Any], missing: str) -> None:
    class Target(Bare):
        capabilities = Capabilities(**declared)

    with pytest.raises(TargetError, match=f"Target declares what it does not have: add the methods {missing}, or"):
        make_target(Target)


def test_a_target_without_capabilities_or_a_life_is_refused() -> None:
    with pytest.raises(TargetError, match="made a object without `capabilities`"):
        make_target(object)  # type: ignore[arg-type]

    class Empty:
        capabilities = Capabilities()

    with pytest.raises(TargetError, match="add the methods create, infer, shutdown"):
        make_target(Empty)  # type: ignore[arg-type]


def test_a_method_that_cannot_take_what_it_is_called_with_is_refused() -> None:
    class Short(Bare):
        def create(self) -> None:  # type: ignore[override]
            pass

    with pytest.raises(TargetError, match=r"Short\.create cannot be called: .*; write `def create\(self, config\)`"):
        make_target(Short)


def test_a_method_may_take_more_or_say_nothing() -> None:
    class Wide(Bare):
        def create(self, *whatever: Any) -> None: ...
        def infer(self, prompts: Any, most: int, seed: int = 0) -> Any: ...

        shutdown = print

    assert isinstance(make_target(Wide), Wide)


def test_a_factory_that_raises_is_said_to() -> None:
    with pytest.raises(TargetError, match="made no target: it raised ZeroDivisionError: "):
        make_target(lambda: 1 // 0)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0: it must be at least 1"),
        ({"max_requests": 0}, "max_requests is 0"),
        ({"prompt_lengths": ()}, r"prompt_lengths is \(\): give lengths of at least 1"),
        ({"prompt_lengths": (3, 0)}, "give lengths of at least 1"),
        ({"configs": {"size": ()}}, "configs has no value for 'size'"),
        ({"sleep_modes": ("doze",)}, "'doze'"),
        ({"sleep_levels": (1,), "sleep_modes": ()}, "sleep_modes is empty"),
        ({"sleep_levels": (1,), "preserving_levels": (2,)}, "preserving_levels has .2., which are not in sleep_levels"),
        ({"sleep_levels": (1,), "emptying_levels": (2,)}, "emptying_levels has .2., which are not in sleep_levels"),
        ({"device": "cuda"}, "device is 'cuda': write 'cpu', or a card with its number: 'cuda:0'"),
        ({"device": "cpu:1"}, "device is 'cpu:1'"),
    ],
)
def test_capabilities_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TargetError, match=message):
        Capabilities(**settings)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "'nowhere' names no target: write MODULE:FACTORY"),
        (":make", "names no target"),
        ("no_such_module:make", "No module named 'no_such_module'; it is looked for from"),
        ("a_target:absent", "has no attribute 'absent'"),
        ("a_target:NUMBER", "is a int: it must be a callable that makes a target"),
        ("a_broken_target:make", "importing a_broken_target raised ZeroDivisionError: division by zero"),
    ],
)
def test_a_name_that_leads_nowhere_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    with pytest.raises(TargetError, match=message):
        load_here(tmp_path, monkeypatch, name)


def test_a_factory_is_found_in_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_here(tmp_path, monkeypatch, "a_target:Nested.make")() == "made"  # type: ignore[comparison-overlap]


def load_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    (tmp_path / "a_target.py").write_text(
        "NUMBER = 1\nclass Nested:\n    @staticmethod\n    def make():\n        return 'made'\n"
    )
    (tmp_path / "a_broken_target.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return load_factory(name)


class Named(Bare):
    """A target that is made with arguments, each of them text."""

    def __init__(self, *names: str) -> None:
        self.names = names


MADE: list[object] = []


def make_and_keep(factory: Callable[[], object], number: int) -> None:
    MADE.append((factory(), number))


@pytest.mark.parametrize("arguments", [[], ["vllm serve", "--it's", 'a "model"']])
def test_a_program_makes_a_target_with_the_same_arguments(arguments: list[str]) -> None:
    subjected = named_target(f"{__name__}:Named", arguments)
    target = subjected.factory()
    assert isinstance(target, Named)
    assert target.names == tuple(arguments)
    exec(subjected.source.program(__name__, "make_and_keep", 7))
    ((target, number),) = MADE
    MADE.clear()
    assert isinstance(target, Named)
    assert (target.names, number) == (tuple(arguments), 7)


class Broken(Bare):
    def create(self, config: Mapping[str, Any]) -> None:
        raise RuntimeError("one engine\n  for each process")

    def infer(self, prompt_lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
        raise KeyboardInterrupt

    def shutdown(self) -> None:
        raise ValueError("not now")


def test_what_a_call_raises_before_anything_is_judged_is_said_in_one_line_with_its_place() -> None:
    unjudged = Unjudged(Broken())
    with pytest.raises(TargetError) as caught:
        unjudged.create({})
    assert re.fullmatch(
        r"create raised RuntimeError: one engine for each process \(.*test_target\.py:\d+\), before any life was judged"
        r"; lives make engines one after the other in this process: `lowtide check` judges a life up to the call that "
        r"raises",
        str(caught.value),
    )
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(TargetError, match=r"shutdown raised ValueError: not now \(.*\), before any life was judged: "):
        unjudged.shutdown()
    with pytest.raises(KeyboardInterrupt):
        unjudged.infer([3], 1)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("infer", None),
        ("infer", 7),
        ("infer", [7]),
        ("infer", {"0": [1]}),
        ("infer", np.ones(3)),
        ("start", {"a": 1}),
        ("start", None),
        ("step", []),
        ("step", {"a": 3}),
        ("sleep", {"a": None}),
        ("update_weights", [np.ones(1)]),
        ("preserved", np.ones(1)),
        ("preserved", {"w": 1}),
        ("graph_buffers", {"w": 1}),
        ("kv_usage", {"total": 1}),
        ("pages", 3),
    ],
)
def test_what_no_call_may_return_is_refused_with_what_it_must_be(name: str, said: object) -> None:
    with pytest.raises(TargetError, match=f"^{name} returned .*: it must return {re.escape(ANSWERS[name].words)}$"):
        answered(name, said)


def test_as_many_things_as_are_known_must_be_returned() -> None:
    assert answered("infer", [[1, 2]], count=1) == [[1, 2]]
    with pytest.raises(TargetError, match=r"^infer returned list of 2 list: it must return one sequence"):
        answered("infer", [[1], [2]], count=1)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("infer", [(1, 2), []]),
        ("infer", np.ones((2, 3))),
        ("start", ("a", "b")),
        ("step", {"a": [1]}),
        ("sleep", None),
        ("preserved", None),
        ("preserved", {"w": SimpleNamespace(data_ptr=int)}),
        ("graph_buffers", {"w": (4096, 8)}),
        ("kv_usage", SimpleNamespace(total=1, available=1, evictable=0, held={}, pending_transfer=0)),
        ("shutdown", 7),
    ],
)
def test_what_a_call_may_return_is_given_on(name: str, said: object) -> None:
    assert answered(name, said) is said
