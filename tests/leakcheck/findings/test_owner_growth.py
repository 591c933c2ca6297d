"""What lies under an owner test after test: storages by the turn in which they appeared, and where they grow."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

from lowtide.leakcheck.findings.owner_growth import growth_of, limit_passed, merged, note_growth, place_of, rest_of
from lowtide.leakcheck.growth.series import LevelKey
from lowtide.leakcheck.judging.owners import ANYTHING, Claims, Count, Owner, OwnerHistory
from lowtide.probes.host.counters import Counters
from lowtide.reports.schema import Finding

pytestmark = pytest.mark.nightly

KIB = 1 << 10


class Engine:
    """Keeps what its tests give it."""

    def __init__(self) -> None:
        self.adapters: dict[str, torch.Tensor] = {}
        self.cached: Callable[[int], torch.Tensor] = torch.zeros
        self.workspace = torch.zeros(KIB)


class EngineOwner(Owner):
    """The owner of an engine."""

    def __init__(self, engine: Engine) -> None:
        super().__init__("module fixture 'engine'", lambda: [engine])
        self._engine = engine

    def named(self) -> list[tuple[str, object]]:
        return [(self.name, self._engine)]


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def owner(engine: Engine) -> Owner:
    return EngineOwner(engine)


NOTHING = Counters({}, {}, {})


def turn(owner: Owner, allowed: int = 0, now: Counters = NOTHING, *, first: bool = False) -> None:
    """A test used the owner, and is over."""
    owner.ledger.begin_turn(allowed)
    claims = Claims([owner])
    sizes = claims.storages({}, ())[id(owner)]
    lying = owner.ledger.storages
    note_growth([owner], Claims([owner]), set() if first else sizes.keys() - lying.keys(), now, NOTHING)


def found(owner: Owner, now: Counters = NOTHING) -> list[Finding]:
    return growth_of(owner, lambda device, addresses: {}, now)


def test_what_every_test_adds_is_found_with_its_place_and_its_rate(owner: Owner, engine: Engine) -> None:
    turn(owner, first=True)
    for name in "abc":
        engine.adapters[name] = torch.zeros(KIB)
        turn(owner)
    (finding,) = found(owner)
    assert finding.message.startswith("+4.0 KiB in each of 3 of 4 tests under module fixture 'engine', 12.0 KiB on cpu")
    assert finding.holder is not None
    assert finding.holder.startswith("module fixture 'engine'.adapters['")
    assert (finding.trend, finding.bytes, finding.count) == ("growth", 12 * KIB, 3)


def test_what_every_test_adds_by_its_graph_is_found(owner: Owner, engine: Engine) -> None:
    weight = torch.ones(KIB, requires_grad=True)
    turn(owner, first=True)
    for _ in range(4):
        engine.workspace = engine.workspace + weight * torch.rand(KIB)
        turn(owner)
    (finding,) = found(owner)
    assert finding.cause == "autograd"
    # The first one brought the weight, too.
    assert finding.message.startswith("+4.0 KiB to +8.0 KiB in each of 4 of 5 tests")


def test_a_workspace_that_grows_is_found(owner: Owner, engine: Engine) -> None:
    turn(owner, first=True)
    for turns in range(3):
        engine.workspace = torch.zeros((turns + 2) * KIB)
        turn(owner)
    (finding,) = found(owner)
    assert finding.holder == "module fixture 'engine'.workspace"


def test_a_workspace_that_is_replaced_is_no_growth(owner: Owner, engine: Engine) -> None:
    for _ in range(5):
        engine.workspace = torch.zeros(KIB)
        turn(owner)
    assert found(owner) == []


SIZES = (4, 6, 7, 3, 4, 1, 2, 3, 4, 9, 4, 7)
"""Of outputs of different lengths; none of the last ones happens to be as small as one before."""


def test_an_output_of_another_size_in_each_test_is_no_growth(owner: Owner, engine: Engine) -> None:
    turn(owner, first=True)
    for size in SIZES:
        engine.workspace = torch.zeros(size * KIB)
        turn(owner)
    assert found(owner) == []


def test_what_is_added_beside_it_is_found(owner: Owner, engine: Engine) -> None:
    turn(owner, first=True)
    for size in SIZES:
        engine.workspace = torch.zeros(size * KIB)
        engine.adapters[f"{len(engine.adapters)}"] = torch.zeros(16)
        turn(owner)
    (finding,) = found(owner)
    assert (finding.holder or "").startswith("module fixture 'engine'.adapters['")


@pytest.mark.parametrize(
    ("maxsize", "tests", "reported"), [(4, 9, False), (4, 5, False), (64, 9, True), (None, 9, True)]
)
def test_a_cache_that_is_full_is_no_growth(
    owner: Owner, engine: Engine, maxsize: int | None, tests: int, *, reported: bool
) -> None:
    # Each entry is a little larger than the one that it replaces.
    engine.cached = functools.lru_cache(maxsize=maxsize)(lambda size: torch.zeros(KIB + size))
    turn(owner, first=True)
    for size in range(tests):
        engine.cached(size)
        turn(owner)
    assert bool(found(owner)) is reported


def test_attributes_that_are_filled_once_each_are_no_growth(owner: Owner, engine: Engine) -> None:
    turn(owner, first=True)
    for name in ("encoder", "decoder", "head"):
        setattr(engine, name, torch.zeros(KIB))
        turn(owner)
    assert owner.ledger.growing() == [LevelKey("tensors", "cpu")]
    assert found(owner) == []


def test_a_list_that_is_emptied_is_no_growth(owner: Owner, engine: Engine) -> None:
    for turns in range(6):
        engine.adapters[f"{turns}"] = torch.zeros(KIB)
        if turns % 3 == 2:
            engine.adapters.clear()
        turn(owner)
    assert found(owner) == []


def test_what_tests_that_are_not_judged_add_is_no_growth(owner: Owner, engine: Engine) -> None:
    for name in "abcd":
        engine.adapters[name] = torch.zeros(KIB)
        turn(owner, ANYTHING)
    assert found(owner) == []


def test_threads_that_become_more_test_after_test_are_found(owner: Owner) -> None:
    for turns in range(3):
        owner.items["threads"] = {f"worker {number}" for number in range(turns + 1)}
        now = Counters({"threads": dict.fromkeys(owner.items["threads"], 1)}, {}, {})
        turn(owner, now=now, first=True)
    (finding,) = found(owner, now)
    assert finding.message.startswith("+1 thread in each of 3 tests under module fixture 'engine', 3 threads in all")


def test_the_limit_is_reported_once_for_each_time_it_is_passed(owner: Owner, engine: Engine) -> None:
    passed = []
    turn(owner, first=True)
    for name in "abcdef":
        engine.adapters[name] = torch.zeros(KIB)
        turn(owner)
        passed.append(len(limit_passed(owner, 11 * KIB, lambda device, addresses: {})))
    assert passed == [0, 0, 1, 0, 0, 1]


def test_what_an_outer_owner_holds_too_is_its_own(owner: Owner, engine: Engine) -> None:
    outer, inner = owner, EngineOwner(Engine())
    inner._engine.adapters["shared"] = engine.workspace
    under = Claims([outer, inner]).storages({}, ())
    assert len(under[id(outer)]) == 1
    assert not under[id(outer)].keys() & under[id(inner)].keys()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["", ".adapters", "[3]"], ["", ".adapters", "['a12']"]),
        (["", ".layer_1", ".weight"], ["", ".layer_22", ".weight"]),
        (["", ".last", ".prev", ".data"], ["", ".last", ".prev", ".prev", ".prev", ".data"]),
        (["", ".x", ".grad_fn", ".next_functions[0][0]"], ["", ".x", ".grad_fn", *[".next_functions[1][0]"] * 3]),
    ],
)
def test_two_things_are_held_in_one_place(one: list[str], other: list[str]) -> None:
    assert place_of(one) == place_of(other)


def test_two_attributes_are_two_places() -> None:
    assert place_of(["", ".encoder"]) != place_of(["", ".decoder"])


def test_growth_that_survives_its_owner_is_reported_with_what_survived(owner: Owner, engine: Engine) -> None:
    turn(owner, first=True)
    for name in "abc":
        engine.adapters[name] = torch.zeros(KIB)
        turn(owner)
    (growth,) = found(owner)
    left = Finding(
        resource="tensors",
        cause="module-global",
        bytes=16 * KIB,
        count=4,
        device="cpu",
        stage="setup",
        message="16.0 KiB in 4 tensors",
        fingerprint="0",
    )
    reported = merged(left, [growth])
    assert reported.trend == "growth"
    assert reported.message == (
        "16.0 KiB in 4 tensors; it grew by +4.0 KiB in each of 3 of 4 tests under module fixture 'engine'"
    )
    assert rest_of([growth], [reported]) == ()
    assert rest_of([growth], []) == (growth,)


def test_a_turn_that_was_not_read_has_the_level_of_the_one_before() -> None:
    ledger = OwnerHistory()
    for _ in range(2):
        ledger.begin_turn(0)
        ledger.begin_turn(0)
        count = ledger.turns // 2
        ledger.note({}, (), {"threads": Count(count, 1)})
    assert ledger.steps(LevelKey("threads")).sizes == [0, 1, 0, 1]
