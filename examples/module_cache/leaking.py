"""Two leaks: an lru_cache and a module's dict that nobody empties."""

from __future__ import annotations

import features


def test_fills_the_lru_cache() -> None:
    assert features.embed_once("green").shape == (256, 256)


def test_fills_the_dict() -> None:
    assert features.remember("blue").shape == (256, 256)
