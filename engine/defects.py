"""Lifecycle bugs that happened elsewhere, each put back into this engine where it was there.

The engine itself knows nothing of them: a defect replaces one method or more for as long as its context lasts.  The
processes that the engine starts enter `switched_on`, `activated` or `triggered` as a process extension.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import hashlib
import mmap
import os
import re
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar
from weakref import WeakKeyDictionary

import msgspec
import torch

from lowtide.engine import processes, runner, weight_transfer
from lowtide.engine.config import Allocator, EngineConfig
from lowtide.engine.core import EngineCore
from lowtide.engine.core_process import CoreClient
from lowtide.engine.device_allocator.arena import Arena, Spec, Workspace, WorkspaceViews
from lowtide.engine.device_allocator.memory import EngineMemory, KVTransport
from lowtide.engine.errors import ConfigError, OutOfMemoryError
from lowtide.engine.kv.kv_cache import KVCache, KVCacheBlock, KVCacheManager
from lowtide.engine.llm_engine import LLMEngine, Prompt
from lowtide.engine.model_executor.block_table import BlockTable
from lowtide.engine.model_executor.cuda_graphs import DecodeGraphs
from lowtide.engine.model_executor.model import LlamaForCausalLM, StaticForwardContext
from lowtide.engine.model_executor.parallel_layers import ProcessGroup
from lowtide.engine.pages import Part
from lowtide.engine.pages.card import VmmPages
from lowtide.engine.processes import ChildProcess, call
from lowtide.engine.ranks import MultiprocExecutor
from lowtide.engine.request import Request, RequestOutput, SamplingParams, SchedulerOutput
from lowtide.engine.runner import ModelRunner
from lowtide.engine.scheduler import Scheduler
from lowtide.engine.teardown import Teardown
from lowtide.engine.weight_transfer import Bucket, BucketMemory, CudaExport, Export, FileExport
from lowtide.engine.worker import HeapFreeze, Worker

Causes = tuple[tuple[str, str], ...]
"""The resource and the cause of each finding, sorted."""


@dataclass(frozen=True)
class Defect:
    """One historical bug.

    Attributes:
        activate: puts the bug into the engine while its context lasts.
        expected: every finding that it makes; none where it is no leak.
        settings: what the engine must be configured with for the bug to have a place.
        trigger: what must happen from outside for it to show, while its context lasts; an engine without the bug takes
            it without a finding.
        devices: the kinds of device on which it can show.
        expected_on_card: `expected` on a card, where that is something else.
        prompt_scale: how many times as long as usual the prompts must be.
        lives: in how many lives it shows on a CPU: two where the first one's libraries would hide it, or where its
            processes would infer too rarely to be judged.
        expected_in_core: `expected` where the engine's core has a process of its own, where that is something else:
            the end of a process gives back whatever its shutdown has kept.
        turns: inferences in a row that it takes to show, as `lowtide run --turns`; 0 where a life's own are enough.
    """

    name: str
    source: str
    summary: str
    activate: Callable[[], AbstractContextManager[None]]
    expected: Causes
    settings: Mapping[str, Any] = field(default_factory=dict)
    trigger: Callable[[], AbstractContextManager[None]] = nullcontext
    devices: tuple[str, ...] = ("cpu", "cuda")
    expected_on_card: Causes | None = None
    prompt_scale: int = 1
    lives: int = 1
    expected_in_core: Causes | None = None
    turns: int = 0

    def lives_on(self, device: str) -> int:
        """Return in how many lives it shows on `cpu` or `cuda`; a card's libraries hide something in the first."""
        return self.lives if device == "cpu" else 2

    def expected_on(self, device: str, *, in_core: bool = False) -> Causes:
        """Return `expected`, on `cpu` or `cuda`; with `in_core`, of an engine whose core has a process of its own."""
        if in_core and self.expected_in_core is not None:
            return self.expected_in_core
        return self.expected if device == "cpu" or self.expected_on_card is None else self.expected_on_card

    @property
    def cards(self) -> int:
        """How many cards an engine has on which it shows; 0 where a CPU will do."""
        return 0 if "cpu" in self.devices else int(self.settings.get("tensor_parallel_size", 1))

    def check(self, device: str) -> None:
        """Refuse a device on which it cannot show."""
        kind = device.partition(":")[0]
        if kind not in self.devices:
            raise ConfigError(f"defect {self.name!r} cannot show on {kind}: use --device {self.devices[0]}")

    def configure(self, config: EngineConfig, *, twin: bool = False) -> EngineConfig:
        """Return the configuration with what the bug needs, or of a `twin` with what makes it show alone."""
        self.check(config.device)
        configured = replace(config, **self.settings)
        if not configured.works_elsewhere:
            return configured
        extension = self.extension("triggered" if twin else "switched_on")
        return replace(configured, process_extensions=(*configured.process_extensions, extension))

    def extension(self, how: Literal["switched_on", "activated", "triggered"]) -> str:
        """Return what puts it into a process that the engine starts, as `EngineConfig.process_extensions` names it."""
        return f"{__name__}:{how}={self.name}"

    @contextmanager
    def switched_on(self) -> Iterator[None]:
        """Put in the bug, and what makes it show."""
        with self.trigger(), self.activate():
            yield


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Give `owner` another value under `name` while the context lasts."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


