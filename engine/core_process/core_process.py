"""What runs in the core's own process: a core that does what the client says, until there is no more to do."""

from __future__ import annotations

import os
from contextlib import ExitStack
from types import FrameType

from lowtide.engine.core import EngineCore, create_core, make_plan
from lowtide.engine.core_process import messages
from lowtide.engine.core_process.messages import Answer, Order
from lowtide.engine.errors import EngineDeadError, EngineStateError
from lowtide.engine.kv.block_pool import KVCacheUsage
from lowtide.engine.processes.channel import Connection
from lowtide.engine.processes.child_main import on_interrupt
from lowtide.engine.processes.extensions import entered
from lowtide.engine.processes.remote_errors import describe_error
from lowtide.engine.request import Request, RequestOutput
from lowtide.engine.teardown import release_frames
from lowtide.engine.weight_transfer.buckets import ReceivedBucket
from lowtide.probes.stages import stage

_STAGES: dict[type[Order], str] = {
    messages.Create: "create",
    messages.AddRequest: "infer",
    messages.Step: "infer",
    messages.Abort: "infer",
    messages.ResetPrefixCache: "reset_prefix_cache",
    messages.PrepareSleep: "sleep",
    messages.ForgetPrefixes: "sleep",
    messages.Sleep: "sleep",
    messages.Wake: "wake",
    messages.ReloadWeights: "reload_weights",
    messages.BeginUpdate: "update_weights",
    messages.LoadBucket: "update_weights",
    messages.UndoUpdate: "update_weights",
    messages.EndUpdate: "update_weights",
    messages.Shutdown: "shutdown",
}


def main(connection: Connection) -> None:
    """Answer the client's orders, until it says `Shutdown` or closes the connection."""
    process = CoreProcess()
    on_interrupt(process.interrupt)
    order: Order | None = None
    while not isinstance(order, messages.Shutdown):
        try:
            order = connection.receive(Order)
            connection.send(process.answer(order))
        except EngineDeadError:
            client_has_gone()


def client_has_gone() -> None:
    """End this process at once."""
    # Nobody listens any more: the kernel takes everything back, and the ranks end with this process.
    os._exit(0)


class CoreProcess:
    """The core, and what becomes of the client's orders."""

    def __init__(self) -> None:
        self._core: EngineCore | None = None
        self._extensions = ExitStack()
        self._is_working = False
        self._is_new = True
        self._is_early = False

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """Break off the order that is being followed, if there is one: the client passes its Ctrl-C on.

        One that comes before the first order breaks that one off: the client sent it while this process started.
        """
        if self._is_working:
            self._is_working = False
            raise KeyboardInterrupt
        self._is_early = self._is_new

    def answer(self, order: Order) -> Answer:
        """Do what an order says; what it raises goes into the answer."""
        result: _Result = None
        error = None
        try:
            try:
                self._is_working = True
                self._raise_early_interrupt()
                if isinstance(order, messages.Create):
                    # Before it is followed: they may change how.
                    self._extensions.enter_context(entered(order.config.process_extensions))
                result = self.follow(order)
            finally:
                # An interrupt up to here is one of the order.
                self._is_working = False
        except BaseException as raised:  # noqa: BLE001 - it is raised again in the engine's process
            error = describe_error(raised)
            # The traceback's frames hold tensors, which must be gone when the client hears of the error.
            release_frames(raised, None)
        core = self._core
        if core is None:
            # After a create that failed; a shutdown has left them already.
            self._extensions.close()
            return Answer(error=error)
        running, waiting = core.num_requests()
        return Answer(
            outputs=result if isinstance(result, list) else [],
            was_reset=result is True,
            usage=result if isinstance(result, KVCacheUsage) else None,
            checksums=result if isinstance(result, dict) else {},
            running=running,
            waiting=waiting,
            awake=core.awake,
            mapped=core.memory_mapped(),
            error=error,
        )

    def _raise_early_interrupt(self) -> None:
        is_early, self._is_new, self._is_early = self._is_early, False, False
        if is_early:
            raise KeyboardInterrupt

    def follow(self, order: Order) -> _Result:
        """Do what an order says.

        Raises:
            EngineStateError: there is no core yet.
            BaseException: what the core raises.
        """
        name = _STAGES.get(type(order))
        if name is None:
            return self._follow(order)
        with stage(name):
            return self._follow(order)

    def _follow(self, order: Order) -> _Result:
        if isinstance(order, messages.Create):
            self._core = create_core(order.config, make_plan(order.config))
            return None
        core = self._core
        if core is None:
            if isinstance(order, messages.Shutdown):
                return None
            raise EngineStateError(type(order).__name__, "not created", ("create", "shutdown"))
        if isinstance(order, messages.Shutdown):
            # Whatever its shutdown raises: the process ends next.
            self._core = None
            with self._extensions:
                core.shutdown()
            return None
        if isinstance(order, messages.ReadKVCacheUsage):
            return core.kv_cache_usage()
        if isinstance(order, messages.ReadWeightChecksums):
            return core.weight_checksums()
        if isinstance(order, _Update):
            _update_weights(core, order)
            return None
        if isinstance(order, messages.AddRequest | messages.Step | messages.Abort | messages.ResetPrefixCache):
            return _serve(core, order)
        _move_memory(core, order)
        return None


_Result = list[RequestOutput] | KVCacheUsage | dict[str, int] | bool | None

_Update = messages.BeginUpdate | messages.LoadBucket | messages.UndoUpdate | messages.EndUpdate


def _serve(
    core: EngineCore, order: messages.AddRequest | messages.Step | messages.Abort | messages.ResetPrefixCache
) -> _Result:
    """What is asked of a running core, request by request."""
    if isinstance(order, messages.Step):
        return core.step()
    if isinstance(order, messages.ResetPrefixCache):
        return core.reset_prefix_cache()
    if isinstance(order, messages.Abort):
        return core.abort_all() if order.request_ids is None else core.abort(order.request_ids)
    core.add_request(Request(order.request_id, order.prompt_token_ids, order.params))
    return None


def _move_memory(
    core: EngineCore,
    order: messages.PrepareSleep | messages.ForgetPrefixes | messages.Sleep | messages.Wake | messages.ReloadWeights,
) -> None:
    """What is asked of a core between two states."""
    if isinstance(order, messages.PrepareSleep):
        core.prepare_sleep(order.level)
    elif isinstance(order, messages.ForgetPrefixes):
        core.forget_prefixes()
    elif isinstance(order, messages.Sleep):
        core.sleep(order.level)
    elif isinstance(order, messages.Wake):
        core.wake(order.tags)
    else:
        core.reload_weights()


def _update_weights(core: EngineCore, order: _Update) -> None:
    """One step of an update; what comes next is the sender's to say."""
    if isinstance(order, messages.BeginUpdate):
        core.begin_update()
    elif isinstance(order, messages.LoadBucket):
        core.load_bucket(ReceivedBucket(order.exports))
    elif isinstance(order, messages.UndoUpdate):
        core.undo_update()
    else:
        core.end_update(loaded=order.loaded)
