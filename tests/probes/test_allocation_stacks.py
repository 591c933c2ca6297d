"""Allocation stacks: parsing of a card's blocks, the CPU's dispatch mode and what it leaves alone, and a real card."""

from __future__ import annotations

import copy
import gc
import io
import os
import subprocess
import sys
import sysconfig
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    _get_current_dispatch_mode_stack,
    is_in_torch_dispatch_mode,
)

from lowtide.probes import allocation_stacks as module
from lowtide.probes import originals
from lowtide.probes.allocation_stacks import AllocationStacks
from lowtide.probes.device.allocation_history import MOST_EVENTS, history_of_program, parse_peak, parse_stacks
from lowtide.probes.memory.stack_frames import StackFrame, allocating_function, telling_frames
from tests.loaded_modules import load_instead

needs_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm card; torch sees none")

FILE = __file__
SITE = "/venv/lib/python3.12/site-packages"
STDLIB = sysconfig.get_path("stdlib")


# What a card's blocks say.


def frame(name: str, file: str = "/work/engine.py", line: int = 7) -> dict[str, Any]:
    return {"filename": file, "line": line, "name": name}


def block(address: int, size: int, *frames: dict[str, Any], state: str = "active_allocated") -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": size, "state": state, "frames": list(frames)}


def segment(*blocks: dict[str, Any], device: int = 0) -> dict[str, Any]:
    return {
        "device": device,
        "address": blocks[0]["address"],
        "total_size": sum(part["size"] for part in blocks),
        "blocks": list(blocks),
        "frames": [frame("of_the_segment")],
    }


def names(stack: tuple[StackFrame, ...] | None) -> list[str] | None:
    """The functions of a stack without what they are defined in."""
    return None if stack is None else [one.function.rpartition(".")[2] for one in stack]


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        (999, None),
        (1000, ["first"]),
        (1099, ["first"]),
        (1100, ["second"]),
        (1199, ["second"]),
        (1200, None),
        (1300, None),
        (1400, None),
        (1500, ["waiting"]),
    ],
    ids=["before", "start", "end", "next", "next-end", "free", "unrecorded", "no-frames", "waiting"],
)
def test_an_address_belongs_to_the_block_in_use_around_it(address: int, expected: list[str] | None) -> None:
    unread = block(1400, 100)
    del unread["frames"]
    segments = [
        segment(block(5000, 100, frame("elsewhere"))),
        segment(
            block(1000, 100, frame("first")),
            block(1100, 100, frame("second")),
            block(1200, 100, frame("freed"), state="inactive"),
            block(1300, 100),
            unread,
            block(1500, 100, frame("waiting"), state="active_pending_free"),
        ),
    ]
    assert names(parse_stacks(segments, 0, [address]).get(address)) == expected


def test_frames_are_kept_as_they_are_the_innermost_first() -> None:
    segments = [segment(block(0, 10, frame("inner", "/a.py", 3), frame("outer", "<string>", 4)))]
    assert parse_stacks(segments, 0, [0]) == {0: (StackFrame("/a.py", 3, "inner"), StackFrame("<string>", 4, "outer"))}


def test_another_device_has_the_same_addresses() -> None:
    segments = [segment(block(0, 10, frame("on_0"))), segment(block(0, 10, frame("on_1")), device=1)]
    assert [names(parse_stacks(segments, index, [5]).get(5)) for index in (0, 1, 2)] == [["on_0"], ["on_1"], None]


def test_all_addresses_in_a_block_have_its_stack() -> None:
    found = parse_stacks([segment(block(0, 10, frame("make")))], 0, {9, 0, 4, 10})
    assert sorted(found) == [0, 4, 9]


@pytest.mark.parametrize(
    "file", ["??", "", "/pytorch/c10/cuda/CUDACachingAllocator.cpp", "/x/libc10.so", "/bin/python3.11"]
)
def test_frames_of_native_code_are_left_out(file: str) -> None:
    segments = [segment(block(0, 10, frame("malloc", file), frame("make")), block(10, 10, frame("malloc", file)))]
    assert {address: names(stack) for address, stack in parse_stacks(segments, 0, [0, 10]).items()} == {0: ["make"]}


def test_a_stack_of_the_card_is_cut_and_without_the_machinery(monkeypatch: pytest.MonkeyPatch) -> None:
    own = [
        str(Path(module.__file__).parents[1] / name) for name in ("probes/a.py", "leakcheck/a.py", "pytest_plugin/a.py")
    ]
    left_out = [*own, *(f"{SITE}/torch/{name}" for name in ("_ops.py", "utils/_python_dispatch.py", "_compile.py"))]
    frames = [frame("hidden", file) for file in left_out]
    shown = [frame(name) for name in ("f", "g", "h")]
    engine = frame("engine", str(Path(module.__file__).parents[1] / "engine/a.py"))
    segments = [segment(block(0, 10, *frames, engine, *shown), block(10, 10, *frames))]
    monkeypatch.setattr(module, "_segments", lambda: segments)
    found = AllocationStacks(depth=3).stacks_at("cuda:0", [0, 10])
    assert {address: names(stack) for address, stack in found.items()} == {0: ["engine", "f", "g"]}


