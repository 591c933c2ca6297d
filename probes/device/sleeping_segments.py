"""What torch counts as reserved although its pages are gone: the memory of a pool whose allocator sleeps.

torch hands a private pool's segments out and takes them back, and does not hear of what the pool's own allocator does
meanwhile: vLLM's unmaps all of them in a sleep, and torch's counters stay as they were.
"""

from __future__ import annotations

from lowtide.probes.device.allocations import read_allocations
from lowtide.probes.memory.ranges import Range, common, total
from lowtide.probes.originals import initialized_torch


def sleeping_bytes(device_index: int) -> int:
    """Bytes of the segments of private pools behind which the driver has no allocation; 0 where it cannot be asked.

    Args:
        device_index: of the card, as torch numbers it.
    """
    torch = initialized_torch()
    if torch is None:
        return 0
    segments: list[Range] = [
        (segment["address"], segment["total_size"])
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == device_index and tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)
    ]
    if not segments:
        return 0
    # An agent's thread has no context yet, and without one the driver knows no address; this makes it the thread's.
    torch.cuda.mem_get_info(device_index)
    present = read_allocations(device_index, among=sorted(segments))
    if present is None:
        return 0
    return total(segments) - total(common(segments, present))
