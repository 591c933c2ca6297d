"""How the judgement of a leak grows with it: tensors in containers and chains, at a thousand, ten thousand, ...

Each shape and size in a process of its own, in seconds of its processor time, so that a busy machine changes little:
`judging` is the end of a `LeakCheck` block that left so many things, with remedies, less that of one that left one;
`report` is writing the report's folder. The floor is one `gc.collect()` of the same heap, in the same process. The peer
is objgraph's search for one way to one of the tensors, which is all that it tells; it is given up after `--limit`
seconds. `slope` is the exponent: how many times longer it takes for ten times as much, as a power of ten, by the two
largest sizes that were measured; 1 is linear. `ratio` is judging over the floor.
"""

from __future__ import annotations

import argparse
import collections
import gc
import json
import math
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine
import torch

import lowtide
from lowtide.reports.folder import write_folder

KEPT: list[Any] = []

SIZES = (1_000, 10_000, 100_000)


class Node:
    """An element of a linked list."""

    def __init__(self, value: Any, following: Node | None) -> None:
        self.value = value
        self.next = following


def a_tensor() -> torch.Tensor:
    return torch.ones(())


def in_list(count: int) -> None:
    KEPT.extend(a_tensor() for _ in range(count))


def in_dict(count: int) -> None:
    KEPT.append({f"key {number}": a_tensor() for number in range(count)})


def in_deque(count: int) -> None:
    KEPT.append(collections.deque(a_tensor() for _ in range(count)))


def in_linked_list(count: int) -> None:
    node = None
    for _ in range(count):
        node = Node(a_tensor(), node)
    KEPT.append(node)


def behind_autograd(count: int) -> None:
    value = torch.ones((), requires_grad=True)
    for _ in range(count):
        value = value * 1.0001
    KEPT.append(value)


def in_nested_lists(count: int) -> None:
    held: Any = a_tensor()
    for _ in range(count):
        held = [held]
    KEPT.append(held)


SHAPES: dict[str, Callable[[int], None]] = {
    "list": in_list,
    "dict": in_dict,
    "deque": in_deque,
    "linked-list": in_linked_list,
    "autograd": behind_autograd,
    "nested-lists": in_nested_lists,
}


def judged(fill: Callable[[int], None], count: int) -> tuple[float, lowtide.LeakCheck]:
    """Processor seconds of the end of a block that left so many things."""
    check = lowtide.LeakCheck(remedies=True, processes=False)
    with check:
        fill(count)
        started = time.process_time()
    return time.process_time() - started, check


def measure(shape: str, count: int, limit: int) -> dict[str, Any]:
    fill = SHAPES[shape]
    # What a first judgement loads is not counted.
    judged(fill, 1)
    KEPT.clear()
    alone, _ = judged(fill, 1)
    KEPT.clear()
    fill(count)
    floor = processor_seconds(gc.collect)
    peer = found_by_objgraph(limit)
    KEPT.clear()
    gc.collect()
    seconds, check = judged(fill, count)
    with tempfile.TemporaryDirectory() as folder:
        report = processor_seconds(lambda: write_folder(check.report, Path(folder)))
    (subject,) = check.report.subjects
    return {
        "judging_seconds": max(0.0, seconds - alone),
        "report_seconds": report,
        "floor_seconds": floor,
        "objgraph_seconds": peer,
        "findings": len(subject.findings),
        "bytes": sum(finding.bytes for finding in subject.findings),
        "returned_bytes": sum(finding.remedy.returns_bytes for finding in subject.findings if finding.remedy),
    }


def processor_seconds(call: Callable[[], object]) -> float:
    started = time.process_time()
    call()
    return time.process_time() - started


def found_by_objgraph(limit: int) -> float | None:
    """Processor seconds for one way to the last tensor; None where it was given up."""
    import objgraph

    target = [item for item in gc.get_objects() if type(item) is torch.Tensor][-1:]
    signal.signal(signal.SIGALRM, _give_up)
    signal.alarm(limit)
    try:
        return processor_seconds(
            lambda: objgraph.find_backref_chain(target[0], objgraph.is_proper_module, max_depth=1 << 20)
        )
    except TimeoutError:
        return None
    finally:
        signal.alarm(0)


def _give_up(*_: object) -> None:
    raise TimeoutError


def slope(sizes: list[int], seconds: list[float | None]) -> float | None:
    """The exponent between the two largest sizes that were measured."""
    known = [(size, each) for size, each in zip(sizes, seconds, strict=True) if each]
    if len(known) < 2:
        return None
    (few, before), (many, after) = known[-2:]
    return math.log(after / before) / math.log(many / few)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", nargs=2, metavar=("SHAPE", "SIZE"), help="measure this one here, and print it")
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--sizes", nargs="*", type=int, default=list(SIZES))
    parser.add_argument("--limit", type=int, default=30, help="seconds after which objgraph is given up")
    parser.add_argument("--timeout", type=int, default=900, help="seconds after which a size of a shape is given up")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    args = parser.parse_args()
    if args.case:
        print(json.dumps(measure(args.case[0], int(args.case[1]), args.limit)))
        return
    results = {}
    for shape in args.shapes:
        sizes: dict[str, Any] = {}
        for size in args.sizes:
            command = [sys.executable, __file__, "--case", shape, str(size), "--limit", str(args.limit)]
            try:
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=args.timeout)
            except subprocess.TimeoutExpired:
                sizes[str(size)] = {"judging_seconds": None, "given_up_after_seconds": args.timeout}
                continue
            found = json.loads(done.stdout)
            sizes[str(size)] = {**found, "ratio": found["judging_seconds"] / found["floor_seconds"]}
        slopes = {
            name: slope(args.sizes, [found.get(f"{name}_seconds") for found in sizes.values()])
            for name in ("judging", "report", "floor", "objgraph")
        }
        results[shape] = {"sizes": sizes, "slope": slopes}
        print(shape, *(f"{name} {each:.2f}" for name, each in slopes.items() if each is not None), file=sys.stderr)
    machine.write("scaling", results, args.out)


if __name__ == "__main__":
    main()
