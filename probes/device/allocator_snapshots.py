"""What torch's allocator has on a card, in the files that PyTorch's memory viewer opens."""

from __future__ import annotations

import contextlib
import pickle
import re
from pathlib import Path
from typing import Any

from lowtide.probes.device.torch_allocator import full_snapshot
from lowtide.probes.originals import loaded

FOLDER = "snapshots"
"""Where they are, in a report's folder."""

_OURS = "lowtide-"
"""Begins the names of what is written here: others may have files of their own in a folder of that name."""

_LONGEST = 200
"""Characters of a file's name, at most."""


class AllocatorSnapshots:
    """Writes what `torch.cuda.memory._snapshot()` says, for https://pytorch.org/memory_viz.

    With the Python stacks of the blocks that were allocated while torch's history was on.

    Args:
        folder: of the report; the files come into `snapshots/` in it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / FOLDER

    def remove_old(self) -> None:
        """Remove those of an earlier run; what cannot be removed stays, and its writing will say why it failed."""
        with contextlib.suppress(OSError):
            for old in self._folder.glob(f"{_OURS}*.pickle"):
                old.unlink(missing_ok=True)

    def file(self, name: str) -> str:
        """Return the name of the file of what is kept as `name`, in `snapshots/`."""
        words = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-")
        return f"{_OURS}{words[-_LONGEST:]}.pickle"

    def keep(self, name: str) -> str:
        """Write what the allocator has now, as a whole or not at all; nothing where CUDA is not in use.

        Args:
            name: what it is of, as `cycle 1 shutdown`; in the file's name, `-` for what that cannot have.

        Returns:
            Why it could not be written; "" where it was, or there is none.
        """
        torch: Any = loaded("torch")
        if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
            return ""
        path = self._folder / self.file(name)
        partial = path.with_suffix(".partial")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                pickle.dump(full_snapshot(torch), file)
            partial.replace(path)
        except (OSError, RuntimeError) as error:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            return str(error)
        return ""
