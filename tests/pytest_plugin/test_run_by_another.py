"""Where another plugin runs a test again, as `flaky` does, a leak is shown as completely as elsewhere; else as ever."""

from __future__ import annotations

import pytest

from tests.pytest_plugin.conftest import InnerRun, RunInner

pytestmark = pytest.mark.nightly

LEAKING = """
    import functools
    import flaky
    import pytest
    import torch

    KEPT = []

    @functools.lru_cache(maxsize=4)
    def table(size):
        return torch.nn.Parameter(torch.zeros(size))

    RUNS = []

    @flaky.flaky
    def test_cached():
        table(1000)

    @pytest.mark.flaky
    def test_kept():
        KEPT.append(torch.zeros(2000))

    @flaky.flaky
    def test_passes_the_second_time():
        RUNS.append(1)
        assert len(RUNS) > 1

    def test_kept_and_not_flaky():
        KEPT.append(torch.zeros(1000))

    def test_fails():
        KEPT.append(torch.zeros(4000))
        assert not KEPT

    def test_clean():
        torch.zeros(3000)
"""


@pytest.fixture(scope="module", params=[(), ("-n", "1")], ids=["alone", "in a worker"])
def run(request: pytest.FixtureRequest, run_inner: RunInner) -> InnerRun:
    using = ("flaky.flaky_pytest_plugin", *(("xdist",) if request.param else ()))
    return run_inner({"test_inner.py": LEAKING}, *request.param, using=using)


def test_the_verdict_is_an_error_of_the_teardown_of_a_test_that_is_run_again(run: InnerRun) -> None:
    assert run.counted("test_inner.py::test_cached") == "passed error"
    assert run.counted("test_inner.py::test_kept") == "passed error"
    assert run.counted("test_inner.py::test_passes_the_second_time") == "passed"


def test_any_other_test_fails_as_without_that_plugin(run: InnerRun) -> None:
    assert run.counted("test_inner.py::test_kept_and_not_flaky") == "failed"
    assert run.counted("test_inner.py::test_clean") == "passed"
    assert (run.counted("test_inner.py::test_fails"), run.leaks("test_inner.py::test_fails")) == (
        "failed",
        [("tensors", "call")],
    )
    assert run.totals == {"failed": 2, "passed": 4, "error": 2}


def test_the_failure_shows_the_remedy_that_was_tried_at_the_end(run: InnerRun) -> None:
    assert "    remedy: test_inner.table.cache_clear() gives back 3.9 KiB of 3.9 KiB" in run.out.splitlines()
    assert "    remedy: del test_inner.KEPT[0] gives back 7.8 KiB of 7.8 KiB" in run.out.splitlines()


def test_the_short_summary_says_what_leaks(run: InnerRun) -> None:
    short = [line for line in run.out.splitlines() if line.startswith("ERROR test_inner.py::test_cached - ")]
    assert len(short) == 1
    assert " - leak: test_inner.table (lru_cache value): tensors/lru-cache: 3.9 KiB in 1 tensor on cpu" in short[0]
