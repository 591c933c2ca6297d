"""The ways to what was explained earlier in the process: what hangs on their end again takes no walk of the heap.

A way is never taken on trust. It is walked again, from its module on, through objects that each refer to the next one
now; and only if nothing else in the process refers to what is new behind it is that all that there is to say.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from lowtide.leakcheck.explaining.explain import Explanation
from lowtide.probes.heap.graph import NewBehindKnown
from lowtide.probes.heap.holders import SharedWalk
from lowtide.probes.objects.identities import Identities
from lowtide.probes.objects.listed import collector_paused, frozen_by_program
from lowtide.probes.originals import gc

_MOST_KNOWN = 10_000
"""Objects on the ways that are remembered; of a linked list the end alone may have as many."""


class KnownWays:
    """The ways from modules to what a process's tests have left; holds identities only."""

    def __init__(self) -> None:
        self._known: dict[int, None] = {}

    def note(self, explanations: Iterable[Explanation]) -> None:
        """Remember the ways to what was explained."""
        for found in explanations:
            if found.path and found.path[0].type == "module" and len(found.through) <= _MOST_KNOWN:
                self._known.update(dict.fromkeys(found.through))
        for identity in list(self._known)[: max(0, len(self._known) - _MOST_KNOWN)]:
            del self._known[identity]

    def to(self, wanted: Collection[int], born: Collection[int] | None) -> SharedWalk | None:
        """Return a walk of what is new behind the ways; None unless that answers who holds some objects.

        It does if each of them is found there and nothing else refers to anything new that is: then they are no garbage
        either. The caller must not hold them.

        Args:
            wanted: their identities, those of the oldest first.
            born: the identities of what was born in the test.
        """
        if not self._known or not wanted or not isinstance(born, Identities):
            return None
        if frozen_by_program(gc.get_freeze_count()):
            return None
        with collector_paused():
            graph = NewBehindKnown(self._known, born)
            if graph.holds_alone(wanted):
                return SharedWalk(graph)
            graph.close()
            return None
