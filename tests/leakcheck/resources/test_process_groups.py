"""Process groups of torch.distributed, as a resource: read, named, and ended by one call."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed

from lowtide.leakcheck.resources import processes as process_groups
from lowtide.leakcheck.resources import read_items
from lowtide.leakcheck.resources.processes import ProcessGroups
from lowtide.probes.host.counters import CounterReader
from tests.waiting import HANG_S


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


distributed: Any = pytest.importorskip("torch.distributed")


class Group:
    """A group whose end waits as long as it is told to."""

    def __init__(self, died_in: list[str], waits: threading.Event) -> None:
        self.died_in, self.waits = died_in, waits

    def __del__(self) -> None:
        self.waits.wait(HANG_S)
        self.died_in.append(threading.current_thread().name)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Torch's own list of groups, whose entries nothing else holds once they are destroyed."""
    world = SimpleNamespace(default_pg=None, pg_names={})
    monkeypatch.setattr(distributed.distributed_c10d, "_world", world)
    monkeypatch.setattr(distributed, "destroy_process_group", lambda group: world.pg_names.clear())
    return world


def test_it_dies_in_the_thread_that_destroys_it(world: SimpleNamespace) -> None:
    died_in: list[str] = []
    no_wait = threading.Event()
    no_wait.set()
    world.pg_names[Group(died_in, no_wait)] = "7"
    (change,) = ProcessGroups().changes(["7"])
    assert not died_in
    change.apply()
    del change
    assert died_in == ["lowtide-remedy"]


def test_one_that_never_ends_is_not_waited_for(world: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_groups, "DESTROY_LIMIT", 0.1)
    died_in: list[str] = []
    ends = threading.Event()
    world.pg_names[Group(died_in, ends)] = "7"
    (change,) = ProcessGroups().changes(["7"])
    with pytest.raises(TimeoutError):
        change.apply()
    del change
    ends.set()
    for thread in threading.enumerate():
        if thread.name == "lowtide-remedy":
            thread.join(HANG_S)
    assert died_in == ["lowtide-remedy"]


def test_one_that_is_gone_is_not_destroyed_again(world: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    no_wait = threading.Event()
    no_wait.set()
    group = Group([], no_wait)
    world.pg_names[group] = "7"
    (change,) = ProcessGroups().changes(["7"])
    destroyed: list[object] = []
    monkeypatch.setattr(distributed, "destroy_process_group", destroyed.append)
    del group
    world.pg_names.clear()
    change.apply()
    assert destroyed == []
