"""The driver's stream-ordered memory pool (`cudaMallocAsync`): what it keeps after everything in it was freed."""

from __future__ import annotations

import ctypes
from typing import Any

from lowtide.probes.originals import initialized_torch

# CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT and CU_MEMPOOL_ATTR_USED_MEM_CURRENT
_RESERVED, _USED = 5, 7


def idle_pool_bytes(device_index: int) -> int | None:
    """Bytes that the card's default pool has reserved and nobody uses; None where the driver cannot be asked.

    A pool gives freed memory back at the next synchronisation, unless its release threshold was raised: then the driver
    counts it as this process's, and no list of allocations has it. Asking takes some microseconds and makes no pool.
    """
    torch = initialized_torch()
    # With this backend the pool is torch's own, and its counters are right.
    if torch is None or torch.version.hip is not None or torch.cuda.get_allocator_backend() == "cudaMallocAsync":
        return None
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        find: Any = cuda.cuDeviceGetDefaultMemPool
        ask: Any = cuda.cuMemPoolGetAttribute
        card: Any = cuda.cuDeviceGet
    except (OSError, AttributeError):
        return None
    device, pool = ctypes.c_int(), ctypes.c_void_p()
    amounts = []
    if card(ctypes.byref(device), device_index) != 0 or find(ctypes.byref(pool), device) != 0:
        return None
    for attribute in (_RESERVED, _USED):
        value = ctypes.c_uint64()
        if ask(pool, attribute, ctypes.byref(value)) != 0:
            return None
        amounts.append(value.value)
    return amounts[0] - amounts[1]
