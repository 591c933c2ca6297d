"""What runs in the process of one rank: a worker whose methods the executor calls."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from lowtide.engine.config import EngineConfig, load_model_config
from lowtide.engine.model_executor.weights import create_weight_source
from lowtide.engine.pages import open_backend
from lowtide.engine.process_group import RankPlace
from lowtide.engine.processes.calls import Signature, Signatures
from lowtide.engine.processes.channel import Connection
from lowtide.engine.processes.child_main import on_interrupt
from lowtide.engine.processes.served import ServedProcess
from lowtide.engine.request import SchedulerOutput
from lowtide.engine.teardown import Teardown
from lowtide.engine.weight_transfer.buckets import ReceivedBucket
from lowtide.engine.worker import Worker


def main(connection: Connection) -> None:
    """Answer the executor's orders, until it says `shutdown` or closes the connection."""
    # The executor hears of Ctrl-C too, and decides what is interrupted here.
    on_interrupt(signal.SIG_IGN)
    RankProcess().serve(connection)


class RankProcess(ServedProcess[Worker]):
    """The worker of one rank, and what becomes of the executor's orders."""

    signatures: ClassVar[Signatures] = {
        "create": Signature("create", (EngineConfig, int, int, int, str)),
        "execute_model": Signature("infer", (SchedulerOutput,), dict[str, int]),
        "prepare_sleep": Signature("sleep", (int,)),
        "undo_prepare_sleep": Signature("sleep"),
        "sleep": Signature("sleep", (int,)),
        "suspend_group": Signature("sleep"),
        "begin_wake": Signature("wake", (list[str],)),
        "undo_wake": Signature("wake", (list[str],)),
        "end_wake": Signature("wake", (list[str],)),
        "resume_group": Signature("wake"),
        "begin_reload": Signature("reload_weights"),
        "undo_reload": Signature("reload_weights"),
        "end_reload": Signature("reload_weights"),
        "begin_update": Signature("update_weights"),
        "load_bucket": Signature("update_weights", (ReceivedBucket,)),
        "weight_checksums": Signature(None, (), dict[str, int]),
        "shutdown": Signature("shutdown"),
    }

    def call(self, served: Worker, name: str, arguments: Sequence[Any]) -> object:
        """Call a method of the worker; where a step fails, the ranks that wait for this one fail too."""
        try:
            return super().call(served, name, arguments)
        except BaseException as error:
            if name == "execute_model":
                undo = Teardown("the step")
                undo.run("breaking the collectives off", served.break_off)
                undo.finish_into(error)
            raise

    def create(self, config: EngineConfig, num_blocks: int, max_model_len: int, rank: int, store: str) -> Worker:
        """Make the rank's worker.

        Args:
            config: of the engine, with this rank's device.
            num_blocks: KV blocks of every rank.
            max_model_len: tokens that one request may span.
            rank: of this process.
            store: path of the file in which the ranks find each other.
        """
        size = config.tensor_parallel_size
        if "OMP_NUM_THREADS" not in os.environ:
            # All ranks compute at the same time.
            torch.set_num_threads(max(1, torch.get_num_threads() // size))
        model_config = load_model_config(config)
        source = create_weight_source(config, model_config, rank, size)
        backend = open_backend(config.device)
        if backend.device.type == "cuda":
            # Else what names no card would take memory on the first one.
            torch.cuda.set_device(backend.device)
        return Worker(config, model_config, backend, source, num_blocks, max_model_len, RankPlace(rank, size, store))


def rank_devices(config: EngineConfig) -> list[str]:
    """The device of each rank: the CPU, or the card that the setting names and the next ones."""
    if config.tensor_parallel_size == 1:
        return [config.device]
    kind, _, first = config.device.partition(":")
    ranks = range(config.tensor_parallel_size)
    return [kind if kind == "cpu" else f"{kind}:{int(first or 0) + rank}" for rank in ranks]
