"""Arrays of other libraries over memory of a card or of its driver: cupy's, JAX's, numba's, rmm's buffers.

They share one interface: `__cuda_array_interface__` says where the data lies (numba's documentation, "CUDA Array
Interface"). A class of the program's may have it, too, but reading it would run the program's code.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lowtide.probes.objects.described import is_installed_module
from lowtide.probes.objects.foreign import module_of_class
from lowtide.probes.objects.listed import all_classes, all_instances
from lowtide.probes.originals import loaded

_INTERFACE = "__cuda_array_interface__"


def arrays_by_address() -> dict[int, object]:
    """Return the array at each address of memory that no tensor of torch's is over, as far as a library says so.

    Of several over the same memory one is returned: an array rather than the pointer inside it.
    """
    return dict((*_pointers(), *_arrays()))


def _arrays() -> Iterator[tuple[int, object]]:
    kinds = [
        kind for kind in all_classes() if _INTERFACE in type.__dict__["__dict__"].__get__(kind) and _may_be_asked(kind)
    ]
    for item in all_instances(*kinds) if kinds else ():
        try:
            yield int(getattr(item, _INTERFACE)["data"][0]), item
        except Exception:  # noqa: BLE001 - an array that was deleted or given away, or lies on the host, in many ways
            continue


def _may_be_asked(kind: type) -> bool:
    """Return whether an installed library other than torch defines a class."""
    module = module_of_class(kind)
    return module.partition(".")[0] != "torch" and is_installed_module(module)


def _pointers() -> Iterator[tuple[int, object]]:
    """Give cupy's pointers into memory, which give it back with the last array."""
    cupy: Any = loaded("cupy")
    if hasattr(cupy, "cuda"):
        for item in all_instances(cupy.cuda.PinnedMemoryPointer, cupy.cuda.MemoryPointer):
            yield item.ptr, item
