"""The calls of a life as they are made and written down, and how one fails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lowtide.leakcheck.targets.faults import Kind
from lowtide.leakcheck.targets.target import Capabilities
from lowtide.reports.schema import Finding


class LifeError(AssertionError):
    """A call of a life did not do what it must; `findings` say what.

    Each kind of finding has a subclass of its own, so that a search that shrinks a failing life keeps to the same one.
    """

    findings: tuple[Finding, ...] = ()
    kind: tuple[str, str] = ("", "")


@dataclass(frozen=True)
class Fault:
    """What is to fail in a call: the fault point number `at`, from 0 on, of a kind; None counts them only."""

    kind: Kind
    at: int | None = 0


@dataclass(frozen=True)
class Call:
    """One call of a life, as it was made.

    Attributes:
        name: of the call.
        arguments: by name.
        fault: what was to fail in it.
        illegal: whether it had to be refused.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    fault: Fault | None = None
    illegal: bool = False

    def __str__(self) -> str:
        parts = [f"{name}={value!r}" for name, value in self.arguments.items()]
        if self.fault is not None:
            parts.append(f"fault={self.fault!r}")
        if self.illegal:
            return f"illegal({', '.join([repr(self.name), *parts])})"
        return f"{self.name}({', '.join(parts)})"


@dataclass
class Coverage:
    """What the lives of one search have been through.

    Attributes:
        lives: how many there were.
        calls: how many calls were made in them.
        states: situations of the model that were reached.
        edges: (situation, call, situation) that were gone through.
        failed: whether a life failed; a search ends with the first.
    """

    lives: int = 0
    calls: int = 0
    states: set[str] = field(default_factory=set)
    edges: set[tuple[str, str, str]] = field(default_factory=set)
    failed: bool = False


def simplest(capabilities: Capabilities) -> dict[str, Any]:
    """The first value of every setting."""
    return {name: values[0] for name, values in capabilities.configs.items()}


def varied(capabilities: Capabilities) -> list[dict[str, Any]]:
    """The simplest configuration, and it with each other value of each setting."""
    plain = simplest(capabilities)
    others = [(name, value) for name, values in capabilities.configs.items() for value in dict.fromkeys(values[1:])]
    return [plain, *({**plain, name: value} for name, value in others if value != plain[name])]


_KINDS: dict[tuple[str, str], type[LifeError]] = {}


def failure_of(findings: Sequence[Finding]) -> LifeError:
    """The failure that has these findings; its class is that of the first one's resource and cause."""
    kind = (findings[0].resource, findings[0].cause)
    if kind not in _KINDS:
        _KINDS[kind] = type("LifeError", (LifeError,), {"kind": kind, "__module__": __name__})
    failure = _KINDS[kind]("; ".join(finding.message for finding in findings))
    failure.findings = tuple(findings)
    return failure
