"""The commands on programs that run: who holds memory (`ps`), and what grows in one.

That is since a mark (`ask`), in a process of it (`attach`), or at all (`watch`).

`ask` needs agents in the processes, which `lowtide exec`, `pytest --leakcheck` or `lowtide.agent_environment()` put
there. Marks are kept in the folder of their sockets, and go with it. `attach` looks into a process that was not started
with us. `watch` follows a server while it works, until it is known what grows in which of its processes.
"""

from __future__ import annotations

import datetime
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar
from urllib.parse import urlsplit

import msgspec
import typer

import lowtide
from lowtide.leakcheck.cli.console import (
    KnownLeaks,
    ReportFolder,
    check_writable,
    find_console,
    interruptible,
    load_suppressions,
    refuse,
    say,
    write,
)
from lowtide.leakcheck.cli.execute import (
    LOOK_S,
    CommandsJson,
    MaxGrowth,
    WatchedGrowth,
    allowed_bytes,
    bytes_of,
    check_address,
    judge_command,
    report_growth,
    seconds_of,
    tell,
    watched_seconds,
)
from lowtide.leakcheck.cli.reports import VARIABLE, needing_history
from lowtide.leakcheck.processes import messages
from lowtide.probes.host.process_files import (
    anonymous_bytes_of,
    descendants_of,
    descriptors_of,
    name_of,
    numbered_descriptors,
    stat,
    thread_names,
)
from lowtide.probes.originals import time
from lowtide.reports.escaping import escape_json
from lowtide.reports.schema import Finding, NotMeasured
from lowtide.reports.sizes import first_of, format_amount, format_bytes

if TYPE_CHECKING:
    from lowtide.leakcheck.gate.watch_history import WatchHistory
    from lowtide.leakcheck.growth.quantities import HeldSource
    from lowtide.leakcheck.processes.attachment import Attachment
    from lowtide.leakcheck.processes.engine_processes import EngineProcesses
    from lowtide.leakcheck.processes.held_series import HeldKey, HeldSeries, Point
    from lowtide.leakcheck.processes.server_watch import ServerWatch
    from lowtide.leakcheck.processes.timed_growth import Moment, TimeWindow
    from lowtide.leakcheck.targets.load import Load
    from lowtide.probes.device.driver import Driver
    from lowtide.probes.processes.agents import AgentError, Agents
    from lowtide.reports.processes.listing import Listing
    from lowtide.reports.processes.stage_processes import ProcessName


_Answer = TypeVar("_Answer")

_PREFIX = "mark-"
"""The first part of the name of a mark's file."""

_NAME = re.compile(r"[\w.-]{1,60}", re.ASCII)

RESTS_WITHIN_S = 10.0
"""Seconds within which the processes rest, or are read as they are."""

_LOOKS_S = 0.2
"""Seconds between two looks at whether they rest."""

ANSWER_S = 60.0
"""Seconds for an answer, which goes through the whole heap."""


class Asked(str, Enum):
    """What a process is asked."""

    MARK = "mark"
    SINCE = "since"


def ask(
    pid: Annotated[int, typer.Argument(metavar="PID", help="A process; those below it are asked, too.")],
    question: Annotated[
        Asked, typer.Argument(metavar="mark|since", help="Mark this moment, or say what has grown since a mark.")
    ],
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="What the mark is called.")] = "mark",
    requests: Annotated[
        int, typer.Option(metavar="N", help="With since: how many requests there were, to tell by request.")
    ] = 0,
    max_growth: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="What a process may have more and be told as known [default: 0]."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON (lowtide-report/1).")] = False,
) -> None:
    """Ask the agents in a running program what has become more in each process since a mark.

    Mark a moment at rest, after the warm-up: `lowtide ask 4711 mark`; let the program work; when it rests again:
    `lowtide ask 4711 since mark --requests 500`. Told are containers with path and holder, host memory and tensors that
    none of these explains, descriptors, threads and child processes.

    Exit codes: 0 nothing, 1 something has become more, 2 it could not be asked, or bad input.
    """
    if _NAME.fullmatch(name) is None:
        refuse(f"{name!r} is no name of a mark: use letters, digits, '-', '_' and '.', 60 at most")
    if question is Asked.MARK and (requests or max_growth is not None or as_json):
        refuse("--requests, --max-growth and --json are about what has become more: they need since")
    if requests < 0:
        refuse(f"--requests {requests} is not possible: use 1 or more")
    asking = _Asking(pid)
    if question is Asked.MARK:
        asking.mark(name)
        return
    raise typer.Exit(asking.since(name, requests, allowed_bytes(max_growth), as_json))