_Function = TypeVar("_Function", bound=Callable[..., Any])
_ALL: list[Defect] = []


def _bug(
    source: str, *expected: tuple[str, str], of: tuple[object, str] | None = None, **more: Any
) -> Callable[[_Function], _Function]:
    """List a bug, by the function's name and docstring.

    The function is what the owner `of` a name has under it while the bug is active, or else makes a context manager.
    """

    def listed(function: _Function) -> _Function:
        summary = " ".join((function.__doc__ or "").split()).removesuffix(".")
        activate = contextmanager(function) if of is None else functools.partial(replaced, *of, function)
        name = function.__name__.replace("_", "-")
        _ALL.append(Defect(name, source, summary[0].lower() + summary[1:], activate, expected, **more))
        return function

    return listed


# What several bugs have in common, and what makes some of them show.

_KEPT = ("tensors", "instance-attribute")
_GROWS = ("host-memory", "instance-attribute")
# There it is reached from the handler of a signal, which is the process's.
_GROWS_IN_CORE: Causes = (("host-memory", "module-global"),)
_PROCESS_LEFT = ("processes", "unknown")
_IN_CORE: Mapping[str, Any] = MappingProxyType({"engine_process": True})

LATE_BY = 2.0
"""Seconds by which `late-release` delays the driver."""

ORPHAN_S = 600.0
"""Seconds after which a process that nothing ends ends by itself, so that no machine keeps it for good."""

REGION_BYTES = 8 << 20
"""Bytes of the file in /dev/shm."""

_REGION = re.compile(r"/dev/shm/vllm_offload_\S+\.mmap")

IMAGE_TOKENS = 256
"""Tokens of the one image that each prompt comes with."""

IMAGE_BYTES = 64 << 10
"""Bytes of what comes with a request besides its prompt."""

AUDIO_BYTES = 4 << 20
"""The same where it is recorded speech."""

HOST_CACHE_BYTES, SCRATCH_BYTES = 36 << 20, 48 << 20
"""Bytes that are pinned beside the model, which torch makes 64 MiB, and that a step takes from the driver's pool."""

PIECES, ARENAS = 64, 8
"""How many images a thread allocates at once, and how many threads do so."""

TURNS = 24
"""Inferences in a row after which growth by each of them is known."""

LORA_RANK = 8
"""Of the adapters that come with each update."""


