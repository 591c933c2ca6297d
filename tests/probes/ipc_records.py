"""torch's records of exports and imports by CUDA IPC, laid out by hand in the C library's heap."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from lowtide.probes.device.cuda_ipc import HEADER, SLOTS

BLOCK, MAPPING = 0x7F30_0000_0000, 0x7F40_0020_0000


class Records:
    """Lays out what torch has of an export and of an import, in the C library's heap, for as long as it lives.

    `CudaIPCSentData` in torch/csrc/CudaIPCTypes.h, and `IpcDeleterContext` in torch/csrc/StorageSharing.cpp: a string,
    the counter's number, and then the counter's address and the storage's, or the card and the mapping's address.
    """

    def __init__(self, exporter: int | None = None) -> None:
        self._libc = ctypes.CDLL(None)
        self._libc.malloc.restype = ctypes.c_void_p
        self._libc.free.argtypes = (ctypes.c_void_p,)
        self.file = f"/torch_{exporter or os.getpid()}_4000000007_0"
        self.path = Path(f"/dev/shm{self.file}")
        self._blocks: list[int] = []
        self.map: mmap.mmap | None = None
        if exporter is None:
            self.path.write_bytes(bytes(HEADER + 8 * SLOTS))
            with self.path.open("r+b") as file:
                self.map = mmap.mmap(file.fileno(), 0)
            self.at = ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    def export(self, slot: int, value: int, address: int = BLOCK) -> int:
        assert self.map is not None
        struct.pack_into("q", self.map, HEADER + 8 * slot, value)
        return self._record(slot, self.at + HEADER + 8 * slot, address)

    def opened(self, slot: int, device: int = 0, address: int = MAPPING) -> int:
        # What lies beside the card's number was never written.
        return self._record(slot, 0xABCD_EF00 | device, address)

    def free(self, record: int) -> None:
        self._libc.free(record)
        self._blocks.remove(record)

    def close(self) -> None:
        for block in list(self._blocks):
            self.free(block)
        if self.map is not None:
            self.path.unlink(missing_ok=True)

    def _record(self, slot: int, pointer: int, address: int) -> int:
        name = self.file.encode()
        text = self._made(len(name) + 1)
        ctypes.memmove(text, name + b"\0", len(name) + 1)
        record = self._made(80)
        words = struct.pack("8Q", text, len(name), len(name), 0, slot, pointer, address, 0)
        ctypes.memmove(record, words, len(words))
        return record

    def _made(self, size: int) -> int:
        self._blocks.append(int(self._libc.malloc(size)))
        return self._blocks[-1]


def importer_of(exporter: int) -> AbstractContextManager[subprocess.Popen[str]]:
    """Run a process that has opened exports 4 and 9 of another one, and export 3 of process 1, until the block ends."""
    return _running(
        f"own, other = Records({exporter}), Records(1)\nmade = own.opened(4), own.opened(9, device=1), other.opened(3)"
    )


def exporter_of(living: int, freed: int) -> AbstractContextManager[subprocess.Popen[str]]:
    """Run a process that has so many exports, and has freed others, until the block ends."""
    return _running(
        f"own = Records()\nmade = [own.export(slot, 0) for slot in range({living + freed})]\n"
        f"for record in made[{living}:]: own.free(record)"
    )


@contextmanager
def _running(code: str) -> Iterator[subprocess.Popen[str]]:
    program = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.probes.ipc_records import Records
{code}
print("ready", flush=True); sys.stdin.readline()
own.close()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        yield child
        child.communicate("\n", timeout=60)
