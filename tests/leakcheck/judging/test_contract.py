"""What must hold after each stage of a life: pages, tokens, KV blocks, and what the driver counts while it sleeps."""

from __future__ import annotations

import functools
import re
import sys
from types import SimpleNamespace

import pytest
import torch

from lowtide.leakcheck.judging.contract import (
    PENDING,
    after_deep_sleep,
    after_failed_wake,
    after_idle,
    after_infer,
    after_sleep,
    after_update,
    after_wake,
    failed_teardown,
    holders,
)
from lowtide.probes.device.driver import DriverReading, NoDriver
from lowtide.probes.device.torch_allocator import AllocatorReading
from lowtide.probes.snapshot import Snapshot, take_snapshot
from lowtide.probes.stages import PoolReading
from lowtide.reports.schema import Finding, Remedy

if sys.version_info < (3, 11):
    from exceptiongroup import ExceptionGroup

MIB = 1 << 20


@functools.cache
def taken() -> Snapshot:
    return take_snapshot(driver=NoDriver("a test"))


def snapshot(driver: int | None) -> Snapshot:
    found = taken()
    reading = DriverReading("cuda:0", "nvml", driver, 20_000 * MIB, 30_000 * MIB, "")
    return Snapshot(**{name: getattr(found, name) for name in Snapshot.__slots__} | {"drivers": (reading,)})


@pytest.mark.parametrize(
    ("before", "at_work", "after"),
    [
        (500, 500, 500),
        (500, 500, 564),
        # A communicator stays while the engine sleeps.
        (500, 890, 890),
        (500, 890, 954),
        # What came back from the libraries is nothing that may be taken instead.
        (500, 400, 564),
    ],
)
def test_what_libraries_hold_at_work_may_stay(before: int, at_work: int, after: int) -> None:
    assert after_deep_sleep("sleep(2)", "cuda:0", *(snapshot(n * MIB) for n in (before, at_work, after))) == []


@pytest.mark.parametrize(
    ("before", "at_work", "after", "reported"), [(500, 500, 565, 65), (500, 890, 955, 455), (500, 400, 565, 65)]
)
def test_more_is_a_finding(before: int, at_work: int, after: int, reported: int) -> None:
    (found,) = after_deep_sleep("sleep(2)", "cuda:0", *(snapshot(n * MIB) for n in (before, at_work, after)))
    assert (found.resource, found.cause, found.bytes) == ("driver", "driver", reported * MIB)
    assert found.message == (
        f"the driver counts {reported}.0 MiB more after sleep(2) than before create,"
        f" of it the driver or native code {reported}.0 MiB"
    )


def asleep(driver: int, *, reserved: int, arenas: int) -> Snapshot:
    """A reading of a card whose driver counts so many bytes, some of them torch's, some of arenas."""
    pools = (PoolReading("arena", "runtime", "cuda:0", 100 * MIB, arenas, ()),)
    allocator = AllocatorReading("cuda:0", 0, reserved, (), 0, True, "")
    parts = {"pools": pools, "allocators": (allocator,)}
    found = snapshot(driver)
    return Snapshot(**{name: getattr(found, name) for name in Snapshot.__slots__} | parts)


@pytest.mark.parametrize(
    ("driver", "reserved", "arenas", "holder", "advice"),
    [
        (100, 30, 20, "the driver or native code", "give it back where native code took it; .*"),
        (100, 50, 20, "torch's caching allocator", r".*torch\.cuda\.empty_cache\(\) at its end"),
        (100, 20, 60, "mapped arenas", "unmap in a sleep what only an engine at work needs"),
    ],
)
def test_most_of_it_names_who_holds_it(driver: int, reserved: int, arenas: int, holder: str, advice: str) -> None:
    before = asleep(500 * MIB, reserved=7 * MIB, arenas=5 * MIB)
    after = asleep((500 + driver) * MIB, reserved=(7 + reserved) * MIB, arenas=(5 + arenas) * MIB)
    (found,) = after_deep_sleep("sleep(2)", "cuda:0", before, before, after)
    assert found.holder == holder
    assert re.fullmatch(advice, found.advice or "")
    of_it = [f"mapped arenas {arenas}.0 MiB", f"torch's caching allocator {reserved}.0 MiB"]
    of_it.append(f"the driver or native code {driver - reserved - arenas}.0 MiB")
    assert found.message.endswith(f"of it {', '.join(of_it)}")


@pytest.mark.parametrize("reported", [(None, None, None), (500, 500, None), (None, 500, 500)])
def test_a_driver_that_does_not_tell_is_not_judged_here(reported: tuple[int | None, ...]) -> None:
    readings = [snapshot(None if size is None else size * MIB) for size in reported]
    assert after_deep_sleep("sleep(2)", "cuda:0", *readings) == []


def test_without_a_reading_at_work_libraries_have_nothing_there() -> None:
    (found,) = after_deep_sleep("sleep(2)", "cuda:0", snapshot(500 * MIB), snapshot(None), snapshot(564 * MIB + 1))
    assert (found.bytes, found.count) == (64 * MIB + 1, 1)


def mapped(**arenas: int) -> Snapshot:
    """A reading in which arenas of that name have so many bytes mapped on the CPU."""
    found = taken()
    pools = tuple(PoolReading("arena", tag, "cpu", 100 * MIB, size, ()) for tag, size in arenas.items())
    return Snapshot(**{name: getattr(found, name) for name in Snapshot.__slots__} | {"pools": pools})


def reported(findings: list[Finding]) -> list[tuple[str, str | None, int, str]]:
    return [(found.resource, found.holder, found.bytes, found.message) for found in findings]


