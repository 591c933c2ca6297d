"""Memory that sleeps, grows or is released in the wrong way: one context manager for each."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch

from lowtide.engine.config import Allocator
from lowtide.engine.defects.defect import replaced
from lowtide.engine.device_allocator.arena import Arena
from lowtide.engine.device_allocator.memory import EngineMemory
from lowtide.engine.device_allocator.workspace import Spec, Workspace, WorkspaceViews
from lowtide.engine.errors import OutOfMemoryError
from lowtide.engine.model_executor.block_table import BlockTable
from lowtide.engine.pages import Part
from lowtide.engine.pages.vmm import VmmPages
from lowtide.engine.processes.calls import call
from lowtide.engine.ranks.executor import MultiprocExecutor
from lowtide.engine.worker import Worker

LATE_BY = 2.0
"""Seconds by which `late-release` delays the driver."""


def wake_oom() -> AbstractContextManager[None]:
    """A wake that fails half-way is not undone."""

    def wake(self: Worker, tags: Sequence[str]) -> None:
        for tag in tags:
            self.memory.restore(tag, self._reload_weights if tag == "weights" else None)

    return replaced(Worker, "wake", wake)


def no_room_in_the_first_wake() -> AbstractContextManager[None]:
    """The device has room for the weights and not for the KV cache, once."""
    original = Arena.map_part
    asked: list[Arena] = []

    def map_part(self: Arena, target: int) -> None:
        # What was given out before and has no pages now was asleep.
        if self.tag == "kv_cache" and self.mapped < self.used and not asked:
            asked.append(self)
            raise OutOfMemoryError(f"arena {self.tag!r} cannot grow to {target} bytes: no room, as it was asked for")
        original(self, target)

    return replaced(Arena, "map_part", map_part)


def workspace_views() -> AbstractContextManager[None]:
    """One micro-batch's growth replaces the workspaces of all."""
    return _reallocating(of_all=True)


@contextmanager
def workspace_resize() -> Iterator[None]:
    """A workspace that grows takes a new buffer from torch."""

    def get(self: WorkspaceViews, *specs: Spec) -> list[torch.Tensor]:
        return self._workspace.get(*specs)

    # Nobody keeps a view, so that all that is left is what torch reserves.
    with _reallocating(of_all=False), replaced(WorkspaceViews, "get", get):
        yield


@contextmanager
def _reallocating(*, of_all: bool) -> Iterator[None]:
    """A workspace grows by taking a new buffer from torch; upstream one micro-batch's growth replaces all of them."""
    create = EngineMemory.__init__
    siblings: WeakKeyDictionary[Workspace, list[weakref.ref[Workspace]]] = WeakKeyDictionary()

    def create_and_know(self: EngineMemory, *args: Any, **settings: Any) -> None:
        create(self, *args, **settings)
        for workspace in self.workspaces:
            siblings[workspace] = [weakref.ref(other) for other in self.workspaces if of_all or other is workspace]

    def grow(self: Workspace, size: int) -> torch.Tensor:
        for reference in siblings[self]:
            other = reference()
            if other is not None:
                other._all = None
                other._all = torch.empty(size, dtype=torch.uint8, device=self._arena.device)
        assert self._all is not None
        return self._all

    with replaced(EngineMemory, "__init__", create_and_know), replaced(Workspace, "_grow", grow):
        yield


@contextmanager
def block_table_contents() -> Iterator[None]:
    """The tensors that lead to the block table lie in memory that every sleep drops."""
    create, create_pointers = EngineMemory.__init__, BlockTable.create_pointers
    cache_of: WeakKeyDictionary[Arena, weakref.ref[Arena]] = WeakKeyDictionary()

    def create_with_room(self: EngineMemory, *args: Any, kv_cache: int, **settings: Any) -> None:
        create(self, *args, kv_cache=kv_cache + 4096, **settings)
        cache_of[self.arena("runtime")] = weakref.ref(self.arena("kv_cache"))

    def create_in_the_cache(self: BlockTable, allocate: Allocator) -> None:
        cache = cache_of[allocate.__self__]()  # type: ignore[attr-defined]
        assert cache is not None
        create_pointers(self, cache.allocate)

    with (
        replaced(EngineMemory, "__init__", create_with_room),
        replaced(BlockTable, "create_pointers", create_in_the_cache),
    ):
        yield


def block_table_moved() -> AbstractContextManager[None]:
    """The block table's pointers are made anew at each wake."""
    original = Worker.wake

    def wake(self: Worker, tags: Sequence[str]) -> None:
        original(self, tags)
        self.model_runner.block_table.create_pointers(self.memory.arena("runtime").allocate)

    return replaced(Worker, "wake", wake)


def rank_keeps() -> AbstractContextManager[None]:
    """A sleep reaches all ranks but the last one, which keeps its weights and its KV cache."""

    def sleep(self: MultiprocExecutor, level: int) -> None:
        failed = self.exchange(dict.fromkeys(self.ranks[:-1], call("sleep", level)))
        assert not failed

    return replaced(MultiprocExecutor, "sleep", sleep)


def late_release() -> AbstractContextManager[None]:
    """The driver releases pages seconds late."""
    return _releasing(lambda release: threading.Timer(LATE_BY, release).start())


def never_release() -> AbstractContextManager[None]:
    """The driver never releases pages."""
    return _releasing(lambda release: None)


def _releasing(how: Callable[[Callable[[], None]], None]) -> AbstractContextManager[None]:
    """The driver says that memory is free, and gives its pages back in its own way."""

    def unmap(self: VmmPages, address: int, part: Part) -> None:
        self._driver.unmap(address + part.offset, part.size)
        how(functools.partial(self._driver.release, part.handle))

    return replaced(VmmPages, "_unmap", unmap)
