"""What can be read in a fraction of a millisecond, before and after every test: counts and names."""

from __future__ import annotations

import gc
import mmap
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import psutil

from lowtide.probes.device.driver import Driver
from lowtide.probes.device.torch_allocator import has_context, initialized_torch, read_pinned
from lowtide.probes.stages import announced_pools

_WATCHED_MODULES = ("torch.accelerator", "torch.cuda")


@dataclass(frozen=True, slots=True)
class Counters:
    """The process at one moment, as far as it costs next to nothing to say.

    Attributes:
        items: per resource, what is there by name, with bytes or 1 each.
        amounts: per resource (and device, as `reserved cuda:0`), bytes or a count; None where it cannot be told.
        settings: process-wide settings and functions by name, as text; what replaced them has another text.
        native_threads: all threads of the process, Python's included.
    """

    items: Mapping[str, Mapping[str, int]]
    amounts: Mapping[str, int | None]
    settings: Mapping[str, str]
    native_threads: int = 0


def read_counters(driver: Callable[[], Driver] | None, *, card: bool = True) -> Counters:
    """Reads them; changes nothing and initialises nothing.

    Args:
        driver: gives whom to ask for the driver's figures; asked only once torch has initialised a card; None leaves
            them out.
        card: whether to read cards at all.
    """
    items: dict[str, Mapping[str, int]] = {
        "threads": {f"{thread.name} ({thread.ident})": 1 for thread in threading.enumerate()},
        "processes": {str(pid): 1 for pid in child_processes()},
        "file-descriptors": dict.fromkeys(_descriptors(), 1),
        "shared-memory": dict.fromkeys(_shared_memory(), 1),
        "process-groups": dict.fromkeys(process_groups(), 1),
    }
    amounts: dict[str, int | None] = {"gc-frozen": gc.get_freeze_count(), "host-memory": anonymous_bytes()}
    mapped: dict[str, int] = {}
    pinned = 0
    for pool in announced_pools():
        if pool.kind == "arena":
            mapped[pool.device] = mapped.get(pool.device, 0) + pool.mapped
            parts = items.setdefault(f"arena {pool.device}", {})
            items[f"arena {pool.device}"] = {
                **parts,
                **{f"{pool.tag} at {address:#x}": length for address, length in pool.ranges},
            }
        elif pool.kind == "pinned":
            pinned += pool.mapped
    torch = initialized_torch() if card else None
    # Not what a test put in its place.
    if torch is not None and issubclass(type(torch), ModuleType):
        # What is handed out, not what the cache holds: that is reserved for the next pinned tensor.
        handed_out = read_pinned().torch_allocated
        amounts["pinned"] = None if handed_out is None else handed_out + pinned
        for index in range(torch.cuda.device_count()):
            if has_context(torch, index):
                amounts |= _card(torch, index, driver, mapped.get(f"cuda:{index}", 0))
    else:
        amounts["pinned"] = pinned
    return Counters(items, amounts, _settings(), len(os.listdir("/proc/self/task")))


def _card(torch: Any, index: int, driver: Callable[[], Driver] | None, mapped: int) -> dict[str, int | None]:
    device = f"cuda:{index}"
    try:
        stats = torch.cuda.memory_stats_as_nested_dict(index)
        allocated = stats["allocated_bytes"]["all"]["current"]
        reserved = stats["reserved_bytes"]["all"]["current"]
    except (RuntimeError, KeyError):  # an allocator without counters
        allocated = reserved = None
    amounts: dict[str, int | None] = {f"allocated {device}": allocated, f"reserved {device}": reserved}
    if driver is not None:
        held = driver().read(index).process_bytes
        amounts[f"driver {device}"] = None if held is None or reserved is None else held - reserved - mapped
    return amounts


def anonymous_bytes() -> int:
    """Resident memory of the process's own (heap, stacks, private maps), in bytes."""
    with open("/proc/self/statm", "rb") as file:
        fields = file.read().split()
    return (int(fields[1]) - int(fields[2])) * mmap.PAGESIZE


def child_processes() -> list[int]:
    """The process identifiers of the direct children."""
    found: list[int] = []
    told = False
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/children", "rb") as file:
                found += map(int, file.read().split())
            told = True
        except OSError:  # the thread ended, or the kernel was built without this file
            continue
    return sorted(found) if told else sorted(child.pid for child in psutil.Process().children())


def process_groups() -> list[str]:
    """The names of torch.distributed's process groups."""
    distributed: Any = sys.modules.get("torch.distributed.distributed_c10d")
    world = getattr(distributed, "_world", None)
    if world is None:
        return []
    return [str(name) for name in world.pg_names.values()]


def _descriptors() -> list[str]:
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            found.append(f"{number} -> {os.readlink('/proc/self/fd/' + number)}")
        except OSError:  # this listing's own, or another thread's
            continue
    return found


def _shared_memory() -> Sequence[str]:
    try:
        return os.listdir("/dev/shm")
    except OSError:
        return ()


def _settings() -> dict[str, str]:
    settings = {
        "gc.get_threshold()": str(gc.get_threshold()),
        "gc.isenabled()": str(gc.isenabled()),
    }
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_default_device"):
        return settings
    settings["torch.get_default_dtype()"] = str(torch.get_default_dtype())
    settings["torch.get_default_device()"] = str(torch.get_default_device())
    for module in _WATCHED_MODULES:
        namespace = sys.modules.get(module)
        if issubclass(type(namespace), ModuleType):
            for name, value in vars(namespace).items():
                if callable(value) and not name.startswith("__"):
                    settings[f"{module}.{name}"] = hex(id(value))
    return settings
