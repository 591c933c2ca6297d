"""What is new on the cards since the last full reading and is in no tensor: native blocks, empty pools, allocations."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from lowtide.probes.device.allocations import read_allocations
from lowtide.probes.device.torch_allocator import read_segments, unexplained_blocks
from lowtide.probes.ranges import common
from lowtide.probes.stages import announced_pools

Segment = tuple[tuple[int, int], int, int, bool]


class Cards:
    """Keeps what was there at the last full reading, per card, by address.

    Args:
        driver: whether to list the driver's own allocations.
    """

    def __init__(self, *, driver: bool) -> None:
        self._driver = driver
        self._known: dict[str, Mapping[str, Mapping[str, int]]] = {}

    def knows(self, device: str) -> bool:
        """Whether there was a reading of this card."""
        return device in self._known

    def adopt(self, devices: Iterable[str], claimed: Collection[int]) -> None:
        """What is there now is known from here on.

        Args:
            devices: the cards, as `cuda:0`.
            claimed: the addresses of all live storages.
        """
        self._known = {device: self._read(device, claimed) for device in devices}

    def new_items(self, devices: Iterable[str], claimed: Collection[int]) -> dict[str, dict[str, int]]:
        """By metric's key (`native cuda:0`, `reserved cuda:0`, …), what was not there then."""
        found: dict[str, dict[str, int]] = {}
        for device in devices:
            known = self._known.get(device, {})
            for key, items in self._read(device, claimed).items():
                old = known.get(key, {})
                found[key] = {name: size for name, size in items.items() if name not in old}
        return found

    def all_items(self, device: str, claimed: Collection[int]) -> dict[str, dict[str, int]]:
        """As `new_items`, for one card and with what was there then."""
        return self._read(device, claimed)

    def has_new_empty_pools(self, device: str) -> bool:
        """Whether a private pool has an empty segment that it had not before; cheap."""
        known = self._known.get(device, {}).get(f"reserved {device}", {})
        return any(name not in known for name in _empty_pools(read_segments(_index(device)) or ()))

    def lists_allocations(self, device: str) -> bool:
        """Whether the driver's allocations can be listed; else its byte count is all there is."""
        return self._driver and f"allocations {device}" in self._known.get(device, {})

    def _read(self, device: str, claimed: Collection[int]) -> dict[str, dict[str, int]]:
        index = _index(device)
        readings: dict[str, dict[str, int]] = {}
        blocks = unexplained_blocks(index, claimed)
        if blocks is not None:
            named = {
                f"native {device}": ("block", blocks.native),
                f"workspaces {device}": ("workspace", blocks.workspaces),
                f"in-flight {device}": ("block", blocks.pending),
            }
            for key, (word, found) in named.items():
                readings[key] = {f"{word} at {address:#x}": size for address, size in found.items()}
        segments = read_segments(index) or []
        readings[f"reserved {device}"] = _empty_pools(segments)
        allocations = read_allocations(index) if self._driver else None
        if allocations is not None:
            explained = [(address, size) for _, address, size, _ in segments]
            explained += [part for pool in announced_pools() if pool.device == device for part in pool.ranges]
            readings[f"allocations {device}"] = {
                f"allocation at {address:#x}": size
                for address, size in allocations
                if not common([(address, size)], explained)
            }
        return readings


def _index(device: str) -> int:
    return int(device.partition(":")[2])


def _empty_pools(segments: Iterable[Segment]) -> dict[str, int]:
    """The segments of private pools in which nothing is in use.

    One of the default pool goes back as soon as anybody empties the cache; one of a private pool only if the pool's
    owner is gone.
    """
    return {
        f"pool {pool}, segment at {address:#x}": size
        for pool, address, size, used in segments
        if not used and pool != (0, 0)
    }
