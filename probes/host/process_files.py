"""What the kernel's files in `/proc` say of one process: its parent, its memory, its open cards."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Collection, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from lowtide.probes.mappings import read_mappings
from lowtide.probes.originals import contents, lines_of, loaded, os, threading, time

MARK = "LOWTIDE_TREE"
"""The environment variable by which a descendant is known whose parent has ended."""

AGENTS_SIGNAL = 58
"""That by which an agent in a process is woken: `SIGNAL` of `lowtide_agent`, whose handler is where it is found."""

_PAUSES = {"x86_64": ("34 ", "130 "), "aarch64": ("133 ", "73 0x0 0x0 0x0 0x0 ")}
"""How `/proc/PID/syscall` begins in `pause` and `sigsuspend`, by machine."""

REAPERS = ("systemd", "init")
"""Names of the processes besides number 1 that become the parent of an orphan."""

_OF_PYTHON = ("python", "pt_", "vllm", "VLLM::", "sglang", "ray::", "pytest", "torchrun")
"""How the kernel's names begin of processes that are a Python."""

_TITLE_LENGTH = 60

_LONGEST_COMMAND = 15
"""Characters that the kernel keeps of a process's name."""

_TICKS = os.sysconf("SC_CLK_TCK")
"""In a second."""

_FORKED = 0x40
"""PF_FORKNOEXEC of the kernel's include/linux/sched.h: forked, and no program started since."""

_EXITING = 0x4
"""PF_EXITING of the same: it runs nothing of its program any more."""


class ProcessStat(msgspec.Struct, frozen=True):
    """A line of `/proc/PID/stat`; `started` in ticks since boot.

    `faults` are the pages that it has touched for the first time, or written where it had them from its parent; 0 on a
    kernel that does not count them. `image` is where the program's code and stack begin, at addresses drawn when the
    program was started, and so the same in a process and its forks; empty where they may not be read. `is_fork`:
    whether it runs no program of its own. `faults_of_ended` are those of its children that it has waited for: more
    whenever one has ended. `is_exiting`: whether the kernel takes it apart, before it is a zombie.
    """

    pid: int
    command: str
    state: str
    parent: int
    group: int
    started: int
    session: int
    faults: int = 0
    image: tuple[int, ...] = ()
    is_fork: bool = False
    faults_of_ended: int = 0
    is_exiting: bool = False


class Rollup(msgspec.Struct, frozen=True):
    """What `smaps_rollup` says, in bytes.

    Attributes:
        private: what only it maps, swapped out or not.
        anonymous: what is no file's, swapped out or not.
        shared: what is in physical memory and others map, too: libraries' code, shared memory.
        swapped: the part of `private` and `anonymous` that is swapped out.
        huge: the part of `anonymous` in huge pages, each of which is one fault.
    """

    private: int
    anonymous: int
    shared: int
    swapped: int
    huge: int


def stat(pid: int) -> ProcessStat | None:
    """Return the process's line; None where it has ended."""
    try:
        text = contents(f"/proc/{pid}/stat").decode(errors="replace")
    except OSError:  # it ended
        return None
    # The command stands in brackets, and may hold any character.
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    parent, group, session = map(int, fields[1:4])
    faults, of_ended = int(fields[7]) + int(fields[9]), int(fields[8]) + int(fields[10])
    # The kernel says 0 or 1 to whom it does not say more.
    image = tuple(address for address in (int(fields[23]), int(fields[25])) if address > 1)
    flags, started = int(fields[6]), int(fields[19])
    is_fork, is_exiting = bool(flags & _FORKED), bool(flags & _EXITING)
    command = head.partition("(")[2]
    return ProcessStat(
        pid, command, fields[0], parent, group, started, session, faults, image, is_fork, of_ended, is_exiting
    )


def has_ended(pid: int) -> bool:
    """Return whether a process is there no more, is being taken apart, or has only its exit code left."""
    process = stat(pid)
    return process is None or process.is_exiting or process.state in ("Z", "X")


def python_threads_seconds() -> dict[int, float] | None:
    """Return for how many seconds each of Python's threads but the calling one has run, by its number in the kernel.

    None where the kernel does not say.
    """
    own = threading.get_native_id()
    numbers = {thread.native_id or own for thread in threading.enumerate()} - {own}
    seconds: dict[int, float] = {}
    for number in numbers:
        try:
            seconds[number] = int(contents(f"/proc/self/task/{number}/schedstat").split()[0]) / 1e9
        except OSError:
            if os.path.exists(f"/proc/self/task/{number}"):
                return None
            # It ended meanwhile.
    return seconds


