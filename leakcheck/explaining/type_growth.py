"""Of which types there are more objects than before, those that the collector has frozen too."""

from __future__ import annotations

from collections import Counter

from lowtide.probes.objects.foreign import mro_of, namespace_of, type_name
from lowtide.probes.objects.listed import all_objects
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
    # Not at the top: only a program with tensors has a use for numpy.
    from lowtide.probes.objects.identities import identities, types_of
    from lowtide.probes.original_numpy import np

    objects = all_objects()
    # Counted by type first: a name is made for one object of each.
    _, places, numbers = np.unique(types_of(identities(objects)), return_index=True, return_counts=True)
    counts: Counter[str] = Counter()
    for place, number in zip(places.tolist(), numbers.tolist(), strict=True):
        counts[_name(objects[place])] += number
    return {name: count for name, count in counts.items() if not name.startswith(_OWN)}


def _name(item: object) -> str:
    """Return module and name of an object's class, which is asked for them unless its metaclass may answer anything."""
    cls = type(item)
    return type_name(cls) if _answers_itself(cls) else f"{cls.__module__}.{cls.__name__}"


def _answers_itself(cls: type) -> bool:
    """Whether a class's metaclass has code of its own for attributes that every class has."""
    own = [namespace_of(base) for base in mro_of(type(cls)) if base is not type and base is not object]
    return any(
        "__getattribute__" in names or "__name__" in names or type(names.get("__module__", "")) is not str
        for names in own
    )
