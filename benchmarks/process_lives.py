"""Engines in several processes: random lives without a finding, and kills of each process in each stage.

Goals: 300 lives with the core in a process of its own and 100 with two ranks besides, no finding; after every kill our
error within 10 s where the caller lives, every other process ended within 10 s, and nothing left in /dev/shm or on a
card. The cards' figures are for the whole card: run it where nothing else does.
"""

from __future__ import annotations

import argparse
import itertools
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import machine
import psutil

from lowtide.leakcheck.lives.fuzz import fuzz
from lowtide.leakcheck.targets.reference import ReferenceTarget
from lowtide.probes.device.driver import Driver, find_driver
from lowtide.probes.device.driver.card_holders import read_card_holders

SHAPES: dict[str, dict[str, Any]] = {
    "core": {"engine_process": True},
    "core and two ranks": {"engine_process": True, "tensor_parallel_size": 2},
}

CLIENT = """
import sys
from lowtide.engine import EngineConfig, LLMEngine
stage, settings = sys.argv[1], eval(sys.argv[2])
engine = LLMEngine(EngineConfig(**settings))
begins = lambda: print("now", flush=True)
def say(error):
    # A shutdown raises the errors of its steps together, and one of them may be those of the ranks' steps.
    for part in getattr(error, "exceptions", ()):
        say(part)
    if not hasattr(error, "exceptions"):
        print(type(error).__name__, flush=True)
calls = {
    "infer": lambda: engine.generate([list(range(40))]),
    "sleep and wake": lambda: (engine.sleep(2), engine.wake()),
    "reload": engine.reload_weights,
    "shutdown": engine.shutdown,
}
try:
    if stage == "create":
        begins()
    engine.create()
    if stage in ("asleep", "idle"):
        engine.sleep(1) if stage == "asleep" else None
        begins()
        sys.stdin.read()
        engine.wake() if stage == "asleep" else engine.generate([[1, 2, 3]])
    elif stage != "create":
        begins()
        sys.stdin.readline()
        calls[stage]()
        # A second shutdown does nothing, for ever.
        while stage != "shutdown":
            calls[stage]()
except BaseException as error:
    say(error)
finally:
    try:
        engine.shutdown()
    except BaseException as error:
        say(error)
"""

STAGES = ("create", "infer", "sleep and wake", "asleep", "idle", "reload", "shutdown")
VICTIMS = {
    "client": (),
    "core": ("lowtide::Engine", "lowtide::EngineCore"),
    "rank 0": ("lowtide::Wo_TP0", "lowtide::Worker_TP0"),
    "rank 1": ("lowtide::Wo_TP1", "lowtide::Worker_TP1"),
}
"""The names of processes, without and with `setproctitle`."""

MOST_LIVES = 50
LIMIT_S = 10.0
START_S = 60.0
"""For a process: torch alone takes some 20 s to import on a machine that has not read it yet."""
SHARED_MEMORY = Path("/dev/shm")


def find(client: subprocess.Popen[str], names: Sequence[str]) -> psutil.Process:
    """The client, or the process below it that has one of some names, as soon as there is one.

    Raises:
        TimeoutError: there is none in time, or the client has ended; with what it said.
    """
    top, until = psutil.Process(client.pid), time.monotonic() + START_S
    while time.monotonic() < until and client.poll() is None:
        for process in [top] if not names else top.children(recursive=True):
            with suppress(psutil.Error):
                if not names or process.name() in names:
                    return process
        time.sleep(0.005)
    client.kill()
    raise TimeoutError(f"no process {names[-1]} below pid {client.pid}, which said: {client.communicate()[0]}")


def used_on_cards(driver: Driver) -> int:
    """Bytes in use on all cards."""
    return sum(card.used or 0 for card in read_card_holders(driver))


def left_on_cards(driver: Driver, before: int) -> int:
    """Bytes that are in use on the cards beyond what was before, as soon as they are none, or when time is up."""
    until = time.monotonic() + LIMIT_S
    while (left := used_on_cards(driver) - before) > 0 and time.monotonic() < until:
        time.sleep(0.1)
    return max(0, left)


