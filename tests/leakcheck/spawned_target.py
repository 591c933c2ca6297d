"""An engine in a spawned process: its sleep keeps everything, and each infer leaks 16 MiB there."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from lowtide.leakcheck.targets.target import Capabilities

WEIGHTS = 32 << 20
LEAKED = 16 << 20


def serve(requests: Connection, weights: int) -> None:
    """In the child: answer until told to end."""
    held = [b"x" * weights]
    while (asked := requests.recv()) != "end":
        if asked == "infer":
            held.append(b"x" * LEAKED)
        requests.send(len(held))


class SpawnedTarget:
    """All its memory is in the child, which ends with the shutdown."""

    capabilities = Capabilities(prompt_lengths=(3,), max_tokens=2, sleep_levels=(1,))
    weights = WEIGHTS
    method = "spawn"

    def __init__(self) -> None:
        self.child: BaseProcess | None = None

    def create(self, config: Mapping[str, Any]) -> None:
        context: Any = multiprocessing.get_context(self.method)
        self.requests, theirs = context.Pipe()
        self.child = context.Process(target=serve, args=(theirs, self.weights), name="EngineCore")
        self.child.start()  # type: ignore[union-attr]
        theirs.close()
        self.ask("create")

    def ask(self, what: str) -> None:
        self.requests.send(what)
        self.requests.recv()

    def infer(self, prompt_lengths: Sequence[int], max_tokens: int) -> Sequence[Sequence[int]]:
        self.ask("infer")
        return [list(range(max_tokens)) for _ in prompt_lengths]

    def sleep(self, level: int, mode: str) -> Mapping[str, Sequence[int]]:
        self.ask("sleep")
        return {}

    def wake(self, tags: Sequence[str] | None) -> None:
        self.ask("wake")

    def shutdown(self) -> None:
        if self.child is None:
            return
        self.requests.send("end")
        self.requests.close()
        self.child.join()
        self.child.close()
        self.child = None


class SmallHelper(SpawnedTarget):
    """What is in its child is no engine: a few MiB, and nothing grows."""

    weights = 1 << 20

    def infer(self, prompt_lengths: Sequence[int], max_tokens: int) -> Sequence[Sequence[int]]:
        self.ask("nothing")
        return [list(range(max_tokens)) for _ in prompt_lengths]
