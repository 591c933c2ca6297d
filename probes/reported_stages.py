"""Stages that a program tells the command that runs it, so that this can look at the tree in between.

The program waits at the beginning and the end of each stage until the command has looked. It does so only where it
marks stages, and where a command that wants to know has started it.  A server that marks each of its steps would wait
for most of its time: of stages that repeat, only the first are told.
"""

from __future__ import annotations

import contextlib
import errno
import json
import select
import socket
from collections.abc import Callable
from typing import Protocol

import msgspec

from lowtide.probes.originals import os, threading, time

SOCKET = "stages"
"""The name of the socket in the agents' folder."""

WAITS_S = 120.0
"""Seconds for which a program waits for the command, which may ask it who holds what has grown."""

MOST = 50
"""Stages after which one that repeats the last is not told: what grows shows within these."""

_MOST_BYTES = 4096
_TAKES_S = 1.0
"""Seconds that a report may take to arrive, once its connection is there."""


class StageReport(msgspec.Struct, frozen=True):
    """One report.

    Attributes:
        pid: the process that marks the stage.
        path: the names from the outermost stage to this one.
        begins: whether it begins; else it ends.
        failed: whether it ended by an exception.
        passed: how many inferences before it were not told.
    """

    pid: int
    path: tuple[str, ...]
    begins: bool
    failed: bool = False
    passed: int = 0


class _MarkedStage(Protocol):
    """What is needed of an `EnteredStage`."""

    @property
    def path(self) -> tuple[str, ...]:
        """The names from the outermost stage to this one."""


class StagesOfCommand:
    """Hears of the stages in a program, and reports them; silent from the first report that nobody takes.

    Args:
        path: the command's socket.
        is_alone: whether nobody in this process judges by the same stages.
    """

    def __init__(self, path: str, is_alone: Callable[[object], bool]) -> None:
        self._path = path
        self._is_alone = is_alone
        self._is_heard = True
        self._told = 0
        self._last: tuple[str, ...] = ()
        # By thread, the stage in it that is not told.
        self._passing: dict[int, tuple[str, ...]] = {}
        self._passed = 0

    def stage_entered(self, stage: _MarkedStage) -> None:
        """See `StageListener`."""
        thread = threading.get_ident()
        if thread in self._passing:  # what is inside of it is not told, either
            return
        if self._told >= MOST and stage.path == self._last:
            self._passing[thread] = stage.path
            self._passed += stage.path[-1] == "infer"
            return
        self._told += 1
        passed, self._passed = self._passed, 0
        self._report(StageReport(os.getpid(), stage.path, begins=True, passed=passed))

    def stage_left(self, stage: _MarkedStage, error: BaseException | None) -> None:
        """See `StageListener`."""
        passing = self._passing.get(threading.get_ident())
        if passing is None:
            self._last = stage.path
            self._report(StageReport(os.getpid(), stage.path, begins=False, failed=error is not None))
        elif passing == stage.path:
            del self._passing[threading.get_ident()]

    def _report(self, report: StageReport) -> None:
        if not self._is_heard or not self._is_alone(self):
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(WAITS_S)
                connection.connect(self._path)
                connection.sendall(_encoded(report))
                connection.recv(1)
        except OSError:  # the command has ended, or is stuck
            self._is_heard = False


class StageReports(msgspec.Struct):
    """Takes the reports of one program, in the command that runs it.

    The first process that reports is the one that is listened to: an engine's own processes may mark stages, too.

    Attributes:
        folder: the agents' folder.
        take: called for each report; the program waits meanwhile.
    """

    folder: str
    take: Callable[[StageReport], object]
    _listening: socket.socket = msgspec.field(default_factory=lambda: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    _pid: int | None = None

    @property
    def _path(self) -> str:
        return f"{self.folder}/{SOCKET}"

    def start(self) -> None:
        """Listen."""
        self._listening.bind(self._path)
        self._listening.listen(128)
        self._listening.setblocking(False)

    def stop(self) -> None:
        """End it; legal twice, and without a start."""
        self._listening.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)

    def serve(self, seconds: float, wake: int) -> None:
        """Take what is reported within some seconds; ends as soon as a descriptor can be read.

        Args:
            seconds: how long.
            wake: the descriptor.
        """
        until = time.monotonic() + seconds
        poll = select.poll()
        poll.register(self._listening.fileno(), select.POLLIN)
        poll.register(wake, select.POLLIN)
        while (left := until - time.monotonic()) > 0:
            ready = {number for number, _ in poll.poll(left * 1000)}
            if self._listening.fileno() in ready:
                self._take_one()
            if wake in ready:
                return

    def _take_one(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.ECONNABORTED, errno.EINTR):
                raise
            return
        with connection:
            report = _received(connection)
            if report is None:
                return
            if self._pid in (None, report.pid):
                self._pid = report.pid
                self.take(report)
            with contextlib.suppress(OSError):  # the program has ended meanwhile
                connection.sendall(b"=")


def _encoded(report: StageReport) -> bytes:
    names = [name[: _MOST_BYTES // 32] for name in report.path[-8:]]
    return json.dumps([report.pid, names, report.begins, report.failed, report.passed]).encode() + b"\n"


def _received(connection: socket.socket) -> StageReport | None:
    """Return what comes over a connection; None where that is no report of this user's."""
    connection.settimeout(_TAKES_S)
    data = b""
    try:
        while not data.endswith(b"\n") and len(data) < _MOST_BYTES * 8:
            more = connection.recv(_MOST_BYTES)
            if not more:
                return None
            data += more
        pid, path, begins, failed, passed = json.loads(data)
    except (OSError, ValueError, TypeError):
        return None
    if (
        type(pid) is not int
        or type(passed) is not int
        or passed < 0
        or type(path) is not list
        or not path
        or not all(type(name) is str for name in path)
    ):
        return None
    return StageReport(pid, tuple(path), bool(begins), bool(failed), passed)
