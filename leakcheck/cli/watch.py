"""`lowtide watch`: a server followed while it works, until it is known what grows in which of its processes."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import msgspec
import typer

from lowtide.leakcheck.cli.ask import find_agents
from lowtide.leakcheck.cli.console import (
    KnownLeaks,
    ReportFolder,
    check_writable,
    interruptible,
    load_suppressions,
    refuse,
)
from lowtide.leakcheck.cli.execute import LOOK_S, WatchedGrowth, judge_command, tell
from lowtide.leakcheck.cli.growth_report import (
    CommandsJson,
    MaxGrowth,
    allowed_bytes,
    report_growth,
    seconds_of,
    watched_seconds,
)

if TYPE_CHECKING:
    from lowtide.leakcheck.processes.engine_processes import EngineProcesses
    from lowtide.leakcheck.processes.server_watch import ServerWatch, Window
    from lowtide.leakcheck.targets.load import Load
    from lowtide.reports.schema import NotMeasured

_PORT = 8000
"""Where a command's server listens that does not say where, as vLLM's does."""

_OTLP = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")
"""Variables that name who receives OpenTelemetry's metrics."""

_STACKS_S = 10.0
"""Seconds that a process has to tell what its threads do."""


def watch(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[-- COMMAND...]", help="What starts the server, with its arguments.")
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Where it answers; without a command what listens there is watched."),
    ] = None,
    pid: Annotated[
        int | None, typer.Option(metavar="PID", help="A process that runs: it and those below it are watched.")
    ] = None,
    watched_for: Annotated[str, typer.Option("--for", metavar="TIME", help="For how long at most: 5m, 8h.")] = "5m",
    load: Annotated[
        int, typer.Option(metavar="CLIENTS", help="Ask it for OpenAI completions, from so many clients at once.")
    ] = 0,
    warm_up: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="When it begins, once the server answers [default: as of `lowtide exec`]."),
    ] = None,
    max_growth: MaxGrowth = None,
    metrics: Annotated[
        int | None, typer.Option(metavar="PORT", help="Serve what it holds as metrics for Prometheus on this port.")
    ] = None,
    report: ReportFolder = None,
    as_json: CommandsJson = False,
    suppressions: KnownLeaks = None,
) -> None:
    """Watch a server while it works: what grows in which process, with who holds it, by request where they are counted.

    It is started by a command, with agents in all its processes, or runs already: then it is found by the address that
    it listens on, or by its pid, and asked through its agents, or looked into where it has none (as by `attach`). What
    grows is told once it shows, and the watch ends when that has gone on for twice as long, or with --for. A server
    that was started ends then, and what it leaves is judged, too.

    With --load it is asked for completions meanwhile: short and long ones, streamed, broken off, refused, with shared
    beginnings, by each model and adapter that it lists; the same ones again and again.

    Exit codes: 0 nothing, 1 something grows, is left, or the server ended or hung; 2 it could not be watched, or bad
    input.
    """
    if pid is not None and (command or url is not None):
        refuse("--pid names a process that runs: leave the command and --url away")
    if command is None and url is None and pid is None:
        refuse("say what to watch: a command behind --, or --url or --pid of what runs")
    if load < 0 or (load and pid is not None):
        refuse(f"--load {load} is not possible: give clients, and --url, or a command" if load < 0 else _NO_URL)
    if url is not None and not re.fullmatch(r"https?://[^/\s]+(:\d+)?/?", url):
        refuse(f"--url {url!r} is no address of a server: use one such as http://127.0.0.1:8000")
    if command is None and (report is not None or suppressions is not None):
        option = "--suppressions" if report is None else "--report"
        refuse(f"{option} needs a command: of what runs the report is printed, with --json as JSON")
    seconds = watched_seconds("--for", watched_for)
    until = None if warm_up is None else seconds_of("--warm-up", warm_up)
    allowed = allowed_bytes(max_growth)
    known = load_suppressions(suppressions)
    if report is not None:
        check_writable(report)
    address = url or (None if command is None else f"http://127.0.0.1:{_port_of(command)}")
    top = None if command is not None else pid or _listener(str(url))
    with _Watching(address, load, seconds, until, metrics, is_needed=bool(url or load)) as watching:
        if command is not None:
            growth = WatchedGrowth(watching.begin, allowed, stops=True)
            code = judge_command("watch", command, report, as_json, known, 5.0, growth)
        else:
            assert top is not None
            with interruptible("interrupted: the server runs on"):
                code = watching.of_running(top, allowed, as_json)
    raise typer.Exit(code)


