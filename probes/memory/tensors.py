"""The live tensors' storages by device, each byte counted once, read without leaving a trace on them."""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

import msgspec

from lowtide.probes.memory.ranges import Range, merge, total
from lowtide.probes.objects.foreign import mro_of
from lowtide.probes.objects.listed import Census, all_instances, collector_paused
from lowtide.probes.originals import loaded

# An element offset that no storage reaches: a view there fails, and the message says how large the storage is.
_OUT_OF_BOUNDS = 1 << 40
_STORAGE_SIZE = re.compile(r"out of bounds for storage of size (\d+)")


class StorageReading(msgspec.Struct, frozen=True):
    """One storage: the memory that one or more tensors view.

    Attributes:
        address: where it starts.
        bytes: its whole length, however little of it the tensors view.
        device: `cpu`, `cuda:0`.
        shape: shape of the largest tensor over it, as `2x3`; empty where no tensor views it.
        dtype: data type of that tensor, as `float32`; empty where no tensor views it.
        tensors: Python tensors that view it.
    """

    address: int
    bytes: int
    device: str
    shape: str
    dtype: str
    tensors: int

    @property
    def key(self) -> tuple[str, int]:
        """Device and address, by which it is known as long as it lives."""
        return self.device, self.address


class TensorReading(msgspec.Struct, frozen=True):
    """The memory under the live tensors of the process.

    Attributes:
        ranges: its address and length, merged, so that each byte counts once; by device, sorted.
        unreadable: tensors that hold memory of a kind that cannot be read (opaque layouts, copy-on-write storages).
    """

    ranges: Mapping[str, tuple[Range, ...]]
    unreadable: int

    def on(self, device: str) -> tuple[Range, ...]:
        """Return the memory on one device."""
        return self.ranges.get(device, ())

    def bytes_on(self, device: str) -> int:
        """Return the bytes under the live tensors of `device`."""
        return total(self.on(device))


class StorageSurvey(msgspec.Struct, frozen=True):
    """Storages found among some objects; `unreadable` counts the tensors that could not be read."""

    storages: tuple[StorageReading, ...]
    unreadable: int

    @property
    def reading(self) -> TensorReading:
        """Their memory."""
        by_device: dict[str, list[Range]] = defaultdict(list)
        for storage in self.storages:
            by_device[storage.device].append((storage.address, storage.bytes))
        return TensorReading({device: merge(parts) for device, parts in sorted(by_device.items())}, self.unreadable)

    @property
    def sizes(self) -> dict[tuple[str, int], int]:
        """The bytes of each storage, by its key."""
        return {storage.key: storage.bytes for storage in self.storages}


def storage_classes() -> tuple[type, ...]:
    """Return the classes of which `survey_storages` looks for instances: none where torch is not loaded."""
    torch = loaded("torch")
    # It may be half way through its import.
    return () if torch is None or not hasattr(torch, "Tensor") else (torch.UntypedStorage, torch.Tensor)


def survey_storages(objects: Iterable[object] | Census | None = None) -> StorageSurvey:
    """Find the storages under the tensors, and the storage objects, among `objects`; empty where torch is not loaded.

    They are sorted by device and address; what is found keeps no object alive. Tensors that Python never saw (a
    gradient that no code has read, what autograd saved) are not found: reading them would make Python objects of them
    that stay.

    Args:
        objects: what to look through; default: everything alive.

    Two storages at one address of one device are one.
    """
    torch, classes = loaded("torch"), storage_classes()
    if torch is None or not classes:
        return StorageSurvey((), 0)
    with collector_paused(), plain_tensors(torch):
        if objects is None:
            objects = all_instances(*classes)
        census = objects if isinstance(objects, Census) else Census(objects)
        found = _Found(torch)
        for storage in census.instances_of(torch.UntypedStorage):
            found.add_storage(storage)
        for tensor in census.instances_of(torch.Tensor):
            found.add_tensor(tensor)
    return StorageSurvey(found.readings(), found.unreadable)


def keys_of_each(items: Iterable[Any]) -> list[frozenset[tuple[str, int]]]:
    """Device and address of the storages under each of some tensors and storage objects; empty where none can be read.

    For many of them faster than a survey of each: no size is asked for.
    """
    torch = loaded("torch")
    if torch is None or not hasattr(torch, "Tensor"):
        return [frozenset() for _ in items]
    with collector_paused(), plain_tensors(torch):
        found = _Found(torch)
        return [found.keys_of(item) for item in items]


