"""What lies under one owner, test by test: levels to judge its growth by, and in which test each storage appeared."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from lowtide.leakcheck.judging.growth import adding_turns, grows, kept_steps, repeated, rises

Key = tuple[str, int]
"""A storage: its device and its address."""

_NUMBER = "number of "
"""The beginning of the key under which the number of storages is kept beside their bytes."""

ANYTHING = sys.maxsize
"""What a test may add that is not judged, in bytes."""


@dataclass(frozen=True)
class Lying:
    """A storage under an owner.

    Attributes:
        bytes: its length.
        turn: in which test that used the owner it appeared there; 0: before the first.
    """

    bytes: int
    turn: int


@dataclass(frozen=True)
class Count:
    """How many things of a kind belong to an owner.

    Attributes:
        now: all of them.
        came: those of them that came in this turn.
    """

    now: int
    came: int


class OwnerHistory:
    """Kept for an owner from its setup to its end; a turn is a test that used it.

    A turn in which nothing was read has the level of the one before: only a test that leaves something young under the
    owner can have raised it, and such a test is read.

    Attributes:
        limit_passed: bytes by which it had grown when that was last reported.
        storages: what lay under the owner when it was last read.
    """

    def __init__(self) -> None:
        self.limit_passed = 0
        self.storages: dict[Key, Lying] = {}
        self._is_new = True
        self._allowed: list[int] = []
        self._levels: dict[str, list[int]] = {}

    @property
    def turns(self) -> int:
        """How many tests have used the owner."""
        return len(self._allowed)

    @property
    def sizes(self) -> dict[Key, int]:
        """The bytes of each storage that lay under the owner."""
        return {key: lying.bytes for key, lying in self.storages.items()}

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever read."""
        return not self._levels

    def begin_turn(self, allowed: int) -> None:
        """A test uses the owner.

        Args:
            allowed: bytes that it may add.
        """
        self._allowed.append(allowed)
        for levels in self._levels.values():
            levels.append(levels[-1])

    def note(self, storages: Mapping[Key, int], fresh: Collection[Key], counts: Mapping[str, Count]) -> None:
        """Writes down what lies under the owner at the end of a turn.

        Args:
            storages: all storages with their bytes.
            fresh: those of them that are known to have appeared in this turn.
            counts: things that are counted, by resource.
        """
        self.storages = {key: Lying(size, self._turn_of(key, size, fresh)) for key, size in storages.items()}
        self._is_new = False
        now = dict(counts)
        for (device, _), lying in self.storages.items():
            key = f"tensors {device}"
            known = now.get(key, Count(0, 0))
            came = lying.bytes if lying.turn == self.turns else 0
            now[key] = Count(known.now + lying.bytes, known.came + came)
            number = now.get(_NUMBER + key, Count(0, 0))
            now[_NUMBER + key] = Count(number.now + 1, number.came + (lying.turn == self.turns))
        for key in {*self._levels, *now}:
            count = now.get(key, Count(0, 0))
            self._levels.setdefault(key, [count.now - count.came] * (self.turns + 1))[-1] = count.now

    def _turn_of(self, key: Key, size: int, fresh: Collection[Key]) -> int:
        known = self.storages.get(key)
        if key in fresh or (known is not None and known.bytes != size):
            return self.turns
        if known is not None:
            return known.turn
        # Of what lies there at the first reading, only what is known to be new is.
        return 0 if self._is_new else self.turns

    def steps(self, key: str) -> list[int]:
        """What each turn added for good to a level."""
        return kept_steps(self._levels[key])

    def allowed(self, key: str) -> Sequence[int]:
        """What each turn may add to a level."""
        if key.startswith("tensors "):
            return self._allowed
        return [limit if limit == ANYTHING else 0 for limit in self._allowed]

    def adding_turns(self, key: str) -> list[int]:
        """The turns that added something for good to a level."""
        return adding_turns(self.steps(key), self.allowed(key))

    def growing(self) -> list[str]:
        """The keys of the levels that grow test after test, as `tensors cpu` and `threads`."""
        return sorted(key for key in self._levels if not key.startswith(_NUMBER) and self._grows(key))

    def _grows(self, key: str) -> bool:
        """Whether a level grows; one that goes up and down only if the number of things grows."""
        if not grows(self.steps(key), self.allowed(key)):
            return False
        number = _NUMBER + key
        return rises(self._levels[key]) or (number in self._levels and grows(self.steps(number), self.allowed(number)))

    def repeated_bytes(self) -> int:
        """By how many bytes of tensors it has grown, as far as that repeats."""
        keys = [key for key in self._levels if key.startswith("tensors ")]
        return sum(repeated(self.steps(key), self.allowed(key)) for key in keys)

    @property
    def may_grow(self) -> bool:
        """Whether so many turns have added something that one more would make a growth of it."""
        return any(len(self.adding_turns(key)) > 1 for key in self._levels if not key.startswith(_NUMBER))
