"""numpy's functions as they were when they were first needed: what a test puts in their place judges nothing."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy

# `numpy.unique` imports it when it is first called: in the middle of a reading, whose imports are watched.
import numpy.ma

from lowtide.probes.originals import keep

if TYPE_CHECKING:
    import numpy as np
else:
    np = keep(numpy)


_FEW = 8
"""Values that are compared one after the other faster than they are looked for."""

_WIDE = 4
"""So many times as far as there are items may values lie apart for a table of all between them."""


def _flatnonzero(items: Any) -> Any:
    """Do as `numpy.flatnonzero`, for one dimension."""
    return np.asarray(items).nonzero()[0]


def _isin(items: Any, others: Any, *, invert: bool = False) -> Any:
    """Do as `numpy.isin`, for whole numbers in one dimension."""
    items, ordered = np.asarray(items), np.array(others)
    ordered.sort()
    found = np.zeros(len(items), bool)
    low, high = (int(ordered[0]), int(ordered[-1])) if len(ordered) else (0, 0)
    if len(ordered) <= _FEW:
        for other in ordered:
            found |= items == other
    elif high - low < _WIDE * len(items):
        table = np.zeros(high - low + 1, bool)
        table[ordered - low] = True
        found = (low <= items) & (items <= high) & table.take(items - low, mode="clip")
    else:
        found = ordered.take(ordered.searchsorted(items), mode="clip") == items
    return ~found if invert else found


# numpy's own look up their parts in the module, where a test may have put others.
for _name, _own in (("flatnonzero", _flatnonzero), ("isin", _isin)):
    vars(np)[_name] = functools.update_wrapper(_own, vars(np)[_name])

__all__ = ["np"]
