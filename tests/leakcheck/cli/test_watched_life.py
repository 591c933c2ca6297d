"""`lowtide open --serve` beside `lowtide run --report`: the life is seen while it runs, and then its report."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from lowtide.reports.schema import read

pytestmark = pytest.mark.nightly


def test_a_life_is_seen_while_it_runs_and_then_its_report(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lowtide"]
    # A browser that does nothing.
    environment = {**os.environ, "BROWSER": "true"}
    with subprocess.Popen(
        [*command, "open", tmp_path, "--serve"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as server:
        assert server.stdout is not None
        url = server.stdout.readline().decode().strip()
        with subprocess.Popen([*command, "run", "--cycles", "2", "--report", tmp_path], stdout=subprocess.PIPE) as run:
            events = urllib.request.urlopen(f"{url}events", timeout=60)
            seen: list[dict[str, object]] = []
            while not (tmp_path / "leakcheck.json").exists():
                line = events.readline().decode()
                if line.startswith("data: {"):
                    seen.append(json.loads(line.removeprefix("data: ")))
            output = run.communicate()[0].decode()
        assert (run.returncode, "CLEAN" in output) == (0, True)
        events.close()
        page = urllib.request.urlopen(url, timeout=60).read().decode()
        server.send_signal(signal.SIGINT)
        said = server.communicate()[1].decode()
    assert (server.returncode, said) == (0, "lowtide: the page is served no longer\n")
    # The last stages come within one interval.
    assert len(seen) >= 3
    assert all(str(each["now"]).startswith("cycle ") for each in seen)
    assert "CLEAN: 1 subject, everything came back" in page
    assert len(read(tmp_path).subjects[0].stages) == 26
    assert not list(tmp_path.glob("live.*"))


def test_a_port_that_is_taken_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "lowtide", "open", tmp_path, "--serve", "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith(f"lowtide: {tmp_path} cannot be served on port {port}: Address already in use")
    assert not list(tmp_path.glob("live.*"))
