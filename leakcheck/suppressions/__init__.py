"""Known findings, each with its reason: read, matched and written.

`entries` matches them with findings; `toml` reads and writes the files.
"""

from lowtide.leakcheck.suppressions.entries import Suppressions

__all__ = ["Suppressions"]