@contextmanager
def _no_room_in_the_first_wake() -> Iterator[None]:
    """The device has room for the weights and not for the KV cache, once."""
    original = Arena.map_part
    asked: list[Arena] = []

    def map_part(self: Arena, target: int) -> None:
        # What was given out before and has no pages now was asleep.
        if self.tag == "kv_cache" and self.mapped < self.used and not asked:
            asked.append(self)
            raise OutOfMemoryError(f"arena {self.tag!r} cannot grow to {target} bytes: no room, as it was asked for")
        original(self, target)

    with replaced(Arena, "map_part", map_part):
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
def _beside_the_model(name: str, make: Callable[[LlamaForCausalLM], object]) -> Iterator[None]:
    """Each model runner has something more, until its shutdown."""
    create, shut_down = ModelRunner.__init__, ModelRunner.shutdown

    def create_with_it(self: ModelRunner, *args: Any) -> None:
        create(self, *args)
        self.__dict__[name] = make(self.model)

    def shutdown(self: ModelRunner) -> None:
        self.__dict__.pop(name, None)
        shut_down(self)

    with replaced(ModelRunner, "__init__", create_with_it), replaced(ModelRunner, "shutdown", shutdown):
        yield


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
def _encoder_cache() -> Iterator[None]:
    """Each model runner has an encoder cache, which a sleep and a shutdown reset."""
    execute, sleep = ModelRunner.execute_model, Worker.sleep

    def execute_with_images(self: ModelRunner, output: SchedulerOutput) -> Mapping[str, int]:
        new = [repr(item.new_token_ids).encode() for item in output.scheduled if item.num_tokens > 1]
        # Equal prompts come with equal images.
        self.__dict__["encoder_cache"].encode(hashlib.sha256(prompt).hexdigest() for prompt in new)
        return execute(self, output)

    def sleep_without(self: Worker, level: int) -> None:
        sleep(self, level)
        self.model_runner.__dict__["encoder_cache"].reset()

    with (
        _beside_the_model("encoder_cache", EncoderCache),
        replaced(ModelRunner, "execute_model", execute_with_images),
        replaced(Worker, "sleep", sleep_without),
    ):
        yield


class LoraAdapters:
    """The low-rank adapters that an engine has loaded, by name; they lie beside the arenas, as a trainer makes them."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self._shape = (model.config.num_layers, 2, LORA_RANK, model.config.hidden_size)
        self._dtype, self._device = model.config.torch_dtype, next(model.parameters()).device
        self.loaded: dict[str, torch.Tensor] = {}
        self._versions = 0

    def update(self) -> None:
        """Load the adapter of this step's policy, and remove that of the step before."""
        former = list(self.loaded)
        self._versions += 1
        self.loaded[f"policy-{self._versions}"] = torch.zeros(self._shape, dtype=self._dtype, device=self._device)
        for name in former:
            self.remove(name)

    def remove(self, name: str) -> None:
        """Let go of an adapter."""
        del self.loaded[name]


@contextmanager
def _lora_adapters() -> Iterator[None]:
    """With each update of the weights comes a LoRA adapter, which takes the place of the one before."""
    begin = Worker.begin_update

    def begin_with_adapter(self: Worker) -> None:
        begin(self)
        self.model_runner.__dict__["lora_adapters"].update()

    with _beside_the_model("lora_adapters", LoraAdapters), replaced(Worker, "begin_update", begin_with_adapter):
        yield


class SharedOffloadRegion:
    """A file in /dev/shm that the core maps, as vLLM's KV offload does; only `cleanup` removes it."""

    def __init__(self) -> None:
        self.path = Path(f"/dev/shm/vllm_offload_{uuid.uuid4()}.mmap")
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.ftruncate(descriptor, REGION_BYTES)
            self._mapping = mmap.mmap(descriptor, REGION_BYTES)
        finally:
            os.close(descriptor)
        self._mapping.write(b"\1" * REGION_BYTES)

    def cleanup(self) -> None:
        """Unmap and remove the file."""
        self._mapping.close()
        self.path.unlink(missing_ok=True)


@contextmanager
def _core_with_an_offload_region() -> Iterator[None]:
    """Each core maps a file in /dev/shm, and removes it in its shutdown."""
    create, shut_down = EngineCore.__init__, EngineCore.shutdown

    def create_with_region(self: EngineCore, *args: Any, **settings: Any) -> None:
        create(self, *args, **settings)
        self.__dict__["offload_region"] = SharedOffloadRegion()

    def shutdown(self: EngineCore) -> None:
        teardown = Teardown("shutting the core down")
        teardown.run("the engine", lambda: shut_down(self))
        region = self.__dict__.pop("offload_region", None)
        if region is not None:
            teardown.run("the offload region", region.cleanup)
        teardown.finish()

    with replaced(EngineCore, "__init__", create_with_region), replaced(EngineCore, "shutdown", shutdown):
        yield


@contextmanager
def _clients_that_leave() -> Iterator[None]:
    """Before each call that generates others ask for the same, and go away after the first step."""
    generate = LLMEngine.generate

    def generate_after_them(self: LLMEngine, prompts: Sequence[Prompt], *params: Any) -> list[RequestOutput]:
        gone = [self.add_request(prompt) for prompt in prompts]
        self.step()
        self.abort(gone)
        return generate(self, prompts, *params)

    with replaced(LLMEngine, "generate", generate_after_them):
        yield


