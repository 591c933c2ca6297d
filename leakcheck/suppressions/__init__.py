"""Known findings, each with its reason: read, matched and written.

`entries` matches them with findings; `toml` reads the files, `writing` adds to them.
"""

from lowtide.leakcheck.suppressions.entries import (
    Suppression,
    SuppressionError,
    Suppressions,
    find,
    load,
    problems,
    shipped,
    write_entries,
)

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
