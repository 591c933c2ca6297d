"""Tokens a second of decoding, by batch, with CUDA graphs and without, and what one step's time goes to.

Floor: a step reads every weight once, so it takes at least the weights' bytes over the card's bandwidth, which is
measured here as a device-to-device copy. Peer: vLLM with the same shapes and dummy weights, in this process and on this
card, where it is installed; `--peer-only` leaves the engine out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import machine
import torch
from lifecycle import copy_bandwidth

from lowtide.engine import EngineConfig, LLMEngine, SamplingParams
from lowtide.engine.config import PRESETS

MAX_TOKENS = 64
# Sequences, and tokens that each has before.
CASES = ((1, 16), (8, 16), (8, 4000))
# Rows of the table of kernels.
KERNELS = 12


def begin(engine: LLMEngine, batch: int, context: int) -> None:
    """Compute the prompts, each of `context` tokens, and the first token of each."""
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    begun = {
        engine.add_request([1 + (7 * row + 13 * at) % 1000 for at in range(context)], params) for row in range(batch)
    }
    while begun:
        begun -= {output.request_id for output in engine.step()}
    torch.cuda.synchronize()


def decode(engine: LLMEngine, batch: int, context: int) -> float:
    """Return the tokens a second of the steps after that, each one token a sequence."""
    begin(engine, batch, context)
    tokens = 0
    started = time.perf_counter()
    while engine.has_unfinished_requests():
        tokens += len(engine.step())
    return tokens / (time.perf_counter() - started)


def kernels(engine: LLMEngine, batch: int, context: int) -> dict[str, Any]:
    """Microseconds of one step, those in which the card had something to do, and by kernel."""
    begin(engine, batch, context)
    steps = 16
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        started = time.perf_counter()
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
        took = time.perf_counter() - started
    while engine.has_unfinished_requests():
        engine.step()
    rows = sorted(
        ((each.self_device_time_total / steps, each.count / steps, each.key[:70]) for each in profiler.key_averages()),
        reverse=True,
    )
    busy = sum(row[0] for row in rows)
    return {
        "step_us": took / steps * 1e6,
        "busy_us": busy,
        "launches": sum(row[1] for row in rows),
        "kernels": [{"us": round(us, 1), "count": count, "name": name} for us, count, name in rows[:KERNELS]],
    }


def of_the_engine(preset: str, device: str, repeats: int, bandwidth: float) -> list[dict[str, Any]]:
    """Measure every case with CUDA graphs and without."""
    runs = []
    for cuda_graphs in (True, False):
        config = EngineConfig(
            model=preset, device=device, max_num_seqs=8, cuda_graphs=cuda_graphs, enable_prefix_caching=False
        )
        with LLMEngine(config) as engine:
            weights = engine.memory_mapped()["weights"]
            for batch, context in CASES:
                decode(engine, batch, context)
                rates = [decode(engine, batch, context) for _ in range(repeats)]
                runs.append(
                    {
                        "cuda_graphs": cuda_graphs,
                        "batch": batch,
                        "context": context,
                        "tokens_per_second": statistics.median(rates),
                        "best": max(rates),
                        "floor": batch * bandwidth / weights,
                        "profile": kernels(engine, batch, context),
                    }
                )
    return runs


def config_of(preset: str) -> dict[str, Any]:
    """Return the preset as Hugging Face's config.json has it."""
    model = dataclasses.asdict(PRESETS[preset])
    names = {
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
    }
    same = ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "max_position_embeddings", "rms_norm_eps")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{name: model[name] for name in same},
        **{theirs: model[ours] for ours, theirs in names.items()},
        "rope_theta": model["rope"]["theta"],
        "tie_word_embeddings": model["tie_word_embeddings"],
        "torch_dtype": model["dtype"],
        "hidden_act": "silu",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def of_vllm(preset: str, repeats: int) -> list[dict[str, Any]]:
    """Measure the same cases of vLLM in its default mode but for the process: compiled, with CUDA graphs."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import vllm

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config_of(preset)))
        engine = vllm.LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=8192,
            max_num_seqs=8,
            enable_prefix_caching=False,
            kv_cache_memory_bytes=8 << 30,
        )
    runs = []
    for batch, context in CASES:

        def seconds(tokens: int, batch: int = batch, context: int = context) -> float:
            prompts = [[1 + (7 * row + 13 * at) % 1000 for at in range(context)] for row in range(batch)]
            params = vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
            started = time.perf_counter()
            engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
            return time.perf_counter() - started

        seconds(MAX_TOKENS)
        # The prompts' own steps take as long with one token.
        rates = [batch * (MAX_TOKENS - 1) / (seconds(MAX_TOKENS) - seconds(1)) for _ in range(repeats)]
        runs.append(
            {"batch": batch, "context": context, "tokens_per_second": statistics.median(rates), "best": max(rates)}
        )
    return [{"vllm": vllm.__version__, **run} for run in runs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="8b")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peer-only", action="store_true")
    parser.add_argument("--name", default="decode")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    args = parser.parse_args()
    bandwidth = copy_bandwidth(args.device)
    torch.cuda.empty_cache()
    results: dict[str, Any] = {"preset": args.preset, "tokens": MAX_TOKENS}
    if not args.peer_only:
        results["runs"] = of_the_engine(args.preset, args.device, args.repeats, bandwidth)
    if find_spec("vllm"):
        results["peer"] = of_vllm(args.preset, args.repeats)
    results["copy_bandwidth_bytes_per_second"] = bandwidth
    machine.write(args.name, results, args.out)


if __name__ == "__main__":
    main()
