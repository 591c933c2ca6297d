"""What is left of a tree of processes, and what the driver counts for those that have ended."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lowtide.leakcheck.growth.quantities import own_descriptors
from lowtide.leakcheck.processes import tree_end
from lowtide.leakcheck.processes.engine_processes import EngineProcesses
from lowtide.leakcheck.processes.other_processes import OtherProcesses
from lowtide.leakcheck.processes.tree_end import EndedHolders, EndJudgement, held_by_a_gone
from lowtide.probes.device.driver import Driver
from lowtide.probes.device.driver.card_holders import CardHolders
from lowtide.probes.host.counters import Counters
from lowtide.probes.host.process_files import stat
from lowtide.probes.host.process_tree import ProcessTree
from lowtide.probes.processes import tree_traces
from lowtide.probes.processes.agents import FOLDER_PREFIX, Agents
from lowtide.probes.processes.shared_memory_files import SharedMemoryFile, SharedMemoryReading, Undecided
from lowtide.probes.processes.tree_traces import TreeTraces, gone_on_cards, sockets_of_agents
from lowtide.reports.processes.stage_processes import ProcessName

MIB = 1 << 20

pytestmark = pytest.mark.usefixtures("no_neighbours")


class Cards:
    """Stands for the driver: what it counts on its only card, by process identifier."""

    def __init__(self) -> None:
        self.listed: dict[int, int | None] = {}

    def read(self, index: int) -> Any:
        return SimpleNamespace(note="")

    def holders(self, driver: object) -> tuple[CardHolders, ...]:
        return (CardHolders("cuda:0", None, None, 0, dict(self.listed)),)


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Cards:
    cards = Cards()
    monkeypatch.setattr(tree_traces, "read_card_holders", cards.holders)
    monkeypatch.setattr(tree_traces, "has_opened_a_card", lambda pid: True)
    return cards


@pytest.fixture
def tree() -> Iterator[ProcessTree]:
    tree = ProcessTree()
    tree.start()
    yield tree
    tree.stop()


def traces_in(folder: Path, tree: ProcessTree, cards: Cards) -> TreeTraces:
    """Look at folders of the test's own: what others make in the machine's meanwhile would be taken for the tree's."""
    shared = folder / "shm"
    shared.mkdir(exist_ok=True)
    return TreeTraces(tree, cast("Driver", cards), folder=str(folder), shared=shared)


def lived(tree: ProcessTree, cards: Cards, folder: Path, *, listed: bool = True) -> tuple[TreeTraces, int]:
    """A child that was looked at and has ended; the driver has listed it with 300 MiB."""
    traces = traces_in(folder, tree, cards)
    traces.start()
    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    cards.listed = {child.pid: 300 * MIB} if listed else {}
    traces.look()
    child.communicate(b"\n")
    return traces, child.pid


def judged(tree: ProcessTree, traces: TreeTraces, settle: float = 0.1) -> tuple[list[str], list[tuple[str, str]]]:
    end = EndJudgement(tree, traces, Agents(), settle).judge()
    return [finding.message for finding in end.findings], [(each.what, each.why) for each in end.not_measured]


def test_what_the_driver_counts_for_an_ended_process_is_a_finding(
    tree: ProcessTree, cards: Cards, tmp_path: Path
) -> None:
    traces, pid = lived(tree, cards, tmp_path)
    (finding,) = EndJudgement(tree, traces, Agents(), 0.1).judge().findings
    assert (finding.resource, finding.bytes, finding.device) == ("driver", 300 * MIB, "cuda:0")
    assert finding.message.startswith(f"pid {pid} (")
    assert finding.message.endswith(" has ended, and the driver counts 300.0 MiB on cuda:0 for it")
    cards.listed = {}
    assert judged(tree, traces) == ([], [])


def test_a_process_that_the_driver_never_lists_is_not_measured(tree: ProcessTree, cards: Cards, tmp_path: Path) -> None:
    traces, pid = lived(tree, cards, tmp_path, listed=False)
    findings, ((what, why),) = judged(tree, traces)
    assert (findings, what) == ([], "memory of ended processes on cards")
    assert why.startswith(f"pid {pid} has used a card, and the driver lists no process of that number: ")


