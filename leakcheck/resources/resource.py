"""The interface of what must come back and is counted by name."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from lowtide.leakcheck.resources.change import Change
from lowtide.leakcheck.resources.names import Name, without_numbers
from lowtide.leakcheck.resources.rule import Rule

Items = Mapping[str, int]
"""Things by name, each with its bytes or 1."""


class Resource:
    """One kind of thing that must come back.

    A test, a life, a fuzzed call and another process read it by the same functions. What is not overridden is what
    holds for a thing that has a name, no object and no remedy.

    Attributes:
        rule: its row of the table.
        opens: what the descriptors are called that a thing of this kind opens for itself; None where it opens none.
    """

    rule: Rule
    opens: re.Pattern[str] | None = None

    def read(self) -> Items:
        """Return what there is now, in microseconds where there is nothing: it is asked several times in every test.

        Not asked where it is not overridden: that the counters read in one go.
        """
        return {}

    def staying(self, names: Collection[str]) -> Collection[str]:
        """Return those of some new things that are no leak; asked at every poll while something is waited for."""
        return ()

    def objects(self, names: Collection[str]) -> Mapping[str, object]:
        """Return the object that stands for each thing, for those that have one: whoever holds it, holds the thing."""
        return {}

    def describe(self, name: str) -> str:
        """Return how a finding calls a thing."""
        return name

    def identity(self, name: str) -> Name:
        """Return what names a thing for ever, for its fingerprint."""
        return Name(without_numbers(name))

    def changes(self, names: Collection[str]) -> list[Change]:
        """Return what may end these things, the smallest first, to be tried when no test follows."""
        return []

    def advice(self, names: Collection[str]) -> str:
        """Return what to do about these things where nothing of the program is seen to hold them."""
        return ""
