"""What the CUDA driver itself says of this process: its contexts, the ranges that some code asked it for, its pool.

torch hands a private pool's segments out and takes them back, and does not hear of what the pool's own allocator does
meanwhile: vLLM's unmaps all of them in a sleep, and torch's counters stay as they were (`with_sleepers`).
"""

from __future__ import annotations

import ctypes
import itertools
import operator
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from lowtide.probes.device.driver_trace import TRACE
from lowtide.probes.device.torch_allocator import AllocatorReading, PoolSegments, all_segments, read_segments
from lowtide.probes.mappings import read_mappings
from lowtide.probes.memory.ranges import Range, common, total, without
from lowtide.probes.originals import initialized_torch, os, time
from lowtide.probes.stages import announced_pools

# The driver hands out device addresses from reserved, inaccessible mappings, in steps of this.
STEP_BYTES = 2 << 20

# No allocation begins at any other address (CUDA C++ Programming Guide, "Device Memory Accesses").
_ALIGNMENT = 256

_ADDRESSES = 1 << 64

# Seconds that one list may take: it takes tenths of one, and a driver that answers otherwise may never come to an end.
_PATIENCE = 10.0

# The driver is asked about so many steps between two looks at the clock: some hundredths of a second.
_STEPS_AT_A_TIME = 1 << 16


class AllocationsError(RuntimeError):
    """The driver's allocations were not all listed; the message says why."""


