"""What a process has mapped, as the kernel lists it in `/proc/PID/maps`: read and parsed here alone."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from lowtide.probes.originals import contents, os


class Mapped(NamedTuple):
    """A part of a process's addresses.

    Attributes:
        start: its first address.
        end: the first one behind it.
        access: as the kernel writes it: `rw-p`, `r-xs`.
        device: of the file behind it, as `fe:01`.
        inode: of the same; `0` where there is no file.
        path: as the kernel lists it; empty for none.
    """

    start: int
    end: int
    access: str
    device: str
    inode: str
    path: str

    @property
    def bytes(self) -> int:
        """Its length."""
        return self.end - self.start

    @property
    def range(self) -> tuple[int, int]:
        """Its first address, and its length in bytes."""
        return self.start, self.bytes

    @property
    def file(self) -> tuple[int, int]:
        """Device and inode of the file behind it, as `os.stat` says them."""
        major, _, minor = self.device.partition(":")
        return os.makedev(int(major, 16), int(minor, 16)), int(self.inode)


def read_mappings(pid: int | None = None, having: str = "") -> Iterator[Mapped]:
    """Yield what a process has mapped, the lowest first, at some microseconds each.

    Args:
        pid: its process identifier; default: this one's.
        having: a part of the kernel's line that all others are without.

    Raises:
        OSError: it has ended, or is another user's.
    """
    return mappings_in(contents(f"/proc/{'self' if pid is None else pid}/maps"), having)


def mappings_in(listing: bytes, having: str = "") -> Iterator[Mapped]:
    """Yield what the kernel's listing has; see `read_mappings`."""
    # A file's name may have any bytes, also where the locale has no name for them.
    for line in os.fsdecode(listing).split("\n"):
        if line and having in line:
            # address access offset device inode path; the name may have blanks
            where, access, _, device, inode, *path = line.split(None, 5)
            start, _, end = where.partition("-")
            yield Mapped(int(start, 16), int(end, 16), access, device, inode, path[0] if path else "")


class AddressMap:
    """Finds mappings by the addresses in them."""

    def __init__(self, mappings: Iterable[Mapped]) -> None:
        self.mappings = list(mappings)
        self._starts = [each.start for each in self.mappings]

    def at(self, address: int) -> Mapped | None:
        """Return that in which an address is; None where nothing is mapped."""
        place = bisect.bisect_right(self._starts, address) - 1
        return self.mappings[place] if place >= 0 and address < self.mappings[place].end else None
