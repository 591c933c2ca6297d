"""Caches: what the entries of each `lru_cache` reach, and no more than that."""

from __future__ import annotations

import functools
import gc
import logging
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lowtide.probes.heap.caches import CacheReading, bytes_held, read_caches
from lowtide.probes.objects.listed import frozen_by_program


def reading_of(wrapper: Any, **options: Any) -> CacheReading:
    (reading,) = read_caches([wrapper], **options)
    return reading


class Owner:
    def __init__(self, held: object = None) -> None:
        self.held = held

    def method(self) -> None: ...


@pytest.mark.parametrize("maxsize", [8, None])
def test_results_and_arguments_count_each_once(maxsize: int | None) -> None:
    @functools.lru_cache(maxsize=maxsize)
    def cached(key: object) -> torch.Tensor:
        return result

    result = torch.ones(100)
    cached(torch.ones(50))
    cached(torch.ones(50))
    reading = reading_of(cached)
    assert (reading.entries, reading.maxsize) == (2, maxsize)
    assert reading.tensor_bytes == 400 + 200 + 200


def test_a_cache_of_a_single_bare_key_is_read() -> None:
    @functools.cache
    def cached(size: int) -> torch.Tensor:
        return torch.ones(size)

    cached(25)
    assert reading_of(cached).tensor_bytes == 100


def test_keyword_arguments_are_entries_too() -> None:
    @functools.cache
    def cached(*, mask: object) -> None: ...

    cached(mask=torch.ones(25))
    assert reading_of(cached).tensor_bytes == 100


def test_a_cache_without_entries_is_not_reported() -> None:
    cached = functools.cache(len)
    assert read_caches([cached]) == ()


def test_the_cached_function_is_no_entry() -> None:
    captured = torch.ones(100)

    @functools.cache
    def cached(key: int) -> object:
        return captured.shape

    cached(1)
    assert reading_of(cached).tensor_bytes == 0


def test_attributes_of_the_cache_are_no_entries() -> None:
    @functools.cache
    def cached(key: int) -> int:
        return key

    cached(1)
    cached.note = torch.ones(100)  # type: ignore[attr-defined]
    assert reading_of(cached).tensor_bytes == 0


def test_the_name_is_the_functions() -> None:
    @functools.cache
    def supports_kw(key: int) -> int:
        return key

    supports_kw(1)
    assert reading_of(supports_kw).name.endswith("test_the_name_is_the_functions.<locals>.supports_kw")


def test_a_cached_partial_has_a_name() -> None:
    cached = functools.lru_cache(maxsize=4)(functools.partial(divmod, 7))
    cached(2)
    assert "partial" in reading_of(cached).name


@pytest.mark.parametrize("wrap", [lambda method: method, functools.partial], ids=["method", "partial"])
def test_a_bound_method_reaches_its_owner(wrap: Any) -> None:
    @functools.cache
    def supports_kw(function: object) -> bool:
        return True

    supports_kw(wrap(Owner(torch.ones(100)).method))
    assert reading_of(supports_kw).tensor_bytes == 400


def test_modules_and_their_parameters_are_reached() -> None:
    @functools.cache
    def cached(model: torch.nn.Module) -> None: ...

    cached(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4, bias=False)))
    assert reading_of(cached).tensor_bytes == (16 + 4 + 16) * 4


def test_a_functions_closure_and_defaults_are_reached() -> None:
    @functools.cache
    def cached(function: object) -> None: ...

    captured = torch.ones(10)

    def function(a: object = torch.ones(20), *, b: object = torch.ones(30)) -> torch.Tensor:
        return captured

    cached(function)
    assert reading_of(cached).tensor_bytes == 4 * (10 + 20 + 30)


_module_global = torch.ones(100)


_code = (lambda: None).__code__


def _unregistered_module() -> types.ModuleType:
    module = types.ModuleType("of_a_test")
    module.held = torch.ones(100)  # type: ignore[attr-defined]
    return module


class HoldsOnItsClass:
    shared = torch.ones(100)


def _running_frame() -> types.FrameType:
    held = torch.ones(100)
    assert len(held) == 100
    return sys._getframe()


@functools.cache
def _other_cache(key: int) -> torch.Tensor:
    return torch.ones(100)


def _weak() -> object:
    tensor = torch.ones(100)
    _keep.append(tensor)
    return weakref.ref(tensor)


_keep: list[torch.Tensor] = []


@pytest.fixture(autouse=True)
def _let_go() -> Iterator[None]:
    yield
    _keep.clear()
    _other_cache.cache_clear()


