"""The whole numbers of a report."""

from __future__ import annotations

from typing import Annotated

import msgspec

Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
"""What databases and readers in other languages can hold: a longer number in a file could be read and not written."""