@contextmanager
def _left_running(says_goodbye: Callable[[CoreClient], object]) -> Iterator[None]:
    """A client's shutdown does not end the core's process; this context's end does."""
    left: list[ChildProcess] = []

    def shutdown(self: CoreClient) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        says_goodbye(self)
        self.process.connection.close()
        left.append(self.process)

    try:
        with replaced(CoreClient, "shutdown", shutdown):
            yield
    finally:
        for process in left:
            process.end(timeout_s=0.0)


# The bugs, in the order in which they are listed.


@_bug("vllm#38503", ("tensors", "lru-cache"), expected_in_core=())
def bound_method_cache() -> Iterator[None]:
    """A capability check is an `lru_cache` keyed by the model's bound `forward`, which keeps the model."""
    asked = runner.supports_kw

    @functools.lru_cache
    def supports_kw(function: Callable[..., Any], name: str) -> bool:
        return asked(function, name)

    with replaced(runner, "supports_kw", supports_kw):
        yield


@_bug(
    "vllm#38503",
    ("gc-frozen", "not-restored"),
    ("tensors", "frozen-garbage"),
    settings={"freeze_heap": True},
    expected_in_core=(),
)
def frozen_heap() -> Iterator[None]:
    """`gc.freeze()` at create, no `gc.unfreeze()` at shutdown: cycles that hold weights are never collected."""
    original = StaticForwardContext.__init__

    def create(self: StaticForwardContext, model: LlamaForCausalLM, kv_cache: KVCache) -> None:
        original(self, model, kv_cache)
        # As upstream's, each layer refers to the table that lists all of them: only the collector can free them.
        listed = dict(self.layers)
        for layer in listed.values():
            layer.static_forward_context = listed  # type: ignore[assignment]

    with replaced(HeapFreeze, "thaw", lambda self: None), replaced(StaticForwardContext, "__init__", create):
        try:
            yield
        finally:
            gc.unfreeze()


@_bug(
    "vllm#41034",
    ("host-memory", "native"),
    ("teardown", "unknown"),
    _KEPT,
    devices=("cpu",),
    lives=2,
    expected_in_core=(("teardown", "unknown"),),
)
def accelerator_on_cpu() -> Iterator[None]:
    """The worker's shutdown waits for an accelerator that is not there, and what comes after it is skipped."""
    original = Worker.shutdown

    def shutdown(self: Worker) -> None:
        torch.accelerator.synchronize()
        original(self)

    with replaced(Worker, "shutdown", shutdown):
        yield


@_bug("vllm#41034, the merged fix", ("globals", "not-restored"), expected_in_core=())
def accelerator_patched() -> Iterator[None]:
    """`torch.accelerator.synchronize` and `empty_cache` become no-ops for the whole process, for good."""
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


@_bug("vllm#41034, first try", _KEPT, of=(ModelRunner, "shutdown"), expected_in_core=())
def shutdown_noop(self: ModelRunner) -> None:
    """The CPU model runner overrides shutdown with `pass`."""


@_bug(
    "vllm#43023",
    ("process-groups", "not-restored"),
    of=(ProcessGroup, "destroy"),
    settings={"process_group": True},
    expected_in_core=(),
)
def process_group(self: ProcessGroup) -> None:
    """The process group and its store survive the shutdown: only the reference to it is dropped."""
    self._group = None


@_bug("vllm#43023 (ROCm)", of=(VmmPages, "_unmap"), devices=("cuda",))
def late_release(self: VmmPages, address: int, part: Part) -> None:
    """The driver gives memory back seconds after it was freed: no leak, but the next engine must wait."""
    self._driver.unmap(address + part.offset, part.size)
    threading.Timer(LATE_BY, functools.partial(self._driver.release, part.handle)).start()


@_bug("vllm#37533 (ROCm)", ("driver", "driver"), of=(VmmPages, "_unmap"), devices=("cuda",))
def never_release(self: VmmPages, address: int, part: Part) -> None:
    """Memory is reported free and physically still there."""
    self._driver.unmap(address + part.offset, part.size)