def hold_memory(items: Iterable[Any]) -> list[bool]:
    """Return whether each of some tensors and storages holds memory, or may: by a graph, or because it is unknown.

    A tensor that needs no gradient, and has no memory of its own (an empty or meta one, the stand-ins of compilers),
    holds nothing else that is not found by itself.
    """
    torch = loaded("torch")
    if torch is None or not hasattr(torch, "Tensor"):
        return [False for _ in items]
    with collector_paused(), plain_tensors(torch):
        found = _Found(torch)
        return [found.holds(item) for item in items]


def bytes_shown(items: Iterable[Any]) -> list[int]:
    """Return the bytes that each of some tensors shows, however large its storage; of a storage object all of them."""
    torch: Any = loaded("torch")
    with collector_paused(), plain_tensors(torch):
        return [
            torch_member(item, "numel")() * torch_member(item, "element_size")()
            if any(base is torch.Tensor for base in mro_of(type(item)))
            else int(item.nbytes())
            for item in items
        ]


@contextlib.contextmanager
def plain_tensors(torch: ModuleType) -> Iterator[None]:
    """Make torch's calls see tensors as plain data: no subclass's or mode's code runs, no graph is recorded."""
    core = torch._C
    # In this order: switching the gradients off is a torch function too.
    with core.DisableTorchFunction(), core._DisableTorchDispatch():
        # Not `torch.no_grad`, which looks up functions that a test may have replaced.
        with_gradients = core.is_grad_enabled()
        core._set_grad_enabled(False)
        try:
            yield
        finally:
            core._set_grad_enabled(with_gradients)


def torch_member(tensor: Any, name: str) -> Any:
    """Return an attribute or bound method of a tensor as torch has it, past what the tensor's class makes of it."""
    member = _MEMBERS.get(name)
    if member is None:
        member = _MEMBERS[name] = getattr(loaded("torch")._C.TensorBase, name)
    return member.__get__(tensor)


_MEMBERS: dict[str, Any] = {}
"""Of torch's own class in C, which stays: a heap of many tensors asks ten of these of each."""


class _Entry(msgspec.Struct):
    """What is known so far of one storage."""

    bytes: int
    tensors: int = 0
    largest: int = -1
    shape: str = ""
    dtype: str = ""


class _Found:
    """Collects storages, keyed by device and address."""

    def __init__(self, torch: ModuleType) -> None:
        self.unreadable = 0
        self._torch = torch
        self._entries: dict[tuple[str, int], _Entry] = {}
        fake = loaded("torch._subclasses.fake_tensor")
        self._fake_tensor: type | None = getattr(fake, "FakeTensor", None)

    def add_storage(self, storage: Any) -> None:
        """Add a storage that Python holds itself; one without memory (meta, a subclass's stand-in) is left out."""
        device = storage.device
        if device.type == "meta":
            return
        try:
            whole = self._torch.empty(0, dtype=self._torch.uint8, device=device).set_(storage)
            if self._torch._C._is_cow_tensor(whole):
                return  # counted as unreadable with the tensors over it; its address is not to be asked for
            size, address = storage.nbytes(), storage.data_ptr()
        except RuntimeError:
            # "invalid python storage": the empty shell under a fake tensor or a wrapper subclass.
            return
        if size:
            self._entries.setdefault((str(device), address), _Entry(size))

    def add_tensor(self, tensor: Any) -> None:
        """Add the storage under a tensor, or those under its parts if it is sparse."""
        fake = self._fake_tensor
        if fake is not None and any(base is fake for base in mro_of(type(tensor))):
            return  # says that it is on a device, and holds nothing there
        try:
            for part in _parts(self._torch, tensor):
                self._add_strided(part)
        except (RuntimeError, NotImplementedError):
            # No storage that Python can reach (opaque layouts such as mkldnn, functorch's wrappers).
            self.unreadable += 1

    def keys_of(self, item: Any) -> frozenset[tuple[str, int]]:
        """Return the storages under one tensor, or the one that a storage object is; nothing is added."""
        if not any(base is self._torch.Tensor for base in mro_of(type(item))):
            alone = _Found(self._torch)
            alone.add_storage(item)
            return frozenset(alone._entries)
        if any(base is self._fake_tensor for base in mro_of(type(item))):
            return frozenset()
        try:
            keys = [self._key(part) for part in _parts(self._torch, item)]
        except (RuntimeError, NotImplementedError):
            return frozenset()
        return frozenset(key for key in keys if key is not None)

    def holds(self, item: Any) -> bool:
        """Return whether a tensor, or a storage object, holds memory or may hold some; nothing is added."""
        if not any(base is self._torch.Tensor for base in mro_of(type(item))):
            try:
                return bool(item.device.type != "meta" and item.nbytes())
            except RuntimeError:  # the empty shell under a fake tensor or a wrapper subclass
                return False
        if torch_member(item, "requires_grad"):
            return True
        if any(base is self._fake_tensor for base in mro_of(type(item))):
            return False
        try:
            return any(self._has_memory(part) for part in _parts(self._torch, item))
        except RuntimeError:  # no storage that Python can reach: unknown
            return True

    def _has_memory(self, tensor: Any) -> bool:
        is_meta = torch_member(tensor, "device").type == "meta"
        return not is_meta and (self._torch._C._is_cow_tensor(tensor) or bool(_storage_address(tensor)))

    def _key(self, tensor: Any) -> tuple[str, int] | None:
        """Device and address of a strided tensor's storage; None where it has none that can be asked for."""
        device = torch_member(tensor, "device")
        if device.type == "meta" or self._torch._C._is_cow_tensor(tensor):
            return None
        address = _storage_address(tensor)
        return (str(device), address) if address else None

    def _add_strided(self, tensor: Any) -> None:
        if torch_member(tensor, "device").type != "meta" and self._torch._C._is_cow_tensor(tensor):
            # Asking for its address would make the copy that copy-on-write put off.
            self.unreadable += 1
            return
        key = self._key(tensor)
        if key is None:
            return  # no memory of its own: zero bytes, or a wrapper subclass whose parts are tensors of their own
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry(_storage_bytes(tensor))
        entry.tensors += 1
        elements = torch_member(tensor, "numel")()
        if elements > entry.largest:
            entry.largest = elements
            entry.shape = "x".join(map(str, torch_member(tensor, "shape")))
            entry.dtype = str(torch_member(tensor, "dtype")).removeprefix("torch.")

    def readings(self) -> tuple[StorageReading, ...]:
        return tuple(
            StorageReading(address, entry.bytes, device, entry.shape, entry.dtype, entry.tensors)
            for (device, address), entry in sorted(self._entries.items(), key=lambda item: item[0])
        )


