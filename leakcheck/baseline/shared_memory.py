"""Which entries of /dev/shm this process made: one that is closed and not unlinked bears no trace of its maker."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from lowtide.probes.host.passing_for import passing_for
from lowtide.probes.originals import os


class OwnSegments:
    """Notes the names that `multiprocessing.shared_memory` makes, from `start` to `stop`.

    It calls `_posixshmem.shm_open` for it, which is stood in for meanwhile.

    Attributes:
        names: as /dev/shm lists them.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._module: Any = None
        self._original: Callable[..., int] | None = None

    def start(self) -> None:
        """Begin to note; legal twice."""
        if self._original is not None:
            return
        try:
            self._module = importlib.import_module("_posixshmem")
        except ImportError:  # not this platform
            return
        original = self._module.shm_open
        names = self.names

        @passing_for(original, self._module, "shm_open")
        def shm_open(path: str, flags: int, mode: int = 0o777) -> int:
            opened: int = original(path, flags, mode=mode)
            if flags & os.O_CREAT:
                names.add(path.lstrip("/"))
            return opened

        self._original, self._module.shm_open = original, shm_open

    def stop(self) -> None:
        """End it; legal twice."""
        if self._original is not None:
            self._module.shm_open = self._original
            self._original = None
