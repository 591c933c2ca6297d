"""The device's side of an engine: its memory, the model in it, the runner that computes steps, and the frozen heap."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from lowtide.engine.config import EngineConfig, ModelConfig, load_model_config, resolve_max_model_len
from lowtide.engine.device_allocator.arena import ALIGNMENT, padded
from lowtide.engine.device_allocator.memory import EngineMemory, KVTransport
from lowtide.engine.errors import WeightUpdateError
from lowtide.engine.kv.kv_cache import KVCache, kv_cache_shape, num_host_kv_blocks, num_kv_cache_blocks
from lowtide.engine.kv.kv_offload import OffloadingConnector
from lowtide.engine.model_executor.attention import workspace_bytes
from lowtide.engine.model_executor.block_table import BlockTable
from lowtide.engine.model_executor.cuda_graphs import check_cuda_graphs
from lowtide.engine.model_executor.fused_ops import rotary_table
from lowtide.engine.model_executor.model import LlamaForCausalLM
from lowtide.engine.model_executor.parallel_layers import ProcessGroup, RankPlace
from lowtide.engine.model_executor.weights import WeightSource, create_weight_source
from lowtide.engine.pages import open_backend
from lowtide.engine.request import SchedulerOutput
from lowtide.engine.runner import ModelRunner
from lowtide.engine.teardown import Teardown, undone_by
from lowtide.engine.weight_transfer import Bucket, checksum
from lowtide.probes.stages import announce, stage, withdraw

# What sleeps, in the order in which it is given up; `runtime` never does.
SLEEPING_TAGS = ("kv_cache", "weights")


@dataclass(frozen=True)
class Plan:
    """What an engine builds, known before any memory is taken; see `make_plan`."""

    model_config: ModelConfig
    num_blocks: int
    num_host_blocks: int
    max_model_len: int
    source: WeightSource


def make_plan(config: EngineConfig, rank: int = 0) -> Plan:
    """Find out what `config` asks for, with the weights of one rank; errors as `LLMEngine.check`."""
    if config.cuda_graphs:
        check_cuda_graphs(config.device)
    model_config = load_model_config(config)
    own = model_config.shard(config.tensor_parallel_size)
    num_blocks = num_kv_cache_blocks(config, own)
    num_host_blocks = num_host_kv_blocks(config, own)
    max_model_len = resolve_max_model_len(config, model_config, num_blocks)
    source = create_weight_source(config, model_config, rank, config.tensor_parallel_size)
    source.check()
    return Plan(model_config, num_blocks, num_host_blocks, max_model_len, source)


class Worker:
    """Owns everything of the engine that lives on the device, or one rank's part of it.

    The `source` fills the weights, now and after a level 2 sleep. Where it cannot be created, all memory is back.
    """

    def __init__(self, config: EngineConfig, plan: Plan, place: RankPlace | None = None) -> None:
        model_config, num_blocks, max_model_len = plan.model_config, plan.num_blocks, plan.max_model_len
        self._source = plan.source
        self._keep_host_copy = config.keep_host_copy
        self._heap = HeapFreeze()
        self._is_rank = place is not None
        self._is_first = place is None or place.rank == 0
        self._backend = backend = open_backend(config.device)
        if place is not None and backend.device.type == "cuda":
            # Else what names no card would take memory on the first one.
            torch.cuda.set_device(backend.device)
        self.kv_connector: OffloadingConnector | None = None
        self.group: ProcessGroup | None = None
        self.transport: KVTransport | None = None
        self._shards = plan.source.shards
        own, dtype = model_config.shard(config.tensor_parallel_size), model_config.torch_dtype
        cache_shape = kv_cache_shape(own, num_blocks, config.block_size)
        kv_cache_bytes = 2 * own.num_layers * padded(cache_shape, dtype)
        self.memory = EngineMemory(
            backend,
            weights=sum(padded(shape, dtype) for shape in plan.source.shapes().values()),
            kv_cache=kv_cache_bytes,
            # Keys and values each start aligned.
            workspace=workspace_bytes(own, config.max_num_seqs, max_model_len) + 2 * ALIGNMENT,
            num_micro_batches=config.num_micro_batches,
            poison=config.poison_pages,
        )
        weights, cache, runtime = map(self.memory.arena, ("weights", "kv_cache", "runtime"))
        with undone_by(partial(self._give_back, drop_pages=True)):
            if config.process_group or place is not None:
                self.group = ProcessGroup(backend.device, place)
            if config.kv_transport_bytes:
                self.transport = KVTransport(backend, config.kv_transport_bytes)
            with stage("load_weights"):
                rotary = rotary_table(model_config, max_model_len, runtime.allocate)
                # One mapping of the whole arena instead of one per tensor.
                weights.map_to(weights.capacity)
                ranks = None if place is None else self.group
                model = LlamaForCausalLM(model_config, weights.allocate, rotary, ranks)
                self._fill(model)
            with stage("allocate_kv_cache"):
                cache.map_to(kv_cache_bytes)
                kv_cache = KVCache(own, num_blocks, config.block_size, cache.allocate)
            # No sleep drops the block table: neither its rows nor the tensors that lead to it.
            blocks_per_seq = -(-max_model_len // config.block_size)
            self.model_runner = ModelRunner(
                config,
                model,
                kv_cache,
                BlockTable(config.max_num_seqs, blocks_per_seq, config.block_size, runtime.allocate),
                self.memory.workspaces,
                runtime.allocate,
                self.group,
            )
            if plan.num_host_blocks:
                self.kv_connector = OffloadingConnector(kv_cache, plan.num_host_blocks, backend)
            if config.cuda_graphs:
                with stage("capture_graphs"):
                    self.model_runner.capture_graphs(config, runtime.allocate)
            if config.freeze_heap:
                self._heap.freeze()
            announce(self)  # whoever judges the engine may be in another process

    def preserved_tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor whose contents must survive a sleep, by name; see `ModelRunner.preserved_tensors`."""
        return self.model_runner.preserved_tensors()

    def graph_addresses(self) -> dict[str, tuple[int, int]]:
        """Return (address, bytes), at their capture, of what graphs use, as `preserved_tensors` names it."""
        graphs = self.model_runner.decode_graphs
        return {} if graphs is None else dict(graphs.addresses)

    @property
    def awake(self) -> bool:
        """Whether weights and KV cache have all their pages."""
        return all(self.memory.arena(tag).mapped >= self.memory.arena(tag).used for tag in SLEEPING_TAGS)

    def memory_mapped(self) -> dict[str, int]:
        """Return the bytes with pages behind them, by arena tag."""
        return self.memory.mapped()

    def execute_model(self, output: SchedulerOutput) -> Mapping[str, int]:
        """Compute one step; the next token by request id, see `ModelRunner.execute_model`."""
        return self.model_runner.execute_model(output)

    def prepare_sleep(self, level: int) -> None:
        """Do all of a sleep that can fail for want of something: level 1 saves the weights, level 2 makes sure that
        they can be loaded again, and no copy may still use pages that go.  On an error nothing has changed.
        """
        if self.kv_connector is not None:
            self.kv_connector.flush()
        if level == 1:
            self.memory.save_weights()
        else:
            self._source.check()

    def undo_prepare_sleep(self) -> None:
        """Undo `prepare_sleep`, where another rank's has failed; a later sleep saves the weights anew."""
        self.memory.forget_weights()

    def sleep(self, level: int) -> None:
        """Give up the pages of weights, KV cache and workspaces, after `prepare_sleep`.

        A driver that refuses half-way leaves the worker awake: the weights are filled again, the KV cache is not.
        """
        if level == 2:
            self.memory.forget_weights()
        with undone_by(lambda undo: undo.run("waking it again", partial(self.wake, SLEEPING_TAGS))):
            self.memory.drop(SLEEPING_TAGS)

    def wake(self, tags: Sequence[str]) -> None:
        """Map the pages of these tags again, and fill the weights from the host or from where they came.

        What was asleep still is where the device has no room, or the weights cannot be read again.
        """
        self.begin_wake(tags)
        with undone_by(lambda undo: undo.run("giving the pages back", partial(self.undo_wake, tags))):
            self.end_wake(tags)

    def begin_wake(self, tags: Sequence[str]) -> None:
        """Do as `wake`, but what `undo_wake` needs is kept until `end_wake`: other ranks may fail."""
        with undone_by(lambda undo: undo.run("giving the pages back", partial(self.undo_wake, tags))):
            for tag in tags:
                self.memory.restore(tag, self._reload_weights if tag == "weights" else None)

    def undo_wake(self, tags: Sequence[str]) -> None:
        """Put what `begin_wake` has woken to sleep again."""
        self.memory.drop(tags)

    def end_wake(self, tags: Sequence[str]) -> None:
        """Give up the host copy of weights that are awake, unless it is to be kept."""
        if "weights" in tags and not self._keep_host_copy:
            self.memory.forget_weights()

    def break_off(self) -> None:
        """Let the ranks fail, too, that wait for this one in a collective, after a step that failed."""
        if self.group is not None:
            self.group.break_off()

    def suspend_group(self) -> None:
        """Give up what the ranks' process group holds, after a sleep."""
        if self.group is not None:
            self.group.destroy()

    def resume_group(self) -> None:
        """Make the ranks' process group again, once all ranks are awake."""
        if self.group is not None:
            self.group.resume()

    def begin_reload(self) -> None:
        """Fill the weights from where they came; the former ones are kept for `undo_reload` until `end_reload`."""
        self._source.check()
        self.memory.save_weights()
        with undone_by(lambda undo: undo.run("putting the weights back", self.undo_reload)):
            self._reload_weights()

    def undo_reload(self) -> None:
        """Put the weights back that were there before `begin_reload`."""
        self.memory.restore("weights")

    def end_reload(self) -> None:
        """Give up the host copy of the weights, unless it is to be kept."""
        if not self._keep_host_copy:
            self.memory.forget_weights()

    def begin_update(self) -> None:
        """Keep the present weights on the host, for `undo_reload`, until `end_reload`."""
        self.memory.save_weights()

    @torch.no_grad()
    def load_bucket(self, bucket: Bucket) -> None:
        """Copy this worker's part of each tensor of a bucket, in the parameter's dtype; none where one does not fit."""
        with bucket.opened() as tensors:
            for name, tensor in tensors.items():
                self._check_update(name, tuple(tensor.shape))
            parameters = dict(self.model_runner.model.named_parameters())
            for name, tensor in tensors.items():
                part = tensor[self._shards[name].index]
                # Pages that an arena maps on one card can be reached from no other: a card's own copy can be copied.
                parameters[name].copy_(part.to(parameters[name].device))

    def _check_update(self, name: str, shape: tuple[int, ...]) -> None:
        shard = self._shards.get(name)
        if shard is None:
            raise WeightUpdateError(f"the model has no parameter {name!r}: send names as its checkpoint has them")
        if shard.full_shape != shape:
            raise WeightUpdateError(
                f"parameter {name!r} has shape {list(shard.full_shape)}, and {list(shape)} was sent: send it whole"
            )

    def weight_checksums(self) -> dict[str, int]:
        """Checksum of this worker's part of every parameter, by name; what all have whole is the first one's."""
        return {
            name: checksum(parameter, self._shards[name])
            for name, parameter in self.model_runner.model.named_parameters()
            if self._is_first or self._shards[name].dim is not None
        }

    def shutdown(self) -> None:
        """Give everything up; the errors of all steps that failed come together, and the others were done."""
        # From here on nobody may read its tensors.
        withdraw(self)
        teardown = Teardown("shutting the worker down")
        self._give_back(teardown)
        teardown.finish()

    def _give_back(self, teardown: Teardown, *, drop_pages: bool = False) -> None:
        """Take down what there is; `drop_pages` even where a tensor holds them, in a worker that never came to life."""
        self.close_connector(teardown)
        if "model_runner" in self.__dict__:
            teardown.run("the model runner", self.model_runner.shutdown)
        if self.transport is not None:
            teardown.run("the KV transport", self.transport.close)
        if self.group is not None:
            teardown.run("the process group", self.group.destroy)
        # After the last reference is gone, and before torch gives back what it caches: not sooner, not later.
        teardown.run("the frozen heap", self._heap.thaw)
        self.memory.close(teardown, drop_pages=drop_pages)

    def close_connector(self, teardown: Teardown) -> None:
        """End all copies of KV blocks, and give their host memory up."""
        if self.kv_connector is not None:
            teardown.run("the KV connector", self.kv_connector.close)

    def _reload_weights(self) -> None:
        self._fill(self.model_runner.model)

    def _fill(self, model: LlamaForCausalLM) -> None:
        self._source.fill(dict(model.named_parameters()))
        if self._is_rank:
            # A part is cut from a whole tensor, whose memory torch would keep.
            self._backend.empty_cache()


