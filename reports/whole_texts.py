"""JSON and MessagePack of texts that are no Unicode: the names of files may be any bytes, those of threads any text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec


def json_bytes(value: Any) -> bytes:
    """A value that msgspec knows as JSON; lone surrogates in its texts as `\\udc80`, in characters."""
    return encoded(msgspec.json.encode, value)


def encoded(encode: Callable[[Any], bytes], value: Any) -> bytes:
    """What an encoder of msgspec makes of a value, likewise."""
    try:
        return encode(value)
    except UnicodeEncodeError:
        return encode(_whole(msgspec.to_builtins(value)))


def whole_text(text: str) -> str:
    """The same without lone surrogates, which no file and no socket can have."""
    return text.encode(errors="backslashreplace").decode()


def _whole(value: Any) -> Any:
    if isinstance(value, str):
        return whole_text(value)
    if isinstance(value, dict):
        return {_whole(key): _whole(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_whole(each) for each in value]
    return value
