"""The large buffers in host memory that Python objects own: numpy's arrays, bytes, text, ctypes, anonymous maps.

And what C code of any library says that an object of its has, as pyarrow's tables do (`__sizeof__`).
"""

from __future__ import annotations

import array
import ctypes
import io
import mmap
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import msgspec

from lowtide.probes import native
from lowtide.probes.memory.tensors import keys_of_each, plain_tensors, storage_classes, survey_storages, torch_member
from lowtide.probes.objects.address_table import Ints, each_once
from lowtide.probes.objects.foreign import is_a, mro_of, namespace_of
from lowtide.probes.objects.identities import are_tracked, identities, objects_at, types_of
from lowtide.probes.objects.listed import (
    Census,
    all_classes,
    all_instances,
    all_objects,
    collector_paused,
    lists_can_be_read,
    running_locals,
)
from lowtide.probes.objects.opened_in_c import defined_in_libraries, has_nameless_memory
from lowtide.probes.original_numpy import np
from lowtide.probes.originals import gc, loaded, sys

LEAST = 1 << 20
"""Bytes from which a buffer is large: glibc takes such a piece from the system by itself, and gives it back."""

_AT_A_TIME = 1 << 16

_BYTES_OF_CHARACTER = 4
"""At most."""

_Kinds = list[tuple[type, Callable[[Any], int]]]
"""Classes of objects that own memory, each with what says how much."""

_NUMBERS = [id(kind) for kind in (int, float, bool, type(None))]
"""What there are most of, and is never large."""

CTYPES_DATA: type = ctypes.c_int.__mro__[-2]
"""What all data of ctypes derives from, which has no public name."""

_OBJECT = 512
"""Bytes that an object of C takes itself, at most."""

_IN_THE_OBJECT = 16
"""Bytes of data that an object of ctypes has in itself."""


class Buffer(msgspec.Struct, frozen=True, eq=False):
    """An object and the bytes of memory that it owns."""

    item: Any
    bytes: int


def large_buffers(least: int = LEAST) -> list[Buffer]:
    """Go through the heap once for the objects that own at least so many bytes; drop them soon.

    The collector tracks none of them but a map, nor for long the containers that hold nothing else. No code of the
    program runs: a subclass is asked as the class that it derives from.
    """
    found: dict[int, Buffer] = {}
    with collector_paused():
        _find(found, least)
        # Only now nobody else has what they found.
        _settle_files(found, least)
    return list(found.values())


