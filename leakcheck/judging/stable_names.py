"""What stays the same of a thing's name from run to run and from machine to machine, so that a fingerprint can have it.

Numbers, addresses, process ids, descriptor numbers and temporary folders say nothing about which leak it is. What has
no name of its own but one that the interpreter or a library has made up (`Thread-7`, a socket, `psm_1f0a93bc`) is known
by its type only: its fingerprint then also says in which test module it leaked, and where it was allocated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lowtide.leakcheck.resources import resource_of
from lowtide.leakcheck.resources.names import Name, without_numbers


@dataclass(frozen=True)
class Identity:
    """Some things of one resource.

    Attributes:
        names: what they are called, without what changes from run to run; each once, sorted.
        are_named: whether each of them has a name that somebody gave it.
    """

    names: tuple[str, ...] = ()
    are_named: bool = False


def identity_of(key: str, items: Iterable[str]) -> Identity:
    """The identity of some things, by their names in the counters.

    Args:
        key: a metric's key, or its resource: `threads`, `native cuda:0`.
        items: the names, as the counters or a snapshot have them.
    """
    resource = resource_of(key)
    name_of = _NAMERS.get(key.partition(" ")[0], _tagged) if resource is None else resource.identity
    found = [name_of(item) for item in items]
    return Identity(tuple(sorted({name.text for name in found})), bool(found) and all(name.is_given for name in found))


def _setting(item: str) -> Name:
    """`name was …, is …`."""
    return Name(without_numbers(re.sub(r" was .*", "", item, flags=re.DOTALL)))


def _cached(item: str) -> Name:
    """`type at 0x… in cache`."""
    return Name(without_numbers(re.sub(r" at 0x[0-9a-f]+", "", item)))


def _tagged(item: str) -> Name:
    """`tag at 0x…`, of announced memory."""
    return Name(without_numbers(re.sub(r" at 0x[0-9a-f]+", "", item)))


def _unnamed(item: str) -> Name:
    """`block at 0x…`, `SomeTensor 140…`: what it is, and nothing more."""
    return Name(without_numbers(re.sub(r" (at )?0x[0-9a-f]+", "", item)), is_given=False)


_NAMERS: dict[str, Callable[[str], Name]] = {
    "globals": _setting,
    "lru-cache": _cached,
    "native": _unnamed,
    "workspaces": _unnamed,
    "in-flight": _unnamed,
    "driver": _unnamed,
    "allocations": _unnamed,
    "reserved": _unnamed,
    "unreadable": _unnamed,
    "gc-frozen": _unnamed,
    "tensors": _unnamed,
}
