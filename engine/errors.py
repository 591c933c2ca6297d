"""What the engine raises: own types, each with a message that says what to do."""

from __future__ import annotations

from collections.abc import Iterable


class EngineError(RuntimeError):
    """Base of everything that the engine raises on purpose."""


class ConfigError(EngineError, ValueError):
    """A setting that cannot work; the message names the setting and what is allowed."""


class CheckpointError(EngineError):
    """A checkpoint folder that cannot be loaded; the message names the file or the tensor."""


class WeightUpdateError(EngineError, ValueError):
    """Weights that were sent and cannot be loaded; the message names the tensor."""


class RequestError(EngineError, ValueError):
    """A request that can never be served; the message says which limit it breaks."""


class OutOfMemoryError(EngineError):
    """The device or the host has no room for what was asked; the message says how much and for what."""


class EngineStateError(EngineError):
    """A call that is not legal in the engine's present state."""

    def __init__(self, call: str, state: str, allowed: Iterable[str], detail: str = "") -> None:
        self.call = call
        self.state = state
        self.allowed = tuple(allowed)
        said = f"{call} is not allowed while the engine is {state}"
        if detail:
            said += f" ({detail})"
        super().__init__(f"{said}; allowed now: {', '.join(self.allowed) or 'nothing'}")


class DriverError(EngineError):
    """A driver call failed for another reason than a lack of memory; the message has the driver's own words."""


class KVTransferError(EngineError):
    """A copy of KV blocks to or from the host failed or does not end; the cause is the copy's own error."""


class EngineDeadError(EngineError):
    """A process of the engine has ended without being asked to; the message names it and how it ended."""


class ChannelError(EngineError):
    """Two processes of the engine do not understand each other, or one does not answer in time."""


class CollectiveError(EngineError):
    """A rank could not exchange with the others, because one of them failed; that one's error says why."""
