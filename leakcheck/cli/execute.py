"""`lowtide exec`: any command, judged by what its tree of processes leaves when it has ended.

Its tree has agents, and signals are passed on to it. A program that marks its stages (`lowtide.stage`) is judged as a
life, too: by what grows from inference to inference in the processes that it has started, and by what a sleep keeps.

Here is also how all commands tell what has grown in processes that run on: as findings, known up to a size.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from msgspec.structs import replace

from lowtide.leakcheck.cli.console import (
    KnownLeaks,
    ReportFolder,
    begin_report,
    check_writable,
    ended_with,
    find_console,
    load_suppressions,
    make_report,
    refuse,
    show_judged,
    write_json,
)
from lowtide.reports.hanging_text import HangingText
from lowtide.reports.schema import Finding, NotMeasured, Outcome, Subject, exit_code
from lowtide.reports.sizes import format_amount, format_bytes, parse_bytes
from lowtide.reports.terminal import render

if TYPE_CHECKING:
    from lowtide.leakcheck.processes.engine_processes import EngineProcesses
    from lowtide.leakcheck.processes.server_watch import ServerWatch
    from lowtide.leakcheck.processes.timed_growth import TimedGrowth
    from lowtide.leakcheck.processes.tree_end import TreeEnd
    from lowtide.leakcheck.suppressions.entries import Suppressions
    from lowtide.probes.device.driver import Driver
    from lowtide.probes.processes.tree_traces import TreeTraces
    from lowtide.probes.reported_stages import StageReport, StageReports


MaxGrowth = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="What a process may grow by meanwhile and be told as known [default: 0]."),
]
CommandsJson = Annotated[
    bool,
    typer.Option("--json", help="Print the report as JSON (lowtide-report/1); the command's own output: stderr."),
]


def seconds_of(option: str, text: str) -> float:
    """Return the seconds that an option gives, or end the command where it gives none."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h|)", text.strip())
    if found is None:
        refuse(f"{option} {text!r} is no time: use seconds such as 30, or a unit such as 30s, 5m, 8h")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


def watched_seconds(option: str, text: str) -> float:
    """Return the seconds for which an option says to watch; end the command where these are too few."""
    from lowtide.leakcheck.processes.timed_growth import SHORTEST_S

    seconds = seconds_of(option, text)
    if seconds < SHORTEST_S:
        refuse(f"{option} {text} is not possible: what grows shows after {SHORTEST_S:g} s or more")
    return seconds


