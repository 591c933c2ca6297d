"""Which tensors were born since a mark, found among the collector's young objects, without a walk of the heap."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lowtide.probes.caches import LRU_CACHE
from lowtide.probes.objects import Census, all_objects, collector_paused


@dataclass(frozen=True)
class Newborn:
    """An object that was born since the mark and is alive.

    Attributes:
        item: the object; drop it soon, it is kept alive by this.
        label: what the births were called when it was first seen.
    """

    item: Any
    label: str


class Births:
    """Watches tensors, storages, `torch.nn.Module`s and `lru_cache`s come to life, by the collector's generations.

    A new object is in the young generations (0 and 1) until a collection moves it to the old one. So what is young and
    was not young at the mark was born since; what a collection is about to move is noted just before it does
    (`gc.callbacks`), and then looked for among as many of the old generation's last objects as can have been moved. No
    weak references are taken: `torch.utils.swap_tensors` refuses tensors that have one.

    Attributes:
        label: what the objects born from now on are called; to be set at every change of stage, after `note()`.
    """

    def __init__(self) -> None:
        self.label = ""
        self._known: set[int] = set()
        self._noted: dict[int, str] = {}
        self._moved = 0
        self._full = False
        self._frozen = 0

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

    def mark(self, label: str = "") -> None:
        """From here on: whatever is alive now is not newborn."""
        self.label = label
        self._noted.clear()
        self._moved = 0
        self._full = False
        self._frozen = gc.get_freeze_count()
        self._known = set(map(id, _watched(_young())))

    def note(self) -> None:
        """Give what was born since the last note the current label."""
        for item in _watched(_young()):
            if id(item) not in self._known:
                self._noted.setdefault(id(item), self.label)

    @property
    def froze(self) -> bool:
        """Whether the program froze objects since the mark: their generation says nothing any more."""
        return gc.get_freeze_count() > self._frozen

    def survivors(self) -> list[Newborn]:
        """What was born since the mark and is alive now, garbage that was not collected yet included."""
        with collector_paused():
            self.note()
            found = {id(item): item for item in _watched(_young()) if id(item) not in self._known}
            if self._noted.keys() - found.keys() and (self._moved or self._full or self.froze):
                for item in _watched(self._moved_objects()):
                    if id(item) in self._noted:
                        found.setdefault(id(item), item)
            return [Newborn(item, self._noted.get(key, self.label)) for key, item in found.items()]

    def young_ids(self) -> set[int]:
        """The identities of all objects that no collection has moved since they were born; of any kind."""
        return set(map(id, _young()))

    def _moved_objects(self) -> list[object]:
        if self.froze:
            return all_objects()
        old = gc.get_objects(generation=2)
        # A full collection may reorder the old generation; the others append to it.
        return old if self._full else old[-self._moved :]

    def _collecting(self, phase: str, info: dict[str, int]) -> None:
        # Only a collection of generation 1 or 2 moves anything to where it is not young any more.
        if phase == "start" and info["generation"] >= 1:
            young = _young()
            self._moved += len(young)
            self._full = self._full or info["generation"] == 2
            for item in _watched(young):
                if id(item) not in self._known:
                    self._noted.setdefault(id(item), self.label)


def young_generations_tell() -> bool:
    """Whether this interpreter's collector has the generations that `Births` relies on.

    Without the interpreter lock there is one generation, and Python 3.14 collects its old one in increments.
    """
    return sys.version_info < (3, 14) and getattr(sys, "_is_gil_enabled", lambda: True)()


def _young() -> list[object]:
    young = gc.get_objects(generation=0)
    young += gc.get_objects(generation=1)
    return young


def _watched(objects: list[object]) -> Iterator[Any]:
    """Those of the objects that are of a kind to watch."""
    census = Census(objects)
    yield from census.exactly(LRU_CACHE)
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "nn") or not hasattr(torch.nn, "Module"):
        return
    for kind in (torch.Tensor, torch.UntypedStorage, torch.nn.Module):
        yield from census.instances_of(kind)
