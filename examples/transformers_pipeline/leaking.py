"""A hook that is never removed appends each layer's output to a list of the module."""

from __future__ import annotations

from typing import Any

import test_generate
import torch

OUTPUTS: list[torch.Tensor] = []


def keep(module: torch.nn.Module, inputs: Any, output: Any) -> None:
    OUTPUTS.append(output[0] if type(output) is tuple else output)


def test_looks_at_hidden_states() -> None:
    model = test_generate.make_model()
    model.model.layers[0].register_forward_hook(keep)
    test_generate.generate(model, 4)
    assert OUTPUTS
