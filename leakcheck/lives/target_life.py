"""A user's target as a life: what `lowtide check` drives through the fixed script."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

# Also for who runs it: where there is no torch, that is said before the target is made.
import torch

from lowtide.leakcheck.judging.contract import holders
from lowtide.leakcheck.lives.lifecycle import LifecycleRun
from lowtide.leakcheck.lives.script import Event, asked, simplest
from lowtide.leakcheck.lives.tenant import tenant_of
from lowtide.leakcheck.targets.target import Capabilities, TargetFactory, make_target
from lowtide.probes.device.allocator_snapshots import AllocatorSnapshots

if TYPE_CHECKING:
    from lowtide.probes.device.driver import Driver


def script_of(capabilities: Capabilities) -> tuple[str, ...]:
    """Return the stages of one life: work, then a sleep of every level that there is, with work again after each."""
    stages = ["create", "infer"]
    for level in capabilities.sleep_levels:
        stages += [f"sleep({level})", "wake", "infer"]
    if capabilities.reload:
        stages += ["reload", "infer"]
    return (*stages, "shutdown")


def check_run(
    name: str,
    factory: TargetFactory,
    *,
    driver: Driver,
    cycles: int,
    listener: Callable[[Event], None] = lambda event: None,
    tenant: bool = False,
    tolerances_on: Callable[[str], Mapping[str, int]] = lambda device: {},
    snapshots: AllocatorSnapshots | None = None,
) -> LifecycleRun:
    """Return the run of `cycles` fixed lives of a factory's targets.

    Args:
        name: of the subject in the report.
        factory: makes a target; one for each life.
        driver: whom to ask for a card's figures.
        cycles: how many lives.
        listener: hears of each stage before it starts, and of the judgement after each shutdown.
        tenant: whether a second process takes what each sleep has freed on a card.
        tolerances_on: gives what one life on a device may leave in place of the table's tolerances.
        snapshots: keeps what torch's allocator has on a card after each sleep and shutdown that leaves something.

    Raises:
        TargetError: what it makes cannot be driven.
    """
    able = make_target(factory).capabilities
    return LifecycleRun(
        name,
        lambda: TargetLife(factory),
        device=able.device,
        driver=driver,
        cycles=cycles,
        listener=listener,
        script=script_of(able),
        preserving={f"sleep({level})" for level in able.preserving_levels},
        emptying={f"sleep({level})" for level in able.emptying_levels},
        tenant=tenant_of(able.device) if tenant else None,
        tolerances=tolerances_on(able.device),
        snapshots=snapshots,
    )


class TargetLife:
    """One life of a target in its simplest configuration, with one prompt of each of its lengths.

    Args:
        factory: makes the target.

    Raises:
        TargetError: what it makes cannot be driven.
    """

    def __init__(self, factory: TargetFactory) -> None:
        # What it has besides is asked for only where its capabilities, or its own methods, say so.
        self._target: Any = make_target(factory)
        self._able: Capabilities = self._target.capabilities

    @property
    def engine(self) -> object:
        """What a user of the engine holds: the target's `engine`, or the target itself."""
        return getattr(self._target, "engine", None) or self._target

    def create(self) -> None:
        """Make the engine."""
        self._target.create(simplest(self._able))

    def infer(self) -> Sequence[Sequence[int]]:
        """Generate for all prompts, in batches of as many as the target takes."""
        lengths, most = list(self._able.prompt_lengths), self._able.max_requests
        batches = [lengths[start : start + most] for start in range(0, len(lengths), most)]
        return [tokens for batch in batches for tokens in self._target.infer(batch, self._able.max_tokens)]

    def sleep(self, level: int) -> None:
        """Put it to sleep, with no request unfinished."""
        self._target.sleep(level, self._able.sleep_modes[0])

    def wake(self) -> None:
        """Wake all of it."""
        self._target.wake(None)

    def reload(self) -> None:
        """Load its weights anew."""
        self._target.reload()

    def shutdown(self) -> None:
        """Shut it down."""
        self._target.shutdown()

    def preserved(self) -> Mapping[str, torch.Tensor]:
        """Return what must survive a sleep, by name, if the target reports it."""
        tensors: Mapping[str, torch.Tensor] = asked(self._target, "preserved") or {}
        return tensors

    def graph_buffers(self) -> Mapping[str, tuple[int, int]]:
        """Return address and bytes of what captured graphs read, by name, if the target reports it."""
        buffers: Mapping[str, tuple[int, int]] = asked(self._target, "graph_buffers") or {}
        return buffers

    def kv_blocks_held(self) -> Mapping[str, int]:
        """Return who holds how many KV blocks although no request does, once the target has forgotten its prefixes."""
        if not self._able.prefix_cache or self._target.reset_prefix_cache():
            return {}
        usage = asked(self._target, "kv_usage")
        return holders(usage) if usage else {"a holder that the engine does not name": 0}

    def step(self) -> None:
        """Make one step, where the target has steps."""
        if self._able.unfinished:
            self._target.step()
