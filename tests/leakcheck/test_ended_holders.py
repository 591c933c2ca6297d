"""Processes that have ended and for which the driver still counts memory, in a life and around a block."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lowtide.leakcheck.processes import engine_processes, other_processes, tree_end
from lowtide.leakcheck.processes.engine_processes import EngineProcesses
from lowtide.leakcheck.processes.other_processes import OtherProcesses
from lowtide.leakcheck.processes.tree_end import EndedHolders
from lowtide.probes.device.driver.card_holders import CardHolders
from lowtide.probes.host.counters import Counters
from lowtide.probes.host.process_tree import ProcessTree
from lowtide.probes.processes.agents import Agents

MIB = 1 << 20

A_TREE = SimpleNamespace(items={"processes": frozenset({"1"})}, amounts={"host-memory": 0})
"""Counters that say that there is a tree."""


class Card:
    """What the driver counts on the only card, by process identifier."""

    def __init__(self) -> None:
        self.listed: dict[int, int | None] = {}
        self.asked = 0

    def holders(self, driver: object) -> tuple[CardHolders, ...]:
        self.asked += 1
        return (CardHolders("cuda:0", None, None, 0, dict(self.listed)),)

    def driver(self) -> Any:
        return self


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card()
    for module in (tree_end, engine_processes, other_processes):
        monkeypatch.setattr(module, "read_card_holders", card.holders)
    monkeypatch.setattr(tree_end, "PATIENCE_S", 0.1)
    return card


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as child:
        yield child
        child.kill()


def ended(child: subprocess.Popen[bytes]) -> int:
    child.communicate(b"\n")
    return child.pid


def test_what_an_ended_process_still_holds_is_reported_once(card: Card, child: subprocess.Popen[bytes]) -> None:
    holders = EndedHolders(card.driver, 0.1)
    card.listed = {child.pid: 200 * MIB}
    holders.note(child.pid)
    assert (holders.findings(), card.asked) == ([], 0)
    pid = ended(child)
    (finding,) = holders.findings()
    assert (finding.resource, finding.bytes, finding.process and finding.process.pid) == ("driver", 200 * MIB, pid)
    assert holders.findings() == []


def test_the_driver_has_some_time_to_give_back(card: Card, child: subprocess.Popen[bytes]) -> None:
    holders = EndedHolders(card.driver, 20.0)
    card.listed = {child.pid: 200 * MIB}
    holders.note(child.pid)
    ended(child)
    giving_back = threading.Timer(0.2, card.listed.clear)
    giving_back.start()
    assert holders.findings() == []
    giving_back.join()


def test_others_that_have_ended_are_none_of_this_program(card: Card, child: subprocess.Popen[bytes]) -> None:
    holders = EndedHolders(card.driver, 0.1)
    holders.note(child.pid)
    pid = ended(child)
    holders.note(pid)
    card.listed = {1 << 30: 200 * MIB}
    assert holders.findings() == []


def test_a_life_notes_who_holds_memory_on_a_card(card: Card, child: subprocess.Popen[bytes]) -> None:
    processes = EngineProcesses(ProcessTree(), Agents(), "cuda:0", card.driver)
    processes.ended.patience = 0.1
    # Not of this program.
    card.listed = {child.pid: 200 * MIB, os.getppid(): MIB}
    processes.end_stage("create")
    pid = ended(child)
    (finding,) = processes.ended.findings()
    assert finding.process is not None
    assert finding.process.pid == pid


def test_a_test_notes_who_holds_memory_on_a_card_at_its_beginning(card: Card, child: subprocess.Popen[bytes]) -> None:
    others = OtherProcesses(ProcessTree(), card.driver, asks=True)
    others.start()
    try:
        card.listed = {child.pid: 200 * MIB}
        others.begin(cast("Counters", A_TREE))
        others._ended.patience = 0.1
        pid = ended(child)
        (finding,) = others.judge([])
        assert finding.process is not None
        assert (finding.process.pid, finding.resource) == (pid, "driver")
    finally:
        others.stop()