def _find(found: dict[int, Buffer], least: int) -> None:
    kinds = _kinds(least)
    # What a function that runs has made, in any thread, only its frame has, which the collector does not.
    _add_untracked(found, running_locals(), kinds, least)
    if native.owned_by_all is not None and lists_can_be_read():
        known = [kind for kind, _ in kinds]
        # Of all classes those say it that say it themselves.
        definers = (cls for cls in all_classes() if "__sizeof__" in namespace_of(cls))
        sized = [kind for kind, _ in _sized_by_libraries(definers, known)]
        # Of text so many bytes may be a quarter of the characters.
        owners = native.owned_by_all(tuple(all_classes(*known, *sized)), least // _BYTES_OF_CHARACTER)
        _add(found, Census(owners), kinds, least)
        return
    objects = all_objects()
    _add(found, Census(objects), kinds, least)
    for start in range(0, len(objects), _AT_A_TIME):
        _add_untracked(found, gc.get_referents(*objects[start : start + _AT_A_TIME]), kinds, least)


def _settle_files(found: dict[int, Buffer], least: int) -> None:
    """Count the bytes that a file in memory shows (Python 3.12 and later) once: as its own, if nobody else has them."""
    for file in [each.item for each in found.values() if is_a(each.item, io.BytesIO)]:
        shown = [id(item) for item in _bytes_shown(file) if id(item) in found]
        for identity in (id(file), *shown):
            del found[identity]
        # It says how much is its own, and nothing of what it shares.
        size = io.BytesIO.__sizeof__(file)
        if size >= least:
            found[id(file)] = Buffer(file, size)
        for item in _bytes_shown(file):
            is_own = 0 <= size - bytes.__sizeof__(item) < _OBJECT
            if id(item) in shown and not is_own:
                found[id(item)] = Buffer(item, len(item))


def _size_of_file(file: Any) -> int:
    """Return the bytes of a file in memory, or that it shares with somebody."""
    return max(io.BytesIO.__sizeof__(file), *map(bytes.__len__, _bytes_shown(file)), 0)


def _bytes_shown(file: Any) -> list[bytes]:
    return [item for item in gc.get_referents(file) if type(item) is bytes]


def large_storages(least: int = LEAST) -> list[Buffer]:
    """Return a tensor over each piece of host memory of at least so many bytes that torch has; drop soon.

    An old tensor may have got new memory: by `resize_`, `set_`, or a new `data`.
    """
    torch: Any = loaded("torch")
    if torch is None or not storage_classes():
        return []
    with plain_tensors(torch):
        # Most are small, which takes less time to ask than where they are.
        tensors = [item for item in all_instances(torch.Tensor) if _bytes_of_storage(item) >= least]
    sizes = {each.key: each.bytes for each in survey_storages(tensors).storages if each.bytes >= least}
    found: dict[tuple[str, int], Buffer] = {}
    for tensor, keys in zip(tensors, keys_of_each(tensors), strict=True):
        for key in keys & sizes.keys():
            if key[0] == "cpu":
                found.setdefault(key, Buffer(tensor, sizes[key]))
    return list(found.values())


def known_arrays(least: int = LEAST) -> frozenset[tuple[int, int]]:
    """Return the identity and bytes of all of these that there are, to tell later which have come, or become larger."""
    return frozenset((id(each.item), each.bytes) for each in (*large_buffers(least), *large_storages(least)))


def _bytes_of_storage(tensor: Any) -> int:
    try:
        return int(torch_member(tensor, "untyped_storage")().nbytes())
    except (RuntimeError, NotImplementedError):
        # It has none that Python can reach.
        return 0


def tells_its_size(kind: type) -> bool:
    """Return whether objects of a class own memory that is known here by its size."""
    owners = {id(owner) for owner, _ in _kinds(LEAST)}
    return not owners.isdisjoint(map(id, mro_of(kind)))


def _add_untracked(found: dict[int, Buffer], held: list[object], kinds: _Kinds, least: int) -> None:
    """Add what the collector does not track of some objects, and what lies in that."""
    seen = np.zeros(0, np.int64)
    while held:
        ids = _untracked(held)
        ids = ids[~np.isin(ids, seen)]
        seen = np.concatenate((seen, ids))
        # The list keeps them alive until they are in the next one.
        untracked = objects_at(ids)
        _add(found, Census(untracked), kinds, least)
        held = gc.get_referents(*untracked)


def _untracked(items: list[object]) -> Ints:
    """Return the identities of what the collector does not track among some objects, but for numbers, each once."""
    # No step in Python: a heap has several million references, most of them to the same few hundred thousand objects.
    ids = identities(items)
    unique = each_once(ids[~np.isin(types_of(ids), _NUMBERS)])
    return unique[~are_tracked(unique)]


def _add(found: dict[int, Buffer], census: Census, kinds: _Kinds, least: int) -> None:
    ndarray: Any = getattr(loaded("numpy"), "ndarray", None)
    views = [] if ndarray is None else census.instances_of(ndarray)
    owners = [owner for view in views if (owner := _owner(ndarray, view)) is not None]
    for kind, size in [*kinds, *_sized_by_libraries(census.types(), [kind for kind, _ in kinds])]:
        for item in [*census.instances_of(kind), *(owner for owner in owners if is_a(owner, kind))]:
            amount = size(item)
            if amount >= least:
                found[id(item)] = Buffer(item, amount)


def _owner(ndarray: Any, view: Any) -> Any:
    """Return what an array is a view of in the end; None if it is none. It does not show the collector what that is."""
    owner = None
    while is_a(view, ndarray):
        owner, view = view, ndarray.base.__get__(view)
    return owner if view is None else view


def _kinds(least: int) -> _Kinds:
    kinds: _Kinds = [
        (bytes, bytes.__len__),
        (str, str.__sizeof__),
        (bytearray, bytearray.__len__),
        (io.BytesIO, _size_of_file),
        (array.array, _size_of_array),
        (mmap.mmap, bytes_of_map),
        # There may be a million small ones.
        (CTYPES_DATA, lambda item: bytes_of_c(item) if ctypes.sizeof(item) >= least else 0),
    ]
    ndarray: Any = getattr(loaded("numpy"), "ndarray", None)
    if ndarray is not None:
        # A view owns nothing: what it is a view of does.
        kinds.append(
            (ndarray, lambda item: 0 if ndarray.base.__get__(item) is not None else ndarray.nbytes.__get__(item))
        )
    return kinds


def _sized_by_libraries(types: Iterable[type], known: Iterable[type]) -> _Kinds:
    """Return the classes of some objects whose C code, that of no library known here, says how much these have."""
    found: dict[int, type] = {}
    for kind in types:
        definer = next((base for base in mro_of(kind) if "__sizeof__" in namespace_of(base)), object)
        if type(namespace_of(definer)["__sizeof__"]) is not FunctionType:
            found[id(definer)] = definer
    # Of numpy's there may be millions, each as large as a number.
    for kind in (object, getattr(loaded("numpy"), "generic", object), *known):
        found.pop(id(kind), None)
    return [(kind, _said_size) for kind in (defined_in_libraries([*found.values()]) if found else ())]


def _said_size(item: Any) -> int:
    try:
        size = sys.getsizeof(item)
    except Exception:  # noqa: BLE001 - the library's own, as of what is not made to its end
        return 0
    return size


def _size_of_array(item: Any) -> int:
    return array.array.__len__(item) * int(array.array.itemsize.__get__(item))


def bytes_of_map(item: Any) -> int:
    """Return the bytes of a `mmap.mmap` of no file, or of shared memory without a name; one of a file is its cache."""
    try:
        mmap.mmap.size(item)
    except OSError:
        return mmap.mmap.__len__(item)
    except ValueError:  # it is closed
        return 0
    return mmap.mmap.__len__(item) if has_nameless_memory(item) else 0


def bytes_of_c(item: Any) -> int:
    """Return the bytes that an object of ctypes has allocated; a view of others' has none."""
    own = vars(CTYPES_DATA)
    is_own = own["_b_needsfree_"].__get__(item) and own["_b_base_"].__get__(item) is None
    size = ctypes.sizeof(item)
    return size if is_own and size > _IN_THE_OBJECT else 0
