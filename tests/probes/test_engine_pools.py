"""The private pools of torch's allocator are known by the engine's allocator that keeps them, in all its versions."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lowtide.probes.objects.engine_pools import owners_of_pools

VLLM = "vllm.device_allocator.cumem"
POOL = """
class MemPool:
    def __init__(self, number):
        self.id = 0, number

"""
SAVER = f"""{POOL}
class Saver:
    _impl = None

torch_memory_saver = Saver()
"""
IN_USE = """
torch_memory_saver._impl = Saver()
torch_memory_saver._impl._mem_pools = {
    ("weights", True, False, "pinned", 0): MemPool(3), ("kv_cache", False, False, "", 0): MemPool(4)
}
"""


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(tmp_path))
    known = set(sys.modules)
    yield
    for name in sys.modules.keys() - known:
        del sys.modules[name]


def use(folder: Path, name: str, source: str) -> None:
    *parents, last = name.split(".")
    for depth in range(len(parents)):
        package = folder.joinpath(*parents[: depth + 1])
        package.mkdir(exist_ok=True)
        (package / "__init__.py").touch()
    folder.joinpath(*parents, f"{last}.py").write_text(source)
    importlib.invalidate_caches()
    importlib.import_module(name)


def allocator(pools: str) -> str:
    return f"{POOL}class CuMemAllocator:\n    instance = None\n\nclass Instance:\n    allocator_and_pools = {pools}\n"


def test_nobody_keeps_a_pool_where_no_engine_s_allocator_is_loaded() -> None:
    assert owners_of_pools() == {}


# Until vLLM 0.24, and from 0.32.
@pytest.mark.parametrize("kept", ["(MemPool(1), None)", "[[MemPool(1), None], [MemPool(2), None]]"])
def test_vllm_s_are_named_by_their_tags(tmp_path: Path, kept: str) -> None:
    use(tmp_path, VLLM, allocator(f'{{"weights": {kept}}}') + "\nCuMemAllocator.instance = Instance()\n")
    numbers = range(1, kept.count("MemPool") + 1)
    assert owners_of_pools() == dict.fromkeys(((0, each) for each in numbers), "weights of vLLM's CuMemAllocator")


def test_torch_memory_saver_s_are_named_by_their_tags(tmp_path: Path) -> None:
    use(tmp_path, "torch_memory_saver", SAVER + IN_USE)
    assert owners_of_pools() == {(0, 3): "weights of torch_memory_saver", (0, 4): "kv_cache of torch_memory_saver"}


@pytest.mark.parametrize(("name", "source"), [(VLLM, allocator("None")), ("torch_memory_saver", SAVER), (VLLM, "")])
def test_one_that_is_not_used_yet_or_is_of_another_version_names_none(tmp_path: Path, name: str, source: str) -> None:
    use(tmp_path, name, source)
    assert owners_of_pools() == {}
