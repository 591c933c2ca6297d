"""One cell: its processes, its log, what its report and its end say, and the card that it has alone meanwhile.

Cells may be handed to a Ray cluster: each is a task with a card of its own, and comes back with its report and its log.
Ray runs a task again elsewhere if its node or worker is lost. The nodes need lowtide, and the project at the same path.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import logging
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from msgspec.structs import replace

from lowtide.leakcheck.gate import guardian
from lowtide.leakcheck.gate.matrix import Cell, GateError
from lowtide.leakcheck.judging.fingerprints import finding_of
from lowtide.reports import schema
from lowtide.reports.schema import Machine, Report, Subject
from lowtide.reports.sizes import format_bytes

LOG = "log.txt"
"""The output of a cell's command, in its folder."""

_GUARDIAN_S = 60.0
"""How long a guardian may take beyond its command's time limit, in seconds: it ends processes and waits for them."""

_POLL_S = 0.2
_SHOWN = 200
_STACK = re.compile(
    r'Current thread .*most recent call first\):\n  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)'
)


class CellResult(msgspec.Struct, frozen=True):
    """How one cell ended: what was judged in it, by ids that begin with its name, and what went wrong with it."""

    subjects: tuple[Subject, ...]
    seconds: float
    machine: Machine | None = None


def not_run(cell: Cell, outcome: schema.Outcome, reason: str) -> CellResult:
    """Return the result of a cell that did not run."""
    return CellResult((Subject(id=cell.name, outcome=outcome, reason=reason),), 0.0)


def run_cell(cell: Cell, folder: Path, card: int | None, stopped: Callable[[], bool]) -> CellResult:
    """Run a cell below its guardian, wait for it, and read what it found.

    Args:
        cell: what to run.
        folder: an empty one, for its report and its log.
        card: the card that it gets; None on the CPU.
        stopped: whether the gate stops; asked while the cell runs.
    """
    env = {**os.environ, **cell.env}
    if card is not None:
        # Both, since which of them counts depends on torch's build; a list that is there already is indexed.
        for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
            visible = [each for each in os.environ.get(name, "").split(",") if each]
            env[name] = visible[card] if card < len(visible) else str(card)
    return result_of(cell, folder, run_in_folder(cell, folder, env, stopped))


def run_in_folder(
    cell: Cell, folder: Path, env: Mapping[str, str], stopped: Callable[[], bool], cwd: str | None = None
) -> dict[str, Any]:
    """Run a cell's command as `run_guarded` does, with its report and its log in an empty folder."""
    command = [*cell.command, f"{cell.report_option}={folder}"]
    with (folder / LOG).open("wb") as log:
        return run_guarded(command, folder / "end.json", cell.timeout, env, stopped, cwd=cwd, log=log)


def run_guarded(
    command: Sequence[str],
    result: Path,
    timeout: float,
    env: Mapping[str, str],
    stopped: Callable[[], bool] = lambda: False,
    *,
    cwd: str | None = None,
    log: BinaryIO | None = None,
) -> dict[str, Any]:
    """Run a command below a guardian, so that nothing of it is left; return what the guardian says of its end.

    That is nothing where the command could not be started, was stopped, or its guardian was killed.

    Args:
        command: with its arguments.
        result: the file in which the guardian says it.
        timeout: seconds after which its processes are ended.
        env: its whole environment.
        stopped: whether it is to end; asked while it runs.
        cwd: its working folder; None for this process's.
        log: takes its output; None leaves it to this process's.
    """
    reading, writing = os.pipe()
    # By its path: the working folder may hold a `lowtide` of its own, as old as a commit that is judged.
    watched = [sys.executable, guardian.__file__, str(result), str(timeout), str(reading), "--", *command]
    try:
        process = subprocess.Popen(
            watched,
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=None if log is None else subprocess.STDOUT,
            pass_fds=(reading,),
            # A Ctrl-C is this process's, which then closes the pipe.
            start_new_session=True,
        )
        until = time.monotonic() + timeout + _GUARDIAN_S
        while process.poll() is None and time.monotonic() < until and not stopped():
            with suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_S)
    finally:
        os.close(reading)
        # By this the guardian ends the command, if it still runs; it is given the time for that.
        os.close(writing)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_GUARDIAN_S)
    process.kill()
    process.wait()
    try:
        ended: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return ended


