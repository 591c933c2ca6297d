"""The reference engine as it is driven through a life to be judged."""

from __future__ import annotations

import pytest

from lowtide.engine import EngineConfig
from lowtide.leakcheck.targets.reference import ReferenceLife

MIB = 1 << 20


@pytest.mark.parametrize("level", [1, 2])
def test_what_a_sleep_dropped_cannot_pass_for_the_zeros_that_it_was(level: int) -> None:
    life = ReferenceLife(EngineConfig(device="cpu", kv_cache_bytes=4 * MIB), 1024)
    life.create()
    try:
        cache = life.engine._core.worker.memory.arena("kv_cache")
        assert not cache.bytes_at(0, 4 * MIB).any()
        life.sleep(level)
        life.wake()
        assert (cache.bytes_at(0, 4 * MIB) == 0xA5).all()
    finally:
        life.shutdown()
