"""The engine's side of a core in another process: has its methods, and raises what it raises there."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from lowtide.engine.config import EngineConfig
from lowtide.engine.core_process import messages
from lowtide.engine.core_process.messages import Answer, Order
from lowtide.engine.errors import ChannelError, EngineDeadError, RequestError
from lowtide.engine.processes.child_process import END_S, ChildProcess
from lowtide.engine.processes.interrupts import HeldInterrupt
from lowtide.engine.processes.remote_errors import restore_error
from lowtide.engine.request import Request, RequestOutput
from lowtide.engine.teardown import Teardown
from lowtide.engine.weight_transfer.buckets import Bucket

if TYPE_CHECKING:
    import torch

    from lowtide.engine.kv.block_pool import KVCacheUsage

ENTRY = "lowtide.engine.core_process.core_process:main"
"""What runs in the core's process."""

NAME = "lowtide::EngineCore"
"""Its title."""

INTERRUPT_S = 10.0
"""Seconds that the core has to roll an interrupted order back, before it is killed."""


class CoreClient:
    """An engine core in a process of its own; has the methods of `EngineCore` that the engine calls.

    The core's error comes with its type, and with its process and its traceback as notes.  When the process ends
    without being asked to, each call raises `EngineDeadError` at once, and only `shutdown` is of use.

    An interrupt (Ctrl-C) is passed on, and the core rolls back what it was doing.  One that comes when the core was
    done already is raised by `raise_late_interrupt` or before the next order, so that no result is lost.  A core that
    does not answer an interrupt within `INTERRUPT_S`, or before a second one, is killed.

    Args:
        config: of the engine; with `engine_process`.

    Attributes:
        process: the core's.

    Raises:
        ConfigError, CheckpointError, OutOfMemoryError: as `create_core`; no process is left.
        EngineDeadError: the process has ended; likewise.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._owner = os.getpid()
        self._answer = Answer()
        self._receivers = config.tensor_parallel_size
        self._death: EngineDeadError | None = None
        self._is_late = False
        self._is_closed = False
        self.process = ChildProcess(ENTRY, NAME)
        try:
            self._order(messages.Create(config))
            self.raise_late_interrupt()
        except BaseException as error:
            undo = Teardown("creating the core's process")
            undo.run(self.name, lambda: self.process.end(0.0))
            undo.finish_into(error)
            raise

    @property
    def name(self) -> str:
        """The core's process, for messages."""
        return f"the engine core (pid {self.process.pid})"

    @property
    def awake(self) -> bool:
        """Whether weights and KV cache have all their pages."""
        return self._answer.awake

    def add_request(self, request: Request) -> None:
        """As `EngineCore.add_request`."""
        order = messages.AddRequest(request.request_id, list(request.prompt_token_ids), request.params)
        try:
            self._order(order)
        except ChannelError as error:
            raise RequestError(
                f"request {request.request_id!r} cannot be sent to {self.name}: {error.__cause__}; give tokens and "
                "sampling parameters as Python's own integers and floats"
            ) from error

    def has_unfinished_requests(self) -> bool:
        """Whether a step has something to do; False where the core has ended."""
        return any(self.num_requests())

    def num_requests(self) -> tuple[int, int]:
        """As `EngineCore.num_requests`, after the last call."""
        return self._answer.running, self._answer.waiting

    def check_health(self) -> None:
        """Find out whether the process runs, without an order.

        Raises:
            EngineDeadError: it has ended.
        """
        if self._death is None and not self.process.is_alive:
            self._died(self.process.death())
        if self._death is not None:
            raise self._death.with_traceback(None)

    def step(self) -> list[RequestOutput]:
        """As `EngineCore.step`."""
        return self._order(messages.Step()).outputs

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """As `EngineCore.abort`; nothing where the core has ended, and the requests with it."""
        # What is no string is the name of no request.
        return self._abort([request_id for request_id in request_ids if isinstance(request_id, str)])

    def abort_all(self) -> list[RequestOutput]:
        """As `EngineCore.abort_all`; likewise."""
        return self._abort(None)

    def reset_prefix_cache(self) -> bool:
        """As `EngineCore.reset_prefix_cache`."""
        return self._order(messages.ResetPrefixCache()).was_reset

    def prepare_sleep(self, level: int) -> None:
        """As `EngineCore.prepare_sleep`."""
        self._order(messages.PrepareSleep(level))

    def forget_prefixes(self) -> None:
        """As `EngineCore.forget_prefixes`."""
        self._order(messages.ForgetPrefixes())

    def sleep(self, level: int) -> None:
        """As `EngineCore.sleep`."""
        self._order(messages.Sleep(level))

    def wake(self, tags: Sequence[str]) -> None:
        """As `EngineCore.wake`."""
        self._order(messages.Wake(list(tags)))

    def reload_weights(self) -> None:
        """As `EngineCore.reload_weights`."""
        self._order(messages.ReloadWeights())

    def begin_update(self) -> None:
        """As `EngineCore.begin_update`."""
        self._order(messages.BeginUpdate())

    def load_bucket(self, bucket: Bucket) -> None:
        """As `EngineCore.load_bucket`, with an export for each process that has weights."""
        self._order(messages.LoadBucket(list(bucket.shared(self._receivers))))

    def undo_update(self) -> None:
        """As `EngineCore.undo_update`."""
        self._order(messages.UndoUpdate())

    def end_update(self, *, loaded: bool) -> None:
        """As `EngineCore.end_update`."""
        self._order(messages.EndUpdate(loaded))

    def weight_checksums(self) -> dict[str, int]:
        """As `EngineCore.weight_checksums`."""
        return dict(self._order(messages.ReadWeightChecksums()).checksums)

    def shutdown(self) -> None:
        """Give everything up; no process is left.  Calling it again does nothing.

        In a fork of the engine's process, only what the fork has copies of: the core is not its own.

        Raises:
            ExceptionGroup: as `EngineCore.shutdown`; the process is gone all the same.
        """
        if self._is_closed:
            return
        teardown = Teardown("shutting the engine's core down")
        teardown.run("an earlier interrupt", self.raise_late_interrupt)
        if self._death is None and os.getpid() == self._owner:
            teardown.run(self.name, lambda: self._order(messages.Shutdown()))
        teardown.run("its process", lambda: self.process.end(END_S))
        self._is_closed = True
        self._answer = Answer()
        teardown.run("the interrupt", self.raise_late_interrupt)
        teardown.finish()

    def raise_late_interrupt(self) -> None:
        """Raise the interrupt that came when the core had finished an order already.

        Raises:
            KeyboardInterrupt: there was one.
        """
        if self._is_late:
            self._is_late = False
            raise KeyboardInterrupt

    def preserved_tensors(self) -> dict[str, torch.Tensor]:
        """None: the tensors are in another process."""
        return {}

    def graph_addresses(self) -> dict[str, tuple[int, int]]:
        """None: the addresses are another process's."""
        return {}

    def kv_cache_usage(self) -> KVCacheUsage:
        """As `EngineCore.kv_cache_usage`."""
        usage = self._order(messages.ReadKVCacheUsage()).usage
        assert usage is not None
        return usage

    def memory_mapped(self) -> dict[str, int]:
        """Bytes with pages behind them in the core's process and its ranks, by arena tag, after the last call."""
        return dict(self._answer.mapped)

    def _abort(self, request_ids: list[str] | None) -> list[RequestOutput]:
        # Who gives requests up because the core has ended must not hear that once more.
        return [] if self._death is not None else self._order(messages.Abort(request_ids)).outputs

    def _order(self, order: Order) -> Answer:
        """Send an order, and wait for its answer.

        Raises:
            ChannelError: the order cannot be sent; nothing was.
            EngineDeadError: the process has ended, or could not be understood and was killed.
            BaseException: what the core raised.
        """
        if os.getpid() != self._owner:
            raise EngineDeadError(f"{self.name} is of another process (pid {self._owner}), of which this is a fork")
        if self._death is not None:
            raise self._death.with_traceback(None)
        _check(order)
        if not isinstance(order, messages.Abort):
            # Who rolls a generation back must come to the end of it first.
            self.raise_late_interrupt()
        with HeldInterrupt() as interrupt:
            self._exchange(order, interrupt)
        try:
            interrupt.deliver()
        except KeyboardInterrupt:
            self._is_late = True
        if self._answer.error is None:
            return self._answer
        error = restore_error(self._answer.error, self.name)
        if self._is_late and isinstance(error, Exception):
            self._is_late = False
            raise KeyboardInterrupt from error
        self._is_late = False
        raise error

    def _exchange(self, order: Order, interrupt: HeldInterrupt) -> None:
        """Send an order and take its answer in; after an error from here, the process is gone."""
        try:
            self.process.connection.send(order)
            self._is_late |= self._wait(interrupt)
            self._answer = self.process.connection.receive(Answer)
        except EngineDeadError as error:
            raise self._died(self.process.death()) from error
        except BaseException as error:
            # Half an order was sent, or an answer got lost: what the core does is not known any more.
            self.process.end(0.0)
            death = self._died(EngineDeadError(f"{self.name} was killed: {str(error) or repr(error)}"))
            if not isinstance(error, Exception):
                raise
            raise death from error

    def _wait(self, interrupt: HeldInterrupt) -> bool:
        """Wait for the answer, or the end of the process; whether there was an interrupt, which is passed on."""
        connection = self.process.connection
        try:
            interrupt.waiting(connection.wait)
        except KeyboardInterrupt:
            deadline = time.monotonic() + INTERRUPT_S
            os.kill(self.process.pid, signal.SIGINT)
            if not interrupt.waiting(connection.wait, deadline):
                raise KeyboardInterrupt(f"it did not answer an interrupt within {INTERRUPT_S:g} s") from None
            return True
        return False

    def _died(self, death: EngineDeadError) -> EngineDeadError:
        self._death = death
        # The engine's state stays what it was.
        self._answer = Answer(awake=self._answer.awake)
        return death


def _check(order: Order) -> None:
    """Find out whether the core can read an order: one that it cannot would end it.

    Raises:
        ChannelError: it cannot; the cause says why.
    """
    try:
        msgspec.msgpack.decode(msgspec.msgpack.encode(order), type=Order)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        raise ChannelError(f"{type(order).__name__} cannot be sent to the engine core: {error}") from error
