"""Lifecycle bugs that happened elsewhere, each put back into this engine where it was there, by a context manager.

The engine itself knows nothing of them: a defect replaces one method for as long as its context lasts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import MappingProxyType

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
def _shutdown_noop() -> Iterator[None]:
    def shutdown(self: ModelRunner) -> None:
        pass

    original = ModelRunner.shutdown
    ModelRunner.shutdown = shutdown  # type: ignore[method-assign]
    try:
        yield
    finally:
        ModelRunner.shutdown = original  # type: ignore[method-assign]


@contextmanager
def _worker_keeps_everything() -> Iterator[None]:
    def shutdown(self: Worker) -> None:
        # What the bug does not name still happens: host buffers go, and torch's cache.
        teardown = Teardown("shutting the worker down")
        self.memory.close_host_buffers(teardown)
        self.memory.empty_cache(teardown)
        teardown.finish()

    original = Worker.shutdown
    Worker.shutdown = shutdown  # type: ignore[method-assign]
    try:
        yield
    finally:
        Worker.shutdown = original  # type: ignore[method-assign]


DEFECTS: Mapping[str, Defect] = MappingProxyType(
    {
        defect.name: defect
        for defect in (
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
