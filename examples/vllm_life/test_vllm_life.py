"""A life of a real vLLM in this process: create, generate, sleep, wake, shutdown.

    LT_MODEL=FOLDER_OR_NAME pytest --leakcheck

The engine must run in the test's own process to be judged; vLLM puts it into another one by default.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

if not torch.cuda.is_available():
    pytest.skip("needs a card", allow_module_level=True)
vllm = pytest.importorskip("vllm", reason="needs vLLM: pip install vllm")

MODEL = os.environ.get("LT_MODEL", "facebook/opt-125m")


@pytest.fixture
def llm() -> Iterator[Any]:
    llm = vllm.LLM(MODEL, enforce_eager=True, enable_sleep_mode=True, gpu_memory_utilization=0.3, max_model_len=1024)
    yield llm
    llm.llm_engine.engine_core.shutdown()


def test_life(llm: Any, leakcheck: Any) -> None:
    engine = leakcheck.engine(llm, infer="generate", sleep="sleep", wake="wake_up")
    params = vllm.SamplingParams(max_tokens=8, temperature=0)
    (before,) = engine.generate(["The tide"], params)
    engine.sleep(level=1)
    engine.wake_up()
    (after,) = engine.generate(["The tide"], params)
    assert before.outputs[0].token_ids == after.outputs[0].token_ids
