"""Records what each collection is about to move, by callables that are written in C and so run no Python code.

Python calls each entry of `gc.callbacks` around a collection and drops what it raises: a signal handler that runs
there, since it runs before the next Python instruction, raises in vain, and Ctrl-C or a test's time limit is lost. Code
that allocates in C (`json.loads`, a tokenizer) meets that nearly always. A callable of C runs no handlers.

So what is done at a collection is put together of such callables, in endless iterators: `map` calls one with what
another one returned, `zip` is a sequence of them, `deque`s are the variables, and dicts of steps, by phase and
generation, decide. One iterator inside another costs no call: a collection may begin at the very end of the stack.
"""

from __future__ import annotations

import atexit
import contextlib
import operator
from _io import _IOBase
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any

from lowtide.probes.objects.address_table import Ints
from lowtide.probes.objects.identities import types_in_c
from lowtide.probes.original_numpy import np
from lowtide.probes.originals import gc, os, sys

_ENTRIES = 2
"""Entries of the log for each record: identities and types as bytes, then the generation."""

_MOST_RECORDS = 512
"""Records that are kept until somebody takes them: of 8,000 objects each they take 65 MB."""

_get_objects, _get_stats = gc.get_objects, gc.get_stats
_END = object()
"""What no callable returns: `iter(callable, _END)` calls it for each value."""

_Step = Iterator[object]
"""What does something each time that it is asked for a value, and gives nothing that is worth keeping."""

_nothing: _Step = repeat(None)

_Steps = dict[str, dict[int, _Step]]
"""What is done in each phase of a collection of each generation."""

_off: _Steps = {phase: dict.fromkeys(range(3), _nothing) for phase in ("start", "stop")}

_steps_of: dict[int, _Steps] = {}
"""What is done for each `CollectionRecord`, by its identity; nothing for one that is not here."""

# In a fork nobody takes what is recorded, and a program that ends takes its modules apart.
os.register_at_fork(after_in_child=_steps_of.clear)
atexit.register(_steps_of.clear)


@dataclass(frozen=True)
class YoungObjects:
    """What was young when a collection began.

    Attributes:
        number: how many such records were made before it.
        generation: the one that was collected; where it is 0, those in generation 1 have stayed young.
        witness: the identity of the witness then; see `CollectionRecord.witness`.
        ids: the identities, those of generation 1 in any order, then those of generation 0, the oldest first.
        types: the identity of each one's type, shape [len(ids)].
    """

    number: int
    generation: int
    witness: int
    ids: Ints
    types: Ints


