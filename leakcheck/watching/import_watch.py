"""Modules imported for the first time while a test, or an engine, runs: what their import makes is the process's."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import itertools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from lowtide.leakcheck.judging.owners import Owner
from lowtide.probes.originals import in_main_thread, sys, threading

_OWN = ("lowtide", "pynvml", "amdsmi")
"""What this checker itself may import in the middle of a reading."""


class ImportWatch(importlib.abc.MetaPathFinder):
    """Stands first in `sys.meta_path` and reports when an outermost import executes a module, and when it is done.

    Only a real import is touched (not `importlib.util.find_spec`), and a module has its own loader again before its
    first line runs.

    Args:
        entered: called before a module is executed.
        left: called after it.
    """

    def __init__(self, entered: Callable[[Owner], None], left: Callable[[], None]) -> None:
        self._entered = entered
        self._left = left
        self._importing: int | None = None
        self.active = False

    def install(self) -> None:
        """Begin to watch."""
        sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """End it; legal twice."""
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return what the other finders find, with a loader that reports."""
        if not self.active or self._importing is not None or not in_main_thread():
            return None
        if name.partition(".")[0] in _OWN:
            return None
        # 0 is this, 1 `_find_spec`, 2 its caller: the import system itself, or somebody who only asks.
        asked_by_another = sys._getframe(1).f_code is ImportWatch.find_spec.__code__
        if not asked_by_another and sys._getframe(2).f_code.co_name != "_find_and_load_unlocked":
            return None
        # Those before this one have been asked; another watch among those after it hears of it, too.
        behind = itertools.dropwhile(lambda finder: finder is not self, tuple(sys.meta_path))
        for finder in itertools.islice(behind, 1, None):
            find: Any = getattr(finder, "find_spec", None)
            spec: Any = None if find is None else find(name, path, target)
            if spec is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    spec.loader = _TellingLoader(spec.loader, self)
                return spec  # type: ignore[no-any-return]
        return None

    def execute(self, module: ModuleType, loader: Any) -> None:
        """Execute an outermost module."""
        if not self.active or self._importing is not None:
            loader.exec_module(module)
            return
        self._importing = threading.get_ident()
        self._entered(Owner(f"import of {module.__name__}", only_adds=True))
        try:
            loader.exec_module(module)
        finally:
            self._left()
            self._importing = None


class _TellingLoader(importlib.abc.Loader):
    """Takes the place of a loader until the module is about to be executed."""

    def __init__(self, loader: Any, watch: ImportWatch) -> None:
        self._loader = loader
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._watch.execute(module, self._loader)
