"""The pools of engines are read as they say it themselves, in all their versions.

Their classes are here as far as they are read, with their names: LMCache's of 0.5.6, SGLang's of 0.5.23 and before.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from lowtide.probes.objects.engine_pools import LostSlot, RequestSlots, owners_of_pools

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


SLOTS = {
    "lmcache.v1.pin_monitor": """
class PinMonitor:
    _instance = None

    def __init__(self):
        self._pinned_objects = {}
""",
    "lmcache.v1.storage_backend.local_cpu_backend": """
import types

class Chunk:
    def __init__(self):
        self.meta = types.SimpleNamespace(ref_count=1)

class LocalCPUBackend:
    def __init__(self, chunks=3):
        self.hot_cache = {number: Chunk() for number in range(chunks)}

    def get_blocking(self, key):
        self.hot_cache[key].meta.ref_count += 1
        return self.hot_cache[key]
""",
    "lmcache.v1.cache_engine": """
class LMCacheEngine:
    def __init__(self):
        self.lookup_pins = {}
""",
    "sglang.srt.managers.schedule_batch": """
import types

class Req:
    finished_reason = None

    def __init__(self, rid, row, *, kv):
        self.rid = rid
        if kv:
            self.kv = types.SimpleNamespace(req_pool_idx=row)
        else:
            self.req_pool_idx = row
""",
    "sglang.srt.mem_cache.memory_pool": """
import types

class ReqToTokenPool:
    def __init__(self, size, *, padded):
        self.req_to_token = types.SimpleNamespace(shape=(size + padded, 4))
        self.free_slots = [*range(padded, size + padded)]
        if padded:
            self._alloc_size = size + padded
""",
    "vllm.v1.core.sched.scheduler": """
class Scheduler:
    def __init__(self):
        self.requests = {}
""",
}


@pytest.fixture
def slots(tmp_path: Path) -> dict[str, ModuleType]:
    for name, source in SLOTS.items():
        use(tmp_path, name, source)
    return {name.rpartition(".")[2]: sys.modules[name] for name in SLOTS}


def lost() -> list[LostSlot]:
    reading = RequestSlots(at_once=True).read()
    assert not reading.unread
    return [*reading.lost]


def test_a_chunk_of_lmcache_s_that_a_reader_did_not_give_back_is_lost(slots: dict[str, ModuleType]) -> None:
    backend = slots["local_cpu_backend"].LocalCPUBackend()
    assert lost() == []
    reader = backend.get_blocking(1)
    assert lost() == []
    number = f"{id(reader):#x}"
    del reader
    (slot,) = lost()
    assert (slot.pool, slot.number) == ("LMCache's LocalCPUBackend", number)


def test_who_watches_a_pinned_chunk_of_lmcache_s_is_no_reader(slots: dict[str, ModuleType]) -> None:
    backend = slots["local_cpu_backend"].LocalCPUBackend()
    kinds = slots["pin_monitor"].PinMonitor
    kinds._instance = kinds()
    kinds._instance._pinned_objects[id(backend.hot_cache[1])] = backend.hot_cache[1], 0.0
    assert lost() == []
    backend.get_blocking(1)
    assert [slot.unit for slot in lost()] == ["KV chunk"]


def test_what_lmcache_pinned_for_a_request_is_lost_unless_the_request_waits(slots: dict[str, ModuleType]) -> None:
    engine, scheduler = slots["cache_engine"].LMCacheEngine(), slots["scheduler"].Scheduler()
    engine.lookup_pins["cmpl-1"] = {"LocalCPUBackend": ["a", "b"], "LocalDiskBackend": ["c"]}
    engine.lookup_pins["cmpl-2"] = {}
    scheduler.requests["cmpl-1"] = None
    assert lost() == []
    scheduler.requests.clear()
    (slot,) = lost()
    assert (slot.request, slot.number) == ("cmpl-1", "3 chunks of cmpl-1")


@pytest.mark.parametrize(("padded", "kv"), [(0, False), (1, True)])
def test_a_row_of_sglang_s_is_lost_that_no_running_request_has(
    slots: dict[str, ModuleType], padded: int, kv: bool
) -> None:
    pool = slots["memory_pool"].ReqToTokenPool(4, padded=padded)
    assert lost() == []
    running, ended = (slots["schedule_batch"].Req(name, pool.free_slots.pop(), kv=kv) for name in ("a", "b"))
    assert lost() == []
    ended.finished_reason = "length"
    (slot,) = lost()
    assert (slot.request, slot.owner) == ("b", "a request that has ended")
    row = pool.free_slots.pop()
    assert [slot.number for slot in lost() if slot.owner == "no request"] == [str(row)]
    pool.free_slots += [row, int(slot.number)]
    assert lost() == []
    del running


def test_slots_of_another_version_are_not_measured(slots: dict[str, ModuleType]) -> None:
    pool = slots["memory_pool"].ReqToTokenPool(4, padded=1)
    del pool.free_slots
    reading = RequestSlots(at_once=True).read()
    assert [*reading.unread] == ["slots of sglang.srt.mem_cache.memory_pool.ReqToTokenPool"]
