"""Things with names, as a finding tells them."""

from __future__ import annotations

from collections.abc import Iterable

import psutil

from lowtide.probes.counters import describe_process_group

FROZEN = "gc-frozen"
"""The key of the metric of frozen objects, which is a level and has no items."""

_SHOWN_NAMES = 3


def listed(key: str, names: Iterable[str]) -> str | None:
    """The first of some names, as a finding's holder."""
    if key == FROZEN:
        return None
    describe = {"processes": _with_command, "process-groups": describe_process_group}.get(key, str)
    shown = sorted(map(describe, names))
    more = f" and {len(shown) - _SHOWN_NAMES} more" if len(shown) > _SHOWN_NAMES else ""
    return ", ".join(shown[:_SHOWN_NAMES]) + more if shown else None


def _with_command(pid: str) -> str:
    """`4711 (python)`; what says more than a number already is left as it is."""
    if not pid.isdigit():
        return pid
    try:
        return f"{pid} ({psutil.Process(int(pid)).name()})"
    except psutil.Error:  # it ended meanwhile
        return pid
