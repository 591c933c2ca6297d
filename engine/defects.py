"""Lifecycle bugs that happened elsewhere, each put back into this engine where it was there, by a context manager.

The engine itself knows nothing of them: a defect replaces one method for as long as its context lasts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from lowtide.engine import capabilities, runner
from lowtide.engine.errors import ConfigError
from lowtide.engine.runner import ModelRunner
from lowtide.engine.teardown import Teardown
from lowtide.engine.worker import Worker


@dataclass(frozen=True)
class Defect:
    """One historical bug.

    Attributes:
        name: what it is switched on by.
        source: where it happened.
        summary: what went wrong, in one line.
        activate: puts the bug into the engine while its context lasts.
    """

    name: str
    source: str
    summary: str
    activate: Callable[[], AbstractContextManager[None]]


@contextmanager
def _replaced(owner: object, name: str, value: object) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _bound_method_cache() -> AbstractContextManager[None]:
    @functools.lru_cache
    def supports_kw(function: Callable[..., Any], name: str) -> bool:
        return capabilities.supports_kw(function, name)

    return _replaced(runner, "supports_kw", supports_kw)


def _worker_keeps_everything() -> AbstractContextManager[None]:
    def shutdown(self: Worker) -> None:
        # What the bug does not name still happens: host buffers go, and torch's cache.
        teardown = Teardown("shutting the worker down")
        self.memory.close_host_buffers(teardown)
        self.memory.empty_cache(teardown)
        teardown.finish()

    return _replaced(Worker, "shutdown", shutdown)


def _accelerator_on_cpu() -> AbstractContextManager[None]:
    original = Worker.shutdown

    def shutdown(self: Worker) -> None:
        torch.accelerator.synchronize()
        original(self)

    return _replaced(Worker, "shutdown", shutdown)


def _shutdown_noop() -> AbstractContextManager[None]:
    def shutdown(self: ModelRunner) -> None:
        pass

    return _replaced(ModelRunner, "shutdown", shutdown)


DEFECTS: Mapping[str, Defect] = MappingProxyType(
    {
        defect.name: defect
        for defect in (
            Defect(
                "bound-method-cache",
                "vllm#38503",
                "a capability check is an `lru_cache` keyed by the model's bound `forward`, which keeps the model",
                _bound_method_cache,
            ),
            Defect(
                "accelerator-on-cpu",
                "vllm#41034",
                "the worker's shutdown waits for an accelerator that is not there, and what comes after it is skipped",
                _accelerator_on_cpu,
            ),
            Defect(
                "shutdown-noop",
                "vllm#41034, first try",
                "the CPU model runner overrides shutdown with `pass`",
                _shutdown_noop,
            ),
            Defect(
                "worker-keeps-everything",
                "vllm#38503",
                "the worker's shutdown drops neither weights nor KV cache, rope table or workspaces",
                _worker_keeps_everything,
            ),
        )
    }
)


def find_defect(name: str) -> Defect:
    """The defect of that name.

    Raises:
        ConfigError: there is none; the message lists those there are.
    """
    try:
        return DEFECTS[name]
    except KeyError:
        raise ConfigError(f"there is no defect {name!r}: use one of {', '.join(DEFECTS)}") from None
