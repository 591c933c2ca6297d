"""Reads every byte of memory at its bandwidth: Triton kernels and plain torch on a card, XXH3 and numpy on a host."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from lowtide.probes.kernels.definition import Hits, RangeTable

if TYPE_CHECKING:
    import torch


Fingerprints = Callable[[Sequence["torch.Tensor"], "torch.device"], list[int]]
FindWords = Callable[[Sequence["torch.Tensor"], "torch.device", RangeTable, int], list[Hits]]


class _Version(Protocol):
    """What each of the modules `compiled`, `plain` and `host` has."""

    @property
    def fingerprints(self) -> Fingerprints: ...

    @property
    def find_words(self) -> FindWords: ...


def fingerprint_version(device: torch.device) -> Fingerprints:
    """Return what takes the fingerprints of tensors on `device`: Triton's or the plain version, or the host's own."""
    return _version(device).fingerprints


def search_version(device: torch.device) -> FindWords:
    """Return what looks for addresses in tensors on `device`: as `fingerprint_version`."""
    return _version(device).find_words


def _version(device: torch.device) -> _Version:
    if device.type == "cpu":
        from lowtide.probes.kernels import host

        return host
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from lowtide.probes.kernels import compiled

        return compiled
    from lowtide.probes.kernels import plain

    return plain


@contextlib.contextmanager
def working_memory(device: torch.device) -> Iterator[None]:
    """Give what torch allocates on a card inside back to the driver at the end.

    The default pool would keep the segment that a result of a few bytes made it reserve. Other allocators than torch's
    own have no pools: what they keep is theirs to give back.
    """
    import torch

    if device.type != "cuda" or torch.cuda.get_allocator_backend() != "native":
        yield
        return
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool, device):
        yield
