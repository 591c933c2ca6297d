"""What must hold after every call of a life: its pages, what it says, its state; and how a breach is reported.

What an engine has at work beyond its arenas and pools is gone through before any life is judged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

from lowtide.leakcheck.findings.life_findings import ENGINE
from lowtide.leakcheck.findings.slept_tensors import SleptTensors, not_judged
from lowtide.leakcheck.findings.storage_holders import Context
from lowtide.leakcheck.judging import contract
from lowtide.leakcheck.judging.fingerprints import fingerprint
from lowtide.leakcheck.judging.ladder import trim_heap
from lowtide.leakcheck.judging.preserved_state import PreservedState
from lowtide.leakcheck.lives.script import Call, LifeModel, failure_of
from lowtide.leakcheck.lives.shared_lives import SharedLives
from lowtide.leakcheck.processes.kept_asleep import explain_kept
from lowtide.leakcheck.suppressions.entries import shipped
from lowtide.leakcheck.targets.target import Capabilities, LifecycleTarget, Unjudged, make_target
from lowtide.probes.host.counters import anonymous_bytes
from lowtide.probes.originals import gc
from lowtide.probes.stages import announced_pools
from lowtide.reports.schema import Cause, Finding, ResourceName
from lowtide.reports.sizes import format_bytes

_SMALLEST_LEVEL = 8 << 20
"""Bytes by which host memory moves anyway."""


class LifeChecks:
    """One target in a life, compared with the model; a check raises `LifeError` where something is not as it must be.

    Args:
        lives: what this life shares with others; entered.

    Attributes:
        model: what it must be in.
        calls: those that were made.
    """

    def __init__(self, lives: SharedLives) -> None:
        self._lives = lives
        self._capabilities = lives.capabilities
        self._target: Any = make_target(lives.factory)
        self._device = self._capabilities.device
        self._preserved_state = PreservedState(self._device)
        self._pages_at_work: dict[str, int] = {}
        # Where earlier lives' memory is that did not come back.
        self._others: frozenset[int] = frozenset()
        self._slept = SleptTensors(self._device.partition(":")[0])
        self.model = LifeModel(self._capabilities)
        self.calls: list[Call] = []

    @property
    def target(self) -> LifecycleTarget:
        """What is driven."""
        return self._target  # type: ignore[no-any-return]

    def _unchanged(self, what: str, before: Mapping[str, int]) -> None:
        """Check that what failed has left the memory as it was."""
        now = self._pages()
        for tag in sorted({*before, *now}):
            # The workspaces grow with what was computed before it failed, and are the engine's to keep.
            if tag != "workspace" and before.get(tag, 0) != now.get(tag, 0):
                self._raise(
                    [
                        self._finding(
                            "arena",
                            f"arena {tag!r} has {format_bytes(now.get(tag, 0))} mapped after {what} "
                            f"{format_bytes(before.get(tag, 0))} before",
                            cause="not-restored",
                            suspect=tag,
                            amount=abs(now.get(tag, 0) - before.get(tag, 0)),
                            holder=f"arena {tag!r}",
                        )
                    ]
                )

    def _check_state(self, name: str) -> None:
        state = asked(self._target, "state")
        # An engine that could not be made is as new as one that was never asked for.
        same = {self.model.phase, "new"} if self.model.phase == "closed" else {self.model.phase}
        if state is not None and state not in same:
            self._fail("state", f"the engine says that it is {state} after {name}; it must be {self.model.phase}")

    def _check_kv_blocks(self, name: str) -> None:
        usage = asked(self._target, "kv_usage")
        if usage is None:
            return
        if usage.available + usage.evictable != usage.total - usage.held:
            self._fail(
                "kv-blocks",
                f"KV blocks do not add up after {name}: {usage.available} available and {usage.evictable} evictable "
                f"are not {usage.total} less {usage.held} held",
            )
        nobody = usage.held - usage.pending_transfer
        if not self.model.unfinished and nobody:
            self._raise(contract.after_idle(name, self._device, {"no request": nobody}, None))

    def _check_pages(self, name: str) -> None:
        """Which pages an engine has follows from what is awake."""
        now = self._pages()
        for tag, at_work in self._pages_at_work.items():
            if tag == "workspace":
                wanted = now.get(tag, 0) if self.model.phase == "running" else 0
            else:
                asleep = self.model.phase == "asleep" and tag != "runtime" and tag not in self.model.awake
                wanted = 0 if asleep else at_work
            if now.get(tag, 0) != wanted:
                cause: Cause = "not-restored" if wanted else "unknown"
                said = (
                    f"arena {tag!r} has {format_bytes(now.get(tag, 0))} mapped after {name}, not {format_bytes(wanted)}"
                )
                self._fail("arena", said, tag, cause, abs(now.get(tag, 0) - wanted), f"arena {tag!r}")

    def _begin_stage(self, name: str) -> None:
        """Note the tensors before a sleep or a wake, of an engine that announces no arenas, by which it is judged."""
        if not self._pages_at_work:
            self._slept.begin(name)

    def _check_slept(self, level: int) -> None:
        """Judge what an engine without arenas has given back in a sleep of a level."""
        stage = f"sleep({level})"
        self._raise(self._slept.only_collected(stage))
        sizes = self._slept.kept_asleep()
        if sizes is not None and level in self._capabilities.emptying_levels:
            holders = self._slept.explain_kept(stage, self._context())
            self._raise([explain_kept(stage, self._device, sizes, None, {}, holders)])
        elif sizes is not None:
            self._lives.not_measured[not_judged(stage, sizes, self._slept.kind)] = None

    def _check_woke(self) -> None:
        """Check that an engine without arenas has no more after a wake than before the sleep."""
        self._raise(self._slept.more_awake("wake", self._context))

    def _context(self) -> Context:
        return Context(roots=[(ENGINE, getattr(self._target, "engine", self._target))], living=True)

    def _host_outside(self) -> int:
        """Return the bytes of the process's own host memory beyond announced pools and what imported modules took."""
        pooled = sum(pool.mapped for pool in announced_pools() if pool.device == "cpu")
        return anonymous_bytes() - pooled - self._lives.imported.growth("host-memory")

    def _outside(self, unknown: int = 0) -> int:
        """Return the driver's bytes beyond arenas and torch's segments; `unknown` where it reports nothing."""
        amount = self._lives.counters.read().amounts.get(f"driver {self._device}")
        return unknown if amount is None else amount

    def _driver_of_imports(self) -> int:
        return self._lives.imported.growth(f"driver {self._device}")

    def _left(self) -> list[Finding]:
        """Report what the life has left behind, now that it is over."""
        verdict = self._lives.end()
        self._lives.not_measured.update(dict.fromkeys(verdict.not_measured))
        found = shipped().apply(verdict.findings, date.today()).findings
        return [finding for finding in found if finding.suppressed_by is None]

    def _finished(self, outputs: Mapping[str, Sequence[int]]) -> None:
        asked = self.model.ended(outputs)
        for each, (length, max_tokens) in asked.items():
            self._compare(length, max_tokens, outputs[each])

    def _compare(self, length: int, max_tokens: int, tokens: Sequence[int]) -> None:
        wanted = self._lives.expected(length, max_tokens)
        if list(tokens) != list(wanted):
            self._fail(
                "contents",
                f"a prompt of {length} tokens gives {list(tokens)}; a fresh engine gives {list(wanted)}",
                "tokens",
                "not-restored",
            )

    def _pages(self) -> dict[str, int]:
        """Return the bytes with pages behind them, by arena tag, of this life's engines."""
        elsewhere: Mapping[str, int] | None = asked(self._target, "pages")
        if elsewhere is not None:
            return dict(elsewhere)
        found: dict[str, int] = {}
        for pool in announced_pools():
            if pool.kind == "arena" and pool.device == self._device:
                mapped = sum(length for address, length in pool.ranges if address not in self._others)
                found[pool.tag] = found.get(pool.tag, 0) + mapped
        return found

    def _preserved(self) -> Mapping[str, Any]:
        return asked(self._target, "preserved") or {}

    def _graph_buffers(self) -> Mapping[str, Any]:
        return asked(self._target, "graph_buffers") or {}

    def _fail(
        self,
        resource: ResourceName,
        message: str,
        suspect: str = "",
        cause: Cause = "unknown",
        amount: int = 0,
        holder: str | None = None,
    ) -> None:
        self._raise([self._finding(resource, message, cause=cause, suspect=suspect, amount=amount, holder=holder)])

    def _finding(
        self,
        resource: ResourceName,
        message: str,
        *,
        cause: Cause,
        suspect: str,
        amount: int,
        holder: str | None,
    ) -> Finding:
        stage = self.calls[-1].name
        print_of = fingerprint(resource=resource, device=self._device, stage=stage, suspects=(suspect, cause))
        return Finding(
            resource=resource,
            cause=cause,
            bytes=amount,
            count=1,
            device=self._device,
            stage=stage,
            message=message,
            fingerprint=print_of,
            holder=holder,
        )

    def _raise(self, findings: Sequence[Finding]) -> None:
        if findings:
            raise failure_of(findings)


def void(result: object) -> None:
    """Nothing follows from the result."""


def asked(target: Any, name: str) -> Any:
    """Return what a target says, where it has something to say."""
    method = getattr(target, name, None)
    return None if method is None else method()


def said(error: BaseException) -> str:
    """Return an error's type and message."""
    return f"{type(error).__name__}: {error}"


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
    """Return the most bytes of an engine in any configuration, by phase: what each setting adds may come together.

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
