"""What modules made and changed when lives imported them for the first time: it belongs to the process."""

from __future__ import annotations

from collections.abc import Callable, Collection

from lowtide.leakcheck.baseline.owners import Owner
from lowtide.probes.host.counters import Counters


class Imported:
    """Collects what the imports of a run took, one outermost import after the other.

    Args:
        read: reads the counters, right before and right after an import.
    """

    def __init__(self, read: Callable[[], Counters]) -> None:
        self._read = read
        self._owner: Owner | None = None
        self._names: dict[str, set[str]] = {}
        self._growth: dict[str, int] = {}

    def begin(self, owner: Owner) -> None:
        """A module is about to be executed.

        Args:
            owner: whose what it makes will be.
        """
        owner.before = self._read()
        self._owner = owner

    def end(self) -> Owner:
        """The module has been executed; returns its owner, with all that is its own."""
        owner, self._owner = self._owner, None
        assert owner is not None
        owner.take(self._read(), (), ())
        for key, names in owner.items.items():
            self._names.setdefault(key, set()).update(names)
        for key, amount in owner.growth.items():
            self._growth[key] = self._growth.get(key, 0) + max(amount, 0)
        return owner

    def names(self, key: str) -> Collection[str]:
        """The items of a resource that imports made, as the counters call them."""
        return self._names.get(key, ())

    def growth(self, key: str) -> int:
        """By how many bytes imports raised a level of the counters until now."""
        return self._growth.get(key, 0)
