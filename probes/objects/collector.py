"""Which collector this interpreter has: decided by what it does, since releases of one version differ.

An incremental collector came with CPython 3.14.0 and went with 3.14.5; 3.15 has the generations of 3.13 again.  A build
without the interpreter lock has its own, whose generations show nothing.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from lowtide.probes.objects.listed import collector_paused
from lowtide.probes.originals import gc

NEEDS = "CPython 3.10 to 3.13, or 3.14.5 or newer, with the interpreter lock"
"""What runs have to have, for a message."""


@dataclass(frozen=True)
class Collector:
    """What was seen of a collector.

    Attributes:
        implementation: the interpreter's name, as in `sys.implementation`.
        has_lock: whether it was built with the interpreter lock.
        moves: the generations in which one object was listed: when it was new, after `gc.collect(0)`, and after
            `gc.collect(1)`.
    """

    implementation: str
    has_lock: bool
    moves: tuple[tuple[int, ...], ...]


def observed_collector() -> Collector:
    """Sees what becomes of an object that survives; collects the young generations."""
    # A collection by itself, which the objects of any thread start, would move the witness too early.
    with collector_paused():
        witness: list[object] = []
        moves = [_generations_of(witness)]
        for generation in (0, 1):
            gc.collect(generation)
            moves.append(_generations_of(witness))
    return Collector(sys.implementation.name, "t" not in sys.abiflags, tuple(moves))


def why_unusable(collector: Collector) -> str:
    """Why births cannot be followed with this collector; empty where they can.

    An object must be listed in generation 0 as long as it is new, then in 1, then in 2: so what is young was born since
    the last collection, and what is about to become old can be noted before it does.
    """
    if collector.implementation != "cpython":
        return f"this is {collector.implementation}"
    if not collector.has_lock:
        return "this one was built without the lock, and its collector has no generations"
    if collector.moves != ((0,), (1,), (2,)):
        return "the collector of this one is incremental, as in 3.14.0 to 3.14.4"
    return ""


def _generations_of(witness: object) -> tuple[int, ...]:
    return tuple(
        generation for generation in range(3) if any(item is witness for item in gc.get_objects(generation=generation))
    )
