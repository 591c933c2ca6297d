"""What the program's own code raises while it lets things go, as text."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def unraisable_texts() -> Iterator[list[str]]:
    """What is raised where nobody can catch it (in a `__del__`) while the block lets things go, as text.

    A test runner's own hook would keep the error, and with it what should go, and blame it on the next test.
    """
    texts: list[str] = []

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        texts.append(error_text(unraisable.exc_type, unraisable.exc_value))

    before, sys.unraisablehook = sys.unraisablehook, hook
    try:
        yield texts
    finally:
        sys.unraisablehook = before


def error_text(kind: type[BaseException], error: BaseException | None) -> str:
    """An error in one line, even if it cannot say what it is."""
    try:
        said = "" if error is None else str(error)
    except Exception:  # noqa: BLE001 - the program's own `__str__`
        said = ""
    return f"{kind.__name__}: {said}" if said else kind.__name__