def test_what_sleeps_has_no_pages_beyond_those_of_earlier_engines() -> None:
    before = mapped(weights=3, kv_cache=5, workspace=7, runtime=9)
    assert after_sleep("sleep(1)", "cpu", before, mapped(weights=3, kv_cache=0, workspace=7, runtime=100)) == []
    assert after_sleep("sleep(1)", "cuda:0", before, mapped(weights=100)) == []
    found = after_sleep("sleep(1)", "cpu", before, mapped(weights=4, kv_cache=25, workspace=7))
    assert reported(found) == [
        ("arena", "arena 'weights'", 1, "arena 'weights' still has 1 B mapped after sleep(1)"),
        ("arena", "arena 'kv_cache'", 20, "arena 'kv_cache' still has 20 B mapped after sleep(1)"),
    ]
    assert [each.advice for each in found] == [f"unmap arena {tag!r} in sleep(1)" for tag in ("weights", "kv_cache")]


@pytest.mark.parametrize(("now", "amount"), [(30, 10), (10, 10), (20, None)])
def test_a_wake_maps_what_was_mapped_no_more_and_no_less(now: int, amount: int | None) -> None:
    before = {"weights": 1, "kv_cache": 20, "runtime": 3, "workspace": 4}
    # Workspaces grow again when they are needed.
    found = after_wake("wake", "cpu", mapped(**before), mapped(**{**before, "kv_cache": now, "workspace": 0}))
    message = f"arena 'kv_cache' has {now} B mapped after wake, 20 B before"
    assert reported(found) == ([] if amount is None else [("arena", "arena 'kv_cache'", amount, message)])
    assert all(each.cause == "not-restored" and (each.advice or "").startswith("map in wake what") for each in found)


def test_a_wake_that_fails_leaves_mapped_what_was_and_nothing_more() -> None:
    before = mapped(weights=1, kv_cache=20)
    assert after_failed_wake("wake", "cpu", before, mapped(weights=1, kv_cache=0)) == []
    (found,) = after_failed_wake("wake", "cpu", before, mapped(weights=2, kv_cache=20, workspace=50))
    assert reported([found]) == [
        ("arena", "arena 'weights'", 1, "1 B of arena 'weights' stay mapped after a wake that failed")
    ]
    assert (found.cause, found.stage) == ("not-restored", "wake")


@pytest.mark.parametrize(
    ("then", "now", "wrong"),
    [
        ([[1, 2], [3]], [[1, 2], [3]], 0),
        ([[1, 2], [3]], [[1, 2], [4]], 1),
        ([[1, 2], [3]], [[1], [4]], 2),
        ([[1, 2], [3]], [[1, 2]], 1),
        ([[1, 2]], [[1, 2], [3]], 1),
    ],
)
def test_prompts_have_the_tokens_that_they_had(then: list[list[int]], now: list[list[int]], wrong: int) -> None:
    found = after_infer("infer", then, now)
    assert [(each.resource, each.cause, each.count) for each in found] == [("contents", "not-restored", wrong)] * bool(
        wrong
    )
    if wrong:
        said = f"{wrong} of {len(then)} prompts give other tokens after a wake than before any sleep"
        assert (found[0].bytes, found[0].message) == (0, said)


def test_an_engine_that_says_nothing_at_all_proves_nothing() -> None:
    for expected in ([], [[], []]):
        (found,) = after_infer("infer", expected, expected)
        assert (found.resource, found.bytes, found.message) == ("contents", 0, "infer gave no token")


@pytest.mark.parametrize(
    ("held", "pending", "reported"),
    [(0, 0, {}), (3, 3, {PENDING: 3}), (3, 0, {"no request": 3}), (5, 2, {PENDING: 2, "no request": 3})],
)
def test_who_holds_blocks_when_no_request_does(held: int, pending: int, reported: dict[str, int]) -> None:
    assert holders(SimpleNamespace(held=held, pending_transfer=pending)) == reported


def test_a_block_that_one_more_step_gives_back_was_waiting_for_it() -> None:
    held = {PENDING: 2, "no request": 3}
    pending, lost = after_idle("infer", "cpu", held, {"no request": 3})
    assert (pending.cause, pending.count, pending.remedy) == (
        "pending-transfer",
        2,
        Remedy(action="engine.step()", returns_bytes=0),
    )
    assert (lost.cause, lost.count, lost.remedy) == ("unknown", 3, None)
    assert (pending.bytes, lost.bytes) == (0, 0)
    said = "2 KV blocks are held by pending transfers after infer, and the prefix cache cannot be reset"
    assert pending.message == f"{said}; engine.step() returns them"
    (untried,) = after_idle("infer", "cpu", {PENDING: 2}, None)
    assert (untried.message, untried.remedy) == (said, None)


def test_every_error_of_a_shutdown_is_reported() -> None:
    alone = failed_teardown(OSError("no card"))
    assert (alone.resource, alone.bytes, alone.count) == ("teardown", 0, 1)
    assert alone.message == "shutdown raised: OSError: no card"
    both = failed_teardown(ExceptionGroup("two", [OSError("no card"), ValueError("no group")]))
    assert (both.count, both.message) == (2, "shutdown raised: OSError: no card; ValueError: no group")
    assert (both.advice or "").startswith("run all steps of shutdown")


def test_weights_that_an_engine_keeps_in_a_type_of_its_own_are_those_that_were_sent() -> None:
    before, sent = {"a": torch.zeros(8).bfloat16()}, {"a": torch.rand(8)}
    assert after_update("cpu", before, sent, {"a": sent["a"].bfloat16()}) == []
    (finding,) = after_update("cpu", before, sent, {"a": sent["a"].bfloat16() + 1})
    assert finding.message == "1 of 1 weight is not what update_weights has sent: a"
    (finding,) = after_update("cpu", before, sent, before)
    assert finding.message.startswith("update_weights moved nothing")
