"""What runs in the process of one rank: a worker that does what the executor says, until there is no more to do."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack

import torch

from lowtide.engine.config import EngineConfig, load_model_config
from lowtide.engine.errors import EngineDeadError, EngineStateError
from lowtide.engine.model_executor.weights import create_weight_source
from lowtide.engine.pages import open_backend
from lowtide.engine.process_group import RankPlace
from lowtide.engine.processes.channel import Connection
from lowtide.engine.processes.child_main import on_interrupt
from lowtide.engine.processes.extensions import entered
from lowtide.engine.processes.remote_errors import describe_error
from lowtide.engine.ranks import messages
from lowtide.engine.ranks.messages import Answer, Order
from lowtide.engine.teardown import Teardown, release_frames
from lowtide.engine.weight_transfer.buckets import ReceivedBucket
from lowtide.engine.worker import Worker
from lowtide.probes.stages import stage

SLEEP_ORDERS = (messages.PrepareSleep, messages.Sleep, messages.UndoPrepareSleep, messages.SuspendGroup)
UPDATE_ORDERS = (messages.BeginUpdate, messages.LoadBucket)
WAKE_ORDERS = (messages.BeginWake, messages.UndoWake, messages.EndWake, messages.ResumeGroup)


def main(connection: Connection) -> None:
    """Answer the executor's orders, until it says `Shutdown` or closes the connection."""
    rank = RankProcess()
    # The executor hears of Ctrl-C too, and decides what is interrupted here.
    on_interrupt(signal.SIG_IGN)
    order: Order | None = None
    while not isinstance(order, messages.Shutdown):
        try:
            order = connection.receive(Order)
            connection.send(rank.answer(order))
        except EngineDeadError:
            # Nobody listens any more, and other ranks may be gone, for whom a teardown would wait in vain.
            os._exit(0)


class RankProcess:
    """The worker of one rank and what becomes of it."""

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._extensions = ExitStack()

    def answer(self, order: Order) -> Answer:
        """Do what an order says; what it raises goes into the answer."""
        result: dict[str, int] = {}
        error = None
        try:
            result = self._follow(order)
        except BaseException as raised:  # noqa: BLE001 - it is raised again in the engine's process
            error = describe_error(raised)
            # The traceback's frames hold tensors, which must be gone when the engine hears of the error.
            release_frames(raised, None)
        if self._worker is None:
            return Answer(error=error)
        tokens, checksums = ({}, result) if isinstance(order, messages.ReadWeightChecksums) else (result, {})
        return Answer(tokens, self._worker.awake, self._worker.memory.mapped(), checksums, error)

    def _follow(self, order: Order) -> dict[str, int]:
        if isinstance(order, messages.Create):
            with ExitStack() as undo:
                undo.enter_context(entered(order.config.process_extensions))
                with stage("create"):
                    self._worker = _create_worker(order)
                self._extensions = undo.pop_all()
            return {}
        worker = self._worker
        if worker is None:
            if isinstance(order, messages.Shutdown):
                return {}
            raise EngineStateError(type(order).__name__, "not created", ("create", "shutdown"))
        if isinstance(order, messages.Execute):
            with stage("infer"):
                return _execute(worker, order)
        if isinstance(order, messages.ReadWeightChecksums):
            return worker.weight_checksums()
        if isinstance(order, SLEEP_ORDERS):
            with stage("sleep"):
                _follow_sleep(worker, order)
        elif isinstance(order, WAKE_ORDERS):
            with stage("wake"):
                _follow_wake(worker, order)
        elif isinstance(order, UPDATE_ORDERS):
            with stage("update_weights"):
                _follow_update(worker, order)
        elif isinstance(order, messages.Shutdown):
            # Whatever its shutdown raises: the process ends next.
            self._worker = None
            with self._extensions, stage("shutdown"):
                worker.shutdown()
        else:
            with stage("reload_weights"):
                _follow_reload(worker, order)
        return {}


def _execute(worker: Worker, order: messages.Execute) -> dict[str, int]:
    try:
        return worker.execute_model(order)
    except BaseException as error:
        undo = Teardown("the step")
        undo.run("breaking the collectives off", worker.break_off)
        undo.finish_into(error)
        raise


def _follow_sleep(
    worker: Worker, order: messages.PrepareSleep | messages.Sleep | messages.UndoPrepareSleep | messages.SuspendGroup
) -> None:
    if isinstance(order, messages.PrepareSleep):
        worker.prepare_sleep(order.level)
    elif isinstance(order, messages.Sleep):
        worker.sleep(order.level)
    elif isinstance(order, messages.SuspendGroup):
        worker.suspend_group()
    else:
        worker.undo_prepare_sleep()


def _follow_wake(
    worker: Worker, order: messages.BeginWake | messages.UndoWake | messages.EndWake | messages.ResumeGroup
) -> None:
    if isinstance(order, messages.BeginWake):
        worker.begin_wake(order.tags)
    elif isinstance(order, messages.UndoWake):
        worker.undo_wake(order.tags)
    elif isinstance(order, messages.ResumeGroup):
        worker.resume_group()
    else:
        worker.end_wake(order.tags)


def _follow_reload(worker: Worker, order: messages.BeginReload | messages.UndoReload | messages.EndReload) -> None:
    if isinstance(order, messages.BeginReload):
        worker.begin_reload()
    elif isinstance(order, messages.UndoReload):
        worker.undo_reload()
    else:
        worker.end_reload()


def _follow_update(worker: Worker, order: messages.BeginUpdate | messages.LoadBucket) -> None:
    if isinstance(order, messages.BeginUpdate):
        worker.begin_update()
    else:
        worker.load_bucket(ReceivedBucket([order.bucket]))


def _create_worker(order: messages.Create) -> Worker:
    config = order.config
    size = config.tensor_parallel_size
    if "OMP_NUM_THREADS" not in os.environ:
        # All ranks compute at the same time.
        torch.set_num_threads(max(1, torch.get_num_threads() // size))
    model_config = load_model_config(config)
    source = create_weight_source(config, model_config, order.rank, size)
    place = RankPlace(order.rank, size, order.store)
    backend = open_backend(config.device)
    if backend.device.type == "cuda":
        # Else what names no card would take memory on the first one.
        torch.cuda.set_device(backend.device)
    return Worker(config, model_config, backend, source, order.num_blocks, order.max_model_len, place)


def rank_devices(config: EngineConfig) -> list[str]:
    """The device of each rank: the CPU, or the card that the setting names and the next ones."""
    if config.tensor_parallel_size == 1:
        return [config.device]
    kind, _, first = config.device.partition(":")
    ranks = range(config.tensor_parallel_size)
    return [kind if kind == "cpu" else f"{kind}:{int(first or 0) + rank}" for rank in ranks]