def _parts(torch: ModuleType, tensor: Any) -> tuple[Any, ...]:
    """Return the strided tensors that hold a tensor's data."""
    functorch: Any = getattr(torch._C, "_functorch", None)
    # What `vmap` and `grad` give a function, which may keep it: each wraps what the transformation around it gave.
    while functorch is not None and functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    layout = torch_member(tensor, "layout")
    if layout is torch.strided and torch_member(tensor, "is_nested"):
        return (torch_member(tensor, "values")(),)
    if layout is torch.sparse_coo:
        return (torch_member(tensor, "_indices")(), torch_member(tensor, "_values")())
    names: tuple[str, ...] = ()
    if layout in (torch.sparse_csr, torch.sparse_bsr):
        names = ("crow_indices", "col_indices", "values")
    if layout in (torch.sparse_csc, torch.sparse_bsc):
        names = ("ccol_indices", "row_indices", "values")
    return tuple(torch_member(tensor, name)() for name in names) or (tensor,)


def _storage_address(tensor: Any) -> int:
    """Return where the tensor's storage starts; 0 if it holds no memory."""
    if torch_member(tensor, "numel")():
        address = torch_member(tensor, "data_ptr")()
        offset = torch_member(tensor, "storage_offset")() * torch_member(tensor, "element_size")()
        return address - offset if address else 0
    # An empty view has the address 0, and still keeps its whole storage alive.
    try:
        return int(torch_member(tensor, "as_strided")((1,), (1,), 0).data_ptr())
    except RuntimeError:
        return 0  # the storage has no room for one element: it is empty


def _storage_bytes(tensor: Any) -> int:
    """Length of the tensor's storage.

    `untyped_storage().nbytes()` would say it too, but makes a Python object of the storage which then lives as long as
    the storage does (torch preserves it): reading would grow the heap by one object per tensor. So a view far out of
    bounds is asked for, and the refusal read (`checkInBoundsForStorage` in ATen/native/Resize.h). About 40 µs.
    """
    try:
        torch_member(tensor, "as_strided")((1,), (1,), _OUT_OF_BOUNDS)
    except RuntimeError as error:
        said = _STORAGE_SIZE.search(str(error))
        if said is not None:
            return int(said.group(1))
    # Layouts that refuse such a view for another reason (nested tensors): better one object more than no figure.
    return int(torch_member(tensor, "untyped_storage")().nbytes())
