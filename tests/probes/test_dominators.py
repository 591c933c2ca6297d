"""Dominators, against what it means that one node dominates another: without it nothing leads there any more."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.probes.heap.dominators import NONE, dominators
from lowtide.probes.original_numpy import np

Graph = list[list[int]]

GRAPHS = st.integers(1, 14).flatmap(
    lambda count: st.lists(st.lists(st.integers(0, count - 1), max_size=3), min_size=count, max_size=count)
)


def found_in(graph: Graph) -> list[int]:
    offsets = np.cumsum([0, *map(len, graph)])
    edges = np.array([held for each in graph for held in each], np.int32)
    immediate, order = dominators(offsets, edges)
    places = {node: place for place, node in enumerate(order.tolist())}
    assert all(places[above] < places[node] for node, above in enumerate(immediate.tolist()) if above != NONE)
    return immediate.tolist()


def reached(graph: Graph, without: int = NONE) -> set[int]:
    waiting, seen = [0], set[int]()
    while waiting:
        node = waiting.pop()
        if node not in seen and node != without:
            seen.add(node)
            waiting += graph[node]
    return seen


@settings(max_examples=500)
@given(GRAPHS)
def test_each_node_has_the_last_one_that_all_paths_to_it_pass(graph: Graph) -> None:
    everything = reached(graph)
    above = {node: {each for each in everything if node not in reached(graph, without=each)} for node in everything}
    expected = [NONE] * len(graph)
    for node in everything - {0}:
        expected[node] = max(above[node] - {node}, key=lambda each: len(above[each]))
    assert found_in(graph) == expected


def test_of_two_ways_the_place_where_they_part_dominates() -> None:
    assert found_in([[1], [2, 3], [4], [4], [5], [1]]) == [NONE, 0, 1, 1, 1, 4]


def test_a_chain_of_any_length_needs_no_recursion() -> None:
    count = 50_000
    assert found_in([*([node + 1] for node in range(count)), []]) == [NONE, *range(count)]
