"""Runs a program with agents in its tree, passes signals on to it, and judges what its tree leaves.

A program that marks its stages (`lowtide.stage`) is judged as a life, too: by what grows from inference to inference in
the processes that it has started, and by what a sleep keeps there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from types import FrameType

from lowtide.leakcheck.processes.engine_processes import EngineProcesses
from lowtide.leakcheck.processes.tree_end import EndJudgement, TreeEnd
from lowtide.probes.device.driver import Driver
from lowtide.probes.host.process_tree import ProcessTree
from lowtide.probes.processes.agents import Agents
from lowtide.probes.processes.tree_traces import TreeTraces
from lowtide.probes.reported_stages import StageReport, StageReports
from lowtide.reports.schema import Finding

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


@dataclass
class _MarkedLife:
    """Judges the processes of a program by the stages that it marks.

    Attributes:
        engine: the processes.
        found: what sleeps have kept.
    """

    engine: EngineProcesses
    found: list[Finding] = field(default_factory=list)

    def take(self, report: StageReport) -> None:
        """A stage begins or ends, and the program waits."""
        name = report.path[-1]
        self.engine.drivers.add(report.pid)
        if report.begins:
            self.engine.begin_stage(name, 1)
            return
        if not report.failed:
            self.engine.end_stage(name)
            if name.startswith("sleep"):
                self.found += self.engine.after_sleep(name, 1, empties=False)
            elif name.startswith("wake"):
                self.found += self.engine.more_awake(name)
        self.engine.begin_stage(report.path[-2] if len(report.path) > 1 else "program", 1)

    def added_to(self, end: TreeEnd) -> TreeEnd:
        """Return what its tree has left, with what the life has shown."""
        findings = (*self.found, *self.engine.findings_at_end(), *end.findings)
        unknown = (*self.engine.not_measured.values(), *self.engine.not_judged_asleep)
        return replace(end, findings=findings, not_measured=(*end.not_measured, *unknown))


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
        life = _MarkedLife(EngineProcesses(tree, agents, None, lambda: driver))
        assert agents.folder is not None
        reports = StageReports(str(agents.folder), life.take)
        stack.callback(reports.stop)
        reports.start()
        signals = _Signals()
        with signals.passed_on():
            process = _started(command, to_stderr)
            traces.note_root(process.pid)
            signals.started(process)
            _wait(process, traces, reports)
            reports.stop()
            judgement = EndJudgement(tree, traces, agents, settle, lambda: signals.is_cut)
            end = life.added_to(judgement.judge())
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


def _wait(process: subprocess.Popen[bytes], traces: TreeTraces, reports: StageReports) -> None:
    # A thread, so that the end is seen at once and the tree is looked at meanwhile.
    ended, end = os.pipe()

    def wait() -> None:
        process.wait()
        os.close(end)

    waiting = threading.Thread(target=wait, name="lowtide-exec", daemon=True)
    waiting.start()
    try:
        while waiting.is_alive():
            traces.look()
            reports.serve(LOOK_S, ended)
    finally:
        os.close(ended)
