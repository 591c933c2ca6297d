"""Files that processes have left in the temporary folder."""

from __future__ import annotations

from lowtide.leakcheck.resources.names import Name, name_of_path
from lowtide.leakcheck.resources.resource import Resource
from lowtide.leakcheck.resources.rule import Bound, Rule


class TemporaryFiles(Resource):
    """The files, by path."""

    rule = Rule(
        "temporary-files",
        "temporary-files",
        "process",
        "what a child that this process killed had open, listened on or numbered in the temporary folder",
        test=Bound(settles=True),
        life=Bound(settles=True),
        unit="temporary files",
    )

    def identity(self, name: str) -> Name:
        """Return the path, without what `tempfile` adds to it."""
        return name_of_path(name)
