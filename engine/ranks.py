"""One process per rank, which work as one worker: what not all of them could do is undone on the others."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial, partialmethod
from typing import Any, ClassVar

import torch

from lowtide.engine.config import EngineConfig
from lowtide.engine.errors import CollectiveError, EngineDeadError
from lowtide.engine.model_executor.parallel_layers import RankPlace
from lowtide.engine.processes import (
    END_S,
    ChildProcess,
    Client,
    Connection,
    HeldInterrupt,
    Order,
    ServedProcess,
    Signature,
    Signatures,
    call,
    on_interrupt,
    signatures,
)
from lowtide.engine.request import SchedulerOutput
from lowtide.engine.teardown import Teardown, add_notes, undone_by
from lowtide.engine.weight_transfer import Bucket, ReceivedBucket, added
from lowtide.engine.worker import SLEEPING_TAGS, Worker, make_plan


def main(connection: Connection) -> None:
    """Answer the executor's orders, until it says `shutdown` or closes the connection."""
    # The executor hears of Ctrl-C too, and decides what is interrupted here.
    on_interrupt(signal.SIG_IGN)
    RankProcess().serve(connection)


class RankProcess(ServedProcess):
    """The worker of one rank, and what becomes of the executor's orders."""

    served: Worker

    def call(self, name: str, arguments: Sequence[Any]) -> object:
        """Call a method of the worker; where a step fails, the ranks that wait for this one fail too."""
        if name != "execute_model":
            return super().call(name, arguments)
        with undone_by(lambda undo: undo.run("breaking the collectives off", self.served.break_off)):
            return super().call(name, arguments)

    def create(self, config: EngineConfig, rank: int, store: str) -> None:
        """Make the rank's worker."""
        size = config.tensor_parallel_size
        if "OMP_NUM_THREADS" not in os.environ:
            # All ranks compute at the same time.
            torch.set_num_threads(max(1, torch.get_num_threads() // size))
        self.served = Worker(config, make_plan(config, rank), RankPlace(rank, size, store))

    signatures: ClassVar[Signatures] = signatures(
        {
            "infer": (Worker.execute_model,),
            "sleep": (Worker.prepare_sleep, Worker.undo_prepare_sleep, Worker.sleep, Worker.suspend_group),
            "wake": (Worker.begin_wake, Worker.undo_wake, Worker.end_wake, Worker.resume_group),
            "reload_weights": (Worker.begin_reload, Worker.undo_reload, Worker.end_reload),
            "update_weights": (Worker.begin_update,),
            None: (Worker.weight_checksums,),
            "create": (create,),
            "shutdown": (Worker.shutdown,),
        },
        load_bucket=Signature("update_weights", Worker.load_bucket, ReceivedBucket),
    )


def rank_devices(config: EngineConfig) -> list[str]:
    """Return the device of each rank: the CPU, or the card that the setting names and the next ones."""
    if config.tensor_parallel_size == 1:
        return [config.device]
    kind, _, first = config.device.partition(":")
    ranks = range(config.tensor_parallel_size)
    return [kind if kind == "cpu" else f"{kind}:{int(first or 0) + rank}" for rank in ranks]


ENTRY = "lowtide.engine.ranks:main"
"""What runs in the process of each rank."""


class MultiprocExecutor(Client):
    """One process per rank, and all of them as one worker; has the methods of `Worker` that the engine calls.

    An order that a rank fails is undone on the others, and the rank's error is raised.  When a rank ends without being
    asked to, or waits for one that failed and cannot be broken off, all are killed: from then on every call raises
    `EngineDeadError`, and only `shutdown` is of use.  One that cannot be created leaves no process.
    """

    kv_connector = None

    def __init__(self, config: EngineConfig) -> None:
        super().__init__()
        self._size = config.tensor_parallel_size
        # The ranks find each other in a file that has no name: nothing of it stays, however they end.
        self._store = os.memfd_create("lowtide-ranks")
        path = f"/proc/{os.getpid()}/fd/{self._store}"
        with undone_by(self._give_back):
            for rank in range(self._size):
                env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self._size)}
                # gloo otherwise asks for the address of this host's name, which not every host knows.
                env["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
                label = f"rank {rank} of {self._size}"
                self.children.append(ChildProcess(ENTRY, f"lowtide::Worker_TP{rank}", label, env))
            self._all(
                [
                    call("create", replace(config, device=device), rank, path)
                    for rank, device in enumerate(rank_devices(config))
                ]
            )

    def execute_model(self, output: SchedulerOutput) -> dict[str, int]:
        """Compute one step; the next token by request id, as rank 0 has sampled it.

        Where one rank fails, the group is made anew, so that the step can be made again.
        """
        with undone_by(self._remake_group):
            tokens: dict[str, int] = self._do("execute_model", output)[0]
            return tokens

    def _remake_group(self, undo: Teardown) -> None:
        if self._death is None:
            undo.run("giving the ranks' group up", partial(self._do, "suspend_group"))
            undo.run("making it again", partial(self._do, "resume_group"))

    def sleep(self, level: int) -> None:
        """Do as `Worker.sleep`; where one rank cannot, the others are awake again."""
        self._do("sleep", level, undo=call("begin_wake", list(SLEEPING_TAGS)))
        self.suspend_groups()

    def suspend_groups(self) -> None:
        """Give up what the ranks' communicators hold on their cards (vllm#51485: up to 1 GiB of each)."""
        self._do("suspend_group")

    def wake(self, tags: Sequence[str]) -> None:
        """Do as `Worker.wake`; where one rank cannot, the others sleep again."""
        undo = call("undo_wake", list(tags))
        self._do("begin_wake", list(tags), undo=undo)
        # Also on those that failed: all of them are awake.
        with undone_by(partial(self._undo, undo, self.children)):
            if self.awake:
                self._do("resume_group")
            self._do("end_wake", list(tags))

    def load_bucket(self, bucket: Bucket) -> None:
        """Do as `Worker.load_bucket`, each rank by an export of its own; after an error comes `undo_reload`."""
        shared = bucket.shared(self._size)
        self._all([call("load_bucket", ReceivedBucket(shared.tensors, [export])) for export in shared.exports])

    def end_reload(self) -> None:
        """Do as `Worker.end_reload`, on all ranks that there are."""
        if self._death is None:
            self._do("end_reload")

    def weight_checksums(self) -> dict[str, int]:
        """Do as `Worker.weight_checksums`, of whole parameters."""
        return added(self._do("weight_checksums"))

    def shutdown(self) -> None:
        """Give everything up; no process is left, whatever a rank has failed with.  Calling it again does nothing."""
        teardown = Teardown("shutting the ranks down")
        if self.children and self.is_usable:
            teardown.run("the ranks", partial(self._do, "shutdown"))
        self._give_back(teardown, END_S)
        teardown.finish()

    def _give_back(self, teardown: Teardown, timeout_s: float = 0.0) -> None:
        self._end(teardown, timeout_s)
        self.children = []
        if self._store >= 0:
            store, self._store = self._store, -1
            os.close(store)

    def _all(
        self, order: Order | Sequence[Order], undo: Order | None = None, ranks: Sequence[ChildProcess] = ()
    ) -> list[Any]:
        """Have every rank do the same, or each its own order; what each has returned.

        The ranks that could do it are told to `undo` it when others could not; after an interrupt, all of them.
        """
        undone = told = ranks or self.children
        orders = list(order) if isinstance(order, Sequence) else [order] * len(told)
        with undone_by(lambda teardown: self._undo(undo, undone, teardown)):
            failed = self.exchange(dict(zip(told, orders, strict=True)))
            if failed:
                undone = [rank for rank in told if rank not in failed]
                raise self._first_error(failed)
        returned = zip(told, orders, strict=True)
        return [RankProcess.signatures[order.name].returned.decode(rank.answer.result) for rank, order in returned]

    def _do(self, name: str, *arguments: object, undo: Order | None = None) -> list[Any]:
        """Do as the `Worker` method of this name, on all ranks; where one cannot, the others undo it."""
        return self._all(call(name, *arguments), undo)

    prepare_sleep = partialmethod(_do, "prepare_sleep", undo=call("undo_prepare_sleep"))
    begin_reload = partialmethod(_do, "begin_reload", undo=call("undo_reload"))
    begin_update = partialmethod(_do, "begin_update", undo=call("end_reload"))
    undo_reload = partialmethod(_do, "undo_reload")

    def _undo(self, order: Order | None, ranks: Sequence[ChildProcess], undo: Teardown) -> None:
        if order is not None and self._death is None:
            for rank in ranks:
                undo.run(rank.label, partial(self._all, order, ranks=[rank]))

    def _first_error(self, failed: Sequence[ChildProcess]) -> BaseException:
        """Return the error of the first rank that failed by itself; the others' are noted in it."""
        errors = [rank.error() for rank in failed]
        first = min(errors, key=lambda error: isinstance(error, CollectiveError))
        others = [(rank, error) for rank, error in zip(failed, errors, strict=True) if error is not first]
        notes = [f"{rank.label} failed too: {error!r}" for rank, error in others]
        if self._death is not None:
            notes.append(str(self._death))
        add_notes(first, *notes)
        return first

    def exchange(self, orders: Mapping[ChildProcess, Order]) -> list[ChildProcess]:
        """Send orders and wait for all answers; the ranks that failed."""
        self._require_usable()
        with HeldInterrupt() as held:
            interrupt, failed = self._exchange(orders, held)
        if interrupt is not None:
            raise interrupt
        held.deliver()
        return failed

    def _killed(self, why: str) -> EngineDeadError:
        return EngineDeadError(f"{why}, and all ranks were killed: shut the engine down and create another")
