"""Marker objects: their place among the young objects shows which of these are older."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field

import numpy as np

from lowtide.probes.objects.identities import identities


@dataclass
class Aside:
    """What is born meanwhile has another label.

    Attributes:
        label: that of the others.
        turn: the number that goes with it.
        mark: made when it began; None once all that is older has been noted.
    """

    label: str
    turn: int
    mark: list[object] | None

    def place(self) -> tuple[int | None, list[object]]:
        """Where the mark is in the youngest generation, if it is there, and that generation."""
        young = gc.get_objects(generation=0)
        if self.mark is None:
            return None, young
        places = np.flatnonzero(identities(young) == id(self.mark)).tolist()
        return (places[0] if places else None), young


@dataclass(frozen=True)
class Boundary:
    """A change of the label.

    Attributes:
        label: that of what was born before it.
        turn: the number that goes with it.
        mark: made when the label changed.
    """

    label: str
    turn: int
    mark: list[object] = field(default_factory=list)
