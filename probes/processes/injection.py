"""Runs a line of Python in a process that was not started with us, between two of its own instructions.

From Python 3.14 on by `sys.remote_exec`.  Below by gdb, which stops the process where one of its threads is about to
let others run, as before any call that waits: it has the GIL then, and no lock of an allocator.  There the thread is
sent through `PyRun_SimpleString` on its way: by its registers alone, since gdb's own calls of functions write those
for floating point back, and gdb before 14 cannot on a processor with AMX; a process that it has stopped in a call of
the kernel ends with `OSError: [Errno 512]` then (seen with gdb 13.1, so also under `memray attach`).  `hypno`, which
stops the main thread anywhere, ended a server whose main thread was at work at its twentieth attach of a thousand.

The text lies on the thread's stack, far below what is in use; nothing is loaded, allocated or left.
"""

from __future__ import annotations

import contextlib
import ctypes
import platform
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from lowtide.probes.host.process_files import mapped_files, name_of, stat, status
from lowtide.probes.originals import contents, os, time

PATIENCE_S = 15.0
"""Seconds for a thread of the process to come to where it can be stopped."""

_BEGINS_S = 60.0
"""Seconds for gdb to start and to read the program's symbols, which the process does not notice."""

_ENDS_S = 60.0
"""Seconds in which gdb must have let go."""

_AGAIN_S = 1.0
"""Seconds after which gdb is interrupted once more."""

_BELOW = 16384
"""Bytes below what a thread has in use of its stack: Python copies the text before it needs as much."""

_SCRIPT = """
set pagination off
set confirm off
handle all nostop noprint pass
set sysroot {nowhere}
file "{python}"
set $save = (long)&PyEval_SaveThread + {base}
set $run = (long)&PyRun_SimpleString + {base}
file "{program}"
attach {pid}
hbreak *$save
echo waiting\\n
continue
if $pc == $save
set {{char[{length}]}} ($rsp - {below}) = "{text}"
find /b1 $save, +4000, 0xc3
set {{long}} ($rsp - 8) = $pc
set {{long}} ($rsp - 16) = $_
set $rdi = $rsp - {below}
set $rsp = $rsp - 16
select-frame 0
set $pc = $run
echo sent\\n
end
delete
detach
"""
"""What gdb does.  What takes long, to read symbols, it does while the process runs.  A return instruction, to which the
call returns, goes on to the function that was to be called: so the stack is aligned as for any call."""

_PYTHON = re.compile(r"(?:lib)?python(3\.\d+)(t?)\b")
_FIXED = 2
"""ET_EXEC of a program's header: its addresses are what it says."""

_LIBRARIES = re.compile(r"/(?:lib)?python3\.\d+t?(?:\.so[^/]*)?$")

_SET_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of the kernel's include/uapi/linux/prctl.h."""

_OLDEST = (3, 10)
"""The Python that a look runs in, at least."""

_SYS_PTRACE = 1 << 19
"""CAP_SYS_PTRACE of its include/uapi/linux/capability.h."""

_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")


class InjectionError(RuntimeError):
    """Nothing can be run in a process; the message says why, and what helps."""


def python_of(pid: int) -> tuple[str, bool] | None:
    """Return the version of the Python that a process runs, as `3.12`, and whether it is free-threaded; None if none.

    By the name of its program or of the library that it has mapped.
    """
    mapped = _mapped_python(pid)
    found = None if mapped is None else _PYTHON.search(os.path.basename(mapped[0]))
    return None if found is None else (found[1], bool(found[2]))


def _mapped_python(pid: int) -> tuple[str, int] | None:
    """Return the file with a process's Python, a library or the program, and what is added to addresses in it."""
    programs = [(file, start) for file, start in mapped_files(pid) if _LIBRARIES.search(file)]
    # A program that has a library is small, and has nothing of Python's.
    for file, start in sorted(programs, key=lambda each: ".so" not in each[0]):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/root{file}", "rb") as program:  # noqa: PTH123
            is_fixed = program.read(18)[16] == _FIXED
            return file, 0 if is_fixed else start
    return None


