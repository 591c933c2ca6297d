"""What is written in C, where it could be built: each has its equal in Python, which does the same without."""

from __future__ import annotations

try:
    from lowtide.probes.native.heap_walk import Walk
except ImportError:
    # No compiler, or a Python without the stable interface.
    Walk = None  # type: ignore[assignment,misc]

__all__ = ["Walk"]