def result_of(cell: Cell, folder: Path, ended: Mapping[str, Any]) -> CellResult:
    """Read a cell's report, and what its guardian says of its end."""
    report = problem = None
    if schema.is_in(folder):
        try:
            report = schema.read(folder)
        except schema.ReportError as error:
            problem = str(error)
    subjects = [
        msgspec.structs.replace(subject, id=f"{cell.name}/{subject.id}")
        for subject in (report.subjects if report is not None else ())
    ]
    subjects += _left_behind(cell, subjects, ended.get("left", ()))
    wrong = problem or _what_went_wrong(cell, folder, report, ended)
    if wrong:
        subjects.append(Subject(id=cell.name, outcome="error", reason=wrong))
    machine = report.machine if report is not None else None
    return CellResult(tuple(subjects), float(ended.get("seconds", 0.0)), machine)


def _what_went_wrong(cell: Cell, folder: Path, report: Report | None, ended: Mapping[str, Any]) -> str:
    """Return why a cell's report is not all that counts; "" if it is."""
    if not ended:
        return f"ended with the gate, or its guardian was killed; {_last_line(folder)}"
    if ended["timed_out"]:
        return f"ended after {cell.timeout:g} s, its time limit, {_where_it_was(folder)}"
    code = ended["code"]
    how = f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    if report is None:
        return f"{how} and wrote no report; {_last_line(folder)}"
    if not report.subjects:
        return f"{how} and judged nothing; {_last_line(folder)}"
    if code and code != schema.exit_code(report):
        return f"{how}, which its report does not explain; {_last_line(folder)}"
    return ""


def _where_it_was(folder: Path) -> str:
    """Return the main thread's innermost Python frame, which `faulthandler` writes into an aborted command's log."""
    with suppress(OSError):
        log = (folder / LOG).read_text(encoding="utf-8", errors="replace")
        match = _STACK.search(log)
        if match:
            return f"in {match['function']} ({match['file']}:{match['line']}); log: cells/{folder.name}/{LOG}"
    return _last_line(folder)


def _last_line(folder: Path) -> str:
    """Return where the log is, and the last line in it that says something."""
    where = f"log: cells/{folder.name}/{LOG}"
    with suppress(OSError):
        lines = (folder / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
        last = next((line.strip() for line in reversed(lines) if any(map(str.isalnum, line))), "")
        if last:
            return f"last line: {last[:_SHOWN]}; {where}"
    return where


def _left_behind(cell: Cell, subjects: list[Subject], left: Any) -> list[Subject]:
    """Report the processes that outlived the command, unless a finding of its own report is about them."""
    if not left or any(finding.resource == "processes" for subject in subjects for finding in subject.findings):
        return []
    names = sorted(str(process["name"]) for process in left)
    shown = ", ".join(
        f"{process['pid']} ({process['name']}, {format_bytes(int(process['bytes']))} of host memory)"
        for process in left
    )
    count = f"{len(left)} process{'es' if len(left) > 1 else ''}"
    finding = finding_of(
        "processes",
        count=len(left),
        device="",
        stage="end",
        message=f"{count} outlived the command and had to be killed: {shown}",
        suspects=("outlived", *names),
        advice="end and join them in the engine's shutdown",
    )
    return [Subject(id=f"{cell.name}/end", outcome="leak", findings=(finding,))]


def count_cards() -> int:
    """Count the cards that the driver shows and the environment leaves visible; torch would make a context."""
    from lowtide.probes.device.driver import find_driver

    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        if name in os.environ:
            return len([each for each in os.environ[name].split(",") if each.strip() and each.strip() != "-1"])
    driver = find_driver()
    try:
        count = 0
        while driver.read(count).card_total is not None:
            count += 1
        return count
    finally:
        driver.close()


@contextmanager
def exclusive(card: int, stopped: Callable[[], bool]) -> Iterator[None]:
    """Have a card alone among the gates of this machine; waits until another one gives it back.

    Raises:
        GateError: the gate stopped meanwhile, or the lock cannot be made.
    """
    path = Path(tempfile.gettempdir()) / f"lowtide-card-{card}.lock"
    try:
        handle = _open(path)
    except OSError as error:
        raise GateError(f"{path} cannot be opened, which locks card {card}: {error.strerror}") from error
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if stopped():
                    raise GateError(f"stopped while another gate had card {card}") from None
                time.sleep(_POLL_S)
        yield
    finally:
        os.close(handle)


def _open(path: Path) -> int:
    """Open a lock for reading, which is enough for `flock`, and which another user's file allows."""
    with suppress(FileNotFoundError):
        # Without O_CREAT, which Linux refuses for another user's file in /tmp (`fs.protected_regular`).
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    return os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)


