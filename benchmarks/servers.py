"""What agents, and a watch, cost a server: its answers in a second, and how long they take.

python benchmarks/servers.py FOLDER [--rounds N] [--seconds S] [--clients N] -- COMMAND…

COMMAND starts a server that speaks OpenAI completions, on the port that its `--port` names. In each round it is started
three times, in changing order: by itself, under `lowtide exec` and under `lowtide watch`. Each time the same requests
are made for the same time, after a warm-up. The floor is the server by itself: the ratios are to it, round by round.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.machine import write

WARM_UP_S = 10.0
START_S = 600.0
LOWTIDE = (sys.executable, "-m", "lowtide")
WAYS = {"plain": (), "exec": (*LOWTIDE, "exec", "--"), "watch": (*LOWTIDE, "watch", "--for", "1h", "--")}
BODY = {"prompt": [*range(10, 42)], "max_tokens": 16, "temperature": 0, "ignore_eos": True}


def measure(way: str, command: list[str], url: str, seconds: float, clients: int) -> dict[str, float]:
    """Run the server in one way; return its answers in a second and their times in seconds."""
    with subprocess.Popen([*WAYS[way], *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            took = asyncio.run(_asked(url, seconds, clients))
        finally:
            # To the server itself, which ends lowtide's command with it.
            process.send_signal(signal.SIGTERM)
    took.sort()
    return {
        "per_second": len(took) / seconds,
        "p50_s": statistics.median(took),
        "p99_s": took[int(len(took) * 0.99)],
    }


async def _asked(url: str, seconds: float, clients: int) -> list[float]:
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=300) as client:
        await _until_ready(client)
        body = {"model": (await client.get("/v1/models")).json()["data"][0]["id"], **BODY}
        took: list[float] = []
        begins = time.monotonic() + WARM_UP_S

        async def ask() -> None:
            while (began := time.monotonic()) < begins + seconds:
                (await client.post("/v1/completions", json=body)).raise_for_status()
                if began >= begins:
                    took.append(time.monotonic() - began)

        await asyncio.gather(*(ask() for _ in range(clients)))
        return took


async def _until_ready(client: httpx.AsyncClient) -> None:
    latest = time.monotonic() + START_S
    while time.monotonic() < latest:
        try:
            if (await client.get("/health")).is_success:
                return
        except httpx.HTTPError:
            pass
        await asyncio.sleep(0.2)
    raise SystemExit(f"the server did not answer within {START_S:g} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("command", nargs="+")
    asked = parser.parse_args()
    port = re.search(r"--port[ =](\d+)", " ".join(asked.command))
    if port is None:
        raise SystemExit("the command must name its --port")
    url = f"http://127.0.0.1:{port[1]}"
    rounds: list[dict[str, dict[str, float]]] = []
    for turn in range(asked.rounds):
        order = [*WAYS][turn % len(WAYS) :] + [*WAYS][: turn % len(WAYS)]
        rounds.append({way: measure(way, asked.command, url, asked.seconds, asked.clients) for way in order})
        print(rounds[-1], file=sys.stderr, flush=True)
    ratios: dict[str, dict[str, Any]] = {
        way: {
            figure: statistics.median(each[way][figure] / each["plain"][figure] for each in rounds)
            for figure in rounds[0]["plain"]
        }
        for way in WAYS
        if way != "plain"
    }
    program = os.path.basename(asked.command[0])  # noqa: PTH119 - it need not be a path
    write("servers", {"program": program, "rounds": rounds, "median_ratio_to_plain": ratios}, asked.folder)


if __name__ == "__main__":
    main()
