"""Chooses the next token of each request from its logits."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from lowtide.engine.request import ScheduledRequest


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
