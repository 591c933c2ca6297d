"""lowtide: does an inference engine's memory come back, and if not, who holds it?

The folders at the top of the repository are the product; this package is the one name under which they are imported
(`lowtide.engine`, `lowtide.probes`, `lowtide.leakcheck`, `lowtide.reports`). Importing it loads neither torch nor
anything heavy.
"""

from lowtide.probes.stages import stage

__version__ = "0.1.0"

__all__ = ["__version__", "stage"]
