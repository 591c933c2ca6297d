"""Filled caches: what a cache alone keeps is told, and what lives anyway, or belongs to a wider fixture, is not."""

from __future__ import annotations

import functools
import gc
import logging
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import pytest
import torch

from lowtide.leakcheck.judging import filled_caches
from lowtide.leakcheck.judging.filled_caches import FilledCaches
from lowtide.leakcheck.judging.storages import storage_keys
from lowtide.probes.heap.births import Births
from lowtide.probes.heap.caches import walk_caches
from lowtide.probes.heap.holders import trace

pytestmark = pytest.mark.nightly


class Plain:
    def method(self) -> None: ...


@pytest.fixture
def program() -> Iterator[types.ModuleType]:
    """A module with two caches and a place for what lives anyway."""
    module = types.ModuleType("caches_of_a_program")
    vars(module).update(KEPT=[])
    for name in ("supports", "build"):
        function = (lambda key: None) if name == "supports" else (lambda key: torch.ones(8))
        function.__module__, function.__qualname__ = module.__name__, name
        vars(module)[name] = functools.lru_cache(function)
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


class Watched:
    """Runs a piece of a program as a test, and says what its caches alone keep."""

    def __init__(self, program: Any) -> None:
        self.program = program
        self.births = Births()
        self.caches = FilledCaches()
        self.caches.add([program.supports, program.build])

    def __enter__(self) -> Watched:
        gc.collect()
        self.births.start()
        self.births.mark("call")
        self.caches.mark()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.births.stop()

    def held(self, judged: tuple[Any, ...] = ()) -> list[str]:
        """The names of what is told, without where it lies."""
        self.caches.note("call")
        self.caches.born(self.births.born())
        gc.collect()
        found = self.caches.held(self.births.survivors(), storage_keys(judged))
        return sorted(text.partition(" at ")[0].rpartition(".")[2] for text in found)


def reported_of(program: Any, run: Callable[[Any], object]) -> list[str]:
    with Watched(program) as watched:
        run(program)
        return watched.held()


LEAKS: dict[str, tuple[Callable[[Any], object], list[str]]] = {
    "a module": (lambda program: program.supports(torch.nn.ReLU()), ["ReLU"]),
    "a bound method": (lambda program: program.supports(Plain().method), ["Plain"]),
    "a partial of a bound method": (lambda program: program.supports(functools.partial(Plain().method)), ["Plain"]),
    "a logger that nobody else has": (lambda program: program.supports(with_method(logging.Logger("own"))), ["Logger"]),
    "a function that closes over a bound method": (lambda program: program.supports(calls(Plain().method)), ["Plain"]),
    "methods in a list": (lambda program: program.build((1, (Plain().method,))), ["Plain"]),
    "two caches, each holding the same": (lambda program: both(program, torch.nn.ReLU()), ["ReLU", "ReLU"]),
    "only the outermost module": (
        lambda program: program.supports(torch.nn.Sequential(torch.nn.ReLU())),
        ["Sequential"],
    ),
}


def with_method(item: Any) -> Any:
    """As vLLM's `init_logger` does: the object leads to a bound method of its own."""
    item.info_once = MethodType(lambda self: None, item)
    return item


def calls(method: Callable[[], None]) -> Callable[[], None]:
    return lambda: method()


class Application:
    """Has what handles its requests, as a web framework's does."""

    def __init__(self) -> None:
        self.handlers = [Plain().method]


def closed_over() -> Callable[[], object]:
    application = with_method(Application())
    return lambda: application


def both(program: Any, item: object) -> None:
    program.supports(item)
    program.build(item)


@pytest.mark.parametrize("name", LEAKS)
def test_what_a_cache_alone_keeps_is_reported(program: Any, name: str) -> None:
    run, expected = LEAKS[name]
    assert reported_of(program, run) == expected


@pytest.mark.parametrize("given", [Application, closed_over])
def test_of_an_object_that_hangs_on_what_a_cache_was_given_nothing_is_said(
    program: Any, given: Callable[[], Any]
) -> None:
    assert reported_of(program, lambda program: program.supports(given())) == []


