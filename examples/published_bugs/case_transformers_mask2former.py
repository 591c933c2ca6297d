"""transformers: the cache on Mask2Former's position embedding pins the module that first ran (5.8.1)."""

import torch
from transformers.models.mask2former import modeling_mask2former as mask2former


def test_positions():
    embedding = mask2former.Mask2FormerSinePositionEmbedding(64)
    embedding((1, 3, 32, 32), torch.device("cpu"), torch.float32)
