"""The JSON Schema of a type, the same under every version of Python."""

from __future__ import annotations

import inspect
from typing import Annotated, Any

import msgspec

Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
"""What databases and readers in other languages can hold: a longer number in a file could be read and not written."""

Float15 = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]
"""Seconds and rates: sums and products of them stay finite, which JSON needs."""


def schema_of(kind: Any, title: str) -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a type.

    Args:
        kind: the type.
        title: the name of the schema, with its version.
    """
    schema = _with_clean_texts(msgspec.json.schema(kind))
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title, **schema}


def _with_clean_texts(schema: Any) -> Any:
    """Return a schema without the indentation of docstrings, which Python 3.13 takes away and earlier ones keep."""
    if isinstance(schema, dict):
        return {key: _clean(key, value) for key, value in schema.items()}
    return schema


def _clean(key: str, value: Any) -> Any:
    return inspect.cleandoc(value) if key == "description" and isinstance(value, str) else _with_clean_texts(value)
