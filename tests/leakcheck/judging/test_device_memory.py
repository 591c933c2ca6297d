"""What is new on a card beside tensors, also where the driver counts it and lists it nowhere."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from lowtide.leakcheck.judging import device_memory as cards
from lowtide.leakcheck.judging.device_memory import UNLISTED, DeviceMemory
from lowtide.leakcheck.judging.metrics import UNLISTED_TOLERANCE
from lowtide.probes.device.allocations import AllocationsError
from lowtide.probes.device.driver_trace import TracedMemory
from lowtide.probes.device.torch_allocator import UnexplainedBlocks
from lowtide.probes.host.counters import Counters

CARD = "cuda:0"
NOTHING_KNOWN = Counters({}, {}, {})
MIB = 1 << 20


@dataclass
class FakeCard:
    """A card as its driver counts and lists it; torch has nothing on it.

    What is imported it counts for this process, unless it does for another one.
    """

    context: int = 600 * MIB
    listed: dict[int, int] = field(default_factory=dict)
    mapped: dict[int, int] = field(default_factory=dict)
    imported: dict[int, int] = field(default_factory=dict)
    of_another: bool = False
    created: int = 0
    idle_pool: int = 0
    searches: int = 0
    lists: int = 0

    def now(self) -> Counters:
        parts = (self.listed, self.mapped, {} if self.of_another else self.imported)
        counted = self.context + self.created + self.idle_pool + sum(sum(part.values()) for part in parts)
        amounts = {f"driver {CARD}": counted, f"reserved {CARD}": 0, f"memory-pool {CARD}": self.idle_pool}
        return Counters({}, amounts, {})

    def allocations(
        self, index: int, among: Sequence[tuple[int, int]] | None = None, known: Sequence[tuple[int, int]] = ()
    ) -> tuple[tuple[int, int], ...]:
        self.lists += among is None
        there = self.listed.items()
        return tuple(sorted(there if among is None else (entry for entry in there if entry in among)))

    def range_at(self, index: int, address: int) -> tuple[int, int] | None:
        there = {**self.listed, **self.imported}
        return next(((start, size) for start, size in there.items() if start <= address < start + size), None)

    def mappings(self, index: int, listed: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        self.searches += 1
        return tuple(sorted(self.mapped.items()))


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> FakeCard:
    fake = FakeCard()
    monkeypatch.setattr(cards, "read_allocations", fake.allocations)
    monkeypatch.setattr(cards, "read_mappings_without_access", fake.mappings)
    monkeypatch.setattr(cards, "range_at", fake.range_at)
    monkeypatch.setattr(cards, "place_of_small_allocations", lambda index: (0x200, 256))
    monkeypatch.setattr(cards, "read_segments", lambda index: [])
    monkeypatch.setattr(cards, "unexplained_blocks", lambda index, claimed: UnexplainedBlocks({}, {}, {}, {}))
    monkeypatch.setattr(cards, "announced_pools", lambda: ())
    return fake


@pytest.fixture
def known(card: FakeCard) -> DeviceMemory:
    """The card as it is at first."""
    known = DeviceMemory(driver=True)
    known.adopt(card.now(), [CARD], {})
    return known


def new(
    known: DeviceMemory, card: FakeCard, storages: Mapping[tuple[str, int], int] | None = None
) -> dict[str, dict[str, int]]:
    found = known.new_items(card.now(), [CARD], storages or {}, NOTHING_KNOWN)
    return {key: items for key, items in found.items() if any(items.values())}


def test_an_allocation_is_new_by_its_address(card: FakeCard, known: DeviceMemory) -> None:
    card.listed[0x1000] = 24 * MIB
    assert new(known, card) == {f"allocations {CARD}": {"allocation at 0x1000": 24 * MIB}}


def test_an_array_that_was_seen_asked_for_has_its_own_name_and_is_in_no_unlisted_rest(
    card: FakeCard, known: DeviceMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    card.created += 64 * MIB
    assert new(known, card) == {f"unlisted {CARD}": {UNLISTED: 64 * MIB}}
    arrays = [TracedMemory(0x7000, 64 * MIB, 0, "libapp.so", is_array=True)]
    monkeypatch.setattr(cards, "TRACE", SimpleNamespace(arrays_on=lambda index: arrays if index == 0 else []))
    assert new(known, card) == {f"allocations {CARD}": {"array at 0x7000": 64 * MIB}}


@pytest.mark.parametrize(("rise", "names"), [(0, {"allocation at 0x9000000"}), (2 * MIB, {"0x1000", "0x9000000"})])
def test_a_small_allocation_is_a_test_s_only_where_the_driver_s_figure_has_risen_in_it(
    card: FakeCard, known: DeviceMemory, rise: int, names: set[str]
) -> None:
    card.listed |= {0x1000: 8192, 0x9000000: 24 * MIB}
    now = card.now()
    begin = Counters({}, {f"driver {CARD}": (now.amounts[f"driver {CARD}"] or 0) - rise}, {})
    found = known.new_items(now, [CARD], {}, begin)[f"allocations {CARD}"]
    assert {name.removeprefix("allocation at ") for name in found} == {name.rpartition(" ")[2] for name in names}


@pytest.mark.parametrize(("held", "is_tensors"), [(24 * MIB, True), (0, True), (MIB, False)])
def test_an_allocation_that_tensors_fill_is_theirs(
    card: FakeCard, known: DeviceMemory, held: int, *, is_tensors: bool
) -> None:
    """Of one that is older than the test the bytes are not known."""
    card.listed[0x1000] = 24 * MIB
    expected = {} if is_tensors else {f"allocations {CARD}": {"allocation at 0x1000": 24 * MIB}}
    assert new(known, card, {(CARD, 0x1000): held}) == expected


def test_a_workspace_of_an_allocator_without_a_list_is_told_from_what_is_outside_torch(
    card: FakeCard, known: DeviceMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cards, "workspace_sizes_here", lambda index: frozenset({32 * MIB}))
    card.listed |= {0x1000: 32 * MIB, 0x9000000: 24 * MIB}
    both = {"allocation at 0x1000": 32 * MIB, "allocation at 0x9000000": 24 * MIB}
    assert new(known, card) == {f"allocations {CARD}": both}
    monkeypatch.setattr(cards, "unexplained_blocks", lambda index, claimed: None)
    assert new(known, card) == {
        f"workspaces {CARD}": {"workspace at 0x1000": 32 * MIB},
        f"allocations {CARD}": {"allocation at 0x9000000": 24 * MIB},
    }


def test_of_a_card_that_was_first_used_in_a_test_the_programs_own_is_new(card: FakeCard) -> None:
    """The context and the parts of a handle are what the first use takes."""
    known = DeviceMemory(driver=True)
    card.listed |= {0x1000: 64 * MIB, 0x9000000: 1024, 0xA000000: 24 * MIB}
    known.adopt_first_use(card.now(), CARD, (64 * MIB, 1024))
    assert known.knows(CARD)
    assert known.lists_allocations(CARD)
    assert new(known, card) == {f"allocations {CARD}": {"allocation at 0xa000000": 24 * MIB}}
    card.created = 128 * MIB
    assert new(known, card)[f"unlisted {CARD}"] == {UNLISTED: 128 * MIB}


def test_memory_without_any_address_is_what_the_driver_counts_and_does_not_list(
    card: FakeCard, known: DeviceMemory
) -> None:
    card.created = 128 * MIB
    assert new(known, card) == {f"unlisted {CARD}": {UNLISTED: 128 * MIB}}


def test_what_a_tensor_has_imported_is_the_tensors_alone_and_what_nothing_is_over_is_told(
    card: FakeCard, known: DeviceMemory
) -> None:
    card.imported[0x400000] = 64 * MIB
    assert new(known, card) == {f"unlisted {CARD}": {UNLISTED: 64 * MIB}}
    # A tensor is a part of what was imported with it; on the host there may be anything at that address.
    assert new(known, card, {(CARD, 0x500000): 8 * MIB, ("cpu", 0x600000): 8 * MIB}) == {}
    assert new(known, card, {("cpu", 0x500000): 64 * MIB}) == {f"unlisted {CARD}": {UNLISTED: 64 * MIB}}
    card.created = 128 * MIB
    assert new(known, card, {(CARD, 0x500000): 8 * MIB}) == {f"unlisted {CARD}": {UNLISTED: 128 * MIB}}


def test_what_an_earlier_tensor_has_imported_is_known(card: FakeCard, known: DeviceMemory) -> None:
    card.imported[0x400000] = 64 * MIB
    known.adopt(card.now(), [CARD], {(CARD, 0x400000): 0})
    assert new(known, card, {(CARD, 0x400000): 0}) == {}
    card.created = 128 * MIB
    assert new(known, card, {(CARD, 0x400000): 0}) == {f"unlisted {CARD}": {UNLISTED: 128 * MIB}}


def test_what_is_imported_is_told_by_nobody_when_its_exporter_ends(card: FakeCard, known: DeviceMemory) -> None:
    card.of_another = True
    card.imported[0x400000] = 64 * MIB
    known.adopt(card.now(), [CARD], {(CARD, 0x400000): 0})
    card.of_another = False
    assert new(known, card, {(CARD, 0x400000): 0}) == {}
    card.created = 128 * MIB
    assert new(known, card, {(CARD, 0x400000): 0}) == {f"unlisted {CARD}": {UNLISTED: 128 * MIB}}
    # It is counted now: what comes later is something else.
    for _ in range(2):
        known.adopt(card.now(), [CARD], {(CARD, 0x400000): 0})
    card.created += 64 * MIB
    assert new(known, card, {(CARD, 0x400000): 0}) == {f"unlisted {CARD}": {UNLISTED: 64 * MIB}}


def test_where_the_driver_does_not_say_what_is_imported_it_is_what_the_tensor_has(
    card: FakeCard, known: DeviceMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cards, "range_at", lambda index, address: None)
    card.imported[0x400000] = 64 * MIB
    assert new(known, card, {(CARD, 0x400000): 64 * MIB}) == {}


def test_a_tensor_over_what_is_listed_has_imported_nothing(card: FakeCard, known: DeviceMemory) -> None:
    card.listed[0x400000], card.created = 64 * MIB, 64 * MIB
    found = new(known, card, {(CARD, 0x500000): MIB})
    assert found[f"unlisted {CARD}"] == {UNLISTED: 64 * MIB}


def test_memory_that_is_mapped_without_access_is_listed_by_its_handle(card: FakeCard, known: DeviceMemory) -> None:
    card.mapped[0x2000] = 64 * MIB
    assert new(known, card) == {f"allocations {CARD}": {"mapping without access at 0x2000": 64 * MIB}}


def test_what_code_takes_is_no_leak_and_nothing_is_searched_for_it(card: FakeCard, known: DeviceMemory) -> None:
    card.context += UNLISTED_TOLERANCE
    assert new(known, card) == {}
    assert card.searches == 0


def test_what_a_memory_pool_keeps_is_counted_with_the_pool_alone(card: FakeCard, known: DeviceMemory) -> None:
    card.idle_pool = 256 * MIB
    assert new(known, card) == {}


def test_what_was_adopted_is_known(card: FakeCard, known: DeviceMemory) -> None:
    card.created, card.mapped[0x2000], card.listed[0x1000] = 128 * MIB, 64 * MIB, MIB
    known.adopt(card.now(), [CARD], {})
    assert new(known, card) == {}
    card.mapped[0x8000] = 32 * MIB
    assert new(known, card) == {f"allocations {CARD}": {"mapping without access at 0x8000": 32 * MIB}}


def test_a_card_that_shrank_is_to_be_read_again_so_that_growth_shows(card: FakeCard, known: DeviceMemory) -> None:
    card.created = 128 * MIB
    known.adopt(card.now(), [CARD], {})
    assert not known.has_shrunk(CARD, card.now())
    card.created = 0
    assert known.has_shrunk(CARD, card.now())


def test_allocations_of_an_owner_are_adopted_by_name_and_blocks_stay_as_they_were(
    card: FakeCard, known: DeviceMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    card.listed[0x1000] = MIB
    monkeypatch.setattr(
        cards, "unexplained_blocks", lambda index, claimed: UnexplainedBlocks({0x7000: 512}, {}, {}, {})
    )
    assert known.adopt_allocations(card.now(), CARD) == {"allocation at 0x1000": MIB}
    assert new(known, card) == {f"native {CARD}": {"block at 0x7000": 512}}


def test_allocations_that_a_library_keeps_can_be_forgotten(card: FakeCard, known: DeviceMemory) -> None:
    card.listed |= {0x1000: 64 * MIB, 0x9000: 64 * MIB}
    known.forget_allocations(CARD, ["allocation at 0x1000"])
    assert new(known, card) == {f"allocations {CARD}": {"allocation at 0x9000": 64 * MIB}}


def test_without_a_figure_of_the_driver_s_its_list_is_all_there_is(card: FakeCard) -> None:
    blind = Counters({}, {f"driver {CARD}": None, f"reserved {CARD}": 0}, {})
    known = DeviceMemory(driver=True)
    known.adopt(blind, [CARD], {})
    card.created, card.listed[0x1000] = 128 * MIB, MIB
    assert known.new_items(blind, [CARD], {}, NOTHING_KNOWN)[f"allocations {CARD}"] == {"allocation at 0x1000": MIB}
    assert f"unlisted {CARD}" not in known.new_items(blind, [CARD], {}, NOTHING_KNOWN)


def test_a_card_that_was_forgotten_is_to_be_read_again(card: FakeCard, known: DeviceMemory) -> None:
    card.created = 128 * MIB
    known.forget()
    assert not known.knows(CARD)
    known.adopt(card.now(), [CARD], {})
    assert new(known, card) == {}


def test_one_judgement_lists_a_card_once_as_long_as_its_figures_stay(card: FakeCard, known: DeviceMemory) -> None:
    card.listed[0x1000] = 64 * MIB
    lists = card.lists
    assert new(known, card) == new(known, card) == {f"allocations {CARD}": {"allocation at 0x1000": 64 * MIB}}
    assert card.lists == lists + 1
    known.adopt(card.now(), [CARD], {})
    assert card.lists == lists + 1
    assert new(known, card) == {}
    assert card.lists == lists + 2


def test_what_went_in_a_judgement_is_not_reported_of_an_old_list(card: FakeCard, known: DeviceMemory) -> None:
    card.listed |= {0x1000: 64 * MIB, 0x5000: 512}
    assert len(new(known, card)[f"allocations {CARD}"]) == 2
    now = card.now()
    del card.listed[0x5000]
    # So small a part of the driver's step does not show in its figure.
    found = known.new_items(now, [CARD], {}, NOTHING_KNOWN)
    assert found[f"allocations {CARD}"] == {"allocation at 0x1000": 64 * MIB}


def test_what_went_in_a_judgement_is_left_out_without_another_list(card: FakeCard, known: DeviceMemory) -> None:
    card.listed |= {0x1000: 64 * MIB, 0x5000: 32 * MIB}
    lists = card.lists
    assert len(new(known, card)[f"allocations {CARD}"]) == 2
    del card.listed[0x5000]
    assert new(known, card) == {f"allocations {CARD}": {"allocation at 0x1000": 64 * MIB}}
    # What a pool of the driver keeps of it is counted with the pool.
    del card.listed[0x1000]
    card.idle_pool = 64 * MIB
    assert new(known, card) == {}
    assert card.lists == lists + 1


# Only of what the driver lists as much may go as comes: of the rest there are the figures alone.
@pytest.mark.parametrize(
    ("gone", "is_listed"), [(0, True), (2 * MIB, True), (64 * MIB, True), (2 * MIB, False), (96 * MIB, False)]
)
def test_what_came_in_a_judgement_is_seen_whatever_went_with_it(
    card: FakeCard, known: DeviceMemory, gone: int, is_listed: bool
) -> None:
    card.listed |= {0x1000: 64 * MIB, 0x5000: gone}
    card.context += 128 * MIB
    assert "allocation at 0x1000" in new(known, card)[f"allocations {CARD}"]
    if is_listed:
        del card.listed[0x5000]
    else:
        card.context -= gone
    card.listed[0x9000] = 64 * MIB
    assert "allocation at 0x9000" in new(known, card)[f"allocations {CARD}"]


def test_what_came_in_a_judgement_is_seen_by_the_figures(card: FakeCard, known: DeviceMemory) -> None:
    card.listed[0x1000] = 64 * MIB
    assert len(new(known, card)[f"allocations {CARD}"]) == 1
    card.listed[0x9000] = 2 * MIB
    assert len(new(known, card)[f"allocations {CARD}"]) == 2


def test_a_card_that_does_not_list_its_allocations_in_time_is_judged_by_its_count_and_said_not_to_be_measured(
    card: FakeCard, known: DeviceMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert known.lists_allocations(CARD)
    assert known.not_measured == ()

    def never(index: int, **asked: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        card.lists += 1
        raise AllocationsError("the driver had not listed its allocations on cuda:0 after 10 s")

    monkeypatch.setattr(cards, "read_allocations", never)
    card.listed[0x1000] = 128 * MIB
    card.lists = 0
    assert new(known, card) == new(known, card) == {}
    assert card.lists == 1
    assert not known.lists_allocations(CARD)
    assert [item.what for item in known.not_measured] == ["allocations cuda:0"]
    assert "after 10 s" in known.not_measured[0].why


def test_mappings_are_looked_for_once_in_a_judgement_as_long_as_its_figures_stay(
    card: FakeCard, known: DeviceMemory
) -> None:
    card.created, card.mapped = 128 * MIB, {0x9000000: 64 * MIB}
    assert new(known, card) == new(known, card)
    assert card.searches == 1
    card.created += 64 * MIB
    new(known, card)
    assert card.searches == 2
    # The next one may have the same figures by other mappings.
    card.created, card.mapped = 0, {}
    known.adopt(card.now(), [CARD], {})
    card.created, card.mapped = 192 * MIB, {0xB000000: 64 * MIB}
    assert "mapping without access at 0xb000000" in new(known, card)[f"allocations {CARD}"]


@pytest.mark.parametrize(("native", "calls"), [(True, ["start", "stop"]), (False, [])])
def test_the_driver_is_recorded_once_and_only_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, *, native: bool, calls: list[str]
) -> None:
    made: list[str] = []
    trace = SimpleNamespace(start=lambda: made.append("start"), stop=lambda: made.append("stop"))
    monkeypatch.setattr(cards, "TRACE", trace)
    memory = DeviceMemory(driver=True, native=native)
    memory.stop()
    for call in (memory.start, memory.start, memory.stop, memory.stop):
        call()
    assert made == calls


def test_why_nothing_is_recorded_of_who_asks_the_driver_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupti", None)
    memory = DeviceMemory(driver=True, native=True)
    assert memory.unrecorded == ()
    memory.start()
    try:
        (missing,) = memory.unrecorded
        assert missing.why.startswith("the extra `cupti` is not there: ")
    finally:
        memory.stop()
    assert memory.unrecorded == ()
