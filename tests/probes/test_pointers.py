"""Pointers: what leads to memory that is gone is found, and what only looks like it is told apart."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowtide.probes.memory.pointers import (
    LabelledRange,
    Moved,
    PointerReading,
    PointerScanError,
    chance_of,
    expected_by_chance,
    find_pointers,
    gone_since,
    moved,
)
from lowtide.probes.memory.ranges import Range, merge

needs_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm card; torch sees none")
GIB = 1 << 30
BASE = 0x7F12_0000_0000
GONE = [
    LabelledRange(BASE + index * 8 * GIB, BASE + index * 8 * GIB + 6 * GIB, f"block {index}") for index in range(20)
]
LIVE = 0x7FAB_0000_0000  # memory that is still there


def scanned(tensor: torch.Tensor, ranges: list[LabelledRange] = GONE) -> PointerReading:
    return find_pointers({"tensor": tensor}, ranges)


def test_a_table_of_dangling_pointers_is_found() -> None:
    (found,) = scanned(torch.tensor([BASE + 512 * index for index in range(100)])).pointers
    assert (found.aligned, found.unaligned, found.noise) == (100, 0, 0)
    assert len(found.hits) == 64
    assert found.hits[2].offset == 16
    assert found.hits[2].value == BASE + 1024
    assert found.hits[2].label == "block 0"


def test_a_table_of_live_pointers_is_clean() -> None:
    assert scanned(torch.tensor([LIVE + 512 * index for index in range(100)])).tensors == ()


def test_one_dangling_pointer_among_live_ones_is_found() -> None:
    table = torch.tensor([LIVE + 512 * index for index in range(1000)])
    table[700] = GONE[3].start + 4096
    (found,) = scanned(table).pointers
    assert [(hit.offset, hit.label) for hit in found.hits] == [(5600, "block 3")]


@pytest.mark.parametrize("size", [1, 100_000])
def test_one_pointer_in_a_buffer_of_small_numbers_is_found(size: int) -> None:
    numbers = torch.arange(size) - size // 2
    assert scanned(numbers).tensors == ()
    numbers[size // 3] = BASE
    assert len(scanned(numbers).pointers) == 1


def test_a_pointer_in_raw_bytes_is_found_wherever_they_begin() -> None:
    raw = torch.zeros(1000, dtype=torch.uint8)
    raw[800:808] = torch.tensor([BASE]).view(torch.uint8)
    (found,) = scanned(raw[3:]).pointers
    assert [hit.offset for hit in found.hits] == [797]
    assert scanned(raw[801:]).tensors == ()


def test_a_pointer_among_packed_sizes_is_found() -> None:
    """What a grouped matrix product takes: addresses beside pairs of 32-bit sizes."""
    packed = torch.tensor([LIVE, 4096 << 32 | 14336, BASE + 64, 127 << 32 | 14337] * 8)
    (found,) = scanned(packed).pointers
    assert (found.aligned, found.noise) == (8, 8)


@pytest.mark.parametrize("distance", [-16, 0, 6 * GIB - 16, 6 * GIB])
def test_a_range_has_its_first_address_and_not_its_last(distance: int) -> None:
    found = scanned(torch.tensor([BASE + distance])).pointers
    assert bool(found) == (0 <= distance < 6 * GIB)


def test_between_ranges_nothing_is_found() -> None:
    assert scanned(torch.tensor([part.stop + 16 for part in GONE])).tensors == ()


def test_thousands_of_ranges_are_distinguished() -> None:
    ranges = [LabelledRange(BASE + 4096 * index, BASE + 4096 * index + 64, str(index)) for index in range(5000)]
    words = torch.tensor([part.start + 16 * (index % 8) for index, part in enumerate(ranges)])
    (found,) = find_pointers({"all": words}, ranges, listed=5000).pointers
    assert [hit.label for hit in found.hits] == [str(index) for index in range(5000) if index % 8 < 4]


def uniform(words: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    low, high = (torch.randint(0, 1 << 32, (words,), generator=generator) for _ in range(2))
    return high << 32 | low


def test_random_data_is_clean() -> None:
    weights = torch.randn(500_000, generator=torch.Generator().manual_seed(6))
    tensors = {
        "bits": uniform(500_000),
        "bfloat16": weights.bfloat16(),
        "float8": weights.to(torch.float8_e4m3fn),
        "int8": (weights * 40).clamp(-127, 127).to(torch.int8),
        "ids": torch.randint(0, 150_000, (500_000,), generator=torch.Generator().manual_seed(7)).int(),
    }
    assert find_pointers(tensors, GONE).pointers == ()


def test_a_word_in_the_ranges_amid_noise_is_doubtful_and_counted() -> None:
    noise = uniform(500_000)
    noise[1000] = BASE + 4096
    reading = scanned(noise)
    assert reading.pointers == ()
    (found,) = reading.by_chance
    assert (found.aligned, [hit.offset for hit in found.hits]) == (1, [8000])
    assert found.expected > 1e-3


def test_many_pointers_amid_noise_are_found() -> None:
    noise = uniform(500_000)
    noise[1000:1100] = BASE + 4096 * torch.arange(100)
    (found,) = scanned(noise).pointers
    assert found.aligned >= 100


def test_saturated_data_that_is_dense_in_the_ranges_is_doubtful() -> None:
    """Bytes that are mostly 0x00, 0x7f and 0x12: hundreds of words in the ranges, aligned and not."""
    choices = torch.tensor([0x00, 0x7F, 0x12, 0x31], dtype=torch.uint8)
    data = choices[torch.randint(0, 4, (800_000,), generator=torch.Generator().manual_seed(8))]
    reading = scanned(data)
    assert reading.pointers == ()
    assert reading.by_chance[0].aligned > 100


def test_pointers_to_odd_places_are_doubtful_and_counted() -> None:
    table = torch.tensor([BASE + 2, BASE + 8, BASE + 18])
    (found,) = scanned(table).by_chance
    assert (found.aligned, found.unaligned, found.hits) == (0, 3, ())
    (found,) = find_pointers({"table": table}, GONE, alignment=2).pointers
    assert (found.aligned, found.unaligned) == (3, 0)


def test_a_few_odd_pointers_do_not_hide_the_others() -> None:
    table = torch.tensor([0] * 100_000 + [BASE + 16 * index for index in range(40)] + [BASE + 2, BASE + 40])
    (found,) = scanned(table).pointers
    assert (found.aligned, found.unaligned) == (40, 2)


def test_all_tensors_are_read_and_named() -> None:
    bad = torch.tensor([BASE])
    reading = find_pointers({"b": bad, "good": torch.zeros(5), "a": bad.clone()}, GONE)
    assert [tensor.name for tensor in reading.pointers] == ["a", "b"]


def test_a_tensor_that_is_not_in_order_in_memory_is_read_as_a_copy() -> None:
    table = torch.zeros(10, 2, dtype=torch.int64)
    table[4, 1] = BASE
    ((hit,),) = (tensor.hits for tensor in scanned(table[:, 1]).pointers)
    assert hit.offset == 32
    assert scanned(table[:, 0]).tensors == ()


def test_a_lazy_copy_is_read_and_stays_one() -> None:
    lazy = torch.tensor([BASE])._lazy_clone()
    assert len(scanned(lazy).pointers) == 1
    assert torch._C._is_cow_tensor(lazy)  # type: ignore[attr-defined]


def test_integers_alone_can_be_asked_for() -> None:
    words = torch.tensor([BASE])
    tensors = {"integers": words, "floats": words.view(torch.float64)}
    assert [tensor.name for tensor in find_pointers(tensors, GONE).pointers] == ["floats", "integers"]
    reading = find_pointers(tensors, GONE, integers_only=True)
    assert [tensor.name for tensor in reading.pointers] == ["integers"]


def test_what_cannot_be_read_is_left_out() -> None:
    reading = find_pointers({"meta": torch.ones(2, device="meta"), "real": torch.tensor([BASE])}, GONE)
    assert [tensor.name for tensor in reading.pointers] == ["real"]


def test_without_ranges_nothing_is_read() -> None:
    assert scanned(torch.tensor([BASE]), []) == PointerReading(())


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ([LabelledRange(64, 64, "empty")], "'empty' is no range"),
        ([LabelledRange(0, 64, "null")], "'null' is no range"),
        ([LabelledRange(64, 1 << 64, "all")], "'all' is no range"),
        ([LabelledRange(64, 128, "a"), LabelledRange(127, 256, "b")], "'a' ends at 0x80, after 'b' begins"),
        ([LabelledRange(512, 1024, "a"), LabelledRange(64, 128, "b")], "sort the ranges"),
    ],
)
def test_bad_ranges_are_refused(ranges: list[LabelledRange], message: str) -> None:
    with pytest.raises(PointerScanError, match=message):
        scanned(torch.zeros(1), ranges)


@pytest.mark.parametrize("alignment", [0, 1, 12])
def test_a_bad_alignment_is_refused(alignment: int) -> None:
    with pytest.raises(PointerScanError, match="power of two"):
        find_pointers({"a": torch.zeros(1)}, GONE, alignment=alignment)


@pytest.mark.parametrize(("count", "expected"), [(1, 1e-9), (1, 0.5), (3, 0.5), (30, 10.0), (5, 4.9)])
def test_the_chance_is_poisson_s(count: int, expected: float) -> None:
    fewer = sum(math.exp(-expected) * expected**k / math.factorial(k) for k in range(count))
    assert chance_of(count, expected) == pytest.approx(1 - fewer, rel=1e-6, abs=1e-16)


def test_no_more_than_expected_is_certain_to_be_chance() -> None:
    assert chance_of(0, 0.0) == chance_of(3, 3.0) == chance_of(2, 5.0) == 1.0
    assert chance_of(1, 0.0) == 0.0


def test_what_chance_gives_grows_with_noise_and_with_unaligned_words() -> None:
    assert expected_by_chance(0, 0, 0, 128 * GIB) < 1e-7
    uniform_noise = expected_by_chance((1 << 27) - 1, 1 << 23, 0, 128 * GIB)
    assert uniform_noise == pytest.approx(64 * 2**27 * 2**37 / 16 / 2**64)
    assert expected_by_chance(1600, 100, 150, 1) == pytest.approx(150 * 101 / 1501, rel=1e-6)


def labelled(*parts: tuple[int, int, str]) -> list[LabelledRange]:
    return [LabelledRange(*part) for part in parts]


def test_what_is_gone_keeps_its_label() -> None:
    before = labelled((100, 200, "a"), (200, 300, "b"), (400, 500, "c"))
    assert list(gone_since(before, [(150, 100), (400, 100)])) == labelled((100, 150, "a"), (250, 300, "b"))
    assert gone_since(before, [(0, 1000)]) == ()
    assert list(gone_since(before, [])) == before


some_parts = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=8)


@given(some_parts, some_parts)
def test_gone_is_the_difference_sorted_and_apart(before: list[Range], now: list[Range]) -> None:
    gone = gone_since([LabelledRange(start, start + size, "") for start, size in before], now)

    def covered(parts: list[Range]) -> set[int]:
        return {byte for address, length in merge(parts) for byte in range(address, address + length)}

    assert covered([(part.start, part.stop - part.start) for part in gone]) == covered(before) - covered(now)
    assert all(left.stop <= right.start for left, right in pairwise(gone))
    assert all(part.start < part.stop for part in gone)


RECORDED = {"input_ids": (0x1000, 0x100), "positions": (0x2000, 0x100)}


def test_buffers_that_are_where_they_were_have_not_moved() -> None:
    live = labelled((0x1000, 0x1100, "input_ids"), (0x2000, 0x2100, "positions"), (0x2000, 0x2010, "a view"))
    assert moved(RECORDED, live) == ()


def test_a_buffer_whose_memory_is_gone_has_moved() -> None:
    live = labelled((0x1000, 0x1080, "input_ids"), (0x2000, 0x2100, "positions"), (0x5000, 0x5100, "input_ids"))
    assert moved(RECORDED, live) == (Moved("input_ids", 0x1000, 0x100, gone=0x80, now=()),)


def test_a_buffer_where_another_lives_now_has_moved() -> None:
    live = labelled((0x0F00, 0x1200, "kv_cache"), (0x2000, 0x2100, "positions"), (0x3000, 0x3100, "input_ids"))
    assert moved(RECORDED, live) == (Moved("input_ids", 0x1000, 0x100, gone=0, now=("kv_cache",)),)


def test_a_buffer_in_memory_of_which_nobody_knows_the_name_has_not_moved() -> None:
    assert moved(RECORDED, labelled((0, 0x9000, ""))) == ()
    assert [item.now for item in moved(RECORDED, labelled((0, 0x9000, ""), (0x1000, 0x1001, "other")))] == [("other",)]


@pytest.mark.cuda
@needs_card
def test_on_a_card_a_table_of_a_freed_block_is_found_and_one_of_a_live_block_is_not() -> None:
    torch.cuda.empty_cache()
    held, freed = (torch.zeros(32 << 20, dtype=torch.uint8, device="cuda") for _ in range(2))
    tables = {
        "of held": torch.tensor([held.data_ptr() + 512 * index for index in range(50)], device="cuda"),
        "of freed": torch.tensor([freed.data_ptr() + 512 * index for index in range(50)], device="cuda"),
    }
    before = [LabelledRange(part.data_ptr(), part.data_ptr() + part.nbytes, name) for name, part in
              (("held", held), ("freed", freed))]  # fmt: skip
    gone = gone_since(before, [(held.data_ptr(), held.nbytes)])
    del freed
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    (found,) = find_pointers(tables, gone).pointers
    assert (found.name, found.aligned, found.hits[0].label) == ("of freed", 50, "freed")
    assert torch.cuda.memory_reserved() == reserved


@pytest.mark.cuda
@needs_card
def test_on_a_card_a_gibibyte_of_random_bits_is_clean() -> None:
    data = torch.empty(1 << 27, dtype=torch.int64, device="cuda").random_()
    data.mul_(2).bitwise_xor_(torch.randint_like(data, 2))
    assert find_pointers({"noise": data}, GONE).pointers == ()
    del data
    torch.cuda.empty_cache()
