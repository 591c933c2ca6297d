"""Host memory by the old tensors that have got it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lowtide.leakcheck.findings.host_memory import with_memory_holder
from lowtide.leakcheck.findings.storage_holders import Context
from lowtide.probes.memory.buffers import large_storages
from tests.leakcheck.findings.test_host_memory import MIB, host

KEPT: dict[str, Any] = {}


@pytest.mark.parametrize(("size", "is_told"), [(11 * MIB, True), (17 * MIB, False)])
def test_a_tensor_with_new_memory_is_named_and_one_that_is_new_is_not(size: int, is_told: bool) -> None:
    KEPT["cache"], KEPT["new"] = torch.empty(1), torch.ones(17 * MIB // 4)
    KEPT["cache"].resize_(11 * MIB // 4)
    finding = with_memory_holder(host(size), Context(born=frozenset([id(KEPT["new"])]))).finding
    assert finding.holder == (f"{__name__}.KEPT['cache']" if is_told else None)
    if is_told:
        assert finding.message.endswith(f"; 11.0 MiB in a torch.Tensor held by {__name__}.KEPT['cache']")
    there = frozenset((id(each.item), each.bytes) for each in large_storages())
    assert with_memory_holder(host(size), Context(old_arrays=there)).finding.holder is None
    KEPT.clear()
