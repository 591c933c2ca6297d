"""Memory that a card's driver has given out to others than torch: on cards, and on the host, page-locked or managed.

And what torch has exported of a card by CUDA IPC and given up, and that waits for processes that have opened it.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from lowtide.leakcheck.resources.resource import MIB, Bound, Change, Items, Name, Resource, Rule, Rung
from lowtide.probes.host.process_files import all_pids, has_opened_a_card, name_of
from lowtide.probes.originals import contents, initialized_torch, os
from lowtide.probes.processes.outside_view import read_role_of
from lowtide.probes.stages import announced_pools
from lowtide.reports.processes.stage_processes import ProcessName
from lowtide.reports.sizes import first_of, format_amount, format_bytes

if TYPE_CHECKING:
    from lowtide.probes.device.allocations import HostAllocation
    from lowtide.probes.device.cuda_ipc import Counter

LEAST = MIB
"""Bytes of an allocation that is told: libraries take smaller ones for themselves whenever they are used."""

_ON_HOST = Bound(rung=Rung.CLEAR_HOST_CACHE, what="host memory that the card's driver has given out", cause="native")

_EXPORTED = Bound(what="memory exported by CUDA IPC", cause="pending-transfer")

_SHOWN = 3


def _read_all() -> Sequence[HostAllocation]:
    # ctypes and torch's allocator, which only who has a card needs.
    from lowtide.probes.device.allocations import read_host_allocations

    return read_host_allocations(LEAST)


class Allocations(Resource):
    """Memory of a card that was allocated past torch, by address; the list of it is one of the judgement's own."""

    rule = Rule(
        "allocations",
        "driver",
        "card",
        "driver memory that was allocated outside torch and the arenas, allocation by allocation",
        test=Bound(
            rung=Rung.EMPTY_CACHE,
            settles=True,
            what="driver memory that was allocated outside torch",
            cause="native",
        ),
        life=None,
        verdict="native-held",
    )

    def objects(self, names: Collection[str]) -> Mapping[str, object]:
        """Return the arrays of other libraries that lie in them."""
        return _arrays_at(names, _start_of_allocation)

    def remark(self, names: Collection[str]) -> str:
        """Return which libraries have asked for them, where that was recorded."""
        # Only who has a card needs these.
        from lowtide.probes.device.allocations import bytes_by_library
        from lowtide.probes.device.driver_trace import TRACE

        libraries = bytes_by_library(set(map(_address_of, names)))
        told = [f"{library} ({format_bytes(size)})" for library, size in libraries.items()]
        why = f"; which library has asked for it is not known: {TRACE.why}" if TRACE.why else ""
        return f", asked for by {first_of(told, _SHOWN)}" if told else why

    def identity(self, name: str) -> Name:
        """Return what each of them is: where it lies is another place in each run."""
        return Name(name.partition(" at ")[0], is_given=False)


class PageLocked(Resource):
    """What `cudaHostAlloc` and `cudaMallocManaged` have given out, by address.

    torch's page-locked memory is among it: what a tensor lies in is that tensor's, and what torch keeps of it for the
    next tensor goes when its cache is emptied.

    Args:
        read_all: reads all there is.
        contents: reads a file of `/proc`.
    """

    rule = Rule(
        "page-locked",
        "pinned",
        "process",
        "host memory that a card's driver has given out (`cudaHostAlloc`, `cudaMallocManaged`) and no tensor lies in, "
        "allocation by allocation, from 1 MiB on",
        test=_ON_HOST,
        life=_ON_HOST,
        verdict="native-held",
    )
    kept_in = ("torch.cuda", "_initialized")

    def __init__(
        self,
        read_all: Callable[[], Sequence[HostAllocation]] = _read_all,
        contents: Callable[[str], bytes] = contents,
    ) -> None:
        self._read_all = read_all
        self._contents = contents
        self._listed_at: Sequence[bytes] = ()
        self._known: Items = {}

    def read(self) -> Items:
        """Return them; listed anew only where the size of the process or what it shares has changed."""
        # Size, resident, shared: one of the first and the last changes with each of them.
        size, _, shared = self._contents("/proc/self/statm").split()[:3]
        if (size, shared) != self._listed_at:
            self._known = {_name_of(each): each.bytes for each in self._read_all()}
            self._listed_at = size, shared
        return self._known

    def staying(self, names: Collection[str]) -> Collection[str]:
        """Return those in which a tensor lies, or that an announced pool has: they are judged as these."""
        if not names:
            return ()
        # Only who has a card needs these.
        from lowtide.probes.memory.ranges import common
        from lowtide.probes.memory.tensors import survey_storages

        # A tensor of a card's, too, may lie in managed memory: the addresses of both are one space.
        judged = [(each.address, max(1, each.bytes)) for each in survey_storages().storages]
        judged += [part for pool in announced_pools() for part in pool.ranges]
        judged.sort()
        return {name for name in names if common([(_address_of(name), self._known.get(name, 1))], judged)}

    def objects(self, names: Collection[str]) -> Mapping[str, object]:
        """Return the arrays over them, which give them back with the last one."""
        return _arrays_at(names, lambda address: address)

    def describe(self, name: str) -> str:
        """Return `32.0 MiB of page-locked memory at 0x7f5e80000000`."""
        size = self._known.get(name)
        return name if size is None else f"{format_bytes(size)} of {name}"

    def identity(self, name: str) -> Name:
        """Return of which kind it is: where it lies is another place in each run."""
        return Name(name.partition(" at ")[0], is_given=False)

    def advice(self, names: Collection[str]) -> str:
        """Return what gives them back."""
        if self.objects(names):
            return ""
        is_managed = all(name.startswith(_MANAGED) for name in names)
        return f"give it back in teardown: {'cudaFree' if is_managed else 'cudaFreeHost'}"


