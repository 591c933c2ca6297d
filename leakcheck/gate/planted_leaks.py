"""Leaks of a known size, planted in lives of the reference engine: what a gate must be able to see."""

from __future__ import annotations

import functools
import gc
import json
import mmap
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import torch

from lowtide.engine import EngineConfig
from lowtide.engine.device_allocator.arena import Arena
from lowtide.engine.pages import check_device, open_backend, open_driver
from lowtide.leakcheck.lives.lifecycle import LifecycleRun, TargetLife
from lowtide.leakcheck.lives.script import SCRIPT
from lowtide.leakcheck.targets.reference import FixedReference
from lowtide.probes.device.driver import find_driver
from lowtide.reports.schema import Finding, ResourceName

MIB = 1 << 20

LARGEST = 64 * MIB
"""The largest leak that is planted, in bytes; each further one is half as large."""

SMALLEST = MIB
"""The smallest, in bytes, where pages are not larger."""

_SHORT_SCRIPT = ("create", "shutdown")

_PAGE = 4096

_KEPT: list[object] = []
"""Holds planted leaks."""


class PlantedLeak(msgspec.Struct, frozen=True):
    """A place in which leaks of a number of bytes are planted.

    Attributes:
        name: of the place.
        plant: leaks so many bytes more on a device ("cpu" or "cuda:N"), and notes how to take them back, whatever a
            remedy has given back already.
        resource: of the finding that must report it; that is the key of the metric's row that counts it, with the
            device behind it if `on_device`.
        on_device: whether the metric belongs to the device, and not to the host.
        needs_card: whether there is such a place on cards only.
        is_level: whether the metric is a level of the whole process, which moves by itself: it is judged from the
            second life on, and at least half of a leak must be in its finding.
        blames: the verdicts or causes of which the finding must have one; empty for any.
        page: gives the bytes of which there are only whole multiples in this place on a device.
    """

    name: str
    plant: Callable[[int, str, ExitStack], None]
    resource: ResourceName = "tensors"
    on_device: bool = True
    needs_card: bool = False
    is_level: bool = False
    blames: Collection[str] = ()
    page: Callable[[str], int] = lambda device: _PAGE

    def metric_on(self, device: str) -> str:
        """Return the key of the metric that counts it."""
        return f"{self.resource} {device}" if self.on_device else self.resource

    def is_reported(self, finding: Finding, size: int) -> bool:
        """Return whether a finding reports a leak of `size` bytes in this place."""
        is_blamed = not self.blames or finding.verdict in self.blames or finding.cause in self.blames
        is_whole = finding.bytes >= (size // 2 if self.is_level else size)
        return finding.resource == self.resource and is_whole and is_blamed


def _in_list(size: int, device: str, undo: ExitStack) -> None:
    """Leak a tensor in torch's own memory that a module-level list holds."""
    undo.callback(_KEPT.clear)
    _KEPT.append(_tensor(size, device))


def _in_arena(size: int, device: str, undo: ExitStack) -> None:
    """Leak an arena that is mapped and has no tensor."""
    arena = Arena("planted", size, open_backend(device))
    undo.callback(arena.close)
    arena.map_to(size)


def _in_frozen_cycle(size: int, device: str, undo: ExitStack) -> None:
    """Leak a tensor in a cycle that nothing reaches and that `gc.freeze()` hides from the collector (vllm#38503)."""
    undo.callback(gc.unfreeze)
    _Cycle(_tensor(size, device))
    gc.freeze()


class _Cycle:
    """Keeps itself and a tensor alive until it is collected."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.itself = self


def _in_cache(size: int, device: str, undo: ExitStack) -> None:
    """Leak a model that is the key of an `lru_cache` (vllm#38503)."""
    undo.callback(_is_supported.cache_clear)
    _is_supported(_Model(_tensor(size, device)))


class _Model:
    """Holds weights."""

    def __init__(self, weights: torch.Tensor) -> None:
        self.weights = weights


@functools.cache
def _is_supported(model: _Model) -> bool:
    return model.weights.is_contiguous()


def _on_host(size: int, device: str, undo: ExitStack) -> None:
    """Leak host memory outside torch, as native code maps it, each page written to."""
    undo.callback(_KEPT.clear)
    pages = mmap.mmap(-1, size)
    for offset in range(0, size, _PAGE):
        pages[offset] = 1
    _KEPT.append(pages)


def _in_driver(size: int, device: str, undo: ExitStack) -> None:
    """Leak physical memory of a card that neither torch nor an arena knows, as native code creates it."""
    driver = open_driver(check_device(device).index)
    undo.callback(driver.release, driver.create(size))


PLANTED: Sequence[PlantedLeak] = (
    PlantedLeak("torch's pool", _in_list),
    PlantedLeak("an arena", _in_arena, "arena", page=lambda device: open_backend(device).granularity),
    PlantedLeak("behind a frozen holder", _in_frozen_cycle, blames=("frozen-garbage", "frozen-holder")),
    PlantedLeak("in an lru_cache", _in_cache, blames=("lru-cache",)),
    PlantedLeak("host memory", _on_host, "host-memory", on_device=False, is_level=True),
    PlantedLeak(
        "the driver alone",
        _in_driver,
        "driver",
        needs_card=True,
        is_level=True,
        page=lambda device: open_driver(check_device(device).index).granularity(),
    ),
)
"""Every place, in the order of the report."""


def sizes(page: int) -> tuple[int, ...]:
    """Return the sizes in bytes of the leaks planted where memory comes in pages, the largest first."""
    halved = (LARGEST >> turn for turn in range((LARGEST // SMALLEST).bit_length()))
    return tuple(size for size in halved if size % page == 0)


def smallest_found(leak: PlantedLeak, device: str, tolerances: Mapping[str, int]) -> int | None:
    """Plant leaks until the smallest that is found is known, halving the sizes left; its bytes, None if none is found.

    (What is found of a smaller leak is found of a larger one: so three runs of lives do for seven sizes.)

    Args:
        leak: what is planted in every life.
        device: "cpu" or "cuda:N", where it is planted.
        tolerances: what may stay at a shutdown, by the metric's key.
    """
    left, found = list(sizes(leak.page(device))), None
    while left:
        middle = len(left) // 2
        size = left[middle]
        if any(leak.is_reported(finding, size) for finding in findings_with(leak, device, size, tolerances)):
            found, left = size, left[middle + 1 :]
        else:
            left = left[:middle]
    return found


def findings_with(leak: PlantedLeak, device: str, size: int, tolerances: Mapping[str, int]) -> Sequence[Finding]:
    """Return what is found in lives in each of which `size` bytes are leaked; then these are taken back."""
    lives = 2 if leak.is_level else 1
    try:
        with ExitStack() as undo:
            run = _run(leak.name, device, lives, _SHORT_SCRIPT, lambda: leak.plant(size, device, undo), tolerances)
            return run.run().findings
    finally:
        gc.collect()


def _run(
    name: str,
    device: str,
    lives: int,
    script: Sequence[str],
    after_create: Callable[[], None],
    tolerances: Mapping[str, int],
) -> LifecycleRun:
    engine = EngineConfig(model="tiny", device=device, seed=0)

    class Target(FixedReference):
        def create(self, config: Mapping[str, Any]) -> None:
            super().create(config)
            after_create()

    return LifecycleRun(
        name,
        lambda: TargetLife(lambda: Target(engine)),
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
    leak = next(each for each in PLANTED if each.name == name)
    found = [smallest_found(leak, device, tolerances) for tolerances in alternatives]
    _write(file, {"found": found, "floor": sizes(leak.page(device))[-1]})


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