def test_a_process_that_runs_on_needs_no_driver_that_lists_it(tree: ProcessTree, cards: Cards, tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as other:
        traces = traces_in(tmp_path, tree, cards)
        traces.start()
        traces.look()
        assert traces.cards_not_measured == ""
        other.communicate(b"\n")
    assert traces.cards_not_measured.startswith(f"pid {other.pid} has used a card")


def test_a_later_process_of_the_same_number_has_ended_not() -> None:
    own = stat(os.getpid())
    assert own is not None
    listed = {os.getpid(): {"cuda:0": MIB}}
    assert gone_on_cards(listed, {os.getpid(): own.started}) == {}
    assert gone_on_cards(listed, {os.getpid(): own.started - 1}) == listed
    # Another program's, and one without memory.
    assert gone_on_cards(listed, {}) == {}
    assert gone_on_cards({1 << 30: {"cuda:0": 0}}, {1 << 30: 1}) == {}


def test_a_driver_that_does_not_say_how_much_is_reported_without_a_size() -> None:
    finding = held_by_a_gone(ProcessName(pid=7, name="VLLM::EngineCore"), {"cuda:1": None})
    assert (finding.bytes, finding.device) == (0, "cuda:1")
    assert "the driver counts memory on cuda:1 for it" in finding.message


def reading(path: str, *, undecided: bool = False, why: str = "") -> SharedMemoryReading:
    file = SharedMemoryFile(path, "NCCL", MIB, MIB, 0.0, "me", f"rm -- {path}")
    return SharedMemoryReading(() if undecided else (file,), (Undecided(file, "a reason"),) if undecided else (), why)


def beside_a_file(tree: ProcessTree, cards: Cards, folder: Path) -> tuple[TreeTraces, Path]:
    """A tree that is looked at, and a file that came since."""
    traces = traces_in(folder, tree, cards)
    traces.start()
    path = folder / "nccl-abc123"
    path.touch()
    return traces, path


def test_an_entry_of_which_nobody_knows_is_not_measured(
    tree: ProcessTree, cards: Cards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traces, path = beside_a_file(tree, cards, tmp_path)
    monkeypatch.setattr(tree_traces, "read_shared_memory", lambda _: reading(str(path), undecided=True))
    assert judged(tree, traces) == ([], [(str(path), "a reason")])
    monkeypatch.setattr(tree_traces, "read_shared_memory", lambda _: SharedMemoryReading((), (), "no access"))
    assert judged(tree, traces) == ([], [("/dev/shm", "no access")])
    monkeypatch.setattr(tree_traces, "read_shared_memory", lambda _: reading(str(path)))
    (message,), _ = judged(tree, traces)
    assert message == f"{path} (1.0 MiB, made by NCCL) is left, and no living process uses it"


def test_what_somebody_has_closed_to_remove_it_is_not_left(
    tree: ProcessTree, cards: Cards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traces, path = beside_a_file(tree, cards, tmp_path)
    looks = iter([reading(str(path)), SharedMemoryReading((), ())])
    monkeypatch.setattr(tree_traces, "read_shared_memory", lambda _: next(looks))
    assert judged(tree, traces) == ([], [])


def test_what_was_there_before_is_none(tree: ProcessTree, cards: Cards, tmp_path: Path) -> None:
    old = tmp_path / "old.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(old))
    traces, pid = lived(tree, cards, tmp_path)
    cards.listed = {}
    assert traces.files() == ([], [])
    folder = tmp_path / "new"
    folder.mkdir()
    fresh, numbered = folder / "new.sock", tmp_path / f"core-{pid}.lock"
    # An agent's of another run, wherever that has its temporary files.
    of_an_agent = folder / f"{FOLDER_PREFIX}1-x" / "2.sock"
    of_an_agent.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(of_an_agent))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(fresh))
        # Somebody listens.
        assert traces.files() == ([], [])
    numbered.touch()
    (tmp_path / "result.txt").touch()
    assert traces.files() == (sorted([fresh, numbered]), [])


OPENS = """
import sys
files = [open(name, "w") for name in sys.argv[1:]]
print(flush=True)
input()
"""


@pytest.mark.parametrize("removes", [False, True])
def test_what_was_open_by_a_name_that_was_made_up_is_left_with_its_process(
    tree: ProcessTree, cards: Cards, tmp_path: Path, *, removes: bool
) -> None:
    folder, kept = tmp_path / "offload_x81_b2aq", tmp_path / "tmpabcdefgh"
    named = [tmp_path / name for name in ("server.log", "run_20261129.log", "torchinductor_root")]
    traces = traces_in(tmp_path, tree, cards)
    traces.start()
    folder.mkdir()
    words = [sys.executable, "-S", "-c", OPENS, *map(str, (folder / "kv.bin", kept, *named))]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        traces.look()
        assert traces.files() == ([], [])
        child.kill()
    if removes:
        shutil.rmtree(folder)
        kept.unlink()
    assert traces.files()[0] == ([] if removes else [folder, kept])
    messages, _ = judged(tree, traces)
    assert [f"open last in pid {child.pid} (" in message for message in messages] == [True] * 2 * (not removes)


@pytest.mark.parametrize(
    "names", [("engine-3fa85f64.sock", "engine-0b1d9c77.sock"), ("core_pzuwy3l1.sock", "core_rc5q_zsp.sock")]
)
def test_the_fingerprint_goes_without_what_is_drawn_anew(
    tree: ProcessTree, cards: Cards, tmp_path: Path, names: Sequence[str]
) -> None:
    marks = set()
    for name in names:
        traces = traces_in(tmp_path, tree, cards)
        traces.start()
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(tmp_path / name))
        (finding,) = EndJudgement(tree, traces, Agents(), 0.1).judge().findings
        assert finding.advice == f"remove the file when the process that made it ends; now: rm -- {tmp_path / name}"
        marks.add(finding.fingerprint)
        (tmp_path / name).unlink()
    assert len(marks) == 1


