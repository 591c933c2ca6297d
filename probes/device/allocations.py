"""The allocations of the CUDA driver itself: every address range that some code in this process asked it for."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lowtide.probes.device.torch_allocator import initialized_torch
from lowtide.probes.ranges import Range

# The driver hands out device addresses from reserved, inaccessible mappings, in steps of this.
_STEP = 2 << 20


def read_allocations(device_index: int, among: Sequence[Range] | None = None) -> tuple[Range, ...] | None:
    """Address and length of each allocation on a card, sorted; None where the driver cannot be asked.

    Args:
        device_index: of the card, as torch numbers it.
        among: an earlier list, to be told at once what is left of it: where kernels have run the driver reserves a
            terabyte of addresses, and to ask about each step takes a third of a second (measured on an H200).

    Kernels that a library loads on first use take device memory too, but the driver keeps that for itself: it is in no
    allocation. So this tells memory that somebody asked for from memory that the driver needs, which NVML's figure
    cannot. On Linux the driver reserves the host's addresses for what it hands out on a card (one address space for
    both), as private mappings without access; each 2 MiB step in those is asked about (`cuMemGetAddressRange`), about
    0.5 µs each. Of several small allocations in one step only those that begin where the previous one ends are seen,
    and managed memory is not: it is the host's until a kernel touches it.

    The tables that belong to kernels (their `__device__` variables: torch's random numbers bring 100 KiB with them)
    have addresses too, but nobody asked for them: they come and go with the code, and are left out.
    """
    torch = initialized_torch()
    if torch is None or torch.version.hip is not None:
        return None
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        ask: Any = cuda.cuMemGetAddressRange_v2
        attribute: Any = cuda.cuPointerGetAttribute
    except (OSError, AttributeError):
        return None
    ask.argtypes = (ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_size_t), ctypes.c_uint64)
    attribute.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64)

    def tell(which: int, address: int) -> int:
        value = ctypes.c_uint64()
        return value.value if attribute(ctypes.byref(value), which, address) == 0 else -1

    def belongs_to_code(address: int) -> bool:
        # Whatever is asked for can be shared with a process, or is managed, or a pool's, or mapped without a context.
        return (
            tell(_CONTEXT, address) > 0
            and tell(_SHAREABLE, address) == 0
            and tell(_MANAGED, address) == 0
            and tell(_POOL, address) == 0
        )

    found: dict[int, int] = {}
    start, length = ctypes.c_uint64(), ctypes.c_size_t()
    # A chip that shares its memory with the host has nothing that can be shared: there it tells nothing.
    shares = not torch.cuda.get_device_properties(device_index).is_integrated
    with torch.cuda.device(device_index):
        for low, high in _reserved() if among is None else ((address, address + 1) for address, _ in among):
            position = low
            while position < high:
                if ask(ctypes.byref(start), ctypes.byref(length), position) != 0:
                    position += _STEP - position % _STEP
                    continue
                if tell(_DEVICE_ORDINAL, position) == device_index and not (shares and belongs_to_code(position)):
                    found[start.value] = length.value
                position = max(start.value + length.value, position + 1)
    return tuple(sorted(found.items()))


def read_mappings_without_access(device_index: int, listed: Sequence[Range]) -> tuple[Range, ...]:
    """Address and length of physical memory of a card that is mapped, and that no access was granted to; sorted.

    `cuMemGetAddressRange` knows such a mapping only once `cuMemSetAccess` was called. The handle of the memory behind
    an address can be asked for before (`cuMemRetainAllocationHandle`), and is released again at once. Empty where the
    driver cannot be asked. Takes about 2 µs for each 2 MiB of reserved addresses, so it is to be asked only where the
    driver counts more than it lists.

    Args:
        device_index: of the card, as torch numbers it.
        listed: what `read_allocations` found: it is left out.
    """
    torch = initialized_torch()
    if torch is None or torch.version.hip is not None:
        return ()
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        retain: Any = cuda.cuMemRetainAllocationHandle
        release: Any = cuda.cuMemRelease
        describe: Any = cuda.cuMemGetAllocationPropertiesFromHandle
    except (OSError, AttributeError):
        return ()
    retain.argtypes = (ctypes.POINTER(ctypes.c_uint64), ctypes.c_uint64)
    release.argtypes = (ctypes.c_uint64,)
    # CUmemAllocationProp: type, requestedHandleTypes, location.type, location.id, and what is not read here.
    properties = (ctypes.c_int * 32)()
    describe.argtypes = (ctypes.c_void_p, ctypes.c_uint64)
    starts = [address for address, _ in listed]
    handle = ctypes.c_uint64()
    found: list[tuple[int, int]] = []
    last = 0
    with torch.cuda.device(device_index):
        for low, high in _reserved():
            for position in range(low, high, _STEP):
                before = bisect_right(starts, position) - 1
                if before >= 0 and position < listed[before][0] + listed[before][1]:
                    continue
                if retain(ctypes.byref(handle), position) != 0:
                    continue
                is_here = describe(properties, handle.value) == 0 and properties[3] == device_index
                release(handle.value)
                if not is_here:
                    continue
                if found and handle.value == last and sum(found[-1]) == position:
                    found[-1] = (found[-1][0], found[-1][1] + _STEP)
                else:
                    found.append((position, _STEP))
                last = handle.value
    return tuple(found)


# CU_POINTER_ATTRIBUTE_…: CONTEXT, IS_MANAGED, DEVICE_ORDINAL, IS_LEGACY_CUDA_IPC_CAPABLE, MEMPOOL_HANDLE
_CONTEXT, _MANAGED, _DEVICE_ORDINAL, _SHAREABLE, _POOL = 1, 8, 9, 10, 17


def _reserved() -> list[Range]:
    """First and last address of the mappings without access and without a file."""
    spans = []
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        fields = line.split(maxsplit=5)
        low, _, high = fields[0].partition("-")
        first = -(-int(low, 16) // _STEP) * _STEP
        if fields[1].startswith("---") and len(fields) < 6 and int(high, 16) - first >= _STEP:
            spans.append((first, int(high, 16)))
    return spans
