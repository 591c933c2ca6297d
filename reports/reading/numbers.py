"""The numbers of a report."""

from __future__ import annotations

from typing import Annotated

import msgspec

Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
"""What databases and readers in other languages can hold: a longer number in a file could be read and not written."""

Float15 = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]
"""Seconds and rates: sums and products of them stay finite, which JSON needs."""
