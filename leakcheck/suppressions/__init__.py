"""Known findings, each with its reason: read, matched and written.

`entries` matches them with findings; `toml` reads and writes the files.
"""

from lowtide.leakcheck.suppressions.entries import Suppression, Suppressions, find, load, problems, shipped
from lowtide.leakcheck.suppressions.toml import SuppressionError, write_entries

__all__ = [
    "Suppression",
    "SuppressionError",
    "Suppressions",
    "find",
    "load",
    "problems",
    "shipped",
    "write_entries",
]
