"""Fifty turns of sleeping, training, waking and sending weights: nothing grows; vLLM's own socket files are left."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: pip install vllm")

import loop


def test_first_use(leakcheck: Any) -> None:
    # What vLLM and torch set up once in a process comes here.
    with loop.running() as made:
        loop.run(made, loop.Trainer(), turns=2)


def test_fifty_turns(leakcheck: Any) -> None:
    trainer = loop.Trainer()
    with loop.running() as made:
        engine = leakcheck.engine(made, infer="generate", sleep="sleep", wake="wake", update_weights="update_weights")
        loop.run(engine, trainer, turns=50)