def read_allocations(
    device_index: int, among: Sequence[Range] | None = None, known: Sequence[Range] = ()
) -> tuple[Range, ...] | None:
    """Address and length of each allocation on a card, sorted; None where the driver cannot be asked.

    Args:
        device_index: of the card, as torch numbers it.
        among: the ranges to look in, such as those of an earlier list, of which the part that is still there is found
            at once: where kernels have run the driver reserves a terabyte of addresses, and to ask about each step
            takes tenths of a second (measured on an H200).
        known: what an earlier list had. Small allocations share a step, and where the first of them is gone the others
            are looked for only if one of these lies there.

    Kernels that a library loads on first use take device memory too, but the driver keeps that for itself: it is in no
    allocation. So this separates memory that somebody asked for from memory that the driver needs, which NVML's figure
    does not. On Linux the driver reserves the host's addresses for what it hands out on a card (one address space for
    both), as private mappings without access; each 2 MiB step in those is asked about (`cuMemGetAddressRange`), in a
    loop of the interpreter's own, as half a million of them may be empty. Behind a small allocation the rest of its
    step is gone through. Managed memory is not seen: it is the host's until a kernel touches it
    (`read_host_allocations` has it).

    The tables that belong to kernels (their `__device__` variables: torch's random numbers bring 100 KiB with them)
    have addresses too, but nobody asked for them: they come and go with the code, and are left out.

    An answer that does not contain the address asked, as for the memory of a CUDA array (`cudaMallocArray`), says
    nothing: the driver is asked about the next step.

    Raises:
        AllocationsError: the list was not finished in time.
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
    # Addresses as plain integers: ctypes takes half as long for them as for pointer objects.
    ask.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
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
    answers = ctypes.addressof(start), ctypes.addressof(length)
    # A chip that shares its memory with the host has nothing that can be shared: there it says nothing.
    shares = not torch.cuda.get_device_properties(device_index).is_integrated
    deadline = _Deadline(device_index)

    def look(low: int, high: int, position: int | None) -> None:
        while position is not None:
            first, end = start.value, start.value + length.value
            following = _next_step(position)
            if first <= position < end <= _ADDRESSES:
                if tell(_DEVICE_ORDINAL, position) == device_index and not (shares and belongs_to_code(position)):
                    found[first] = length.value
                following = -(-end // _ALIGNMENT) * _ALIGNMENT
            position = None
            if length.value < STEP_BYTES:
                position = _first_answered(
                    ask, answers, following, min(high, _aligned(following)), deadline, _ALIGNMENT
                )
            if position is None:
                position = _first_answered(ask, answers, following, high, deadline)

    with torch.cuda.device(device_index):
        for low, high in _reserved() if among is None else [(address, address + size) for address, size in among]:
            look(low, high, _first_answered(ask, answers, low, high, deadline))
        gone = (address for address, size in known if size < STEP_BYTES and address not in found)
        for low in sorted({address // STEP_BYTES * STEP_BYTES for address in gone}):
            high = low + STEP_BYTES
            look(low, high, _first_answered(ask, answers, low, high, deadline, _ALIGNMENT))
    return tuple(sorted(found.items()))


def place_of_small_allocations(device_index: int) -> Range | None:
    """Return where the driver puts a small allocation now, by making one and giving it back; None where it cannot.

    Those of one step begin where the first gap was, so that `read_allocations` may not see them unless told where.

    Args:
        device_index: of the card, as torch numbers it; torch has a context there.
    """
    torch = initialized_torch()
    if torch is None or torch.version.hip is not None:
        return None
    try:
        cuda: Any = ctypes.CDLL("libcuda.so.1")
        take, give_back = cuda.cuMemAlloc_v2, cuda.cuMemFree_v2
    except (OSError, AttributeError):
        return None
    take.argtypes, give_back.argtypes = (ctypes.c_void_p, ctypes.c_size_t), (ctypes.c_uint64,)
    address = ctypes.c_uint64()
    with torch.cuda.device(device_index):
        if take(ctypes.byref(address), _ALIGNMENT) != 0:
            return None
        give_back(address.value)
    return address.value, _ALIGNMENT


def range_at(device_index: int, address: int) -> Range | None:
    """Address and length of what lies at an address on a card, whoever allocated it; None where the driver cannot say.

    What was imported from another process (`cudaIpcOpenMemHandle`) is in no list: the driver says the same of it as of
    the tables that belong to kernels.

    Args:
        device_index: of the card, as torch numbers it.
        address: there.
    """
    torch = initialized_torch()
    if torch is None or torch.version.hip is not None:
        return None
    try:
        ask: Any = ctypes.CDLL("libcuda.so.1").cuMemGetAddressRange_v2
    except (OSError, AttributeError):
        return None
    start, length = ctypes.c_uint64(), ctypes.c_size_t()
    with torch.cuda.device(device_index):
        answer = ask(ctypes.byref(start), ctypes.byref(length), ctypes.c_uint64(address))
    is_known = answer == 0 and start.value <= address < start.value + length.value
    return (start.value, length.value) if is_known else None


def read_mappings_without_access(device_index: int, listed: Sequence[Range]) -> tuple[Range, ...]:
    """Address and length of physical memory of a card that is mapped, and that no access was granted to; sorted.

    `cuMemGetAddressRange` knows such a mapping only once `cuMemSetAccess` was called. The handle of the memory behind
    an address can be asked for before (`cuMemRetainAllocationHandle`), and is released again at once. Empty where the
    driver cannot be asked. Takes longer than `read_allocations` does, so it is to be asked only where the driver counts
    more than it lists.

    Args:
        device_index: of the card, as torch numbers it.
        listed: what `read_allocations` found: it is left out.

    Raises:
        AllocationsError: the list was not finished in time.
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
    retain.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    release.argtypes = (ctypes.c_uint64,)
    # CUmemAllocationProp: type, requestedHandleTypes, location.type, location.id, and what is not read here.
    properties = (ctypes.c_int * 32)()
    describe.argtypes = (ctypes.c_void_p, ctypes.c_uint64)
    handle = ctypes.c_uint64()
    answers = (ctypes.addressof(handle),)
    found: list[tuple[int, int]] = []
    last = 0
    deadline = _Deadline(device_index)
    with torch.cuda.device(device_index):
        for address, size in without([(low, high - low) for low, high in _reserved()], listed):
            high = address + size
            position = _first_answered(retain, answers, _aligned(address), high, deadline)
            while position is not None:
                is_here = describe(properties, handle.value) == 0 and properties[3] == device_index
                release(handle.value)
                if is_here:
                    if found and handle.value == last and sum(found[-1]) == position:
                        found[-1] = (found[-1][0], found[-1][1] + STEP_BYTES)
                    else:
                        found.append((position, STEP_BYTES))
                    last = handle.value
                position = _first_answered(retain, answers, position + STEP_BYTES, high, deadline)
    return tuple(found)