class MarkedMoments(msgspec.Struct, frozen=True):
    """A moment of some processes, as a file."""

    moments: dict[int, msgspec.Raw]


class _Asking:
    """Asks the agents of one tree, with the process of that number at its top."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        found = find_agents(pid)
        if found is None:
            refuse(
                f"pid {pid} ({name_of(pid)}) has no agent, nor has a process below it: start the program by "
                f"`lowtide exec`, or look into it by `lowtide attach {pid}`"
            )
        self._agents, self._pids = found
        self._silent: dict[int, AgentError] = {}

    def mark(self, name: str) -> None:
        """Note this moment."""
        moments = self._moments()
        if not moments:
            refuse(str(next(iter(self._silent.values()))))
        raw = {pid: msgspec.Raw(msgspec.msgpack.encode(moment)) for pid, moment in moments.items()}
        file = self._file(name)
        fresh = file.with_name(f"{file.name}.{os.getpid()}")
        fresh.write_bytes(msgspec.msgpack.encode(MarkedMoments(moments={**self._marked(name), **raw})))
        fresh.rename(file)
        for pid, moment in moments.items():
            text = _described(pid, moment).text
            say(f"lowtide: {text} is marked as {name!r}: `lowtide ask {pid} since {name}` says what has grown since")
        for error in self._silent.values():
            say(f"lowtide: not marked: {error}", err=True)

    def _file(self, name: str) -> Path:
        assert self._agents.folder is not None
        return self._agents.folder / f"{_PREFIX}{name}"

    def _marked(self, name: str) -> dict[int, msgspec.Raw]:
        try:
            return msgspec.msgpack.decode(self._file(name).read_bytes(), type=MarkedMoments).moments
        except FileNotFoundError:
            return {}

    def since(self, name: str, requests: int, allowed: int, as_json: bool) -> int:
        """Tell what is more than at a mark; return the exit code."""
        from lowtide.leakcheck.processes.timed_growth import Moment, grown_between
        from lowtide.reports.statement import in_process

        marked = self._marked(name)
        if not marked.keys() & set(self._pids):
            refuse(f"pid {self._pid} has no mark {name!r}{self._others()}")
        found: list[Finding] = []
        unknown: list[NotMeasured] = []
        named: dict[int, ProcessName] = {}
        for pid, now in self._moments().items():
            named[pid] = _described(pid, now)
            before = None if pid not in marked else msgspec.msgpack.decode(marked[pid], type=Moment)
            if before is None or before.started != now.started:
                unknown.append(NotMeasured(what=f"what has grown in {named[pid].text}", why="it began after the mark"))
                continue
            grown = grown_between(before, now, f"mark {name!r}", requests, self._explain(pid))
            found += [in_process(finding, named[pid]) for finding in grown]
        silent = [
            NotMeasured(what=f"what has grown in pid {pid}", why=str(error)) for pid, error in self._silent.items()
        ]
        where = f"since mark {name!r}"
        return report_growth(f"ask[{self._pid}]", found, silent, unknown, allowed, as_json, where, len(named))

    def _others(self) -> str:
        assert self._agents.folder is not None
        files = self._agents.folder.glob(f"{_PREFIX}*")
        names = sorted(file.name.removeprefix(_PREFIX) for file in files)
        known = [repr(name) for name in names if self._marked(name).keys() & set(self._pids)]
        return f", but {', '.join(known)}" if known else f": make one by `lowtide ask {self._pid} mark`"

    def _moments(self) -> dict[int, Moment]:
        """Return what there is in each process, once they rest and what is free has been given back."""
        from lowtide.leakcheck.processes.timed_growth import moment_of

        self._wait_until_they_rest()
        self._each(self._pids, messages.Trim())
        seen = self._each(self._pids, messages.Look())
        return {pid: moment_of(pid, each) for pid, each in seen.items()}

    def _wait_until_they_rest(self) -> None:
        from lowtide.leakcheck.processes.timed_growth import Start

        start = Start(None, began := time.monotonic())
        while not start.is_over(self._pids, time.monotonic()):
            if time.monotonic() - began > RESTS_WITHIN_S:
                say(
                    f"lowtide: the processes are still at work, which is counted too (waited {RESTS_WITHIN_S:g} s)",
                    err=True,
                )
                return
            time.sleep(_LOOKS_S)

    def _explain(self, pid: int) -> Callable[[messages.ExplainGrown], list[Finding]]:
        return lambda question: self._each([pid], question).get(pid, [])

    def _each(self, pids: Sequence[int], question: messages.Question[_Answer]) -> Mapping[int, _Answer]:
        """Return what each answers; those that do not are noted, and not asked again."""
        from lowtide.probes.processes.agents import AgentError

        answers: dict[int, _Answer] = {}
        for pid in pids:
            if pid in self._silent:
                continue
            try:
                answers[pid] = messages.ask_agent(self._agents, pid, question, ANSWER_S)
            except AgentError as error:
                self._silent[pid] = error
        return answers


def _described(pid: int, moment: Moment) -> ProcessName:
    from lowtide.leakcheck.processes.process_levels import describe_process

    return describe_process(pid, variables=moment.seen.variables, called=moment.seen.called)


def find_agents(pid: int, *, looks: bool = False) -> tuple[Agents, list[int]] | None:
    """Return the agents of a tree, and the processes in it that have one; None where none has.

    Ends the command where the process is not there, or, unless it may be looked into, is another user's.
    """
    import psutil

    from lowtide.probes.processes.agents import Agents

    process = stat(pid)
    if process is None or process.state in ("Z", "X"):
        refuse(f"there is no process {pid}: `lowtide ps` lists engines")
    if psutil.Process(pid).uids().real != os.getuid():
        if looks:
            return None
        owner = psutil.Process(pid).username()
        refuse(f"pid {pid} is {owner}'s, and agents answer their own user alone: run lowtide as {owner}")
    tree = _tree_of(pid)
    # What watches the program at the top may be somebody else's: a test's, of a command that has agents of its own.
    found = next((agents for each in reversed(tree) if (agents := Agents.of_process(each)) is not None), None)
    return None if found is None else (found, [each for each in tree if found.has_agent(each)])


def _tree_of(pid: int) -> list[int]:
    return [pid, *sorted(descendants_of(pid))]


_LISTED_DESCRIPTORS = 5
"""Kinds of descriptors that are named."""

_ATTACH_LOOKS_S = 0.05
"""Seconds between two looks at whether the next one at the process is due."""


def attach(
    pid: Annotated[int, typer.Argument(metavar="PID", help="A Python process, of whatever program.")],
    watch: Annotated[
        str | None, typer.Option(metavar="TIME", help="Watch so long what grows in it: 60s, 5m, 8h.")
    ] = None,
    max_growth: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="With --watch: what it may grow by and be told as known [default: 0]."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --watch: print the report as JSON (lowtide-report/1) and no tables.")
    ] = False,
) -> None:
    """Look into a process that was not started with lowtide: memory, tensors, caches, and with --watch what grows.

    It runs on meanwhile: each look is at a fork of it, which a thread of ours makes and which ends with it. Nothing of
    that stays. Needs Python 3.14 on both sides, or gdb; and the right to trace the process.

    Exit codes: 0 looked, and nothing grows; 1 something grows, 2 it could not be looked into, or bad input.
    """
    if watch is None and (max_growth is not None or as_json):
        refuse(f"{'--json' if as_json else '--max-growth'} applies only with --watch TIME")
    seconds = 0.0 if watch is None else watched_seconds("--watch", watch)
    allowed = allowed_bytes(max_growth)
    with interruptible("interrupted: the process runs on, and nothing of lowtide is in it"):
        raise typer.Exit(_attach(pid, seconds, allowed, as_json))


def _attach(pid: int, seconds: float, allowed: int, as_json: bool) -> int:
    from lowtide.leakcheck.processes.attachment import Attachment
    from lowtide.leakcheck.processes.process_levels import describe_process
    from lowtide.probes.processes.agents import AgentError
    from lowtide.probes.processes.injection import InjectionError

    # Before there is anything of ours in it.
    outside = _outside(pid)
    try:
        with Attachment(pid) as attachment:
            if not as_json:
                seen = attachment.ask(messages.Look(lists=True))
                process = describe_process(pid, variables=seen.variables, called=seen.called)
                say(*_looked(process, outside, seen))
            return _watch_fork(attachment, seconds, allowed, as_json) if seconds else 0
    except (InjectionError, AgentError) as error:
        refuse(str(error))


def _watch_fork(attachment: Attachment, seconds: float, allowed: int, as_json: bool) -> int:
    from lowtide.leakcheck.processes.timed_growth import LookedGrowth

    pid = attachment.pid
    growth = LookedGrowth({pid: attachment}, seconds)
    say(f"lowtide: growth of {growth.named[pid].text} is watched for {seconds:g} s", err=True)
    while not growth.is_over:
        growth.look()
        time.sleep(_ATTACH_LOOKS_S)
    where = f"over {growth.seconds_read / growth.interval:.0f} intervals of {growth.interval:g} s"
    return report_growth(
        f"attach[{pid}]", growth.findings(), growth.not_measured, growth.not_judged, allowed, as_json, where, 1
    )


def _outside(pid: int) -> str:
    """Say what is seen of a process without a look into it."""
    from lowtide.leakcheck.growth.quantities import counted
    from lowtide.probes.processes.injection import python_of

    python, threads, descriptors = python_of(pid), thread_names(pid), descriptors_of(pid)
    kinds = [f"{count} {kind}" for kind, count in counted(descriptors).most_common()]
    return (
        f"Python {'' if python is None else python[0]}, {format_amount(len(threads), 'threads')}, "
        f"{format_amount(len(descriptors), 'descriptors')} ({first_of(kinds, _LISTED_DESCRIPTORS)})"
    )


def _looked(process: ProcessName, outside: str, seen: messages.Seen) -> Iterator[str]:
    """Say what there is in a process."""
    from lowtide.probes.host.memory_parts import NAMES
    from lowtide.reports.processes.text import table

    yield f"{process.text}: {outside}"
    yield ""
    yield f"host memory: {format_bytes(anonymous_bytes_of(process.pid))} are no file's"
    parts: list[Sequence[str]] = [(format_bytes(seen.parts[name]), said) for name, said in NAMES.items()]
    yield from table(("bytes", "what"), parts)
    for device, size in sorted(seen.tensors.items()):
        yield ""
        yield f"tensors on {device}: {format_bytes(size)}"
        rows = [
            (format_bytes(kind.bytes), str(kind.count), kind.dtype or "storage", kind.shape or "seen by no tensor")
            for kind in seen.tensor_kinds
            if kind.device == device
        ]
        yield from table(("bytes", "count", "type", "shape"), rows)
    if seen.caches:
        yield ""
        yield "caches with entries:"
        rows = [
            (
                str(cache.entries),
                "no bound" if cache.maxsize is None else str(cache.maxsize),
                format_bytes(cache.tensor_bytes),
                cache.name,
            )
            for cache in seen.caches
        ]
        yield from table(("entries", "most", "under tensors", "function"), rows)


_PORT = 8000
"""Where a command's server listens that does not say where, as vLLM's does."""

_OTLP = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")
"""Variables that name who receives OpenTelemetry's metrics."""