def catches(pid: int, number: int) -> bool | None:
    """Return whether a process handles a signal that its main thread lets in; None where it blocks the signal.

    False, too, where the process has ended or may not be read.
    """
    fields = status(pid)
    bit = 1 << (number - 1)
    if not int(fields.get("SigCgt", "0"), 16) & bit:
        return False
    return None if int(fields["SigBlk"], 16) & bit else True


def is_running(pid: int) -> bool:
    """Return whether a process's main thread computes, or waits for a processor to."""
    process = stat(pid)
    return process is not None and process.state == "R"


def resting_threads(pid: int, number: int) -> list[int]:
    """Return the threads of a process that wait in the kernel and let a signal in, by their numbers."""
    resting = []
    with contextlib.suppress(OSError):  # it ended
        for name in os.listdir(f"/proc/{pid}/task"):
            fields = _status(f"/proc/{pid}/task/{name}/status")
            blocks = int(fields.get("SigBlk", "0"), 16) & 1 << (number - 1)
            if fields.get("State", "")[:1] == "S" and not blocks:
                resting.append(int(name))
    return resting


def status(pid: int) -> dict[str, str]:
    """Return the lines of a process's status, by their names; empty where it has ended."""
    return _status(f"/proc/{pid}/status")


def anonymous_bytes_of(pid: int) -> int:
    """Return the bytes of a process that are no file's, as the kernel counts them."""
    return _anonymous(status(pid))


def _anonymous(fields: Mapping[str, str]) -> int:
    return _bytes_in(fields, "RssAnon") + _bytes_in(fields, "VmSwap")


def _bytes_in(fields: Mapping[str, str], name: str) -> int:
    return int(fields.get(name, "0 kB").split()[0]) * 1024


def _status(path: str) -> dict[str, str]:
    """Return the lines of the status of a process or thread, by name; empty where it has ended or may not be read."""
    try:
        lines = [line.partition(":") for line in lines_of(path)]
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in lines}


def waits_for_a_signal(pid: int) -> bool:
    """Return whether a process's main thread is in `pause`, which each handled signal ends; False if unknown."""
    try:
        call = contents(f"/proc/{pid}/syscall").decode()
    except OSError:  # it ended, or a kernel without this file
        return False
    return call.startswith(_PAUSES.get(os.uname().machine, ()))


def lives(pid: int, started: int) -> bool:
    """Return whether the process that began at this tick is there yet, and no zombie."""
    process = stat(pid)
    return process is not None and process.started == started and process.state != "Z"


def all_pids() -> list[int]:
    """Return the numbers of all processes that are seen here."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def children_of(pid: int) -> list[int]:
    """Return the processes that it has started and that are there; empty where that may not be read."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += map(int, contents(f"/proc/{pid}/task/{thread}/children").split())
    except FileNotFoundError:
        # A kernel without this file, or a thread that ended.
        everybody = map(stat, all_pids())
        return [process.pid for process in everybody if process is not None and process.parent == pid]
    except OSError:  # it ended, or is another user's
        pass
    return found


def descendants_of(pid: int) -> set[int]:
    """Return the processes that it has started, and those that these have."""
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        fresh = set(children_of(waiting.pop())) - found
        found |= fresh
        waiting += fresh
    return found


def parents_of(pid: int) -> list[int]:
    """Return its parent, that one's parent, and so on; none of one that has ended."""
    found: list[int] = []
    process = stat(pid)
    while process is not None and process.parent > 0:
        found.append(process.parent)
        process = stat(process.parent)
    return found


def began_at(process: ProcessStat) -> float:
    """Return when it began, in seconds since the epoch."""
    booted = time.clock_gettime(time.CLOCK_REALTIME) - time.clock_gettime(time.CLOCK_BOOTTIME)
    return booted + process.started / _TICKS


def program_name(pid: int) -> str:
    """Return the name of its program: the kernel's, which its command line may have in full; empty if it has ended."""
    process = stat(pid)
    if process is None:
        return ""
    full = os.path.basename(_words(pid)[0])
    return full if len(process.command) == _LONGEST_COMMAND and full.startswith(process.command) else process.command


def sizes(pid: int) -> tuple[int, int]:
    """Return the bytes of a process in physical memory, and swapped out; everybody may read these."""
    fields = status(pid)
    return _bytes_in(fields, "VmRSS") + _bytes_in(fields, "HugetlbPages"), _bytes_in(fields, "VmSwap")


