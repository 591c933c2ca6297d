"""pytorch_optimizer: a hook of LOMO pins the model that it optimised (4.1.0)."""

import torch
from pytorch_optimizer import LOMO


def test_step():
    net = torch.nn.Linear(256, 256)
    optimizer = LOMO(net, lr=0.1)
    optimizer.fused_backward(net(torch.randn(4, 256)).sum(), lr=0.1)
