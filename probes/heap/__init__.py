"""Who refers to whom: one walk through the process's whole heap, the paths in it, and what the collector hides.

`graph` has the references and `roots` where paths start; `search` finds the paths, `retained` what a reference holds,
`holders` puts both together; `births` and `caches` list what is new.
"""

from lowtide.probes.heap.holders import SharedWalk, Traces, census_of, find_paths, objects_of, sharing_walk, trace
from lowtide.probes.heap.paths import Inspector, Link, Mark, Path, PathStep

__all__ = [
    "Inspector",
    "Link",
    "Mark",
    "Path",
    "PathStep",
    "SharedWalk",
    "Traces",
    "census_of",
    "find_paths",
    "objects_of",
    "sharing_walk",
    "trace",
]