def kill(stage: str, victim: str, settings: dict[str, Any], driver: Driver) -> dict[str, Any]:
    """One kill: the error that the caller got, the seconds until the last process had ended, and what is left."""
    before, used = set(SHARED_MEMORY.iterdir()), used_on_cards(driver)
    command = [sys.executable, "-c", CLIENT, stage, repr(settings)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        client.stdout.readline()
        process = find(client, VICTIMS[victim])
        if stage not in ("create", "asleep", "idle"):
            client.stdin.write("go\n")
            client.stdin.flush()
        # A process has its name once it has imported everything: a small engine is created right after that.
        time.sleep({"create": 0.0, "shutdown": 0.02}.get(stage, 0.05))
        family = psutil.Process(client.pid).children(recursive=True)
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
        began = time.monotonic()
        client.stdin.close()
        said = client.stdout.read().split()
        _, alive = psutil.wait_procs(family, timeout=LIMIT_S)
        seconds = time.monotonic() - began
        for left in alive:
            left.kill()
    return {
        "stage": stage,
        "victim": victim,
        "error": said[0] if said else None,
        "seconds": round(seconds, 2),
        "processes_left": len(alive),
        "files_left": sorted(map(str, set(SHARED_MEMORY.iterdir()) - before)),
        "card_bytes_left": left_on_cards(driver, used),
    }


def search(device: str, settings: dict[str, Any], examples: int, seed: int) -> dict[str, Any]:
    """What a search finds."""
    found = fuzz(lambda: ReferenceTarget(device, settings), examples=examples, seed=seed)
    return {
        "lives": found.coverage.lives,
        "calls": found.coverage.calls,
        "states": len(found.coverage.states),
        "seconds": round(found.seconds, 1),
        "findings": [finding.message for finding in found.findings],
        "not_measured": [item.why for item in found.not_measured],
        "reason": found.reason,
    }


def parts_of(examples: int) -> list[int]:
    """As many lives in searches of `MOST_LIVES`, each with another seed: one that ends early has shown something."""
    return [min(MOST_LIVES, examples - done) for done in range(0, examples, MOST_LIVES)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--shape", action="append", choices=tuple(SHAPES), help="default: all")
    parser.add_argument("--stage", action="append", choices=STAGES, help="of kills; default: all")
    parser.add_argument("--lives", type=int, default=300, help="with the core alone; a third as many with two ranks")
    parser.add_argument("--kills", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    args = parser.parse_args()

    shapes = {shape: settings for shape, settings in SHAPES.items() if not args.shape or shape in args.shape}
    driver = find_driver()
    results: dict[str, Any] = {"goals": {"findings": 0, "seconds_after_a_kill": LIMIT_S, "left": 0}}
    if args.kills:
        engine = {"device": args.device, "kv_cache_bytes": 1 << 20 if args.device == "cpu" else 64 << 20}
        cases = [
            (shape, stage, victim)
            for shape, stage, victim in itertools.product(shapes, args.stage or STAGES, VICTIMS)
            if "ranks" in shape or not victim.startswith("rank")
        ]
        results["kills"] = kills = []
        for shape, stage, victim in cases:
            kills.append({"shape": shape, **kill(stage, victim, {**engine, **shapes[shape]}, driver)})
            # A run that is cut off has shown something.
            print(kills[-1], file=sys.stderr, flush=True)
    if args.lives:
        for shape, settings in shapes.items():
            examples = args.lives // 3 if "ranks" in shape else args.lives
            results[f"lives, {shape}"] = searches = []
            for turn, part in enumerate(parts_of(examples)):
                searches.append(search(args.device, settings, part, seed=7 + turn))
                print(shape, searches[-1], file=sys.stderr, flush=True)
    machine.write("process_lives", results, args.out)


if __name__ == "__main__":
    main()
