"""Things with names, as a finding lists them."""

from __future__ import annotations

from collections.abc import Iterable

from lowtide.leakcheck.resources import resource_of
from lowtide.reports.sizes import first_of

FROZEN = "gc-frozen"
"""The key of the metric of frozen objects, which is a level and has no items."""

_SHOWN_NAMES = 3


def listed(key: str, names: Iterable[str]) -> str | None:
    """The first of some names, as a finding's holder."""
    if key == FROZEN:
        return None
    return first_of(described(key, names), _SHOWN_NAMES) or None


def described(key: str, names: Iterable[str]) -> list[str]:
    """Return how a finding calls some things, sorted.

    Args:
        key: their resource.
        names: what the counters call them.
    """
    resource = resource_of(key)
    return sorted(names if resource is None else map(resource.describe, names))
