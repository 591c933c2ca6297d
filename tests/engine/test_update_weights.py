"""Weights that a trainer sends: all of them arrive, in every shape of the engine; a failure leaves those of before."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide.engine import (
    EngineConfig,
    EngineState,
    EngineStateError,
    LLMEngine,
    SamplingParams,
    WeightUpdateError,
    llm_engine,
    weight_transfer,
)
from lowtide.engine.config import load_model_config
from lowtide.engine.errors import EngineDeadError, OutOfMemoryError
from lowtide.engine.model_executor.parallel_layers import shard_parameter
from lowtide.engine.model_executor.weights import RandomWeights, parameter_shapes
from lowtide.engine.weight_transfer import (
    CudaExport,
    CudaMemory,
    FileExport,
    PackedTensor,
    ReceivedBucket,
    SentBucket,
    added,
    checksum,
)
from lowtide.probes.stages import announced_pools
from tests.engine.process_watch import cores, nothing_stays, ranks

pytestmark = pytest.mark.nightly

ALONE = EngineConfig(kv_cache_bytes=1 << 20)
PROMPTS = [[1, 2, 3], list(range(40)), [7] * 20]
SHAPES: dict[str, dict[str, Any]] = {
    "in this process": {},
    "core apart": {"engine_process": True},
    "two ranks": {"tensor_parallel_size": 2},
    "core apart, with two ranks": {"engine_process": True, "tensor_parallel_size": 2},
}
SMALL_BUCKET = 200 << 10


def weights(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    model = load_model_config(ALONE)
    found = {name: torch.empty(shape, dtype=dtype) for name, shape in parameter_shapes(model).items()}
    RandomWeights(model, seed).fill(found)
    return found


def tokens(engine: LLMEngine) -> list[tuple[int, ...]]:
    return [output.token_ids for output in engine.generate(PROMPTS, SamplingParams(max_tokens=8, ignore_eos=True))]


def checksums(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    return {name: checksum(tensor) for name, tensor in tensors.items()}


def bucket_mappings(pid: int) -> int:
    return Path(f"/proc/{pid}/maps").read_text().count(weight_transfer.FILE_NAME)


def open_buckets() -> int:
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return sum(weight_transfer.FILE_NAME in str(link.readlink()) for link in links)


def staying_nowhere(shape: str) -> AbstractContextManager[object]:
    settings = SHAPES[shape]
    processes = settings.get("engine_process", 0) + settings.get("tensor_parallel_size", 0)
    return nothing_stays(at_least=int(processes)) if processes else nullcontext()


def on_host() -> int:
    return sum(pool.mapped for pool in announced_pools() if pool.kind == "host")


@pytest.fixture(scope="module")
def expected() -> dict[int, list[tuple[int, ...]]]:
    """The tokens of engines that have loaded their weights themselves, by seed."""
    found = {}
    for seed in (0, 1):
        with LLMEngine(replace(ALONE, seed=seed)) as engine:
            found[seed] = tokens(engine)
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_what_was_sent_is_there_and_says_what_it_says_elsewhere(shape: str, expected: dict[int, list]) -> None:
    new, old = weights(1), weights(0)
    with staying_nowhere(shape), LLMEngine(replace(ALONE, **SHAPES[shape])) as engine:
        assert engine.weight_checksums() == checksums(old)
        assert tokens(engine) == expected[0]
        mapped = engine.memory_mapped()
        engine.update_weights(new)
        assert engine.weight_checksums() == checksums(new)
        # Also where a prefix of the former weights was cached.
        assert tokens(engine) == expected[1] != expected[0]
        # By shards, in many buckets, some of which are smaller than one tensor.
        engine.update_weights(iter(old.items()), bucket_bytes=SMALL_BUCKET)
        assert tokens(engine) == expected[0]
        engine.update_weights({name: new[name] for name in list(new)[::2]})
        assert engine.weight_checksums() == checksums({**old, **{name: new[name] for name in list(new)[::2]}})
        engine.update_weights(new)
        engine.sleep(1)
        engine.wake()
        assert tokens(engine) == expected[1]
        assert {**engine.memory_mapped(), "workspace": 0} == {**mapped, "workspace": 0}
        assert open_buckets() == 0
        pids = [os.getpid(), *(process.pid for core in cores() for process in (core, *ranks(core)))]
        assert [bucket_mappings(pid) for pid in [*pids, *(rank.pid for rank in ranks())]] == [0] * (
            len(pids) + len(ranks())
        )


@pytest.mark.parametrize("shape", ["in this process", "core apart, with two ranks"])
def test_an_update_that_fails_half_way_leaves_the_weights_of_before(shape: str, expected: dict[int, list]) -> None:
    new = weights(1)
    wrong = {**new, "model.norm.weight": torch.ones(3)}

    def breaks_off() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(new.items())[:-1]
        raise RuntimeError("the trainer has failed")

    with staying_nowhere(shape), LLMEngine(replace(ALONE, **SHAPES[shape])) as engine:
        before = engine.weight_checksums()
        for sent, error, said in (
            (wrong, WeightUpdateError, r"'model.norm.weight' has shape \[\d+\], and \[3\] was sent: send it whole"),
            ({**new, "lm_head.bias": torch.ones(3)}, WeightUpdateError, "has no parameter 'lm_head.bias'"),
            (breaks_off(), RuntimeError, "the trainer has failed"),
            ({}, WeightUpdateError, "no tensor was sent"),
        ):
            with pytest.raises(error, match=said):
                engine.update_weights(sent, bucket_bytes=SMALL_BUCKET)
            assert engine.state is EngineState.RUNNING
            assert engine.weight_checksums() == before
        assert tokens(engine) == expected[0]
        assert open_buckets() == 0
        engine.update_weights(new)
        assert tokens(engine) == expected[1]


def test_without_room_for_a_bucket_nothing_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(file: int, start: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    with LLMEngine(replace(ALONE, keep_host_copy=False)) as engine:
        before, held = engine.weight_checksums(), on_host()
        with monkeypatch.context() as patched:
            patched.setattr(os, "posix_fallocate", no_room)
            with pytest.raises(OutOfMemoryError, match=r"no room for a bucket of \d+ bytes in shared memory"):
                engine.update_weights(weights(1))
        assert (engine.weight_checksums(), on_host(), open_buckets()) == (before, held, 0)


def test_what_torch_has_cached_of_buckets_goes_where_the_worker_is_in_another_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    emptied: list[str] = []
    monkeypatch.setattr(llm_engine, "release_cached", emptied.append)
    for config, is_sent in [(ALONE, True), (replace(ALONE, engine_process=True), False)]:
        with LLMEngine(config) as engine:
            if is_sent:
                engine.update_weights(weights(1), bucket_bytes=SMALL_BUCKET)
    assert emptied == []
    with LLMEngine(replace(ALONE, engine_process=True)) as engine:
        engine.update_weights(weights(1), bucket_bytes=SMALL_BUCKET)
        assert emptied == []
    assert emptied == ["cpu"]


@pytest.mark.parametrize(("device", "times"), [("cpu", 0), ("cuda:1", 1)])
def test_only_a_cards_cache_is_emptied(device: str, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[None] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(None))
    weight_transfer.release_cached(device)
    assert len(emptied) == times


def test_a_core_that_ends_in_an_update_is_said_to_have_ended() -> None:
    def kills() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(weights(1).items())[:4]
        cores()[0].kill()
        yield from list(weights(1).items())[4:]

    with nothing_stays(at_least=1):
        engine = LLMEngine(replace(ALONE, engine_process=True))
        engine.create()
        with pytest.raises(EngineDeadError, match=r"EngineCore \(pid \d+\) has ended: killed by SIGKILL"):
            engine.update_weights(kills(), bucket_bytes=SMALL_BUCKET)
        engine.shutdown()


def test_a_trainer_wakes_the_weights_alone_and_sends_them() -> None:
    new = weights(1)
    with LLMEngine(ALONE) as engine:
        engine.sleep(2)
        for call in (lambda: engine.update_weights(new), engine.weight_checksums):
            with pytest.raises(
                EngineStateError, match=r"weight(s|_checksums) is not allowed while the engine is asleep"
            ):
                call()
        engine.wake("weights")
        engine.update_weights(new)
        assert engine.state is EngineState.ASLEEP
        engine.wake("kv_cache")
        assert engine.weight_checksums() == checksums(new)
        # A level 2 sleep drops them: they come back from where the engine loads its own.
        engine.sleep(2)
        engine.wake()
        assert engine.weight_checksums() == checksums(weights(0))


def test_requests_do_not_go_on_with_other_weights() -> None:
    with LLMEngine(ALONE) as engine:
        request = engine.add_request([1, 2, 3])
        with pytest.raises(EngineStateError, match=r"requests are unfinished; finish them first\); allowed now: step"):
            engine.update_weights(weights(1))
        engine.abort(request)
        engine.update_weights(weights(1))


def test_weights_of_another_dtype_are_cast() -> None:
    sent = weights(1, torch.float64)
    with LLMEngine(replace(ALONE, dtype="bfloat16")) as engine:
        engine.update_weights(sent)
        assert engine.weight_checksums() == checksums({name: each.bfloat16() for name, each in sent.items()})


@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"])
def test_checksums_of_parts_add_up_and_one_bit_changes_them(name: str) -> None:
    whole = torch.randn(257, 96)
    shards = [shard_parameter(name, (257, 96), rank, 2) for rank in (0, 1)]
    assert added({name: checksum(whole[shard.index], shard)} for shard in shards) == {name: checksum(whole)}
    changed, swapped = whole.clone(), whole.clone()
    changed.view(torch.int32)[200, 95] ^= 1
    swapped[[3, 200]] = whole[[200, 3]]
    assert len({checksum(each) for each in (whole, changed, swapped)}) == 3


@pytest.mark.parametrize("place", range(8))
def test_the_uppermost_bit_of_an_element_counts_at_every_place(place: int) -> None:
    whole = torch.ones(8, dtype=torch.float64)
    changed = whole.clone()
    changed[place] = -1
    assert checksum(changed) != checksum(whole)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card; torch sees none")
@pytest.mark.parametrize("shape", ["in this process", "core apart"])
def test_weights_go_to_another_process_of_a_card(shape: str) -> None:
    new = {name: each.cuda() for name, each in weights(1).items()}
    # The first export to another process opens descriptors of the driver and of torch, which stay for the next.
    for staying in (nullcontext(), staying_nowhere(shape)):
        with staying, LLMEngine(replace(ALONE, device="cuda", **SHAPES[shape])) as engine:
            torch.cuda.synchronize()
            held = torch.cuda.memory_allocated()
            for _ in range(3):
                engine.update_weights(iter(new.items()), bucket_bytes=SMALL_BUCKET)
                assert engine.weight_checksums() == checksums(new)
                assert torch.cuda.memory_allocated() == held


def test_a_rank_on_another_card_gets_a_copy_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    of_card = CudaExport((0, b"", 64, 0), (b"", 0, b"", False))
    monkeypatch.setattr(CudaMemory, "export", lambda _: of_card)
    memory = CudaMemory(64, torch.device("cpu"))
    weight = PackedTensor("weight", "float32", [16], 0)
    for turn in (1.0, 2.0):
        weight.over(memory.data).fill_(turn)
        first, *others = SentBucket([weight], memory).shared(3).exports
        assert first is of_card
        for export in others:
            with ReceivedBucket([weight], [export]).opened() as tensors:
                assert tensors["weight"].tolist() == [turn] * 16
    assert isinstance(others[0], FileExport)
    assert SentBucket([weight], memory).shared(1).exports == [of_card]
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    memory.close()
    assert not Path(others[0].path).exists()
