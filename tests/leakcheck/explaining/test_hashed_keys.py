"""What a cache keeps by the hashes of its keys is one thing, held by the cache, whatever the hashes are."""

from __future__ import annotations

import hashlib
import uuid

import pytest

from lowtide.leakcheck.explaining.explain import Explanation, explain
from lowtide.leakcheck.findings.storage_holders import common_holder
from lowtide.reports.schema import Hop


class Output:
    pass


CACHE: dict[object, Output] = {}


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param((digest("a"), digest("b")), id="digests"),
        pytest.param((str(uuid.UUID(int=11)), str(uuid.UUID(int=2**127))), id="UUIDs"),
        pytest.param((-8068877676007087803, 5049258684758126673), id="hash()"),
    ],
)
def test_entries_under_hashes_have_one_fingerprint(keys: tuple[object, object]) -> None:
    CACHE.update((key, Output()) for key in keys)
    first, second = explain(list(CACHE.values()), innocent={id(CACHE)})
    CACHE.clear()
    assert first.holder != second.holder
    assert first.suspects == second.suspects != ()


def test_entries_under_names_have_one_each() -> None:
    CACHE.update(weights=Output(), optimizer=Output())
    first, second = explain(list(CACHE.values()), innocent={id(CACHE)})
    CACHE.clear()
    assert first.suspects != second.suspects


def held_by(root: str, key: str, holder: str) -> Explanation:
    hops = (Hop(type="module", edge=root), Hop(type="dict", edge=".outputs"), Hop(type="Output", edge=f"[{key!r}]"))
    return Explanation("reachable", "module-global", holder, hops, ())


def test_what_shortened_holders_have_in_common_is_named_in_full() -> None:
    root = "engine.core.worker.model_runner.encoder_cache"
    shortened = [
        held_by(root, digest(each), f"engine.core.worker.model_runner.enc…{digest(each)[40:]}]") for each in "ab"
    ]
    assert common_holder(shortened) == f"{root}.outputs"
    assert common_holder([shortened[0], held_by(root, "x", "the frame of run()")]) == shortened[0].holder


def nested(depth: int) -> object:
    key: object = 1
    for _ in range(depth):
        key = (key,)
    return key


@pytest.mark.parametrize(
    ("key", "shown"),
    [
        pytest.param(10**5000, f"[{hex(10**5000)[:60]}…]", id="an integer"),
        pytest.param((1, -(10**5000)), f"[(1, {hex(-(10**5000))[:60]}…)]", id="in a tuple"),
        pytest.param(nested(500), f"[{'(' * 8}<tuple>{')' * 8}]", id="tuples"),
        pytest.param(10**50, f"[{10**50}]", id="one that Python writes"),
    ],
)
def test_a_key_that_python_does_not_write_is_named(key: object, shown: str) -> None:
    CACHE[key] = Output()
    (found,) = explain([CACHE[key]], innocent={id(CACHE)})
    CACHE.clear()
    assert found.path[-1].edge == shown


def test_a_variable_stands_apart_in_what_holders_have_in_common() -> None:
    hops = (Hop(type="module", edge="audio._error.tb_frame"), Hop(type="LLM", edge="f_locals['engine']"))
    way = "audio._error.tb_frame f_locals['engine']"
    both = [
        Explanation("reachable", "module-global", way + edge, (*hops, Hop(type="Tensor", edge=edge)), ())
        for edge in (".first", ".second")
    ]
    assert common_holder(both) == way
