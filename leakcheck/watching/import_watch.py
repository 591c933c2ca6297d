"""Modules imported for the first time while a test, or an engine, runs: what their import makes is the process's."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

from lowtide.leakcheck.judging.owners import Owner, Ownership
from lowtide.probes.host.counters import CounterReader, Counters
from lowtide.probes.host.process_files import python_threads_seconds
from lowtide.probes.originals import in_main_thread, sys, threading

_OWN = ("lowtide", "pynvml", "amdsmi")
"""What this checker itself may import in the middle of a reading."""

_IDLE = 0.01
"""Seconds that a program's other threads may work beside an import for what changes meanwhile to be the import's.

Who only waits for it needs less (a loop that looks every 10 ms: 10 to 30 us a time), and 10 ms of work make no 64 MiB.
"""


class ImportWatch(importlib.abc.MetaPathFinder):
    """Stands first in `sys.meta_path` and reports when an outermost import executes a module, and when it is done.

    Only a real import is touched (not `importlib.util.find_spec`), and a module has its own loader again before its
    first line runs.

    Args:
        entered: called before the main thread executes a module.
        left: called after it.
        in_threads: what modules that other threads execute belong to; None: these are not followed.
    """

    def __init__(
        self, entered: Callable[[Owner], None], left: Callable[[], None], in_threads: ThreadImports | None = None
    ) -> None:
        self._entered = entered
        self._left = left
        self._in_threads = in_threads
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
        if not self._is_outermost():
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
        if not self._is_outermost():
            loader.exec_module(module)
            return
        owner = Owner(f"import of {module.__name__}", only_adds=True)
        with self._followed(owner) if in_main_thread() or self._in_threads is None else self._in_threads.follow(owner):
            loader.exec_module(module)

    @contextmanager
    def _followed(self, owner: Owner) -> Iterator[None]:
        self._importing = threading.get_ident()
        self._entered(owner)
        try:
            yield
        finally:
            self._left()
            self._importing = None

    def _is_outermost(self) -> bool:
        """Return whether a module that this thread imports now is to be followed."""
        if not self.active or self._importing is not None:
            return False
        return in_main_thread() or (self._in_threads is not None and not self._in_threads.follows_one)


class ThreadImports:
    """Gives the process what an import in another thread than the main one sets and makes, one import at a time.

    Nothing of the watch itself is touched before the import is over, since the main thread may go on meanwhile. What
    changed then is known to be the import's only where the other threads did nothing but wait; tensors are not looked
    at, so those that a module keeps stay with the test.

    Args:
        ownership: whose it becomes.
        warnings_filters: whether to read these.

    Attributes:
        follows_one: whether one goes on.
    """

    def __init__(self, ownership: Ownership, *, warnings_filters: bool = True) -> None:
        self._ownership = ownership
        self._warnings_filters = warnings_filters
        self._reader: CounterReader | None = None
        self.follows_one = False

    @contextmanager
    def follow(self, owner: Owner) -> Iterator[None]:
        """Give `owner` what changes in the block."""
        self.follows_one = True
        try:
            baseline, before, worked = self._ownership.baseline, self._read(), python_threads_seconds()
            yield
            after = python_threads_seconds()
            if before is None or worked is None or after is None:
                return
            by_others = sum(seconds - worked.get(thread, 0) for thread, seconds in after.items())
            now = self._read() if by_others <= _IDLE else None
            if now is not None:
                self._ownership.take_of_thread(owner, baseline, before, now)
        finally:
            self.follows_one = False

    def _read(self) -> Counters | None:
        """Return the counters; None where another thread has changed meanwhile what was gone through."""
        if self._reader is None:
            # Not the watch's own: the main thread may be reading with that one.
            self._reader = CounterReader(None, card=False, warnings_filters=self._warnings_filters)
        with suppress(RuntimeError):
            return self._reader.read()
        return None


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
