"""Large ranges of addresses that are reserved, with no memory behind them: no level of memory shows them."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Collection, Iterable, Mapping

from lowtide.leakcheck.resources.resource import Bound, Items, Name, Resource, Rule
from lowtide.probes.mappings import Mapped, mappings_in
from lowtide.probes.objects.listed import all_instances
from lowtide.probes.objects.opened_in_c import addresses_of_mappings
from lowtide.probes.originals import contents
from lowtide.reports.sizes import format_bytes

LEAST = 1 << 30
"""Bytes of a range that is told: allocators of C reserve 64 MiB for each of their arenas, and stacks less."""

_MOVED = LEAST // 4
"""Bytes by which the process's addresses have to change before they are listed again, which takes milliseconds."""

_CARDS = ("/dev/nvidia", "/dev/kfd", "/dev/dri")
"""What a process maps that uses a card."""

Range = tuple[int, int]


class AddressSpace(Resource):
    """The ranges of addresses that may be neither read nor written, of no file, by where they lie.

    Not judged where the process uses a card: its driver reserves addresses with every gigabyte that is allocated there
    (8.5 GiB for eight tensors of one), and keeps some.

    Args:
        contents: reads a file of `/proc`.
    """

    rule = Rule(
        "address-space",
        "address-space",
        "process",
        "ranges of addresses of 1 GiB and more that are reserved, with no memory behind them; where no card is used",
        test=Bound(),
        life=Bound(),
        unit="reserved ranges of addresses",
    )

    def __init__(self, contents: Callable[[str], bytes] = contents) -> None:
        self._contents = contents
        self._listed_at = 0
        self._known: list[Range] = []
        self._uses_card = False

    def read(self) -> Items:
        """Return the ranges; listed anew only where the size of the process has changed by much."""
        size = int(self._contents("/proc/self/statm").split()[0]) * mmap.PAGESIZE
        if abs(size - self._listed_at) >= _MOVED:
            mapped = list(mappings_in(self._contents("/proc/self/maps")))
            self._known = parts_of(self._known, reserved_ranges(mapped))
            self._listed_at = size
            self._uses_card = any(each.path.startswith(_CARDS) for each in mapped)
        return dict.fromkeys(map(_name_of, self._known), 1)

    def staying(self, names: Collection[str]) -> Collection[str]:
        """Return all of them where the process uses a card."""
        return names if self._uses_card else ()

    def objects(self, names: Collection[str]) -> Mapping[str, object]:
        """Return the `mmap.mmap` that has reserved each range."""
        if not names:
            return {}
        mappings = [item for item in all_instances(mmap.mmap) if type(item) is mmap.mmap]
        placed = list(zip(addresses_of_mappings(mappings), mappings, strict=True))
        ranges = {name: _range_of(name) for name in names}
        return {
            name: mapping for name, (low, high) in ranges.items() for at, mapping in placed if at and low <= at < high
        }

    def describe(self, name: str) -> str:
        """Return `4.0 GiB at 0x7f5e80000000`."""
        low, high = _range_of(name)
        return f"{format_bytes(high - low)} at {low:#x}"

    def identity(self, name: str) -> Name:
        """Return its size: where it lies is another place in each run."""
        low, high = _range_of(name)
        return Name(format_bytes(high - low), is_given=False)

    def advice(self, names: Collection[str]) -> str:
        """Return what gives addresses back that no object of Python's stands for."""
        if self.objects(names):
            return ""
        return "give the addresses back in teardown: munmap"


def reserved_ranges(mapped: Iterable[Mapped]) -> list[Range]:
    """Return first and last address of the large mappings without access that belong to no file, the lowest first."""
    large = (each for each in mapped if each.bytes >= LEAST and each.access.startswith("---"))
    return [(each.start, each.end) for each in large if not each.path or each.path.startswith(("/dev/zero", "["))]


def parts_of(known: Iterable[Range], now: Iterable[Range]) -> list[Range]:
    """Return the ranges that there are now, in the parts in which they came.

    The kernel makes neighbours one: what was reserved later, beside what was there, is a range of its own all the same.

    Args:
        known: the parts that there were, the lowest first.
        now: the ranges, the lowest first.
    """
    parts: list[Range] = []
    earlier = list(known)
    for low, high in now:
        at = low
        for begin, end in earlier:
            begin, end = max(begin, at), min(end, high)
            if end - begin >= LEAST:
                if begin - at >= LEAST:
                    parts.append((at, begin))
                parts.append((begin, end))
                at = end
        if high - at >= LEAST:
            parts.append((at, high))
    return parts


def _name_of(part: Range) -> str:
    return f"{part[0]:#x}-{part[1]:#x}"


def _range_of(name: str) -> Range:
    low, _, high = name.partition("-")
    return int(low, 16), int(high, 16)
