"""Contents: whatever changes is named, and what did not change is not."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.probes.device.allocations import read_allocations
from lowtide.probes.kernels import plain
from lowtide.probes.memory.contents import ContentsError, changed, fingerprint, take_fingerprints

needs_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm card; torch sees none")


Hash = Callable[[torch.Tensor], int]


@pytest.fixture(params=["of the host", "of a card"])
def of(request: pytest.FixtureRequest) -> Hash:
    """What takes fingerprints here, and what takes them on a card."""
    card: Hash = lambda tensor: plain.fingerprints([tensor], torch.device("cpu"))[0]  # noqa: E731
    return fingerprint if request.param == "of the host" else card


def weights(size: int = 200_000, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def test_the_same_bytes_have_the_same_fingerprint(of: Hash) -> None:
    assert of(weights()) == of(weights())


def test_every_single_bit_counts(of: Hash) -> None:
    data = torch.tensor(list(random.Random(1).randbytes(40)), dtype=torch.uint8)
    seen = {of(data)}
    for bit in range(8 * 40):
        flipped = data.clone()
        flipped[bit // 8] ^= 1 << bit % 8
        seen.add(of(flipped))
    assert len(seen) == 8 * 40 + 1


def test_two_flipped_signs_do_not_cancel(of: Hash) -> None:
    data = weights(64)
    seen = {of(data)}
    for first in range(64):
        for second in range(first):
            flipped = data.clone()
            flipped[[first, second]] *= -1
            seen.add(of(flipped))
    assert len(seen) == 64 * 63 // 2 + 1


@pytest.mark.parametrize(("first", "second"), [(0, 1), (0, 2), (1, 2), (0, 1024), (5, 16384 + 5), (7, 150_000)])
def test_swapped_words_count(of: Hash, first: int, second: int) -> None:
    """In one 64-bit word, in neighbouring ones, in one lane, in two sections, far apart."""
    data = weights()
    swapped = data.clone()
    swapped[[first, second]] = swapped[[second, first]]
    assert of(swapped) != of(data)


@pytest.mark.parametrize("words", [1, 1024, 16384, 50_000])
def test_a_block_that_moved_counts(of: Hash, words: int) -> None:
    """By one word, by a round of lanes, by a section, by something else."""
    data = torch.zeros(200_000)
    data[: 1 << 14] = weights(1 << 14)
    assert of(data.roll(words)) != of(data)


def test_zeros_are_not_nothing(of: Hash) -> None:
    seen = {of(torch.zeros(size, dtype=torch.uint8)) for size in [*range(40), 65535, 65536, 65537, 131072]}
    assert len(seen) == 44


def test_a_page_that_came_back_as_zeros_counts(of: Hash) -> None:
    data = weights()
    lost = data.clone()
    lost[4096:5120] = 0
    assert of(lost) != of(data)


def test_only_the_bytes_count(of: Hash) -> None:
    data = weights(1 << 14)  # one whole section
    odd = torch.empty(data.nbytes + 1, dtype=torch.uint8)[1:]
    odd.copy_(data.view(torch.uint8))
    wide = torch.stack([data, -data], 1)
    alike = [
        data.view(torch.int16),
        data.view(128, 128),
        data.view(128, 128).t().contiguous().t(),  # transposed in memory, not in its elements
        odd,  # not at a multiple of 8
        wide[:, 0],  # every second element
        torch.nn.Parameter(data),
        data.view(torch.complex64).conj().resolve_conj().conj(),  # conjugated twice, once of it by a mark only
    ]
    assert {of(tensor) for tensor in alike} == {of(data)}


def test_what_a_mark_alone_changes_counts(of: Hash) -> None:
    data = weights(64).view(torch.complex64)
    assert data.conj().data_ptr() == data.data_ptr()
    assert of(data.conj()) != of(data)
    negated = torch._neg_view(data.imag.contiguous())  # type: ignore[attr-defined]
    assert of(negated) == of(-data.imag)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float8_e4m3fn, torch.bfloat16, torch.complex128, torch.int64])
def test_every_dtype_is_read(of: Hash, dtype: torch.dtype) -> None:
    data = torch.zeros(33, dtype=dtype)
    other = data.clone()
    other[32] = 1
    assert of(data) == of(data.clone())
    assert of(data) != of(other)


def test_a_scalar_and_an_empty_tensor_are_read(of: Hash) -> None:
    assert of(torch.tensor(1.5)) == of(torch.tensor([1.5]))
    assert of(torch.empty(0)) == of(torch.empty(3, 0))


def test_a_tensor_is_described() -> None:
    data = torch.zeros(4, 6, dtype=torch.bfloat16)
    (read,) = take_fingerprints({"kept": data})
    assert (read.name, read.shape, read.dtype, read.device, read.bytes) == ("kept", (4, 6), "bfloat16", "cpu", 48)
    assert read.address == data.data_ptr()
    assert read.fingerprint == fingerprint(data) < 1 << 128


def test_nothing_changed() -> None:
    tensors = {"b": weights(), "a": weights(10, seed=1), "empty": torch.empty(0)}
    before = take_fingerprints(tensors)
    assert [tensor.name for tensor in before] == ["a", "b", "empty"]
    assert sum(tensor.bytes for tensor in before) == 800_040
    assert changed(before, take_fingerprints(tensors)) == []


def test_what_changed_is_named() -> None:
    tensors = {"a": weights(), "b": weights(seed=1), "c": weights(seed=2)}
    before = take_fingerprints(tensors)
    tensors["b"][100_000] += 1
    after = take_fingerprints(tensors)
    assert changed(before, after) == ["b"]


def test_what_is_missing_is_named_and_what_is_new_is_not() -> None:
    before = take_fingerprints({"a": weights(10), "b": weights(10)})
    after = take_fingerprints({"b": weights(10), "c": weights(10)})
    assert changed(before, after) == ["a"]


def test_the_same_bytes_in_another_shape_or_dtype_are_a_change() -> None:
    before = take_fingerprints({"a": torch.zeros(4, 2), "b": torch.zeros(4)})
    after = take_fingerprints({"a": torch.zeros(8), "b": torch.zeros(4, dtype=torch.int32)})
    assert changed(before, after) == ["a", "b"]


def test_another_address_is_no_change() -> None:
    data = weights()
    assert changed(take_fingerprints({"a": data}), take_fingerprints({"a": data.clone()})) == []


def test_no_tensors_no_contents() -> None:
    assert take_fingerprints({}) == ()


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(3)


class Wrapper(torch.Tensor):
    """Says that it is on the CPU, and holds its data elsewhere."""

    @staticmethod
    def __new__(cls: type[Wrapper], data: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype)  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("a probe runs no code of a subclass")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.ones(3, device="meta"), "a stand-in without memory"),
        (fake, "a stand-in without memory"),
        (lambda: torch.eye(3).to_sparse(), "its layout .* is no plain array"),
        (lambda: Wrapper(torch.ones(3)), "no memory of its own"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "its layout .* is no plain array"),
    ],
    ids=["meta", "fake", "sparse", "wrapper", "nested"],
)
def test_what_has_no_plain_memory_is_refused_by_name(make: Any, why: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors say that they are a prototype
        tensor = make()
    with pytest.raises(ContentsError, match=rf"contents of layers\.0 cannot be read: .*{why}.*give"):
        take_fingerprints({"good": torch.ones(2), "layers.0": tensor})


def test_a_lazy_copy_stays_one() -> None:
    data = weights(1000)
    lazy = data._lazy_clone()
    before = torch._C._is_cow_tensor(lazy)  # type: ignore[attr-defined]
    assert fingerprint(lazy) == fingerprint(weights(1000))
    assert take_fingerprints({"lazy": lazy})[0].address == 0
    assert before
    assert torch._C._is_cow_tensor(lazy)  # type: ignore[attr-defined]


def test_reading_changes_nothing() -> None:
    data = weights(5000).requires_grad_()
    version, state = data._version, torch.get_rng_state()
    take_fingerprints({"plain": data, "copied": data[::2]})
    assert data._version == version
    assert torch.equal(torch.get_rng_state(), state)
    assert data.grad_fn is None


def test_no_mode_of_the_process_runs() -> None:
    class Loud(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(f"{func} was seen")

    data = weights(100)
    with Loud():
        fingerprint(data)


def test_another_device_is_a_change() -> None:
    (before,) = take_fingerprints({"a": torch.ones(3)})
    assert changed([before], [msgspec.structs.replace(before, device="cuda:0")]) == ["a"]


@pytest.mark.cuda
@needs_card
def test_of_what_went_to_another_kind_of_device_that_is_reported_and_a_change_on_the_card_is_named() -> None:
    tensors = {"a": weights(), "b": weights(seed=1).view(400, 500).t(), "c": weights(7)}
    on_card = {name: tensor.cuda() for name, tensor in tensors.items()}
    before = take_fingerprints(on_card)
    assert changed(take_fingerprints(tensors), before) == ["a", "b", "c"]
    assert changed(before, take_fingerprints(on_card)) == []
    on_card["b"][3, 5] = 0
    assert changed(before, take_fingerprints(on_card)) == ["b"]


@pytest.mark.cuda
@needs_card
def test_a_card_is_waited_for_once() -> None:
    tensors = {str(index): torch.full((1000 + index,), index, device="cuda") for index in range(20)}
    take_fingerprints(tensors)
    with warnings.catch_warnings(record=True) as waits:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            take_fingerprints(tensors)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert len([wait for wait in waits if "synchronizing CUDA operation" in str(wait.message)]) == 1


@pytest.mark.cuda
@needs_card
def test_on_a_card_nothing_stays_allocated() -> None:
    tensors = {"a": weights().cuda(), "copied": torch.zeros(4000, 4000, device="cuda").t()}
    take_fingerprints(tensors)  # loads the kernels
    torch.cuda.empty_cache()

    def held() -> tuple[object, ...]:
        torch.cuda.synchronize()
        return (
            torch.cuda.memory_allocated(),
            torch.cuda.memory_reserved(),
            len(torch.cuda.memory_snapshot()),
            # Not the card's free memory, which changes with every process on it.
            read_allocations(0),
        )

    before = held()
    take_fingerprints(tensors)
    assert held() == before


@pytest.mark.cuda
@needs_card
def test_what_the_current_stream_still_writes_is_read() -> None:
    data = torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(100_000_000)
        data.fill_(1.0)
        assert fingerprint(data) == fingerprint(torch.ones(1 << 20, device="cuda"))
