"""Modules written in C: walks ask for their namespaces alone; CPython 3.12's `_asyncio` breaks if asked for more."""

from __future__ import annotations

import _asyncio
import asyncio
import gc
import subprocess
import sys
import types

import pytest

from lowtide.probes.heap.holders import trace
from lowtide.probes.objects.foreign import is_kind_of_module, without_state
from lowtide.probes.objects.listed import all_objects


def test_of_a_module_in_c_its_namespace_stands_for_it() -> None:
    asked = without_state(_asyncio)
    assert gc.get_referents(asked) == [vars(_asyncio)]
    assert without_state(sys) == (vars(sys),)


def test_a_module_in_python_is_asked_itself() -> None:
    made = types.ModuleType("made")
    assert without_state(asyncio) is asyncio
    assert without_state(made) is made


class Lazy(types.ModuleType):
    """As transformers has it."""


@pytest.mark.parametrize(
    ("kind", "expected"), [(types.ModuleType, True), (Lazy, True), (types.FunctionType, False), (dict, False)]
)
def test_kinds_of_modules(kind: type, expected: bool) -> None:
    assert is_kind_of_module(kind) is expected


WALKS = """
import asyncio, gc
from lowtide.probes.heap.holders import trace
from lowtide.probes.objects.listed import all_objects

class Kept: pass
KEPT = Kept()

async def main():
    # An awaited future leaves an iterator behind, which waits in the module's state for the next.
    for _ in range(3):
        future = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(future.set_result, None)
        await future

gc.freeze()
for _ in range(4):
    asyncio.run(main())
    with trace([KEPT]) as found:
        assert found.path(0) is not None
    all_objects()
    gc.collect()
print("ended")
"""


def test_walks_end_after_futures_were_awaited() -> None:
    done = subprocess.run([sys.executable, "-c", WALKS], capture_output=True, text=True, check=False)
    assert done.stdout == "ended\n", done.stderr


def test_what_a_module_in_c_has_in_its_namespace_is_found() -> None:
    class Held:
        pass

    held = Held()
    vars(_asyncio)["of_a_test"] = held
    try:
        with trace([held]) as found:
            path = found.path(0)
            assert path is not None
        assert any(item is held for item in all_objects()) or not gc.is_tracked(held)
    finally:
        del vars(_asyncio)["of_a_test"]
