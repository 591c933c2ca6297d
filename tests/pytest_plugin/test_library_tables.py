"""What is computed once passes as a first use and is listed: a table, a constant, what a compiled function keeps."""

from __future__ import annotations

import json

import pytest

from tests.pytest_plugin.conftest import InnerRun, RunInner

pytestmark = pytest.mark.nightly

LIBRARY = """
import functools
import torch

@functools.lru_cache(maxsize=8)
def positions(length, dtype=torch.float32):
    return torch.zeros(length, dtype=dtype).view(1, -1)

@functools.lru_cache(maxsize=8)
def positions_of_a_fixture(length):
    return torch.zeros(length)

@functools.lru_cache(maxsize=8)
def anchors(owner, length):
    return torch.zeros(length)
"""

TESTS = """
import functools
import sys
import sysconfig
import types

import pytest
import torch
import torch.distributed.fsdp
import torch.distributed.tensor

tables = types.ModuleType("installed_tables")
tables.__file__ = sysconfig.get_path("purelib") + "/installed_tables.py"
exec(compile(__LIBRARY__, tables.__file__, "exec"), vars(tables))
sys.modules["installed_tables"] = tables


@functools.lru_cache(maxsize=8)
def own_positions(length):
    return torch.zeros(length)


@pytest.fixture(scope="module")
def warm():
    return tables.positions_of_a_fixture(100) is None


def test_table_of_a_fixture(warm):
    tables.positions_of_a_fixture(100)


def test_first():
    assert tables.positions(1000).shape == (1, 1000)


def test_again():
    tables.positions(1000)


def test_more():
    tables.positions(2000)


def test_much_more():
    tables.positions(1 << 16)


@torch.compile(backend="eager")
def compiled(x):
    return (x.sin() * 2).sum()


KEPT = []


def test_compiles():
    compiled(torch.ones(10, requires_grad=True)).backward()


def test_keeps_beside():
    x = torch.ones(11, requires_grad=True)
    compiled(x).backward()
    KEPT.append(x)


def test_model():
    tables.anchors(torch.nn.Linear(8, 8), 100)


@functools.cache
def scale(bits, device="cpu"):
    return torch.tensor(2.0**bits, device=device)


@pytest.mark.parametrize("bits", [4, 8, 6, 4])
def test_memo_of_constants(bits):
    scale(bits)


@functools.cache
def of_request(number):
    return torch.ones(16)


@pytest.mark.parametrize("number", range(15))
def test_memo_that_goes_on(number):
    of_request(number)


class Layer:
    @functools.cache
    def scale(self, bits):
        return torch.tensor(2.0**bits)


def test_memo_of_a_method():
    Layer().scale(4)


def test_large_memo():
    own_positions(1 << 16)


def plan(size):
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    sharded = torch.distributed.tensor.distribute_tensor(
        torch.ones(size, size), mesh, [torch.distributed.tensor.Shard(0)]
    )
    (sharded @ sharded).full_tensor()
    torch.distributed.destroy_process_group()
    return mesh


def test_shards():
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    model = torch.nn.Linear(8, 8)
    torch.distributed.fsdp.fully_shard(model)
    model(torch.ones(2, 8)).sum().backward()
    torch.distributed.destroy_process_group()


def test_plans():
    plan(8)


def test_more_plans():
    plan(16)


def test_keeps_a_mesh():
    KEPT.append(plan(32))
"""


@pytest.fixture(scope="module")
def judged(run_inner: RunInner) -> InnerRun:
    return run_inner({"test_tables.py": TESTS.replace("__LIBRARY__", json.dumps(LIBRARY))})


