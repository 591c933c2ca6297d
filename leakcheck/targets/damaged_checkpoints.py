"""Damaged copies of a checkpoint's shards: cut short, or with a tensor of another shape. The originals stay."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

Damage: TypeAlias = Literal["shard-cut", "shard-shape"]

_LENGTH = 8
"""Bytes of a safetensors file that say how long its header is; the header is JSON, the tensors' bytes follow it."""


def cut_short(shard: Path, copy: Path) -> None:
    """Writes the first half of `shard` to `copy`, as a download that broke off leaves it."""
    left = shard.stat().st_size // 2
    with shard.open("rb") as source, copy.open("wb") as target:
        while left and (part := source.read(min(left, 16 << 20))):
            target.write(part)
            left -= len(part)


def misshape(shard: Path, copy: Path) -> None:
    """Writes `shard`, a safetensors file, to `copy` with its last tensor of one dimension more: a valid file."""
    whole = shard.read_bytes()
    stop = _LENGTH + int.from_bytes(whole[:_LENGTH], "little")
    header: dict[str, dict[str, Any]] = json.loads(whole[_LENGTH:stop])
    name = next(name for name in reversed(header) if name != "__metadata__")
    header[name]["shape"] = [1, *header[name]["shape"]]
    encoded = json.dumps(header).encode()
    copy.write_bytes(len(encoded).to_bytes(_LENGTH, "little") + encoded + whole[stop:])


DAMAGES: Mapping[str, Callable[[Path, Path], None]] = MappingProxyType(
    {"shard-cut": cut_short, "shard-shape": misshape}
)
"""By kind of fault, what makes the copy."""