_STACKS_S = 10.0
"""Seconds that a process has to tell what its threads do."""

_RELOAD_S = 5
"""Seconds after which the page of a watch is read again."""


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
        int | None,
        typer.Option(metavar="PORT", help="Serve what it holds on this port: a page, and metrics for Prometheus."),
    ] = None,
    history: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|URL",
            help=f"Keep what it holds in this history, and judge it over all watches of it [default: ${VARIABLE}].",
        ),
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
        refuse("--pid names a process that runs: leave the command and --url out")
    if command is None and url is None and pid is None:
        refuse("say what to watch: a command behind --, or --url or --pid of what runs")
    if load < 0:
        refuse(f"--load {load} is not possible: give clients, and --url, or a command")
    if load and pid is not None:
        refuse("--load needs the address of a server: give --url in place of --pid")
    if url is not None:
        check_address(url)
    if command is None and (report is not None or suppressions is not None):
        option = "--suppressions" if report is None else "--report"
        refuse(f"{option} needs a command: of what runs the report is printed, with --json as JSON")
    seconds = watched_seconds("--for", watched_for)
    until = None if warm_up is None else seconds_of("--warm-up", warm_up)
    allowed = allowed_bytes(max_growth)
    known = load_suppressions(suppressions)
    check_writable(report)
    address = url or (None if command is None else f"http://127.0.0.1:{_port_of(command)}")
    top = None if command is not None else pid or _listener(str(url))
    name = f"watch[{top if command is None else Path(command[0]).name}]"
    kept = history or os.environ.get(VARIABLE)
    with _Watching(name, address, load, bool(url or load), seconds, until, metrics, kept) as watching:
        if command is not None:

            def begin(engine: EngineProcesses) -> ServerWatch:
                tell(f"the server is asked at {address}{'' if url else ': --url says another address'}")
                return watching.begin(engine)

            growth = WatchedGrowth(begin, allowed, stops=True)
            code = judge_command("watch", command, report, as_json, known, 5.0, growth)
        else:
            assert top is not None
            with interruptible("interrupted: the server runs on"):
                code = watching.of_running(top, allowed, as_json)
        watching.judged(code)
    raise typer.Exit(code)


