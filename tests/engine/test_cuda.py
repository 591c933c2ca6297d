"""The engine on a card: driver memory really comes and goes, and everything else is as on the CPU."""

from __future__ import annotations

import ctypes
import gc
import mmap
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lowtide.engine import DriverError, EngineConfig, EngineState, LLMEngine, OutOfMemoryError, SamplingParams
from lowtide.engine.config import PRESETS
from lowtide.engine.core import EngineCore
from lowtide.engine.device_allocator.arena import Arena
from lowtide.engine.device_allocator.memory import HostBuffer, TransferRing
from lowtide.engine.kv.kv_cache import HostBlock, KVCacheBlock, Transfer, kv_cache_bytes_per_block
from lowtide.engine.pages import open_backend
from lowtide.probes.device.driver import find_driver
from lowtide.probes.stages import announced_pools
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card; torch sees none"),
]

MIB = 1 << 20
GREEDY = SamplingParams(max_tokens=64, ignore_eos=True)


@pytest.fixture
def used() -> Iterator[Any]:
    """Bytes that the driver counts for this process, after torch gave back what it caches."""
    driver = find_driver()

    def read() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        held = driver.read(0).process_bytes
        assert held is not None
        return held

    torch.zeros(1, device="cuda")
    yield read
    driver.close()


def test_pages_come_and_go_under_tensors_that_stay(used: Any) -> None:
    before = used()
    arena = Arena("weights", 512 * MIB, open_backend("cuda"))
    assert used() == before
    tensor = arena.allocate((64 * MIB,), torch.float32)
    tensor.fill_(3.0)
    address = tensor.data_ptr()
    assert used() - before == 256 * MIB
    arena.unmap_to(0)
    assert used() == before
    arena.map_to(arena.used)
    tensor.fill_(4.0)
    assert (tensor.data_ptr(), tensor[-1].item()) == (address, 4.0)
    del tensor
    arena.close()
    assert used() == before


def test_a_leaked_tensor_keeps_the_arenas_memory_until_it_goes(used: Any) -> None:
    before = used()
    arena = Arena("weights", 64 * MIB, open_backend("cuda"))
    tensor = arena.allocate((1000,), torch.float32)
    tensor.fill_(5.0)
    arena.close()
    del arena
    assert used() - before == 2 * MIB
    assert tensor.sum().item() == 5000.0
    del tensor
    assert used() == before


def test_more_than_the_card_has_is_refused_and_nothing_is_kept(used: Any) -> None:
    before = used()
    size = 4 * torch.cuda.get_device_properties(0).total_memory
    arena = Arena("kv_cache", size, open_backend("cuda"))
    with pytest.raises(OutOfMemoryError, match=r"arena 'kv_cache' cannot grow .* bytes are free"):
        arena.map_to(size)
    assert arena.mapped == 0
    arena.close()
    assert used() == before


@pytest.mark.parametrize("size", [1, 3 * MIB + 7, 300 * MIB + 1])
def test_bytes_survive_the_way_to_the_host_and_back(size: int) -> None:
    backend = open_backend("cuda")
    arena = Arena("weights", size, backend)
    contents = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
    arena.allocate((size,), torch.uint8).copy_(contents)
    ring = TransferRing(backend, size)
    image = ring.new_image(size)
    for _ in range(2):
        ring.save(arena, image)
        arena.unmap_to(0)
        ring.restore(image, arena, size)
        assert torch.equal(arena.bytes_at(0, size), contents)
    image.close()
    ring.close()


def test_the_users_current_device_is_left_alone() -> None:
    last = torch.cuda.device_count() - 1
    before = torch.cuda.current_device()
    with LLMEngine(EngineConfig(device=f"cuda:{last}")):
        assert torch.cuda.current_device() == before


def test_tokens_equal_those_of_transformers_on_the_card_too(golden: Any) -> None:
    config = EngineConfig(model=str(golden.folder), device="cuda", block_size=8, num_blocks=256)
    with LLMEngine(config) as engine:
        for level in (None, 1, 2):
            if level is not None:
                engine.sleep(level)
                engine.wake()
            outputs = engine.generate(golden.prompts, GREEDY)
            assert [output.token_ids for output in outputs] == list(golden.tokens)


@pytest.mark.parametrize("level", [1, 2])
def test_a_life_gives_the_driver_back_what_it_took(used: Any, level: int) -> None:
    prompts = [[1, 2, 3], list(range(40))]
    with LLMEngine(EngineConfig(device="cuda")) as warm_up:
        expected = [output.token_ids for output in warm_up.generate(prompts, GREEDY)]
    before = used()
    engine = LLMEngine(EngineConfig(device="cuda"))
    engine.create()
    assert used() - before == sum(engine.memory_mapped().values())
    assert [output.token_ids for output in engine.generate(prompts, GREEDY)] == expected
    engine.sleep(level)
    assert used() - before == engine.memory_mapped()["runtime"]
    engine.wake()
    assert [output.token_ids for output in engine.generate(prompts, GREEDY)] == expected
    engine.shutdown()
    assert used() == before


def test_memory_goes_by_reference_count_alone_at_shutdown(used: Any) -> None:
    # What libraries and kernels keep of their first use is not the engine's.
    with LLMEngine(EngineConfig(device="cuda")) as warm_up:
        warm_up.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
    before = used()
    driver = find_driver()
    engine = LLMEngine(EngineConfig(device="cuda"))
    gc.collect()
    gc.disable()
    try:
        engine.create()
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
        engine.sleep(1)
        engine.wake()
        engine.shutdown()
        assert driver.read(0).process_bytes == before
    finally:
        gc.enable()
        driver.close()


