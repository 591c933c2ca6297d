"""Lifecycle bugs that happened elsewhere, each put back into this engine where it was there, by a context manager.

The engine itself knows nothing of them: a defect replaces one method for as long as its context lasts.
"""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import torch

from lowtide.engine import capabilities, runner
from lowtide.engine.arena import Arena
from lowtide.engine.block_table import BlockTable
from lowtide.engine.config import Allocator, EngineConfig
from lowtide.engine.core import EngineCore
from lowtide.engine.cuda_graphs import DecodeGraphs
from lowtide.engine.errors import ConfigError, OutOfMemoryError
from lowtide.engine.forward_context import StaticForwardContext
from lowtide.engine.heap_freeze import HeapFreeze
from lowtide.engine.kv_cache import KVCache
from lowtide.engine.kv_transport import KVTransport
from lowtide.engine.memory import EngineMemory
from lowtide.engine.model import LlamaForCausalLM
from lowtide.engine.pages import Part
from lowtide.engine.pages.vmm import VmmPages
from lowtide.engine.process_group import ProcessGroup
from lowtide.engine.runner import ModelRunner
from lowtide.engine.teardown import Teardown
from lowtide.engine.worker import Worker
from lowtide.engine.workspace import Spec, Workspace, WorkspaceViews

LATE_BY = 2.0
"""Seconds by which `late-release` delays the driver."""


@dataclass(frozen=True)
class Defect:
    """One historical bug.

    Attributes:
        name: what it is switched on by.
        source: where it happened.
        summary: what went wrong, in one line.
        activate: puts the bug into the engine while its context lasts.
        expected: the resource and the cause of every finding that it makes, sorted; none where it is no leak.
        settings: what the engine must be configured with for the bug to have a place.
        trigger: what must happen from outside for it to show, while its context lasts; an engine without the bug takes
            it without a finding.
        devices: the kinds of device on which it can show.
        expected_on_card: `expected` on a card, where that is something else.
        prompt_scale: how many times as long as usual the prompts must be.
        lives: in how many lives it shows on a CPU: two where the first one's libraries would hide it.
    """

    name: str
    source: str
    summary: str
    activate: Callable[[], AbstractContextManager[None]]
    expected: tuple[tuple[str, str], ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    trigger: Callable[[], AbstractContextManager[None]] = nullcontext
    devices: tuple[str, ...] = ("cpu", "cuda")
    expected_on_card: tuple[tuple[str, str], ...] | None = None
    prompt_scale: int = 1
    lives: int = 1

    def lives_on(self, device: str) -> int:
        """In how many lives it shows on `cpu` or `cuda`; a card's libraries always hide something in the first."""
        return self.lives if device == "cpu" else 2

    def expected_on(self, device: str) -> tuple[tuple[str, str], ...]:
        """`expected`, on `cpu` or `cuda`."""
        return self.expected if device == "cpu" or self.expected_on_card is None else self.expected_on_card

    def check(self, device: str) -> None:
        """Refuse a device on which it cannot show.

        Raises:
            ConfigError: this is one.
        """
        kind = device.partition(":")[0]
        if kind not in self.devices:
            raise ConfigError(f"defect {self.name!r} cannot show on {kind}: use --device {self.devices[0]}")

    def configure(self, config: EngineConfig) -> EngineConfig:
        """The configuration with what the bug needs.

        Raises:
            ConfigError: it cannot show on this kind of device.
        """
        self.check(config.device)
        return replace(config, **self.settings)

    @contextmanager
    def switched_on(self) -> Iterator[None]:
        """The bug, and what makes it show."""
        with self.trigger(), self.activate():
            yield


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
        self.close_connector(teardown)
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


@contextmanager
def _accelerator_patched() -> Iterator[None]:
    original = Worker.__init__
    synchronize, empty_cache = torch.accelerator.synchronize, torch.accelerator.empty_cache

    def create(self: Worker, *args: Any) -> None:
        original(self, *args)
        setattr(torch.accelerator, "synchronize", lambda device=None: None)  # noqa: B010 - as upstream wrote it
        setattr(torch.accelerator, "empty_cache", lambda: None)  # noqa: B010

    try:
        with _replaced(Worker, "__init__", create):
            yield
    finally:
        torch.accelerator.synchronize, torch.accelerator.empty_cache = synchronize, empty_cache


@contextmanager
def _frozen_heap() -> Iterator[None]:
    with _replaced(HeapFreeze, "thaw", lambda self: None), _layers_in_a_cycle():
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

    return _replaced(StaticForwardContext, "__init__", create)


def _transport_registration() -> AbstractContextManager[None]:
    return _replaced(KVTransport, "close", lambda self: None)


def _process_group() -> AbstractContextManager[None]:
    def destroy(self: ProcessGroup) -> None:
        self._group = None

    return _replaced(ProcessGroup, "destroy", destroy)


def _wake_oom() -> AbstractContextManager[None]:
    def wake(self: Worker, tags: Sequence[str]) -> None:
        for tag in tags:
            self.memory.restore(tag, self._reload_weights if tag == "weights" else None)

    return _replaced(Worker, "wake", wake)


def _no_room_in_the_first_wake() -> AbstractContextManager[None]:
    """The device has room for the weights and not for the KV cache, once."""
    original = Arena.map_part
    asked: list[Arena] = []

    def map_part(self: Arena, target: int) -> None:
        # What was given out before and has no pages now was asleep.
        if self.tag == "kv_cache" and self.mapped < self.used and not asked:
            asked.append(self)
            raise OutOfMemoryError(f"arena {self.tag!r} cannot grow to {target} bytes: no room, as it was asked for")
        original(self, target)

    return _replaced(Arena, "map_part", map_part)


def _workspace_views() -> AbstractContextManager[None]:
    return _reallocating(of_all=True)


@contextmanager
def _workspace_resize() -> Iterator[None]:
    def get(self: WorkspaceViews, *specs: Spec) -> list[torch.Tensor]:
        return self._workspace.get(*specs)

    # Nobody keeps a view, so that all that is left is what torch reserves.
    with _reallocating(of_all=False), _replaced(WorkspaceViews, "get", get):
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

    with _replaced(EngineMemory, "__init__", create_and_know), _replaced(Workspace, "_grow", grow):
        yield


def _undrained_offload() -> AbstractContextManager[None]:
    def reset_prefix_cache(self: EngineCore) -> bool:
        return self.scheduler.reset_prefix_cache()

    return _replaced(EngineCore, "reset_prefix_cache", reset_prefix_cache)


@contextmanager
def _block_table_contents() -> Iterator[None]:
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
        _replaced(EngineMemory, "__init__", create_with_room),
        _replaced(BlockTable, "create_pointers", create_in_the_cache),
    ):
        yield


