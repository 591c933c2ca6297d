"""Of tensors that were there before a collection those are told that it alone gave back, with their cycle."""

from __future__ import annotations

import gc
import warnings

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.leakcheck.findings.storage_watch import Collected, HostGarbage, StorageWatch, collected_host_memory
from lowtide.probes.memory.tensors import keys_of_each

MIB = 1 << 20


class Request:
    def __init__(self, mib: int) -> None:
        self.data = self
        self.table = torch.zeros(mib * MIB, dtype=torch.uint8)


def before(*requests: Request, least: int = MIB) -> Collected:
    found = Collected.before([request.table for request in requests], least)
    assert found is not None
    return found


def test_what_the_collector_alone_gives_back_is_told() -> None:
    kept, dropped = Request(2), Request(4)
    collected = before(kept, dropped)
    del dropped
    assert collected.finding("call") is None
    gc.collect()
    finding = collected.finding("call")
    assert finding is not None
    assert (finding.bytes, finding.count, finding.holder) == (4 * MIB, 1, "Request.data")
    del kept


def test_what_is_let_go_meanwhile_is_not_told() -> None:
    held = Request(4)
    held.data = None  # type: ignore[assignment]
    collected = before(held)
    with collected.released():
        del held
    gc.collect()
    assert collected.finding("call") is None


def test_what_is_less_than_a_limit_is_not_looked_at() -> None:
    kept = Request(1)
    assert Collected.before([kept.table], 2 * MIB) is None
    assert Collected.before([kept.table], MIB) is not None


def test_a_compilers_stand_in_is_not_asked_for_its_storage() -> None:
    real = torch.zeros(MIB)
    with FakeTensorMode():
        fake = torch.zeros(MIB)
    keys = [key for of_each in keys_of_each([real, fake]) for key in of_each]
    with warnings.catch_warnings():
        # Torch warns who asks one, and it would be the program's warning.
        warnings.simplefilter("error")
        watch = StorageWatch(keys, [fake, fake.untyped_storage(), real])
    assert (len(keys), watch.all_gone) == (1, False)
    del real
    assert watch.all_gone


class Message:
    def __init__(self, mib: int) -> None:
        self.data: dict[str, object] = {"request": self, "audio": bytearray(mib * MIB)}


class Living:
    def __init__(self, mib: int) -> None:
        self.parts: list[object] = [self, bytearray(mib * MIB)]


def test_host_memory_that_the_collector_alone_gives_back_is_told() -> None:
    gc.collect()
    # In a cycle, too, and held.
    kept = Living(8)
    Message(4)
    finding = collected_host_memory("call", MIB)
    assert finding is not None
    assert (finding.resource, finding.cause, finding.holder) == ("host-memory", "cycle", "Message.data")
    # What else was allocated meanwhile is in it.
    assert abs(finding.bytes - 4 * MIB) < MIB // 4
    assert finding.message.startswith(
        "4.0 MiB of host memory came back only when the collector ran, in a cycle through"
    )
    assert len(kept.parts) == 2


def test_host_memory_that_stays_or_goes_by_itself_is_not_told() -> None:
    gc.collect()
    kept = Message(8)
    Message(8).data.clear()
    assert collected_host_memory("call", MIB) is None
    del kept
    assert collected_host_memory("call", 16 * MIB) is None


def test_garbage_is_looked_for_where_malloc_gives_out_more_and_more() -> None:
    gc.collect()
    garbage = HostGarbage("turns", 4 * MIB)
    kept = []
    for turn in range(3):
        garbage.look(turn)
        kept.append(bytearray(3 * MIB))
    assert garbage.found is None
    for turn in range(3, 7):
        Message(3)
        garbage.look(turn)
    assert garbage.found is not None
    assert " came back only when the collector ran after " in garbage.found.message
    assert garbage.found.holder == "Message.data"
    assert garbage.found.bytes < len(kept) * 4 * MIB
