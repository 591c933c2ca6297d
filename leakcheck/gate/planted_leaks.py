"""Leaks of a known size, planted in lives of the reference engine: what a gate must be able to see."""

from __future__ import annotations

import functools
import gc
import json
import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import torch

from lowtide.engine import EngineConfig
from lowtide.engine.config import load_model_config
from lowtide.engine.device_allocator.arena import Arena
from lowtide.engine.pages import check_device, open_backend, open_driver
from lowtide.leakcheck.lives.lifecycle import LifecycleRun
from lowtide.leakcheck.lives.script import SCRIPT
from lowtide.leakcheck.targets.reference import ReferenceLife
from lowtide.probes.device.driver import find_driver
from lowtide.reports.schema import Finding, ResourceName, Subject

MIB = 1 << 20

LARGEST = 64 * MIB
"""The largest leak that is planted, in bytes; each further one is half as large."""

SMALLEST = MIB
"""The smallest, in bytes, where pages are not larger."""

_SHORT_SCRIPT = ("create", "shutdown")

_PAGE = 4096

_KEPT: list[object] = []
"""Holds planted leaks."""


class PlantedLeak(ABC):
    """Leaks a number of bytes in one place.

    Args:
        device: "cpu" or "cuda:N", where the leak is.

    Attributes:
        page: bytes of which there are only whole multiples in this place.
        name: of the place.
        resource: of the finding that must report it; that is the key of the metric's row that counts it, with the
            device behind it if `on_device`.
        on_device: whether the metric belongs to the device, and not to the host.
        needs_card: whether there is such a place on cards only.
        is_level: whether the metric is a level of the whole process, which moves by itself: it is judged from the
            second life on, and at least half of a leak must be in its finding.
    """

    name: ClassVar[str]
    resource: ClassVar[ResourceName] = "tensors"
    on_device: ClassVar[bool] = True
    needs_card: ClassVar[bool] = False
    is_level: ClassVar[bool] = False

    def __init__(self, device: str) -> None:
        self.device = device
        self.page = _PAGE

    @classmethod
    def metric_on(cls, device: str) -> str:
        """Return the key of the metric that counts it."""
        return f"{cls.resource} {device}" if cls.on_device else cls.resource

    @abstractmethod
    def plant(self, size: int) -> None:
        """Leak `size` bytes more."""

    def remove(self) -> None:
        """Give back all that was leaked, whatever a remedy has given back already."""
        _KEPT.clear()
        gc.collect()

    def is_reported(self, finding: Finding, size: int) -> bool:
        """Return whether a finding reports a leak of `size` bytes in this place."""
        return finding.resource == self.resource and finding.bytes >= (size // 2 if self.is_level else size)


class PoolLeak(PlantedLeak):
    """A tensor in torch's own memory that a module-level list holds."""

    name = "torch's pool"

    def plant(self, size: int) -> None:
        """Leak `size` bytes more."""
        _KEPT.append(_tensor(size, self.device))


class ArenaLeak(PlantedLeak):
    """An arena that is mapped and has no tensor."""

    name = "an arena"
    resource = "arena"

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.page = open_backend(device).granularity
        self._arenas: list[Arena] = []

    def plant(self, size: int) -> None:
        """Leak `size` bytes more."""
        arena = Arena("planted", size, open_backend(self.device))
        arena.map_to(size)
        self._arenas.append(arena)

    def remove(self) -> None:
        """Give back all that was leaked."""
        while self._arenas:
            self._arenas.pop().close()


class FrozenLeak(PlantedLeak):
    """A tensor in a cycle that nothing reaches and that `gc.freeze()` hides from the collector (vllm#38503)."""

    name = "behind a frozen holder"

    def plant(self, size: int) -> None:
        """Leak `size` bytes more."""
        _Cycle(_tensor(size, self.device))
        gc.freeze()

    def remove(self) -> None:
        """Thaw the heap and collect."""
        gc.unfreeze()
        super().remove()

    def is_reported(self, finding: Finding, size: int) -> bool:
        """Return whether a finding also blames the frozen heap."""
        return super().is_reported(finding, size) and finding.verdict in ("frozen-garbage", "frozen-holder")


class _Cycle:
    """Keeps itself and a tensor alive until it is collected."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.itself = self


class CacheLeak(PlantedLeak):
    """A model that is the key of an `lru_cache` (vllm#38503)."""

    name = "in an lru_cache"

    def plant(self, size: int) -> None:
        """Leak `size` bytes more."""
        _is_supported(_Model(_tensor(size, self.device)))

    def remove(self) -> None:
        """Clear the cache."""
        _is_supported.cache_clear()
        super().remove()

    def is_reported(self, finding: Finding, size: int) -> bool:
        """Return whether a finding also blames a cache."""
        return super().is_reported(finding, size) and finding.cause == "lru-cache"


class _Model:
    """Holds weights."""

    def __init__(self, weights: torch.Tensor) -> None:
        self.weights = weights


@functools.cache
def _is_supported(model: _Model) -> bool:
    return model.weights.is_contiguous()


class HostLeak(PlantedLeak):
    """Host memory outside torch, as native code maps it."""

    name = "host memory"
    resource = "host-memory"
    on_device = False
    is_level = True

    def plant(self, size: int) -> None:
        """Leak `size` bytes more, each page written to."""
        pages = mmap.mmap(-1, size)
        for offset in range(0, size, _PAGE):
            pages[offset] = 1
        _KEPT.append(pages)


class DriverLeak(PlantedLeak):
    """Physical memory of a card that neither torch nor an arena knows, as native code creates it."""

    name = "the driver alone"
    resource = "driver"
    needs_card = True
    is_level = True

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self._driver = open_driver(check_device(device).index)
        self.page = self._driver.granularity()
        self._handles: list[int] = []

    def plant(self, size: int) -> None:
        """Leak `size` bytes more."""
        self._handles.append(self._driver.create(size))

    def remove(self) -> None:
        """Give back all that was leaked."""
        while self._handles:
            self._driver.release(self._handles.pop())


PLANTED: Sequence[type[PlantedLeak]] = (PoolLeak, ArenaLeak, FrozenLeak, CacheLeak, HostLeak, DriverLeak)
"""Every place, in the order of the report."""


def sizes(page: int) -> tuple[int, ...]:
    """Return the sizes in bytes of the leaks planted where memory comes in pages, the largest first."""
    halved = (LARGEST >> turn for turn in range((LARGEST // SMALLEST).bit_length()))
    return tuple(size for size in halved if size % page == 0)


def smallest_found(leak: PlantedLeak, tolerances: Mapping[str, int]) -> int | None:
    """Plant leaks until the smallest that is found is known, halving the sizes left; its bytes, None if none is found.

    (What is found of a smaller leak is found of a larger one: so three runs of lives do for seven sizes.)

    Args:
        leak: what is planted in every life.
        tolerances: what may stay at a shutdown, by the metric's key.
    """
    left, found = list(sizes(leak.page)), None
    while left:
        middle = len(left) // 2
        size = left[middle]
        if _is_found(leak, size, tolerances):
            found, left = size, left[middle + 1 :]
        else:
            left = left[:middle]
    return found


def _is_found(leak: PlantedLeak, size: int, tolerances: Mapping[str, int]) -> bool:
    try:
        findings = _judged_with(leak, size, tolerances).findings
    finally:
        leak.remove()
    return any(leak.is_reported(finding, size) for finding in findings)


def _judged_with(leak: PlantedLeak, size: int, tolerances: Mapping[str, int]) -> Subject:
    lives = 2 if leak.is_level else 1
    run = _run(leak.name, leak.device, lives, _SHORT_SCRIPT, lambda: leak.plant(size), tolerances)
    return run.run()


def _run(
    name: str,
    device: str,
    lives: int,
    script: Sequence[str],
    after_create: Callable[[], None],
    tolerances: Mapping[str, int],
) -> LifecycleRun:
    config = EngineConfig(model="tiny", device=device, seed=0)
    vocab_size = load_model_config(config).vocab_size

    class Life(ReferenceLife):
        def create(self) -> None:
            super().create()
            after_create()

    return LifecycleRun(
        name,
        lambda: Life(config, vocab_size),
        device=device,
        driver=find_driver(),
        cycles=lives,
        script=script,
        tolerances=tolerances,
    )


def _tensor(size: int, device: str) -> torch.Tensor:
    return torch.ones(size, dtype=torch.uint8, device=device)


def write_smallest(name: str, device: str, alternatives: Sequence[Mapping[str, int]], file: str) -> None:
    """Write the bytes of the smallest leak found in a place by each set of tolerances, as JSON; in its own process.

    `found` has them, None where no leak is found; `floor` gives the bytes of the smallest that is planted there.
    """
    leak = next(kind for kind in PLANTED if kind.name == name)(device)
    found = [smallest_found(leak, tolerances) for tolerances in alternatives]
    _write(file, {"found": found, "floor": sizes(leak.page)[-1]})


def write_null_lives(device: str, lives: int, file: str) -> None:
    """Write what whole lives show with nothing planted, as JSON; in a process of its own.

    `problem` says what did not come back; `lives` gives, for each life and by the metric's key, how far the metric was
    above its baseline (None where that cannot be read); `tolerances` gives the bytes of the table by the same keys.
    """
    run = _run("nothing planted", device, lives, SCRIPT, lambda: None, {})
    subject = run.run()
    findings = "; ".join(finding.message for finding in subject.findings)
    last = [item for item in run.excesses[-1] if item.metric.unit == "bytes"] if run.excesses else []
    _write(
        file,
        {
            "problem": "" if subject.outcome == "clean" else subject.reason or findings,
            "lives": [{item.metric.key: item.above for item in life} for life in run.excesses],
            "tolerances": {item.metric.key: item.metric.tolerance for item in last},
        },
    )


def _write(file: str, value: object) -> None:
    Path(file).write_text(json.dumps(value), encoding="utf-8")