@dataclass
class _Watching:
    """What a watch has beside the processes: who asks the server, and the metrics.

    Attributes:
        name: what the watch is called.
        url: where the server answers; None where that is not known.
        clients: how many ask it at once, as of `Load`.
        is_needed: whether it is known to be there, or to come, as of `Load`.
        seconds: for how long it is watched at most.
        warm_up: as of `TimedGrowth`.
        metrics: the port for Prometheus; None for none.
        history: the address of the history; None for none.
    """

    name: str
    url: str | None
    clients: int
    is_needed: bool
    seconds: float
    warm_up: float | None
    metrics: int | None
    history: str | None

    def __post_init__(self) -> None:
        self._kept: WatchHistory | None = None
        self._earlier: Mapping[HeldKey, Sequence[Sequence[Point]]] = {}
        self._watching: ServerWatch | None = None
        self._client: Load | None = None
        # What is not known of processes that have agents and did not answer.
        self._silent: Callable[[], Collection[NotMeasured]] = tuple
        self._open = ExitStack()

    def __enter__(self) -> _Watching:
        from lowtide.leakcheck.targets.load import Load
        from lowtide.probes.device.driver import find_driver

        self._driver = find_driver()
        self._open.callback(self._driver.close)
        if self.history:
            with needing_history():
                from lowtide.leakcheck.gate.history import HistoryError
                from lowtide.leakcheck.gate.watch_history import WatchHistory
            try:
                self._kept = WatchHistory(self.history, self.name, tell)
            except HistoryError as error:
                refuse(str(error))
            self._open.callback(self._kept.close)
        if self.url is not None:
            self._client = self._open.enter_context(Load(self.url, self.clients, is_needed=self.is_needed))
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def judged(self, code: int) -> None:
        """Note with what exit code it has ended."""
        if self._kept is not None and self._watching is not None:
            outcome = {0: "clean", 1: "leak"}.get(code, "unsupported")
            self._kept.judged(outcome, [each.message for each in self._watching.findings()])

    def begin(self, engine: EngineProcesses) -> ServerWatch:
        """Begin to watch processes that have agents."""
        from lowtide.leakcheck.processes.timed_growth import TimedGrowth

        def begin(seconds: float, is_first: bool) -> TimedGrowth:
            return TimedGrowth(engine, seconds, self.warm_up if is_first else 0.0, tell, "--for")

        def stacks_of(pid: int) -> messages.ThreadStacks:
            return messages.ask_agent(engine.agents, pid, messages.TellStacks(), _STACKS_S)

        return self._watch(begin, engine.tree.descendants, stacks_of)

    def of_running(self, pid: int, allowed: int, as_json: bool) -> int:
        """Watch a process that runs, and those below it, which each may grow by some bytes; return the exit code."""
        from lowtide.probes.processes.injection import InjectionError

        if self._kept is not None:
            self._earlier = self._kept.earlier(_tree_of(pid))
        with ExitStack() as stack:
            try:
                watch = self._of_tree(pid, stack)
            except InjectionError as error:
                refuse(str(error))
            while not watch.is_over:
                process = stat(pid)
                if process is None or process.state in ("Z", "X"):
                    watch.end()
                watch.look()
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
        from lowtide.leakcheck.processes.engine_processes import EngineProcesses
        from lowtide.leakcheck.processes.timed_growth import LookedGrowth
        from lowtide.probes.host.process_tree import ProcessTree
        from lowtide.probes.processes.agents import NoAgentError

        found = find_agents(pid, looks=True)
        if found is not None:
            tree = ProcessTree()
            tree.adopt([pid])
            engine = EngineProcesses(tree, found[0], None, lambda: self._driver)
            self._silent = engine.not_measured.values
            return self.begin(engine)
        looks = self._look_into(_tree_of(pid), stack)
        if not looks:
            refuse(f"pid {pid} is no Python, and there is none below it: it cannot be asked what grows in it")
        tell(f"growth of {format_amount(len(looks), 'processes')} is watched, at a fork of each")

        def begin(seconds: float, is_first: bool) -> LookedGrowth:
            # A server may have ended some of its workers meanwhile, and started others.
            there = [*looks] if is_first else _tree_of(pid)
            looks.update(self._look_into([each for each in there if each not in looks], stack, needed=False))
            return LookedGrowth({each: looks[each] for each in looks if each in there}, seconds, tell)

        def stacks_of(of: int) -> messages.ThreadStacks:
            if of not in looks:
                raise NoAgentError(f"pid {of} is not looked into")
            return looks[of].ask(messages.TellStacks(), _STACKS_S)

        return self._watch(begin, lambda: _tree_of(pid), stacks_of)

    @staticmethod
    def _look_into(pids: Sequence[int], stack: ExitStack, *, needed: bool = True) -> dict[int, Attachment]:
        """Enter those of some processes that are the program's own Pythons, for as long as a stack is open.

        Raises:
            InjectionError: that is `needed` and possible for none of them.
        """
        from lowtide.leakcheck.processes.attachment import Attachment
        from lowtide.leakcheck.processes.process_levels import describe_process, is_helper
        from lowtide.probes.processes.injection import InjectionError, python_of

        looks, refused = dict[int, Attachment](), list[InjectionError]()
        for pid in pids:
            if python_of(pid) is None or is_helper(process := describe_process(pid)):
                continue
            try:
                looks[pid] = stack.enter_context(Attachment(pid))
            except InjectionError as error:
                refused.append(error)
                tell(f"what grows in {process.text} is not judged: {error}")
        if refused and needed and not looks:
            raise refused[0]
        return looks

    def _watch(
        self,
        begin: Callable[[float, bool], TimeWindow],
        pids: Callable[[], Sequence[int]],
        stacks_of: Callable[[int], messages.ThreadStacks],
    ) -> ServerWatch:
        from lowtide.leakcheck.growth.quantities import HeldSource
        from lowtide.leakcheck.processes.held_series import HeldSeries
        from lowtide.leakcheck.processes.server_watch import ServerWatch

        kept = self._kept
        source = HeldSource(pids, self._driver, lambda: watched.tensors)
        series = None
        if kept is not None or self.metrics is not None:
            series = HeldSeries(source, self._earlier, len if kept is None else kept.add, is_judged=kept is not None)
        self._watching = watched = ServerWatch(
            begin,
            self.seconds,
            tell,
            self._client,
            stacks=lambda: [line for pid in pids() for line in _stacks(pid, stacks_of)],
            held=lambda: {pid: anonymous_bytes_of(pid) for pid in pids()},
            series=series,
        )
        self._export(watched, source, series)
        return watched

    def _export(self, watch: ServerWatch, source: HeldSource, series: HeldSeries | None) -> None:
        """Serve metrics and the page, where somebody wants them."""
        sends = any(os.environ.get(name) for name in _OTLP)
        if self.metrics is None and not sends:
            return
        from lowtide.leakcheck.gate.history_page import PastWatch, render_page
        from lowtide.leakcheck.processes.exported_metrics import ExportedMetrics

        client, began = self._client, datetime.datetime.now(datetime.timezone.utc)

        def page() -> str:
            grows = [finding.message for finding, _ in watch.rates]
            courses = [] if series is None else series.courses()
            return render_page(watches=[PastWatch(self.name, began, "", grows, courses)], reload_s=_RELOAD_S)

        try:
            exported = ExportedMetrics(
                source,
                lambda: (0, 0) if client is None else (client.answered, client.failed),
                lambda: watch.rates,
                page,
                self.metrics,
                sends=sends,
            )
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or "there is no such port"
            refuse(f"--metrics {self.metrics} is not possible ({why}): choose another port, or 0 for any")
        self._open.enter_context(exported)
        if exported.port is not None:
            at = f"http://127.0.0.1:{exported.port}"
            tell(f"metrics for Prometheus are at {at}/metrics, a page of them at {at}/")