@pytest.mark.parametrize(
    "beyond",
    [
        pytest.param(lambda: types.FunctionType(_code, {"held": torch.ones(100)}), id="function globals"),
        pytest.param(_unregistered_module, id="module"),
        pytest.param(HoldsOnItsClass, id="class of an instance"),
        pytest.param(lambda: HoldsOnItsClass, id="class"),
        pytest.param(_weak, id="weak reference"),
        pytest.param(_running_frame, id="frame"),
        pytest.param(lambda: (_other_cache(1), _other_cache)[1], id="other cache"),
        pytest.param(globals, id="module namespace"),
    ],
)
def test_the_walk_stops_at_what_others_hold_too(beyond: Any) -> None:
    cached = functools.lru_cache(maxsize=4)(lambda key: beyond())
    cached(1)
    assert reading_of(cached).tensor_bytes == 0


def test_the_callback_of_a_weak_reference_is_held_although_its_target_is_not() -> None:
    target, captured = Owner(torch.ones(10)), torch.ones(100)
    cached = functools.lru_cache(maxsize=4)(lambda key: weakref.ref(target, lambda gone: captured.zero_()))
    cached(1)
    assert reading_of(cached).tensor_bytes == captured.nbytes


def test_a_walk_ends_at_its_limit() -> None:
    cached = functools.lru_cache(maxsize=4)(lambda key: [torch.ones(1) for _ in range(100)])
    cached(1)
    assert 0 < reading_of(cached, max_objects=50).tensor_bytes < 400
    assert reading_of(cached, max_objects=500).tensor_bytes == 400


def test_caches_that_share_a_tensor_hold_it_once_together() -> None:
    shared = torch.ones(100)
    first = functools.lru_cache(maxsize=4)(lambda key: shared)
    second = functools.lru_cache(maxsize=4)(lambda key: shared[50:])
    first(1)
    second(1)
    readings = read_caches([first, second])
    assert [reading.tensor_bytes for reading in readings] == [400, 400]
    assert bytes_held(readings) == 400


def test_reading_does_not_use_the_cache() -> None:
    cached = functools.lru_cache(maxsize=4)(lambda key: key)
    cached(1)
    before = cached.cache_info()
    read_caches([cached])
    assert cached.cache_info() == before


def test_a_cache_in_a_frozen_heap_is_seen() -> None:
    _other_cache(1)
    assert frozen_by_program(gc.get_freeze_count()) == 0
    gc.freeze()
    try:
        names = [reading.name for reading in read_caches()]
    finally:
        gc.unfreeze()
    assert any(name.endswith("._other_cache") for name in names)


def test_the_probes_have_no_cache_of_their_own() -> None:
    assert [reading.name for reading in read_caches() if reading.name.startswith("lowtide.probes")] == []


def test_what_a_logger_s_handlers_hold_is_no_cache_s() -> None:
    class Handler(logging.Handler):
        records = (torch.ones(100),)

        def __init__(self) -> None:
            super().__init__()
            self.kept = torch.ones(50)

    @functools.cache
    def print_once(logger: logging.Logger, text: str) -> torch.Tensor:
        return torch.ones(25)

    logger = logging.Logger("of_a_test")
    logger.addHandler(Handler())
    print_once(logger, "hello")
    assert reading_of(print_once).tensor_bytes == 100


def caches_of_one_heap(number: int, size: int) -> tuple[list[Any], Any]:
    """So many caches that hold one list of tensors, and one that holds a small tensor of its own."""
    shared = [torch.ones(1) for _ in range(size)]
    caches = [functools.cache(lambda key: shared) for _ in range(number)]
    for cache in caches:
        cache(1)
    small = functools.cache(lambda key: torch.ones(25))
    small(1)
    return caches, small


def test_what_several_caches_reach_is_walked_through_once() -> None:
    caches, small = caches_of_one_heap(3, 3000)
    by_themselves = read_caches([*caches, small])
    assert sorted(reading.tensor_bytes for reading in by_themselves) == [100, 12000, 12000, 12000]
    together = read_caches([*caches, small], max_in_all=100_000)
    assert sorted(reading.tensor_bytes for reading in together) == [0, 0, 100, 12000]
    assert bytes_held(together) == bytes_held(by_themselves) == 12100


def test_all_together_look_at_so_many_objects_only() -> None:
    caches, small = caches_of_one_heap(2, 3000)
    together = read_caches([*caches, small], max_in_all=2500)
    assert 0 < bytes_held(together) < 12100


def test_caches_that_hold_little_are_read_by_themselves_in_either_case() -> None:
    caches, small = caches_of_one_heap(2, 30)
    assert read_caches([*caches, small], max_in_all=1) == read_caches([*caches, small])
