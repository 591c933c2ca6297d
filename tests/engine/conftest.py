"""Checkpoints written by transformers with the tokens that transformers generates, and an engine loop without memory.

The golden tests compare with these; nothing here comes from the engine under test except what drives it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from lowtide.engine.config import EngineConfig, load_model_config, resolve_max_model_len
from lowtide.engine.kv.kv_cache import KVCache, KVCacheManager, num_kv_cache_blocks
from lowtide.engine.model_executor.block_table import BlockTable
from lowtide.engine.model_executor.fused_ops import rotary_table
from lowtide.engine.model_executor.model import LlamaForCausalLM
from lowtide.engine.model_executor.parallel_layers import TensorParallelGroup
from lowtide.engine.model_executor.weights import INDEX_FILE, CheckpointWeights, RandomWeights, WeightSource
from lowtide.engine.request import Request, RequestOutput, SamplingParams, SchedulerOutput
from lowtide.engine.runner import ModelRunner
from lowtide.engine.scheduler import Scheduler
from tests.engine import random_checkpoint

if TYPE_CHECKING:
    import transformers

NUM_GOLDEN_TOKENS = 64
VOCAB_SIZE = random_checkpoint.SHAPE["vocab_size"]

SHAPE: dict[str, Any] = {
    **random_checkpoint.SHAPE,
    # Large, so that the likeliest token leads by far more than what the order of additions changes.
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}


@dataclass(frozen=True)
class Variety:
    """A kind of checkpoint: which model, what differs from `SHAPE`, and how large its files may be."""

    architecture: str
    changes: dict[str, Any] = field(default_factory=dict)
    max_shard_size: str = "1GB"


VARIETIES = {
    "llama-grouped-heads": Variety("Llama"),
    "llama-tied-head": Variety("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    "llama-all-biases": Variety("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "qwen2-biases": Variety("Qwen2"),
    "llama-llama3-rope": Variety("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear-rope": Variety("Llama", {"rope_parameters": LINEAR_ROPE}),
    "qwen2-sharded": Variety("Qwen2", {"num_key_value_heads": 1}, max_shard_size="60KB"),
}


@dataclass(frozen=True)
class Golden:
    """A checkpoint folder, prompts, and the greedy tokens that transformers generates for each of them."""

    folder: Path
    prompts: tuple[tuple[int, ...], ...]
    tokens: tuple[tuple[int, ...], ...]


def build_reference(variety: Variety, seed: int = 0) -> transformers.PreTrainedModel:
    """A random model of transformers, its biases and norms included."""
    # Only here: it triples the heap, and with it what every snapshot of every other test costs.
    import transformers

    config_class = getattr(transformers, f"{variety.architecture}Config")
    model_class = getattr(transformers, f"{variety.architecture}ForCausalLM")
    torch.manual_seed(seed)
    model = model_class(config_class(**{**SHAPE, **variety.changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.5)
            elif name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
    return model


def golden_prompts() -> tuple[tuple[int, ...], ...]:
    """Mixed lengths from one token on; four share their first 40 tokens, one of them all of its 40."""
    draw = random.Random(7)
    shared = [draw.randrange(VOCAB_SIZE) for _ in range(40)]
    lengths = [1, 5, 16, 17, 93]
    alone = [[draw.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]
    together = [shared + [draw.randrange(VOCAB_SIZE) for _ in range(extra)] for extra in (0, 1, 9, 30)]
    return tuple(map(tuple, [*alone, *together]))


def reference_tokens(
    model: transformers.PreTrainedModel, prompts: Sequence[Sequence[int]], num_tokens: int
) -> tuple[tuple[int, ...], ...]:
    """Greedy tokens of transformers, prompt by prompt; empty when the two best logits are ever so close that another
    order of additions could choose between them (the engine's logits differ by up to 3e-6): that would judge rounding.
    """
    tokens = []
    for prompt in prompts:
        generated = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=num_tokens,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best, second = torch.stack(generated.logits).topk(2).values.unbind(-1)
        if (best - second).min() < 1e-4:
            return ()
        tokens.append(tuple(generated.sequences[0, len(prompt) :].tolist()))
    return tuple(tokens)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """These models are so small that a second thread costs more than it brings, above all beside other test workers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def write_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a checkpoint folder of one variety, a new one at each call."""

    def write(name: str, seed: int = 0) -> Path:
        folder = tmp_path_factory.mktemp(name)
        variety = VARIETIES[name]
        build_reference(variety, seed).save_pretrained(folder, max_shard_size=variety.max_shard_size)
        assert (folder / INDEX_FILE).exists() == name.endswith("sharded")
        return folder

    return write


@pytest.fixture(scope="session", params=VARIETIES)
def golden(request: pytest.FixtureRequest, write_checkpoint: Callable[..., Path]) -> Golden:
    """Each variety in turn."""
    prompts = golden_prompts()
    for seed in range(20):
        tokens = reference_tokens(build_reference(VARIETIES[request.param], seed), prompts, NUM_GOLDEN_TOKENS)
        if tokens:
            return Golden(write_checkpoint(request.param, seed), prompts, tokens)
    pytest.fail("every seed gives two logits that are too close to tell apart")


class TorchWorkspace:
    """Scratch memory from torch, filled with NaN: whoever reads what was never written is found out."""

    def __init__(self) -> None:
        self._lent: list[torch.Tensor] = []

    def get(self, *specs: tuple[Sequence[int], torch.dtype]) -> list[torch.Tensor]:
        self._lent = [poisoned(shape, dtype) for shape, dtype in specs]
        return self._lent

    def reserve(self, size: int) -> None:
        for tensor in self._lent:
            tensor.fill_(float("nan"))


def poisoned(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An allocator whose memory holds what no code may rely on."""
    tensor = torch.empty(tuple(shape), dtype=dtype)
    return tensor.fill_(float("nan") if dtype.is_floating_point else 2**31 - 1)


class Loop:
    """Scheduler and runner with memory from torch: the step loop of an engine, or of one rank, without its life."""

    def __init__(self, config: EngineConfig, group: TensorParallelGroup | None = None) -> None:
        model_config = load_model_config(config)
        num_blocks = num_kv_cache_blocks(config, model_config)
        max_model_len = resolve_max_model_len(config, model_config, num_blocks)
        preset = not Path(config.model).is_dir()
        rank, size = (0, 1) if group is None else (group.rank, group.size)
        source: WeightSource = (
            RandomWeights(model_config, config.seed, rank, size)
            if preset
            else CheckpointWeights(config.model, model_config, rank, size)
        )
        rotary = rotary_table(model_config, max_model_len, poisoned)
        self.model = LlamaForCausalLM(model_config, poisoned, rotary, group)
        source.fill(dict(self.model.named_parameters()))
        self.kv_cache_manager = KVCacheManager(num_blocks, config.block_size, config.enable_prefix_caching)
        self.scheduler = Scheduler(
            self.kv_cache_manager,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=max_model_len,
            vocab_size=model_config.vocab_size,
            eos_token_ids=model_config.eos_token_ids,
        )
        self.runner = ModelRunner(
            config,
            self.model,
            KVCache(model_config.shard(size), num_blocks, config.block_size, poisoned),
            BlockTable(config.max_num_seqs, -(-max_model_len // config.block_size), config.block_size, poisoned),
            [TorchWorkspace() for _ in range(config.num_micro_batches)],
            poisoned,
        )
        self.steps: list[SchedulerOutput] = []
        """What was planned, step by step."""

    def step(self) -> list[RequestOutput]:
        output = self.scheduler.schedule()
        self.steps.append(output)
        return self.scheduler.update_from_output(output, self.runner.execute_model(output))

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        """Runs all prompts to their end, in one batch as far as it goes; no request may hold a KV block then."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        for index, (prompt, own) in enumerate(zip(prompts, each, strict=True)):
            self.scheduler.add_request(Request(str(index), prompt, own))
        last = {}
        while self.scheduler.has_unfinished_requests():
            last.update({output.request_id: output for output in self.step()})
        assert self.kv_cache_manager.usage.held == 0
        return [last[str(index)] for index in range(len(prompts))]


@pytest.fixture
def make_loop() -> Callable[..., Loop]:
    """Builds a step loop from the settings of an `EngineConfig`, and for a rank its group."""
    return lambda group=None, **settings: Loop(EngineConfig(**settings), group)


@pytest.fixture
def edit_json() -> Callable[..., None]:
    """Changes keys of a JSON file; None as a value removes the key."""

    def edit(path: Path, **changes: object) -> None:
        content = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))

    return edit
