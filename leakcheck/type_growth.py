"""Of which types there are more objects than before: objgraph's table, over frozen objects too."""

from __future__ import annotations

from collections import Counter

import objgraph

from lowtide.probes.foreign import type_name
from lowtide.probes.objects import all_objects
from lowtide.reports.schema import TypeGrowth

_OWN = ("lowtide.probes.", "lowtide.leakcheck.", "lowtide.reports.", "lowtide.pytest_plugin.")

MOST_TYPES = 12
"""Types in a table; those that grew most."""


class TypeCounts:
    """How many objects of each type there are at one moment.

    Args:
        moment: its name.
    """

    def __init__(self, moment: str) -> None:
        self._moment = moment
        self._counts = _counts()

    def growth(self, until: str) -> tuple[TypeGrowth, ...]:
        """Of which types there are more now, those that grew most first.

        Args:
            until: the name of this moment.
        """
        now = _counts()
        grown = {name: count - self._counts.get(name, 0) for name, count in now.items()}
        rows = sorted((item for item in grown.items() if item[1] > 0), key=lambda item: (-item[1], item[0]))
        return tuple(
            TypeGrowth(type=name, since=self._moment, until=until, before=self._counts.get(name, 0), after=now[name])
            for name, _ in rows[:MOST_TYPES]
        )


def _counts() -> dict[str, int]:
    """Without what the checker itself makes and keeps for its report."""
    counts: dict[str, int]
    try:
        counts = objgraph.typestats(all_objects(), shortnames=False)
    except Exception:  # noqa: BLE001 - it asks the classes for their names, and a metaclass may answer anything
        counts = Counter(type_name(type(item)) for item in all_objects())
    return {name: count for name, count in counts.items() if not name.startswith(_OWN)}