class CollectionRecord:
    """Records the young objects before a collection makes them old; keeps none of them alive."""

    def __init__(self) -> None:
        # No small objects of Python's: each would keep the memory around it, where a test's small objects have been.
        self._log: deque[Any] = deque(maxlen=_MOST_RECORDS * _ENTRIES)
        # One that no collection has seen: only a collection or `gc.freeze()` can make it old.
        self._witness: deque[list[object]] = deque([[]], maxlen=1)
        self._taken = self._full_taken = self._begun = 0
        # Empty but in a collection's callbacks.
        self._young: deque[list[object]] = deque(maxlen=1)
        at_start = dict.fromkeys(range(3), _nothing)
        disarmed = map(at_start.__setitem__, repeat(0), repeat(_nothing))
        listed = self._listed()
        record = [
            zip(*listed, map(self._log.append, repeat(generation)), disarmed, strict=False) for generation in range(3)
        ]
        renewed = map(self._witness.append, iter(list, _END))
        at_start.update({1: record[1], 2: record[2]})
        self._at_start, self._at_next = at_start, record[0]
        self._steps: _Steps = {"start": at_start, "stop": {0: _nothing, 1: renewed, 2: renewed}}
        # What is called cannot see with what, so the first callback takes it down and the second acts on it.
        events: dict[str, dict[str, int]] = {}
        event: deque[tuple[str, dict[str, int]]] = deque(maxlen=1)
        # The third lets go of all that also where the second one failed, at the end of the stack or of memory.
        forget = (iter(variable.clear, _END) for variable in (self._young, event, events))
        self._callbacks: tuple[Callable[..., Any], ...] = (
            events.__setitem__,
            _of_any_arguments(map(event.append, iter(events.popitem, _END)), self._acted(event)),
            _of_any_arguments(*forget),
        )

    def _acted(self, event: deque[tuple[str, dict[str, int]]]) -> _Step:
        """What does what is to be done at an event."""
        phase = _through(_only(event), operator.itemgetter(0))
        # Not by a text made of both: Python looks for signals whenever it makes a text of an object.
        generation = _through(_only(event), operator.itemgetter(1), operator.itemgetter("generation"))
        steps = map(_steps_of.get, repeat(id(self)), repeat(_off))
        # Not what the step gave: kept until the next one, it would be one more object of the program's.
        return map(bool, map(next, map(operator.getitem, map(operator.getitem, steps, phase), generation)))

    def _listed(self) -> tuple[_Step, ...]:
        """What appends to the log the identities of the witness and of all that is young, and those of their types."""
        ids: deque[bytes] = deque(maxlen=1)
        types = _through(_only(ids), _as_numbers, *types_in_c(), _bytes_of)
        return (
            # Kept until their types are read: the first of these lists are among the objects of the last one.
            map(self._young.append, map(operator.add, map(list, repeat(self._witness)), _young())),
            _through(_only(self._young), _as_references, _bytes_of, ids.append),
            map(self._log.append, map(operator.add, _only(ids), types)),
            iter(ids.clear, _END),
        )

    @property
    def witness(self) -> list[object]:
        """A young object, unless the program has frozen its heap since the last record of more than generation 0."""
        return self._witness[0]

    @property
    def made(self) -> int:
        """How many records were made since `restart`."""
        return self._taken + len(self._log) // _ENTRIES

    @property
    def is_incomplete(self) -> bool:
        """Whether a collection since `restart` made objects old that are in no record, taken ones included."""
        waiting = sum(generation > 0 for generation in list(self._log)[1::_ENTRIES])
        return bool(_collections() != self._begun + self._full_taken + waiting)

    def start(self) -> None:
        """Begin to record; legal twice, and again where the program has emptied `gc.callbacks` or has forked."""
        _steps_of[id(self)] = self._steps
        for callback in self._callbacks:
            if not any(entry is callback for entry in gc.callbacks):
                gc.callbacks.append(callback)

    def stop(self) -> None:
        """End it and forget what was recorded; legal twice."""
        _steps_of.pop(id(self), None)
        for place in reversed(range(len(gc.callbacks))):
            if any(gc.callbacks[place] is callback for callback in self._callbacks):
                del gc.callbacks[place]
        self._log.clear()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing in the block, which `restart` follows."""
        _steps_of.pop(id(self), None)
        try:
            yield
        finally:
            _steps_of[id(self)] = self._steps

    def restart(self) -> None:
        """Forget what was recorded, and take a new witness."""
        self._log.clear()
        self._witness.append([])
        self._at_start[0] = _nothing
        self._taken = self._full_taken = 0
        self._begun = _collections()

    def record_next(self) -> None:
        """Record before the next collection, also where it moves the youngest objects only."""
        self._at_start[0] = self._at_next

    def take(self) -> list[YoungObjects]:
        """Return what was recorded since it was last taken, the earliest first."""
        # One by one, since another thread may add to it.
        entries = [self._log.popleft() for _ in range(len(self._log))]
        taken = []
        for place in range(0, len(entries), _ENTRIES):
            ids, types = np.split(_as_numbers(entries[place]), 2)
            taken.append(YoungObjects(self._taken, entries[place + 1], int(ids[0]), ids[1:], types[1:]))
            self._taken += 1
        self._full_taken += sum(moved.generation > 0 for moved in taken)
        return taken


def _collections() -> int:
    """How many collections there were that can have made an object old."""
    return sum(int(generation["collections"]) for generation in _get_stats()[1:])


def _only(variable: deque[Any]) -> Iterator[Any]:
    """What a deque of one entry holds, looked up anew for each."""
    return map(operator.getitem, repeat(variable), repeat(0))


def _through(values: Iterator[Any], *functions: Callable[[Any], Any]) -> Iterator[Any]:
    """Each value, given to one function after the other."""
    for function in functions:
        values = map(function, values)
    return values


def _of_any_arguments(*steps: _Step) -> Callable[..., Any]:
    """What takes each step once, in order, whatever iterables of hashables it is called with itself."""
    if sys.version_info >= (3, 12):
        # `zip` stops, for this once, where one of its iterators has no value.
        return partial(frozenset[Any]().union, zip(*steps, iter(()), strict=False))
    # Until then the calls of C count for the depth of the stack: at the very end of it they fail, and Python would
    # print that where the program prints nothing. So this is a file that is closed as it is made, since nobody keeps
    # it: what its `close` raises is dropped.
    close = zip(*steps, strict=False).__next__
    return type("Steps", (_IOBase,), {"__module__": __name__, "__slots__": (), "closed": False, "close": close})


def _young() -> Iterator[list[object]]:
    """All young objects, listed anew for each."""
    return map(operator.add, map(_get_objects, repeat(1)), map(_get_objects, repeat(0)))


# An array of references, whose bytes are the identities. It asks no object for anything, and is gone at once.
_as_references: Callable[[Iterable[object]], Any] = partial(np.fromiter, dtype=np.dtype(object))
_bytes_of = operator.methodcaller("tobytes")
_as_numbers: Callable[[bytes], Any] = partial(np.frombuffer, dtype=np.dtype(np.int64))
