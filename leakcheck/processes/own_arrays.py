"""This process's large arrays, for another one that asks which of them are the host memory that it has seen grow."""

from __future__ import annotations

from lowtide.leakcheck.findings.host_arrays import held_by_arrays
from lowtide.leakcheck.findings.storage_holders import Context
from lowtide.reports.schema import Finding


def named_by_arrays(finding: Finding, size: int) -> Finding | None:
    """A finding about host memory with the holder of the arrays that are of that size; None where none are.

    Args:
        finding: about host memory.
        size: bytes of the arrays.
    """
    found = held_by_arrays(finding, size, Context(living=True))
    return None if found is None else found[0]
