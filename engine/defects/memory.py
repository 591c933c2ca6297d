"""Memory that sleeps, grows or is released in the wrong way: one context manager for each."""

from __future__ import annotations

import functools
import hashlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch

from lowtide.engine.config import Allocator
from lowtide.engine.defects.defect import replaced
from lowtide.engine.device_allocator.arena import Arena, Spec, Workspace, WorkspaceViews
from lowtide.engine.device_allocator.memory import EngineMemory
from lowtide.engine.errors import OutOfMemoryError
from lowtide.engine.model_executor.block_table import BlockTable
from lowtide.engine.model_executor.model import LlamaForCausalLM
from lowtide.engine.pages import Part
from lowtide.engine.pages.card import VmmPages
from lowtide.engine.processes.channel import call
from lowtide.engine.ranks import MultiprocExecutor
from lowtide.engine.request import ScheduledRequest, SchedulerOutput
from lowtide.engine.runner import ModelRunner
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
        failed = self.exchange(dict.fromkeys(self.children[:-1], call("sleep", level)))
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


IMAGE_TOKENS = 256
"""Tokens of the one image that each prompt comes with."""


class EncoderCache:
    """The encoder's outputs, each [IMAGE_TOKENS, hidden size], by image's hash: a later request may have the same."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self._shape = (IMAGE_TOKENS, model.config.hidden_size)
        self._dtype, self._device = model.config.torch_dtype, next(model.parameters()).device
        self.outputs: dict[str, torch.Tensor] = {}

    def encode(self, images: Iterable[str]) -> None:
        """Encode the images that are not in the cache, by their hashes."""
        for image in images:
            if image not in self.outputs:
                self.outputs[image] = torch.ones(self._shape, dtype=self._dtype, device=self._device)

    def reset(self) -> None:
        """Forget all outputs."""
        self.outputs.clear()


@contextmanager
def encoder_cache() -> Iterator[None]:
    """Each model runner has an encoder cache, which a sleep and a shutdown reset."""
    create, execute, shut_down = ModelRunner.__init__, ModelRunner.execute_model, ModelRunner.shutdown
    sleep = Worker.sleep

    def create_with_cache(self: ModelRunner, *args: Any) -> None:
        create(self, *args)
        self.__dict__["encoder_cache"] = EncoderCache(self.model)

    def execute_with_images(self: ModelRunner, output: SchedulerOutput) -> Mapping[str, int]:
        new = [item for item in output.scheduled if item.num_tokens > 1]
        self.__dict__["encoder_cache"].encode(_image_of(item) for item in new)
        return execute(self, output)

    def sleep_without(self: Worker, level: int) -> None:
        sleep(self, level)
        self.model_runner.__dict__["encoder_cache"].reset()

    def shutdown(self: ModelRunner) -> None:
        self.__dict__.pop("encoder_cache", None)
        shut_down(self)

    with (
        replaced(ModelRunner, "__init__", create_with_cache),
        replaced(ModelRunner, "execute_model", execute_with_images),
        replaced(ModelRunner, "shutdown", shutdown),
        replaced(Worker, "sleep", sleep_without),
    ):
        yield


def encoder_cache_kept() -> AbstractContextManager[None]:
    """An output goes only where the cache is full: no sleep resets it."""
    return replaced(EncoderCache, "reset", lambda self: None)


def _image_of(item: ScheduledRequest) -> str:
    """The image of a prompt: equal prompts come with equal ones."""
    return hashlib.sha256(repr(item.new_token_ids).encode()).hexdigest()
