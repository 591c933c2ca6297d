"""The names of the attributes that instances have in themselves and not in a dict (Python 3.11 and later).

Asking an instance for its `__dict__` would make one, which then stays; asking for an attribute by its name does not.
The names that the instances of a class share lie behind that class: they are read from its memory.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator

from lowtide.probes.mappings import AddressMap, read_mappings
from lowtide.probes.objects.foreign import flags_of
from lowtide.probes.originals import sys

_MANAGED_DICT = 1 << 4
"""`Py_TPFLAGS_MANAGED_DICT`: the interpreter decides where the attributes of a type's instances are."""

_WORD = 8
_SIZE_OF_CLASS: int = vars(type)["__basicsize__"].__get__(type)
_INDEX_BYTES, _COUNT, _HEAD = 9, 24, 32
"""Where a table of keys (`PyDictKeysObject`) has the logarithm of the size of its index, the number of its entries, and
the index, behind which the entries are: a key and a value each."""


def has_values_inside(cls: type) -> bool:
    """Return whether instances have attributes in themselves and not in a dict, as no type written in C has."""
    return sys.version_info >= (3, 11) and bool(flags_of(cls) & _MANAGED_DICT)


class AttributeNames:
    """Reads the names that the instances of classes share."""

    @functools.cached_property
    def _place(self) -> int:
        return _place_of_keys()

    def of(self, cls: type) -> list[str]:
        """Return the names of what instances of a class have in themselves, which any of them may lack.

        None where they have nothing in themselves, or that cannot be read.
        """
        table = _word(id(cls) + self._place) if has_values_inside(cls) and self._place else 0
        return list(_keys(table)) if table else []


def _keys(table: int) -> Iterator[str]:
    entries = table + _HEAD + (1 << ctypes.c_uint8.from_address(table + _INDEX_BYTES).value)
    for turn in range(_word(table + _COUNT)):
        name = ctypes.cast(_word(entries + 2 * turn * _WORD), ctypes.py_object).value
        # The interpreter itself allows subclasses of texts, by `vars(item)[…]`.
        if type(name) is str:
            yield name


class _Sample:
    def __init__(self) -> None:
        self.first_of_sample = self.second_of_sample = 0


def _place_of_keys() -> int:
    """Return at which byte of a class the address of its table of keys stands; 0 if nowhere.

    Versions of Python differ in it: it is found by a class whose names are known, where what is read is mapped.
    """
    _Sample()
    names = [sys.intern("first_of_sample"), sys.intern("second_of_sample")]
    mapped = AddressMap(read_mappings())
    for place in range(0, _SIZE_OF_CLASS, _WORD):
        table = _word(id(_Sample) + place)
        within = mapped.at(table) if table % _WORD == 0 else None
        if within is None or "r" not in within.access or table + _HEAD + 2**8 > within.end:
            continue
        size = ctypes.c_uint8.from_address(table + _INDEX_BYTES).value
        if _word(table + _COUNT) == len(names) and size < _WORD:
            entries = [_word(table + _HEAD + (1 << size) + 2 * turn * _WORD) for turn in range(len(names))]
            if entries == list(map(id, names)):
                return place
    return 0


def _word(address: int) -> int:
    return ctypes.c_int64.from_address(address).value
