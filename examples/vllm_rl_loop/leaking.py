"""The worker keeps a tensor of each update: it grows, turn by turn, in a process that is not the test's."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: pip install vllm")

import loop


def test_ten_turns_of_a_worker_that_keeps_what_was_sent(leakcheck: Any) -> None:
    trainer = loop.Trainer()
    with loop.running("workers.KeepsSent") as made:
        engine = leakcheck.engine(made, infer="generate", sleep="sleep", wake="wake", update_weights="update_weights")
        loop.run(engine, trainer, turns=10)
