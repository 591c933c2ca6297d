"""Checkpoint folders: what is wrong with one is said before any memory is taken."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from lowtide.engine import EngineConfig, LLMEngine, SamplingParams
from lowtide.engine.config import read_model_config
from lowtide.engine.errors import CheckpointError, ConfigError, EngineStateError
from lowtide.engine.model_executor import weights as checkpoint
from lowtide.engine.model_executor.weights import INDEX_FILE, SINGLE_FILE, CheckpointWeights, load_tokenizer

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def single(write_checkpoint: Callable[[str], Path]) -> Path:
    return write_checkpoint("llama-grouped-heads")


@pytest.fixture
def sharded(write_checkpoint: Callable[[str], Path]) -> Path:
    return write_checkpoint("qwen2-sharded")


def source(folder: Path) -> CheckpointWeights:
    return CheckpointWeights(folder, read_model_config(folder))


def replace_tensor(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    tensors = load_file(folder / SINGLE_FILE)
    tensors.pop(name, None)
    if tensor is not None:
        tensors[name] = tensor
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})


def shard_of(folder: Path, name: str) -> Path:
    return folder / json.loads((folder / INDEX_FILE).read_text())["weight_map"][name]


def test_a_missing_tensor_is_named_with_its_shape(single: Path) -> None:
    replace_tensor(single, Q_PROJ, None)
    with pytest.raises(
        CheckpointError, match=rf"{SINGLE_FILE} does not hold tensor {Q_PROJ}; expected shape \[48, 48\]"
    ):
        source(single).check()


def test_a_misshapen_tensor_is_named_with_both_shapes(single: Path) -> None:
    replace_tensor(single, Q_PROJ, torch.zeros(48, 1))
    with pytest.raises(CheckpointError, match=rf"{Q_PROJ} has shape \[48, 1\]; config.json asks for \[48, 48\]"):
        source(single).check()


def test_a_dtype_that_is_no_float_is_named(single: Path) -> None:
    replace_tensor(single, Q_PROJ, torch.zeros(48, 48, dtype=torch.int64))
    with pytest.raises(CheckpointError, match=rf"{Q_PROJ} is of dtype I64; supported are float32, float16, bfloat16"):
        source(single).check()


def test_a_file_that_ends_early_is_named(single: Path) -> None:
    path = single / SINGLE_FILE
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=rf"{SINGLE_FILE} cannot be read as safetensors"):
        source(single).check()


def test_a_folder_without_safetensors(single: Path) -> None:
    (single / SINGLE_FILE).rename(single / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=f"holds neither {SINGLE_FILE} nor {INDEX_FILE}"):
        source(single).check()


def test_a_missing_shard_is_named_with_what_it_should_hold(sharded: Path) -> None:
    shard = shard_of(sharded, "model.norm.weight")
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"shard .*{shard.name} is missing; .* says that it holds tensor"):
        source(sharded).check()


def test_a_shard_that_ends_early_is_named(sharded: Path) -> None:
    shard = shard_of(sharded, Q_PROJ)
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=f"{shard.name} cannot be read"):
        source(sharded).check()


def test_an_index_that_does_not_list_a_tensor(sharded: Path) -> None:
    index = json.loads((sharded / INDEX_FILE).read_text())
    del index["weight_map"][Q_PROJ]
    (sharded / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=f"{INDEX_FILE} does not list tensor {Q_PROJ}"):
        source(sharded).check()


def test_an_index_that_points_into_the_wrong_shard(sharded: Path) -> None:
    index = json.loads((sharded / INDEX_FILE).read_text())
    other = next(name for name in index["weight_map"].values() if name != index["weight_map"][Q_PROJ])
    index["weight_map"][Q_PROJ] = other
    (sharded / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=f"{other} does not hold tensor {Q_PROJ}"):
        source(sharded).check()


def test_an_index_that_is_no_index(sharded: Path) -> None:
    (sharded / INDEX_FILE).write_text('{"weight_map": 3}')
    with pytest.raises(CheckpointError, match=f"{INDEX_FILE} cannot be read"):
        source(sharded).check()


def test_tensors_that_the_model_does_not_have_are_passed_over(single: Path) -> None:
    replace_tensor(single, "model.layers.0.self_attn.rotary_emb.inv_freq", torch.zeros(4))
    source(single).check()


def test_a_tied_head_may_be_saved_all_the_same(write_checkpoint: Callable[[str], Path]) -> None:
    folder = write_checkpoint("llama-tied-head")
    source(folder).check()
    replace_tensor(folder, "lm_head.weight", torch.zeros(3))
    source(folder).check()


def test_a_folder_that_went_bad_touches_no_parameter(single: Path) -> None:
    weights = source(single)
    parameters = {name: torch.full(shape, 7.0) for name, shape in weights.shapes().items()}
    replace_tensor(single, "lm_head.weight", torch.zeros(1, 1))
    with pytest.raises(CheckpointError, match="lm_head"):
        weights.fill(parameters)
    assert all(bool((parameter == 7.0).all()) for parameter in parameters.values())


@pytest.mark.parametrize("bad", [False, True])
def test_no_file_stays_open(sharded: Path, bad: bool) -> None:
    weights = source(sharded)
    parameters = {name: torch.empty(shape) for name, shape in weights.shapes().items()}
    weights.fill(parameters)
    before = psutil.Process().num_fds()
    if bad:
        shard = shard_of(sharded, "model.norm.weight")
        shard.write_bytes(shard.read_bytes()[:-1])
        with pytest.raises(CheckpointError):
            weights.fill(parameters)
    else:
        weights.fill(parameters)
    assert psutil.Process().num_fds() == before
    assert not [region.path for region in psutil.Process().memory_maps() if str(sharded) in region.path]


def test_the_tokenizer_of_a_folder(tmp_path: Path) -> None:
    Tokenizer(WordLevel({"ebb": 0, "flow": 1}, unk_token="ebb")).save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.encode("flow").ids == [1]


def test_an_engine_takes_and_gives_text_while_it_has_a_model(write_checkpoint: Callable[..., Path]) -> None:
    folder = write_checkpoint("llama-grouped-heads")
    words = {f"word{index}": index for index in range(199)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="word0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    engine = LLMEngine(EngineConfig(model=str(folder), num_blocks=64))
    with pytest.raises(EngineStateError, match="decode is not allowed while the engine is new"):
        engine.decode([5])
    with engine:
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        (by_text,) = engine.generate(["word5 word7"], params)
        (by_ids,) = engine.generate([[5, 7]], params)
        assert by_text.token_ids == by_ids.token_ids
        assert engine.decode(by_text.token_ids) == " ".join(f"word{index}" for index in by_ids.token_ids)
    with pytest.raises(EngineStateError, match="decode is not allowed while the engine is closed"):
        engine.decode([5])
    assert not any(isinstance(held, Tokenizer) for held in vars(engine).values())


def test_a_folder_without_tokenizer(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None


def test_a_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path)


def test_without_the_packages_the_error_says_how_to_get_them(
    single: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_installed(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(checkpoint, "import_module", not_installed)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r'safetensors: pip install "lowtide\[models\]"'):
        source(single).check()
    with pytest.raises(ConfigError, match=r'tokenizers: pip install "lowtide\[models\]"'):
        load_tokenizer(tmp_path)
