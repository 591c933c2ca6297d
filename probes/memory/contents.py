"""Fingerprints of the bytes of tensors that must survive a sleep: taken before and after, they name what changed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec

from lowtide.probes.kernels import fingerprint_version, working_memory
from lowtide.probes.kernels.definition import UnreadableTensorError, check_readable, is_lazy_copy
from lowtide.probes.memory.tensors import plain_tensors

if TYPE_CHECKING:
    import torch


class ContentsError(ValueError):
    """A tensor whose contents cannot be read; the message names it and says what to give instead."""


class TensorContents(msgspec.Struct, frozen=True):
    """One tensor at the moment it was read.

    Attributes:
        name: as the caller calls it.
        fingerprint: 128 bits over the bytes of its elements in logical order (`fingerprint`).
        shape: its sizes.
        dtype: `bfloat16`.
        device: `cpu`, `cuda:0`.
        bytes: of its elements.
        address: of its first element; 0 without elements, or where it is a copy on write that was not made yet.
    """

    name: str
    fingerprint: int
    shape: tuple[int, ...]
    dtype: str
    device: str
    bytes: int
    address: int


def fingerprint(tensor: torch.Tensor) -> int:
    """128 bits that distinguish the bytes of a tensor's elements, in logical order, from any others.

    The same bytes on the same kind of device have the same fingerprint whatever their dtype, shape and strides. On a
    card (`kernels.definition` says why) a change within one aligned 32-bit word is always seen, and any other is missed
    with a chance of about 2^-64, whether Triton or torch computed it. On a CPU it is XXH3's, another function: what
    computes the card's at the speed of memory there is slow on a CPU (`kernels.host`). No defence against contents that
    somebody built to collide.

    Raises:
        ContentsError: the tensor has no plain memory (meta, fake, sparse, quantized, wrapper subclasses).
    """
    return take_fingerprints({"the tensor": tensor})[0].fingerprint


def take_fingerprints(tensors: Mapping[str, torch.Tensor]) -> tuple[TensorContents, ...]:
    """Read the contents of some tensors, by name, as they are once the work that the current stream has queued is done.

    Waits for each device once, however many tensors it holds. A tensor whose elements lie in memory in their logical
    order is read where it is; any other (transposed, expanded, sliced along an inner dimension) is copied whole on its
    device, one after the other. Nothing that this allocates stays: on a card it comes from a pool that goes back to the
    driver. The first call on a card compiles and loads kernels (seconds, and the driver's bytes for their code): make
    one before the baseline.

    Raises:
        ContentsError: a tensor has no plain memory (meta, fake, sparse, quantized, wrapper subclasses).
    """
    if not tensors:
        return ()
    import torch

    with plain_tensors(torch):
        by_device: dict[torch.device, list[str]] = defaultdict(list)
        for name, tensor in tensors.items():
            by_device[tensor.device].append(name)
        fingerprints: dict[str, int] = {}
        for device, names in by_device.items():
            with working_memory(device):
                fingerprints.update(_read(device, {name: tensors[name] for name in names}))
        return tuple(
            TensorContents(
                name,
                fingerprints[name],
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                device=str(tensor.device),
                bytes=tensor.nbytes,
                address=0 if is_lazy_copy(tensor) else tensor.data_ptr(),
            )
            for name, tensor in sorted(tensors.items())
        )


def _read(device: torch.device, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return the fingerprints of tensors on one device."""
    for name, tensor in tensors.items():
        try:
            check_readable(tensor)
        except UnreadableTensorError as error:
            raise ContentsError(f"the contents of {name} cannot be read: {error}") from error
    return dict(zip(tensors, fingerprint_version(device)(list(tensors.values()), device), strict=True))


def changed(before: Iterable[TensorContents], after: Iterable[TensorContents]) -> list[str]:
    """Return the names of the tensors of `before` that are not the same in `after`, wherever they lie on their device.

    Tensors that only `after` has are no change.
    """
    later = {tensor.name: _compared(tensor) for tensor in after}
    return [old.name for old in before if later.get(old.name) != _compared(old)]


def _compared(tensor: TensorContents) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.fingerprint
