"""The device's side of an engine: its memory, the model in it, and the runner that computes steps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from lowtide.engine.config import EngineConfig, ModelConfig
from lowtide.engine.device_allocator.arena import ALIGNMENT, padded
from lowtide.engine.device_allocator.memory import EngineMemory
from lowtide.engine.heap_freeze import HeapFreeze
from lowtide.engine.kv.kv_cache import KVCache, kv_cache_shape, num_host_kv_blocks
from lowtide.engine.kv.kv_transfer import KVConnector
from lowtide.engine.kv.kv_transport import KVTransport
from lowtide.engine.kv.offloading_connector import OffloadingConnector
from lowtide.engine.model_executor.attention import workspace_bytes
from lowtide.engine.model_executor.block_table import BlockTable
from lowtide.engine.model_executor.model import LlamaForCausalLM
from lowtide.engine.model_executor.rope import RotaryEmbedding
from lowtide.engine.model_executor.sampling import Sampler
from lowtide.engine.model_executor.weights import WeightSource
from lowtide.engine.pages import PageBackend
from lowtide.engine.process_group import ProcessGroup
from lowtide.engine.runner import ModelRunner
from lowtide.engine.scheduler import SchedulerOutput
from lowtide.engine.teardown import Teardown
from lowtide.probes.stages import stage

# What sleeps, in the order in which it is given up; `runtime` never does.
SLEEPING_TAGS = ("kv_cache", "weights")


class Worker:
    """Owns everything of the engine that lives on the device.

    Args:
        config: of the engine.
        model_config: of the model.
        backend: where device memory comes from.
        source: what fills the weights, now and after a level 2 sleep.
        num_blocks: KV blocks.
        max_model_len: tokens that one request may span.

    Attributes:
        memory: all that the engine has on the device, and the host copy of the weights.
        model_runner: computes the steps.
        kv_connector: copies KV blocks to host memory and back; None without offload.

    Raises:
        OutOfMemoryError: the device or the host has no room; all memory is back where it was.
        CheckpointError: the weights cannot be read; likewise.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        backend: PageBackend,
        source: WeightSource,
        num_blocks: int,
        max_model_len: int,
    ) -> None:
        self._source = source
        self._keep_host_copy = config.keep_host_copy
        self.kv_connector: KVConnector | None = None
        self._heap = HeapFreeze()
        self.group: ProcessGroup | None = None
        self.transport: KVTransport | None = None
        dtype = model_config.torch_dtype
        cache_shape = kv_cache_shape(model_config, num_blocks, config.block_size)
        kv_cache_bytes = 2 * model_config.num_layers * padded(cache_shape, dtype)
        self.memory = _create_memory(config, model_config, backend, source, kv_cache_bytes, max_model_len)
        try:
            if config.process_group:
                self.group = ProcessGroup(backend.device)
            if config.kv_transport_bytes:
                self.transport = KVTransport(backend, config.kv_transport_bytes)
            runtime = self.memory.arena("runtime").allocate
            with stage("load_weights"):
                rotary = RotaryEmbedding(model_config, max_model_len, runtime)
                # One mapping of the whole arena instead of one per tensor.
                self.memory.arena("weights").map_to(self.memory.arena("weights").capacity)
                model = LlamaForCausalLM(model_config, self.memory.arena("weights").allocate, rotary)
                source.fill(dict(model.named_parameters()))
            with stage("allocate_kv_cache"):
                self.memory.arena("kv_cache").map_to(kv_cache_bytes)
                kv_cache = KVCache(model_config, num_blocks, config.block_size, self.memory.arena("kv_cache").allocate)
            self.model_runner = ModelRunner(
                config,
                model,
                kv_cache,
                self.create_block_table(config, max_model_len),
                Sampler(config.seed),
                self.memory.workspaces,
                runtime,
                self.group,
            )
            num_host_blocks = num_host_kv_blocks(config, model_config)
            if num_host_blocks:
                self.kv_connector = OffloadingConnector(kv_cache, num_host_blocks, backend)
            if config.cuda_graphs:
                with stage("capture_graphs"):
                    self.model_runner.capture_graphs(config, runtime)
            if config.freeze_heap:
                self._heap.freeze()
        except BaseException as error:
            self._undo_create(error)
            raise

    def _undo_create(self, error: BaseException) -> None:
        """Give back what a worker has taken that could not be created; what fails is noted in the error."""
        undo = Teardown("creating the worker")
        self.close_connector(undo)
        if "model_runner" in self.__dict__:
            undo.run("the model runner", self.model_runner.shutdown)
        self._close_transport(undo)
        self._destroy_group(undo)
        self.memory.close(undo, drop_pages=True)
        undo.finish_into(error)

    def create_block_table(self, config: EngineConfig, max_model_len: int) -> BlockTable:
        """The block table, which no sleep drops: neither its rows nor the tensors that lead to it."""
        blocks_per_seq = -(-max_model_len // config.block_size)
        runtime = self.memory.arena("runtime").allocate
        return BlockTable(config.max_num_seqs, blocks_per_seq, config.block_size, runtime)

    def preserved_tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor whose contents must survive a sleep, by name; see `ModelRunner.preserved_tensors`."""
        return self.model_runner.preserved_tensors()

    def graph_addresses(self) -> dict[str, tuple[int, int]]:
        """What the CUDA graphs read and write at fixed places: (address, bytes) by name, as it was at their capture.

        Names are those of `preserved_tensors` where a tensor is in both; empty without graphs.
        """
        graphs = self.model_runner.decode_graphs
        return {} if graphs is None else dict(graphs.addresses)

    @property
    def awake(self) -> bool:
        """Whether weights and KV cache have all their pages."""
        return all(self.memory.arena(tag).mapped >= self.memory.arena(tag).used for tag in SLEEPING_TAGS)

    def execute_model(self, output: SchedulerOutput) -> dict[str, int]:
        """Compute one step; the next token by request id."""
        return self.model_runner.execute_model(output)

    def prepare_sleep(self, level: int) -> None:
        """All of a sleep that can fail for want of something: level 1 saves the weights, level 2 makes sure that they
        can be loaded again, and no copy may still use pages that go.  On an error nothing has changed.
        """
        if self.kv_connector is not None:
            self.kv_connector.flush()
        if level == 1:
            self.memory.save_weights()
        else:
            self._source.check()

    def sleep(self, level: int) -> None:
        """Give up the pages of weights, KV cache and workspaces, after `prepare_sleep`.

        A driver that refuses half-way leaves the worker awake: the weights are filled again, the KV cache is not.
        """
        if level == 2:
            self.memory.forget_weights()
        try:
            self.memory.drop(SLEEPING_TAGS)
        except BaseException as error:
            undo = Teardown("putting the worker to sleep")
            undo.run("waking it again", partial(self.wake, SLEEPING_TAGS))
            undo.finish_into(error)
            raise

    def wake(self, tags: Sequence[str]) -> None:
        """Map the pages of these tags again, and fill the weights from the host or from where they came.

        Raises:
            OutOfMemoryError: the device has no room; what was asleep still is.
            CheckpointError: the weights cannot be read again; likewise.
        """
        try:
            for tag in tags:
                self.memory.restore(tag, self._reload_weights if tag == "weights" else None)
            if "weights" in tags and not self._keep_host_copy:
                self.memory.forget_weights()
        except BaseException as error:
            undo = Teardown("waking the worker")
            undo.run("giving the pages back", partial(self.memory.drop, tags))
            undo.finish_into(error)
            raise

    def reload_weights(self) -> None:
        """Fill the weights from where they came.  The present ones are kept on the host until that has worked.

        Raises:
            OutOfMemoryError: the host has no room for them; nothing has changed.
            CheckpointError: the weights cannot be read; the present ones are there as before.
        """
        self._source.check()
        self.memory.save_weights()
        try:
            self._reload_weights()
        except BaseException as error:
            undo = Teardown("reloading the weights")
            undo.run("putting the weights back", partial(self.memory.restore, "weights"))
            undo.finish_into(error)
            raise
        finally:
            if not self._keep_host_copy:
                self.memory.forget_weights()

    def shutdown(self) -> None:
        """Give everything up.

        Raises:
            ExceptionGroup: the errors of all steps that failed; the others were done all the same.
        """
        teardown = Teardown("shutting the worker down")
        self.close_connector(teardown)
        teardown.run("the model runner", self.model_runner.shutdown)
        self._close_transport(teardown)
        self._destroy_group(teardown)
        # After the last reference is gone, and before torch gives back what it caches: not sooner, not later.
        teardown.run("the frozen heap", self._heap.thaw)
        self.memory.close(teardown)
        teardown.finish()

    def close_connector(self, teardown: Teardown) -> None:
        """End all copies of KV blocks, and give their host memory up."""
        if self.kv_connector is not None:
            teardown.run("the KV connector", self.kv_connector.close)

    def _close_transport(self, teardown: Teardown) -> None:
        if self.transport is not None:
            teardown.run("the KV transport", self.transport.close)

    def _destroy_group(self, teardown: Teardown) -> None:
        if self.group is not None:
            teardown.run("the process group", self.group.destroy)

    def _reload_weights(self) -> None:
        self._source.fill(dict(self.model_runner.model.named_parameters()))


def _create_memory(
    config: EngineConfig,
    model_config: ModelConfig,
    backend: PageBackend,
    source: WeightSource,
    kv_cache_bytes: int,
    max_model_len: int,
) -> EngineMemory:
    """All arenas with their sizes, and the micro-batches' workspaces."""
    return EngineMemory(
        backend,
        weights=sum(padded(shape, model_config.torch_dtype) for shape in source.shapes().values()),
        kv_cache=kv_cache_bytes,
        # Keys and values each start aligned.
        workspace=workspace_bytes(model_config, config.max_num_seqs, max_model_len) + 2 * ALIGNMENT,
        num_micro_batches=config.num_micro_batches,
        poison=config.poison_pages,
    )
