"""Known findings, each with its reason: read, matched and written.

`entries` matches them with findings; `toml` reads the files, `writing` adds to them.
"""

from lowtide.leakcheck.suppressions.entries import Suppression, Suppressions, find, load, problems, shipped
from lowtide.leakcheck.suppressions.toml import SuppressionError
from lowtide.leakcheck.suppressions.writing import write_entries

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
