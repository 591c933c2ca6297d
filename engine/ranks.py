"""One process per rank, which work as one worker: what not all of them could do is undone on the others."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch

from lowtide.engine.config import EngineConfig, load_model_config
from lowtide.engine.errors import ChannelError, CollectiveError, EngineDeadError
from lowtide.engine.model_executor.weights import create_weight_source
from lowtide.engine.pages import open_backend
from lowtide.engine.process_group import RankPlace
from lowtide.engine.processes.channel import (
    Answer,
    Connection,
    Order,
    Signature,
    Signatures,
    call,
    restore_error,
    watch_process,
)
from lowtide.engine.processes.child import END_S, ChildProcess, HeldInterrupt, on_interrupt
from lowtide.engine.processes.served import ServedProcess
from lowtide.engine.request import SchedulerOutput
from lowtide.engine.teardown import Teardown
from lowtide.engine.weight_transfer import Bucket, ReceivedBucket, added
from lowtide.engine.worker import SLEEPING_TAGS, Worker


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


ENTRY = "lowtide.engine.ranks:main"
"""What runs in the process of each rank."""

STUCK_S = 5.0
"""Seconds that the other ranks get for their answers once one has failed: they may wait for it in a collective."""


class MultiprocExecutor:
    """One process per rank, and all of them as one worker; has the methods of `Worker` that the engine calls.

    An order that a rank fails is undone on the others, and the rank's error is raised.  When a rank ends without being
    asked to, or waits for one that failed and cannot be broken off, all are killed: from then on every call raises
    `EngineDeadError`, and only `shutdown` is of use.

    Args:
        config: of the engine.
        num_blocks: KV blocks of every rank.
        max_model_len: tokens that one request may span.

    Attributes:
        ranks: their processes, in order; none after `shutdown`.

    Raises:
        OutOfMemoryError: a rank's device or the host has no room; no process is left.
        CheckpointError: the weights cannot be read; likewise.
        EngineDeadError: a rank has ended; likewise.
    """

    kv_connector = None

    def __init__(self, config: EngineConfig, num_blocks: int, max_model_len: int) -> None:
        self._size = config.tensor_parallel_size
        self.ranks: list[Rank] = []
        self._death: EngineDeadError | None = None
        # The ranks find each other in a file that has no name: nothing of it stays, however they end.
        self._store = os.memfd_create("lowtide-ranks")
        path = f"/proc/{os.getpid()}/fd/{self._store}"
        try:
            for rank in range(self._size):
                self.ranks.append(Rank(rank, self._size))
            self._all(
                [
                    call("create", replace(config, device=device), num_blocks, max_model_len, rank, path)
                    for rank, device in enumerate(rank_devices(config))
                ]
            )
        except BaseException as error:
            undo = Teardown("creating the ranks")
            self._end(undo)
            undo.finish_into(error)
            raise

    @property
    def awake(self) -> bool:
        """Whether weights and KV cache have all their pages, on every rank."""
        return all(rank.answer.awake for rank in self.ranks)

    def memory_mapped(self) -> dict[str, int]:
        """Bytes with pages behind them on all ranks together, by arena tag, as they were after the last call."""
        if self._death is not None or not self.ranks:
            return {}
        return {tag: sum(rank.answer.mapped[tag] for rank in self.ranks) for tag in self.ranks[0].answer.mapped}

    def preserved_tensors(self) -> dict[str, torch.Tensor]:
        """None: the tensors are in other processes."""
        return {}

    def graph_addresses(self) -> dict[str, tuple[int, int]]:
        """None: ranks compute without graphs."""
        return {}

    def execute_model(self, output: SchedulerOutput) -> dict[str, int]:
        """Compute one step; the next token by request id, as rank 0 has sampled it.

        Where one rank fails, the others' collectives are broken off and the group is made anew, so that the step can
        be made again. NCCL's collectives cannot be broken off: then all ranks are killed.
        """
        try:
            tokens: dict[str, int] = self._all(call("execute_model", output))[0]
            return tokens
        except BaseException as error:
            if self._death is None:
                undo = Teardown("the step")
                undo.run("giving the ranks' group up", partial(self._all, call("suspend_group")))
                undo.run("making it again", partial(self._all, call("resume_group")))
                undo.finish_into(error)
            raise

    def prepare_sleep(self, level: int) -> None:
        """As `Worker.prepare_sleep`, on all ranks or on none."""
        self._all(call("prepare_sleep", level), call("undo_prepare_sleep"))

    def sleep(self, level: int) -> None:
        """As `Worker.sleep`; where one rank cannot, the others are awake again."""
        self._all(call("sleep", level), call("begin_wake", list(SLEEPING_TAGS)))
        self.suspend_groups()

    def suspend_groups(self) -> None:
        """Give up what the ranks' communicators hold on their cards (vllm#51485: up to 1 GiB of each)."""
        self._all(call("suspend_group"))

    def wake(self, tags: Sequence[str]) -> None:
        """As `Worker.wake`; where one rank cannot, the others sleep again."""
        undo = call("undo_wake", list(tags))
        self._all(call("begin_wake", list(tags)), undo)
        try:
            if self.awake:
                self._all(call("resume_group"))
            self._all(call("end_wake", list(tags)))
        except BaseException as error:
            # Also on those that failed: all of them are awake.
            self._undo(undo, self.ranks, error)
            raise

    def reload_weights(self) -> None:
        """As `Worker.reload_weights`; where one rank cannot, the others have their former weights again."""
        try:
            self._all(call("begin_reload"), call("undo_reload"))
        finally:
            if self._death is None:
                self._all(call("end_reload"))

    def begin_update(self) -> None:
        """As `Worker.begin_update`, on all ranks or on none."""
        self._all(call("begin_update"), call("end_reload"))

    def load_bucket(self, bucket: Bucket) -> None:
        """As `Worker.load_bucket`, each rank by an export of its own; after an error comes `undo_reload`."""
        self._all([call("load_bucket", ReceivedBucket([shared])) for shared in bucket.shared(self._size)])

    def undo_reload(self) -> None:
        """As `Worker.undo_reload`, on all ranks."""
        self._all(call("undo_reload"))

    def end_reload(self) -> None:
        """As `Worker.end_reload`, on all ranks."""
        self._all(call("end_reload"))

    def weight_checksums(self) -> dict[str, int]:
        """As `Worker.weight_checksums`, of whole parameters."""
        return added(self._all(call("weight_checksums")))

    def shutdown(self) -> None:
        """Give everything up; no process is left.  Calling it again does nothing.

        Raises:
            ExceptionGroup: the errors of the ranks that failed; the processes are gone all the same.
        """
        teardown = Teardown("shutting the ranks down")
        if self.ranks and self._death is None:
            teardown.run("the ranks", partial(self._all, call("shutdown")))
        self._end(teardown, END_S)
        teardown.finish()

    def _all(self, order: Order | Sequence[Order], undo: Order | None = None) -> list[Any]:
        """Have every rank do the same, or each its own order; what each has returned.

        Args:
            order: for all, or one per rank.
            undo: what the ranks that could do it are told when others could not; after an interrupt, all of them.
        """
        orders = list(order) if isinstance(order, Sequence) else [order] * self._size
        try:
            failed = self.exchange(dict(zip(self.ranks, orders, strict=True)))
        except KeyboardInterrupt as interrupt:
            self._undo(undo, self.ranks, interrupt)
            raise
        if failed:
            first = self._first_error(failed)
            self._undo(undo, [rank for rank in self.ranks if rank not in failed], first)
            raise first
        returned = zip(self.ranks, orders, strict=True)
        return [RankProcess.signatures[order.name].returned(rank.answer) for rank, order in returned]

    def _undo(self, order: Order | None, ranks: Sequence[Rank], error: BaseException) -> None:
        if order is None or self._death is not None:
            return
        undo = Teardown("undoing it on the ranks")
        for rank in ranks:
            undo.run(rank.name, partial(self._one, rank, order))
        undo.finish_into(error)

    def _one(self, rank: Rank, order: Order) -> None:
        failed = self.exchange({rank: order})
        if failed:
            raise self._first_error(failed)

    def _first_error(self, failed: Sequence[Rank]) -> BaseException:
        """The error of the first rank that failed by itself; the others' are noted in it."""
        errors = [rank.error() for rank in failed]
        first = min(errors, key=lambda error: isinstance(error, CollectiveError))
        others = [(rank, error) for rank, error in zip(failed, errors, strict=True) if error is not first]
        notes = [f"{rank.name} failed too: {error!r}" for rank, error in others]
        if self._death is not None:
            notes.append(str(self._death))
        first.__notes__ = [*getattr(first, "__notes__", ()), *notes]  # type: ignore[attr-defined]
        return first

    def exchange(self, orders: Mapping[Rank, Order]) -> list[Rank]:
        """Send orders and wait for all answers; the ranks that failed.

        An interrupt waits for the answers too: else the next call would take them for its own.
        """
        if self._death is not None:
            raise self._death.with_traceback(None)
        with HeldInterrupt() as held:
            interrupt, failed = self._exchange(orders, held)
        if interrupt is not None:
            raise interrupt
        held.deliver()
        return failed

    def _exchange(
        self, orders: Mapping[Rank, Order], held: HeldInterrupt
    ) -> tuple[KeyboardInterrupt | None, list[Rank]]:
        self._send(orders)
        interrupt: KeyboardInterrupt | None = None
        waiting = list(orders)
        failed: list[Rank] = []
        deadline: float | None = None
        while waiting:
            try:
                ready = held.waiting(partial(_wait, waiting, self._idle(orders, waiting)), deadline)
            except KeyboardInterrupt as error:
                interrupt, deadline = error, time.monotonic() + STUCK_S
                continue
            if not ready:
                self._give_up(_stuck(waiting, failed))
                break
            for rank in ready:
                if rank not in waiting:
                    raise self._ended(rank)
                rank.answer = self._answer_of(rank)
                waiting.remove(rank)
                if rank.answer.error is not None:
                    failed.append(rank)
                    deadline = time.monotonic() + STUCK_S
        return interrupt, failed

    def _idle(self, orders: Mapping[Rank, Order], waiting: Sequence[Rank]) -> list[Rank]:
        """The ranks that are not waited for, and must not end meanwhile: the others could wait for them for ever."""
        if any(order.name == "shutdown" for order in orders.values()):
            return []
        return [rank for rank in self.ranks if rank not in waiting]

    def _send(self, orders: Mapping[Rank, Order]) -> None:
        for rank, order in orders.items():
            try:
                rank.process.connection.send(order)
            except EngineDeadError as error:
                raise self._ended(rank) from error
            except BaseException:
                # Half an order was sent, or not to all.
                self._give_up("an order could not be sent")
                raise

    def _answer_of(self, rank: Rank) -> Answer:
        try:
            answer: Answer = rank.process.connection.receive(Answer)
        except EngineDeadError as error:
            raise self._ended(rank) from error
        except ChannelError as error:
            raise self._give_up(str(error)) from error
        return answer

    def _ended(self, ended: Rank) -> EngineDeadError:
        """The error for a rank that is gone; the others are killed."""
        for rank in self.ranks:
            if rank is not ended:
                rank.process.end(timeout_s=0.0)
        self._death = ended.process.death()
        return self._death

    def _give_up(self, why: str) -> EngineDeadError:
        """Kill all ranks: what they do cannot be known any more, or will never end."""
        self._death = EngineDeadError(f"{why}, and all ranks were killed: shut the engine down and create another")
        for rank in self.ranks:
            rank.process.end(timeout_s=0.0)
        return self._death

    def _end(self, teardown: Teardown, timeout_s: float = 0.0) -> None:
        for rank in self.ranks:
            teardown.run(rank.name, partial(rank.process.end, timeout_s))
            teardown.run(f"the watch on {rank.name}", rank.close)
        self.ranks = []
        if self._store >= 0:
            store, self._store = self._store, -1
            os.close(store)


