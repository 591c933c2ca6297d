"""The states of an engine's life, and what may be called in each."""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence

from lowtide.engine.worker import SLEEPING_TAGS


class EngineState(enum.Enum):
    """Where an engine is in its life: new -> running <-> asleep -> closed."""

    NEW = "new"
    RUNNING = "running"
    ASLEEP = "asleep"
    CLOSED = "closed"


_ALLOWED = {
    EngineState.NEW: ("create", "shutdown"),
    EngineState.RUNNING: (
        "generate",
        "add_request",
        "step",
        "abort",
        "reset_prefix_cache",
        "reload_weights",
        "update_weights",
        "sleep",
        "shutdown",
    ),
    EngineState.ASLEEP: ("wake", "shutdown"),
    EngineState.CLOSED: ("shutdown",),
}


def allowed_calls(state: EngineState, awake_tags: Collection[str]) -> Sequence[str]:
    """What may be called in a state, as an error says it.

    Args:
        state: the engine's.
        awake_tags: of an engine that is asleep in part: what is awake again.
    """
    if state is not EngineState.ASLEEP or not awake_tags:
        return _ALLOWED[state]
    asleep = next(tag for tag in SLEEPING_TAGS if tag not in awake_tags)
    reload = ("reload_weights", "update_weights") if "weights" in awake_tags else ()
    return (f"wake({asleep!r})", *reload, "shutdown")