def _arrays_at(names: Collection[str], start_of: Callable[[int], int]) -> dict[str, object]:
    """Return the array in each of some allocations, for those that have one.

    By `start_of` it is known where what lies at an address begins.
    """
    if not names:
        return {}
    from lowtide.probes.memory.array_interfaces import arrays_by_address

    placed = {start_of(address): item for address, item in arrays_by_address().items()}
    return {name: placed[address] for name in names if (address := _address_of(name)) in placed}


def _start_of_allocation(address: int) -> int:
    # Where the process has a context alone: to ask on another card would make one there.
    from lowtide.probes.device.allocations import cards_with_contexts, range_at

    ranges = (range_at(card, address) for card in cards_with_contexts())
    return next((found[0] for found in ranges if found is not None), address)


_MANAGED = "managed memory"


def _name_of(allocation: HostAllocation) -> str:
    return f"{_MANAGED if allocation.is_managed else 'page-locked memory'} at {allocation.address:#x}"


def _address_of(name: str) -> int:
    return int(name.rpartition(" ")[2], 16)


class CudaIpc(Resource):
    """torch's blocks over which no tensor lives any more, exported to other processes, by their addresses.

    What has a tensor is that tensor's, and in the importer it is the tensor's, too.
    """

    rule = Rule(
        "cuda-ipc",
        "cuda-ipc",
        "card",
        "torch's blocks that no tensor explains any more, and that are kept for processes to which CUDA IPC has "
        "exported them",
        test=_EXPORTED,
        life=_EXPORTED,
        verdict="native-held",
    )

    def identity(self, name: str) -> Name:
        """Return what each of them is: its address is another one in each run."""
        return Name("export", is_given=False)

    def remark(self, names: Collection[str]) -> str:
        """Return by whom they were exported, who has them open, and what their counters say."""
        waiting = _waiting(names)
        counters = [counter for of_block in waiting.values() for counter in of_block]
        if not counters:
            return ""
        importers = _importers(counters)
        known = f"{format_amount(len(importers), 'importers')} ({first_of(importers, _SHOWN)}), " if importers else ""
        values = sorted({_value(of_block) for of_block in waiting.values()})
        told = first_of([f"counter {value}: {_meaning(value, is_open=bool(importers))}" for value in values], _SHOWN)
        return f", exported by pid {counters[0].exporter}; {known}{told}"

    def changes(self, names: Collection[str]) -> list[Change]:
        """Return what has torch free them, where no process has any of them open."""
        waiting = _waiting(names)
        left = [counter for of_block in waiting.values() for counter in of_block]
        if not left or _importers(left):
            return []
        return [
            Change(
                "torch.cuda.ipc_collect() once their counters are 0",
                "exported memory that nobody has open is freed",
                functools.partial(_free, left),
                is_code=False,
            )
        ]

    def advice(self, names: Collection[str]) -> str:
        """Return what brings their counters to 0."""
        waiting = _waiting(names)
        values = [_value(of_block) for of_block in waiting.values()]
        if any(value < 0 for value in values):
            return (
                "open and close each export once: reduce_tensor() and _share_cuda_() count one importer, so call them "
                "anew for each process and each time that opens it"
            )
        if any(values):
            return (
                "close it in the process that has opened it, and call torch.cuda.ipc_collect() here; export nothing "
                "that is not opened"
            )
        return "call torch.cuda.ipc_collect() where the last importer has closed it"


def _waiting(names: Collection[str]) -> Mapping[int, list[Counter]]:
    """Return the counters of all exports of some blocks, by their addresses."""
    # numpy, which only who has a card needs.
    from lowtide.probes.device.cuda_ipc import read_exports

    addresses = set(map(_address_of, names))
    found: dict[int, list[Counter]] = {}
    for export in read_exports() if addresses else ():
        if export.address in addresses:
            found.setdefault(export.address, []).append(export.counter)
    return found


def _value(counters: Iterable[Counter]) -> int:
    """Return what a block's last export waits for: torch looks at the ones before only once that is over."""
    return list(counters)[-1].value() or 0


def _meaning(value: int, *, is_open: bool) -> str:
    if value < 0:
        return "freed by nobody"
    if value == 0:
        return "closed by all, and not collected"
    return "not closed by all" if is_open else "opened by nobody who lives"


def _importers(counters: Collection[Counter]) -> list[str]:
    """Return the processes that have some exports open, as a finding calls them."""
    from lowtide.probes.device.cuda_ipc import importers_of

    pids = [pid for pid in all_pids() if pid != os.getpid()]
    return [
        ProcessName(pid=pid, name=name_of(pid), rank=read_role_of(pid).rank).text
        for pid in sorted(importers_of(set(counters), [pid for pid in pids if has_opened_a_card(pid)]))
    ]


def _free(counters: Iterable[Counter]) -> None:
    """Set counters to 0, as torch's own importers would, and have torch look at them."""
    from lowtide.probes.device.cuda_ipc import HEADER

    for counter in counters:
        file = os.open(f"/dev/shm{counter.file}", os.O_RDWR)
        try:
            os.pwrite(file, struct.pack("q", 0), HEADER + 8 * counter.slot)
        finally:
            os.close(file)
    torch = initialized_torch()
    if torch is not None:
        torch.cuda.ipc_collect()
