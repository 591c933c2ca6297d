"""`lowtide serve` as its users have it: a process of its own, asked by the official client and over plain HTTP."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests.engine.process_watch import cores, is_running
from tests.waiting import HANG_S, wait_until

LISTENING = re.compile(r"Serving .* on http://127\.0\.0\.1:(\d+)")


class Served:
    """A server that answers.

    Args:
        process: of the server.
        log: what it writes.

    Attributes:
        core: the engine core's process.
        client: OpenAI's, which tries nothing twice.
    """

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log = log
        wait_until(lambda: LISTENING.search(log.read_text()) or process.poll() is not None)
        found = LISTENING.search(log.read_text())
        assert found is not None, log.read_text()
        self.url = f"http://127.0.0.1:{found[1]}"
        (self.core,) = cores(psutil.Process(process.pid))
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)
        wait_until(self._answers)

    def _answers(self) -> bool:
        try:
            return self.get("/health") == (200, "")
        except urllib.error.URLError:
            return False

    def get(self, path: str) -> tuple[int, str]:
        """Ask for a path: the status and the text of the answer."""
        return self._ask(urllib.request.Request(self.url + path))

    def post(self, path: str, body: bytes = b"", content_type: str = "application/json") -> tuple[int, str]:
        """Send a body to a path: the status and the text of the answer."""
        headers = {"Content-Type": content_type}
        return self._ask(urllib.request.Request(self.url + path, data=body, headers=headers, method="POST"))

    def did(self, path: str) -> Any:
        """Send nothing to a path: what is answered, which is no error."""
        status, said = self.post(path)
        assert status == 200, said
        return json.loads(said)

    def _ask(self, request: urllib.request.Request) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(request, timeout=HANG_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def metrics(self) -> dict[str, float]:
        """What `/metrics` says: values by name, with the labels besides the model's."""
        status, said = self.get("/metrics")
        assert status == 200
        found = {}
        for family in text_string_to_metric_families(said):
            for sample in family.samples:
                assert sample.labels.pop("model_name") == "tiny"
                found[" ".join((sample.name, *sample.labels.values()))] = sample.value
        return found

    def requests(self) -> tuple[float, float]:
        """How many requests run, and how many wait."""
        metrics = self.metrics()
        return metrics["lowtide:num_requests_running"], metrics["lowtide:num_requests_waiting"]

    def end_code(self) -> int:
        """Wait until it has ended: its exit code; no core is left."""
        code = self.process.wait(HANG_S)
        wait_until(lambda: not is_running(self.core))
        return code


@contextmanager
def serving(folder: Path, *command: str, options: Sequence[str] = ()) -> Iterator[Served]:
    """A server that runs until the block ends.

    Args:
        folder: for its log.
        command: what starts it; none for `lowtide serve` on a CPU.
        options: of `lowtide serve`.
    """
    started = command or ("-m", "lowtide", "serve", "--device", "cpu", "--port", "0", *options)
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *started], stdout=output, stderr=output, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    served = None
    try:
        served = Served(process, log)
        yield served
    finally:
        process.kill()
        process.wait()
        if served is not None:
            served.client.close()