def rollup(pid: int) -> Rollup | None:
    """Return its memory by kind; None where it may not be read: another user's process, or a kernel before 4.14."""
    try:
        _, *lines = lines_of(f"/proc/{pid}/smaps_rollup")
    except (OSError, ValueError):  # or it ends: then the file is empty
        return None
    sizes = {name: int(value.split()[0]) * 1024 for name, _, value in (line.partition(":") for line in lines)}
    swapped = sizes.get("Swap", 0)
    private, shared = (
        sum(sizes.get(f"{kind}_{part}", 0) for part in ("Clean", "Dirty", "Hugetlb")) for kind in ("Private", "Shared")
    )
    anonymous, huge = sizes.get("Anonymous", 0) + swapped, sizes.get("AnonHugePages", 0)
    return Rollup(private + swapped, anonymous, shared, swapped, huge)


class PrivateMemory:
    """Reads what processes have to themselves, without going through their pages each time.

    To do so takes the kernel 10 ms for a process with torch, and 50 where it has gigabytes; to say how much is no
    file's a twentieth of a millisecond. What is a file's, or its parent's, is as it was when the pages were gone
    through: where shared memory has come or gone they are gone through again, as it may be nobody else's.
    """

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, int, Rollup]] = {}

    def read(self, process: ProcessStat) -> Rollup | None:
        """Return its memory by kind; of `shared`, `swapped` and `huge` as of the last time.  None: see `rollup`."""
        pid, fields = process.pid, status(process.pid)
        shared = _bytes_in(fields, "RssShmem")
        started, shared_before, last = self._last.get(pid, (0, 0, None))
        if last is None or (started, shared_before) != (process.started, shared):
            found = rollup(pid)
            if found is not None:
                self._last[pid] = process.started, shared, found
            return found
        more = _anonymous(fields) - last.anonymous
        return replace(last, private=last.private + more, anonymous=last.anonymous + more)

    def keep(self, pids: Collection[int]) -> None:
        """Forget all processes but some."""
        self._last = {pid: known for pid, known in self._last.items() if pid in pids}


def has_opened_a_card(pid: int) -> bool:
    """Return whether a process has the device open through which memory on a card is taken."""
    return not {"/dev/nvidia-uvm", "/dev/kfd"}.isdisjoint(descriptors_of(pid))


