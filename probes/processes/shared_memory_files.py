"""Files in /dev/shm that nobody uses any more: whose makers and users have all ended."""

from __future__ import annotations

import pwd
import re
import shlex
import stat as modes
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from lowtide.probes.host.process_files import all_pids, runs_python, stat
from lowtide.probes.originals import os, time
from lowtide.probes.processes.mapped_files import PATIENCE_S, FileId, files_in_use, read_side_by_side

FOLDER = Path("/dev/shm")

_BLOCK = 512
"""Bytes of a block as `stat(2)` counts them, on every file system."""

_FIRST_PERSON = 1000
"""The first number of a person's account (UID_MIN in login.defs(5)); those below are of the system's own services."""

_INITIAL = {"pid": "pid:[4026531836]", "ipc": "ipc:[4026531839]"}
"""The namespaces of a host itself (include/linux/proc_ns.h)."""

_HIDDEN = ("(sd-pam)", "fusermount3", "gnome-keyring-d", "gpg-agent", "ssh-agent", "sshd", "sshd-session", "su", "sudo")
"""Programs that keep their memory from their own user, too, and that share none in files."""


class _Maker(msgspec.Struct, frozen=True):
    """How a library names its files in /dev/shm.

    Attributes:
        names: matches them; the group `pid` is the maker's number, `hex` the same in hexadecimal digits.
        library: whose they are.
    """

    names: re.Pattern[str]
    library: str


_MAKERS = (
    # CPython, Lib/multiprocessing/shared_memory.py, _SHM_NAME_PREFIX.
    _Maker(re.compile(r"psm_[0-9a-f]+"), "Python's multiprocessing.shared_memory"),
    # CPython, Lib/multiprocessing/synchronize.py, SemLock._make_name; sem_open(3) puts `sem.` in front.
    _Maker(re.compile(r"sem\.mp-.+"), "a semaphore of Python's multiprocessing"),
    _Maker(re.compile(r"sem\..+"), "a named semaphore"),
    # torch, aten/src/ATen/MapAllocator.cpp, NewProcessWideShmHandle: `/torch_PID_RANDOM_COUNT`.
    _Maker(re.compile(r"torch_(?P<pid>\d+)_\d+(_\d+)?"), "torch.multiprocessing"),
    # vLLM, vllm/v1/kv_offload/cpu/shared_offload_region.py; vllm#51579 is about those that are left.
    _Maker(re.compile(r"vllm_offload_.+\.mmap"), "vLLM's KV offloading"),
    # NCCL, src/misc/shmutils.cc, ncclShmOpen.
    _Maker(re.compile(r"nccl-\w{6}"), "NCCL"),
    # The CUDA driver, for memory that processes share (cuIpcOpenMemHandle): user and process in hexadecimal digits.
    _Maker(re.compile(r"cuda\.shm\.[0-9a-f]+\.(?P<hex>[0-9a-f]+)\.\d+"), "the CUDA driver"),
    # LLVM, openmp/runtime/src/kmp_runtime.cpp, __kmp_reg_status_name: `__KMP_REGISTERED_LIB_PID_UID`.
    _Maker(re.compile(r"__KMP_REGISTERED_LIB_(?P<pid>\d+)_\d+"), "LLVM's OpenMP"),
)


class SharedMemoryFile(msgspec.Struct, frozen=True):
    """An entry of /dev/shm, or a folder there with all below it.

    Attributes:
        path: its path.
        library: who makes files with such names; empty where the name tells nothing: such a file may be kept on
            purpose, as a model that somebody has copied there.
        bytes: memory that comes back when it is removed; 0 for a page that was never written.
        length: bytes as its users see them.
        age: seconds since it was made, or last written, renamed or resized.
        owner: whose it is.
        remove: the command that removes it.
    """

    path: str
    library: str
    bytes: int
    length: int
    age: float
    owner: str
    remove: str


class Undecided(msgspec.Struct, frozen=True):
    """An entry of which it cannot be seen whether anybody uses it.

    Attributes:
        file: the entry.
        why: what could not be read.
    """

    file: SharedMemoryFile
    why: str


class SharedMemoryReading(msgspec.Struct, frozen=True):
    """What is in /dev/shm.

    Attributes:
        dead: entries whose makers and users have all ended, the largest first.
        undecided: entries of which that cannot be seen, the largest first.
        not_measured: why nothing could be read at all; empty if it could.
    """

    dead: tuple[SharedMemoryFile, ...]
    undecided: tuple[Undecided, ...]
    not_measured: str = ""

    @property
    def left_by_libraries(self) -> int:
        """Bytes of the dead entries that a library made, and so nobody keeps on purpose."""
        return sum(file.bytes for file in self.dead if file.library)


class _Entry(msgspec.Struct, frozen=True):
    file: SharedMemoryFile
    ids: frozenset[FileId]
    names: frozenset[str]
    user: int
    is_open_to_others: bool


def read_shared_memory(folder: Path = FOLDER, *, patience: float = PATIENCE_S) -> SharedMemoryReading:
    """Return which entries of /dev/shm nobody uses any more.

    An entry is used while a living process maps it or has it open, and while the process lives whose number its name
    has.  Who has closed one to open it again later by its name is not seen: hence `SharedMemoryFile.age`.

    Args:
        folder: the one to read.
        patience: seconds after which a process that cannot be read counts as one that may not be read.
    """
    try:
        entries = list(_entries(folder))
    except OSError as error:
        return SharedMemoryReading((), (), f"{folder} cannot be read: {error.strerror}")
    users = _Users.look(entries, patience)
    unused = [entry for entry in entries if not users.use(entry)]
    if unused:
        # Again, for who has opened one since it was looked at.
        users = _Users.look(unused, patience)
        unused = [entry for entry in unused if not users.use(entry) and _is_there(entry)]
    reasons = {entry.file.path: users.doubt(entry) for entry in unused}
    unused.sort(key=lambda entry: (-entry.file.bytes, entry.file.path))
    return SharedMemoryReading(
        dead=tuple(entry.file for entry in unused if not reasons[entry.file.path]),
        undecided=tuple(
            Undecided(entry.file, reasons[entry.file.path]) for entry in unused if reasons[entry.file.path]
        ),
    )


