"""Tensors whose memory nobody can read: opaque layouts, such as mkldnn's."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from lowtide.leakcheck.resources.resource import Bound, Name, Resource, Rule, without_numbers
from lowtide.probes.objects.foreign import type_name
from lowtide.probes.objects.listed import all_instances
from lowtide.probes.originals import loaded

_WHAT = "tensors of a kind whose memory cannot be read"


def name_of(tensor: object) -> str:
    """Return how such a tensor is called in readings: `Tensor 0x7f5e80000000`."""
    return f"{type_name(type(tensor)).rpartition('.')[2]} {id(tensor):#x}"


class UnreadableTensors(Resource):
    """They are counted; who reads the heap finds them."""

    rule = Rule(
        "unreadable",
        "tensors",
        "process",
        "tensors whose memory cannot be read (opaque layouts), by number",
        test=Bound(what=_WHAT),
        life=Bound(what=_WHAT),
        unit=_WHAT,
    )

    def objects(self, names: Collection[str]) -> Mapping[str, object]:
        """Return the tensors themselves."""
        torch: Any = loaded("torch")
        found = ((name_of(tensor), tensor) for tensor in all_instances(torch.Tensor)) if names and torch else ()
        return {name: tensor for name, tensor in found if name in names}

    def identity(self, name: str) -> Name:
        """Return its type."""
        return Name(without_numbers(re.sub(r" 0x[0-9a-f]+$", "", name)), is_given=False)