def refuse_unless_possible(pid: int) -> None:
    """Make sure that something can be run in a process, as far as that shows without stopping it.

    Raises:
        InjectionError: it cannot.
    """
    process = stat(pid)
    if process is None or process.state in ("Z", "X"):
        raise InjectionError(f"there is no process {pid}: `lowtide ps` lists engines")
    if pid == os.getpid():
        raise InjectionError(f"pid {pid} is lowtide itself")
    _refuse_unless_allowed(pid)
    python = python_of(pid)
    named = f"pid {pid} ({name_of(pid)})"
    if python is None:
        raise InjectionError(f"{named} runs no Python that is known by its file's name")
    if tuple(map(int, python[0].split("."))) < _OLDEST:
        raise InjectionError(f"{named} runs Python {python[0]}: it takes {'.'.join(map(str, _OLDEST))} or newer")
    if python[1]:
        raise InjectionError(
            f"{named} runs a free-threaded Python, whose threads would run on beside: use a build with the GIL"
        )
    if _files_of(pid) != _files_of(os.getpid()):
        raise InjectionError(f"{named} is in another container: run lowtide in that one")
    tracer = int(status(pid).get("TracerPid", "0"))
    if tracer:
        raise InjectionError(f"{named} is traced by pid {tracer} ({name_of(tracer)}): end that first")
    if _has_remote_exec(python[0]):
        return
    if platform.machine() != "x86_64":
        raise InjectionError(f"{named} runs Python {python[0]}: on {platform.machine()} it takes Python 3.14 or newer")
    if shutil.which("gdb") is None:
        raise InjectionError("gdb was not found, by which processes of Python before 3.14 are entered: install gdb")


def _has_remote_exec(version: str) -> bool:
    """Return whether both Pythons are one, and have it: each reads the other's structures."""
    return hasattr(sys, "remote_exec") and version == f"{sys.version_info.major}.{sys.version_info.minor}"


def _refuse_unless_allowed(pid: int) -> None:
    # Opening it takes the same right as to stop the process.
    try:
        with open(f"/proc/{pid}/mem", "rb"):  # noqa: PTH123 - no file to be read
            return
    except FileNotFoundError:
        raise InjectionError(f"pid {pid} has ended") from None
    except OSError:
        pass
    owner = psutil.Process(pid).username()
    if os.geteuid() and psutil.Process(pid).uids().effective != os.geteuid():
        raise InjectionError(
            f"pid {pid} is {owner}'s: run lowtide as {owner}{'' if owner == 'root' else ', or as root'}"
        )
    scope = _yama()
    if scope == 3:
        raise InjectionError("kernel.yama.ptrace_scope is 3, which forbids it to all until the next start of the host")
    if scope and not int(status(os.getpid()).get("CapEff", "0"), 16) & _SYS_PTRACE:
        raise InjectionError(
            f"kernel.yama.ptrace_scope is {scope}, which lets only root enter other processes: "
            "use sudo, or `sysctl kernel.yama.ptrace_scope=0`; in a container add --cap-add=SYS_PTRACE"
        )
    raise InjectionError(
        f"the kernel does not let pid {pid} be entered: in Docker add --cap-add=SYS_PTRACE, "
        "in Kubernetes SYS_PTRACE to securityContext.capabilities"
    )


def _yama() -> int:
    try:
        return int(contents(str(_YAMA)))
    except OSError:  # a kernel without it
        return 0


def _files_of(pid: int) -> tuple[str, ...]:
    """Return which files a process sees: by its namespace, and where that begins for it."""
    try:
        return os.readlink(f"/proc/{pid}/ns/mnt"), os.readlink(f"/proc/{pid}/root")
    except OSError:  # it ended
        return ()


def run_in(pid: int, text: str, folder: Path, patience: float = PATIENCE_S) -> None:
    """Let a process run some Python, of ASCII and less than 8 KiB, in a thread that has the GIL.

    Args:
        pid: the process, of which `refuse_unless_possible` says nothing.
        text: statements that raise nothing; they run in the namespace of `__main__`, and must be quick.
        folder: where the process may read files, and where one is written for it.
        patience: seconds until a thread must have come to where it can run it.

    Raises:
        InjectionError: it cannot be, or no thread has come there; then nothing of it runs later either.
    """
    python = python_of(pid)
    if python is not None and _has_remote_exec(python[0]):
        _remote_exec(pid, text, folder)
    else:
        _by_gdb(pid, text, folder, patience)