class HostAllocation(NamedTuple):
    """Memory of the host that the driver has given out.

    Attributes:
        address: where it begins.
        bytes: its length.
        is_managed: whether it moves to a card and back (`cudaMallocManaged`); else it is page-locked.
    """

    address: int
    bytes: int
    is_managed: bool


def read_host_allocations(least: int) -> tuple[HostAllocation, ...]:
    """Return what `cudaHostAlloc` and `cudaMallocManaged` have given out, torch's own included, sorted.

    The driver maps both as shared memory, of /dev/zero or of its own device. (Python's `mmap.mmap(-1, …)` is such a
    mapping, too, and the driver has many for itself: it knows no range there.) What was registered later, by
    `cudaHostRegister`, is memory that somebody else has allocated, and is not among it. Empty where the driver cannot
    be asked. Takes about a millisecond (measured on an H200).

    Args:
        least: bytes of an allocation; smaller ones may be left out.
    """
    torch = initialized_torch()
    if torch is None or torch.version.hip is not None:
        return ()
    try:
        ask: Any = ctypes.CDLL("libcuda.so.1").cuPointerGetAttribute
    except (OSError, AttributeError):
        return ()
    ask.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64)
    value = ctypes.c_uint64()

    def tell(which: int, address: int) -> int | None:
        value.value = 0
        return value.value if ask(ctypes.byref(value), which, address) == 0 else None

    found = []
    for low, high in _given_out(least):
        # An allocation is found by any of its addresses, so that one of the least size is at one of these.
        position = low
        while position < high:
            start, size = tell(_RANGE_START, position), tell(_RANGE_SIZE, position)
            if start is None or size is None or not start <= position < start + size:
                position += least
                continue
            if size >= least:
                found.append(HostAllocation(start, size, bool(tell(_MANAGED, position))))
            position = start + size
    return tuple(sorted(found))


class _Deadline:
    """The end of the time that one list may take.

    Args:
        device_index: of the card that is asked.
    """

    def __init__(self, device_index: int) -> None:
        self._device_index = device_index
        self._end = time.monotonic() + _PATIENCE

    def check(self) -> None:
        """Raise `AllocationsError` if it has passed."""
        if time.monotonic() > self._end:
            raise AllocationsError(
                f"the driver had not listed its allocations on cuda:{self._device_index} after {_PATIENCE:.0f} s"
            )


