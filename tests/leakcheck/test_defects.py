"""Every defect that shows on a CPU: found with its cause, its holder and its remedy, and nothing else is found."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lowtide.engine import EngineConfig
from lowtide.engine.defects import DEFECTS, find_defect
from lowtide.leakcheck.lifecycle import LifecycleRun
from lowtide.leakcheck.reference import ReferenceLife
from lowtide.probes.device.driver.none import NoDriver
from lowtide.reports.schema import Finding, Subject


def live(cycles: int = 2) -> Subject:
    config = EngineConfig(device="cpu")
    make = lambda: ReferenceLife(config, 1024)  # noqa: E731
    return LifecycleRun("tiny", make, device="cpu", driver=NoDriver("a test"), cycles=cycles).run()


def is_a_bound_method_in_a_cache(findings: tuple[Finding, ...]) -> None:
    (found,) = findings
    assert (found.resource, found.cause, found.stage) == ("tensors", "lru-cache", "create")
    assert found.holder == "lowtide.engine.runner.supports_kw (lru_cache key)"
    assert [hop.edge for hop in found.path[:5]] == [
        "lowtide.engine.runner",
        ".supports_kw",
        "lru_cache key",
        "[0]",
        ".__self__",
    ]
    assert found.remedy is not None
    assert found.remedy.action == "lowtide.engine.runner.supports_kw.cache_clear()"
    assert found.remedy.returns_bytes == found.bytes


def is_a_shutdown_that_ends_early(findings: tuple[Finding, ...]) -> None:
    errors = [found for found in findings if found.resource == "teardown"]
    assert errors
    assert all("accelerator" in found.message for found in errors)
    skipped = [found for found in findings if found.resource != "teardown"]
    # The host's copy of the weights and the transfer ring come after it too.
    assert {found.resource for found in skipped} == {"tensors", "host-memory"}
    assert {"model", "layers"} <= {(found.holder or "").rpartition(".")[2] for found in skipped}


def is_everything_that_the_engine_holds(findings: tuple[Finding, ...]) -> None:
    assert {(found.resource, found.cause) for found in findings} == {("tensors", "instance-attribute")}
    assert {"model", "layers"} <= {(found.holder or "").rpartition(".")[2] for found in findings}
    assert all(found.remedy is not None and found.remedy.returns_bytes == found.bytes for found in findings)


EXPECTED: dict[str, Callable[[tuple[Finding, ...]], None]] = {
    "bound-method-cache": is_a_bound_method_in_a_cache,
    "accelerator-on-cpu": is_a_shutdown_that_ends_early,
    "shutdown-noop": is_everything_that_the_engine_holds,
    "worker-keeps-everything": is_everything_that_the_engine_holds,
}


def test_every_defect_is_expected_here() -> None:
    assert EXPECTED.keys() == DEFECTS.keys()


@pytest.mark.parametrize("name", EXPECTED)
def test_a_defect_is_found_and_named(name: str) -> None:
    with find_defect(name).activate():
        subject = live()
    assert subject.outcome == "leak"
    EXPECTED[name](subject.findings)


def test_without_a_defect_nothing_is_found_after_all_of_them() -> None:
    for name in DEFECTS:
        with find_defect(name).activate():
            pass
    subject = live()
    assert (subject.outcome, subject.findings) == ("clean", ())