def _remote_exec(pid: int, text: str, folder: Path) -> None:
    script = folder / "run.py"
    script.write_text(text, encoding="ascii")
    script.chmod(0o644)
    try:
        sys.remote_exec(pid, str(script))  # type: ignore[attr-defined]
    except (OSError, RuntimeError, ValueError) as error:
        raise InjectionError(f"pid {pid} cannot be entered: {error}") from error


def _by_gdb(pid: int, text: str, folder: Path, patience: float) -> None:
    mapped = _mapped_python(pid)
    if mapped is None:
        raise InjectionError(f"pid {pid} has ended")
    script = folder / "gdb"
    quoted = "".join(f"\\{byte:03o}" if chr(byte) in '"\\' or byte < 32 else chr(byte) for byte in text.encode("ascii"))
    script.write_text(
        _SCRIPT.format(
            pid=pid,
            python=mapped[0],
            base=mapped[1],
            program=f"/proc/{pid}/exe",
            # Or it would read the headers of every library, of which an engine has hundreds.
            nowhere=folder / "nowhere",
            length=len(text) + 1,
            below=_BELOW,
            text=quoted,
        ),
        encoding="utf-8",
    )
    command = ["gdb", "-nx", "-batch", "-readnever", "-iex", "set auto-solib-add off", "-iex", "set auto-load off"]
    # No `with`, which waits for its end.
    gdb = subprocess.Popen(
        [*command, "-x", str(script)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        # What a terminal sends is for us alone, and gdb must let go of the process where we are killed.
        start_new_session=True,
        preexec_fn=_prepare_gdb,
    )
    said, is_cut = _said_by(gdb, patience)
    if "\nsent\n" in said:
        return
    if "received signal SIGINT" in said and not is_cut:
        # Gdb keeps the one signal to itself by which it is interrupted.
        os.kill(pid, signal.SIGINT)
        raise InjectionError(f"pid {pid} was interrupted meanwhile")
    if is_cut:
        raise InjectionError(
            f"no thread of pid {pid} ({name_of(pid)}) has run Python for {patience:g} s: attach while it has work"
        )
    if stat(pid) is None:
        raise InjectionError(f"pid {pid} has ended")
    raise InjectionError(f"gdb could not enter pid {pid}: {_reason_in(said)}")


def _said_by(gdb: subprocess.Popen[str], patience: float) -> tuple[str, bool]:
    """Return what gdb has said until its end, and whether it was cut short: by SIGINT alone it undoes what it does."""
    until = time.monotonic() + _BEGINS_S
    is_waiting = False
    try:
        while time.monotonic() < until:
            try:
                return gdb.communicate(timeout=_AGAIN_S)[0], False
            except subprocess.TimeoutExpired as error:
                if not is_waiting and b"\nwaiting\n" in (error.output or b""):
                    is_waiting, until = True, time.monotonic() + patience
    except BaseException:
        _interrupted(gdb)
        raise
    return _interrupted(gdb), True


def _interrupted(gdb: subprocess.Popen[str]) -> str:
    """Return what gdb has said until it has let go of the process; while it attaches to one, it hears nothing.

    Raises:
        InjectionError: it does not end. Nobody kills it, since its breakpoint would stay in the process.
    """
    until = time.monotonic() + _ENDS_S
    while time.monotonic() < until:
        gdb.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return gdb.communicate(timeout=_AGAIN_S)[0]
    raise InjectionError(f"gdb (pid {gdb.pid}) has not let go for {_ENDS_S:g} s: send it SIGINT again, and no SIGKILL")


def _reason_in(said: str) -> str:
    lines = [line for line in said.splitlines() if line.strip() and not line.startswith(("[", "Using host", "0x"))]
    return lines[-1] if lines else "it said nothing"


def _prepare_gdb() -> None:
    with contextlib.suppress(OSError):
        # The process stands still for some of its time; only root may.
        os.nice(-10)
    with contextlib.suppress(OSError):
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGINT)
