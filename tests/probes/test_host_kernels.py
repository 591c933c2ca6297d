"""What reads host memory: XXH3 of the bytes, and the words that the plain version finds, by one thread or several."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch
import xxhash

from lowtide.probes.kernels import host, plain
from lowtide.probes.kernels.definition import RangeTable

CPU = torch.device("cpu")
RANGES = RangeTable((0x1000, 0x7F00_0000_0000, 0x7F10_0000_0000), (0x1100, 0x7F00_0001_0000, 0x7F10_0000_0100), 15)
KEPT = "0xcb0395310643ba0edd97e9af3609d9f5"


def words_with(places: dict[int, int], size: int = 100_000) -> torch.Tensor:
    words = torch.randint(-(1 << 62), 1 << 62, (size,), generator=torch.Generator().manual_seed(0))
    for place, value in places.items():
        words[place] = value
    return words


def test_a_fingerprint_is_xxh3_of_the_bytes_for_every_size_and_offset() -> None:
    data = torch.tensor(list(random.Random(0).randbytes(600)), dtype=torch.uint8)
    for offset in (0, 1, 7):
        tensors = [data[offset : offset + size] for size in range(500)]
        expected = [xxhash.xxh3_128_intdigest(bytes(tensor.tolist())) for tensor in tensors]
        assert host.fingerprints(tensors, CPU) == expected


def test_what_is_kept_is_the_logical_order() -> None:
    data = torch.arange(1000.0).view(10, 100)
    turned, conjugated = data.t(), torch.complex(data, data).conj()
    copies = [turned.contiguous(), conjugated.resolve_conj()]
    assert host.fingerprints([turned, conjugated], CPU) == host.fingerprints(copies, CPU)
    assert host.fingerprints([turned], CPU) != host.fingerprints([data], CPU)


def test_the_fingerprint_does_not_drift() -> None:
    assert [hex(value) for value in host.fingerprints([torch.arange(200, dtype=torch.uint8)], CPU)] == [KEPT]


def test_what_was_read_can_be_resized_as_before() -> None:
    """As engines do that give a weight's memory back and keep the parameter."""
    data = torch.ones(100)
    host.fingerprints([data], CPU)
    host.find_words([data], CPU, RANGES, 4)
    assert data.untyped_storage().resizable()
    data.untyped_storage().resize_(0)


def test_a_tensor_that_is_trained_is_read_and_stays_as_it_is() -> None:
    trained = torch.ones(100, requires_grad=True)
    assert host.fingerprints([trained], CPU) == host.fingerprints([torch.ones(100)], CPU)
    assert trained.requires_grad


@pytest.mark.parametrize("offset", [0, 1, 3, 8, 12])
def test_it_finds_the_words_that_the_plain_version_finds(offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_PIECE", 6)
    # The first and the last address of a range and those beside them; 0 and the largest number wrap round.
    edges = [0, 0xFFF, 0x1000, 0x10F0, 0x10FF, 0x1100, -1, 1 << 62, -(1 << 63)]
    edges += [stop + step for stop in RANGES.starts + RANGES.stops for step in (-16, -1, 0, 1, 16)]
    data = torch.tensor([*edges, *reversed(edges)]).view(torch.uint8)
    for size in range(len(data) - offset + 1):
        tensors = [data[offset : offset + size]]
        assert host.find_words(tensors, CPU, RANGES, 4) == plain.find_words(tensors, CPU, RANGES, 4)


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_several_threads_find_what_one_finds(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    places = {place: RANGES.starts[place % 3] + 16 * (place % 5) for place in (0, 1, 49_999, 50_000, 99_998, 99_999)}
    places[33_333] = RANGES.starts[1] + 3
    words = words_with(places)
    (alone,) = host.find_words([words], CPU, RANGES, 64)
    assert (alone.words, alone.aligned, alone.unaligned) == (100_000, 6, 1)
    assert alone.listed == tuple((8 * place, value) for place, value in sorted(places.items()) if place != 33_333)
    monkeypatch.setattr(host, "_WORTH_THREADS", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert host.find_words([words], CPU, RANGES, 64) == [alone]
    (few,) = host.find_words([words], CPU, RANGES, 2)
    assert few.listed == alone.listed[:2]


def test_several_threads_have_the_fingerprints_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [words_with({0: number}, size=number) for number in range(1, 20)]
    alone = host.fingerprints(tensors, CPU)
    seen = set()
    digest = host._digest

    def watched(data: Any) -> int:
        seen.add(threading.current_thread().name.rpartition("_")[0])
        return digest(data)

    monkeypatch.setattr(host, "_digest", watched)
    monkeypatch.setattr(host, "_WORTH_THREADS", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert host.fingerprints(tensors, CPU) == alone
    assert len(set(alone)) == len(tensors)
    assert seen == {"lowtide-read"}


def test_what_must_be_copied_and_what_must_not_keep_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_WORTH_THREADS", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    data = torch.arange(600.0).view(20, 30)
    tensors = [data, data.t(), data[3:], data[:, 3:], data + 1]
    expected = [host.fingerprints([tensor.contiguous()], CPU)[0] for tensor in tensors]
    assert host.fingerprints(tensors, CPU) == expected
    assert len(set(expected)) == 5


def test_threads_end_with_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_WORTH_THREADS", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    seen: set[str] = set()
    stretch = host._Search._stretch

    def watched(self: host._Search, words: host.Words, first: int, stop: int) -> host._Part:
        seen.add(threading.current_thread().name)
        return stretch(self, words, first, stop)

    monkeypatch.setattr(host._Search, "_stretch", watched)
    before = set(threading.enumerate())
    host.find_words([words_with({})], CPU, RANGES, 64)
    assert {name.rpartition("_")[0] for name in seen} == {"lowtide-read"}
    assert set(threading.enumerate()) == before


def test_a_dense_tensor_is_counted_to_the_last_word_and_listed_as_far_as_asked() -> None:
    dense = torch.full((70_000,), RANGES.starts[1])
    (hits,) = host.find_words([dense], CPU, RANGES, 3)
    assert (hits.words, hits.aligned, hits.unaligned) == (70_000, 70_000, 0)
    assert hits.listed == tuple((8 * place, RANGES.starts[1]) for place in range(3))