_NO_URL = "--load needs the address of a server: give --url in place of --pid"


class _Watching:
    """What a watch has beside the processes: who asks the server, and the metrics.

    Args:
        url: where the server answers; None where that is not known.
        clients: see `Load`.
        seconds: for how long it is watched at most.
        warm_up: as of `TimedGrowth`.
        metrics: the port for Prometheus; None for none.
        is_needed: see `Load`.
    """

    def __init__(
        self,
        url: str | None,
        clients: int,
        seconds: float,
        warm_up: float | None,
        metrics: int | None,
        *,
        is_needed: bool,
    ) -> None:
        self._url, self._clients, self._is_needed = url, clients, is_needed
        self._seconds, self._warm_up, self._metrics = seconds, warm_up, metrics
        self._client: Load | None = None
        # What is not known of processes that have agents and did not answer.
        self._silent: Callable[[], Collection[NotMeasured]] = tuple
        self._open = ExitStack()

    def __enter__(self) -> _Watching:
        from lowtide.leakcheck.targets.load import Load
        from lowtide.probes.device.driver import find_driver

        self._driver = find_driver()
        self._open.callback(self._driver.close)
        if self._url is not None:
            self._client = self._open.enter_context(Load(self._url, self._clients, is_needed=self._is_needed))
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def begin(self, engine: EngineProcesses) -> ServerWatch:
        """Begin to watch processes that have agents."""
        from lowtide.leakcheck.processes.timed_growth import TimedGrowth

        def begin(seconds: float, is_first: bool) -> TimedGrowth:
            return TimedGrowth(engine, seconds, self._warm_up if is_first else 0.0, tell)

        def ask(pid: int, question: bytes) -> bytes:
            return engine.agents.ask(pid, question, _STACKS_S)

        return self._watch(begin, engine.tree.descendants, ask)

    def of_running(self, pid: int, allowed: int, as_json: bool) -> int:
        """Watch a process that runs, and those below it; return the exit code.

        Args:
            pid: the process.
            allowed: bytes by which each may grow.
            as_json: whether the report is printed as JSON.
        """
        from lowtide.probes.host.process_files import stat
        from lowtide.probes.originals import time
        from lowtide.probes.processes.injection import InjectionError

        with ExitStack() as stack:
            try:
                watch = self._of_tree(pid, stack)
            except InjectionError as error:
                refuse(str(error))
            while not watch.is_over:
                watch.look()
                process = stat(pid)
                if process is None or process.state in ("Z", "X"):
                    watch.end()
                time.sleep(LOOK_S)
            where = f"over {watch.seconds_read:.0f} s"
            return report_growth(
                f"watch[{pid}]",
                watch.findings(),
                (*self._silent(), *watch.not_measured),
                watch.not_judged,
                allowed,
                as_json,
                where,
                len(_tree_of(pid)),
            )

    def _of_tree(self, pid: int, stack: ExitStack) -> ServerWatch:
        """Begin to watch a tree: through agents, or by looks where it has none."""
        from lowtide.leakcheck.processes.attachment import Attachment
        from lowtide.leakcheck.processes.engine_processes import EngineProcesses
        from lowtide.leakcheck.processes.look_growth import LookedGrowth
        from lowtide.probes.host.process_tree import ProcessTree
        from lowtide.probes.processes.agents import NoAgentError
        from lowtide.probes.processes.injection import python_of
        from lowtide.reports.sizes import format_amount

        found = find_agents(pid)
        if found is not None:
            tree = ProcessTree()
            tree.adopt([pid])
            engine = EngineProcesses(tree, found[0], None, lambda: self._driver)
            self._silent = engine.not_measured.values
            return self.begin(engine)
        pythons = [each for each in _tree_of(pid) if python_of(each) is not None]
        looks = {each: stack.enter_context(Attachment(each)) for each in pythons}
        if not looks:
            refuse(f"pid {pid} is no Python, and there is none below it: it cannot be asked what grows in it")
        tell(f"growth of {format_amount(len(looks), 'processes')} is watched, at a fork of each")

        def ask(of: int, question: bytes) -> bytes:
            if of not in looks:
                raise NoAgentError(f"pid {of} is not looked into")
            return looks[of].answer(question, _STACKS_S)

        return self._watch(lambda seconds, _: LookedGrowth(looks, seconds, tell), lambda: _tree_of(pid), ask)

    def _watch(
        self,
        begin: Callable[[float, bool], Window],
        pids: Callable[[], Sequence[int]],
        ask: Callable[[int, bytes], bytes],
    ) -> ServerWatch:
        from lowtide.leakcheck.processes.look_growth import anonymous_bytes_of
        from lowtide.leakcheck.processes.server_watch import ServerWatch

        watch = ServerWatch(
            begin,
            self._seconds,
            tell,
            self._client,
            stacks=lambda: [line for pid in pids() for line in _stacks(pid, ask)],
            held=lambda: {pid: anonymous_bytes_of(pid) for pid in pids()},
        )
        self._export(watch, pids)
        return watch

    def _export(self, watch: ServerWatch, pids: Callable[[], Sequence[int]]) -> None:
        """Serve metrics, where somebody wants them."""
        sends = any(os.environ.get(name) for name in _OTLP)
        if self._metrics is None and not sends:
            return
        from lowtide.leakcheck.processes.exported_metrics import ExportedMetrics

        client = self._client
        try:
            exported = ExportedMetrics(
                pids,
                self._driver,
                lambda: (0, 0) if client is None else (client.answered, client.failed),
                lambda: watch.rates,
                self._metrics,
                sends=sends,
            )
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or "there is no such port"
            refuse(f"--metrics {self._metrics} is not possible ({why}): choose another port, or 0 for any")
        self._open.enter_context(exported)
        if exported.port is not None:
            tell(f"metrics for Prometheus are at http://127.0.0.1:{exported.port}/metrics")


