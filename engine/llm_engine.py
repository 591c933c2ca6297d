"""The states of an engine's life, and what may be called in each."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeAlias

from lowtide.engine.config import PRESETS, EngineConfig, load_model_config
from lowtide.engine.core import EngineCore, create_core
from lowtide.engine.core_process import CoreClient
from lowtide.engine.errors import ConfigError, EngineStateError, RequestError
from lowtide.engine.kv.kv_cache import KVCacheUsage
from lowtide.engine.model_executor.weights import CheckpointWeights, load_tokenizer
from lowtide.engine.pages import check_device
from lowtide.engine.ranks import rank_devices
from lowtide.engine.request import RequestOutput, SamplingParams
from lowtide.engine.teardown import Teardown, rolled_back, undone_by
from lowtide.engine.weight_transfer import BUCKET_BYTES, packed, release_cached
from lowtide.engine.worker import SLEEPING_TAGS, Worker, make_plan
from lowtide.probes.stages import stage

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer


class EngineState(enum.Enum):
    """Where an engine is in its life: new -> running <-> asleep -> closed."""

    NEW = "new"
    RUNNING = "running"
    ASLEEP = "asleep"
    CLOSED = "closed"


_ALLOWED = {
    EngineState.NEW: ("create", "shutdown"),
    EngineState.RUNNING: (
        "generate",
        "add_request",
        "step",
        "abort",
        "reset_prefix_cache",
        "reload_weights",
        "update_weights",
        "sleep",
        "shutdown",
    ),
    EngineState.ASLEEP: ("wake", "shutdown"),
    EngineState.CLOSED: ("shutdown",),
}


def allowed_calls(state: EngineState, awake_tags: Collection[str]) -> Sequence[str]:
    """Return what may be called in a state, as an error says it; the tags are those awake of one asleep in part."""
    if state is not EngineState.ASLEEP or not awake_tags:
        return _ALLOWED[state]
    asleep = next(tag for tag in SLEEPING_TAGS if tag not in awake_tags)
    reload = ("reload_weights", "update_weights") if "weights" in awake_tags else ()
    return (f"wake({asleep!r})", *reload, "shutdown")


Prompt: TypeAlias = "str | Sequence[int]"


class LLMEngine:
    """A small LLM engine whose memory can be put to sleep, woken and given back.

    Not thread-safe: one thread drives an engine.  A call that is not legal in the engine's state raises
    `EngineStateError`, which names what is.  Every call that fails leaves the engine in the state it was in, with the
    memory it had, and can be made again; `shutdown` is legal at any time.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._state = EngineState.NEW
        self._core: EngineCore | CoreClient | None = None
        self._tokenizer: Tokenizer | None = None
        self._awake_tags: set[str] = set()
        self._pending_outputs: list[RequestOutput] = []
        self._num_requests = 0
        self._torn_down = False
        self._has_sent = False

    def __enter__(self) -> LLMEngine:
        """Create the engine, if it is new."""
        if self._state is EngineState.NEW:
            self.create()
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Shut the engine down."""
        self.shutdown()

    @property
    def state(self) -> EngineState:
        """Where the engine is in its life."""
        return self._state

    @property
    def awake_tags(self) -> frozenset[str]:
        """What is not asleep, of `weights` and `kv_cache`; nothing of an engine that is new or closed."""
        return frozenset(self._awake_tags)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The checkpoint's; None where it has none, and in an engine that is new or closed."""
        return self._tokenizer

    def create(self) -> None:
        """Take memory, load the weights, be ready for requests.

        Raises:
            ConfigError: a setting that cannot work here; nothing was taken.
            CheckpointError: the checkpoint cannot be used; memory is back where it was.
            OutOfMemoryError: no room; memory is back where it was.
        """
        self._require("create", EngineState.NEW)
        with stage("create"), rolled_back():
            plan = make_plan(self.config)
            tokenizer = None if self.config.model in PRESETS else load_tokenizer(self.config.model)
            # Last, so that nothing can fail once there is memory to give back.
            self._core = CoreClient(self.config) if self.config.engine_process else create_core(self.config, plan)
            self._tokenizer = tokenizer
            self._awake_tags = set(SLEEPING_TAGS)
            self._state = EngineState.RUNNING

    def check(self) -> None:
        """Find out whether `create` can work, without taking memory; errors as its first two."""
        make_plan(self.config)
        if self.config.model not in PRESETS:
            load_tokenizer(self.config.model)
        for device in rank_devices(self.config):
            check_device(device)

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Run prompts, token ids or text, to their end; one output per prompt, in order.

        The `params` are for all, or one per prompt; greedy with 16 tokens by default.

        Raises:
            EngineStateError: the engine is not running, or has requests of the step API that would be stepped too.
            RequestError: a prompt can never be served; none was started.
            KVTransferError: as `step`; the prompts were given up.
        """
        core = self._require("generate", EngineState.RUNNING)
        if core.has_unfinished_requests():
            raise EngineStateError(
                "generate", "running", ("step", "abort"), "requests of add_request are unfinished; finish them first"
            )
        each = [params or SamplingParams()] * len(prompts) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts came with {len(each)} sampling parameters; give one per prompt")
        with self._calling("infer"):
            ids: list[str] = []
            finished: dict[str, RequestOutput] = {}
            try:
                for prompt, one in zip(prompts, each, strict=True):
                    ids.append(self._add(core, None, prompt, one))
                while core.has_unfinished_requests():
                    for output in core.step():
                        if output.finished:
                            finished[output.request_id] = output
            except BaseException:
                core.abort(ids)
                raise
            return [finished[request_id] for request_id in ids]

    def add_request(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> str:
        """Queue a request for `step`, and return its id; a `RequestError` where it can never be served."""
        core = self._require("add_request", EngineState.RUNNING)
        return self._add(core, request_id, prompt, params or SamplingParams())

    def has_unfinished_requests(self) -> bool:
        """Return whether `step` has something to do, or something to report."""
        return bool(self._pending_outputs) or (self._core is not None and self._core.has_unfinished_requests())

    def num_requests(self) -> tuple[int, int]:
        """Return how many requests run, and how many wait: they have not begun, or gave way to others."""
        return (0, 0) if self._core is None else self._core.num_requests()

    def check_health(self) -> None:
        """Find out whether the core runs; `EngineDeadError`: it has ended, and only `shutdown` is of use."""
        if isinstance(self._core, CoreClient) and not self._torn_down:
            self._core.check_health()

    def step(self) -> list[RequestOutput]:
        """Compute one step; one output for each request that has a new token.

        A `KVTransferError` where copies of KV blocks to or from the host failed since the last step, or do not end: no
        request is lost, and the next step goes on.
        """
        core = self._require("step", EngineState.RUNNING)
        with self._calling("infer"):
            self._pending_outputs += core.step()
        return self._take_pending_outputs()

    def abort(self, request_ids: str | Iterable[str]) -> list[RequestOutput]:
        """End requests now; the last output of each that was still unfinished."""
        core = self._require("abort", EngineState.RUNNING)
        return core.abort([request_ids] if isinstance(request_ids, str) else list(request_ids))

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes, here and on the host; False, with nothing forgotten, while requests hold blocks.

        Waits for copies between the two; a `KVTransferError` where one failed, or does not end.
        """
        return self._require("reset_prefix_cache", EngineState.RUNNING).reset_prefix_cache()

    def sleep(self, level: int = 1, mode: Literal["wait", "abort"] = "wait") -> list[RequestOutput]:
        """Give the device memory of weights and KV cache back until `wake`.

        Args:
            level: 1 keeps the weights in host memory; 2 drops them, and wake loads them from where they came.
            mode: `wait` runs unfinished requests to their end first, `abort` ends them now.

        Returns:
            The last output of each request that this finished or aborted, so that none is lost.

        Raises:
            ConfigError: another level or mode.
            OutOfMemoryError: no host memory for the weights; the engine runs on, requests that had finished come out
                of the next `step`.
            KVTransferError: a copy of KV blocks failed or does not end; likewise.
        """
        core = self._require("sleep", EngineState.RUNNING)
        if level not in (1, 2):
            raise ConfigError(f"sleep level {level!r} does not exist: use 1 (weights stay in host memory) or 2")
        if mode not in ("wait", "abort"):
            raise ConfigError(f"sleep mode {mode!r} does not exist: use 'wait' or 'abort'")
        with self._calling("sleep"):
            while mode == "wait" and core.has_unfinished_requests():
                self._pending_outputs += [output for output in core.step() if output.finished]
            core.prepare_sleep(level)
            self._pending_outputs += core.abort()
            core.forget_prefixes()
            try:
                core.worker.sleep(level)
            finally:
                # Not so after a failure that was undone; but where undoing it failed too, the engine must not run on
                # without its memory: asleep, it can still be woken or shut down.
                if not core.worker.awake:
                    self._state = EngineState.ASLEEP
                    self._awake_tags.clear()
        return self._take_pending_outputs()

    def wake(self, tags: Iterable[str] | None = None) -> None:
        """Take the memory again and fill it; the engine runs when all of it is awake.

        Args:
            tags: `weights` or `kv_cache` alone, for a trainer that wants to write new weights before there is a KV
                cache; None is all that is asleep.

        Raises:
            EngineStateError: the engine is not asleep, or a tag is awake already.
            ConfigError: a tag that does not exist.
            OutOfMemoryError: no room; what was asleep still is.
            CheckpointError: the weights of a level 2 sleep cannot be read again; what was asleep still is.
        """
        core = self._require("wake", EngineState.ASLEEP)
        asleep = [tag for tag in ("weights", "kv_cache") if tag not in self._awake_tags]
        wanted = asleep if tags is None else list(dict.fromkeys([tags] if isinstance(tags, str) else tags))
        for tag in wanted:
            if tag not in SLEEPING_TAGS:
                raise ConfigError(f"there is no tag {tag!r} to wake: use 'weights', 'kv_cache' or None for both")
            if tag not in asleep:
                raise EngineStateError("wake", "asleep", [f"wake({t!r})" for t in asleep], f"{tag!r} is awake already")
        if not wanted:
            raise ConfigError("wake was given no tag: use 'weights', 'kv_cache' or None for both")
        with self._calling("wake"):
            core.worker.wake(wanted)
            self._awake_tags.update(wanted)
            if self._awake_tags == set(SLEEPING_TAGS):
                self._state = EngineState.RUNNING

    def reload_weights(self, folder: str = "") -> None:
        """Fill the weights in place from where they came, as a trainer's new checkpoint has to be.

        Cached prefixes are forgotten, on the device and on the host: other weights computed them.

        Args:
            folder: of another checkpoint of the same model, from which they are filled instead, as by `update_weights`.

        Raises:
            EngineStateError: the weights are not there, or requests are unfinished, which would go on with others.
            CheckpointError: the weights cannot be read; those there are stay.
            OutOfMemoryError: no host memory to keep the present weights in until the new ones are there; likewise.
            KVTransferError: a copy of KV blocks failed or does not end; likewise.
        """
        core = self._require_weights("reload_weights")
        if folder:
            model = load_model_config(self.config)
            self.update_weights(CheckpointWeights(folder, model).parameters(model.torch_dtype, self.config.device))
            return
        with self._calling("reload_weights"):
            core.reload_weights()

    def update_weights(
        self,
        tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
        *,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Copy a trainer's weights into those of the engine, in place: all of them, or some.

        They go into the engine's processes in packed buckets: through shared memory on a CPU, by CUDA IPC on a card.
        A sleep of level 1 keeps them, one of level 2 does not. Cached prefixes are forgotten, on the device and on the
        host: other weights computed them.

        Args:
            tensors: whole parameters by their Hugging Face names, on any device, in any dtype; an iterator is asked for
                the next one when the one before is packed.
            bucket_bytes: bytes of a bucket; a larger tensor has a bucket of its own.

        Raises:
            EngineStateError: the weights are not there, or requests are unfinished, which would go on with others.
            WeightUpdateError: there is no tensor, or one does not fit the model; the weights are those of before.
            OutOfMemoryError: no room for a bucket, or on the host to keep the present weights in; likewise.
            KVTransferError: a copy of KV blocks failed or does not end; likewise.
        """
        core = self._require_weights("update_weights")
        with self._calling("update_weights"):
            self._has_sent = True
            core.begin_update()
            with (
                undone_by(partial(_undo_update, core)),
                closing(packed(tensors, self.config.device, bucket_bytes)) as buckets,
            ):
                for bucket in buckets:
                    core.worker.load_bucket(bucket)
            core.end_update(True)

    def weight_checksums(self) -> dict[str, int]:
        """Checksum of every parameter in the engine's dtype, all ranks together; see `weight_transfer.checksum`."""
        return self._require_weights("weight_checksums", idle=False).worker.weight_checksums()

    def shutdown(self) -> None:
        """Give everything back; legal in every state, and again.

        Raises:
            ExceptionGroup: the errors of the steps that failed; the others were done all the same, and the engine is
                closed.  Called again, it tries again what has failed.
        """
        self._state = EngineState.CLOSED
        if self._core is None or self._torn_down:
            return
        with stage("shutdown"):
            try:
                self._core.shutdown()
            finally:
                self._tokenizer = None
                self._pending_outputs = []
                self._awake_tags.clear()
            if self._has_sent and self.config.works_elsewhere:
                # Buckets are all that this process has had on the card; a worker in it empties the cache by itself.
                release_cached(self.config.device)
            # Only now, and only then: after an interrupt on the way here, the next call does it all again.
            self._torn_down = True

    def preserved_tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor on the device whose contents must survive a sleep, by name; none of other processes."""
        worker = self._require("preserved_tensors", EngineState.RUNNING, EngineState.ASLEEP).worker
        return worker.preserved_tensors() if isinstance(worker, Worker) else {}

    def graph_addresses(self) -> dict[str, tuple[int, int]]:
        """Address and bytes of what captured CUDA graphs read and write, by name, as it was at capture."""
        worker = self._require("graph_addresses", EngineState.RUNNING, EngineState.ASLEEP).worker
        return worker.graph_addresses() if isinstance(worker, Worker) else {}

    def kv_cache_usage(self) -> KVCacheUsage:
        """Return who has the KV blocks."""
        core = self._require("kv_cache_usage", EngineState.RUNNING, EngineState.ASLEEP)
        return core.kv_cache_usage()

    def memory_mapped(self) -> dict[str, int]:
        """Return the bytes with pages behind them, by arena tag; empty before `create`."""
        return {} if self._core is None else self._core.worker.memory_mapped()

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids; `ConfigError`: the model has no tokenizer."""
        self._require("decode", EngineState.RUNNING, EngineState.ASLEEP)
        return str(self._require_tokenizer().decode(list(token_ids)))

    @contextmanager
    def _calling(self, name: str) -> Iterator[None]:
        """Run a call that computes or moves memory: a stage, whose failure is rolled back."""
        with stage(name), rolled_back():
            yield
            if isinstance(self._core, CoreClient):
                self._core.raise_late_interrupt()

    def _take_pending_outputs(self) -> list[RequestOutput]:
        pending, self._pending_outputs = self._pending_outputs, []
        return pending

    def _add(
        self, core: EngineCore | CoreClient, request_id: str | None, prompt: Prompt, params: SamplingParams
    ) -> str:
        if request_id is None:
            request_id = f"request-{self._num_requests}"
            self._num_requests += 1
        token_ids = self._require_tokenizer().encode(prompt).ids if isinstance(prompt, str) else prompt
        core.add_request(request_id, token_ids, params)
        return request_id

    def _require_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise ConfigError(f"model {self.config.model!r} has no tokenizer.json: give prompts as token ids")
        return self._tokenizer

    def _require_weights(self, call: str, *, idle: bool = True) -> EngineCore | CoreClient:
        """Return the core of an engine whose weights are there, and, if `idle`, of which no request reads them."""
        states = (EngineState.RUNNING, EngineState.ASLEEP)
        core = self._require(call, *(states if "weights" in self._awake_tags else states[:1]))
        if idle and core.has_unfinished_requests():
            raise EngineStateError(call, "running", ("step", "abort"), "requests are unfinished; finish them first")
        return core

    def _require(self, call: str, *states: EngineState) -> EngineCore | CoreClient:
        if self._state not in states:
            raise EngineStateError(call, self._state.value, allowed_calls(self._state, self._awake_tags))
        return self._core  # type: ignore[return-value]


def _undo_update(core: EngineCore | CoreClient, undo: Teardown) -> None:
    undo.run("putting the former weights back", core.worker.undo_reload)
    undo.run("letting go of their copy", partial(core.end_update, False))
