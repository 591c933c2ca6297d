"""Damaged shards: what the copies are, that the originals stay, and what an engine makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file

from lowtide.engine import EngineConfig, LLMEngine
from lowtide.engine.errors import CheckpointError
from lowtide.engine.model_executor import weights as module
from lowtide.engine.model_executor.parallel_layers import Shard
from lowtide.leakcheck.lives.sweep import Swept
from lowtide.leakcheck.targets.faults import DamagedShardError, Injection, ShardSeam, cut_short, injecting, misshape
from lowtide.leakcheck.targets.reference import SmallCheckpoint, checkpoint_target
from tests.leakcheck.swept import sweep

pytestmark = pytest.mark.nightly

DAMAGES = ("shard-cut", "shard-shape")


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(5)}, str(path), {"format": "pt"})
    return path


def test_a_shard_that_is_cut_short_cannot_be_opened(shard: Path, tmp_path: Path) -> None:
    whole = shard.read_bytes()
    cut_short(shard, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == whole[: len(whole) // 2]
    with pytest.raises(safetensors.SafetensorError):
        load_file(str(tmp_path / "copy"))
    assert shard.read_bytes() == whole


def test_a_misshapen_shard_is_valid_but_for_one_shape(shard: Path, tmp_path: Path) -> None:
    whole = shard.read_bytes()
    misshape(shard, tmp_path / "copy")
    was, now = load_file(str(shard)), load_file(str(tmp_path / "copy"))
    changed = [name for name in was if was[name].shape != now[name].shape]
    assert len(changed) == 1
    assert now[changed[0]].shape == (1, *was[changed[0]].shape)
    assert all(torch.equal(was[name].flatten(), now[name].flatten()) for name in was)
    assert shard.read_bytes() == whole


# --- as fault points ------------------------------------------------------------------------------------------------


def opened(kind: Any, at: int | None, *shards: Path) -> tuple[Injection, list[Path]]:
    """The paths that a reader of these shards gets."""
    got: list[Path] = []
    reader = SimpleNamespace(read=got.append)
    original = reader.read
    injection = Injection(kind, at)
    with injecting(injection, [ShardSeam(reader, "read")]):
        for path in shards:
            reader.read(str(path))
    assert reader.read is original
    return injection, got


def test_each_opening_is_a_point_and_one_of_them_gets_a_copy(shard: Path) -> None:
    injection, got = opened("shard-cut", 1, shard, shard, shard)
    assert [path == shard for path in got] == [True, False, True]
    assert [point.what for point in injection.passed] == ["model.safetensors"] * 3
    # The copy is gone with the block.
    assert not got[1].exists()
    injection, got = opened("shard-shape", None, shard, shard)
    assert (len(injection.passed), injection.raised, got) == (2, None, [shard, shard])


def test_of_another_kind_it_is_a_point_for_ctrl_c_only(shard: Path) -> None:
    injection, got = opened("allocation", 0, shard)
    assert (injection.passed, got) == ([], [shard])
    with pytest.raises(KeyboardInterrupt):
        opened("interrupt", 0, shard)


def test_the_error_over_a_damaged_shard_is_a_declared_one_that_names_it() -> None:
    injection = Injection("shard-cut", 0)
    injection.raised = DamagedShardError("model-1.safetensors")
    assert injection.caused(CheckpointError("model-1.safetensors cannot be read"), (CheckpointError,))
    assert not injection.caused(CheckpointError("a file cannot be read"), (CheckpointError,))
    assert not injection.caused(RuntimeError("model-1.safetensors cannot be read"), (CheckpointError,))


# --- in an engine ---------------------------------------------------------------------------------------------------


def test_a_shard_that_changes_after_it_was_checked_is_refused() -> None:
    with SmallCheckpoint() as written:
        shard = Path(written.folder, "model-1-of-2.safetensors")
        header = json.loads(shard.read_bytes()[8 : 8 + int.from_bytes(shard.read_bytes()[:8], "little")])
        name = next(name for name in reversed(header) if name != "__metadata__")
        parameter = torch.zeros(header[name]["shape"])
        with (
            injecting(Injection("shard-shape", 0), [ShardSeam(module, "open_safetensors")]),
            pytest.raises(CheckpointError, match=r"has shape \[1, .*\]; the model has \["),
        ):
            module.copy_tensors({shard: [name]}, {name: parameter}, {name: Shard(tuple(parameter.shape))})
        assert not parameter.any()


def test_a_small_checkpoint_gives_the_tokens_of_its_preset_and_is_gone_in_the_end() -> None:
    with SmallCheckpoint() as written:
        tokens = []
        for model in ("tiny", written.folder):
            with LLMEngine(EngineConfig(model=model, num_blocks=8)) as engine:
                tokens.append([output.token_ids for output in engine.generate([[1, 2, 3]])])
        assert tokens[0] == tokens[1]
    assert not Path(written.folder).exists()


@pytest.fixture(scope="module")
def swept() -> dict[tuple[str, str], Swept]:
    target = checkpoint_target("cpu")
    with target.context:
        found = sweep(target.factory, config=target.thorough, kinds=("shard-cut", "shard-shape"), every=2)
        return {(item.stage, item.kind): item for item in found}


@pytest.mark.parametrize("kind", DAMAGES)
@pytest.mark.parametrize(
    ("stage", "points"),
    # Each of two shards is opened to be checked, and again to be read.
    [("create", 6), ("reload", 6), ("sleep(2)", 2), ("wake from 2", 4), ("infer", 0), ("sleep(1)", 0)],
)
def test_the_engine_survives_a_damaged_shard_wherever_it_opens_one(
    swept: dict[tuple[str, str], Swept], stage: str, points: int, kind: str
) -> None:
    item = swept[stage, kind]
    assert (item.points, item.raised, item.findings) == (points, points // 2, ())
