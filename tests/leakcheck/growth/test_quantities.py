"""What a process holds that may grow: how it is read from outside, and how it is said."""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lowtide.leakcheck.growth.quantities import (
    COUNTED,
    QUANTITIES,
    HeldSource,
    Level,
    counted,
    kind_of,
    most_of,
    things_of,
)
from lowtide.probes.device.driver import find_driver
from lowtide.reports.schema import ResourceName

OWN = os.getpid()
MIB = 1 << 20


@pytest.fixture
def source() -> Iterator[HeldSource]:
    driver = find_driver()
    yield HeldSource(lambda: [OWN], driver, lambda: {OWN: {"cuda:0": 5 * MIB}, OWN + 1: {"cuda:0": MIB}})
    driver.close()


def held(source: HeldSource, resource: ResourceName) -> int:
    (level,) = QUANTITIES[resource].read(source)
    assert (level.pid, level.device) == (OWN, "")
    return level.amount


def test_a_child_process_is_counted_until_it_is_waited_for(source: HeldSource) -> None:
    before = held(source, "processes")
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with child:
        assert held(source, "processes") == before + 1
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert held(source, "processes") == before + 1
        assert things_of(OWN)["processes"][child.pid].endswith("that has ended, and nobody has waited for it")
    assert held(source, "processes") == before


def test_a_socket_and_a_thread_are_counted_while_they_are_there(source: HeldSource) -> None:
    ends = threading.Event()
    before, things = [held(source, each) for each in COUNTED], things_of(OWN)
    thread = threading.Thread(target=ends.wait, daemon=True)
    thread.start()
    with socket.socket() as planted:
        assert [held(source, each) for each in COUNTED] == [before[0] + 1, before[1] + 1, *before[2:]]
        target = str(Path(f"/proc/self/fd/{planted.fileno()}").readlink())
        assert target in things_of(OWN)["file-descriptors"].values()
        assert things_of(OWN)["threads"].keys() - things["threads"].keys() == {thread.native_id}
    ends.set()
    thread.join()
    # The kernel lists a thread for a moment longer.
    until = time.monotonic() + 10
    while thread.native_id in things_of(OWN)["threads"] and time.monotonic() < until:
        time.sleep(0.01)
    assert [held(source, each) for each in COUNTED] == before
    assert target not in things_of(OWN)["file-descriptors"].values()


def test_memory_is_read_where_it_lies(source: HeldSource) -> None:
    before = held(source, "host-memory")
    # No part of what earlier tests have left free.
    kept = mmap.mmap(-1, 64 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    kept[:: os.sysconf("SC_PAGE_SIZE")] = bytes(1) * len(range(0, len(kept), os.sysconf("SC_PAGE_SIZE")))
    assert held(source, "host-memory") - before >= 60 * MIB
    assert list(QUANTITIES["tensors"].read(source)) == [Level(OWN, "cuda:0", 5 * MIB)]
    assert list(QUANTITIES["shared-memory"].read(source)) == []


@pytest.mark.parametrize(
    ("resource", "device", "amount", "said"),
    [
        ("host-memory", "", 39 * MIB, "39.0 MiB more of host memory"),
        ("tensors", "cuda:0", MIB, "1.0 MiB more of tensors on cuda:0"),
        ("driver", "cuda:1", MIB, "1.0 MiB more of driver memory on cuda:1"),
        ("threads", "", 1, "1 thread more"),
        ("file-descriptors", "", 12, "12 file descriptors more"),
    ],
)
def test_how_much_more_there_is_in_words(resource: ResourceName, device: str, amount: int, said: str) -> None:
    assert QUANTITIES[resource].more(amount, device) == said


def test_things_are_told_by_their_kind_without_numbers() -> None:
    things = ["socket:[1]", "socket:[22]", "/dev/null"]
    assert (most_of(counted(things)), kind_of(things)) == ("2 of socket:[N]", "most of them socket:[N]")
    assert kind_of(things[:2]) == "socket:[N]"


def test_a_name_of_which_there_is_one_keeps_its_numbers() -> None:
    assert counted(["/tmp/run7/log", "/tmp/run7/log", "pipe:[1]", "pipe:[2]"]) == {"/tmp/run7/log": 2, "pipe:[N]": 2}
