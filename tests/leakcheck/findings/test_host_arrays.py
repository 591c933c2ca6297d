"""Host memory by the large arrays that it is, and who holds them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lowtide.leakcheck.findings.host_arrays import with_array_holder
from lowtide.leakcheck.findings.item_findings import ItemLeak, with_fingerprint
from lowtide.leakcheck.findings.storage_holders import Context
from lowtide.reports.schema import Finding

MIB = 1 << 20
# Sizes that nothing else in the process has.
UNIT = 3 * MIB
KEPT: dict[str, Any] = {}
LISTED: list[Any] = []


@pytest.fixture(autouse=True)
def nothing_kept() -> Any:
    yield
    KEPT.clear()
    LISTED.clear()


def host(size: int, resource: str = "host-memory") -> ItemLeak:
    finding = Finding(
        resource="host-memory",
        cause="unknown",
        bytes=size,
        count=1,
        device="cpu",
        stage="call",
        message="much did not come back",
        fingerprint="",
    )
    return with_fingerprint(ItemLeak(finding, resource, {}, 0), "")


def numbers(size: int) -> Any:
    return np.ones(size // 8)


def test_an_array_of_that_size_is_named_with_its_holder_and_how_to_let_go_of_it() -> None:
    KEPT["table"] = {"deep": numbers(41 * MIB)}
    finding = with_array_holder(host(40 * MIB), Context()).finding
    assert finding.holder == f"{__name__}.KEPT['table']['deep']"
    assert finding.message == (
        f"much did not come back; 41.0 MiB in a numpy.ndarray held by {__name__}.KEPT['table']['deep']"
    )
    assert (finding.cause, finding.verdict, finding.path[0].edge) == ("module-global", "reachable", __name__)
    assert finding.advice is not None
    assert f"{__name__}.KEPT['table']" in finding.advice
    # Other arrays are other leaks; and the suppression of the time when none was named still applies.
    assert finding.former_fingerprint == host(40 * MIB).finding.fingerprint
    assert finding.fingerprint not in ("", finding.former_fingerprint)


def test_all_in_one_container_are_named_together() -> None:
    KEPT["parts"] = {name: numbers(UNIT) for name in "abcdefghij"}
    finding = with_array_holder(host(10 * UNIT), Context()).finding
    assert "; 30.0 MiB in 10 numpy.ndarrays held by " in finding.message
    assert "KEPT['parts']" in (finding.holder or "")


def test_the_last_of_a_list_are_named_where_the_first_were_there_before() -> None:
    LISTED.extend(numbers(UNIT) for _ in range(12))
    finding = with_array_holder(host(4 * UNIT), Context()).finding
    assert "; 12.0 MiB in 4 numpy.ndarrays held by " in finding.message
    assert finding.holder == f"{__name__}.LISTED[11]"


def test_of_several_of_that_size_in_a_list_the_last_is_named() -> None:
    LISTED.extend(numbers(41 * MIB) for _ in range(2))
    assert with_array_holder(host(41 * MIB), Context()).finding.holder == f"{__name__}.LISTED[1]"


@pytest.mark.parametrize("size", [30 * MIB, 60 * MIB, 1 << 30])
def test_arrays_of_another_size_are_not_said_to_be_it(size: int) -> None:
    KEPT["table"] = numbers(41 * MIB)
    assert with_array_holder(host(size), Context()).finding.holder is None


class Server:
    weights: Any = None


def test_two_leaks_are_named_where_they_are_all_that_there_is() -> None:
    Server.weights, KEPT["table"] = numbers(41 * MIB), numbers(59 * MIB)
    finding = with_array_holder(host(102 * MIB), Context()).finding
    Server.weights = None
    held = f"{__name__}.KEPT['table'], {__name__}.Server.weights"
    assert f"; 100.0 MiB in 2 numpy.ndarrays held by {held}" in finding.message
    assert finding.holder == f"{__name__}.KEPT['table']"
    assert all(f"{name}" in (finding.advice or "") for name in held.split(", "))


def test_none_is_where_there_are_others() -> None:
    Server.weights, KEPT["table"], KEPT["more"] = (numbers(size * MIB) for size in (41, 59, 77))
    finding = with_array_holder(host(100 * MIB), Context()).finding
    Server.weights = None
    assert finding.holder is None


def test_other_resources_are_left_as_they_are() -> None:
    KEPT["table"] = numbers(41 * MIB)
    leak = host(41 * MIB, "threads")
    assert with_array_holder(leak, Context()) is leak


def test_what_nothing_of_the_program_holds_is_not_named() -> None:
    local = numbers(43 * MIB)
    assert with_array_holder(host(43 * MIB), Context()).finding.holder is None
    assert local.size
