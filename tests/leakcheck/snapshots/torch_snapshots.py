"""Snapshots of torch's allocator, made by hand as torch makes them."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lowtide.leakcheck.snapshots.allocator_snapshot import AllocatorSnapshot, read_snapshot

MIB = 1 << 20


def frame(function: str, line: int = 1, file: str = "/srv/model.py") -> dict[str, Any]:
    return {"name": function, "filename": file, "line": line}


FORWARD = [frame("empty", 0, "??"), frame("forward", 12), frame("step", 40)]
LOAD = [frame("load_weights", 7), frame("<module>", 90)]


def block(
    size: int,
    frames: Sequence[dict[str, Any]] | None = None,
    state: str = "active_allocated",
    address: int = 0,
) -> dict[str, Any]:
    return {
        "size": size * MIB,
        "requested_size": size * MIB,
        "state": state,
        "address": address,
        "frames": list(frames or ()),
    }


def segment(
    *blocks: dict[str, Any], device: int = 0, pool: tuple[int, int] = (0, 0), address: int = 0
) -> dict[str, Any]:
    return {
        "device": device,
        "address": address,
        "total_size": sum(each["size"] for each in blocks),
        "segment_pool_id": pool,
        "stream": 0,
        "blocks": list(blocks),
    }


def event(action: str, address: int, time: int, **more: Any) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": MIB, "stream": 0, "time_us": time, **more}


def history(entries: int) -> list[list[dict[str, Any]]]:
    return [[{"action": "alloc", "addr": turn, "size": 512, "frames": LOAD} for turn in range(entries)]]


def annotation(stage: str, time: int, name: str, device: int = 0) -> dict[str, Any]:
    return {"name": name, "stage": stage, "device": device, "time_us": time}


def written(path: Path, *segments: dict[str, Any], protocol: int = 4, entries: int = 3, **more: Any) -> Path:
    whole = {"segments": list(segments), "device_traces": history(entries), "allocator_settings": {}} | more
    path.write_bytes(pickle.dumps(whole, protocol=protocol))
    return path


def read(*segments: dict[str, Any], path: Path, **more: Any) -> AllocatorSnapshot:
    return read_snapshot(written(path, *segments, **more))
