"""A test that ends with an error that memory was not enough says who held it; one that goes on says nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

pytestmark = pytest.mark.nightly

if TYPE_CHECKING:
    from tests.pytest_plugin.conftest import InnerRun, RunInner

TESTS = """
    import pytest
    import torch
    import lowtide

    KEPT = {}

    class Engine:
        def __init__(self):
            self.weights = [torch.zeros(1 << 20) for _ in range(3)]

        def load(self):
            activations = torch.zeros(5 << 20)
            with lowtide.stage("load"):
                return torch.empty(1 << 50)

    @pytest.fixture(scope="module")
    def engine():
        return Engine()

    @pytest.fixture
    def broken():
        weights = torch.zeros(1 << 20)
        torch.empty(1 << 50)

    def test_ends(engine):
        KEPT["cache"] = torch.zeros(1 << 19)
        engine.load()

    def test_goes_on(engine):
        with pytest.raises(RuntimeError):
            engine.load()

    def test_setup(broken):
        pass

    @pytest.mark.xfail(raises=MemoryError)
    def test_expected():
        bytearray(1 << 62)

    def test_other(engine):
        raise RuntimeError("no card")

    def test_skipped():
        pytest.skip("not here")
"""

SECTION = "leakcheck: out of memory"


@pytest.fixture(scope="module")
def run(run_inner: RunInner) -> InnerRun:
    return run_inner({"test_it.py": TESTS}, "--leakcheck-stacks=all", "-n0", using=["xdist"])


def section(run: InnerRun, test: str) -> str:
    """Return what stands below the section's title in a test's failure."""
    (text,) = [part for part in run.out.split("\n___") if f" {test} ___" in part.partition("\n")[0]]
    return text.partition(SECTION)[2]


def test_who_held_it_is_a_section_of_the_failure(run: InnerRun) -> None:
    assert run.counted("test_it.py::test_ends") == "failed"
    text = section(run, "test_ends")
    assert "out of memory on cpu in load: 4096.0 TiB were asked for" in text
    # The largest first, each with its stage, its holder and the line that allocated it.
    first, second, third = (
        text.index("20.0 MiB in 1 tensor on cpu, since call (float32 [5242880]), held by "),
        text.index("12.0 MiB in 3 tensors on cpu, since setup of module fixture 'engine' ("),
        text.index("2.0 MiB in 1 tensor on cpu, since call (float32 [524288]), held by test_it.KEPT['cache']"),
    )
    assert first < second < third
    assert "f_locals['activations']" in text[first:second]
    assert "allocated in Engine.load, " in text[first:second]
    assert "test_it.py:13" in text[first:second]
    assert ".weights" in text[second:third]


def test_the_report_has_the_same(run: InnerRun) -> None:
    found = run.subject("test_it.py::test_ends").out_of_memory
    assert found is not None
    assert (found.device, found.stage, found.asked) == ("cpu", "load", 1 << 52)
    assert [each.bytes for each in found.held[:3]] == [20 << 20, 12 << 20, 2 << 20]
    pages = [(run.folder / "report" / name).read_text() for name in ("index.html", "summary.md", "junit.xml")]
    assert ["20.0 MiB in 1 tensor on cpu, since call" in page for page in pages] == [True] * 3


def test_one_in_a_fixture_is_seen_too(run: InnerRun) -> None:
    assert "4.0 MiB in 1 tensor on cpu, since setup" in section(run, "ERROR at setup of test_setup")
    assert run.subject("test_it.py::test_setup").out_of_memory is not None


@pytest.mark.parametrize("test", ["test_goes_on", "test_expected", "test_other", "test_skipped"])
def test_nothing_is_said_of_what_is_caught_expected_or_another_error(run: InnerRun, test: str) -> None:
    assert run.subject(f"test_it.py::{test}").out_of_memory is None
    assert run.out.count(SECTION) == 2


def test_nothing_but_what_leaked_is_left(run: InnerRun) -> None:
    assert run.blamed == ["test_it.py::test_ends"]
    assert run.subject("test_it.py::test_ends").findings[0].holder == "test_it.KEPT['cache']"


def test_a_worker_of_xdist_says_it_as_well(run_inner: RunInner) -> None:
    run = run_inner({"test_it.py": TESTS}, "-n1", "-k", "test_ends", using=["xdist"])
    assert "12.0 MiB in 3 tensors on cpu" in section(run, "test_ends")
    assert run.subject("test_it.py::test_ends").out_of_memory is not None


def test_off_is_off(run_inner: RunInner) -> None:
    run = run_inner({"test_it.py": TESTS}, "-k", "test_ends", leakcheck=False)
    assert SECTION not in run.out
