"""Lifecycle bugs that happened elsewhere, each put back into this engine where it was there, by a context manager.

The engine itself knows nothing of them: a defect replaces one method for as long as its context lasts.
"""

from lowtide.engine.defects.catalogue import DEFECTS, find_defect
from lowtide.engine.defects.defect import Defect
from lowtide.engine.defects.memory import LATE_BY

__all__ = ["DEFECTS", "LATE_BY", "Defect", "find_defect"]
