"""Processes of the engine that outlive it, and what they leave behind or keep asleep: one context manager for each."""

from __future__ import annotations

import mmap
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from lowtide.engine.core import EngineCore
from lowtide.engine.core_process import CoreClient
from lowtide.engine.defects.defect import replaced
from lowtide.engine.processes import child, served
from lowtide.engine.processes.child import ChildProcess
from lowtide.engine.ranks import MultiprocExecutor
from lowtide.engine.teardown import Teardown

ORPHAN_S = 600.0
"""Seconds after which a process that nothing ends ends by itself, so that no machine keeps it for good."""

REGION_BYTES = 8 << 20
"""Bytes of the file in /dev/shm."""

_REGION = re.compile(r"/dev/shm/vllm_offload_\S+\.mmap")


@contextmanager
def orphan_core() -> Iterator[None]:
    """The client closes its connection and goes; the core waits for its next order, whatever has become of the client.

    The processes that are left are ended with this context, in the process in which the clients are.
    """

    def wait() -> None:
        time.sleep(ORPHAN_S)
        os._exit(1)

    with (
        _left_running(lambda client: None),
        replaced(served, "client_has_gone", wait),
        # In a thread of its own, which has nothing else to do.
        replaced(child, "parent_has_ended", wait),
    ):
        yield


@contextmanager
def core_ignores_shutdown() -> Iterator[None]:
    """The core confirms the shutdown and does nothing; a thread that nobody joins keeps its process alive."""

    def shutdown(self: EngineCore) -> None:
        threading.Thread(target=lambda core: time.sleep(ORPHAN_S), args=(self,), name="core-loop").start()

    def confirmed(client: CoreClient) -> None:
        client._call("shutdown")

    with _left_running(confirmed), replaced(EngineCore, "shutdown", shutdown):
        yield


@contextmanager
def _left_running(says_goodbye: Callable[[CoreClient], None]) -> Iterator[None]:
    """A client's shutdown does not end the core's process; this context's end does."""
    left: list[ChildProcess] = []

    def shutdown(self: CoreClient) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        says_goodbye(self)
        self.process.connection.close()
        left.append(self.process)

    try:
        with replaced(CoreClient, "shutdown", shutdown):
            yield
    finally:
        for process in left:
            process.end(timeout_s=0.0)


class SharedOffloadRegion:
    """A file in /dev/shm that the core maps, as vLLM's KV offload does; only `cleanup` removes it."""

    def __init__(self) -> None:
        self.path = Path(f"/dev/shm/vllm_offload_{uuid.uuid4()}.mmap")
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.ftruncate(descriptor, REGION_BYTES)
            self._mapping = mmap.mmap(descriptor, REGION_BYTES)
        finally:
            os.close(descriptor)
        self._mapping.write(b"\1" * REGION_BYTES)

    def cleanup(self) -> None:
        """Unmap and remove the file."""
        self._mapping.close()
        self.path.unlink(missing_ok=True)


@contextmanager
def core_with_an_offload_region() -> Iterator[None]:
    """Each core maps a file in /dev/shm, and removes it in its shutdown."""
    create, shut_down = EngineCore.__init__, EngineCore.shutdown

    def create_with_region(self: EngineCore, *args: Any, **settings: Any) -> None:
        create(self, *args, **settings)
        self.__dict__["offload_region"] = SharedOffloadRegion()

    def shutdown(self: EngineCore) -> None:
        teardown = Teardown("shutting the core down")
        teardown.run("the engine", lambda: shut_down(self))
        region = self.__dict__.pop("offload_region", None)
        if region is not None:
            teardown.run("the offload region", region.cleanup)
        teardown.finish()

    with replaced(EngineCore, "__init__", create_with_region), replaced(EngineCore, "shutdown", shutdown):
        yield


@contextmanager
def shared_memory_of_the_dead() -> Iterator[None]:
    """The client kills the core instead of shutting it down, and the core's file in /dev/shm stays.

    Files that are still there at the end of this context are removed.
    """
    left: set[str] = set()

    def shutdown(self: CoreClient) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        with suppress(OSError):  # it has ended
            left.update(_REGION.findall(Path(f"/proc/{self.process.pid}/maps").read_text()))
        self.process.end(timeout_s=0.0)

    try:
        with replaced(CoreClient, "shutdown", shutdown):
            yield
    finally:
        for path in left:
            Path(path).unlink(missing_ok=True)


def nccl_kept() -> AbstractContextManager[None]:
    """A sleep leaves the ranks' communicators as they are, with their buffers."""
    return replaced(MultiprocExecutor, "suspend_groups", lambda self: None)
