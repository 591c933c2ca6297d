"""Runs one step on the device: lays out the scheduled tokens, computes them in micro-batches, samples."""

from __future__ import annotations

import hashlib
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lowtide.engine.config import Allocator, EngineConfig
from lowtide.engine.device_allocator.arena import Workspace, WorkspaceViews
from lowtide.engine.errors import ConfigError, EngineError
from lowtide.engine.kv.kv_cache import KVCache
from lowtide.engine.model_executor.attention import PagedDecodes, StepMetadata, build_attention_metadata
from lowtide.engine.model_executor.block_table import BlockTable
from lowtide.engine.model_executor.cuda_graphs import DecodeGraphs
from lowtide.engine.model_executor.fused_ops import has_kernels
from lowtide.engine.model_executor.model import LlamaForCausalLM, StaticForwardContext
from lowtide.engine.model_executor.parallel_layers import ProcessGroup
from lowtide.engine.request import UNREAD, ScheduledRequest, SchedulerOutput
from lowtide.engine.teardown import Teardown


class SampledTokens(Mapping[str, int]):
    """The tokens, int64 [N], that a step samples, by request id: on the device until somebody asks for one.

    Asking waits for that step, and for none that was launched after it.  The stream `copies` brings them to the host.
    """

    def __init__(self, request_ids: Sequence[str], tokens: torch.Tensor, copies: torch.cuda.Stream | None) -> None:
        self.tokens = tokens
        self._request_ids = request_ids
        self._copies = copies
        self._computed = None if copies is None else torch.cuda.current_stream(tokens.device).record_event()

    def __getitem__(self, request_id: str) -> int:
        return self._by_request[request_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_request)

    def __len__(self) -> int:
        return len(self._request_ids)

    @cached_property
    def _by_request(self) -> dict[str, int]:
        if self._copies is None or self._computed is None:
            values = self.tokens.tolist()
        else:
            with torch.cuda.stream(self._copies):
                self._copies.wait_event(self._computed)
                values = self.tokens.tolist()
        return dict(zip(self._request_ids, values, strict=True))


