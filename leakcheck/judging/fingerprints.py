"""A finding's fingerprint: what stays the same about a leak from run to run and from machine to machine."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence

from lowtide.leakcheck.judging.stable_names import identity_of


def fingerprint(
    *,
    resource: str,
    device: str,
    stage: str,
    suspects: Sequence[str],
    allocated_in: str = "",
    kind: str = "",
    module: str = "",
) -> str:
    """Sixteen hex digits over what identifies a leak.

    The device's index is left out (the same leak on another card is the same leak), and so is every number in the
    suspect edges: which layer or which entry it was this time says nothing.

    Args:
        resource: the finding's.
        device: the finding's.
        stage: the finding's.
        suspects: what names the leak: edges, causes, the names of things.
        allocated_in: the function that allocated it.
        kind: of what has no name, its type.
        module: of what has no name, the test module in which it leaked.
    """
    parts = [resource, device.split(":")[0], stage, allocated_in, *(re.sub(r"\d+", "*", edge) for edge in suspects)]
    parts += [f"{word} {text}" for word, text in (("kind", kind), ("module", module)) if text]
    return hashlib.sha256("\0".join(parts).encode(errors="surrogatepass")).hexdigest()[:16]


def fingerprint_of_items(
    key: str,
    items: Iterable[str],
    *,
    resource: str,
    device: str,
    stage: str,
    suspects: Sequence[str],
    allocated_in: str = "",
    module: str = "",
) -> str:
    """The fingerprint of a leak of things that are counted, or of a level: by their names, so far as they have any.

    Args:
        key: the metric's key: `threads`, `native cuda:0`.
        items: the things, by their names in the counters; none for a level.
        resource: the finding's.
        device: the finding's.
        stage: the finding's.
        suspects: what else names the leak.
        allocated_in: the function that allocated what has no name.
        module: the test module in which it leaked; it counts for what has no name.
    """
    identity = identity_of(key, items)
    return fingerprint(
        resource=resource,
        device=device,
        stage=stage,
        suspects=(key.partition(" ")[0], *suspects, *identity.names),
        allocated_in="" if identity.are_named else allocated_in,
        module="" if identity.are_named else module,
    )
