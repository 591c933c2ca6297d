"""The cards on which this process has a context, whoever made it; asking makes none and loads nothing."""

from __future__ import annotations

import ctypes
from typing import Any

from lowtide.probes.originals import os


def cards_with_contexts() -> list[int]:
    """The numbers of the cards with a context, sorted; none where CUDA's driver is not loaded or not initialised.

    The runtime, and with it cupy, numba and JAX, uses a card's primary context. One that a program made by itself is
    seen while it is current in this thread. Asking takes some microseconds.
    """
    try:
        cuda: Any = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        count, device, found = ctypes.c_int(), ctypes.c_int(), set()
        if cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
            return []
        for index in range(count.value):
            flags, active = ctypes.c_uint(), ctypes.c_int()
            if (
                cuda.cuDeviceGet(ctypes.byref(device), index) == 0
                and cuda.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)) == 0
                and active.value
            ):
                found.add(index)
        # Fails where none is current.
        if cuda.cuCtxGetDevice(ctypes.byref(device)) == 0:
            found.add(device.value)
    except (OSError, AttributeError):
        return []
    return sorted(found)