@pytest.mark.parametrize("level", [1, 2])
def test_a_wake_without_room_leaves_the_engine_asleep_and_can_be_tried_again(used: Any, level: int) -> None:
    with LLMEngine(EngineConfig(device="cuda", kv_cache_bytes=4 << 30)) as engine:
        expected = engine.generate([[1, 2, 3]], GREEDY)[0].token_ids
        engine.sleep(level)
        asleep = used()
        free, _ = torch.cuda.mem_get_info()
        filler = torch.empty(free - (1 << 30), dtype=torch.uint8, device="cuda")
        with pytest.raises(OutOfMemoryError, match="arena 'kv_cache' cannot grow"):
            engine.wake()
        assert engine.state is EngineState.ASLEEP
        assert engine.memory_mapped()["weights"] == 0
        del filler
        assert used() == asleep
        engine.wake()
        assert engine.generate([[1, 2, 3]], GREEDY)[0].token_ids == expected


def test_a_create_without_room_takes_nothing(used: Any) -> None:
    before = used()
    engine = LLMEngine(EngineConfig(device="cuda", kv_cache_bytes=2 * torch.cuda.get_device_properties(0).total_memory))
    with pytest.raises(OutOfMemoryError, match="arena 'kv_cache'") as caught:
        engine.create()
    assert caught.value.__traceback__ is not None
    assert engine.state is EngineState.NEW
    assert used() == before


def offloading(num_blocks: int) -> EngineConfig:
    per_block = kv_cache_bytes_per_block(PRESETS["tiny"], 16)
    return EngineConfig(device="cuda", num_blocks=num_blocks, kv_offload_bytes=64 * per_block)


def test_a_dropped_host_buffer_is_unpinned_by_a_thread() -> None:
    buffer = HostBuffer("offload", 4 * MIB, 2 * MIB, open_backend("cuda"))
    tensor = buffer.tensor(0, 2 * MIB).fill_(7)
    buffer.pin(0)
    assert tensor.is_pinned()
    del buffer
    wait_until(lambda: not tensor.is_pinned())
    assert tensor.sum().item() == 14 * MIB


LONG = [[(7 * index + 101 * number) % 1000 for index in range(70)] for number in range(3)]


def test_host_memory_can_be_pinned_again_and_needs_unpinning_once() -> None:
    pages = open_backend("cuda")
    with mmap.mmap(-1, MIB) as mapping:
        start = ctypes.c_char.from_buffer(mapping)
        address = ctypes.addressof(start)
        for _ in range(2):
            pages.pin(address, MIB)
            with pytest.raises(DriverError, match="ALREADY_REGISTERED"):
                pages.pin(address, MIB)
            pages.unpin(address)
            pages.unpin(address)
        del start


@pytest.mark.parametrize("level", [1, 2])
def test_prefixes_come_back_from_pinned_memory_and_it_is_returned(used: Any, level: int) -> None:
    params = SamplingParams(max_tokens=6)
    with LLMEngine(EngineConfig(device="cuda", num_blocks=64)) as without:
        expected = [without.generate([prompt], params)[0].token_ids for prompt in LONG]
    with LLMEngine(offloading(5)) as warm_up:
        warm_up.generate(LONG, params)
    before = used()
    with LLMEngine(offloading(5)) as engine:
        for cached in (0, 64):
            outputs = [engine.generate([prompt], params)[0] for prompt in LONG]
            assert [output.token_ids for output in outputs] == expected
            assert [output.num_cached_tokens for output in outputs] == [cached] * 3
        assert ("pinned", "offloaded kv cache") in {(pool.kind, pool.tag) for pool in announced_pools()}
        engine.sleep(level)
        assert used() - before == engine.memory_mapped()["runtime"]
        engine.wake()
        outputs = engine.generate(LONG, params)
        assert [output.token_ids for output in outputs] == expected
    assert used() == before
    assert announced_pools() == ()
    assert not any(thread.name == "lowtide-kv-offload" for thread in threading.enumerate())


def test_a_copy_on_the_side_stream_waits_for_the_step_that_computes_its_block() -> None:
    with LLMEngine(offloading(8)) as engine:
        assert isinstance(engine._core, EngineCore)
        connector: Any = engine._core.worker.kv_connector
        rows = connector._rows[0]
        rows[3].fill_(1)
        torch.cuda.synchronize()
        # Some tenths of a second of nothing, then what the save must see.
        torch.cuda._sleep(500_000_000)
        rows[3].fill_(2)
        connector.begin(Transfer(False, [(KVCacheBlock(3), HostBlock(0, b""))], ()))
        connector.flush()
        # The host's bytes, read by a load into another block that a slow kernel before it still writes.
        torch.cuda._sleep(500_000_000)
        rows[5].fill_(3)
        connector.begin(Transfer(True, [(KVCacheBlock(5), HostBlock(0, b""))], ()))
        connector.flush()
        assert rows[5].eq(2).all()
        assert [end.error for end in connector.take_completed()] == [None, None]


def test_a_shutdown_while_the_card_is_busy_waits_for_the_copy(used: Any) -> None:
    with LLMEngine(offloading(24)) as warm_up:
        warm_up.generate(LONG, SamplingParams(max_tokens=6))
    torch.cuda._sleep(1)
    before = used()
    engine = LLMEngine(offloading(24))
    engine.create()
    engine.generate(LONG, SamplingParams(max_tokens=1))
    assert isinstance(engine._core, EngineCore)
    connector: Any = engine._core.worker.kv_connector
    torch.cuda._sleep(500_000_000)
    connector.begin(Transfer(False, [(KVCacheBlock(0), HostBlock(0, b""))], ()))
    engine.shutdown()
    del connector
    assert used() == before
    assert announced_pools() == ()
