"""Fingerprint and pointer scan beside a plain read of the same bytes, and what a scan of random data finds by chance.

Floor of both: each byte is read once. The plain read is torch's sum of the bytes as float32, about 4.4 TB/s on one
H200: 100 GB in 23 ms. The goal of both is 95 % of that, and 100 GB in under 25 ms.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import machine
import torch

from lowtide.probes.device.allocations import read_allocations
from lowtide.probes.kernels import fingerprint_version, search_version
from lowtide.probes.kernels.definition import RangeTable
from lowtide.probes.memory.contents import take_fingerprints
from lowtide.probes.memory.pointers import ALIGNMENT, LabelledRange, find_pointers, gone_since
from lowtide.probes.memory.ranges import merge
from lowtide.probes.memory.tensors import survey_storages

GIB = 1 << 30
PIECE = 64 << 20  # bytes that are made at a time, so that making them takes little memory


def seconds(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The median time of a call that waits for the device; on a card between two events of it."""
    call()
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) / 1e3)
        else:
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
    return statistics.median(times)


def live_ranges(device: torch.device) -> list[LabelledRange]:
    """All memory that this process has on the device."""
    known = [
        (storage.address, storage.bytes) for storage in survey_storages().storages if storage.device == str(device)
    ]
    if device.type == "cuda":
        known += [(segment["address"], segment["total_size"]) for segment in torch.cuda.memory_snapshot()]
        known += read_allocations(device.index) or ()
    return list(gone_since([LabelledRange(start, start + size, "live") for start, size in merge(known)], []))


def pieces(data: torch.Tensor) -> Iterator[torch.Tensor]:
    for start in range(0, data.numel(), PIECE):
        yield data[start : start + PIECE]


def fill(data: torch.Tensor, kind: str) -> None:
    """Fills bytes with random data: every bit, or weights as a model has them."""
    for piece in pieces(data):
        if kind == "uniform":
            piece.view(torch.int64).random_()
            piece.view(torch.int64).mul_(2).bitwise_xor_(torch.randint_like(piece.view(torch.int64), 2))
        elif kind == "bf16":
            piece.view(torch.bfloat16).normal_(0, 0.02)
        elif kind == "fp8":
            piece.view(torch.float8_e4m3fn).copy_(torch.randn(len(piece), device=piece.device))
        elif kind == "int8":
            piece.view(torch.int8).copy_(
                torch.randn(len(piece), device=piece.device).mul_(40).round_().clamp_(-127, 127)
            )


def rates(data: torch.Tensor, ranges: list[LabelledRange], repeats: int) -> dict[str, float]:
    device, size = data.device, data.numel()
    table = RangeTable(tuple(part.start for part in ranges), tuple(part.stop for part in ranges), ALIGNMENT - 1)
    # As with expandable segments, which the driver places low: random data then is in the hull once in 2^17 words.
    far_apart = RangeTable((0x3_0200_0000, *table.starts), (0x3_0400_0000, *table.stops), ALIGNMENT - 1)
    calls: dict[str, Callable[[], object]] = {
        "plain_read": lambda: data.view(torch.float32).sum().item(),
        "fingerprint": lambda: fingerprint_version(device)([data], device),
        "search": lambda: search_version(device)([data], device, table, 64),
        "search_with_ranges_far_apart": lambda: search_version(device)([data], device, far_apart, 64),
        "fingerprint_at_odd_address": lambda: fingerprint_version(device)([data[1:]], device),
        "fingerprint_at_even_address": lambda: fingerprint_version(device)([data[2:]], device),
        "take_fingerprints": lambda: take_fingerprints({"data": data}),
        "find_pointers": lambda: find_pointers({"data": data}, ranges),
    }
    found: dict[str, float] = {"bytes": size}
    for name, call in calls.items():
        taken = seconds(call, device, repeats if "address" not in name else 3)
        found[f"{name}_seconds"] = taken
        found[f"{name}_gb_per_second"] = size / taken / 1e9
    for name in ("fingerprint", "search"):
        found[f"{name}_of_plain_read"] = found["plain_read_seconds"] / found[f"{name}_seconds"]
    return found


def by_chance(data: torch.Tensor, kind: str) -> dict[str, object]:
    """What a scan reports of random data, as tensors of a sixty-fourth each."""
    fill(data, kind)
    tensors = {f"layer.{index}": part for index, part in enumerate(data.chunk(64))}
    ranges = live_ranges(data.device)
    reading = find_pointers(tensors, ranges)
    return {
        "data": kind,
        "bytes": data.nbytes,
        "ranges": len(ranges),
        "bytes_in_ranges": sum(part.stop - part.start for part in ranges),
        "from": hex(ranges[0].start),
        "to": hex(ranges[-1].stop),
        "tensors_with_pointers": len(reading.pointers),
        "aligned_words_by_chance": sum(tensor.aligned for tensor in reading.by_chance),
        "unaligned_words": sum(tensor.unaligned for tensor in reading.tensors),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    card = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda:0" if card else "cpu")
    parser.add_argument("--bytes", type=int, nargs="*", default=[8 * GIB, 100_000_000_000] if card else [GIB])
    parser.add_argument("--random-bytes", type=int, default=64 * GIB if card else GIB)
    parser.add_argument("--ballast", type=int, default=60 * GIB if card else GIB, help="more live memory, for ranges")
    parser.add_argument("--repeats", type=int, default=20 if card else 5)
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    args = parser.parse_args()

    device = torch.device(args.device)
    timed = []
    for size in args.bytes:
        data = torch.empty(size - size % PIECE, dtype=torch.uint8, device=device)
        fill(data, "bf16")
        timed.append(rates(data, live_ranges(device), args.repeats))
        del data
    if card:
        torch.cuda.empty_cache()
    data = torch.empty(max(PIECE, args.random_bytes - args.random_bytes % PIECE), dtype=torch.uint8, device=device)
    ballast = torch.empty(args.ballast, dtype=torch.uint8, device=device)
    chance = [by_chance(data, kind) for kind in ("uniform", "bf16", "fp8", "int8")]
    del data, ballast
    machine.write("oracles", {"rates": timed, "goal_of_plain_read": 0.95, "random_data": chance}, args.out)


if __name__ == "__main__":
    main()