@_bug(
    "vllm#39226",
    ("reserved", "allocator-cache"),
    # A workspace of more than a hundred MiB: more than anything else that torch has cached.
    settings={"model": "1b", "kv_cache_bytes": 2 << 30},
    devices=("cuda",),
    prompt_scale=60,
)
def workspace_resize() -> Iterator[None]:
    """A workspace that grows drops its buffer and takes a new one: twice its bytes stay reserved."""

    def get(self: WorkspaceViews, *specs: Spec) -> list[torch.Tensor]:
        return self._workspace.get(*specs)

    # Nobody keeps a view, so that all that is left is what torch reserves.
    with _reallocating(of_all=False), replaced(WorkspaceViews, "get", get):
        yield


@_bug(
    "vllm#39226 (DBO)",
    _KEPT,
    # Where kernels decode, only later chunks of prompts gather keys and values in a workspace.
    settings={"num_micro_batches": 2, "max_num_batched_tokens": 24},
)
def workspace_views() -> Iterator[None]:
    """One micro-batch's growth replaces every micro-batch's workspace; views keep the old storages."""
    with _reallocating(of_all=True):
        yield


@_bug("vllm#40648", ("contents", "not-restored"), settings={"poison_pages": True})
def block_table_contents() -> Iterator[None]:
    """Pointer, stride and size tensors lie in the KV cache's pages, which a sleep drops: contents undefined."""
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


@_bug("vllm#40648, the merged fix", ("pointers", "cuda-graph"), settings={"cuda_graphs": True}, devices=("cuda",))
def block_table_moved() -> Iterator[None]:
    """Those tensors are made anew at every wake: a captured graph still reads the old addresses."""
    original = Worker.wake

    def wake(self: Worker, tags: Sequence[str]) -> None:
        original(self, tags)
        self.model_runner.block_table.create_pointers(self.memory.arena("runtime").allocate)

    with replaced(Worker, "wake", wake):
        yield


@_bug("vllm#34600", ("arena", "not-restored"), of=(Worker, "wake"), trigger=_no_room_in_the_first_wake)
def wake_oom(self: Worker, tags: Sequence[str]) -> None:
    """Out of memory half-way through a wake leaves the mapped half mapped."""
    for tag in tags:
        self.memory.restore(tag, self._reload_weights if tag == "weights" else None)


@_bug(
    "vllm 0.20",
    ("reserved", "allocator-cache"),
    settings={"freeze_heap": True, "cuda_graphs": True},
    devices=("cuda",),
)
def unfreeze_too_late() -> Iterator[None]:
    """`gc.unfreeze()` runs after the last collection and `empty_cache()`: what it frees stays reserved."""

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


@_bug(
    "sglang#28902, NeMo-RL#223",
    ("arena", "unknown"),
    of=(MultiprocExecutor, "sleep"),
    settings={"tensor_parallel_size": 2},
    # One card is what most machines have.
    devices=("cpu",),
)
def rank_keeps(self: MultiprocExecutor, level: int) -> None:
    """A sleep does not reach one of two ranks, which keeps its weights and its KV cache."""
    failed = self.exchange(dict.fromkeys(self.children[:-1], call("sleep", level)))
    assert not failed


@_bug("vllm#38503", _KEPT, of=(Worker, "shutdown"), expected_in_core=())
def worker_keeps_everything(self: Worker) -> None:
    """The worker's shutdown drops neither weights nor KV cache, rope table or workspaces."""
    # What the bug does not name still happens: host buffers go, and torch's cache.
    teardown = Teardown("shutting the worker down")
    self.close_connector(teardown)
    self.memory.close_host_buffers(teardown)
    self.memory.empty_cache(teardown)
    teardown.finish()


@_bug(
    "vllm#38503",
    ("kv-blocks", "pending-transfer"),
    of=(EngineCore, "reset_prefix_cache"),
    settings={"kv_offload_bytes": 16 << 20},
)
def undrained_offload(self: EngineCore) -> bool:
    """Blocks of an async offload are given back by the next step only: `reset_prefix_cache()` is never True."""
    return self.scheduler.reset_prefix_cache()


@_bug(
    "vllm#38503 (UCX/NIXL)",
    ("host-memory", "native"),
    of=(KVTransport, "close"),
    settings={"kv_transport_bytes": 64 << 20},
    expected_on_card=(("pinned", "native"),),
    lives=2,
    expected_in_core=(),
)
def transport_registration(self: KVTransport) -> None:
    """Memory registered with a native transport is never deregistered; torch's counters are clean."""


