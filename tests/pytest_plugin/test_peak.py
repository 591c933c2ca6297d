"""`@pytest.mark.leakcheck(peak=SIZE)`: a test whose memory rises too far fails, and says who had it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lowtide import LeakCheck
from lowtide.leakcheck.watching.check import LeakCheckError

pytestmark = pytest.mark.nightly

if TYPE_CHECKING:
    from tests.pytest_plugin.conftest import InnerRun, RunInner

TESTS = """
    import importlib
    import pytest
    import torch
    import lowtide

    pytestmark = pytest.mark.leakcheck(tolerance="1GiB")

    def floats(mebibytes):
        return torch.ones(mebibytes, 1 << 18)

    def work(mebibytes):
        first = floats(mebibytes)
        with lowtide.stage("second"):
            second = torch.zeros(mebibytes, 1 << 18) + 1
        return float((first[0] + second[0]).sum())

    @pytest.fixture(scope="module")
    def wide():
        return floats(150)

    @pytest.fixture
    def narrow():
        return floats(90)

    def test_without():
        work(200)

    @pytest.mark.leakcheck(peak="100MiB")
    def test_over():
        work(60)

    @pytest.mark.leakcheck(peak="300MiB")
    def test_under():
        work(60)

    @pytest.mark.leakcheck(peak="100MiB")
    def test_wide_fixture(wide):
        pass

    @pytest.mark.leakcheck(peak="100MiB")
    def test_narrow_fixture(narrow):
        pass

    @pytest.mark.leakcheck(peak="60MiB")
    def test_over_in_its_fixture(narrow, leakcheck):
        pass

    @pytest.mark.parametrize(
        "size",
        [
            pytest.param(30, marks=pytest.mark.leakcheck(peak="20MiB")),
            pytest.param(31, marks=pytest.mark.leakcheck(peak="70MiB")),
        ],
    )
    def test_each(size):
        floats(size)

    @pytest.mark.leakcheck(peak="60MiB")
    def test_fails_anyway():
        floats(90)
        assert not "as it is"

    @pytest.mark.leakcheck(peak="60MiB")
    @pytest.mark.xfail
    def test_expected():
        floats(90)

    @pytest.mark.leakcheck(peak="60MiB")
    @pytest.mark.no_leakcheck(reason="it is known")
    def test_excused():
        floats(90)

    @pytest.mark.leakcheck(peak="100MiB")
    def test_import():
        import large_module

    @pytest.mark.leakcheck(peak="2 bananas")
    def test_wrong():
        pass
"""

FILES = {
    "test_it.py": TESTS.replace('"2 bananas"', '"2GiB"'),
    "large_module.py": "DATA = bytearray(b'x') * (150 << 20)\n",
}


@pytest.fixture(scope="module")
def run(run_inner: RunInner) -> InnerRun:
    return run_inner(FILES, "--leakcheck-stacks=all")


def peaks(run: InnerRun) -> dict[str, int]:
    """By how many MiB the memory of those tests rose that it rose too far of."""
    assert run.report is not None
    return {
        subject.id.partition("::")[2]: finding.bytes >> 20
        for subject in run.report.subjects
        for finding in subject.findings
        if finding.resource == "peak"
    }


def test_what_rises_too_far_fails_and_nothing_else(run: InnerRun) -> None:
    found = peaks(run)
    expected = {"test_over": 180, "test_over_in_its_fixture": 90, "test_each[30]": 30, "test_fails_anyway": 90}
    assert found.keys() == {*expected, "test_expected"}
    assert all(abs(found[test] - amount) <= 15 for test, amount in expected.items()), found
    assert {test.partition("::")[2] for test in run.phases if "failed" in run.counted(test).split()} == expected.keys()


def test_the_failure_says_who_had_it(run: InnerRun) -> None:
    message = run.message("test_it.py::test_over")
    assert message.startswith("peak: host memory rose by 1")
    assert (
        " above the start in second: 100.0 MiB is allowed; at the peak: 120.0 MiB in 2 tensors since second" in message
    )
    first, second = message.partition("; at the peak: ")[2].split("; ")
    assert first.startswith("120.0 MiB in 2 tensors since second, allocated in work, ")
    assert second.startswith("60.0 MiB in 1 tensor since call, allocated in floats, ")
    (phase,) = [phase for phase in run.phases["test_it.py::test_over"] if phase.outcome == "failed"]
    assert phase.text.startswith("test_it.py::test_over took more memory than it may:")


def test_a_test_that_fails_anyway_stays_as_it_is_and_is_told(run: InnerRun) -> None:
    assert "as it is" in run.message("test_it.py::test_fails_anyway")
    assert "test_it.py::test_fails_anyway took more memory than it may:" in run.out
    assert run.counted("test_it.py::test_expected") == "xfailed"
    assert run.subject("test_it.py::test_excused").outcome == "skipped"


def test_workers_of_xdist_tell_the_same(run_inner: RunInner) -> None:
    run = run_inner(FILES, "-n2", "-k", "over or under or each", using=["xdist"])
    assert peaks(run).keys() == {"test_over", "test_over_in_its_fixture", "test_each[30]"}
    assert "--leakcheck-stacks=all" in run.out


def test_a_wrong_value_is_one_clear_line(run_inner: RunInner) -> None:
    run = run_inner({"test_it.py": TESTS}, "-k", "test_wrong")
    assert run.code == pytest.ExitCode.USAGE_ERROR
    (line,) = [line for line in run.err.splitlines() if "bananas" in line]
    assert "test_it.py::test_wrong: @pytest.mark.leakcheck(peak=…): '2 bananas' is no size" in line


def test_off_is_off(run_inner: RunInner) -> None:
    run = run_inner(FILES, "-k", "test_over", leakcheck=False)
    assert run.code == pytest.ExitCode.OK


@pytest.mark.parametrize(("peak", "resources"), [("20MiB", ["peak"]), (200 << 20, []), (None, [])])
def test_a_block_may_be_limited_too(peak: str | int | None, resources: list[str]) -> None:
    with LeakCheck(peak=peak) as check:
        touched = bytearray(b"x") * (60 << 20)
        del touched
    assert [finding.resource for finding in check.report.subjects[0].findings] == resources


@pytest.mark.parametrize("peak", ["2 bananas", -1, "-1MiB", True])
def test_a_wrong_limit_of_a_block_is_refused(peak: str | int) -> None:
    with pytest.raises(LeakCheckError, match=r"LeakCheck\(peak=…\): .* is no size: use bytes"):
        LeakCheck(peak=peak)
