"""How far memory rises above the start: read where the kernel and torch keep it, whatever there was before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from lowtide.leakcheck.findings import peak_memory as module
from lowtide.leakcheck.findings.peak_memory import PeakWatch
from lowtide.leakcheck.judging.ladder import trim_heap
from lowtide.probes.allocation_stacks import AllocationStacks
from lowtide.probes.device.card_peaks import CardPeak
from lowtide.probes.host.memory_parts import read_high_water
from lowtide.reports.schema import Finding

MIB = 1 << 20
KEPT: list[Any] = []
LIMIT = 60 * MIB


class Stages:
    """Says in which stage a test is."""

    now = "call"


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    trim_heap()
    yield
    KEPT.clear()
    Stages.now = "call"


def watch(stacks: AllocationStacks | None = None, limit: int = LIMIT, *, card: bool = False) -> PeakWatch:
    return PeakWatch(stacks or AllocationStacks(card=False), lambda: Stages.now, limit, card=card)


def use(mebibytes: int) -> None:
    """Have so much memory for a moment."""
    touched = bytearray(mebibytes * MIB)
    touched[:: 1 << 12] = b"x" * len(touched[:: 1 << 12])


def rise(of: PeakWatch) -> tuple[int | None, tuple[str, ...]]:
    """End it: by how many MiB too far it rose on the host, and what could not be seen."""
    findings, missing = of.end("test_it.py::test_it")
    return (findings[0].bytes // MIB if findings else None), tuple(each.why for each in missing)


@pytest.mark.parametrize(("amount", "is_over"), [(120, True), (20, False)])
def test_what_is_freed_before_the_end_counts(amount: int, *, is_over: bool) -> None:
    follows = watch()
    follows.begin()
    use(amount)
    found, missing = rise(follows)
    assert (found is not None, missing) == (is_over, ())
    assert found is None or amount - 10 <= found <= amount + 10


@pytest.mark.parametrize(("amount", "is_over"), [(120, True), (20, False)])
def test_a_higher_peak_before_hides_nothing(amount: int, *, is_over: bool) -> None:
    use(300)
    follows = watch()
    follows.begin()
    use(amount)
    found, missing = rise(follows)
    assert (found is not None, missing) == (is_over, ())


@pytest.mark.parametrize(("limit", "is_counted_anew"), [(LIMIT, True), (1000 * MIB, False)])
def test_the_program_s_own_reading_is_left_alone_where_it_hides_nothing(limit: int, *, is_counted_anew: bool) -> None:
    use(300)
    before = read_high_water().most
    follows = watch(limit=limit)
    follows.begin()
    assert (read_high_water().most < before - 100 * MIB) is is_counted_anew
    follows.end("")


@pytest.mark.parametrize(("before", "missing"), [(300, 1), (0, 0)])
def test_where_the_kernel_does_not_count_anew_that_is_said(
    before: int, missing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What earlier tests have used hides it as well.
    assert module.forget_high_water()
    monkeypatch.setattr(module, "forget_high_water", lambda: False)
    use(before)
    follows = watch()
    follows.begin()
    use(20)
    _, whys = rise(follows)
    assert len(whys) == missing
    assert all("clear_refs" in why for why in whys)


def test_what_a_fixture_or_an_import_takes_and_keeps_does_not_count() -> None:
    follows = watch()
    follows.begin()
    use(20)
    follows.entered()
    follows.entered()
    use(200)
    KEPT.append(bytearray(b"x") * (100 * MIB))
    follows.left()
    follows.left()
    use(30)
    assert rise(follows) == (None, ())


def test_what_comes_after_it_does() -> None:
    follows = watch()
    follows.begin()
    follows.entered()
    KEPT.append(bytearray(b"x") * (100 * MIB))
    follows.left()
    use(120)
    found, _ = rise(follows)
    assert found is not None
    assert 110 <= found <= 130


def test_the_stage_is_that_in_which_it_was_highest() -> None:
    follows = watch()
    follows.begin()
    use(80)
    for stage, amount in (("load", 150), ("infer", 100)):
        follows.stage_ended(stage)
        Stages.now = stage
        use(amount)
    (finding,), _ = follows.end("test_it.py::test_it")
    assert finding.stage == "load"
    assert " above the start in load: 60.0 MiB is allowed" in finding.message


# --- who had it -----------------------------------------------------------------------------------------------------


@pytest.fixture
def recording() -> Iterator[AllocationStacks]:
    stacks = AllocationStacks(card=False, cpu=True)
    stacks.start()
    yield stacks
    stacks.stop()


def floats(mebibytes: int) -> torch.Tensor:
    return torch.ones(mebibytes, MIB // 4)


def of_host(stacks: AllocationStacks, work: Callable[[PeakWatch], None]) -> Finding:
    follows = watch(stacks)
    follows.begin()
    work(follows)
    (finding,), _ = follows.end("test_it.py::test_it")
    return finding


def test_the_tensors_of_the_host_at_the_peak_are_named_by_their_lines(recording: AllocationStacks) -> None:
    def work(follows: PeakWatch) -> None:
        first = floats(50)
        del first
        KEPT.append(floats(20))
        follows.stage_ended("infer")
        Stages.now = "infer"
        second = [floats(40) for _ in range(2)]
        del second
        floats(90)

    finding = of_host(recording, work)
    told = finding.message.partition("; at the peak: ")[2].split("; ")
    assert [part.partition(", ")[0] for part in told[:2]] == [
        "90.0 MiB in 1 tensor since infer",
        "20.0 MiB in 1 tensor since call",
    ]
    assert f"{__name__}.KEPT[0]" in told[1]
    assert finding.allocated_at[0].function.endswith("floats")
    assert finding.advice is None


def test_what_no_operation_has_allocated_is_said_to_be_in_no_list(recording: AllocationStacks) -> None:
    finding = of_host(recording, lambda _: use(150))
    assert "memray" in str(finding.advice)


def test_without_stacks_it_is_said_how_to_get_them() -> None:
    finding = of_host(AllocationStacks(card=False), lambda _: use(150))
    assert "--leakcheck-stacks=all" in str(finding.advice)


# --- cards, as torch counts -----------------------------------------------------------------------------------------


class Card:
    """A card whose memory rises and falls as it is told, and what is read of it."""

    def __init__(self, now: int, most: int) -> None:
        self.now, self.most = now, most
        self.resets = 0

    def use(self, amount: int) -> None:
        self.most = max(self.most, self.now + amount)

    def reset(self) -> bool:
        self.resets += 1
        self.most = self.now
        return True

    def read(self) -> dict[str, CardPeak]:
        return {"cuda:0": CardPeak(self.now, self.most)}


def on_card(card: Card, monkeypatch: pytest.MonkeyPatch) -> PeakWatch:
    monkeypatch.setattr(module, "read_card_peaks", card.read)
    monkeypatch.setattr(module, "forget_card_peak", lambda device: card.reset())
    monkeypatch.setattr(module, "read_high_water", lambda: (0, 0))
    follows = watch(limit=100, card=True)
    follows.begin()
    return follows


def bytes_of(follows: PeakWatch) -> list[int]:
    return [finding.bytes for finding in follows.end("test_it.py::test_it")[0]]


@pytest.mark.parametrize(("amount", "found"), [(101, [101]), (100, [])])
@pytest.mark.parametrize(("most", "resets"), [(1000, 0), (1100, 0), (1101, 1), (5000, 1)])
def test_torch_is_told_to_count_anew_only_where_an_earlier_peak_hides_it(
    amount: int, found: list[int], most: int, resets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = Card(now=1000, most=most)
    follows = on_card(card, monkeypatch)
    card.use(amount)
    assert bytes_of(follows) == found
    assert card.resets == resets


@pytest.mark.parametrize(("first", "then", "found"), [(300, 20, [300]), (20, 300, [300]), (20, 30, [])])
def test_a_program_that_has_torch_count_anew_itself_hides_nothing(
    first: int, then: int, found: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    card = Card(now=1000, most=1000)
    name = "_cuda_resetPeakMemoryStats"
    monkeypatch.setattr(torch._C, name, lambda device: card.reset(), raising=False)
    follows = on_card(card, monkeypatch)
    card.use(first)
    getattr(torch._C, name)(0)
    assert card.resets == 1
    card.use(then)
    assert bytes_of(follows) == found


def test_a_card_that_comes_into_use_meanwhile_had_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(now=0, most=0)
    follows = on_card(card, monkeypatch)
    follows._levels.pop("cuda:0")
    card.use(150)
    assert bytes_of(follows) == [150]