def test_a_first_table_is_listed_with_its_cache_and_passes(judged: InnerRun) -> None:
    for name in ("table_of_a_fixture", "first", "again"):
        assert judged.is_clean(f"test_tables.py::test_{name}"), judged.out
    (line,) = judged.subject("test_tables.py::test_first").not_measured
    assert line.what == "3.9 KiB in 1 tensor (float32 [1000]) in the cache of installed_tables.positions"
    assert line.why.endswith("; installed_tables.positions.cache_clear() empties it")
    assert not [name for name in judged.blamed if "fixture" in name]


def test_a_first_compilation_is_listed_with_its_function_and_passes(judged: InnerRun) -> None:
    assert judged.is_clean("test_tables.py::test_compiles"), judged.out
    (line,) = judged.subject("test_tables.py::test_compiles").not_measured
    assert line.what.startswith("8 B in 1 tensor (int64 []) in what torch.compile made of compiled, test_tables.py:")


def test_what_the_program_keeps_of_what_it_compiles_fails(judged: InnerRun) -> None:
    holders = {finding.holder for finding in judged.subject("test_tables.py::test_keeps_beside").findings}
    assert holders == {"test_tables.KEPT[0]"}


def test_much_that_a_later_test_adds_fails_with_the_first(judged: InnerRun) -> None:
    assert judged.is_clean("test_tables.py::test_more"), judged.out
    (finding,) = judged.subject("test_tables.py::test_much_more").findings
    assert (finding.resource, finding.cause, finding.bytes) == ("tensors", "lru-cache", 4 << 16)
    assert "its first values came with test_tables.py::test_first" in finding.message


def test_a_memo_of_constants_is_listed_and_passes(judged: InnerRun) -> None:
    for name in ("4_0", "8", "6", "4_1"):
        assert judged.is_clean(f"test_tables.py::test_memo_of_constants[{name}]"), judged.out
    (line,) = judged.subject("test_tables.py::test_memo_of_constants[8]").not_measured
    assert line.what == "4 B in 1 tensor (float32 []) in the cache of test_tables.scale"


def test_a_memo_that_goes_on_is_told_once(judged: InnerRun) -> None:
    names = [f"test_tables.py::test_memo_that_goes_on[{number}]" for number in range(15)]
    assert [name for name in names if not judged.is_clean(name)] == [names[11]]
    (finding,) = judged.subject(names[11]).findings
    assert finding.holder == "test_tables.of_request (lru_cache value)"
    assert "+64 B in each of 12 tests" in finding.message


def test_what_is_no_constant_fails_at_once(judged: InnerRun) -> None:
    for name in ("model", "memo_of_a_method", "large_memo"):
        assert set(judged.leaks(f"test_tables.py::test_{name}")) == {("tensors", "call")}


def test_the_plans_of_dtensor_are_listed_with_the_descriptors_behind_them(judged: InnerRun) -> None:
    for name in ("plans", "more_plans"):
        assert judged.is_clean(f"test_tables.py::test_{name}"), judged.out
        lines = judged.subject(f"test_tables.py::test_{name}").not_measured
        values = next(line for line in lines if "tensor (int32" in line.what)
        descriptors = next(line for line in lines if "file descriptors" in line.what)
        assert "in torch.distributed.tensor._redistribute._planner_cache" in values.what
        assert "torch.distributed.tensor._redistribute.clear_redistribute_planner_cache()" in values.why
        assert "of native code for torch.distributed.tensor._redistribute._planner_cache" in descriptors.what


def test_what_dtensor_keeps_in_cpp_is_listed(judged: InnerRun) -> None:
    assert judged.is_clean("test_tables.py::test_shards"), judged.out
    lines = [line.what for line in judged.subject("test_tables.py::test_shards").not_measured]
    assert any(
        line.endswith("in a torch.distributed.tensor._dtensor_spec.DTensorSpec, held from C++") for line in lines
    )


def test_a_mesh_that_the_program_keeps_fails(judged: InnerRun) -> None:
    holders = {finding.holder for finding in judged.subject("test_tables.py::test_keeps_a_mesh").findings}
    assert "test_tables.KEPT[1]._rank_map" in holders
