"""Refusals of settings that cannot work; each names the setting and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lowtide.engine.errors import ConfigError


def one_of(name: str, value: str, allowed: Sequence[str] | Mapping[str, Any]) -> None:
    """Refuse a value that is not among those allowed.

    Raises:
        ConfigError: it is such a one.
    """
    if value not in allowed:
        raise ConfigError(f"{name} {value!r} is not supported; supported are {', '.join(allowed)}")


def positive(name: str, value: float) -> None:
    """Refuse a number that is not finite and above 0.

    Raises:
        ConfigError: it is such a one.
    """
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{name} {value} must be above 0")


def positive_int(name: str, value: object) -> None:
    """Refuse what is no whole number of at least 1.

    Raises:
        ConfigError: it is such a one.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} {value!r} must be a whole number of at least 1")


def int_between(name: str, value: object, low: int, high: int) -> None:
    """Refuse what is no whole number from `low` to `high`.

    Raises:
        ConfigError: it is such a one.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"{name} {value!r} must be a whole number from {low} to {high}")
