"""Who refers to whom: one walk through the process's whole heap, the paths in it, and what the collector hides.

`holders` finds the paths and `graph` the references; `edges` names them; `births` and `caches` list what is new.
"""

from lowtide.probes.heap.holders import (
    Inspector,
    Link,
    Mark,
    Path,
    SharedWalk,
    Step,
    Traces,
    census_of,
    find_paths,
    objects_of,
    sharing_walk,
    trace,
)

__all__ = [
    "Inspector",
    "Link",
    "Mark",
    "Path",
    "SharedWalk",
    "Step",
    "Traces",
    "census_of",
    "find_paths",
    "objects_of",
    "sharing_walk",
    "trace",
]
