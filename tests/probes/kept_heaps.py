"""Heaps of a moment, read back from a file, and what is looked for in them."""

from __future__ import annotations

import gc
from pathlib import Path

from lowtide.probes.heap.graph import Graph
from lowtide.probes.heap.heap_copy import copy_heap
from lowtide.probes.heap.paths import Path as LivingPath
from lowtide.probes.objects.listed import collector_paused
from lowtide.reports.heap.kept_heap import read_heap, write_heap
from lowtide.reports.heap.questions import AskedHeap, FoundPath

SECRET = "a-secret-that-no-file-may-have-4711"


class Leak:
    """What is looked for."""


class Attributed:
    def __init__(self, held: object = None) -> None:
        self.held = held


def kept(tmp_path: Path, *things: object, born: bool = False, left: bool = True) -> AskedHeap:
    """The heap of now, read back from a file."""
    gc.collect()
    ids = set(map(id, things))
    with collector_paused():
        graph = Graph(things)
        copied = copy_heap(graph, born=ids if born else None, left=ids if left else (), ignore={id(things)})
        graph.close()
    write_heap(copied, str(tmp_path), "one.heap.npz", "a test", "0.0")
    return AskedHeap(read_heap(tmp_path / "one.heap.npz"))


def shown(path: LivingPath | None) -> list[tuple[str, str]]:
    """A living heap's path: its types and edges."""
    assert path is not None
    return [(path.root_kind, path.root_name), *((step.type_name, step.edge) for step in path.steps)]


def as_shown(path: FoundPath) -> list[tuple[str, str]]:
    return [(hop.type, hop.edge) for hop in path.hops]
