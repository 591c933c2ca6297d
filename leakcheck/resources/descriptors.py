"""Open descriptors."""

from __future__ import annotations

from lowtide.leakcheck.resources.names import Name, name_of_path
from lowtide.leakcheck.resources.resource import Resource
from lowtide.leakcheck.resources.rule import Bound, Rule
from lowtide.leakcheck.resources.shared_memory import name_of_segment


class Descriptors(Resource):
    """The open descriptors, by number and target."""

    rule = Rule(
        "file-descriptors",
        "file-descriptors",
        "process",
        "open descriptors, by number and target",
        test=Bound(settles=True),
        life=Bound(first_use=True),
        unit="file descriptors",
    )

    def identity(self, name: str) -> Name:
        """Return the path of a file; of a socket, a pipe and the like the kind.

        Args:
            name: its number and what it is open on: `14 -> /srv/model.bin`.
        """
        target = name.partition(" -> ")[2].removesuffix(" (deleted)")
        if target.startswith("/dev/shm/"):
            return name_of_segment(target.removeprefix("/dev/shm/"))
        if target.startswith("/"):
            return name_of_path(target)
        return Name(
            target.partition(":[")[0] if target.endswith("]") and target[-2].isdigit() else target, is_given=False
        )
