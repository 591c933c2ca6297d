"""Where another plugin runs every test, as `flaky` does, a leak is shown as completely as elsewhere."""

from __future__ import annotations

import pytest

from tests.pytest_plugin.conftest import InnerRun, RunInner

LEAKING = """
    import functools
    import torch

    KEPT = []

    @functools.lru_cache(maxsize=4)
    def table(size):
        return torch.zeros(size)

    def test_cached():
        table(1000)

    def test_kept():
        KEPT.append(torch.zeros(2000))

    def test_clean():
        torch.zeros(3000)
"""


@pytest.fixture(scope="module", params=[(), ("-n", "1")], ids=["alone", "in a worker"])
def run(request: pytest.FixtureRequest, run_inner: RunInner) -> InnerRun:
    using = ("flaky.flaky_pytest_plugin", *(("xdist",) if request.param else ()))
    return run_inner({"test_inner.py": LEAKING}, *request.param, using=using)


def test_the_verdict_is_an_error_of_the_teardown(run: InnerRun) -> None:
    assert run.counted("test_inner.py::test_cached") == "passed error"
    assert run.counted("test_inner.py::test_clean") == "passed"


def test_the_failure_shows_the_remedy_that_was_tried_at_the_end(run: InnerRun) -> None:
    assert "    remedy: test_inner.table.cache_clear() gives back 3.9 KiB of 3.9 KiB" in run.out.splitlines()
    assert "    remedy: del test_inner.KEPT[0] gives back 7.8 KiB of 7.8 KiB" in run.out.splitlines()


def test_the_short_summary_says_what_leaks(run: InnerRun) -> None:
    short = [line for line in run.out.splitlines() if line.startswith("ERROR test_inner.py::test_cached - ")]
    assert len(short) == 1
    assert " - leak: tensors/lru-cache: 3.9 KiB in 1 tensor on cpu" in short[0]
