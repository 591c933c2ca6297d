"""Groups of `torch.distributed`: numbered through the life of a process, and ended only by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any

from lowtide.leakcheck.resources.resource import Bound, Change, Items, Name, Resource, Rule, without_numbers
from lowtide.probes.originals import loaded, threading, weakref

DESTROY_LIMIT = 10.0
"""Seconds to wait for a group to be destroyed: a peer that is gone may never answer."""

_WITHOUT_DESCRIPTION = ("", "default_pg", "undefined")


class ProcessGroups(Resource):
    """The process groups that torch knows, by torch's name."""

    rule = Rule(
        "process-groups",
        "process-groups",
        "process",
        "groups of `torch.distributed`; those of all lives are one finding",
        test=Bound(cause="not-restored"),
        life=Bound(cause="not-restored"),
        unit="process groups",
    )
    # A backend talks to itself and to others.
    opens = re.compile(r"\d+ -> ((pipe|socket|anon_inode):.*|/dev/null)")

    def read(self) -> Items:
        """Return the names of the groups; nothing where `torch.distributed` was not imported."""
        return dict.fromkeys(map(str, _groups().values()), 1)

    def describe(self, name: str) -> str:
        """Return `0 (gloo, 1 rank)`; just the name of a group that is not there."""
        world: Any = _world()
        for group, known in _groups().items():
            if str(known) == name:
                backend, ranks = world.pg_map[group][0], len(world.pg_group_ranks[group])
                return f"{name} ({backend}, {ranks} rank{'s' if ranks != 1 else ''})"
        return name

    def identity(self, name: str) -> Name:
        """Return the backend and the description that somebody gave the group: torch's name is a number or a digest."""
        given = next((_description(group) for group, known in _groups().items() if str(known) == name), "")
        backend = without_numbers(self.describe(name).partition(" ")[2])
        if given in _WITHOUT_DESCRIPTION:
            return Name(f"{backend} {given}", is_given=False)
        return Name(f"{backend} {without_numbers(given)}")

    def changes(self, names: Collection[str]) -> list[Change]:
        """Return what destroys the groups; of the default one, which takes all others with it, only that."""
        found = [(str(known), group) for group, known in _groups().items() if str(known) in set(names)]
        default = getattr(_world(), "default_pg", None)
        return [_destroying(*each) for each in [each for each in found if each[1] is default] or found]


def _world() -> Any:
    return getattr(loaded("torch.distributed.distributed_c10d"), "_world", None)


def _groups() -> dict[Any, Any]:
    world = _world()
    return {} if world is None else dict(world.pg_names)


def _description(group: Any) -> str:
    return str(getattr(group, "group_desc", ""))


def _destroying(name: str, group: Any) -> Change:
    distributed: Any = loaded("torch.distributed")
    is_default = group is getattr(_world(), "default_pg", None)
    own = f"torch.distributed.destroy_process_group(group) with group {name}, which new_group() returned"
    # Not held for longer than it is destroyed: the end of a group waits for its threads, and whoever lets go of it last
    # may wait for ever.  That is to be the thread with a limit, not the one that judges.
    living = weakref.ref(group)

    def destroy() -> None:
        left = living()
        if left is not None:
            distributed.destroy_process_group(left)

    return Change(
        "torch.distributed.destroy_process_group()" if is_default else own,
        "all process groups are destroyed" if is_default else f"process group {name} is destroyed",
        lambda: _within(DESTROY_LIMIT, destroy),
        is_code=is_default,
    )


def _within(limit: float, function: Callable[[], object]) -> None:
    """Run a function in a thread of its own, so that one that waits for a peer that is gone does not wait for ever.

    Raises:
        TimeoutError: it did not end in time, and goes on.
    """
    failures: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - handed on to who waits
            failures.append(error)

    thread = threading.Thread(target=run, name="lowtide-remedy", daemon=True)
    thread.start()
    thread.join(limit)
    if thread.is_alive():
        raise TimeoutError(f"still running after {limit:.0f} s")
    if failures:
        raise failures[0]
