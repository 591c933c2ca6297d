"""A finding's fingerprint: what stays the same about a leak from run to run and from machine to machine.

Of a name that is what nothing made up for this run: no number, address, process id or temporary folder.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from lowtide.leakcheck.resources import resource_of
from lowtide.leakcheck.resources.resource import Name, without_numbers
from lowtide.reports.schema import Cause, Finding, ResourceName
from lowtide.reports.statement import StatedFinding

_PHASES = re.compile(r"^(setup|teardown|setup of .*)$", re.DOTALL)
"""The stages in which what a test or a fixture leaves appears, beside its call."""


class Identity(msgspec.Struct, frozen=True):
    """Some things of one resource.

    Attributes:
        names: what they are called, without what changes from run to run; each once, sorted.
        are_named: whether each of them has a name that somebody gave it.
    """

    names: tuple[str, ...] = ()
    are_named: bool = False


def identity_of(key: str, items: Iterable[str]) -> Identity:
    """Return the identity of some things, by their names in the counters.

    Args:
        key: a metric's key, or its resource: `threads`, `native cuda:0`.
        items: the names, as the counters or a snapshot have them.
    """
    resource = resource_of(key)
    name_of = _NAMERS.get(key.partition(" ")[0], _tagged) if resource is None else resource.identity
    found = [name_of(item) for item in items]
    return Identity(tuple(sorted({name.text for name in found})), bool(found) and all(name.is_given for name in found))


def _setting(item: str) -> Name:
    """Name `name was …, is …`."""
    return Name(without_numbers(re.sub(r" was .*", "", item, flags=re.DOTALL)))


def _tagged(item: str) -> Name:
    """Name `tag at 0x…`, of announced memory, and `type at 0x… in cache`."""
    return Name(without_numbers(re.sub(r" at 0x[0-9a-f]+", "", item)))


def _unnamed(item: str) -> Name:
    """Name `block at 0x…` and `SomeTensor 140…` by what they are, and nothing more."""
    return Name(without_numbers(re.sub(r" (at )?0x[0-9a-f]+", "", item)), is_given=False)


_NAMERS: dict[str, Callable[[str], Name]] = {
    "globals": _setting,
    "native": _unnamed,
    "workspaces": _unnamed,
    "in-flight": _unnamed,
    "driver": _unnamed,
    "reserved": _unnamed,
    "gc-frozen": _unnamed,
    "tensors": _unnamed,
}


def fingerprint(
    *,
    resource: str,
    device: str,
    stage: str,
    suspects: Sequence[str],
    allocated_in: str = "",
    kind: str = "",
    module: str = "",
    by_phase: bool = False,
) -> str:
    """Return sixteen hex digits over what identifies a leak.

    The device's index is left out (the same leak on another card is the same leak), and so is every number in the
    suspect edges: which layer or which entry it was this time says nothing. Nor does the phase of a test: what leaks
    does so in a test as in a fixture's setup.

    Args:
        resource: the finding's.
        device: the finding's.
        stage: the finding's.
        suspects: what names the leak: edges, causes, the names of things.
        allocated_in: the function that allocated it.
        kind: of what has no name, its type.
        module: of what has no name, the test module in which it leaked.
        by_phase: whether the phase counts all the same, as it did in lowtide 0.1.
    """
    stage = stage if by_phase else _PHASES.sub("call", stage)
    parts = [resource, device.split(":")[0], stage, allocated_in, *(re.sub(r"\d+", "*", edge) for edge in suspects)]
    parts += [f"{word} {text}" for word, text in (("kind", kind), ("module", module)) if text]
    return hashlib.sha256("\0".join(parts).encode(errors="surrogatepass")).hexdigest()[:16]


_NOTHING_ELSE: Mapping[str, str] = MappingProxyType({})


def finding_of(
    resource: ResourceName,
    *,
    stage: str,
    device: str,
    suspects: Sequence[str],
    cause: Cause = "unknown",
    bytes: int = 0,  # noqa: A002 - as a finding calls it
    count: int = 1,
    known_by: Mapping[str, str] = _NOTHING_ELSE,
    items: Iterable[str] | None = None,
    **more: Any,
) -> Finding:
    """Return a finding with the fingerprint that its suspects make with its resource, device and stage.

    What else makes that fingerprint, or makes it in place of these, is in `known_by`, as of `fingerprint`; of things
    that are counted it is their `items`, as of `fingerprint_of_items`. All further facts are the finding's own: a
    `message`, or the `statement` of which that is made.
    """
    marks: dict[str, Any] = {"resource": resource, "device": device, "stage": stage, "suspects": suspects, **known_by}
    kind = StatedFinding if "statement" in more else Finding
    return kind(
        resource=resource,
        cause=cause,
        bytes=bytes,
        count=count,
        device=device,
        stage=stage,
        fingerprint=fingerprint(**marks) if items is None else fingerprint_of_items(resource, items, **marks),
        **more,
    )


def whereabouts(finding: Finding) -> dict[str, Any]:
    """Return what of a finding makes its fingerprint, beside its suspects, as of `fingerprint`."""
    return {"resource": finding.resource, "device": finding.device, "stage": finding.stage}


def fingerprint_of_items(
    key: str, items: Iterable[str], *, suspects: Sequence[str], allocated_in: str = "", module: str = "", **facts: Any
) -> str:
    """Return the fingerprint of things that are counted, or of a level: by their names, so far as they have any.

    Args:
        key: the metric's key: `threads`, `native cuda:0`.
        items: the things, by their names in the counters; none for a level.
        suspects: what else names the leak.
        allocated_in: the function that allocated what has no name.
        module: the test module in which it leaked; it counts for what has no name.
        facts: the finding's own, as of `fingerprint`.
    """
    identity = identity_of(key, items)
    if identity.are_named:
        allocated_in = module = ""
    suspects = (key.partition(" ")[0], *suspects, *identity.names)
    return fingerprint(suspects=suspects, allocated_in=allocated_in, module=module, **facts)