def _target(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:  # closed meanwhile
        return ""


def command_line(pid: int) -> str:
    """Return what it was started with, the words apart by blanks; empty where it has ended."""
    try:
        return contents(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode(errors="replace")
    except OSError:  # it ended meanwhile
        return ""


def open_files(pid: int) -> set[str]:
    """Return what its descriptors lead to; empty where that may not be read."""
    return set(descriptors_of(pid))


def descriptors_of(pid: int) -> list[str]:
    """Return what each of its descriptors leads to; empty where that may not be read."""
    return list(numbered_descriptors(pid).values())


def numbered_descriptors(pid: int) -> dict[int, str]:
    """Return what each of its descriptors leads to, by number; empty where that may not be read."""
    try:
        with os.scandir(f"/proc/{pid}/fd") as entries:
            return {int(entry.name): target for entry in entries if (target := _target(entry.path))}
    except OSError:  # it ended meanwhile
        return {}


_UUID = re.compile(r"[0-9a-f]{8}-?([0-9a-f]{4}-?){3}[0-9a-f]{12}")


def numbers_in(name: str) -> set[int]:
    """Return the numbers in a file's name that may be a process's; the digits of a UUID are none."""
    return set(map(int, re.findall(r"(?<!\d)[1-9]\d*", _UUID.sub("", name))))


def bound_sockets(pid: int | None = None) -> list[tuple[int, str]]:
    """Return inode and path of each Unix socket that is bound, as a process sees them; default: as this one does.

    Empty where that may not be read. A path is as it was bound: a relative one, or one with `@` that is no file's.
    """
    try:
        # Num RefCount Protocol Flags Type St Inode Path
        fields = [line.split(maxsplit=7) for line in lines_of(f"/proc/{'self' if pid is None else pid}/net/unix")[1:]]
    except OSError:
        return []
    return [(int(each[6]), each[7]) for each in fields if len(each) == 8]


def own_sockets(pid: int, folder: str = "/") -> set[str]:
    """Return the paths in a folder to which a process's Unix sockets are bound."""
    own = set(descriptors_of(pid))
    return {path for inode, path in bound_sockets(pid) if f"socket:[{inode}]" in own and path.startswith(folder)}


def mapped_files(pid: int) -> list[tuple[str, int]]:
    """Return the files that it has mapped, each once with its first address; empty where that may not be read."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError):  # it ended, or is another user's
        for each in read_mappings(pid, "/"):
            if each.path.startswith("/"):
                found.setdefault(each.path, each.start)
    return list(found.items())


def count_descriptors(pid: int) -> int | None:
    """Return how many descriptors it has open; None where that may not be read."""
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:  # it ended, or is another user's
        return None


def thread_names(pid: int) -> tuple[str, ...]:
    """Return the names of its threads as the kernel keeps them, up to 15 characters each; empty where it has ended."""
    return tuple(numbered_threads(pid).values())


def numbered_threads(pid: int) -> dict[int, str]:
    """Return the same by the kernel's number of each."""
    found = {}
    with contextlib.suppress(OSError):  # it ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):  # the thread ended
                name = contents(f"/proc/{pid}/task/{thread}/comm").decode(errors="replace").rstrip("\n")
                found[int(thread)] = name
    return found


def numbered_children(pid: int) -> dict[int, str]:
    """Return what it has started, by number: what each runs; of one that has ended, that nobody has waited for it."""
    found = {}
    for child in children_of(pid):
        process = stat(child)
        if process is not None:
            ended = " that has ended, and nobody has waited for it" if process.state == "Z" else ""
            found[child] = f"{process.command}{ended}"
    return found


def things_sign(pid: int) -> tuple[int | str, ...] | None:
    """Return what moves when a process opens, starts or maps something, or ends it; None where that may not be read.

    How many descriptors, threads and child processes it has, and how large its address space is.
    """
    try:
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return None
    fields = status(pid)
    return descriptors, len(children_of(pid)), *(fields.get(name, "") for name in ("Threads", "VmSize", "RssShmem"))


def environment(pid: int) -> dict[str, str] | None:
    """Return the variables that it was started with, not what it has set since; None where they may not be read."""
    try:
        entries = contents(f"/proc/{pid}/environ").split(b"\0")
    except OSError:  # it ended, or is another user's
        return None
    pairs = (entry.decode(errors="replace").partition("=") for entry in entries if entry)
    return {name: value for name, _, value in pairs}


def runs_python(process: ProcessStat) -> bool:
    """Return whether a process is a Python; by its name where its program may not be read."""
    try:
        return os.path.basename(os.readlink(f"/proc/{process.pid}/exe")).startswith("python")
    except OSError:  # another user's
        return process.command.startswith(_OF_PYTHON)


def name_of(pid: int, called: str = "") -> str:
    """Return how a person knows a process: its own title, its name in `multiprocessing`, its module, or its command.

    Args:
        pid: its process identifier.
        called: its name in `multiprocessing` as it says itself; who has not started it does not know that.
    """
    command = _words(pid)
    try:
        program = os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    except OSError:  # it ended, or is another user's
        program = ""
    process = stat(pid)
    fallback = process.command if process is not None else "gone"
    first = os.path.basename(command[0])
    is_python = program.startswith("python")
    # A fork shows its parent's title until it sets one.
    is_inherited = pid != os.getpid() and command == _words(os.getpid())
    if is_python and not first.startswith("python") and command[0] != sys.executable and not is_inherited:
        # By `setproctitle`, as `VLLM::EngineCore`.
        return command[0].strip()[:_TITLE_LENGTH] or fallback
    known = _multiprocessing_name(pid) or called
    if known:
        return known
    if is_python and "-m" in command[:-1]:
        return f"python -m {command[command.index('-m') + 1]}"[:_TITLE_LENGTH]
    scripts = [word for word in command[1:2] if word.endswith(".py")]
    return f"python {os.path.basename(scripts[0])}" if is_python and scripts else fallback


def _words(pid: int) -> list[str]:
    """Return the words of its command line, or its title as one word; one empty word where it has ended."""
    try:
        words = contents(f"/proc/{pid}/cmdline").rstrip(b"\0").split(b"\0")
    except OSError:
        return [""]
    return [word.decode(errors="replace") for word in words]


def _multiprocessing_name(pid: int) -> str:
    """Return the name of the process object for a child that `multiprocessing` has started; empty if it has not."""
    module: Any = loaded("multiprocessing.process")
    for child in list(getattr(module, "_children", ())):
        facts = vars(child)
        # A stand-in of a test's has no such fields.
        if getattr(facts.get("_popen"), "pid", None) == pid:
            return str(facts.get("_name", ""))
    return ""
