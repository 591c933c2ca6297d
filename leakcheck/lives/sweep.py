"""Fails every fault point of every stage in turn, each in a life of its own, and sees what becomes of it.

It is done in several processes at the same time, each of which lives one life after the other.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import re
import signal
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import psutil
from msgspec.structs import replace

from lowtide.leakcheck.judging.fingerprints import finding_of
from lowtide.leakcheck.lives.checked_life import CheckedLife, Lives
from lowtide.leakcheck.lives.script import Call, Fault, LifeError
from lowtide.leakcheck.processes.process_exit import end_soon
from lowtide.leakcheck.targets.faults import KINDS, Kind
from lowtide.leakcheck.targets.target import Capabilities, TargetError, TargetFactory, TargetSource, start_program
from lowtide.probes.processes.agents import remove_folders_of_the_dead
from lowtide.probes.stages import UPDATE
from lowtide.reports.schema import Finding, NotMeasured

PATIENCE_S = 60.0
"""How long a process may take to end its life, and itself, when no more is asked of it, in seconds."""

HANG_S = 300.0
"""How long a life in which something fails may take, in seconds, or ten times as long as without, if that is more."""

_LOOK_S = 1.0
"""How often it is looked which processes have ended, in seconds."""

_FRAMES = 4
"""How many calls are shown of where a life stands that does not end."""


class SweptCall(msgspec.Struct, frozen=True):
    """A call of which every fault point is failed, and how an engine comes to where it is made."""

    name: str
    before: tuple[Call, ...]
    call: Call


class Swept(msgspec.Struct, frozen=True):
    """What came of failing fault points of one kind in one stage: one of them in a life, or all.

    Attributes:
        points: how many there are.
        raised: in how many of them the call failed; in the others it did without what failed.
        findings: what was wrong, of the first point at which anything was.
        life: the life in which it was; empty if all was well.
        not_measured: what could not be judged, in earlier lives of the same process, too.
    """

    stage: str
    kind: Kind
    points: int
    raised: int = 0
    findings: tuple[Finding, ...] = ()
    life: tuple[Call, ...] = ()
    not_measured: tuple[NotMeasured, ...] = ()


def stages(capabilities: Capabilities, config: Mapping[str, Any]) -> list[SweptCall]:
    """Return the stages of a life that a target with these capabilities has."""
    able = capabilities
    create = Call("create", {"config": dict(config)} if config else {})
    longest = max(able.prompt_lengths)
    infer = Call("infer", {"prompt_lengths": [longest], "max_tokens": min(2, able.max_tokens)})
    found = [SweptCall("create", (), create), SweptCall("infer", (create,), infer)]
    if able.unfinished:
        start = Call("start", {"prompt_lengths": [longest], "max_tokens": able.max_tokens})
        found.append(SweptCall("step", (create, start), Call("step")))
    if able.prefix_cache:
        found.append(SweptCall("reset_prefix_cache", (create, infer), Call("reset_prefix_cache")))
    if able.reload:
        found.append(SweptCall("reload", (create, infer), Call("reload")))
    if able.update_weights:
        found.append(SweptCall(UPDATE, (create, infer), Call(UPDATE, {"version": 1})))
    for level in able.sleep_levels:
        sleep = Call("sleep", {"level": level, "mode": able.sleep_modes[0]})
        found.append(SweptCall(f"sleep({level})", (create, infer), sleep))
        found.append(SweptCall(f"wake from {level}", (create, infer, sleep), Call("wake")))
        # The second time there is a host copy already.
        again = (create, infer, sleep, Call("wake"))
        found.append(SweptCall(f"sleep({level}) again", again, sleep))
    found.append(SweptCall("shutdown", (create, infer), Call("shutdown")))
    if able.sleep_levels:
        found.append(SweptCall("shutdown asleep", (create, infer, sleep), Call("shutdown")))
    return found


def live(lives: Lives, stage: SweptCall, fault: Fault) -> Swept:
    """Live a life in which one point of a stage fails, or in which they are counted."""
    life = CheckedLife(lives)
    swept = functools.partial(Swept, stage.name, fault.kind)
    points = 0
    try:
        for call in stage.before:
            life.make(call)
        succeeded = life.make(replace(stage.call, fault=fault))
        points = life.points
        if fault.at is None:
            life.close()
            return swept(points, not_measured=lives.unmeasured)
        if not succeeded:
            life.make(stage.call)
        if life.model.phase == "closed":
            life.make(stage.before[0])
        _to_the_end(life)
    except LifeError as error:
        life.abandon()
        return swept(points, 0, error.findings, tuple(life.calls), lives.unmeasured)
    return swept(points, int(not succeeded), not_measured=lives.unmeasured)


def _to_the_end(life: CheckedLife) -> None:
    """Check that everything that the engine has to do still works, and what it says."""
    able, model = life.target.capabilities, life.model
    if model.phase == "asleep":
        life.wake()
    while model.unfinished:
        life.step()
    life.infer([min(able.prompt_lengths), max(able.prompt_lengths)][: able.max_requests], min(2, able.max_tokens))
    life.close()


def shared_sweep(
    source: TargetSource,
    able: Capabilities,
    *,
    config: Mapping[str, Any],
    jobs: int,
    kinds: Sequence[Kind] = KINDS,
    listener: Callable[[str, Kind, int, int], None] = lambda stage, kind, at, points: None,
) -> Iterator[Swept]:
    """Fail every point in several processes at the same time; reports and their order are those of one after the other.

    Of each point the error that comes out must be the one that was raised, the state and the memory those of before, a
    second try must work, and the life must end with nothing left.

    A process in which a life failed lives no other: what that one left must not be found in the next.  One that ends
    by itself over a fault point, or does not end its life, is a finding of that point.

    Args:
        source: how a program gets at the target.
        able: the target's capabilities.
        config: of every engine.
        jobs: processes at the same time.
        kinds: what is to fail.
        listener: hears of each point when its life is asked for: stage, kind, which one, of how many.

    Raises:
        TargetError: a process cannot drive the target, or ended by itself where nothing was made to fail.
    """
    by_stage = [[_Points(index, stage, kind) for kind in kinds] for index, stage in enumerate(stages(able, config))]
    unmeasured = deque(points for stage in by_stage for points in stage)
    # Of each stage one kind first: if it goes wrong without anything that fails, what fails in it besides says nothing.
    todo = deque(_Question(stage[0], None) for stage in by_stage)
    workers = _Workers(source, config, jobs)
    try:
        while unmeasured:
            while todo and (worker := workers.free()) is not None:
                question = todo.popleft()
                if question.is_of_use:
                    if question.at is not None:
                        stage, kind = question.points.stage.name, question.points.kind
                        listener(stage, kind, question.at, question.points.count)
                    worker.ask(question)
            for (points, at), lived in workers.answers(able.device):
                if at is not None:
                    points.lived[at] = lived
                    continue
                points.counted = lived
                todo.extend(_Question(points, each) for each in range(points.count))
                first, *others = by_stage[points.index]
                if points is first and lived.findings:
                    unmeasured = deque(points for points in unmeasured if points not in others)
                elif points is first:
                    todo.extend(_Question(other, None) for other in others)
            while unmeasured and unmeasured[0].is_done:
                yield unmeasured.popleft().swept()
    finally:
        workers.close()


def live_what_is_asked(factory: TargetFactory, config: Mapping[str, Any], descriptor: int, stacks: int) -> None:
    """Live the lives that are asked for over a connection, in a process of its own; `stacks` says where one hangs."""
    with Connection(descriptor) as connection, open(stacks, "w") as file:
        try:
            # Whether inferring leaves something in another process is for random lives: they infer often enough.
            with Lives(factory, growth=False) as lives:
                known = stages(lives.capabilities, config)
                connection.send(None)
                while True:
                    index, fault, limit = connection.recv()
                    if limit is not None:
                        faulthandler.dump_traceback_later(limit, file=file)
                    try:
                        lived = live(lives, known[index], fault)
                    finally:
                        faulthandler.cancel_dump_traceback_later()
                    connection.send(lived)
        except TargetError as error:
            connection.send(error)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            # Nobody asks any more.
            pass
    end_soon(0)


class _Points(msgspec.Struct, eq=False):
    """The fault points of one kind in one stage, and what came of them so far."""

    index: int
    stage: SweptCall
    kind: Kind
    counted: Swept | None = None
    seconds: float = 0.0
    lived: dict[int, Swept] = msgspec.field(default_factory=dict)

    @property
    def count(self) -> int:
        """How many there are to be failed: none before they are counted, or if the stage goes wrong by itself."""
        return 0 if self.counted is None or self.counted.findings else self.counted.points

    @property
    def end(self) -> int:
        """Up to where they are failed: up to the first that is not survived."""
        return next((at for at in sorted(self.lived) if self.lived[at].findings), self.count)

    @property
    def is_done(self) -> bool:
        return self.counted is not None and all(at in self.lived for at in range(self.end))

    def swept(self) -> Swept:
        assert self.counted is not None
        bad = self.lived.get(self.end, self.counted)
        raised = sum(self.lived[at].raised for at in range(self.end))
        unmeasured = dict.fromkeys(
            each for lived in (self.counted, *self.lived.values()) for each in lived.not_measured
        )
        return replace(bad, points=self.counted.points, raised=raised, not_measured=tuple(unmeasured))


class _Question(NamedTuple):
    """What a process is asked to live: a stage in which a point fails, or in which they are counted (`at` is None)."""

    points: _Points
    at: int | None

    @property
    def is_of_use(self) -> bool:
        return self.at is None or self.at < self.points.end

    @property
    def limit(self) -> float | None:
        """How many seconds the life may take; None where nobody knows."""
        return None if self.at is None else max(HANG_S, 10 * self.points.seconds)


class _Workers:
    """The processes, which are started as there is something to do for them."""

    def __init__(self, source: TargetSource, config: Mapping[str, Any], jobs: int) -> None:
        self._source = source
        self._config = config
        self._jobs = jobs
        self._all: list[_Worker] = []

    def free(self) -> _Worker | None:
        """Return one that does nothing, or a new one if there may be more."""
        found = next((worker for worker in self._all if worker.question is None), None)
        if found is None and len(self._all) < self._jobs:
            found = _Worker(self._source, self._config, self._jobs)
            self._all.append(found)
        return found

    def answers(self, device: str) -> list[tuple[_Question, Swept]]:
        """Wait a moment for those that answer or have ended; return what was asked, and what came of it."""
        found = []
        ready = wait([worker.connection for worker in self._all], _LOOK_S)
        for worker in [each for each in self._all if each.connection in ready or each.has_ended or each.hangs]:
            question = worker.question
            lived = worker.answer(device)
            if question is None or lived is None:
                continue
            if question.at is None:
                question.points.seconds = worker.seconds
            found.append((question, lived))
            if lived.findings:
                self._all.remove(worker)
                worker.connection.close()
                worker.wait()
        return found

    def close(self) -> None:
        """Ask no more of any, and see them end."""
        for worker in self._all:
            worker.connection.close()
        for worker in self._all:
            worker.wait()


class _Worker:
    """One process, and what it was asked last."""

    def __init__(self, source: TargetSource, config: Mapping[str, Any], jobs: int) -> None:
        self.question: _Question | None = None
        self.connection, theirs = Pipe()
        self._is_loaded = False
        self._asked = 0.0
        # Closed with the process, which writes to it.
        self._stacks = tempfile.TemporaryFile("r", errors="replace")  # noqa: SIM115
        # Each has its part of the cores: together their threads would only wait for each other.
        threads = os.environ.get("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // jobs)))
        with theirs:
            descriptor = theirs.fileno()
            stacks = self._stacks.fileno()
            program = source.program(__name__, live_what_is_asked.__name__, dict(config), descriptor, stacks)
            self._process = start_program(program, env={"OMP_NUM_THREADS": threads}, pass_fds=[descriptor, stacks])

    def ask(self, question: _Question) -> None:
        self.question = question
        self._asked = time.monotonic()
        # One that is dead by now says so when it is asked for its answer.
        with suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send((question.points.index, Fault(question.points.kind, question.at), question.limit))

    @property
    def has_ended(self) -> bool:
        """Whether its process is no more; a child that it forked may have the connection still open."""
        return self._process.poll() is not None

    @property
    def seconds(self) -> float:
        """Since it was asked, and was there to hear it."""
        return time.monotonic() - self._asked

    @property
    def hangs(self) -> bool:
        """Whether its life takes longer than any that ends."""
        limit = None if self.question is None else self.question.limit
        # A moment more, in which it writes down where it stands.
        return self._is_loaded and limit is not None and self.seconds > limit + _LOOK_S

    def answer(self, device: str) -> Swept | None:
        """Return what came of the life that it was asked for; None as long as it was only loading.

        Raises:
            TargetError: it cannot drive the target, or ended by itself where nothing was made to fail.
        """
        if not self.connection.poll():
            return self._died(device) if self.has_ended else self._hung(device)
        try:
            said = self.connection.recv()
        except (EOFError, ConnectionResetError):
            return self._died(device)
        if isinstance(said, TargetError):
            raise said
        if said is None:
            self._is_loaded = True
            self._asked = time.monotonic()
            return None
        assert isinstance(said, Swept)
        self.question = None
        return said

    def wait(self) -> None:
        """Wait until it ends; not for ever."""
        try:
            self._process.wait(PATIENCE_S)
        except BaseException as error:
            self._process.kill()
            self._process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
        finally:
            self._stacks.close()
            # One that was killed, or died, has left the folder of its agents.
            remove_folders_of_the_dead()

    def _died(self, device: str) -> Swept:
        ended = _how_it_ended(self._process.wait())
        question = self.question
        if not self._is_loaded or question is None or question.at is None:
            at = f"in {question.points.stage.name}" if self._is_loaded and question is not None else "while loading"
            raise TargetError(f"a process of the sweep ended by itself {at}, where nothing was made to fail: {ended}")
        return _failed(question, device, "ended", f"the process ended by itself ({ended})")

    def _hung(self, device: str) -> Swept:
        question = self.question
        assert question is not None
        children = psutil.Process(self._process.pid).children(recursive=True)
        self._process.kill()
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        self._process.wait()
        self._stacks.seek(0)
        said = f"the life had not ended after {question.limit:g} s: {where_it_stood(self._stacks.read())}"
        return _failed(question, device, "hangs", said)


def where_it_stood(stacks: str) -> str:
    """Say, from what `faulthandler` writes of all threads, where the main one was, the last: its innermost calls."""
    frames = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', stacks.rpartition("Thread 0x")[2], re.MULTILINE)
    calls = [f"{function} ({Path(file).name}:{line})" for file, line, function in frames[:_FRAMES]]
    return f"it stood in {', called by '.join(calls)}" if calls else "it did not say where it stood"


def _failed(question: _Question, device: str, how: str, said: str) -> Swept:
    stage, kind = question.points.stage, question.points.kind
    finding = finding_of(
        "state",
        device=device,
        stage=stage.call.name,
        message=f"{kind} number {question.at} failed in {stage.name}, and {said}",
        suspects=(how, kind),
    )
    failed = replace(stage.call, fault=Fault(kind, question.at))
    return Swept(stage.name, kind, 0, 0, (finding,), (*stage.before, failed))


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    # Not all have a name.
    return next((known.name for known in signal.Signals if known == -code), f"signal {-code}")