def _stacks(pid: int, stacks_of: Callable[[int], messages.ThreadStacks]) -> Iterator[str]:
    """Say what the threads of a process do, each in a line."""
    from lowtide.leakcheck.processes.process_levels import describe_process
    from lowtide.probes.processes.agents import AgentError

    process = describe_process(pid)
    try:
        told = stacks_of(pid)
    except AgentError as error:
        yield f"{process.text}: what its threads do is not known: {error}"
        return
    for name, frames in told:
        yield f"{process.text}, thread {name!r}: {' < '.join(frames)}"


def _listener(url: str) -> int:
    """Return the process that listens at an address on this machine; end the command where none is seen."""
    import psutil

    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    listening = [
        numbered_descriptors(each.pid).get(each.fd)
        for each in psutil.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN and each.laddr.port == port and each.pid is not None
    ]
    # Workers share the socket that they were forked with, and psutil names one of them alone.
    found = {
        pid for pid in psutil.pids() if listening and {*numbered_descriptors(pid).values()}.intersection(listening)
    }
    if not found:
        refuse(
            f"no process of this machine that can be seen listens on port {port}: run lowtide where the server runs, "
            "in its container and as its user, or name it by --pid"
        )
    tops = found - {below for pid in found for below in descendants_of(pid)}
    # Several may share a port: then whoever has started them is their parent.
    first = min(tops)
    return first if len(tops) == 1 else int(psutil.Process(first).ppid())