# There is one permanent generation for the whole process, so who else needs it must be known to all: weakly, and with
# no memory behind it. By identity, each taken out by a callable of C: in Python code that a reference calls as its
# object dies, a signal handler raises in vain.
_FROZEN_BY: dict[int, weakref.ref[HeapFreeze]] = {}

# CPython 3.12 starts with some hundred frozen objects of its own; a program that freezes its heap has thousands.
_OWN_OF_PYTHON = 2000


class HeapFreeze:
    """One engine's claim on a frozen heap.

    `gc.unfreeze()` thaws what everybody has frozen.  So while another engine still wants its objects frozen they are
    frozen again after this one's garbage was collected; and a heap that was frozen by somebody else is left alone.
    (vllm#38503: a freeze without its pair hides cycles, and the tensors in them, from the collector for ever.)
    """

    def freeze(self) -> None:
        """Collect, and freeze what is left; do nothing where the program has frozen its heap itself."""
        if not _FROZEN_BY and gc.get_freeze_count() > _OWN_OF_PYTHON:
            return
        gc.collect()
        gc.freeze()
        _FROZEN_BY[id(self)] = weakref.ref(self, partial(_FROZEN_BY.pop, id(self)))

    def thaw(self) -> None:
        """Undoes `freeze` and collects what was hidden by it; does nothing where nothing was frozen."""
        if id(self) not in _FROZEN_BY:
            return
        gc.unfreeze()
        gc.collect()
        # Not sooner: interrupted before that, another call does it again.
        _FROZEN_BY.pop(id(self), None)
        if _FROZEN_BY:
            gc.freeze()
