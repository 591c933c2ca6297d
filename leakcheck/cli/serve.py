"""`lowtide serve`: the reference engine behind HTTP, with the endpoints of vLLM's server."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated

import typer

from lowtide.leakcheck.cli.console import interruptible, refuse
from lowtide.leakcheck.cli.run import (
    Bug,
    Checkpoint,
    RandomModel,
    Ranks,
    RunsOn,
    Twin,
    check_engine_options,
    configure_engine,
    model_name,
)
from lowtide.leakcheck.targets.target import Device, device_name


def serve(
    device: RunsOn = Device.AUTO,
    preset: RandomModel = None,
    model: Checkpoint = None,
    host: Annotated[str, typer.Option(help="Name or address to listen at; anybody who gets there may use it.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="To listen at; 0 takes one that is free.")] = 8000,
    seed: Annotated[int, typer.Option(help="Seed of random weights, and of requests that bring none.")] = 0,
    tensor_parallel_size: Ranks = 1,
    max_num_seqs: Annotated[int, typer.Option(help="Requests that run at the same time; others wait.")] = 64,
    max_model_len: Annotated[
        int | None, typer.Option(help="Prompt and output tokens of one request [default: what fits].")
    ] = None,
    defect: Bug = None,
    twin: Twin = False,
) -> None:
    """Serve the reference engine over HTTP as vLLM serves one, its core in a process of its own.

    It answers /v1/completions, /v1/models, /health, /metrics, /sleep, /wake_up, /is_sleeping and /reset_prefix_cache.
    SIGTERM and Ctrl-C end it: the core first, then the connections.

    Exit codes: 0 after Ctrl-C, 2 bad input, a port in use, or an engine that has ended by itself.
    """
    check_engine_options(preset, model, defect, twin=twin)
    with interruptible("interrupted before it served"):
        # Before the engine, so that what is missing is said before seconds are spent.
        from lowtide.engine import EngineError, LLMEngine
        from lowtide.engine.defects import find_defect
        from lowtide.engine.server import serve as serve_engine

        settings = {
            "model": model_name(preset, model),
            "device": device_name(device),
            "seed": seed,
            "tensor_parallel_size": tensor_parallel_size,
            "max_num_seqs": max_num_seqs,
            "max_model_len": max_model_len,
            "engine_process": True,
        }
        try:
            active = find_defect(defect) if defect is not None else None
            config, _ = configure_engine(settings, active, twin=twin)
            with ExitStack() as stack:
                if active is not None:
                    stack.enter_context(active.trigger() if twin else active.switched_on())
                serve_engine(LLMEngine(config), host, port)
        except EngineError as error:
            refuse(str(error))