class ModelRunner:
    """Owns the step's input buffers and the rows of the block table; borrows all else from the engine.

    Between steps it remembers nothing but which request has which row, and puts that right at every step: rows of
    requests that are not in the step are given up, and written anew when the request is back.  The tokens of the last
    step are those that `UNREAD` stands for; they live as long as somebody wants them.

    There are as many micro-batches as workspaces. `allocate` gives the input buffers, which keep their addresses.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: LlamaForCausalLM,
        kv_cache: KVCache,
        block_table: BlockTable,
        workspaces: Sequence[Workspace],
        allocate: Allocator,
        group: ProcessGroup | None = None,
    ) -> None:
        self.model = model
        self._group = group
        # Models without scratch memory of their own leave it out.
        self._lends_workspace = supports_kw(model.forward, "workspace")
        self._kv_cache = kv_cache
        self.forward_context = StaticForwardContext(model, kv_cache)
        self.block_table = block_table
        self._seed = config.seed
        self._workspaces = tuple(map(WorkspaceViews, workspaces))
        self.decode_graphs: DecodeGraphs | None = None
        self._input_ids = allocate((config.max_num_batched_tokens,), torch.int64)
        self._positions = allocate((config.max_num_batched_tokens,), torch.int64)
        self._slot_mapping = allocate((config.max_num_batched_tokens,), torch.int64)
        self._rows = allocate((config.max_num_seqs,), torch.int64)
        self._last: weakref.ref[SampledTokens] | None = None
        # Tokens are read while the next step computes: not on its stream.
        self._runs_ahead = config.runs_ahead
        on_card = config.runs_ahead and self._input_ids.is_cuda
        self._copies = torch.cuda.Stream(self._input_ids.device) if on_card else None  # type: ignore[no-untyped-call]
        self._row_of: dict[tuple[int, int], int] = {}
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))

    def capture_graphs(self, config: EngineConfig, allocate: Allocator) -> None:
        """Capture the decode step as CUDA graphs, which `execute_model` uses from then on where it can."""
        graphs = DecodeGraphs(
            partial(self.model.forward, **self._lent(self._workspaces[0])),
            self.block_table,
            max_batch_size=min(config.max_num_seqs, config.max_num_batched_tokens),
            hidden_size=self.model.config.hidden_size,
            dtype=self.model.config.torch_dtype,
            allocate=allocate,
        )
        layers = self._kv_cache.layers
        caches = {f"kv_cache.{index}.keys": keys for index, (keys, _) in enumerate(layers)}
        caches |= {f"kv_cache.{index}.values": values for index, (_, values) in enumerate(layers)}
        graphs.capture(
            {**self.preserved_tensors(), "block_table.device_table": self.block_table.device_table, **caches}
        )
        self.decode_graphs = graphs

    def preserved_tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor whose contents must survive a sleep at level 1 and at level 2, by name.

        Weights have their checkpoint's names. What is not here is written before it is read: KV cache, workspaces,
        the block table's rows, the step's inputs.
        """
        return {
            **dict(self.model.named_parameters()),
            "rotary.table": self.model.rotary_table,
            **{f"block_table.{name}": tensor for name, tensor in self.block_table.pointers.items()},
        }

    def shutdown(self) -> None:
        """Lets go of all that is on the device, whatever the graphs say; the runner computes nothing any more."""
        teardown = Teardown("shutting the model runner down")
        # First: a graph that could still run would use what goes after it.
        if self.decode_graphs is not None:
            teardown.run("the CUDA graphs", self.decode_graphs.close)
            self.decode_graphs = None
        self._workspaces = ()
        self._group = None
        self.forward_context.clear()
        # By name, so that it can be called again after an interrupt.
        for name in ("model", "_kv_cache", "block_table", "_input_ids", "_positions", "_slot_mapping", "_rows"):
            self.__dict__.pop(name, None)
        teardown.finish()

    # Not inference mode: tensors made in it can never be written outside it, and a workspace that grows during a step
    # makes tensors that live on.
    @torch.no_grad()
    def execute_model(self, output: SchedulerOutput) -> Mapping[str, int]:
        """Compute a step; the next token by request id, for each request whose last token was computed.

        The device is waited for once: at the end, or where the engine runs ahead, when tokens are looked at.
        """
        # Triton's kernels go to the current device, which is the user's choice and need not be the engine's.
        with torch.cuda.device_of(self._input_ids):  # type: ignore[no-untyped-call]
            return self._execute(output)

    def _execute(self, output: SchedulerOutput) -> Mapping[str, int]:
        self._assign_rows(output.scheduled)
        sampled: list[ScheduledRequest] = []
        hidden: list[torch.Tensor] = []
        first_token = first_seq = 0
        for micro_batch, workspace in zip(
            split_micro_batches(output.scheduled, len(self._workspaces)), self._workspaces, strict=False
        ):
            states = self._compute(micro_batch, first_token, first_seq, workspace)
            ends = np.cumsum([item.num_tokens for item in micro_batch]) - 1
            last = [(int(end), item) for end, item in zip(ends, micro_batch, strict=True) if item.samples]
            if last:
                # Of decodes all rows are: the card is not waited for to say which.
                every = len(last) == states.shape[0]
                hidden.append(states if every else states[torch.tensor([end for end, _ in last], device=states.device)])
                sampled += [item for _, item in last]
            first_token += states.shape[0]
            first_seq += len(micro_batch)
        if not sampled:
            return {}
        logits = self.model.compute_logits(hidden[0] if len(hidden) == 1 else torch.cat(hidden))
        tokens = sample(logits, sampled, self._seed)
        if self._group is not None:
            self._group.broadcast(tokens)
        launched = SampledTokens([item.request_id for item in sampled], tokens, self._copies)
        self._last = weakref.ref(launched)
        return launched if self._runs_ahead else dict(launched)

    def _compute(
        self, micro_batch: Sequence[ScheduledRequest], first_token: int, first_seq: int, workspace: WorkspaceViews
    ) -> torch.Tensor:
        """Hidden states of a micro-batch; its inputs go into the buffers from `first_token` and `first_seq` on."""
        counts = [item.num_tokens for item in micro_batch]
        starts = [item.num_computed_tokens for item in micro_batch]
        stops = [start + count for start, count in zip(starts, counts, strict=True)]
        rows = np.array([self._row_of[_life(item)] for item in micro_batch], dtype=np.int64)
        token_ids = [token for item in micro_batch for token in item.new_token_ids]
        # A sequence's tokens lie at their number in the micro-batch, less that of its first one, after its start.
        firsts = np.cumsum(counts) - counts
        positions = np.arange(len(token_ids)) + np.repeat(np.array(starts, dtype=np.int64) - firsts, counts)
        slots = self.block_table.slots(np.repeat(rows, counts), positions)
        decodes = max(counts) == 1
        sampled = self._unread(first_seq, len(rows)) if token_ids[0] == UNREAD else None
        if self.decode_graphs is not None and decodes:
            return self.decode_graphs.run(token_ids, positions, slots, rows, stops, sampled)
        input_ids = _upload(self._input_ids, first_token, np.array(token_ids, dtype=np.int64))
        if sampled is not None:
            input_ids.copy_(sampled)
        row_indices = _upload(self._rows, first_seq, rows)
        slot_mapping = _upload(self._slot_mapping, first_token, slots)
        metadata: StepMetadata
        if decodes and has_kernels(input_ids):
            seq_lens = torch.tensor(stops, device=input_ids.device)
            metadata = PagedDecodes(self.block_table, row_indices, seq_lens, slot_mapping)
        else:
            metadata = build_attention_metadata(
                query_lens=counts,
                seq_lens=stops,
                block_tables=self.block_table.gather(row_indices),
                slot_mapping=slot_mapping,
                block_size=self._kv_cache.block_size,
                dtype=self.model.config.torch_dtype,
            )
        positions_on_device = _upload(self._positions, first_token, positions)
        return self.model.forward(input_ids, positions_on_device, metadata, **self._lent(workspace))

    def _unread(self, first: int, count: int) -> torch.Tensor:
        """Tokens of the last step, from the `first` on: a step with the same requests has them in the same order."""
        last = None if self._last is None else self._last()
        if last is None:
            raise EngineError("a step was planned on tokens of one before it, which are gone: plan it anew")
        return last.tokens[first : first + count]

    def _lent(self, workspace: WorkspaceViews) -> dict[str, Any]:
        return {"workspace": workspace} if self._lends_workspace else {}

    def _assign_rows(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """Give each scheduled request a row of the block table that lists its blocks."""
        present = {_life(item) for item in scheduled}
        for life in [life for life in self._row_of if life not in present]:
            row = self._row_of.pop(life)
            self.block_table.clear(row)
            self._free_rows.append(row)
        for item in scheduled:
            life = _life(item)
            if life not in self._row_of:
                self._row_of[life] = self._free_rows.pop()
            row = self._row_of[life]
            self.block_table.append(row, item.block_ids[self.block_table.num_blocks(row) :])
        self.block_table.commit()


def _life(item: ScheduledRequest) -> tuple[int, int]:
    """Return what one row of the block table is for.

    Not the request's id, which a later request may have again, and not the request alone: one that was preempted has
    other blocks when it is back.
    """
    return item.arrival_index, item.num_preemptions


def split_micro_batches(scheduled: Sequence[ScheduledRequest], count: int) -> list[list[ScheduledRequest]]:
    """Split a step into at most `count` parts with about as many tokens, each in the order that the attention wants."""
    total = sum(item.num_tokens for item in scheduled)
    parts: list[list[ScheduledRequest]] = [[] for _ in range(count)]
    before = 0
    for item in scheduled:
        # By the middle of its tokens, so that one long prompt does not drag all that follows it into the last part.
        parts[(2 * before + item.num_tokens) * count // (2 * total)].append(item)
        before += item.num_tokens

    def attention_order(item: ScheduledRequest) -> tuple[bool, int]:
        return item.num_tokens > 1, -(item.num_computed_tokens + item.num_tokens)

    return [sorted(part, key=attention_order) for part in parts if part]


def _upload(buffer: torch.Tensor, start: int, values: npt.NDArray[np.int64]) -> torch.Tensor:
    """Copy host values into a buffer from `start` on; the part of the buffer that now holds them."""
    part = buffer[start : start + len(values)]
    part.copy_(torch.from_numpy(values), non_blocking=True)
    return part


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def supports_kw(function: Callable[..., Any], name: str) -> bool:
    """Return whether a callable takes a keyword argument of that name; `ConfigError`: it does not say what it takes.

    The answer is kept nowhere: a cache's key that is a bound method keeps its object, which may be the model with all
    its weights (vllm#38503).
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{function!r} does not say which arguments it takes: {error}") from error
    return any(
        each.kind is inspect.Parameter.VAR_KEYWORD or (each.name == name and each.kind in _BY_NAME)
        for each in parameters
    )


@torch.no_grad()
def sample(logits: torch.Tensor, requests: Sequence[ScheduledRequest], engine_seed: int) -> torch.Tensor:
    """Next tokens, int64 [N] on the logits' device, of N requests with logits [N, vocab_size].

    Greedy for temperature 0, else a seeded draw after temperature, top-k and top-p (in this order, as in vLLM).

    A draw takes one number from the request's seed and the position of the token, and nothing else: it does not depend
    on the batch or on earlier draws, so a step that failed can be run again, and no state outlives a request.  Of
    requests that bring no seed, the engine's and the order of arrival make it.
    """
    tokens = logits.argmax(dim=-1)
    drawn = [row for row, request in enumerate(requests) if request.params.temperature > 0]
    if drawn:
        rows = torch.tensor(drawn).to(logits.device, non_blocking=True)
        tokens[rows] = _draw(logits[rows], [requests[row] for row in drawn], engine_seed)
    return tokens


def _draw(logits: torch.Tensor, requests: Sequence[ScheduledRequest], engine_seed: int) -> torch.Tensor:
    """Inverts the cumulative distribution over tokens in falling order: what top-k and top-p keep is a prefix."""
    device, vocab_size = logits.device, logits.shape[-1]
    settings = [
        (r.params.temperature, r.params.top_p, uniform_draw(r, engine_seed), r.params.top_k or vocab_size)
        for r in requests
    ]
    on_host = torch.tensor(settings, dtype=torch.float64)
    temperature, top_p, uniform, top_k = on_host.to(device, non_blocking=True).T.unsqueeze(-1)
    ordered, token_ids = logits.double().sort(dim=-1, descending=True, stable=True)
    # The largest is made 0 before it is divided, or a small temperature would overflow.
    scores = (ordered - ordered[:, :1]) / temperature
    scores = scores.masked_fill(torch.arange(vocab_size, device=device) >= top_k, float("-inf"))
    probabilities = scores.softmax(dim=-1)
    cumulative = probabilities.cumsum(dim=-1)
    kept = cumulative - probabilities < top_p
    mass = (probabilities * kept).sum(dim=-1, keepdim=True)
    rank = (cumulative <= uniform * mass).sum(dim=-1, keepdim=True)
    # Rounding in the sum must not lead past the last token that may be drawn.
    last = (kept & (probabilities > 0)).sum(dim=-1, keepdim=True) - 1
    return token_ids.gather(1, torch.minimum(rank, last)).squeeze(1)


def uniform_draw(request: ScheduledRequest, engine_seed: int) -> float:
    """Return the number in [0, 1) that chooses the request's next token."""
    seed = request.params.seed
    origin = f"engine:{engine_seed}:{request.arrival_index}" if seed is None else f"request:{seed}"
    digest = hashlib.blake2b(f"{origin}:{request.num_output_tokens}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)
