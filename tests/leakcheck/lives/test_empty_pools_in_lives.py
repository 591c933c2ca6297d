"""Private pools of torch's allocator in which nothing lives after a life, and what no second life could explain."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import torch

from lowtide.leakcheck.findings import empty_pools
from lowtide.leakcheck.judging import ladder
from lowtide.leakcheck.judging.fingerprints import fingerprint
from lowtide.leakcheck.judging.ladder import release
from lowtide.leakcheck.lives import life_reader
from lowtide.leakcheck.lives.lifecycle import LifecycleRun
from lowtide.leakcheck.resources.resource import Rung
from lowtide.probes.device.driver import DriverReading, NoDriver
from lowtide.probes.device.torch_allocator import AllocatorReading, parse_pools
from lowtide.probes.memory.ranges import Range, total
from lowtide.probes.snapshot import Snapshot, take_snapshot
from lowtide.reports.schema import Subject
from lowtide.reports.sizes import format_bytes

pytestmark = pytest.mark.nightly

CARD = "cuda:0"
MIB = 1 << 20


class FakePool:
    """A memory pool, whose memory stays reserved for as long as it is there."""

    def __init__(self, number: int) -> None:
        self.id = (0, number)


class Allocator:
    """Keeps its pools for ever, as an engine that sleeps does."""

    pools: list[Any] = []  # noqa: RUF012 - that it is the class's is the defect


@dataclass
class FakeCard:
    """A card on which segments of pools lie, with nothing in them; and what the driver counts besides."""

    segments: list[tuple[tuple[int, int], int]] = field(default_factory=list)
    besides: int = 600 * MIB

    def reserve(self, number: int, size: int) -> None:
        self.segments.append(((0, number), size))

    def snapshot(self, **kwargs: Any) -> Snapshot:
        found = [
            {
                "device": 0,
                "address": 0x1000_0000 * (place + 1),
                "total_size": size,
                "segment_pool_id": pool,
                "blocks": [{"address": 0x1000_0000 * (place + 1), "size": size, "state": "inactive"}],
            }
            for place, (pool, size) in enumerate(self.segments)
        ]
        reserved = sum(size for _, size in self.segments)
        pools = parse_pools(found, 0, (), ())
        allocator = AllocatorReading(CARD, 0, reserved, pools, 0, True, "")
        driver = DriverReading(CARD, "nvml", reserved + self.besides, None, None, "")
        plain = take_snapshot(driver=NoDriver("a test"))
        return msgspec.structs.replace(plain, allocators=(allocator,), drivers=(driver,))


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCard]:
    fake = FakeCard()
    monkeypatch.setattr(life_reader, "take_snapshot", fake.snapshot)
    monkeypatch.setattr(LifecycleRun, "_open_device", lambda run: None)
    monkeypatch.setattr(torch.cuda, "MemPool", FakePool)
    yield fake
    Allocator.pools.clear()


def lived(create: Callable[[int], None], *, cycles: int = 2, sleep: Sequence[str] = ()) -> Subject:
    class Life:
        turn = 0

        def create(self) -> None:
            Life.turn += 1
            create(Life.turn)

        def infer(self) -> Sequence[Sequence[int]]:
            return [[1]]

        def sleep(self, level: int) -> None:
            """It does."""

        def wake(self) -> None:
            """It does."""

        def shutdown(self) -> None:
            """Nothing is left but on the card."""

    driver = NoDriver("a test")
    script = ("create", "infer", *sleep, "shutdown")
    return LifecycleRun("pools", Life, device=CARD, driver=driver, cycles=cycles, script=script).run()


def not_twice(card: FakeCard) -> Callable[[int], None]:
    def create(turn: int) -> None:
        if turn == 2:
            raise AssertionError("can only be used for one instance per process")
        Allocator.pools.append(FakePool(2))
        for _ in range(3):
            card.reserve(2, 100 * MIB)

    return create


def test_what_an_empty_pool_of_the_first_life_keeps_is_found_where_no_second_begins(card: FakeCard) -> None:
    subject = lived(not_twice(card))
    (finding,) = subject.findings
    assert (finding.resource, finding.bytes, finding.device, finding.stage) == ("reserved", 300 * MIB, CARD, "shutdown")
    assert finding.message.startswith(
        "300.0 MiB reserved on cuda:0 in a private pool of torch's allocator, in which nothing lives, still held"
        " after shutdown (pool (0, 2): 300.0 MiB); the pool is held by "
    )
    assert "Allocator.pools" in (finding.holder or "")
    assert f"let go of {finding.holder} at shutdown" in (finding.advice or "")
    # A life that does not begin shows nothing about one.
    assert finding.trend is None
    assert "create raised AssertionError" in subject.reason


def test_what_pools_keep_in_each_life_is_one_finding_that_grows(card: FakeCard) -> None:
    def create(turn: int) -> None:
        Allocator.pools.append(FakePool(turn))
        card.reserve(turn, 100 * MIB)

    (finding,) = lived(create, cycles=3).findings
    assert (finding.resource, finding.bytes, finding.trend) == ("reserved", 300 * MIB, "growth")
    assert "in 3 private pools" in finding.message


class Graphs:
    """Keeps a pool as well, for another reason."""

    pool: Any = None


def test_pools_of_two_holders_are_two_leaks_each_with_its_holder(card: FakeCard) -> None:
    def create(turn: int) -> None:
        if turn == 1:
            Allocator.pools += [FakePool(2), FakePool(3)]
            Graphs.pool = FakePool(4)
            for number, size in ((2, 300), (3, 200), (4, 20), (5, 8)):
                card.reserve(number, size * MIB)

    try:
        found = lived(create).findings
    finally:
        Graphs.pool = None
    assert [(finding.resource, finding.bytes) for finding in found] == [
        ("reserved", 500 * MIB),
        ("reserved", 20 * MIB),
        ("reserved", 8 * MIB),
    ]
    allocator, graphs, nobody = found
    assert "2 private pools" in allocator.message
    assert "Allocator.pools" in (allocator.holder or "")
    assert "(pool (0, 4): 20.0 MiB); the pool is held by " in graphs.message
    assert "Graphs.pool" in (graphs.holder or "")
    assert f"let go of {graphs.holder} at shutdown" in (graphs.advice or "")
    assert nobody.holder == "pool (0, 5)"
    assert len({finding.fingerprint for finding in found}) == 3


@pytest.mark.parametrize(
    ("mapped", "reported"),
    [
        ((), "; the driver holds none of it: torch counts addresses that no memory is mapped to; the pool is held by "),
        (((0x1000_0000, 30 * MIB), (0x9000_0000, MIB)), "; the driver holds 30.0 MiB of it: torch counts "),
        (((0x1000_0000, 100 * MIB), (0x2000_0000, 100 * MIB), (0x3000_0000, 200 * MIB)), "; the pool is held by "),
        (None, "; the pool is held by "),
    ],
)
def test_what_the_driver_holds_of_a_pool_is_reported_where_torch_counts_more(
    card: FakeCard, monkeypatch: pytest.MonkeyPatch, mapped: Sequence[Range] | None, reported: str
) -> None:
    def read(index: int, among: Sequence[Range]) -> Sequence[Range] | None:
        assert total(among) == 300 * MIB
        return mapped if index == 0 else ((0, 1 << 40),)

    monkeypatch.setattr(empty_pools, "read_allocations", read)
    (finding,) = lived(not_twice(card)).findings
    assert finding.bytes == 300 * MIB
    assert f"(pool (0, 2): 300.0 MiB){reported}" in finding.message


def test_a_pool_that_nobody_holds_is_named_by_its_id(card: FakeCard) -> None:
    (finding,) = lived(lambda turn: card.reserve(5, 8 * MIB) if turn == 1 else None).findings
    assert (finding.holder, finding.bytes) == ("pool (0, 5)", 8 * MIB)
    assert finding.advice == "let go of the pool at shutdown, then torch.cuda.empty_cache()"


@pytest.mark.parametrize("default", [0, 2 * MIB])
def test_what_torch_caches_in_pools_and_beside_them_is_one_finding(
    card: FakeCard, monkeypatch: pytest.MonkeyPatch, default: int
) -> None:
    def let_go(rung: Rung) -> bool:
        if rung is Rung.EMPTY_CACHE:
            card.segments.clear()
            return True
        return release(rung)

    def create(turn: int) -> None:
        card.reserve(3, 14 * MIB)
        card.reserve(3, 20 * MIB)
        if default:
            card.reserve(0, default)

    monkeypatch.setattr(ladder, "release", let_go)
    (finding,) = lived(create).findings
    size = 34 * MIB + default
    assert (finding.resource, finding.cause, finding.device, finding.stage, finding.bytes, finding.count) == (
        "reserved",
        "allocator-cache",
        CARD,
        "shutdown",
        size,
        1,
    )
    assert finding.remedy is not None
    assert (finding.remedy.action, finding.remedy.returns_bytes) == ("torch.cuda.empty_cache()", size)
    assert finding.holder == "torch's caching allocator"
    # As in a life in which the default pool alone was cached: it is the same leak.
    assert finding.fingerprint == fingerprint(
        resource="reserved", device=CARD, stage="shutdown", suspects=("", "allocator-cache")
    )
    assert finding.message == (
        f"{format_bytes(size)} of reserved on cuda:0 still held after shutdown, 34.0 MiB of it in private pools in"
        f" which nothing lives; torch.cuda.empty_cache() returns {format_bytes(size)}"
    )


def test_what_torch_s_own_pool_keeps_from_the_first_life_is_first_use(card: FakeCard) -> None:
    subject = lived(lambda turn: card.reserve(0, 64 * MIB) if turn == 1 else None)
    assert (subject.outcome, subject.findings, subject.not_measured) == ("clean", (), ())


def test_what_stays_after_the_first_life_is_listed_where_no_second_follows(card: FakeCard) -> None:
    def create(turn: int) -> None:
        if turn == 2:
            raise RuntimeError("no second engine")
        card.reserve(0, 64 * MIB)
        card.besides += 900 * MIB

    subject = lived(create, sleep=("sleep(2)", "wake"))
    assert subject.outcome == "error"
    reported = {missing.what: missing.why for missing in subject.not_measured}
    assert list(reported) == [
        "64.0 MiB of reserved on cuda:0 after the shutdown of cycle 1",
        "900.0 MiB of driver on cuda:0 after the shutdown of cycle 1",
        "the driver's level on cuda:0 in sleep(2)",
    ]
    assert all("no whole second life followed" in why for why in reported.values())


def test_what_a_second_life_explains_is_not_listed(card: FakeCard) -> None:
    def create(turn: int) -> None:
        card.besides += 900 * MIB * (turn == 1)

    subject = lived(create)
    assert (subject.outcome, subject.not_measured) == ("clean", ())
