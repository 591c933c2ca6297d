"""How another process gets at a target: the lines of Python that make it there, and the process that runs them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TargetSource:
    """How a program gets at a target.

    Attributes:
        imports: lines.
        factory: an expression for what makes a target.
        context: an expression for a context manager around it all, such as a defect; may be empty.
    """

    imports: Sequence[str]
    factory: str
    context: str = ""

    def program(self, module: str, function: str, *arguments: object) -> str:
        """Python that calls a module's function with the factory and these arguments, within the context."""
        imports = sorted({*self.imports, f"from {module} import {function}"})
        call = f"{function}({', '.join([self.factory, *map(repr, arguments)])})"
        within = [f"with {self.context}:", f"    {call}"] if self.context else [call]
        return "\n".join([*imports, *within])


_DEAF = """import signal
signal.signal(signal.SIGINT, lambda number, frame: None)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
"""
"""A handler, and nothing that an engine's own processes would inherit."""


def start_program(program: str, *, env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen[bytes]:
    """A process of its own that runs Python, and finds the modules that this one finds.

    A terminal's Ctrl-C, which it gets from its beginning on, is for the one who has started it, and ends it.

    Args:
        program: its text.
        env: variables of its environment besides this one's.
        options: of `subprocess.Popen`.
    """
    paths = os.pathsep.join(entry for entry in sys.path if entry)
    known = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        return subprocess.Popen(
            [sys.executable, "-c", _DEAF + program], env={**os.environ, "PYTHONPATH": paths, **(env or {})}, **options
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, known)