@pytest.mark.parametrize(
    ("device", "expected"), [("cuda:1", ["on_1"]), ("cuda", ["on_0"]), ("cpu", None), ("xpu:1", None)]
)
def test_a_device_is_asked_by_its_name(
    device: str, expected: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    segments = [segment(block(0, 10, frame("on_0"))), segment(block(0, 10, frame("on_1")), device=1)]
    monkeypatch.setattr(module, "_segments", lambda: segments)
    assert names(AllocationStacks().stacks_at(device, [5]).get(5)) == expected


# Whose function it was.


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ([("/work/engine.py", "load")], "load"),
        ([("/work/engine.py", "Engine.load")], "load"),
        ([("/work/engine.py", "test.<locals>.load")], "load"),
        ([("/work/engine.py", "test.<locals>.<lambda>")], "<lambda>"),
        ([("/work/engine.py", "<module>")], "<module>"),
        ([("/work/inner.py", "inner"), ("/work/outer.py", "outer")], "inner"),
        ([(f"{SITE}/vllm/worker.py", "load"), ("/work/test.py", "test")], "test"),
        ([("/usr/lib/python3/dist-packages/x.py", "load"), ("/work/test.py", "test")], "test"),
        ([(f"{Path(torch.__file__).parent}/nn/functional.py", "pad"), ("/work/test.py", "test")], "test"),
        ([(f"{Path(np.__file__).parent}/core.py", "pad"), ("/work/test.py", "test")], "test"),
        ([(f"{STDLIB}/copy.py", "deepcopy"), ("/work/test.py", "test")], "test"),
        ([(f"{STDLIB}-mine/copy.py", "deepcopy"), ("/work/test.py", "test")], "deepcopy"),
        ([("<frozen runpy>", "run"), ("<string>", "<module>"), ("/work/test.py", "test")], "test"),
        ([("/tmp/torchinductor_me/ab/cab.py", "call"), ("/work/test.py", "test")], "test"),
        ([("/inductor/ab/cab.py", "call"), ("/work/test.py", "test")], "test"),
        ([("/work/engine.py", "load.<locals>.<listcomp>"), ("/work/engine.py", "Engine.load")], "load"),
        ([("/work/engine.py", "<dictcomp>"), ("/work/engine.py", "<setcomp>"), ("/work/engine.py", "load")], "load"),
        ([("/work/engine.py", "load.<locals>.<genexpr>"), ("/work/engine.py", "load")], "<genexpr>"),
        ([(f"{SITE}/vllm/worker.py", "load")], ""),
        ([], ""),
    ],
)
def test_the_allocating_function_is_the_innermost_of_no_library(
    frames: list[tuple[str, str]], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/inductor/")
    assert allocating_function([StackFrame(file, 1, name) for file, name in frames]) == expected


def test_a_library_that_is_not_installed_is_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = [StackFrame("/src/numpy/core.py", 1, "pad"), StackFrame("/src/mine/numpy.py", 1, "test")]
    assert allocating_function(stack) == "pad"
    monkeypatch.setattr(np, "__file__", "/src/numpy/__init__.py")
    assert allocating_function(stack) == "test"


@pytest.mark.parametrize(
    ("files", "telling"),
    [
        (["/x/lib/python3.12/site-packages/torch/nn/functional.py", f"{SITE}/vllm/model.py", "/work/serve.py"], [1, 2]),
        (["/opt/conda/lib/python3.11/contextlib.py", "/usr/lib/python3/dist-packages/numpy/core.py", "a.py"], [2]),
        (["<frozen importlib>", "/tmp/torchinductor_me/ab/cd.py", "a.py", f"{SITE}/torchvision/ops.py"], [2, 3]),
        (["fx_generated_0a1b.py", "<eval_with_key>.3", "a.py"], [2]),
        ([f"{SITE}/torch/nn.py", "<ipython-input-3-0a1b>", f"{SITE}/IPython/core/interactiveshell.py"], [1, 2]),
        ([f"{SITE}/torch/nn.py", "<stdin>", "<string>", "<python-input-0>", "<torch_package_0>.a.py"], [1, 2, 3, 4]),
        ([f"{STDLIB}/threading.py", f"{SITE}/torch/nn/modules/module.py"], [0, 1]),
        ([], []),
    ],
)
def test_the_telling_frames_are_not_torchs_or_pythons_wherever_these_are(files: list[str], telling: list[int]) -> None:
    assert telling_frames([StackFrame(file, 1, "f") for file in files]) == telling


def test_what_a_dataclass_has_generated_tells_nothing() -> None:
    stack = [StackFrame("<string>", 2, "__init__"), StackFrame("/work/model.py", 1, "load")]
    assert telling_frames(stack) == [1]


def test_torch_that_is_not_installed_tells_nothing_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__file__", "/src/torch/__init__.py")
    stack = [StackFrame("/src/torch/nn.py", 1, "linear"), StackFrame("/src/mine/torch.py", 1, "forward")]
    assert telling_frames(stack) == [1]


# The CPU's ops.


@pytest.fixture
def stacks() -> Iterator[AllocationStacks]:
    recording = AllocationStacks(card=False, cpu=True)
    recording.start()
    yield recording
    recording.stop()
    assert _get_current_dispatch_mode() is None


def address_of(tensor: torch.Tensor) -> int:
    return torch._C._data_address(tensor)


def stack_of(stacks: AllocationStacks, tensor: torch.Tensor) -> tuple[StackFrame, ...] | None:
    address = address_of(tensor)
    return stacks.stacks_at("cpu", [address]).get(address)


def maker_of(stacks: AllocationStacks, tensor: torch.Tensor) -> str | None:
    """The function of this file that allocated a tensor; None if there is no stack."""
    stack = stack_of(stacks, tensor)
    return None if stack is None else allocating_function(stack)


def planted(size: int = 100) -> torch.Tensor:
    return torch.zeros(size)


def other(size: int = 100) -> torch.Tensor:
    return torch.zeros(size)


def test_the_innermost_frame_is_the_line_that_allocated(stacks: AllocationStacks) -> None:
    tensor = planted()
    stack = stack_of(stacks, tensor)
    assert stack is not None
    assert stack[0] == StackFrame(FILE, planted.__code__.co_firstlineno + 1, "planted")
    assert stack[1].function == "test_the_innermost_frame_is_the_line_that_allocated"
    assert 10 < len(stack) <= 32


def test_a_name_has_those_around_it_where_python_tells(stacks: AllocationStacks) -> None:
    class Engine:
        def load(self) -> torch.Tensor:
            return torch.zeros(10)

    stack = stack_of(stacks, tensor := Engine().load())
    assert stack is not None
    assert stack[0].function.endswith("<locals>.Engine.load" if sys.version_info >= (3, 11) else "load")
    assert allocating_function(stack) == "load"
    del tensor


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_a_stack_is_no_deeper_than_asked_for(depth: int) -> None:
    recording = AllocationStacks(card=False, cpu=True, depth=depth)
    recording.start()
    tensor = planted()
    recording.stop()
    stack = stack_of(recording, tensor)
    assert stack is not None
    assert len(stack) == depth
    assert stack[0].function == "planted"
    recorder: Any = recording._recorder
    assert {len(kept) for kept in recorder._stacks.values()} == {3 * depth}


def rebuilt() -> torch.Tensor:
    file = io.BytesIO()
    torch.save(torch.ones(100), file)
    file.seek(0)
    return torch.load(file)


def gradient() -> torch.Tensor:
    weight = torch.ones(100, requires_grad=True)
    (weight.relu().softmax(0) * 3).sum().backward()
    assert weight.grad is not None
    return weight.grad


def into_an_output() -> torch.Tensor:
    out = torch.empty(0)
    torch.add(torch.ones(100), 1, out=out)
    return out


def grown() -> torch.Tensor:
    return torch.zeros(2).resize_(5000)


def grown_parameter() -> torch.Tensor:
    return nn.Parameter(torch.zeros(2), requires_grad=False).resize_(5000)


def by_an_operator_with_functions() -> torch.Tensor:
    branch = torch.ops.higher_order.cond
    value = torch.ones(9)
    return branch(torch.tensor(True), lambda taken: [(taken + 1,)], lambda other: [(other - 1,)], (value,))[0][0]


def shared() -> torch.Tensor:
    return torch.zeros(100).share_memory_()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value * 2


@pytest.mark.parametrize(
    ("make", "maker"),
    [
        (planted, "planted"),
        (lambda: torch.tensor([1.0, 2.0]), "<lambda>"),
        (lambda: torch.Tensor([1.0, 2.0]), "<lambda>"),
        (lambda: torch.std_mean(torch.ones(9))[1], "<lambda>"),
        (lambda: torch._foreach_add([torch.ones(9), torch.ones(9)], 1)[1], "<lambda>"),
        (lambda: nn.Parameter(torch.ones(9)), "<lambda>"),
        (lambda: nn.Linear(3, 3).weight, "<lambda>"),
        (lambda: Doubled.apply(torch.ones(9)), "forward"),
        (lambda: torch.vmap(lambda row: row * 2)(torch.ones(9, 9)), "<lambda>"),
        (lambda: torch.func.grad(lambda value: (value * value).sum())(torch.ones(9)), "<lambda>"),
        (lambda: torch.ones(9).to(torch.float64), "<lambda>"),
        (
            lambda: torch.UntypedStorage(9) and torch.tensor([], dtype=torch.uint8).set_(torch.UntypedStorage(9)),
            "<lambda>",
        ),
        (into_an_output, "into_an_output"),
        (grown, "grown"),
        (grown_parameter, "grown_parameter"),
        (by_an_operator_with_functions, "by_an_operator_with_functions"),
        (rebuilt, "rebuilt"),
        (shared, "shared"),
        (gradient, "gradient"),
    ],
)
def test_who_allocates_is_known(stacks: AllocationStacks, make: Callable[[], torch.Tensor], maker: str) -> None:
    tensor = make()
    assert maker_of(stacks, tensor) == maker


def test_memory_of_numpy_has_the_stack_that_made_a_tensor_of_it(stacks: AllocationStacks) -> None:
    assert (
        maker_of(stacks, torch.from_numpy(np.zeros(100)))
        == "test_memory_of_numpy_has_the_stack_that_made_a_tensor_of_it"
    )


def test_what_is_not_dispatched_has_no_stack(stacks: AllocationStacks) -> None:
    memory = bytearray(4096)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    assert maker_of(stacks, tensor) is None


@pytest.mark.parametrize(
    "use",
    [
        lambda tensor: tensor[10:],
        lambda tensor: tensor.view(10, 10).t(),
        lambda tensor: tensor.detach(),
        lambda tensor: tensor.add_(1),
        lambda tensor: torch.add(tensor, 1, out=tensor),
        lambda tensor: torch._foreach_add_([tensor], 1),
        lambda tensor: torch.mm(torch.eye(10).to_sparse(), torch.ones(10, 10), out=tensor.view(10, 10)),
        lambda tensor: tensor.unbind(),
        lambda tensor: tensor.numpy(),
        lambda tensor: nn.Parameter(tensor),
        lambda tensor: copy.deepcopy(tensor),
        lambda tensor: torch.as_strided(tensor, (2,), (1,), 5),
        lambda tensor: torch.empty(0).set_(tensor),
        lambda tensor: torch.empty(0).set_(tensor.untyped_storage()),
    ],
)
def test_use_is_no_allocation(stacks: AllocationStacks, use: Callable[[torch.Tensor], object]) -> None:
    tensor = planted()
    used = use(tensor)
    assert maker_of(stacks, tensor) == "planted"
    del used


def test_a_view_has_no_entry_of_its_own(stacks: AllocationStacks) -> None:
    base = planted()
    view = base[10:]
    assert stacks.stacks_at("cpu", [view.data_ptr()]) == {}
    assert maker_of(stacks, view) == "planted"


def test_a_copy_has_its_own_stack(stacks: AllocationStacks) -> None:
    # Until its memory is one that another function had before; which that is, is the allocator's own affair.
    for turn in range(100):
        tensor = planted(10 + 500 * (turn % 10))
        # All alive together, and then none.
        used = set(map(address_of, [other(tensor.numel()) for _ in range(20)]))
        copies = [copy.deepcopy(tensor) for _ in range(20)]
        assert {maker_of(stacks, copied) for copied in copies} == {"test_a_copy_has_its_own_stack"}
        if used & set(map(address_of, copies)):
            return
    pytest.fail("its memory was never one that was used before")


def test_memory_that_is_used_again_has_the_newer_stack(stacks: AllocationStacks) -> None:
    # Several sizes and many times: which memory an allocator gives out again is its own affair.
    for turn in range(400):
        size = 100 << turn % 8
        addresses = {address_of(planted(size)) for _ in range(8)}
        tensors = [tensor for tensor in [other(size) for _ in range(8)] if address_of(tensor) in addresses]
        if tensors:
            break
    assert tensors, "no memory was used again"
    assert {maker_of(stacks, tensor) for tensor in tensors} == {"other"}


def test_addresses_without_a_stack_are_absent(stacks: AllocationStacks) -> None:
    tensor = planted()
    assert list(stacks.stacks_at("cpu", {address_of(tensor), 1, 0})) == [address_of(tensor)]
    assert stacks.stacks_at("cuda:0", [address_of(tensor)]) == {}
    assert stacks.stacks_at("cpu", []) == {}


@pytest.mark.parametrize(
    ("name", "hidden"),
    [
        ("lowtide.probes.x", True),
        ("lowtide.leakcheck.x", True),
        ("lowtide.pytest_plugin.x", True),
        ("lowtide.engine.x", False),
        ("lowtide.probes_of_mine", False),
        (None, False),
        (5, False),
    ],
)
def test_frames_of_the_checker_are_left_out(stacks: AllocationStacks, name: object, hidden: bool) -> None:
    scope: dict[str, Any] = {"planted": planted, "__name__": name}
    exec("def between(): return planted()", scope)
    tensor = scope["between"]()
    stack = names(stack_of(stacks, tensor))
    assert stack is not None
    assert stack[:2] == ["planted", "test_frames_of_the_checker_are_left_out" if hidden else "between"]


def test_what_was_recorded_can_be_read_after_the_end(stacks: AllocationStacks) -> None:
    tensor = planted()
    stacks.stop()
    assert maker_of(stacks, tensor) == "planted"


def test_after_a_pause_nothing_of_before_is_known(stacks: AllocationStacks) -> None:
    tensor = planted()
    stacks.stop()
    unseen = planted()
    stacks.start()
    assert (maker_of(stacks, tensor), maker_of(stacks, unseen)) == (None, None)
    assert maker_of(stacks, other()) == "other"


# What it leaves alone.


def test_nothing_is_kept_alive(stacks: AllocationStacks) -> None:
    class Owner:
        pass

    def allocate() -> tuple[weakref.ref[Owner], torch.Tensor]:
        owner = Owner()
        return weakref.ref(owner), planted()

    gc.disable()
    try:
        owner, tensor = allocate()
        assert owner() is None
        gone = weakref.ref(tensor)
        assert maker_of(stacks, tensor) == "planted"
        del tensor
        assert gone() is None
    finally:
        gc.enable()


def test_no_python_object_is_made_of_a_storage(stacks: AllocationStacks) -> None:
    def storages() -> int:
        return sum(type(item) is torch.UntypedStorage for item in gc.get_objects())

    gc.collect()
    before = storages()
    tensors = [planted() for _ in range(10)]
    views = [tensor[1:] for tensor in tensors]
    assert storages() == before
    del views


def test_the_table_is_bounded_and_the_oldest_go(stacks: AllocationStacks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_ADDRESSES", 8)
    tensors = [planted() for _ in range(50)]
    known = [maker_of(stacks, tensor) is not None for tensor in tensors]
    assert known[-1]
    assert 5 <= sum(known) <= 8
    assert known == sorted(known)


def test_what_was_used_again_is_not_the_oldest(stacks: AllocationStacks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_ADDRESSES", 8)
    memory = np.zeros(100)
    torch.from_numpy(memory)
    kept = [planted() for _ in range(6)]
    again = torch.from_numpy(memory)
    kept += [planted(), planted()]
    assert maker_of(stacks, kept[0]) is None
    assert maker_of(stacks, again) is not None


def test_stacks_are_shared_and_bounded(stacks: AllocationStacks, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder: Any = stacks._recorder
    tensors = [planted() for _ in range(50)]
    assert len({id(recorder._stacks[address_of(tensor)]) for tensor in tensors}) == 1
    monkeypatch.setattr(module, "_MOST_STACKS", 3)
    for at in range(20):
        scope: dict[str, Any] = {"planted": planted}
        exec("\n" * at + "def between(): return planted()", scope)
        tensors.append(scope["between"]())
    assert len(recorder._shared) <= 4
    assert {maker_of(stacks, tensor) for tensor in tensors} == {"planted"}


def test_off_means_no_mode() -> None:
    recording = AllocationStacks(card=False)
    recording.start()
    tensor = planted()
    assert _get_current_dispatch_mode() is None
    assert recording.stacks_at("cpu", [address_of(tensor)]) == {}
    recording.stop()


def test_started_twice_it_is_one_mode_and_stopped_twice_none() -> None:
    recording = AllocationStacks(card=False, cpu=True)
    recording.stop()
    recording.start()
    recording.start()
    assert len(_get_current_dispatch_mode_stack()) == 1
    assert not is_in_torch_dispatch_mode()
    recording.stop()
    recording.stop()
    assert _get_current_dispatch_mode_stack() == []


class Listening(TorchDispatchMode):
    """A mode of the program, which notes the ops that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_mode_of_the_program_stays_as_it_is() -> None:
    recording = AllocationStacks(card=False, cpu=True)
    with Listening() as below:
        recording.start()
        with Listening() as above, Listening() as top:
            tensor = planted()
            recording.stop()
            assert _get_current_dispatch_mode_stack() == [below, above, top]
            torch.ones(3)
        assert _get_current_dispatch_mode_stack() == [below]
    assert _get_current_dispatch_mode_stack() == []
    assert below.seen == above.seen == top.seen == ["aten.zeros.default", "aten.ones.default"]
    stack = stack_of(recording, tensor)
    assert stack is not None
    assert {one.function.rpartition(".")[2] for one in stack[:3]} == {"__torch_dispatch__", "planted"}


def test_a_function_mode_of_the_program_sees_nothing_of_it(stacks: AllocationStacks) -> None:
    class Seeing(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen: list[Any] = []
    with Seeing():
        tensor = torch.zeros(3)
        tensor.add_(1)
        assert seen == [torch.zeros, torch.Tensor.add_]
        # Its ops begin below all function modes, so the recorder's own calls would not.
        torch.UntypedStorage(40).copy_(torch.UntypedStorage(40))
    assert not [func for func in seen if func.__name__ == "__get__"]
    assert maker_of(stacks, tensor) is not None


class Wrapped(torch.Tensor):
    """A subclass that holds another tensor, and allocates in its own dispatcher."""

    inner: torch.Tensor
    calls: list[str] = []  # noqa: RUF012 - of all instances

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Wrapped.calls.append(str(func))
        result = func(*(arg.inner if isinstance(arg, Wrapped) else arg for arg in args), **(kwargs or {}))
        return Wrapped(result) if isinstance(result, torch.Tensor) else result


class Touchy(torch.Tensor):
    """A subclass whose code is not to be run."""

    @property
    def is_cpu(self) -> bool:
        raise AssertionError


def test_a_subclass_that_a_mode_below_makes_is_asked_nothing() -> None:
    class Making(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {})).as_subclass(Touchy)

    recording = AllocationStacks(card=False, cpu=True)
    with Making():
        recording.start()
        assert type(torch.zeros(3)) is Touchy
        recording.stop()


def test_what_a_subclass_allocates_in_its_dispatcher_is_seen(stacks: AllocationStacks) -> None:
    Wrapped.calls.clear()
    result: Any = Wrapped(torch.ones(100)) + 1
    assert type(result) is Wrapped
    assert maker_of(stacks, result.inner) == "__torch_dispatch__"
    assert Wrapped.calls == ["aten.add.Tensor"]


@pytest.mark.parametrize("where", ["below", "above"])
def test_a_mode_of_the_program_sees_a_subclass_as_without(where: str) -> None:
    recording = AllocationStacks(card=False, cpu=True)
    wrapped = Wrapped(torch.ones(100))
    Wrapped.calls.clear()
    if where == "above":
        recording.start()
    with Listening() as listening:
        recording.start()
        result = wrapped + 1
        recording.stop()
    assert type(result) is Wrapped
    assert Wrapped.calls == ["aten.add.Tensor"]
    assert listening.seen[0] == "aten.add.Tensor"
    assert _get_current_dispatch_mode() is None


class Named(torch.Tensor):
    """A subclass without a dispatcher of its own."""


def copy_on_write() -> torch.Tensor:
    return torch._lazy_clone(torch.zeros(100))


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(3) + 1


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(0),
        lambda: torch.zeros(100)[5:5],
        lambda: torch.zeros(3, device="meta") + 1,
        lambda: torch.zeros(3).to_sparse() * 2,
        lambda: torch.eye(3).to_sparse_csr().to_dense(),
        lambda: torch.ones(3).to_mkldnn().to_dense(),
        lambda: (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged) * 2).to_padded_tensor(
            0
        ),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]) * 2,
        lambda: torch.ones(3).as_subclass(Named) + 1,
        lambda: torch.ones(3, dtype=torch.complex64).conj().imag,
        lambda: torch.func.functionalize(lambda value: value.add_(1))(torch.ones(3)),
        lambda: make_fx(lambda value: value + torch.ones(3))(torch.ones(3)).code,
        lambda: make_fx(lambda value: value + torch.ones(3), tracing_mode="fake")(torch.ones(3)).code,
        copy_on_write,
        fake,
    ],
)
def test_nothing_fails_that_works_without(stacks: AllocationStacks, make: Callable[[], object]) -> None:
    recorded = make()
    stacks.stop()
    without = make()
    assert type(recorded) is type(without)
    assert str(recorded) == str(without)


def test_a_view_of_a_subclass_is_no_allocation(stacks: AllocationStacks) -> None:
    tensor = planted().as_subclass(Named)
    view = tensor[0:50]
    assert maker_of(stacks, tensor) == "planted"
    del view


def test_a_copy_on_write_is_not_carried_out(stacks: AllocationStacks) -> None:
    tensor = copy_on_write()
    again = torch._lazy_clone(tensor)
    assert torch._C._is_cow_tensor(tensor)
    assert torch._C._is_cow_tensor(again)


def test_tensors_can_be_swapped(stacks: AllocationStacks) -> None:
    first, second = torch.zeros(3), torch.zeros(5)
    torch.utils.swap_tensors(first, second)
    assert len(first) == 5


def test_gradients_are_on_and_off_as_without(stacks: AllocationStacks) -> None:
    weight = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        assert not (weight * 2).requires_grad
    with torch.inference_mode():
        assert (weight * 2).is_inference()
    assert (weight * 2).requires_grad
    assert gradient().shape == (100,)


def test_an_error_of_the_op_passes_unchanged(stacks: AllocationStacks) -> None:
    class OurOwnError(Exception):
        pass

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            raise error

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> None:
            pass

    error = OurOwnError()
    with pytest.raises(OurOwnError) as caught:
        Failing.apply(torch.ones(3))
    assert caught.value is error
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        torch.mm(torch.ones(2, 3), torch.ones(2, 3))
    assert maker_of(stacks, planted()) == "planted"


@pytest.mark.parametrize("step", ["_walk", "_fresh_addresses", "_tensors", "_address"])
@pytest.mark.parametrize("error", [RuntimeError, TypeError, KeyError, MemoryError])
def test_an_error_in_recording_fails_no_op(
    stacks: AllocationStacks, step: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(stacks._recorder, step, fail)
    assert torch.add(torch.ones(3), 1).tolist() == [2.0, 2.0, 2.0]


def test_the_programs_own_alarm_is_not_lost(stacks: AllocationStacks, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(stacks._recorder, "_walk", fail)
    with pytest.raises(TimeoutError):
        torch.zeros(3)


def test_a_thread_is_watched_once_it_has_started_it(stacks: AllocationStacks) -> None:
    found: list[str | None] = []

    def run() -> None:
        found.append(maker_of(stacks, planted(7777)))
        stacks.start()
        found.append(maker_of(stacks, planted(8888)))
        found.append(maker_of(stacks, torch.vmap(lambda row: row * 2)(torch.ones(9, 9))))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [None, "planted", "<lambda>"]


def test_stopped_elsewhere_it_records_nothing_and_comes_off_later(stacks: AllocationStacks) -> None:
    thread = threading.Thread(target=stacks.stop)
    thread.start()
    thread.join()
    tensor = planted()
    assert _get_current_dispatch_mode() is not None
    assert maker_of(stacks, tensor) is None
    stacks.stop()
    assert _get_current_dispatch_mode() is None


COMPILE = """
import torch
from lowtide.probes.allocation_stacks import AllocationStacks
from lowtide.probes.memory.stack_frames import allocating_function
import sys
graphs = []

def backend(graph, inputs):
    graphs.append(graph)
    return graph

def straight(x):
    return (x.sin() + 1).cos()

def broken(x):
    for _ in range(3):
        print(end="")  # the frame runs eagerly, and the compiler is asked for every frame below it
        x = x.sin() + 1
    return x

def run():
    torch.compile(straight, backend=backend)(torch.ones(3))
    torch.compile(broken, backend=backend)(torch.ones(3))
    counted = dict(torch._dynamo.utils.counters["frames"]), len(graphs)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    graphs.clear()
    return counted

stacks = AllocationStacks(card=False, cpu=True)
stacks.start()
torch.ones(3)
assert "torch._dynamo" not in sys.modules, "recording has loaded the compiler"
stacks.stop()
without = run()
stacks.start()
assert run() == without, "it does not compile what it does without"
compiled = torch.compile(straight, backend=backend)
stacks.stop()
compiled(torch.ones(3))
stacks.start()
result = compiled(torch.ones(3))
stacks.stop()
compiled(torch.ones(3))
assert len(graphs) == 1, "compiled again"
address = torch._C._data_address(result)
assert stacks.stacks_at("cpu", [address]), "what the eager backend allocates is seen"
"""


def run_python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env={**os.environ, **env}
    )


@pytest.mark.nightly
def test_the_compiler_does_what_it_does_without() -> None:
    done = run_python(COMPILE)
    assert done.returncode == 0, done.stderr


@pytest.mark.nightly
def test_without_torch_nothing_happens_until_it_is_there() -> None:
    done = run_python(
        "import sys\n"
        "from lowtide.probes.allocation_stacks import AllocationStacks\n"
        "stacks = AllocationStacks(cpu=True)\n"
        "stacks.start()\n"
        "assert stacks.stacks_at('cpu', [1]) == stacks.stacks_at('cuda:0', [1]) == {}\n"
        "stacks.stop()\n"
        "assert 'torch' not in sys.modules\n"
        "stacks.start()\n"
        "import torch\n"
        "stacks.start()\n"
        "tensor = torch.zeros(10)\n"
        "assert stacks.stacks_at('cpu', [tensor.data_ptr()])\n"
        "stacks.stop()\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    assert done.returncode == 0, done.stderr


def test_half_way_through_its_import_torch_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(originals, "_OF_TORCH", [])
    monkeypatch.setattr(torch.__spec__, "_initializing", True, raising=False)
    recording = AllocationStacks(cpu=True)
    recording.start()
    assert _get_current_dispatch_mode() is None


# Whose history it is, on a stand-in for torch.


class StandIn:
    """As much of torch as a history needs, and what was done to it."""

    def __init__(self, *, initialized: bool = True, backend: str = "native") -> None:
        self.calls: list[tuple[object, ...]] = []
        self.enabled = False
        self.initialized = initialized
        self.backend = backend
        self.events: list[list[object]] = [[], [object()]]
        self._C = SimpleNamespace(_cuda_isHistoryEnabled=self._is_enabled)
        self.cuda = SimpleNamespace(
            is_initialized=lambda: self.initialized,
            get_allocator_backend=lambda: self.backend,
            memory=SimpleNamespace(_record_memory_history=self._record, _snapshot=self._snapshot),
            _lazy_call=self._lazy_call,
            _queued_calls=[],
            _initialization_lock=threading.Lock(),
        )

    def _is_enabled(self) -> bool:
        assert self.initialized or self.cuda._initialization_lock.locked(), "the allocator is not there yet"
        return self.enabled

    def _record(
        self, enabled: str | None = "all", context: str = "all", stacks: str = "all", max_entries: int = 0
    ) -> None:
        kept = (max_entries,) if max_entries else ()
        self.calls.append((enabled, context, stacks, *kept) if enabled else (None,))
        if self.backend != "native":
            raise RuntimeError
        self.enabled = enabled is not None
        if not self.enabled:
            # Only so does torch forget events.
            self.events = []

    def _snapshot(self) -> dict[str, Any]:
        return {"segments": [], "device_traces": self.events}

    def _lazy_call(self, call: Callable[[], None]) -> None:
        self.cuda._queued_calls.append((call, ["traceback"]))

    def initialize(self) -> None:
        """As `torch.cuda._lazy_init` does it."""
        with self.cuda._initialization_lock:
            for call, _ in self.cuda._queued_calls:
                call()
            self.initialized = True


OURS = ("state", "alloc", "python")
WITH_EVENTS = ("all", "alloc", "python", MOST_EVENTS)


def stand_in(monkeypatch: pytest.MonkeyPatch, *, initialized: bool = True, backend: str = "native") -> StandIn:
    made = StandIn(initialized=initialized, backend=backend)
    load_instead(monkeypatch, "torch", made)
    return made


def test_a_history_is_switched_on_once_and_off_again(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = stand_in(monkeypatch)
    recording = AllocationStacks()
    recording.start()
    recording.start()
    assert torch.calls == [OURS]
    recording.stop()
    recording.stop()
    assert torch.calls == [OURS, (None,)]


@pytest.mark.parametrize("initialized", [True, False])
def test_events_are_kept_from_the_beginning_of_a_peak_to_its_end(
    monkeypatch: pytest.MonkeyPatch, *, initialized: bool
) -> None:
    torch: Any = stand_in(monkeypatch, initialized=initialized)
    recording = AllocationStacks()
    recording.start()
    recording.start_peak()
    torch.initialize()
    assert torch.calls == [OURS, WITH_EVENTS][not initialized :]
    torch.calls.clear()
    assert recording.take_peak(["cuda:0"], lambda _: True) == {"cuda:0": []}
    # Off in between: else torch keeps the events that it has.
    assert torch.calls == [(None,), OURS]
    recording.take_peak([], lambda _: True)
    recording.stop()
    assert torch.calls == [(None,), OURS, (None,)]


def test_a_stop_in_the_middle_of_a_peak_leaves_nothing_on(monkeypatch: pytest.MonkeyPatch) -> None:
    torch: Any = stand_in(monkeypatch)
    recording = AllocationStacks()
    recording.start()
    recording.start_peak()
    torch.events = [[object(), object()]]
    recording.stop()
    assert (torch.calls[-1], torch.enabled) == ((None,), False)


def test_a_history_of_the_program_s_own_is_left_as_it_is_for_a_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    torch: Any = stand_in(monkeypatch)
    torch.cuda.memory._record_memory_history("all")
    recording = AllocationStacks()
    recording.start()
    recording.start_peak()
    recording.take_peak(["cuda:0"], lambda _: True)
    recording.stop()
    assert torch.calls == [("all", "all", "all")]


def event(action: str, address: int, size: int, when: int = 0, *frames: dict[str, Any]) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "time_us": when, "frames": list(frames)}


def test_at_the_peak_is_what_was_allocated_before_it_and_freed_after_it() -> None:
    trace = [
        event("free_requested", 7, 50, 1),
        event("segment_alloc", 1, 1000, 1),
        event("alloc", 1, 100, 2, frame("first"), frame("native", "/c10.cpp")),
        event("alloc", 2, 30, 3, frame("second")),
        event("free_requested", 2, 30, 4),
        event("free_completed", 2, 30, 4),
        event("alloc", 2, 200, 5, frame("third")),
        event("free_requested", 1, 100, 6),
        event("alloc", 1, 60, 7, frame("fourth")),
    ]
    found = parse_peak(trace, lambda when: True)
    assert [(block.bytes, names(block.stack), block.time, block.address, block.is_alive) for block in found] == [
        (100, ["first"], 2, 1, False),
        (200, ["third"], 5, 2, True),
    ]
    # Without what belongs to somebody else, the peak is another one.
    found = parse_peak(trace, lambda when: when not in (2, 5))
    assert [(block.bytes, block.time) for block in found] == [(30, 3)]
    assert parse_peak([], lambda when: True) == []


def test_storages_of_the_cpu_that_were_there_when_there_was_most() -> None:
    recording = AllocationStacks(card=False, cpu=True)
    recording.start()
    try:
        before = torch.ones(4000)
        recording.start_peak()
        small = torch.ones(1000)
        for _ in range(3):
            torch.ones(2000)
        recording.pause_peak(paused=True)
        others = torch.ones(9000)
        recording.pause_peak(paused=False)
        large = torch.ones(5000)
        shown = large[:10]
        del large
        del shown
        after = torch.ones(300)
        found = recording.take_peak(["cpu"], lambda _: True)["cpu"]
        assert [(block.bytes, block.is_alive) for block in found] == [(4000, True), (20000, False)]
        assert names(found[1].stack)[0] == "test_storages_of_the_cpu_that_were_there_when_there_was_most"  # type: ignore[index]
        assert recording.take_peak(["cpu"], lambda _: True) == {}
        del before, small, others, after
    finally:
        recording.stop()


@pytest.mark.parametrize("initialized", [True, False])
def test_what_the_program_switches_on_beside_it_is_told_apart(
    monkeypatch: pytest.MonkeyPatch, *, initialized: bool
) -> None:
    torch: Any = stand_in(monkeypatch, initialized=initialized)
    before = torch.cuda.memory._record_memory_history
    recording = AllocationStacks()
    recording.start()
    torch.initialize()
    assert (torch.calls, history_of_program(torch)) == ([OURS], None)
    torch.cuda.memory._record_memory_history(stacks="python")
    assert (torch.calls[1:], history_of_program(torch)) == ([("all", "all", "python")], "all")
    torch.cuda.memory._record_memory_history(enabled="state")
    assert history_of_program(torch) == "state"
    torch.cuda.memory._record_memory_history(None)
    assert history_of_program(torch) is None
    recording.stop()
    assert torch.cuda.memory._record_memory_history == before


def test_what_the_program_has_switched_on_before_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    torch: Any = stand_in(monkeypatch)
    torch.cuda.memory._record_memory_history("state")
    assert history_of_program(torch) == "all"
    recording = AllocationStacks()
    recording.start()
    assert history_of_program(torch) == "all"
    recording.stop()
    assert torch.calls == [("state", "all", "all")]


def test_without_the_card_it_is_left_off(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = stand_in(monkeypatch)
    recording = AllocationStacks(card=False)
    recording.start()
    recording.stop()
    assert torch.calls == []


def test_the_users_history_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = stand_in(monkeypatch)
    torch.enabled = True
    recording = AllocationStacks()
    recording.start()
    recording.start()
    recording.stop()
    assert (torch.enabled, torch.calls) == (True, [])


def test_what_the_user_switches_on_after_the_end_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = stand_in(monkeypatch)
    recording = AllocationStacks()
    recording.start()
    recording.stop()
    torch.enabled = True
    recording.stop()
    assert torch.enabled


def test_a_history_that_the_user_has_taken_over_stays_on(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = stand_in(monkeypatch)
    recording = AllocationStacks()
    recording.start()
    torch.events = [[], [object(), object()]]
    recording.stop()
    assert (torch.enabled, torch.calls) == (True, [OURS])


def test_switched_off_by_the_user_it_comes_on_with_the_next_start(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = stand_in(monkeypatch)
    recording = AllocationStacks()
    recording.start()
    torch.enabled = False
    recording.start()
    assert torch.calls == [OURS, OURS]
    torch.enabled = False
    recording.stop()
    assert torch.calls == [OURS, OURS]


def test_before_cuda_is_initialized_it_waits_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = stand_in(monkeypatch, initialized=False)
    recording = AllocationStacks()
    recording.start()
    recording.start()
    assert (torch.calls, len(torch.cuda._queued_calls)) == ([], 1)
    torch.initialize()
    assert torch.calls == [OURS]
    recording.start()
    recording.stop()
    assert torch.calls == [OURS, (None,)]
    assert torch.cuda._queued_calls == []


def test_while_it_waits_for_cuda_there_is_nothing_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = stand_in(monkeypatch, initialized=False)
    recording, with_cpu = AllocationStacks(), AllocationStacks(cpu=True)
    assert recording.has_work
    recording.start()
    assert not recording.has_work
    assert with_cpu.has_work
    torch.initialize()
    # The program may switch it off.
    assert recording.has_work
    torch.initialized = False
    recording.stop()
    assert recording.has_work


def test_stopped_before_cuda_is_initialized_it_waits_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = stand_in(monkeypatch, initialized=False)
    users = []
    torch.cuda._lazy_call(lambda: users.append(1))
    recording = AllocationStacks()
    recording.start()
    queued = list(torch.cuda._queued_calls)
    recording.stop()
    assert len(torch.cuda._queued_calls) == 1
    # One that was called already, or is about to be.
    torch.cuda._queued_calls[:] = queued
    torch.initialize()
    assert (torch.calls, users) == ([], [1])


def test_without_a_queue_the_next_start_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = stand_in(monkeypatch, initialized=False)
    del torch.cuda._lazy_call, torch.cuda._queued_calls
    recording = AllocationStacks()
    recording.start()
    torch.initialized = True
    recording.start()
    recording.stop()
    assert torch.calls == [OURS, (None,)]


@pytest.mark.parametrize("backend", ["cudaMallocAsync", "pluggable"])
@pytest.mark.parametrize("initialized", [True, False])
def test_an_allocator_without_a_history_is_left_alone(
    backend: str, initialized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = stand_in(monkeypatch, initialized=initialized, backend=backend)
    recording = AllocationStacks()
    recording.start()
    torch.initialize()
    recording.start()
    recording.stop()
    assert torch.calls == []


@pytest.mark.parametrize("error", [RuntimeError, TypeError, OSError])
def test_what_fails_does_not_fail_the_users_initialization(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    torch = stand_in(monkeypatch, initialized=False)
    torch.cuda.memory._record_memory_history = fail
    recording = AllocationStacks()
    recording.start()
    torch.initialize()
    recording.start()
    recording.stop()
    assert torch.initialized


def test_a_torch_for_the_cpu_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = stand_in(monkeypatch, initialized=False)
    del torch._C._cuda_isHistoryEnabled
    recording = AllocationStacks()
    recording.start()
    assert (torch.calls, torch.cuda._queued_calls) == ([], [])
    recording.stop()


def test_a_forked_child_switches_nothing_off(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = stand_in(monkeypatch)
    recording = AllocationStacks()
    recording.start()
    torch.initialized = False
    recording.stop()
    assert torch.calls == [OURS]


# A real card.


@pytest.fixture
def card() -> Iterator[AllocationStacks]:
    torch.zeros(1, device="cuda")
    torch.cuda.empty_cache()
    # Whoever judges these tests may be recording too.
    torch.cuda.memory._record_memory_history(None)
    recording = AllocationStacks()
    recording.start()
    yield recording
    recording.stop()
    assert not torch._C._cuda_isHistoryEnabled()


def planted_on_card(size: int = 1 << 20) -> torch.Tensor:
    return torch.zeros(size, device="cuda")


@pytest.mark.cuda
@needs_card
def test_a_card_names_the_line_that_allocated(card: AllocationStacks) -> None:
    tensor = planted_on_card()
    address = tensor.data_ptr()
    stack = card.stacks_at("cuda:0", [address])[address]
    assert stack[0] == StackFrame(FILE, planted_on_card.__code__.co_firstlineno + 1, "planted_on_card")
    assert stack[1].function == "test_a_card_names_the_line_that_allocated"
    assert allocating_function(stack) == "planted_on_card"
    assert 10 < len(stack) <= 32


@pytest.mark.cuda
@needs_card
def test_an_address_inside_a_block_is_of_the_block(card: AllocationStacks) -> None:
    tensor = planted_on_card()
    inside, behind = tensor[1000:].data_ptr(), tensor.data_ptr() + tensor.nbytes
    found = card.stacks_at("cuda:0", {inside, behind})
    assert allocating_function(found[inside]) == "planted_on_card"
    assert allocating_function(found.get(behind, ())) != "planted_on_card"


@pytest.mark.cuda
@needs_card
def test_memory_that_was_freed_has_no_stack_and_then_the_newer_one(card: AllocationStacks) -> None:
    tensor = planted_on_card()
    address = tensor.data_ptr()
    del tensor
    assert card.stacks_at("cuda:0", [address]) == {}
    tensor = torch.ones(1 << 20, device="cuda")
    assert tensor.data_ptr() == address
    found = card.stacks_at("cuda:0", [address])
    assert allocating_function(found[address]) == "test_memory_that_was_freed_has_no_stack_and_then_the_newer_one"


@pytest.mark.cuda
@needs_card
def test_what_was_there_before_the_history_has_no_stack(card: AllocationStacks) -> None:
    card.stop()
    before = planted_on_card()
    card.start()
    after = planted_on_card()
    assert list(card.stacks_at("cuda:0", [before.data_ptr(), after.data_ptr()])) == [after.data_ptr()]


@pytest.mark.cuda
@needs_card
def test_both_recorders_work_side_by_side(card: AllocationStacks) -> None:
    both = AllocationStacks(cpu=True)
    both.start()
    on_card, on_cpu = planted_on_card(), planted()
    both.stop()
    assert torch._C._cuda_isHistoryEnabled(), "the other one's"
    stacks = both.stacks_at("cuda:0", [on_card.data_ptr()])
    assert names(stacks[on_card.data_ptr()])[:2] == ["planted_on_card", "test_both_recorders_work_side_by_side"]
    assert list(both.stacks_at("cpu", [on_card.data_ptr(), on_cpu.data_ptr()])) == [on_cpu.data_ptr()]


@pytest.mark.cuda
@needs_card
@pytest.mark.parametrize("kind", ["state", "all"])
def test_a_users_history_is_read_and_left_on(kind: str) -> None:
    torch.zeros(1, device="cuda")
    torch.cuda.memory._record_memory_history(kind, stacks="all")
    try:
        recording = AllocationStacks()
        recording.start()
        tensor = planted_on_card()
        address = tensor.data_ptr()
        stack = recording.stacks_at("cuda:0", [address])[address]
        recording.stop()
        assert stack[0].function == "planted_on_card"
        assert torch._C._cuda_isHistoryEnabled()
    finally:
        torch.cuda.memory._record_memory_history(None)


@pytest.mark.cuda
@needs_card
def test_a_history_of_events_that_the_user_switched_on_since_stays_on() -> None:
    torch.zeros(1, device="cuda")
    recording = AllocationStacks()
    recording.start()
    try:
        torch.cuda.memory._record_memory_history("all")
        tensors = [planted_on_card() for _ in range(3)]
        recording.stop()
        assert torch._C._cuda_isHistoryEnabled()
        del tensors
    finally:
        torch.cuda.memory._record_memory_history(None)


START_FIRST = """
import torch
from lowtide.probes.allocation_stacks import AllocationStacks
stacks = AllocationStacks()
stacks.start()
stacks.start()
assert not torch.cuda.is_initialized()
before = len(torch.cuda._queued_calls)
def first():
    return torch.zeros(1 << 20, device="cuda")
tensor = first()
address = tensor.data_ptr()
found = stacks.stacks_at("cuda:0", [address])
functions = [frame.function for frame in found.get(address, ())]
stacks.stop()
assert len(torch.cuda._queued_calls) == before - 1
print(torch.cuda.get_allocator_backend(), functions)
"""


@pytest.mark.cuda
@needs_card
@pytest.mark.parametrize(
    ("backend", "expected"),
    [("native", "native ['first', '<module>']"), ("cudaMallocAsync", "cudaMallocAsync []")],
)
def test_started_first_it_sees_the_first_allocation(backend: str, expected: str) -> None:
    done = run_python(
        START_FIRST, PYTORCH_CUDA_ALLOC_CONF=f"backend:{backend}", PYTORCH_ALLOC_CONF=f"backend:{backend}"
    )
    assert done.stdout.strip() == expected, done.stderr