def bytes_of(option: str, text: str) -> int:
    """Return the bytes that an option gives, or end the command where it gives none."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        refuse(f"{option}: {error}")


def allowed_bytes(max_growth: str | None) -> int:
    """Return the bytes of `--max-growth`."""
    return 0 if max_growth is None else bytes_of("--max-growth", max_growth)


def with_known(found: Sequence[Finding], allowed: int) -> list[Finding]:
    """Return what has grown; in processes where all of it together is no more than some bytes it is known."""
    from lowtide.leakcheck.processes.timed_growth import grown_above

    above = grown_above(found, allowed)
    known = f"--max-growth {format_bytes(allowed)}"
    return [
        finding
        # Bytes allow no more threads.
        if not (allowed and finding.bytes) or finding.process is None or finding.process.pid in above
        else msgspec.structs.replace(finding, suppressed_by=known)
        for finding in found
    ]


def judged(
    name: str,
    findings: Sequence[Finding],
    not_measured: Sequence[NotMeasured],
    not_judged: Sequence[NotMeasured],
    reason: str = "",
) -> Subject:
    """Return a subject: a leak where something is found that is not known, clean only where all was measured."""
    is_leak = any(finding.suppressed_by is None for finding in findings)
    outcome: Outcome = "leak" if is_leak else "unsupported" if not_measured else "clean"
    everything = (*not_measured, *not_judged)
    return Subject(id=name, outcome=outcome, reason=reason, findings=tuple(findings), not_measured=everything)


def report_growth(
    subject: str,
    found: Sequence[Finding],
    silent: Sequence[NotMeasured],
    unknown: Sequence[NotMeasured],
    allowed: int,
    as_json: bool,
    where: str,
    processes: int,
) -> int:
    """Print what has grown (`where`: since when, or over what time) in so many processes; return the exit code."""
    from lowtide.probes.device.driver import find_driver

    with closing(find_driver()) as driver:
        report = make_report(judged(subject, with_known(found, allowed), silent, unknown), driver)
    if as_json:
        write_json(report)
    else:
        nothing = () if found else (f"nothing has grown {where} in {format_amount(processes, 'processes')}",)
        find_console().print(render(report, *nothing))
    return exit_code(report)


LOOK_S = 0.2
"""Seconds between two looks at the tree: a process that lives shorter is known by its agent, if it is a Python."""

END_S = 120.0
"""Seconds that a command may take to end that is asked to."""

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)

_OF_TERMINALS = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)


def execute(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND...", help="The program and its arguments.")
    ] = None,
    report: ReportFolder = None,
    as_json: CommandsJson = False,
    suppressions: KnownLeaks = None,
    settle: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long its processes and the driver have to let go at the end.")
    ] = 5.0,
    growth: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Watch so long what grows in its processes while it runs: 30s, 5m, 8h."),
    ] = None,
    warm_up: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="When that begins, after the start [default: once its processes rest, or are there for 30s].",
        ),
    ] = None,
    max_growth: MaxGrowth = None,
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Where its server answers: what grows is told by request, too."),
    ] = None,
) -> None:
    """Run a command with agents in all its processes, and judge what they leave when it has ended.

    Signals are passed on to it. What it leaves: orphans, files in /dev/shm that no living process uses, sockets and
    temporary files of ended processes, semaphores, memory on cards that the driver counts for ended processes. Where it
    marks its stages, what grows in its processes with each `infer`, and what a `sleep` keeps there, is judged, too.
    With --growth, what grows in them as time goes on, while it runs.

    Exit codes: 1 something stays or grows, 2 it could not be measured or bad input; else the command's own.
    """
    if not command:
        refuse("there is no command: give one, as in `lowtide exec -- python serve.py`")
    if not 0 <= settle < float("inf"):
        refuse(f"--settle {settle} is not possible: use 0 or more seconds")
    known = load_suppressions(suppressions)
    check_writable(report)
    asked = _asked(growth, warm_up, max_growth, url)
    raise typer.Exit(judge_command("exec", command, report, as_json, known, settle, asked))


class WatchedGrowth(msgspec.Struct, frozen=True):
    """What is asked about growth while a command runs.

    Attributes:
        begin: begins to watch the processes of the command.
        allowed: bytes by which a process may grow meanwhile.
        stops: whether the command is to end once it is known what grows.
    """

    begin: Callable[[EngineProcesses], TimedGrowth | ServerWatch]
    allowed: int
    stops: bool = False


def _asked(growth: str | None, warm_up: str | None, max_growth: str | None, url: str | None) -> WatchedGrowth | None:
    if growth is None:
        given = {"--warm-up": warm_up, "--max-growth": max_growth, "--url": url}
        if named := [option for option, value in given.items() if value is not None]:
            refuse(f"{named[0]} applies only with --growth TIME")
        return None
    from lowtide.leakcheck.processes.timed_growth import TimedGrowth

    seconds = watched_seconds("--growth", growth)
    until = None if warm_up is None else seconds_of("--warm-up", warm_up)
    if url is None:
        return WatchedGrowth(lambda engine: TimedGrowth(engine, seconds, until, tell), allowed_bytes(max_growth))
    check_address(url)
    # Where the extra is missing that asks servers, that is said before the command is started.
    from lowtide.leakcheck.processes.server_watch import ServerWatch
    from lowtide.leakcheck.targets.load import Load

    def begin(engine: EngineProcesses) -> ServerWatch:
        client = Load(url, 0, is_needed=True)
        client.start()
        # Which stops it at its end.
        return ServerWatch(
            lambda length, is_first: TimedGrowth(engine, length, until if is_first else 0.0, tell),
            seconds,
            tell,
            client,
        )

    return WatchedGrowth(begin, allowed_bytes(max_growth))


def check_address(url: str) -> None:
    """Refuse what is no address of a server."""
    if not re.fullmatch(r"https?://[^/\s]+(:\d+)?/?", url):
        refuse(f"--url {url!r} is no address of a server: use one such as http://127.0.0.1:8000")


def judge_command(
    name: str,
    command: list[str],
    report: Path | None,
    as_json: bool,
    known: Suppressions,
    settle: float,
    growth: WatchedGrowth | None,
) -> int:
    """Run a command as `run_command` does, and report what it leaves and what grows in it; return the exit code."""
    from lowtide.probes.device.driver import find_driver

    with closing(find_driver()) as driver:
        try:
            with begin_report(report, driver):
                status, end = run_command(command, driver, settle=settle, to_stderr=as_json, growth=growth)
        except CommandError as error:
            refuse(str(error))
        reason = f"the command ended with exit code {status}" if status else ""
        program = os.path.basename(command[0])  # noqa: PTH119 - it need not be a path
        subject = judged(f"{name}[{program}]", end.findings, end.not_measured, end.not_judged, reason)
        subject, used = known.judge(subject, datetime.date.today())
        written = make_report(subject, driver)
    # The command's own output is on stdout, for whoever reads it.
    code, unwritten = show_judged(find_console(sys.stderr), written, report, known, used, ran_all=not status)
    if as_json:
        write_json(written)
    return ended_with(code or status, unwritten)


class CommandError(RuntimeError):
    """A command that cannot be started; the message says why."""


class _Signals:
    """Passes signals on to a process; those that come when it has ended cut the waiting short.

    Attributes:
        heard: whether any has come.
        is_cut: whether one has when the process had ended.
    """

    def __init__(self) -> None:
        self.heard = self.is_cut = False
        self._process: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []

    @contextlib.contextmanager
    def passed_on(self) -> Iterator[None]:
        """Pass signals on within the block."""
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
        self.heard = True
        if self._process is None:
            self._early.append(number)
        elif self._process.returncode is not None:
            self.is_cut = True
        elif not (number in _OF_TERMINALS and _is_in_foreground()):
            self._process.send_signal(number)


class _MarkedLife(msgspec.Struct):
    """Judges the processes of a program by the stages that it marks."""

    engine: EngineProcesses
    found: list[Finding] = msgspec.field(default_factory=list)

    def take(self, report: StageReport) -> None:
        """Note that a stage begins or ends; the program waits meanwhile."""
        self.engine.drivers.add(report.pid)
        if report.passed:
            self.engine.pass_over(report.passed)
        if report.begins:
            self.engine.begin_stage(report.path[-1], 1)
        else:
            self.found += self.engine.leave_stage(report.path, 1, failed=report.failed, outside="program")


def _with(
    end: TreeEnd,
    findings: Iterable[Finding],
    not_measured: Iterable[NotMeasured],
    not_judged: Iterable[NotMeasured] = (),
) -> TreeEnd:
    """Return what a tree has left, with what was seen of it while it ran."""
    return replace(
        end,
        findings=(*findings, *end.findings),
        not_measured=(*end.not_measured, *not_measured),
        not_judged=(*end.not_judged, *not_judged),
    )


def tell(text: str) -> None:
    """Say something while a command runs, whose output is on standard output."""
    find_console(sys.stderr).print(HangingText(f"lowtide: {text}", style="dim"))


def _is_in_foreground() -> bool:
    """Return whether a terminal sends its signals to this process's group, and so to the command in it."""
    try:
        with open("/dev/tty", "rb") as terminal:  # noqa: PTH123 - no file to be read
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:  # no terminal
        return False


