"""The engine's core in a process of its own: the client that has its methods, and what it calls there."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from functools import partialmethod
from types import FrameType
from typing import Any, ClassVar

import msgspec

from lowtide.engine.config import EngineConfig
from lowtide.engine.core import EngineCore, create_core
from lowtide.engine.errors import ChannelError, EngineDeadError, RequestError
from lowtide.engine.processes import (
    END_S,
    Answer,
    ChildProcess,
    Client,
    Connection,
    HeldInterrupt,
    ServedProcess,
    Signature,
    Signatures,
    call,
    on_interrupt,
    signatures,
)
from lowtide.engine.request import RequestOutput, SamplingParams
from lowtide.engine.teardown import Teardown, undone_by
from lowtide.engine.weight_transfer import Bucket, ReceivedBucket
from lowtide.engine.worker import Worker, make_plan


def main(connection: Connection) -> None:
    """Answer the client's orders, until it says `shutdown` or closes the connection."""
    process = CoreProcess()
    on_interrupt(process.interrupt)
    process.serve(connection)


class CoreProcess(ServedProcess):
    """The core, and what becomes of the client's orders."""

    served: EngineCore

    def __init__(self) -> None:
        super().__init__()
        self._is_new = True
        self._is_early = False

    def create(self, config: EngineConfig) -> None:
        """Make the core."""
        self.served = create_core(config, make_plan(config))

    def state(self) -> tuple[int, int, bool, dict[str, int]]:
        """Do as `ServedProcess.state`."""
        worker = self.served.worker
        return (*self.served.num_requests(), worker.awake, worker.memory_mapped())

    def call(self, name: str, arguments: Sequence[Any]) -> object:
        """Call a method of the core, or of its worker."""
        return getattr(self.served if hasattr(self.served, name) else self.served.worker, name)(*arguments)

    signatures: ClassVar[Signatures] = signatures(
        {
            "infer": (EngineCore.add_request, EngineCore.step, EngineCore.abort),
            "reset_prefix_cache": (EngineCore.reset_prefix_cache,),
            "sleep": (EngineCore.prepare_sleep, EngineCore.forget_prefixes, Worker.sleep),
            "wake": (Worker.wake,),
            "reload_weights": (EngineCore.reload_weights,),
            "update_weights": (EngineCore.begin_update, Worker.undo_reload, EngineCore.end_update),
            None: (Worker.weight_checksums, EngineCore.kv_cache_usage),
            "create": (create,),
            "shutdown": (EngineCore.shutdown,),
        },
        load_bucket=Signature("update_weights", Worker.load_bucket, ReceivedBucket),
    )

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """Break off the order that is being followed, if there is one: the client passes its Ctrl-C on.

        One that comes before the first order breaks that one off: the client sent it while this process started.
        """
        if self._is_working:
            self._is_working = False
            raise KeyboardInterrupt
        self._is_early = self._is_new

    def _begin_work(self) -> None:
        super()._begin_work()
        is_early, self._is_new, self._is_early = self._is_early, False, False
        if is_early:
            raise KeyboardInterrupt


ENTRY = "lowtide.engine.core_process:main"
"""What runs in the core's process."""

INTERRUPT_S = 10.0
"""Seconds that the core has to roll an interrupted order back, before it is killed."""


