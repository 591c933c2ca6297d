"""What goes through the whole heap, in C.

`lengths_of_all` and `all_instances` give nobody else a reference, and let no other thread run meanwhile.
"""

from collections.abc import Callable
from typing import Any

class Walk:
    """A walk over the heap; it keeps addresses, and no object alive."""

    def add_roots(self, items: list[Any]) -> None:
        """Make nodes of the first objects, in their order."""

    def add(self, objects: list[Any], items: list[Any]) -> None:
        """Append those items to `objects` that are no nodes yet."""

    def read(
        self,
        objects: list[Any],
        also: list[list[Any]],
        classify: Callable[[type], int],
        stand_in: Callable[[Any], object],
        more: Callable[[object], list[object]],
        dicts_share: bool,
    ) -> None:
        """Read what all objects refer to that were not read yet, appending what is met."""

    def find(self, ids: bytes) -> bytes:
        """Return the nodes (int32) of objects by their identities (int64); -1 for none."""

    def take(self) -> tuple[bytes, bytes, bytes, bytes]:
        """Hand over what was read since the last time.

        Kind places (int32), ends of edges (int64), edges (int32), nodes that are passed over (int32).
        """

def lengths_of_all(deque: type, wanted: bytes, most: int) -> tuple[bytes, bytes, bytes, int, list[Any]]:
    """Return all lists, dicts, sets and deques, dicts that objects hold and the collector does not track, and types.

    Args:
        deque: `collections.deque`.
        wanted: identities (int64) of containers that are returned themselves.
        most: the most things in a container that is looked into for such dicts.

    Returns:
        Their identities, how many things each holds, or how many objects there are of a type, their types' identities,
        all int64; how many objects were gone through; the wanted ones.

    Raises:
        NotImplementedError: this interpreter's collector has its objects in other lists.
    """

def values_of_all(kinds: tuple[type, ...], deque: type, least: int, many: int) -> tuple[bytes, bytes, list[Any], int]:
    """Return what all objects, and what of theirs the collector does not track, refer to of some types.

    An object that refers to many things and is none of Python's containers comes as a value of its own.

    Args:
        kinds: the types of such values.
        deque: `collections.deque`.
        least: bytes or characters from which on a text or bytes are large; other values all are.
        many: how many things.

    Returns:
        Who refers to each, by identity (int64), with 1 more where that is one of Python's containers; the types of
        these, by identity (int64); the values; how many objects were gone through.

    Raises:
        NotImplementedError: this interpreter's collector has its objects in other lists.
    """

def owned_by_all(kinds: tuple[type, ...], least: int) -> list[Any]:
    """Return of all objects, of what they refer to, and of what lies in that untracked those of some types.

    Some more than once.

    Args:
        kinds: the types.
        least: bytes or characters from which on a text or bytes are large; others all are.

    Raises:
        NotImplementedError: this interpreter's collector has its objects in other lists.
    """

def followers_among(first: object, ids: bytes, most: int) -> list[Any]:
    """Return those of the objects with these identities (int64) that come behind one in the collector's list.

    Args:
        first: where to begin; the collector tracks it.
        ids: the identities.
        most: how many places to look at.

    Raises:
        ValueError: the collector does not track the first object.
    """

def old_among(ids: bytes, /) -> list[Any]:
    """Return those of the objects with these identities (int64) that are in the oldest generation, in its order.

    Raises:
        NotImplementedError: this interpreter's collector has its objects in other lists.
    """

def all_instances(classes: tuple[type, ...], only_frozen: bool) -> list[Any]:
    """Return all objects whose types derive from one of some classes, frozen ones too, and frozen garbage.

    Args:
        classes: what to look for.
        only_frozen: whether to look among the frozen ones alone.

    Raises:
        NotImplementedError: this interpreter's collector has its objects in other lists.
    """

def of_generations(oldest: int, classes: tuple[type, ...], /) -> tuple[bytes, bytes, list[Any]]:
    """Return the objects of a generation and of all younger ones, the oldest generation first, each in its order.

    Nobody gets a reference to any but the instances that are returned, and no other thread runs meanwhile.

    Args:
        oldest: the generation to begin with, 0 to 2.
        classes: of what to return the instances; the tuple itself is left out of what is found.

    Returns:
        The identities of all (int64); the places among them of what derives from one of the classes (int64), and that.

    Raises:
        NotImplementedError: this interpreter's collector has its objects in other lists.
    """

def young_with_types(first: object, /) -> bytes:
    """Return the identities of an object and of those of generation 1 and 0, and then of their types (int64).

    No other thread runs meanwhile, and no Python code.

    Raises:
        NotImplementedError: this interpreter's collector has its objects in other lists.
    """

def frozen(most: int) -> tuple[int, int, int]:
    """Return how many objects are frozen, and two numbers of which one changes with the first and one with the last.

    Args:
        most: how many to count; -1 for all.

    Raises:
        NotImplementedError: this interpreter's collector has its objects in other lists.
    """

def marks_of(dicts: tuple[dict[str, Any], ...]) -> bytes:
    """Return a number (uint64) for each dictionary, which is another one once a value in it is another."""

def namespace_sizes(modules: list[Any], /) -> tuple[bytes, bytes]:
    """Return the identity of each module's namespace, and how many names it has (int64); 0 for what is no module."""

def numbers_in(references: list[Any], offset: int, /) -> bytes:
    """Return the number (int64) in each object that a weak reference refers to; -1 for what is gone.

    Args:
        references: weak references to objects of a type that is known to have a number there.
        offset: where, in bytes.

    Raises:
        SystemError: one of them is no weak reference.
    """