def _port_of(command: Sequence[str]) -> int:
    """Return the port that a command names, or else vLLM's."""
    said = re.search(r"--port[ =](\d+)", " ".join(command))
    return int(said[1]) if said else _PORT


_SHORTEST_S = 0.5
"""Seconds between two lists."""


def ps(
    fail_above: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Fail where a card, an orphan or all files of the dead hold more: 1GiB."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON with stable names (lowtide-ps/1).")] = False,
    watch: Annotated[
        str | None, typer.Option(metavar="TIME", help="List it again each so often, until Ctrl-C: 2s, 1m.")
    ] = None,
) -> None:
    """List who holds memory on each card, engines without a card and orphans, and files of the dead in /dev/shm.

    Exit codes: 0 listed; with --fail-above: 1 something holds more, 2 a card could not be measured; 2 nothing could be
    measured, or bad input.
    """
    limit = None if fail_above is None else bytes_of("--fail-above", fail_above)
    if watch is not None and (as_json or limit is not None):
        refuse("--watch redraws a terminal: leave --json and --fail-above out")
    from lowtide.probes.device.driver import find_driver

    with closing(find_driver()) as driver:
        if watch is None:
            raise typer.Exit(_list(driver, limit, as_json))
        with interruptible("ended"):
            _list_again(driver, seconds_of("--watch", watch))


