"""Files that were left in the temporary folder."""

from __future__ import annotations

import functools
import stat
from collections.abc import Collection

from lowtide.leakcheck.resources.change import Change
from lowtide.leakcheck.resources.names import Name, name_of_path
from lowtide.leakcheck.resources.resource import Resource
from lowtide.leakcheck.resources.rule import Bound, Rule
from lowtide.probes.originals import os


class TemporaryFiles(Resource):
    """The files, by path."""

    rule = Rule(
        "temporary-files",
        "temporary-files",
        "process",
        "sockets in the temporary folder that this process bound, closed and did not unlink, and what a child that it "
        "killed had open, listened on or numbered there",
        test=Bound(settles=True),
        life=Bound(settles=True),
        unit="temporary files",
    )

    def identity(self, name: str) -> Name:
        """Return the path, without what `tempfile` adds to it."""
        return name_of_path(name)

    def changes(self, names: Collection[str]) -> list[Change]:
        """Return the removal of the sockets among them: nobody can connect to one whose maker has closed it."""
        return [
            Change(f"os.unlink({path!r})", f"{path} is removed", functools.partial(os.unlink, path))
            for path in sorted(names)
            if stat.S_ISSOCK(_mode_of(path))
        ]

    def advice(self, names: Collection[str]) -> str:
        """Return who removes them."""
        return (
            "call os.unlink() with the path where the socket is closed"
            if any(stat.S_ISSOCK(_mode_of(path)) for path in names)
            else ""
        )


def _mode_of(path: str) -> int:
    try:
        return os.lstat(path).st_mode
    except OSError:  # it is gone
        return 0
