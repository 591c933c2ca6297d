"""What a defect is, and how one is put into the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from lowtide.engine.config import EngineConfig
from lowtide.engine.errors import ConfigError

EXTENSIONS = "lowtide.engine.defects"
"""The module whose functions put a bug into a process that the engine starts."""


@dataclass(frozen=True)
class Defect:
    """One historical bug.

    Attributes:
        name: what it is switched on by.
        source: where it happened.
        summary: what went wrong, in one line.
        activate: puts the bug into the engine while its context lasts.
        expected: the resource and the cause of every finding that it makes, sorted; none where it is no leak.
        settings: what the engine must be configured with for the bug to have a place.
        trigger: what must happen from outside for it to show, while its context lasts; an engine without the bug takes
            it without a finding.
        devices: the kinds of device on which it can show.
        expected_on_card: `expected` on a card, where that is something else.
        prompt_scale: how many times as long as usual the prompts must be.
        lives: in how many lives it shows on a CPU: two where the first one's libraries would hide it, or where its
            processes would infer too rarely to be judged.
        expected_in_core: `expected` where the engine's core has a process of its own, where that is something else:
            the end of a process gives back whatever its shutdown has kept.
    """

    name: str
    source: str
    summary: str
    activate: Callable[[], AbstractContextManager[None]]
    expected: tuple[tuple[str, str], ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    trigger: Callable[[], AbstractContextManager[None]] = nullcontext
    devices: tuple[str, ...] = ("cpu", "cuda")
    expected_on_card: tuple[tuple[str, str], ...] | None = None
    prompt_scale: int = 1
    lives: int = 1
    expected_in_core: tuple[tuple[str, str], ...] | None = None

    def lives_on(self, device: str) -> int:
        """In how many lives it shows on `cpu` or `cuda`; a card's libraries always hide something in the first."""
        return self.lives if device == "cpu" else 2

    def expected_on(self, device: str, *, in_core: bool = False) -> tuple[tuple[str, str], ...]:
        """`expected`, on `cpu` or `cuda`; with `in_core`, of an engine whose core has a process of its own."""
        if in_core and self.expected_in_core is not None:
            return self.expected_in_core
        return self.expected if device == "cpu" or self.expected_on_card is None else self.expected_on_card

    @property
    def cards(self) -> int:
        """How many cards an engine has on which it shows; 0 where a CPU will do."""
        return 0 if "cpu" in self.devices else int(self.settings.get("tensor_parallel_size", 1))

    def check(self, device: str) -> None:
        """Refuse a device on which it cannot show."""
        kind = device.partition(":")[0]
        if kind not in self.devices:
            raise ConfigError(f"defect {self.name!r} cannot show on {kind}: use --device {self.devices[0]}")

    def configure(self, config: EngineConfig, *, twin: bool = False) -> EngineConfig:
        """The configuration with what the bug needs; the processes that the engine starts get the bug too.

        A `twin`, the engine without the bug, has processes that get what makes the bug show, alone.
        """
        self.check(config.device)
        configured = replace(config, **self.settings)
        if not configured.works_elsewhere:
            return configured
        extension = self.extension("triggered" if twin else "switched_on")
        return replace(configured, process_extensions=(*configured.process_extensions, extension))

    def extension(self, how: Literal["switched_on", "activated", "triggered"]) -> str:
        """What puts it into a process that the engine starts, as `EngineConfig.process_extensions` names it."""
        return f"{EXTENSIONS}:{how}={self.name}"

    @contextmanager
    def switched_on(self) -> Iterator[None]:
        """The bug, and what makes it show."""
        with self.trigger(), self.activate():
            yield


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """`owner` has another value under `name` while the context lasts."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
