"""peft#2466: `delete_adapter` forgets the copies that `modules_to_save` made (0.15.2; right in 0.18.0)."""

import pytest
import torch
from peft import LoraConfig, get_peft_model


@pytest.fixture(scope="module")
def model():
    net = torch.nn.Sequential()
    net.add_module("lin", torch.nn.Linear(512, 512))
    net.add_module("head", torch.nn.Linear(512, 512))
    return get_peft_model(net, LoraConfig(target_modules=["lin"], modules_to_save=["head"]))


@pytest.mark.parametrize("number", range(6))
def test_adapter(model, number):
    model.add_adapter(f"a{number}", LoraConfig(target_modules=["lin"], modules_to_save=["head"]))
    model.delete_adapter(f"a{number}")
