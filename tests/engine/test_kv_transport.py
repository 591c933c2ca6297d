"""Memory registered for a peer: announced while it is, locked as far as the system lets it, and gone with `close`."""

from __future__ import annotations

import ctypes
import gc
import re
from pathlib import Path

import pytest

from lowtide.engine import ConfigError, DriverError, EngineConfig, LLMEngine
from lowtide.engine.device_allocator import memory
from lowtide.engine.device_allocator.memory import KVTransport
from lowtide.engine.errors import OutOfMemoryError
from lowtide.engine.pages.cpu import CpuPages
from lowtide.probes.host.counters import anonymous_bytes
from lowtide.probes.host.readings import resident_bytes
from lowtide.probes.stages import PoolReading, announced_pools

MIB = 1 << 20


def transports() -> list[PoolReading]:
    return [pool for pool in announced_pools() if pool.tag == "kv transport"]


def own_bytes() -> int:
    """The process's own memory, without what the C library keeps of what was freed: it would serve the next request."""
    ctypes.CDLL(None).malloc_trim(0)
    return anonymous_bytes()


def locked_bytes() -> int:
    found = re.search(r"VmLck:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found.group(1)) << 10


def test_it_is_resident_announced_and_given_back() -> None:
    before = own_bytes()
    transport = KVTransport(CpuPages(), 32 * MIB - 5)
    (pool,) = transports()
    assert (pool.kind, pool.device, pool.mapped) == ("host", "cpu", 32 * MIB)
    # Not by the process's level: C's heap may have had so much that was free and nobody could give back.
    assert [resident_bytes(*part) for part in pool.ranges] == [32 * MIB]
    transport.close()
    assert transports() == []
    assert own_bytes() - before < 8 * MIB
    transport.close()


def test_it_is_locked_where_the_system_allows_it() -> None:
    before = locked_bytes()
    transport = KVTransport(CpuPages(), 64 << 10)
    assert locked_bytes() - before == 64 << 10
    transport.close()
    assert locked_bytes() == before


def test_dropping_the_object_does_not_deregister_anything() -> None:
    transport = KVTransport(CpuPages(), MIB)
    del transport
    gc.collect()
    assert [pool.mapped for pool in transports()] == [MIB]
    (registration,) = memory._REGISTERED
    registration.close()
    assert transports() == []


class Card(CpuPages):
    """Registers as a card's backend does, and may refuse."""

    def __init__(self) -> None:
        super().__init__()
        self.pins_host_memory = True
        self.pinned: dict[int, int] = {}
        self.refuses = ""

    def pin(self, address: int, size: int) -> None:
        if self.refuses == "pin":
            raise OutOfMemoryError("no more")
        self.pinned[address] = size

    def unpin(self, address: int) -> None:
        if self.refuses == "unpin":
            raise DriverError("busy")
        del self.pinned[address]


def test_on_a_card_it_is_registered_with_the_driver() -> None:
    card = Card()
    transport = KVTransport(card, MIB)
    (pool,) = transports()
    assert (pool.kind, pool.ranges) == ("pinned", tuple(card.pinned.items()))
    transport.close()
    assert card.pinned == {}


def test_what_cannot_be_registered_leaves_nothing() -> None:
    card = Card()
    card.refuses = "pin"
    before = own_bytes()
    with pytest.raises(OutOfMemoryError, match="no more"):
        KVTransport(card, 32 * MIB)
    assert transports() == []
    assert own_bytes() - before < 8 * MIB


def test_what_the_driver_does_not_let_go_stays_and_can_be_tried_again() -> None:
    card = Card()
    transport = KVTransport(card, MIB)
    card.refuses = "unpin"
    with pytest.raises(DriverError, match="busy"):
        transport.close()
    assert len(transports()) == 1
    card.refuses = ""
    transport.close()
    assert transports() == []


def test_an_engine_has_it_from_create_to_shutdown() -> None:
    engine = LLMEngine(EngineConfig(kv_cache_bytes=MIB, kv_transport_bytes=MIB))
    engine.create()
    assert [pool.mapped for pool in transports()] == [MIB]
    engine.shutdown()
    assert transports() == []


def test_an_engine_that_cannot_be_created_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.engine.worker.rotary_table", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        LLMEngine(EngineConfig(kv_cache_bytes=MIB, kv_transport_bytes=MIB)).create()
    assert transports() == []


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_transport_bytes -1 must be a whole number from 0"):
        EngineConfig(kv_transport_bytes=-1)
