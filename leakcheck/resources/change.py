"""A change that can be made: what a finding offers to try, and what the ladder and the end of the tests try."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    """Something that may end what a finding is about.

    Attributes:
        code: it, as code or in words.
        effect: what is different afterwards; empty if nothing of the program's is.
        apply: makes it.
        is_code: whether `code` is code that runs as it stands.
    """

    code: str
    effect: str
    apply: Callable[[], object]
    is_code: bool = True