@_bug("EasyR1#11002", _KEPT, of=(EncoderCache, "reset"), trigger=_encoder_cache)
def encoder_cache(self: EncoderCache) -> None:
    """Encoder outputs stay in the model runner's cache: they go only for want of room, and in no sleep."""


@_bug("tokenspeed#1373", ("contents", "not-restored"), of=(Worker, "load_bucket"))
def sync_of_nothing(self: Worker, bucket: Bucket) -> None:
    """An update of the weights says that it is done and moved nothing: no name was found, none was missed."""
    # Names are looked up with the prefix of another wrapper.
    parameters = {f"module.{name}": each for name, each in self.model_runner.model.named_parameters()}
    with bucket.opened() as tensors:
        for name, tensor in tensors.items():
            if name in parameters:
                parameters[name].copy_(tensor)


@_bug("peft#1639, ACE-Step#705", _KEPT, of=(LoraAdapters, "remove"), trigger=_lora_adapters)
def lora_pile(self: LoraAdapters, name: str) -> None:
    """Each update brings a LoRA adapter under a new name, and those of the updates before are never removed."""


@_bug(
    "sglang#17870",
    ("shared-memory", "unknown"),
    settings=_IN_CORE,
    # On a card a second import of one handle is the first one.
    devices=("cpu",),
)
def ipc_double_open() -> Iterator[None]:
    """The process that loads a bucket of weights opens it twice and closes it once: it stays mapped."""
    opened = weight_transfer.opened
    mappings: list[mmap.mmap] = []

    @contextmanager
    def opened_twice(export: Export) -> Iterator[torch.Tensor]:
        assert isinstance(export, FileExport)
        file = os.open(export.path, os.O_RDWR)
        mappings.append(mmap.mmap(file, export.size))
        os.close(file)
        with opened(export) as data:
            yield data

    with replaced(weight_transfer, "opened", opened_twice):
        yield


@_bug("vllm#51258, pytorch#149187", ("cuda-ipc", "pending-transfer"), settings=_IN_CORE, devices=("cuda",))
def ipc_counter() -> Iterator[None]:
    """The process that loads a bucket of weights opens and closes it twice: its counter falls below 0, and torch never
    frees it.
    """
    opened = weight_transfer.opened

    @contextmanager
    def opened_in_turn(export: Export) -> Iterator[torch.Tensor]:
        assert isinstance(export, CudaExport)
        with opened(export):
            pass
        with opened(export) as data:
            yield data

    with replaced(weight_transfer, "opened", opened_in_turn):
        yield


@_bug("vllm#52950", ("reserved", "allocator-cache"), devices=("cuda",))
def stranded_streams() -> Iterator[None]:
    """Each update takes the memory of its buckets on a new stream: torch keeps it for that stream alone."""
    bucket_memory = weight_transfer.bucket_memory

    def on_new_stream(size: int, device: str) -> BucketMemory:
        with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
            return bucket_memory(size, device)

    with replaced(weight_transfer, "bucket_memory", on_new_stream):
        yield


@_bug("vllm#55510, vllm#55846", _PROCESS_LEFT, settings=_IN_CORE, lives=2)
def orphan_core() -> Iterator[None]:
    """The core's process takes no notice of its client's end, runs on and keeps all its memory."""

    def wait() -> None:
        time.sleep(ORPHAN_S)
        os._exit(1)

    with (
        _left_running(lambda client: None),
        replaced(processes, "client_has_gone", wait),
        # In a thread of its own, which has nothing else to do.
        replaced(processes, "parent_has_ended", wait),
    ):
        yield


@_bug("vllm#55510, the same from a client that lives", _PROCESS_LEFT, settings=_IN_CORE, lives=2)
def core_ignores_shutdown() -> Iterator[None]:
    """The core confirms its shutdown, gives nothing up and does not end, and its client does not kill it."""

    def shutdown(self: EngineCore) -> None:
        # Nobody joins the thread, which keeps the process alive.
        threading.Thread(target=lambda core: time.sleep(ORPHAN_S), args=(self,), name="core-loop").start()

    with _left_running(lambda client: client._call("shutdown")), replaced(EngineCore, "shutdown", shutdown):
        yield


