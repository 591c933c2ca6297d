"""The processes of an engine as its tests watch them: which there are, what they hold, and that nothing stays."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from lowtide.engine import core_process
from lowtide.engine.errors import EngineDeadError

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup, ExceptionGroup

ROOT = Path(__file__).parents[2]

LIMIT_S = 300.0
"""Seconds within which an error comes and every process has ended, whatever was killed: far fewer than `SO_LONG_S`."""


def cores(parent: psutil.Process | None = None) -> list[psutil.Process]:
    """The processes of engine cores below a process."""
    found = []
    for child in (parent or psutil.Process()).children():
        with suppress(psutil.Error):
            if core_process.ENTRY in child.cmdline():
                found.append(child)
    return found


def ranks(parent: psutil.Process | None = None) -> list[psutil.Process]:
    """The ranks' processes right below a process, in the order of ranks."""
    found = {}
    for child in (parent or psutil.Process()).children():
        # A process that is only just forked has its parent's environment.
        with suppress(psutil.Error):
            environ = child.environ()
            if environ.get("WORLD_SIZE") == "2":
                found[environ["RANK"]] = child
    return [found[rank] for rank in sorted(found)]


def files_of(process: psutil.Process) -> set[str]:
    """What a process has open or mapped in the folders where something could stay."""
    maps = Path(f"/proc/{process.pid}/maps").read_text().split()
    opened = [str(link.readlink()) for link in Path(f"/proc/{process.pid}/fd").iterdir()]
    return {path for path in (*maps, *opened) if path.startswith(("/dev/shm/", "/tmp/"))}


def left_of(files: set[str]) -> list[str]:
    """Which of these files are still there, but for the checker's own, and for what was being imported.

    The driver keeps a file for what this process has exported of a card, as long as it runs.
    """
    own = ("lowtide_", f"cuda.shm.0.{os.getpid():x}.")
    left = [path for path in files if Path(path).exists() and not any(part in path for part in own)]
    imported = [ROOT, *filter(os.path.isabs, sys.path)]
    return [path for path in left if not any(Path(path).is_relative_to(folder) for folder in imported)]


class Watch:
    """Every process that appears below one meanwhile, and every file that it has in a folder for all.

    Args:
        root: the process below which it looks.
    """

    def __init__(self, root: psutil.Process) -> None:
        self.seen: dict[int, psutil.Process] = {}
        self.files: set[str] = set()
        self._root = root
        self._before: set[psutil.Process] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Watch:
        self._before = set(self._root.children(recursive=True))
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._over.set()
        self._thread.join()

    def look(self) -> None:
        """Take in what there is now."""
        with suppress(psutil.Error):
            for child in set(self._root.children(recursive=True)) - self._before:
                self.seen[child.pid] = child
                # Gone since.
                with suppress(OSError, psutil.Error):
                    self.files.update(files_of(child))

    def _watch(self) -> None:
        while not self._over.wait(0.05):
            self.look()

    def assert_nothing_stays(self, within_s: float = 0.0) -> None:
        """No process that was seen, and no file of it.

        Args:
            within_s: seconds that processes may take to end whose parent has been killed.
        """
        end = time.monotonic() + within_s
        while (running := [child for child in self.seen.values() if is_running(child)]) and time.monotonic() < end:
            time.sleep(0.02)
        assert not running
        assert left_of(self.files) == []


def is_running(process: psutil.Process) -> bool:
    """Whether a process has not ended; one that its parent has not looked after yet has."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def nothing_stays(at_least: int = 2, within_s: float = 0.0) -> Iterator[None]:
    """Every process that appears meanwhile is gone at the end, with its files; this one has no descriptor more.

    Args:
        at_least: how many must have appeared.
        within_s: seconds that they may take to end after the block.
    """
    own = psutil.Process()
    descriptors = own.num_fds()
    with Watch(own) as watch:
        yield
    assert len(watch.seen) >= at_least
    watch.assert_nothing_stays(within_s)
    assert own.num_fds() == descriptors


def innermost(error: BaseException) -> BaseException:
    """The one error that a group holds, or the error itself."""
    while isinstance(error, BaseExceptionGroup):
        (error,) = error.exceptions
    return error


def killed_during(victim: psutil.Process, name: str, call: Callable[[], object]) -> float:
    """Makes a call in the middle of which a process of the engine is killed.

    Args:
        victim: the process.
        name: as the error must have it.
        call: must raise our error, alone or in a group.

    Returns:
        Seconds that it took.
    """
    # Stopped, it cannot have finished its part when the signal comes.
    victim.suspend()
    timer = threading.Timer(0.3, victim.kill)
    timer.start()
    start = time.monotonic()
    with pytest.raises((EngineDeadError, ExceptionGroup)) as raised:
        call()
    seconds = time.monotonic() - start
    error = innermost(raised.value)
    assert isinstance(error, EngineDeadError)
    assert f"{name} (pid {victim.pid}) has ended: killed by SIGKILL" in str(error)
    timer.join()
    return seconds
