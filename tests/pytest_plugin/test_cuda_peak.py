"""On a card: how far its memory rises, who had it, and who has it when there is not enough."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from lowtide.leakcheck.snapshots.allocator_snapshot import read_snapshot

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA card"),
]

if TYPE_CHECKING:
    from tests.pytest_plugin.conftest import InnerRun, RunInner

TESTS = """
    import pytest
    import torch
    import lowtide

    MIB = 1 << 20
    PEAKS = {}

    def block(mebibytes):
        return torch.ones(mebibytes * MIB, dtype=torch.uint8, device="cuda")

    def work(mebibytes):
        first = block(mebibytes)
        with lowtide.stage("second"):
            second = block(2 * mebibytes)
        del first, second
        block(10)

    @pytest.fixture(scope="module")
    def wide():
        return block(300)

    def test_earlier():
        block(2000)

    @pytest.mark.leakcheck(peak="100MiB")
    def test_over():
        work(100)

    @pytest.mark.leakcheck(peak="1GiB")
    def test_under():
        work(100)

    @pytest.mark.leakcheck(peak="100MiB")
    def test_wide_fixture(wide):
        block(20)

    @pytest.mark.leakcheck(peak="100MiB")
    def test_counts_anew(wide):
        block(150)
        torch.cuda.reset_peak_memory_stats()
        block(30)
        PEAKS["own"] = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()

    @pytest.mark.leakcheck(peak="100MiB")
    def test_counts_anew_and_stays_below(wide):
        block(20)
        torch.cuda.reset_peak_memory_stats()
        block(30)

    @pytest.mark.leakcheck(peak="100MiB")
    def test_own_history(wide):
        torch.cuda.memory._record_memory_history(max_entries=1000)
        block(150)
        torch.cuda.memory._record_memory_history(None)

    def test_its_reading_is_as_it_was():
        assert 30 * MIB <= PEAKS["own"] < 40 * MIB
        assert not torch.cuda.memory._snapshot()["device_traces"][0][1:]

    @pytest.mark.leakcheck(peak="100MiB")
    def test_many_events():
        kept = [block(1) for _ in range(150)]
        for _ in range(150_000):
            torch.empty(1, device="cuda")
        del kept
"""

OUT_OF_MEMORY = """
    import pytest
    import torch
    import lowtide

    class Engine:
        def __init__(self):
            self.weights = [torch.ones(1 << 26, dtype=torch.uint8, device="cuda") for _ in range(4)]

        def train(self):
            scale = torch.ones(1 << 24, device="cuda", requires_grad=True)
            loss = (scale.exp() * 2).sin().sum()
            with lowtide.stage("backward"):
                torch.empty(1 << 50, dtype=torch.uint8, device="cuda")

    @pytest.fixture
    def engine():
        return Engine()

    def test_ends(engine):
        engine.train()

    def test_goes_on(engine):
        with pytest.raises(torch.OutOfMemoryError):
            engine.train()
        torch.empty(1 << 20, device="cuda")

    def test_later():
        torch.ones(1 << 20, device="cuda")
"""


@pytest.fixture(scope="module")
def peaks(run_inner: RunInner) -> InnerRun:
    return run_inner({"test_it.py": TESTS}, "--leakcheck-device=cuda")


def of_card(run: InnerRun, test: str) -> list[tuple[int, str]]:
    """By how many MiB a card's memory rose too far in a test, and what is said of it."""
    found = run.subject(f"test_it.py::{test}").findings
    return [
        (finding.bytes >> 20, finding.message)
        for finding in found
        if (finding.resource, finding.device) == ("peak", "cuda:0")
    ]


def test_the_blocks_at_the_peak_are_named_with_their_stages(peaks: InnerRun) -> None:
    ((rise, message),) = of_card(peaks, "test_over")
    assert rise == 300
    assert "memory on cuda:0 rose by 300.0 MiB above the start in second: 100.0 MiB is allowed" in message
    first, second = message.partition("; at the peak: ")[2].split("; ")
    assert first.startswith("200.0 MiB in 1 block since second, allocated in block, ")
    assert second.startswith("100.0 MiB in 1 block since call, allocated in block, ")


@pytest.mark.parametrize("test", ["test_under", "test_wide_fixture", "test_counts_anew_and_stays_below"])
def test_what_stays_below_is_clean(peaks: InnerRun, test: str) -> None:
    assert of_card(peaks, test) == []


def test_a_program_that_counts_anew_hides_nothing_and_reads_its_own(peaks: InnerRun) -> None:
    ((rise, message),) = of_card(peaks, "test_counts_anew")
    assert rise == 150
    assert "150.0 MiB in 1 block since call, allocated in block, " in message
    assert peaks.counted("test_it.py::test_its_reading_is_as_it_was") == "passed"


def test_a_history_of_the_program_s_own_is_left_to_it(peaks: InnerRun) -> None:
    ((rise, _),) = of_card(peaks, "test_own_history")
    assert rise == 150


def test_more_events_than_are_kept_hide_lines_and_no_bytes(peaks: InnerRun) -> None:
    ((rise, _),) = of_card(peaks, "test_many_events")
    assert rise == 150


@pytest.fixture(scope="module")
def out_of_memory(run_inner: RunInner) -> InnerRun:
    return run_inner({"test_it.py": OUT_OF_MEMORY}, "--leakcheck-device=cuda")


def test_who_has_the_card_s_memory_when_there_is_not_enough(out_of_memory: InnerRun) -> None:
    run = out_of_memory
    found = run.subject("test_it.py::test_ends").out_of_memory
    assert found is not None
    assert (found.device, found.stage, found.asked) == ("cuda:0", "backward", 1 << 50)
    assert found.unread == ()
    sizes = {line.name: line.bytes for line in found.memory}
    assert sizes["the card"] > sizes["torch's"] >= sizes["of this in use"] >= 4 << 26
    first, *others = found.held
    assert (first.bytes, first.count, first.stage) == (4 << 26, 4, "setup")
    assert str(first.holder).endswith("].weights")
    assert first.allocated_at[0].function.rpartition(".")[2] in ("<listcomp>", "__init__")
    # What autograd has saved, and Python has no tensor of.
    assert any(other.verdict == "native-held" or "train" in str(other.allocated_at) for other in others)
    snapshot = read_snapshot(run.folder / "report" / found.snapshot)
    assert sum(survivors.bytes for survivors in snapshot.survivors) >= 4 << 26


def test_what_goes_on_is_not_disturbed_and_nothing_is_held(out_of_memory: InnerRun) -> None:
    run = out_of_memory
    assert run.counted("test_it.py::test_goes_on") == run.counted("test_it.py::test_later") == "passed"
    assert run.subject("test_it.py::test_goes_on").out_of_memory is None
    assert run.blamed == []
    assert len(list((run.folder / "report" / "snapshots").glob("*.pickle"))) == 1
