"""What an engine must be in after any history of calls: the model that the fuzzer compares a target with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from lowtide.leakcheck.targets.target import Capabilities

Phase: TypeAlias = Literal["new", "running", "asleep", "closed"]

EXCLUSIVE = ("infer", "reload")
"""Calls that are not made, or refused, while requests are unfinished."""


@dataclass
class LifeModel:
    """The state of one target, derived from the calls that succeeded.

    Attributes:
        capabilities: of the target.
        phase: where it is in its life.
        awake: of the wake tags, those that are awake.
        unfinished: (prompt length, max_tokens) of the requests that have not ended, by id.
        level: of the last sleep; 0 before the first.
    """

    capabilities: Capabilities
    phase: Phase = "new"
    awake: set[str] = field(default_factory=set)
    unfinished: dict[str, tuple[int, int]] = field(default_factory=dict)
    level: int = 0

    @property
    def calls(self) -> tuple[str, ...]:
        """All calls that the target has, in whatever state."""
        able = self.capabilities
        return (
            "create",
            "infer",
            *(("start", "step", "abort") if able.unfinished else ()),
            *(("sleep", "wake") if able.sleep_levels else ()),
            *(("reset_prefix_cache",) if able.prefix_cache else ()),
            *(("reload",) if able.reload else ()),
            "shutdown",
        )

    @property
    def legal(self) -> tuple[str, ...]:
        """The calls that must succeed now."""
        if self.phase in ("new", "closed"):
            allowed: tuple[str, ...] = ("create", "shutdown")
        elif self.phase == "asleep":
            allowed = ("wake", "shutdown", *(("reload",) if "weights" in self.awake else ()))
        else:
            allowed = tuple(call for call in self.calls if call not in ("create", "wake"))
        if self.unfinished:
            allowed = tuple(call for call in allowed if call not in EXCLUSIVE)
        return tuple(call for call in self.calls if call in allowed)

    @property
    def illegal(self) -> tuple[str, ...]:
        """The calls that must be refused now; none for a target that does not promise to."""
        if self.capabilities.illegal_call is None:
            return ()
        return tuple(call for call in self.calls if call not in self.legal)

    @property
    def wakeable(self) -> tuple[str, ...]:
        """The parts that can be asked for one by one now."""
        return tuple(tag for tag in self.capabilities.wake_tags if tag not in self.awake)

    @property
    def situation(self) -> str:
        """The state in a word, as coverage counts it."""
        if self.phase == "running":
            return "running, requests unfinished" if self.unfinished else "running"
        if self.phase == "asleep":
            awake = f", {' and '.join(sorted(self.awake))} awake" if self.awake else ""
            return f"asleep at level {self.level}{awake}"
        return self.phase

    def created(self) -> None:
        """`create` succeeded."""
        self.phase = "running"
        self.awake = set(self.capabilities.wake_tags)

    def started(self, ids: Sequence[str], prompt_lengths: Sequence[int], max_tokens: int) -> None:
        """`start` succeeded."""
        self.unfinished |= {each: (length, max_tokens) for each, length in zip(ids, prompt_lengths, strict=True)}

    def ended(self, ids: Iterable[str]) -> Mapping[str, tuple[int, int]]:
        """Requests ended; (prompt length, max_tokens) of those that were unfinished."""
        return {each: self.unfinished.pop(each) for each in ids if each in self.unfinished}

    def slept(self, level: int) -> None:
        """`sleep` succeeded."""
        self.phase, self.level = "asleep", level
        self.awake.clear()
        self.unfinished.clear()

    def woke(self, tags: Sequence[str] | None) -> None:
        """`wake` succeeded."""
        self.awake |= set(self.capabilities.wake_tags if tags is None else tags)
        if self.awake >= set(self.capabilities.wake_tags):
            self.phase = "running"

    def shut_down(self) -> None:
        """`shutdown` succeeded, or raised: the engine is closed either way."""
        if self.phase != "new":
            self.phase = "closed"
        self.awake.clear()
        self.unfinished.clear()
