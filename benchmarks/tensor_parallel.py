"""The life of an engine of several ranks: what each rank holds after each stage, and whether its tokens are one rank's.

On cards, what the driver counts for each rank's process; beside it what the rank's arenas have mapped, and its private
host memory. The difference between the driver's figure and the arenas is the card's context, libraries and, awake,
NCCL's buffers: `--keep-communicators` leaves those in place asleep, as vLLM did before #51485. `--rank-keeps` is the
bug of that name: the last rank does not sleep.

    python benchmarks/tensor_parallel.py                               # 8b on two cards
    python benchmarks/tensor_parallel.py --preset tiny --device cpu    # anywhere
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import machine

from lowtide.engine import EngineConfig, LLMEngine, SamplingParams
from lowtide.engine.defects import find_defect, replaced
from lowtide.engine.processes import ChildProcess
from lowtide.engine.ranks import MultiprocExecutor
from lowtide.probes.device.driver import Driver, find_driver
from lowtide.probes.host.process_files import rollup

PROMPTS = [[1 + index, *range(2, 50)] for index in range(8)]
MAX_TOKENS = 64
MIB = 1 << 20


def ranks_of(engine: LLMEngine) -> list[ChildProcess]:
    """The ranks' processes; none with a single rank."""
    worker = engine._core.worker if engine._core is not None else None
    return list(worker.children) if isinstance(worker, MultiprocExecutor) else []


def read_ranks(engine: LLMEngine, driver: Driver, cards: int) -> list[dict[str, Any]]:
    """Bytes of each rank: the driver's figure (None where there is none), arenas by tag, private host memory."""
    by_pid: dict[int, int] = {}
    for index in range(cards):
        for pid, size in driver.processes(index).items():
            by_pid[pid] = by_pid.get(pid, 0) + (size or 0)
    readings = []
    for number, rank in enumerate(ranks_of(engine)):
        host = rollup(rank.pid)
        readings.append(
            {
                "rank": number,
                "driver_bytes": by_pid.get(rank.pid) if cards else None,
                "arena_bytes": dict(rank.answer.mapped),
                "private_host_bytes": host.private if host is not None else None,
            }
        )
    return readings


def tokens_of(engine: LLMEngine) -> list[tuple[int, ...]]:
    """64 greedy tokens of each prompt."""
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    return [output.token_ids for output in engine.generate(PROMPTS, params)]


def common_start(some: tuple[int, ...], others: tuple[int, ...]) -> int:
    """How many leading tokens are the same."""
    differing = (index for index, pair in enumerate(zip(some, others, strict=True)) if pair[0] != pair[1])
    return next(differing, len(some))


def live(config: EngineConfig, driver: Driver, cards: int) -> dict[str, Any]:
    """One life with both sleeps; a reading of every rank after each stage."""
    engine = LLMEngine(config)
    stages: list[dict[str, Any]] = []
    tokens: list[list[tuple[int, ...]]] = []
    calls: tuple[tuple[str, Callable[[], object]], ...] = (
        ("create", engine.create),
        ("infer", lambda: tokens.append(tokens_of(engine))),
        ("sleep(1)", lambda: engine.sleep(1)),
        ("wake", engine.wake),
        ("infer", lambda: tokens.append(tokens_of(engine))),
        ("sleep(2)", lambda: engine.sleep(2)),
        ("wake", engine.wake),
        ("infer", lambda: tokens.append(tokens_of(engine))),
        ("sleep(1)", lambda: engine.sleep(1)),
        ("wake", engine.wake),
    )
    try:
        for name, call in calls:
            started = time.perf_counter()
            call()
            seconds = time.perf_counter() - started
            stages.append({"stage": name, "seconds": seconds, "ranks": read_ranks(engine, driver, cards)})
        pids = [rank.pid for rank in ranks_of(engine)]
    finally:
        started = time.perf_counter()
        engine.shutdown()
        seconds = time.perf_counter() - started
    left = {pid for index in range(cards) for pid in driver.processes(index)} & set(pids)
    alive = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    stages.append({"stage": "shutdown", "seconds": seconds, "ranks": [], "left": sorted({*left, *alive})})
    return {"stages": stages, "tokens": tokens}


def table(stages: list[dict[str, Any]]) -> str:
    """The stages as Markdown, MiB: of each rank the driver's figure, or without one its arenas."""
    size = len(stages[0]["ranks"])
    names = [f"rank {number}: {what}" for number in range(size) for what in ("driver", "arenas", "host")]
    rows = [f"| stage | seconds | {' | '.join(names)} |", "| --- " * (2 + len(names)) + "|"]
    for stage in stages:
        cells = []
        for reading in stage["ranks"]:
            sizes = (reading["driver_bytes"], sum(reading["arena_bytes"].values()), reading["private_host_bytes"])
            cells += ["" if figure is None else f"{figure / MIB:.1f}" for figure in sizes]
        cells += [""] * (len(names) - len(cells))
        rows.append(f"| {stage['stage']} | {stage['seconds']:.2f} | {' | '.join(cells)} |")
    return "\n".join(rows)


@contextmanager
def switched_on(keep_communicators: bool, rank_keeps: bool) -> Iterator[None]:
    """What is to be left out of a sleep."""
    with ExitStack() as stack:
        if keep_communicators:
            stack.enter_context(replaced(MultiprocExecutor, "suspend_groups", lambda self: None))
        if rank_keeps:
            stack.enter_context(find_defect("rank-keeps").activate())
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", type=int, default=2, help="ranks")
    parser.add_argument("--dtype", help="in place of the model's own; in bfloat16 rounding decides between two tokens")
    parser.add_argument("--kv-cache-bytes", type=int, help="of each rank")
    parser.add_argument("--keep-communicators", action="store_true")
    parser.add_argument("--rank-keeps", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    args = parser.parse_args()

    on_cards = args.device != "cpu"
    driver = find_driver()
    # In float64 on a CPU: additions in another order must not decide between two tokens.
    config = EngineConfig(
        model=args.preset,
        device=args.device,
        kv_cache_bytes=args.kv_cache_bytes,
        tensor_parallel_size=args.size,
        dtype=args.dtype or (None if on_cards else "float64"),
    )
    with switched_on(args.keep_communicators, args.rank_keeps):
        several = live(config, driver, args.size if on_cards else 0)
    # After it, so that this process has no context on a card while the ranks are measured.
    with LLMEngine(replace(config, tensor_parallel_size=1)) as single:
        expected = tokens_of(single)
    equal = [
        sum(own == one for own, one in zip(tokens, expected, strict=True)) / len(expected)
        for tokens in several["tokens"]
    ]
    alike = [
        [common_start(own, one) for own, one in zip(tokens, expected, strict=True)] for tokens in several["tokens"]
    ]
    infers = [stage["seconds"] for stage in several["stages"] if stage["stage"] == "infer"]
    results = {
        "preset": args.preset,
        "ranks": args.size,
        "keep_communicators": args.keep_communicators,
        "rank_keeps": args.rank_keeps,
        "stages": several["stages"],
        "prompts_with_the_tokens_of_one_rank": equal,
        "leading_tokens_of_one_rank": alike,
        "all_inferences_alike": all(tokens == several["tokens"][0] for tokens in several["tokens"]),
        "tokens_per_second": [len(PROMPTS) * MAX_TOKENS / seconds for seconds in infers],
        "processes_left": several["stages"][-1]["left"],
    }
    machine.write("tensor_parallel", results, args.out)
    print()
    print(table(several["stages"]))


if __name__ == "__main__":
    main()
