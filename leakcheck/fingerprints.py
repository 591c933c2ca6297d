"""A finding's fingerprint: what stays the same about a leak from run to run and from machine to machine."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence


def fingerprint(*, resource: str, device: str, stage: str, suspects: Sequence[str], allocated_in: str = "") -> str:
    """Sixteen hex digits over what identifies a leak.

    The device's index is left out (the same leak on another card is the same leak), and so is every number in the
    suspect edges: which layer or which entry it was this time says nothing.
    """
    parts = [resource, device.split(":")[0], stage, allocated_in, *(re.sub(r"\d+", "*", edge) for edge in suspects)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
