"""How a server under load outlives that somebody attaches to it a thousand times, and what is in it afterwards.

python benchmarks/attaches.py [N] [threads|one]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

from lowtide.leakcheck.processes.attachment import Attachment
from lowtide.leakcheck.processes.messages import Look
from lowtide.probes.host.process_files import status
from lowtide.probes.processes.agents import AgentError
from lowtide.probes.processes.injection import InjectionError
from tests.leakcheck.cli.loaded_server import LoadedServer


def main(count: int = 1000, kind: str = "threads") -> None:
    failed: list[str] = []
    took: list[float] = []
    with tempfile.TemporaryDirectory() as folder, LoadedServer(Path(folder), keeps=False, kind=kind) as server:
        time.sleep(1)
        before, memory = server.inside(), status(server.pid)["RssAnon"]
        plain = server.slowest
        began, requests = time.monotonic(), server.requests
        for turn in range(count):
            start = time.monotonic()
            try:
                with Attachment(server.pid) as attachment:
                    attachment.ask(Look())
            except (InjectionError, AgentError) as error:
                failed.append(f"{turn}: {error}")
            took.append(time.monotonic() - start)
            if server.process.poll() is not None:
                print(f"the server has ended with {server.process.returncode} at attach {turn + 1}")
                break
            if turn % 100 == 99:
                print(
                    turn + 1,
                    f"{time.monotonic() - began:.0f} s, wrong {server.wrong}, failed {len(failed)}",
                    flush=True,
                )
        seconds = time.monotonic() - began
        served = server.requests - requests
        if server.process.poll() is None:
            after = server.inside()
            left = {name: (before[name], after[name]) for name in before if before[name] != after[name]}
            print(f"left inside: {left or 'nothing'}; memory {memory} -> {status(server.pid)['RssAnon']}")
        print(
            f"{len(took) - len(failed)} of {count} attaches with a look each in {seconds:.0f} s, median "
            f"{statistics.median(took):.2f} s, longest {max(took):.2f} s; {served} answers, {server.wrong} wrong, "
            f"slowest {server.slowest:.3f} s (before: {plain:.3f} s)"
        )
        print(*failed[:10], sep="\n")


if __name__ == "__main__":
    main(*(int(argument) if argument.isdecimal() else argument for argument in sys.argv[1:]))  # type: ignore[arg-type]
