"""What the program opens and leaves in folders: descriptors, entries of `/dev/shm`, temporary files."""

from __future__ import annotations

import functools
import re
import stat
from collections.abc import Collection

from lowtide.leakcheck.resources.resource import Bound, Change, Name, Resource, Rule, name_of_path, without_numbers
from lowtide.probes.originals import os

_MADE_UP = re.compile(
    r"(psm_|wnsm_|sem\.mp-|sem\.loky-|mp-|pym-|torch_|nccl-|cuda\.shm\.|__KMP_REGISTERED_LIB_)[\w.-]*"
)

_BY_TEMPFILE = re.compile(r"(?<=[-.])(?=[a-z]*[0-9_])[a-z0-9_]{8}$")
"""What `tempfile` adds to a prefix, as far as that tells it from a word."""

_SENT = re.compile(r"torch_\d+_\d+(_\d+)?")
"""How torch calls the memory of a tensor that it shares by name: who has received it removes that."""


class SharedMemory(Resource):
    """The entries of `/dev/shm`, by name."""

    rule = Rule(
        "shared-memory",
        "shared-memory",
        "process",
        "entries of `/dev/shm` that this process made or maps, that carry its number, or that a child had which it "
        "killed (in a life: or which ended by itself)",
        test=Bound(settles=True),
        life=Bound(),
    )

    def staying(self, names: Collection[str]) -> Collection[str]:
        """Return the files in which torch counts the importers of what is exported still: that is judged itself."""
        own = re.compile(rf"torch_{os.getpid()}_\d+(_\d+)?")
        if not any(map(own.fullmatch, names)):
            return ()
        # numpy, which only who has torch needs.
        from lowtide.probes.device.cuda_ipc import read_exports

        return {export.counter.file.lstrip("/") for export in read_exports()} & set(names)

    def identity(self, name: str) -> Name:
        """Return the name if somebody gave it; else what its maker puts before a number."""
        return name_of_segment(name)

    def advice(self, names: Collection[str]) -> str:
        """Return how to remove those that nobody holds: the file stays when its maker ends."""
        first = f"os.unlink({f'/dev/shm/{min(names)}'!r})"
        others = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        sent = all(map(_SENT.fullmatch, names))
        end = (
            "get() each tensor from the queue that it was put into"
            if sent
            else "call unlink() of the shared memory when its maker no longer needs it"
        )
        return f"{end}; now: {first}{others}"


def name_of_segment(item: str) -> Name:
    """Return what names an entry of /dev/shm for ever."""
    made_up = _MADE_UP.fullmatch(item)
    return Name(f"{made_up[1]}*", is_given=False) if made_up else Name(without_numbers(_BY_TEMPFILE.sub("*", item)))


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

    def still_there(self, names: Collection[str]) -> Collection[str]:
        """Return those that exist: what other processes left is read only until the next test begins."""
        return [path for path in names if _mode_of(path)]

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
