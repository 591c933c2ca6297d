"""What must come back, a module for each kind of thing: how it is read, named, excused, given back and explained.

`resource` is the interface, `RESOURCES` has those with names: a new one is a class in a module here, and a row below.
Who judges, explains or tries knows no kind by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lowtide.leakcheck.resources.address_space import AddressSpace
from lowtide.leakcheck.resources.driver_memory import Allocations, CudaIpc, PageLocked
from lowtide.leakcheck.resources.files import Descriptors, SharedMemory, TemporaryFiles
from lowtide.leakcheck.resources.processes import ChildProcesses, ProcessGroups
from lowtide.leakcheck.resources.resource import Items, Resource
from lowtide.leakcheck.resources.threads import AsyncioTasks, Threads
from lowtide.leakcheck.resources.unreadable_tensors import UnreadableTensors
from lowtide.probes.originals import loaded

__all__ = ["LISTED", "RESOURCES", "read_items", "resource_of"]

RESOURCES: tuple[Resource, ...] = (
    UnreadableTensors(),
    ChildProcesses(),
    ProcessGroups(),
    AsyncioTasks(),
    Threads(),
    SharedMemory(),
    Descriptors(),
    TemporaryFiles(),
    AddressSpace(),
    PageLocked(),
    CudaIpc(),
    Allocations(),
)
"""That which says most of a cause that several share comes first."""

LISTED = tuple(resource for resource in RESOURCES if type(resource).read is not Resource.read)
"""Those that are not read with the counters."""

_BY_KEY = {resource.rule.key: resource for resource in RESOURCES}


def resource_of(key: str) -> Resource | None:
    """Return the resource whose reading has this key, on whichever card; None for one that has no module yet."""
    return _BY_KEY.get(key.partition(" ")[0])


def read_items() -> Mapping[str, Items]:
    """Return what there is now of each resource that the counters do not read, by its key."""
    return {resource.rule.key: resource.read() if _may_be_any(resource) else {} for resource in LISTED}


def _may_be_any(resource: Resource) -> bool:
    """Return whether a library keeps anything of the kind: most tests do nothing with most libraries."""
    if not resource.kept_in:
        return True
    name, *names = resource.kept_in
    module = loaded(name)
    return module is not None and any(_attribute(module, name) for name in names)


def _attribute(place: Any, path: str) -> Any:
    for name in path.split("."):
        place = getattr(place, name, None)
    return place
