"""Which tensors were born since a mark, found among the collector's young objects, without a walk of the heap."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from lowtide.probes.heap.birth_marks import Aside, Boundary
from lowtide.probes.heap.caches import LRU_CACHE
from lowtide.probes.objects.address_table import Ints
from lowtide.probes.objects.collector import observed_collector, why_unusable
from lowtide.probes.objects.foreign import mro_of
from lowtide.probes.objects.identities import Identities, identities
from lowtide.probes.objects.listed import Census, all_objects, collector_paused, frozen_by_program
from lowtide.probes.references.unseen_references import is_script, tensors_of_script

_MOST_IDENTITIES = 1_500_000
"""Identities of objects of any kind that are remembered since a mark: creating a vLLM engine makes a million."""

_FEW = 1000
"""Objects whose types are gone through one by one: numpy costs as much before it looks at the first."""

_MOST_ALIKE = 2
"""Times as many that are noted before those that are the same are made one."""


@dataclass(frozen=True)
class Newborn:
    """An object that was born since the mark and is alive.

    Attributes:
        item: the object; drop it soon, it is kept alive by this.
        label: what the births were called when it was first seen.
        turn: the number that the births had then.
    """

    item: Any
    label: str
    turn: int = 1


class Births:
    """Watches tensors, storages, `torch.nn.Module`s and `lru_cache`s come to life, by the collector's generations.

    A new object is in the young generations (0 and 1) until a collection moves it to the old one. So what is young and
    was not young at the mark was born since; what a collection is about to move is noted just before it does
    (`gc.callbacks`), and then looked for among as many of the old generation's last objects as can have been moved. No
    weak references are taken: `torch.utils.swap_tensors` refuses tensors that have one. Hence its one blind spot: a
    watched object at the very address of another one that died since it was seen passes for that one.

    Attributes:
        label: what the objects born from now on are called; see `begin`.
        turn: a number that goes with the label, such as how often that stage has run.
        froze_in: the label under which the program was first seen to have frozen objects since the mark; else empty.
    """

    def __init__(self) -> None:
        self.label = ""
        self.turn = 1
        # All that was young at the mark, and of that what is watched: a tensor may get the address of something else.
        self._known: set[int] = set()
        self._known_watched: set[int] = set()
        self._noted: dict[int, tuple[str, int]] = {}
        # Not as Python's integers: each would keep the memory around it, where a test's small objects have been.
        self._born: list[Ints] = []
        self._born_number = 0
        self._are_too_many = False
        self._moved = 0
        self._full = False
        self._frozen = 0
        # A young object that nothing but a collection or `gc.freeze()` can make old.
        self._witness: list[object] | None = None
        self._lost = False
        self._is_marked_next = False
        self._asides: list[Aside] = []
        self._boundaries: list[Boundary] = []
        self.froze_in = ""

    def start(self) -> None:
        """Begin to watch; legal twice."""
        if self._collecting not in gc.callbacks:
            gc.callbacks.append(self._collecting)

    def stop(self) -> None:
        """End it; legal twice."""
        if self._collecting in gc.callbacks:
            gc.callbacks.remove(self._collecting)
        self._noted.clear()
        self._known.clear()
        self._known_watched.clear()
        self._boundaries.clear()
        self._forget_born()

    @contextlib.contextmanager
    def forgetting(self) -> Iterator[None]:
        """In the block nothing is noted of what a collection moves: `mark` comes right after it."""
        self._is_marked_next = True
        try:
            yield
        finally:
            self._is_marked_next = False

    def mark(self, label: str = "") -> None:
        """From here on: whatever is alive now is not newborn."""
        self.label, self.turn = label, 1
        self._boundaries.clear()
        self._noted.clear()
        self._forget_born()
        self._moved = 0
        self._full = False
        self._frozen = frozen_by_program(gc.get_freeze_count())
        # In this order, and the set in place: what is freed here must not leave its identity among the known ones.
        self._known.clear()
        self._known_watched.clear()
        self._witness = []
        young = _young()
        self._known.update(map(id, young))
        self._known_watched.update(map(id, _watched(young)))
        self._lost = False
        self.froze_in = ""

    def begin(self, label: str, turn: int = 1) -> None:
        """What is born from here on has this label.

        A new object comes to the end of the youngest generation. So the place of one that is made here shows which of
        the others are older, until the next collection, before which all of them are noted: nothing has to be looked
        at now.
        """
        self._settle_aside()
        self._boundaries.append(Boundary(self.label, self.turn))
        self.label, self.turn = label, turn

    def note(self) -> None:
        """Give what was born since the last note the current label."""
        self._settle()
        young = _young()
        self._look_at_witness(young)
        self._note(map(id, _watched(young)))

    def begin_aside(self, label: str) -> None:
        """What is born from here to `end_aside` has a label of its own; nothing is looked at for it; nests.

        As in `begin`, the place of an object that is made here shows which of the others are older.

        Args:
            label: what they are called.
        """
        self._settle()
        self._asides.append(Aside(self.label, self.turn, []))
        self.label, self.turn = label, 1

    def end_aside(self) -> list[Newborn] | None:
        """End what was begun last: the labels are as before it.

        Returns:
            What was born in it and is alive; None where something else has been noted meanwhile, as by a collection:
            then `survivors` finds them.
        """
        aside = self._asides[-1]
        with collector_paused():
            place, young = aside.place()
            if place is None:
                self.note()
                born = None
            else:
                own = [item for item in _watched(young[place + 1 :]) if id(item) not in self._known_watched]
                self._note(map(id, own))
                noted = [(item, self._noted[id(item)]) for item in own]
                born = [Newborn(item, *reported) for item, reported in noted if reported[0] == self.label]
        self._asides.pop()
        self.label, self.turn = aside.label, aside.turn
        return born

    def _settle(self) -> None:
        """Give everything that is older than the last change of the label the label that it was born under."""
        self._settle_boundaries()
        self._settle_aside()

    def _settle_boundaries(self) -> None:
        if not self._boundaries:
            return
        boundaries, self._boundaries = self._boundaries, []
        older, young = gc.get_objects(generation=1), gc.get_objects(generation=0)
        ids = identities(young)
        found = [np.flatnonzero(ids == id(boundary.mark)).tolist() for boundary in boundaries]
        # A freeze took all that were made before it. Where none has gone, it was before the first, if there was one.
        gone = max((turn for turn, places in enumerate(found, 1) if not places), default=0)
        frozen_in = boundaries[gone].label if gone < len(boundaries) else self.label
        self._look_at_witness([*older, *young], frozen_in)
        begin = 0
        for boundary, places in zip(boundaries, found, strict=True):
            if places:
                older += young[begin : places[0]]
                begin = places[0]
            self._note(map(id, _watched(older)), boundary.label, boundary.turn)
            older = []

    def _settle_aside(self) -> None:
        """Give what is older than the aside that runs the label that it had before it."""
        if not self._asides or self._asides[-1].mark is None:
            return
        aside = self._asides[-1]
        place, young = aside.place()
        aside.mark = None
        if place is None:
            return
        inside = {id(item) for item in _watched(young[place + 1 :])}
        older = (id(item) for item in _watched(_young()) if id(item) not in inside)
        self._note(older, aside.label, aside.turn)

    def _note(self, keys: Iterable[int], label: str | None = None, turn: int = 1) -> None:
        reported = (self.label, self.turn) if label is None else (label, turn)
        for key in keys:
            if key not in self._known_watched:
                self._noted.setdefault(key, reported)

    def forget_dead(self) -> None:
        """Drop what is known of objects that are gone: the next object at such an address is another one."""
        with collector_paused():
            alive = {id(born.item) for born in self.survivors()}
            self._noted = {key: noted for key, noted in self._noted.items() if key in alive}

    @property
    def froze(self) -> bool:
        """Whether the program froze objects since the mark: their generation says nothing any more.

        Even if it has unfrozen them since: they are old then.
        """
        if self.froze_until_last_look:
            return True
        self._settle_boundaries()
        self._look_at_witness(_young())
        return self._lost

    @property
    def froze_until_last_look(self) -> bool:
        """As `froze`, right after `survivors`, which has listed the young objects: they are not listed once more."""
        return self._lost or frozen_by_program(gc.get_freeze_count()) > self._frozen

    def survivors(self, label: str | None = None, census: Census | None = None) -> list[Newborn]:
        """What was born since the mark and is alive now, the oldest first, garbage that is not collected yet included.

        Args:
            label: only what was first seen under this label: where nothing of that has become old, which is so after
                nearly every import, the old generation is not looked through.
            census: all objects, where they are known, so that they are not listed once more.
        """
        with collector_paused():
            self._settle()
            young = _young()
            self._look_at_witness(young)
            found = {id(item): item for item in _watched(young) if id(item) not in self._known_watched}
            self._note(found)
            wanted = {key for key, noted in self._noted.items() if label is None or noted[0] == label}
            if wanted - found.keys() and (self._moved or self._full or self.froze):
                for item in _watched(self._moved_objects()) if census is None else _watched_among(census):
                    if id(item) in wanted:
                        found.setdefault(id(item), item)
            self._reveal(found)
            # The oldest first: of a memory that several of them view, the first shows since when it is there.
            ordered = [(key, found.pop(key)) for key in self._noted if key in found] + list(found.items())
            born = [Newborn(item, *self._noted.get(key, (self.label, self.turn))) for key, item in ordered]
            return [each for each in born if label is None or each.label == label]

    def add(self, item: object, like: Newborn) -> Newborn:
        """Takes in an object that asking for it has only now made, with the label of the one that holds it.

        Returns:
            It, with the label under which it was seen if that was before.
        """
        # One that was there at the mark and is gone had this address.
        self._known.discard(id(item))
        self._known_watched.discard(id(item))
        return Newborn(item, *self._noted.setdefault(id(item), (like.label, like.turn)))

    def _reveal(self, found: dict[int, Any]) -> None:
        """Adds the tensors of TorchScript modules: until they are asked for there are none in Python."""
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
        """The identities of all objects of any kind born since the mark; None if there were too many to remember.

        (Some of them may be dead.)
        """
        self._merge_born()
        if self._are_too_many or self.froze:
            return None
        return Identities(np.concatenate([*self._born, identities(_young())]), but=self._known)

    def _note_born(self, young: list[object]) -> None:
        if self._are_too_many:
            return
        self._born.append(identities(young))
        self._born_number += len(young)
        if self._born_number > _MOST_IDENTITIES * _MOST_ALIKE:
            self._merge_born()

    def _merge_born(self) -> None:
        """Many of them are those of objects that took the places of earlier ones."""
        if len(self._born) > 1:
            self._born = [np.unique(np.concatenate(self._born))]
            self._born_number = len(self._born[0])
        if self._born_number > _MOST_IDENTITIES:
            self._forget_born()
            self._are_too_many = True

    def _forget_born(self) -> None:
        self._born.clear()
        self._born_number = 0
        self._are_too_many = False

    def _moved_objects(self) -> list[object]:
        if self.froze:
            return all_objects()
        old = gc.get_objects(generation=2)
        # A full collection may reorder the old generation; the others append to it.
        return old if self._full else old[-self._moved :]

    def _look_at_witness(self, young: list[object], label: str | None = None) -> None:
        if self._witness is not None and not any(item is self._witness for item in young):
            self._lost = True
            self.froze_in = self.froze_in or (self.label if label is None else label)

    def _collecting(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            if not self._is_marked_next:
                self._settle_boundaries()
            self._settle_aside()
        # Only a collection of generation 1 or 2 moves anything to where it is not young any more.
        if info["generation"] < 1 or self._is_marked_next:
            return
        if phase == "stop":
            self._witness = []
            return
        young = _young()
        self._look_at_witness(young)
        self._witness = None
        self._moved += len(young)
        self._full = self._full or info["generation"] == 2
        self._note_born(young)
        self._note(map(id, _watched(young)))


def young_generations_tell() -> bool:
    """Whether this interpreter's collector has the generations that `Births` relies on; see `why_unusable`."""
    return not why_unusable(observed_collector())


def _young() -> list[object]:
    young = gc.get_objects(generation=0)
    young += gc.get_objects(generation=1)
    return young


def _watched(objects: list[object]) -> Iterator[Any]:
    """Those of the objects that are of a kind to watch."""
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
    """From which the kinds to watch derive; nothing derives from the type of `lru_cache`s."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "nn") or not hasattr(torch.nn, "Module"):
        return (LRU_CACHE,)
    return LRU_CACHE, torch.Tensor, torch.UntypedStorage, torch.nn.Module


def _watched_among(census: Census) -> Iterator[Any]:
    yield from census.instances_of(*_classes())
