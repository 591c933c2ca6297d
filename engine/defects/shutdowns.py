"""What an engine does not give back at its end, or breaks off: one context manager for each."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from lowtide.engine import runner
from lowtide.engine.core import EngineCore
from lowtide.engine.defects.defect import replaced
from lowtide.engine.kv.kv_cache import KVCache
from lowtide.engine.kv.kv_transport import KVTransport
from lowtide.engine.model_executor.cuda_graphs import DecodeGraphs
from lowtide.engine.model_executor.model import LlamaForCausalLM, StaticForwardContext
from lowtide.engine.process_group import ProcessGroup
from lowtide.engine.runner import ModelRunner
from lowtide.engine.teardown import Teardown
from lowtide.engine.worker import HeapFreeze, Worker


def bound_method_cache() -> AbstractContextManager[None]:
    """A check's cache keeps the model's bound method."""

    asked = runner.supports_kw

    @functools.lru_cache
    def supports_kw(function: Callable[..., Any], name: str) -> bool:
        return asked(function, name)

    return replaced(runner, "supports_kw", supports_kw)


def worker_keeps_everything() -> AbstractContextManager[None]:
    """The worker's shutdown drops nothing of its own."""

    def shutdown(self: Worker) -> None:
        # What the bug does not name still happens: host buffers go, and torch's cache.
        teardown = Teardown("shutting the worker down")
        self.close_connector(teardown)
        self.memory.close_host_buffers(teardown)
        self.memory.empty_cache(teardown)
        teardown.finish()

    return replaced(Worker, "shutdown", shutdown)


def accelerator_on_cpu() -> AbstractContextManager[None]:
    """The shutdown asks an accelerator that is not there."""
    original = Worker.shutdown

    def shutdown(self: Worker) -> None:
        torch.accelerator.synchronize()
        original(self)

    return replaced(Worker, "shutdown", shutdown)


def shutdown_noop() -> AbstractContextManager[None]:
    """The runner's shutdown does nothing."""

    def shutdown(self: ModelRunner) -> None:
        pass

    return replaced(ModelRunner, "shutdown", shutdown)


@contextmanager
def accelerator_patched() -> Iterator[None]:
    """Two of torch's functions are replaced for good."""
    original = Worker.__init__
    synchronize, empty_cache = torch.accelerator.synchronize, torch.accelerator.empty_cache

    def create(self: Worker, *args: Any) -> None:
        original(self, *args)
        setattr(torch.accelerator, "synchronize", lambda device=None: None)  # noqa: B010 - as upstream wrote it
        setattr(torch.accelerator, "empty_cache", lambda: None)  # noqa: B010

    try:
        with replaced(Worker, "__init__", create):
            yield
    finally:
        torch.accelerator.synchronize, torch.accelerator.empty_cache = synchronize, empty_cache


@contextmanager
def frozen_heap() -> Iterator[None]:
    """The heap is frozen and never thawed."""
    with replaced(HeapFreeze, "thaw", lambda self: None), _layers_in_a_cycle():
        try:
            yield
        finally:
            gc.unfreeze()


def _layers_in_a_cycle() -> AbstractContextManager[None]:
    """As upstream's, each layer refers to the table that lists all of them: only the collector can free them."""
    original = StaticForwardContext.__init__

    def create(self: StaticForwardContext, model: LlamaForCausalLM, kv_cache: KVCache) -> None:
        original(self, model, kv_cache)
        listed = dict(self.layers)
        for layer in listed.values():
            layer.static_forward_context = listed  # type: ignore[assignment]

    return replaced(StaticForwardContext, "__init__", create)


@contextmanager
def unfreeze_too_late() -> Iterator[None]:
    """The heap is thawed after the last collection."""

    def shutdown(self: Worker) -> None:
        teardown = Teardown("shutting the worker down")
        teardown.run("the model runner", self.model_runner.shutdown)
        gc.collect()
        self.memory.close(teardown)
        teardown.run("the frozen heap", self._heap.thaw)
        teardown.finish()

    def close(self: DecodeGraphs) -> None:
        # As upstream's, they are left to the collector.
        self.__dict__["itself"] = self

    with replaced(Worker, "shutdown", shutdown), replaced(DecodeGraphs, "close", close):
        yield


def transport_registration() -> AbstractContextManager[None]:
    """The transport's memory stays registered."""
    return replaced(KVTransport, "close", lambda self: None)


def process_group() -> AbstractContextManager[None]:
    """The group is dropped and not destroyed."""

    def destroy(self: ProcessGroup) -> None:
        self._group = None

    return replaced(ProcessGroup, "destroy", destroy)


def undrained_offload() -> AbstractContextManager[None]:
    """Nobody waits for copies before the cache is reset."""

    def reset_prefix_cache(self: EngineCore) -> bool:
        return self.scheduler.reset_prefix_cache()

    return replaced(EngineCore, "reset_prefix_cache", reset_prefix_cache)
