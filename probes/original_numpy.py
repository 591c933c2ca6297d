"""numpy's functions as they were when they were first needed: what a test puts in their place judges nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy

# `numpy.unique` and `isin` import it when they are first called: in the middle of a reading, whose imports are watched.
import numpy.ma

from lowtide.probes.originals import keep

if TYPE_CHECKING:
    import numpy as np
else:
    np = keep(numpy)

__all__ = ["np"]
