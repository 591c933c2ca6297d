"""Another process as a report names it: its parent, its role and rank, and where it holds memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from lowtide.probes.host.process_files import stat
from lowtide.probes.host.process_tree import name_of
from lowtide.probes.processes.outside_view import read_role_of
from lowtide.reports.processes.stage_processes import ProcessName

_NONE: Mapping[str, str] = MappingProxyType({})


def describe_process(pid: int, *, variables: Mapping[str, str] = _NONE, devices: Iterable[str] = ()) -> ProcessName:
    """A process that is there, as a report names it.

    Args:
        pid: its process identifier.
        variables: those of its environment that it says itself: what an engine sets in the process is not seen outside.
        devices: where it holds memory.
    """
    process, role = stat(pid), read_role_of(pid, variables)
    return ProcessName(
        pid=pid,
        name=name_of(pid),
        parent=None if process is None else process.parent,
        role=role.part,
        rank=role.rank,
        ranks=role.dimensions,
        device=", ".join(sorted(devices)),
    )
