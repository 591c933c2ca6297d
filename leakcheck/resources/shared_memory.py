"""Files of shared memory."""

from __future__ import annotations

import re

from lowtide.leakcheck.resources.names import Name, without_numbers
from lowtide.leakcheck.resources.resource import Resource
from lowtide.leakcheck.resources.rule import Bound, Rule

_MADE_UP = re.compile(
    r"(psm_|wnsm_|sem\.mp-|sem\.loky-|mp-|pym-|torch_|nccl-|cuda\.shm\.|__KMP_REGISTERED_LIB_)[\w.-]*"
)


class SharedMemory(Resource):
    """The entries of `/dev/shm`, by name."""

    rule = Rule(
        "shared-memory",
        "shared-memory",
        "process",
        "entries of `/dev/shm` that this process made or maps, that carry its number, or that a child had which it "
        "killed (in a life: or which ended by itself)",
        test=Bound(settles=True),
        life=Bound(),
    )

    def identity(self, name: str) -> Name:
        """Return the name if somebody gave it; else what its maker puts before a number."""
        return name_of_segment(name)


def name_of_segment(item: str) -> Name:
    """Return what names an entry of /dev/shm for ever."""
    made_up = _MADE_UP.fullmatch(item)
    return Name(f"{made_up[1]}*", is_given=False) if made_up else Name(without_numbers(item))
