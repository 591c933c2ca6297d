"""The table of what is judged: both judges take their figures from it, and the pages say them as it does."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lowtide.leakcheck.judging import metrics
from lowtide.leakcheck.judging.metrics import (
    Metric,
    Reading,
    host_memory_tolerance,
    plain_metrics,
    shutdown_metrics,
)
from lowtide.leakcheck.judging.rules import RULES, bound_of_test, rule_of
from lowtide.leakcheck.lives.life_reader import LifeReader
from lowtide.leakcheck.resources.resource import Bound, Rung
from lowtide.probes.device.driver import NoDriver

DOCS = Path(__file__).parents[2] / "docs"
MIB = 1 << 20


def writer() -> Any:
    spec = importlib.util.spec_from_file_location("write_reference", DOCS / "write_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # A dataclass looks its module up.
    sys.modules[module.__name__] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[module.__name__]
    return module


def test_the_table_says_tolerance_rungs_and_life() -> None:
    (row,) = [line for line in writer().judged_table().splitlines() if "that nothing else here explains" in line]
    tested, lived = (cell.strip() for cell in row.strip("|").split("|")[2:])
    assert tested == "64 MiB, with a card 768 MiB; `clear_host_cache`"
    assert lived == "32 MiB, with a card 64 MiB; `collect`; from the second life"


def test_each_row_has_its_own_key_and_is_judged_somewhere() -> None:
    assert len({rule.key for rule in RULES}) == len(RULES)
    assert [rule.key for rule in RULES if rule.test is None and rule.life is None] == []


def figures(metric: Metric) -> tuple[object, ...]:
    return metric.rung, metric.settles, metric.first_use, metric.what, metric.cause


def expected(bound: Bound) -> tuple[object, ...]:
    return bound.rung, bound.settles, bound.first_use, bound.what, bound.cause


def test_a_test_is_judged_by_every_row_of_its_column() -> None:
    judged = {metric.key: metric for metric in plain_metrics(["cpu", "cuda:0"])}
    for rule in RULES:
        keys = {
            "process": [rule.key],
            "device": [f"{rule.key} cpu", f"{rule.key} cuda:0"],
            "card": [f"{rule.key} cuda:0"],
        }
        for key in keys[rule.place]:
            metric = judged.pop(key, None)
            if rule.test is None:
                assert metric is None
                continue
            assert metric is not None, key
            assert figures(metric) == expected(rule.test)
            # What arrays explain has no more room with a card.
            assert metric.tolerance == rule.test.allowed(card=rule.key != "host-memory")
            assert (metric.resource, metric.unit, metric.verdict) == (rule.resource, rule.unit, rule.verdict)
    assert judged == {}


def test_without_a_card_no_row_of_a_card_is_judged_and_tolerances_are_smaller() -> None:
    judged = plain_metrics(["cpu"])
    assert {metric.device for metric in judged} == {"", "cpu"}
    assert {metric.device for metric in shutdown_metrics("cpu")} == {"", "cpu"}
    (host,) = [metric for metric in judged if metric.key == "host-memory"]
    assert host.tolerance == host_memory_tolerance(["cpu"]) == host_memory_tolerance([])
    assert host.tolerance < host_memory_tolerance(["cpu", "cuda:0"])


def test_a_life_on_a_card_counts_tensors_on_both_devices_and_the_rest_on_the_card() -> None:
    devices: dict[str, set[str]] = {}
    for metric in shutdown_metrics("cuda:0"):
        devices.setdefault(metric.key.partition(" ")[0], set()).add(metric.device)
    assert devices["tensors"] == {"cpu", "cuda:0"}
    assert devices["arena"] == {"cuda:0"}
    assert devices["host-memory"] == {"cpu"}
    assert devices["threads"] == {""}


def test_a_test_is_read_by_levels_and_by_names() -> None:
    judged = {metric.key: metric for metric in plain_metrics(["cpu"])}
    reading = Reading(items={"threads": {"a": 1, "b": 1}}, amounts={"host-memory": 7, "pinned": None})
    assert judged["threads"].read(reading) == 2
    assert judged["threads"].above(Reading(), reading) == 2
    assert judged["threads"].new_items(Reading(), reading) == {"a": 1, "b": 1}
    assert judged["host-memory"].read(reading) == 7
    assert judged["pinned"].read(reading) is None
    assert judged["gc-frozen"].read(reading) == 0


def test_a_life_is_judged_by_every_row_of_its_column() -> None:
    judged = {metric.key: metric for metric in shutdown_metrics("cuda:0")}
    for rule in RULES:
        key = rule.key if rule.place == "process" else f"{rule.key} cuda:0"
        # Settings are compared one by one by the life's reader.
        if rule.life is None or rule.key == "globals":
            assert key not in judged
            continue
        assert figures(judged[key]) == expected(rule.life)
        assert judged[key].tolerance == rule.life.allowed(card=True)


def test_each_metric_of_a_life_has_its_place_in_a_reading() -> None:
    reader = LifeReader("cpu", NoDriver("a test"))
    reader.start()
    reading = reader.read()
    reader.stop()
    judged = shutdown_metrics("cpu")
    assert {metric.key for metric in judged if metric.is_named} == reading.items.keys()
    assert {metric.key for metric in judged if not metric.is_named} == reading.amounts.keys()


def test_a_tests_own_tolerance_counts_where_it_is_larger_and_only_for_bytes() -> None:
    judged = {metric.key: metric for metric in plain_metrics(["cpu"], 100 * MIB)}
    assert judged["tensors cpu"].tolerance == judged["host-memory"].tolerance == 100 * MIB
    assert judged["threads"].tolerance == judged["gc-frozen"].tolerance == 0


def test_a_row_that_is_not_judged_in_tests_has_no_bound_there() -> None:
    with pytest.raises(KeyError, match="host-pools"):
        bound_of_test("host-pools")


def test_a_row_that_changes_changes_the_judgement(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = rule_of("threads")
    bound = msgspec.structs.replace(rule.life or Bound(), tolerance=7, rung=Rung.EMPTY_CACHE)
    monkeypatch.setattr(metrics, "RULES", (msgspec.structs.replace(rule, life=bound),))
    (metric,) = shutdown_metrics("cpu")
    assert (metric.tolerance, metric.rung) == (7, Rung.EMPTY_CACHE)
