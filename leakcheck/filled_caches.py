"""Caches that were filled during a test: which of them newly hold a module, or an object by its bound method."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from types import MethodType
from typing import Any

from lowtide.leakcheck.exemptions import is_exempt
from lowtide.leakcheck.storages import Key, is_tensor, storage_keys
from lowtide.probes.births import Newborn
from lowtide.probes.caches import LRU_CACHE, CacheActivity, cache_entries
from lowtide.probes.foreign import type_name
from lowtide.probes.reach import module_namespaces, reach


class FilledCaches:
    """Knows all `lru_cache`s, which of them were asked for something new since a mark, and in which stage."""

    def __init__(self) -> None:
        self._activity = CacheActivity()
        self._stages: dict[int, str] = {}
        self._filled: list[Any] = []
        self._born: Collection[int] | None = ()
        self._told: dict[str, Any] = {}

    def add(self, caches: Iterable[Any]) -> None:
        """Watch these too."""
        self._activity.add(caches)

    def mark(self) -> None:
        """From here on."""
        self._activity.mark()
        self._stages.clear()
        self.forget()

    def note(self, stage: str) -> None:
        """Those that were filled for the first time since the last look, were so in `stage`."""
        self._filled = self._activity.changed()
        for cache in self._filled:
            self._stages.setdefault(id(cache), stage)

    @property
    def any_filled(self) -> bool:
        """Whether any was at the last look."""
        return bool(self._filled)

    def born(self, identities: Collection[int] | None) -> None:
        """The identities of what was born since the mark; None if nobody knows."""
        self._born = identities

    def forget(self) -> None:
        """Let go of the caches themselves."""
        self._filled = []
        self._told = {}

    def held(self, survivors: Iterable[Newborn], judged: Collection[Key]) -> dict[str, int]:
        """New modules, and objects of bound methods, in the filled caches, as text with 1 each.

        Args:
            survivors: what was born since the mark and is alive.
            judged: the storages that are judged: where a cache holds one of those, that is the finding.
        """
        if not self._filled:
            return {}
        newborn = {id(born.item) for born in survivors}
        found: dict[str, int] = {}
        # Asked once: with torch's compiler loaded there are thousands of modules, and dozens of its caches fill.
        namespaces = module_namespaces()
        for cache in self._filled:
            objects, _ = reach(cache_entries(cache), boundaries=(LRU_CACHE,), namespaces=namespaces, max_objects=20_000)
            owners = [item.__self__ for item in objects if type(item) is MethodType]
            held = [item for item in objects if id(item) in newborn and _is_module(item)]
            held += [
                owner
                for owner in owners
                if self._born is not None and id(owner) in self._born and type(owner).__module__ != "builtins"
            ]
            if held and not (judged and storage_keys(item for item in objects if is_tensor(item)) & set(judged)):
                texts = [f"{type_name(type(item))} at {id(item):#x} in {_name(cache)}" for item in held]
                texts = [text for text in texts if not is_exempt("lru-cache", text)]
                found.update(dict.fromkeys(texts, 1))
                self._told.update(dict.fromkeys(texts, cache))
        return found

    def stage_of(self, name: str) -> str:
        """In which stage what is told by this text got into its cache; empty if it is no such text."""
        return self._stages.get(id(self._told.get(name)), "")

    def of(self, names: Iterable[str]) -> dict[str, Any]:
        """The caches that hold what is told by these texts, by their names as code."""
        return {_name(self._told[name]): self._told[name] for name in names if name in self._told}


def _name(cache: Any) -> str:
    return f"{cache.__module__}.{getattr(cache, '__qualname__', '?')}"


def _is_module(item: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and any(base is torch.nn.Module for base in type(item).__mro__)
