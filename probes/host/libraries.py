"""Which libraries' code is in memory: what was run for the first time shows as pages that were not resident before."""

from __future__ import annotations

import re

from lowtide.probes.originals import lines_of

_HEADER = re.compile(r"^[0-9a-f]+-[0-9a-f]+ (\S+) \S+ \S+ \S+\s*(.*)$")


def resident_code(pattern: str) -> dict[str, int]:
    """Bytes of code in physical memory of each loaded library whose file name matches, by file name.

    Args:
        pattern: a regular expression that the whole file name must match.

    Raises:
        OSError: /proc/self/smaps cannot be read.
    """
    wanted = re.compile(pattern)
    found: dict[str, int] = {}
    name = ""
    for line in lines_of("/proc/self/smaps"):
        header = _HEADER.match(line)
        if header is not None:
            file = header[2].rpartition("/")[2]
            name = file if "x" in header[1] and wanted.fullmatch(file) else ""
        elif name and line.startswith("Rss:"):
            found[name] = found.get(name, 0) + int(line.split()[1]) * 1024
    return found