def run_command(
    command: Sequence[str],
    driver: Driver,
    *,
    settle: float,
    to_stderr: bool,
    growth: WatchedGrowth | None,
) -> tuple[int, TreeEnd]:
    """Run a command to its end and judge what its tree leaves.

    Args:
        command: the program and its arguments.
        driver: reports what processes hold on cards.
        settle: seconds that what it has left has to end, and the driver to give back.
        to_stderr: whether what it writes to standard output goes to standard error.
        growth: what is asked about growth while it runs; None: nothing.

    Returns:
        Its exit status (128 and the signal's number where a signal has ended it, as shells count it), and what its tree
        has left.

    Raises:
        CommandError: it cannot be started.
    """
    from lowtide.leakcheck.processes.engine_processes import EngineProcesses
    from lowtide.leakcheck.processes.tree_end import EndJudgement
    from lowtide.probes.host.process_tree import ProcessTree
    from lowtide.probes.processes.agents import Agents
    from lowtide.probes.processes.tree_traces import TreeTraces
    from lowtide.probes.reported_stages import StageReports

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
            watch = None if growth is None else growth.begin(life.engine)
            stopped = _wait(process, traces, reports, watch, stops=growth is not None and growth.stops)
            if watch is not None and growth is not None:
                # A command that is not watched as a server may end by itself.
                watch.end(process.returncode, asked=signals.heard or not growth.stops)
            reports.stop()
            judgement = EndJudgement(tree, traces, agents, settle, lambda: signals.is_cut)
            end, engine = judgement.judge(), life.engine
            found = (*life.found, *engine.findings_at_end())
            end = _with(end, found, (*engine.not_measured.values(), *engine.not_judged))
            if watch is not None and growth is not None:
                grown = with_known(watch.findings(), growth.allowed)
                end = _with(end, grown, watch.not_measured, watch.not_judged)
    status = 0 if stopped else process.returncode
    return 128 - status if status < 0 else status, end


def _started(command: Sequence[str], to_stderr: bool) -> subprocess.Popen[bytes]:
    sys.stdout.flush()
    try:
        return subprocess.Popen(list(command), stdout=sys.stderr.fileno() if to_stderr else None)
    except FileNotFoundError as error:
        # A script's interpreter may be missing, too.
        raise CommandError(f"{command[0]} was not found: give a program of PATH, or a path to one") from error
    except (OSError, ValueError) as error:
        raise CommandError(f"{command[0]} cannot be started: {getattr(error, 'strerror', None) or error}") from error


def _wait(
    process: subprocess.Popen[bytes],
    traces: TreeTraces,
    reports: StageReports,
    watch: TimedGrowth | ServerWatch | None,
    *,
    stops: bool,
) -> bool:
    """Wait until a command has ended; return whether it was asked to, as it is known what grows."""
    # A thread, so that the end is seen at once and the tree is looked at meanwhile.
    ended, end = os.pipe()

    def wait() -> None:
        process.wait()
        os.close(end)

    waiting = threading.Thread(target=wait, name="lowtide-exec", daemon=True)
    waiting.start()
    stopped_at: float | None = None
    try:
        while waiting.is_alive():
            traces.look()
            if watch is not None and stopped_at is None:
                watch.look()
                if stops and watch.is_over:
                    process.terminate()
                    stopped_at = time.monotonic()
            if stopped_at is not None and time.monotonic() - stopped_at > END_S and process.returncode is None:
                tell(f"the command has not ended {END_S:g} s after SIGTERM: it is killed")
                process.kill()
            reports.serve(LOOK_S, ended)
    finally:
        os.close(ended)
    return stopped_at is not None