class CoreClient(Client):
    """An engine core in a process of its own; has the methods of `EngineCore` that the engine calls.

    An interrupt (Ctrl-C) is passed on, and the core rolls back what it was doing.  One that comes when the core was
    done already is raised by `raise_late_interrupt` or before the next order, so that no result is lost.  A core that
    does not answer an interrupt within `INTERRUPT_S`, or before a second one, is killed.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__()
        self._receivers = config.tensor_parallel_size
        self._is_late = False
        self._is_closed = False
        self.process = ChildProcess(ENTRY, "lowtide::EngineCore", "the engine core")
        self.children = [self.process]
        with undone_by(self._end):
            self._call("create", config)
            self.raise_late_interrupt()

    @property
    def worker(self) -> CoreClient:
        """Itself: the worker's methods are called in the same process as the core's."""
        return self

    def add_request(self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """Do as `EngineCore.add_request`."""
        try:
            self._call("add_request", request_id, list(prompt_token_ids), params)
        except ChannelError as error:
            raise RequestError(
                f"request {request_id!r} cannot be sent to {self.process.label}: {error.__cause__}; give "
                "tokens and sampling parameters as Python's own integers and floats"
            ) from error

    def has_unfinished_requests(self) -> bool:
        """Return whether a step has something to do; False where the core has ended."""
        return any(self.num_requests())

    def num_requests(self) -> tuple[int, int]:
        """Do as `EngineCore.num_requests`, after the last call."""
        return self.process.answer.running, self.process.answer.waiting

    def check_health(self) -> None:
        """Find out whether the process runs, without an order; `EngineDeadError`: it has ended."""
        if self._death is None and not self.process.is_alive:
            self._ended(self.process)
        if self._death is not None:
            raise self._death.with_traceback(None)

    def abort(self, request_ids: Sequence[str] | None = None) -> list[RequestOutput]:
        """Do as `EngineCore.abort`; nothing where the core has ended, and the requests with it."""
        # What is no string is the name of no request. Who gives requests up because the core has ended must not hear
        # that once more.
        known = None if request_ids is None else [each for each in request_ids if isinstance(each, str)]
        return [] if self._death is not None else self._call("abort", known)

    def load_bucket(self, bucket: Bucket) -> None:
        """Do as `Worker.load_bucket`, with an export for each process that has weights."""
        self._call("load_bucket", bucket.shared(self._receivers))

    def shutdown(self) -> None:
        """Give everything up; no process is left.  Calling it again does nothing.

        In a fork of the engine's process, only what the fork has copies of: the core is not its own.
        """
        if self._is_closed:
            return
        teardown = Teardown("shutting the engine's core down")
        teardown.run("an earlier interrupt", self.raise_late_interrupt)
        if self.is_usable:
            teardown.run(self.process.label, lambda: self._call("shutdown"))
        self._end(teardown, END_S)
        self._is_closed = True
        self.process.answer = Answer()
        teardown.run("the interrupt", self.raise_late_interrupt)
        teardown.finish()

    def raise_late_interrupt(self) -> None:
        """Raise the interrupt that came when the core had finished an order already, if there was one."""
        if self._is_late:
            self._is_late = False
            raise KeyboardInterrupt

    def _call(self, name: str, *arguments: object) -> Any:
        """Call a method of the core; a `ChannelError`, with nothing sent, where the arguments cannot be."""
        self._require_usable()
        called = CoreProcess.signatures[name]
        try:
            # As the core will read it: the cause says what it could not.
            called.arguments.decode((sent := call(name, *arguments)).arguments)
        except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as unsendable:
            raise ChannelError(f"{name} cannot be sent to the engine core: {unsendable}") from unsendable
        if name != "abort":
            # Who rolls a generation back must come to the end of it first.
            self.raise_late_interrupt()
        with HeldInterrupt() as held:
            interrupt, _ = self._exchange({self.process: sent}, held)
        if interrupt is not None and self._death is not None:
            raise interrupt
        self._is_late |= interrupt is not None
        try:
            held.deliver()
        except KeyboardInterrupt:
            self._is_late = True
        if self.process.answer.error is None:
            return called.returned.decode(self.process.answer.result)
        error = self.process.error()
        if self._is_late and isinstance(error, Exception):
            self._is_late = False
            raise KeyboardInterrupt from error
        self._is_late = False
        raise error

    def _interrupted(self, times: int) -> float:
        if times > 1:
            raise KeyboardInterrupt
        os.kill(self.process.pid, signal.SIGINT)
        return INTERRUPT_S

    def _killed(self, why: str) -> EngineDeadError:
        return EngineDeadError(f"{self.process.label} was killed: {why}")

    # Each as the method of `EngineCore` or `Worker` that has its name.
    step = partialmethod(_call, "step")
    reset_prefix_cache = partialmethod(_call, "reset_prefix_cache")
    prepare_sleep = partialmethod(_call, "prepare_sleep")
    forget_prefixes = partialmethod(_call, "forget_prefixes")
    sleep = partialmethod(_call, "sleep")
    wake = partialmethod(_call, "wake")
    reload_weights = partialmethod(_call, "reload_weights")
    begin_update = partialmethod(_call, "begin_update")
    undo_reload = partialmethod(_call, "undo_reload")
    end_update = partialmethod(_call, "end_update")
    weight_checksums = partialmethod(_call, "weight_checksums")
    kv_cache_usage = partialmethod(_call, "kv_cache_usage")
