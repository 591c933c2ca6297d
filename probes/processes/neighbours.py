"""Whether others on this host may have made a file whose maker has ended: nothing says who it was."""

from __future__ import annotations

from lowtide.probes.host.process_files import parents_of
from lowtide.probes.host.process_tree import ProcessTree
from lowtide.probes.originals import os
from lowtide.probes.processes.agents import processes_with_agents

_IPC_OF_HOST, _PIDS_OF_HOST = 0xEFFFFFFF, 0xEFFFFFFC
"""The numbers of the namespaces in which a system starts: PROC_IPC_INIT_INO and PROC_PID_INIT_INO of Linux."""


class Neighbours:
    """Notices other programs that lowtide watches at the same time, and containers whose processes are not seen here.

    Of other programs of this user nothing is known: what they leave while they run beside a watched one is taken for
    that one's.

    Args:
        tree: whose processes are none.
    """

    def __init__(self, tree: ProcessTree) -> None:
        self._tree = tree
        self._reason = ""
        self.mark()

    def mark(self) -> None:
        """Forget those that have been there until now."""
        self._reason = _unseen_containers()

    def look(self) -> str:
        """Why others may have left a file since `mark`; empty where nobody else is known.

        Called now and then: those that have ended by the next call are not noticed.
        """
        if not self._reason:
            others = processes_with_agents() - {os.getpid()} - set(self._tree.descendants())
            # Whoever runs this program, as a suite that is watched itself runs its tests, waits for it meanwhile.
            others -= set(parents_of(os.getpid())) if others else set()
            if others:
                watched = f"lowtide watches another program on this host (pid {min(others)})"
                self._reason = f"{watched}, which may have made it"
        return self._reason


def _unseen_containers() -> str:
    """Whether /dev/shm is the host's while only some of its processes are seen, as with Docker's `--ipc=host`."""
    try:
        ipc, pids = (os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("ipc", "pid"))
    except OSError:
        return ""
    if ipc == _IPC_OF_HOST and pids != _PIDS_OF_HOST:
        return "this container shares /dev/shm with the host (--ipc=host), so another one may have made it"
    return ""
