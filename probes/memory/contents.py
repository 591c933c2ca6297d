"""Fingerprints of the bytes of tensors that must survive a sleep: taken before and after, they name what changed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import msgspec

from lowtide.probes.kernels.access import fingerprint_version, working_memory
from lowtide.probes.kernels.definition import UnreadableTensorError, check_readable, is_lazy_copy
from lowtide.probes.memory.tensors import plain_tensors

if TYPE_CHECKING:
    import torch

Aspect = Literal["missing", "shape", "dtype", "device", "address", "bytes"]


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


class Contents(msgspec.Struct, frozen=True):
    """The contents of some tensors at one moment, sorted by name; holds none of them."""

    tensors: tuple[TensorContents, ...]

    @property
    def bytes(self) -> int:
        """Bytes that were read; memory under several of the tensors counts for each."""
        return sum(tensor.bytes for tensor in self.tensors)


class ContentChange(msgspec.Struct, frozen=True):
    """One way in which a tensor is not what it was.

    Attributes:
        name: of the tensor.
        what: `missing`: there is none of that name; `bytes`: shape and dtype are the same, the elements are not.
        before: shape, dtype, device, address or fingerprint, as text.
        after: the same afterwards; empty for a missing tensor.
    """

    name: str
    what: Aspect
    before: str
    after: str


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
    return take_fingerprints({"the tensor": tensor}).tensors[0].fingerprint


def take_fingerprints(tensors: Mapping[str, torch.Tensor]) -> Contents:
    """Read the contents of some tensors, as they are once the work that the current stream has queued is done.

    Waits for each device once, however many tensors it holds. A tensor whose elements lie in memory in their logical
    order is read where it is; any other (transposed, expanded, sliced along an inner dimension) is copied whole on its
    device, one after the other. Nothing that this allocates stays: on a card it comes from a pool that goes back to the
    driver. The first call on a card compiles and loads kernels (seconds, and the driver's bytes for their code): make
    one before the baseline.

    Raises:
        ContentsError: a tensor has no plain memory (meta, fake, sparse, quantized, wrapper subclasses).
    """
    if not tensors:
        return Contents(())
    import torch

    with plain_tensors(torch):
        by_device: dict[torch.device, list[str]] = defaultdict(list)
        for name, tensor in tensors.items():
            by_device[tensor.device].append(name)
        fingerprints: dict[str, int] = {}
        for device, names in by_device.items():
            with working_memory(device):
                fingerprints.update(_read(device, {name: tensors[name] for name in names}))
        return Contents(
            tuple(
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
        )


def _read(device: torch.device, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return the fingerprints of tensors on one device."""
    for name, tensor in tensors.items():
        try:
            check_readable(tensor)
        except UnreadableTensorError as error:
            raise ContentsError(f"the contents of {name} cannot be read: {error}") from error
    return dict(zip(tensors, fingerprint_version(device)(list(tensors.values()), device), strict=True))


def changed(before: Contents, after: Contents, *, addresses: bool = False) -> tuple[ContentChange, ...]:
    """In which ways tensors of `before` are not the same in `after`; sorted by name, empty if all survived.

    Args:
        before: the contents that must survive.
        after: those found later. Tensors that only these have are no change.
        addresses: whether a tensor must also lie where it did, as it must if a captured graph reads it.

    Elements are compared where shape, dtype and kind of device are the same.
    """
    found = []
    later = {tensor.name: tensor for tensor in after.tensors}
    for old in before.tensors:
        new = later.get(old.name)
        if new is None:
            found.append(ContentChange(old.name, "missing", f"{old.dtype} {list(old.shape)} on {old.device}", ""))
            continue
        aspects: list[tuple[Aspect, str, str]] = [
            ("shape", str(list(old.shape)), str(list(new.shape))),
            ("dtype", old.dtype, new.dtype),
            ("device", old.device, new.device),
        ]
        if addresses:
            aspects.append(("address", hex(old.address), hex(new.address)))
        if (old.shape, old.dtype, _kind(old)) == (new.shape, new.dtype, _kind(new)):
            aspects.append(("bytes", f"{old.fingerprint:032x}", f"{new.fingerprint:032x}"))
        found += [ContentChange(old.name, what, was, now) for what, was, now in aspects if was != now]
    return tuple(found)


def _kind(tensor: TensorContents) -> str:
    """`cuda`: on another kind of device the same bytes have another fingerprint."""
    return tensor.device.partition(":")[0]
