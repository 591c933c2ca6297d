"""Memory that other processes of the program hold, where no probe looks: an engine in a child is never called clean."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable

import msgspec

from lowtide.leakcheck.judging.exemptions import exempt
from lowtide.probes.device.driver import Driver
from lowtide.probes.host.counters import Counters, child_processes
from lowtide.probes.host.process_files import parents_of
from lowtide.probes.host.process_tree import ProcessMemory, ProcessTree, TreeMemory
from lowtide.probes.originals import contents, time
from lowtide.reports.outcomes import ENDED
from lowtide.reports.schema import CardMemory, NotMeasured, OtherProcess
from lowtide.reports.sizes import format_bytes

SHARE = 0.1
"""The part of the tree's private memory from which on a process is one that had to be seen."""

FLOOR = 32 << 20
"""Bytes of its own below which a process is a helper: as much may move in this process without being reported."""

_BUDGET_S = 0.02
_BUDGET_SHARE = 0.02
"""Seconds of this thread, and the share of the time since the beginning, that looks at stages may cost."""

_DATA_WORKER = "pt_data_worker"
"""The name of the processes of torch's DataLoader.  They hand over what they load in shared memory, which is judged."""

_WORKER_IMPORTS = 512 << 20
"""Bytes that such a process may have from importing, if it was not forked: torch's build for CPUs takes 150 MiB, that
for cards and the program's own modules more."""

_HELPERS = ("torch_shm_manag",)
"""The names, as the kernel cuts them, of programs that serve a library: torch's removes shared memory whose processes
have ended.  It has libtorch loaded, and what it looks after is in /dev/shm, which is judged."""

_ADVICE = {
    "vllm": "run the engine in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0) to have it judged",
    "": "run the engine in this process, or the check in the engine's, to have it judged",
}


_TOO_FEW = "it infers too rarely to say whether it grows: run more cycles, so that three inferences follow another one"


class UnmeasuredProcesses:
    """Remembers, from a beginning on, which descendants held memory that had to be seen.

    Args:
        tree: whose processes.
        driver: gives whom to ask for memory on cards, once there is a process to ask about; None if cards do not count.
    """

    def __init__(self, tree: ProcessTree, driver: Callable[[], Driver] | None) -> None:
        self._tree = tree
        self._driver = driver
        self._memory = TreeMemory(tree)
        self._found: dict[int, ProcessMemory] = {}
        self._reported_pids: set[int] = set()
        self._is_looking = False
        self._begun, self._spent = time.perf_counter(), 0.0
        self._looked_at: frozenset[int] = frozenset()

    def begin(self, held: int | None = None) -> None:
        """Forget what was found before.

        Args:
            held: bytes that this process held before there was another one, where they have been read.
        """
        self._found.clear()
        self._begun, self._spent = time.perf_counter(), 0.0
        self._memory.note(held)

    def is_reported(self, pids: Iterable[int]) -> None:
        """Note that these processes are findings: what they and their children hold is not reported again."""
        self._reported_pids.update(pids)
        if self._reported_pids:
            self._found = {pid: process for pid, process in self._found.items() if not self._is_of_reported(pid)}

    def look(self, *, always: bool = False, now: Counters | None = None) -> None:
        """Look at the tree; next to free where there is none.

        Args:
            always: whether it must be looked at however long earlier looks have taken.
            now: the counters, where they have just been read: they say whether there is a tree.
        """
        if self._is_looking:
            return  # asking the driver for the first time imports its library, which is noticed like any import
        self._is_looking = True
        try:
            self._look(always=always, now=now)
        finally:
            self._is_looking = False

    def _look(self, *, always: bool, now: Counters | None) -> None:
        # Not the clock's time, which other processes of a busy machine would spend.
        started = time.thread_time()
        elapsed = time.perf_counter() - self._begun
        children = frozenset(child_processes())
        # A child that starts and ends between two looks would pass for nobody, so a new one is always looked at.
        if not always and children <= self._looked_at and self._spent > _BUDGET_S + _BUDGET_SHARE * elapsed:
            return
        self._looked_at = children
        if not (self._tree.any_alive() if now is None else now.items["processes"]):
            self._memory.note(None if now is None else now.own)
            return
        own, processes = self._memory.read(self._driver, floor=FLOOR)
        whole = own + sum(process.own for process in processes)
        for process in processes:
            had_to_be_seen = bool(process.cards) or (
                process.own >= FLOOR and process.own > SHARE * whole and not _is_helper(process.pid)
            )
            if had_to_be_seen and not process.cards and not process.forked and _is_data_worker(process.pid):
                had_to_be_seen = process.own - _WORKER_IMPORTS > SHARE * whole
                if not had_to_be_seen:
                    # It has its name only once it has imported everything.
                    self._found.pop(process.pid, None)
            if had_to_be_seen and not (self._reported_pids and self._is_of_reported(process.pid)):
                before = self._found.get(process.pid)
                self._found[process.pid] = process if before is None else max(before, process, key=_size)
        self._spent += time.thread_time() - started

    @property
    def on_cards(self) -> tuple[int, ...]:
        """Return those of them for which the driver counts memory."""
        return tuple(pid for pid, process in self._found.items() if process.cards)

    @property
    def not_measured(self) -> tuple[NotMeasured, ...]:
        """One for each process that was found since the beginning, the largest first."""
        return tuple(map(_not_measured, sorted(self._found.values(), key=_size, reverse=True)))

    def growth_unseen(self, pid: int) -> NotMeasured:
        """Return what is not known of one of them that has ended, and left nothing of what it held.

        Raises:
            KeyError: it was not found since the beginning.
        """
        process = self._found[pid]
        what = f"whether pid {pid} ({process.name}) grew while it ran; it was seen with {_amounts(process)}"
        return NotMeasured(what=what, why=ENDED)

    def besides(self, measured: Collection[int], answering: Collection[int]) -> tuple[NotMeasured, ...]:
        """Return `not_measured` where some processes have been asked.

        Args:
            measured: those that have been judged.
            answering: those that have said what they hold, and not often enough to be judged.
        """
        pids = {item: item.process.pid for item in self.not_measured if item.process is not None}
        return tuple(
            msgspec.structs.replace(item, why=_TOO_FEW) if pids.get(item) in answering else item
            for item in self.not_measured
            if pids.get(item) not in measured
        )

    def _is_of_reported(self, pid: int) -> bool:
        return not self._reported_pids.isdisjoint([pid, *parents_of(pid)])