class _Users(msgspec.Struct, frozen=True):
    """What the living processes use of some entries; by user, a process that could not be read."""

    ids: frozenset[FileId]
    unreadable: Mapping[int, int]

    @classmethod
    def look(cls, entries: Sequence[_Entry], patience: float) -> _Users:
        wanted = {each for entry in entries for each in entry.ids}
        names = {name for entry in entries for name in entry.names}
        pids = all_pids() if wanted else []
        files = read_side_by_side(lambda pid: files_in_use(pid, wanted, names), pids, patience)
        unreadable: dict[int, int] = {}
        for pid in pids:
            user = None if pid in files and files[pid].is_readable else _user_of(pid)
            if user is not None and not _shares_nothing(pid):
                unreadable.setdefault(user, pid)
        return cls(frozenset(each for found in files.values() for each in found.ids), unreadable)

    def use(self, entry: _Entry) -> bool:
        return not self.ids.isdisjoint(entry.ids) or _maker_lives(entry)

    def doubt(self, entry: _Entry) -> str:
        """Why it cannot be seen whether anybody uses an entry; empty if it can."""
        namespaces = {kind: _namespace(kind) for kind in _INITIAL}
        if namespaces["pid"] != _INITIAL["pid"] and namespaces["ipc"] == _INITIAL["ipc"]:
            return "this container shares /dev/shm with its host, whose processes it does not see"
        me = os.geteuid()
        if me and entry.user != me:
            return f"only {entry.file.owner} and root may see whether {entry.file.owner}'s processes use it"
        suspects = [user for user in self.unreadable if user == entry.user]
        if entry.is_open_to_others:
            # Neither root nor a service of the system takes part in a person's shared memory.
            suspects += [user for user in self.unreadable if user >= _FIRST_PERSON and user != entry.user]
        if suspects:
            return f"process {self.unreadable[suspects[0]]} of {_name(suspects[0])} could not be read, and may use it"
        return ""


def _entries(folder: Path) -> Iterator[_Entry]:
    for path in sorted(folder.iterdir()):
        try:
            facts = path.lstat()
        except FileNotFoundError:  # removed since it was listed
            continue
        if modes.S_ISREG(facts.st_mode):
            yield _entry(path, facts, {path: facts})
        elif modes.S_ISDIR(facts.st_mode):
            inside = dict(_files_below(path))
            # An empty folder holds nothing.
            if inside:
                yield _entry(path, facts, inside)


def _files_below(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place, name)
            try:
                facts = path.lstat()
            except FileNotFoundError:
                continue
            if modes.S_ISREG(facts.st_mode):
                yield path, facts


def _entry(path: Path, facts: os.stat_result, files: Mapping[Path, os.stat_result]) -> _Entry:
    made = max(each.st_ctime for each in files.values())
    is_folder = path not in files
    owner = _name(facts.st_uid)
    command = ["rm", *(["-r"] if is_folder else []), "--", str(path)]
    if os.geteuid() not in (0, facts.st_uid):
        command.insert(0, "sudo")
    return _Entry(
        file=SharedMemoryFile(
            path=str(path),
            library=next((maker.library for maker in _MAKERS if maker.names.fullmatch(path.name)), ""),
            bytes=sum(each.st_blocks for each in files.values()) * _BLOCK,
            length=sum(each.st_size for each in files.values()),
            age=max(0.0, time.time() - made),
            owner=owner,
            remove=shlex.join(command),
        ),
        ids=frozenset((each.st_dev, each.st_ino) for each in files.values()),
        names=frozenset(each.name for each in files),
        user=facts.st_uid,
        is_open_to_others=any(each.st_mode & (modes.S_IRWXG | modes.S_IRWXO) for each in files.values()),
    )


def _maker_lives(entry: _Entry) -> bool:
    """Return whether the process lives whose number an entry's name has: it may open it again."""
    pid = _maker_of(Path(entry.file.path).name)
    process = stat(pid) if pid is not None else None
    return process is not None and process.state != "Z" and _user_of(process.pid) == entry.user


def _maker_of(name: str) -> int | None:
    for maker in _MAKERS:
        match = maker.names.fullmatch(name)
        if match is not None:
            numbers = match.groupdict()
            if "pid" in numbers:
                return int(numbers["pid"])
            return int(numbers["hex"], 16) if "hex" in numbers else None
    return None


def _is_there(entry: _Entry) -> bool:
    return Path(entry.file.path).exists()


def _user_of(pid: int) -> int | None:
    """Whose process it is; None if it has ended."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("Uid:"):
                return int(line.split()[2])  # the effective one
    except OSError:  # it ended
        return None
    return None


def _shares_nothing(pid: int) -> bool:
    """Return whether a process that may not be read takes part in no shared memory: an init, or one of `_HIDDEN`."""
    process = stat(pid)
    return process is None or process.command in _HIDDEN or (pid == 1 and not runs_python(process))


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:  # as in a container
        return str(user)


def _namespace(kind: str) -> str:
    try:
        return str(Path(f"/proc/self/ns/{kind}").readlink())
    except OSError:  # a kernel without it
        return ""
