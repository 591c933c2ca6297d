"""pytorch-grad-cam#132: a dropped extractor stays hooked to the model and keeps what it computes (1.3.1; 1.3.7)."""

import sys
from unittest import mock

import pytest
import torch

for drawing in ("cv2", "torchvision", "torchvision.transforms"):
    sys.modules[drawing] = mock.MagicMock()
from pytorch_grad_cam import activations_and_gradients as cam  # noqa: E402


@pytest.fixture(scope="module")
def model():
    return torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU())


@pytest.mark.parametrize("number", range(6))
def test_extract(model, number):
    new = hasattr(cam.ActivationsAndGradients, "release")
    extractor = cam.ActivationsAndGradients(model, [model[0]] if new else model[0], None)
    extractor(torch.randn(4, 3, 64, 64)).sum().backward()
    extractor.release() if new else None
