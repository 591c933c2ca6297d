"""Memory of a card that was exported by CUDA IPC and given up, and that waits for processes that have opened it."""

from __future__ import annotations

import functools
import struct
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from lowtide.leakcheck.resources.resource import Bound, Change, Name, Resource, Rule
from lowtide.probes.host.process_files import has_opened_a_card, name_of
from lowtide.probes.originals import initialized_torch, os
from lowtide.probes.processes.outside_view import read_role_of
from lowtide.reports.processes.stage_processes import ProcessName
from lowtide.reports.sizes import first_of, format_amount

if TYPE_CHECKING:
    from lowtide.probes.device.cuda_ipc import Counter

_BOUND = Bound(what="memory exported by CUDA IPC", cause="pending-transfer")

_SHOWN = 3


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
        test=_BOUND,
        life=_BOUND,
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

    addresses = {int(name.rpartition(" ")[2], 16) for name in names}
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

    pids = [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
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
