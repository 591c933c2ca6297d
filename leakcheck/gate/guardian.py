"""Runs one command and makes sure that nothing of it outlives this process, the time limit or the gate.

    python -m lowtide.leakcheck.gate.guardian RESULT TIMEOUT FD -- COMMAND …

It is the subreaper of the command's processes (`man 2 PR_SET_CHILD_SUBREAPER`), so that daemons among them become its
children and are found. `FD` is the reading end of a pipe whose writing end only the gate has: when it closes, the gate
is gone. A process of its own does this, since a gate that is killed with SIGKILL cannot.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

LINGER_S = 5.0
"""How long helpers of a command that has ended (resource trackers, loggers) may take to end as well, in seconds."""

DUMP_S = 3.0
"""How long a command may take to write its Python stacks before it is killed, in seconds."""

_KILL_S = 20.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main(arguments: list[str]) -> int:
    """Run the command, write `RESULT` (JSON) about its end; the exit code is 0 whatever the command's is."""
    result, timeout, pipe = Path(arguments[0]), float(arguments[1]), int(arguments[2])
    command = arguments[arguments.index("--") + 1 :]
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # Where a terminal or a system's manager ends this process, the command is to end, too.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _raise_exit)
    started = time.monotonic()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        # Aborting writes the stacks of all threads to the log, and no core file.
        env={**os.environ, "PYTHONFAULTHANDLER": "1"},
        preexec_fn=_prepare_child,
    )
    try:
        ended = _wait(process, pipe, started + timeout)
        if ended == "gate":
            return 0
        if ended == "timeout":
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGABRT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(DUMP_S)
        seconds = time.monotonic() - started
        left = _left_after(LINGER_S) if ended == "command" else []
    finally:
        _end_all(process)
    report = {"code": process.returncode, "timed_out": ended == "timeout", "seconds": seconds, "left": left}
    partial = result.with_suffix(".partial")
    partial.write_text(json.dumps(report), encoding="utf-8")
    partial.replace(result)
    return 0


def _prctl(option: int, value: int) -> None:
    # Only Linux has it; elsewhere a daemon of the command is not found.
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _prepare_child() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _raise_exit(number: int, _: Any) -> None:
    raise SystemExit(128 + number)


def _wait(process: subprocess.Popen[bytes], pipe: int, until: float) -> str:
    """Wait; return what ended first: the `command`, the `gate`, or the time (`timeout`)."""
    handle = os.pidfd_open(process.pid)
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        poll.register(pipe, select.POLLIN | select.POLLHUP)
        while (seconds := until - time.monotonic()) > 0:
            ready = {number for number, _ in poll.poll(min(seconds, 3600.0) * 1000.0)}
            if handle in ready:
                process.wait()
                return "command"
            if pipe in ready:
                return "gate"
        return "timeout"
    finally:
        os.close(handle)


def _left_after(patience: float) -> list[dict[str, Any]]:
    """Return the processes of the command that outlive it."""
    until = time.monotonic() + patience
    while True:
        _reap()
        living = _descendants()
        if not living or time.monotonic() > until:
            return [_described(process) for process in living]
        time.sleep(0.05)


def _described(process: psutil.Process) -> dict[str, Any]:
    found = {"pid": process.pid, "name": "?", "bytes": 0}
    with suppress(psutil.Error):
        found["name"] = process.name()
        found["bytes"] = process.memory_full_info().uss
    return found


def _descendants() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _end_all(process: subprocess.Popen[bytes]) -> None:
    """Kill everything below this process, also what is started while this goes on."""
    until = time.monotonic() + _KILL_S
    while (living := _descendants()) and time.monotonic() < until:
        for each in living:
            with suppress(psutil.Error):
                each.kill()
        _reap(process)
        time.sleep(0.02)
    with suppress(subprocess.TimeoutExpired):
        process.wait(1.0)


def _reap(command: subprocess.Popen[bytes] | None = None) -> None:
    """Take the exit codes of adopted processes, and leave that of the command to its `Popen`."""
    if command is not None:
        command.poll()
        if command.returncode is None:
            return
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
