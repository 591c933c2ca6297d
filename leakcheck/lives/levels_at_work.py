"""What an engine has at work beyond its arenas and pools, gone through call by call before any life is judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lowtide.leakcheck.baseline.preserved_state import PreservedState
from lowtide.leakcheck.judging.ladder import trim_heap
from lowtide.leakcheck.targets.target import Capabilities, Unjudged
from lowtide.probes.originals import gc

_SMALLEST_LEVEL = 8 << 20
"""Bytes by which host memory moves anyway."""


@dataclass(frozen=True)
class Probes:
    """How the levels are read.

    Attributes:
        host: bytes of host memory that are in no announced pool.
        driver: bytes that the driver counts beyond arenas and torch's segments.
        preserved: the tensors whose contents must survive a sleep, by name.
        graph_buffers: address and bytes of what captured graphs read, by name.
    """

    host: Callable[[], int]
    driver: Callable[[], int]
    preserved: Callable[[], Mapping[str, Any]]
    graph_buffers: Callable[[], Mapping[str, Any]]


@dataclass(frozen=True)
class LevelsAtWork:
    """What an engine had at most with one configuration, and gave back; in bytes.

    Attributes:
        host: of host memory in no pool, by phase: `running`, `asleep`.
        driver: of the driver's at work.
        asleep: of the driver's asleep: what libraries took for it.
    """

    host: Mapping[str, int]
    driver: int
    asleep: int


def levels_at_work(
    engine: Any, able: Capabilities, config: Mapping[str, Any], preserved_state: PreservedState, probes: Probes
) -> LevelsAtWork:
    """Go through all calls with one configuration, unjudged."""
    host: dict[str, int] = {}

    def note(phase: str) -> None:
        host[phase] = max(host.get(phase, 0), probes.host())

    target: Any = Unjudged(engine)
    # What an earlier engine left free in the heap would hide what this one takes of it.
    trim_heap()
    driver_before, host_before = probes.driver(), probes.host()
    target.create(config)
    note("running")
    preserved_state.before_sleep(probes.preserved())
    target.infer(list(able.prompt_lengths), able.max_tokens)
    note("running")
    if able.unfinished:
        ids = target.start([able.prompt_lengths[0]], able.max_tokens)
        target.step()
        target.abort(ids)
    if able.reload:
        target.reload()
    if able.prefix_cache:
        target.reset_prefix_cache()
    note("running")
    at_work, asleep = probes.driver() - driver_before, 0
    for level in able.sleep_levels:
        target.sleep(level, able.sleep_modes[0])
        note("asleep")
        asleep = max(asleep, probes.driver() - driver_before)
        target.wake(None)
        note("running")
        preserved_state.after_wake("wake", probes.preserved(), probes.graph_buffers())
    target.shutdown()
    if max(host.values()) - host_before > _SMALLEST_LEVEL:
        # What it did not give back is not to be excused in the lives that follow.
        gc.collect()
        trim_heap()
        host_before = max(host_before, probes.host())
    return LevelsAtWork({phase: max(0, level - host_before) for phase, level in host.items()}, at_work, asleep)


def added_up(
    plain: Mapping[str, Any], levels: Mapping[str, int], others: Sequence[tuple[Mapping[str, Any], Mapping[str, int]]]
) -> dict[str, int]:
    """What an engine has at most with any configuration, by phase, in bytes: what each setting adds may come together.

    Args:
        plain: the simplest configuration.
        levels: what it had with that.
        others: what it had with one setting changed.
    """
    found = dict(levels)
    for phase, level in levels.items():
        added: dict[str, int] = {}
        for config, changed in others:
            (name,) = [name for name, value in config.items() if value != plain[name]]
            added[name] = max(added.get(name, 0), changed.get(phase, 0) - level)
        found[phase] += sum(added.values())
    return found