RETRIES = 3
"""How often a cell is run again whose worker or node was lost."""

_ASKED_EVERY_S = 0.5
_MOST_BYTES = 64 << 20


class RayCluster(msgspec.Struct):
    """A cluster that runs cells; a context that connects and disconnects.

    Attributes:
        address: as `ray.init` takes it: `auto`, `ray://HOST:10001`, or `local` for one on this machine.
        folder: the working folder of the cells, on every node.
        cards: how many cards the cluster has; known once it is connected.
    """

    address: str
    folder: Path
    cards: int = 0
    _ray: Any = None
    _task: Any = None

    def __enter__(self) -> RayCluster:
        """Connect.

        Raises:
            GateError: Ray is not installed, or nobody answers at the address.
        """
        try:
            ray: Any = importlib.import_module("ray")
        except ImportError as error:
            raise GateError("--ray needs Ray: install lowtide[ray]") from error
        try:
            ray.init(address=self.address, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:  # Ray raises errors of many types, of grpc's and its own
            first = next(iter(str(error).splitlines()), type(error).__name__)
            raise GateError(f"--ray {self.address} cannot be reached: {first}") from error
        self._ray = ray
        self.cards = int(ray.cluster_resources().get("GPU", 0))
        self._task = ray.remote(max_retries=RETRIES, retry_exceptions=False)(_run_on_node)
        return self

    def __exit__(self, *_: object) -> None:
        """Disconnect, which ends the tasks that still run."""
        self._ray.shutdown()

    def run(self, cell: Cell, folder: Path, stopped: Callable[[], bool]) -> CellResult:
        """Run a cell on some node, as `run_cell` does here, and fetch what it wrote."""
        ray = self._ray
        task = self._task.options(num_cpus=1, num_gpus=int(cell.on_card), name=cell.name)
        waiting = [task.remote(cell, str(self.folder))]
        while True:
            done, _ = ray.wait(waiting, timeout=_ASKED_EVERY_S)
            if done:
                break
            if stopped():
                ray.cancel(waiting[0], force=True)
                return not_run(cell, "error", "ended with the gate")
        try:
            ended, files, node = ray.get(done[0])
        except (ray.exceptions.RayError, OSError) as error:
            first = next(iter(str(error).splitlines()), type(error).__name__)
            return not_run(cell, "error", f"lost by the cluster after {RETRIES} more tries: {first}")
        files[LOG] = f"(on {node})\n".encode() + files.get(LOG, b"")
        for name, data in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        return result_of(cell, folder, ended)


def _run_on_node(cell: Cell, folder: str) -> tuple[dict[str, Any], dict[str, bytes], str]:
    """Run the cell in a worker of Ray's; return how it ended, its files by name, and where it ran.

    Ray has chosen the card, and shows the worker no other one.
    """
    if not Path(folder).is_dir():
        text = f"{folder} is not on this node: the nodes need the project at the same path\n"
        return {"code": 2, "timed_out": False, "seconds": 0.0, "left": []}, {LOG: text.encode()}, socket.gethostname()
    # The node's own Python: the gate's may lie elsewhere.
    here = replace(cell, command=(sys.executable, *cell.command[1:]))
    with tempfile.TemporaryDirectory(prefix="lowtide-cell-") as written:
        ended = run_in_folder(here, Path(written), {**os.environ, **cell.env}, lambda: False, cwd=folder)
        files: dict[str, bytes] = {}
        room = _MOST_BYTES
        # The report first, so that nothing else leaves no room for it.
        for path in sorted(Path(written).rglob("*"), key=lambda each: each.name != "leakcheck.json"):
            if path.is_file() and path.stat().st_size <= room:
                name = path.relative_to(written).as_posix()
                files[name] = path.read_bytes()
                room -= len(files[name])
    return ended, files, socket.gethostname()