def _stacks(pid: int, ask: Callable[[int, bytes], bytes]) -> Iterator[str]:
    """Say what the threads of a process do, each in a line."""
    from lowtide.leakcheck.processes import messages
    from lowtide.leakcheck.processes.process_levels import describe_process
    from lowtide.probes.processes.agents import AgentError

    process = describe_process(pid)
    try:
        told = msgspec.msgpack.decode(ask(pid, messages.encode(messages.TellStacks())), type=messages.ThreadStacks)
    except (AgentError, msgspec.DecodeError) as error:
        yield f"{process.text}: what its threads do is not known: {error}"
        return
    for name, frames in told.threads:
        yield f"{process.text}, thread {name!r}: {' < '.join(frames)}"


def _tree_of(pid: int) -> list[int]:
    from lowtide.probes.host.process_files import descendants_of

    return [pid, *sorted(descendants_of(pid))]


def _listener(url: str) -> int:
    """Return the process that listens at an address on this machine; end the command where none is seen."""
    import psutil

    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    found = {
        each.pid
        for each in psutil.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN and each.laddr.port == port and each.pid is not None
    }
    if not found:
        refuse(
            f"no process of this machine that can be seen listens on port {port}: run lowtide where the server runs, "
            "in its container and as its user, or name it by --pid"
        )
    # Several may share a port: then whoever has started them is their parent.
    first = min(found)
    return first if len(found) == 1 else int(psutil.Process(first).ppid())


def _port_of(command: Sequence[str]) -> int:
    """Return the port that a command names, or else vLLM's."""
    said = re.search(r"--port[ =](\d+)", " ".join(command))
    return int(said[1]) if said else _PORT
