"""Whether captured CUDA graphs are alive: the driver keeps memory for each of them that no list shows."""

from __future__ import annotations

from typing import Any

from lowtide.probes.objects.listed import Census, all_objects
from lowtide.probes.originals import loaded


def any_graph_alive() -> bool:
    """Whether there is any object of torch's graph type; goes through the whole heap where torch has that type."""
    torch: Any = loaded("torch")
    kind = None if torch is None else getattr(torch.cuda, "CUDAGraph", None)
    return kind is not None and bool(Census(all_objects()).instances_of(kind))
