"""How one process of the engine calls a method in another: plain data, encoded by msgspec."""

from __future__ import annotations

from collections.abc import Mapping
from types import GenericAlias
from typing import Any

import msgspec

from lowtide.engine.processes.remote_errors import RemoteError


class Order(msgspec.Struct, frozen=True):
    """A call of a method.

    Attributes:
        name: of the method.
        arguments: encoded, in the order of its parameters.
    """

    name: str
    arguments: msgspec.Raw


class Answer(msgspec.Struct, frozen=True):
    """What became of an order.

    Attributes:
        result: what the method has returned, encoded; nil where it failed.
        running: requests that steps compute.
        waiting: requests that have not begun, or gave way.
        awake: whether weights and KV cache have all their pages.
        mapped: bytes with pages behind them, by arena tag.
        error: why it failed; None where it did not.
    """

    result: msgspec.Raw = msgspec.Raw(b"\xc0")
    running: int = 0
    waiting: int = 0
    awake: bool = False
    mapped: dict[str, int] = {}
    error: RemoteError | None = None


class Signature:
    """What a method that another process may call takes and returns.

    Args:
        stage: that the call belongs to (`lowtide.probes.stages`); None is none.
        parameters: their types, as msgspec decodes them.
        result: likewise.
    """

    def __init__(self, stage: str | None, parameters: tuple[Any, ...] = (), result: Any = None) -> None:
        self.stage = stage
        # Made once: msgspec would read the types anew for each message.
        kinds: Any = GenericAlias(tuple, parameters)
        self._arguments: msgspec.msgpack.Decoder[tuple[Any, ...]] = msgspec.msgpack.Decoder(kinds)
        self._result: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(result)

    def arguments(self, order: Order) -> tuple[Any, ...]:
        """Return an order's arguments.

        Raises:
            msgspec.MsgspecError: they are of other types.
        """
        return self._arguments.decode(order.arguments)

    def returned(self, answer: Answer) -> Any:
        """Return what the method has returned, of an answer without an error."""
        return self._result.decode(answer.result)


Signatures = Mapping[str, Signature]


def call(name: str, *arguments: object) -> Order:
    """Return the call of a method.

    Raises:
        TypeError, ValueError, OverflowError, msgspec.MsgspecError: an argument that msgspec does not encode.
    """
    return Order(name, msgspec.Raw(msgspec.msgpack.encode(arguments)))
