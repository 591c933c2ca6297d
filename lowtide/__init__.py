"""lowtide: does an inference engine's memory come back, and if not, who holds it?

The folders at the top of the repository are the product; this package is the one name under which they are imported
(`lowtide.engine`, `lowtide.probes`, `lowtide.leakcheck`, `lowtide.reports`). Importing it loads neither torch nor
anything heavy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lowtide import old_names

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from lowtide.leakcheck.watching.check import LeakCheck
    from lowtide.probes.processes.agents import agent_environment
    from lowtide.probes.stages import announce, stage

__version__ = "0.1.0"

__all__ = ["LeakCheck", "__version__", "agent_environment", "announce", "stage"]


old_names.install()

_HOMES = {
    "LeakCheck": "lowtide.leakcheck.watching.check",
    "agent_environment": "lowtide.probes.processes.agents",
    "announce": "lowtide.probes.stages",
    "stage": "lowtide.probes.stages",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lowtide' has no attribute {name!r}")
    # Once asked for it is an ordinary attribute: a stage mark must cost next to nothing.
    found = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return found


def load_ipython_extension(ipython: InteractiveShell) -> None:
    """Give a notebook the cell magic `%%leakcheck`: `%load_ext lowtide` calls this."""
    try:
        # By its name, as all that is here: no room below may depend on the notebook.
        notebook = importlib.import_module("lowtide.leakcheck.watching.notebook")
    except ModuleNotFoundError as error:
        if error.name != "rich":
            raise
        from IPython.core.error import UsageError

        raise UsageError('rich is not installed: pip install "lowtide[cli]"') from None
    notebook.register(ipython)
