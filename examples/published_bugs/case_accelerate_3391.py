"""accelerate#3391: `GradientState` keeps each loader whose loop was left early (1.3.0; right in 1.15.0)."""

import accelerate
import torch


def test_first_batch():
    data = torch.utils.data.TensorDataset(torch.randn(1024, 1024))
    loader = accelerate.Accelerator(cpu=True).prepare(torch.utils.data.DataLoader(data, batch_size=64))
    for _ in loader:
        break
