"""transformers#45412: a class's cache pins each RT-DETR that has run (5.8.1, 5.23.0)."""

import torch
from transformers.models.rt_detr import modeling_rt_detr as rt_detr


class Detector(rt_detr.RTDetrModel):
    """The model's own cached method, without the layers that take time to build."""

    def __init__(self):
        torch.nn.Module.__init__(self)
        self.layer = torch.nn.Linear(512, 512)
        self.register_buffer("anchors", torch.zeros(1))


def test_anchors():
    Detector().generate_anchors(((16, 16),))
