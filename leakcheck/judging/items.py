"""Things with names, as a finding lists them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lowtide.leakcheck.resources import resource_of
from lowtide.probes.host.process_files import program_name

FROZEN = "gc-frozen"
"""The key of the metric of frozen objects, which is a level and has no items."""

_SHOWN_NAMES = 3


def listed(key: str, names: Iterable[str]) -> str | None:
    """The first of some names, as a finding's holder."""
    if key == FROZEN:
        return None
    resource = resource_of(key)
    describe = {"processes": _with_command}.get(key, str) if resource is None else resource.describe
    return first_of(sorted(map(describe, names)), _SHOWN_NAMES) or None


def first_of(names: Sequence[str], most: int) -> str:
    """`a, b and 3 more`: the first of some names, `most` at the most."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _with_command(pid: str) -> str:
    """`4711 (python)`; what says more than a number already is left as it is."""
    if not pid.isdigit():
        return pid
    # One that ended meanwhile has no name.
    name = program_name(int(pid))
    return f"{pid} ({name})" if name else pid
