"""The engine's process group: alone, beside the program's own, and gone after shutdown."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch's stubs leave it out

from lowtide.engine import EngineConfig, EngineError, LLMEngine, SamplingParams
from lowtide.engine.model_executor.parallel_layers import ProcessGroup, RankPlace
from lowtide.leakcheck.resources.processes import ProcessGroups
from lowtide.probes.host.process_files import numbered_descriptors

CPU = torch.device("cpu")
CONFIG = EngineConfig(kv_cache_bytes=1 << 20, process_group=True)


def process_groups() -> list[str]:
    return list(ProcessGroups().read())


@pytest.fixture
def program_s_own() -> Iterator[str]:
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    (name,) = process_groups()
    yield name
    distributed.destroy_process_group()


def test_it_is_the_default_group_where_there_is_none_and_goes_with_all_it_has() -> None:
    ProcessGroup(CPU).destroy()  # what gloo keeps for good comes with its first use
    before = numbered_descriptors(os.getpid())
    group = ProcessGroup(CPU)
    assert len(process_groups()) == 1
    assert distributed.is_initialized()
    group.destroy()
    assert process_groups() == []
    assert not distributed.is_initialized()
    assert numbered_descriptors(os.getpid()) == before
    group.destroy()


def test_the_program_s_own_group_stays(program_s_own: str) -> None:
    group = ProcessGroup(CPU)
    assert len(process_groups()) == 2
    group.destroy()
    assert process_groups() == [program_s_own]
    assert distributed.is_initialized()


def test_tokens_go_through_it_unchanged() -> None:
    group = ProcessGroup(CPU)
    tokens = torch.tensor([3, 1, 2])
    group.broadcast(tokens)
    assert tokens.tolist() == [3, 1, 2]
    group.destroy()


def test_ranks_can_suspend_it_and_make_it_again(tmp_path: Path) -> None:
    group = ProcessGroup(CPU, RankPlace(0, 1, str(tmp_path / "store")))
    for _ in range(2):
        assert len(process_groups()) == 1
        assert group.all_reduce(torch.tensor([2.0])).tolist() == [2.0]
        assert group.all_gather(torch.tensor([[1.0, 2.0]])).tolist() == [[1.0, 2.0]]
        group.destroy()
        assert process_groups() == []
        group.resume()
    group.resume()
    group.destroy()
    assert process_groups() == []


def test_an_engine_samples_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    original = ProcessGroup.broadcast

    def broadcast(self: ProcessGroup, tokens: torch.Tensor) -> None:
        original(self, tokens)
        seen.append(tokens.tolist())

    monkeypatch.setattr(ProcessGroup, "broadcast", broadcast)
    with LLMEngine(CONFIG) as engine:
        (output,) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
    assert [token for tokens in seen for token in tokens] == list(output.token_ids)
    assert process_groups() == []


def test_an_engine_that_cannot_be_created_leaves_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.engine.worker.rotary_table", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        LLMEngine(CONFIG).create()
    assert process_groups() == []


def test_a_torch_without_the_backend_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "is_backend_available", lambda backend: False)
    with pytest.raises(EngineError, match="this torch has no gloo process groups: leave process_group off"):
        ProcessGroup(CPU)


def test_what_torch_says_comes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no interface")

    monkeypatch.setattr(distributed, "init_process_group", refuse)
    with pytest.raises(EngineError, match="a gloo process group cannot be made here: no interface"):
        ProcessGroup(CPU)
