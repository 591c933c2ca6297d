"""Live storages: each byte once, whatever kind of tensor is over it, and no trace of having been read."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.probes.memory.tensors import (
    TensorReading,
    hold_memory,
    keys_of_each,
    survey_storages,
)
from lowtide.probes.objects.listed import frozen_by_program


def reading_of(*objects: object) -> TensorReading:
    return survey_storages(list(objects)).reading


def bytes_in_all() -> int:
    return survey_storages().reading.bytes_on("cpu")


def test_a_tensor_counts_its_whole_storage() -> None:
    assert reading_of(torch.ones(1000)).bytes_on("cpu") == 4000


def test_without_tensors_everything_is_zero() -> None:
    reading = reading_of(object(), [1, 2])
    assert (reading.ranges, reading.unreadable) == ({}, 0)


def test_without_torch_nothing_is_read_and_torch_is_not_loaded() -> None:
    code = (
        "import sys; from lowtide.probes.memory.tensors import survey_storages;"
        "print(len(survey_storages().storages), 'torch' in sys.modules, 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "False", "False"]


def test_views_share_one_storage() -> None:
    whole = torch.ones(1000)
    (storage,) = survey_storages([whole, whole[10:20], whole.view(10, 100).t()]).storages
    assert (storage.tensors, storage.bytes) == (3, 4000)


def test_a_small_view_keeps_and_counts_the_whole_storage() -> None:
    assert reading_of(torch.ones(1000)[990:]).bytes_on("cpu") == 4000


def test_an_empty_view_keeps_and_counts_the_whole_storage() -> None:
    assert reading_of(torch.ones(1000)[5:5]).bytes_on("cpu") == 4000


def test_a_tensor_without_elements_holds_nothing() -> None:
    assert reading_of(torch.empty(0), torch.empty(3, 0)).ranges == {}


def test_a_storage_alone_counts() -> None:
    storage = torch.ones(1000).untyped_storage()
    (reading,) = survey_storages([storage]).storages
    assert (reading.tensors, reading.bytes) == (0, 4000)


def test_a_storage_and_its_tensor_count_once() -> None:
    tensor = torch.ones(1000)
    assert reading_of(tensor, tensor.untyped_storage()).bytes_on("cpu") == 4000


def test_overlapping_memory_of_two_storages_counts_once() -> None:
    buffer = bytearray(1000)
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    first = torch.frombuffer(buffer, dtype=torch.uint8, count=600)
    second = torch.frombuffer(buffer, dtype=torch.uint8, offset=400, count=600)
    survey = survey_storages([first, second])
    assert (len(survey.storages), survey.reading.bytes_on("cpu")) == (2, 1000)
    assert survey.reading.on("cpu") == ((address, 1000),)


def test_parameters_count_like_tensors() -> None:
    assert reading_of(torch.nn.Parameter(torch.ones(10))).bytes_on("cpu") == 40


def test_a_meta_tensor_holds_nothing() -> None:
    assert reading_of(torch.empty(1000, device="meta")).ranges == {}


def test_a_fake_tensor_holds_nothing_whatever_it_says() -> None:
    with FakeTensorMode():
        fake = torch.empty(1000)
    assert reading_of(fake).ranges == {}


@pytest.mark.filterwarnings("ignore:.*quantize")
def test_a_quantized_tensor_counts_its_bytes() -> None:
    codes = torch.quantize_per_tensor(torch.ones(1000), 0.1, 0, torch.qint8)
    assert reading_of(codes).bytes_on("cpu") == 1000


def test_a_sparse_coo_tensor_counts_indices_and_values() -> None:
    sparse = torch.sparse_coo_tensor([[0, 2, 2]], [1.0, 2.0, 3.0], (5,), check_invariants=True)
    assert reading_of(sparse).bytes_on("cpu") == 3 * 8 + 3 * 4


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(
    ("compress", "parts"),
    [
        (lambda dense: dense.to_sparse_csr(), ("crow_indices", "col_indices", "values")),
        (lambda dense: dense.to_sparse_csc(), ("ccol_indices", "row_indices", "values")),
        (lambda dense: dense.to_sparse_bsr((2, 2)), ("crow_indices", "col_indices", "values")),
        (lambda dense: dense.to_sparse_bsc((2, 2)), ("ccol_indices", "row_indices", "values")),
    ],
    ids=["csr", "csc", "bsr", "bsc"],
)
def test_a_compressed_sparse_tensor_counts_its_three_parts(
    compress: Callable[[torch.Tensor], torch.Tensor], parts: tuple[str, ...]
) -> None:
    sparse = compress(torch.eye(4))
    expected = sum(getattr(sparse, part)().untyped_storage().nbytes() for part in parts)
    assert reading_of(sparse).bytes_on("cpu") == expected > 0


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad, lambda run: torch.vmap(torch.vmap(run))])
def test_what_a_transformed_function_keeps_holds_its_memory(transform: Any) -> None:
    kept: list[torch.Tensor] = []

    def run(value: torch.Tensor) -> torch.Tensor:
        kept.append(value * 2)
        return (value * value).sum()

    transform(run)(torch.ones(2, 3, 4))
    survey = survey_storages(kept)
    assert survey.unreadable == 0
    assert [storage.bytes for storage in survey.storages] == [2 * 3 * 4 * 4]
    assert keys_of_each(kept) == [frozenset({(storage.device, storage.address) for storage in survey.storages})]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_counts_its_buffer() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert reading_of(nested).bytes_on("cpu") >= 20
    assert reading_of(nested).unreadable == 0


def test_a_tensor_whose_storage_python_cannot_reach_is_counted_as_unreadable() -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN, whose tensors are the opaque ones")
    reading = reading_of(torch.ones(4).to_mkldnn(), torch.ones(4))
    assert (reading.unreadable, reading.bytes_on("cpu")) == (1, 16)


def test_reading_a_copy_on_write_tensor_does_not_make_the_copy() -> None:
    lazy = torch._lazy_clone(torch.ones(1000))
    storage = lazy.untyped_storage()
    reading = reading_of(lazy, storage)
    assert torch._C._is_cow_tensor(lazy)
    assert reading.unreadable == 1


class Overriding(torch.Tensor):
    """A subclass whose overrides fail the test."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"the subclass's code ran: {func}")


