"""Lifecycle bugs that happened elsewhere, each put back into this engine where it was there, by a context manager.

The engine itself knows nothing of them: a defect replaces one method for as long as its context lasts.  The processes
that the engine starts enter `switched_on`, `activated` or `triggered` as a process extension.
"""

from contextlib import AbstractContextManager

from lowtide.engine.defects.catalogue import DEFECTS, find_defect
from lowtide.engine.defects.defect import Defect
from lowtide.engine.defects.memory import LATE_BY

__all__ = ["DEFECTS", "LATE_BY", "Defect", "activated", "find_defect", "switched_on", "triggered"]


def switched_on(name: str) -> AbstractContextManager[None]:
    """The defect of that name, and what makes it show, in this process.

    Raises:
        ConfigError: there is none.
    """
    return find_defect(name).switched_on()


def activated(name: str) -> AbstractContextManager[None]:
    """A bug alone, without what makes it show.

    Raises:
        ConfigError: there is no bug of that name.
    """
    return find_defect(name).activate()


def triggered(name: str) -> AbstractContextManager[None]:
    """What makes the defect of that name show, in this process, without the defect.

    Raises:
        ConfigError: there is none.
    """
    return find_defect(name).trigger()
