"""Another process as a report and its findings name it: its parent, its role and rank, and where it holds memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from lowtide.probes.host.process_files import name_of, rollup, stat
from lowtide.probes.processes.outside_view import read_role_of
from lowtide.reports.processes.stage_processes import ProcessName
from lowtide.reports.schema import Finding
from lowtide.reports.statement import in_process

_NONE: Mapping[str, str] = MappingProxyType({})


def describe_process(
    pid: int, *, variables: Mapping[str, str] = _NONE, devices: Iterable[str] = (), called: str = ""
) -> ProcessName:
    """A process that is there, as a report names it.

    Args:
        pid: its process identifier.
        variables: those of its environment that it says itself: what an engine sets in the process is not seen outside.
        devices: where it holds memory.
        called: its name in `multiprocessing`, as it says itself.
    """
    process, role = stat(pid), read_role_of(pid, variables)
    return ProcessName(
        pid=pid,
        name=name_of(pid, called),
        parent=None if process is None else process.parent,
        role=role.part,
        rank=role.rank,
        ranks=role.dimensions,
        device=", ".join(sorted(devices)),
    )


def private_bytes(finding: Finding) -> int:
    """Bytes of host memory that the process of a finding alone has; 0 where that may not be read."""
    memory = None if finding.process is None else rollup(finding.process.pid)
    return 0 if memory is None else memory.private


def placed(finding: Finding, process: ProcessName) -> Finding:
    """A finding as one of a process's, which its message names."""
    return in_process(finding, process)
