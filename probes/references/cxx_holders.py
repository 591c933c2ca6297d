"""Which objects of torch's C++ code refer to a Python object, by the name of their class in the memory beside it.

An object of a C++ class with virtual functions begins with the address of a table, and before that table lies the
address of the class's name.  So where a word of memory is the address of a Python object, the words before it say what
keeps it.  (By the Itanium ABI, as GCC and Clang have it on Linux.)  Memory is read by way of the kernel, which refuses
an address that is not mapped.
"""

from __future__ import annotations

import contextlib
import mmap
import re
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from lowtide.probes.mappings import AddressMap, read_mappings
from lowtide.probes.objects.address_table import Ints
from lowtide.probes.objects.identities import object_at
from lowtide.probes.original_numpy import np
from lowtide.probes.originals import loaded, os

_WORD = 8
_CHUNK = 1 << 24
_LARGEST_MAPPING = 1 << 28
"""Bytes; what is larger is the memory of tensors. The heap itself is always read."""

_MOST_READ = 1 << 31
_BACK = 8
"""Words before the address of a Python object among which the table of its holder's class is looked for."""

_LONGEST_NAME = 400
_NAME = re.compile(rb"\*?[A-Za-z0-9_.$]+")

_BEHIND_INSTANCE = 16
"""Where an instance that pybind11 has made has the address of its C++ object, in bytes."""

_WRAPPER = "PythonFutureWrapper"
_WRAPPED = 5
"""Words that are in use of what Python has of a future: the rest is room for a function that it seldom has."""

_CALLBACK = "PythonFunctionGuard"
_KERNEL = "PythonKernelHolder"
_LARGEST_BLOCK = 1024
_DEPTH = 4
"""Pointers from a future to a callback: the future itself, its list, the list's entry, and what that has captured."""

_MOST_BLOCKS = 2000

_COUNTS = 16
"""What `std::make_shared` puts before an object, in bytes: a table, and how many share the object."""

_MOST_SHARES = 1 << 20
"""What counts who shares a block is less: in one that was given back stand addresses of malloc's."""

_HOLDERS = (
    # The class of the holder, and what it is: a kernel that is still registered has an entry of the second kind, too.
    (_KERNEL, "torch.library kernel"),
    (_CALLBACK, "callback of a torch.futures.Future"),
    ("PySavedVariableHooks", "hook of a tensor that a graph has saved"),
    ("SafePyObject", "destroyed torch.library kernel"),
)


def held_as(addresses: Collection[int]) -> dict[int, str]:
    """Return what keeps some Python objects in C++, by their addresses: `torch.library kernel of lib::op (CPU)`.

    Reads all of the heap, which takes a third of a second for 200 MB; those whose holder is of no known class are left
    out.

    Args:
        addresses: identities of objects that are alive.
    """
    found: dict[int, tuple[int, str]] = {}
    if not addresses or loaded("torch") is None:
        return {}
    with _opened() as memory:
        if memory is None:
            return {}
        for address, block, name in memory.holders_of(addresses):
            for place, (pattern, words) in enumerate(_HOLDERS):
                if pattern in name and place < found.get(address, (len(_HOLDERS), ""))[0]:
                    operator = memory.operators.get(block, "") if pattern == _KERNEL else ""
                    found[address] = place, f"{words} of {operator}" if operator else words
    return {address: words for address, (_, words) in found.items()}


def callbacks_of(future: Any) -> list[object]:
    """Return the functions that a torch future calls when it is done, known only to C++; none if unreadable."""
    with _opened() as memory:
        return [] if memory is None else list(memory.callbacks_of(future))


def storage_of_file(file: object) -> list[object]:
    """Return the storage over all of a file that safetensors has open for torch; none if there is none.

    It is written in Rust: behind what an `Arc` has for its two counts lies the address of the Python object.
    """
    torch: Any = loaded("torch")
    with _opened() as memory:
        return [] if memory is None or torch is None else list(memory.behind_counts(file, torch.UntypedStorage))


