"""einops 0.8.2 and `torch.jit.trace`: scalars of each trace stay (torch's, not fixed)."""

import torch
from einops.layers.torch import Rearrange


def test_trace():
    layer = torch.nn.Sequential(Rearrange("b (h w) c -> b c h w", h=4), torch.nn.Conv2d(8, 8, 1))
    torch.jit.trace(layer, torch.randn(2, 16, 8))
