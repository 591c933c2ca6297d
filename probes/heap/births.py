"""Which tensors were born since a mark, found among the collector's young objects, without a walk of the heap.

What a collection moves from there meanwhile is recorded beside it, by callables of C that run no Python code.
"""

from __future__ import annotations

import atexit
import contextlib
import operator
from _io import _IOBase
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import repeat
from typing import Any

import msgspec

from lowtide.probes import native
from lowtide.probes.heap.caches import LRU_CACHE
from lowtide.probes.objects.address_table import Ints, each_once
from lowtide.probes.objects.collector import observed_collector, why_unusable
from lowtide.probes.objects.foreign import mro_of
from lowtide.probes.objects.identities import Identities, identities, types_in_c
from lowtide.probes.objects.listed import (
    Census,
    FrozenCount,
    all_classes,
    all_instances,
    collector_paused,
    lists_can_be_read,
)
from lowtide.probes.original_numpy import np
from lowtide.probes.originals import gc, loaded, os, sys, weakref
from lowtide.probes.references.unseen_references import is_script, tensors_of_script

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


class YoungObjects(msgspec.Struct, frozen=True):
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
    """Records the young objects before a collection makes them old; keeps none of them alive.

    Python calls each entry of `gc.callbacks` around a collection and drops what it raises: a signal handler that runs
    there, since it runs before the next Python instruction, raises in vain, and Ctrl-C or a test's time limit is lost.
    Code that allocates in C (`json.loads`, a tokenizer) meets that nearly always. A callable of C runs no handlers.

    So what is done at a collection is put together of such callables, in endless iterators: `map` calls one with what
    another one returned, `zip` is a sequence of them, `deque`s are the variables, and dicts of steps, by phase and
    generation, decide. One iterator inside another costs no call: a collection may begin at the very end of the stack.
    """

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
        """Return what does what is to be done at an event."""
        phase = _through(_only(event), operator.itemgetter(0))
        # Not by a text made of both: Python looks for signals whenever it makes a text of an object.
        generation = _through(_only(event), operator.itemgetter(1), operator.itemgetter("generation"))
        steps = map(_steps_of.get, repeat(id(self)), repeat(_off))
        # Not what the step gave: kept until the next one, it would be one more object of the program's.
        return map(bool, map(next, map(operator.getitem, map(operator.getitem, steps, phase), generation)))

    def _listed(self) -> tuple[_Step, ...]:
        """Return what appends to the log the identities of the witness and of all that is young, and of their types."""
        if _young_with_types is not None:
            return (map(self._log.append, map(_young_with_types, _only(self._witness))),)
        ids: deque[bytes] = deque(maxlen=1)
        types = _through(_only(ids), _as_numbers, *types_in_c(), _bytes_of)
        return (
            # Kept until their types are read: the first of these lists are among the objects of the last one.
            map(self._young.append, map(operator.add, map(list, repeat(self._witness)), _young_lists())),
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
    def has_news(self) -> bool:
        """Whether there was a collection since `restart` of which something is to be taken, or that is in no record."""
        return bool(self._log) or self.is_incomplete

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
    """Return how many collections there were that can have made an object old."""
    return sum(int(generation["collections"]) for generation in _get_stats()[1:])


def _only(variable: deque[Any]) -> Iterator[Any]:
    """Yield what a deque of one entry holds, looked up anew for each."""
    return map(operator.getitem, repeat(variable), repeat(0))


def _through(values: Iterator[Any], *functions: Callable[[Any], Any]) -> Iterator[Any]:
    """Return each value, given to one function after the other."""
    for function in functions:
        values = map(function, values)
    return values


def _of_any_arguments(*steps: _Step) -> Callable[..., Any]:
    """Return what takes each step once, in order, whatever iterables of hashables it is called with itself."""
    if sys.version_info >= (3, 12):
        # `zip` stops, for this once, where one of its iterators has no value.
        return partial(frozenset[Any]().union, zip(*steps, iter(()), strict=False))
    # Until then the calls of C count for the depth of the stack: at the very end of it they fail, and Python would
    # print that where the program prints nothing. So this is a file that is closed as it is made, since nobody keeps
    # it: what its `close` raises is dropped.
    close = zip(*steps, strict=False).__next__
    return type("Steps", (_IOBase,), {"__module__": __name__, "__slots__": (), "closed": False, "close": close})


def _young_lists() -> Iterator[list[object]]:
    """Return all young objects, listed anew for each."""
    return map(operator.add, map(_get_objects, repeat(1)), map(_get_objects, repeat(0)))


# An array of references, whose bytes are the identities. It asks no object for anything, and is gone at once.
_as_references: Callable[[Iterable[object]], Any] = partial(np.fromiter, dtype=np.dtype(object))
_bytes_of = operator.methodcaller("tobytes")
_as_numbers: Callable[[bytes], Any] = partial(np.frombuffer, dtype=np.dtype(np.int64))


_MOST_IDENTITIES = 1_500_000
"""Identities of objects of any kind that are remembered since a mark: creating a vLLM engine makes a million."""

_FEW = 1000
"""Objects whose types are gone through one by one: numpy costs as much before it looks at the first."""

_FEW_MARKS = 8
"""Marks that are looked for one by one: the search for many begins by sorting."""

_OLDEST = 2
"""The generation of which a collection is a full one."""

_MOST_ALIKE = 2
"""Times as many that are noted before those that are the same are made one."""


class Newborn(msgspec.Struct, frozen=True):
    """An object that was born since the mark and is alive.

    Attributes:
        item: the object; drop it soon, it is kept alive by this.
        label: what the births were called when it was first seen.
        turn: the number that the births had then.
    """

    item: Any
    label: str
    turn: int = 1


class SurvivorLook(msgspec.Struct, frozen=True):
    """What `Births.survivors` gave at one time, by weak references, which make the next times cheap; drop it soon.

    Attributes:
        references: to all of it.
        ids: its identities.
        records: how many records of collections had been looked at.
    """

    references: tuple[weakref.ref[Any], ...]
    ids: frozenset[int]
    records: int


class _Change(msgspec.Struct, frozen=True):
    """A change of the label.

    Attributes:
        label: that of what was born before it.
        turn: the number that goes with it.
        made: how many records of collections there were then.
        mark: made when the label changed: its place among the young objects shows which of them are older.
    """

    label: str
    turn: int
    made: int
    mark: list[object] = msgspec.field(default_factory=list)


class _Span(msgspec.Struct, frozen=True):
    """A part of a list of young objects, the oldest first, whose objects have one label."""

    begin: int
    end: int
    label: str
    turn: int


class Births:
    """Watches tensors, storages, `torch.nn.Module`s and `lru_cache`s come to life, by the collector's generations.

    A new object is in the young generations (0 and 1) until a collection moves it to the old one. So what is young and
    was not young at the mark was born since; what a collection is about to move is recorded just before it does
    (`CollectionRecord`), and then looked for among as many of the old generation's last objects as can have been
    moved. No weak references are taken: `torch.utils.swap_tensors` refuses tensors that have one. Hence its one blind
    spot: a watched object at the very address of another one that died since it was seen passes for that one.

    Attributes:
        label: what the objects born from now on are called; `begin` changes it.
        turn: a number that goes with the label, such as how often that stage has run.
        froze_in: the label under which the program was first seen to have frozen objects since the mark; else empty.
    """

    def __init__(self) -> None:
        self.label = ""
        self.turn = 1
        self.froze_in = ""
        self._record = CollectionRecord()
        # All that was young at the mark, and of that what is watched: a tensor may get the address of something else.
        self._known: set[int] = set()
        self._known_watched: set[int] = set()
        # No object that was born since the mark comes before it in the old generation. The collector sees no references
        # from an array: what it takes for referred to from outside stays at its place.
        self._first = np.empty(1, object)
        self._noted: dict[int, tuple[str, int]] = {}
        # What is watched and was moved to the old generation, by the number of the record that shows it last.
        self._aged: dict[int, int] = {}
        # Not as Python's integers: each would keep the memory around it, where a test's small objects have been.
        self._born: list[Ints] = []
        self._born_number = 0
        self._are_too_many = False
        self._moved = 0
        self._full = False
        self._frozen_count = FrozenCount()
        self._frozen = 0
        self._lost = False
        # Changes of the label whose marks were in no record yet, and those of them at which something began aside.
        self._changes: list[_Change] = []
        self._asides: list[_Change] = []

    def start(self) -> None:
        """Begin to watch; legal twice."""
        self._record.start()

    def stop(self) -> None:
        """End it; legal twice."""
        self._record.stop()
        self._noted.clear()
        self._aged.clear()
        self._known.clear()
        self._known_watched.clear()
        self._changes.clear()
        self._forget_born()

    @contextlib.contextmanager
    def forgetting(self) -> Iterator[None]:
        """Note nothing in the block of what a collection moves: `mark` comes right after it."""
        with self._record.paused():
            yield

    def mark(self, label: str = "") -> None:
        """Begin here: whatever is alive now is not newborn."""
        self.label, self.turn = label, 1
        self._changes.clear()
        self._noted.clear()
        self._aged.clear()
        self._forget_born()
        self._moved = 0
        self._full = False
        self._lost = False
        self.froze_in = ""
        self._frozen = self._frozen_count.read()
        self._first[0] = []
        # In this order, and the set in place: what is freed here must not leave its identity among the known ones.
        self._known.clear()
        self._known_watched.clear()
        self._record.restart()
        young = _young()
        self._known.update(young.ids.tolist())
        self._known_watched.update(map(id, young.watched))

    def begin(self, label: str, turn: int = 1) -> None:
        """Give what is born from here on this label.

        A new object comes to the end of the youngest generation. So the place of one that is made here shows which of
        the others are older, until the next collection, before which all of them are recorded: nothing has to be looked
        at now.
        """
        self._change()
        self.label, self.turn = label, turn

    def _change(self) -> _Change:
        change = _Change(self.label, self.turn, self._record.made)
        self._changes.append(change)
        self._record.record_next()
        return change

    def begin_aside(self, label: str) -> None:
        """Give what is born from here to `end_aside` a label of its own; nothing is looked at for it; nests.

        Args:
            label: what they are called.
        """
        self._asides.append(self._change())
        self.label, self.turn = label, 1

    def end_aside(self) -> list[Newborn] | None:
        """End what was begun last: the labels are as before it.

        Returns:
            What was born in it and is alive; None where a collection has moved it meanwhile: then `survivors` finds it.
        """
        aside = self._asides.pop()
        with collector_paused():
            within = _since(aside, self._changes)
            young = _young(0)
            born: list[Newborn] | None = None
            if within and (young.ids == id(aside.mark)).any():
                born = [
                    Newborn(item, span.label, span.turn)
                    for span in _spans(young.ids, within, self.label, self.turn)[1:]
                    if span.label == self.label
                    for item in young.watched_in(span)
                    if id(item) not in self._known_watched
                ]
        self._change()
        self.label, self.turn = aside.label, aside.turn
        return born

    def _settle(self) -> _Young:
        """Note what is older than the last change of the label; return the young objects, the oldest first.

        The collector is paused.
        """
        taken = self._record.take()
        kinds = _watched_kinds() if taken else np.zeros(0, np.int64)
        for moved in taken:
            is_watched = np.isin(moved.types, kinds)
            for place, span in enumerate(self._advance(moved.ids, moved.witness, moved.number)):
                part = slice(span.begin, span.end)
                keys = moved.ids[part][is_watched[part]].tolist()
                self._forget(keys if place else ())
                self._note(keys, span.label, span.turn)
                aged = keys if moved.generation else ()
                self._aged.update((key, moved.number) for key in aged if key not in self._known_watched)
            if moved.generation:
                self._moved += len(moved.ids)
                self._full = self._full or moved.generation == _OLDEST
                self._note_born(moved.ids)
        young = _young()
        spans = self._advance(young.ids, id(self._record.witness), self._record.made)
        for place, span in enumerate(spans):
            keys = list(map(id, young.watched_in(span))) if len(spans) > 1 else []
            self._forget(keys if place else ())
            if place < len(spans) - 1:
                self._note(keys, span.label, span.turn)
        return young

    def _advance(self, ids: Ints, witness: int, made: int) -> list[_Span]:
        """Divide what was young at a moment by the changes before it, which are forgotten, and see whether it froze.

        Args:
            ids: the identities of what was young, the oldest first.
            witness: that of what was young then unless the program froze it.
            made: how many records there were before.
        """
        due = [change for change in self._changes if change.made <= made]
        self._changes = self._changes[len(due) :]
        label, turn = (self._changes[0].label, self._changes[0].turn) if self._changes else (self.label, self.turn)
        spans = _spans(ids, due, label, turn)
        if not (ids == witness).any() and not self._record.is_incomplete:
            self._lost = True
            self.froze_in = self.froze_in or _label_at_freeze(ids, due, label)
        return spans

    def _note(self, keys: Iterable[int], label: str, turn: int) -> None:
        for key in keys:
            if key not in self._known_watched:
                self._noted.setdefault(key, (label, turn))

    def _forget(self, keys: Iterable[int]) -> None:
        """Drop what is known of the addresses of what was made since: who was there is gone, and has left its place."""
        for key in keys:
            self._noted.pop(key, None)

    def forget_dead(self) -> None:
        """Drop what is known of objects that are gone: the next object at such an address is another one."""
        with collector_paused():
            alive = {id(born.item) for born in self.survivors()}
            self._noted = {key: noted for key, noted in self._noted.items() if key in alive}

    @property
    def frozen_before(self) -> int:
        """Return how many objects were frozen at the mark."""
        return self._frozen

    @property
    def froze(self) -> bool:
        """Whether the program froze objects since the mark: their generation says nothing any more.

        Even if it has unfrozen them since: they are old then.
        """
        if not self.froze_until_last_look:
            with collector_paused():
                self._settle()
        return self.froze_until_last_look

    @property
    def froze_until_last_look(self) -> bool:
        """As `froze`, right after `survivors`, which has listed the young objects: they are not listed once more."""
        return self._lost or self._frozen_count.read() > self._frozen

    def survivors(
        self, label: str | None = None, census: Census | None = None, last: SurvivorLook | None = None
    ) -> list[Newborn]:
        """Return what was born since the mark and is alive, the oldest first, uncollected garbage included.

        Args:
            label: only what was first seen under this label: where nothing of that has become old, which is so after
                nearly every import, the old generation is not looked through.
            census: all objects, where they are known, so that they are not listed once more.
            last: an earlier look: what was old then, or has become old since, is among it, or is looked for.
        """
        with collector_paused():
            if self._are_none():
                return []
            young = self._settle()
            found = {id(item): item for item in young.watched if id(item) not in self._known_watched}
            self._note(found, self.label, self.turn)
            if self._record.is_incomplete:
                self._note(map(id, _watched(self._old_objects())), self.label, self.turn)
            wanted = {key for key, noted in self._noted.items() if label is None or noted[0] == label}
            wanted -= found.keys()
            if wanted and (self._moved or self._record.is_incomplete or self.froze_until_last_look):
                if last is None or self._misses_any(last):
                    old = self._old_among(wanted, census)
                else:
                    old = _alive(last, wanted)
                found.update((id(item), item) for item in old)
            self._reveal(found)
            # The oldest first: of a memory that several of them view, the first shows since when it is there.
            ordered = [(key, found.pop(key)) for key in self._noted if key in found] + list(found.items())
            born = [Newborn(item, *self._noted.get(key, (self.label, self.turn))) for key, item in ordered]
            return [each for each in born if label is None or each.label == label]

    def look(self, survivors: Sequence[Newborn]) -> SurvivorLook | None:
        """Return what `survivors` has given just now, to be given to it; None where one allows no weak reference."""
        try:
            references = tuple(weakref.ref(born.item) for born in survivors)
        except TypeError:
            return None
        return SurvivorLook(references, frozenset(id(born.item) for born in survivors), self._record.made)

    def _misses_any(self, last: SurvivorLook) -> bool:
        """Return whether something may be old by now that an earlier look has not met."""
        if self._record.is_incomplete or self.froze_until_last_look:
            return True
        return any(number >= last.records and key not in last.ids for key, number in self._aged.items())

    @property
    def are_young(self) -> bool:
        """Whether all that was born since the mark is young, right after `survivors`: a young collection finds it."""
        return not (self._moved or self._full or self._lost or self._record.has_news)

    def _are_none(self) -> bool:
        """Return whether nothing that is watched was born since the mark, as in most tests; the collector is paused.

        What has to be noted of the changes of the label may wait until something is.
        """
        if self._noted or self._lost or self._record.has_news:
            return False
        young = _young()
        return not young.watched and bool((young.ids == id(self._record.witness)).any())

    def all_watched(self) -> Census:
        """Everything of the kinds that are watched, whenever it was born; drop it soon.

        A list of all objects would take a reference to each.
        """
        with collector_paused():
            return Census(all_instances(*_classes()))

    def unfrozen_among(self, ids: Collection[int]) -> set[int]:
        """Return those identities that an object has which the collector lists, whenever it was born."""
        wanted = Identities(np.fromiter(ids, np.int64, len(ids)))
        with collector_paused():
            if _of_generations is None:
                listed = identities(gc.get_objects())
            else:
                listed = _as_numbers(_of_generations(_OLDEST, ())[0])
            return set(listed[wanted.holds(listed)].tolist())

    def add(self, item: object, like: Newborn) -> Newborn:
        """Take in an object that asking for it has only now made, with the label of the one that holds it.

        Returns:
            It, with the label under which it was seen if that was before.
        """
        # One that was there at the mark and is gone had this address.
        self._known.discard(id(item))
        self._known_watched.discard(id(item))
        return Newborn(item, *self._noted.setdefault(id(item), (like.label, like.turn)))

    def _reveal(self, found: dict[int, Any]) -> None:
        """Add the tensors of TorchScript modules: until they are asked for there are none in Python."""
        # Asked by the type, since there may be thousands of modules; by its identity, as a metaclass may hash it.
        kinds = {id(kind): kind for kind in map(type, found.values())}
        scripts = {key for key, kind in kinds.items() if is_script(kind)}
        for module in [item for item in found.values() if id(type(item)) in scripts]:
            noted = self._noted.get(id(module), (self.label, self.turn))
            for tensor in tensors_of_script(module):
                if id(tensor) not in self._known_watched and id(tensor) not in found:
                    self._noted.setdefault(id(tensor), noted)
                    found[id(tensor)] = tensor

    def born(self) -> Identities | None:
        """Return the identities of all objects born since the mark; None if there were too many to remember.

        (Some of them may be dead.)
        """
        with collector_paused():
            young = self._settle()
            self._merge_born()
            if self._are_too_many or self._record.is_incomplete or self.froze_until_last_look:
                return None
            return Identities(np.concatenate([*self._born, young.ids]), but=self._known)

    def may_be_new(self, item: object) -> bool:
        """Return whether an object was born since the mark; also where there were too many to remember."""
        born = self.born()
        return born is None or bool(born.holds(identities([item]))[0])

    def _note_born(self, ids: Ints) -> None:
        if self._are_too_many:
            return
        self._born.append(ids)
        self._born_number += len(ids)
        if self._born_number > _MOST_IDENTITIES * _MOST_ALIKE:
            self._merge_born()

    def _merge_born(self) -> None:
        """Many of them are those of objects that took the places of earlier ones."""
        if len(self._born) > 1:
            self._born = [each_once(np.concatenate(self._born))]
            self._born_number = len(self._born[0])
        if self._born_number > _MOST_IDENTITIES:
            self._forget_born()
            self._are_too_many = True

    def _forget_born(self) -> None:
        self._born.clear()
        self._born_number = 0
        self._are_too_many = False

    def _old_among(self, wanted: set[int], census: Census | None) -> Iterator[Any]:
        """Yield those old objects that have one of some identities and are of a kind to watch.

        Args:
            wanted: the identities.
            census: all objects, where they are known.
        """
        if census is not None:
            old = _watched_among(census)
        elif _old_among is None or _followers_among is None or self._record.is_incomplete or self.froze_until_last_look:
            old = _watched(self._old_objects())
        else:
            # They are behind the first one, unless a full collection has reordered them.
            ids = np.fromiter(wanted, np.int64, len(wanted)).tobytes()
            found = _old_among(ids) if self._full else _followers_among(self._first[0], ids, self._moved + 1)
            old = _watched(found)
        return (item for item in old if id(item) in wanted)

    def _old_objects(self) -> list[object]:
        """Return the old objects among which those are that were born since the mark."""
        if self.froze_until_last_look:
            return all_instances(*_classes())
        old = gc.get_objects(generation=2)
        if self._record.is_incomplete:
            # How many were moved is not known.
            places = np.flatnonzero(identities(old) == id(self._first[0])).tolist()
            return old[places[0] :] if places else old
        # A full collection may reorder the old generation; the others append to it.
        return old if self._full else old[-self._moved :]


def _since(change: _Change, changes: list[_Change]) -> list[_Change]:
    """Return a change and those behind it; empty where it is not among them."""
    for place in range(len(changes) - 1, -1, -1):
        if changes[place] is change:
            return changes[place:]
    return []


def _spans(ids: Ints, changes: list[_Change], label: str, turn: int) -> list[_Span]:
    """Divide a list of young objects where the marks of changes are.

    Args:
        ids: the identities of the objects, the oldest first.
        changes: the changes, the earliest first.
        label: that of what comes behind the last one.
        turn: the number that goes with it.
    """
    spans, begin = [], 0
    for change, place in zip(changes, _places_of_marks(ids, changes), strict=True):
        if place is not None:
            spans.append(_Span(begin, place, change.label, change.turn))
            begin = place + 1
    return [*spans, _Span(begin, len(ids), label, turn)]


def _label_at_freeze(ids: Ints, changes: list[_Change], label: str) -> str:
    """Return the label under which a freeze has taken the marks that are not among young objects any more.

    It took all that were made before it. Where none has gone, it was before the first, if there was one.
    """
    places = _places_of_marks(ids, changes)
    gone = max((number for number, place in enumerate(places, 1) if place is None), default=0)
    return [*(change.label for change in changes), label][gone]


def _places_of_marks(ids: Ints, changes: list[_Change]) -> list[int | None]:
    marks = [id(change.mark) for change in changes]
    if len(marks) <= _FEW_MARKS:
        found = [(ids == mark).nonzero()[0] for mark in marks]
        return [int(at[0]) if len(at) else None for at in found]
    at = np.flatnonzero(np.isin(ids, np.array(marks, np.int64)))
    places = dict(zip(ids[at].tolist(), at.tolist(), strict=True))
    return [places.get(mark) for mark in marks]


def _alive(last: SurvivorLook, wanted: Collection[int]) -> Iterator[Any]:
    """Yield those objects of an earlier look that are alive and have one of some identities."""
    alive = (reference() for reference in last.references)
    return (item for item in alive if item is not None and id(item) in wanted)


_ANSWERS: list[bool] = []
"""What was answered once: no interpreter changes its collector, and to ask lists the whole heap."""


def young_generations_tell() -> bool:
    """Return whether this interpreter's collector has the generations that `Births` relies on; see `why_unusable`."""
    if not _ANSWERS:
        _ANSWERS.append(not why_unusable(observed_collector()))
    return _ANSWERS[0]


class _Young(msgspec.Struct, frozen=True):
    """The young objects at a moment.

    Attributes:
        ids: the identities of all of them; behind the last collection the oldest come first.
        places: where in this are those that are watched, shape [len(watched)].
        watched: these; no other one is kept alive.
    """

    ids: Ints
    places: Ints
    watched: list[Any]

    def watched_in(self, span: _Span) -> list[Any]:
        """Return what is watched and lies in a part of them."""
        begin, end = self.places.searchsorted((span.begin, span.end)) if self.watched else (0, 0)
        return self.watched[begin:end]


def _young(oldest: int = 1) -> _Young:
    """Return what is in a young generation and in those below.

    Args:
        oldest: the generation, 1 or 0.
    """
    if _of_generations is not None:
        ids, places, watched = _of_generations(oldest, _classes())
        return _Young(_as_numbers(ids), _as_numbers(places), watched)
    # In this order: the later of the two lists is not in the earlier one, and so never in itself. In no comprehension:
    # the cell of a variable that one uses is young itself, and the list would be in a cycle with it, which keeps all
    # young objects, even tuples that are not filled yet.
    newer = gc.get_objects(generation=0)
    young = gc.get_objects(generation=1) if oldest else newer
    if oldest:
        young += newer
    items = list(_watched(young))
    in_order = identities(young)
    return _Young(in_order, np.flatnonzero(np.isin(in_order, identities(items))), items)


def _watched(objects: list[object]) -> Iterator[Any]:
    """Yield those of the objects that are of a kind to watch."""
    if len(objects) > _FEW:
        yield from _watched_among(Census(objects))
        return
    # By identity, and so never by the `__hash__` of a metaclass.
    kinds = list(map(id, map(type, objects)))
    types = dict(zip(kinds, map(type, objects), strict=True))
    classes = set(map(id, _classes()))
    wanted = {kind for kind, cls in types.items() if not classes.isdisjoint(map(id, mro_of(cls)))}
    if wanted:
        yield from (item for item, kind in zip(objects, kinds, strict=True) if kind in wanted)


def _classes() -> tuple[type, ...]:
    """Return the types from which the kinds to watch derive; nothing derives from the type of `lru_cache`s."""
    torch: Any = loaded("torch")
    if torch is None or not hasattr(torch, "nn") or not hasattr(torch.nn, "Module"):
        return (LRU_CACHE,)
    return LRU_CACHE, torch.Tensor, torch.UntypedStorage, torch.nn.Module


def _watched_kinds() -> Ints:
    """Return the identities of all types of which the instances are watched, in any order."""
    return np.fromiter(map(id, all_classes(*_classes())), np.int64)


def _watched_among(census: Census) -> Iterator[Any]:
    yield from census.instances_of(*_classes())


_followers_among = native.followers_among if lists_can_be_read() else None
_old_among = native.old_among if lists_can_be_read() else None
_of_generations = native.of_generations if lists_can_be_read() else None
_young_with_types = native.young_with_types if lists_can_be_read() else None
