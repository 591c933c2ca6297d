"""Which tensors have bytes to read, and how these are laid out in order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lowtide.probes.originals import loaded

if TYPE_CHECKING:
    import torch


class UnreadableTensorError(ValueError):
    """A tensor whose bytes cannot be read; the message says why, and what to give instead."""


def check_readable(tensor: torch.Tensor) -> None:
    """Refuses a tensor whose elements are not in plain memory.

    Raises:
        UnreadableTensorError: it has no memory, or none that holds its elements as an array.
    """
    import torch

    fake = getattr(loaded("torch._subclasses.fake_tensor"), "FakeTensor", None)
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
