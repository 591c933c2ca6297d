"""Engines on a card that are killed beside a neighbour: what the neighbour takes is not theirs, what they leave is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from itertools import islice
from typing import Any

import pytest
import torch

from lowtide.leakcheck.lives.witness import Killed, kill_in_each_stage
from lowtide.leakcheck.targets.reference import reference_target
from lowtide.leakcheck.targets.target import Capabilities, TargetSource
from lowtide.probes.device.driver import find_driver
from tests.leakcheck.lives.test_witness import Bare

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card; torch sees none"),
]

TAKES_MORE_AND_MORE = """
import sys, threading, torch
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
kept = [torch.empty(128 << 20, dtype=torch.uint8, device="cuda")]
print("ready", flush=True)
while not ended.wait(0.2) and len(kept) < 160:
    kept.append(torch.empty(128 << 20, dtype=torch.uint8, device="cuda"))
ended.wait()
"""

TAKES_A_GIB_FOR_EVER = """
import time, torch
kept = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
print("ready", flush=True)
time.sleep(600)
"""


class LeavesItsWorker(Bare):
    """Its worker has left its parent, so that nobody ends it when that is killed."""

    capabilities = Capabilities(device="cuda:0")

    def create(self, config: Mapping[str, Any]) -> None:
        self.worker = subprocess.Popen(
            [sys.executable, "-c", TAKES_A_GIB_FOR_EVER], stdout=subprocess.PIPE, start_new_session=True
        )
        assert self.worker.stdout is not None
        self.worker.stdout.readline()
        super().create(config)

    def shutdown(self) -> None:
        self.worker.kill()
        self.worker.communicate()


@contextmanager
def neighbour() -> Iterator[None]:
    with subprocess.Popen(
        [sys.executable, "-c", TAKES_MORE_AND_MORE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield
        process.communicate()


def killed(source: TargetSource, able: Capabilities, config: Mapping[str, Any]) -> Killed:
    with closing(find_driver()) as driver, neighbour():
        (found,) = islice(kill_in_each_stage(source, able, config=config, driver=driver), 1)
    return found


def test_what_a_neighbour_takes_is_not_what_a_killed_engine_left() -> None:
    target = reference_target("cuda:0", None)
    found = killed(target.source, target.factory().capabilities, target.thorough)
    assert (found.stage, found.findings, found.not_measured) == ("create", (), ())


def test_what_a_killed_engine_left_is_found_beside_a_neighbour() -> None:
    worker, memory = killed(
        TargetSource([f"from {__name__} import LeavesItsWorker"], "LeavesItsWorker"), LeavesItsWorker.capabilities, {}
    ).findings
    assert (worker.resource, worker.count) == ("processes", 1)
    assert memory.resource == "driver"
    # With its context.
    assert 1 << 30 <= memory.bytes < 2 << 30
