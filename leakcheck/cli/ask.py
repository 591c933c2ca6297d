"""`lowtide ask`: what has become more in the processes of a running program since a moment that somebody has marked.

The processes have agents: `lowtide exec`, a `pytest --leakcheck` or `lowtide.agent_environment()` has put them in.
Marks are kept in the folder of their sockets, and go with it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec
import typer

from lowtide.leakcheck.cli.console import refuse, say

if TYPE_CHECKING:
    from lowtide.leakcheck.processes import messages
    from lowtide.leakcheck.processes.look_growth import Moment
    from lowtide.probes.processes.agents import AgentError, Agents
    from lowtide.reports.processes.stage_processes import ProcessName
    from lowtide.reports.schema import Finding, NotMeasured

_PREFIX = "mark-"
"""The first part of the name of a mark's file."""

_NAME = re.compile(r"[\w.-]{1,60}", re.ASCII)

RESTS_WITHIN_S = 10.0
"""Seconds within which the processes rest, or are read as they are."""

_LOOKS_S = 0.2
"""Seconds between two looks at whether they rest."""

ANSWER_S = 60.0
"""Seconds for an answer, which goes through the whole heap."""

_Answer = TypeVar("_Answer", bound=msgspec.Struct)


class Asked(str, Enum):
    """What a process is asked."""

    MARK = "mark"
    SINCE = "since"


def ask(
    pid: Annotated[int, typer.Argument(metavar="PID", help="A process; those below it are asked, too.")],
    question: Annotated[
        Asked, typer.Argument(metavar="mark|since", help="Mark this moment, or tell what is more than at a mark.")
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
    none of these explains, descriptors and threads.

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
    from lowtide.leakcheck.cli.growth_report import allowed_bytes

    raise typer.Exit(asking.since(name, requests, allowed_bytes(max_growth), as_json))


class MarkedMoments(msgspec.Struct, frozen=True):
    """A moment of some processes, as a file.

    Attributes:
        moments: of each, by its number, in MessagePack.
    """

    moments: dict[int, msgspec.Raw]


class _Asking:
    """Asks the agents of one tree.

    Args:
        pid: the process at its top.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._agents, self._pids = _agents_of(pid)
        self._silent: dict[int, AgentError] = {}

    def mark(self, name: str) -> None:
        """Note this moment."""
        from lowtide.leakcheck.processes.process_levels import describe_process

        moments = self._moments()
        if not moments:
            refuse(str(next(iter(self._silent.values()))))
        raw = {pid: msgspec.Raw(msgspec.msgpack.encode(moment)) for pid, moment in moments.items()}
        file = self._file(name)
        fresh = file.with_name(f"{file.name}.{os.getpid()}")
        fresh.write_bytes(msgspec.msgpack.encode(MarkedMoments(moments={**self._marked(name), **raw})))
        fresh.rename(file)
        for pid, moment in moments.items():
            seen = moment.seen
            text = describe_process(pid, variables=seen.variables, called=seen.called).text
            say(f"lowtide: {text} is marked as {name!r}: tell what is more by `lowtide ask {pid} since {name}`")
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
        from lowtide.leakcheck.cli.growth_report import report_growth
        from lowtide.leakcheck.processes.look_growth import Moment, grown_between
        from lowtide.reports.schema import NotMeasured
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
        from lowtide.leakcheck.processes import messages
        from lowtide.leakcheck.processes.look_growth import moment_of

        self._wait_until_they_rest()
        self._each(self._pids, messages.Trim(), messages.Trimmed)
        seen = self._each(self._pids, messages.Look(), messages.Seen)
        return {pid: moment_of(pid, each) for pid, each in seen.items()}

    def _wait_until_they_rest(self) -> None:
        from lowtide.leakcheck.processes.timed_growth import Start
        from lowtide.probes.originals import time

        start = Start(None, began := time.monotonic())
        while not start.is_over(self._pids, time.monotonic()):
            if time.monotonic() - began > RESTS_WITHIN_S:
                say(
                    f"lowtide: the processes do not rest: what they work on counts, too (waited {RESTS_WITHIN_S:g} s)",
                    err=True,
                )
                return
            time.sleep(_LOOKS_S)

    def _explain(self, pid: int) -> Callable[[messages.ExplainGrown], messages.Findings]:
        from lowtide.leakcheck.processes import messages

        def explain(question: messages.ExplainGrown) -> messages.Findings:
            return self._each([pid], question, messages.Findings).get(pid, messages.Findings())

        return explain

    def _each(self, pids: Sequence[int], question: messages.Question, kind: type[_Answer]) -> Mapping[int, _Answer]:
        """Return what each answers; those that do not are noted, and not asked again."""
        from lowtide.leakcheck.processes import messages
        from lowtide.probes.processes.agents import AgentError

        answers: dict[int, _Answer] = {}
        for pid in pids:
            if pid in self._silent:
                continue
            try:
                data = self._agents.ask(pid, messages.encode(question), ANSWER_S)
                answers[pid] = msgspec.msgpack.decode(data, type=kind)
            except AgentError as error:
                self._silent[pid] = error
            except msgspec.DecodeError as error:
                self._silent[pid] = AgentError(f"the agent of pid {pid} answered something else: {error}")
        return answers


def _described(pid: int, moment: Moment) -> ProcessName:
    from lowtide.leakcheck.processes.process_levels import describe_process

    return describe_process(pid, variables=moment.seen.variables, called=moment.seen.called)


def _agents_of(pid: int) -> tuple[Agents, list[int]]:
    from lowtide.probes.host.process_files import name_of

    found = find_agents(pid)
    if found is None:
        refuse(
            f"pid {pid} ({name_of(pid)}) has no agent, nor has a process below it: start the program by "
            f"`lowtide exec`, or look into it by `lowtide attach {pid}`"
        )
    return found


def find_agents(pid: int) -> tuple[Agents, list[int]] | None:
    """Return the agents of a tree, and the processes in it that have one; None where none has.

    Ends the command where the process is not there, or is another user's.
    """
    import psutil

    from lowtide.probes.host.process_files import descendants_of, stat
    from lowtide.probes.processes.agents import Agents

    process = stat(pid)
    if process is None or process.state in ("Z", "X"):
        refuse(f"there is no process {pid}: `lowtide ps` lists engines")
    if psutil.Process(pid).uids().real != os.getuid():
        owner = psutil.Process(pid).username()
        refuse(f"pid {pid} is {owner}'s, and agents answer their own user alone: run lowtide as {owner}")
    tree = [pid, *sorted(descendants_of(pid))]
    found = next((agents for each in tree if (agents := Agents.of_process(each)) is not None), None)
    return None if found is None else (found, [each for each in tree if found.has_agent(each)])
