"""What tests add to the processes of an engine: contexts that record, and places at which a core stops for a while."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import distributed

from lowtide.engine.device_allocator.memory import EngineMemory
from lowtide.engine.worker import Worker
from lowtide.probes.stages import announced_pools
from tests.waiting import wait_until

POINTS: dict[str, tuple[type, str]] = {
    "fill": (Worker, "_fill"),
    "execute": (Worker, "execute_model"),
    "drop": (EngineMemory, "drop"),
    "restore": (EngineMemory, "restore"),
    "begin_reload": (Worker, "begin_reload"),
    "shutdown": (Worker, "shutdown"),
}
"""Where a process can stop: after the call of a method."""

SO_LONG_S = 900.0
"""Seconds of a stop that nobody breaks off: more than any test waits."""


@contextmanager
def recorded(path: str) -> Iterator[None]:
    """Writes a line as it is entered, with what the process has created so far, and one as it is left, or collected."""
    created = len(announced_pools()) + distributed.is_initialized()
    with Path(path).open("a") as record:
        record.write(f"{os.getpid()} entered after {created}\n")
    how = "left"
    try:
        yield
    except GeneratorExit:
        how = "collected"
        raise
    finally:
        remaining = len(announced_pools()) + distributed.is_initialized()
        with Path(path).open("a") as record:
            record.write(f"{os.getpid()} {how} with {remaining}\n")


@contextmanager
def removing(path: str) -> Iterator[None]:
    """Removes a file, once."""
    with suppress(FileNotFoundError):
        Path(path).unlink()
    yield


@contextmanager
def forked(path: str) -> Iterator[None]:
    """Leaves a fork of the process, which holds copies of all its descriptors; its identifier is in the file."""
    fork = os.fork()
    if fork == 0:
        time.sleep(SO_LONG_S)
        os._exit(0)
    Path(path).write_text(str(fork))
    yield


@contextmanager
def stopping(folder: str) -> Iterator[None]:
    """Stops the process after the first call of a point whose file a test has made; see `Stops`."""
    for point, (owner, name) in POINTS.items():
        setattr(owner, name, _stopped_after(getattr(owner, name), Path(folder), point))
    yield


def _stopped_after(call: Callable[..., Any], folder: Path, point: str) -> Callable[..., Any]:
    def called(*args: Any) -> Any:
        result = call(*args)
        armed = folder / point
        try:
            how = armed.read_text()
            armed.unlink()
        except FileNotFoundError:
            return result
        (folder / f"{point} reached").write_text(str(os.getpid()))
        end = time.monotonic() + SO_LONG_S
        while time.monotonic() < end:
            try:
                time.sleep(1.0)
            except KeyboardInterrupt:
                if how == "ends":
                    raise
                if how == "finishes":
                    break
        return result

    return called


class Stops:
    """The test's side of `stopping`.

    Args:
        folder: in which the two sides meet.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.extension = f"{__name__}:stopping={folder}"

    def arm(self, point: str, how: str = "ends") -> None:
        """Have the next call of a point stop.

        Args:
            point: of `POINTS`.
            how: an interrupt `ends` the call; the call `finishes` all the same; or it `stays` where it is.
        """
        (self.folder / f"{point} reached").unlink(missing_ok=True)
        (self.folder / point).write_text(how)

    def wait_for(self, point: str) -> int:
        """Wait until a process has stopped there; returns its identifier."""
        reached = self.folder / f"{point} reached"
        wait_until(lambda: reached.exists() and reached.read_text())
        return int(reached.read_text())


@contextmanager
def failing(path: str) -> Iterator[None]:
    """Fails the next step after a file has been made, which it removes."""
    execute = Worker.execute_model

    def fails(self: Worker, output: Any) -> Any:
        if Path(path).exists():
            Path(path).unlink()
            raise ArithmeticError("a planted error of a step")
        return execute(self, output)

    setattr(Worker, "execute_model", fails)  # noqa: B010 - mypy allows no other way
    yield
