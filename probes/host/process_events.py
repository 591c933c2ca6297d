"""Hears when a child process has answered, and before one is waited for or signalled: moments to look."""

from __future__ import annotations

import multiprocessing.process
import os as os_module
import subprocess
from collections.abc import Callable
from typing import Any

from lowtide.probes.objects.passing_for import passing_for
from lowtide.probes.originals import in_main_thread, loaded, os, time

_POOLS = (
    ("concurrent.futures.process", "ProcessPoolExecutor", ("shutdown",)),
    ("multiprocessing.pool", "Pool", ("close", "terminate")),
)
"""Classes that end processes in threads of their own, by their module, and their methods."""

_CONNECTIONS = ("multiprocessing.connection", "_ConnectionBase", ("recv", "recv_bytes"))
"""What a message from another process comes through: whoever answers is at work."""

_PAUSE = 0.005
"""Seconds in which one answer is enough: some engines answer ten thousand times a second."""


class ProcessEvents:
    """Calls listeners when the main thread has heard from a process, and before it ends one or waits for its end.

    The functions of Python's library that do so are stood in for from `start` to `stop`; no module is imported for it.

    Args:
        listeners: what to call, in this order; an error of theirs is lost.
    """

    def __init__(self, *listeners: Callable[[], object]) -> None:
        self._listeners = listeners
        self._replaced: list[tuple[Any, str, Callable[..., Any], Callable[..., Any]]] = []
        # By their identities: all of them are in `_replaced`, too.
        self._places: set[tuple[int, str]] = set()
        self._is_heard = False
        self._heard_at = 0.0
        self._process = os.getpid()

    def start(self) -> None:
        """Begin to listen; legal again, for what was imported meanwhile."""
        self._process = os.getpid()
        self._stand_in(subprocess.Popen, "wait", "communicate", "send_signal")
        self._stand_in(multiprocessing.process.BaseProcess, "join", "terminate", "kill")
        self._stand_in(os_module, "kill", "killpg")
        for module, name, methods in _POOLS:
            kind = getattr(loaded(module), name, None)
            if kind is not None:
                self._stand_in(kind, *methods)
        module, name, methods = _CONNECTIONS
        kind = getattr(loaded(module), name, None)
        if kind is not None:
            self._stand_in(kind, *methods, after=True)

    def stop(self) -> None:
        """End it; legal twice. What somebody else has replaced meanwhile stays as it is."""
        for place, name, original, ours in reversed(self._replaced):
            if vars(place).get(name) is ours:
                setattr(place, name, original)
        self._replaced.clear()
        self._places.clear()

    def _stand_in(self, place: Any, *names: str, after: bool = False) -> None:
        for name in names:
            original = vars(place).get(name)
            # What a test has put in a class's place has none of its own.
            if original is None or (id(place), name) in self._places:
                continue
            self._places.add((id(place), name))
            ours = passing_for(original, place, name)(
                self._heard_after(original) if after else self._heard_before(original)
            )
            setattr(place, name, ours)
            self._replaced.append((place, name, original, ours))

    def _heard_before(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def ours(*args: Any, **kwargs: Any) -> Any:
            self._hear()
            return original(*args, **kwargs)

        return ours

    def _heard_after(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def ours(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if time.perf_counter() - self._heard_at >= _PAUSE:
                self._hear()
            return result

        return ours

    def _hear(self) -> None:
        # One of these calls another; what is read is the main thread's to read; and a fork has these functions, too.
        if self._is_heard or os.getpid() != self._process or not in_main_thread():
            return
        self._is_heard = True
        try:
            for listener in self._listeners:
                listener()
        except Exception:  # noqa: BLE001 - the program's call comes next, and nothing here may change that
            return
        finally:
            self._is_heard = False
            self._heard_at = time.perf_counter()
