"""Which library asks the CUDA driver for memory: CUPTI's record of each call, through NVIDIA's binding (extra `cupti`).

The driver lists memory by its address, and does not say who asked for it; of a CUDA array it says nothing. CUPTI's
memory activity (`CUPTI_ACTIVITY_KIND_MEMORY2`, with the source of each allocation) has both, for what is asked while
it records. What cuMemCreate makes it does not have.

Recording costs, on an H200 (torch 2.11, cupti-python 13.4): 14 MiB of the card; 119 us where a pair of cudaMalloc and
cudaFree took 67; 7.6 to 9.9 us where a launch took 7.3. torch's profiler works beside it, another client of CUPTI may
not. A CUDA call may wait for Python's lock while CUPTI asks for a buffer: so it is for who has asked for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from lowtide.probes.originals import loaded, os

_BUFFER_BYTES = 1 << 20

# CUPTI_ACTIVITY_FLAG_FLUSH_FORCED: buffers that are not full, too.
_ALL_BUFFERS = 1

# CUPTI_ACTIVITY_MEMORY_OPERATION_TYPE_ALLOCATION, and CUPTI_ACTIVITY_MEMORY_KIND_…: DEVICE, ARRAY, MANAGED
_ALLOCATION, _ARRAY, _ON_CARDS = 1, 4, (3, 4, 5)


class TracedMemory(NamedTuple):
    """Memory of a card that is there, and was asked for while it was recorded.

    Attributes:
        address: where it begins; of an array, what stands for it.
        bytes: its length.
        device_index: the card's, as CUDA numbers it.
        library: the file that has asked for it, as `libcublas.so.13`.
        is_array: whether it is a CUDA array, to which no address leads.
    """

    address: int
    bytes: int
    device_index: int
    library: str
    is_array: bool


class DriverTrace:
    """Records what is asked of the driver from the first `start` to the last `stop`, for all who have asked for it.

    CUPTI has one record for the process, and so has this; a fork has none.

    Attributes:
        why: why it does not record though it was started; empty where it does.
    """

    def __init__(self) -> None:
        self.why = ""
        self._cupti: Any = None
        self._users = self._process = 0
        # By kind and address.
        self._live: dict[tuple[int, int], TracedMemory] = {}

    def start(self) -> None:
        """Begin to record, where that can be done; each is to be followed by a `stop`."""
        self._users += 1
        if self._users > 1:
            return
        try:
            from cupti import cupti
        except (ImportError, OSError, RuntimeError) as error:
            self.why = f"the extra `cupti` is not there: {error}"
            return
        try:
            cupti.activity_register_callbacks(lambda: (_BUFFER_BYTES, 0), self._note)
            cupti.activity_enable_allocation_source(1)
            cupti.activity_enable(cupti.ActivityKind.MEMORY2)
        except (cupti.cuptiError, RuntimeError) as error:
            self.why = f"CUPTI does not record: {error}"
            return
        self._cupti, self._process, self.why = cupti, os.getpid(), ""

    def stop(self) -> None:
        """End it, and forget all, where nobody else has asked for it."""
        self._users -= 1
        if self._users:
            return
        cupti, self._cupti, self.why = self._cupti, None, ""
        if cupti is not None and self._process == os.getpid():
            cupti.activity_disable(cupti.ActivityKind.MEMORY2)
            cupti.activity_flush_all(_ALL_BUFFERS)
            self._live.clear()

    def read(self) -> Sequence[TracedMemory]:
        """Return what is there now of what was asked for since the start, but tables of kernels and the host's."""
        if self._cupti is None or self._process != os.getpid():
            return ()
        self._cupti.activity_flush_all(_ALL_BUFFERS)
        return [memory for (kind, _), memory in tuple(self._live.items()) if kind in _ON_CARDS]

    def arrays_on(self, device_index: int) -> list[TracedMemory]:
        """Return the CUDA arrays on a card, which no list of the driver's has."""
        return [each for each in self.read() if each.is_array and each.device_index == device_index]

    def _note(self, activities: Sequence[Any]) -> None:
        # Called by CUPTI, in whichever thread a buffer is full or asked for.
        for each in activities:
            key = each.memory_kind, each.address
            if each.memory_operation_type == _ALLOCATION:
                is_array = each.memory_kind == _ARRAY
                library = os.path.basename(each.source or "")
                self._live[key] = TracedMemory(each.address, each.bytes, each.device_id, library, is_array)
            else:
                self._live.pop(key, None)


TRACE = DriverTrace()
"""The process's."""


def record_from_first_use() -> None:
    """Begin to record as soon as torch, which is there, uses a card; in forks that do, too."""
    torch: Any = loaded("torch")
    torch.cuda._lazy_call(TRACE.start)
