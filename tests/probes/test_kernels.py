"""The kernels: what they compute, the same in Triton, in plain torch and by the definition, for every size."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lowtide.probes.kernels import fingerprint_version, plain, search_version
from lowtide.probes.kernels.definition import CHAIN, GEOMETRY, GOLDEN, Geometry, RangeTable, finish, key, mix

pytestmark = pytest.mark.nightly

CPU = torch.device("cpu")
SMALL = Geometry(lanes=4, rounds=2)
KEPT_KEYS = ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4", "0xf16952ee72f3454f", "0x377d35dea8e40225"]
KEPT_FINGERPRINT = "0x39962d0b6114f57fb70b957c77a6f527"
ALL_BITS = (1 << 64) - 1
needs_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm card; torch sees none")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, which is not there")


def random_bytes(size: int, seed: int = 0) -> torch.Tensor:
    return torch.tensor(list(random.Random(seed).randbytes(size)), dtype=torch.uint8)


def by_definition(data: bytes, geometry: Geometry) -> tuple[int, int]:
    """The definition read aloud, in Python's numbers."""
    data += bytes(-len(data) % geometry.section)
    words = [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]
    sums = [0, 0]
    for lane in range(len(words) // geometry.rounds):
        section, column = divmod(lane, geometry.lanes)
        first = section * geometry.lanes * geometry.rounds + column
        states = [0, 0]
        for which in (0, 1):
            for turn in range(geometry.rounds):
                keyed = words[first + turn * geometry.lanes] ^ key(which, turn)
                states[which] += (keyed & 0xFFFFFFFF) * (keyed >> 32)
        mixed = mix((states[0] + lane * GOLDEN) & ALL_BITS)
        sums[0] += mixed
        sums[1] += mix((states[1] + mixed * CHAIN) & ALL_BITS)
    return sums[0] & ALL_BITS, sums[1] & ALL_BITS


def test_the_plain_version_is_the_definition_for_every_size_and_offset() -> None:
    data = random_bytes(3 * SMALL.section)
    for offset in (0, 1):
        for size in range(2 * SMALL.section + 10):
            tensor = data[offset : offset + size]
            assert plain.fingerprint_sums([tensor], CPU, SMALL) == [by_definition(bytes(tensor.tolist()), SMALL)], size


@pytest.mark.parametrize("size", [GEOMETRY.section, 33 * GEOMETRY.section + 12345])
def test_the_plain_version_is_the_definition_beyond_one_piece(size: int) -> None:
    data = random_bytes(size)
    assert plain.fingerprint_sums([data], CPU) == [by_definition(bytes(data.tolist()), GEOMETRY)]


def test_the_definition_does_not_drift() -> None:
    """Fingerprints may be kept: a change of these is a change of the format."""
    assert [hex(key(which, turn)) for turn in (0, 15) for which in (0, 1)] == KEPT_KEYS
    (sums,) = plain.fingerprint_sums([torch.arange(200, dtype=torch.uint8)], CPU)
    assert hex(finish(*sums, 200)) == KEPT_FINGERPRINT


def test_no_half_of_a_word_is_zero_under_both_keys_of_a_round() -> None:
    """Otherwise a change of the other half would go unseen."""
    for turn in range(GEOMETRY.rounds):
        first, second = key(0, turn), key(1, turn)
        assert first >> 32 != second >> 32
        assert first & 0xFFFFFFFF != second & 0xFFFFFFFF


def test_the_step_that_mixes_is_undone_by_its_inverse() -> None:
    """A bijection: what differs before differs after."""

    def unshifted(value: int, places: int) -> int:
        result = value
        for _ in range(64 // places):
            result = value ^ (result >> places)
        return result

    def inverse(value: int) -> int:
        value = unshifted(value, 31) * pow(0x94D049BB133111EB, -1, 1 << 64) & ALL_BITS
        value = unshifted(value, 27) * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & ALL_BITS
        return unshifted(value, 30)

    source = random.Random(3)
    for value in (0, 1, ALL_BITS, *(source.getrandbits(64) for _ in range(100))):
        assert inverse(mix(value)) == value


@pytest.fixture(scope="module")
def in_interpreter() -> dict[str, object]:
    """Of Triton's version on the CPU, in a process of its own, the numbers of cases and those that are wrong.

    The variable counts at the first import only.
    """
    script = Path(__file__).with_name("kernels_in_interpreter.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, object] = json.loads(done.stdout)
    return result


@needs_triton
def test_triton_has_the_fingerprints_of_the_plain_version_for_every_size_and_offset(
    in_interpreter: dict[str, object],
) -> None:
    assert in_interpreter["fingerprints"] == [175, []]


@needs_triton
def test_triton_finds_the_words_that_the_plain_version_finds_for_every_size_and_offset(
    in_interpreter: dict[str, object],
) -> None:
    assert in_interpreter["searches"] == [46, []]


def test_on_the_cpu_the_version_of_host_memory_is_used_and_triton_is_not_loaded() -> None:
    code = (
        "import sys, torch; from lowtide.probes.memory.contents import fingerprint; fingerprint(torch.ones(3));"
        "print(*(f'lowtide.probes.kernels.{name}' in sys.modules for name in ('host', 'plain', 'compiled')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False", "False"]


RANGES = RangeTable((0x7F00_0000_0000, 0x7F10_0000_0000), (0x7F00_0001_0000, 0x7F10_0000_0100), misalignment=15)


@pytest.mark.cuda
@needs_card
def test_on_a_card_triton_has_the_fingerprints_of_the_plain_version() -> None:
    device = torch.device("cuda:0")
    data = random_bytes(3 * GEOMETRY.section).to(device)
    sizes = [0, 1, 7, 8, 9, 1000, 65535, 65536, 65537, 131072, 140001]
    tensors = [data[offset : offset + size] for offset in (0, 1, 2, 4, 8) for size in sizes]
    assert fingerprint_version(device)(tensors, device) == plain.fingerprints(tensors, device)
    assert plain.fingerprint_sums(tensors, device) == plain.fingerprint_sums([part.cpu() for part in tensors], CPU)


@pytest.mark.cuda
@needs_card
def test_on_a_card_triton_finds_the_words_that_the_plain_version_finds() -> None:
    device = torch.device("cuda:0")
    words = torch.randint(-(1 << 62), 1 << 62, (100_000,), device=device)
    for place in (0, 1, 8191, 8192, 65535, 99_999):
        words[place] = RANGES.starts[place % 2] + 16 * (place % 7)
    words[500] = RANGES.starts[0] + 3
    data = words.view(torch.uint8)
    dense = torch.full((70_000,), RANGES.starts[1], device=device)
    tensors = [
        words,
        *(data[offset : offset + size] for offset in (0, 3, 8) for size in (0, 7, 8, 65544, 99_999)),
        dense,
    ]
    found = search_version(device)(tensors, device, RANGES, 64)
    assert found == plain.find_words(tensors, device, RANGES, 64)
    assert (found[0].aligned, found[0].unaligned, found[-1].aligned) == (6, 1, 70_000)


@pytest.mark.cuda
@needs_card
def test_on_a_card_more_than_two_to_the_31_words_are_read() -> None:
    device = torch.device("cuda:0")
    words = (1 << 31) + 8193
    free, _ = torch.cuda.mem_get_info()
    if free < words * 8 + (1 << 30):
        pytest.skip("needs 17 GiB of free memory on the card")
    data = torch.zeros(words, dtype=torch.int64, device=device)
    (clean,) = fingerprint_version(device)([data], device)
    data[-1] = RANGES.starts[0]
    assert fingerprint_version(device)([data], device) != [clean]
    (hits,) = search_version(device)([data], device, RANGES, 64)
    assert hits.listed == ((8 * (words - 1), RANGES.starts[0]),)
    del data
    torch.cuda.empty_cache()