@_bug("vllm#51579", ("shared-memory", "unknown"), settings=_IN_CORE, trigger=_core_with_an_offload_region, lives=2)
def shared_memory_of_the_dead() -> Iterator[None]:
    """A file of KV offloading in /dev/shm is removed in the core's shutdown only, and the core was killed."""
    left: set[str] = set()

    def shutdown(self: CoreClient) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        with suppress(OSError):  # it has ended
            left.update(_REGION.findall(Path(f"/proc/{self.process.pid}/maps").read_text()))
        self.process.end(timeout_s=0.0)

    try:
        with replaced(CoreClient, "shutdown", shutdown):
            yield
    finally:
        # What this has left on the host goes with this context.
        for path in left:
            Path(path).unlink(missing_ok=True)


@_bug(
    "vllm#51485",
    ("process-groups", "not-restored"),
    of=(MultiprocExecutor, "suspend_groups"),
    settings={"tensor_parallel_size": 2},
    devices=("cuda",),
)
def nccl_kept(self: MultiprocExecutor) -> None:
    """The ranks' communicators keep their buffers on each card while the engine sleeps."""


@_bug("vime#4", ("driver", "driver"), settings={"tensor_parallel_size": 2}, devices=("cuda",))
def bridge_context() -> Iterator[None]:
    """Each rank that takes in new weights makes a context on the first card, too, where it has nothing to do."""
    begin = Worker.begin_update

    def begin_on_the_first_card(self: Worker) -> None:
        torch.zeros(1, device="cuda:0")
        begin(self)

    with replaced(Worker, "begin_update", begin_on_the_first_card):
        yield


@_bug(
    "vllm#44490",
    _GROWS,
    # A number takes eight bytes: many blocks, none of which is found in the cache.
    settings={"freeze_heap": True, "enable_prefix_caching": False, "block_size": 8},
    prompt_scale=2,
    turns=TURNS,
    expected_in_core=_GROWS_IN_CORE,
)
def frozen_list() -> Iterator[None]:
    """The numbers of new KV blocks are listed for whoever zeroes these, which nobody does here, in a frozen heap."""
    create, allocate = KVCacheManager.__init__, KVCacheManager.allocate_slots

    def create_with_list(self: KVCacheManager, *args: Any, **settings: Any) -> None:
        create(self, *args, **settings)
        self.__dict__["new_block_ids"] = []

    def allocate_and_note(self: KVCacheManager, *args: Any) -> list[KVCacheBlock] | None:
        taken = allocate(self, *args)
        self.__dict__["new_block_ids"] += [block.block_id for block in taken or ()]
        return taken

    with (
        replaced(KVCacheManager, "__init__", create_with_list),
        replaced(KVCacheManager, "allocate_slots", allocate_and_note),
    ):
        yield


@_bug("vllm#15597", _GROWS, turns=TURNS, expected_in_core=_GROWS_IN_CORE)
def request_map() -> Iterator[None]:
    """Each request is put into a map by its id, and is not taken out of it when it has ended."""
    add_request = Scheduler.add_request

    def add_and_map(self: Scheduler, request: Request) -> None:
        add_request(self, request)
        self.__dict__.setdefault("seq_id_to_seq_group", {})[request.request_id] = request

    with replaced(Scheduler, "add_request", add_and_map):
        yield


@_bug("vllm-omni#6462", _GROWS, trigger=_clients_that_leave, turns=TURNS)
def aborted_outputs() -> Iterator[None]:
    """A request that ends takes its future out of a dict, and one that is aborted does not."""
    add, generate = LLMEngine._add, LLMEngine.generate

    def add_with_future(self: LLMEngine, *args: Any) -> str:
        request_id = add(self, *args)
        self.__dict__.setdefault("completed_outputs", {})[request_id] = Future()
        return request_id

    def generate_and_set(self: LLMEngine, *args: Any) -> list[RequestOutput]:
        outputs = generate(self, *args)
        for output in outputs:
            self.__dict__["completed_outputs"].pop(output.request_id).set_result(output)
        return outputs

    with replaced(LLMEngine, "_add", add_with_future), replaced(LLMEngine, "generate", generate_and_set):
        yield


@_bug("msgspec#1175", ("host-memory", "native"), turns=TURNS, expected_in_core=(("host-memory", "unknown"),))
def native_refcount() -> Iterator[None]:
    """What encodes a request's message, in C, has one reference to it too many."""
    add_request = EngineCore.add_request

    def encode_and_add(self: EngineCore, request_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
        message = msgspec.msgpack.encode((request_id, list(prompt), bytes(IMAGE_BYTES)))
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(message))
        add_request(self, request_id, prompt, params)

    with replaced(EngineCore, "add_request", encode_and_add):
        yield


