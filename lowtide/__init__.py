"""lowtide: does an inference engine's memory come back, and if not, who holds it?

The folders at the top of the repository are the product; this package is the one name under which they are imported
(`lowtide.engine`, `lowtide.probes`, `lowtide.leakcheck`, `lowtide.reports`). Importing it loads neither torch nor
anything heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lowtide.probes.stages import stage

if TYPE_CHECKING:
    from lowtide.leakcheck.check import LeakCheck

__version__ = "0.1.0"

__all__ = ["LeakCheck", "__version__", "stage"]


def __getattr__(name: str) -> Any:
    if name == "LeakCheck":
        from lowtide.leakcheck.check import LeakCheck

        return LeakCheck
    raise AttributeError(f"module 'lowtide' has no attribute {name!r}")
