"""How the methods of objects in other processes are called: one process, or several that do the same, as one object."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from msgspec import structs

from lowtide.engine.errors import EngineDeadError
from lowtide.engine.processes.channel import Answer, Order
from lowtide.engine.processes.child import ChildProcess, HeldInterrupt
from lowtide.engine.teardown import Teardown

STUCK_S = 5.0
"""Seconds that other processes get for their answers once one has failed: they may wait for it in a collective."""


class Client:
    """Sends orders to child processes, and takes their answers in.

    When a process ends without being asked to, or cannot be understood, all are ended: from then on each call raises
    `EngineDeadError`, and only a shutdown is of use.

    Attributes:
        children: the processes; each has what was last heard from it.
    """

    def __init__(self) -> None:
        self.children: list[ChildProcess] = []
        self._owner = os.getpid()
        self._death: EngineDeadError | None = None

    @property
    def awake(self) -> bool:
        """Whether weights and KV cache have all their pages, in every process."""
        return all(child.answer.awake for child in self.children)

    def memory_mapped(self) -> dict[str, int]:
        """Bytes with pages behind them in all processes together, by arena tag, as they were after the last call."""
        mapped = [child.answer.mapped for child in self.children]
        return {tag: sum(each[tag] for each in mapped) for tag in mapped[0]} if mapped else {}

    def preserved_tensors(self) -> dict[str, torch.Tensor]:
        """None: the tensors are in other processes, and so are the addresses of graphs."""
        return {}

    def graph_addresses(self) -> dict[str, tuple[int, int]]:
        """As `preserved_tensors`."""
        return {}

    @property
    def is_usable(self) -> bool:
        """Whether calls can be made: nothing has ended, and this is no fork of the process that has begun it."""
        return self._death is None and os.getpid() == self._owner

    def _require_usable(self) -> None:
        if os.getpid() != self._owner:
            whose = self.children[0].label if self.children else "this engine"
            raise EngineDeadError(f"{whose} is of another process (pid {self._owner}), of which this is a fork")
        if self._death is not None:
            raise self._death.with_traceback(None)

    def _interrupted(self, times: int) -> float:
        """React to the interrupt of that number; the seconds that processes get. Where it raises, they are killed."""
        return STUCK_S

    def _killed(self, why: str) -> EngineDeadError:
        """Return the error for processes that are killed."""
        raise NotImplementedError

    def _exchange(
        self, orders: Mapping[ChildProcess, Order], held: HeldInterrupt
    ) -> tuple[KeyboardInterrupt | None, list[ChildProcess]]:
        """Send orders and wait for all answers; the interrupt that came meanwhile, and the processes that failed.

        An interrupt waits for the answers too: else the next call would take them for its own.
        """
        interrupts: list[KeyboardInterrupt] = []
        waiting, failed = list(orders), list[ChildProcess]()
        seconds, deadline = 0.0, None
        for child, order in orders.items():
            with self._talking_to(child):
                child.connection.send(order)
        # What is not waited for must not end meanwhile, or others could wait for it for ever.
        ends = any(order.name == "shutdown" for order in orders.values())
        while waiting:
            idle = [] if ends else [child for child in self.children if child not in waiting]
            try:
                ready = held.waiting(partial(_wait, waiting, idle), deadline)
            except KeyboardInterrupt as error:
                interrupts.append(error)
                with self._talking_to(waiting[0]):
                    seconds = self._interrupted(len(interrupts))
                deadline = time.monotonic() + seconds
                continue
            if not ready:
                cause = f"after {failed[0].label} had failed" if failed else "after an interrupt"
                silent = ", ".join(child.label for child in waiting)
                self._give_up(f"{silent} did not answer within {seconds:g} s {cause}")
                break
            for child in ready:
                if child not in waiting:
                    raise self._ended(child)
                with self._talking_to(child):
                    child.answer = child.connection.receive(Answer)
                waiting.remove(child)
                if child.answer.error is not None:
                    failed.append(child)
                    seconds, deadline = STUCK_S, time.monotonic() + STUCK_S
        return (interrupts[-1] if interrupts else None), failed

    @contextmanager
    def _talking_to(self, child: ChildProcess) -> Iterator[None]:
        try:
            yield
        except EngineDeadError as error:
            raise self._ended(child) from error
        except BaseException as error:
            # Half an order was sent, or an answer got lost: what the processes do is not known any more.
            death = self._give_up(str(error) or repr(error))
            if not isinstance(error, Exception):
                raise
            raise death from error

    def _ended(self, ended: ChildProcess) -> EngineDeadError:
        """Return the error for a process that is gone; the others are killed."""
        return self._end_all(ended.death, [child for child in self.children if child is not ended])

    def _give_up(self, why: str) -> EngineDeadError:
        """Kill all processes: what they do cannot be known any more, or will never end."""
        return self._end_all(lambda: self._killed(why), self.children)

    def _end_all(self, death: Callable[[], EngineDeadError], killed: Sequence[ChildProcess]) -> EngineDeadError:
        for child in killed:
            child.end(timeout_s=0.0)
        self._death = death()
        for child in self.children:
            # The engine's state stays what it was, and what a process has failed with is still to be raised.
            child.answer = structs.replace(child.answer, running=0, waiting=0, mapped={})
        return self._death

    def _end(self, teardown: Teardown, timeout_s: float = 0.0) -> None:
        """Wait until nothing is left of the processes, which have so many seconds to end by themselves."""
        for child in self.children:
            teardown.run(child.label, partial(child.end, timeout_s))


def _wait(waiting: Sequence[ChildProcess], idle: Sequence[ChildProcess], deadline: float | None) -> list[ChildProcess]:
    """Return who has answered or ended, and who of the idle ones has ended; none after the deadline."""
    poll = select.poll()
    for child in waiting:
        poll.register(child.connection, select.POLLIN)
    for child in (*waiting, *idle):
        poll.register(child.connection.pidfd, select.POLLIN)
    left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
    ready = {descriptor for descriptor, _ in poll.poll(left)}
    return [child for child in (*waiting, *idle) if ready & {child.connection.fileno(), child.connection.pidfd}]
