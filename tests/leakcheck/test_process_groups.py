"""Process groups of torch.distributed, as a resource: read, named, and ended by one call."""

from __future__ import annotations

from pathlib import Path

import torch.distributed

from lowtide.leakcheck.resources import read_items
from lowtide.leakcheck.resources.process_groups import ProcessGroups
from lowtide.probes.host.counters import CounterReader


def read() -> dict[str, int]:
    return dict(CounterReader(None, card=False, resources=read_items).read().items["process-groups"])


def test_a_group_is_there_and_gone(tmp_path: Path) -> None:
    groups = ProcessGroups()
    assert read() == groups.read() == {}
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, world_size=1, rank=0)
    try:
        (name,) = read()
        assert groups.describe(name) == f"{name} (gloo, 1 rank)"
        (change,) = groups.changes([name])
        assert (change.code, change.is_code) == ("torch.distributed.destroy_process_group()", True)
    finally:
        change.apply()
    assert read() == {}
    assert groups.describe(name) == name
    assert groups.changes([name]) == []
