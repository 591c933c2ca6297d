"""A fingerprint of a parameter's bits to which the parts of several ranks add up."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch

from lowtide.engine.model_executor.tensor_parallel import Shard

_AT_ONCE = 1 << 20
"""Elements that are taken at a time: each takes some ten bytes meanwhile."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def checksum(tensor: torch.Tensor, shard: Shard | None = None) -> int:
    """Return the sum, in 64 bits, of each element's bits times an odd number that its place in the parameter gives.

    One element that changes changes it, whichever; and parts of a parameter that is cut add up to that of the whole.

    Args:
        tensor: the part, or the whole.
        shard: which part of the parameter it is; None for the whole.
    """
    part = shard or Shard(tuple(tensor.shape))
    bits = tensor.detach().contiguous().view(_BITS[tensor.dtype.itemsize])
    rows = bits.reshape(bits.shape[0] if bits.ndim else 1, -1)
    width = math.prod(part.full_shape[1:])
    first_row, first_column = (part.start if part.dim == dim else 0 for dim in (0, 1))
    columns = torch.arange(first_column, first_column + rows.shape[1], device=tensor.device)
    total = 0
    step = max(1, _AT_ONCE // max(1, rows.shape[1]))
    for start in range(0, rows.shape[0], step):
        some = rows[start : start + step].to(torch.int64)
        places = torch.arange(first_row + start, first_row + start + some.shape[0], device=tensor.device)
        # Not from the card at once: torch would keep page-locked memory for the number.
        total += int((some * _factors(places[:, None] * width + columns)).sum().cpu())
    return _signed(total)


def added(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the checksums of whole parameters, of the parts that ranks have."""
    found: dict[str, int] = {}
    for part in parts:
        for name, value in part.items():
            found[name] = _signed(found.get(name, 0) + value)
    return found


def _factors(places: torch.Tensor) -> torch.Tensor:
    """Spread the places over all 64 bits, as Fibonacci hashing does (Knuth, TAOCP 3, 6.4)."""
    mixed = places * -7046029254386353131
    return (mixed ^ (mixed >> 29)) | 1


def _signed(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