def _block_table_moved() -> AbstractContextManager[None]:
    original = Worker.wake

    def wake(self: Worker, tags: Sequence[str]) -> None:
        original(self, tags)
        self.model_runner.block_table.create_pointers(self.memory.arena("runtime").allocate)

    return _replaced(Worker, "wake", wake)


@contextmanager
def _unfreeze_too_late() -> Iterator[None]:
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

    with _replaced(Worker, "shutdown", shutdown), _replaced(DecodeGraphs, "close", close):
        yield


def _late_release() -> AbstractContextManager[None]:
    return _releasing(lambda release: threading.Timer(LATE_BY, release).start())


def _never_release() -> AbstractContextManager[None]:
    return _releasing(lambda release: None)


def _releasing(how: Callable[[Callable[[], None]], None]) -> AbstractContextManager[None]:
    """The driver says that memory is free, and gives its pages back in its own way."""

    def unmap(self: VmmPages, address: int, part: Part) -> None:
        self._driver.unmap(address + part.offset, part.size)
        how(functools.partial(self._driver.release, part.handle))

    return _replaced(VmmPages, "_unmap", unmap)


DEFECTS: Mapping[str, Defect] = MappingProxyType(
    {
        defect.name: defect
        for defect in (
            Defect(
                "bound-method-cache",
                "vllm#38503",
                "a capability check is an `lru_cache` keyed by the model's bound `forward`, which keeps the model",
                _bound_method_cache,
                (("tensors", "lru-cache"),),
            ),
            Defect(
                "frozen-heap",
                "vllm#38503",
                "`gc.freeze()` at create, no `gc.unfreeze()` at shutdown: cycles that hold weights are never collected",
                _frozen_heap,
                (("gc-frozen", "not-restored"), ("tensors", "frozen-garbage")),
                settings={"freeze_heap": True},
            ),
            Defect(
                "accelerator-on-cpu",
                "vllm#41034",
                "the worker's shutdown waits for an accelerator that is not there, and what comes after it is skipped",
                _accelerator_on_cpu,
                (
                    ("host-memory", "native"),
                    ("teardown", "unknown"),
                    ("tensors", "instance-attribute"),
                    ("tensors", "pending-transfer"),
                ),
                devices=("cpu",),
                lives=2,
            ),
            Defect(
                "accelerator-patched",
                "vllm#41034, the merged fix",
                "`torch.accelerator.synchronize` and `empty_cache` become no-ops for the whole process, for good",
                _accelerator_patched,
                (("globals", "not-restored"),),
            ),
            Defect(
                "shutdown-noop",
                "vllm#41034, first try",
                "the CPU model runner overrides shutdown with `pass`",
                _shutdown_noop,
                (("tensors", "instance-attribute"),),
            ),
            Defect(
                "process-group",
                "vllm#43023",
                "the process group and its store survive the shutdown: only the reference to it is dropped",
                _process_group,
                (("process-groups", "not-restored"),),
                settings={"process_group": True},
            ),
            Defect(
                "late-release",
                "vllm#43023 (ROCm)",
                "the driver gives memory back seconds after it was freed: no leak, but the next engine must wait",
                _late_release,
                (),
                devices=("cuda",),
            ),
            Defect(
                "never-release",
                "vllm#37533 (ROCm)",
                "memory is reported free and physically still there",
                _never_release,
                (("driver", "driver"),),
                devices=("cuda",),
            ),
            Defect(
                "workspace-resize",
                "vllm#39226",
                "a workspace that grows drops its buffer and takes a new one: twice its bytes stay reserved",
                _workspace_resize,
                (("reserved", "allocator-cache"),),
                # A workspace of more than a hundred MiB: more than anything else that torch has cached.
                settings={"model": "1b", "kv_cache_bytes": 2 << 30},
                devices=("cuda",),
                prompt_scale=60,
            ),
            Defect(
                "workspace-views",
                "vllm#39226 (DBO)",
                "one micro-batch's growth replaces every micro-batch's workspace; views keep the old storages",
                _workspace_views,
                (("tensors", "instance-attribute"),),
                settings={"num_micro_batches": 2},
            ),
            Defect(
                "block-table-contents",
                "vllm#40648",
                "pointer, stride and size tensors lie in the KV cache's pages, which a sleep drops: contents undefined",
                _block_table_contents,
                (("contents", "not-restored"),),
                settings={"poison_pages": True},
            ),
            Defect(
                "block-table-moved",
                "vllm#40648, the merged fix",
                "those tensors are made anew at every wake: a captured graph still reads the old addresses",
                _block_table_moved,
                (("pointers", "cuda-graph"),),
                settings={"cuda_graphs": True},
                devices=("cuda",),
            ),
            Defect(
                "wake-oom",
                "vllm#34600",
                "out of memory half-way through a wake leaves the mapped half mapped",
                _wake_oom,
                (("arena", "not-restored"),),
                trigger=_no_room_in_the_first_wake,
            ),
            Defect(
                "unfreeze-too-late",
                "vllm 0.20",
                "`gc.unfreeze()` runs after the last collection and `empty_cache()`: what it frees stays reserved",
                _unfreeze_too_late,
                (("reserved", "allocator-cache"),),
                settings={"freeze_heap": True, "cuda_graphs": True},
                devices=("cuda",),
            ),
            Defect(
                "worker-keeps-everything",
                "vllm#38503",
                "the worker's shutdown drops neither weights nor KV cache, rope table or workspaces",
                _worker_keeps_everything,
                (("tensors", "instance-attribute"),),
            ),
            Defect(
                "undrained-offload",
                "vllm#38503",
                "blocks of an async offload are given back by the next step only: `reset_prefix_cache()` is never True",
                _undrained_offload,
                (("kv-blocks", "pending-transfer"),),
                settings={"kv_offload_bytes": 16 << 20},
            ),
            Defect(
                "transport-registration",
                "vllm#38503 (UCX/NIXL)",
                "memory registered with a native transport is never deregistered; torch's counters are clean",
                _transport_registration,
                (("host-memory", "native"),),
                settings={"kv_transport_bytes": 64 << 20},
                expected_on_card=(("pinned", "native"),),
                lives=2,
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