class Wrapper(torch.Tensor):
    """A subclass that only pretends to hold data; its parts do."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"the subclass's code ran: {func}")


def test_a_subclass_counts_and_its_code_does_not_run() -> None:
    tensor = torch.ones(10).as_subclass(Overriding)
    assert reading_of(tensor).bytes_on("cpu") == 40


def test_a_wrapper_subclass_holds_nothing_itself() -> None:
    reading = reading_of(Wrapper(torch.ones(10)))
    assert (reading.ranges, reading.unreadable) == ({}, 0)


def fake(*, requires_grad: bool) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(1000, requires_grad=requires_grad)


def of_a_graph() -> torch.Tensor:
    """Has no element, and its graph has saved a tensor that has."""
    weights = torch.ones(1000, requires_grad=True)
    return (weights * weights)[torch.zeros(0, dtype=torch.long)]


@pytest.mark.parametrize(
    ("made", "holds"),
    [
        (lambda: torch.ones(3), True),
        (lambda: torch.ones(1000)[:0], True),
        (lambda: torch.ones(3).untyped_storage(), True),
        (lambda: torch.eye(3).to_sparse(), True),
        (lambda: torch.ones(3).as_subclass(Overriding), True),
        (lambda: torch._lazy_clone(torch.ones(1000)), True),
        (lambda: torch.ones(4).to_mkldnn() if torch.backends.mkldnn.is_available() else torch.ones(4), True),
        (of_a_graph, True),
        (lambda: torch.empty(0, requires_grad=True), True),
        (lambda: fake(requires_grad=True), True),
        (lambda: fake(requires_grad=False), False),
        (lambda: torch.empty(0), False),
        (lambda: torch.empty(0).untyped_storage(), False),
        (lambda: torch.empty(1000, device="meta"), False),
        (lambda: torch.empty(1000, device="meta").untyped_storage(), False),
        (lambda: Wrapper(torch.ones(10)), False),
    ],
)
def test_what_may_hold_memory_is_distinguished_from_what_cannot(made: Callable[[], Any], holds: bool) -> None:
    assert hold_memory([made()]) == [holds]


def test_to_ask_what_holds_memory_makes_no_copy() -> None:
    lazy = torch._lazy_clone(torch.ones(1000))
    hold_memory([lazy, lazy.untyped_storage()])
    assert torch._C._is_cow_tensor(lazy)


def test_torch_function_modes_do_not_see_the_reading() -> None:
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(f"the mode's code ran: {func}")

    tensor, storage = torch.ones(10), torch.ones(10).untyped_storage()
    with Mode():
        reading = reading_of(tensor, storage)
    assert reading.bytes_on("cpu") == 80


def test_torch_dispatch_modes_do_not_see_the_reading() -> None:
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(f"the mode's code ran: {func}")

    tensor, storage = torch.ones(10), torch.ones(10).untyped_storage()
    with Mode():
        reading = reading_of(tensor, storage)
    assert reading.bytes_on("cpu") == 80


@pytest.mark.filterwarnings("ignore:Sparse")
def test_hooks_on_saved_tensors_do_not_see_the_reading() -> None:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the hook's code ran")

    sparse = torch.eye(4).to_sparse_csr().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, pack):
        reading = reading_of(sparse)
    assert reading.bytes_on("cpu") > 0


def test_a_proxy_is_not_taken_for_its_tensor() -> None:
    tensor = torch.ones(10)
    assert reading_of(weakref.proxy(tensor)).ranges == {}


def test_an_object_that_claims_to_be_a_tensor_is_not_asked() -> None:
    class Liar:
        @property
        def __class__(self) -> type:  # type: ignore[override]
            raise AssertionError("the object's code ran")

    assert reading_of(Liar()).ranges == {}


def test_the_largest_tensor_names_a_storage() -> None:
    tensor = torch.ones(6, 7, dtype=torch.bfloat16)
    (storage,) = survey_storages([tensor[0], tensor, tensor[1]]).storages
    assert (storage.shape, storage.dtype, storage.tensors) == ("6x7", "bfloat16", 3)
    assert (storage.address, storage.bytes, storage.device) == (tensor.data_ptr(), 84, "cpu")


def test_readings_hold_no_live_object() -> None:
    tensor = torch.ones(10)
    watched = weakref.ref(tensor)
    kept = (survey_storages([tensor]).storages, reading_of(tensor))
    del tensor
    assert watched() is None
    assert len(kept[0]) == 1


def test_the_whole_heap_is_read_by_default() -> None:
    before = bytes_in_all()
    held = {"deep": [torch.ones(12_345)]}
    assert bytes_in_all() - before == held["deep"][0].nbytes


@pytest.fixture
def thaw() -> Iterator[None]:
    """Undoes the freezing of a test."""
    assert frozen_by_program(gc.get_freeze_count()) == 0
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("thaw")
def test_tensors_in_a_frozen_heap_are_seen() -> None:
    gc.collect()  # what is garbage when it freezes can be reached no more
    gc.freeze()
    # Without what other tests have left to C alone.
    before = bytes_in_all()
    gc.unfreeze()
    held = {"deep": [torch.ones(12_345)]}
    gc.freeze()
    assert bytes_in_all() - before == held["deep"][0].nbytes


def test_reading_makes_no_python_object_of_a_storage() -> None:
    tensors = [torch.ones(10) for _ in range(20)]
    sparse = torch.sparse_coo_tensor([[0]], [1.0], (5,), check_invariants=True)

    def known() -> int:
        return sum(issubclass(type(item), (torch.UntypedStorage, torch.Tensor)) for item in gc.get_objects())

    before = known()
    survey_storages()
    assert known() == before
    assert len(tensors) + sparse.dim() == 21


def test_reading_leaves_the_gradient_mode_alone() -> None:
    leaf = torch.ones(10, requires_grad=True)
    double = leaf * 2
    version = double._version
    reading_of(leaf, double)
    assert torch.is_grad_enabled()
    assert double._version == version
    double.sum().backward()
    assert torch.equal(leaf.grad, torch.full((10,), 2.0))  # type: ignore[arg-type]