class Rank:
    """One rank's process, and the last that was heard from it."""

    def __init__(self, rank: int, size: int) -> None:
        env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
        # gloo otherwise asks for the address of this host's name, which not every host knows.
        env.setdefault("GLOO_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME", "lo"))
        self.process = ChildProcess(ENTRY, f"lowtide::Worker_TP{rank}", env)
        self.name = f"rank {rank} of {size} (pid {self.process.pid})"
        self.answer = Answer()
        self.pidfd = watch_process(self.process.pid, self.process.name)

    def error(self) -> BaseException:
        """What the last order has failed with."""
        assert self.answer.error is not None
        return restore_error(self.answer.error, self.name)

    def close(self) -> None:
        """Stop watching the process; calling it again does nothing."""
        pidfd, self.pidfd = self.pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)


def _wait(ranks: Sequence[Rank], idle: Sequence[Rank], deadline: float | None) -> list[Rank]:
    """The ranks that have answered or ended, and those of the idle ones that have ended; none after the deadline."""
    poll = select.poll()
    for rank in ranks:
        poll.register(rank.process.connection, select.POLLIN)
    for rank in (*ranks, *idle):
        poll.register(rank.pidfd, select.POLLIN)
    left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
    ready = {descriptor for descriptor, _ in poll.poll(left)}
    return [rank for rank in (*ranks, *idle) if ready & {rank.process.connection.fileno(), rank.pidfd}]


def _stuck(waiting: Sequence[Rank], failed: Sequence[Rank]) -> str:
    """Why ranks are waited for no longer: they wait in a collective for one that has failed or was interrupted."""
    cause = f"after {failed[0].name} had failed" if failed else "after an interrupt"
    return f"{', '.join(rank.name for rank in waiting)} did not answer within {STUCK_S:g} s {cause}"
