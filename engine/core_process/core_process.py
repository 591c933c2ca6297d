"""What runs in the core's own process: a core whose methods the client calls."""

from __future__ import annotations

from collections.abc import Sequence
from types import FrameType
from typing import Any, ClassVar

from lowtide.engine.config import EngineConfig
from lowtide.engine.core import EngineCore, create_core, make_plan
from lowtide.engine.kv.block_pool import KVCacheUsage
from lowtide.engine.processes.calls import Signature, Signatures
from lowtide.engine.processes.channel import Connection
from lowtide.engine.processes.child_main import on_interrupt
from lowtide.engine.processes.served import ServedProcess
from lowtide.engine.request import Request, RequestOutput, SamplingParams
from lowtide.engine.weight_transfer.buckets import ReceivedBucket


def main(connection: Connection) -> None:
    """Answer the client's orders, until it says `shutdown` or closes the connection."""
    process = CoreProcess()
    on_interrupt(process.interrupt)
    process.serve(connection)


class CoreProcess(ServedProcess[EngineCore]):
    """The core, and what becomes of the client's orders."""

    signatures: ClassVar[Signatures] = {
        "create": Signature("create", (EngineConfig,)),
        "add_request": Signature("infer", (str, list[int], SamplingParams)),
        "step": Signature("infer", (), list[RequestOutput]),
        "abort": Signature("infer", (list[str],), list[RequestOutput]),
        "abort_all": Signature("infer", (), list[RequestOutput]),
        "reset_prefix_cache": Signature("reset_prefix_cache", (), bool),
        "prepare_sleep": Signature("sleep", (int,)),
        "forget_prefixes": Signature("sleep"),
        "sleep": Signature("sleep", (int,)),
        "wake": Signature("wake", (list[str],)),
        "reload_weights": Signature("reload_weights"),
        "begin_update": Signature("update_weights"),
        "load_bucket": Signature("update_weights", (ReceivedBucket,)),
        "undo_update": Signature("update_weights"),
        "end_update": Signature("update_weights", (bool,)),
        "weight_checksums": Signature(None, (), dict[str, int]),
        "kv_cache_usage": Signature(None, (), KVCacheUsage),
        "shutdown": Signature("shutdown"),
    }

    def __init__(self) -> None:
        super().__init__()
        self._is_new = True
        self._is_early = False

    def create(self, config: EngineConfig) -> EngineCore:
        """Make the core."""
        return create_core(config, make_plan(config))

    def num_requests(self) -> tuple[int, int]:
        """As `EngineCore.num_requests`."""
        return (0, 0) if self.served is None else self.served.num_requests()

    def call(self, served: EngineCore, name: str, arguments: Sequence[Any]) -> object:
        """Call a method of the core, which takes a request whole."""
        return super().call(served, name, [Request(*arguments)] if name == "add_request" else arguments)

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