@_bug("vllm-omni#6462, where malloc had all of it", turns=TURNS)
def arena_fragmentation() -> Iterator[None]:
    """Threads free all but a little of what they allocate, and malloc keeps it until it is told to trim: no leak."""
    add_request = EngineCore.add_request
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    together = threading.Barrier(ARENAS)
    above: deque[int] = deque()

    def allocate() -> None:
        # All at once, or each would get the arena of the one before.
        together.wait()
        pieces = [libc.malloc(IMAGE_BYTES) for _ in range(PIECES)]
        for piece in pieces:
            ctypes.memset(piece, 1, IMAGE_BYTES)
        above.append(libc.malloc(1))
        for piece in pieces:
            libc.free(piece)

    def add_beside_threads(self: EngineCore, *request: Any) -> None:
        threads = [threading.Thread(target=allocate) for _ in range(ARENAS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        while len(above) > ARENAS:
            libc.free(above.popleft())
        add_request(self, *request)

    try:
        with replaced(EngineCore, "add_request", add_beside_threads):
            yield
    finally:
        while above:
            libc.free(above.pop())


@_bug("sglang-omni#1174", ("host-memory", "cycle"), turns=TURNS)
def cycle_per_request() -> Iterator[None]:
    """A request and its data refer to each other: what came with it stays until Python collects."""
    add_request = Scheduler.add_request

    def add_with_data(self: Scheduler, request: Request) -> None:
        add_request(self, request)
        request.__dict__["omni_data"] = {"request": request, "image": bytearray(AUDIO_BYTES)}

    with replaced(Scheduler, "add_request", add_with_data):
        yield


@_bug("sglang#37285", ("pinned", "allocator-cache"), devices=("cuda",))
def pinned_rounding() -> Iterator[None]:
    """Host memory is pinned by torch, which takes the next power of two, and keeps it when it was given back."""
    with _beside_the_model(
        "host_cache", lambda model: torch.empty(HOST_CACHE_BYTES, dtype=torch.uint8, pin_memory=True)
    ):
        yield


@_bug("CUDA's stream-ordered allocator", ("driver", "allocator-cache"), devices=("cuda",))
def pool_threshold() -> Iterator[None]:
    """Memory of each step comes from the driver's pool, which has been told to give nothing back to the card."""
    execute = ModelRunner.execute_model

    def called(code: Any, *results: Any) -> Any:
        assert not int(code), code
        return results[0] if results else None

    def execute_with_scratch(self: ModelRunner, output: SchedulerOutput) -> Mapping[str, int]:
        from cuda.bindings import driver

        pool = called(*driver.cuDeviceGetDefaultMemPool(torch.cuda.current_device()))
        threshold = driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
        called(*driver.cuMemPoolSetAttribute(pool, threshold, driver.cuuint64_t(2**64 - 1)))
        stream = torch.cuda.current_stream().cuda_stream
        scratch = called(*driver.cuMemAllocAsync(SCRATCH_BYTES, stream))
        sampled = execute(self, output)
        called(*driver.cuMemFreeAsync(scratch, stream))
        return sampled

    with replaced(ModelRunner, "execute_model", execute_with_scratch):
        yield


DEFECTS: Mapping[str, Defect] = MappingProxyType({defect.name: defect for defect in _ALL})


def find_defect(name: str) -> Defect:
    """Return the defect of that name; `ConfigError`: there is none; the message lists those there are."""
    try:
        return DEFECTS[name]
    except KeyError:
        raise ConfigError(f"there is no defect {name!r}: use one of {', '.join(DEFECTS)}") from None


def switched_on(name: str) -> AbstractContextManager[None]:
    """Put in the defect of that name, and what makes it show, in this process."""
    return find_defect(name).switched_on()


def activated(name: str) -> AbstractContextManager[None]:
    """Put in a bug alone, without what makes it show; `ConfigError`: there is no bug of that name."""
    return find_defect(name).activate()


def triggered(name: str) -> AbstractContextManager[None]:
    """Do what makes the defect of that name show, in this process, without the defect."""
    return find_defect(name).trigger()
