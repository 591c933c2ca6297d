"""The agent in a child process: what it costs at the start, at rest, and how much longer an answer takes from there.

Goals: 12 ms at the start of a child without torch, 3 MiB, no wake-up at rest, and 50 ms more for a finding's path than
in the own process. The same child without the agent is the peer, started in turn with it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import machine
import msgspec
import torch

from lowtide.leakcheck.processes.messages import Begin, ExplainAsleep, encode
from lowtide.leakcheck.processes.own_tensors import OwnTensors
from lowtide.probes.host.process_files import rollup
from lowtide.probes.processes.agents import Agents
from lowtide.reports.schema import Finding

WAITS = "import sys; print('ready', flush=True); sys.stdin.read()"

ENGINE = """
import sys, torch
HELD = []
heap = [[number] for number in range(300_000)]
print('ready', flush=True)
for line in sys.stdin:
    HELD.append(torch.zeros(1 << 20))
    print('done', flush=True)
"""

LEAK = encode(ExplainAsleep(cycle=1, kind="cpu"))
INFER = encode(Begin(stage="infer", cycle=1))


def started(text: str, environment: dict[str, str]) -> tuple[subprocess.Popen[str], float]:
    """A child that is ready, and the milliseconds that this took."""
    begun = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process, (time.perf_counter() - begun) * 1000


def start_costs(agents: Agents, repeats: int) -> dict[str, float]:
    """Milliseconds and bytes of children with the agent and without, one after the other in turn."""
    without = {name: value for name, value in os.environ.items() if name not in agents.environment()}
    took: dict[str, list[float]] = {"with": [], "without": []}
    private: dict[str, list[int]] = {"with": [], "without": []}
    for _ in range(repeats):
        for name, environment in (("without", without), ("with", dict(os.environ))):
            process, milliseconds = started(WAITS, environment)
            took[name].append(milliseconds)
            memory = rollup(process.pid)
            assert memory is not None
            private[name].append(memory.private)
            process.communicate()
    differences = [there - here for there, here in zip(took["with"], took["without"], strict=True)]
    more = statistics.median(private["with"]) - statistics.median(private["without"])
    return {
        "without_ms": round(statistics.median(took["without"]), 2),
        "with_ms": round(statistics.median(took["with"]), 2),
        "difference_ms": round(statistics.median(differences), 2),
        "private_bytes_more": int(more),
    }


def wake_ups(seconds: float) -> int:
    """How often the threads of a waiting child were switched to, the agent's among them."""
    process, _ = started(WAITS, dict(os.environ))

    def switches() -> int:
        found = 0
        for status in Path(f"/proc/{process.pid}/task").glob("*/status"):
            lines = [line for line in status.read_text().splitlines() if "ctxt_switches" in line]
            found += sum(int(line.split()[-1]) for line in lines)
        return found

    time.sleep(0.2)
    before = switches()
    time.sleep(seconds)
    woken = switches() - before
    process.communicate()
    return woken


def answer_costs(agents: Agents, repeats: int) -> dict[str, float]:
    """Milliseconds until a leak's path is known, in a child and in this process, with heaps of about one size."""
    process, _ = started(ENGINE, dict(os.environ))
    assert process.stdin is not None
    assert process.stdout is not None
    agents.ask(process.pid, INFER)
    own, kept = OwnTensors(), []
    heap = [[number] for number in range(300_000)]
    own.begin("infer", 1)
    there, here = [], []
    for _ in range(repeats):
        process.stdin.write("infer\n")
        process.stdin.flush()
        process.stdout.readline()
        begun = time.perf_counter()
        findings = msgspec.msgpack.decode(agents.ask(process.pid, LEAK), type=list[Finding])
        there.append((time.perf_counter() - begun) * 1000)
        assert [finding.holder for finding in findings] == ["__main__.HELD" if len(there) > 1 else "__main__.HELD[0]"]
        kept.append(torch.zeros(1 << 20))
        begun = time.perf_counter()
        assert own.asleep(1, "cpu")
        here.append((time.perf_counter() - begun) * 1000)
    process.stdin.close()
    process.wait()
    del heap
    return {"child_ms": round(statistics.median(there), 1), "own_ms": round(statistics.median(here), 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    args = parser.parse_args()
    with ExitStack() as stack:
        agents = Agents()
        agents.start()
        stack.callback(agents.stop)
        results = {
            "start": start_costs(agents, args.repeats),
            "wake_ups_in_2_s": wake_ups(2.0),
            "path": answer_costs(agents, min(args.repeats, 10)),
            "goals": {"start_ms": 12, "private_bytes_more": 3 << 20, "wake_ups": 0, "path_ms_more": 50},
        }
    machine.write("agents", results, args.out)


if __name__ == "__main__":
    main()