def _first_answered(
    ask: Any, answers: Sequence[int], low: int, high: int, deadline: _Deadline, step: int = STEP_BYTES
) -> int | None:
    """Return the first of `low` and the steps after it, below `high`, for which a function of the driver succeeds.

    Args:
        ask: takes `answers`, and the address last; returns 0 if it succeeds.
        answers: where it writes what it says: that of the address returned.
        low: the first address.
        high: the end.
        deadline: when to give up.
        step: bytes of a step.
    """
    deadline.check()
    if low >= high:
        return None
    if low % step and ask(*answers, low) == 0:
        return low
    for steps in _portions(range(-(-low // step) * step, high, step)):
        try:
            return steps[operator.indexOf(map(ask, *map(itertools.repeat, answers), steps), 0)]
        except ValueError:
            deadline.check()
    return None


def _portions(steps: range) -> Iterator[range]:
    for begin in range(0, len(steps), _STEPS_AT_A_TIME):
        yield steps[begin : begin + _STEPS_AT_A_TIME]


def _next_step(address: int) -> int:
    """Return the first step above an address."""
    return (address // STEP_BYTES + 1) * STEP_BYTES


def _aligned(address: int) -> int:
    """Return the first step that is not below an address."""
    return -(-address // STEP_BYTES) * STEP_BYTES


# CU_POINTER_ATTRIBUTE_…: CONTEXT, IS_MANAGED, DEVICE_ORDINAL, IS_LEGACY_CUDA_IPC_CAPABLE, MEMPOOL_HANDLE
_CONTEXT, _MANAGED, _DEVICE_ORDINAL, _SHAREABLE, _POOL = 1, 8, 9, 10, 17
# RANGE_START_ADDR, RANGE_SIZE
_RANGE_START, _RANGE_SIZE = 11, 12

_GIVEN_OUT = ("/dev/zero", "/dev/nvidia-uvm")
"""Of what the driver maps memory that it gives out on the host."""


def _given_out(least: int) -> list[Range]:
    """First and last address of the mappings in which there may be such memory."""
    return [
        (each.start, each.end)
        for each in read_mappings(having=" rw-s ")
        if each.path.startswith(_GIVEN_OUT) and each.bytes >= least
    ]


def _reserved() -> list[Range]:
    """First and last address of the mappings without access and without a file."""
    spans = [(_aligned(each.start), each.end) for each in read_mappings(having=" ---") if not each.path]
    return [(first, end) for first, end in spans if end - first >= STEP_BYTES]


def cards_with_contexts() -> list[int]:
    """Return the numbers of the cards with a context, sorted; none where CUDA's driver is not loaded or initialised.

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


# CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT and CU_MEMPOOL_ATTR_USED_MEM_CURRENT
_RESERVED, _USED = 5, 7
# CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT
_RESERVED_BY_GRAPHS = 2


def pooled_bytes(device_index: int) -> int | None:
    """Return the bytes that the card's own pools keep, and no list of allocations has; None where unknown.

    Of the default pool that is what is reserved and not used: it gives that back at the next synchronisation, unless
    its release threshold was raised. The pool for the memory nodes of graphs keeps all that these have ever had, used
    or not, until it is trimmed. Asking takes some microseconds and makes no pool.
    """
    torch = initialized_torch()
    # With this backend the pool is torch's own, and its counters are right.
    if torch is None or torch.version.hip is not None or torch.cuda.get_allocator_backend() == "cudaMallocAsync":
        return None
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        find: Any = cuda.cuDeviceGetDefaultMemPool
        ask: Any = cuda.cuMemPoolGetAttribute
        ask_graphs: Any = cuda.cuDeviceGetGraphMemAttribute
        card: Any = cuda.cuDeviceGet
    except (OSError, AttributeError):
        return None
    device, pool, value = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    if card(ctypes.byref(device), device_index) != 0 or find(ctypes.byref(pool), device) != 0:
        return None
    amounts = []
    for tell, whose, attribute in (
        (ask, pool, _RESERVED),
        (ask, pool, _USED),
        (ask_graphs, device, _RESERVED_BY_GRAPHS),
    ):
        if tell(whose, attribute, ctypes.byref(value)) != 0:
            return None
        amounts.append(value.value)
    reserved, used, by_graphs = amounts
    return reserved - used + by_graphs


class Outside(Struct, frozen=True):
    """What others than torch and the announced arenas have asked the driver for on a card.

    Attributes:
        bytes: all of it.
        by_library: bytes of what a library was seen to ask for, by its file's name.
    """

    bytes: int
    by_library: Mapping[str, int] = {}


class OutsideTorch:
    """Remembers how much of each card others than torch and the announced arenas have asked the driver for."""

    def __init__(self) -> None:
        # By card, what the driver counted beyond torch and the arenas, and what others had asked for then.
        self._known: dict[str, tuple[int, Outside | None]] = {}
        # The cards of which it had not listed all in time, which would take as long again.
        self._too_slow: set[str] = set()

    def read(self, device: str, beyond: int) -> Outside | None:
        """Return what the driver lists, or keeps in its own pools, and torch and the arenas do not explain.

        What it counts and lists nowhere is its own: contexts, the code of kernels, their stacks; and arrays, unless it
        is recorded who asks for them. None where it cannot list. It is asked again, for tenths of a second, only where
        its figure has moved.

        Args:
            device: `cuda:0`.
            beyond: bytes that it counts there and that are in neither.
        """
        known = self._known.get(device)
        if device in self._too_slow:
            return None
        if known is None or known[0] != beyond:
            try:
                known = self._known[device] = beyond, _outside_torch(int(device.partition(":")[2]))
            except AllocationsError:
                self._too_slow.add(device)
                return None
        return known[1]


def _outside_torch(device_index: int) -> Outside | None:
    segments = read_segments(device_index)
    if segments is None:  # cudaMallocAsync: what it lists may be torch's
        return None
    listed, pooled = read_allocations(device_index), pooled_bytes(device_index)
    if listed is None or pooled is None:
        return None
    explained = [(address, size) for _, address, size, _ in segments]
    explained += [part for pool in announced_pools() if pool.device == f"cuda:{device_index}" for part in pool.ranges]
    outside = {address: size for address, size in listed if not common([(address, size)], explained)}
    outside |= {each.address: each.bytes for each in TRACE.arrays_on(device_index)}
    return Outside(sum(outside.values()) + pooled, bytes_by_library(outside))


def bytes_by_library(allocations: Collection[int]) -> dict[str, int]:
    """Return the bytes of some memory of a card by the library that was seen to ask for it, the most first.

    Args:
        allocations: their addresses.
    """
    found = Counter[str]()
    for each in TRACE.read():
        if each.address in allocations:
            found[each.library] += each.bytes
    return dict(found.most_common())


def with_sleepers(allocator: AllocatorReading) -> AllocatorReading:
    """Return a reading of torch's allocator with what of its private pools has no memory behind it.

    Args:
        allocator: as torch counts: a pool that an engine has unmapped in a sleep is as large as before.
    """
    gone = {
        *_without_memory(allocator.device, [(at, size) for pool in allocator.pools for at, size, _ in pool.segments])
    }
    if not gone:
        return allocator
    return replace(allocator, pools=tuple(_asleep(pool, gone) for pool in allocator.pools))


def asleep_on(device: str) -> list[Range]:
    """Return the segments of private pools of torch's allocator behind which the driver has no memory, on one device.

    The tensors in them are alive all the same, while vLLM's or SGLang's engine sleeps.
    """
    torch = initialized_torch()
    if torch is None or not device.startswith("cuda"):
        return []
    private = [
        (segment["address"], segment["total_size"])
        for segment in all_segments(torch)[0] or ()
        if f"cuda:{segment['device']}" == device and tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)
    ]
    return _without_memory(device, private)


def _without_memory(device: str, segments: Sequence[Range]) -> list[Range]:
    """Return those of some segments behind which the driver has no memory; none where it cannot be asked."""
    torch = initialized_torch()
    if torch is None or not segments:
        return []
    index = int(device.partition(":")[2])
    # An agent's thread has no context yet, and without one the driver knows no address; this makes it the thread's.
    torch.cuda.mem_get_info(index)
    present = read_allocations(index, among=sorted(segments))
    return [] if present is None else [segment for segment in segments if not total(common([segment], present))]


def _asleep(pool: PoolSegments, gone: Collection[Range]) -> PoolSegments:
    asleep = [(size, used) for at, size, used in pool.segments if (at, size) in gone]
    return replace(pool, asleep=sum(size for size, _ in asleep), asleep_in_use=sum(used for _, used in asleep))
