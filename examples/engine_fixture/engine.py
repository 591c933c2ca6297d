"""A toy engine: weights, a KV cache, and a thread that would serve requests."""

from __future__ import annotations

import queue
import threading

import torch


class Engine:
    """Takes its memory when it is made, and releases it in `close`."""

    def __init__(self) -> None:
        self.weights = torch.zeros(1 << 20)
        self.kv_cache = torch.zeros(1 << 18)
        self._requests: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while self._requests.get() is not None:
            pass

    def generate(self, tokens: int) -> torch.Tensor:
        """As many numbers as tokens were asked for."""
        self._requests.put(tokens)
        return self.weights[:tokens] + self.kv_cache[:tokens]

    def close(self) -> None:
        """End the thread, and drop the memory."""
        self._requests.put(None)
        self._thread.join()
        del self.weights, self.kv_cache
