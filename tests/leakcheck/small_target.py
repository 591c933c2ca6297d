"""A small engine as a target, right in everything; tests change one thing about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from lowtide.engine.device_allocator.arena import Arena
from lowtide.engine.pages.cpu import CpuPages
from lowtide.leakcheck.targets.faults import Seam
from lowtide.leakcheck.targets.target import Capabilities

KIB = 1 << 10
KEPT: list[Any] = []
"""What outlives an engine."""


class RefusedError(Exception):
    """A call in the wrong state."""


class NoRoomError(Exception):
    """No memory; the cause is what failed."""


class SmallTarget:
    """Weights and a cache in arenas that sleep, a table in one that does not; tokens come from the weights."""

    capabilities = Capabilities(
        configs={"size": (8, 16)},
        unfinished=True,
        sleep_levels=(1,),
        sleep_modes=("wait", "abort"),
        preserving_levels=(1,),
        wake_tags=("weights", "kv_cache"),
        prefix_cache=True,
        reload=True,
        illegal_call=RefusedError,
        failure=(NoRoomError,),
    )
    sizes: ClassVar[Mapping[str, int]] = {"weights": 64 * KIB, "kv_cache": 128 * KIB, "runtime": 4 * KIB}

    def __init__(self) -> None:
        self.phase = "new"
        self.awake: set[str] = set()
        self.arenas: dict[str, Arena] = {}
        self.requests: dict[str, list[int]] = {}
        self.asked: dict[str, tuple[int, int]] = {}
        self.number = 0
        # Of a sleep that then failed: the next step tells them.
        self.finished: dict[str, Sequence[int]] = {}
        self.saved: torch.Tensor | None = None

    def require(self, *phases: str) -> None:
        if self.phase not in phases:
            raise RefusedError(self.phase)

    def create(self, config: Mapping[str, Any]) -> None:
        self.require("new", "closed")
        pages = CpuPages()
        try:
            self.arenas = {tag: Arena(tag, size, pages) for tag, size in self.sizes.items()}
            for tag in self.sizes:
                self.map(tag)
            self.weights = self.arenas["weights"].allocate((1000,), torch.int64)
            self.table = self.arenas["runtime"].allocate((10,), torch.int64)
            self.table.fill_(7)
            self.reload_into()
        except BaseException:
            self.let_go()
            raise
        self.phase, self.awake = "running", {"weights", "kv_cache"}

    def map(self, tag: str) -> None:
        self.arenas[tag].map_to(self.sizes[tag])

    def reload_into(self) -> None:
        self.weights.copy_(torch.arange(1000))

    def say(self, length: int, count: int) -> list[int]:
        return self.weights[length : length + count].tolist()

    def infer(self, prompt_lengths: Sequence[int], max_tokens: int) -> Sequence[Sequence[int]]:
        self.require("running")
        if self.requests:
            raise RefusedError("requests")
        return [self.say(length, max_tokens) for length in prompt_lengths]

    def start(self, prompt_lengths: Sequence[int], max_tokens: int) -> Sequence[str]:
        self.require("running")
        ids = []
        for length in prompt_lengths:
            self.number += 1
            ids.append(str(self.number))
            self.requests[ids[-1]] = []
            self.asked[ids[-1]] = (length, max_tokens)
        return ids

    def step(self) -> Mapping[str, Sequence[int]]:
        self.require("running")
        done, self.finished = self.finished, {}
        for name, tokens in list(self.requests.items()):
            length, most = self.asked[name]
            tokens.extend(self.say(length + len(tokens), 1))
            if len(tokens) == most:
                done[name] = self.requests.pop(name)
        return done

    def abort(self, request_ids: Sequence[str]) -> None:
        self.require("running")
        for name in request_ids:
            self.requests.pop(name, None)

    def sleep(self, level: int, mode: str) -> Mapping[str, Sequence[int]]:
        self.require("running")
        while mode == "wait" and self.requests:
            self.finished = dict(self.step())
        self.saved = self.weights.clone()
        self.requests.clear()
        self.drop(("weights", "kv_cache"))
        self.phase, self.awake = "asleep", set()
        done, self.finished = self.finished, {}
        return done

    def drop(self, tags: Sequence[str]) -> None:
        for tag in tags:
            self.arenas[tag].unmap_to(0)

    def wake(self, tags: Sequence[str] | None) -> None:
        self.require("asleep")
        wanted = [tag for tag in ("weights", "kv_cache") if tag not in self.awake] if tags is None else list(tags)
        try:
            for tag in wanted:
                self.map(tag)
                if tag == "weights":
                    self.fill()
        except BaseException:
            self.drop(wanted)
            raise
        self.awake |= set(wanted)
        if "weights" in wanted:
            self.saved = None
        if len(self.awake) == 2:
            self.phase = "running"

    def fill(self) -> None:
        assert self.saved is not None
        self.weights.copy_(self.saved)

    def reset_prefix_cache(self) -> bool:
        self.require("running")
        return not self.requests

    def reload(self) -> None:
        if self.phase != "running" and "weights" not in self.awake:
            raise RefusedError(self.phase)
        if self.requests:
            raise RefusedError("requests")
        self.reload_into()

    def shutdown(self) -> None:
        self.let_go()
        self.requests.clear()
        if self.phase != "new":
            self.phase = "closed"

    def let_go(self) -> None:
        for name in ("weights", "table"):
            self.__dict__.pop(name, None)
        self.saved = None
        self.awake, self.finished = set(), {}
        for arena in self.arenas.values():
            arena.close()
        self.arenas = {}

    def state(self) -> str:
        return self.phase

    def kv_usage(self) -> Any:
        held = len(self.requests)
        return SimpleNamespace(total=10, available=10 - held, evictable=0, held=held, pending_transfer=0)

    def preserved(self) -> Mapping[str, torch.Tensor]:
        return {"weights": self.weights, "table": self.table}

    def fault_seams(self) -> Sequence[Seam]:
        return (Seam("map", CpuPages, "map", lambda what: MemoryError(what)),)
