"""What is said of an error that memory was not enough: how much was asked for, what there was, and who held it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from lowtide.engine.errors import OutOfMemoryError as OfEngine
from lowtide.leakcheck.findings import out_of_memory as module
from lowtide.leakcheck.findings.out_of_memory import OutOfMemoryWatch, is_out_of_memory
from lowtide.probes.device.torch_allocator import Room, UnexplainedBlocks
from lowtide.probes.heap.births import Births
from lowtide.probes.memory.stack_frames import StackFrame
from lowtide.probes.stages import listening, stage
from lowtide.reports.schema import OutOfMemory

MIB = 1 << 20
GIB = 1 << 30
KEPT: list[Any] = []

OF_CARD = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 1 has a total capacity of 79.11 GiB of which 1.50 GiB is "
    "free. Including non-PyTorch memory, this process has 77.60 GiB memory in use."
)


@pytest.fixture
def births() -> Iterator[Births]:
    births = Births()
    births.start()
    births.mark("first")
    yield births
    births.stop()
    KEPT.clear()


@pytest.fixture
def watch(births: Births) -> OutOfMemoryWatch:
    return OutOfMemoryWatch(births, lambda device, addresses: {}, "before it began")


def raised(call: Callable[[], object]) -> BaseException:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - whatever it is; `pytest.raises` would be in a cycle with it
        return error
    raise AssertionError("nothing was raised")


def read(watch: OutOfMemoryWatch, call: Callable[[], object]) -> OutOfMemory:
    found = watch.read(raised(call))
    assert found is not None
    return found


def floats(mebibytes: int) -> torch.Tensor:
    return torch.zeros(mebibytes, MIB // 4)


def too_much() -> torch.Tensor:
    return torch.empty(1 << 50, dtype=torch.uint8)


@pytest.mark.parametrize(
    "call",
    [
        too_much,
        lambda: bytearray(1 << 62),
        lambda: np.empty(1 << 50),
        lambda: (_ for _ in ()).throw(torch.OutOfMemoryError(OF_CARD)),
        lambda: (_ for _ in ()).throw(OfEngine("no room")),
        lambda: (_ for _ in ()).throw(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")),
        lambda: (_ for _ in ()).throw(RuntimeError("CUDA error: out of memory")),
    ],
)
def test_what_says_that_memory_is_not_enough(call: Callable[[], object]) -> None:
    assert is_out_of_memory(raised(call))


class MuteError(RuntimeError):
    def __str__(self) -> str:
        raise ValueError


@pytest.mark.parametrize(
    "error", [RuntimeError("a shape"), ValueError("out of memory"), MuteError(), KeyboardInterrupt()]
)
def test_other_errors_say_nothing_of_memory(error: BaseException, watch: OutOfMemoryWatch) -> None:
    assert not is_out_of_memory(error)
    assert watch.read(error) is None


def test_the_largest_come_first_with_holder_and_stage(watch: OutOfMemoryWatch, births: Births) -> None:
    def fill() -> None:
        weights = [floats(4) for _ in range(2)]  # noqa: F841
        births.begin("second")
        KEPT.append(floats(5))
        too_much()

    found = read(watch, fill)
    assert (found.device, found.stage, found.asked) == ("cpu", "second", 1 << 50)
    first, second = [each for each in found.held if each.stage in ("first", "second")]
    assert (first.bytes, first.count, first.stage, first.device) == (8 * MIB, 2, "first", "cpu")
    assert str(first.holder).endswith("fill() f_locals['weights']")
    assert (second.bytes, second.stage, second.holder) == (5 * MIB, "second", f"{__name__}.KEPT[0]")
    assert {line.name for line in found.memory} >= {"this process's own", "the machine"}
    assert found.unread == ()


@pytest.mark.nightly
def test_arrays_of_the_host_are_in_it_too(watch: OutOfMemoryWatch) -> None:
    def fill() -> None:
        array = np.ones(6 * MIB // 8)  # noqa: F841
        np.empty(1 << 50)

    found = read(watch, fill)
    # As numpy rounds it.
    assert found.asked == 8 << 50
    assert any(
        (each.resource, each.bytes) == ("host-memory", 6 * MIB) and "f_locals['array']" in str(each.holder)
        for each in found.held
    )


@pytest.mark.nightly
def test_what_is_freed_on_the_way_up_is_known_from_the_stage_that_the_error_left(watch: OutOfMemoryWatch) -> None:
    def create() -> None:
        made = [floats(7)]
        try:
            with stage("load"):
                too_much()
        except RuntimeError as error:
            made.clear()
            raise ValueError("the engine was rolled back") from error

    with listening(watch):
        found = read(watch, create)
    (gone,) = [each for each in found.held if each.bytes == 7 * MIB]
    assert gone.holder is None
    assert gone.message.endswith("; it was freed while the error went up")


@pytest.mark.nightly
def test_a_second_error_is_read_anew_and_a_caught_one_is_forgotten(watch: OutOfMemoryWatch) -> None:
    def caught() -> None:
        made = [floats(7)]
        with pytest.raises(RuntimeError), stage("load"):
            too_much()
        made.clear()
        torch.empty(1 << 51, dtype=torch.uint8)

    with listening(watch):
        found = read(watch, caught)
    assert found.asked == 1 << 51
    assert [each for each in found.held if each.bytes == 7 * MIB] == []


class Holder:
    """Something that can be watched."""


def test_nothing_of_the_program_is_held_afterwards(watch: OutOfMemoryWatch) -> None:
    alive: list[weakref.ref[Holder]] = []

    def fill() -> None:
        holder: Any = Holder()
        alive.append(weakref.ref(holder))
        holder.weights = floats(3)
        with stage("load"):
            too_much()

    gc.collect()
    gc.disable()
    try:
        with listening(watch):
            error: BaseException | None = raised(fill)
            assert error is not None
            found = watch.read(error)
        assert alive[0]() is not None
        error = None
        # Without a collection: not in a cycle either.
        assert alive[0]() is None
    finally:
        gc.enable()
    assert found is not None
    assert any("holder'].weights" in str(each.holder) for each in found.held)


def test_what_cannot_be_read_is_said(watch: OutOfMemoryWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(module, "leaks_of", fails)
    monkeypatch.setattr(module, "_of_host", fails)
    found = read(watch, too_much)
    assert [(each.what, each.why) for each in found.unread] == [
        ("the memory of the host", "MemoryError"),
        ("who holds it", "MemoryError"),
    ]


def test_of_a_card_its_memory_torch_s_and_blocks_that_no_tensor_explains(
    births: Births, monkeypatch: pytest.MonkeyPatch
) -> None:
    stacks = {1: (StackFrame("model.py", 40, "forward"),), 2: (StackFrame("model.py", 40, "forward"),), 3: ()}
    monkeypatch.setattr(module, "read_room", lambda index: Room(70 * GIB, 45 * GIB, 2 * GIB))
    blocks = UnexplainedBlocks({1: 20 * GIB, 2: 10 * GIB, 3: GIB}, {}, {}, {})
    monkeypatch.setattr(module, "unexplained_blocks", lambda index, claimed: blocks)
    watch = OutOfMemoryWatch(births, lambda device, addresses: {each: stacks[each] for each in addresses}, "before")
    found = watch.read(torch.OutOfMemoryError(OF_CARD))
    assert found is not None
    assert (found.device, found.asked) == ("cuda:1", 20 * GIB)
    sizes = {line.name: round(line.bytes / GIB, 2) for line in found.memory}
    assert sizes == {
        "the card": 79.11,
        "free on it": 1.5,
        "torch's": 70,
        "of this in use": 45,
        "of this free": 25,
        "other processes', the driver's and libraries'": 7.61,
    }
    assert "expandable_segments" in found.advice
    first, second = found.held
    assert first.message == "30.0 GiB in 2 blocks that native code holds"
    assert [frame.function for frame in first.allocated_at] == ["forward"]
    assert (second.bytes, second.allocated_at) == (GIB, ())


def test_more_than_all_that_is_free_is_no_fragmentation(births: Births, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "read_room", lambda index: Room(70 * GIB, 69 * GIB, GIB))
    monkeypatch.setattr(module, "unexplained_blocks", lambda index, claimed: None)
    watch = OutOfMemoryWatch(births, lambda device, addresses: {}, "before")
    found = watch.read(torch.OutOfMemoryError(OF_CARD))
    assert found is not None
    assert found.advice == ""
