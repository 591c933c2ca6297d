"""torchmetrics#902: a metric keeps the autograd graph of every batch (0.7.2; right in 0.7.3)."""

import pytest
import torch
import torchmetrics


@pytest.fixture(scope="module")
def net():
    return torch.nn.Linear(1024, 64)


@pytest.fixture(scope="module")
def mean():
    return torchmetrics.MeanMetric()


@pytest.mark.parametrize("batch", range(6))
def test_batch(net, mean, batch):
    mean.update(net(torch.randn(256, 1024)).pow(2).mean())
