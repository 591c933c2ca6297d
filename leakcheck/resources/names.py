"""What a thing is called in a fingerprint: the same from run to run and from machine to machine."""

from __future__ import annotations

import re
from dataclasses import dataclass

UUIDS = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_DIGESTS = re.compile(r"(?<![0-9A-Za-z])(0x)?(?=[a-f]*\d)[0-9a-f]{8,}(?![0-9A-Za-z])")


@dataclass(frozen=True)
class Name:
    """A name without what changes from run to run.

    Attributes:
        text: it.
        is_given: whether somebody gave it, rather than the interpreter or a library.
    """

    text: str
    is_given: bool = True


def without_numbers(text: str) -> str:
    """Return the text with `*` for every number, address, digest and UUID."""
    return re.sub(r"\d+", "*", _DIGESTS.sub("*", UUIDS.sub("*", text)))
