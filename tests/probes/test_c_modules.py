"""Modules written in C are asked for their namespaces alone; CPython 3.12's `_asyncio` breaks if asked for more."""

from __future__ import annotations

import _asyncio
import _csv
import asyncio
import gc as builtin_gc
import subprocess
import sys
import types

import pytest

from lowtide.probes import native
from lowtide.probes.heap.holders import trace
from lowtide.probes.objects.foreign import is_kind_of_module
from lowtide.probes.objects.listed import all_objects
from lowtide.probes.originals import gc


class Slotted:
    __slots__ = ("held",)


class OfProgram(types.ModuleType):
    held = None


@pytest.fixture(params=["C", "Python"])
def _asked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "Python":
        monkeypatch.setattr(native, "referents", None)
    elif native.referents is None:
        pytest.skip("built without the extension")


@pytest.mark.usefixtures("_asked")
def test_of_a_module_in_c_its_namespace_is_shown() -> None:
    # Its state shows the collector more, in every version.
    assert len(builtin_gc.get_referents(_csv)) > 1
    assert gc.get_referents(_asyncio, _csv, sys) == [vars(_asyncio), vars(_csv), vars(sys)]


@pytest.mark.usefixtures("_asked")
def test_all_else_is_shown_as_the_collector_sees_it() -> None:
    slotted = Slotted()
    slotted.held = slotted
    running = (number for number in [1])
    asked = [[slotted, 1], {"key": slotted}, slotted, 5, "text", (), running, Slotted, len, None]
    assert gc.get_referents() == []
    for item in (*asked, asyncio, types.ModuleType("made"), OfProgram("made")):
        assert [*map(id, gc.get_referents(item))] == [*map(id, builtin_gc.get_referents(item))]
    assert [*map(id, gc.get_referents(*asked))] == [*map(id, builtin_gc.get_referents(*asked))]


class Lazy(types.ModuleType):
    """As transformers has it."""


@pytest.mark.parametrize(
    ("kind", "expected"), [(types.ModuleType, True), (Lazy, True), (types.FunctionType, False), (dict, False)]
)
def test_kinds_of_modules(kind: type, expected: bool) -> None:
    assert is_kind_of_module(kind) is expected


WALKS = """
import asyncio, gc, sys
from lowtide.leakcheck.processes.own_tensors import look
from lowtide.probes import native
from lowtide.probes.heap.holders import trace
from lowtide.probes.heap.large_values import read_values
from lowtide.probes.objects.listed import all_objects

class Kept: pass
KEPT = Kept()

async def main():
    # An awaited future leaves an iterator behind, which waits in the module's state for the next.
    for _ in range(3):
        future = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(future.set_result, None)
        await future

if "slow" in sys.argv:
    native.referents = native.values_of_all = native.lengths_of_all = None
gc.freeze()
for _ in range(4):
    asyncio.run(main())
    with trace([KEPT]) as found:
        assert found.path(0) is not None
    all_objects()
    read_values()
    look(lists=True)
    gc.collect()
print("ended")
"""


@pytest.mark.parametrize("how", ["fast", "slow"])
def test_walks_end_after_futures_were_awaited(how: str) -> None:
    command = [sys.executable, "-c", WALKS, how]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
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