def test_after_a_cheap_look_only_caches_that_hold_something_new_are_gone_through(
    program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    walked: list[str] = []

    def walk(caches: Any, *more: Any) -> Any:
        walked.extend("supports" if cache is program.supports else "build" for cache in caches)
        return walk_caches(caches, *more)

    with Watched(program) as watched:
        program.supports(torch.nn.ReLU())
        program.build("a word")
        watched.caches.note("call")
        watched.caches.born(watched.births.born())
        monkeypatch.setattr(filled_caches, "walk_caches", walk)
        assert watched.caches.suspects(watched.births.survivors())
        assert sorted(walked) == ["build", "supports"]
        walked.clear()
        for _ in range(2):
            found = watched.caches.held(watched.births.survivors(), ())
            assert [text.partition(" at ")[0] for text in found] == ["torch.nn.modules.activation.ReLU"]
        assert walked == ["supports", "supports"]
        program.supports.cache_clear()
        assert watched.caches.held(watched.births.survivors(), ()) == {}
        # Another stage: any of them may hold something new.
        program.build(torch.nn.ReLU())
        watched.caches.note("teardown")
        assert len(watched.caches.held(watched.births.survivors(), ())) == 1


def keep(program: Any, item: Any) -> Any:
    program.KEPT.append(item)
    return item


def as_singleton(cls: Any) -> Any:
    cls.instance = cls()
    return cls.instance


CLEAN: dict[str, Callable[[Any], object]] = {
    "a registered logger": lambda program: program.supports(with_method(logging.getLogger("caches_of_a_program"))),
    "a module that a global holds": lambda program: program.supports(keep(program, torch.nn.ReLU())),
    "a method of what a global holds": lambda program: program.supports(keep(program, Plain()).method),
    "a singleton": lambda program: program.supports(as_singleton(type("Single", (Plain,), {"home": program})).method),
    "a function": lambda program: program.supports(lambda: None),
    "an old object": lambda program: program.supports(OLD.method),
}
OLD = Plain()


@pytest.mark.parametrize("name", CLEAN)
def test_what_lives_anyway_is_not(program: Any, name: str) -> None:
    kept: list[object] = []
    vars(program)["ALL"] = kept

    def run(program: Any) -> None:
        CLEAN[name](program)
        # What a test's own class holds lives as long as that, which somebody has to hold.
        kept.extend(cls for cls in Plain.__subclasses__() if vars(cls).get("home") is program)

    assert reported_of(program, run) == []


def test_a_value_that_is_judged_does_not_silence_the_module_in_the_key(program: Any) -> None:
    """As in Mask2Former of transformers 5.8.1: a module without tensors in the key, a tensor as the value."""
    with Watched(program) as watched:
        value = program.build(torch.nn.ReLU())
        assert watched.held((value,)) == ["ReLU"]


def test_a_module_whose_own_tensors_are_judged_is_reported_by_their_finding(program: Any) -> None:
    with Watched(program) as watched:
        program.supports(torch.nn.Linear(2, 2))
        (module,) = (born.item for born in watched.births.survivors() if isinstance(born.item, torch.nn.Linear))
        assert watched.held((module.weight, module.bias)) == []


def test_what_a_wider_fixture_puts_into_a_cache_is_not_the_tests(program: Any) -> None:
    with Watched(program) as watched:
        watched.caches.note("setup")
        watched.caches.enter()
        program.supports(torch.nn.ReLU())
        watched.caches.leave()
        assert watched.held() == []
        program.supports(torch.nn.Tanh())
        assert watched.held() == ["Tanh"]


def test_all_suspects_share_one_walk_and_a_test_without_any_pays_for_none(
    program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    walks: list[int] = []

    def counted(targets: Any, **options: Any) -> Any:
        walks.append(len(targets))
        return trace(targets, **options)

    monkeypatch.setattr(filled_caches, "trace", counted)
    with Watched(program) as watched:
        program.supports(4711)
        assert watched.held() == []
        assert walks == []
        for module in (torch.nn.ReLU, torch.nn.Tanh, torch.nn.GELU):
            both(program, module())
        assert len(watched.held()) == 6
        assert len(watched.held()) == 6
        assert walks == [3]


def test_a_cache_that_was_filled_ends_with_its_owner(program: Any) -> None:
    with Watched(program) as watched:
        # As a `sqlite3.Connection` has one of its statements, which keeps the file open after `close()`.
        own = functools.lru_cache(str)
        watched.caches.add([own])
        watched.caches.mark()
        own(4711)
        watched.caches.note("setup")
        assert watched.caches.any_filled
        left = weakref.ref(own)
        del own
        assert left() is None


def test_a_cache_of_texts_is_gone_through_once_and_one_with_a_method_again(
    program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone_through: list[int] = []
    given = filled_caches._given

    def counted(entries: list[Any], owners: Any) -> Iterator[object]:
        gone_through.append(len(entries))
        return given(entries, owners)

    monkeypatch.setattr(filled_caches, "_given", counted)
    with Watched(program) as watched:
        for number in range(100):
            program.supports(f"text {number}")
        assert watched.held() == []
        assert gone_through == []
        program.supports(Plain().method)
        assert watched.held() == ["Plain"]
        assert len(gone_through) == 1


def test_what_is_reported_can_be_looked_at_and_cleared_long_after(program: Any) -> None:
    with Watched(program) as watched:
        program.supports(torch.nn.ReLU())
        watched.held()
        (name,) = watched.caches.held(watched.births.survivors(), ())
        (item,) = watched.caches.of([name]).values()
        watched.caches.forget()
    assert (item.code, item.is_there) == ("caches_of_a_program.supports", True)
    item.clear()
    assert not item.is_there
    assert program.supports.cache_info().currsize == 0
