"""Runs a program with agents in its tree, passes signals on to it, and judges what its tree leaves."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import FrameType

from lowtide.leakcheck.processes.tree_end import EndJudgement, TreeEnd
from lowtide.probes.device.driver import Driver
from lowtide.probes.host.process_tree import ProcessTree
from lowtide.probes.processes.agents import Agents
from lowtide.probes.processes.tree_traces import TreeTraces

LOOK_S = 0.2
"""Seconds between two looks at the tree: a process that lives shorter is known by its agent, if it is a Python."""

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_OF_TERMINALS = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)


class CommandError(RuntimeError):
    """A command that cannot be started; the message says why."""


@dataclass(frozen=True)
class CommandEnd:
    """How a command has ended.

    Attributes:
        status: its exit status; 128 and the signal's number where a signal has ended it, as shells count it.
        end: what its tree has left.
    """

    status: int
    end: TreeEnd


class _Signals:
    """Passes signals on to a process; those that come when it has ended cut the waiting short."""

    def __init__(self) -> None:
        self.is_cut = False
        self._process: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []

    @contextlib.contextmanager
    def passed_on(self) -> Iterator[None]:
        """Within this."""
        before = {number: signal.signal(number, self._pass_on) for number in _PASSED_ON}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def started(self, process: subprocess.Popen[bytes]) -> None:
        """To this one; with those that have come while it was started."""
        self._process = process
        for number in self._early:
            process.send_signal(number)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if self._process is None:
            self._early.append(number)
        elif self._process.returncode is not None:
            self.is_cut = True
        elif not (number in _OF_TERMINALS and _is_in_foreground()):
            self._process.send_signal(number)


def _is_in_foreground() -> bool:
    """Whether a terminal sends its signals to this process's group: the command is in it, and has had them."""
    try:
        with open("/dev/tty", "rb") as terminal:  # noqa: PTH123 - no file to be read
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:  # no terminal
        return False


def run_command(command: Sequence[str], driver: Driver, *, settle: float, to_stderr: bool = False) -> CommandEnd:
    """Run a command to its end and judge what its tree leaves.

    Args:
        command: the program and its arguments.
        driver: reports what processes hold on cards.
        settle: seconds that what it has left has to end, and the driver to give back.
        to_stderr: whether what it writes to standard output goes to standard error.

    Raises:
        CommandError: it cannot be started.
    """
    tree, agents = ProcessTree(), Agents()
    with ExitStack() as stack:
        stack.callback(tree.stop)
        tree.start()
        stack.callback(agents.stop)
        agents.start()
        traces = TreeTraces(tree, driver, agents=agents.folder)
        traces.start()
        signals = _Signals()
        with signals.passed_on():
            process = _started(command, to_stderr)
            traces.note_root(process.pid)
            signals.started(process)
            _wait(process, traces)
            judgement = EndJudgement(tree, traces, agents, settle, lambda: signals.is_cut)
            end = judgement.judge()
    status = process.returncode
    return CommandEnd(128 - status if status < 0 else status, end)


def _started(command: Sequence[str], to_stderr: bool) -> subprocess.Popen[bytes]:
    sys.stdout.flush()
    try:
        return subprocess.Popen(list(command), stdout=sys.stderr.fileno() if to_stderr else None)
    except FileNotFoundError as error:
        # A script's interpreter may be missing, too.
        raise CommandError(f"{command[0]} was not found: give a program of PATH, or a path to one") from error
    except (OSError, ValueError) as error:
        raise CommandError(f"{command[0]} cannot be started: {getattr(error, 'strerror', None) or error}") from error


def _wait(process: subprocess.Popen[bytes], traces: TreeTraces) -> None:
    # A thread, so that the end is seen at once and the tree is looked at meanwhile.
    waiting = threading.Thread(target=process.wait, name="lowtide-exec", daemon=True)
    waiting.start()
    while waiting.is_alive():
        traces.look()
        waiting.join(LOOK_S)
