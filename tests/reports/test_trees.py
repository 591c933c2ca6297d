"""Findings as trees: each leak once, bytes that add up, and paths of any depth."""

from __future__ import annotations

from lowtide.reports import schema
from lowtide.reports.html.page import LONGEST, MOST_CHILDREN, MOST_DEEP, Node, allocation_tree, holder_tree
from tests.reports.small_reports import finding, report, subject


def frames(*names: str) -> tuple[schema.Frame, ...]:
    return tuple(schema.Frame(file="a.py", line=7, function=name) for name in names)


def hops(*edges: str) -> tuple[schema.Hop, ...]:
    return tuple(schema.Hop(type="dict", edge=edge) for edge in edges)


def as_tuples(node: Node) -> tuple[str, int, list[object]]:
    return node.name, node.bytes, [as_tuples(child) for child in node.children]


def test_stacks_share_their_outer_frames() -> None:
    # The innermost frame comes first in a finding.
    one = finding(fingerprint="1", bytes=10, allocated_at=frames("empty", "load", "main"))
    other = finding(fingerprint="2", bytes=5, allocated_at=frames("cat", "load", "main"))
    tree = allocation_tree(report(subject(one, other)))
    assert tree is not None
    cat, empty = ("cat (a.py:7)", 5, []), ("empty (a.py:7)", 10, [])
    assert as_tuples(tree) == ("all", 15, [("main (a.py:7)", 15, [("load (a.py:7)", 15, [empty, cat])])])


def test_holders_share_their_roots_and_a_hop_without_an_edge_is_its_type() -> None:
    one = finding(fingerprint="1", bytes=10, path=hops("engine", ".a", ""))
    other = finding(fingerprint="2", bytes=20, path=hops("engine", ".b"))
    tree = holder_tree(report(subject(one, other)))
    assert tree is not None
    assert as_tuples(tree) == ("all", 30, [("engine", 30, [(".b", 20, []), (".a", 10, [("dict", 10, [])])])])


def test_a_leak_in_several_subjects_counts_once_at_its_largest() -> None:
    held = hops("pool")
    written = report(
        subject(finding(bytes=10, path=held), name="a"),
        subject(finding(bytes=30, path=held), name="b"),
        subject(finding(bytes=20, path=held), name="c"),
    )
    tree = holder_tree(written)
    assert tree is not None
    assert tree.bytes == 30


def test_what_is_suppressed_or_has_no_bytes_or_no_path_is_in_no_tree() -> None:
    known = finding(fingerprint="1", path=hops("a"), suppressed_by="known.toml:3")
    counted = finding(fingerprint="2", path=hops("a"), bytes=0)
    assert holder_tree(report(subject(known, counted, finding(path=())))) is None
    assert allocation_tree(report(subject(finding()))) is None


def test_beyond_the_largest_ones_children_are_one_node_and_no_bytes_are_lost() -> None:
    found = [
        finding(fingerprint=str(turn), bytes=turn, path=hops("root", f".{turn}"))
        for turn in range(1, MOST_CHILDREN + 4)
    ]
    tree = holder_tree(report(subject(*found)))
    assert tree is not None
    (root,) = tree.children
    assert len(root.children) == MOST_CHILDREN + 1
    assert (root.children[-1].name, root.children[-1].bytes) == ("3 more", 6)
    assert sum(child.bytes for child in root.children) == root.bytes == tree.bytes


def test_a_path_of_thousands_of_hops_with_long_names_is_no_trouble() -> None:
    deep = finding(path=hops(*(f".{turn}" for turn in range(5000)), "x" * 9999))
    tree = holder_tree(report(subject(deep)))
    names = []
    while tree is not None and tree.children:
        (tree,) = tree.children
        names.append(tree.name)
    # No more levels than an encoder of JSON takes: both ends, and how much is between them.
    assert len(names) == MOST_DEEP
    assert [names[0], names[49], names[50], names[51], names[98]] == [".0", ".49", "… 4902 more …", ".4952", ".4999"]
    assert tree is not None
    assert len(tree.name) == LONGEST + 1
