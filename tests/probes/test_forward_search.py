"""The search over references as arrays: narrow levels, which Python goes through, are reached as wide ones are."""

from __future__ import annotations

import random
from collections.abc import Iterator
from unittest import mock

import numpy as np

from lowtide.probes.heap import forward_search
from lowtide.probes.heap.forward_search import BLOCKED, ROOT, UNSEEN, ForwardSearch

Edges = list[list[int]]


def search_of(edges: Edges, turns: list[int]) -> ForwardSearch:
    offsets = np.cumsum([0, *map(len, edges)])
    flat = np.array([held for each in edges for held in each], np.int32)
    return ForwardSearch(offsets, flat, np.array(turns, np.uint8), np.zeros(len(edges), np.int32))


def parents_of(edges: Edges, turns: list[int], kinds: list[int], narrow: int, levels: int = 1000) -> list[int]:
    parents = np.array(kinds, np.int32)
    roots = np.flatnonzero(parents == ROOT).astype(np.int32)
    with mock.patch.multiple(forward_search, _NARROW=narrow, _LEVELS=levels):
        search_of(edges, turns).search(parents, roots, np.arange(len(edges), dtype=np.int32))
    return parents.tolist()


def flooded(edges: Edges, narrow: int) -> tuple[list[bool], list[int]]:
    seen = np.zeros(len(edges), np.bool_)
    seen[0] = True
    search = search_of(edges, [0] * len(edges))
    with mock.patch.multiple(forward_search, _NARROW=narrow, _LEVELS=3):
        met = [node for level in search.flood(seen, search._edges, np.zeros(1, np.int32)) for node in level.tolist()]
    return seen.tolist(), sorted(met)


def heaps() -> Iterator[tuple[Edges, list[int], list[int]]]:
    """Chains, so that there are narrow levels, with whatever else: in one of twenty a mistake shows."""
    for seed in range(300):
        source = random.Random(seed)
        count = source.randint(4, 12)
        edges = [[turn + 1] if turn + 1 < count else [] for turn in range(count)]
        for _ in range(source.randint(2, 14)):
            edges[source.randrange(count)].append(source.randrange(count))
        turns = [source.choice([0, 0, 1, 2]) for _ in range(count)]
        yield edges, turns, [ROOT, *(source.choice([UNSEEN, UNSEEN, UNSEEN, BLOCKED]) for _ in range(count - 1))]


def test_paths_are_the_same_however_wide_a_level_is() -> None:
    for heap in heaps():
        wide = parents_of(*heap, narrow=0)
        assert parents_of(*heap, narrow=4) == wide
        assert parents_of(*heap, narrow=1000, levels=2) == wide


def test_what_is_flooded_is_the_same_however_wide_a_level_is() -> None:
    for edges, *_ in heaps():
        assert flooded(edges, narrow=0) == flooded(edges, narrow=4) == flooded(edges, narrow=1000)


def test_a_long_chain_is_gone_through_to_its_end() -> None:
    count = 200_000
    edges = [[turn + 1] for turn in range(count - 1)] + [[]]
    parents = parents_of(edges, [0] * count, [ROOT] + [UNSEEN] * (count - 1), narrow=4)
    assert parents == [ROOT, *range(count - 1)]
