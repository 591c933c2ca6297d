"""How a tensor's bytes are got at, by which version of the kernels, and in which working memory."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from lowtide.probes.kernels.words import Hits, RangeTable

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


class UnreadableTensorError(ValueError):
    """A tensor whose bytes cannot be read; the message says why, and what to give instead."""


def check_readable(tensor: torch.Tensor) -> None:
    """Refuses a tensor whose elements are not in plain memory.

    Raises:
        UnreadableTensorError: it has no memory, or none that holds its elements as an array.
    """
    import torch

    fake = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensor", None)
    if tensor.device.type == "meta" or (fake is not None and issubclass(type(tensor), fake)):
        raise UnreadableTensorError("it is a stand-in without memory (meta or fake); give the real tensor")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise UnreadableTensorError(
            f"its layout ({tensor.layout}, {tensor.dtype}) is no plain array; give the tensors that hold its parts"
        )
    try:
        reachable = is_lazy_copy(tensor) or not tensor.numel() or tensor.data_ptr()
    except (RuntimeError, NotImplementedError) as error:
        raise UnreadableTensorError(f"torch gives no address for it ({error}); give the tensors inside it") from error
    if not reachable:
        raise UnreadableTensorError("it has no memory of its own; give the tensors inside it")


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """A readable tensor itself if its elements lie in memory in their logical order, else a copy in which they do."""
    if is_lazy_copy(tensor):
        return tensor.clone()  # asking for its address would make the copy that copy-on-write put off
    return tensor.resolve_conj().resolve_neg().contiguous()


def is_lazy_copy(tensor: torch.Tensor) -> bool:
    """Whether this is a copy on write that was not made yet."""
    import torch

    internals: Any = torch._C
    return bool(internals._is_cow_tensor(tensor))


def fingerprint_version(device: torch.device) -> Fingerprints:
    """What takes the fingerprints of tensors on `device`: Triton's or the plain version on a card, the host's own."""
    return _version(device).fingerprints


def search_version(device: torch.device) -> FindWords:
    """What looks for addresses in tensors on `device`: as `fingerprint_version`."""
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
    """What torch allocates on a card inside goes back to the driver at the end.

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