def _size(process: ProcessMemory) -> tuple[int, int]:
    return sum(size or 1 for size in process.cards.values()), _on_host(process)


def _on_host(process: ProcessMemory) -> int:
    return process.resident if process.private is None else process.private


def _amounts(process: ProcessMemory) -> str:
    parts = [
        f"a context on {device}, whose size the driver does not tell"
        if size is None
        else f"{format_bytes(size)} on {device}"
        for device, size in process.cards.items()
    ]
    host = f"{format_bytes(_on_host(process))} host"
    parts.append(host if process.private is not None else f"{host} (resident: what is its own may not be read)")
    return ", ".join(parts)


def _not_measured(process: ProcessMemory) -> NotMeasured:
    return NotMeasured(
        what=f"memory of pid {process.pid} ({process.name}): {_amounts(process)}",
        why=_ADVICE["vllm" if _is_vllm(process.name) else ""],
        process=OtherProcess(
            pid=process.pid,
            name=process.name,
            host=process.private,
            cards=tuple(CardMemory(device=device, bytes=size) for device, size in process.cards.items()),
        ),
    )


def _is_vllm(name: str) -> bool:
    """Return whether a process is vLLM's: by its title, or where it has none because this process uses vLLM."""
    return "vllm" in name.lower() or ("vllm" in sys.modules and "sglang" not in name.lower())


def _is_helper(pid: int) -> bool:
    """Return whether a process serves a library, and is no engine whatever it holds on the host, or has ended."""
    return bool(exempt("processes", (str(pid),))) or _comm(pid) in (*_HELPERS, "")


def _is_data_worker(pid: int) -> bool:
    return _comm(pid) == _DATA_WORKER


def _comm(pid: int) -> str:
    """Return the name of a process as the kernel has it; empty where it has ended."""
    try:
        return contents(f"/proc/{pid}/comm").decode(errors="replace").strip()
    except OSError:
        return ""
