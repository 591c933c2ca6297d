"""Settings and config.json: what is understood, and what each refusal says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lowtide.engine import LLMEngine
from lowtide.engine.config import (
    PRESETS,
    EngineConfig,
    RopeConfig,
    load_model_config,
    read_model_config,
    resolve_max_model_len,
)
from lowtide.engine.errors import CheckpointError, ConfigError
from lowtide.engine.kv.kv_cache import kv_cache_bytes_per_block, num_host_kv_blocks, num_kv_cache_blocks
from lowtide.engine.model_executor.weights import parameter_shapes

LLAMA_32_1B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_32_1B))
    return tmp_path


def test_the_1b_preset_is_llama_3_2_1b_without_an_end(folder: Path, edit_json: Callable[..., None]) -> None:
    edit_json(folder / "config.json", eos_token_id=None)
    assert read_model_config(folder) == PRESETS["1b"]


def test_the_8b_preset_has_the_parameters_of_llama_3_1_8b() -> None:
    assert sum(_numel(shape) for shape in parameter_shapes(PRESETS["8b"]).values()) == 8_030_261_248


def test_rope_parameters_of_transformers_5_mean_the_same(folder: Path, edit_json: Callable[..., None]) -> None:
    before = read_model_config(folder)
    rope = {**LLAMA_32_1B["rope_scaling"], "rope_theta": 500000.0}
    edit_json(folder / "config.json", rope_scaling=None, rope_theta=None, rope_parameters=rope)
    edit_json(folder / "config.json", torch_dtype=None, dtype="bfloat16")
    assert read_model_config(folder) == before


def test_the_oldest_spelling_of_linear_scaling(folder: Path, edit_json: Callable[..., None]) -> None:
    edit_json(folder / "config.json", rope_scaling={"type": "linear", "factor": 4})
    assert read_model_config(folder).rope == RopeConfig(500000.0, "linear", factor=4.0)


def test_what_old_configs_leave_out_is_derived(folder: Path, edit_json: Callable[..., None]) -> None:
    absent = ("head_dim", "num_key_value_heads", "rope_scaling", "rope_theta", "torch_dtype", "eos_token_id")
    edit_json(folder / "config.json", **dict.fromkeys(absent))
    config = read_model_config(folder)
    assert (config.head_dim, config.num_kv_heads, config.dtype, config.eos_token_ids) == (64, 32, "float32", ())
    assert config.rope == RopeConfig()


def test_the_end_tokens_of_generation_config_win(folder: Path) -> None:
    assert read_model_config(folder).eos_token_ids == (128001, 128008, 128009)
    (folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert read_model_config(folder).eos_token_ids == (7,)


def test_a_generation_config_without_end_tokens_changes_nothing(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    assert read_model_config(folder).eos_token_ids == (128001, 128008, 128009)


def test_qwen2_has_biases_on_queries_keys_and_values_alone(tmp_path: Path) -> None:
    import transformers

    transformers.Qwen2Config(architectures=["Qwen2ForCausalLM"]).save_pretrained(tmp_path)
    config = read_model_config(tmp_path)
    assert (config.attention_bias, config.attention_output_bias, config.mlp_bias) == (True, False, False)


def test_llamas_attention_bias_covers_the_output_too(folder: Path, edit_json: Callable[..., None]) -> None:
    edit_json(folder / "config.json", attention_bias=True)
    config = read_model_config(folder)
    assert (config.attention_bias, config.attention_output_bias) == (True, True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r"GPT2LMHeadModel is not supported.*LlamaForCausalLM, Qwen2ForCausal"),
        ({"architectures": []}, r"\(none\) is not supported"),
        ({"architectures": None}, "architectures"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "large"}, r"\$\.hidden_size"),
        ({"hidden_size": 0}, "hidden_size 0 must be"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported is 'silu'"),
        ({"num_key_value_heads": 5}, "num_heads 32 must be a multiple of num_kv_heads 5"),
        ({"num_attention_heads": 33, "head_dim": None}, "hidden_size 2048 is not a multiple of num_attention_heads 33"),
        ({"num_attention_heads": 0, "head_dim": None}, "num_attention_heads 0"),
        ({"head_dim": 63}, "head_dim 63 must be even"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn' is not supported; supported are float32"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window attention"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type 'yarn' is not supported; supported are default, linear"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "'llama3' needs the key 'low_freq_factor'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'linear' needs the key 'factor'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor 0"),
        ({"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"rope_scaling": {**LLAMA_32_1B["rope_scaling"], "low_freq_factor": 4.0}}, "low_freq_factor 4.0"),
    ],
)
def test_what_cannot_be_loaded_is_named(
    folder: Path, edit_json: Callable[..., None], changes: dict[str, Any], said: str
) -> None:
    edit_json(folder / "config.json", **changes)
    with pytest.raises(CheckpointError, match=said) as caught:
        read_model_config(folder)
    assert str(folder / "config.json") in str(caught.value)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe"])
def test_a_config_that_is_no_json_object(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        read_model_config(folder)


def test_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is missing.*not a Hugging Face checkpoint folder"):
        read_model_config(tmp_path)


def test_a_model_that_is_neither_preset_nor_folder() -> None:
    with pytest.raises(CheckpointError, match=r"tinny is neither a preset \(tiny, 1b, 8b\) nor a folder"):
        load_model_config(EngineConfig(model="tinny"))


def test_the_dtype_of_the_engine_wins() -> None:
    assert load_model_config(EngineConfig(model="8b", dtype="float16")).dtype == "float16"


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"model": ""}, "model is empty"),
        ({"device": "tpu"}, "device 'tpu' is not known; allowed are cpu, cuda and cuda:N"),
        ({"dtype": "int8"}, "dtype 'int8' is not supported"),
        ({"seed": -1}, "seed -1"),
        ({"block_size": 0}, "block_size 0"),
        ({"block_size": 1.5}, "block_size 1.5"),
        ({"num_blocks": 0}, "num_blocks 0"),
        ({"kv_cache_bytes": -5}, "kv_cache_bytes -5"),
        ({"max_num_seqs": True}, "max_num_seqs True"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens 0"),
        ({"max_model_len": 0}, "max_model_len 0"),
        ({"num_micro_batches": 3}, "num_micro_batches 3 must be a whole number from 1 to 2"),
        ({"num_blocks": 4, "kv_cache_bytes": 4096}, "num_blocks and kv_cache_bytes both"),
        ({"kv_offload_bytes": -1}, "kv_offload_bytes -1 must be a whole number from 0"),
        ({"kv_offload_bytes": True}, "kv_offload_bytes True must be a whole number from 0"),
        ({"kv_offload_bytes": 1 << 20, "enable_prefix_caching": False}, "kv_offload_bytes needs enable_prefix_caching"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size 0 must be a whole number from 1 to 64"),
        ({"tensor_parallel_size": 2, "cuda_graphs": True}, "cuda_graphs does not work with tensor_parallel_size above"),
        (
            {"tensor_parallel_size": 2, "kv_offload_bytes": 1 << 20},
            "kv_offload_bytes does not work with tensor_parallel_size above 1: leave one of them off",
        ),
        (
            {"tensor_parallel_size": 2, "async_scheduling": True},
            "async_scheduling does not work with tensor_parallel_size above 1: leave one of them off",
        ),
        (
            {"async_scheduling": True, "kv_offload_bytes": 1 << 20},
            "async_scheduling does not work with kv_offload_bytes",
        ),
        ({"cuda_graphs": True, "num_micro_batches": 2}, "cuda_graphs takes a step as one batch.*set it to 1"),
    ],
)
def test_a_setting_that_cannot_work_is_named(setting: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EngineConfig(**setting)


def test_tinys_kv_cache_is_64_mib() -> None:
    config = EngineConfig()
    model = load_model_config(config)
    blocks = num_kv_cache_blocks(config, model)
    assert blocks * kv_cache_bytes_per_block(model, config.block_size) == 64 << 20


def test_the_kv_cache_budget_of_a_folder_is_1_gib() -> None:
    assert EngineConfig(model="some/folder").kv_cache_budget == 1 << 30


def test_a_kv_cache_that_does_not_hold_one_block() -> None:
    config = EngineConfig(kv_cache_bytes=1000)
    with pytest.raises(ConfigError, match=r"kv_cache_bytes 1000 does not hold one block.*32768 bytes"):
        num_kv_cache_blocks(config, PRESETS["tiny"])


@pytest.mark.parametrize(("size", "blocks"), [(0, 0), (32768, 1), (3 * 32768 - 1, 2)])
def test_host_memory_for_kv_holds_whole_blocks(size: int, blocks: int) -> None:
    assert num_host_kv_blocks(EngineConfig(kv_offload_bytes=size), PRESETS["tiny"]) == blocks


@pytest.mark.parametrize(
    ("settings", "runs_ahead"),
    [
        ({}, False),
        ({"async_scheduling": True}, True),
        ({"device": "cuda", "cuda_graphs": True}, True),
        ({"device": "cuda", "cuda_graphs": True, "async_scheduling": False}, False),
        ({"device": "cuda", "cuda_graphs": True, "kv_offload_bytes": 1 << 20}, False),
    ],
)
def test_steps_are_launched_ahead_with_graphs_or_where_asked(settings: dict[str, Any], runs_ahead: bool) -> None:
    assert EngineConfig(**settings).runs_ahead is runs_ahead


def test_host_memory_that_does_not_hold_one_block() -> None:
    engine = LLMEngine(EngineConfig(kv_offload_bytes=1000))
    with pytest.raises(ConfigError, match=r"kv_offload_bytes 1000 does not hold one block.*32768 bytes"):
        engine.check()


def test_a_card_that_is_not_there_is_refused_before_anything_is_taken() -> None:
    with pytest.raises(ConfigError, match=r"torch sees no card here: use device 'cpu'|'cuda:99' does not exist"):
        LLMEngine(EngineConfig(device="cuda:99")).check()


def test_the_longest_request_is_what_model_and_cache_allow() -> None:
    tiny = PRESETS["tiny"]
    assert resolve_max_model_len(EngineConfig(), tiny, num_blocks=4096) == 2048
    assert resolve_max_model_len(EngineConfig(), tiny, num_blocks=3) == 48
    assert resolve_max_model_len(EngineConfig(max_model_len=40), tiny, num_blocks=3) == 40


@pytest.mark.parametrize(
    ("length", "said"), [(2049, "max_position_embeddings 2048"), (65, "4 blocks x 16 tokens = 64")]
)
def test_a_longest_request_beyond_them_is_refused(length: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve_max_model_len(EngineConfig(max_model_len=length), PRESETS["tiny"], num_blocks=4)


def _numel(shape: tuple[int, ...]) -> int:
    rows, *columns = shape
    return rows * (columns[0] if columns else 1)
