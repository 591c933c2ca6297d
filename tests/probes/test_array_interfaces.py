"""Which arrays of other libraries lie over a card's memory; with cupy, on a card, in `pytest_plugin/test_cuda.py`."""

from __future__ import annotations

import importlib.machinery
import sysconfig
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from lowtide.probes.memory import array_interfaces
from lowtide.probes.memory.array_interfaces import arrays_by_address
from lowtide.probes.originals import sys

LIBRARY = "lowtide_tests_arrays"


@pytest.fixture
def array_of() -> Iterator[Callable[[Any], Any]]:
    """Makes arrays of an installed library, which say what they are given."""
    module = ModuleType(LIBRARY)
    origin = f"{sysconfig.get_path('purelib')}/{LIBRARY}.py"
    module.__spec__ = importlib.machinery.ModuleSpec(LIBRARY, None, origin=origin)
    sys.modules[LIBRARY] = module

    class Array:
        def __init__(self, address: Any) -> None:
            self.address, self.cycle = address, self

        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            if isinstance(self.address, Exception):
                raise self.address
            return {"data": (self.address, False), "shape": (1,), "typestr": "|u1", "version": 3}

    Array.__module__ = LIBRARY
    yield Array
    del sys.modules[LIBRARY]


def test_an_array_of_an_installed_library_is_found_by_its_address(array_of: Callable[[Any], Any]) -> None:
    array = array_of(0x7F0000001000)
    assert arrays_by_address()[0x7F0000001000] is array


@pytest.mark.parametrize("error", [RuntimeError("the array has been deleted"), AttributeError("on the host")])
def test_an_array_that_has_no_memory_is_passed_over(array_of: Callable[[Any], Any], error: Exception) -> None:
    # An address of its own: what was raised in the test before has a traceback, and by that its arrays.
    address = 0x7F0010000000 + (len(str(error)) << 12)
    kept = [array_of(error), array_of(address)]
    assert arrays_by_address()[address] is kept[1]


def test_no_code_of_the_program_runs() -> None:
    asked = []

    class Own:
        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            asked.append(self)
            return {"data": (0x7F0000003000, False)}

    kept = [Own()]
    assert 0x7F0000003000 not in arrays_by_address()
    assert (asked, len(kept)) == ([], 1)


def test_tensors_are_none_of_them() -> None:
    tensor = torch.ones(3)
    assert tensor.data_ptr() not in arrays_by_address()


def test_of_an_array_and_a_pointer_into_it_the_array_is_returned(
    array_of: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pointer:
        def __init__(self, ptr: int) -> None:
            self.ptr, self.cycle = ptr, self

    cupy = SimpleNamespace(cuda=SimpleNamespace(PinnedMemoryPointer=type("Pinned", (), {}), MemoryPointer=Pointer))
    monkeypatch.setattr(array_interfaces, "loaded", lambda name: cupy)
    array, pointers = array_of(0x7F0000004000), [Pointer(0x7F0000004000), Pointer(0x7F0000005000)]
    found = arrays_by_address()
    assert (found[0x7F0000004000], found[0x7F0000005000]) == (array, pointers[1])
