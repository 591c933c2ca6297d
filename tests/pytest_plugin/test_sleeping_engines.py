"""An engine's sleep and wake in a test: pointers to dropped pages are found, and what the sleep has kept."""

from __future__ import annotations

import pytest

from tests.pytest_plugin.conftest import RunInner

pytestmark = pytest.mark.nightly

INNER = """
    import pytest
    import torch
    from lowtide.engine.device_allocator.arena import Arena
    from lowtide.engine.pages.cpu import CpuPages


    class Engine:
        def __init__(self):
            self.caches = [self.make()]
            self.table = torch.zeros(4, dtype=torch.int64)
            self.write()

        def make(self):
            cache = Arena("kv_cache", 1 << 16, CpuPages())
            cache.map_to(1 << 16)
            return cache

        def write(self):
            self.table[1] = self.caches[-1].bytes_at(0, 1).data_ptr()

        def sleep(self):
            self.caches[-1].unmap_to(0)

        def wake_up(self, writes):
            self.caches.append(self.make())
            if writes:
                self.write()


    @pytest.mark.parametrize("writes", [True, False])
    def test_sleep(leakcheck, writes):
        engine = Engine()
        staged = leakcheck.engine(engine, sleep="sleep", wake="wake_up")
        staged.sleep()
        staged.wake_up(writes)
        for cache in engine.caches:
            cache.close()


    class Arenaless:
        def __init__(self, keeps):
            self.keeps, self.kv, self.spare = keeps, torch.zeros(2, 64, 1 << 14), None

        def sleep(self):
            self.spare = self.kv[:, :8] if self.keeps else None
            self.kv = None

        def wake_up(self):
            self.kv = torch.zeros(2, 64, 1 << 14)

        def close(self):
            self.kv = self.spare = None


    @pytest.mark.parametrize("keeps", [True, False])
    def test_cache(leakcheck, keeps):
        staged = leakcheck.engine(Arenaless(keeps), sleep="sleep", wake="wake_up", shutdown="close")
        staged.sleep()
        staged.wake_up()
        staged.close()
"""


def test_the_stages_of_an_engine_are_judged_by_it(run_inner: RunInner) -> None:
    run = run_inner({"test_inner.py": INNER})
    assert run.is_clean("test_inner.py::test_sleep[True]")
    assert run.leaks("test_inner.py::test_sleep[False]") == [("pointers", "wake")]
    (finding,) = run.subject("test_inner.py::test_sleep[False]").findings
    assert "which was in arena 'kv_cache' when the sleep began" in finding.message
    assert run.is_clean("test_inner.py::test_cache[False]")
    assert run.leaks("test_inner.py::test_cache[True]") == [("tensors", "wake")]
    (kept,) = run.subject("test_inner.py::test_cache[True]").findings
    assert (kept.bytes, kept.holder) == (8 << 20, "engine.spare")
    (unsaid,) = run.subject("test_inner.py::test_cache[True]").not_measured
    assert unsaid.what.startswith("what sleep gives back on cpu: 0 B of ")
