"""Fails every fault point of every stage in turn, each in a life of its own, and sees what becomes of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lowtide.leakcheck.lives.checked_life import CheckedLife, Lives
from lowtide.leakcheck.lives.script import Call, Fault, LifeError
from lowtide.leakcheck.targets.faults import KINDS, Kind
from lowtide.leakcheck.targets.target import Capabilities, TargetFactory
from lowtide.reports.schema import Finding, NotMeasured


@dataclass(frozen=True)
class SweptCall:
    """A call of which every fault point is failed, and how an engine comes to where it is made.

    Attributes:
        name: as it is shown.
        before: the calls that lead there, `create` included.
        call: the one that is to fail.
    """

    name: str
    before: tuple[Call, ...]
    call: Call


@dataclass(frozen=True)
class Swept:
    """What came of failing the fault points of one kind in one stage.

    Attributes:
        stage: its name.
        kind: of the points.
        points: how many there are.
        raised: in how many of them the call failed; in the others it did without what failed.
        findings: what was wrong, of the first point at which anything was.
        life: the life in which it was; empty if all was well.
        not_measured: what could not be judged.
    """

    stage: str
    kind: Kind
    points: int
    raised: int
    findings: tuple[Finding, ...] = ()
    life: tuple[Call, ...] = ()
    not_measured: tuple[NotMeasured, ...] = ()


@dataclass(frozen=True)
class SweptLife:
    """What came of one life of a sweep.

    Attributes:
        points: how many points of its kind the stage passed.
        raised: whether the stage failed.
        findings: what was wrong.
        life: the life, if anything was.
        not_measured: what could not be judged in it, or in earlier ones of its process.
    """

    points: int
    raised: bool = False
    findings: tuple[Finding, ...] = ()
    life: tuple[Call, ...] = ()
    not_measured: tuple[NotMeasured, ...] = ()


def stages(capabilities: Capabilities, config: Mapping[str, Any]) -> list[SweptCall]:
    """The stages of a life that a target with these capabilities has."""
    able = capabilities
    create = Call("create", {"config": dict(config)} if config else {})
    longest = max(able.prompt_lengths)
    infer = Call("infer", {"prompt_lengths": [longest], "max_tokens": min(2, able.max_tokens)})
    found = [SweptCall("create", (), create), SweptCall("infer", (create,), infer)]
    if able.unfinished:
        start = Call("start", {"prompt_lengths": [longest], "max_tokens": able.max_tokens})
        found.append(SweptCall("step", (create, start), Call("step")))
    if able.prefix_cache:
        found.append(SweptCall("reset_prefix_cache", (create, infer), Call("reset_prefix_cache")))
    if able.reload:
        found.append(SweptCall("reload", (create, infer), Call("reload")))
    for level in able.sleep_levels:
        sleep = Call("sleep", {"level": level, "mode": able.sleep_modes[0]})
        found.append(SweptCall(f"sleep({level})", (create, infer), sleep))
        found.append(SweptCall(f"wake from {level}", (create, infer, sleep), Call("wake")))
        # The second time there is a host copy already.
        again = (create, infer, sleep, Call("wake"))
        found.append(SweptCall(f"sleep({level}) again", again, sleep))
    found.append(SweptCall("shutdown", (create, infer), Call("shutdown")))
    if able.sleep_levels:
        found.append(SweptCall("shutdown asleep", (create, infer, sleep), Call("shutdown")))
    return found


def sweep(
    factory: TargetFactory,
    *,
    config: Mapping[str, Any],
    kinds: Sequence[Kind] = KINDS,
    among: Collection[str] | None = None,
    every: int = 1,
    listener: Callable[[str, Kind, int, int], None] = lambda stage, kind, at, points: None,
) -> Iterator[Swept]:
    """Fail every point; of each, the error that comes out must be the one that was raised, the state and the memory
    those of before, a second try must work, and the life must end with nothing left.

    Args:
        factory: makes a target.
        config: of every engine.
        kinds: what is to fail.
        among: the names of the stages in which it is; None for all.
        every: only each so-many-th point is failed, from the first on.
        listener: hears of each point before its life: stage, kind, which one, of how many.

    Raises:
        TargetError: the target cannot be driven.
    """
    # Whether inferring leaves something in another process is for random lives: they infer often enough.
    with Lives(factory, growth=False) as lives:
        for stage in stages(lives.capabilities, config):
            if among is not None and stage.name not in among:
                continue
            for kind in kinds:
                counted = live(lives, stage, Fault(kind, None))
                raised = 0
                bad = counted
                for at in range(0, counted.points, every):
                    if bad.findings:
                        break
                    listener(stage.name, kind, at, counted.points)
                    bad = live(lives, stage, Fault(kind, at))
                    raised += bad.raised
                unmeasured = lives.unmeasured
                yield Swept(stage.name, kind, counted.points, raised, bad.findings, bad.life, unmeasured)
                if counted.findings:
                    # It goes wrong without anything that fails: what fails in it besides says nothing.
                    break


def live(lives: Lives, stage: SweptCall, fault: Fault) -> SweptLife:
    """A life in which one point of a stage fails, or in which they are counted."""
    life = CheckedLife(lives)
    points = 0
    try:
        for call in stage.before:
            _make(life, call)
        succeeded = _make(life, stage.call, fault)
        points = life.points
        if fault.at is None:
            life.close()
            return SweptLife(points, not_measured=lives.unmeasured)
        if not succeeded:
            _make(life, stage.call)
        if life.model.phase == "closed":
            _make(life, stage.before[0])
        _to_the_end(life)
    except LifeError as error:
        life.abandon()
        return SweptLife(points, False, error.findings, tuple(life.calls), lives.unmeasured)
    return SweptLife(points, not succeeded, not_measured=lives.unmeasured)


def _to_the_end(life: CheckedLife) -> None:
    """Everything that the engine has to do still works; what it says is compared."""
    able, model = life.target.capabilities, life.model
    if model.phase == "asleep":
        life.wake()
    while model.unfinished:
        life.step()
    life.infer([min(able.prompt_lengths), max(able.prompt_lengths)][: able.max_requests], min(2, able.max_tokens))
    life.close()


def _make(life: CheckedLife, call: Call, fault: Fault | None = None) -> bool:
    return bool(getattr(life, call.name)(**call.arguments, fault=fault))
