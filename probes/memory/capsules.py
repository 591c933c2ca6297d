"""Memory that is exported to another library by DLPack: who has the capsule, or cupy's object, keeps the tensor."""

from __future__ import annotations

import bisect
import ctypes
import datetime
import itertools
from collections.abc import Sequence
from typing import Any

from lowtide.probes.memory.tensors import keys_of_each, survey_storages
from lowtide.probes.objects.listed import Census
from lowtide.probes.originals import loaded

EXPORTED = "exported memory"
"""What leads from a capsule to the tensor whose memory it exports."""

_CAPSULE: type = type(datetime.datetime_CAPI)

_DATA = {
    # Where the address of the data lies, in words: behind the version, the context, the deleter and the flags.
    b"dltensor": 0,
    b"numpy_dltensor": 0,
    b"dltensor_versioned": 4,
    b"numpy_dltensor_versioned": 4,
}
"""By the names of capsules that own what they export: one that was used up has another name."""

_name_of = ctypes.pythonapi.PyCapsule_GetName
_name_of.argtypes, _name_of.restype = [ctypes.py_object], ctypes.c_char_p
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.argtypes, _pointer_of.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p


class ExportedMemory:
    """The tensors among some objects, by their memory.

    Args:
        items: any objects; this holds the tensors among them.
    """

    def __init__(self, items: Sequence[object]) -> None:
        torch: Any = loaded("torch")
        kind = getattr(torch, "Tensor", None)
        tensors = [] if kind is None else Census(list(items)).instances_of(kind)
        sizes = survey_storages(tensors).sizes
        spans = [
            (key[1], key[1] + sizes[key], tensor)
            for tensor, keys in zip(tensors, keys_of_each(tensors), strict=True)
            for key in keys & sizes.keys()
        ]
        self._spans = sorted(spans, key=lambda span: span[0])
        self._begins = [begin for begin, _, _ in self._spans]
        # Up to each span, where the memory of all of them ends: one may lie within another.
        self._ends = list(itertools.accumulate((end for _, end, _ in self._spans), max))

    def held_by(self, exporter: object) -> list[object]:
        """Return the tensors in whose memory lies what an object keeps, of a type that `keeps_exported` names."""
        address = exported_address(exporter)
        found: list[object] = []
        place = bisect.bisect_right(self._begins, address) - 1
        while place >= 0 and address < self._ends[place]:
            _, end, tensor = self._spans[place]
            found += [tensor] if address < end else []
            place -= 1
        return found[::-1]


def keeps_exported(cls: type) -> bool:
    """Return whether objects of a type keep what another library has exported, and show the collector nothing of it.

    A capsule does until it is used up. cupy uses it up, and has an object of its own do the same from then on
    (`cupy/_core/dlpack.pyx`); jax and TensorFlow keep it outside of Python.
    """
    return cls is _CAPSULE or cls is getattr(loaded("cupy._core.dlpack"), "DLPackMemory", None)


def exported_address(exporter: Any) -> int:
    """Return the address of the data that an object keeps for another library; 0 if it keeps none.

    Args:
        exporter: of a type that `keeps_exported` names.
    """
    if type(exporter) is not _CAPSULE:
        return int(exporter.ptr)
    name = _name_of(exporter)
    if name not in _DATA:
        return 0
    pointer = _pointer_of(exporter, name)
    data = ctypes.c_void_p.from_address(pointer + _DATA[name] * ctypes.sizeof(ctypes.c_void_p)) if pointer else None
    return (data.value or 0) if data is not None else 0
