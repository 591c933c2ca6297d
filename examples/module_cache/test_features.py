"""Clean: what a test fills it empties again."""

from __future__ import annotations

import features


def test_a_vector_is_the_same_each_time() -> None:
    assert features.embed("red").equal(features.embed("red"))


def test_a_cache_that_is_emptied_keeps_nothing() -> None:
    first = features.embed_once("red")
    assert features.embed_once("red") is first
    features.embed_once.cache_clear()