class _Memory:
    """This process's memory, its mappings as they were when it was opened."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._mapped = AddressMap(read_mappings())
        self._names: dict[int, str] = {}
        self._operators: dict[int, str] | None = None

    @property
    def operators(self) -> dict[int, str]:
        """The operators that have a kernel in Python, by the address of what holds the kernel's function."""
        if self._operators is None:
            self._operators = dict(self._kernels())
        return self._operators

    def holders_of(self, addresses: Collection[int]) -> Iterator[tuple[int, int, str]]:
        """Yield each place where one of some addresses is a member of a C++ object: with its address and class."""
        wanted = np.array(sorted(addresses), np.int64)
        left = _MOST_READ
        # What is read here is not read again as if it were the program's: this memory was mapped after the mappings
        # were listed, and a copy in the heap would be found there, then or once it is free.
        buffer, near_buffer = (np.frombuffer(mmap.mmap(-1, _CHUNK), np.int64) for _ in range(2))
        for mapping in self._mapped.mappings:
            is_heap = mapping.path == "[heap]"
            is_large = mapping.bytes > _LARGEST_MAPPING and not is_heap
            if "w" not in mapping.access or (mapping.path and not is_heap) or is_large:
                continue
            for begin in range(mapping.start, mapping.end, _CHUNK):
                words = (
                    self._read_into(buffer[: min(_CHUNK, mapping.end - begin) // _WORD], begin)
                    if left > 0
                    else _NOTHING
                )
                left -= words.nbytes
                near = np.flatnonzero((words >= wanted[0]) & (words <= wanted[-1]))
                values = words.take(near, out=near_buffer[: len(near)], mode="clip")
                for place in near[wanted.take(np.searchsorted(wanted, values)) == values].tolist():
                    for back in range(1, min(_BACK, place) + 1):
                        name = self._class_by_table(int(words[place - back]))
                        if name:
                            if self._ends_behind(begin + (place - back) * _WORD, back):
                                yield int(words[place]), begin + (place - back) * _WORD, name
                            break

    def callbacks_of(self, future: Any) -> Iterator[object]:
        start = self._value_of(future)
        seen = {start}
        waiting = deque([(start, 0, _LARGEST_BLOCK)])
        while waiting and len(seen) < _MOST_BLOCKS:
            address, depth, most = waiting.popleft()
            words = self._block(address).tolist()[:most]
            if words and _CALLBACK in self._class_by_table(words[0]):
                # Behind the table and two counts.
                if len(words) > 2 and words[2]:
                    yield object_at(words[2])
                continue
            for word, used in self._owned(words) if depth < _DEPTH else ():
                if word not in seen and self._is_heap(word):
                    seen.add(word)
                    waiting.append((word, depth + 1, used))

    def behind_counts(self, instance: object, kind: type) -> Iterator[object]:
        """Yield the objects of a type that an instance has behind a pointer, with counts of who shares it before."""
        size = type.__dict__["__basicsize__"].__get__(type(instance))
        for word in self._words(id(instance), size // _WORD).tolist():
            block = self._block(word).tolist() if self._is_heap(word) else []
            for address in block[2:] if all(0 < count < _MOST_SHARES for count in block[:2]) else ():
                counted = self._words(address, 2).tolist()
                if counted[1:] == [id(kind)] and counted[0] > 0:
                    yield object_at(address)

    def _owned(self, words: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield the words that may be pointers to what a C++ object owns, each with how many words of that are in use.

        What was never written in it is what the memory was before, and may point to somebody else's: that is the room
        that a `std::vector` has beyond its end, and the second word of a `std::function`, which only what owns nothing
        is kept in (as libstdc++ has them: beginning, end, end of the room; two words, the manager, the caller).
        """
        for place, word in enumerate(words):
            following = words[place + 1 : place + 3]
            if len(following) == 2 and all(map(self._is_file, following)):
                continue
            used = _LARGEST_BLOCK
            if len(following) == 2 and word < following[0] <= following[1] <= word + _LARGEST_BLOCK:
                room = _WORD * len(self._block(word))
                used = (following[0] - word) // _WORD if following[1] <= word + room else used
            yield word, used

    def _kernels(self) -> Iterator[tuple[int, str]]:
        torch: Any = loaded("torch")
        kernel_of: Any = getattr(torch._C, "_dispatch_get_computed_kernel_for_dispatch_key", None)
        for key in sorted(getattr(torch.library, "_impls", ())) if kernel_of is not None else ():
            parts = key.split("/")
            if len(parts) != 3:
                continue
            namespace, operator, dispatch_key = parts
            try:
                kernel = kernel_of(f"{namespace}::{operator}", _FOR_ALIASES.get(dispatch_key, dispatch_key))
            except RuntimeError:  # it has none for that key, or is gone
                continue
            holder = self._words(self._value_of(kernel), 1)
            if len(holder):
                yield int(holder[0]), f"{namespace}::{operator} ({dispatch_key})"

    def _value_of(self, instance: object) -> int:
        """Return the address of what an instance that pybind11 has made stands for; 0 if it cannot be read."""
        words = self._words(id(instance) + _BEHIND_INSTANCE, 1)
        return int(words[0]) if len(words) else 0

    def _block(self, address: int) -> Ints:
        """Return the words of an object in the C library's heap, whose size lies before it; none where it says none."""
        for before in (0, _COUNTS):
            begin = address - before
            header = self._words(begin - _WORD, 1)
            size = int(header[0]) & ~7 if len(header) else 0
            if not 4 * _WORD <= size <= _LARGEST_BLOCK:
                continue
            words = self._words(begin, size // _WORD - 1)
            name = self._class_by_table(int(words[0])) if len(words) else ""
            if not before or "_Sp_counted" in name:
                return words[before // _WORD : _WRAPPED if _WRAPPER in name else None]
        return _NOTHING

    def _ends_behind(self, address: int, member: int) -> bool:
        """Return whether an object has the member of this number, counted in words: else the block behind it has."""
        header = self._words(address - _WORD, 1)
        size = int(header[0]) & ~7 if len(header) and address % (2 * _WORD) == 0 else 0
        # A part of another object, as a member is, has no size of its own before it.
        return not 4 * _WORD <= size <= _LARGEST_BLOCK or member < size // _WORD - 1

    def _class_by_table(self, table: int) -> str:
        """Return the mangled name of the class whose virtual functions lie at an address; empty if none do."""
        if table not in self._names:
            self._names[table] = self._read_name(table)
        return self._names[table]

    def _read_name(self, table: int) -> str:
        if not self._is_file(table):
            return ""
        kind = self._words(table - _WORD, 1)
        known = self._words(int(kind[0]), 2) if len(kind) and self._is_file(int(kind[0])) else _NOTHING
        if len(known) < 2 or not self._is_file(int(known[1])):
            return ""
        try:
            name = os.pread(self._file, _LONGEST_NAME, int(known[1])).partition(b"\0")[0]
        except OSError:
            return ""
        return name.decode() if _NAME.fullmatch(name) else ""

    def _is_file(self, address: int) -> bool:
        mapping = self._mapped.at(address)
        return mapping is not None and mapping.path.startswith("/")

    def _is_heap(self, address: int) -> bool:
        mapping = self._mapped.at(address) if address % (2 * _WORD) == 0 else None
        return mapping is not None and "w" in mapping.access and mapping.path in ("", "[heap]")

    def _read_into(self, buffer: Ints, address: int) -> Ints:
        """Return as many words of memory as fit; none where nothing is mapped."""
        try:
            read = os.preadv(self._file, [buffer.data.cast("B")], address)
        except (OSError, OverflowError):
            return _NOTHING
        return buffer[: read // _WORD]

    def _words(self, address: int, count: int) -> Ints:
        """Words of memory; none where nothing is mapped."""
        if address <= 0 or address % _WORD:
            return _NOTHING
        try:
            data = os.pread(self._file, count * _WORD, address)
        except (OSError, OverflowError):
            return _NOTHING
        return np.frombuffer(data, np.int64, len(data) // _WORD)


_FOR_ALIASES = {
    "Autograd": "AutogradCPU",
    "CompositeExplicitAutograd": "CPU",
    "CompositeImplicitAutograd": "CPU",
}
"""Keys that stand for several, and one of those."""

_NOTHING: Ints = np.zeros(0, np.int64)


@contextlib.contextmanager
def _opened() -> Iterator[_Memory | None]:
    try:
        file = os.open("/proc/self/mem", os.O_RDONLY)
    except OSError:
        yield None
        return
    try:
        yield _Memory(file)
    finally:
        os.close(file)
