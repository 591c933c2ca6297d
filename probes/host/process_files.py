"""What the kernel's files in `/proc` say of one process: its parent, its memory, its open cards."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """A line of `/proc/PID/stat`."""

    pid: int
    command: str
    state: str
    parent: int
    group: int
    started: int


@dataclass(frozen=True, slots=True)
class Rollup:
    """What `smaps_rollup` says, in bytes.

    Attributes:
        layout: first and last address of the process: a fork has its parent's.
    """

    layout: str
    private: int
    anonymous: int


def stat(pid: int) -> ProcessStat | None:
    """The process's line; None where it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read().decode(errors="replace")
    except OSError:  # it ended
        return None
    # The command stands in brackets, and may hold any character.
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    return ProcessStat(pid, head.partition("(")[2], fields[0], int(fields[1]), int(fields[2]), int(fields[19]))


def lives(pid: int, started: int) -> bool:
    """Whether the process that began at this tick is there yet, and no zombie."""
    process = stat(pid)
    return process is not None and process.started == started and process.state != "Z"


def children_of(pid: int) -> list[int]:
    """The processes that it has started and that are there; empty where that may not be read."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                found += map(int, file.read().split())
    except FileNotFoundError:
        try:
            # A kernel without this file, or a thread that ended.
            return [child.pid for child in psutil.Process(pid).children()]
        except psutil.Error:
            return found
    except OSError:  # it ended, or is another user's
        pass
    return found


def sizes(pid: int) -> tuple[int, int]:
    """Bytes of a process in physical memory, and swapped out; everybody may read these."""
    found = dict.fromkeys(("VmRSS", "VmSwap", "HugetlbPages"), 0)
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name in found:
                    found[name] = int(value.removesuffix("kB\n")) * 1024
    except OSError:  # it ended
        pass
    return found["VmRSS"] + found["HugetlbPages"], found["VmSwap"]


def rollup(pid: int) -> Rollup | None:
    """Its memory by kind; None where it may not be read: another user's process, or a kernel before 4.14."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="utf-8", errors="replace") as file:
            head, *lines = file.read().splitlines()
    except (OSError, ValueError):
        return None
    sizes = {name: int(value.split()[0]) * 1024 for name, _, value in (line.partition(":") for line in lines)}
    swapped = sizes.get("Swap", 0)
    private = ("Private_Clean", "Private_Dirty", "Private_Hugetlb")
    return Rollup(
        head.split()[0],
        sum(sizes.get(name, 0) for name in private) + swapped,
        sizes.get("Anonymous", 0) + swapped,
    )


def has_opened_a_card(pid: int) -> bool:
    """Whether a process has the device open through which memory on a card is taken."""
    try:
        with os.scandir(f"/proc/{pid}/fd") as entries:
            return any(_target(entry.path) in ("/dev/nvidia-uvm", "/dev/kfd") for entry in entries)
    except OSError:  # it ended, or is another user's
        return False


def _target(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:  # closed meanwhile
        return ""


def command_line(pid: int) -> str:
    """What it was started with, the words apart by blanks; empty where it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:  # it ended meanwhile
        return ""


def open_files(pid: int) -> set[str]:
    """What its descriptors lead to; empty where that may not be read."""
    try:
        return {str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()}
    except OSError:  # it ended meanwhile
        return set()
