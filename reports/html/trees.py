"""What a report's findings hold as trees: by the stack that allocated it, and by the path that holds it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lowtide.reports.escaping import one_line
from lowtide.reports.schema import Finding, Report

MOST_CHILDREN = 60
"""Nodes below one node, the largest ones; the others are together in one."""

MOST_DEEP = 100
"""Levels of a tree: a linked list may be a path of thousands, which no chart shows and no encoder of JSON takes."""

LONGEST = 120
"""Characters of a node's name: a chart has no room for more."""


@dataclass(slots=True)
class Node:
    """A part of a tree.

    Attributes:
        name: what it is.
        bytes: of all that is below it, and its own.
        children: the largest first.
    """

    name: str
    bytes: int = 0
    children: list[Node] = field(default_factory=list)


def allocation_tree(report: Report) -> Node | None:
    """What did not come back by the stack that allocated it, the outermost frame on top; None if no stack is known."""
    return _grown(
        ([f"{frame.function} ({frame.file}:{frame.line})" for frame in reversed(finding.allocated_at)], finding.bytes)
        for finding in distinct(report)
    )


def holder_tree(report: Report) -> Node | None:
    """What did not come back by the path that holds it, the root on top; None if no path is known.

    Each node dominates what is below it as far as the findings tell: to cut its edge lets that go.
    """
    return _grown(([hop.edge or hop.type for hop in finding.path], finding.bytes) for finding in distinct(report))


def distinct(report: Report) -> Iterable[Finding]:
    """The findings that are no suppression's: of one leak in several subjects the largest one."""
    largest: dict[str, Finding] = {}
    for subject in report.subjects:
        for finding in subject.findings:
            known = largest.get(finding.fingerprint)
            if finding.suppressed_by is None and (known is None or known.bytes < finding.bytes):
                largest[finding.fingerprint] = finding
    return largest.values()


def _grown(ways: Iterable[tuple[Sequence[str], int]]) -> Node | None:
    root = Node("all")
    # By the node above, which lives as long as the tree, and the step from it.
    index: dict[tuple[int, str], Node] = {}
    for way, size in ways:
        if not way or size <= 0:
            continue
        node = root
        node.bytes += size
        for step in _bounded(way):
            key = (id(node), step)
            below = index.get(key)
            if below is None:
                below = index[key] = Node(_shown(step))
                node.children.append(below)
            node = below
            node.bytes += size
    if not root.children:
        return None
    _fold(root)
    return root


def _bounded(way: Sequence[str]) -> Sequence[str]:
    """The steps, those in the middle of a long way as one."""
    if len(way) <= MOST_DEEP:
        return way
    first = MOST_DEEP // 2
    last = MOST_DEEP - first - 1
    return [*way[:first], f"… {len(way) - first - last} more …", *way[-last:]]


def _shown(step: str) -> str:
    text = one_line(step)
    return text if len(text) <= LONGEST else f"…{text[-LONGEST:]}"


def _fold(root: Node) -> None:
    """Sort each node's children, and put those beyond the largest into one; without recursion, for deep paths."""
    waiting = [root]
    while waiting:
        node = waiting.pop()
        node.children.sort(key=lambda child: -child.bytes)
        rest = node.children[MOST_CHILDREN:]
        if len(rest) > 1:
            node.children[MOST_CHILDREN:] = [Node(f"{len(rest)} more", sum(child.bytes for child in rest))]
        waiting += node.children