def test_an_orphan_is_reported_with_what_it_holds_on_cards(tree: ProcessTree, cards: Cards, tmp_path: Path) -> None:
    traces = traces_in(tmp_path, tree, cards)
    traces.start()
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as child:
        cards.listed = {child.pid: 300 * MIB}
        (finding,) = EndJudgement(tree, traces, Agents(), 0.1).judge().findings
        child.communicate(b"\n")
    assert " on the host, 300.0 MiB on cuda:0; end pid " in f"{finding.message}; {finding.advice}"
    assert finding.bytes > 300 * MIB
    assert finding.process is not None
    assert (finding.process.pid, finding.process.device) == (child.pid, "cuda:0")


A_TREE = SimpleNamespace(items={"processes": frozenset({"1"})}, own=0)
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
    monkeypatch.setattr(tree_end, "read_card_holders", card.holders)
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


def test_an_agent_s_sockets_are_told_from_others() -> None:
    with ExitStack() as open_ones:

        def at(path: Path) -> list[str]:
            """A socket that listens at a path, and one that it has accepted: what their descriptors lead to."""
            listening, asking = (open_ones.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(2))
            listening.bind(str(path))
            listening.listen()
            asking.connect(str(path))
            accepted = open_ones.enter_context(listening.accept()[0])
            return [str(Path(f"/proc/self/fd/{each.fileno()}").readlink()) for each in (listening, accepted)]

        # Short, since a socket's path may have 107 bytes.
        folder = Path(open_ones.enter_context(tempfile.TemporaryDirectory(prefix="lowtide-agents-", dir="/tmp")))
        other = Path(open_ones.enter_context(tempfile.TemporaryDirectory(dir="/tmp")))
        of_agent, of_program = at(folder / "1.sock"), at(other / "1.sock")
        found = sockets_of_agents(os.getpid())
        assert found.issuperset(of_agent)
        assert found.isdisjoint(of_program)
        descriptors = own_descriptors(os.getpid()).values()
        assert set(descriptors).issuperset(of_program)
        assert set(descriptors).isdisjoint(of_agent)
