"""Documented modules under the names that they had before: the old name still imports the same module."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

RENAMED = {
    "lowtide.leakcheck.checked_life": "lowtide.leakcheck.lives.checked_life",
    "lowtide.leakcheck.fuzz": "lowtide.leakcheck.lives.fuzz",
    "lowtide.leakcheck.reference_target": "lowtide.leakcheck.targets.reference",
    "lowtide.leakcheck.small_checkpoint": "lowtide.leakcheck.targets.reference",
    "lowtide.leakcheck.target": "lowtide.leakcheck.targets.target",
    "lowtide.leakcheck.transformers_target": "lowtide.leakcheck.targets.transformers_target",
}
"""By the old name, which users have from the documentation or from programs of `lowtide fuzz`, the new one."""


class OldNames:
    """Finds a renamed module by its old name; asked last, so only for what nothing else finds.

    A finder and a loader without the base classes of `importlib.abc`, which take half of the time to import lowtide.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the module's specification, or None where no documented module had this name."""
        new = RENAMED.get(fullname)
        loader: Any = self
        return None if new is None else importlib.machinery.ModuleSpec(fullname, loader, origin=new)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Return the renamed module itself, so that there is only one of it."""
        module = importlib.import_module(RENAMED[spec.name])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module back its own specification, which the import system has just replaced."""
        spec = module.__spec__
        if spec is not None:
            module.__spec__ = spec.loader_state


def install() -> None:
    """Make the old names importable; again it does nothing."""
    if not any(type(finder) is OldNames for finder in sys.meta_path):
        sys.meta_path.append(OldNames())