def _list_again(driver: Driver, seconds: float) -> None:
    if seconds < _SHORTEST_S:
        refuse(f"--watch {seconds:g} is not possible: use {_SHORTEST_S:g} s or more")
    while True:
        if sys.stdout.isatty():
            find_console().clear()
        _list(driver, None, as_json=False)
        sys.stdout.flush()
        time.sleep(seconds)


def _list(driver: Driver, limit: int | None, as_json: bool) -> int:
    """Print who holds what; return the exit code."""
    from lowtide.probes.processes.outside_view import read_holders
    from lowtide.reports.processes.listing import encode, make_listing
    from lowtide.reports.processes.text import render

    now = datetime.datetime.now(datetime.timezone.utc)
    listing = make_listing(read_holders(driver), version=lowtide.__version__, now=now, limit=limit)
    write(f"{escape_json(encode(listing))}\n" if as_json else render(listing))
    code = _exit_code(listing)
    if code == 2:
        say("lowtide: what a card holds could not be measured", err=True)
    return code


def _exit_code(listing: Listing) -> int:
    if listing.exceeded:
        return 1
    unknown = {each.what for each in listing.not_measured}
    cards = {"cards", *(card.device for card in listing.cards)}
    if listing.limit is not None and unknown & cards:
        return 2
    return 2 if {"cards", "/dev/shm"} <= unknown else 0
