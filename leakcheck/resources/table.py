"""The resources that have a module of their own; a new one is a module and a row here."""

from __future__ import annotations

from collections.abc import Mapping

from lowtide.leakcheck.resources.asyncio_tasks import AsyncioTasks
from lowtide.leakcheck.resources.process_groups import ProcessGroups
from lowtide.leakcheck.resources.resource import Items, Resource

RESOURCES: tuple[Resource, ...] = (ProcessGroups(), AsyncioTasks())
"""That which says most of a cause that several share comes first."""

_BY_KEY = {resource.rule.key: resource for resource in RESOURCES}


def resource_of(key: str) -> Resource | None:
    """Return the resource whose reading has this key; None for one that has no module yet."""
    return _BY_KEY.get(key)


def read_items() -> Mapping[str, Items]:
    """Return what there is now of each resource, by its key."""
    return {key: resource.read() for key, resource in _BY_KEY.items()}
